"""The wire tee under real OpenAI clients: routes, bodies, retries, streams, loops, threads."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from contextlib import suppress
from typing import Any

import httpx2
import openai
import pytest

from art_core.calls import ModelCall
from art_core.capture import Scope, Target, open_scope
from art_core.config import SamplingConfig
from art_core.route import Route, overridden, prepare_body, route_to
from art_core.slim import SlimStream
from art_core.transport import PLACEHOLDER_URL, async_client, sync_client
from tests.stub_endpoint import (
    DONE,
    Answer,
    Endpoint,
    completion,
    endpoint,
    event,
    refusal,
    streamed,
)

HI: list[Any] = [{"role": "user", "content": "hi"}]


def client_to(stub: Endpoint, **settings: Any) -> openai.OpenAI:
    route = route_to(stub.target(), "agent")
    return openai.OpenAI(
        base_url=stub.base_url, api_key="key", http_client=sync_client(route), **settings
    )


def async_client_to(stub: Endpoint, **settings: Any) -> openai.AsyncOpenAI:
    route = route_to(stub.target(), "agent")
    return openai.AsyncOpenAI(
        base_url=stub.base_url, api_key="key", http_client=async_client(route), **settings
    )


def ids(call: ModelCall) -> list[int] | None:
    return None if call.sampled_ids is None else call.sampled_ids.tolist()


# --- plain calls


def test_a_call_is_recorded_and_the_client_gets_what_it_asked_for() -> None:
    with endpoint([completion("yo", [5, 6])]) as stub, open_scope("r1") as scope:
        answer = client_to(stub).chat.completions.create(model="agent", messages=HI)
    assert answer.choices[0].message.content == "yo"
    assert answer.choices[0].logprobs is None
    assert answer.choices[0].model_extra == {}
    (kept,) = scope.calls
    assert ids(kept) == [5, 6]
    assert kept.trainable
    assert b"token_id:5" in kept.response
    assert kept.request == stub.bodies[0]
    assert stub.bodies[0] == {
        "messages": HI,
        "model": "agent@3",
        "return_token_ids": True,
        "logprobs": True,
        "top_logprobs": 0,
    }
    assert stub.requests[0].headers["x-art-rollout"] == "r1"
    assert stub.requests[0].headers["authorization"] == "Bearer key"


def test_what_the_client_did_ask_for_it_gets() -> None:
    with endpoint([completion("yo", [5, 6])]) as stub, open_scope() as scope:
        answer = client_to(stub).chat.completions.create(
            model="agent",
            messages=HI,
            logprobs=True,
            top_logprobs=2,
            extra_body={"return_token_ids": True},
        )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.logprob for entry in logprobs.content] == [-0.1, -0.11]
    assert answer.choices[0].model_extra == {"token_ids": [5, 6]}
    assert stub.bodies[0]["top_logprobs"] == 2
    assert ids(scope.calls[0]) == [5, 6]


def test_outside_a_scope_a_request_is_sent_as_it_is() -> None:
    with endpoint([completion(ids=None)]) as stub:
        client_to(stub).chat.completions.create(model="agent", messages=HI)
    assert stub.bodies == [{"messages": HI, "model": "agent@3"}]
    assert "x-art-rollout" not in stub.requests[0].headers


def test_a_provider_that_knows_no_token_ids_is_not_asked_for_them() -> None:
    with endpoint([completion(ids=None, prompt_ids=None)]) as stub, open_scope() as scope:
        route = route_to(stub.target(token_data=False))
        client = openai.OpenAI(
            base_url=stub.base_url, api_key="key", http_client=sync_client(route)
        )
        client.chat.completions.create(model="agent@3", messages=HI)
    assert stub.bodies == [{"messages": HI, "model": "agent@3"}]
    assert scope.calls[0].error is None
    assert scope.calls[0].left_out == "other model"


@pytest.mark.parametrize(
    ("answer", "left_out"),
    [
        (completion(ids=[5], prompt_ids=None), None),
        (refusal(400), "not answered"),
    ],
)
def test_what_else_is_known_of_such_a_call_counts(answer: Any, left_out: str | None) -> None:
    """Ids that came unasked, as of our own endpoint by another name; or why there is no answer."""
    with endpoint([answer]) as stub, open_scope() as scope:
        route = route_to(stub.target(token_data=False))
        client = openai.OpenAI(
            base_url=stub.base_url, api_key="key", http_client=sync_client(route)
        )
        with suppress(openai.BadRequestError):
            client.chat.completions.create(model="agent@3", messages=HI)
    assert scope.calls[0].left_out == left_out


@pytest.mark.parametrize(("asked", "sent"), [("agent", "agent@3"), ("agent@1", "agent@1")])
def test_another_step_than_the_targets_may_be_asked_for(asked: str, sent: str) -> None:
    with endpoint([completion()]) as stub, open_scope() as scope:
        client_to(stub).chat.completions.create(model=asked, messages=HI)
    assert stub.bodies[0]["model"] == sent
    assert scope.calls[0].step == int(sent[-1])


def test_a_placeholder_client_goes_where_the_route_says_with_its_key() -> None:
    with endpoint([completion()]) as stub, open_scope() as scope:
        route = Route(stub.target(api_key="other"), scope)
        client = openai.OpenAI(
            base_url=PLACEHOLDER_URL, api_key="none", http_client=sync_client(lambda: route)
        )
        client.chat.completions.create(model="any", messages=HI)
    assert stub.requests[0].path == "/v1/chat/completions"
    assert stub.requests[0].headers["authorization"] == "Bearer other"
    assert stub.requests[0].headers["host"] == stub.base_url.split("/")[2]
    assert stub.bodies[0]["model"] == "agent@3"


async def test_async_calls_are_recorded_too() -> None:
    with endpoint([completion("yo", [5, 6])]) as stub, open_scope() as scope:
        answer = await async_client_to(stub).chat.completions.create(model="agent", messages=HI)
    assert answer.choices[0].message.content == "yo"
    assert ids(scope.calls[0]) == [5, 6]


def test_a_compressed_answer_is_read() -> None:
    """We ask for plain bytes; a server may compress all the same."""
    answer = Answer(completion("yo", [5]), compressed=True)
    with endpoint([answer]) as stub, open_scope() as scope:
        said = client_to(stub).chat.completions.create(model="agent", messages=HI)
    assert said.choices[0].message.content == "yo"
    assert ids(scope.calls[0]) == [5]
    assert scope.calls[0].response.startswith(b"{")


def test_other_endpoints_of_a_server_pass_and_are_noted() -> None:
    body = {"id": "1", "object": "text_completion", "choices": []}
    with endpoint([body]) as stub, open_scope() as scope:
        client_to(stub).completions.create(model="agent", prompt="hi")
    assert stub.requests[0].path == "/v1/completions"
    assert "/v1/completions" in scope.incomplete[0]
    assert scope.calls == []


# --- failures


def test_a_retried_attempt_leaves_one_trainable_record() -> None:
    """The failed attempt is kept as an error without ids."""
    answers: list[Any] = [refusal(503, "busy"), completion("yo", [5])]
    with endpoint(answers) as stub, open_scope() as scope:
        client_to(stub, max_retries=1).chat.completions.create(model="agent", messages=HI)
    assert [call.error for call in scope.calls] == ["HTTP 503: busy", None]
    assert [ids(call) for call in scope.calls] == [None, [5]]


def test_an_answer_cut_in_the_middle_is_an_error_and_asked_for_again() -> None:
    answers: list[Any] = [Answer(completion("yo", [5]), cut=True), completion("yo", [5])]
    with endpoint(answers) as stub, open_scope() as scope:
        client_to(stub, max_retries=1).chat.completions.create(model="agent", messages=HI)
    assert [call.error is None for call in scope.calls] == [False, True]
    assert [call.trainable for call in scope.calls] == [False, True]


def test_a_refused_connection_is_an_error_call() -> None:
    with endpoint([]) as stub:
        pass
    with open_scope() as scope, pytest.raises(openai.APIConnectionError):
        client_to(stub, max_retries=0).chat.completions.create(model="agent", messages=HI)
    (kept,) = scope.calls
    assert kept.error is not None
    assert "ConnectError" in kept.error
    assert kept.request["messages"] == HI


def test_a_redirect_is_not_followed() -> None:
    """A key must not travel to where a server points."""
    answer = Answer({}, status=307, headers={"Location": "http://127.0.0.1:1/v1"})
    with endpoint([answer]) as stub, open_scope() as scope, pytest.raises(openai.APIStatusError):
        client_to(stub).chat.completions.create(model="agent", messages=HI)
    assert len(stub.requests) == 1
    assert scope.calls[0].error is not None


async def test_a_cancelled_call_is_an_error_call() -> None:
    until = threading.Event()
    with endpoint([Answer(completion(), until=until)]) as stub, open_scope() as scope:
        client = async_client_to(stub)
        task = asyncio.create_task(client.chat.completions.create(model="agent", messages=HI))
        await asyncio.to_thread(stub.came.wait, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        until.set()
    assert [call.error for call in scope.calls] == ["CancelledError"]
    assert scope.open_calls == 0


# --- streams


def test_a_stream_is_recorded_and_slim_for_the_client() -> None:
    with endpoint([streamed("yo", [5, 6])]) as stub, open_scope() as scope:
        parts = list(
            client_to(stub).chat.completions.create(model="agent", messages=HI, stream=True)
        )
    assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == "yo"
    assert all(p.choices[0].logprobs is None for p in parts if p.choices)
    (kept,) = scope.calls
    assert kept.trainable
    assert ids(kept) == [5, 6]
    assert kept.message == {"role": "assistant", "content": "yo"}


async def test_an_async_stream_is_recorded_too() -> None:
    with endpoint([streamed("yo", [5, 6])]) as stub, open_scope() as scope:
        stream = await async_client_to(stub).chat.completions.create(
            model="agent", messages=HI, stream=True
        )
        assert len([part async for part in stream]) == 4
    assert ids(scope.calls[0]) == [5, 6]
    assert scope.calls[0].trainable


def test_a_consumer_that_stops_early_leaves_an_incomplete_call() -> None:
    """Case 012, consumer_stops: nothing trainable, no call left open."""
    until = threading.Event()
    answer = Answer(events=[event("a", [3]), event("b", [4], finish_reason="stop")], until=until)
    with endpoint([answer]) as stub, open_scope() as scope:
        stream = client_to(stub).chat.completions.create(model="agent", messages=HI, stream=True)
        next(iter(stream))
        stream.close()
        assert scope.open_calls == 0
        until.set()
    (kept,) = scope.calls
    assert kept.error == "the client closed the response before its end"
    assert not kept.trainable
    assert kept.message["content"] == "a"


async def test_an_async_consumer_that_forgets_its_stream_leaves_an_incomplete_call() -> None:
    until = threading.Event()
    answer = Answer(events=[event("a", [3]), event("b", [4], finish_reason="stop")], until=until)
    with endpoint([answer]) as stub, open_scope() as scope:
        stream = await async_client_to(stub).chat.completions.create(
            model="agent", messages=HI, stream=True
        )
        async for _ in stream:
            break
        await stream.close()
        until.set()
    assert [call.error is None for call in scope.calls] == [False]


def test_an_error_midway_is_kept_with_what_came_before() -> None:
    """Case 012, error_midway."""
    answer = Answer(events=[event("par", [3]), {"error": {"message": "engine died"}}])
    with endpoint([answer]) as stub, open_scope() as scope, pytest.raises(openai.APIError):
        list(client_to(stub).chat.completions.create(model="agent", messages=HI, stream=True))
    (kept,) = scope.calls
    assert kept.error is not None
    assert "engine died" in kept.error
    assert kept.message["content"] == "par"


def test_a_stream_cut_on_the_wire_is_an_error() -> None:
    answer = Answer(events=[event("par", [3])], cut=True)
    with endpoint([answer]) as stub, open_scope() as scope, pytest.raises(openai.APIError):
        list(client_to(stub).chat.completions.create(model="agent", messages=HI, stream=True))
    assert [call.trainable for call in scope.calls] == [False]
    assert scope.calls[0].error is not None


def test_a_response_open_when_the_scope_ends_is_recorded() -> None:
    until = threading.Event()
    answer = Answer(events=[event("a", [3]), DONE], until=until)
    with endpoint([answer]) as stub:
        with open_scope() as scope:
            stream = client_to(stub).chat.completions.create(
                model="agent", messages=HI, stream=True
            )
            next(iter(stream))
        until.set()
        list(stream)
    (kept,) = scope.calls
    assert kept.error == "the rollout ended while this call was open"


class _Closing(Scope):
    """Closes a response while its call is being recorded, as a garbage collection may."""

    response: Any = None

    def add(self, call: ModelCall, place: int | None = None) -> None:
        self.response.close()
        super().add(call, place)


def test_a_response_may_be_closed_while_its_call_is_recorded() -> None:
    """A stream left in a reference cycle is closed by whatever runs when it is collected."""
    with endpoint([Answer(events=[event("a", [3]), DONE])]) as stub:
        scope = _Closing("r")
        client = openai.OpenAI(
            base_url=stub.base_url,
            api_key="key",
            http_client=sync_client(lambda: Route(stub.target(), scope)),
        )
        stream = client.chat.completions.create(model="agent", messages=HI, stream=True)
        scope.response = stream.response
        closing = threading.Thread(target=scope.close, daemon=True)
        closing.start()
        closing.join(10)
    assert not closing.is_alive()
    assert [c.error for c in scope.calls] == ["the rollout ended while this call was open"]


def test_an_empty_finish_reason_in_every_event_holds_nothing_back() -> None:
    """Some servers send one; the first letter must not wait for the last."""
    slim = SlimStream({})
    first = b"data: " + completion_event("a", [3], finish_reason="") + b"\n\n"
    assert b'"content":"a"' in slim.feed(first)


def streamed_parts(stub: Endpoint) -> list[Any]:
    return list(client_to(stub).chat.completions.create(model="agent", messages=HI, stream=True))


@pytest.mark.parametrize(
    "odd",
    [
        b"event: ping\n\n",
        b"id: 7\n\n: held\n\n",
        b"retry: 1000\n\n",
        b"event: chunk\nid: 8\ndata: " + b'{"choices": []}' + b"\n\n",
        b'data: {"choices":\ndata: []}\n\n',
        b'\xef\xbb\xbfdata: {"choices": []}\n\n',
        b"event: ping\r\n\r\n",
    ],
)
def test_events_that_the_client_can_not_read_do_not_reach_it(odd: bytes) -> None:
    """OpenAI's client reads "" as JSON where an event has no data, or after an id comments."""
    pieces = [odd, event("a", [3]), odd, event("b", [4], finish_reason="stop"), odd, DONE]
    with endpoint([Answer(events=pieces)]) as stub, open_scope() as scope:
        parts = streamed_parts(stub)
    said = [choice.delta.content or "" for part in parts for choice in part.choices]
    assert "".join(said) == "ab"
    assert ids(scope.calls[0]) == [3, 4]


