"""Assistant turns under chat templates of every kind we know to be hard."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from art_core.batch.template import assistant_turns, render_prompt
from art_core.calls import Sampling
from art_core.engine.base import Tokenizer
from art_core.engine.prompt import build_prompt
from art_core.engine.tokenizer import ByteTokenizer, HFTokenizer
from art_core.errors import RenderError
from art_core.records import TokenRecord

EXTRA = ("<|s|>", "<|e|>", "<|bos|>", "<think>", "</think>", "<call>", "</call>", "<res>", "</res>")
HEAD = "{% for m in messages %}<|s|>{{ m.role }}\n{{ m.content or '' }}"
TAIL = "<|e|>\n{% endfor %}{% if add_generation_prompt %}<|s|>assistant\n{% endif %}"
PLAIN = HEAD + TAIL
CALLS = (
    HEAD
    + "{% for c in m.tool_calls or [] %}<call>{{ {'name': c.function.name, 'arguments': "
    + "c.function.arguments}|tojson }}</call>{% endfor %}"
    + TAIL
)
ITEMS = (
    HEAD
    + "{% for c in m.tool_calls or [] %}<call:{{ c.function.name }}>{% for k, v in "
    + "c.function.arguments|items %}<{{ k }}>{{ v }}</{{ k }}>{% endfor %}</call>{% endfor %}"
    + TAIL
)
DROPS_THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{% set c = m.content or '' %}{% if m.role == 'assistant' and loop.index0 < ns.last "
    "and '</think>' in c %}{% set c = c.split('</think>')[-1] %}{% endif %}"
    "<|s|>{{ m.role }}\n{{ c }}<|e|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|s|>assistant\n{% endif %}"
)
NEVER_SHOWS_THINKING = (
    "{% for m in messages %}<|s|>{{ m.role }}\n"
    "{{ (m.content or '').split('</think>')[-1] }}<|e|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|s|>assistant\n<think>\n{% endif %}"
)
GROUPS_RESULTS = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|s|>user{% endif %}\n"
    "<res>{{ m.content }}</res>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|e|>\n{% endif %}"
    "{% else %}<|s|>{{ m.role }}\n{{ m.content or '' }}<|e|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|s|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|s|>assistant\n"
    "{% generation %}{{ m.content }}<|e|>{% endgeneration %}{{ '\n' }}"
    "{% else %}<|s|>{{ m.role }}\n{{ m.content }}<|e|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|s|>assistant\n{% endif %}"
)


def toy(template: str, *more: str) -> ByteTokenizer:
    """The cases' tokenizer: bytes, then special texts, longest match first."""
    return ByteTokenizer((*EXTRA, *more), eos="<|e|>", template=template)


def user(text: str = "q") -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c", "content": text}


