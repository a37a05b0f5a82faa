"""The canary by numbers: what it says of right, stale and foreign weights, and below the noise."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from art_core.batch.probe import Float, Probe
from art_core.calls import Ids, Logprobs
from art_core.engine.base import AdapterRef
from art_core.engine.swap_proof import judge, prove_swap
from art_core.errors import EngineError

_random = np.random.default_rng(0)
BEFORE = np.minimum(_random.normal(-2.0, 1.0, 500), -0.3)
STEP = np.minimum(_random.normal(0.0, 0.05, 500), -BEFORE / 2)
"""What the trainer changed: 0.05 nats, and no logprob above 0."""


def noisy(values: npt.NDArray[np.float64], nats: float) -> npt.NDArray[np.float64]:
    return values + _random.normal(0.0, nats, len(values))


def test_the_right_weights_are_proved_with_a_slope_of_one() -> None:
    found = judge(BEFORE, BEFORE + STEP, noisy(BEFORE, 1e-4), noisy(BEFORE + STEP, 1e-4))
    assert found.outcome == "proved"
    assert found.slope == pytest.approx(1.0, abs=0.01)
    assert found.tokens == 500


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


def rounded(log_odds: Float, random: np.random.Generator) -> Float:
    """Logprobs of tokens as a pass in bfloat16 gives them: logits are off by about 0.08."""
    noisy = log_odds + random.normal(0.0, 0.08, len(log_odds))
    return -np.log1p(np.exp(-noisy))


@pytest.mark.parametrize("step", [0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 1.0])
def test_what_is_rounding_in_the_trainers_own_change_condemns_nobody(step: float) -> None:
    """Trainer and engine round alike but apart; most tokens are sure, as late in a run. 200 draws:
    the right weights are never refuted, the old ones never proved, and a step of several times the
    rounding is told in nearly all."""
    random = np.random.default_rng(0)
    told: dict[str, list[str]] = {"right": [], "stale": []}
    for _ in range(200):
        old = random.normal(3.0, 3.0, 250)
        new = old + random.normal(0.0, step, 250)
        before, after = rounded(old, random), rounded(new, random)
        engine = rounded(old, random)
        told["right"].append(judge(before, after, engine, rounded(new, random)).outcome)
        told["stale"].append(judge(before, after, engine, engine).outcome)
    assert "refuted" not in told["right"]
    assert "proved" not in told["stale"]
    if step >= 0.4:
        assert told["right"].count("proved") > 190
        assert told["stale"].count("refuted") > 190


def test_a_few_tokens_prove_nothing() -> None:
    """They have ratios of their own: engine and trainer are not equally sure of each."""
    step = np.zeros(500)
    step[:4] = -1.0
    for share in (0.0, 0.4, 1.0):
        found = judge(BEFORE, BEFORE + step, BEFORE, BEFORE + share * step)
        assert found.outcome == "inconclusive"


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


class _Broken:
    """An engine whose second step has weights that are no numbers."""

    async def score(self, adapter: AdapterRef | None, ids: Ids) -> Logprobs:
        worth = math.nan if adapter == AdapterRef("agent", 2) else -1.0
        return np.full(len(ids) - 1, worth, np.float32)


async def test_logprobs_that_are_no_numbers_are_an_error() -> None:
    ids = np.arange(101, dtype=np.int32)
    probe = Probe((ids,), (np.arange(1, 101),), BEFORE[:100], BEFORE[:100] + STEP[:100])
    with pytest.raises(EngineError, match="agent@2 is answered by logprobs that are no numbers"):
        await prove_swap(_Broken(), AdapterRef("agent", 1), AdapterRef("agent", 2), probe)
