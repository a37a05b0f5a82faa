"""What a trajectory must agree with: the server's log, its token records, and the token trees.

In: a trajectory, and what the endpoint says of its rollout. Out: nothing, or a failed assertion.
Also small views of a trajectory by which tests say what they expect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from art_core.batch.forest import Row, plant
from art_core.batch.sample import Sample
from art_core.calls import ModelCall
from art_core.records import TokenRecord
from art_core.trajectories import Trajectory


def prove(trajectory: Trajectory, requests: int, records: Sequence[TokenRecord]) -> None:
    """Fail unless each request that came is one call, and each whole token record one sample.

    Args:
        requests: how many came to the server in this rollout's name.
        records: the rollout's token records on the server.
    """
    assert "incomplete" not in trajectory.metadata, trajectory.metadata["incomplete"]
    calls = trajectory.calls
    assert len(calls) == requests
    assert len({call.key for call in calls}) == len(calls)
    assert sum(not call.error for call in calls) == sum(record.complete for record in records)
    found = {record.key: record for record in records}
    for call in calls:
        _prove_origin(call)
        if call.error is None:
            _prove_call(call, found.pop(call.key))
        else:
            assert not call.trainable
            found.pop(call.key, None)  # an answer left early, which the client still saw the id of
    unseen = sum(call.error is not None for call in calls)
    assert not any(record.complete for record in found.values()), "an answer was lost"
    assert len(found) <= unseen, "the server began more answers than calls broke off"
    trained = [call for call in calls if call.trainable]
    if trained:
        _prove_forest(trained)


def _prove_origin(call: ModelCall) -> None:
    origin = call.origin
    assert origin.run_id is not None
    if origin.node is not None:
        last = str(origin.namespace).split("|")[-1]
        assert last.partition(":")[0] == origin.node
        assert origin.task_path is not None
        assert origin.graph_step is not None


def _prove_call(call: ModelCall, record: TokenRecord) -> None:
    assert record.complete
    np.testing.assert_array_equal(call.prompt_ids, record.prompt_ids)
    np.testing.assert_array_equal(call.sampled_ids, record.sampled_ids)
    np.testing.assert_array_equal(call.logprobs, record.logprobs)
    assert (call.model, call.step) == (record.model, record.step)
    assert _shown(call.message) == _shown(record.message)
    assert call.messages == record.request_messages
    assert call.sampling == record.sampling
    assert call.finish_reason == record.finish_reason
    assert call.trainable


def _shown(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what is empty: a stream opens with content "" where a body has null."""
    return {name: value for name, value in message.items() if value not in (None, "")}


def _prove_forest(calls: Sequence[ModelCall]) -> None:
    """The trees hold every prefix once, and one entry for each sampled token of each call."""
    samples = [
        Sample.of(call, advantage=1.0, weight=1.0, index=index, trajectory=0)
        for index, call in enumerate(calls)
    ]
    (row,) = plant(samples, max_tokens=1_000_000)
    paths = [tuple(sample.path.tolist()) for sample in samples]
    prefixes = {path[:end] for path in paths for end in range(1, len(path) + 1)}
    assert len(row) == len(prefixes)
    assert len(row.entries) == sum(len(sample.sampled_ids) for sample in samples)
    for index, sample in enumerate(samples):
        mine = row.entries.call == index
        np.testing.assert_array_equal(row.entries.target[mine], sample.sampled_ids)
        last = int(row.entries.position[mine][-1])
        np.testing.assert_array_equal(_above(row, last), sample.path)


def _above(row: Row, position: int) -> Any:
    """The ids that a position sees: those of every segment that it descends from."""
    segments = row.segments
    over = (segments.start <= position) & (position < segments.subtree_end)
    spans = zip(segments.start[over], segments.end[over], strict=True)
    return np.concatenate([row.ids[start : min(end, position + 1)] for start, end in spans])


# --- views


def said(call: ModelCall) -> str:
    """What the policy sampled, without the end of its turn (`ByteTokenizer`)."""
    assert call.sampled_ids is not None
    return bytes(i for i in call.sampled_ids.tolist() if i < 256).decode()


def histories(trajectory: Trajectory) -> list[list[str]]:
    """Conversations as training sees them, sorted: calls whose prompts extend each other by ids.

    A call goes on from the longest prompt and sample that its own prompt begins with.
    """
    chains: list[list[ModelCall]] = []
    for call in trajectory.calls:
        if not call.trainable:
            continue
        before = [chain for chain in chains if _goes_on(call, chain[-1])]
        if before:
            max(before, key=lambda chain: len(_whole(chain[-1]))).append(call)
        else:
            chains.append([call])
    return sorted([said(call) for call in chain] for chain in chains)


def origins(trajectory: Trajectory, *names: str) -> list[tuple[Any, ...]]:
    """The named parts of each call's origin, in the order of calls."""
    return [tuple(getattr(c.origin, name) for name in names) for c in trajectory.calls]


def levels(call: ModelCall) -> list[str]:
    """The nodes that a call is inside of, outermost first; their tasks' ids left out.

    LangGraph numbers the second and later graphs that one task calls: "boss:<id>|1|worker:<id>".
    """
    parts = str(call.origin.namespace).split("|")
    return [part.partition(":")[0] for part in parts if not part.isdigit()]


def _whole(call: ModelCall) -> list[int]:
    assert call.prompt_ids is not None
    assert call.sampled_ids is not None
    return [*call.prompt_ids.tolist(), *call.sampled_ids.tolist()]


def _goes_on(call: ModelCall, before: ModelCall) -> bool:
    assert call.prompt_ids is not None
    whole = _whole(before)
    return bool(call.prompt_ids[: len(whole)].tolist() == whole)
