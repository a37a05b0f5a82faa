"""A conversation under a chat template: each assistant turn as the call that would have made it.

In: messages, tools, and what renders and encodes them (a base model's tokenizer). Out: for each
assistant turn the ids that it would have been asked with and the ids that would have been sampled,
its end token the last. Every turn is rendered by itself, so templates that rewrite history (drop
thinking, group tool results) are followed as the endpoint follows them. For supervised training,
and for calls that came without ids; calls that have ids are never rendered again. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from art_core.calls import Ids
from art_core.errors import ARTError, RenderError
from art_core.types import Message

_MARK = "\ue000\ue001"
"""Stands for an answer; private characters, which no template looks at."""
_END_OF_THOUGHT = "</think>"
_OPENED = re.compile(r"<([^<>/\s]+)>\s*$")


class Renderer(Protocol):
    """The part of a tokenizer that this needs; the engine's `Tokenizer`s have it."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a turn."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special-token text becomes its id; nothing is added in front."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`."""
        ...

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The template's text for messages as a client sends them (arguments are JSON text).

        Raises:
            ARTError: they can't be rendered.
        """
        ...


@dataclass(frozen=True, eq=False)
class AssistantTurn:
    """One assistant message as a call."""

    message: int
    """Its index in the conversation."""
    prompt_ids: Ids
    """[P] int32, P >= 1: all that is before it, up to where the model begins to write."""
    sampled_ids: Ids
    """[S] int32, S >= 1: what the model writes; the last one is the token that ends the turn."""


def render_prompt(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None
) -> Ids:
    """[P] ids that a call with these messages enters the model with, if nothing was sampled before.

    Raises:
        RenderError: the template makes nothing of them.
        ARTError: the template refuses them.
    """
    return _ids(renderer.encode(_prompt(renderer, messages, tools)))


def assistant_turns(
    renderer: Renderer,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] | None = None,
    *,
    only: Collection[int] | None = None,
) -> list[AssistantTurn]:
    """The assistant messages of a conversation as calls, in order.

    Prompt and answer are encoded apart, as sampling does: the prompt is encoded before the answer
    is there, so no token may reach over the border. A turn whose text goes on from an earlier turn
    begins with that turn's ids, so that a tree holds the conversation once.

    Args:
        renderer: of the base model that is trained.
        messages: in OpenAI's shape.
        tools: that the calls were made with.
        only: indices of the messages that are asked for; None means all assistant messages.

    Raises:
        RenderError: an answer has no exact place in what the template writes.
        ARTError: the template refuses the messages.
    """
    turns: list[AssistantTurn] = []
    told: list[tuple[str, list[int]]] = []  # text and ids up to the end of each turn so far
    for i, message in enumerate(messages):
        if message.get("role") != "assistant" or (only is not None and i not in only):
            continue
        prompt = _prompt(renderer, messages[:i], tools)
        answer = _answer(renderer, messages, i, tools, prompt)
        prompt_ids = _going_on(renderer, prompt, told)
        sampled_ids = _up_to_end(renderer, _encode_after(renderer, answer, prompt, prompt_ids), i)
        told.append((prompt + renderer.decode(sampled_ids), [*prompt_ids, *sampled_ids]))
        turns.append(AssistantTurn(i, _ids(prompt_ids), _ids(sampled_ids)))
    return turns


# --- text


def _prompt(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None
) -> str:
    text = renderer.render(messages, tools=tools)
    if not text:
        raise RenderError(
            f"the chat template makes no prompt of the {len(messages)} messages before an answer",
            fix="Begin the conversation with a system or a user message.",
        )
    return text


def _answer(
    renderer: Renderer,
    messages: Sequence[Message],
    i: int,
    tools: Sequence[dict[str, Any]] | None,
    prompt: str,
) -> str:
    """What the model writes after `prompt` to say message `i`, and what the template puts behind.

    Raises:
        RenderError: the template shows the message otherwise than it asks for it.
    """
    shown = renderer.render(messages[: i + 1], tools=tools, add_generation_prompt=False)
    said = _said(messages[i])

    def is_whole(answer: str) -> bool:
        return _END_OF_THOUGHT not in said or _END_OF_THOUGHT in answer

    if shown.startswith(prompt) and is_whole(shown[len(prompt) :]):
        return shown[len(prompt) :]
    before, after = _around(renderer, messages, i, tools)
    if not (prompt.startswith(before) and shown.startswith(before)):
        raise _no_place(i, "its turn begins otherwise than the prompt for an answer ends")
    opening = prompt[len(before) :]  # what a new answer is begun with but one in history is not
    body = shown[len(before) :] if is_whole(shown[len(before) :]) else said + after
    if opening and body.startswith(opening):
        return body[len(opening) :]
    opened = _OPENED.search(opening)
    if opened and f"</{opened[1]}>" not in body:
        raise _no_place(
            i, f"a new answer begins inside <{opened[1]}>, and this one has no such part"
        )
    return body


def _around(
    renderer: Renderer,
    messages: Sequence[Message],
    i: int,
    tools: Sequence[dict[str, Any]] | None,
) -> tuple[str, str]:
    """The rendered text before and after the content of message `i`, the last one."""
    stand_in = {**messages[i], "content": _MARK}
    text = renderer.render([*messages[:i], stand_in], tools=tools, add_generation_prompt=False)
    before, found, after = text.partition(_MARK)
    if not found or _MARK in after:
        raise _no_place(i, "the template does not show its content once")
    return before, after


def _said(message: Message) -> str:
    """The content as text."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


# --- ids


def _going_on(renderer: Renderer, prompt: str, told: Sequence[tuple[str, list[int]]]) -> list[int]:
    """Ids of `prompt`, beginning with those of the longest earlier turn that it goes on from."""
    longest = max(
        (t for t in told if prompt.startswith(t[0])), key=lambda t: len(t[0]), default=None
    )
    if longest is None:
        return renderer.encode(prompt)
    text, ids = longest
    return [*ids, *_encode_after(renderer, prompt[len(text) :], text, ids)]


def _encode_after(renderer: Renderer, text: str, before: str, before_ids: list[int]) -> list[int]:
    """Ids of `text` where it follows `before`.

    Encoded apart if that keeps the text. Tokenizers that write a space in front of every text, or
    normalise it, do not: there the ids are what the whole adds to `before_ids`.
    """
    apart = renderer.encode(text)
    if renderer.decode(apart) == text:
        return apart
    whole = renderer.encode(before + text)
    size = len(before_ids)
    return whole[size:] if whole[:size] == before_ids else apart


def _up_to_end(renderer: Renderer, ids: list[int], i: int) -> list[int]:
    """`ids` without what the template writes after the end of the turn."""
    ends = [at for at, token in enumerate(ids) if token in renderer.eos_ids]
    if not ends:
        raise _no_place(i, "the template ends it with no token that ends a turn")
    if len(ends) > 1:
        raise _no_place(
            i, f"its text holds the end-of-turn token {renderer.decode([ids[ends[0]]])!r}"
        )
    return ids[: ends[0] + 1]


def _ids(ids: Sequence[int]) -> Ids:
    return np.asarray(ids, np.int32)


def _no_place(i: int, why: str) -> ARTError:
    return RenderError(
        f"message {i} has no exact place under the base model's chat template: {why}",
        fix="Give that message weight 0 so that it is context only, or leave the row out.",
    )
