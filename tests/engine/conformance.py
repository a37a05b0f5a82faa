"""What every engine behind our chat endpoint must do, asked over HTTP by the real `openai` client.

A test module derives from `Conformance` and gives the fixture `served`. What was sampled is held
against `Served.logits`, a plain forward pass of the policy that had to answer.
"""

from __future__ import annotations

import asyncio
import json
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import openai
import pytest
import torch
from openai.types.chat import ChatCompletion
from torch import Tensor

Logits = Callable[[str, Sequence[int], Sequence[int]], Tensor]

ENDLESS = 60
"""Tokens asked for where an answer should not end by itself first."""


@dataclass
class Served:
    """An endpoint and what is known about it."""

    base_url: str
    base_model: str
    """Name under which the base model answers."""
    policies: list[str]
    """Pinned names ("agent@3") of at least three adapters that differ, of two models."""
    latest: dict[str, str]
    """Model name -> the pinned name that it must stand for."""
    logits: Logits
    """(name, prompt ids, sampled ids) -> [S, V]: what predicts each sampled id."""
    noise: float
    """Nats by which a logprob may differ from the plain forward pass."""
    context_length: int
    eos_ids: frozenset[int]
    decode: Callable[[list[int]], str]
    api_key: str = "none"
    block: int = 16
    """Tokens that are kept for later prompts, or not, as a whole."""

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=self.base_url, api_key=self.api_key, max_retries=0, timeout=120
        )

    async def chat(
        self, model: str | None = None, text: str = "hi", *, extra: Any = None, **body: Any
    ) -> ChatCompletion:
        """A completion with ids and logprobs. `extra`: fields that the client does not know."""
        messages: Any = body.pop("messages", [{"role": "user", "content": text}])
        async with self.client() as client:
            done: ChatCompletion = await client.chat.completions.create(
                model=model or self.policies[0],
                messages=messages,
                logprobs=True,
                extra_body={"return_token_ids": True, **(extra or {})},
                **body,
            )
        return done


def prompt_of(done: ChatCompletion) -> list[int]:
    assert done.model_extra is not None
    ids: list[int] = done.model_extra["prompt_token_ids"]
    return ids


def ids_of(done: ChatCompletion, choice: int = 0) -> list[int]:
    extra = done.choices[choice].model_extra
    assert extra is not None
    ids: list[int] = extra["token_ids"]
    return ids


def logprobs_of(done: ChatCompletion, choice: int = 0) -> list[float]:
    logprobs = done.choices[choice].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    return [entry.logprob for entry in logprobs.content]


def text_of(done: ChatCompletion, choice: int = 0) -> str:
    return done.choices[choice].message.content or ""


def cached_of(done: ChatCompletion) -> int:
    assert done.usage is not None
    details = done.usage.prompt_tokens_details
    assert details is not None
    return details.cached_tokens or 0


def tool(name: str, *values: str) -> dict[str, Any]:
    """A tool with one argument out of `values`."""
    parameters = {
        "type": "object",
        "properties": {"x": {"type": "string", "enum": list(values)}},
        "required": ["x"],
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("up", "A", "B"), tool("down", "C")]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad"]}, "sure": {"type": "boolean"}},
    "required": ["mood", "sure"],
    "additionalProperties": False,
}
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


