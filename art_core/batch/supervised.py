"""Trajectories for supervised training as samples: each answer a call, its weight the message's.

In: trajectories, and what renders them. Out: per trajectory its samples, or the reason why it is
left out; and the shares of an optimizer step. Calls that were captured with their ids are trained
as they were sampled; answers that were written are rendered (template.py). Left out: the forest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from art_core.batch.sample import Sample
from art_core.batch.template import Renderer, assistant_turns
from art_core.calls import Ids, ModelCall
from art_core.errors import ARTError, NoTrainableTokens
from art_core.sft.conversation import Conversation, check_conversation
from art_core.trajectories import History, Trajectory, as_message
from art_core.types import Choice, Message


@dataclass(frozen=True)
class Written:
    """The samples of some trajectories."""

    rows: list[list[Sample]]
    """One list a trajectory, empty if it is left out. A sample's weight is that of one token."""
    left_out: dict[int, str]
    """Index of a trajectory: why."""
    cut: int
    """Samples that were cut."""
    max_length: int
    """The limit that was used, in tokens."""
    warnings: Counter[str]

    @property
    def samples(self) -> list[Sample]:
        """Of all rows."""
        return [sample for row in self.rows for sample in row]

    @property
    def figures(self) -> dict[str, float]:
        """Counts for the log."""
        return {
            "rows": len(self.rows),
            "left_out": len(self.left_out),
            "cut": self.cut,
            "max_length": self.max_length,
        }

    def batches(self, size: int) -> list[list[Sample]]:
        """The samples of each `size` trajectories in order; fewer in the last."""
        parts = [self.rows[at : at + size] for at in range(0, len(self.rows), size)]
        return [[sample for row in part for sample in row] for part in parts]


def written_samples(
    trajectories: Sequence[Trajectory],
    renderer: Renderer,
    *,
    model: str,
    max_length: int,
    too_long: Literal["drop", "cut"],
) -> Written:
    """The answers of `trajectories` as samples.

    Args:
        renderer: of the base model.
        model: whose captured calls are trained by their ids; those of others are rendered.
        max_length: tokens of a prompt with its answer.
        too_long: what becomes of a trajectory with a longer one: it is left out whole, or the
            answer is cut there and those that begin later are left out.

    Raises:
        NoTrainableTokens: every trajectory is left out; the message counts why.
    """
    rows: list[list[Sample]] = []
    left_out: dict[int, str] = {}
    warnings: Counter[str] = Counter()
    cut = 0
    for index, trajectory in enumerate(trajectories):
        try:
            answers = _answers(trajectory, renderer, model, warnings)
            kept, here = _fitting(answers, max_length, too_long)
            if not kept:
                raise ValueError("no answer has a weight above 0")
        except (ValueError, ARTError) as error:
            left_out[index] = str(error)
            kept, here = [], 0
        cut += here
        rows.append([_sample(answer, index) for answer in kept])
    if not any(rows):
        raise _nothing_left(left_out)
    numbers = iter(range(sum(map(len, rows))))
    rows = [[sample._replace(call=next(numbers)) for sample in row] for row in rows]
    return Written(rows, left_out, cut, max_length, warnings)


def shares(samples: Sequence[Sample]) -> list[Sample]:
    """The samples of one optimizer step, weighted so that the entries' weights sum to 1.

    The loss is sum(weight * loss) / sum(weight) over the tokens of the step, however it is cut into
    rows.
    """
    whole = sum(sample.weight * len(sample.sampled_ids) for sample in samples)
    return [sample._replace(weight=sample.weight / whole) for sample in samples]


@dataclass(frozen=True, eq=False)
class _Answer:
    prompt_ids: Ids
    sampled_ids: Ids
    weight: float


def _answers(
    trajectory: Trajectory, renderer: Renderer, model: str, warnings: Counter[str]
) -> list[_Answer]:
    """By the ids of its own calls, or from its messages, or from what other models answered.

    Raises:
        ValueError: a conversation is not as it must be.
        ARTError: the template refuses it.
    """
    chosen = trajectory.chosen_records()
    if chosen is not None or not trajectory.messages_and_choices:
        known = [_known(call) for call in _own_calls(trajectory, chosen, model)]
        if known:
            return known
    found = []
    for conversation in _conversations(trajectory, warnings):
        found += _rendered(conversation, renderer, warnings)
        warnings.update(conversation.warnings)
    return found