def test_several_finish_reasons_reach_the_client_once() -> None:
    """Case 012 and the like: LangChain would say "stopstop"; the last one counts, as recorded."""
    pieces = [
        event("a", [3]),
        event(finish_reason="stop"),
        event(finish_reason="tool_calls"),
        event("", [4], finish_reason="tool_calls"),
        {**event(), "choices": [{"index": 1, "delta": {}, "finish_reason": "stop"}]},
        DONE,
    ]
    with endpoint([Answer(events=pieces)]) as stub, open_scope() as scope:
        parts = streamed_parts(stub)
    told = [(c.index, c.finish_reason) for part in parts for c in part.choices]
    assert told == [(0, None), (0, None), (0, None), (0, "tool_calls"), (1, "stop")]
    assert [call.finish_reason for call in scope.calls] == ["tool_calls", "stop"]


def test_a_last_event_without_its_blank_line_reaches_the_client() -> None:
    ending = b"data: " + completion_event("b", [4], finish_reason="stop")
    with endpoint([Answer(events=[event("a", [3]), ending])]) as stub, open_scope() as scope:
        parts = streamed_parts(stub)
    assert [part.choices[0].delta.content for part in parts] == ["a", "b"]
    assert (ids(scope.calls[0]), scope.calls[0].error) == ([3, 4], None)


