"""OpenAI's completions API: a prompt without a template, recorded, part of no conversation."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from art_core.engine.forms.answer_form import THOUGHTS, AnswerForm
from art_core.engine.serving import LoopbackServer
from art_core.engine.tokenizer import ByteTokenizer
from tests.engine.conftest import CALL, Endpoint, make_endpoint, user


async def ask(endpoint: Endpoint, **body: Any) -> dict[str, Any]:
    asked = {"model": "scripted", "prompt": "Once", **body}
    headers = {"x-art-rollout": "r"}
    response = await endpoint.client.post("/v1/completions", json=asked, headers=headers)
    found: dict[str, Any] = response.json()
    return {"status_code": response.status_code, **found}


async def test_the_openai_client_plain_and_streamed(
    endpoint: Endpoint, server: LoopbackServer
) -> None:
    """Of 16 tokens, the default, "héllo 😀" needs 12: 11 bytes and the end."""
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none") as client:
        asked: Any = {"model": "agent", "prompt": "Once", "n": 2, "logprobs": 0}
        whole = await client.completions.create(**asked)
        assert [(c.index, c.text, c.finish_reason) for c in whole.choices] == [
            (0, "héllo 😀", "stop"),
            (1, "héllo 😀", "stop"),
        ]
        logprobs = whole.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        assert len(logprobs.token_logprobs) == 12
        assert whole.system_fingerprint is not None
        record = endpoint.records.get([whole.system_fingerprint])[whole.system_fingerprint, 0]
        assert bytes(record.prompt_ids.tolist()) == b"Once"
        assert (record.request_messages, record.step) == ([], 3)
        options: Any = {"include_usage": True}
        chunks = await client.completions.create(**asked, stream=True, stream_options=options)
        texts, last = {0: "", 1: ""}, None
        async for chunk in chunks:
            last = chunk
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == {0: "héllo 😀", 1: "héllo 😀"}
        assert last is not None
        assert last.usage == whole.usage
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="nobody", prompt="x")


async def test_nothing_in_an_answer_is_anything_but_text() -> None:
    endpoint = await make_endpoint(ByteTokenizer(form=AnswerForm(thoughts=THOUGHTS["qwen3"])))
    endpoint.says = f"<think>Hm.</think>{CALL}"
    body = await ask(endpoint, max_tokens=500)
    assert body["choices"][0]["text"] == endpoint.says


async def test_ids_are_taken_as_they_are_and_a_limit_holds(endpoint: Endpoint) -> None:
    endpoint.says = "x" * 100
    for prompt in ([79, 110], [[79, 110]], ["On"]):
        body = await ask(endpoint, prompt=prompt)
        assert endpoint.asked[-1].prompt_ids.tolist() == [79, 110]
        assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == (
            "x" * 16,
            "length",
        )


async def test_it_is_no_part_of_a_conversation_also_after_a_restart(endpoint: Endpoint) -> None:
    """A chat that quotes the answer is rendered and encoded, as it is without the completion."""
    endpoint.says = "abc"
    await ask(endpoint)
    answered = {"role": "assistant", "content": "abc"}
    for _ in range(2):
        await endpoint.chat(messages=[user(), answered, user()], rollout="r")
        assert endpoint.service.drifts == {}
        endpoint.restart()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [[1], [2]]}, "prompt"),
    ({"prompt": [1, True]}, "prompt"),
    ({"prompt": [1, 10_000]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"echo": True}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"logprobs": 5}, "logprobs"),
    ({"best_of": 2}, "best_of"),
    ({"tools": [{}]}, "tools"),
    ({"messages": [user()]}, "messages"),
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


async def test_a_fault_within_a_stream_reaches_the_client(
    endpoint: Endpoint, server: LoopbackServer
) -> None:
    """The engine is closed at 0.05 s; of its deltas at 0.03, 0.06, 0.09 s one is out."""
    endpoint.says = "abcdef"
    endpoint.engine.delay = 0.03

    async def read() -> None:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none") as client:
            async for _ in await client.completions.create(
                model="scripted", prompt="x", stream=True
            ):
                pass

    async def close() -> None:
        await asyncio.sleep(0.05)
        await endpoint.engine.close()

    with pytest.raises(openai.APIError, match="closed during a call"):
        await asyncio.gather(read(), close())
