"""Which parser of vLLM fits, told by templates of real models alone.

Expected names are those that vLLM's documentation gives for these models.
"""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from art_core.engine.chat_template import hermes_chatml
from art_core.engine.runtime import VllmRuntime, find_runtime
from art_core.errors import BaseModelError, RuntimeMissing
from art_core.readiness.dialogue import FUNCTION, called, user
from art_core.readiness.dialogue import TOOLS as TOOLS_SHOWN
from art_core.readiness.reasoning_parser import reasoning_parser
from art_core.readiness.tool_parser import PARSERS, tool_parser
from tests.readiness.models import WITH_TEMPLATE, dialogue, files, template

TOOLS: dict[str, str | None] = {
    "gemma-3-1b": None,
    "gpt-oss-20b": "openai",
    "llama-3.1-8b": "llama3_json",
    "llama-3.2-1b": "llama3_json",
    "mistral-nemo": "mistral",
    "phi-3.5-mini": None,
    "phi-4-mini": None,
    "qwen2.5-0.5b": "hermes",
    "qwen3-4b-2507": "hermes",
    "qwen3-8b": "hermes",
    "qwen3.5-27b": "qwen3_coder",
    "qwen3.6-27b": "qwen3_coder",
    "smollm3-3b": None,
}
REASONING: dict[str, str | None] = {
    **dict.fromkeys(TOOLS),
    "gpt-oss-20b": "openai_gptoss",
    "qwen3-8b": "qwen3",
    "qwen3.5-27b": "qwen3",
    "qwen3.6-27b": "qwen3",
    "smollm3-3b": "qwen3",
}


@pytest.mark.parametrize("name", WITH_TEMPLATE)
def test_the_template_tells_the_parser_of_tool_calls(name: str) -> None:
    model = files(name)
    found = tool_parser(model.template or "", model.special_tokens)
    assert found.name == TOOLS[name]
    # Phi-4-mini's calls have a form that no parser reads: said, not guessed.
    assert found.sure == (name != "phi-4-mini")


@pytest.mark.parametrize("name", WITH_TEMPLATE)
def test_the_template_tells_the_parser_of_thinking(name: str) -> None:
    model = files(name)
    found = reasoning_parser(model.template or "", model.special_tokens)
    assert found.name == REASONING[name]
    # SmolLM3's template (Unsloth's edition) speaks of <think> but never writes a thought.
    assert found.sure == (name != "smollm3-3b")


@pytest.mark.parametrize(
    ("name", "tools", "reasoning"),
    [
        ("gemma3_pythonic", "pythonic", None),
        ("glm4moe", "glm45", "glm45"),
        ("lfm2_2_5", "lfm2", "deepseek_r1"),
        ("deepseek_r1_distill", None, "deepseek_r1"),
    ],
)
def test_other_forms_of_calls_and_thoughts(
    name: str, tools: str | None, reasoning: str | None
) -> None:
    assert tool_parser(template(name)).name == tools
    assert reasoning_parser(template(name)).name == reasoning


def test_our_template_writes_hermes_calls() -> None:
    found = tool_parser(hermes_chatml())
    assert (found.name, found.sure) == ("hermes", True)


def test_a_mark_that_is_no_token_makes_it_unsure() -> None:
    model = files("mistral-nemo")
    found = tool_parser(model.template or "", model.special_tokens - {"[TOOL_CALLS]"})
    assert (found.name, found.sure) == ("mistral", False)
    assert "[TOOL_CALLS]" in found.why


def test_the_prompts_instruction_counts_where_calls_are_left_out() -> None:
    source = (
        "{% if tools %}{{ tools[0].function.name }}: write "
        "<tool_call>\n<function=NAME>\n</tool_call>{% endif %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    found = tool_parser(source)
    assert (found.name, found.sure) == ("qwen3_coder", False)


def test_what_is_no_template_is_refused() -> None:
    with pytest.raises(BaseModelError, match="chat template can't be read"):
        tool_parser("{% for m in messages %}")


# Against the vLLM that is here, if there is one

PARSE = """
import json, sys
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

asked = json.load(sys.stdin)
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
for call in asked["calls"]:
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in call["tokens"]])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    request = ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "q"}], tools=asked["tools"]
    )
    parser = ToolParserManager.get_tool_parser(call["parser"])(tokenizer, request.tools)
    found = parser.extract_tool_calls(call["text"], request).tool_calls
    print("FOUND", json.dumps([[each.function.name, each.function.arguments] for each in found]))
"""
"""Run by vLLM's Python: its own parsers read what the templates wrote."""


@pytest.fixture(scope="module")
def vllm() -> VllmRuntime:
    try:
        return find_runtime()
    except RuntimeMissing as error:
        pytest.skip(f"no vLLM: {error}")


@pytest.mark.slow
def test_vllm_has_every_parser_by_that_name(vllm: VllmRuntime) -> None:
    """Its registry is read as text; nothing of vLLM is imported."""
    (package,) = vllm.python.parent.parent.glob("lib/python*/site-packages/vllm")
    for folder, names in (("tool_parsers", PARSERS), ("reasoning", set(REASONING.values()))):
        registry = (package / folder / "__init__.py").read_text("utf-8")
        known = set(re.findall(r'^    "([\w-]+)": \(', registry, re.MULTILINE))
        assert names - {None} <= known


@pytest.mark.slow
def test_vllms_parsers_read_what_the_templates_write(vllm: VllmRuntime) -> None:
    """But for gpt-oss, whose tokens vLLM parses before any parser of text."""
    names = [name for name, parser in TOOLS.items() if parser not in (None, "openai")]
    calls = []
    for name in names:
        written = dialogue(name).answer([user("q")], called("Oslo-7"), tools=True) or ""
        model = files(name)
        end = next(t for t in ("<|im_end|>", "<|eot_id|>", "</s>") if written.strip().endswith(t))
        calls.append(
            {
                "parser": TOOLS[name],
                "text": written.strip().removesuffix(end),
                "tokens": sorted(model.special_tokens),
            }
        )
    done = subprocess.run(
        [str(vllm.python), "-P", "-c", PARSE],
        input=json.dumps({"calls": calls, "tools": TOOLS_SHOWN}),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    found = [json.loads(line[6:]) for line in done.stdout.splitlines() if line[:6] == "FOUND "]
    assert len(found) == len(names) == 8
    for name, read in zip(names, found, strict=True):
        assert [(n, json.loads(a)) for n, a in read] == [(FUNCTION, {"city": "Oslo-7"})], name
