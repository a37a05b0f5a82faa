"""The forms of calls that can be read, by the name that vLLM's parser of it has.

In: a name. Out: `CallForm`: what a call begins with, and who reads on. Names are those that
`readiness.tool_parser` finds in a chat template. Left out: how a call is forced (grammars.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from art_core.engine.forms.calls import Block, Tools
from art_core.engine.forms.json_calls import (
    FirstOf,
    JsonBlock,
    JsonCalls,
    JsonListBlock,
    NamedBlock,
)
from art_core.engine.forms.python_calls import PythonBlock
from art_core.engine.forms.xml_calls import XmlBlock

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
HARMONY = "openai"
"""Not a form of calls alone, but of whole answers."""

_ARGUMENTS = ("arguments",)
_PARAMETERS = ("arguments", "parameters")


@dataclass(frozen=True)
class CallForm:
    """How calls are written."""

    name: str
    marks: tuple[str, ...]
    """What a call begins with."""
    opened: Callable[[str, Tools], Block]
    """(mark, tools) -> who reads what follows it."""
    bare: tuple[str, ...] = ()
    """Of `marks`, those that belong to what follows: a bracket."""
    close: str = ""
    """What a call, or a list of them, ends with."""
    joint: str = ""
    """Letters between calls that say nothing."""

    @property
    def tokens(self) -> frozenset[str]:
        """What a tokenizer may have as special tokens, and the parser has to see."""
        return frozenset({*self.marks, self.close, *_INNER}) - {"", *self.bare}


_INNER = ("[ARGS]", "[CALL_ID]")


def _one(close: str) -> Callable[[str, Tools], Block]:
    return lambda mark, tools: JsonBlock(mark, JsonCalls(_ARGUMENTS), close)


def _list(close: str = "") -> Callable[[str, Tools], Block]:
    return lambda mark, tools: JsonListBlock(mark, JsonCalls(_PARAMETERS), close)


def _either(close: str = "") -> Callable[[str, Tools], Block]:
    def opened(mark: str, tools: Tools) -> Block:
        one = JsonBlock(mark, JsonCalls(_PARAMETERS), close)
        return FirstOf(mark, {"{": one, "[": _list(close)(mark, tools)})

    return opened


def _mistral(mark: str, tools: Tools) -> Block:
    one, several = (
        JsonBlock(mark, JsonCalls(_ARGUMENTS)),
        JsonListBlock(mark, JsonCalls(_ARGUMENTS)),
    )
    return FirstOf(mark, {"{": one, "[": several, "": NamedBlock(mark)})


def _llama(mark: str, tools: Tools) -> Block:
    """Only tools that there are: an answer may be JSON for other reasons."""
    said = "" if mark == "{" else mark
    return JsonBlock(said, JsonCalls(_PARAMETERS, known=tools))


def _xlam(mark: str, tools: Tools) -> Block:
    return JsonListBlock("", JsonCalls(_PARAMETERS, known=tools))


def _pythonic(close: str = "") -> Callable[[str, Tools], Block]:
    def opened(mark: str, tools: Tools) -> Block:
        return PythonBlock(mark, close) if close else PythonBlock("", known=tools)

    return opened


_ALL = (
    CallForm("hermes", (HERMES_OPEN,), _one(HERMES_CLOSE), close=HERMES_CLOSE),
    CallForm("qwen3_coder", (HERMES_OPEN,), XmlBlock, close=HERMES_CLOSE),
    CallForm("llama3_json", ("<|python_tag|>", "{"), _llama, bare=("{",), joint=";"),
    CallForm("mistral", ("[TOOL_CALLS]",), _mistral),
    CallForm(
        "phi4_mini_json",
        ("functools", "<|tool_call|>"),
        _either("<|/tool_call|>"),
        close="<|/tool_call|>",
    ),
    CallForm("granite", ("<|tool_call|>",), _list()),
    CallForm("jamba", ("<tool_calls>",), _list("</tool_calls>"), close="</tool_calls>"),
    CallForm("xlam", ("[",), _xlam, bare=("[",)),
    CallForm("pythonic", ("[",), _pythonic(), bare=("[",)),
    CallForm(
        "llama4_pythonic",
        ("<|python_start|>",),
        _pythonic("<|python_end|>"),
        close="<|python_end|>",
    ),
    CallForm(
        "lfm2",
        ("<|tool_call_start|>",),
        _pythonic("<|tool_call_end|>"),
        close="<|tool_call_end|>",
    ),
)
FORMS = {form.name: form for form in _ALL}
HERMES = FORMS["hermes"]
NAMES = (*FORMS, HARMONY)
"""What can be read."""
