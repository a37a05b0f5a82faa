"""The endpoint on a real port, with the clients that people have."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

from art_core.engine.openai_routes import create_app
from art_core.engine.serving import LoopbackServer
from art_core.errors import EngineError
from tests.engine.conftest import CALL, TOOLS, Endpoint, user

Messages = Any
"""openai types messages as a union of typed dicts, which plain dicts in a variable are not."""


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait at most so long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        time.sleep(0.005)


async def in_thread(work: Callable[[], Any]) -> Any:
    """Run sync client code beside the test's loop."""
    return await asyncio.get_running_loop().run_in_executor(None, work)


async def test_the_sync_openai_client(endpoint: Endpoint, server: LoopbackServer) -> None:
    def work() -> None:
        with openai.OpenAI(base_url=server.base_url, api_key="none") as client:
            messages: Messages = [user()]
            done = client.chat.completions.create(
                model="agent",
                messages=messages,
                logprobs=True,
                top_logprobs=0,
                extra_body={"return_token_ids": True},
            )
            choice = done.choices[0]
            assert choice.message.content == "héllo 😀"
            assert choice.logprobs is not None
            assert choice.logprobs.content is not None
            assert choice.model_extra is not None
            assert len(choice.logprobs.content) == len(choice.model_extra["token_ids"])
            assert choice.model_extra["art_record_id"] == done.system_fingerprint
            chunks = client.chat.completions.create(model="agent@0", messages=messages, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            assert text == "héllo 😀"
            assert "agent@3" in {model.id for model in client.models.list()}
            with pytest.raises(openai.NotFoundError, match="Served here: scripted, agent"):
                client.chat.completions.create(model="nobody", messages=messages)

    await in_thread(work)


async def test_the_async_openai_client(endpoint: Endpoint, server: LoopbackServer) -> None:
    endpoint.says = f"See:\n{CALL}"
    messages: Messages = [user()]
    tools: Any = TOOLS
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none") as client:
        stream = client.chat.completions.stream(model="scripted", messages=messages, tools=tools)
        async with stream as events:
            final = await events.get_final_completion()
        message = final.choices[0].message
        assert message.content == "See:"
        assert message.tool_calls is not None
        assert message.tool_calls[0].function.arguments == '{"a":1}'
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(
                model="scripted", messages=messages, max_tokens=10**9
            )
        assert refused.value.code == "context_length_exceeded"


class Answer(BaseModel):
    x: int


def chat_openai(server: LoopbackServer, **settings: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model="agent", base_url=server.base_url, api_key=SecretStr("none"), **settings
    )


async def test_chat_openai_calls_a_tool_and_goes_on_without_drift(
    endpoint: Endpoint, server: LoopbackServer
) -> None:
    """LangChain parses the arguments and dumps them again; the ids stay those that were sampled."""
    endpoint.says = lambda prompt: "It is 2." if "<|im_start|>tool\n" in prompt else f"Hm.\n{CALL}"
    for streaming in (False, True):
        model = chat_openai(server, streaming=streaming).bind_tools(TOOLS)
        first = await model.ainvoke([HumanMessage("1+1?")])
        assert (first.content, first.tool_calls[0]["args"]) == ("Hm.", {"a": 1})
        result = ToolMessage("2", tool_call_id=first.tool_calls[0]["id"] or "")
        second = await model.ainvoke([HumanMessage("1+1?"), first, result])
        assert second.content == "It is 2."
        one, two = endpoint.asked[-2:]
        head = [*one.prompt_ids.tolist(), *f"Hm.\n{CALL}".encode(), 257]
        assert two.prompt_ids.tolist()[: len(head)] == head
        fingerprint = str(second.response_metadata["system_fingerprint"])
        assert endpoint.records.get([fingerprint])[fingerprint, 0].step == 3


async def test_chat_openai_gets_structured_output(
    endpoint: Endpoint, server: LoopbackServer
) -> None:
    model = chat_openai(server)
    endpoint.says = '{"x": 1}'
    for method in ("json_schema", "json_mode"):
        got = await model.with_structured_output(Answer, method=method).ainvoke("json please")
        assert got == Answer(x=1)
        grammar = endpoint.asked[-1].grammar
        assert grammar is not None
        assert grammar.kind == "json_schema"
    endpoint.says = '<tool_call>\n{"name": "Answer", "arguments": {"x": 2}}\n</tool_call>'
    forced = model.with_structured_output(Answer, method="function_calling")
    assert await forced.ainvoke("call please") == Answer(x=2)
    grammar = endpoint.asked[-1].grammar
    assert grammar is not None
    assert grammar.kind == "tool_call"


def connect(server: LoopbackServer) -> socket.socket:
    port = int(server.base_url.split(":")[2].split("/")[0])
    return socket.create_connection(("127.0.0.1", port), timeout=5)


def send_raw(server: LoopbackServer, body: dict[str, Any]) -> socket.socket:
    """A request sent, its answer not read."""
    connection = connect(server)
    raw = json.dumps({"model": "scripted", "messages": [user()], **body}).encode()
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Art-Rollout: gone\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw
    )
    return connection


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_cancels_its_call_and_leaves_a_record(
    endpoint: Endpoint, server: LoopbackServer, stream: bool
) -> None:
    endpoint.says = "abc" * 1000
    endpoint.engine.delay = 0.01

    def work() -> None:
        connection = send_raw(server, {"stream": stream})
        wait_for(lambda: endpoint.engine.running == 1)
        if stream:
            assert connection.recv(10) == b"HTTP/1.1 2"
        connection.close()
        wait_for(lambda: endpoint.engine.cancelled == 1)
        wait_for(lambda: len(endpoint.records.of_rollout("gone")) == 1)

    await in_thread(work)
    [record] = endpoint.records.of_rollout("gone")
    assert record.complete is False
    assert record.finish_reason is None
    assert 0 < len(record.sampled_ids) < 3000 or not stream
    assert bytes(record.sampled_ids.tolist()) == (b"abc" * 1000)[: len(record.sampled_ids)]
    assert record.message["content"] == "abc" * (len(record.sampled_ids) // 3)


async def test_a_consumer_that_stops_early_cancels_too(
    endpoint: Endpoint, server: LoopbackServer
) -> None:
    """Case 012, consumer_stops."""
    endpoint.says = "abc" * 1000
    endpoint.engine.delay = 0.01

    def work() -> None:
        for _ in chat_openai(server).stream("hi"):
            break
        wait_for(lambda: endpoint.engine.cancelled == 1)

    await in_thread(work)


@pytest.mark.parametrize(("stream", "says"), [(False, b"HTTP/1.1 503"), (True, b"HTTP/1.1 200")])
async def test_stop_is_bounded_while_calls_are_held(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture, stream: bool, says: bytes
) -> None:
    """A call held for an hour; the server lets calls go on for 2 s, then cancels them."""
    endpoint.engine.delay = 3600.0
    others = set(threading.enumerate())
    server = LoopbackServer(create_app(endpoint.service)).start()

    def work() -> tuple[float, bytes]:
        with send_raw(server, {"stream": stream}) as connection:
            wait_for(lambda: endpoint.engine.running == 1)
            begun = time.monotonic()
            server.stop()
            server.stop()
            seconds = time.monotonic() - begun
            return seconds, b"".join(iter(lambda: connection.recv(65_536), b""))

    seconds, answer = await in_thread(work)
    assert seconds < 8
    assert answer.startswith(says)
    assert b"the server is stopping" in answer
    assert "Traceback" not in caplog.text
    left = set(threading.enumerate()) - others
    assert not any(t.name.startswith("art-endpoint") for t in left)
    [record] = endpoint.records.of_rollout("gone")
    assert record.complete is False


async def test_several_servers_run_side_by_side(endpoint: Endpoint) -> None:
    app = create_app(endpoint.service)
    with LoopbackServer(app) as one, LoopbackServer(app) as two:
        assert one.base_url != two.base_url
        async with httpx.AsyncClient() as client:
            for server in (one, two):
                assert (await client.get(f"{server.base_url}/models")).status_code == 200
            one.stop()
            assert (await client.get(f"{two.base_url}/models")).status_code == 200


async def test_a_taken_port_is_said(server: LoopbackServer, endpoint: Endpoint) -> None:
    port = int(server.base_url.split(":")[2].split("/")[0])
    with pytest.raises(EngineError, match=str(port)):
        LoopbackServer(create_app(endpoint.service), port=port).start()
