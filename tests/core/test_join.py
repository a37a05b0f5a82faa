"""The client's half of a call joined with the server's; a missing half is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from art_core.calls import ModelCall, Sampling
from art_core.join import join_records
from art_core.records import RecordStore, TokenRecord
from art_core.trajectories import Trajectory

ASK = [{"role": "user", "content": "q"}]
SAID = {"role": "assistant", "content": "yes"}
ID, OTHER = "a" * 20, "b" * 20


def record(record_id: str = ID, **fields: Any) -> TokenRecord:
    """What the server kept: 2 prompt ids, 2 sampled ids, step 4."""
    given: dict[str, Any] = {
        "record_id": record_id,
        "choice_index": 0,
        "rollout_id": "r",
        "model": "agent",
        "step": 4,
        "prompt_ids": [1, 2],
        "sampled_ids": [3, 4],
        "logprobs": [-0.5, -0.25],
        "sampling": Sampling(temperature=0.7, seed=1),
        "finish_reason": "stop",
        "message": SAID,
        "request_messages": ASK,
        "tools": None,
        "created": 100.0,
        "complete": True,
    }
    return TokenRecord(**given | fields)


def seen(record_id: str = ID, **fields: Any) -> ModelCall:
    """What a callback saw of it."""
    given: dict[str, Any] = {
        "record_id": record_id,
        "model": "agent",
        "step": None,
        "request": {"model": "agent", "messages": ASK},
        "message": SAID,
        "finish_reason": "stop",
        "started": 100.0,
        "ended": 101.0,
    }
    return ModelCall(**given | fields)


def joined(calls: list[ModelCall], *records: TokenRecord, **fields: Any) -> Trajectory:
    store = RecordStore(None)
    store.put(records)
    trajectory = Trajectory(calls=calls, start_time=99.0, **fields)
    join_records([trajectory], store)
    before = repr(trajectory.calls)
    join_records([trajectory], store)
    assert repr(trajectory.calls) == before  # a second time changes nothing
    return trajectory


def test_a_call_gets_the_tokens_of_its_record() -> None:
    trajectory = joined([seen()], record())
    (call,) = trajectory.calls
    assert call.prompt_ids is not None
    assert call.sampled_ids is not None
    assert call.logprobs is not None
    assert (call.prompt_ids.tolist(), call.sampled_ids.tolist()) == ([1, 2], [3, 4])
    np.testing.assert_array_equal(call.logprobs, [-0.5, -0.25])
    assert (call.step, call.sampling.temperature, call.trainable) == (4, 0.7, True)
    assert trajectory.completeness.is_whole


def test_the_servers_half_is_missing() -> None:
    (call,) = joined([seen()]).calls
    assert (call.left_out, call.error, call.trainable) == ("no server record", None, False)


def test_the_clients_half_is_missing() -> None:
    """The server answered in this rollout, and nobody saw it: kept as context, and counted."""
    trajectory = joined([seen()], record(), record(OTHER, created=100.5), rollout_id="r")
    assert [(c.record_id, c.left_out) for c in trajectory.calls] == [(ID, None), (OTHER, "orphan")]
    assert trajectory.calls[1].message == SAID
    report = trajectory.completeness
    assert (report.answered, report.seen, report.kept) == (2, 1, 1)
    assert dict(report.left_out) == {"orphan": 1}


def test_records_of_another_rollout_or_an_earlier_run_are_no_orphans() -> None:
    """A run that is played again has the same rollout ids; what broke off was no answer."""
    trajectory = joined(
        [],
        record(rollout_id="other"),
        record(OTHER, created=1.0),
        record("c" * 20, complete=False, finish_reason=None),
        rollout_id="r",
    )
    assert trajectory.calls == []


def test_a_call_that_broke_on_the_way_back_is_found_by_its_messages() -> None:
    """One call that the client gave up on and the server answered: not counted twice."""
    broken = seen("local-1", error="ReadTimeout", left_out="not answered", message={})
    trajectory = joined([broken], record(), rollout_id="r")
    assert [(c.record_id, c.left_out) for c in trajectory.calls] == [(ID, "not answered")]


def test_another_answer_than_the_servers_is_a_mismatch() -> None:
    changed = seen(message={"role": "assistant", "content": "no"})
    (call,) = joined([changed], record()).calls
    assert (call.left_out, call.trainable) == ("mismatch", False)
    assert "another answer" in str(call.error)


def test_another_request_than_the_servers_is_a_mismatch() -> None:
    asked = seen(request={"model": "agent", "messages": [*ASK, *ASK]})
    (call,) = joined([asked], record()).calls
    assert call.left_out == "mismatch"
    assert "message 1 of the request" in str(call.error)


def test_spelling_is_no_mismatch() -> None:
    """A client dumps arguments again and shows text as parts."""
    function = {"name": "add", "arguments": '{"a":  1}'}
    said = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    again = {**function, "arguments": '{"a": 1}'}
    shown = {**said, "content": "", "tool_calls": [{"id": "c", "function": again}]}
    parts = [{"role": "user", "content": [{"type": "text", "text": "q"}]}]
    client = seen(message=shown, request={"messages": parts})
    (call,) = joined([client], record(message=said)).calls
    assert call.trainable


@pytest.mark.parametrize(
    ("written", "dumped"),
    [
        ("null", "{}"),
        ("[]", "{}"),
        ('{"a":  NaN}', '{"a": NaN}'),
        ('{"a": "one\ntwo"}', '{"a": "one\\ntwo"}'),
    ],
)
def test_arguments_as_langchain_reads_them_are_no_mismatch(written: str, dumped: str) -> None:
    """Case 003, in a stock client: what its message holds is not what was sampled."""

    def calling(arguments: str) -> dict[str, Any]:
        function = {"name": "add", "arguments": arguments}
        return {**SAID, "tool_calls": [{"id": "c", "type": "function", "function": function}]}

    (call,) = joined([seen(message=calling(dumped))], record(message=calling(written))).calls
    assert call.trainable


def test_an_answer_that_comes_twice_is_trained_once() -> None:
    """A cache below the client answered the second rollout with the first one's answer."""
    store = RecordStore(None)
    store.put([record()])
    first, second = Trajectory(calls=[seen()]), Trajectory(calls=[seen(started=200.0)])
    copied = first.model_copy(update={"calls": list(first.calls)})
    join_records([first, second, first, copied], store)
    assert [t.calls[0].left_out for t in (first, second, copied)] == [None, "cache replay", None]


def test_several_answers_get_their_own_tokens_whatever_their_order() -> None:
    """LangChain hands on what came first, here the choice with index 1."""
    no = {"role": "assistant", "content": "no"}
    yes, second = record(), record(choice_index=1, message=no, sampled_ids=[7, 8])
    shown = [
        replace(seen(), message=no),
        replace(seen(), choice_index=1, left_out="several answers"),
    ]
    trajectory = joined(shown, yes, second)
    first, sibling = trajectory.calls
    assert first.sampled_ids is not None
    assert first.sampled_ids.tolist() == [7, 8]
    assert (sibling.left_out, sibling.trainable) == ("several answers", False)


def test_a_broken_record_is_not_trained() -> None:
    (call,) = joined([seen()], record(complete=False, finish_reason=None)).calls
    assert call.left_out == "broken answer"
