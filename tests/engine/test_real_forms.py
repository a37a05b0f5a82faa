"""Agents on real models' chat templates: calls and thoughts are read, the next prompt takes them.

The samples are what each template itself writes for an answer that calls a tool, thinking first
where it shows thoughts; the tokenizer is bytes with the model's special tokens.
"""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from art_core.engine.answer import Answer
from art_core.engine.base import Delta
from art_core.engine.forms.answer_form import find_form
from art_core.engine.forms.spelling import Speller
from art_core.engine.grammar import GrammarMatcher, json_grammar, tool_call_grammar
from art_core.engine.messages import template_messages
from art_core.engine.openai_routes import ChatService, ModelRegistry
from art_core.engine.prompt import PromptBuild
from art_core.engine.scripted import ScriptedEngine
from art_core.engine.tokenizer import ByteTokenizer
from art_core.records import RecordStore
from tests.engine.test_grammar import accepts
from tests.engine.test_prompt import Rollout
from tests.readiness.models import files

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks a city up.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]
ARGUMENTS = '{"city": "Oslo", "days": 2}'
THOUGHT = "<think>\nA city.\n</think>\n\n"
LLAMA = f'{{"name": "look", "parameters": {ARGUMENTS}}}'
HERMES = f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>'
XML = """A city.
</think>

<tool_call>
<function=look>
<parameter=city>
Oslo
</parameter>
<parameter=days>
2
</parameter>
</function>
</tool_call>"""
CHANNELS = (
    "<|channel|>analysis<|message|>A city.<|end|><|start|>assistant"
    f"<|channel|>commentary to=functions.look <|constrain|>json<|message|>{ARGUMENTS}"
)
MISTRAL = f'[TOOL_CALLS][{{"name": "look", "arguments": {ARGUMENTS}, "id": "Xy3Xy3Xy3"}}]'
CASES = {
    "llama-3.1-8b": (LLAMA, "<|eot_id|>"),
    "llama-3.2-1b": (LLAMA, "<|eot_id|>"),
    "qwen2.5-0.5b": (HERMES, "<|im_end|>"),
    "qwen3-8b": (THOUGHT + HERMES, "<|im_end|>"),
    "qwen3.5-27b": (XML, "<|im_end|>"),
    "mistral-nemo": (MISTRAL, "</s>"),
    "gpt-oss-20b": (CHANNELS, "<|call|>"),
}
"""What each model samples, and the token that ends it."""
THINKING = {"qwen3-8b", "qwen3.5-27b", "gpt-oss-20b"}


class Tokens(ByteTokenizer):
    """Bytes with the special tokens of a real model."""

    def __init__(self, name: str) -> None:
        model = files(name)
        assert model.template is not None
        form = find_form(model.template, model.special_tokens)
        end = CASES[name][1]
        super().__init__(sorted(model.special_tokens), eos=end, template=model.template, form=form)
        self._template._names.update(model.names)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("portion", [1, 1000])
def test_a_call_is_read_as_the_model_writes_it(name: str, portion: int) -> None:
    tokenizer = Tokens(name)
    assert tokenizer.form.doubts == ()
    sample, end = CASES[name]
    ids = tokenizer.encode(sample + end)
    prompt = tokenizer.render([{"role": "user", "content": "q"}], tools=TOOLS)
    answer = Answer(tokenizer, call_id_prefix="c", tools=TOOLS, prompt=prompt)
    for at in range(0, len(ids), portion):
        part = ids[at : at + portion]
        answer.take(Delta(part, [-0.5] * len(part), "stop" if at + portion >= len(ids) else None))
        if answer.finish_reason:
            break
    message = answer.message
    [call] = message["tool_calls"]
    assert call["function"]["name"] == "look"
    assert template_messages([message])[0]["tool_calls"][0]["function"]["arguments"] == {
        "city": "Oslo",
        "days": 2,
    }
    assert message["content"] is None
    assert message.get("reasoning_content") == ("A city." if name in THINKING else None)
    assert answer.finish_reason == "tool_calls"


@pytest.mark.parametrize("gives_back", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_next_prompt_goes_on_from_what_was_sampled(name: str, gives_back: bool) -> None:
    """Two calls in a row: the ids that were sampled stand in the prompts as they were."""
    tokenizer = Tokens(name)
    rollout = Rollout(tokenizer, TOOLS)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "q"}]
    sample, _ = CASES[name]
    for _ in range(2):
        said = rollout.text(messages, sample)
        if not gives_back:
            said.pop("reasoning_content", None)
        [call] = said["tool_calls"]
        messages += [said, {"role": "tool", "tool_call_id": call["id"], "content": "r"}]
        before = rollout.last
        prompt: PromptBuild = rollout.prompt(messages)
        assert prompt.drift is None
        assert prompt.ids.tolist()[: len(before)] == before


