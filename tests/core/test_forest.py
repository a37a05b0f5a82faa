"""Token forests against a computation of every sequence alone."""

import numpy as np
import pytest
import torch

from art_core.batch.forest import Row, plant
from art_core.batch.leaves import common_prefix
from art_core.batch.sample import Sample
from art_core.errors import GroupError
from art_core.training.policy_losses import clipped
from tests.core.samples import ancestors, make_sample, random_calls


def paths(row: Row) -> set[tuple[int, ...]]:
    """The ids on the way to every position."""
    return {tuple(row.ids[path].tolist()) for path in ancestors(row)}


def check(samples: list[Sample], rows: list[Row]) -> None:
    """Every entry of every call stands once, and reads exactly its own context."""
    found = []
    for row in rows:
        seen = ancestors(row)
        assert [len(path) - 1 for path in seen] == row.depth.tolist()
        assert len(paths(row)) == len(row), "a position was computed twice in one row"
        last_of_call: dict[int, int] = {}
        for i in range(len(row.entries)):
            call = int(row.entries.call[i])
            token = last_of_call.get(call, 0)
            last_of_call[call] = token + 1
            sample = samples[call]
            context = [*sample.prompt_ids.tolist(), *sample.sampled_ids[:token].tolist()]
            assert row.ids[seen[row.entries.position[i]]].tolist() == context
            assert row.entries.target[i] == sample.sampled_ids[token]
            assert row.entries.logprob[i] == sample.logprobs[token]
            for name in (
                "advantage", "weight", "temperature", "distorted", "trajectory", "staleness",
            ):  # fmt: skip
                assert getattr(row.entries, name)[i] == getattr(sample, name)
            found.append((call, token))
    everything = [(s.call, t) for s in samples for t in range(len(s.sampled_ids))]
    assert sorted(found) == everything


