"""What vLLM and the trainer refuse, before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from art_core.engine.chat_template import hermes_chatml
from art_core.errors import BaseModelError, ConfigError
from art_core.readiness.chat import check_template
from art_core.readiness.limits import RANKS, check_trainable, check_vllm_takes_adapters, served_rank
from art_core.readiness.model_files import find_model, read_model
from tests.readiness.models import MODELS, files, folder, shape


@pytest.mark.parametrize(
    ("rank", "limit"), [(1, 1), (2, 8), (8, 8), (24, 32), (64, 64), (300, 320)]
)
def test_the_next_rank_that_vllm_allows(rank: int, limit: int) -> None:
    assert served_rank(rank) == limit
    assert limit in RANKS


@pytest.mark.parametrize("rank", [0, 513])
def test_a_rank_out_of_bounds_is_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match=rf"got {rank}, expected 1 to 512"):
        served_rank(rank)


@pytest.mark.parametrize("name", MODELS)
def test_vllm_serves_these_models_with_a_lora(name: str) -> None:
    check_vllm_takes_adapters(shape(name))


@pytest.mark.parametrize("method", ["bitsandbytes", "gguf", "mlx", "exl3", "hqq", "aqlm"])
def test_quantisations_that_vllm_can_not_read(method: str) -> None:
    """vLLM 0.32 has neither bitsandbytes nor GGUF any more."""
    quantised = shape("qwen3-8b", quantization_config={"quant_method": method})
    with pytest.raises(BaseModelError, match=f"got '{method}'.*16-bit weights"):
        check_vllm_takes_adapters(quantised)


def test_an_architecture_without_lora() -> None:
    with pytest.raises(BaseModelError, match="without LoRA only: got 'BloomForCausalLM'"):
        check_vllm_takes_adapters(shape("qwen3-8b", architectures=["BloomForCausalLM"]))


@pytest.mark.parametrize("name", MODELS)
def test_only_whole_weights_are_trained(name: str) -> None:
    if name in ("gpt-oss-20b", "qwen3-32b-fp8", "qwen3.6-27b"):
        with pytest.raises(BaseModelError, match="can't learn on quantised weights"):
            check_trainable(shape(name).quantisation)
    else:
        check_trainable(shape(name).quantisation)


def test_ours_stands_in_where_a_chatml_model_knows_no_tools() -> None:
    ours = hermes_chatml()
    assert check_template(files("smollm3-3b"), ours) == ours
    assert check_template(files("qwen3-8b"), ours) == files("qwen3-8b").template
    assert check_template(files("gemma-3-1b"), ours) == files("gemma-3-1b").template


def test_a_base_without_a_chat_template(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {"model_type": "llama"})
    with pytest.raises(BaseModelError, match=r"no chat template.*-Instruct"):
        check_template(read_model(tmp_path), hermes_chatml())
    turns = [{"content": "<|im_start|>"}, {"content": "<|im_end|>"}]
    write(tmp_path, "tokenizer.json", {"added_tokens": turns})
    assert check_template(read_model(tmp_path), hermes_chatml()) == hermes_chatml()


def test_templates_are_found_in_every_place(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {"model_type": "llama"})
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write(tmp_path, "tokenizer_config.json", {"chat_template": named})
    assert read_model(tmp_path).template == "tools"
    write(
        tmp_path, "tokenizer_config.json", {"chat_template": "text", "bos_token": {"content": "^"}}
    )
    assert (read_model(tmp_path).template, read_model(tmp_path).names) == (
        "text",
        {"bos_token": "^"},
    )
    write(tmp_path, "chat_template.json", {"chat_template": "older"})
    assert read_model(tmp_path).template == "older"
    (tmp_path / "chat_template.jinja").write_text("newest")
    assert read_model(tmp_path).template == "newest"


def test_a_folder_that_holds_no_model_and_a_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(BaseModelError, match="the folder holds no base model"):
        read_model(tmp_path)
    for damaged in ("{", "[]"):
        (tmp_path / "config.json").write_text(damaged)
        with pytest.raises(BaseModelError, match=r"a file can't be read.*config.json"):
            read_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(BaseModelError, match=r"a file can't be read.*chat_template.jinja"):
        read_model(tmp_path)


def test_a_folder_is_found_and_an_unknown_name_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    assert find_model(str(folder("qwen3-8b")), say=told.append) == folder("qwen3-8b")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(BaseModelError, match=r"not to be had.*no-one/no-such-model"):
        find_model("no-one/no-such-model", say=told.append)
    assert told == []


def write(at: Path, name: str, content: Any) -> None:
    (at / name).write_text(json.dumps(content), "utf-8")