@pytest.mark.parametrize("name", CASES)
async def test_the_endpoint_gives_calls_and_thoughts_whole_and_streamed(name: str) -> None:
    """A call, its result, and an answer, as any OpenAI client has them."""
    tokenizer, sample = Tokens(name), CASES[name][0]
    engine = ScriptedEngine(lambda prompt, request: sample, tokenizer=tokenizer)
    service = ChatService(engine, RecordStore(None), ModelRegistry("scripted"))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "q"}]
    body = {"model": "scripted", "messages": messages, "tools": TOOLS}
    whole = await service.complete(body, rollout_id="r")
    [choice] = whole["choices"]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert choice["message"].get("reasoning_content") == ("A city." if name in THINKING else None)
    messages += [choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "r"}]
    thought, calls = "", 0
    async for data in service.stream({**body, "stream": True}, rollout_id="r"):
        if data.startswith(b"data: {"):
            delta = json.loads(data[6:])["choices"][0]["delta"]
            thought += delta.get("reasoning_content", "")
            calls += len(delta.get("tool_calls", ()))
            assert not delta.get("content")
    assert (thought, calls) == ("A city." if name in THINKING else "", 1)
    assert not service.drifts


# Forced calls

FORCED = {
    **{name: sample for name, (sample, _) in CASES.items()},
    "qwen3-8b": HERMES,  # it is held to the call before it can think
    "mistral-nemo": MISTRAL.replace(', "id": "Xy3Xy3Xy3"', ""),
    "gpt-oss-20b": CHANNELS + "<|call|>",
}
SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad"]}},
    "required": ["mood"],
}


def speller(name: str) -> tuple[Tokens, Speller]:
    tokenizer = Tokens(name)
    prompt = tokenizer.render([{"role": "user", "content": "q"}], tools=TOOLS)
    return tokenizer, Speller(tokenizer, prompt)


@pytest.mark.parametrize("name", FORCED)
def test_a_forced_call_is_what_the_model_writes(name: str) -> None:
    tokenizer, spell = speller(name)
    grammar = tool_call_grammar(TOOLS, spell, several=True)
    assert accepts(grammar, FORCED[name], tokenizer)
    assert not accepts(grammar, FORCED[name].replace("look", "took"), tokenizer)
    assert not accepts(grammar, "hello", tokenizer)


@pytest.mark.parametrize("name", FORCED)
def test_a_forced_answer_in_json_is_the_text_of_the_answer(name: str) -> None:
    tokenizer, spell = speller(name)
    thought = {"qwen3.5-27b": "hm\n</think>\n\n", "gpt-oss-20b": "<|channel|>final<|message|>"}
    text = thought.get(name, "") + '{"mood": "good"}'
    assert accepts(json_grammar(SCHEMA, spell), text, tokenizer)
    either = tool_call_grammar(TOOLS, spell, several=True, or_json=SCHEMA)
    assert accepts(either, text, tokenizer)
    assert accepts(either, FORCED[name], tokenizer)


@pytest.mark.parametrize("name", [name for name in FORCED if name != "qwen3.5-27b"])
@pytest.mark.parametrize("seed", range(2))
def test_whatever_is_sampled_under_the_grammar_is_a_call(name: str, seed: int) -> None:
    """Random tokens that the grammar allows; text that may go on for ever is cut short. Qwen3.5's
    free texts end with tags that chance does not write."""
    tokenizer, spell = speller(name)
    matcher = GrammarMatcher(tool_call_grammar(TOOLS, spell, several=False), tokenizer)
    rng, sampled = random.Random(seed), list[int]()
    ends = [tokenizer.encode(text)[0] for text in ('"', "<", "\n")] + [
        i for i in tokenizer.special_ids if i not in tokenizer.eos_ids
    ]
    while not matcher.finished:
        allowed = np.flatnonzero(matcher.mask()).tolist()
        wanted = [i for i in ends if i in allowed] if len(sampled) > 60 else []
        printable = [i for i in allowed if 32 <= i < 127] or allowed
        sampled.append(rng.choice(wanted or printable))
        matcher.advance(sampled[-1])
        assert len(sampled) < 2000
    prompt = tokenizer.render([{"role": "user", "content": "q"}], tools=TOOLS)
    answer = Answer(tokenizer, call_id_prefix="c", tools=TOOLS, prompt=prompt)
    answer.take(Delta(sampled, [-0.5] * len(sampled), "stop"))
    [call] = answer.message["tool_calls"]
    assert call["function"]["name"] == "look"
