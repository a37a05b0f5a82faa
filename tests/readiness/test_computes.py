"""Trees or rows, and where adapters go: decided by the trainer's code on a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="art-langgraph[train] is not installed")

from art_core.errors import BaseModelError
from art_core.nn.sketch import look
from art_core.readiness.computes import Computed, Unknown, how_it_computes
from art_core.readiness.shape import shape_of
from art_core.readiness.sizes import sizes_of
from tests.readiness.models import MODELS, files, folder, shape

ALL_LINEAR = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")


@pytest.mark.parametrize("name", MODELS)
def test_trees_unless_a_layer_carries_a_state(name: str) -> None:
    """Qwen3.5 and 3.6 mix attention with gated delta layers; the others have attention alone."""
    found = look(folder(name))
    hybrid = name.startswith(("qwen3.5", "qwen3.6"))
    assert found.why_alone == ("it has layers of kind linear_attention" if hybrid else None)
    assert found.is_plain == (name != "gpt-oss-20b"), "sinks"
    assert found.why_no_adapter is None
    sizes = sizes_of(shape(name))
    assert sizes_of(shape_of(files(name).config, found.config)) == sizes, "defaults change nothing"


def test_what_a_config_leaves_to_the_defaults_of_its_kind(tmp_path: Path) -> None:
    """Gemma 3 4B names neither heads nor vocabulary: 8 heads of 256 over 4, 262,208 words, which
    makes 3,880,263,168 weights without its vision part."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "text_config": text}))
    with pytest.raises(BaseModelError, match="num_attention_heads"):
        shape_of({**config, "text_config": text})
    whole = shape_of({**config, "text_config": text}, look(tmp_path).config)
    assert (whole.heads, whole.kv_heads, whole.head_dim) == (8, 4, 256)
    sizes = sizes_of(whole)
    assert sizes is not None
    assert sizes.total == 3_880_263_168


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama-3.1-8b", ALL_LINEAR),
        ("phi-3.5-mini", ("down_proj", "gate_up_proj", "o_proj", "qkv_proj")),
        ("gpt-oss-20b", ("k_proj", "o_proj", "q_proj", "v_proj")),
        (
            "qwen3.5-27b",
            tuple(
                sorted(
                    [*ALL_LINEAR, "in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z", "out_proj"]
                )
            ),
        ),
    ],
)
def test_layers_that_take_an_adapter(name: str, targets: tuple[str, ...]) -> None:
    assert look(folder(name)).targets == targets


def test_windows_and_how_far_keys_can_be_kept() -> None:
    assert look(folder("gemma-3-1b")).windows == (512,)
    assert look(folder("gpt-oss-20b")).windows == (128,)
    # longrope: beyond 4,096 a key's rotation depends on the call's length
    assert look(folder("phi-3.5-mini")).context_length == 4096


def test_a_kind_that_transformers_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_kind", "hidden_size": 8}')
    with pytest.raises(BaseModelError, match="transformers can't make a model of this kind"):
        look(tmp_path)


def test_a_kind_that_is_not_loaded_as_a_language_model(tmp_path: Path) -> None:
    """Mistral 3 with its eyes: its text part alone could be made, but nothing would load it."""
    (tmp_path / "config.json").write_text('{"model_type": "mistral3"}')
    with pytest.raises(BaseModelError, match="Mistral3Config is no causal language model's"):
        look(tmp_path)


@pytest.mark.slow
def test_it_is_asked_in_a_process_of_its_own(tmp_path: Path) -> None:
    found = how_it_computes(folder("llama-3.2-1b"))
    assert isinstance(found, Computed)
    assert (found.why_alone, found.targets) == (None, ALL_LINEAR)
    (tmp_path / "config.json").write_text('{"model_type": "no_such_kind"}')
    refused = how_it_computes(tmp_path)
    assert isinstance(refused, Unknown)
    assert refused.is_fault


def test_no_answer_in_time_is_told() -> None:
    found = how_it_computes(folder("llama-3.2-1b"), timeout=0.01)
    assert found == Unknown("no answer within 0.01 s", is_fault=False)
