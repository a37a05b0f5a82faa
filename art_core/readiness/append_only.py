"""Whether a chat template keeps what it wrote: histories to which something is only appended.

In: a template. Out: where a later prompt does not begin with an earlier prompt and its answer, and
why. Such a call is trained all the same, but it can't be joined with the one before: the tree
branches, and what was computed is computed again. Whole conversations are rendered, with calls,
results and thoughts, and compared letter by letter. Left out: spelling that only the tokenizer
sees, and white space around answers; there the recorded ids are used (engine/prompt.py). Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from art_core.errors import RenderError
from art_core.readiness.dialogue import (
    TOOLS,
    Dialogue,
    Message,
    called,
    common,
    result,
    said,
    system,
    user,
)
from art_core.readiness.reasoning_parser import thought_style

_THOUGHT = "art thought"
_TOOL = str(TOOLS[0]["function"]["description"])
_NO_THOUGHT = "thinking is taken out of the history"
_SHOWN = 36
"""Characters on each side of a break that are quoted."""
_RULE, _WORDS = "art rule", "I look."


@dataclass(frozen=True)
class Break:
    """A place where a history is rewritten."""

    where: str
    """The kind of conversation."""
    why: str
    """What the template does, in a clause."""
    was: str
    """The text as it was sampled after."""
    becomes: str
    """The same place in a later prompt."""


@dataclass(frozen=True)
class Refusal:
    """A conversation that the template does not take."""

    where: str
    reason: str
    """The template's own words."""


@dataclass(frozen=True)
class AppendOnly:
    """What was seen."""

    breaks: tuple[Break, ...]
    refusals: tuple[Refusal, ...]
    kept: tuple[str, ...]
    """Kinds of conversations whose prefixes are kept."""


@dataclass(frozen=True)
class _Conversation:
    """Messages, of which every answer is taken to be sampled."""

    where: str
    messages: Sequence[Message]
    tools: bool = False


def append_only(dialogue: Dialogue) -> AppendOnly:
    """Play every kind of conversation against the template."""
    breaks: list[Break] = []
    refusals: list[Refusal] = []
    kept: list[str] = []
    for conversation in _conversations(dialogue):
        found = _play(dialogue, conversation)
        if isinstance(found, Break):
            breaks.append(found)
        elif isinstance(found, Refusal):
            refusals.append(found)
        else:
            kept.append(conversation.where)
    if (moved := _date(dialogue)) is not None:
        breaks.append(moved)
    return AppendOnly(tuple(breaks), tuple(refusals), tuple(kept))


def _conversations(dialogue: Dialogue) -> list[_Conversation]:
    """Every kind; the answers think, where the template takes thoughts."""
    thought, spoken = _thinking(dialogue)
    one, two = said(f"{spoken}a1", thought=thought), said(f"{spoken}a2", thought=thought)
    talk = [user("q1"), one, user("q2"), two, user("q3")]
    found = [
        _Conversation("several questions", talk),
        _Conversation("a system message first", [system(_RULE), *talk]),
        _Conversation("two questions in a row", [user("q0"), *talk]),
    ]
    if not dialogue.takes_tools():
        return found
    first = called("Oslo-1", text=spoken, thought=thought)
    second = called("Oslo-2", text=spoken, thought=thought)
    both = called("Oslo-1", "Oslo-2", text=spoken, thought=thought)
    loop = [user("q1"), first, result("r1"), second, result("r2")]
    at_once = [user("q1"), both, result("r1"), result("r2", call=1)]
    texted = [
        user("q1"),
        called("Oslo-1", text=f"{spoken}{_WORDS}", thought=thought),
        result("r1"),
        one,
    ]
    return [
        *found,
        _Conversation("several questions, tools at hand", talk, tools=True),
        _Conversation("tool calls one after the other", loop, tools=True),
        _Conversation("tool calls at once", at_once, tools=True),
        _Conversation("words beside a tool call", texted, tools=True),
        _Conversation("tool calls, then another question", [*loop, one, user("q2")], tools=True),
    ]


def _thinking(dialogue: Dialogue) -> tuple[Message | None, str]:
    """(the fields that take a thought, what an answer's text begins with)."""
    thought = thought_style(dialogue, _THOUGHT)
    if thought is None and "</think>" in dialogue.source:
        return None, f"<think>\n{_THOUGHT}\n</think>\n\n"
    return thought, ""


