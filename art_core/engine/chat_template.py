"""A chat template in Jinja, and our own one for ChatML models whose template knows no tools.

In: messages in normal form, tools. Out: the text that the model reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

import jinja2

from art_core.engine.api_errors import ApiError
from art_core.templating import compile_template


@cache
def hermes_chatml() -> str:
    """Source of our tool-capable ChatML template (`hermes_chatml.jinja`)."""
    return resources.files(__package__).joinpath("hermes_chatml.jinja").read_text("utf-8")


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja source.
        names: further names the template may use, e.g. `{"bos_token": "<s>"}`.
    """

    def __init__(self, source: str, names: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._names = dict(names or {})
        self._template = compile_template(source)

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of `messages`, which are in normal form (`template_messages`).

        Raises:
            ApiError: the template refuses the messages.
        """
        try:
            return self._template.render(
                messages=messages,
                tools=tools or None,
                add_generation_prompt=add_generation_prompt,
                **self._names,
            )
        except jinja2.TemplateError as error:
            raise refused(error) from error


def refused(error: jinja2.TemplateError) -> ApiError:
    """The template's own complaint as a fault of the request."""
    return ApiError(
        f"the base model's chat template refuses these messages ({error})", param="messages"
    )
