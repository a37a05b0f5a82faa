"""Calls that read other ids than the call that they go on from: found, counted by cause, shown."""

from typing import Any

import pytest

from art_core.calls import ModelCall
from art_core.drift import Drift, drifts
from tests.core.greedy_bytes import NO_OLD_THOUGHTS, GreedyBytes
from tests.core.sample import make_call

TOKENIZER = GreedyBytes(more=["ab", "abc"])
Q, R = {"role": "user", "content": "q"}, {"role": "user", "content": "r"}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def call(prompt: str | list[int], answer: list[int], *messages: Any, **fields: Any) -> ModelCall:
    """A call with these messages that read `prompt` and sampled `answer`."""
    ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
    request = {"messages": list(messages), **fields.pop("request", {})}
    message = said(TOKENIZER.decode(answer, skip_special=True))
    values = {
        "message": message,
        "sampled_ids": answer,
        "logprobs": [-0.5] * len(answer),
        "prompt_ids": ids,
    }
    return make_call(request=request, **(values | fields))


def found(*calls: ModelCall, text: bool = True) -> list[Drift]:
    return drifts(calls, TOKENIZER.decode if text else None)


FIRST = call("<|s|>user\nq<|e|>\n<|s|>assistant\n", [97, 98, 99, 257], Q)
HEAD = "<|s|>user\nq<|e|>\n<|s|>assistant\n"
REST = "\n<|s|>user\nr<|e|>\n<|s|>assistant\n"


def test_what_goes_on_with_the_very_ids_does_not_drift() -> None:
    ids = [*TOKENIZER.encode(HEAD), 97, 98, 99, 257, *TOKENIZER.encode(REST)]
    assert found(FIRST, call(ids, [257], Q, said("abc"), R)) == []


def test_an_answer_that_was_encoded_again() -> None:
    """Case 035's kind: a, b, c were sampled, and "abc" is one token, 266."""
    (drift,) = found(FIRST, call(HEAD + "abc<|e|>" + REST, [257], Q, said("abc"), R))
    assert (drift.cause, drift.at) == ("re-encoded", 20)
    assert drift.parent is FIRST
    start = TOKENIZER.encode(HEAD)[8:]
    assert drift.had == f"\n<|s|>assistant\nabc<|e|> {[*start, 97, 98, 99, 257]}"
    assert drift.reads.startswith("\n<|s|>assistant\nabc<|e|>\n<|s|>user\nr<|e|>\n")
    assert str([*start, 266, 257])[:-1] in drift.reads


def test_an_answer_whose_text_is_other() -> None:
    """Shown are 12 ids before the first difference and 12 from it on."""
    (drift,) = found(FIRST, call(HEAD + "ab!<|e|>" + REST, [257], Q, said("abc"), R))
    assert drift.at == 20  # "ab" is one token, and a was sampled
    assert drift.had == "\n<|s|>assistant\nabc<|e|>"
    assert drift.reads == "\n<|s|>assistant\nab!<|e|>\n<|s|>user\nr<|e|>"
    assert str(drift) == (
        "answer rewritten at agent, id 20: '\\n<|s|>assistant\\nabc<|e|>' was read as "
        "'\\n<|s|>assistant\\nab!<|e|>\\n<|s|>user\\nr<|e|>'"
    )


def test_a_template_that_drops_old_thoughts() -> None:
    """Case 029, the first trajectory: turn 2 reads turn 1's answer without its thinking."""
    tokenizer = GreedyBytes(NO_OLD_THOUGHTS)
    q1, q2 = {"role": "user", "content": "q1"}, {"role": "user", "content": "q2"}
    thought = said("<think>a</think>X")

    def asked(*messages: dict[str, Any]) -> list[int]:
        return tokenizer.encode(tokenizer.render(messages))

    first = call(asked(q1), [259, 97, 260, 88, 257], q1, message=thought)
    second = call(asked(q1, thought, q2), [257], q1, thought, q2)
    (drift,) = drifts([first, second], tokenizer.decode)
    assert (drift.cause, drift.at) == ("answer rewritten", 21)
    assert drift.had == "\n<|s|>assistant\n<think>a</think>X<|e|>"
    assert drift.reads == "\n<|s|>assistant\nX<|e|>\n<|s|>user\nq2<|e|>"


def test_a_prompt_that_was_rewritten_before_the_answer() -> None:
    later = call(HEAD.replace("q", "Q") + "abc<|e|>" + REST, [257], Q, said("abc"), R)
    assert [(d.cause, d.at) for d in found(FIRST, later)] == [("history rewritten", 6)]


def test_other_tools_are_a_cause_of_their_own() -> None:
    tools = {"request": {"tools": [{"type": "function", "function": {"name": "f"}}]}}
    later = call("tools" + HEAD + "abc<|e|>" + REST, [257], Q, said("abc"), R, **tools)
    assert [d.cause for d in found(FIRST, later)] == ["tools changed"]


def test_a_prompt_that_ends_inside_the_answer() -> None:
    ids = [*TOKENIZER.encode(HEAD), 97]
    (drift,) = found(FIRST, call(ids, [257], Q, said("abc"), R))
    assert (drift.cause, drift.at, drift.reads[-1]) == ("answer rewritten", 21, "a")


@pytest.mark.parametrize(
    "messages", [[R], [Q], [Q, said("abd"), R], [said("abc"), R], [Q, R, said("abc")]]
)
def test_a_history_that_was_not_only_appended_drifts_from_nothing(messages: list[Any]) -> None:
    assert found(FIRST, call("something else", [257], *messages)) == []


def test_of_twins_any_may_be_the_one_that_went_on() -> None:
    """Two nodes said "abc" to the same prompt, with other ids; the third call goes on from one."""
    twin = call(HEAD, [266, 257], Q)
    went_on = TOKENIZER.encode(HEAD + "abc<|e|>" + REST)
    later = call(went_on, [257], Q, said("abc"), R)
    assert found(twin, FIRST, later) == found(FIRST, twin, later) == []


def test_the_longest_history_is_the_one_that_is_gone_on_from() -> None:
    second = call(HEAD + "abc<|e|>" + REST, [100, 257], Q, said("abc"), R)
    third = call(HEAD + "abc<|e|>" + REST + "D<|e|>", [257], Q, said("abc"), R, said("d"), Q)
    assert [d.parent for d in found(FIRST, second, third)] == [FIRST, second]


def test_without_text_the_place_says_the_cause() -> None:
    later = call(HEAD + "abc<|e|>" + REST, [257], Q, said("abc"), R)
    (drift,) = found(FIRST, later, text=False)
    assert drift.cause == "answer rewritten"
    assert drift.had == str([*TOKENIZER.encode(HEAD)[8:], 97, 98, 99, 257])


def test_calls_without_ids_and_of_other_models_are_left_alone() -> None:
    blank = call(HEAD, [97], Q, prompt_ids=None)
    other = call("x", [257], Q, said("abc"), R, model="judge")
    assert found(blank, FIRST, other, call("y", [257], Q, said("abc"), prompt_ids=None)) == []
