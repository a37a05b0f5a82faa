"""Token-in: appended histories extend what was sampled, and what does not is named."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from art_core.calls import Sampling
from art_core.engine.answer import Answer
from art_core.engine.base import Delta, FinishReason, Tokenizer
from art_core.engine.history import Conversations, History
from art_core.engine.messages import template_messages
from art_core.engine.prompt import PromptBuild, PromptBuilder, build_prompt
from art_core.engine.tokenizer import ByteTokenizer, HFTokenizer
from art_core.records import TokenRecord

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
BYTES = ByteTokenizer()


class Rollout:
    """A server's half of a conversation: prompts are built, answers recorded."""

    def __init__(self, tokenizer: Tokenizer = BYTES, tools: Any = TOOLS) -> None:
        self.tokenizer = tokenizer
        self.tools = tools
        self.records: list[TokenRecord] = []
        self._builder = PromptBuilder(tokenizer)
        self._history = History()

    def prompt(self, messages: list[dict[str, Any]]) -> PromptBuild:
        return self._builder.build(messages, self.tools, self._history)

    def answer(
        self,
        messages: list[dict[str, Any]],
        ids: list[int],
        finish_reason: FinishReason = "stop",
        **changes: Any,
    ) -> dict[str, Any]:
        """Sample `ids` after `messages`; the assistant message as the client gets it."""
        record_id = f"r{len(self.records)}"
        answer = Answer(self.tokenizer, call_id_prefix=f"call_{record_id}", tools=TOOLS)
        answer.take(Delta(ids, [-0.5] * len(ids), finish_reason))
        fields: dict[str, Any] = {
            "record_id": record_id,
            "choice_index": 0,
            "rollout_id": "roll",
            "model": "agent",
            "step": 1,
            "prompt_ids": self.prompt(messages).ids,
            "sampled_ids": answer.ids,
            "logprobs": answer.logprobs,
            "sampling": Sampling(),
            "finish_reason": answer.finish_reason,
            "message": answer.message,
            "request_messages": deepcopy(messages),
            "tools": self.tools,
            "created": float(len(self.records)),
            "complete": True,
        }
        self.records.append(TokenRecord(**{**fields, **changes}))
        self._history.add(self.records[-1])
        return deepcopy(answer.message)

    def text(self, messages: list[dict[str, Any]], text: str) -> dict[str, Any]:
        return self.answer(messages, [*self.tokenizer.encode(text), min(self.tokenizer.eos_ids)])

    @property
    def last(self) -> list[int]:
        """Prompt + sample of the last record."""
        record = self.records[-1]
        return [*record.prompt_ids.tolist(), *record.sampled_ids.tolist()]


def user(text: str = "q") -> dict[str, Any]:
    return {"role": "user", "content": text}


def as_langchain_sends(message: dict[str, Any]) -> dict[str, Any]:
    """Arguments parsed and dumped again, no content as an empty string or the other way round."""
    sent = deepcopy(message)
    for call in sent.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]))
    if sent.get("tool_calls"):
        sent["content"] = sent["content"] or ""
    return sent


CALL = '<tool_call>\n{"name":"look","arguments":{"q":  "\\u00e9", "n":1.50}}\n</tool_call>'


def random_sample(rng: random.Random, tokenizer: Tokenizer) -> tuple[list[int], FinishReason]:
    """Sampled ids of every kind we know to be hard, and how they ended."""
    kind = rng.randrange(6)
    ids: list[int]
    if kind == 0:  # any ids, broken characters included
        free = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.eos_ids]
        ids = [rng.choice(free) for _ in range(rng.randint(0, 12))]
    elif kind == 1:
        ids = tokenizer.encode(rng.choice(["", " ", "ok", "naïve 😀\n\n", "a\u2028b", "  x  "]))
    elif kind == 2:
        ids = tokenizer.encode("\n".join([CALL] * rng.randint(1, 3)))
    elif kind == 3:
        ids = tokenizer.encode(f"Let me see.\n{CALL}\n and then {CALL} done")
    elif kind == 4:
        ids = tokenizer.encode(CALL[: rng.randrange(len(CALL))])
    else:  # one token a letter: the tokenizer itself would merge them
        ids = [i for letter in "look it up" for i in tokenizer.encode(letter)]
    if rng.random() < 0.2:
        return ids or tokenizer.encode("x"), "length"
    return [*ids, min(tokenizer.eos_ids)], "stop"


