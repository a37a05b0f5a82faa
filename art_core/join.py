"""The two halves of a call brought together: what the client saw, and what the server kept.

In: trajectories, and the backend's token records. Out: their calls with the token side filled in,
found by record id and compared by message; what has only one half says which is missing. It leaves
out how a client learns a record id (`art_langgraph.callbacks`, `exchange`).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from art_core.calls import ModelCall
from art_core.records import RecordStore, TokenRecord
from art_core.said import same_message
from art_core.trajectories import Trajectory


def join_records(trajectories: Iterable[Trajectory], records: RecordStore) -> None:
    """Complete the calls of `trajectories`, in place. Doing it twice changes nothing.

    A call without ids gets those of its record. Where the record is missing, not whole, or says
    something else, the call stays context, with its cause. An answer that comes a second time, in
    whichever trajectory, is a replay. What the server answered in a rollout and nobody there saw
    is added as an "orphan".
    """
    seen: dict[tuple[str, int], float] = {}
    for trajectory in {id(t): t for t in trajectories}.values():
        wanting = [call.record_id for call in trajectory.calls if _wants_tokens(call)]
        found = _by_id(records.get(wanting)) if wanting else {}
        calls = [
            _joined(call, found.get(call.record_id, ())) if _wants_tokens(call) else call
            for call in trajectory.calls
        ]
        trajectory.calls = [_unless_replay(call, seen) for call in calls]
        _add_orphans(trajectory, records)


def _wants_tokens(call: ModelCall) -> bool:
    """True if the server may know tokens that the client does not."""
    is_open = call.error is None and call.left_out in (None, "no server record")
    return is_open and call.sampled_ids is None and not call.record_id.startswith("local-")


def _by_id(found: Mapping[tuple[str, int], TokenRecord]) -> dict[str, list[TokenRecord]]:
    records: dict[str, list[TokenRecord]] = {}
    for (record_id, _), record in sorted(found.items()):
        records.setdefault(record_id, []).append(record)
    return records


def _joined(call: ModelCall, records: Sequence[TokenRecord]) -> ModelCall:
    """The call with the tokens of its record, or with the reason why it has none."""
    if not records:
        return replace(call, left_out="no server record")
    # LangChain hands several answers on in the order they came, without their index.
    record = next((r for r in records if same_message(r.message, call.message)), None)
    if record is None:
        what = f"the graph was given another answer than record {call.record_id!r} holds"
        return replace(call, left_out="mismatch", error=what)
    if not record.complete:
        what = f"record {call.record_id!r} broke off before its end"
        return replace(call, left_out="broken answer", error=what)
    differs = _first_difference(call, record)
    if differs is not None:
        what = f"message {differs} of the request is not the one of record {call.record_id!r}"
        return replace(call, left_out="mismatch", error=what)
    return replace(
        call.with_tokens(
            prompt_ids=record.prompt_ids,
            sampled_ids=record.sampled_ids,
            logprobs=record.logprobs,
            sampling=record.sampling,
            step=record.step,
        ),
        model=record.model,
        left_out=None,
    )


def _first_difference(call: ModelCall, record: TokenRecord) -> int | None:
    """Index of the first message of the request that the server did not get; None if all did."""
    sent, got = call.messages, record.request_messages
    for index, (one, other) in enumerate(zip(sent, got, strict=False)):
        if not same_message(one, other):
            return index
    return None if len(sent) == len(got) else min(len(sent), len(got))


def _unless_replay(call: ModelCall, seen: dict[tuple[str, int], float]) -> ModelCall:
    """The call, unless another one, begun at another time, had the same answer.

    (A trajectory may be given twice, as it is or copied: that is one call.)
    """
    is_first = seen.setdefault(call.key, call.started) == call.started
    return call if is_first or call.left_out is not None else replace(call, left_out="cache replay")


# --- what only the server knows


def _add_orphans(trajectory: Trajectory, records: RecordStore) -> None:
    """Add what the server answered in this rollout, whole, and the client did not see.

    Rollouts that are played again under the same key have the same ids: what was answered before
    this one began is another one's.
    """
    if trajectory.rollout_id is None:
        return
    known = {call.record_id for call in trajectory.calls}
    begun = min([trajectory.start_time, *(call.started for call in trajectory.calls)])
    unseen = [
        record_id
        for record_id in records.answered_in(trajectory.rollout_id, after=begun)
        if record_id not in known
    ]
    if not unseen:
        return
    for record in records.get(unseen).values():
        if not _adopted(trajectory, record):
            insort(trajectory.calls, _orphan(record), key=lambda call: call.started)


def _adopted(trajectory: Trajectory, record: TokenRecord) -> bool:
    """True if a call that broke on the client's side turns out to be this record's."""
    for index, call in enumerate(trajectory.calls):
        is_nameless = call.error is not None and call.record_id.startswith("local-")
        if is_nameless and _first_difference(call, record) is None:
            trajectory.calls[index] = replace(call, record_id=record.record_id)
            return True
    return False


def _orphan(record: TokenRecord) -> ModelCall:
    request = {"model": record.model, "messages": record.request_messages}
    return ModelCall(
        record_id=record.record_id,
        model=record.model,
        step=record.step,
        request=request | ({"tools": record.tools} if record.tools else {}),
        message=record.message,
        finish_reason=record.finish_reason,
        choice_index=record.choice_index,
        sampling=record.sampling,
        started=record.created,
        ended=record.created,
        left_out="orphan",
    )
