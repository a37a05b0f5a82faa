"""The chat endpoint, by its wire: OpenAI's shapes, our extras, and what bad requests get."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from art_core.calls import Sampling
from art_core.config import SamplingConfig
from art_core.engine.base import AdapterRef
from art_core.engine.chat_service import ChatService
from art_core.engine.scripted import LOGPROB
from art_core.engine.tokenizer import ByteTokenizer
from tests.engine.conftest import CALL, TOOLS, Endpoint, make_endpoint, user

HELLO = "héllo 😀"
HELLO_IDS = [*HELLO.encode(), 257]
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
PROMPT_IDS = [256, *b"user\nhi", 257, 10, 256, *b"assistant\n"]
ASK_ALL: dict[str, Any] = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}


async def test_a_plain_completion_has_openais_shape_and_nothing_more_than_asked(
    endpoint: Endpoint,
) -> None:
    body = await endpoint.chat()
    record_id = body["system_fingerprint"]
    assert body["id"] == f"chatcmpl-{record_id}"
    assert (body["object"], body["model"]) == ("chat.completion", "scripted")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": HELLO},
            "finish_reason": "stop",
            "logprobs": None,
            "art_record_id": record_id,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": len(PROMPT_IDS),
        "completion_tokens": len(HELLO_IDS),
        "total_tokens": len(PROMPT_IDS) + len(HELLO_IDS),
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert "prompt_token_ids" not in body
    assert "art_drift" not in body


async def test_ids_and_logprobs_are_given_when_asked_for(endpoint: Endpoint) -> None:
    """Case 041: top_logprobs 0 is a wish, not an absence."""
    body = await endpoint.chat(**ASK_ALL)
    choice = body["choices"][0]
    assert body["prompt_token_ids"] == PROMPT_IDS
    assert choice["token_ids"] == HELLO_IDS
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [LOGPROB] * len(HELLO_IDS)
    assert content[0] == {"token": "h", "bytes": [104], "logprob": LOGPROB, "top_logprobs": []}
    assert bytes(b for entry in content[:-1] for b in entry["bytes"]).decode() == HELLO
    assert content[-1]["token"] == "<|im_end|>"


async def test_every_call_is_recorded_whatever_the_client_asked(endpoint: Endpoint) -> None:
    body = await endpoint.chat(model="agent@1", rollout="roll", temperature=0.5, tools=TOOLS)
    record = endpoint.record(body)
    assert record.prompt_ids.tolist() == endpoint.asked[0].prompt_ids.tolist()
    assert record.sampled_ids.tolist() == HELLO_IDS
    assert record.logprobs.tolist() == [np.float32(LOGPROB)] * len(HELLO_IDS)
    assert (record.rollout_id, record.model, record.step) == ("roll", "agent", 1)
    assert record.sampling == endpoint.asked[0].sampling
    assert record.message == body["choices"][0]["message"]
    assert record.request_messages == [user()]
    assert record.tools == TOOLS
    assert (record.finish_reason, record.complete) == ("stop", True)
    assert [r.key for r in endpoint.records.of_rollout("roll")] == [record.key]


async def test_a_stream_says_the_same_as_a_completion(endpoint: Endpoint) -> None:
    endpoint.says = f"Let me see é.\n{CALL}\n{CALL}"
    whole = await endpoint.chat(tools=TOOLS, **ASK_ALL)
    chunks = await endpoint.stream(tools=TOOLS, stream_options={"include_usage": True}, **ASK_ALL)
    first, *_, last_choice, usage = chunks
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["system_fingerprint"] for chunk in chunks}) == 1
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    assert first["art_sampling"] | {"seed": 0} == whole["art_sampling"] | {"seed": 0}
    assert last_choice["choices"][0]["delta"] == {}
    assert last_choice["choices"][0]["finish_reason"] == "tool_calls"
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])

    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    deltas = [choice["delta"] for choice in choices]
    message, ids = whole["choices"][0]["message"], whole["choices"][0]["token_ids"]
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
    assert [i for choice in choices for i in choice.get("token_ids", [])] == ids
    logprobs = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
    assert logprobs == whole["choices"][0]["logprobs"]["content"]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 1]
    assert [call["function"] for call in calls] == [c["function"] for c in message["tool_calls"]]
    assert endpoint.record(first).message["tool_calls"][1]["id"] == calls[1]["id"]


async def test_no_part_of_a_tag_and_no_half_character_is_streamed(endpoint: Endpoint) -> None:
    endpoint.says = f"é😀 {CALL}"
    chunks = await endpoint.stream(tools=TOOLS)
    texts = [c["choices"][0]["delta"].get("content", "") for c in chunks]
    assert "".join(texts) == "é😀"
    assert not any("�" in text or "<" in text for text in texts)


async def test_a_stream_without_usage_has_none(endpoint: Endpoint) -> None:
    assert all(chunk["choices"] for chunk in await endpoint.stream())


async def test_several_choices_share_one_record_id(endpoint: Endpoint) -> None:
    endpoint.says = CALL
    body = await endpoint.chat(n=3, tools=TOOLS, rollout="roll", **ASK_ALL)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    ids = [c["message"]["tool_calls"][0]["id"] for c in body["choices"]]
    assert len(set(ids)) == 3
    assert len({request.sampling.seed for request in endpoint.asked}) == 3
    assert body["usage"]["completion_tokens"] == 3 * len([*CALL, "end"])
    assert [r.key for r in endpoint.records.of_rollout("roll")] == [
        (body["system_fingerprint"], i) for i in range(3)
    ]
    chunks = await endpoint.stream(n=2, tools=TOOLS)
    ends = [c["choices"][0] for c in chunks if c["choices"][0]["finish_reason"]]
    assert sorted(choice["index"] for choice in ends) == [0, 1]


async def test_a_rollout_extends_its_calls_and_a_pin_is_answered_by_its_step(
    endpoint: Endpoint,
) -> None:
    endpoint.says = f"Hm.{CALL}"
    first = await endpoint.chat(model="agent@1", rollout="r", tools=TOOLS, **ASK_ALL)
    assert first["art_policy"] == "agent@1"
    message = first["choices"][0]["message"]
    message["tool_calls"][0]["function"]["arguments"] = '{"a": 1}'  # dumped again, as by LangChain
    messages = [
        user(),
        message,
        {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "2"},
    ]
    second = await endpoint.chat(
        model="agent", rollout="r", tools=TOOLS, messages=messages, **ASK_ALL
    )
    assert second["art_policy"] == "agent@3"
    head = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    assert second["prompt_token_ids"][: len(head)] == head
    assert endpoint.asked[1].adapter == AdapterRef("agent", 3)


async def test_token_in_works_without_a_rollout_and_after_a_restart(endpoint: Endpoint) -> None:
    endpoint.says = "a\n"
    for rollout in (None, "r"):
        first = await endpoint.chat(rollout=rollout, **ASK_ALL)
        if rollout is not None:
            endpoint.restart()
        messages = [user(), {"role": "assistant", "content": "a"}, user("b")]
        second = await endpoint.chat(rollout=rollout, messages=messages, **ASK_ALL)
        head = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
        assert second["prompt_token_ids"][: len(head)] == head


async def test_tool_choice_and_formats_become_grammars(endpoint: Endpoint) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    json_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    wishes: list[tuple[dict[str, Any], str | None]] = [
        ({}, None),
        ({"tools": TOOLS}, None),
        ({"tools": TOOLS, "tool_choice": "none"}, None),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_call"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "now"}}},
         "tool_call"),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, "json_schema"),
        ({"response_format": json_format}, "json_schema"),
        ({"response_format": json_format, "tools": TOOLS}, "json_schema"),
    ]  # fmt: skip
    for wish, kind in wishes:
        body = await endpoint.chat(**wish)
        grammar = endpoint.asked[-1].grammar
        assert (grammar.kind if grammar else None) == kind == body["art_sampling"]["grammar"]
        assert endpoint.record(body).sampling.distorted is (kind is not None)
    both = endpoint.asked[-1].grammar
    named = endpoint.asked[4].grammar
    assert both is not None
    assert "answer" in both.lark
    assert "tool_1" in both.lark
    assert named is not None
    assert "now" in named.lark
    assert "tool_1" not in named.lark


async def test_tool_choice_none_reads_no_calls_but_keeps_the_stem(endpoint: Endpoint) -> None:
    endpoint.says = CALL
    body = await endpoint.chat(tools=TOOLS, tool_choice="none")
    assert body["choices"][0]["message"] == {"role": "assistant", "content": CALL}
    assert body["choices"][0]["finish_reason"] == "stop"
    await endpoint.chat(tools=TOOLS)
    none, auto = (request.prompt_ids.tolist() for request in endpoint.asked)
    assert none == auto


async def test_one_call_at_a_time_if_so_asked(endpoint: Endpoint) -> None:
    endpoint.says = f"{CALL}\n{CALL}"
    body = await endpoint.chat(tools=TOOLS, parallel_tool_calls=False, return_token_ids=True)
    assert len(body["choices"][0]["message"]["tool_calls"]) == 1
    assert body["choices"][0]["token_ids"] == list(CALL.encode())


async def test_a_broken_call_says_nothing_untrue(endpoint: Endpoint) -> None:
    endpoint.says = CALL[:-14]
    choice = (await endpoint.chat(tools=TOOLS))["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": CALL[:-14]}
    assert choice["finish_reason"] == "stop"


async def test_length_beats_tool_calls(endpoint: Endpoint) -> None:
    endpoint.says = f"{CALL}\nand more"
    choice = (await endpoint.chat(tools=TOOLS, max_tokens=len(CALL) + 4))["choices"][0]
    assert choice["finish_reason"] == "length"
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["message"]["content"] == "and"


async def test_case_005_broken_arguments_do_not_poison_the_next_request(
    endpoint: Endpoint,
) -> None:
    call = {"name": "add", "arguments": '{"path":"a.txt","text":"hel'}
    messages = [
        user(),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "bad arguments"},
    ]
    body = await endpoint.chat(messages=messages, tools=TOOLS)
    assert endpoint.record(body).request_messages == messages


async def test_settings_reach_the_engine(endpoint: Endpoint) -> None:
    await endpoint.chat(
        temperature=0,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        min_tokens=1,
        max_tokens=9,
        max_completion_tokens=8,
        stop="x",
        seed=-3,
    )
    sampling = endpoint.asked[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.5, 7)
    assert (sampling.min_p, sampling.min_tokens, sampling.max_tokens) == (0.1, 1, 8)
    assert (sampling.stop, sampling.seed) == (("x",), -3)


async def test_what_is_not_named_or_null_comes_from_the_model(endpoint: Endpoint) -> None:
    endpoint.models.publish("agent", 3, sampling=SamplingConfig(temperature=0.3, max_tokens=5))
    await endpoint.chat(model="agent", temperature=None, top_k=-1, stop=None, tools=None, n=None)
    sampling = endpoint.asked[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.3, 0, 5)


async def test_penalties_and_biases_reach_the_engine_and_the_record(endpoint: Endpoint) -> None:
    """What they change was not sampled from the policy alone: the trainer recomputes its logprobs,
    as of every distorted call."""
    body = await endpoint.chat(
        presence_penalty=0.5, frequency_penalty=-1, repetition_penalty=1.2, logit_bias={"7": -100}
    )
    sampling = endpoint.asked[0].sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -1.0)
    assert (sampling.repetition_penalty, sampling.logit_bias) == (1.2, ((7, -100.0),))
    assert sampling.distorted
    assert endpoint.record(body).sampling == sampling
    assert Sampling.from_json(body["art_sampling"]) == sampling


async def test_unknown_and_harmless_fields_are_ignored(endpoint: Endpoint) -> None:
    await endpoint.chat(
        user="u",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        prompt_cache_key="k",
        logit_bias={},
        presence_penalty=0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        stream_options={},
        surprise=[1],
    )


async def test_noise_repeats_with_the_rollout_and_differs_within_it() -> None:
    """A repeated run asks the same and gets the same noise, whatever order its nodes ask in."""

    async def play(rollout: str, texts: list[str]) -> list[tuple[str, int | None]]:
        endpoint = await make_endpoint()
        for text in texts:
            await endpoint.chat(model="agent@0", rollout=rollout, messages=[user(text)])
            endpoint.restart()
        seeds = [request.sampling.seed for request in endpoint.asked]
        return sorted(zip(texts, seeds, strict=True), key=lambda pair: pair[0])

    first = await play("r", ["a", "b", "a"])
    assert first == await play("r", ["a", "a", "b"])
    other = await play("s", ["a"])
    assert len({seed for _, seed in [*first, *other]}) == 4


async def test_an_empty_answer_is_an_answer(endpoint: Endpoint) -> None:
    endpoint.says = ""
    body = await endpoint.chat(return_token_ids=True)
    assert body["choices"][0]["message"]["content"] == ""
    assert body["choices"][0]["token_ids"] == [257]


REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"model": None}, "model", "model is missing"),
    ({"model": 3}, "model", "got 3"),
    ({"messages": []}, "messages", "at least one"),
    ({"messages": [{"role": "bot", "content": "x"}]}, "messages.[0].role", "'bot'"),
    ({"temperature": 11}, "temperature", "0 <= temperature <= 10"),
    ({"temperature": True}, "temperature", "got True"),
    ({"temperature": "hot"}, "temperature", "'hot'"),
    ({"top_p": 0}, "top_p", "0 < top_p <= 1"),
    ({"min_p": 1}, "min_p", "0 <= min_p < 1"),
    ({"top_k": 1.5}, "top_k", "an integer"),
    ({"max_tokens": 0}, "max_tokens", ">= 1"),
    ({"n": 129}, "n", "<= 128"),
    ({"stop": [""]}, "stop", "none empty"),
    ({"stop": ["x"] * 17}, "stop", "at most 16"),
    ({"seed": "x"}, "seed", "an integer"),
    ({"stream": "yes"}, "stream", "'yes'"),
    ({"top_logprobs": 5}, "top_logprobs", "only the sampled token's logprob"),
    ({"logit_bias": {"a": 2}}, "logit_bias", "token ids"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "from -100 to 100"),
    ({"presence_penalty": 2.5}, "presence_penalty", "-2 <= presence_penalty <= 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0 < repetition_penalty"),
    ({"functions": [{}]}, "functions", "Use `tools`"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "Use `response_format`"),
    ({"tools": [{"type": "web_search"}]}, "tools.[0].type", "'web_search'"),
    ({"tools": [{"type": "function"}]}, "tools.[0].function.name", "no name"),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
        "tools.[0].function.parameters",
        "a JSON schema",
    ),
    ({"tool_choice": "any", "tools": TOOLS}, "tool_choice", "'any'"),
    ({"tool_choice": "required"}, "tool_choice", "not there"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": TOOLS},
        "tool_choice",
        "['add', 'now']",
    ),
    ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}},
            }
        },
        "response_format",
        "uniqueItems",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages.[0].content.[0]",
        "'image_url'",
    ),
]


@pytest.mark.parametrize(("body", "param", "says"), REFUSED, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_can_not_be_honoured_is_refused_by_name(
    endpoint: Endpoint, body: dict[str, Any], param: str | None, says: str, stream: bool
) -> None:
    status, error = await endpoint.error(**{"stream": stream, **body})
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert says in error["message"]
    assert endpoint.asked == []


async def test_an_unknown_model_is_404(endpoint: Endpoint) -> None:
    status, error = await endpoint.error(model="agent@2")
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "agent@3" in error["message"]


async def test_a_prompt_that_does_not_fit_is_openais_context_error(endpoint: Endpoint) -> None:
    endpoint.engine.context_length = len(PROMPT_IDS) + 8
    await endpoint.chat(max_tokens=8)
    for body in ({"max_tokens": 9}, {"messages": [user("x" * 100)]}):
        status, error = await endpoint.error(**body)
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert error["message"].startswith(
            f"This model's maximum context length is {len(PROMPT_IDS) + 8} tokens."
        )


async def test_an_engine_fault_is_500_and_what_was_sampled_is_kept(endpoint: Endpoint) -> None:
    await endpoint.engine.unload_adapter(AdapterRef("agent", 3))
    status, error = await endpoint.error(model="agent", rollout="r")
    assert (status, error["type"], error["code"]) == (500, "server_error", "EngineError")
    assert "agent@3" in error["message"]
    [record] = endpoint.records.of_rollout("r")
    assert (record.complete, record.finish_reason, len(record.sampled_ids)) == (False, None, 0)


async def test_a_fault_before_the_first_event_of_a_stream_is_a_status(endpoint: Endpoint) -> None:
    await endpoint.engine.unload_adapter(AdapterRef("agent", 3))
    assert (await endpoint.error(model="agent", stream=True))[0] == 500


async def test_a_fault_within_a_stream_is_an_event_and_no_done(endpoint: Endpoint) -> None:
    """The engine is closed at 0.05 s; of its three deltas at 0.03, 0.06 and 0.09 s one is out."""
    endpoint.says = "abcdef"
    endpoint.engine.delay = 0.03

    async def close() -> None:
        await asyncio.sleep(0.05)
        await endpoint.engine.close()

    response, _ = await asyncio.gather(endpoint.post(stream=True, rollout="r"), close())
    *_, last = response.text.strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "EngineError"
    [record] = endpoint.records.of_rollout("r")
    assert record.complete is False
    assert b"abcdef".startswith(bytes(record.sampled_ids.tolist()))


async def test_a_held_stream_is_kept_alive_by_comments(endpoint: Endpoint) -> None:
    """The fixture's keep_alive is 0.05 s and the answer takes 0.2 s."""
    endpoint.engine.delay = 0.2
    response = await endpoint.post(stream=True, max_tokens=1)
    assert response.text.startswith(": ")
    assert response.text.endswith("data: [DONE]\n\n")
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"


