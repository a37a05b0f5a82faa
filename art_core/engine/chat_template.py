"""A chat template in Jinja, and our own one for ChatML models whose template knows no tools.

In: messages in normal form, tools. Out: the text that the model reads. The environment is the
one that Hugging Face documents for chat templates (sandboxed, trimmed blocks, `tojson` without
ASCII escapes, `raise_exception`), so that a template means the same here and there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from art_core.engine.api_errors import ApiError


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
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationMarks],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        self.source = source
        self._names = dict(names or {})
        self._template = environment.from_string(source)

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


class _GenerationMarks(Extension):
    """`{% generation %}...{% endgeneration %}` around what a model wrote: the text inside."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def refused(error: jinja2.TemplateError) -> ApiError:
    """The template's own complaint as a fault of the request."""
    return ApiError(
        f"the base model's chat template refuses these messages ({error})", param="messages"
    )


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it; Jinja's own filter escapes HTML characters."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
