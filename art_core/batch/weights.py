"""From calls to loss weights: which share each sampled token has in a step's loss.

In: how many tokens each call sampled, and whose call it is. Out: one weight per call, that of each
of its tokens; the loss of a step is the weighted sum over its tokens, over all rows, however the
rows are cut. Calls without a token don't count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from art_core.algorithms import Aggregation


def entry_weights(
    lengths: Sequence[int],
    trajectories: Sequence[int],
    aggregation: Aggregation,
    *,
    horizon: int = 1,
) -> list[float]:
    """The share of each token of a call. But for "constant" they sum to 1 over all tokens.

    Args:
        lengths: sampled tokens of each call.
        trajectories: which trajectory each call belongs to.
        aggregation: "token" gives every token the same share, 1/N (DAPO, arXiv:2503.14476);
            "sequence" every call, its tokens share it (GRPO, arXiv:2402.03300; ART's default, whose
            weights 1.25 and .833333 for lengths 2 and 3 are these, times N); "rollout" every
            trajectory, all its calls' tokens share it; "constant" gives every token
            1 / (calls * horizon) (Dr. GRPO, arXiv:2503.20783), so that no length is favoured.
        horizon: tokens, for "constant".
    """
    total, calls = sum(lengths), sum(n > 0 for n in lengths)
    if aggregation == "rollout":
        tokens: Counter[int] = Counter()
        for n, trajectory in zip(lengths, trajectories, strict=True):
            tokens[trajectory] += n
        rollouts = sum(n > 0 for n in tokens.values())
        return [
            1.0 / (rollouts * tokens[t]) if n else 0.0
            for n, t in zip(lengths, trajectories, strict=True)
        ]
    if aggregation == "sequence":
        return [1.0 / (calls * n) if n else 0.0 for n in lengths]
    share = 1.0 / total if aggregation == "token" else 1.0 / (calls * horizon)
    return [share if n else 0.0 for n in lengths]