def play_at_random(rng: random.Random, tokenizer: Tokenizer, turns: int) -> None:
    """Appends to one history and demands of every prompt that it extends the call before."""
    rollout = Rollout(tokenizer, rng.choice([TOOLS, None]))
    messages = [{"role": rng.choice(["system", "developer"]), "content": "s"}] * rng.randrange(2)
    messages = [*messages, user()]
    for turn in range(turns):
        prompt = rollout.prompt(messages)
        assert prompt.drift is None
        assert prompt.text == tokenizer.decode(prompt.ids.tolist())
        if turn:
            assert prompt.ids.tolist()[: len(rollout.last)] == rollout.last
            assert prompt.reused == len(rollout.last)
        message = rollout.answer(messages, *random_sample(rng, tokenizer))
        messages = [*messages, as_langchain_sends(message) if rng.random() < 0.5 else message]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": rng.choice(["r", "", "é\n"])}
            for call in message.get("tool_calls", ())
        ]
        messages += results or [user(rng.choice(["more", "", "<b>"]))]


@pytest.mark.parametrize("seed", range(60))
def test_appended_histories_never_drift(seed: int) -> None:
    play_at_random(random.Random(seed), BYTES, turns=6)


@pytest.mark.model
def test_appended_histories_never_drift_with_smollm2(smollm2: Path) -> None:
    tokenizer = HFTokenizer(smollm2)
    for seed in range(60):
        play_at_random(random.Random(seed), tokenizer, turns=5)


@pytest.mark.model
def test_text_would_drift_with_smollm2(smollm2: Path) -> None:
    """The reason for all this: the ids of a text are not the ids that were sampled."""
    tokenizer = HFTokenizer(smollm2)
    letters = [i for letter in "look it up" for i in tokenizer.encode(letter)]
    assert tokenizer.encode(tokenizer.decode(letters)) != letters


