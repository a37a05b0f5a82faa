"""How a forced answer is spelled: the calls of each form, and what has to stand around an answer.

In: a form, the tokenizer's special tokens, the prompt. Out: pieces of a grammar in llguidance's
Lark. A mark that is a special token is asked for by its id; text would never be it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from art_core.engine.api_errors import ApiError
from art_core.engine.base import Tokenizer
from art_core.engine.forms.answer_form import AnswerForm
from art_core.engine.forms.harmony import MESSAGE
from art_core.engine.forms.table import HARMONY

_ANY = r"/(.|\n)*/"
_MARKS = re.compile(r"<\|?/?[a-z_:]+\|?>|\[/?[A-Z_]+\]")
"""What may be a special token."""


@dataclass(frozen=True)
class Spelling:
    """A row of calls. `NAME` and `"NAME"` stand for the tool's name, plain and as JSON."""

    head: str
    """Before the arguments."""
    tail: str
    begin: str = ""
    join: str = ""
    end: str = ""
    several: bool = True


_JSON_HEAD = '{"name": "NAME", "arguments": '
SPELLINGS = {
    "hermes": Spelling(f"<tool_call>\n{_JSON_HEAD}", "}\n</tool_call>", join="\n"),
    "llama3_json": Spelling('{"name": "NAME", "parameters": ', "}", several=False),
    "mistral": Spelling(_JSON_HEAD, "}", begin="[TOOL_CALLS][", join=", ", end="]"),
    "mistral, named": Spelling("[TOOL_CALLS]NAME[ARGS]", ""),
    "phi4_mini_json": Spelling(_JSON_HEAD, "}", begin="functools[", join=", ", end="]"),
    "granite": Spelling(_JSON_HEAD, "}", begin="<|tool_call|>[", join=", ", end="]"),
    "jamba": Spelling(_JSON_HEAD, "}", begin="<tool_calls>[", join=", ", end="]</tool_calls>"),
    "xlam": Spelling(_JSON_HEAD, "}", begin="[", join=", ", end="]"),
    "qwen3_coder": Spelling(
        "<tool_call>\n<function=NAME>\n", "</function>\n</tool_call>", join="\n"
    ),
    HARMONY: Spelling(
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
        "<|call|>",
        several=False,
    ),
}
_FINAL = f"<|channel|>final{MESSAGE}"
_ANALYSIS = (f"<|channel|>analysis{MESSAGE}", "<|end|>", "<|start|>assistant")


