"""`ChatArt`: where it finds its model, what it sends, what it gives back."""

from __future__ import annotations

import asyncio
import json
import threading
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import openai
import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.exceptions import ContextOverflowError
from langchain_core.globals import set_llm_cache
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

from art_core.capture import open_scope
from art_core.config import SamplingConfig
from art_core.errors import CaptureError, ConfigError
from art_langgraph import ChatArt, SamplingOverridden, capture
from tests.stub_endpoint import (
    Answer,
    call,
    completion,
    endpoint,
    event,
    recording,
    refusal,
    streamed,
    usage,
)


class Ans(BaseModel):
    x: int


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def now() -> str:
    """The time."""
    return "noon"


def write(path: str, text: str) -> str:
    """Write a file."""
    return "written"


# --- how it is built


def test_it_is_a_chat_openai_that_needs_no_key() -> None:
    assert isinstance(ChatArt(), ChatOpenAI)


def test_it_reads_nothing_of_other_providers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key or an address of OpenAI in the environment must neither be used nor break it."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-hosted")
    monkeypatch.setenv("OPENAI_BASE_URL", "https://hosted.invalid/v1")
    monkeypatch.setenv("OPENAI_PROXY", "http://proxy.invalid:1")
    with recording([completion()]) as (stub, _):
        assert ChatArt().invoke("hi").content == "ok"
    assert stub.requests[0].headers["authorization"] == "Bearer key"


