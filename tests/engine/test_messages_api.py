"""Anthropic's messages API, with its own client; the calls are those of chat completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from art_core.engine.base import AdapterRef
from art_core.engine.forms.answer_form import THOUGHTS, AnswerForm
from art_core.engine.serving import LoopbackServer
from art_core.engine.tokenizer import ByteTokenizer
from tests.engine.conftest import CALL, TOOLS, Endpoint, make_endpoint, user

anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")

THEIRS: Any = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"].get("description", "Adds"),
        "input_schema": tool["function"].get("parameters", {"type": "object"}),
    }
    for tool in TOOLS
]
HI: Any = [user()]


@pytest.fixture
async def client(server: LoopbackServer) -> AsyncIterator[Any]:
    url = server.base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as found:
        yield found


async def ask(endpoint: Endpoint, **body: Any) -> dict[str, Any]:
    asked = {"model": "scripted", "max_tokens": 100, "messages": HI, **body}
    response = await endpoint.client.post("/v1/messages", json=asked)
    found: dict[str, Any] = response.json()
    return {"status_code": response.status_code, **found}


async def test_an_answer_has_the_apis_shape_and_is_recorded_as_a_chats(
    endpoint: Endpoint, client: Any
) -> None:
    done = await client.messages.create(
        model="agent",
        max_tokens=100,
        system="Be short.",
        messages=HI,
        extra_body={"temperature": 0.5},
    )
    assert [block.text for block in done.content] == ["héllo 😀"]
    assert (done.stop_reason, done.stop_sequence, done.role) == ("end_turn", None, "assistant")
    record_id = done.art_record_id
    assert (done.id, done.art_policy) == (f"msg_{record_id}", "agent@3")
    record = endpoint.records.get([record_id])[record_id, 0]
    assert record.request_messages == [{"role": "system", "content": "Be short."}, user()]
    assert record.message == {"role": "assistant", "content": "héllo 😀"}
    assert done.usage.input_tokens == len(record.prompt_ids)
    assert done.usage.output_tokens == len(record.sampled_ids)
    assert (record.sampling.temperature, record.sampling.max_tokens) == (0.5, 100)
    counted = await client.messages.count_tokens(model="agent", system="Be short.", messages=HI)
    assert counted.input_tokens == len(record.prompt_ids)


async def test_a_stream_says_the_same_as_a_message(endpoint: Endpoint, client: Any) -> None:
    endpoint.says = f"See é:\n{CALL}\n{CALL}"
    asked: Any = {"model": "scripted", "max_tokens": 500, "messages": HI, "tools": THEIRS}
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_message()
    assert [block.type for block in whole.content] == ["text", "tool_use", "tool_use"]
    assert whole.content[1].input == {"a": 1}
    plain = [block.model_dump(exclude={"id", "parsed_output"}) for block in whole.content]
    told = [block.model_dump(exclude={"id", "parsed_output"}) for block in final.content]
    assert told == plain
    assert (final.stop_reason, whole.stop_reason) == ("tool_use", "tool_use")
    assert final.usage.model_dump() == whole.usage.model_dump()
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3


async def test_a_conversation_with_tools_goes_on_without_drift(
    endpoint: Endpoint, client: Any
) -> None:
    """What was sampled enters the next prompt as its own ids: 257 ends a turn."""
    endpoint.says = lambda prompt: "It is 2." if "<|im_start|>tool\n" in prompt else f"Hm.\n{CALL}"
    history: Any = [{"role": "user", "content": [{"type": "text", "text": "1+1?"}]}]
    asked: Any = {"model": "agent", "max_tokens": 500, "tools": THEIRS}
    first = await client.messages.create(messages=history, **asked)
    content = [block.model_dump(exclude_none=True) for block in first.content]
    result = {
        "type": "tool_result",
        "tool_use_id": first.content[1].id,
        "content": [{"type": "text", "text": "2"}],
    }
    history += [
        {"role": "assistant", "content": content},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    second = await client.messages.create(messages=history, **asked)
    assert second.content[0].text == "It is 2."
    record = endpoint.records.get([second.art_record_id])[second.art_record_id, 0]
    roles = [message["role"] for message in record.request_messages]
    assert roles == ["user", "assistant", "tool", "user"]
    one, two = endpoint.asked[-2:]
    head = [*one.prompt_ids.tolist(), *f"Hm.\n{CALL}".encode(), 257]
    assert two.prompt_ids.tolist()[: len(head)] == head
    assert not endpoint.service.drifts


@pytest.mark.parametrize("streaming", [False, True])
async def test_langchains_client_calls_a_tool_and_goes_on(
    endpoint: Endpoint, server: LoopbackServer, streaming: bool
) -> None:
    langchain = pytest.importorskip("langchain_anthropic", reason="it is not installed")
    from langchain_core.messages import HumanMessage, ToolMessage

    endpoint.says = lambda prompt: "It is 2." if "<|im_start|>tool\n" in prompt else f"Hm.\n{CALL}"
    url = server.base_url.removesuffix("/v1")
    chat = langchain.ChatAnthropic(
        model="agent", base_url=url, api_key="none", max_tokens=500, streaming=streaming
    )
    model = chat.bind_tools(THEIRS)
    first = await model.ainvoke([HumanMessage("1+1?")])
    assert (first.text, first.tool_calls[0]["args"]) == ("Hm.", {"a": 1})
    result = ToolMessage("2", tool_call_id=first.tool_calls[0]["id"])
    second = await model.ainvoke([HumanMessage("1+1?"), first, result])
    assert second.text == "It is 2."
    await chat._async_client.close()  # which it leaves to the end of the process
    one, two = endpoint.asked[-2:]
    head = [*one.prompt_ids.tolist(), *f"Hm.\n{CALL}".encode(), 257]
    assert two.prompt_ids.tolist()[: len(head)] == head


async def test_endings_choices_and_formats(endpoint: Endpoint) -> None:
    endpoint.says = "one two three"
    for stream in (False, True):
        body = await ask(endpoint, stop_sequences=["two"]) if not stream else {}
        if stream:
            asked = {"model": "scripted", "max_tokens": 9, "messages": HI, "stream": True}
            response = await endpoint.client.post(
                "/v1/messages", json={**asked, "stop_sequences": ["two"]}
            )
            assert '"stop_reason":"stop_sequence","stop_sequence":"two"' in response.text
        else:
            assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "two")
            assert body["content"] == [{"type": "text", "text": "one "}]
    body = await ask(endpoint, max_tokens=3)
    assert (body["stop_reason"], body["content"][0]["text"]) == ("max_tokens", "one")
    endpoint.says = CALL
    for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
        once = {**choice, "disable_parallel_tool_use": True}
        body = await ask(endpoint, tools=THEIRS, tool_choice=once)
        assert [block["type"] for block in body["content"]] == ["tool_use"]
        assert endpoint.asked[-1].sampling.grammar == "tool_call"
    endpoint.says = '{"x": 1}'
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    await ask(endpoint, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert endpoint.asked[-1].sampling.grammar == "json_schema"
    endpoint.says = ""
    assert (await ask(endpoint))["content"] == []


async def test_thoughts_are_blocks_and_go_back_as_they_came() -> None:
    form = AnswerForm(thoughts=THOUGHTS["qwen3"])
    endpoint = await make_endpoint(ByteTokenizer(form=form))
    endpoint.says = "<think>Hm.</think>Yes."
    body = await ask(endpoint)
    assert body["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "Yes."},
    ]
    answered = {"role": "assistant", "content": body["content"]}
    again = await ask(endpoint, messages=[user(), answered, user("more")])
    record_id = again["art_record_id"]
    [_, answer, _] = endpoint.records.get([record_id])[record_id, 0].request_messages
    assert answer == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens is missing"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking is not supported"),
    ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
    ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "'web_search_20250305'"),
    ({"tool_choice": {"type": "some"}}, "tool_choice is not supported"),
    ({"tool_choice": {"type": "any"}}, "a tool that is not there"),
    ({"messages": [user(), {"role": "assistant", "content": "The"}]}, "the last message"),
    ({"messages": [{"role": "bot", "content": "x"}]}, "unknown message role"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
    ({"messages": [{"role": "user"}]}, "a list of objects"),
    ({"messages": []}, "at least one message"),
    ({"messages": "hi"}, "a list of objects"),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}, user()]},
        "'redacted_thinking'",
    ),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ({"temperature": -1}, "temperature is out of range"),
]


@pytest.mark.parametrize(("body", "says"), REFUSED, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_can_not_be_honoured_is_refused_in_their_shape(
    endpoint: Endpoint, body: dict[str, Any], says: str, stream: bool
) -> None:
    told = await ask(endpoint, **{"stream": stream, **body})
    assert (told["status_code"], told["type"]) == (400, "error")
    assert told["error"]["type"] == "invalid_request_error"
    assert says in told["error"]["message"]
    assert endpoint.asked == []


async def test_faults_reach_the_client(endpoint: Endpoint, client: Any) -> None:
    """The engine is closed at 0.05 s; of its deltas at 0.03, 0.06, 0.09 s one is out."""
    asked: Any = {"max_tokens": 100, "messages": HI}
    with pytest.raises(anthropic.NotFoundError, match="Served here"):
        await client.messages.create(model="nobody", **asked)
    endpoint.engine.context_length = 60
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        await client.messages.create(model="scripted", **asked)
    endpoint.engine.context_length = 32_768
    await endpoint.engine.unload_adapter(AdapterRef("agent", 3))
    with pytest.raises(anthropic.InternalServerError):
        await client.messages.create(model="agent", stream=True, **asked)
    endpoint.says = "abcdef"
    endpoint.engine.delay = 0.03

    async def read() -> None:
        async for _ in await client.messages.create(model="scripted", stream=True, **asked):
            pass

    async def close() -> None:
        await asyncio.sleep(0.05)
        await endpoint.engine.close()

    with pytest.raises(anthropic.APIStatusError, match="closed during a call"):
        await asyncio.gather(read(), close())


async def test_a_held_stream_is_kept_alive_by_pings(endpoint: Endpoint) -> None:
    """The fixture's keep_alive is 0.05 s and each delta takes 0.2 s."""
    endpoint.engine.delay = 0.2
    asked = {"model": "scripted", "max_tokens": 1, "messages": HI, "stream": True}
    response = await endpoint.client.post("/v1/messages", json=asked)
    assert "event: ping\n" in response.text
    assert response.text.rstrip().splitlines()[-2] == "event: message_stop"