async def test_calls_wait_at_the_gate_and_get_the_policy_that_came_meanwhile(
    endpoint: Endpoint,
) -> None:
    endpoint.service.gate.hold()
    plain = asyncio.ensure_future(endpoint.chat(model="agent"))
    stream = asyncio.ensure_future(endpoint.post(model="agent", stream=True))
    unknown = asyncio.ensure_future(endpoint.post(model="agent@0", stream=True))
    await asyncio.sleep(0.2)  # four times the fixture's keep_alive
    assert endpoint.asked == []
    await endpoint.engine.load_adapter(AdapterRef("agent", 4), Path("nowhere"))
    endpoint.models.publish("agent", 4)
    endpoint.models.retire("agent", 0)
    endpoint.service.gate.release()
    assert (await plain)["art_policy"] == "agent@4"
    text = (await stream).text
    assert text.startswith(": held\n\n: held\n\n")
    assert '"art_policy":"agent@4"' in text
    *_, last = (await unknown).text.strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "model_not_found"


async def test_events_are_single_lines_of_ascii(endpoint: Endpoint) -> None:
    endpoint.says = "a\u2028b\n\n\u0000é"
    response = await endpoint.post(stream=True)
    assert response.text.isascii()
    assert all(line.startswith("data: ") for line in response.text.strip().split("\n\n"))
    chunks = await endpoint.stream()
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    assert text == endpoint.says