def _play(dialogue: Dialogue, conversation: _Conversation) -> Break | Refusal | None:
    """The first answer that a later prompt does not keep."""
    messages, tools = conversation.messages, conversation.tools
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    try:
        for i, end in zip(answers, [*answers[1:], len(messages)], strict=True):
            turn = _Turn(
                before=dialogue.render(messages[:i], tools=tools, prompt=False),
                prompt=dialogue.render(messages[:i], tools=tools),
                whole=dialogue.render(messages[: i + 1], tools=tools, prompt=False),
                later=dialogue.render(messages[:end], tools=tools),
                text=messages[i]["content"].rpartition("\n")[2],
            )
            if (found := _compare(dialogue, turn, conversation.where)) is not None:
                return found
    except RenderError as error:
        return Refusal(conversation.where, str(error.__cause__))
    return None


@dataclass(frozen=True)
class _Turn:
    """One answer."""

    before: str
    """The history."""
    prompt: str
    """The history, and the opening of an answer."""
    whole: str
    """The history and the answer."""
    later: str
    """The next prompt."""
    text: str
    """What the answer says, without a thought."""


def _compare(dialogue: Dialogue, turn: _Turn, where: str) -> Break | None:
    """How the next prompt parts from this one and its answer; None if it goes on from them.

    Where the text with the answer does not begin as its own prompt did, the answer's text is not
    known, and the two prompts are compared.
    """
    kept = common(turn.prompt, turn.whole)
    if turn.text not in turn.whole[kept:]:
        why = "words beside a tool call are left out of the history"
        return Break(where, why, turn.text, turn.whole[kept:][:_SHOWN])
    if not turn.prompt[kept:].strip():
        at = _whole_tokens(dialogue, turn.whole, common(turn.whole, turn.later))
        if _is_closed(dialogue, turn.whole[len(turn.prompt) : at], turn.whole[at:]):
            return None
        why = _why(dialogue, turn.whole[at:], turn.later[at:], is_answer=at >= len(turn.prompt))
        return Break(where, why, *_quotes(turn.whole, turn.later, at))
    at = _whole_tokens(dialogue, turn.prompt, common(turn.prompt, turn.later))
    if at == len(turn.prompt):
        return None
    opening = turn.prompt[at:]
    if at >= len(turn.before.rstrip()) and "think" in opening.lower():
        why = _NO_THOUGHT
    elif at >= len(turn.before.rstrip()):
        why = f"prompts open an answer with {opening!r}, which the history leaves out"
    else:
        why = _why(dialogue, opening, turn.later[at:], is_answer=False)
    return Break(where, why, *_quotes(turn.prompt, turn.later, at))


def _whole_tokens(dialogue: Dialogue, text: str, at: int) -> int:
    """`at`, or where the special token begins that it would cut."""
    for token in dialogue.special_tokens:
        start = text.find(token, max(0, at - len(token) + 1), at + len(token))
        if 0 <= start < at < start + len(token):
            return start
    return at


def _is_closed(dialogue: Dialogue, kept: str, rest: str) -> bool:
    """True if the answer had its end before the texts part: what follows was never sampled."""
    if not rest.strip():
        return True
    ends = [token for token in dialogue.special_tokens if kept.rstrip().endswith(token)]
    return bool(ends) and rest.strip() in dialogue.special_tokens


def _why(dialogue: Dialogue, lost: str, instead: str, *, is_answer: bool) -> str:
    if _THOUGHT in lost and lost.count(_THOUGHT) > instead.count(_THOUGHT):
        return _NO_THOUGHT
    if not is_answer and _RULE in lost and _RULE in instead:
        return "the system message moves to the last question"
    if _WORDS in lost and _WORDS not in instead:
        return "words beside a tool call are taken out of the history"
    if not is_answer and _TOOL in lost:
        return "the list of tools moves to the last question"
    if not is_answer:
        return "what was before the answer is written anew"
    tokens = [token for token in dialogue.special_tokens if lost.lstrip().startswith(token)]
    if tokens and lost.strip() == tokens[0]:
        return f"the end of an answer, {tokens[0]}, is written otherwise in the history"
    return "the answer is written otherwise in the history"


def _date(dialogue: Dialogue) -> Break | None:
    """Whether a prompt is another one tomorrow."""
    now = dialogue.attempt([user("q1")])
    later = dialogue.attempt([user("q1")], days_later=1)
    if now is None or later is None or now == later:
        return None
    why = "the date is in the prompt: a conversation that goes on past midnight begins otherwise"
    return Break("a conversation past midnight", why, *_quotes(now, later, common(now, later)))


def _quotes(whole: str, later: str, at: int) -> tuple[str, str]:
    start = max(0, at - 8)
    return whole[start : at + _SHOWN], later[start : at + _SHOWN]
