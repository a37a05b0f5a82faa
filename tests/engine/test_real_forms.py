"""Agents on real models' chat templates: calls and thoughts are read, the next prompt takes them.

The samples are what each template itself writes for an answer that calls a tool, thinking first
where it shows thoughts; the tokenizer is bytes with the model's special tokens.
"""

from __future__ import annotations

from typing import Any

import pytest

from art_core.engine.answer import Answer
from art_core.engine.base import Delta
from art_core.engine.forms.answer_form import find_form
from art_core.engine.messages import template_messages
from art_core.engine.prompt import PromptBuild
from art_core.engine.tokenizer import ByteTokenizer
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
JSON = '{"city": "Oslo", "days": 2}'
THOUGHT = "<think>\nA city.\n</think>\n\n"
LLAMA = f'{{"name": "look", "parameters": {JSON}}}'
HERMES = f'<tool_call>\n{{"name": "look", "arguments": {JSON}}}\n</tool_call>'
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
    f"<|channel|>commentary to=functions.look <|constrain|>json<|message|>{JSON}"
)
MISTRAL = f'[TOOL_CALLS][{{"name": "look", "arguments": {JSON}, "id": "Xy3Xy3Xy3"}}]'
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
