"""Case 090: memory runs out in a step, once or always; nothing counts twice, nothing is held."""

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from art_core.config import TrainConfig, TrainSFTConfig
from art_core.errors import TrainingError
from art_core.nn.lora import LoraModel
from art_core.training.out_of_memory import OutOfMemory, is_out_of_memory
from art_core.training.sft import train_supervised
from art_core.training.trainer import Trainer
from tests.core.samples import make_sample, policy_calls
from tests.core.tiny_policy import NAME, same_bits, tensors_alive, tiny_policy, weights

CONFIG = TrainConfig(learning_rate=1e-3, entropy_coef=0.01, max_tokens_per_row=24)
FIGURES = ("loss", "entropy", "kl", "clipped", "grad_norm", "tokens_trained")


class Memory:
    """Makes `model` run out of memory in the passes told."""

    def __init__(
        self,
        model: LoraModel,
        *,
        at: int | None = None,
        limit: int | None = None,
        late: bool = False,
    ) -> None:
        """at: in this pass, counted from 1; limit: for rows of more positions; late: backwards."""
        self.rows: list[int] = []
        self.held: list[weakref.ref[Tensor]] = []
        self.alive_at_first_row = -1
        self._forward = model.hidden
        self._at, self._limit, self._late = at, limit, late
        setattr(model, "hidden", self._hidden)  # noqa: B010 - mypy knows methods can't be assigned

    def _hidden(self, ids: Tensor, *rest: Any) -> Tensor:
        self.rows.append(len(ids))
        full = len(self.rows) == self._at or (self._limit is not None and len(ids) > self._limit)
        if self._at is not None and len(self.rows) == self._at + 1:
            self.alive_at_first_row = sum(ref() is not None for ref in self.held)
        if full and not self._late:
            self._fail()
        out = self._forward(ids, *rest)
        self.held.append(weakref.ref(out))
        if full:
            out.register_hook(self._fail)
        return out

    def _fail(self, *_: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 20.00 MiB")


def worst(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    scale = max(float(value.abs().max()) for value in expected.values())
    return max(float((got[key] - expected[key]).abs().max()) for key in got) / scale


@pytest.mark.parametrize("late", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("settings", [{}, {"minibatches": 2}, {"aggregation": "sequence"}], ids=str)
def test_a_step_that_ran_out_once_is_taken_in_smaller_rows(
    tiny_llama: Path, settings: dict[str, Any], late: bool
) -> None:
    """In the third row, first time only. The rows before it are counted once; what the failed try
    held is free before the next one.
    """
    config = CONFIG.model_copy(update=settings)
    calm, short = tiny_policy(tiny_llama), tiny_policy(tiny_llama)
    expected = Trainer(calm, NAME, seed=0).step(policy_calls(), config)
    memory = Memory(short, at=3 if "minibatches" not in settings else 5, late=late)
    figures = Trainer(short, NAME, seed=0).step(policy_calls(), config)
    for name in FIGURES:
        assert figures[name] == pytest.approx(expected[name], rel=1e-6), name
    assert worst(weights(short), weights(calm)) <= 1e-6
    again = memory.rows[memory._at :]
    assert max(again) < max(memory.rows)
    assert memory.alive_at_first_row == 0


def test_a_pass_without_gradients_may_run_out_too(tiny_llama: Path) -> None:
    config = CONFIG.model_copy(update={"kl_penalty_coef": 0.1})
    calm, short = tiny_policy(tiny_llama), tiny_policy(tiny_llama)
    expected = Trainer(calm, NAME, seed=0).step(policy_calls(), config)
    Memory(short, at=2)
    figures = Trainer(short, NAME, seed=0).step(policy_calls(), config)
    assert figures["kl_reference"] == pytest.approx(expected["kl_reference"], rel=1e-9)
    assert worst(weights(short), weights(calm)) <= 1e-6


@pytest.mark.parametrize("late", [False, True], ids=["forward", "backward"])
def test_a_row_that_never_fits_is_named(tiny_llama: Path, late: bool) -> None:
    """A call of 60 + 3 - 1 tokens where 50 fit; the 45 of all the others do. The step is undone;
    the error, which a user may keep, holds no tensor.
    """
    model = tiny_policy(tiny_llama)
    trainer = Trainer(model, NAME, seed=0)
    trainer.step(policy_calls(), CONFIG)
    before, there = weights(model), tensors_alive()
    memory = Memory(model, limit=50, late=late)
    long = make_sample([299] * 60, [1, 2, 3], call=99, trajectory=99)
    config = CONFIG.model_copy(update={"max_tokens_per_row": 62})  # nothing fits beside it
    with pytest.raises(TrainingError) as caught:
        trainer.step([*policy_calls(), long], config)
    message = str(caught.value)
    assert "memory ran out at a row of 62 tokens (Tried to allocate 20.00 MiB)" in message
    assert "max_tokens_per_row=45" in message
    assert "the longest has 62 tokens" in message
    assert memory.rows == [45, 62], "a call can't be parted, so that there is no second try"
    assert same_bits(weights(model), before)
    assert tensors_alive() == there


@pytest.mark.parametrize("can_forget", [True, False])
def test_a_call_that_fills_a_row_is_tried_again_where_layers_can_forget(
    tiny_llama: Path, can_forget: bool
) -> None:
    """Seen on an H200: 14B, one call of 16,384 tokens. It can't be parted, but what the layers kept
    can be computed again.
    """
    calm, short = tiny_policy(tiny_llama), tiny_policy(tiny_llama)
    calls = [make_sample([299] * 22, [1, 2, 3], logprobs=[-5.0] * 3)]
    Trainer(calm, NAME, seed=0).step(calls, CONFIG)
    asked: list[int] = []

    def forget_from(positions: int) -> bool:
        asked.append(positions)
        return can_forget

    setattr(short, "forget_from", forget_from)  # noqa: B010 - as above
    trainer = Trainer(short, NAME, seed=0)
    memory = Memory(short, at=1)
    if can_forget:
        figures = trainer.step(calls, CONFIG)
        assert figures["memory/row_tried_again"] == 24
        assert memory.rows == [24, 24]
        assert same_bits(weights(short), weights(calm))
    else:
        with pytest.raises(TrainingError, match="memory ran out at a row of 24 tokens"):
            trainer.step(calls, CONFIG)
        assert memory.rows == [24]
    assert asked == [24]


def test_a_supervised_step_is_told_of_its_own_settings(tiny_llama: Path) -> None:
    model = tiny_policy(tiny_llama)
    trainer = Trainer(model, NAME, seed=0)
    Memory(model, limit=50)
    written = make_sample([299] * 60, [1, 2, 3], call=0, trajectory=0)
    with pytest.raises(TrainingError, match=r"TrainSFTConfig\(max_tokens_per_row=31\)"):
        train_supervised(trainer, [[written]], TrainSFTConfig())


def test_memory_that_ends_in_the_optimizer_undoes_the_step(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_policy(tiny_llama, dtype=torch.float32)
    trainer = Trainer(model, NAME, seed=0)
    trainer.step(policy_calls(), CONFIG)
    before = weights(model)
    moments = {k: v.clone() for p in trainer._parameters for k, v in _state(trainer, p)}
    optimizer_step = trainer._optimizer.step

    def half_done() -> None:
        optimizer_step()
        raise torch.OutOfMemoryError("Tried to allocate 8.00 MiB")

    monkeypatch.setattr(trainer._optimizer, "step", half_done)
    with pytest.raises(TrainingError, match="memory ran out"):
        trainer.step(policy_calls(1), CONFIG)
    assert same_bits(weights(model), before)
    after = {k: v for p in trainer._parameters for k, v in _state(trainer, p)}
    assert same_bits(after, moments)
    assert {len(_state(trainer, p)) for p in trainer._parameters} == {3}


def _state(trainer: Trainer, parameter: Tensor) -> list[tuple[str, Tensor]]:
    return [(f"{id(parameter)}.{k}", v) for k, v in trainer._optimizer.state[parameter].items()]


def test_real_errors_are_known() -> None:
    for allocate in (lambda: torch.empty(2**60), lambda: np.empty(2**56)):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            allocate()
        assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


@pytest.mark.parametrize(
    ("longest_row", "longest_call", "smaller"), [(100, 10, 50), (100, 60, 60), (100, 100, None)]
)
def test_the_next_try_is_half_as_big_as_far_as_calls_can_be_parted(
    longest_row: int, longest_call: int, smaller: int | None
) -> None:
    assert failed(longest_row=longest_row, longest_call=longest_call).smaller == smaller


def failed(**changes: Any) -> OutOfMemory:
    facts = {"reason": "", "row": 1, "fitted": 0, "longest_row": 100, "longest_call": 100}
    return OutOfMemory(**{**facts, "settings": "TrainSFTConfig", **changes})


def test_the_advice_is_a_setting_that_the_step_has_and_may_have() -> None:
    """Rows have 16 positions at least; a row that did not fit advises half of it."""
    assert "Set TrainSFTConfig(max_tokens_per_row=16)" in failed(row=32).error().fix
    told = failed(row=31, longest_call=31).error().fix
    assert "max_tokens_per_row" not in told
    assert "keep calls shorter: the longest has 31 tokens" in told