def test_blank_lines_of_mixed_line_ends_lose_the_client_nothing() -> None:
    """Such a stream is one block until its end; the client gets all of it."""
    raw = [completion_event("a", [3]), completion_event("b", [4], finish_reason="stop"), b"[DONE]"]
    pieces = [b"data: " + body + b"\n\r\n" for body in raw]
    with endpoint([Answer(events=pieces)]) as stub, open_scope() as scope:
        parts = list(
            client_to(stub).chat.completions.create(model="agent", messages=HI, stream=True)
        )
    assert "".join(p.choices[0].delta.content or "" for p in parts) == "ab"
    assert ids(scope.calls[0]) == [3, 4]


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [1, 7, 4096])
def test_the_client_reads_a_stream_in_whatever_pieces_it_comes(line_end: bytes, size: int) -> None:
    """Case 069, the way to the client: the text is the same for every split."""
    raw = b"".join(
        b"data: " + body + line_end + line_end
        for body in (
            completion_event("a bc 😀 ", [3]),
            completion_event("end", [4], finish_reason="stop"),
            b"[DONE]",
        )
    )
    pieces = [raw[i : i + size] for i in range(0, len(raw), size)]
    with endpoint([Answer(events=pieces)]) as stub, open_scope() as scope:
        parts = list(
            client_to(stub).chat.completions.create(model="agent", messages=HI, stream=True)
        )
    assert "".join(p.choices[0].delta.content or "" for p in parts) == "a bc 😀 end"
    assert all(p.choices[0].logprobs is None for p in parts)
    assert ids(scope.calls[0]) == [3, 4]


