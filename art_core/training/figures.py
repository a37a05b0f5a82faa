"""What is logged of a train call: figures of its rows put together, and of its updates.

In: the loss's parts of each row, and the rows. Out: numbers by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from art_core.training.known import KnownRow
from art_core.training.loss import LossParts


def figures_of_call(each: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of a train call, from those of its updates: means, counts, extremes of the ratio."""
    mean = _means(each)
    return {
        **mean,
        "ratio_min": min(f["ratio_min"] for f in each),
        "ratio_max": max(f["ratio_max"] for f in each),
        "tokens_beyond": sum(f["tokens_beyond"] for f in each),
        "tokens_observed": sum(f["tokens_observed"] for f in each),
        # Before the first update `old` is what the sampler said, or `kl_sampler` is there.
        "kl_sampler": mean.get("kl_sampler", each[0]["kl"]),
        "updates": len(each),
    }


def figures_of_update(parts: Sequence[LossParts], rows: Sequence[KnownRow]) -> dict[str, float]:
    """Of an update: the loss as it was differentiated, means of the rest, extremes of the ratio."""
    # Its sum is 1 unless a constant divides the loss.
    weight = sum(float(row.row.entries.weight[row.own].sum()) for row in rows)
    sums = {
        name: math.fsum(float(part.sums[name]) for part in parts) / weight for name in parts[0].sums
    }
    heard = sum(int((~row.own).sum()) for row in rows)
    if heard:
        share = sum(float(row.row.entries.weight[~row.own].sum()) for row in rows)
        sums["observation_loss"] = (
            math.fsum(float(part.observed) for part in parts if part.observed is not None) / share
        )
    return {
        "tokens_observed": heard,
        "loss": math.fsum(float(part.loss) for part in parts),
        **sums,
        "ratio_min": min(float(part.ratio_min) for part in parts),
        "ratio_max": max(float(part.ratio_max) for part in parts),
        "tokens_beyond": sum(int(part.beyond) for part in parts),
    }


def _means(each: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each figure over the updates that have it."""
    found: dict[str, list[float]] = {}
    for figures in each:
        for key, value in figures.items():
            found.setdefault(key, []).append(value)
    return {key: math.fsum(values) / len(values) for key, values in found.items()}
