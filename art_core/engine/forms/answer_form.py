"""How one base model's answers are read: its form of calls, its marks of thoughts.

In: the chat template, the special tokens, and the user's settings. Out: `AnswerForm`, which makes a
parser for each answer, and says what is doubtful. Forms are seen in the template
(`readiness.tool_parser`); a setting that names one wins.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from art_core.engine.forms.calls import AnswerParser, Event, by_name
from art_core.engine.forms.harmony import HarmonyParser
from art_core.engine.forms.table import FORMS, HARMONY, HERMES, NAMES, CallForm
from art_core.engine.forms.thoughts import ThoughtForm, ThoughtParser
from art_core.engine.messages import short_ids, thoughts_in
from art_core.engine.toolcalls import ToolCallParser
from art_core.errors import ConfigError
from art_core.readiness.dialogue import Dialogue, called, user
from art_core.readiness.reasoning_parser import reasoning_parser, thought_style
from art_core.readiness.tool_parser import ParserFound, tool_parser

_THINK = ThoughtForm("<think>", "</think>")
THOUGHTS = {
    **dict.fromkeys(("qwen3", "deepseek_r1", "deepseek_v3", "glm45"), _THINK),
    "mistral": ThoughtForm("[THINK]", "[/THINK]"),
    "seed_oss": ThoughtForm("<seed:think>", "</seed:think>"),
    "openai_gptoss": None,  # part of the form of its answers
}
"""What thoughts stand between, by the name that vLLM's parser of them has."""
_AUTO, _NONE = "auto", "none"
_LONG_ID, _SHORT_ID = "call_0123456789abcdef_0", 9


