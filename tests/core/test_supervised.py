"""Which tokens count in supervised training, and with which weight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import art_core as art
from art_core.batch.forest import plant
from art_core.batch.supervised import Written, shares, written_samples
from art_core.calls import ModelCall
from art_core.engine.tokenizer import ByteTokenizer
from art_core.errors import NoTrainableTokens
from art_core.trajectories import as_message
from tests.core.samples import make_sample

# Turns of exactly as many tokens as their texts have letters, "." ending an answer; the header that
# asks for an answer belongs to what is before it, as in case 082.
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
LENGTHS = [("system", 4), ("user", 5), ("assistant", 6), ("user", 3), ("assistant", 7)]


def toy(template: str = PLAIN) -> ByteTokenizer:
    return ByteTokenizer((".",), eos=".", template=template)


def conversation(weights: Any = (None, None), **more: Any) -> art.Trajectory:
    """Case 082: 25 tokens, 13 of them in answers."""
    texts = {"system": "s", "user": "u", "assistant": "a"}
    messages: list[Any] = []
    given = iter(weights)
    for role, length in LENGTHS:
        text = texts[role] * length
        if role == "assistant":
            text = text[:-1] + "."
        messages.append({"role": role, "content": text})
        if role == "assistant" and (weight := next(given)) is not None:
            messages[-1]["weight"] = weight
    for place, changes in more.items():
        messages[int(place.removeprefix("m"))] |= changes
    return art.Trajectory(messages_and_choices=messages)


def written(
    trajectories: list[art.Trajectory],
    *,
    template: str = PLAIN,
    max_length: int = 8192,
    too_long: Any = "drop",
) -> Written:
    return written_samples(
        trajectories, toy(template), model="agent", max_length=max_length, too_long=too_long
    )


def trained(found: Written) -> list[tuple[int, float]]:
    """(tokens, weight of each) of every sample."""
    return [(len(s.sampled_ids), s.weight) for s in found.samples]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((None, None), [(6, 1.0), (7, 1.0)]),
        ((0, 1), [(7, 1.0)]),
        ((0.5, 1), [(6, 0.5), (7, 1.0)]),
        ((False, True), [(7, 1.0)]),
    ],
)
def test_trained_tokens(weights: Any, expected: list[tuple[int, float]], template: str) -> None:
    """Case 082, with and without generation markers: 13, 7, 6 x 0.5 + 7, 7 tokens."""
    found = written([conversation(weights)], template=template)
    assert trained(found) == expected
    assert all(s.sampled_ids[-1] == 256 for s in found.samples), "the end token is trained"
    assert found.left_out == {}


@pytest.mark.parametrize(
    ("weights", "why"),
    [((0, 0), "no answer has a weight above 0"), (("0", 1), 'not "0"'), ((-1, 1), "not -1")],
)
def test_rows_that_are_left_out_are_counted(weights: Any, why: str) -> None:
    found = written([conversation(weights), conversation()])
    assert trained(found) == [(6, 1.0), (7, 1.0)]
    assert [len(row) for row in found.rows] == [0, 2]
    assert list(found.left_out) == [0]
    assert why in found.left_out[0]
    assert found.figures["left_out"] == 1


def test_keys_that_are_ignored_are_told() -> None:
    found = written([conversation(m1={"weight": 1}, m2={"train": False})])
    assert trained(found) == [(6, 1.0), (7, 1.0)]
    assert dict(found.warnings) == {
        "the weight of a user message; only answers are trained": 1,
        'unknown key "train" in a message': 1,
    }


def test_reasoning_is_learned_or_told_to_be_lost() -> None:
    thinking = PLAIN.replace("{{ m.content }}", "{{ m.reasoning_content or '' }}{{ m.content }}")
    row = conversation(m2={"reasoning_content": "why"})
    shown = written([row], template=thinking)
    assert [n for n, _ in trained(shown)] == [6 + 3, 7]
    assert shown.warnings == {}
    assert dict(written([row]).warnings) == {"reasoning that the chat template does not show": 1}


@pytest.mark.parametrize(
    ("max_length", "kept", "cut"),
    [
        (25, [6, 7], [6, 7]),
        (24, None, [6, 6]),
        (12, None, [3]),
        (9, None, None),
        (8192, [6, 7], [6, 7]),
    ],
)
def test_the_longest_row(max_length: int, kept: list[int] | None, cut: list[int] | None) -> None:
    """Case 082: what fits exactly is kept; a longer one is dropped whole, or cut without an end."""
    for too_long, expected in (("drop", kept), ("cut", cut)):
        if expected is None:
            with pytest.raises(NoTrainableTokens, match="1 too long"):
                written([conversation()], max_length=max_length, too_long=too_long)
            continue
        found = written([conversation()], max_length=max_length, too_long=too_long)
        assert [n for n, _ in trained(found)] == expected
        whole = expected == [6, 7]
        assert (found.samples[-1].sampled_ids[-1] == 256) == whole
        assert found.cut == (0 if whole else 1)
        assert found.figures["max_length"] == max_length


def test_dropping_all_rows_is_an_error_with_the_counts() -> None:
    rows = [conversation(), conversation((0, 0)), conversation()]
    with pytest.raises(NoTrainableTokens) as caught:
        written(rows, max_length=24)
    message = str(caught.value)
    assert "none of 3 trajectories is left to train" in message
    assert "2 too long" in message
    assert "1 no answer has a weight above 0" in message
    with pytest.raises(NoTrainableTokens, match="none of 0"):
        written([])


def test_the_loss_of_a_batch_is_the_mean_over_its_weight() -> None:
    """Case 082: rows with 13, 0 and 7 tokens of loss 1: 20 in numerator and denominator."""
    found = written([conversation(), conversation((0, 0)), conversation((0, 1))])
    (batch,) = found.batches(3)
    assert sum(len(s.sampled_ids) for s in batch) == 20
    (row,) = plant(shares(batch), 100)
    assert len(row.entries) == 20
    assert row.entries.weight.sum() == pytest.approx(1.0)
    (half,) = written([conversation((0.5, 1))]).batches(1)
    weights = plant(shares(half), 100)[0].entries.weight
    assert sorted(set(weights.tolist())) == pytest.approx([0.5 / 10, 1 / 10])  # of 6 x 0.5 + 7


@pytest.mark.parametrize("row_size", [4, 6, 9, 100])
def test_how_rows_are_cut_is_no_matter(row_size: int) -> None:
    """Case 088: 2 tokens of loss 1 and 8 of loss 3: 2.6, in one row or two; never 2.0."""
    samples = [make_sample([1], [2, 3]), make_sample([4], [5] * 8, call=1)]
    rows = plant(shares(samples), max(row_size, 8))
    losses = {0: 1.0, 1: 3.0}
    loss = sum(
        weight * losses[call]
        for row in rows
        for weight, call in zip(row.entries.weight, row.entries.call.tolist(), strict=True)
    )
    assert loss == pytest.approx(2.6, abs=1e-12)


def test_batches_are_of_trajectories_and_the_last_may_be_smaller() -> None:
    found = written([conversation(), conversation((0, 0)), conversation((0, 1))])
    assert [[len(s.sampled_ids) for s in batch] for batch in found.batches(1)] == [[6, 7], [], [7]]
    assert [[len(s.sampled_ids) for s in batch] for batch in found.batches(2)] == [[6, 7], [7]]


# --- calls that were captured


def call(number: int, *, model: str = "agent", text: str = "ab.") -> ModelCall:
    return ModelCall(
        record_id=f"r{number}",
        model=model,
        step=0,
        request={"messages": [{"role": "user", "content": "q"}]},
        message={"role": "assistant", "content": text},
        finish_reason="stop",
        prompt_ids=np.array([9, number], np.int32),
        sampled_ids=np.array([7, 8, number], np.int32),
        logprobs=np.zeros(3, np.float32),
    )


def test_captured_calls_are_trained_by_their_ids() -> None:
    found = written([art.Trajectory(calls=[call(1), call(2)])])
    assert [s.prompt_ids.tolist() for s in found.samples] == [[9, 1], [9, 2]]
    assert [s.sampled_ids.tolist() for s in found.samples] == [[7, 8, 1], [7, 8, 2]]
    assert [s.call for s in found.samples] == [0, 1]
    assert np.isnan(found.samples[0].logprobs).all(), "what was sampled once is now written"


def test_only_the_choices_that_were_kept() -> None:
    trajectory = art.Trajectory(calls=[call(1), call(2)])
    trajectory.tell_histories()
    trajectory.messages_and_choices = trajectory.messages_and_choices[:2]
    trajectory.additional_histories = []
    assert [s.sampled_ids.tolist() for s in written([trajectory]).samples] == [[7, 8, 1]]


def test_calls_of_another_model_are_rendered() -> None:
    """Its ids are of another tokenizer; the answer is learned, what it read is context."""
    found = written([art.Trajectory(calls=[call(1, model="teacher")])])
    assert [s.prompt_ids.tolist() for s in found.samples] == [[ord("q")]]
    assert [s.sampled_ids.tolist() for s in found.samples] == [[ord("a"), ord("b"), 256]]


def test_what_another_model_was_cut_at_or_said_badly_is_context() -> None:
    """A cut answer would be learned as if it ended there."""
    broken = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"q'}}
    said = {"role": "assistant", "content": "", "tool_calls": [broken]}
    calls = [
        call(1, model="teacher"),
        replace(call(2, model="teacher", text="no end"), finish_reason="length"),
        replace(call(3, model="teacher"), message=said),
        replace(
            call(4, model="teacher", text="cd."),
            request={"messages": [{"role": "user", "content": "q"}, said]},
        ),
    ]
    found = written([art.Trajectory(calls=calls)])
    assert [toy().decode(s.sampled_ids.tolist()) for s in found.samples] == ["ab.", "cd."]
    (warning,) = found.warnings
    assert warning.startswith("a call of teacher: the arguments of tool call 0 of message 1")


def test_a_rollout_of_another_model_is_learned_by_what_it_tells() -> None:
    """Its answers are messages; one that was cut is context there too."""
    first = replace(call(1, model="teacher"), left_out="other model")
    asked = [*first.messages, first.message, {"role": "user", "content": "u"}]
    second = replace(
        call(2, model="teacher", text="no end"),
        left_out="other model",
        finish_reason="length",
        request={"messages": asked},
        prompt_ids=np.array([9, 1, 7, 8, 1, 5], np.int32),
    )
    trajectory = art.Trajectory(calls=[first, second])
    trajectory.tell_histories()
    roles = [as_message(m)["role"] for m in trajectory.messages_and_choices]
    assert roles == ["user", "assistant", "user", "assistant"]
    found = written([trajectory])
    assert [toy().decode(s.sampled_ids.tolist()) for s in found.samples] == ["ab."]


def test_messages_that_were_given_win_over_calls() -> None:
    messages: Any = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "mended."}]
    found = written([art.Trajectory(messages_and_choices=messages, calls=[call(1)])])
    assert [toy().decode(s.sampled_ids.tolist()) for s in found.samples] == ["mended."]


def test_histories_are_conversations_too() -> None:
    main = conversation()
    beside = art.History(messages_and_choices=conversation((0, 1)).messages_and_choices)
    main = main.model_copy(update={"additional_histories": [beside]})
    assert [n for n, _ in trained(written([main]))] == [6, 7, 7]