def test_the_end_of_turn_is_added_to_a_cut_sample_only() -> None:
    rollout = Rollout(tools=None)
    whole = rollout.text([user()], "ok")
    assert rollout.prompt([user(), whole, user("b")]).text == (
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
        "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    )
    cut = rollout.answer([user("c")], BYTES.encode("o"), "length")
    assert (
        "assistant\no<|im_end|>\n<|im_start|>user\nb"
        in rollout.prompt([user("c"), cut, user("b")]).text
    )


def test_results_of_the_record_store_do_as_well_as_those_in_memory() -> None:
    rollout = Rollout()
    messages = [user(), rollout.text([user()], CALL), {"role": "tool", "content": "r"}]
    built = build_prompt(BYTES, messages, TOOLS, rollout.records)
    assert built.ids.tolist() == rollout.prompt(messages).ids.tolist()
    assert built.ids.tolist()[: len(rollout.last)] == rollout.last


def test_a_trimmed_history_still_enters_as_ids_and_claims_no_drift() -> None:
    rollout = Rollout()
    sampled = [*b"ok\xff", 257]
    first = rollout.answer([user("long ago"), user()], sampled)
    prompt = rollout.prompt([user(), first, user("b")])
    assert first["content"] == "ok�"
    assert bytes(sampled[:3]) in bytes(i for i in prompt.ids.tolist() if i < 256)
    assert (prompt.reused, prompt.drift) == (4, None)


def test_an_edited_call_is_not_what_was_sampled() -> None:
    """A human in the loop may change the arguments and keep the id."""
    rollout = Rollout()
    message = rollout.text([user()], CALL)
    message["tool_calls"][0]["function"]["arguments"] = '{"q": "other"}'
    prompt = rollout.prompt([user(), message, {"role": "tool", "content": "r"}])
    assert (prompt.reused, prompt.drift) == (0, None)
    assert '{"q": "other"}' in prompt.text


def test_an_answer_that_broke_off_is_not_taken_for_what_the_client_saw() -> None:
    rollout = Rollout()
    message = rollout.answer([user()], BYTES.encode("ok"), "length", complete=False)
    assert rollout.prompt([user(), message, user("b")]).reused == 0


def test_other_tools_are_another_conversation_but_the_words_stay() -> None:
    rollout = Rollout()
    message = rollout.answer([user()], [*b"ok\xff", 257])
    rollout.tools = None
    prompt = rollout.prompt([user(), message, user("b")])
    assert (prompt.reused, prompt.drift) == (4, None)


def test_of_two_equal_answers_the_one_with_the_call_ids_is_meant() -> None:
    """Two nodes asked the same and got the same call, spelled in two ways."""
    rollout = Rollout()
    spelled = ['{"name":"look","arguments":{}}', '{"name": "look", "arguments": { }}']
    first, second = (
        rollout.text([user()], f"<tool_call>\n{body}\n</tool_call>") for body in spelled
    )
    for record, message in zip(rollout.records, (first, second), strict=True):
        prompt = rollout.prompt([user(), message, {"role": "tool", "content": "r"}])
        expected = [*record.prompt_ids.tolist(), *record.sampled_ids.tolist()]
        assert prompt.ids.tolist()[: len(expected)] == expected


def test_a_later_twin_of_an_early_answer_does_not_make_its_heirs_drift() -> None:
    """a1 and a1' read the same and have other ids; the conversation went on from a1."""
    rollout = Rollout()
    a1 = rollout.answer([user()], [*b"\xff", 257])
    history = [user(), a1, user("b")]
    a2 = rollout.text(history, "two")
    heir = rollout.last
    assert rollout.answer([user()], [*b"\xfe", 257]) == a1
    prompt = rollout.prompt([*history, a2, user("c")])
    assert prompt.drift is None
    assert prompt.ids.tolist()[: len(heir)] == heir


def test_a_user_who_writes_our_marks_gets_text_and_no_harm() -> None:
    rollout = Rollout()
    messages = [user("\ue0001\ue001"), rollout.text([user("\ue0001\ue001")], "ok"), user("b")]
    prompt = rollout.prompt(messages)
    assert prompt.text == BYTES.render(messages, tools=TOOLS)


SPECIAL = ["<|s|>", "<|e|>", "<|bos|>", "<think>", "</think>", "<call>", "</call>"]
STRIPS_THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{% set c = m.content or '' %}{% if m.role == 'assistant' and loop.index0 < ns.last and "
    "'</think>' in c %}{% set c = c.split('</think>')[-1] %}{% endif %}<|s|>{{ m.role }}\n"
    "{{ c }}<|e|>\n{% endfor %}{% if add_generation_prompt %}<|s|>assistant\n{% endif %}"
)


class ThinkingTokenizer(ByteTokenizer):
    """Case 029's: thinking tags are tokens, and part of the text."""

    def __init__(self, template: str) -> None:
        super().__init__(SPECIAL, eos="<|e|>", template=template)
        self.special_ids = frozenset({256, 257, 258})


def test_case_029_a_template_that_drops_thinking_is_followed_and_named() -> None:
    rollout = Rollout(ThinkingTokenizer(STRIPS_THINKING), None)
    message = rollout.answer([user("q1")], [259, 97, 260, 88, 257])
    assert message["content"] == "<think>a</think>X"
    prompt = rollout.prompt([user("q1"), message, user("q2")])
    assert prompt.text == (
        "<|s|>user\nq1<|e|>\n<|s|>assistant\nX<|e|>\n<|s|>user\nq2<|e|>\n<|s|>assistant\n"
    )
    assert len(prompt.ids) == 45  # as the case says
    assert prompt.drift == "template rewrote history"


def test_case_029_thinking_of_the_present_turn_stays_as_sampled() -> None:
    rollout = Rollout(ThinkingTokenizer(STRIPS_THINKING), None)
    message = rollout.answer([user()], [259, 99, 260, 99, 97, 108, 108, 257])
    prompt = rollout.prompt([user(), message, {"role": "tool", "content": "r"}])
    assert prompt.ids.tolist()[: len(rollout.last)] == rollout.last
    assert prompt.drift is None
    assert len(prompt.ids) == 49  # 56 of the case less the 7 of its second answer


def test_only_the_messages_that_the_template_rewrites_lose_their_ids() -> None:
    rollout = Rollout(ThinkingTokenizer(STRIPS_THINKING), None)
    plain = rollout.answer([user("q1")], [*b"\xff", 257])
    history = [user("q1"), plain, user("q2")]
    thought = rollout.answer(history, [259, 97, 260, 88, 257])
    prompt = rollout.prompt([*history, thought, user("q3")])
    assert prompt.reused == 2
    assert prompt.drift == "template rewrote history"


def test_a_prompt_that_opens_the_thinking_is_extended_too() -> None:
    """The template writes "<think>" for a new answer, so the sample has the rest only."""
    template = (
        "{% for m in messages %}<|s|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and '</think>' in m.content %}<think>{% endif %}"
        "{{ m.content }}<|e|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|s|>assistant\n<think>{% endif %}"
    )
    rollout = Rollout(ThinkingTokenizer(template), None)
    message = rollout.answer([user()], [*b"hm\xff", 260, *b"X", 257])
    prompt = rollout.prompt([user(), message, user("b")])
    assert prompt.drift is None
    assert prompt.ids.tolist()[: len(rollout.last)] == rollout.last


def test_a_template_that_trims_content_keeps_what_was_sampled() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    rollout = Rollout(ByteTokenizer(template=template), None)
    message = rollout.text([user()], " two  \n")
    prompt = rollout.prompt([user(), message, user("b")])
    assert prompt.drift is None
    assert prompt.ids.tolist()[: len(rollout.last)] == rollout.last


def test_a_template_that_can_not_be_followed_piece_by_piece_is_named() -> None:
    """It refuses an assistant turn without calls before a tool result."""
    template = (
        "{% for m in messages %}{% if m.role == 'tool' and not loop.previtem.tool_calls %}"
        "{{ raise_exception('no call') }}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{{ m.tool_calls | length }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    )
    rollout = Rollout(ByteTokenizer(template=template))
    message = rollout.text([user()], CALL)
    prompt = rollout.prompt([user(), message, {"role": "tool", "content": "r"}])
    assert prompt.reused == 0
    assert prompt.drift == "template does not show messages one by one"


def test_an_example_in_the_prompt_that_reads_like_a_sample_stays_as_it_was() -> None:
    """It was tokenised when nothing was sampled yet, and the next prompt must extend that one."""
    rollout = Rollout(ThinkingTokenizer(STRIPS_THINKING), None)
    example = {"role": "assistant", "content": "<call>"}
    messages = [user("like"), example, user()]
    message = rollout.answer(messages, [*b"<call>", 257])
    assert message == example
    prompt = rollout.prompt([*messages, message, user("b")])
    assert prompt.ids.tolist()[: len(rollout.last)] == rollout.last
    assert prompt.ids.tolist().count(261) == 1
    assert prompt.drift is None


def test_an_old_answer_put_in_again_enters_as_its_ids() -> None:
    rollout = Rollout()
    first = rollout.answer([user()], [*b"a\xff", 257])
    history = [user(), first, user("b")]
    second = rollout.text(history, "two")
    prompt = rollout.prompt([*history, second, first, user("c")])
    assert prompt.ids.tolist()[: len(rollout.last)] == rollout.last
    assert prompt.ids.tolist()[len(rollout.last) :].count(0xFF) == 1


def test_texts_are_tokenised_once() -> None:
    class Counting(ByteTokenizer):
        encoded = 0

        def encode(self, text: str) -> list[int]:
            self.encoded += len(text)
            return super().encode(text)

    tokenizer = Counting()
    builder, history = PromptBuilder(tokenizer), History()
    for _ in range(5):
        builder.build([user("x" * 1000)], TOOLS, history)
    assert tokenizer.encoded < 1500


def test_conversations_without_a_rollout_are_found_by_what_was_said() -> None:
    rollout = Rollout()
    conversations = Conversations(limit=2)
    first = rollout.text([user()], "one")
    history = [user(), first, user("b")]
    second = rollout.text(history, "two")
    a, b = rollout.records
    conversations.add(a, ())
    conversations.add(b, (a,))
    whole = template_messages([*history, second, user("c")])
    assert conversations.records(whole, TOOLS) == (a, b)
    assert conversations.records(whole[:3], TOOLS) == (a,)
    assert conversations.records(whole, None) == ()
    conversations.add(rollout.records[-1], ())
    rollout.text([user("z")], "three")
    conversations.add(rollout.records[-1], ())  # the third: the one unused for longest is gone
    assert conversations.records(whole[:3], TOOLS) == ()


def test_ids_are_int32() -> None:
    assert Rollout().prompt([user()]).ids.dtype == np.int32
