"""What a graph gets of odd answers, and what is recorded of them.

Cases are those collected from public bug reports; their numbers name where an input comes from.
"""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

from art_core.capture import Scope
from art_core.errors import EngineError
from art_langgraph import ChatArt, capture
from tests.stub_endpoint import (
    DONE,
    Answer,
    Asked,
    call,
    completion,
    endpoint,
    event,
    recording,
    usage,
)


def now() -> str:
    """The time."""
    return "noon"


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def ids(scope: Scope) -> list[Any]:
    return [None if c.sampled_ids is None else c.sampled_ids.tolist() for c in scope.calls]


# --- reasoning


def thinking(name: str, streamed: bool) -> Any:
    """Case 001: "4", thought over in four tokens."""
    if not streamed:
        body = completion("4", [901, 902, 903, 904])
        body["choices"][0]["message"][name] = "two and two"
        return body
    parts = [event(ids=[901]), event(ids=[902, 903]), event("4", [904], finish_reason="stop")]
    for part, text in zip(parts, ("two ", "and two"), strict=False):
        part["choices"][0]["delta"][name] = text
    parts[0]["prompt_token_ids"] = [11, 12, 13]
    return Answer(events=[*parts, {**event(), "choices": [], "usage": usage(3, 4)}, DONE])


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_case_001_reasoning_is_kept_for_the_record_and_for_the_graph(
    name: str, streamed: bool
) -> None:
    llm = ChatArt(streaming=streamed)
    with recording([thinking(name, streamed)]) as (_, scope):
        said = llm.invoke("What is 2+2?")
    assert (said.content, said.additional_kwargs[name]) == ("4", "two and two")
    (kept,) = scope.calls
    assert ids(scope) == [[901, 902, 903, 904]]
    assert kept.prompt_ids is not None
    assert kept.prompt_ids.tolist() == [11, 12, 13]
    assert kept.logprobs is not None
    assert len(kept.logprobs) == 4
    assert kept.message[name] == "two and two"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_goes_back_so_that_a_template_can_show_it(name: str) -> None:
    """Without it the next prompt would not go on from what was sampled."""
    with recording([thinking(name, False), completion()]) as (stub, _):
        said = ChatArt().invoke("What is 2+2?")
        ChatArt().invoke([HumanMessage("What is 2+2?"), said, HumanMessage("Sure?")])
    assert stub.bodies[1]["messages"][1] == {
        "role": "assistant",
        "content": "4",
        name: "two and two",
    }


def test_what_another_provider_keeps_under_that_name_is_not_sent() -> None:
    """OpenAI's Responses API leaves an object there; servers want a text."""
    kept = {"reasoning": {"id": "rs_1", "summary": []}}
    said = AIMessage("4", additional_kwargs=kept)
    with recording([completion()]) as (stub, _):
        ChatArt().invoke([HumanMessage("q"), said, HumanMessage("Sure?")])
    assert stub.bodies[0]["messages"][1] == {"role": "assistant", "content": "4"}


def test_a_hosted_provider_gets_no_field_that_it_does_not_know() -> None:
    said = AIMessage("4", additional_kwargs={"reasoning_content": "two and two"})
    with recording([completion()], token_data=False) as (stub, _):
        ChatArt().invoke([HumanMessage("q"), said, HumanMessage("Sure?")])
    assert stub.bodies[0]["messages"][1] == {"role": "assistant", "content": "4"}


# --- arguments that are none


def calling(raw: Any, streamed: bool = False) -> Any:
    """An answer that calls `add` with these arguments."""
    if not streamed:
        return completion(None, [41, 42], tool_calls=[call("add", raw)])
    part = event(ids=[41, 42])
    part["choices"][0]["delta"]["tool_calls"] = [{"index": 0, **call("add", raw)}]
    return Answer(events=[part, event(finish_reason="tool_calls"), DONE])


