"""Tree attention against torch's own attention with the tree's full mask."""

import numpy as np
import pytest
import torch

from art_core.batch.forest import Sample, plant
from art_core.nn import attention
from art_core.nn.attention import TreeRow
from art_core.training.logprobs import tree_row


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
    for b in row.blocks:
        shape = (b.q1 - b.q0, b.k1 - b.k0)
        block = torch.ones(shape, dtype=torch.bool)
        mask[b.q0 : b.q1, b.k0 : b.k1] |= block.tril() if b.causal else block
    return mask


@pytest.mark.parametrize("kernel", ["cpu kernel", "plain"])
def test_equals_full_mask_attention(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel == "plain":  # the way taken off the CPU, tried here on the CPU
        monkeypatch.setattr(attention, "_has_kernel", lambda device: False)
    (row,) = plant(agent_calls(0), 10_000)
    tree, n = tree_row(row), len(row)
    generator = torch.Generator().manual_seed(0)

    def leaf(heads: int) -> torch.Tensor:
        x = torch.randn(1, heads, n, 8, dtype=torch.float64, generator=generator)
        return x.requires_grad_()

    q, k, v = leaf(6), leaf(2), leaf(2)
    ours = tree.attend(0, q, k, v, 0.3)
    weights = torch.randn(ours.shape, dtype=torch.float64, generator=generator)
    gradients = torch.autograd.grad((ours * weights).sum(), (q, k, v))

    full = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=tree_mask(tree, n), scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    expected = torch.autograd.grad((full * weights).sum(), (q, k, v))
    assert (ours - full).abs().max() < 1e-12
    for got, want in zip(gradients, expected, strict=True):
        assert (got - want).abs().max() < 1e-12


def test_every_position_sees_its_own_depth_of_ancestors() -> None:
    (row,) = plant(agent_calls(1), 10_000)
    seen = tree_mask(tree_row(row), len(row)).sum(1)
    assert seen.tolist() == (row.depth + 1).tolist()


def test_sliding_window_is_refused() -> None:
    from art_core.errors import BaseModelError

    with pytest.raises(BaseModelError, match="sliding_window"):
        attention.attend(
            torch.nn.Identity(),
            torch.zeros(1, 1, 1, 1),
            torch.zeros(1, 1, 1, 1),
            torch.zeros(1, 1, 1, 1),
            None,
            1.0,
            sliding_window=128,
        )
