"""FlexAttention over trees on a GPU, against the same attention by definition in float64."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="art-langgraph[train] is not installed")

import torch

from art_core.batch.forest import Row, plant
from art_core.nn import flex, gpu_pieces
from art_core.nn.gpu_plan import LONG
from art_core.nn.rows import Score
from art_core.training.logprobs import tree_row
from tests.core.samples import make_sample, random_calls
from tests.core.test_attention import SCORES, expected_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # torch 2.11 as it compiles Flex
]

FLOAT32, BFLOAT16 = 1e-5, 2e-2
"""||out - ref|| / ||ref||: float32 products lie far under 1e-3, bfloat16 between 1e-3 and 1e-2."""


def big_row() -> Row:
    """Trees of several hundred positions: blocks of every kind."""
    samples = random_calls(0, vocab=3, groups=40)
    (row,) = plant(samples, 100_000)
    return row


def draws(n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        x = torch.randn(1, heads, n, 64, generator=generator, device="cuda", dtype=torch.float64)
        return x.to(dtype).requires_grad_()

    return draw(6), draw(2), draw(2)


def distance(got: torch.Tensor, want: torch.Tensor, least: float = 0.0) -> float:
    """least: a norm to compare with where `want` is all but zero."""
    got, want = got.detach().double(), want.detach()
    return float((got - want).norm()) / max(float(want.norm()), least)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", SCORES)
def test_flex_equals_the_definition(kind: str, dtype: torch.dtype) -> None:
    plain = SCORES[kind]
    sinks = None if plain.sinks is None else plain.sinks.to("cuda", dtype)
    score = Score(plain.scale, plain.softcap, plain.window, sinks)
    row = big_row()
    q, k, v = draws(len(row), dtype)
    got = tree_row(row).attend(0, q, k, v, score)
    weights = torch.randn(got.shape, device="cuda", dtype=dtype)
    gradients = torch.autograd.grad((got * weights).sum(), (q, k, v))

    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    sinks = None if sinks is None else sinks.double()
    exact_score = Score(score.scale, score.softcap, score.window, sinks)
    full = expected_attention(exact[0], exact[1], exact[2], row, exact_score)
    expected = torch.autograd.grad((full * weights.double()).sum(), exact)
    tolerance = FLOAT32 if dtype == torch.float32 else BFLOAT16
    assert distance(got, full) < tolerance
    # With a window of 1 the gradients of q and k are 0: terms of the size of `weights` cancel out.
    least = float(weights.norm()) if score.window == 1 else 0.0
    for mine, theirs in zip(gradients, expected, strict=True):
        assert distance(mine, theirs, least) < tolerance


def test_blocks_cover_what_is_seen() -> None:
    """The block lists, made of segments alone, say what the N x N mask says."""
    row = big_row()
    tree = tree_row(row)
    mask = flex.mask({}, tree.visible_until, tree.depth, None, torch.device("cuda"))
    n = mask.seq_lengths[0]
    place = torch.arange(n, device="cuda")
    seen = mask.mask_mod(0, 0, place[:, None], place[None, :])  # type: ignore[arg-type]  # broadcast
    blocks = seen.view(n // flex.BLOCK, flex.BLOCK, -1, flex.BLOCK)
    some, whole = blocks.any(3).any(1), blocks.all(3).all(1)
    assert (mask.full_kv_num_blocks[0, 0] == whole.sum(1)).all()  # type: ignore[index]  # there
    assert (mask.kv_num_blocks[0, 0] >= (some & ~whole).sum(1)).all()
    assert int(seen[: len(row)].sum()) == int((row.depth + 1).sum())


@pytest.mark.parametrize(("length", "calls"), [(300, 5), (1100, 6)])
def test_few_large_pieces_equal_the_definition(length: int, calls: int) -> None:
    """Two stems, long and short segments, a gap of a long one between short ones.

    Of a longer stem 76 keys are over that cuDNN does not plan.
    """
    stem, long = list(range(length)), list(range(2000, 2000 + LONG))
    tails = [[5] * 40, [6] * 700, long, [8] * 90, [9, 7] * 100]
    samples = [make_sample(stem + tail, [1]) for tail in tails]
    samples += [make_sample([11] * 500 + tail, [1]) for tail in ([1] * 64, [2] * 64)]
    (row,) = plant(samples, 100_000)
    tree = tree_row(row)
    assert tree._pieces is not None
    assert len(tree._pieces) == calls  # short, long, short; two stems
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        shape = (1, len(row), heads, 128)
        x = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        return x.transpose(1, 2).requires_grad_()

    q, k, v = draw(6), draw(2), draw(2)
    assert gpu_pieces.has_kernels(q, v)
    got = tree.attend(0, q, k, v, Score(0.2))
    weights = torch.randn(got.shape, device="cuda", dtype=torch.bfloat16)
    gradients = torch.autograd.grad((got * weights).sum(), (q, k, v))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    full = expected_attention(exact[0], exact[1], exact[2], row, Score(0.2))
    expected = torch.autograd.grad((full * weights.double()).sum(), exact)
    assert distance(got, full) < BFLOAT16
    for mine, theirs in zip(gradients, expected, strict=True):
        assert distance(mine, theirs) < BFLOAT16