BODIES: list[tuple[str, bytes, int, str]] = [
    ("not JSON", b"{", 400, "not JSON"),
    ("trailing", b"{} garbage", 400, "not JSON"),
    ("nested", b"[" * 20_000 + b"]" * 20_000, 400, "not JSON"),
    ("latin-1", b'{"messages":[{"role":"user","content":"caf\xe9"}]}', 400, "UTF-8"),
    ("half character", rb'{"messages":[{"role":"user","content":"\ud83d"}]}', 400, "half a char"),
    ("NaN", b'{"temperature": NaN}', 400, "NaN"),
    ("infinite", b'{"model":"scripted","messages":[],"max_tokens":1e400}', 400, ""),
    ("a list", b"[]", 400, "not a JSON object"),
    ("BOM", b'\xef\xbb\xbf{"model": "scripted"}', 400, "not JSON"),
    ("too large", b"x" * 100_001, 413, "at most 100000"),
]


@pytest.mark.parametrize(
    ("raw", "status", "says"), [b[1:] for b in BODIES], ids=[b[0] for b in BODIES]
)
async def test_case_073_bodies(endpoint: Endpoint, raw: bytes, status: int, says: str) -> None:
    response = await endpoint.client.post("/v1/chat/completions", content=raw)
    assert response.status_code == status
    assert says in response.json()["error"]["message"]