@dataclass(frozen=True)
class AnswerForm:
    """What a model's answers are read by."""

    calls: CallForm | None = HERMES
    """None: calls can't be read, or the whole answer has a form of its own."""
    thoughts: ThoughtForm | None = None
    is_harmony: bool = False
    """Answers are rows of channels."""
    single_call: bool = False
    """The template shows one call an answer: where there are more, the first ends it."""
    names_calls: bool = False
    """Of Mistral's forms the newer one: a name, then its arguments."""
    id_letters: int | None = None
    """Letters that the template wants of a call's id; None: any."""
    thought_field: str = "reasoning_content"
    """Of a message, where the template looks for a thought."""
    why_no_calls: str = ""
    doubts: tuple[str, ...] = ()
    """What the user should know at the start, each with what to set."""

    def for_template(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """`messages` in normal form as the template wants them."""
        if self.id_letters is not None:
            messages = short_ids(messages, self.id_letters)
        if self.thought_field != "reasoning_content":
            messages = thoughts_in(messages, self.thought_field)
        return messages

    @property
    def reads_calls(self) -> bool:
        """Tools may be offered."""
        return self.calls is not None or self.is_harmony

    def parser(
        self, tools: Sequence[Mapping[str, Any]], *, limit: int | None, prompt: str
    ) -> AnswerParser:
        """For one answer.

        Args:
            tools: those that may be called; none: calls are text.
            limit: how many calls are read.
            prompt: what is answered; it may have opened a thought.
        """
        if self.single_call:
            limit = 1
        if self.is_harmony:
            return HarmonyParser(limit if tools else 0)
        calls = ToolCallParser(limit, self.calls, by_name(tools)) if tools and self.calls else None
        thoughts = None
        if self.thoughts is not None:
            thoughts = ThoughtParser(self.thoughts, is_open=self.opens_thought(prompt))
        return _InTurn(thoughts, calls, self.thoughts)

    def opens_thought(self, prompt: str) -> bool:
        """True if the answer begins in a thought."""
        return self.thoughts is not None and prompt.rstrip().endswith(self.thoughts.open)


AS_IT_IS = AnswerForm(calls=None)
"""Nothing in an answer is anything but text."""


class _InTurn:
    """First thoughts, then text and calls."""

    def __init__(
        self,
        thoughts: ThoughtParser | None,
        calls: ToolCallParser | None,
        form: ThoughtForm | None,
    ) -> None:
        self._thoughts, self._calls = thoughts, calls
        self._marks = {form.open, form.close} if form else set()

    @property
    def tokens(self) -> frozenset[str]:
        return frozenset(self._marks | (self._calls.tokens if self._calls else frozenset()))

    @property
    def has_limit(self) -> bool:
        return self._calls is not None and self._calls.has_limit

    @property
    def is_full(self) -> bool:
        return self._calls is not None and self._calls.is_full

    def push(self, text: str) -> Sequence[Event]:
        return self._sorted([text] if self._thoughts is None else self._thoughts.push(text))

    def finish(self) -> Sequence[Event]:
        events = self._sorted([] if self._thoughts is None else self._thoughts.finish())
        return events if self._calls is None else [*events, *self._calls.finish()]

    def _sorted(self, events: Sequence[Event]) -> Sequence[Event]:
        if self._calls is None:
            return events
        found: list[Event] = []
        for event in events:
            found += self._calls.push(event) if isinstance(event, str) else [event]
        return found


def find_form(
    template: str,
    special_tokens: Collection[str] = (),
    *,
    own_template: str | None = None,
    tool_parser_name: str = _AUTO,
    reasoning_parser_name: str = _AUTO,
) -> AnswerForm:
    """The form of a model's answers.

    Args:
        template: what it is asked with.
        own_template: its own, where another stands in for that.
        tool_parser_name, reasoning_parser_name: `EngineConfig.tool_parser`, `.reasoning_parser`.

    Raises:
        ConfigError: a setting names what can't be read.
        BaseModelError: the template is no Jinja.
    """
    calls = _chosen("tool_parser", tool_parser_name, NAMES) or tool_parser(template, special_tokens)
    thoughts = _chosen("reasoning_parser", reasoning_parser_name, tuple(THOUGHTS)) or (
        reasoning_parser(own_template or template, special_tokens)
    )
    is_harmony = calls.name == HARMONY or thoughts.name == "openai_gptoss"
    form = None if is_harmony else FORMS.get(calls.name or "")
    dialogue = Dialogue(template, special_tokens)
    why = "" if form or is_harmony else _why_no_calls(calls)
    return AnswerForm(
        calls=form,
        thoughts=THOUGHTS.get(thoughts.name or ""),
        is_harmony=is_harmony,
        single_call=_is_single(dialogue),
        names_calls="[ARGS]" in (dialogue.answer([user("q")], called("a"), tools=True) or ""),
        id_letters=_id_letters(dialogue),
        thought_field=next(iter(thought_style(dialogue, "art") or ["reasoning_content"])),
        why_no_calls=why,
        doubts=_doubts(calls, thoughts, why),
    )


def _chosen(setting: str, name: str, known: Sequence[str]) -> ParserFound | None:
    """What the user names; None: it is to be found."""
    if name == _AUTO:
        return None
    if name != _NONE and name not in known:
        raise ConfigError(
            f"{setting} is none that is known",
            got=name,
            expected=f'"auto", "none", or one of {", ".join(sorted(known))}',
            fix="The names are vLLM's; see `art-langgraph doctor --base-model NAME`.",
        )
    return ParserFound(None if name == _NONE else name, True, f"{setting}={name!r}")


def _why_no_calls(found: ParserFound) -> str:
    if found.name is None:
        return found.why
    return f"they have the form {found.name!r} ({found.why}), which is not read here"


def _doubts(calls: ParserFound, thoughts: ParserFound, why_no_calls: str) -> tuple[str, ...]:
    doubts = []
    if why_no_calls:
        doubts.append(
            f"calls of tools can't be read, so requests with tools are refused: {why_no_calls}. "
            f"If one of these forms is right, set EngineConfig(tool_parser=...): {', '.join(NAMES)}"
        )
    elif not calls.sure:
        doubts.append(
            f"calls of tools are likely in the form {calls.name!r} ({calls.why}). Look at an "
            "answer; EngineConfig(tool_parser=...) names another"
        )
    if thoughts.name is not None and thoughts.name not in THOUGHTS:
        doubts.append(
            f"thoughts stay in the text: they have the form {thoughts.name!r} ({thoughts.why}), "
            "which is not read here"
        )
    elif not thoughts.sure:
        doubts.append(
            f"thoughts are likely in the form {thoughts.name!r} ({thoughts.why}). Look at an "
            "answer; EngineConfig(reasoning_parser=...) names another"
        )
    return tuple(doubts)


def _is_single(dialogue: Dialogue) -> bool:
    """True if the template takes one call, and not two."""
    one = dialogue.answer([user("q")], called("art-1"), tools=True)
    two = dialogue.answer([user("q")], called("art-1", "art-2"), tools=True)
    return bool(one and "art-1" in one) and not (two and "art-1" in two and "art-2" in two)


def _id_letters(dialogue: Dialogue) -> int | None:
    """Letters of an id, if the template refuses others."""
    answers = []
    for call_id in (_LONG_ID, "a" * _SHORT_ID):
        answer = called("art-1")
        answer["tool_calls"][0]["id"] = call_id
        answers.append(dialogue.answer([user("q")], answer, tools=True))
    return _SHORT_ID if answers[0] is None and answers[1] is not None else None
