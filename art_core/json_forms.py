"""How what users put into a trajectory looks in JSON, in files and on the wire.

In: values of any library, messages and Choices, exceptions. Out: values that `json` takes, and
Choices read back. Left out: NaN and infinities, which each place spells its own way.
"""

from __future__ import annotations

from typing import Any

from openai.types.chat import ChatCompletionMessage
from pydantic import BaseModel

from art_core.errors import ForeignError
from art_core.types import Choice, Message

_CHOICE = "art_choice"


def plain(value: Any) -> Any:
    """Something that JSON has no form for as something that it has; the `default` of `json`."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if hasattr(value, "tolist"):  # NumPy's and torch's scalars and arrays
        return value.tolist()
    return repr(value)


def packed(item: Message | Choice) -> Message:
    """A message as it is; a Choice marked as one, so that it is read back as one."""
    if isinstance(item, Choice):
        return {_CHOICE: item.model_dump(mode="json", exclude_unset=True)}
    return item


def unpacked(item: Message) -> Message | Choice:
    """What was `packed`.

    Raises:
        ValueError: it is marked as a Choice, and is none.
    """
    if _CHOICE not in item:
        return item
    told = item[_CHOICE]
    choice = Choice.construct(**told) if isinstance(told, dict) else None
    if (
        choice is None
        or type(getattr(choice, "index", None)) is not int
        or not isinstance(getattr(choice, "message", None), ChatCompletionMessage)
    ):
        raise ValueError(f"a choice without an index or a message: {told!r:.200}")
    return choice


def described(error: BaseException) -> str:
    """An exception in a line: its class and its text."""
    return str(error) if isinstance(error, ForeignError) else f"{type(error).__name__}: {error}"