async def test_case_073_a_nul_is_kept_whole(endpoint: Endpoint) -> None:
    body = await endpoint.chat(messages=[user("a\u0000b")])
    assert endpoint.record(body).request_messages == [user("a\u0000b")]


async def test_compressed_bodies_are_not_taken(endpoint: Endpoint) -> None:
    response = await endpoint.client.post(
        "/v1/chat/completions", content=b"x", headers={"content-encoding": "gzip"}
    )
    assert response.status_code == 415


async def test_models_are_listed(endpoint: Endpoint) -> None:
    body = (await endpoint.client.get("/v1/models")).json()
    assert [card["id"] for card in body["data"]] == [
        "scripted", "agent", "agent@0", "agent@1", "agent@3",
    ]  # fmt: skip
    assert (await endpoint.client.get("/v1/models/agent@1")).json()["object"] == "model"
    response = await endpoint.client.get("/v1/models/org/nobody")
    assert response.json()["error"]["code"] == "model_not_found"


async def test_other_routes_and_methods_get_openais_error_shape(endpoint: Endpoint) -> None:
    for method, path, status in [
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/chat/completions", 405),
    ]:
        response = await endpoint.client.request(method, path)
        assert response.status_code == status
        assert "POST /v1/chat/completions" in response.json()["error"]["message"]
    assert (await endpoint.client.get("/health")).json() == {"status": "ok"}