def completion_event(content: str, ids: list[int], finish_reason: str | None = None) -> bytes:
    return json.dumps(event(content, ids, finish_reason=finish_reason), ensure_ascii=False).encode()


# --- loops and threads


@pytest.mark.filterwarnings("error")
def test_one_client_serves_several_event_loops() -> None:
    """Case 017: a notebook calls `asyncio.run` once a step. Each loop closes what it opened."""
    with endpoint([completion("a", [1]), completion("b", [2])]) as stub:
        client = async_client_to(stub)

        async def ask() -> ModelCall:
            with open_scope() as scope:
                await client.chat.completions.create(model="agent", messages=HI)
            return scope.calls[0]

        assert [ids(asyncio.run(ask())) for _ in range(2)] == [[1], [2]]
    gc.collect()  # an unclosed socket would warn here


def test_threads_share_a_client_and_keep_their_scopes() -> None:
    def echo(asked: Any) -> dict[str, Any]:
        return completion(asked.body["messages"][0]["content"], [1])

    with endpoint(echo) as stub:
        client = client_to(stub)
        found: dict[str, list[str]] = {}

        def play(name: str) -> None:
            with open_scope(name) as scope:
                for i in range(3):
                    said: list[Any] = [{"role": "user", "content": f"{name}-{i}"}]
                    client.chat.completions.create(model="agent", messages=said)
            found[name] = [call.message["content"] for call in scope.calls]

        threads = [threading.Thread(target=play, args=(f"t{i}",)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {f"t{i}": [f"t{i}-{n}" for n in range(3)] for i in range(8)}


def test_loopback_never_goes_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 075, proxy."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://proxy.invalid:1")
    with endpoint([completion()]) as stub, open_scope() as scope:
        client_to(stub, max_retries=0).chat.completions.create(model="agent", messages=HI)
    assert scope.calls[0].error is None


def test_other_hosts_go_through_the_proxy_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with endpoint([completion()]) as proxy, open_scope() as scope:
        monkeypatch.setenv("http_proxy", proxy.base_url.removesuffix("/v1"))
        monkeypatch.setenv("no_proxy", "")
        route = route_to(Target("http://gpu-box.invalid/v1", "key", "agent@3"))
        client = openai.OpenAI(
            base_url="http://gpu-box.invalid/v1", api_key="key", http_client=sync_client(route)
        )
        client.chat.completions.create(model="agent@3", messages=HI)
    assert proxy.requests[0].path == "http://gpu-box.invalid/v1/chat/completions"
    assert scope.calls[0].error is None


def test_the_client_is_of_the_kind_that_openai_wants() -> None:
    assert isinstance(sync_client(_no_route), httpx2.Client)
    assert isinstance(async_client(_no_route), httpx2.AsyncClient)


def _no_route() -> Route:
    raise AssertionError("not asked")


# --- bodies


TRAINING = SamplingConfig(temperature=0.8, top_k=20, max_tokens=64)


def training(**settings: Any) -> Target:
    given = {"sampling": TRAINING, "trains": True, **settings}
    return Target("http://127.0.0.1/v1", "k", "agent", **given)


def sent(body: dict[str, Any], target: Target) -> dict[str, Any]:
    return prepare_body({"model": "art", "messages": [], **body}, Route(target))


def test_training_samples_with_its_own_settings() -> None:
    asked = {"temperature": 0.0, "top_p": 0.5, "min_p": 0.2, "seed": 7, "presence_penalty": 1.0}
    assert sent(asked, training()) == {
        "model": "agent",
        "messages": [],
        "temperature": 0.8,
        "top_p": 1.0,
        "top_k": 20,
        "max_completion_tokens": 64,
    }
    assert overridden(asked, training()) == asked


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_that_the_caller_names_is_kept(name: str) -> None:
    body = sent({name: 5}, training())
    assert body[name] == 5
    assert len([key for key in body if key.startswith("max_")]) == 1


def test_without_training_the_settings_fill_in_what_is_open() -> None:
    body = sent({"temperature": 0.0, "seed": 7}, training(trains=False))
    assert (body["temperature"], body["seed"], body["top_p"], body["top_k"]) == (0.0, 7, 1.0, 20)


def test_without_settings_a_body_changes_its_model_only() -> None:
    asked = {"temperature": 0.0, "seed": None}
    assert sent(asked, training(sampling=None)) == {"model": "agent", "messages": [], **asked}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"temperature": 0.8},
        {"temperature": None, "seed": None},
        {"top_k": 20, "min_p": 0},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
        {"logit_bias": {}},
        {"stop": ["x"], "max_tokens": 3},
    ],
)
def test_what_is_the_same_or_off_is_not_overridden(body: dict[str, Any]) -> None:
    assert overridden(body, training()) == {}


def test_nothing_is_overridden_outside_training() -> None:
    assert overridden({"temperature": 0.0}, training(trains=False)) == {}
    assert overridden({"temperature": 0.0}, training(sampling=None)) == {}
