"""Tree attention against torch's own attention with the tree's full mask."""

import numpy as np
import pytest
import torch

from art_core.batch.forest import Row, plant
from art_core.batch.sample import Sample
from art_core.errors import BaseModelError
from art_core.nn import attention, rows
from art_core.nn.rows import Score
from art_core.nn.tree_row import TreeRow
from art_core.training.logprobs import tree_row
from tests.core.samples import ancestors


def sample(prompt: list[int], sampled: list[int], call: int = 0) -> Sample:
    return Sample(
        prompt_ids=np.array(prompt, np.int32),
        sampled_ids=np.array(sampled, np.int32),
        logprobs=np.zeros(len(sampled), np.float32),
        advantage=1.0,
        weight=1.0,
        temperature=1.0,
        distorted=False,
        call=call,
        trajectory=call,
    )


def agent_calls(seed: int) -> list[Sample]:
    """Three prompts over one stem, four rollouts each, of two calls."""
    rng = np.random.default_rng(seed)

    def draw(n: int) -> list[int]:
        return [int(x) for x in rng.integers(0, 50, n)]

    stem, calls = draw(20), []
    for _ in range(3):
        prompt = stem + draw(7)
        for _ in range(4):
            answer = draw(int(rng.integers(1, 6)))
            calls.append(sample(prompt, answer))
            calls.append(sample(prompt + answer + draw(4), draw(5)))
    return calls


def tree_mask(row: TreeRow, n: int) -> torch.Tensor:
    mask = torch.zeros(n, n, dtype=torch.bool)
    for b in row.blocks():
        shape = (b.q1 - b.q0, b.k1 - b.k0)
        block = torch.ones(shape, dtype=torch.bool)
        mask[b.q0 : b.q1, b.k0 : b.k1] |= block.tril() if b.causal else block
    return mask


SCORES = {
    "plain": Score(0.3),
    "soft cap": Score(0.3, softcap=2.0),
    "sinks": Score(0.3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, 3.0], dtype=torch.float64)),
    "window of 1": Score(0.3, window=1),
    "window of 4": Score(0.3, window=4),
    "window of 25": Score(0.3, window=25),
    "window that never bites": Score(0.3, window=1000),
    "all": Score(0.3, softcap=1.5, window=9, sinks=torch.arange(6, dtype=torch.float64)),
}


def expected_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row: Row, score: Score
) -> torch.Tensor:
    """By the whole matrix of scores, as the layer's definition says: [1, N, Hq, D]."""
    s = score.scale * q @ k.repeat_interleave(3, dim=1).transpose(2, 3)
    if score.softcap is not None:
        s = score.softcap * torch.tanh(s / score.softcap)
    seen = torch.zeros(len(row), len(row), dtype=torch.bool)
    for position, path in enumerate(ancestors(row)):
        seen[position, path[-score.window :] if score.window else path] = True
    s = s.masked_fill(~seen.to(s.device), float("-inf"))
    if score.sinks is not None:
        s = torch.cat([s, score.sinks.view(1, -1, 1, 1).expand(1, -1, len(row), 1)], dim=-1)
    p = torch.softmax(s, dim=-1)[..., : len(row)]
    return (p @ v.repeat_interleave(3, dim=1)).transpose(1, 2)


@pytest.mark.parametrize("kernel", ["cpu kernel", "plain"])
@pytest.mark.parametrize("kind", SCORES)
def test_equals_attention_by_definition(
    kernel: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six heads over two, four trees; also where values are narrower than keys (no kernel)."""
    if kernel == "plain":
        monkeypatch.setattr(attention, "has_kernel", lambda q, v: False)
    score = SCORES[kind]
    (row,) = plant(agent_calls(0), 10_000)
    n, generator = len(row), torch.Generator().manual_seed(0)

    def leaf(heads: int, width: int = 8) -> torch.Tensor:
        x = torch.randn(1, heads, n, width, dtype=torch.float64, generator=generator)
        return x.requires_grad_()

    q, k, v = leaf(6), leaf(2), leaf(2, 8 if kernel == "cpu kernel" else 5)
    ours = tree_row(row).attend(0, q, k, v, score)
    weights = torch.randn(ours.shape, dtype=torch.float64, generator=generator)
    gradients = torch.autograd.grad((ours * weights).sum(), (q, k, v))

    full = expected_attention(q, k, v, row, score)
    expected = torch.autograd.grad((full * weights).sum(), (q, k, v))
    assert (ours - full).abs().max() < 1e-12
    for got, want in zip(gradients, expected, strict=True):
        assert (got - want).abs().max() < 1e-12


@pytest.mark.parametrize("kind", ["plain", "all"])
def test_half_precision_is_summed_up_in_float32(kind: str) -> None:
    """||out - ref|| / ||ref|| of bfloat16 operands lies between 1e-3 and 1e-2."""
    (row,) = plant(agent_calls(0), 10_000)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, len(row), 8, generator=generator) for h in (6, 2, 2))
    half = [x.bfloat16().requires_grad_() for x in (q, k, v)]
    ours = tree_row(row).attend(0, half[0], half[1], half[2], SCORES[kind])
    gradients = torch.autograd.grad(ours.float().square().sum(), half)
    exact = [x.detach().double().requires_grad_() for x in half]
    full = expected_attention(exact[0], exact[1], exact[2], row, SCORES[kind])
    expected = torch.autograd.grad(full.square().sum(), exact)
    for got, want in zip((ours, *gradients), (full, *expected), strict=True):
        assert got.dtype == torch.bfloat16
        apart = (got.detach().double() - want.detach()).norm()
        assert float(apart / want.detach().norm()) < 1e-2


def test_every_position_sees_its_own_depth_of_ancestors() -> None:
    (row,) = plant(agent_calls(1), 10_000)
    seen = tree_mask(tree_row(row), len(row)).sum(1)
    assert seen.tolist() == (row.depth + 1).tolist()


def test_attention_that_rows_do_not_carry_is_refused() -> None:
    x = torch.zeros(1, 1, 1, 1)
    with pytest.raises(BaseModelError, match="attention of Identity uses position_bias"):
        rows.attend(torch.nn.Identity(), x, x, x, None, 1.0, position_bias=x)
