"""Sampling: the inverse of the distribution function, truncation, and what is reported of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="art-langgraph[train] is not installed")

import torch

from art_core.calls import Sampling
from art_core.engine.sampling import sample, uniform
from art_core.errors import EngineError

PLAIN = Sampling()
TENTHS = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
ALMOST_ONE = 1.0 - 2.0**-53
"""The largest number that `uniform` can give."""


def draw(
    logits: torch.Tensor,
    setting: Sampling = PLAIN,
    noise: float = 0.5,
    allowed: torch.Tensor | None = None,
) -> tuple[int, float]:
    """One token of one sequence."""
    ids, logprobs = sample(logits.unsqueeze(0).clone(), [setting], [noise], [allowed])
    return ids[0], logprobs[0]


def near(probability: float) -> Any:
    """The logarithm of `probability`, to float32."""
    return pytest.approx(math.log(probability), abs=1e-6)


def support(logits: torch.Tensor, **settings: Any) -> dict[int, float]:
    """Every token that can be drawn and the probability reported for it."""
    setting = Sampling(**settings)
    found = {}
    for noise in np.linspace(0, ALMOST_ONE, 2001):
        token, logprob = draw(logits, setting, float(noise))
        found[token] = math.exp(logprob)
    return found


@pytest.mark.parametrize(
    ("noise", "token"),
    [(0.0, 0), (0.39, 0), (0.41, 1), (0.69, 1), (0.71, 2), (0.91, 3), (ALMOST_ONE, 3)],
)
def test_the_token_is_where_the_summed_probability_passes_the_noise(
    noise: float, token: int
) -> None:
    """Sums of .4 .3 .2 .1 are .4 .7 .9 1."""
    got, logprob = draw(TENTHS, noise=noise)
    assert got == token
    assert logprob == pytest.approx(float(TENTHS[token]), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_extreme_noise_never_draws_what_has_no_probability(dtype: torch.dtype) -> None:
    """First and last tokens are impossible, in a vocabulary that is no multiple of the fold."""
    logits = torch.full((1000,), -math.inf, dtype=dtype)
    logits[[300, 301, 700]] = 0.0
    for noise, token in [(0.0, 300), (0.34, 301), (ALMOST_ONE, 700)]:
        got, logprob = draw(logits, noise=noise)
        assert got == token
        assert logprob == pytest.approx(math.log(1 / 3), abs=1e-2)


def test_noise_is_not_rounded_to_single_precision() -> None:
    """1e-9 below the border between two tokens and 1e-9 above it; float32 knows no such step."""
    logits = torch.tensor([0.75, 0.25], dtype=torch.float64).log()
    assert draw(logits, noise=0.75 - 1e-9)[0] == 0
    assert draw(logits, noise=0.75 + 1e-9)[0] == 1


@pytest.mark.parametrize("vocab", [7, 256, 257, 1000])
def test_many_draws_have_the_distribution(vocab: int) -> None:
    """Chi-square of 20,000 draws with fixed noise: below the 99.9 % point, which for k degrees of
    freedom is k (1 - 2/(9k) + 3.09 sqrt(2/(9k)))^3 (Wilson and Hilferty 1931)."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(vocab, generator=generator)
    probs = logits.double().softmax(0).numpy()
    draws = 20_000
    noise = np.random.default_rng(vocab).random(draws).tolist()
    counts = np.zeros(vocab)
    for start in range(0, draws, 2000):
        part = noise[start : start + 2000]
        rows = logits.expand(len(part), -1).clone()
        ids, _ = sample(rows, [PLAIN] * len(part), part, [None] * len(part))
        counts += np.bincount(ids, minlength=vocab)
    expected = probs * draws
    big = expected >= 5  # the rest counts as one cell
    observed = np.append(counts[big], counts[~big].sum())
    wanted = np.append(expected[big], expected[~big].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    chi = float(((observed - wanted) ** 2 / wanted).sum())
    k = len(wanted) - 1
    assert chi < k * (1 - 2 / (9 * k) + 3.09 * math.sqrt(2 / (9 * k))) ** 3


def test_uniform_depends_on_seed_and_index_and_on_nothing_else() -> None:
    numbers = [uniform(seed, index) for seed in range(40) for index in range(40)]
    assert len(set(numbers)) == 1600
    assert all(0 <= u < 1 for u in numbers)
    assert 0.45 < np.mean(numbers) < 0.55  # four standard errors are 0.029
    assert uniform(3, 7) == uniform(3, 7)
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)


def test_uniform_is_the_same_in_every_process_and_release() -> None:
    """Recorded noise must be found again; the numbers are numpy's Philox, written down once."""
    assert uniform(0, 0) == 0.011546754286331562
    assert uniform(2**63 - 1, 5) == 0.852809547353868


def test_temperature_divides_the_logits() -> None:
    """At T = 0.5 the odds 4:3:2:1 become 16:9:4:1; at T = 2 they become 2:sqrt(3):sqrt(2):1."""
    assert support(TENTHS, temperature=0.5) == pytest.approx(
        {0: 16 / 30, 1: 9 / 30, 2: 4 / 30, 3: 1 / 30}, abs=1e-6
    )
    total = 2 + math.sqrt(3) + math.sqrt(2) + 1
    assert support(TENTHS, temperature=2.0)[1] == pytest.approx(math.sqrt(3) / total, abs=1e-6)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 5e-324])
def test_a_tiny_temperature_is_all_but_greedy(temperature: float) -> None:
    for noise in (0.0, 0.5, ALMOST_ONE):
        assert draw(TENTHS, Sampling(temperature=temperature), noise) == (0, near(1))


