"""OpenAI's responses API, by its clients; the calls are those of chat completions."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

from art_core.engine.base import AdapterRef
from art_core.engine.forms.answer_form import THOUGHTS, AnswerForm
from art_core.engine.serving import LoopbackServer
from art_core.engine.tokenizer import ByteTokenizer
from tests.engine.conftest import CALL, TOOLS, Endpoint, make_endpoint, user

FLAT: Any = [{"type": "function", "strict": None, **tool["function"]} for tool in TOOLS]
"""The tools as this API has them."""


@pytest.fixture
async def client(server: LoopbackServer) -> Any:
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0) as found:
        yield found


async def ask(endpoint: Endpoint, **body: Any) -> dict[str, Any]:
    asked = {"model": "scripted", "input": "hi", **body}
    response = await endpoint.client.post("/v1/responses", json=asked)
    found: dict[str, Any] = response.json()
    return {"status_code": response.status_code, **found}


async def test_an_answer_has_the_apis_shape_and_is_recorded_as_a_chats(
    endpoint: Endpoint, client: openai.AsyncOpenAI
) -> None:
    done = await client.responses.create(
        model="agent", input="hi", instructions="Be short.", metadata={"a": "b"}
    )
    assert (done.output_text, done.status) == ("héllo 😀", "completed")
    assert (done.instructions, done.metadata) == ("Be short.", {"a": "b"})
    assert done.usage is not None
    assert done.model_extra is not None
    record_id = done.model_extra["art_record_id"]
    assert done.model_extra["store"] is False
    assert done.id == f"resp_{record_id}"
    record = endpoint.records.get([record_id])[record_id, 0]
    assert done.model_extra["art_policy"] == "agent@3"
    assert record.request_messages == [{"role": "system", "content": "Be short."}, user()]
    assert record.message == {"role": "assistant", "content": "héllo 😀"}
    assert done.usage.input_tokens == len(record.prompt_ids)
    assert done.usage.output_tokens == len(record.sampled_ids)
    asked = endpoint.asked[-1].prompt_ids.tolist()
    await endpoint.chat(model="agent", messages=record.request_messages)
    assert endpoint.asked[-1].prompt_ids.tolist() == asked


async def test_a_stream_says_the_same_as_a_response(
    endpoint: Endpoint, client: openai.AsyncOpenAI
) -> None:
    endpoint.says = f"See é:\n{CALL}\n{CALL}"
    whole = await client.responses.create(model="scripted", input="hi", tools=FLAT)
    async with client.responses.stream(model="scripted", input="hi", tools=FLAT) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.function_call_arguments.done") == 2
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done")

    def told(response: Any) -> list[Any]:
        said = [item.model_dump(exclude={"id", "call_id"}) for item in response.output]
        for item in said:
            for part in item.get("content") or ():
                part.pop("parsed", None)
            item.pop("parsed_arguments", None)
        return said

    assert told(final) == told(whole)
    assert [item.type for item in whole.output] == ["message", "function_call", "function_call"]
    assert final.usage == whole.usage
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "See é:"


async def test_a_conversation_with_tools_goes_on_without_drift(
    endpoint: Endpoint, client: openai.AsyncOpenAI
) -> None:
    """What was sampled enters the next prompt as its own ids: 257 ends a turn."""
    endpoint.says = lambda prompt: "It is 2." if "<|im_start|>tool\n" in prompt else f"Hm.\n{CALL}"
    history: Any = [{"role": "user", "content": [{"type": "input_text", "text": "1+1?"}]}]
    first = await client.responses.create(model="agent", input=history, tools=FLAT)
    call = first.output[1]
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"a": 1}
    history += [item.model_dump(exclude_none=True) for item in first.output]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "2"})
    second = await client.responses.create(model="agent", input=history, tools=FLAT)
    assert second.output_text == "It is 2."
    one, two = endpoint.asked[-2:]
    head = [*one.prompt_ids.tolist(), *f"Hm.\n{CALL}".encode(), 257]
    assert two.prompt_ids.tolist()[: len(head)] == head
    assert not endpoint.service.drifts


@pytest.mark.parametrize("streaming", [False, True])
async def test_chat_openai_over_this_api_calls_a_tool_and_goes_on(
    endpoint: Endpoint, server: LoopbackServer, streaming: bool
) -> None:
    endpoint.says = lambda prompt: "It is 2." if "<|im_start|>tool\n" in prompt else f"Hm.\n{CALL}"
    model = ChatOpenAI(
        model="agent",
        base_url=server.base_url,
        api_key=SecretStr("none"),
        use_responses_api=True,
        streaming=streaming,
    ).bind_tools(TOOLS)
    first = await model.ainvoke([HumanMessage("1+1?")])
    assert (first.text, first.tool_calls[0]["args"]) == ("Hm.", {"a": 1})
    result = ToolMessage("2", tool_call_id=first.tool_calls[0]["id"] or "")
    second = await model.ainvoke([HumanMessage("1+1?"), first, result])
    assert second.text == "It is 2."
    one, two = endpoint.asked[-2:]
    head = [*one.prompt_ids.tolist(), *f"Hm.\n{CALL}".encode(), 257]
    assert two.prompt_ids.tolist()[: len(head)] == head


class Answer(BaseModel):
    x: int


async def test_settings_formats_and_choices_reach_the_engine(
    endpoint: Endpoint, client: openai.AsyncOpenAI
) -> None:
    endpoint.says = '{"x": 1}'
    parsed = await client.responses.parse(
        model="scripted", input="hi", text_format=Answer, temperature=0.5, top_p=0.9
    )
    assert parsed.output_parsed == Answer(x=1)
    sampling = endpoint.asked[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.grammar) == (0.5, 0.9, "json_schema")
    endpoint.says = CALL
    choice: Any = {"type": "function", "name": "add"}
    forced = await client.responses.create(
        model="scripted", input="hi", tools=FLAT, tool_choice=choice, parallel_tool_calls=False
    )
    assert [item.type for item in forced.output] == ["function_call"]
    assert endpoint.asked[-1].sampling.grammar == "tool_call"
    endpoint.says = "abcdef"
    cut = await client.responses.create(model="scripted", input="hi", max_output_tokens=3)
    assert (cut.status, cut.output_text) == ("incomplete", "abc")
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    logprobs: Any = ["message.output_text.logprobs"]
    body = await ask(endpoint, include=logprobs)
    [part] = body["output"][0]["content"]
    assert len(part["logprobs"]) == 7, "six letters and the turn's end"


async def test_thoughts_are_items_and_go_back_as_they_came() -> None:
    form = AnswerForm(thoughts=THOUGHTS["qwen3"])
    endpoint = await make_endpoint(ByteTokenizer(form=form))
    endpoint.says = "<think>Hm.</think>Yes."
    body = await ask(endpoint)
    assert [item["type"] for item in body["output"]] == ["reasoning", "message"]
    assert body["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    again = await ask(endpoint, input=[user(), *body["output"], user("more")])
    record_id = again["art_record_id"]
    [_, answer, _] = endpoint.records.get([record_id])[record_id, 0].request_messages
    assert answer == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "c"}, "conversation"),
    ({"store": True}, "store"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"include": ["reasoning.encrypted_content"]}, "include"),
    ({"include": "x"}, "include"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"tools": [{"type": "web_search"}]}, "tools.[0].type"),
    ({"tools": 3}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools.[0].function.name"),
    ({"tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice"),
    ({"text": {"format": {"type": "grammar"}}}, "response_format"),
    ({"text": 3}, "text.format"),
    ({"input": None}, "input"),
    ({"input": []}, "messages"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input.[0].type"),
    ({"input": [{"type": "function_call", "name": "a"}]}, "input.[0].arguments"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input.[0].content.[0]",
    ),
    ({"input": [{"role": "bot", "content": "x"}]}, "messages.[0].role"),
    ({"model": None}, "model"),
    ({"temperature": 99}, "temperature"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_can_not_be_honoured_is_refused_by_name(
    endpoint: Endpoint, body: dict[str, Any], param: str, stream: bool
) -> None:
    told = await ask(endpoint, **{"stream": stream, **body})
    assert (told["status_code"], told["error"]["param"]) == (400, param)
    assert endpoint.asked == []


async def test_faults_reach_the_client(endpoint: Endpoint, client: openai.AsyncOpenAI) -> None:
    """The engine is closed at 0.05 s; of its deltas at 0.03, 0.06, 0.09 s one is out."""
    with pytest.raises(openai.NotFoundError, match="Served here"):
        await client.responses.create(model="nobody", input="hi")
    await endpoint.engine.unload_adapter(AdapterRef("agent", 3))
    with pytest.raises(openai.InternalServerError):
        await client.responses.create(model="agent", input="hi", stream=True)
    endpoint.says = "abcdef"
    endpoint.engine.delay = 0.03

    async def read() -> None:
        async for _ in await client.responses.create(model="scripted", input="hi", stream=True):
            pass

    async def close() -> None:
        await asyncio.sleep(0.05)
        await endpoint.engine.close()

    with pytest.raises(openai.APIError, match="closed during a call"):
        await asyncio.gather(read(), close())


async def test_a_held_stream_is_kept_alive_and_a_rollout_is_named(endpoint: Endpoint) -> None:
    """The fixture's keep_alive is 0.05 s and each delta takes 0.2 s."""
    endpoint.engine.delay = 0.2
    response = await endpoint.client.post(
        "/v1/responses",
        json={"model": "scripted", "input": "hi", "stream": True, "max_output_tokens": 1},
        headers={"x-art-rollout": "r"},
    )
    assert ": held\n\n" in response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.rstrip().splitlines()[-2] == "event: response.incomplete"
    [record] = endpoint.records.of_rollout("r")
    assert record.complete
