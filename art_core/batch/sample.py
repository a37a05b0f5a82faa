"""A `Sample`: one trained call as the loss needs it, or what a call was told.

In: a call that can be trained, its advantage, and where it stands in the step. Out: its ids, the
sampler's logprobs and its share of the loss. Left out: whether it may be trained (candidates.py),
and where it is computed (forest.py).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from art_core.calls import Ids, Logprobs, ModelCall


class Sample(NamedTuple):
    """One trained call: what it read, what it sampled, and what that was worth.

    A tuple, because a step makes thousands: a frozen dataclass takes five times as long.
    """

    prompt_ids: Ids
    """[P], P >= 1."""
    sampled_ids: Ids
    """[S], S >= 1."""
    logprobs: Logprobs
    """[S] of the sampler; NaN where nothing was sampled: in an answer that was written, which only
    supervised steps take, and in what was observed."""
    advantage: float
    weight: float
    """Share of each of its entries in the step's loss; see `weights.entry_weights`."""
    temperature: float
    distorted: bool
    """True: the sampler's logprobs are not those of softmax(logits / temperature)."""
    call: int
    """Index over the step."""
    trajectory: int
    """Index over the step."""
    staleness: int = 0
    """Steps that the policy being trained is ahead of the one that sampled."""
    observed: bool = False
    """True: the environment said it, so that the policy loss does not look at it; see
    `TrainConfig.observation_coef`."""

    @classmethod
    def of(
        cls,
        call: ModelCall,
        *,
        advantage: float,
        weight: float,
        index: int,
        trajectory: int,
        staleness: int = 0,
    ) -> Sample:
        """The sample that a trainable call is; `index` and `trajectory` count over the step."""
        assert call.prompt_ids is not None
        assert call.sampled_ids is not None
        assert call.logprobs is not None
        return cls(
            prompt_ids=call.prompt_ids,
            sampled_ids=call.sampled_ids,
            logprobs=call.logprobs,
            advantage=advantage,
            weight=weight,
            temperature=call.sampling.temperature,
            distorted=call.sampling.distorted,
            call=index,
            trajectory=trajectory,
            staleness=staleness,
        )

    @property
    def path(self) -> Ids:
        """[P + S - 1] ids that must be computed: the last sampled token predicts nothing."""
        return np.concatenate([self.prompt_ids, self.sampled_ids[:-1]])

    @property
    def positions(self) -> int:
        """P + S - 1."""
        return len(self.prompt_ids) + len(self.sampled_ids) - 1
