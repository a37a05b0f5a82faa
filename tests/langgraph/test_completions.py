"""`ReadyCompletions` sends what the client's own resource sends, and gives its answers as JSON."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import openai
import pytest
from langchain_core.messages import BaseMessage
from langchain_openai import ChatOpenAI
from openai.types.completion_usage import PromptTokensDetails
from pydantic import BaseModel

from art_core.capture import open_scope
from art_langgraph import ChatArt
from art_langgraph.completions import AsyncReadyCompletions, ReadyCompletions
from tests.stub_endpoint import DONE, Answer, completion, endpoint, event, refusal

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "What is it? \u2028 é"}, IMAGE]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "a thing"},
]  # fmt: skip
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


class Thing(BaseModel):
    name: str
    size: int = 3


PAYLOADS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5, "stop": ["a", "b"], "logit_bias": {"5": -1}, "n": 2, "stream": False},
    {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False},
    {"extra_body": {"top_k": 4, "model": "other"}, "extra_query": {"q": "1"}},
    {"extra_headers": {"x-one": "1", "User-Agent": "mine"}, "timeout": 7.5, "user": openai.omit},
    {"metadata": {"at": datetime(2026, 1, 2, tzinfo=UTC)}, "prediction": Thing(name="x")},
    {"seed": openai.NOT_GIVEN, "extra_body": {"unknown_field": {"deep": [1, None, True]}}},
]
VOLATILE = {"content-length", "host"}


def assert_pairs(stub: Any) -> None:
    """Requests came in pairs, theirs and ours; forgets them."""
    requests = sent(stub)
    assert requests
    assert requests[::2] == requests[1::2]
    stub.requests.clear()


def sent(stub: Any) -> list[tuple[str, dict[str, str], dict[str, Any]]]:
    """Path, headers and body of each request, less what differs between any two."""
    return [
        (r.path, {k: v for k, v in r.headers.items() if k not in VOLATILE}, r.body)
        for r in stub.requests
    ]


@pytest.mark.parametrize("payload", PAYLOADS)
async def test_requests_and_answers_are_those_of_the_client(payload: dict[str, Any]) -> None:
    given: dict[str, Any] = {"model": "m", "messages": MESSAGES, **payload}
    with endpoint(lambda _: completion("said")) as stub:
        with openai.OpenAI(base_url=stub.base_url, api_key="key") as client:
            ready = ReadyCompletions(client)
            theirs = client.chat.completions.create(**given).to_dict()
            assert ready.create(**given) == theirs
            raw = client.chat.completions.with_raw_response.create(**given).parse()
            assert ready.with_raw_response.create(**given).parse() == raw.to_dict() == theirs
        assert_pairs(stub)
        async with openai.AsyncOpenAI(base_url=stub.base_url, api_key="key") as aclient:
            aready = AsyncReadyCompletions(aclient)
            atheirs = (await aclient.chat.completions.create(**given)).to_dict()
            assert await aready.create(**given) == atheirs == theirs
            araw = (await aclient.chat.completions.with_raw_response.create(**given)).parse()
            ours = (await aready.with_raw_response.create(**given)).parse()
            assert ours == araw.to_dict()
        assert_pairs(stub)


async def test_streams_are_those_of_the_client() -> None:
    events = [event("a"), event("b", finish_reason="stop"), b"[DONE]"]
    given: dict[str, Any] = {"model": "m", "messages": MESSAGES, "stream": True}
    with endpoint(lambda _: Answer(events=events)) as stub:
        with openai.OpenAI(base_url=stub.base_url, api_key="key") as client:
            theirs = [chunk.to_dict() for chunk in client.chat.completions.create(**given)]
            assert list(ReadyCompletions(client).create(**given)) == theirs
            raw = ReadyCompletions(client).with_raw_response.create(**given)
            assert list(raw.parse()) == theirs
        async with openai.AsyncOpenAI(base_url=stub.base_url, api_key="key") as aclient:
            assert [c async for c in await AsyncReadyCompletions(aclient).create(**given)] == theirs
        assert len(theirs) == 2
        theirs_sent, ours_sent, _, _ = sent(stub)
        assert theirs_sent == ours_sent


@pytest.mark.parametrize("status", [400, 401, 404, 409, 422, 429, 500, 503])
def test_errors_and_retries_are_those_of_the_client(status: int) -> None:
    body = {"error": {"message": "no", "code": "some_code"}}
    headers = {"retry-after-ms": "1"}
    tries = []
    with endpoint(lambda _: Answer(body, status=status, headers=headers)) as stub:
        with openai.OpenAI(base_url=stub.base_url, api_key="key", max_retries=2) as client:
            for resource in (client.chat.completions, ReadyCompletions(client)):
                with pytest.raises(openai.APIStatusError) as caught:
                    resource.create(model="m", messages=MESSAGES)  # type: ignore[arg-type]
                error = caught.value
                told = (type(error), error.status_code, error.code, error.body, len(stub.requests))
                tries.append(told)
                stub.requests.clear()
    assert tries[0] == tries[1]
    assert tries[0][-1] == (3 if status in (409, 429, 500, 503) else 1)


@pytest.mark.parametrize(
    "payload",
    [
        {"model": "m", "messages": [], "unknown_field": 1},
        {"model": "m"},
        {"model": "m", "messages": [], "response_format": Thing},
        {"model": "m", "messages": [{"role": "user", "content": object()}]},
    ],
)
def test_what_the_client_refuses_is_refused_in_its_words(payload: dict[str, Any]) -> None:
    said = []
    with openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="key") as client:
        for resource in (client.chat.completions, ReadyCompletions(client)):
            with pytest.raises(TypeError) as caught:
                resource.create(**payload)
            said.append(str(caught.value))
    assert said[0] == said[1]


# --- what LangChain makes of it

DETAILS = PromptTokensDetails(cached_tokens=2).model_dump()
USAGE: dict[str, Any] = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
ODD_CALLS = [CALL, {"id": "c2", "type": "function", "function": {"name": "now"}}]
ANSWERS: dict[str, dict[str, Any]] = {
    "text": completion("said", None),
    "no usage, no ids": {
        "choices": [{"message": {"role": "assistant", "content": "x"}}],
    },
    "calls": completion(None, None, tool_calls=ODD_CALLS),
    "refusal": {
        **completion("", None),
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": None, "refusal": "I won't."},
            }
        ],
    },
    "details": completion(
        "x",
        None,
        usage={**USAGE, "prompt_tokens_details": DETAILS},
        service_tier="flex",
        system_fingerprint="fp",
        id=None,
    ),
    "two": {**completion("a", None), "choices": completion("a", None)["choices"] * 2},
    "function": {
        **completion("", None),
        "choices": [
            {
                "index": 0,
                "finish_reason": "function_call",
                "message": {
                    "role": "assistant",
                    "content": None,
                    "function_call": {"name": "look", "arguments": "{}"},
                },
            }
        ],
    },
}


def models(stub: Any) -> tuple[ChatOpenAI, ChatOpenAI]:
    """Stock, and ours, in the same settings."""
    stock = ChatOpenAI(base_url=stub.base_url, api_key="key", model="agent@3", stream_usage=True)
    return stock, ChatArt()


def told(said: BaseMessage) -> dict[str, Any]:
    """All of a message but the id of its run."""
    return said.model_dump(exclude={"id"})


@pytest.mark.parametrize("name", [*ANSWERS])
async def test_a_message_is_that_of_a_stock_model(name: str) -> None:
    with endpoint(lambda _: ANSWERS[name]) as stub:
        with open_scope(None, {None: stub.target(token_data=False)}):
            stock, ours = models(stub)
            assert told(ours.invoke("q")) == told(stock.invoke("q"))
            assert told(await ours.ainvoke("q")) == told(await stock.ainvoke("q"))


STREAMS: dict[str, list[Any]] = {
    "text": [event("a"), event("b", finish_reason="stop"), {**event(), "choices": []}],
    "calls": [
        event(""),
        {**event(), "choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, **CALL}]}}]},
        event(finish_reason="tool_calls"),
        {**event(), "choices": [], "usage": USAGE, "service_tier": "flex"},
    ],
    "no delta": [event("a"), {"choices": [{"index": 0, "finish_reason": "stop"}]}],
    "calls without an index": [
        event(""),
        {**event(), "choices": [{"index": 0, "delta": {"tool_calls": [CALL]}}]},
        event(finish_reason="tool_calls"),
    ],
    "refusal": [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "refusal": "no"}}]},
        event(finish_reason="stop"),
    ],
    "null choices": [event("a", finish_reason="stop"), {**event(), "choices": None}],
}


@pytest.mark.parametrize("name", [*STREAMS])
async def test_streamed_chunks_are_those_of_a_stock_model(name: str) -> None:
    with endpoint(lambda _: Answer(events=[*STREAMS[name], DONE])) as stub:
        with open_scope(None, {None: stub.target(token_data=False)}):
            stock, ours = models(stub)
            wanted = [told(chunk) for chunk in stock.stream("q")]
            assert [told(chunk) for chunk in ours.stream("q")] == wanted
            assert [told(chunk) async for chunk in ours.astream("q")] == wanted


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422, 429, 500])
async def test_errors_are_those_of_a_stock_model(status: int) -> None:
    kinds = []
    with endpoint(lambda _: refusal(status)) as stub:
        with open_scope(None, {None: stub.target()}):
            for model in models(stub):
                model.max_retries = 0
                model.root_async_client.max_retries = 0
                with pytest.raises(openai.APIStatusError) as caught:
                    await model.ainvoke("q")
                kinds.append(type(caught.value))
    assert kinds[0] is kinds[1]


def test_chat_art_asks_through_it() -> None:
    model = ChatArt()
    assert isinstance(model.client, ReadyCompletions)
    assert isinstance(model.async_client, AsyncReadyCompletions)
