"""The chat template that a base model is asked with, and what it takes.

In: a model's files, and our own template, which stands in where a ChatML model knows no tools. Out:
`Chat`. It is chosen as the engine's tokenizer chooses it (`HFTokenizer`).
"""

from __future__ import annotations

from dataclasses import dataclass

from art_core.errors import BaseModelError
from art_core.readiness.append_only import AppendOnly, append_only
from art_core.readiness.dialogue import Dialogue
from art_core.readiness.model_files import ModelFiles
from art_core.readiness.reasoning_parser import reasoning_parser
from art_core.readiness.tool_parser import ParserFound, tool_parser, writes_calls


@dataclass(frozen=True)
class Chat:
    """How a model is talked to."""

    stands_in: bool
    """True if our template is used instead of the model's own."""
    has_own: bool
    takes_tools: bool
    tool_parser: ParserFound
    reasoning_parser: ParserFound
    histories: AppendOnly


def chat_of(files: ModelFiles, stand_in: str) -> Chat:
    """Choose the template, and ask it.

    Args:
        stand_in: source of our tool-capable ChatML template.

    Raises:
        BaseModelError: there is no template that fits.
    """
    source = check_template(files, stand_in)
    dialogue = Dialogue(source, files.special_tokens, files.names)
    return Chat(
        stands_in=source != files.template,
        has_own=files.template is not None,
        takes_tools=dialogue.takes_tools(),
        tool_parser=tool_parser(source, files.special_tokens),
        reasoning_parser=reasoning_parser(files.template or source, files.special_tokens),
        histories=append_only(dialogue),
    )


def check_template(files: ModelFiles, stand_in: str) -> str:
    """Source of the template that the model is asked with.

    Raises:
        BaseModelError: it has none, and ours does not fit its tokens.
    """
    if files.template is None:
        if not files.is_chatml:
            raise BaseModelError(
                "the base model has no chat template",
                got=str(files.folder),
                expected="a model tuned for chat",
                fix="Choose the -Instruct or -Chat variant of the base model.",
            )
        return stand_in
    dialogue = Dialogue(files.template, files.special_tokens, files.names)
    knows_tools = dialogue.takes_tools() and writes_calls(dialogue)
    return stand_in if files.is_chatml and not knows_tools else files.template