ODD = {
    "null": ("null", "{}"),
    "a list": ("[]", "{}"),
    "a number": ("3", "{}"),
    "a word": ("hello", "{}"),
    "a string": ('"hello"', "{}"),
    "NaN": ('{"a": NaN}', '{"a": null}'),
    "infinity": ('{"a": -Infinity}', '{"a": null}'),
    "cut": ('{"a": 1, "b": [2', '{"a": 1, "b": [2]}'),
    "cut in a text": ('{"a": "hel', '{"a": "hel"}'),
    "encoded twice": (json.dumps('{"a": 1}'), '{"a": 1}'),
    "two objects": ('{"a": 1}{"b": 2}', '{"a": 1}'),
    "in single quotes": ("{'a': 1}", "{}"),
    "deep": ("[" * 100_000, "{}"),
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("kind", ODD)
def test_case_003_005_broken_arguments_make_no_call_and_are_mended_when_sent(
    kind: str, streamed: bool
) -> None:
    raw, sent = ODD[kind]
    llm = ChatArt(streaming=streamed).bind_tools([add])
    answers = [calling(raw, streamed), calling("{}", streamed)]
    with recording(answers) as (stub, scope):
        said = llm.invoke("go")
        llm.invoke([HumanMessage("go"), said, ToolMessage("no", tool_call_id="c1")])
    assert said.tool_calls == []
    assert [(c["name"], c["args"]) for c in said.invalid_tool_calls] == [("add", raw)]
    assert scope.calls[0].message["tool_calls"][0]["function"]["arguments"] == raw
    assert ids(scope) == [[41, 42]] * 2
    (again,) = stub.bodies[1]["messages"][1]["tool_calls"]
    assert again["function"]["arguments"] == sent


@pytest.mark.parametrize("streamed", [False, True])
def test_case_003_no_arguments_at_all_are_a_call_without_any(streamed: bool) -> None:
    with recording([calling("", streamed)]) as (_, scope):
        said = ChatArt(streaming=streamed).bind_tools([now]).invoke("go")
    assert [c["args"] for c in said.tool_calls] == [{}]
    assert said.invalid_tool_calls == []
    assert scope.calls[0].message["tool_calls"][0]["function"]["arguments"] == ""


def test_arguments_that_come_as_an_object_are_a_call() -> None:
    with recording([calling({"a": 1, "b": 2})]) as (_, scope):
        said = ChatArt().bind_tools([add]).invoke("go")
    assert [c["args"] for c in said.tool_calls] == [{"a": 1, "b": 2}]
    assert scope.calls[0].trainable


@pytest.mark.parametrize("streamed", [False, True])
def test_two_broken_calls_among_three_leave_the_third(streamed: bool) -> None:
    calls = [
        call("add", '{"a": 1', "c1"),
        call("add", '{"a": 2, "b": 3}', "c2"),
        call("add", "null", "c3"),
    ]
    answer: Any = completion(None, [5], tool_calls=calls)
    if streamed:
        parts = [event(ids=[5]) if at == 0 else event() for at in range(3)]
        for at, part in enumerate(parts):
            part["choices"][0]["delta"]["tool_calls"] = [{"index": at, **calls[at]}]
        answer = Answer(events=[*parts, event(finish_reason="tool_calls"), DONE])
    with recording([answer, completion()]) as (stub, scope):
        llm = ChatArt(streaming=streamed).bind_tools([add])
        said = llm.invoke("go")
        history = [ToolMessage("r", tool_call_id=f"c{n}") for n in (1, 2, 3)]
        ChatArt().invoke([HumanMessage("go"), said, *history])
    assert [(c["id"], c["args"]) for c in said.tool_calls] == [("c2", {"a": 2, "b": 3})]
    assert [(c["id"], c["args"]) for c in said.invalid_tool_calls] == [
        ("c1", '{"a": 1'),
        ("c3", "null"),
    ]
    assert len(scope.calls[0].message["tool_calls"]) == 3
    sent = stub.bodies[1]["messages"][1]["tool_calls"]
    assert {c["id"] for c in sent} == {"c1", "c2", "c3"}
    assert all(isinstance(json.loads(c["function"]["arguments"]), dict) for c in sent)


ODD_BODIES: list[Any] = [
    [],
    "text",
    None,
    {"choices": "x"},
    {"choices": [None]},
    {"choices": [{"message": "hi"}]},
    {"choices": [{"message": {"role": "assistant", "content": 5}}]},
    {"choices": [{"message": {"role": "assistant", "content": "x", "tool_calls": "no"}}]},
    {"choices": [{"message": {"role": "assistant", "content": "x", "tool_calls": [None]}}]},
    {"choices": [{"message": {"content": "x", "tool_calls": [{"function": None}]}}]},
    {"choices": [{"message": {"content": "x", "tool_calls": [{"function": {"name": 5}}]}}]},
    {"choices": [{"message": {"content": "x", "tool_calls": [{"id": 5, "function": {}}]}}]},
    {"choices": [{"message": {"content": [5]}}]},
    {"choices": [{"message": {"content": "x", "function_call": "x"}}]},
]
ODD_EVENTS: list[Any] = [
    {"choices": "x"},
    {"choices": [None]},
    {"choices": [{"delta": "x"}]},
    {"choices": [{"delta": {"content": 5}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": "x"}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [None]}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": "f"}]}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"function": {"arguments": 5}}]}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"id": 5, "function": {}}]}}]},
    {"choices": [{"index": 0, "delta": {"function_call": "x"}}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": 5}]},
]
ODD_USAGES: list[Any] = [5, {"prompt_tokens": "x"}, {"prompt_tokens_details": 5}]


@pytest.mark.parametrize("body", ODD_BODIES)
async def test_a_shape_that_no_completion_has_is_the_servers_fault(body: Any) -> None:
    """Not the policy's: such a rollout must not be trained on with the reward of a failure."""
    with recording([Answer(body)]) as (_, scope):
        with pytest.raises(EngineError, match="of a known shape"):
            await ChatArt(max_retries=0).ainvoke("hi")
    assert len(scope.calls) == 1


@pytest.mark.parametrize("odd", ODD_EVENTS)
async def test_so_it_is_in_a_stream(odd: Any) -> None:
    events = [event("a", [3]), odd, event(finish_reason="stop"), DONE]
    with recording([Answer(events=events)]) as (_, scope):
        with pytest.raises(EngineError, match="that no completion has"):
            await ChatArt(max_retries=0, streaming=True).ainvoke("hi")
    assert [call.trainable for call in scope.calls] == [False]


@pytest.mark.parametrize("odd", ODD_USAGES)
async def test_a_message_without_its_role_or_with_an_odd_usage_is_an_answer(odd: Any) -> None:
    bodies = [{"choices": [{"message": {"content": "x"}}], "usage": odd}]
    events = [event("x", [3], usage=odd), event(finish_reason="stop"), DONE]
    with recording([*bodies, Answer(events=events)]):
        for streaming in (False, True):
            said = await ChatArt(streaming=streaming).ainvoke("hi")
            assert (said.content, said.usage_metadata) == ("x", None)
            assert isinstance(said, AIMessage)


async def test_arguments_that_a_stream_gives_as_an_object_are_a_call() -> None:
    part = {"index": 0, "id": "c1", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    odd = {"choices": [{"index": 0, "delta": {"tool_calls": [part]}}]}
    events = [odd, event(ids=[3], finish_reason="tool_calls"), DONE]
    with recording([Answer(events=events)]):
        said = await ChatArt(streaming=True).ainvoke("hi")
    assert [(c["name"], c["args"]) for c in said.tool_calls] == [("add", {"a": 1, "b": 2})]


# --- streams


def framed(*events: dict[str, Any], end: bytes = b"\n\n", between: bytes = b"") -> Answer:
    """A stream with these line ends, `between` after each event, and no more than given."""
    first = {**events[0], "prompt_token_ids": [11, 12, 13]}
    parts = [b"data: " + json.dumps(e).encode() + end + between for e in (first, *events[1:])]
    return Answer(events=parts)


COUNTED = {**event(finish_reason="stop"), "usage": usage(3, 2)}
WHOLE = {
    "without [DONE]": framed(event("a", [3]), event("b", [4], finish_reason="stop")),
    "usage in the last content chunk": framed(
        event("a", [3]), {**event("b", [4], finish_reason="stop"), "usage": usage(3, 2)}
    ),
    "usage in every chunk": framed(
        {**event("a", [3]), "usage": usage(3, 1)},
        {**event("b", [4], finish_reason="stop"), "usage": usage(3, 2)},
    ),
    "CRLF": framed(event("a", [3]), event("b", [4]), COUNTED, end=b"\r\n\r\n"),
    "comments": framed(event("a", [3]), event("b", [4]), COUNTED, between=b": held\n\n"),
    "two finish chunks": framed(
        event("ab", [3]), event(finish_reason="stop"), event(ids=[4], finish_reason="stop")
    ),
    "events without data": framed(
        event("a", [3]), event("b", [4]), COUNTED, between=b"id: 1\n\nevent: ping\n\n"
    ),
    "an empty chunk": framed(
        {**event(), "choices": []}, event("a", [3]), event("b", [4], finish_reason="stop")
    ),
    "a chunk without a delta": framed(
        event("a", [3]), event("b", [4], finish_reason="stop"), {**COUNTED, "choices": []}
    ),
}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", WHOLE)
def test_case_012_streams_of_every_form_are_whole(kind: str, is_async: bool) -> None:
    llm = ChatArt(streaming=True)
    with recording([WHOLE[kind]]) as (_, scope):
        said = asyncio.run(llm.ainvoke("hi")) if is_async else llm.invoke("hi")
    assert said.content == "ab"
    assert said.response_metadata["finish_reason"] == "stop"
    assert said.response_metadata["model_name"] == "agent@3"
    (kept,) = scope.calls
    assert (kept.error, kept.finish_reason, kept.message["content"]) == (None, "stop", "ab")
    assert ids(scope) == [[3, 4]]
    assert kept.trainable


@pytest.mark.parametrize("is_async", [False, True])
def test_case_012_an_error_in_the_middle_is_no_answer(is_async: bool) -> None:
    failing = framed(event("par", [3]), {"error": {"message": "engine died", "code": 500}})
    llm = ChatArt(streaming=True)
    with recording([failing]) as (_, scope):
        with pytest.raises(openai.APIError, match="engine died"):
            asyncio.run(llm.ainvoke("hi")) if is_async else llm.invoke("hi")
    (kept,) = scope.calls
    assert not kept.trainable
    assert "engine died" in str(kept.error)
    assert scope.open_calls == 0


def test_case_012_a_stream_that_was_cut_is_not_trained() -> None:
    with recording([framed(event("par", [3]))]) as (_, scope):
        ChatArt(streaming=True).invoke("hi")
    assert not scope.calls[0].trainable
    assert "finish_reason" in str(scope.calls[0].error)


def test_case_011_logprobs_that_a_stream_swallowed_are_noticed() -> None:
    short = event("ab", [3, 4], finish_reason="stop")
    short["choices"][0]["logprobs"]["content"].pop()
    with recording([framed(short)]) as (_, scope):
        ChatArt(streaming=True).invoke("hi")
    assert scope.calls[0].error == "2 token ids came with 1 logprobs"
    assert not scope.calls[0].trainable


# --- choices


def test_case_020_a_choice_without_ids_does_not_spoil_the_other() -> None:
    body = completion("r1", [8])
    body["choices"][0]["index"] = 1
    body["choices"].append(completion("r0", None)["choices"][0])
    body["usage"] = usage(3, 2)
    with recording([body]) as (_, scope):
        assert ChatArt(n=2).invoke("hi").content == "r1"
    assert [(c.message["content"], c.trainable) for c in scope.calls] == [
        ("r0", False),
        ("r1", True),
    ]


@pytest.mark.parametrize(
    "body",
    [
        {**completion(), "choices": []},
        {**completion(), "choices": None},
        {"object": "chat.completion"},
        {**completion(), "choices": [{"index": 0, "message": None, "finish_reason": "stop"}]},
        {"error": {"message": "out of memory"}},
        b"<html>not found</html>",
    ],
    ids=["empty", "null", "missing", "no message", "an error", "no JSON"],
)
def test_an_answer_without_a_choice_is_the_servers_fault(body: Any) -> None:
    """ChatOpenAI ends in an IndexError or TypeError, which would be blamed on the policy."""
    with recording([Answer(body)]) as (_, scope), pytest.raises(EngineError, match="server"):
        ChatArt().invoke("hi")
    assert scope.calls[0].error is not None


# --- loops


def test_case_017_two_loops_in_two_threads_at_once_and_one_after() -> None:
    """Every loop its own connections; nothing of a closed one is used again."""
    llm = ChatArt()
    together = threading.Barrier(2)
    found: list[Any] = []

    def echo(asked: Asked) -> dict[str, Any]:
        said = asked.body["messages"][0]["content"]
        return completion(said, [int(said)])

    async def play(target: Any, said: str) -> None:
        async with capture(target) as trajectory:
            await asyncio.gather(*(llm.ainvoke(said) for _ in range(4)))
        found.append(trajectory)

    def run(target: Any, said: str) -> None:
        together.wait(10)
        asyncio.run(play(target, said))

    with endpoint(echo) as stub:
        threads = [threading.Thread(target=run, args=(stub.target(), str(n))) for n in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        asyncio.run(play(stub.target(), "3"))
    assert sorted(ids(trajectory) for trajectory in found) == [[[n]] * 4 for n in (1, 2, 3)]