async def test_a_rollout_id_that_is_too_long_is_refused(endpoint: Endpoint) -> None:
    assert (await endpoint.post(rollout="r" * 201)).status_code == 400


async def test_drift_is_counted_and_said() -> None:
    """A template that drops what comes before a bar, where another turn follows."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content if loop.last else m.content.split('|')[-1] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    endpoint = await make_endpoint(ByteTokenizer(template=template))
    endpoint.says = "thought|said"
    first = await endpoint.chat(rollout="r")
    second = await endpoint.chat(
        rollout="r", messages=[user(), first["choices"][0]["message"], user("b")]
    )
    assert second["art_drift"] == "template rewrote history"
    assert endpoint.service.drifts == {"template rewrote history": 1}


async def test_128_chats_side_by_side_get_their_own_answers(endpoint: Endpoint) -> None:
    endpoint.says = lambda prompt: prompt.split("user\n")[1].split("<")[0]
    bodies = await asyncio.gather(
        *(endpoint.chat(messages=[user(str(i))], rollout=str(i % 7)) for i in range(128))
    )
    assert [body["choices"][0]["message"]["content"] for body in bodies] == [
        str(i) for i in range(128)
    ]
    assert len({body["system_fingerprint"] for body in bodies}) == 128


# What the engine is told


async def test_an_engine_may_draw_its_noise_by_itself(endpoint: Endpoint) -> None:
    """Then a call has a seed only if it names one, and its record says so."""
    service = ChatService(endpoint.engine, endpoint.records, endpoint.models, keyed=False)
    body = {"model": "agent", "messages": [user()], "n": 2}
    free = await service.complete(body)
    await service.complete({**body, "seed": 5})
    none, nor, first, second = [asked.sampling.seed for asked in endpoint.asked]
    assert (none, nor, first) == (None, None, 5)
    assert second not in (None, 5)
    assert endpoint.record(free).sampling.seed is None


@pytest.mark.parametrize(
    ("body", "is_looked_at"),
    [
        ({}, False),
        ({"tools": TOOLS}, False),
        ({"stream": True}, True),
        ({"stop": "x"}, True),
        ({"tools": TOOLS, "parallel_tool_calls": False}, True),
    ],
)
async def test_the_engine_knows_whether_anybody_looks_before_the_end(
    endpoint: Endpoint, body: dict[str, Any], is_looked_at: bool
) -> None:
    assert (await endpoint.post(**body)).status_code == 200
    assert [asked.stream for asked in endpoint.asked] == [is_looked_at]