def test_top_k_keeps_the_most_likely() -> None:
    """.4 and .3 of .7."""
    assert support(TENTHS, top_k=2) == pytest.approx({0: 4 / 7, 1: 3 / 7}, abs=1e-6)
    assert support(TENTHS, top_k=1) == {0: pytest.approx(1.0)}
    assert len(support(TENTHS, top_k=100)) == 4


def test_top_p_keeps_tokens_until_their_mass_reaches_it() -> None:
    """.4 alone is below .6, so .3 comes too; .9 is reached by three."""
    assert support(TENTHS, top_p=0.6) == pytest.approx({0: 4 / 7, 1: 3 / 7}, abs=1e-6)
    assert support(TENTHS, top_p=0.85) == pytest.approx({0: 4 / 9, 1: 3 / 9, 2: 2 / 9}, abs=1e-6)
    assert support(TENTHS, top_p=0.01) == {0: pytest.approx(1.0)}


def test_min_p_keeps_what_is_likely_beside_the_most_likely() -> None:
    """A quarter of .4 is .1: with .24 the last token stays, with .26 it goes."""
    assert len(support(TENTHS, min_p=0.24)) == 4
    assert support(TENTHS, min_p=0.26) == pytest.approx({0: 4 / 9, 1: 3 / 9, 2: 2 / 9}, abs=1e-6)


def test_truncations_follow_each_other() -> None:
    """min_p, then top_k, then top_p of what they left: of .4 and .3 (4/7 and 3/7) the first alone
    is 0.571, which reaches 0.5. The raw 0.4 would not."""
    assert support(TENTHS, top_k=2, top_p=0.5) == {0: pytest.approx(1.0)}
    assert len(support(TENTHS, top_p=0.5)) == 2
    assert support(TENTHS, min_p=0.6, top_p=0.55) == {0: pytest.approx(1.0)}


def test_truncation_sees_the_distribution_after_the_temperature() -> None:
    """At T = 0.5 the first token has 16/30 = 0.533."""
    assert support(TENTHS, temperature=0.5, top_p=0.53) == {0: pytest.approx(1.0)}


def test_a_wide_nucleus_in_a_large_vocabulary() -> None:
    """All but equal probabilities: half the mass is half of 4,000 tokens."""
    logits = torch.linspace(0, 1e-3, 4000, dtype=torch.float64)
    found = set()
    for noise in np.linspace(0, ALMOST_ONE, 301):
        token, logprob = draw(logits, Sampling(top_p=0.5), float(noise))
        found.add(token)
        assert math.exp(logprob) == pytest.approx(1 / 2000, rel=2e-3)
    assert min(found) >= 1999


def test_greedy_takes_the_most_likely_and_reports_the_whole_distribution() -> None:
    for extra in ({}, {"top_k": 1}, {"top_p": 0.1}, {"min_p": 0.9}):
        token, logprob = draw(TENTHS, Sampling(temperature=0.0, **extra), noise=0.99)
        assert token == 0
        assert logprob == pytest.approx(math.log(0.4), abs=1e-6)


def test_a_mask_renormalises() -> None:
    """Without the first token, .3 .2 .1 become 1/2, 1/3, 1/6."""
    allowed = torch.tensor([False, True, True, True])
    assert draw(TENTHS, noise=0.49, allowed=allowed) == (1, near(1 / 2))
    assert draw(TENTHS, noise=0.99, allowed=allowed) == (3, near(1 / 6))
    greedy = Sampling(temperature=0.0)
    assert draw(TENTHS, greedy, allowed=allowed) == (1, near(1 / 2))
    top = Sampling(top_k=1)
    assert draw(TENTHS, top, allowed=allowed) == (1, near(1))


def test_the_callers_logits_are_left_alone() -> None:
    logits = TENTHS.repeat(2, 1)
    before = logits.clone()
    allowed = torch.tensor([False, True, True, True])
    sample(logits, [PLAIN, Sampling(top_k=1)], [0.5, 0.5], [allowed, None])
    assert torch.equal(logits, before)


SETTINGS = [
    PLAIN,
    Sampling(temperature=0.7),
    Sampling(temperature=0.0),
    Sampling(top_k=3),
    Sampling(top_p=0.6, temperature=1.3),
    Sampling(min_p=0.1),
    Sampling(top_k=5, top_p=0.9, min_p=0.01),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sequence_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(len(SETTINGS), 777, generator=generator, dtype=dtype) * 3
    masks = [torch.rand(777, generator=generator) < 0.5 if i % 2 else None for i in range(7)]
    noise = [uniform(i, 0) for i in range(7)]
    together = sample(logits.clone(), SETTINGS, noise, masks)
    for i, setting in enumerate(SETTINGS):
        alone = draw(logits[i], setting, noise[i], masks[i])
        assert alone[0] == together[0][i]
        assert alone[1] == pytest.approx(together[1][i], abs=1e-6)


def test_double_precision_stays_double() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(500, generator=generator, dtype=torch.float64)
    token, logprob = draw(logits, Sampling(temperature=0.7), 0.3)
    assert abs(logprob - float((logits / 0.7).log_softmax(0)[token])) < 1e-14


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error(bad: float) -> None:
    logits = TENTHS.clone()
    logits[1] = bad
    for setting in (PLAIN, replace(PLAIN, temperature=0.0)):
        with pytest.raises(EngineError, match="not finite"):
            draw(logits, setting)


def test_nothing_allowed_is_an_error() -> None:
    with pytest.raises(EngineError, match="not finite"):
        draw(TENTHS, allowed=torch.zeros(4, dtype=torch.bool))
