"""A chat template that is asked questions: conversations made up to see how it writes them.

In: Jinja source, the tokenizer's special tokens, and the names that the template may use
("bos_token"). Out: texts. Messages are in normal form: contents are strings, arguments mappings.
Left out: what the texts tell (tool_parser.py, reasoning_parser.py, append_only.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import jinja2

from art_core.errors import BaseModelError, RenderError
from art_core.templating import compile_template

Message = dict[str, Any]

FUNCTION = "art_probe"
ARGUMENT = "city"
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": FUNCTION,
            "description": "Looks a city up.",
            "parameters": {
                "type": "object",
                "properties": {ARGUMENT: {"type": "string", "description": "A name."}},
                "required": [ARGUMENT],
            },
        },
    }
]
_FAULTS = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)
"""What templates raise on messages that they were not written for."""


class Dialogue:
    """A template with its tokens.

    Raises:
        BaseModelError: the source is no template.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Collection[str] = (),
        names: Mapping[str, str] | None = None,
    ) -> None:
        try:
            self._template = compile_template(source)
        except jinja2.TemplateSyntaxError as error:
            raise BaseModelError(
                f"the chat template can't be read ({error})",
                expected="a template in Jinja",
                fix="Fetch the model again, or give it another chat_template.jinja.",
            ) from error
        self.source = source
        self.names = {"bos_token": "", "eos_token": "", **(names or {})}
        self.special_tokens = frozenset(special_tokens) | frozenset(
            filter(None, self.names.values())
        )

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: bool = False,
        prompt: bool = True,
        days_later: int = 0,
    ) -> str:
        """The text of `messages`, with the opening of an answer if `prompt`.

        Raises:
            RenderError: the template refuses them.
        """
        try:
            return self._template.render(
                messages=list(messages),
                tools=TOOLS if tools else None,
                add_generation_prompt=prompt,
                strftime_now=_clock(days_later),
                **self.names,
            )
        except _FAULTS as error:
            raise RenderError(f"the chat template refuses the messages ({error})") from error

    def attempt(self, messages: Sequence[Message], **options: Any) -> str | None:
        """As `render`; None where it refuses."""
        try:
            return self.render(messages, **options)
        except RenderError:
            return None

    def answer(self, before: Sequence[Message], answer: Message, *, tools: bool) -> str | None:
        """What `answer` adds to the prompt of `before`; None if the template refuses it."""
        prompt = self.attempt(before, tools=tools)
        whole = self.attempt([*before, answer], tools=tools, prompt=False)
        if prompt is None or whole is None:
            return None
        return whole[common(prompt, whole) :]

    def takes_tools(self) -> bool:
        """True if a prompt shows the tools."""
        shown = self.attempt([user("q")], tools=True)
        return shown is not None and FUNCTION in shown


def common(first: str, second: str) -> int:
    """How many characters both begin with."""
    for at, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return at
    return min(len(first), len(second))


def user(text: str) -> Message:
    """What a user said."""
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    """What the agent's author said."""
    return {"role": "system", "content": text}


def said(text: str, *, thought: Message | None = None) -> Message:
    """An answer in words."""
    return {"role": "assistant", "content": text, **(thought or {})}


def called(*values: str, text: str = "", thought: Message | None = None) -> Message:
    """An answer that calls the tool, once a value; the ids have the nine letters Mistral wants."""
    calls = [
        {
            "id": f"artcall{i:02}",
            "type": "function",
            "function": {"name": FUNCTION, "arguments": {ARGUMENT: value}},
        }
        for i, value in enumerate(values)
    ]
    return {"role": "assistant", "content": text, "tool_calls": calls, **(thought or {})}


def result(text: str, call: int = 0) -> Message:
    """What the tool gave back."""
    return {
        "role": "tool",
        "name": FUNCTION,
        "tool_call_id": f"artcall{call:02}",
        "content": text,
    }


def _clock(days_later: int) -> Any:
    moment = datetime(2030, 1, 2, 3, 4) + timedelta(days=days_later)
    return moment.strftime
