"""`POST /tokenize` and what the list of models says: in vLLM's shapes, and true."""

from __future__ import annotations

from typing import Any

import pytest

from art_core.engine.api_errors import ApiError
from art_core.engine.tokenizer import ByteTokenizer
from tests.engine.conftest import TOOLS, Endpoint, make_endpoint, user


async def tokenized(endpoint: Endpoint, rollout: str | None = None, **body: Any) -> dict[str, Any]:
    headers = {} if rollout is None else {"x-art-rollout": rollout}
    response = await endpoint.client.post("/tokenize", json=body, headers=headers)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == endpoint.engine.context_length
    return found


async def test_a_text_is_its_ids_alone(endpoint: Endpoint) -> None:
    """Bytes of UTF-8; <|im_end|> is id 257 of the byte tokenizer; nothing is put in front."""
    found = await tokenized(endpoint, model="agent@3", prompt="é<|im_end|>")
    assert found["tokens"] == [195, 169, 257]
    assert found["token_strs"] is None
    found = await tokenized(endpoint, prompt="hi", add_special_tokens=True, return_token_strs=True)
    assert (found["tokens"], found["token_strs"]) == ([104, 105], ["h", "i"])
    assert (await tokenized(endpoint, prompt=""))["tokens"] == []


@pytest.mark.parametrize("tools", [None, TOOLS])
async def test_a_chat_is_the_prompt_of_its_call(endpoint: Endpoint, tools: Any) -> None:
    asked: dict[str, Any] = {"messages": [user("hi")], "tools": tools}
    found = await tokenized(endpoint, model="agent", **asked)
    called = await endpoint.chat(model="agent", return_token_ids=True, **asked)
    assert found["tokens"] == called["prompt_token_ids"]


async def test_in_a_rollout_it_has_the_ids_that_were_sampled(endpoint: Endpoint) -> None:
    """The script's arguments are spelled without spaces, which the template would put in."""
    endpoint.says = '<tool_call>\n{"name":"add","arguments":{"a":1}}\n</tool_call>'
    first = await endpoint.chat(rollout="r", messages=[user()], tools=TOOLS)
    said = first["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "2"}
    asked: dict[str, Any] = {"messages": [user(), said, result], "tools": TOOLS}
    inside = await tokenized(endpoint, rollout="r", **asked)
    called = await endpoint.chat(rollout="r", return_token_ids=True, **asked)
    assert inside["tokens"] == called["prompt_token_ids"]
    assert inside["count"] != (await tokenized(endpoint, rollout="other", **asked))["count"]


async def test_the_opening_of_an_answer_can_be_left_out(endpoint: Endpoint) -> None:
    asked: dict[str, Any] = {"messages": [user("hi")]}
    whole = await tokenized(endpoint, **asked)
    less = await tokenized(endpoint, add_generation_prompt=False, **asked)
    opening = endpoint.engine.tokenizer.encode("<|im_start|>assistant\n")
    assert less["tokens"] + opening == whole["tokens"]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ([], 400, "not a JSON object"),
        ({}, 400, "either a string `prompt` or a list of `messages`"),
        ({"prompt": 3}, 400, "either"),
        ({"prompt": "a", "messages": [user()]}, 400, "either"),
        ({"messages": []}, 400, "at least one message"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "unknown message role"),
        ({"messages": [user()], "tools": [3]}, 400, "tool"),
        ({"messages": [user()], "chat_template": "x"}, 400, "chat_template is not supported"),
        ({"prompt": "a", "model": "gpt-4o"}, 404, "Served here"),
    ],
)
async def test_what_can_not_be_tokenised_is_named(
    endpoint: Endpoint, body: Any, status: int, words: str
) -> None:
    response = await endpoint.client.post("/tokenize", json=body)
    assert response.status_code == status
    assert words in response.json()["error"]["message"]


async def test_a_models_card_says_what_it_can_do(endpoint: Endpoint) -> None:
    cards = (await endpoint.client.get("/v1/models")).json()["data"]
    assert [card["id"] for card in cards][:2] == ["scripted", "agent"]
    for card in cards:
        assert card["max_model_len"] == endpoint.engine.context_length
        assert card["art_profile"]["tool_calling"] is True
        assert card["art_profile"]["structured_output"] is True
        assert card["art_profile"]["image_inputs"] is False
    assert (await endpoint.client.get("/v1/models/agent")).json() == cards[1]


async def test_a_template_without_tools_promises_none() -> None:
    class Plain(ByteTokenizer):
        def render(self, messages: Any, *, tools: Any = None, **settings: Any) -> str:
            if tools:
                raise ApiError("this model's template knows no tools")
            return super().render(messages, **settings)

    endpoint = await make_endpoint(Plain())
    (card, *_) = (await endpoint.client.get("/v1/models")).json()["data"]
    assert card["art_profile"]["tool_calling"] is False
    assert card["art_profile"]["structured_output"] is True
    await endpoint.client.aclose()
    endpoint.records.close()
