"""Which of vLLM's tool parsers reads the calls that a model writes: seen in its chat template.

In: the template and the tokenizer's special tokens. Out: vLLM's name of the parser, and what was
seen. The template is made to write a call, and the call's form decides; the model's name does not
count. Names are those of vLLM 0.32. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from art_core.readiness.dialogue import FUNCTION, Dialogue, called, user

_VALUE = "Oslo-7"
_AT_ONCE = r"\A"
"""Begins the pattern of a form that an answer opens with, without a mark of its own."""
_SHOWN = 60
"""Characters of a call that a message quotes."""


@dataclass(frozen=True)
class ParserFound:
    """A parser, or why there is none."""

    name: str | None
    """vLLM's name for it. None: none fits, or none is needed."""
    sure: bool
    """False: look at it yourself, and name the parser if it is wrong."""
    why: str
    """What was seen, in a clause."""


@dataclass(frozen=True)
class _Form:
    """How calls may be written."""

    parser: str
    pattern: str
    """Of a call to `N`, in the text that the template wrote for it."""
    token: str | None = None
    """The parser looks for this token, which the tokenizer must have as one."""


_FORMS = (
    _Form("hermes", r'<tool_call>\s*\{\s*"name"\s*:\s*"N"'),
    _Form("qwen3_coder", r"<tool_call>\s*<function=N>"),
    _Form("glm45", r"<tool_call>\s*N\s*<arg_key>"),
    _Form("kimi_k2", r"<\|tool_call_begin\|>", "<|tool_call_begin|>"),
    _Form("deepseek_v3", r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>N", "<｜tool▁call▁begin｜>"),
    _Form("deepseek_v31", r"<｜tool▁call▁begin｜>N<｜tool▁sep｜>", "<｜tool▁call▁begin｜>"),
    _Form("mistral", r"\[TOOL_CALLS\]", "[TOOL_CALLS]"),
    _Form("openai", r"to=functions\.N\b.*<\|message\|>", "<|channel|>"),
    _Form("granite", r"<\|tool_call\|>\s*\["),
    _Form("phi4_mini_json", r"functools\s*\["),
    _Form("gemma4", r"<\|tool_call>call:N", "<|tool_call>"),
    _Form("functiongemma", r"<start_function_call>call:N"),
    _Form("lfm2", r"<\|tool_call_start\|>\s*\[N\(", "<|tool_call_start|>"),
    _Form("minimax_m2", r"<minimax:tool_call>"),
    _Form("seed_oss", r"<seed:tool_call>"),
    _Form("internlm", r"<\|action_start\|>"),
    _Form("cohere_command3", r"<\|START_ACTION\|>"),
    _Form("jamba", r"<tool_calls>\s*\["),
    _Form("olmo3", r"<function_calls>\s*N\("),
    _Form("llama4_pythonic", r"<\|python_start\|>\s*\[N\("),
    _Form("pythonic", r"\A\s*\[\s*N\("),
    _Form("llama3_json", r'\A\s*(?:<\|python_tag\|>)?\{\s*"name"\s*:\s*"N"'),
    _Form("xlam", r'\A\s*\[\s*\{\s*"name"\s*:\s*"N"'),
)

PARSERS = frozenset(form.parser for form in _FORMS)
"""Names that `tool_parser` may give."""
READ_HERE = frozenset(
    {
        "hermes", "qwen3_coder", "llama3_json", "mistral", "openai", "phi4_mini_json", "granite",
        "jamba", "xlam", "pythonic", "llama4_pythonic", "lfm2",
    }
)  # fmt: skip
"""Those whose form our endpoint reads, with whatever engine behind it."""


def tool_parser(template: str, special_tokens: Collection[str] = ()) -> ParserFound:
    """The parser for a model with this chat template.

    Args:
        template: Jinja source.
        special_tokens: texts of the tokenizer's added tokens; empty where they are not known.

    Raises:
        BaseModelError: the template is no Jinja.
    """
    dialogue = Dialogue(template, special_tokens)
    if not dialogue.takes_tools():
        return ParserFound(None, True, "its chat template shows no tools")
    written = _written_call(dialogue)
    if written is None:
        return _by_instruction(dialogue)
    found = _match(written)
    if found is None:
        return ParserFound(
            None, False, f"calls are written {_quoted(written)}, which no parser is known to read"
        )
    form, at = found
    if form.token and special_tokens and form.token not in special_tokens:
        return ParserFound(
            form.parser, False, f"calls have {form.token}, which is no token of its tokenizer"
        )
    return ParserFound(form.parser, True, f"calls are written {_quoted(written[at:])}")


def writes_calls(dialogue: Dialogue) -> bool:
    """True if the history shows the calls that were made."""
    return _written_call(dialogue) is not None


def _written_call(dialogue: Dialogue) -> str | None:
    """The text of a call; None if the template leaves calls out."""
    written = dialogue.answer([user("q")], called(_VALUE), tools=True)
    return written if written is not None and _VALUE in written else None


def _by_instruction(dialogue: Dialogue) -> ParserFound:
    """From how the prompt tells the model to call; templates that leave out calls still do.

    Forms without a mark of their own are not looked for: lists of tools look like them.
    """
    prompt = dialogue.render([user("q")], tools=True)
    for form in _FORMS:
        if form.pattern.startswith(_AT_ONCE):
            continue
        pattern = form.pattern.replace('"N"', "[^,]{1,40}").replace("N", r"\S{1,40}")
        if re.search(pattern, prompt):
            return ParserFound(
                form.parser,
                False,
                "the prompt asks for this form; calls of the history are left out",
            )
    return ParserFound(None, False, "tools are shown, but no call of the history")


def _match(written: str) -> tuple[_Form, int] | None:
    """The form of a call, and where it begins."""
    for form in _FORMS:
        found = re.search(form.pattern.replace("N", FUNCTION), written, re.DOTALL)
        if found is not None:
            return form, found.start()
    return None


def _quoted(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "...")