@pytest.mark.parametrize(
    "given",
    [
        {"model": "gpt-4o"},
        {"model_name": "gpt-4o"},
        {"api_key": "sk-secret"},
        {"base_url": "http://127.0.0.1/v1"},
        {"openai_proxy": "http://127.0.0.1"},
        {"use_responses_api": True},
    ],
)
def test_what_it_finds_by_itself_it_does_not_take(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        ChatArt(**given)
    assert next(iter(given)) in str(raised.value)
    assert "sk-secret" not in str(raised.value)


# --- where it finds its model


def test_first_the_scope_around() -> None:
    config: Any = {"metadata": {"art_rollout": "named"}}
    with (
        endpoint([]) as other,
        open_scope("named", {None: other.target()}),
        recording([completion()]) as (_, scope),
    ):
        ChatArt().invoke("hi", config=config)
    assert len(scope.calls) == 1


def test_then_the_rollout_named_in_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ART_BASE_URL", "http://127.0.0.1:1/v1")
    monkeypatch.setenv("ART_MODEL", "other")
    config: Any = {"metadata": {"art_rollout": "named"}}
    with endpoint([completion()]) as stub, open_scope("named", {None: stub.target()}) as scope:
        in_bare_thread(lambda: ChatArt().invoke("hi", config=config))
    assert len(scope.calls) == 1


def test_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same line with the environment set is the production deployment."""
    llm = ChatArt(temperature=0.0, otherwise=GenericFakeChatModel(messages=iter([])))
    with endpoint([completion("prod")]) as stub:
        monkeypatch.setenv("ART_BASE_URL", stub.base_url)
        monkeypatch.setenv("ART_MODEL", "agent-001@12")
        monkeypatch.setenv("ART_API_KEY", "prod-key")
        assert llm.invoke("hi").content == "prod"
    assert stub.requests[0].headers["authorization"] == "Bearer prod-key"
    assert stub.bodies[0] == {
        "model": "agent-001@12",
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0.0,
        "stream": False,
    }


@pytest.mark.parametrize(
    ("name", "missing"), [("ART_BASE_URL", "ART_MODEL"), ("ART_MODEL", "ART_BASE_URL")]
)
def test_half_an_environment_is_an_error(
    name: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "x")
    with pytest.raises(ConfigError, match=f"{missing} is not set"):
        ChatArt().invoke("hi")


def test_then_the_stand_in() -> None:
    other = GenericFakeChatModel(messages=iter(["stand-in"] * 4))
    llm = ChatArt(otherwise=other)
    assert llm.invoke("hi").content == "stand-in"
    assert asyncio.run(llm.ainvoke("hi")).content == "stand-in"
    assert "".join(str(chunk.content) for chunk in llm.stream("hi")) == "stand-in"


def test_a_stand_in_gets_tools_in_its_own_terms() -> None:
    class Other(GenericFakeChatModel):
        bound: list[Any] = Field(default_factory=list)

        def bind_tools(self, tools: Any, *, tool_choice: Any = None, **_: Any) -> Any:
            self.bound.append((tools, tool_choice))
            return self.bind(theirs=len(tools))

        def _generate(self, messages: Any, *args: Any, theirs: int = 0, **_: Any) -> Any:
            self.bound.append(theirs)
            return super()._generate(messages)

    other = Other(messages=iter(["a", "b"]))
    llm = ChatArt(otherwise=other)
    llm.bind_tools([add], tool_choice="any", parallel_tool_calls=False).invoke("hi")
    (tools, choice), theirs = other.bound
    assert (tools[0]["function"]["name"], choice, theirs) == ("add", "any", 1)
    with pytest.raises(ConfigError, match="response_format"):
        llm.with_structured_output(Ans).invoke("hi")


def test_else_a_typed_error_that_says_what_to_do() -> None:
    with pytest.raises(CaptureError, match=r"rollout\(.*ART_BASE_URL.*otherwise") as raised:
        ChatArt(role="planner").invoke("hi")
    assert "'planner'" in str(raised.value)


@pytest.mark.parametrize("path", ["ainvoke", "stream", "astream", "batch", "events"])
def test_the_error_is_the_same_on_every_path(path: str) -> None:
    llm = ChatArt()

    async def drain(items: Any) -> None:
        async for _ in items:
            pass

    paths: dict[str, Any] = {
        "ainvoke": lambda: asyncio.run(llm.ainvoke("hi")),
        "stream": lambda: list(llm.stream("hi")),
        "astream": lambda: asyncio.run(drain(llm.astream("hi"))),
        "batch": lambda: llm.batch(["hi"]),
        "events": lambda: asyncio.run(drain(llm.astream_events("hi", version="v2"))),
    }
    with pytest.raises(CaptureError):
        paths[path]()


def test_after_the_rollout_its_scope_is_no_scope() -> None:
    with endpoint([]) as stub, open_scope("gone", {None: stub.target()}):
        pass
    with pytest.raises(CaptureError, match="'gone' has ended"):
        ChatArt().invoke("hi", config={"metadata": {"art_rollout": "gone"}})


def test_roles_have_models_of_their_own() -> None:
    with (
        endpoint([completion("p")]) as plan,
        endpoint([completion("c")]) as code,
        open_scope(None, {"planner": plan.target(), "coder": code.target()}) as scope,
    ):
        assert ChatArt(role="planner").invoke("hi").content == "p"
        assert ChatArt(role="coder").invoke("hi").content == "c"
        with pytest.raises(ConfigError, match=r"'critic'.*'coder', 'planner'"):
            ChatArt(role="critic").invoke("hi")
    assert [call.origin.role for call in scope.calls] == ["planner", "coder"]


def test_a_bare_thread_without_any_carrier_is_told_and_counted() -> None:
    """Case 013, fallback: a loud error, and the run is not reported as fully captured."""
    lost = pytest.raises(CaptureError, match="ContextThreadPoolExecutor")
    with recording([]) as (_, scope), lost:
        in_bare_thread(lambda: ChatArt().invoke("hi"))
    assert len(scope.incomplete) == 1


# --- every path is recorded


@pytest.mark.parametrize("how", ["invoke", "ainvoke", "batch", "abatch", "bare client"])
def test_plain_paths_are_recorded(how: str) -> None:
    llm: Any = ChatArt()
    messages: Any = [{"role": "user", "content": "hi"}]
    paths: dict[str, Any] = {
        "invoke": lambda: llm.invoke("hi"),
        "ainvoke": lambda: asyncio.run(llm.ainvoke("hi")),
        "batch": lambda: llm.batch(["hi"]),
        "abatch": lambda: asyncio.run(llm.abatch(["hi"])),
        "bare client": lambda: llm.client.create(model="art", messages=messages),
    }
    with recording([completion("yo", [5])]) as (stub, s):
        paths[how]()
    assert [c.trainable for c in s.calls] == [True]
    assert stub.bodies[0]["return_token_ids"] is True


@pytest.mark.parametrize("how", ["stream", "astream", "streaming=True", "events", "events v3"])
def test_streaming_paths_are_recorded(how: str) -> None:
    llm = ChatArt()

    async def joined(items: Any) -> str:
        return "".join([chunk.content async for chunk in items])

    async def events() -> str:
        found = llm.astream_events("hi", version="v2")
        return "".join([e["data"]["chunk"].content async for e in found if e["event"] == STREAM])

    def events_v3() -> str:
        with warnings.catch_warnings():  # LangChain marks it as beta
            warnings.simplefilter("ignore")
            return str(llm.stream_events("hi", version="v3").output.content)

    paths: dict[str, Any] = {
        "stream": lambda: "".join(str(chunk.content) for chunk in llm.stream("hi")),
        "astream": lambda: asyncio.run(joined(llm.astream("hi"))),
        "streaming=True": lambda: ChatArt(streaming=True).invoke("hi").content,
        "events": lambda: asyncio.run(events()),
        "events v3": events_v3,
    }
    with recording([streamed("yo", [5, 6])]) as (stub, s):
        assert "yo" in str(paths[how]())
    (kept,) = s.calls
    assert kept.trainable
    assert stub.bodies[0]["stream_options"] == {"include_usage": True}


STREAM = "on_chat_model_stream"


def test_ids_swallowed_in_a_stream_are_noticed() -> None:
    """Case 011: 4 ids, usage says 9: not trainable, and the reason names both numbers."""
    chunk = event("")
    chunk["choices"][0]["delta"]["tool_calls"] = [{"index": 0, **call("add", '{"a": 1}')}]
    chunk["choices"][0] |= event(ids=[5, 6, 7])["choices"][0] | {
        "delta": chunk["choices"][0]["delta"]
    }
    counted = {**event(), "choices": [], "usage": usage(4, 9)}
    parts = [event(""), chunk, event(ids=[9], finish_reason="tool_calls"), counted]
    with recording([Answer(events=parts)]) as (_, s):
        said = ChatArt(streaming=True).bind_tools([add]).invoke("add")
    assert said.tool_calls[0]["name"] == "add"
    assert not s.calls[0].trainable
    assert s.calls[0].error == "4 token ids received, usage says 9 completion tokens"


@pytest.mark.parametrize("sync", [True, False])
async def test_a_consumer_that_stops_leaves_no_open_call(sync: bool) -> None:
    """Case 012, consumer_stops."""
    until = threading.Event()
    answer = Answer(events=[event("a", [3]), event("b", [4], finish_reason="stop")], until=until)
    with endpoint([answer]) as stub:
        async with capture(stub.target()) as traj:
            if sync:
                for _ in ChatArt().stream("hi"):
                    break
            else:
                async for _ in ChatArt().astream("hi"):
                    break
        until.set()
    (kept,) = traj.calls
    assert kept.error is not None
    assert "client closed" in kept.error
    assert not kept.trainable


def test_structured_output_is_recorded_by_every_method() -> None:
    """Case 008: a response_format goes through the SDK's parse helper, past `create`."""
    text = completion('{"x": 1}', [81, 82])
    tool = completion(None, [81, 83], tool_calls=[call("Ans", '{"x": 1}')])
    json_mode = completion('{"x": 1}', [81, 84])
    methods: tuple[Any, ...] = ("json_schema", "function_calling", "json_mode")
    with recording([text, tool, json_mode]) as (stub, scope):
        parsed = [
            ChatArt().with_structured_output(Ans, method=method).invoke("give json")
            for method in methods
        ]
    assert parsed == [Ans(x=1)] * 3
    assert [c.sampled_ids.tolist() for c in scope.calls if c.sampled_ids is not None] == [
        [81, 82],
        [81, 83],
        [81, 84],
    ]
    tools = scope.calls[1].request["tools"]
    assert [t["function"]["name"] for t in tools] == ["Ans"]
    assert all(b["logprobs"] is True and b["return_token_ids"] is True for b in stub.bodies)


@pytest.mark.parametrize("streaming", [False, True])
def test_structured_output_that_is_cut_is_recorded(streaming: bool) -> None:
    """The SDK raises on finish_reason "length"; the tokens were sampled all the same."""
    events = [event('{"x"', [81, 82]), event(finish_reason="length")]
    cut = completion('{"x"', [81, 82], finish_reason="length")
    answer: Any = Answer(events=events) if streaming else cut
    llm = ChatArt(streaming=streaming).with_structured_output(Ans)
    with recording([answer]) as (_, scope), pytest.raises(openai.LengthFinishReasonError):
        llm.invoke("give json")
    (kept,) = scope.calls
    assert kept.error is None
    assert kept.finish_reason == "length"
    assert kept.sampled_ids is not None
    assert kept.sampled_ids.tolist() == [81, 82]


# --- what is asked


@pytest.mark.parametrize("how", ["plain", "structured", "tools", "streaming", "refused"])
def test_logprobs_are_asked_for_with_a_number_of_top_ones(how: str) -> None:
    """Case 041: some servers send them only where top_logprobs is a number; 0 counts."""

    def rule(asked: Any) -> Any:
        right = asked.body.get("logprobs") is True and asked.body.get("top_logprobs") == 0
        body = completion('{"x": 1}', [97])
        if not right:
            body["choices"][0]["logprobs"] = None
        return streamed("a", [97]) if asked.body.get("stream") else body

    runs: dict[str, Any] = {
        "plain": ChatArt(),
        "structured": ChatArt().with_structured_output(Ans),
        "tools": ChatArt().bind_tools([add]),
        "streaming": ChatArt(streaming=True),
        "refused": ChatArt(logprobs=False, role="quiet"),
    }
    told = pytest.warns(SamplingOverridden, match="logprobs=False; a call that is recorded asks")
    with recording(rule) as (_, scope), told if how == "refused" else nullcontext():
        answer = runs[how].invoke("hi")
    assert not getattr(answer, "response_metadata", {}).get("logprobs"), "nobody asked for them"
    assert scope.calls[0].logprobs is not None
    assert len(scope.calls[0].logprobs) == 1


TRAINING: Any = {"sampling": SamplingConfig(), "trains": True}


def test_a_cold_node_is_overridden_in_training_and_told_once() -> None:
    """temperature=0 would make every rollout of a group the same."""
    llm = ChatArt(temperature=0.0, seed=20250101, role="cold")
    with recording([completion()] * 4, **TRAINING) as (stub, _):
        with pytest.warns(SamplingOverridden) as told:
            llm.batch(["a", "b"])
        llm.invoke("c")
        llm.invoke("d", seed=4)
    assert len(told) == 1
    assert "temperature=0.0" in str(told[0].message)
    assert [body["temperature"] for body in stub.bodies] == [1.0] * 4
    assert all("seed" not in body for body in stub.bodies)


def test_evaluation_keeps_the_nodes_settings() -> None:
    with recording([completion()]) as (stub, _):
        ChatArt(temperature=0.0, seed=3).invoke("hi")
    assert (stub.bodies[0]["temperature"], stub.bodies[0]["seed"]) == (0.0, 3)


def test_several_answers_at_once_are_refused_in_training() -> None:
    """Case 020."""
    with recording([], **TRAINING), pytest.raises(ConfigError, match="n=2"):
        ChatArt(n=2).invoke("hi")


def test_several_answers_are_branches_elsewhere() -> None:
    """Case 020: the graph gets the first of the list, r1; its ids are its own."""
    body = completion("r1", [8])
    body["choices"][0]["index"] = 1
    body["choices"].append(completion("r0", [7])["choices"][0])
    body["usage"] = usage(3, 2)
    with recording([body]) as (_, scope):
        assert ChatArt(n=2).invoke("hi").content == "r1"
    found = {c.message["content"]: c.sampled_ids for c in scope.calls}
    assert {k: v.tolist() for k, v in found.items() if v is not None} == {"r0": [7], "r1": [8]}


def test_the_name_behind_does_not_change_the_request() -> None:
    """ChatOpenAI turns roles and APIs by the names it knows ("o1", "gpt-5-pro", "codex")."""
    with recording([completion()], model_name="o1-codex@3") as (stub, _):
        ChatArt(temperature=0.3).invoke([("system", "s"), ("user", "u")])
    assert stub.requests[0].path == "/v1/chat/completions"
    assert stub.bodies[0]["messages"][0]["role"] == "system"
    assert (stub.bodies[0]["model"], stub.bodies[0]["temperature"]) == ("o1-codex@3", 0.3)


def test_broken_arguments_are_mended_when_sent_and_raw_when_trained() -> None:
    """Case 005: the server answers 400 to arguments that are no JSON object."""
    raw = '{"path":"a.txt","text":"hel'

    def rule(asked: Any) -> Any:
        for message in asked.body["messages"]:
            for sent in message.get("tool_calls") or []:
                try:
                    assert isinstance(json.loads(sent["function"]["arguments"]), dict)
                except (ValueError, AssertionError):
                    return refusal(400, "arguments are not an object")
        if len(asked.body["messages"]) == 1:
            cut = [call("write", raw)]
            return completion(None, [71, 72, 73], tool_calls=cut, finish_reason="length")
        return completion("ok", [74])

    llm = ChatArt().bind_tools([write])
    with recording(rule) as (_, scope):
        said = llm.invoke([("user", "write it")])
        bad = ToolMessage("bad arguments, try again", tool_call_id="c1", status="error")
        llm.invoke([("user", "write it"), said, bad])
    first, second = scope.calls
    assert second.error is None
    assert first.message["tool_calls"][0]["function"]["arguments"] == raw
    assert first.finish_reason == "length"
    assert first.sampled_ids is not None
    assert first.sampled_ids.tolist() == [71, 72, 73]
    assert sum(len(c.sampled_ids) for c in scope.calls if c.sampled_ids is not None) == 4


@pytest.mark.parametrize(
    ("raw", "valid", "sent"),
    [
        ("", [{}], "{}"),
        ("null", [], "{}"),
        ("[]", [], "{}"),
        ("3", [], "{}"),
        ('{"a": NaN}', [], '{"a": null}'),
        ('{"a": 1}', [{"a": 1}], '{"a": 1}'),
    ],
)
def test_odd_arguments(raw: str, valid: list[Any], sent: str) -> None:
    """Case 003: nothing becomes another valid call, and a strict reader can read what is sent on.

    A bare number makes ChatOpenAI fail inside the node.
    """
    answers = [completion(None, [41, 42], tool_calls=[call("now", raw)]), completion("ok", [43])]
    llm = ChatArt().bind_tools([now])
    with recording(answers) as (stub, scope):
        said = llm.invoke("go")
        llm.invoke([("user", "go"), said, ToolMessage("noon", tool_call_id="c1")])
    assert [c["args"] for c in said.tool_calls] == valid
    assert [c["args"] for c in said.invalid_tool_calls] == ([] if valid else [raw])
    assert scope.calls[0].message["tool_calls"][0]["function"]["arguments"] == raw
    history = stub.bodies[1]["messages"][1]["tool_calls"]
    assert [c["function"]["arguments"] for c in history] == [sent]


# --- what comes back


def test_the_state_of_a_graph_holds_no_token_data() -> None:
    with recording([completion("yo", [5]), streamed("yo", [5, 6])]):
        plain, stream = ChatArt().invoke("hi"), ChatArt(streaming=True).invoke("hi")
    assert "token_id" not in repr(plain)
    assert "token_id" not in repr(stream)


def test_a_context_overflow_is_langchains_own_error() -> None:
    answer = refusal(400, "too long", "context_length_exceeded")
    with recording([answer] * 2), pytest.raises(ContextOverflowError):
        ChatArt().invoke("hi")
    with recording([answer] * 2), pytest.raises(ContextOverflowError):
        list(ChatArt().stream("hi"))


# --- caches


@pytest.fixture
def cache() -> Iterator[None]:
    set_llm_cache(InMemoryCache())
    yield
    set_llm_cache(None)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("is_async", [False, True])
def test_in_a_rollout_nothing_comes_from_the_cache(is_async: bool) -> None:
    """A replayed answer looks like a sample, and is none."""
    llm = ChatArt()
    answers = [completion("a", [1]), completion("b", [2])]
    with recording(answers) as (_, scope):
        for said in ("a", "b"):
            message = asyncio.run(llm.ainvoke("hi")) if is_async else llm.invoke("hi")
            assert message.content == said
    assert len(scope.calls) == 2


@pytest.mark.usefixtures("cache")
def test_outside_the_cache_knows_the_model_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = ChatArt()
    with endpoint([completion("one"), completion("two")]) as stub:
        monkeypatch.setenv("ART_BASE_URL", stub.base_url)
        monkeypatch.setenv("ART_MODEL", "agent@1")
        assert [llm.invoke("hi").content for _ in range(2)] == ["one", "one"]
        monkeypatch.setenv("ART_MODEL", "agent@2")
        assert llm.invoke("hi").content == "two"


def in_bare_thread(work: Any) -> None:
    """Run `work` in a thread that knows nothing of the caller's context."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  # raised below, in the caller's thread
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
