"""The trajectories of an agent's step, made up: what benchmarks of training work on.

In: how many groups, rollouts and turns, a tokenizer, a seed. Out: conversations under its chat
template with the ids that an endpoint would have recorded, token for token. All groups share the
system prompt, the rollouts of a group its task, the turns of a rollout all that came before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import art_core as art
from art_core.calls import Ids, Logprobs
from art_core.engine.base import Tokenizer

MODEL = "agent"
WORDS = tuple(
    """
    order refund parcel status weather street customer invoice search result page row value total
    date number found missing paid open closed the of and to in for with from not yet answer tool
    call city price list item stock ready late reply thanks please check again
    """.split()  # noqa: SIM905 - fifty quoted words read worse
)


@dataclass(frozen=True)
class Turn:
    """One answer of the policy."""

    prompt_ids: Ids
    sampled_ids: Ids
    logprobs: Logprobs
    content: str


@dataclass(frozen=True)
class Conversation:
    """One rollout."""

    messages: list[dict[str, Any]]
    """All that was said; the assistant's ones are the turns', in order."""
    turns: list[Turn]
    reward: float

    @property
    def ids(self) -> Ids:
        """All its ids: the last turn's prompt and sample."""
        return np.concatenate([self.turns[-1].prompt_ids, self.turns[-1].sampled_ids])


@dataclass(frozen=True)
class Load:
    """How much is played; lengths are in words, about one id each, drawn evenly."""

    groups: int = 64
    rollouts: int = 8
    turns: int = 6
    system: int = 400
    task: tuple[int, int] = (100, 300)
    answer: tuple[int, int] = (30, 150)
    observation: tuple[int, int] = (100, 500)

    def draw(self, tokenizer: Tokenizer, seed: int) -> list[list[Conversation]]:
        """The conversations of each group."""
        rng = np.random.default_rng(seed)
        system = {"role": "system", "content": _text(rng, self.system)}
        groups = []
        for _ in range(self.groups):
            start = [system, {"role": "user", "content": _text(rng, *self.task)}]
            groups.append([self._play(tokenizer, rng, start) for _ in range(self.rollouts)])
        return groups

    def _play(
        self, tokenizer: Tokenizer, rng: np.random.Generator, start: list[dict[str, Any]]
    ) -> Conversation:
        messages, turns = list(start), []
        text = tokenizer.render(messages)
        prompt = np.array(tokenizer.encode(text), np.int32)
        for turn in range(self.turns):
            content = _text(rng, *self.answer)
            sampled = np.array([*tokenizer.encode(content), *_end(tokenizer)], np.int32)
            logprobs = -rng.exponential(0.5, len(sampled)).astype(np.float32)
            turns.append(Turn(prompt, sampled, logprobs, content))
            messages.append({"role": "assistant", "content": content})
            if turn + 1 < self.turns:
                messages.append({"role": "user", "content": _text(rng, *self.observation)})
                text, before = tokenizer.render(messages), text
                after = text[len(before) + len(content) :].removeprefix(_END)
                prompt = np.concatenate([prompt, sampled, tokenizer.encode(after)], dtype=np.int32)
        return Conversation(messages, turns, float(rng.integers(0, 100)) / 100)


def trajectory_groups(groups: list[list[Conversation]]) -> list[art.TrajectoryGroup]:
    """The conversations as captured."""
    return [
        art.TrajectoryGroup(
            art.Trajectory(calls=_calls(one, f"{g}.{r}"), reward=one.reward)
            for r, one in enumerate(group)
        )
        for g, group in enumerate(groups)
    ]


def _calls(conversation: Conversation, name: str) -> list[art.ModelCall]:
    answers = [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant"]
    return [
        art.ModelCall(
            record_id=f"{name}.{number}",
            model=MODEL,
            step=0,
            request={"model": MODEL, "messages": conversation.messages[:at]},
            message=conversation.messages[at],
            finish_reason="stop",
            prompt_ids=turn.prompt_ids,
            sampled_ids=turn.sampled_ids,
            logprobs=turn.logprobs,
        )
        for number, (at, turn) in enumerate(zip(answers, conversation.turns, strict=True))
    ]


_END = "<|im_end|>"


def _end(tokenizer: Tokenizer) -> list[int]:
    ids = tokenizer.encode(_END)
    if len(ids) != 1 or ids[0] not in tokenizer.eos_ids:
        raise ValueError(f"{_END!r} ends no turn of this tokenizer: give one that speaks ChatML")
    return ids


def _text(rng: np.random.Generator, low: int, high: int | None = None) -> str:
    words = low if high is None else int(rng.integers(low, high))
    return " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), words))