@pytest.mark.parametrize("seed", range(6))
def test_random_forests_equal_every_sequence_alone(seed: int) -> None:
    samples = random_calls(seed)
    (row,) = plant(samples, 10_000)
    check(samples, [row])
    # The distinct prefixes of all paths, counted by hand, are the positions to compute.
    prefixes = {tuple(s.path[: n + 1].tolist()) for s in samples for n in range(len(s.path))}
    assert len(row) == len(prefixes)
    assert paths(row) == prefixes


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("max_tokens", [12, 20, 60, 10_000])
def test_ids_alone_decide_what_is_shared(seed: int, max_tokens: int) -> None:
    """Paths over three ids meet by chance all the time; some are equal, some begin others."""
    rng = np.random.default_rng(seed)
    samples: list[Sample] = []
    for call in range(40):
        prompt = rng.integers(0, 3, int(rng.integers(1, 9))).tolist()
        sampled = rng.integers(0, 3, int(rng.integers(1, 5))).tolist()
        if samples and rng.random() < 0.4:  # goes on from, begins, or is, an earlier one
            earlier = samples[int(rng.integers(len(samples)))]
            whole = [*earlier.prompt_ids.tolist(), *earlier.sampled_ids.tolist()]
            prompt = whole[: int(rng.integers(1, min(len(whole), 9) + 1))]
        samples.append(make_sample(prompt, sampled, call=call, trajectory=call // 3))
    rows = plant(samples, max_tokens)
    check(samples, rows)
    prefixes = {tuple(s.path[: n + 1].tolist()) for s in samples for n in range(len(s.path))}
    assert set().union(*map(paths, rows)) == prefixes
    assert all(len(row) <= max_tokens for row in rows)
    if max_tokens > 1000:
        assert [len(row) for row in rows] == [len(prefixes)]


def test_a_million_tokens_are_planted_like_any_other() -> None:
    """A trajectory of 200 calls, 5000 ids more each; one call leaves it at the end's beginning."""
    ids = np.random.default_rng(0).integers(0, 50_000, 1_000_001).astype(np.int32)
    calls = [
        make_sample(ids[: 5000 * (i + 1) - 9], ids[5000 * (i + 1) - 9 : 5000 * (i + 1)], call=i)
        for i in range(200)
    ]
    branch = make_sample([*ids[:500_000], 50_000], [1, 2], call=200)
    (row,) = plant([*calls, branch], 1_000_100)
    assert len(row) == 999_999 + 2
    assert row.segments.start.tolist() == [0, 500_000, 999_999]
    assert len(row.entries) == 200 * 9 + 2
    last = row.entries.call == 199
    assert row.depth[row.entries.position[last]].tolist() == list(range(999_990, 999_999))


@pytest.mark.parametrize("max_tokens", [24, 29, 37, 45])
def test_rows_respect_their_limit_and_repeat_what_is_shared(max_tokens: int) -> None:
    samples = random_calls(7)
    rows = plant(samples, max_tokens)
    assert len(rows) > 1
    assert all(len(row) <= max_tokens for row in rows)
    check(samples, rows)


def test_a_row_is_filled_to_the_last_position() -> None:
    """Three paths of 2 + 2 positions over a stem of 2: 4, 6 and 8 positions."""
    samples = [make_sample([1, 2, 10 + i], [20, 30], call=i) for i in range(3)]
    assert [len(row) for row in plant(samples, 8)] == [8]
    assert [len(row) for row in plant(samples, 7)] == [6, 4]  # the stem [1, 2] is computed again
    assert plant(samples, 7)[1].ids.tolist() == [1, 2, 12, 20]


def test_branches_exactly_where_ids_differ() -> None:
    """[1 2 3 4] and [1 2 5]: one stem of two, then two segments below it."""
    (row,) = plant([make_sample([1, 2, 3, 4], [9]), make_sample([1, 2, 5], [9], call=1)], 100)
    assert row.ids.tolist() == [1, 2, 3, 4, 5]
    assert row.depth.tolist() == [0, 1, 2, 3, 2]
    assert row.segments.start.tolist() == [0, 2, 4]
    assert row.segments.end.tolist() == [2, 4, 5]
    assert row.segments.subtree_end.tolist() == [5, 4, 5]
    assert row.entries.position.tolist() == [3, 4]


def test_a_prefix_of_another_call_adds_nothing() -> None:
    """The second call of an agent goes on from prompt and sample of the first."""
    first = make_sample([1, 2], [3, 4], call=0, trajectory=0)
    second = make_sample([1, 2, 3, 4, 5], [6], call=1, trajectory=0)
    (row,) = plant([second, first], 100)
    assert row.ids.tolist() == [1, 2, 3, 4, 5]
    by_call = dict(zip(row.entries.call.tolist(), row.entries.position.tolist(), strict=True))
    assert row.entries.position[row.entries.call == 0].tolist() == [1, 2]  # predict 3 and 4
    assert by_call[1] == 4


def test_nested_branches_lie_below_their_stems() -> None:
    """Stem 1, below it 2 with 3 and 4 below, and 5: subtrees end where their last leaf does."""
    prompts = [[1, 2, 3], [1, 2, 4], [1, 5]]
    (row,) = plant([make_sample(p, [0], call=i) for i, p in enumerate(prompts)], 100)
    assert row.ids.tolist() == [1, 2, 3, 4, 5]
    assert row.segments.start.tolist() == [0, 1, 2, 3, 4]
    assert row.segments.subtree_end.tolist() == [5, 4, 3, 4, 5]


def test_two_trees_in_a_row_see_nothing_of_each_other() -> None:
    (row,) = plant([make_sample([1, 2], [0]), make_sample([3, 2], [0], call=1)], 100)
    assert row.ids.tolist() == [1, 2, 3, 2]
    assert row.depth.tolist() == [0, 1, 0, 1]
    assert ancestors(row) == [[0], [0, 1], [2], [2, 3]]


def test_identical_calls_keep_their_samples() -> None:
    """Four calls of one prompt that sampled b, b, b, t: one position, four entries."""
    b, t = 7, 8
    calls = [make_sample([1, 2], [x], call=i) for i, x in enumerate([b, b, b, t])]
    (row,) = plant(calls, 100)
    assert row.ids.tolist() == [1, 2]
    assert row.entries.position.tolist() == [1, 1, 1, 1]
    assert sorted(row.entries.target.tolist()) == [b, b, b, t]


def test_coefficients_of_samples_on_one_position() -> None:
    """DESIGN section 2: rewards 1, 1, 1, 0 on answers b, b, b, t of one prompt, group mean .75.

    The objective's coefficients are .75 on log p(b) (three entries of .25) and -.75 on log p(t);
    merging the equal samples would give .25. On the toy of two tokens with logits (x, 0) and
    p(b) = p(t) = .5 that is d objective / dx = .75 * (1 - p(b)) + -.75 * -p(b) = .75.
    """
    b, t = 0, 1
    calls = [
        make_sample([5], [token], advantage=reward - 0.75, logprobs=[float(np.log(0.5))], call=i)
        for i, (token, reward) in enumerate([(b, 1.0), (b, 1.0), (b, 1.0), (t, 0.0)])
    ]
    (row,) = plant(calls, 100)
    x = torch.zeros((), dtype=torch.float64, requires_grad=True)
    table = torch.log_softmax(torch.stack([x, torch.zeros_like(x)]), 0)
    logprobs = table.expand(len(row), 2)[
        torch.from_numpy(row.entries.position), torch.from_numpy(row.entries.target)
    ].clone()
    logprobs.retain_grad()
    terms = clipped(
        logprobs,
        logprobs.detach(),  # on-policy: every ratio is 1
        torch.from_numpy(row.entries.advantage),
        low=0.2,
        high=0.2,
    )
    (torch.from_numpy(row.entries.weight) * terms.loss).sum().backward()
    assert logprobs.grad is not None
    assert x.grad is not None
    targets = row.entries.target
    assert -logprobs.grad[torch.from_numpy(targets == b)].sum() == pytest.approx(0.75, abs=1e-12)
    assert -logprobs.grad[torch.from_numpy(targets == t)].sum() == pytest.approx(-0.75, abs=1e-12)
    assert -x.grad == pytest.approx(0.75, abs=1e-7)


def test_a_call_too_long_for_a_row_is_named_with_its_numbers() -> None:
    calls = [
        make_sample([1], [2], call=0),
        make_sample(list(range(14)), [1, 2, 3, 4], call=1, trajectory=3),  # 14 + 4 - 1 positions
    ]
    with pytest.raises(
        GroupError, match=r"call 1 of trajectory 3 .* got 17, expected at most .*=16 tokens"
    ):
        plant(calls, 16)
    assert [len(row) for row in plant(calls, 17)] == [17, 1]


def test_nothing_makes_no_rows() -> None:
    assert plant([], 100) == []


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [([], [], 0), ([1], [], 0), ([1, 2], [1, 2], 2), ([1, 2], [1, 2, 3], 2), ([1, 2], [3, 2], 0)],
)
def test_common_prefix(a: list[int], b: list[int], expected: int) -> None:
    assert common_prefix(np.array(a, np.int32), np.array(b, np.int32)) == expected


def test_ids_share_a_stem_whatever_their_bytes_are() -> None:
    """Ids on both sides of 255 and 65535, where their lowest bytes are the same."""
    prompts = [[256, 70_000], [256, 1], [0, 70_000], [256, 70_001], [65_536, 1], [256, 257]]
    samples = [make_sample(p, [0], call=i) for i, p in enumerate(prompts)]
    (row,) = plant(samples, 100)
    check(samples, [row])
    assert len(row) == 3 + 6  # roots 256, 0 and 65,536