class Serving:
    """What any engine's endpoint does, whatever it samples. Derive as below."""

    async def test_an_unknown_model_is_404_and_names_what_is_there(self, served: Served) -> None:
        for name in ("nobody", f"{served.policies[0]}9"):
            with pytest.raises(openai.NotFoundError) as refused:
                await served.chat(name)
            assert refused.value.code == "model_not_found"
            assert served.policies[0] in str(refused.value)

    async def test_models_are_listed(self, served: Served) -> None:
        async with served.client() as client:
            names = [model.id async for model in client.models.list()]
        assert {served.base_model, *served.policies, *served.latest} <= set(names)

    @pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
    async def test_a_token_limit_ends_the_answer(self, served: Served, field: str) -> None:
        limit: dict[str, Any] = {field: 5}
        done = await served.chat(**limit, extra={"min_tokens": 5})
        assert len(ids_of(done)) == len(logprobs_of(done)) == 5
        assert done.choices[0].finish_reason == "length"

    async def test_usage_counts_what_was_read_and_sampled(self, served: Served) -> None:
        done = await served.chat(n=2, max_tokens=5)
        assert done.usage is not None
        assert done.usage.prompt_tokens == len(prompt_of(done))
        assert done.usage.completion_tokens == len(ids_of(done)) + len(ids_of(done, 1))
        assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens

    async def test_a_prompt_that_does_not_fit_is_openais_error(self, served: Served) -> None:
        bodies: list[dict[str, Any]] = [
            {"text": "x y " * served.context_length},
            {"text": "hi", "max_tokens": served.context_length},
        ]
        for body in bodies:
            with pytest.raises(openai.BadRequestError) as refused:
                await served.chat(**body)
            assert refused.value.code == "context_length_exceeded"

    async def test_a_stream_says_the_same_as_a_completion(self, served: Served) -> None:
        for text in ("hi", "é 漢 🙂 \n"):
            body: dict[str, Any] = {"max_tokens": 20, "seed": 11, "n": 2}
            whole = await served.chat(text=text, **body)
            messages: Any = [{"role": "user", "content": text}]
            texts, reasons = ["", ""], ["", ""]
            ids: list[list[int]] = [[], []]
            logprobs: list[list[float]] = [[], []]
            usage = None
            async with served.client() as client:
                stream = await client.chat.completions.create(
                    model=served.policies[0], messages=messages, stream=True, logprobs=True,
                    stream_options={"include_usage": True},
                    extra_body={"return_token_ids": True}, **body,
                )  # fmt: skip
                async for chunk in stream:
                    usage = chunk.usage or usage
                    for choice in chunk.choices:
                        at = choice.index
                        texts[at] += choice.delta.content or ""
                        reasons[at] = choice.finish_reason or reasons[at]
                        ids[at] += (choice.model_extra or {}).get("token_ids") or []
                        if choice.logprobs is not None and choice.logprobs.content is not None:
                            logprobs[at] += [entry.logprob for entry in choice.logprobs.content]
            assert texts == [text_of(whole, 0), text_of(whole, 1)]
            assert ids == [ids_of(whole, 0), ids_of(whole, 1)]
            assert reasons == [choice.finish_reason for choice in whole.choices]
            for i in range(2):
                np.testing.assert_allclose(
                    logprobs[i], logprobs_of(whole, i), rtol=0, atol=served.noise
                )
            assert usage is not None
            assert whole.usage is not None
            assert usage.completion_tokens == whole.usage.completion_tokens

    async def test_many_at_once_get_their_own_answers(self, served: Served) -> None:
        alone = [await served.chat(text=f"n{i}", max_tokens=5, seed=i) for i in range(3)]
        crowd = await asyncio.gather(
            *(served.chat(text=f"n{i % 3}", max_tokens=5, seed=i % 3) for i in range(24))
        )
        for i, done in enumerate(crowd):
            assert ids_of(done) == ids_of(alone[i % 3])


