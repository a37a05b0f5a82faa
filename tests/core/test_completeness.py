"""`Completeness`: what of a rollout is trained, and what was left out by which cause."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat.chat_completion import Choice

from art_core import Completeness
from art_core.calls import Origin
from art_core.completeness import cause_of
from art_core.exchange import calls_of_reply
from art_core.reply import read_reply
from art_core.runlog import summarize
from art_core.trajectories import Trajectory, TrajectoryGroup
from tests.core.sample import make_call
from tests.stub_endpoint import completion, event

NO_IDS: dict[str, Any] = {"prompt_ids": None, "sampled_ids": None, "logprobs": None}


def test_the_report_adds_up_and_can_be_read() -> None:
    """Two whole calls of 3 tokens each; one broke off; one has no ids; one is another model's."""
    calls = [
        make_call(record_id="a"),
        make_call(record_id="b"),
        make_call(record_id="c", error="cut", left_out="broken answer", **NO_IDS),
        make_call(record_id="d", **NO_IDS),
        make_call(record_id="e", left_out="other model", **NO_IDS),
        make_call(record_id="f", left_out="orphan", **NO_IDS),
    ]
    report = Trajectory(calls=calls, metadata={"incomplete": ["lost one"]}).completeness
    assert report == Completeness(
        answered=5,
        seen=5,
        kept=2,
        tokens=6,
        left_out={"broken answer": 1, "no ids": 1, "other model": 1, "orphan": 1},
        notes=("lost one",),
    )
    assert str(report) == (
        "5 calls answered, 5 seen, 2 kept with 6 tokens to train\n"
        "left out: 1 broken answer, 1 no ids, 1 other model, 1 orphan\n"
        "note: lost one"
    )
    assert not report.is_whole


def test_context_does_not_make_a_record_incomplete() -> None:
    calls = [make_call(record_id="a"), make_call(record_id="b", left_out="other model", **NO_IDS)]
    assert Trajectory(calls=calls).completeness.is_whole


def test_choices_that_were_not_kept_are_counted() -> None:
    message = {"role": "assistant", "content": "x"}
    kept = Choice.model_validate(
        {"index": 0, "finish_reason": "stop", "message": message, "art_record_id": "b"}
    )
    calls = [make_call(record_id="a"), make_call(record_id="b")]
    report = Trajectory(calls=calls, messages_and_choices=[kept]).completeness
    assert (report.kept, dict(report.left_out)) == (1, {"choice not kept": 1})


def test_it_is_summed_over_groups() -> None:
    """Two trajectories: 2 and 1 calls, of which one has no ids."""
    one = Trajectory(calls=[make_call(record_id="a"), make_call(record_id="b", **NO_IDS)])
    other = Trajectory(calls=[make_call(record_id="c")])
    figures = summarize([TrajectoryGroup([one]), TrajectoryGroup([other])])
    assert {name: n for name, n in figures.items() if name.startswith("calls/")} == {
        "calls/answered": 1.5,
        "calls/seen": 1.5,
        "calls/kept": 1.0,
        "calls/left_out/no ids": 0.5,
    }


@pytest.mark.parametrize(
    ("cause", "answer"),
    [
        (None, {"body": completion("a", [1])}),
        ("no ids", {"body": completion("a", None)}),
        ("not answered", {"body": {"error": {"message": "busy"}}, "status": 503}),
        ("not answered", {"status": None, "error": "ConnectError"}),
        ("broken answer", {"body": {"cut": True}, "error": "ReadError"}),
        ("broken answer", {"body": completion("a", [1], finish_reason="abort")}),
        ("mismatch", {"body": completion("a", [1]) | {"usage": {"completion_tokens": 7}}}),
        ("broken answer", {"events": [event("a", [1])]}),
    ],
)
def test_an_exchange_says_its_cause(cause: str | None, answer: dict[str, Any]) -> None:
    events = answer.get("events")
    if events is not None:
        raw = b"".join(b"data: " + json.dumps(part).encode() + b"\n\n" for part in events)
    else:
        raw = json.dumps(answer.get("body")).encode() if "body" in answer else b""
    status, error = answer.get("status", 200), answer.get("error")
    reply = read_reply(raw, status, streamed=events is not None, error=error)
    (call,) = calls_of_reply(
        reply, {"model": "agent"}, raw, origin=Origin(), started=0.0, ended=1.0
    )
    assert cause_of(call) == cause
