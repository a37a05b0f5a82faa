"""The canary by numbers: what it says of right, stale and foreign weights, and below the noise."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from art_core.batch.probe import Probe
from art_core.calls import Ids, Logprobs
from art_core.engine.base import AdapterRef
from art_core.engine.swap_proof import judge, prove_swap
from art_core.errors import EngineError

_random = np.random.default_rng(0)
BEFORE = _random.normal(-2.0, 1.0, 500)
STEP = _random.normal(0.0, 0.05, 500)
"""What the trainer changed: 0.05 nats, of 64 kept tokens the root mean square is about 0.09."""


def noisy(values: npt.NDArray[np.float64], nats: float) -> npt.NDArray[np.float64]:
    return values + _random.normal(0.0, nats, len(values))


def test_the_right_weights_are_proved_with_a_slope_of_one() -> None:
    found = judge(BEFORE, BEFORE + STEP, noisy(BEFORE, 1e-4), noisy(BEFORE + STEP, 1e-4))
    assert found.outcome == "proved"
    assert found.slope == pytest.approx(1.0, abs=0.01)
    assert found.tokens == 64


@pytest.mark.parametrize("noise", [0.0, 1e-4, 0.01])
def test_weights_of_the_step_before_are_refuted(noise: float) -> None:
    """N-1 served as N: the engine's change is nothing but noise, so that the slope is 0."""
    found = judge(BEFORE, BEFORE + STEP, noisy(BEFORE, noise), noisy(BEFORE, noise))
    assert found.outcome == "refuted"
    assert found.slope == pytest.approx(0.0, abs=0.1)


def test_weights_of_another_model_are_not_proved() -> None:
    """An engine that moves, but elsewhere: what the line leaves over is as big as the change."""
    other = BEFORE + np.random.default_rng(1).normal(0.0, 0.05, 500)
    assert judge(BEFORE, BEFORE + STEP, BEFORE, other).outcome != "proved"


def test_below_the_noise_it_says_so() -> None:
    """bf16: mean noise .04 against a step of .003 (DESIGN section 6)."""
    step = STEP * 0.06
    found = judge(BEFORE, BEFORE + step, noisy(BEFORE, 0.05), noisy(BEFORE + step, 0.05))
    assert found.outcome == "inconclusive"
    assert judge(BEFORE, BEFORE, BEFORE, BEFORE).outcome == "inconclusive"
    assert math.isnan(judge(BEFORE, BEFORE, BEFORE, BEFORE).slope)


class _Stale:
    """An engine that answers every step with the weights of one."""

    async def score(self, adapter: AdapterRef | None, ids: Ids) -> Logprobs:
        return BEFORE[: len(ids) - 1].astype(np.float32)


async def test_an_engine_that_goes_on_with_the_old_step_is_an_error() -> None:
    ids = np.arange(101, dtype=np.int32)
    places = np.arange(50, 101)
    told = BEFORE[49:100].astype(np.float32).astype(np.float64)
    probe = Probe((ids,), (places,), told, told + STEP[:51])
    old, new = AdapterRef("agent", 1), AdapterRef("agent", 2)
    with pytest.raises(EngineError, match=r"agent@2 is not answered by its own weights.*0\.00 of"):
        await prove_swap(_Stale(), old, new, probe)