def _own_calls(
    trajectory: Trajectory, chosen: Collection[tuple[str, int]] | None, model: str
) -> list[ModelCall]:
    calls = [call for call in trajectory.calls if call.trainable and call.model == model]
    return [call for call in calls if chosen is None or call.key in chosen]


def _known(call: ModelCall) -> _Answer:
    assert call.prompt_ids is not None
    assert call.sampled_ids is not None
    return _Answer(call.prompt_ids, call.sampled_ids, 1.0)


def _conversations(trajectory: Trajectory, warnings: Counter[str]) -> Iterator[Conversation]:
    """The messages that were given; where there are none, each answered call.

    An answer that its token limit cut is context: rendered, it would seem to end there.
    """
    cut = [call.message for call in trajectory.calls if call.finish_reason == "length"]
    if trajectory.messages_and_choices or not trajectory.calls:
        main = History(messages_and_choices=trajectory.messages_and_choices, tools=trajectory.tools)
        for history in (main, *trajectory.additional_histories):
            yield check_conversation(_weighted(history, cut), history.tools)
        return
    for call in trajectory.calls:
        if call.error is not None or not call.message or call.message in cut:
            continue
        context = [_context(message) for message in call.messages]
        try:
            yield check_conversation([*context, call.message], call.request.get("tools"))
        except ValueError as error:  # what another model said need not be well said
            warnings[f"a call of {call.model}: {error}"] += 1


def _weighted(history: History, cut: Sequence[Message]) -> list[Message]:
    """Where some answers are kept as a Choice, exactly these are trained, as in `train`."""
    items = history.messages_and_choices
    has_choice = any(isinstance(item, Choice) for item in items)
    messages = []
    for item in items:
        message = as_message(item)
        is_context = (has_choice and not isinstance(item, Choice)) or message in cut
        messages.append(_context(message) if is_context else message)
    return messages


def _context(message: Message) -> Message:
    return {**message, "weight": 0} if message.get("role") == "assistant" else message


def _rendered(
    conversation: Conversation, renderer: Renderer, warnings: Counter[str]
) -> list[_Answer]:
    messages, weights = conversation.messages, conversation.weights
    found = []
    for turn in assistant_turns(renderer, messages, conversation.tools, only=conversation.trained):
        message = messages[turn.message]
        thought = message.get("reasoning_content") or message.get("reasoning")
        shown = renderer.decode(turn.sampled_ids.tolist()) if thought else ""
        if isinstance(thought, str) and thought.strip() not in shown:
            warnings["reasoning that the chat template does not show"] += 1
        found.append(_Answer(turn.prompt_ids, turn.sampled_ids, weights[turn.message]))
    return found


def _fitting(
    answers: Sequence[_Answer], max_length: int, too_long: Literal["drop", "cut"]
) -> tuple[list[_Answer], int]:
    """The answers that fit, and how many of them were cut.

    Raises:
        ValueError: nothing is left to train.
    """
    lengths = [len(a.prompt_ids) + len(a.sampled_ids) for a in answers]
    longest = max(lengths, default=0)
    if longest <= max_length:
        return list(answers), 0
    if too_long == "drop":
        raise ValueError(f"too long: {longest} tokens, max_length is {max_length}")
    kept, cut = [], 0
    for answer, length in zip(answers, lengths, strict=True):
        room = max_length - len(answer.prompt_ids)
        if room > 0:
            kept.append(replace(answer, sampled_ids=answer.sampled_ids[:room]))
            cut += length > max_length
    if not kept:
        raise ValueError(f"too long: no answer begins before token {max_length}, max_length")
    return kept, cut


def _sample(answer: _Answer, trajectory: int) -> Sample:
    return Sample(
        prompt_ids=answer.prompt_ids,
        sampled_ids=answer.sampled_ids,
        logprobs=np.full(len(answer.sampled_ids), np.nan, np.float32),
        advantage=1.0,
        weight=answer.weight,
        temperature=1.0,
        distorted=False,
        call=0,
        trajectory=trajectory,
    )


def _nothing_left(left_out: dict[int, str]) -> NoTrainableTokens:
    counts = Counter(reason.partition(":")[0] for reason in left_out.values())
    told = ", ".join(f"{number} {reason}" for reason, number in counts.most_common(5))
    first = next(iter(left_out.values()), "no trajectories were given")
    return NoTrainableTokens(
        f"none of {len(left_out)} trajectories is left to train ({told or 'none given'}); "
        f"the first: {first}",
        fix="Raise TrainSFTConfig(max_length=...), give answers a weight, or mend the rows.",
    )