class Conformance(Serving):
    """Derive, give the fixture `served`, and name the class Test..."""

    def wanted(
        self, served: Served, done: ChatCompletion, name: str, choice: int = 0, t: float = 1.0
    ) -> Tensor:
        """[S, V] log-probabilities of a plain forward pass at temperature `t`."""
        logits = served.logits(name, prompt_of(done), ids_of(done, choice))
        return (logits.double() / t).log_softmax(-1)

    def check(
        self, served: Served, done: ChatCompletion, name: str, choice: int = 0, t: float = 1.0
    ) -> None:
        """The reported logprobs are those of a plain forward pass of policy `name`."""
        ids = ids_of(done, choice)
        wanted = self.wanted(served, done, name, choice, t)[torch.arange(len(ids)), ids]
        np.testing.assert_allclose(logprobs_of(done, choice), wanted, rtol=0, atol=served.noise)

    def check_within(self, served: Served, done: ChatCompletion, keep: Any) -> None:
        """Every id is among `keep(probs, order)`, its probability divided by what they sum to.

        probs: [V] of the plain forward pass; order: their ids, most likely first.
        """
        for choice in range(len(done.choices)):
            probs = self.wanted(served, done, served.policies[0], choice).exp()
            given = logprobs_of(done, choice)
            for row, token, logprob in zip(probs, ids_of(done, choice), given, strict=True):
                kept = keep(row, row.argsort(descending=True))
                assert token in kept
                wanted = float((row[token] / row[kept].sum()).log())
                assert logprob == pytest.approx(wanted, abs=served.noise)

    # Who answers

    async def test_a_name_is_its_latest_step_and_a_pin_is_its_own(self, served: Served) -> None:
        for name, pinned in served.latest.items():
            done = await served.chat(name, max_tokens=8)
            self.check(served, done, pinned)
        for pinned in served.policies:
            self.check(served, await served.chat(pinned, max_tokens=8), pinned)

    async def test_the_base_model_answers_without_an_adapter(self, served: Served) -> None:
        done = await served.chat(served.base_model, max_tokens=8)
        self.check(served, done, served.base_model)

    async def test_policies_differ_by_more_than_the_noise(self, served: Served) -> None:
        """Else the two tests above could not fail."""
        done = await served.chat(served.policies[0], max_tokens=8)
        for other in [served.base_model, *served.policies[1:]]:
            with pytest.raises(AssertionError):
                self.check(served, done, other)

    async def test_several_models_at_once_are_answered_by_their_own_weights(
        self, served: Served
    ) -> None:
        names = [served.base_model, *served.policies] * 2
        done = await asyncio.gather(
            *(
                served.chat(name, f"question {i % 3}", max_tokens=6 + i % 5, seed=i)
                for i, name in enumerate(names)
            )
        )
        for name, answer in zip(names, done, strict=True):
            self.check(served, answer, name)

    # How it samples

    async def test_temperature_zero_takes_the_most_likely(self, served: Served) -> None:
        done = await served.chat(temperature=0, max_tokens=12)
        wanted = self.wanted(served, done, served.policies[0])
        assert ids_of(done) == wanted.argmax(-1).tolist()
        self.check(served, done, served.policies[0])
        again = await served.chat(temperature=0, max_tokens=12, seed=99)
        assert ids_of(again) == ids_of(done)

    @pytest.mark.parametrize("t", [0.5, 1.0, 1.7])
    async def test_logprobs_are_of_the_tempered_distribution(
        self, served: Served, t: float
    ) -> None:
        done = await served.chat(temperature=t, max_tokens=12)
        self.check(served, done, served.policies[0], t=t)

    async def test_top_k(self, served: Served) -> None:
        done = await served.chat(n=3, max_tokens=8, extra={"top_k": 3})
        self.check_within(served, done, lambda probs, order: order[:3])
        assert len({i for choice in range(3) for i in ids_of(done, choice)}) > 3

    async def test_top_p(self, served: Served) -> None:
        done = await served.chat(n=3, max_tokens=8, top_p=0.6)
        self.check_within(served, done, lambda p, order: order[p[order].cumsum(0) - p[order] < 0.6])

    async def test_min_p(self, served: Served) -> None:
        done = await served.chat(n=3, max_tokens=8, extra={"min_p": 0.3})
        self.check_within(served, done, lambda p, order: order[p[order] >= 0.3 * p.max()])

    async def test_min_tokens_holds_the_end_back(self, served: Served) -> None:
        done = await served.chat(max_tokens=6, extra={"min_tokens": 6})
        assert not served.eos_ids & set(ids_of(done))
        free = torch.ones(self.wanted(served, done, served.policies[0]).shape[1], dtype=torch.bool)
        free[sorted(served.eos_ids)] = False
        everything = free.nonzero().squeeze(1)
        self.check_within(served, done, lambda probs, order: everything)

    async def test_the_same_seed_gives_the_same_ids_and_another_gives_others(
        self, served: Served
    ) -> None:
        once, twice, other = await asyncio.gather(
            *(served.chat(max_tokens=12, seed=seed) for seed in (1, 1, 2))
        )
        assert ids_of(once) == ids_of(twice) != ids_of(other)
        crowd = [served.chat(text=f"{i}", max_tokens=12, seed=i) for i in range(8)]
        alike, *_ = await asyncio.gather(served.chat(max_tokens=12, seed=1), *crowd)
        assert ids_of(alike) == ids_of(once)

    async def test_several_choices_are_samples_of_their_own(self, served: Served) -> None:
        done = await served.chat(n=4, max_tokens=8, seed=3)
        assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
        assert len({tuple(ids_of(done, i)) for i in range(4)}) == 4
        for i in range(4):
            self.check(served, done, served.policies[0], choice=i)
        again = await served.chat(n=4, max_tokens=8, seed=3)
        assert [ids_of(again, i) for i in range(4)] == [ids_of(done, i) for i in range(4)]

    # Where it ends

    async def test_a_stop_string_is_cut_from_the_text_and_not_from_the_ids(
        self, served: Served
    ) -> None:
        body: dict[str, Any] = {"temperature": 0, "max_tokens": ENDLESS}
        whole = text_of(await served.chat(**body))
        plain = string.ascii_letters + string.digits + string.punctuation
        stop = next(char for char in whole[3:] if char in plain and char not in whole[:3])
        done = await served.chat(**body, stop=[stop, "not in there"])
        assert text_of(done) == whole.split(stop)[0]
        assert done.choices[0].finish_reason == "stop"
        assert served.decode(ids_of(done)).startswith(text_of(done) + stop)
        self.check(served, done, served.policies[0])

    # Tools and formats

    async def test_a_required_call_is_one_of_the_tools(self, served: Served) -> None:
        done = await served.chat(
            tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=100
        )
        [call] = done.choices[0].message.tool_calls or []
        assert call.type == "function"
        allowed = {"up": ["A", "B"], "down": ["C"]}
        assert json.loads(call.function.arguments)["x"] in allowed[call.function.name]
        assert done.choices[0].finish_reason == "tool_calls"

    @pytest.mark.parametrize("name", ["up", "down"])
    async def test_a_named_tool_is_called(self, served: Served, name: str) -> None:
        choice = {"type": "function", "function": {"name": name}}
        done = await served.chat(tools=TOOLS, tool_choice=choice, max_tokens=100)
        [call] = done.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == name
        assert json.loads(call.function.arguments).keys() == {"x"}

    async def test_a_free_choice_shows_the_tools_and_forces_nothing(self, served: Served) -> None:
        plain = await served.chat(max_tokens=5)
        for choice in ("auto", "none"):
            done = await served.chat(tools=TOOLS, tool_choice=choice, max_tokens=5)
            assert len(prompt_of(done)) > len(prompt_of(plain))
            self.check(served, done, served.policies[0])

    async def test_an_answer_by_a_schema_is_json_by_that_schema(self, served: Served) -> None:
        done = await served.chat(response_format=JSON_FORMAT, n=4, max_tokens=100)
        for i, choice in enumerate(done.choices):
            answer = json.loads(text_of(done, i))
            assert answer.keys() == {"mood", "sure"}
            assert answer["mood"] in ("good", "bad")
            assert isinstance(answer["sure"], bool)
            assert choice.finish_reason == "stop"

    # What it keeps

    async def test_a_second_turn_is_read_from_the_cache(self, served: Served) -> None:
        """All but the last sampled token, which was never computed, in whole blocks."""
        text = "a question that is long enough to fill more than one block of a cache, " * 3
        first = await served.chat(text=text, max_tokens=8)
        messages = [
            {"role": "user", "content": text},
            {"role": "assistant", "content": text_of(first)},
            {"role": "user", "content": "and now?"},
        ]
        second = await served.chat(messages=messages, max_tokens=4)
        kept = (len(prompt_of(first)) + 7) // served.block * served.block
        assert cached_of(second) >= kept > 0
        self.check(served, second, served.policies[0])
