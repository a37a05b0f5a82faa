"""Where templates of real models rewrite histories to which something was only appended.

What is expected was read in the templates.
"""

from __future__ import annotations

import pytest

from art_core.engine.chat_template import hermes_chatml
from art_core.readiness.append_only import append_only
from art_core.readiness.dialogue import Dialogue
from tests.readiness.models import dialogue, template

TALK = {"several questions", "a system message first", "two questions in a row"}
TOOLS = {
    "several questions, tools at hand",
    "tool calls one after the other",
    "tool calls at once",
    "words beside a tool call",
    "tool calls, then another question",
}
ACROSS = TALK | {"several questions, tools at hand", "tool calls, then another question"}


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen3-4b-2507"])
def test_a_template_without_thinking_keeps_everything(name: str) -> None:
    seen = append_only(dialogue(name))
    assert (set(seen.kept), seen.breaks, seen.refusals) == (TALK | TOOLS, (), ())


def test_our_own_template_keeps_everything() -> None:
    seen = append_only(Dialogue(hermes_chatml(), {"<|im_start|>", "<|im_end|>"}))
    assert (set(seen.kept), seen.breaks, seen.refusals) == (TALK | TOOLS, (), ())


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3.5-27b", "qwen3.6-27b"])
def test_thinking_goes_at_the_next_question_and_stays_between_calls(name: str) -> None:
    seen = append_only(dialogue(name))
    assert set(seen.kept) == TOOLS - ACROSS
    assert {each.where for each in seen.breaks} == ACROSS
    assert {each.why for each in seen.breaks} == {"thinking is taken out of the history"}
    first = seen.breaks[0]
    assert "<think>\nart thought" in first.was
    assert "art thought" not in first.becomes


def test_gpt_oss_drops_thinking_and_writes_the_date() -> None:
    seen = append_only(dialogue("gpt-oss-20b"))
    assert set(seen.kept) == {"tool calls one after the other", "tool calls at once"}
    why = {each.where: each.why for each in seen.breaks}
    assert why.pop("a conversation past midnight").startswith("the date is in the prompt")
    assert set(why.values()) == {"thinking is taken out of the history"}
    (refusal,) = seen.refusals
    assert refusal.where == "words beside a tool call"
    assert "both content and thinking" in refusal.reason


def test_llama_calls_one_tool_at_a_time_and_says_nothing_beside() -> None:
    seen = append_only(dialogue("llama-3.1-8b"))
    (refusal,) = seen.refusals
    assert refusal.where == "tool calls at once"
    assert refusal.reason == "This model only supports single tool-calls at once!"
    assert [each.why for each in seen.breaks] == [
        "words beside a tool call are left out of the history"
    ]


def test_only_the_newer_llama_writes_todays_date() -> None:
    """3.1 has a fixed date, 3.2 asks for today's."""
    places = [
        {b.where for b in append_only(dialogue(n)).breaks} for n in ("llama-3.1-8b", "llama-3.2-1b")
    ]
    assert ["a conversation past midnight" in place for place in places] == [False, True]


def test_mistral_moves_tools_and_system_message_to_the_last_question() -> None:
    seen = append_only(dialogue("mistral-nemo"))
    why = {each.where: each.why for each in seen.breaks}
    assert why["a system message first"] == "the system message moves to the last question"
    assert why["several questions, tools at hand"] == "the list of tools moves to the last question"
    assert "tool calls one after the other" in seen.kept
    assert [each.where for each in seen.refusals] == ["two questions in a row"]


@pytest.mark.parametrize(("name", "kept"), [("gemma-3-1b", 2), ("phi-3.5-mini", 3)])
def test_templates_without_tools_are_asked_without(name: str, kept: int) -> None:
    """Gemma refuses two questions in a row."""
    seen = append_only(dialogue(name))
    assert (len(seen.kept), len(seen.refusals), seen.breaks) == (kept, 3 - kept, ())


def test_a_template_that_can_not_do_without_tools() -> None:
    seen = append_only(dialogue("phi-4-mini"))
    assert {each.where for each in seen.refusals} == TALK
    assert set(seen.kept) == TOOLS


def test_thoughts_inside_the_text_are_seen_too() -> None:
    """DeepSeek-R1 takes no field for thoughts: it cuts them out of the answer's text."""
    seen = append_only(Dialogue(template("deepseek_r1_distill"), {"<｜end▁of▁sentence｜>"}))
    assert "thinking is taken out of the history" in {each.why for each in seen.breaks}


def test_an_end_of_turn_that_changes_is_seen() -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% if loop.last and m.role == 'assistant' %}<ret>{% else %}<end>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    seen = append_only(Dialogue(source, {"<ret>", "<end>"}))
    assert {each.why for each in seen.breaks} == {
        "the end of an answer, <ret>, is written otherwise in the history"
    }


def test_an_opening_that_the_history_leaves_out_is_seen() -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<assistant><go>{% endif %}"
    )
    seen = append_only(Dialogue(source, {"<end>", "<go>"}))
    assert "prompts open an answer with '<go>'" in seen.breaks[0].why


def test_what_follows_the_end_of_an_answer_only_in_the_last_place_does_not_count() -> None:
    """Phi-3.5 closes a whole text with one more token, which no model samples."""
    assert append_only(dialogue("phi-3.5-mini")).breaks == ()