def texts(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> list[tuple[str, str]]:
    """(prompt, sampled) of each turn as text; ids are the text's own, one by one."""
    turns = assistant_turns(tokenizer, messages, **options)
    return [
        (tokenizer.decode(t.prompt_ids.tolist()), tokenizer.decode(t.sampled_ids.tolist()))
        for t in turns
    ]


def test_thinking_that_history_loses_is_trained_in_its_own_turn() -> None:
    """Case 029, two user turns: the second prompt does not extend the first call."""
    conversation = [user("q1"), said("<think>a</think>X"), user("q2"), said("<think>b</think>Y")]
    first, second = assistant_turns(toy(DROPS_THINKING), conversation)
    assert (len(first.prompt_ids), len(first.sampled_ids)) == (21, 5)
    assert (len(second.prompt_ids), len(second.sampled_ids)) == (45, 5)
    assert texts(toy(DROPS_THINKING), conversation) == [
        ("<|s|>user\nq1<|e|>\n<|s|>assistant\n", "<think>a</think>X<|e|>"),
        (
            "<|s|>user\nq1<|e|>\n<|s|>assistant\nX<|e|>\n<|s|>user\nq2<|e|>\n<|s|>assistant\n",
            "<think>b</think>Y<|e|>",
        ),
    ]


def test_thinking_that_history_keeps_extends_the_call_before() -> None:
    """Case 029, one user turn with a tool: 20 + 8, then 21 more + 7."""
    conversation = [user(), said("<think>c</think>call"), result("r"), said("<think>d</think>end")]
    first, second = assistant_turns(toy(DROPS_THINKING), conversation)
    whole = [*first.prompt_ids, *first.sampled_ids]
    assert len(whole) == 28
    assert second.prompt_ids.tolist()[:28] == whole
    assert (len(second.prompt_ids), len(second.sampled_ids)) == (28 + 21, 7)


def test_thinking_that_the_template_never_shows_is_trained_all_the_same() -> None:
    """A new answer begins inside <think>; one in history has lost all of it."""
    conversation = [user("q1"), said("<think>\na</think>X"), user("q2"), said("b</think>Y")]
    start = "<|s|>user\nq1<|e|>\n<|s|>assistant\n"
    assert texts(toy(NEVER_SHOWS_THINKING), conversation) == [
        (f"{start}<think>\n", "a</think>X<|e|>"),
        (f"{start}X<|e|>\n<|s|>user\nq2<|e|>\n<|s|>assistant\n<think>\n", "b</think>Y<|e|>"),
    ]


def test_an_answer_without_thought_where_thinking_is_begun_is_refused() -> None:
    with pytest.raises(RenderError, match="message 1 has no exact place"):
        assistant_turns(toy(NEVER_SHOWS_THINKING), [user(), said("X")])


def test_a_thought_that_is_begun_and_ended_in_the_prompt_is_not_trained() -> None:
    """The way of Qwen3 with thinking switched off."""
    off = PLAIN.replace("<|s|>assistant\n{% endif", "<|s|>assistant\n<think></think>\n{% endif")
    ((prompt, sampled),) = texts(toy(off), [user(), said("X")])
    assert prompt == "<|s|>user\nq<|e|>\n<|s|>assistant\n<think></think>\n"
    assert sampled == "X<|e|>"


def test_tool_results_that_the_template_groups() -> None:
    """The prompt ends the group where the call was made, not where the template sees more."""
    conversation = [user(), said("a"), result("1"), result("2"), said("b"), result("3"), said("c")]
    turns = texts(toy(GROUPS_RESULTS), conversation)
    start = "<|s|>user\nq<|e|>\n<|s|>assistant\n"
    second = f"{start}a<|e|>\n<|s|>user<res>1</res><res>2</res><|e|>\n<|s|>assistant\n"
    third = f"{second}b<|e|>\n<|s|>user<res>3</res><|e|>\n<|s|>assistant\n"
    assert turns == [(start, "a<|e|>"), (second, "b<|e|>"), (third, "c<|e|>")]


@pytest.mark.parametrize(
    ("template", "call", "size"),
    [
        (CALLS, '<call>{"name": "look", "arguments": {"city": "Oslo"}}</call>', 91),
        (ITEMS, "<call:look><city>Oslo</city></call>", 71),
    ],
)
def test_the_template_sees_arguments_as_a_mapping(template: str, call: str, size: int) -> None:
    """Case 031: the prompt of the call after a hand-written history, 91 and 71 tokens."""
    wire = {"name": "look", "arguments": '{"city": "Oslo"}'}
    asked = said("", tool_calls=[{"id": "c1", "type": "function", "function": wire}])
    conversation = [user(), asked, result("r")]
    tokenizer = toy(template)
    ids = render_prompt(tokenizer, conversation)
    assert len(ids) == size
    assert tokenizer.decode(ids.tolist()) == (
        f"<|s|>user\nq<|e|>\n<|s|>assistant\n{call}<|e|>\n<|s|>tool\nr<|e|>\n<|s|>assistant\n"
    )
    first, last = assistant_turns(tokenizer, [*conversation, said("ok")])
    assert tokenizer.decode(first.sampled_ids.tolist()) == f"{call}<|e|>"
    assert last.prompt_ids.tolist() == ids.tolist()
    assert last.sampled_ids.tolist() == [111, 107, 257]
    assert wire["arguments"] == '{"city": "Oslo"}', "the stored message is left alone"


def test_one_beginning_of_sequence() -> None:
    """Case 033: the template writes it, the tokenizer adds none; 22 + 3 tokens."""
    tokenizer = toy("<|bos|>" + PLAIN)
    (turn,) = assistant_turns(tokenizer, [user("hi"), said("yo")])
    assert (len(turn.prompt_ids), turn.sampled_ids.tolist()) == (22, [121, 111, 257])
    assert turn.prompt_ids.tolist().count(258) == 1


def test_generation_markers_change_nothing() -> None:
    conversation = [user(), said("a"), user("r"), said("b")]
    assert texts(toy(MARKED), conversation) == texts(toy(PLAIN), conversation)


def test_no_token_reaches_over_the_border() -> None:
    """ "\\n" + "\\n" is one token of this tokenizer, but a prompt is encoded before its answer."""
    tokenizer = toy(PLAIN, "\n\n")
    first, second = assistant_turns(tokenizer, [user(), said("\nx"), user(), said("y")])
    assert first.prompt_ids.tolist()[-1] == ord("\n")
    assert first.sampled_ids.tolist() == [ord("\n"), ord("x"), 257]
    whole = [*first.prompt_ids, *first.sampled_ids]
    assert second.prompt_ids.tolist()[: len(whole)] == whole, "what was sampled goes on as sampled"


class SpacingTokenizer(ByteTokenizer):
    """Writes a space in front of every text, as SentencePiece's do."""

    def encode(self, text: str) -> list[int]:
        return super().encode(" " + text)


def test_a_tokenizer_that_puts_a_space_before_every_text() -> None:
    tokenizer = SpacingTokenizer(EXTRA, eos="<|e|>", template=PLAIN)
    first, second = assistant_turns(tokenizer, [user(), said("x"), user(), said("y")])
    assert first.sampled_ids.tolist() == [ord("x"), 257]
    assert second.sampled_ids.tolist() == [ord("y"), 257]
    assert tokenizer.decode(second.prompt_ids.tolist()) == (
        " <|s|>user\nq<|e|>\n<|s|>assistant\nx<|e|>\n<|s|>user\nq<|e|>\n<|s|>assistant\n"
    )


def test_only_the_messages_that_are_asked_for() -> None:
    conversation = [said("greeting <|e|> with an end"), user(), said("a"), user(), said("b")]
    assert [t.message for t in assistant_turns(toy(PLAIN), conversation, only={2, 4})] == [2, 4]
    assert [t.message for t in assistant_turns(toy(PLAIN), conversation, only={4})] == [4]
    assert assistant_turns(toy(PLAIN), conversation, only=()) == []


@pytest.mark.parametrize(
    ("template", "conversation", "reason"),
    [
        (PLAIN, [user(), said("a <|e|> b")], "holds the end-of-turn token '<|e|>'"),
        (PLAIN.replace("<|e|>", ""), [user(), said("a")], "no token that ends a turn"),
        (PLAIN.replace("assistant", ""), [user(), said("a")], "begins otherwise"),
        (
            "{% for m in messages %}{{ m.content }}<|e|>{% endfor %}",
            [said("a")],
            "no prompt of the 0 messages",
        ),
    ],
)
def test_what_has_no_exact_form_is_refused(
    template: str, conversation: list[dict[str, Any]], reason: str
) -> None:
    with pytest.raises(RenderError) as caught:
        assistant_turns(toy(template), conversation)
    assert reason in str(caught.value)


def written(rng: random.Random, turns: int) -> list[dict[str, Any]]:
    """A conversation of texts, calls and results, with what is hard about texts."""
    texts = ["ok", "\n\nx", " a ", "é漢😀", "<b>\n", "l\r\n", "1.50"]
    messages = [{"role": "system", "content": "s"}] * rng.randrange(2)
    messages.append(user(rng.choice(texts)))
    for _ in range(turns):
        if rng.random() < 0.5:
            messages += [said(rng.choice(texts)), user(rng.choice(texts))]
            continue
        arguments = json.dumps({"q": rng.choice(texts)}, ensure_ascii=False)
        calls = [
            {
                "id": f"c{n}",
                "type": "function",
                "function": {"name": "look", "arguments": arguments},
            }
            for n in range(rng.randint(1, 2))
        ]
        messages.append(said(rng.choice(["", "Let me see."]), tool_calls=calls))
        messages += [result(rng.choice(texts)) for _ in calls]
    return [*messages, said("end")]


def as_the_endpoint_asks(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: Any
) -> list[list[int]]:
    """Prompt ids of each answer by the endpoint, had the model sampled what was written."""
    records: list[TokenRecord] = []
    for turn in assistant_turns(tokenizer, messages, tools):
        before = messages[: turn.message]
        prompt = build_prompt(tokenizer, before, tools, records)
        assert prompt.drift is None
        records.append(
            TokenRecord(
                record_id=f"r{turn.message}",
                choice_index=0,
                rollout_id="roll",
                model="agent",
                step=0,
                prompt_ids=prompt.ids,
                sampled_ids=turn.sampled_ids,
                logprobs=np.zeros(len(turn.sampled_ids), np.float32),
                sampling=Sampling(),
                finish_reason="stop",
                message=messages[turn.message],
                request_messages=before,
                tools=tools,
                created=float(turn.message),
                complete=True,
            )
        )
    return [record.prompt_ids.tolist() for record in records]


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def check_like_the_endpoint(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    messages, tools = written(rng, 5), rng.choice([TOOLS, None])
    turns = assistant_turns(tokenizer, messages, tools)
    expected = as_the_endpoint_asks(tokenizer, messages, tools)
    assert [turn.prompt_ids.tolist() for turn in turns] == expected


@pytest.mark.parametrize("seed", range(40))
def test_prompts_are_those_of_the_endpoint(seed: int) -> None:
    """What is trained on is what the model will be asked with, id for id."""
    check_like_the_endpoint(ByteTokenizer(("<|im_start|>", "<|im_end|>", "\n\n", "t\n")), seed)


@pytest.mark.model
def test_prompts_are_those_of_the_endpoint_with_smollm2(smollm2: Path) -> None:
    tokenizer = HFTokenizer(smollm2)
    for seed in range(40):
        check_like_the_endpoint(tokenizer, seed)


@pytest.mark.model
def test_smollm2_with_tools(smollm2: Path) -> None:
    """The real tokenizer: each turn goes on from the one before, and says what was written."""
    tokenizer = HFTokenizer(smollm2)
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"q":"é"}'}}
    conversation = [
        user("né 😀"), said("", tool_calls=[call]), result("r\n"), said("\n\n It's é.\n"),
        user(""), said("漢字"),
    ]  # fmt: skip
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    turns = assistant_turns(tokenizer, conversation, tools)
    assert [tokenizer.decode(t.sampled_ids.tolist()) for t in turns] == [
        '<tool_call>\n{"name": "look", "arguments": {"q": "é"}}\n</tool_call><|im_end|>',
        "\n\n It's é.\n<|im_end|>",
        "漢字<|im_end|>",
    ]
    for before, after in itertools.pairwise(turns):
        whole = [*before.prompt_ids, *before.sampled_ids]
        assert after.prompt_ids.tolist()[: len(whole)] == whole
    assert (
        turns[0].prompt_ids.tolist() == render_prompt(tokenizer, conversation[:1], tools).tolist()
    )
