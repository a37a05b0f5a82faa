"""What the environment said to a trajectory's calls, found in their ids.

In: the calls of one trajectory. Out: for each, where in its prompt begins what it read for the
first time: what follows the prompt and the sample of the call that it goes on from. So a tool's
result, a user's next message and the template's own tokens around them are observations, once each;
a first prompt, a sub-agent's and one whose history was trimmed or summed up are none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from art_core.batch.leaves import common_prefix
from art_core.batch.sample import Sample
from art_core.calls import Ids, ModelCall
from art_core.prefixes import Prefixes


def observations(calls: Sequence[ModelCall]) -> list[int | None]:
    """For each call the first id of its prompt that is an observation; None: it has none.

    Args:
        calls: of one trajectory in the order they were made, with ids.
    """
    whole, known = Prefixes(len(calls)), [_whole(call) for call in calls]
    heard: dict[int, list[Ids]] = defaultdict(list)  # by the call that was gone on from
    found: list[int | None] = []
    for place, call in enumerate(calls):
        prompt = _prompt(call)
        before = [i for i in whole.of(prompt).tolist() if _begins(prompt, known[i])]
        whole.add(place, known[place])
        if not before:
            found.append(None)
            continue
        last = max(before, key=lambda i: len(known[i]))
        twins = (common_prefix(prompt, other) for other in heard[last])
        first = max(len(known[last]), *twins, 0)
        heard[last].append(prompt)
        found.append(first if first < len(prompt) else None)
    return found


def observed_sample(call: ModelCall, first: int, *, index: int, trajectory: int) -> Sample:
    """What `call` read from id `first` on, as a sample of the environment's.

    It lies on the call's own path, so that it adds no position.
    """
    prompt = _prompt(call)
    return Sample(
        prompt_ids=prompt[:first],
        sampled_ids=prompt[first:],
        logprobs=np.full(len(prompt) - first, np.nan, np.float32),
        advantage=0.0,
        weight=0.0,
        temperature=1.0,
        distorted=False,
        call=index,
        trajectory=trajectory,
        observed=True,
    )


def _prompt(call: ModelCall) -> Ids:
    assert call.prompt_ids is not None
    return call.prompt_ids


def _whole(call: ModelCall) -> Ids:
    assert call.sampled_ids is not None
    return np.concatenate([_prompt(call), call.sampled_ids])


def _begins(longer: Ids, start: Ids) -> bool:
    return np.array_equal(longer[: len(start)], start)
