"""Fixtures that several test files share, and what a skipped test means.

A test that can't run for want of a real part (the base model, a package) is skipped by name. With
ART_REQUIRE_ALL=1, as in CI, such a skip is a failure; only a reason that begins with
"not on this platform" may still skip, and LangChain's standard tests of what a model is said not
to do.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from art_core.engine.runtime import VllmRuntime, find_runtime
from art_core.errors import BaseModelError, RuntimeMissing

# Several folders derive from these.
pytest.register_assert_rewrite(
    "tests.engine.conformance",
    "tests.core.policy_conformance",
    "tests.conformance.backend_conformance",
)

ALLOWED_REASON = "not on this platform"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct, found or fetched by the real resolver."""
    pytest.importorskip("transformers", reason="art-langgraph[train] is not installed")
    from art_core.nn.base_model import resolve_base_model

    try:
        return resolve_base_model("HuggingFaceTB/SmolLM2-135M-Instruct")
    except BaseModelError as error:
        pytest.skip(f"SmolLM2-135M-Instruct is not to be had: {error}")


@pytest.fixture(scope="session")
def vllm() -> VllmRuntime:
    """The real vLLM of this machine."""
    if os.name == "nt":
        pytest.skip("not on this platform: vLLM is Unix only")
    try:
        return find_runtime()
    except RuntimeMissing as error:
        pytest.skip(f"vLLM is not to be had: {error}")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Llama in Hugging Face format, small enough for float64.

    Two layers, hidden size 32, 4 heads of 8 over 2 key-value heads, vocabulary 300, context 512,
    float32, untied. Its tokenizer has a token for each byte (ids 0-255), then "<|im_start|>" (256)
    and "<|im_end|>" (257, which ends a turn), and a ChatML template; ids 258-299 have no text.
    """
    torch = pytest.importorskip("torch", reason="art-langgraph[train] is not installed")
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny-llama")
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=257,
        pad_token_id=257,
        tie_word_embeddings=False,
        initializer_range=0.2,  # wide enough that the next token is not all but uniform
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Any:
    """A transformers tokenizer whose id of a byte is the byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE({letter: byte for byte, letter in byte_letters()}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    turns = ["<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in turns])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def byte_letters() -> list[tuple[int, str]]:
    """(byte, the printable letter that byte-level BPE writes it as), after GPT-2's table.

    Printable bytes stand for themselves; the others become the letters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(0x100 + place) for place, byte in enumerate(others)}
    return sorted(letters.items())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Where everything is required, turn the skip of a test into its failure."""
    report = yield
    _refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    """The same for files that skip themselves."""
    report = yield
    _refuse_skip(report)
    return report


def _refuse_skip(report: Any) -> None:
    if os.environ.get("ART_REQUIRE_ALL") != "1":
        return
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    file, _, reason = report.longrepr
    reason = str(reason).removeprefix("Skipped: ")
    if not reason.startswith(ALLOWED_REASON) and "langchain_tests" not in Path(file).parts:
        report.outcome = "failed"
        report.longrepr = f"skipped, but ART_REQUIRE_ALL=1 requires every part: {reason}"