class Speller:
    """Writes rules for the answers of one model to one prompt.

    Args:
        tokenizer: its special tokens count, and its form. None: Hermes calls, no such tokens.
        prompt: the end of the prompt, which may have opened a thought.
    """

    def __init__(self, tokenizer: Tokenizer | None = None, prompt: str = "") -> None:
        self._tokenizer = tokenizer
        self._form = AnswerForm() if tokenizer is None else tokenizer.form
        self._is_open = self._form.opens_thought(prompt)

    def start(self, answer: str) -> list[str]:
        """Rules for `answer`, after a thought where the prompt opened one."""
        if self._form.is_harmony:
            head, end, next_head = map(self._literal, _ANALYSIS)
            thought = f"thought: {head} thinking {end} {next_head}"
            return [f"start: thought? {answer}", thought, f"thinking: {_ANY}"]
        if not self._is_open or self._form.thoughts is None:
            return [f"start: {answer}"]
        rules, thought = self._until("thought", self._form.thoughts.close)
        return [f'start: {thought} "\\n\\n" {answer}', *rules]

    def json(self, rule: str) -> str:
        """A whole answer whose text is `rule`."""
        return f"{self._literal(_FINAL)} {rule}" if self._form.is_harmony else rule

    def calls(
        self,
        tools: Sequence[dict[str, Any]],
        several: bool,
        *,
        arguments: Callable[[Any], str],
        value: Callable[[Any], str],
    ) -> list[str]:
        """Rules for `calls`: one of `tools` at least, and nothing else.

        Args:
            arguments: (parameters' JSON schema) -> the right side of a rule for them as JSON.
            value: the same for a value by any schema.

        Raises:
            ApiError: calls of this form can't be forced.
        """
        spelling = self._spelling()
        rules = []
        for i, tool in enumerate(tools):
            name = tool["function"]["name"]
            quoted = json.dumps(name, ensure_ascii=False)
            parts = spelling.head.split('"NAME"')  # the name itself may have NAME in it
            head = self._literal(quoted.join(part.replace("NAME", name) for part in parts))
            parameters = tool["function"].get("parameters") or {}
            rules.append(f"tool_{i}: {head} parameters_{i} {self._literal(spelling.tail)}")
            if self._form.calls is not None and self._form.calls.name == "qwen3_coder":
                rules += self._tagged(i, parameters, value)
            else:
                rules.append(f"parameters_{i}: {arguments(parameters)}")
        rules.append("call: " + " | ".join(f"tool_{i}" for i in range(len(tools))))
        more = f" ({self._literal(spelling.join)} call)*"
        row = "call" + (more if several and spelling.several and not self._form.single_call else "")
        begin, end = self._literal(spelling.begin), self._literal(spelling.end)
        return [f"calls: {begin} {row} {end}", *rules]

    def _spelling(self) -> Spelling:
        name = HARMONY if self._form.is_harmony else self._form.calls and self._form.calls.name
        if name == "mistral" and self._form.names_calls:
            name = "mistral, named"
        found = SPELLINGS.get(name or "")
        if found is None:
            raise ApiError(
                f"calls in this model's form ({name}) can't be forced",
                fix='Leave tool_choice at "auto", or use `response_format`.',
                param="tool_choice",
            )
        return found

    def _tagged(
        self, i: int, parameters: Mapping[str, Any], value: Callable[[Any], str]
    ) -> list[str]:
        """Rules for arguments with a tag each, in the order of the schema."""
        rules, order = [], []
        shared = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
        for j, (key, of_it) in enumerate((parameters.get("properties") or {}).items()):
            name = f"value_{i}_{j}"
            head, tail = self._literal(f"<parameter={key}>\n"), "\n</parameter>\n"
            is_text = isinstance(of_it, Mapping) and of_it.get("type") == "string"
            if is_text and isinstance(of_it.get("enum"), list):
                ways = " | ".join(self._literal(str(each) + tail) for each in of_it["enum"])
                rules.append(f"{name}: {ways}")
            elif is_text:
                more, text = self._until(f"text_{i}_{j}", tail)
                rules += [f"{name}: {text}", *more]
            else:
                of_it = {**of_it, **shared} if isinstance(of_it, Mapping) else of_it
                rules += [
                    f"{name}: json_{i}_{j} {self._literal(tail)}",
                    f"json_{i}_{j}: {value(of_it)}",
                ]
            must = key in (parameters.get("required") or ())
            order.append(f"({head} {name}){'' if must else '?'}")
        return [f"parameters_{i}: {' '.join(order) or self._literal('')}", *rules]

    def _until(self, name: str, end: str) -> tuple[list[str], str]:
        """(rules, the rule for any text up to and with `end`)."""
        if self._token(end) is None:
            return [f"{name}[suffix={json.dumps(end)}]: {_ANY}"], name
        return [f"{name}: {name}_text {self._literal(end)}", f"{name}_text: {_ANY}"], name

    def _literal(self, text: str) -> str:
        """`text` as grammar, special tokens by their ids."""
        parts, at = [], 0
        if text.startswith("{"):  # by itself: JSON that may come instead begins alike
            parts, text = ['"{"'], text[1:]
        for mark in _MARKS.finditer(text):
            token = self._token(mark[0])
            if token is not None:
                parts += [_quoted(text[at : mark.start()]), f"<[{token}]>"]
                at = mark.end()
        parts.append(_quoted(text[at:]))
        return " ".join(filter(None, parts)) or '""'

    def _token(self, text: str) -> int | None:
        """The special token that `text` is."""
        if self._tokenizer is None:
            return None
        ids = self._tokenizer.encode(text)
        return ids[0] if len(ids) == 1 and ids[0] in self._tokenizer.special_ids else None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
