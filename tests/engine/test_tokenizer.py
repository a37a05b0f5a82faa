"""Tokenizers and the chat template that stands in for those that know no tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from art_core.engine.api_errors import ApiError
from art_core.engine.base import Tokenizer
from art_core.engine.chat_template import hermes_chatml
from art_core.engine.messages import template_messages
from art_core.engine.tokenizer import ByteTokenizer, HFTokenizer
from art_core.errors import BaseModelError

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Né — 1",
            "strict": True,
            "parameters": {"type": "object", "properties": {"q": {}}},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
CONVERSATION: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be kind."},
    {"role": "user", "content": "é?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"q":"é"}'}},
            {"id": "b", "type": "function", "function": {"name": "now", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "ra"},
    {"role": "tool", "tool_call_id": "b", "content": "rb"},
    {
        "role": "assistant",
        "content": "So:",
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "c", "content": "rc"},
]
RENDERED = """\
<|im_start|>system
Be kind.

<tools>
{"name":"look","description":"Né — 1","parameters":{"type":"object","properties":{"q":{}}}}
{"name":"now","parameters":{}}
</tools>
To call a tool, write:
<tool_call>
{"name": ..., "arguments": {...}}
</tool_call><|im_end|>
<|im_start|>user
é?<|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "look", "arguments": {"q": "é"}}
</tool_call>
<tool_call>
{"name": "now", "arguments": {}}
</tool_call><|im_end|>
<|im_start|>tool
ra<|im_end|>
<|im_start|>tool
rb<|im_end|>
<|im_start|>assistant
So:
<tool_call>
{"name": "now", "arguments": {}}
</tool_call><|im_end|>
<|im_start|>tool
rc<|im_end|>
<|im_start|>assistant
"""
QWEN_LIKE = (
    "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OTHER_CALLS = QWEN_LIKE.replace("<tool_call>", "[CALL]").replace("</tool_call>", "[/CALL]")


def test_the_template_writes_tools_calls_and_results_in_hermes_form() -> None:
    assert ByteTokenizer().render(CONVERSATION, tools=TOOLS) == RENDERED


def test_without_tools_the_template_is_plain_chatml() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "system", "content": "late"},
    ]
    assert ByteTokenizer().render(messages, add_generation_prompt=False) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>system\nlate<|im_end|>\n"
    )


def test_tools_open_a_system_turn_of_their_own_where_there_is_none() -> None:
    text = ByteTokenizer().render([{"role": "user", "content": "a"}], tools=TOOLS)
    assert text.startswith("<|im_start|>system\n<tools>\n")
    assert text.endswith(
        "</tool_call><|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_orphan_tool_result_is_rendered() -> None:
    """Case 021: a trimmed history may begin with one."""
    text = ByteTokenizer().render([{"role": "tool", "tool_call_id": "c", "content": "r"}])
    assert text.startswith("<|im_start|>tool\nr<|im_end|>\n")


def test_a_template_that_refuses_the_messages_is_a_fault_of_the_request() -> None:
    tokenizer = ByteTokenizer(template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ApiError, match="roles must alternate"):
        tokenizer.render([{"role": "user", "content": "a"}])


def test_cases_031_and_007_with_their_own_template() -> None:
    template = (
        "{% for m in messages %}{% if m.role not in ['system','user','assistant','tool'] %}"
        "{{ raise_exception('unknown role') }}{% endif %}<|s|>{{ m.role }}\n{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}<call:{{ c.function.name }}>"
        "{% for k, v in c.function.arguments|items %}<{{ k }}>{{ v }}</{{ k }}>{% endfor %}</call>"
        "{% endfor %}<|e|>\n{% endfor %}{% if add_generation_prompt %}<|s|>assistant\n{% endif %}"
    )
    tokenizer = ByteTokenizer(["<|s|>", "<|e|>", "</call>"], eos="<|e|>", template=template)
    call = {"name": "look", "arguments": '{"city": "Oslo"}'}
    text = tokenizer.render(
        [
            {"role": "developer", "content": "rhyme"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "function": call}]},
        ]
    )
    assert text == (
        "<|s|>system\nrhyme<|e|>\n<|s|>assistant\n<call:look><city>Oslo</city></call><|e|>\n"
        "<|s|>assistant\n"
    )


def test_bytes_are_ids_and_the_longest_special_token_wins() -> None:
    tokenizer = ByteTokenizer(["<a", "<a>", "<e>"], eos="<e>")
    ids = tokenizer.encode("é<a><a<e>")
    assert ids == [0xC3, 0xA9, 257, 256, 258]
    assert tokenizer.decode(ids) == "é<a><a<e>"
    assert tokenizer.decode(ids, skip_special=True) == "é"
    assert tokenizer.vocab_size == 259
    assert tokenizer.eos_ids == {258}


def save_with_template(folder: Path, template: str | None) -> Path:
    """A transformers tokenizer of bytes with `template`."""
    from tests.conftest import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def test_a_hugging_face_folder_behaves_as_the_byte_tokenizer_does(tmp_path: Path) -> None:
    from tests.conftest import CHATML

    ours = ByteTokenizer()
    theirs: Tokenizer = HFTokenizer(save_with_template(tmp_path, CHATML))
    assert theirs.render(CONVERSATION, tools=TOOLS) == RENDERED
    assert theirs.encode(RENDERED) == ours.encode(RENDERED)
    assert theirs.decode(theirs.encode("é😀<|im_end|>"), skip_special=True) == "é😀"
    assert [theirs.token_bytes(i) for i in range(258)] == [ours.token_bytes(i) for i in range(258)]
    assert theirs.token_bytes(299) == b""
    assert theirs.vocab_size == 258
    assert theirs.eos_ids == {257}
    assert theirs.special_ids == {256, 257}


def test_a_template_that_knows_hermes_calls_is_used_as_it_is(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(save_with_template(tmp_path, QWEN_LIKE))
    text = tokenizer.render(CONVERSATION, tools=TOOLS)
    assert text.startswith('<|im_start|>system\n[{"type": "function"')
    assert '<tool_call>\n{"name": "look", "arguments": {"q": "é"}}\n</tool_call>' in text


def test_a_template_with_another_form_of_calls_takes_no_tools(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(save_with_template(tmp_path, OTHER_CALLS))
    assert tokenizer.render([{"role": "user", "content": "a"}]).endswith("assistant\n")
    with pytest.raises(ApiError, match=r"calls are written '\[CALL\].*tool_parser=") as fault:
        tokenizer.render([{"role": "user", "content": "a"}], tools=TOOLS)
    assert fault.value.param == "tools"


def test_chatml_tokens_without_a_template_get_ours(tmp_path: Path) -> None:
    assert HFTokenizer(save_with_template(tmp_path, None)).render(CONVERSATION, tools=TOOLS) == (
        RENDERED
    )


def test_the_generation_config_names_further_ends_of_turn(tmp_path: Path) -> None:
    folder = save_with_template(tmp_path, None)
    (folder / "generation_config.json").write_text('{"eos_token_id": [256, 257]}')
    assert HFTokenizer(folder).eos_ids == {256, 257}


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(BaseModelError, match=tmp_path.name):
        HFTokenizer(tmp_path)


def test_our_template_means_the_same_to_transformers(tmp_path: Path) -> None:
    """So that an exported tokenizer renders alike in every other server."""
    from tests.conftest import byte_tokenizer

    text = byte_tokenizer().apply_chat_template(
        template_messages(CONVERSATION),
        tools=TOOLS,
        chat_template=hermes_chatml(),
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text == RENDERED


@pytest.mark.model
def test_smollm2_is_given_our_template_and_keeps_its_text(smollm2: Path) -> None:
    tokenizer = HFTokenizer(smollm2)
    assert tokenizer.render(CONVERSATION, tools=TOOLS) == RENDERED
    assert tokenizer.decode(tokenizer.encode(RENDERED)) == RENDERED
    assert tokenizer.decode(sorted(tokenizer.eos_ids)) == "<|im_end|>"
    assert tokenizer.vocab_size == 49_152  # the model card's vocabulary
