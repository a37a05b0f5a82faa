"""Calls that are too long for a row, or speak of ids that the model does not know."""

from typing import Any

import pytest

from art_core.batch.forest import plant
from art_core.batch.select import Selection, select
from art_core.calls import ModelCall
from art_core.config import TrainConfig
from art_core.errors import GroupError
from art_core.trajectories import Trajectory, TrajectoryGroup
from tests.core.sample import make_call

ROW = 16


def sized(prompt: int, sampled: int, **fields: Any) -> ModelCall:
    """A call of these lengths; its sampled ids are 100, 101, ..."""
    return make_call(
        record_id=f"{prompt}+{sampled}",
        prompt_ids=[1] * prompt,
        sampled_ids=list(range(100, 100 + sampled)),
        logprobs=[-0.5 - i for i in range(sampled)],
        **fields,
    )


def chosen(
    *calls: ModelCall,
    vocab_size: int | None = None,
    context_length: int | None = None,
    **config: Any,
) -> Selection:
    """The selection of a group: one trajectory of `calls`, one of a small call."""
    group = TrajectoryGroup(
        [Trajectory(calls=list(calls), reward=1.0), Trajectory(calls=[make_call()], reward=0.0)]
    )
    return select(
        [group],
        model="agent",
        step=2,
        config=TrainConfig(**{"max_tokens_per_row": ROW, **config}),
        vocab_size=vocab_size,
        context_length=context_length,
    )


def reasons(selection: Selection) -> list[str]:
    return [skip.reason for skip in selection.skipped]


def test_by_default_a_call_too_long_refuses_the_step() -> None:
    """14 prompt ids and 4 sampled ones are 17 positions: the last one predicts nothing."""
    with pytest.raises(GroupError) as caught:
        chosen(sized(14, 4))
    assert str(caught.value) == (
        "a call of trajectory 0 of group 0, asked by agent, is too long for a row: got 17, "
        "expected at most max_tokens_per_row=16 tokens. Raise "
        'TrainConfig(max_tokens_per_row=...), shorten the rollout, or set too_long="drop" or "cut".'
    )
    assert len(chosen(sized(13, 4)).samples) == 2


def test_drop_leaves_the_call_out_and_counts_it() -> None:
    selection = chosen(sized(14, 4), sized(13, 4), sized(30, 1), too_long="drop")
    assert [len(s.prompt_ids) for s in selection.samples] == [13, 4]
    assert dict(selection.misfits) == {"too long": 2}
    assert (selection.skipped, selection.share) == ([], 1.0)


def test_a_trajectory_whose_calls_are_all_dropped_is_skipped_with_its_reason() -> None:
    """Its reward still counts in the mean: (1 + 0) / 2."""
    selection = chosen(sized(14, 4), sized(30, 1), too_long="drop")
    assert reasons(selection) == ["trajectory 0: no call of it fits the model: 2 too long"]
    assert [s.advantage for s in selection.samples] == [-0.5]
    assert selection.share == 0.5


@pytest.mark.parametrize(
    ("prompt", "sampled", "left"), [(14, 4, 3), (10, 100, 7), (16, 2, 1), (16, 50, 1)]
)
def test_cut_keeps_of_the_sample_what_fits(prompt: int, sampled: int, left: int) -> None:
    """`prompt` + `left` - 1 = 16 positions. What is left has no token that ends the turn."""
    selection = chosen(sized(prompt, sampled), too_long="cut")
    cut = selection.samples[0]
    assert cut.sampled_ids.tolist() == list(range(100, 100 + left))
    assert cut.logprobs.tolist() == [-0.5 - i for i in range(left)]
    assert len(cut.prompt_ids) == prompt
    assert dict(selection.misfits) == {"cut": 1}
    assert max(len(row) for row in plant(selection.samples, ROW)) == ROW


@pytest.mark.parametrize(("prompt", "sampled"), [(17, 1), (17, 50), (1_000_000, 3)])
def test_cut_drops_a_call_of_which_nothing_would_be_trained(prompt: int, sampled: int) -> None:
    selection = chosen(sized(prompt, sampled), too_long="cut")
    assert dict(selection.misfits) == {"too long": 1}
    assert reasons(selection) == ["trajectory 0: no call of it fits the model: 1 too long"]


def test_a_call_longer_than_the_models_context_is_as_one_longer_than_a_row() -> None:
    """Rows are long so that many calls share one; 17 positions are more than the model's 16."""
    limits = {"max_tokens_per_row": 1000, "context_length": 16}
    with pytest.raises(GroupError, match=r"too long for the model: got 17, .* 16 tokens, its con"):
        chosen(sized(14, 4), **limits)
    dropped = chosen(sized(14, 4), sized(13, 4), too_long="drop", **limits)
    assert [len(s.prompt_ids) for s in dropped.samples] == [13, 4]
    assert dict(dropped.misfits) == {"too long": 1}
    cut = chosen(sized(14, 4), too_long="cut", **limits)
    assert cut.samples[0].sampled_ids.tolist() == [100, 101, 102]


def test_the_captured_call_stays_whole() -> None:
    call = sized(10, 100)
    chosen(call, too_long="cut")
    assert call.sampled_ids is not None
    assert (len(call.sampled_ids), call.finish_reason) == (100, "stop")


@pytest.mark.parametrize("fields", [{"prompt_ids": [1, 64]}, {"sampled_ids": [5, 64, 0]}])
def test_ids_outside_the_vocabulary_are_left_out(fields: dict[str, Any]) -> None:
    """A vocabulary of 64 knows the ids 0 to 63."""
    strange = make_call(record_id="strange", **fields)
    selection = chosen(strange, make_call(record_id="fine"), vocab_size=64)
    assert dict(selection.misfits) == {"outside the vocabulary": 1}
    assert len(selection.samples) == 2
    assert reasons(chosen(strange, vocab_size=64)) == [
        "trajectory 0: no call of it fits the model: 1 outside the vocabulary"
    ]
    assert chosen(strange, vocab_size=65).misfits == {}
