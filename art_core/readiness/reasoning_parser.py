"""Which of vLLM's reasoning parsers parts thinking from answers: seen in the chat template.

In: the template and the tokenizer's special tokens. Out: vLLM's name of the parser, and what was
seen. None is needed where a template knows no thinking. Several parsers read `<think>`: how the
template opens an answer, and by which name thinking is switched off, tells them apart. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from art_core.readiness.dialogue import Dialogue, Message, said, user
from art_core.readiness.tool_parser import ParserFound

_THOUGHT = "art thought"
_BY_MARK = (
    (r"<\|channel\|>analysis<\|message\|>", "openai_gptoss"),
    (r"\[THINK\]", "mistral"),
    (r"<\|channel>thought", "gemma4"),
    (r"<seed:think>", "seed_oss"),
)
"""What stands before a thought, and who reads it."""
_STYLES: tuple[Message, ...] = (
    {"reasoning_content": _THOUGHT, "reasoning": _THOUGHT},
    {"thinking": _THOUGHT},
)


def thought_style(dialogue: Dialogue, thought: str) -> Message | None:
    """The fields in which this template takes a thought; None if in none."""
    for style in _STYLES:
        fields = dict.fromkeys(style, thought)
        written = dialogue.answer([user("q")], said("a", thought=fields), tools=False)
        if written is not None and thought in written:
            return fields
    return None


def reasoning_parser(template: str, special_tokens: Collection[str] = ()) -> ParserFound:
    """The parser for a model with this chat template.

    Raises:
        BaseModelError: the template is no Jinja.
    """
    dialogue = Dialogue(template, special_tokens)
    style = thought_style(dialogue, _THOUGHT)
    prompt = dialogue.attempt([user("q")]) or ""
    whole = dialogue.attempt([user("q"), said("a", thought=style)], prompt=False) or ""
    before = whole.partition(_THOUGHT)[0] if style else ""
    for mark, parser in _BY_MARK:
        if re.search(mark + r"\s*\Z", before) or re.search(mark, prompt):
            return ParserFound(parser, True, f"thoughts follow {mark.replace(chr(92), '')}")
    if "<think>" in before or "<think>" in prompt:
        return _among_think(dialogue, prompt, shown=style is not None)
    if re.search(r"</?think>", template):
        return _among_think(dialogue, prompt, shown=False)
    if style is not None:
        return ParserFound(None, False, f"thoughts are written after {before[-40:]!r}")
    return ParserFound(None, True, "its chat template knows no thinking")


def _among_think(dialogue: Dialogue, prompt: str, *, shown: bool) -> ParserFound:
    """One of those that read `<think>`."""
    opened = prompt.rstrip().endswith("<think>")
    how = "thoughts stand in <think>" + (", which the prompt opens" if opened else "")
    if "[gMASK]" in dialogue.source:
        return ParserFound("glm45", shown, how)
    if "enable_thinking" in dialogue.source:
        return ParserFound("qwen3", shown, how)
    if re.search(r"\bthinking\b", dialogue.source) and "｜" in dialogue.source:
        return ParserFound("deepseek_v3", shown, how)
    return ParserFound("deepseek_r1", opened, how)
