"""Adapters by name on one base model: made, saved, loaded, dropped, refused."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

from art_core.batch.forest import plant
from art_core.config import LoraSettings
from art_core.errors import BaseModelError, CheckpointError, ConfigError
from art_core.nn.lora import WEIGHTS, LoraModel
from art_core.training.logprobs import tree_row
from tests.core.samples import make_sample
from tests.core.tiny_policy import NAME, in_peft, same_bits, shake, tiny_policy, weights

IDS = [1, 2, 3, 4, 5]


def logits(model: LoraModel, name: str | None) -> Tensor:
    """Of every position of `IDS` under the adapter."""
    model.activate(name)
    (row,) = plant([make_sample(IDS, [0])], 10)
    with torch.no_grad():
        hidden = model.hidden(torch.from_numpy(row.ids), torch.from_numpy(row.depth), tree_row(row))
        return model.logits(hidden)


def saved(model: LoraModel, folder: Path, name: str = NAME) -> Path:
    model.save_adapter(name, folder)
    return folder


def test_a_fresh_adapter_changes_nothing_and_follows_its_seed(tiny_llama: Path) -> None:
    model = LoraModel.load(tiny_llama)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        model.create_adapter(name, LoraSettings(), seed=seed)
    assert model.adapters() == ["a", "b", "c"]
    # To float noise: which of the two stands merged in memory depends on who asked before.
    assert torch.allclose(logits(model, "a"), logits(model, None), rtol=0, atol=1e-5)
    assert same_bits(weights(model, "a"), weights(model, "b"))
    assert not same_bits(weights(model, "a"), weights(model, "c"))


def test_the_callers_random_numbers_are_left_alone(tiny_llama: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    LoraModel.load(tiny_llama).create_adapter("a", LoraSettings(), seed=1)
    assert torch.equal(torch.rand(3), expected)


def test_adapters_do_not_mix(tiny_llama: Path) -> None:
    model = tiny_policy(tiny_llama, name="one", seed=1)
    alone = logits(model, "one")
    model.create_adapter("two", LoraSettings(rank=2), seed=2)
    shake(model, 2, "two")
    second = logits(model, "two")
    assert not torch.allclose(alone, second)
    assert torch.equal(logits(model, "one"), alone)
    model.drop_adapter("one")
    assert torch.allclose(logits(model, "two"), second, rtol=0, atol=1e-10)
    assert model.adapters() == ["two"]


def test_an_unknown_adapter_never_answers_as_the_base(tiny_llama: Path) -> None:
    model = tiny_policy(tiny_llama)
    with pytest.raises(AssertionError, match="no adapter 'other' among"):
        model.activate("other")


def test_training_ends_with_what_was_active(tiny_llama: Path) -> None:
    model = tiny_policy(tiny_llama)
    model.activate(None)
    base = logits(model, None)
    with model.training(NAME) as parameters:
        assert len(parameters) == 2 * 14  # A and B of seven matrices in two layers
        assert all(parameter.requires_grad for parameter in parameters)
    assert not any(parameter.requires_grad for parameter in parameters)
    assert torch.equal(logits(model, None), base)


def test_saved_adapters_load_in_plain_peft(tiny_llama: Path, tmp_path: Path) -> None:
    """Equal logits to 1e-10 in float64."""
    model = tiny_policy(tiny_llama)
    twin = in_peft(tiny_llama, saved(model, tmp_path), torch.float64)
    expected = twin(input_ids=torch.tensor([IDS])).logits[0].detach()
    assert (logits(model, NAME) - expected).abs().max() <= 1e-10


def test_saved_adapters_load_again_under_any_name(tiny_llama: Path, tmp_path: Path) -> None:
    model = tiny_policy(tiny_llama)
    model.load_adapter("again", saved(model, tmp_path))
    assert same_bits(weights(model, "again"), weights(model))
    shake(model, 9)
    assert not same_bits(weights(model, "again"), weights(model))
    model.load_adapter(NAME, tmp_path)
    assert same_bits(weights(model, "again"), weights(model))


def test_no_path_of_this_machine_is_saved(tiny_llama: Path, tmp_path: Path) -> None:
    folder = saved(tiny_policy(tiny_llama), tmp_path)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == tiny_llama.name


def test_nothing_warns(tiny_llama: Path, tmp_path: Path) -> None:
    """peft and transformers have deprecated words for each other; users do not see them."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = tiny_policy(tiny_llama, dtype=torch.float32)
        folder = saved(model, tmp_path)
        model.load_adapter("again", folder)
        model.load_adapter(NAME, folder)
        model.activate("again")
        for name in (NAME, "again"):
            model.drop_adapter(name)
        model.load_adapter("last", folder)
        model.drop_adapter("last")
        model.drop_adapter("never there")
    assert model.adapters() == []


def test_target_modules_that_are_not_there_are_named(tiny_llama: Path) -> None:
    model = LoraModel.load(tiny_llama)
    nowhere = LoraSettings(target_modules=("nothing",))
    for _ in range(2):  # with and without an adapter before it
        with pytest.raises(ConfigError, match=r"got \('nothing',\), expected \"all-linear\""):
            model.create_adapter("b", nowhere, seed=0)
        assert "b" not in model.adapters()
        if not model.adapters():
            model.create_adapter("a", LoraSettings(), seed=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (LoraSettings(rank=2, alpha=8.0), r"other LoRA settings: got {'r': 4}, .*'r': 2"),
        (LoraSettings(rank=4, alpha=9.0), r"got {'lora_alpha': 8.0}, .*'lora_alpha': 9.0"),
        (LoraSettings(rank=4, alpha=8.0, target_modules=("q_proj",)), "weights without a match"),
    ],
)
def test_an_adapter_of_other_settings_is_not_loaded_over_one(
    tiny_llama: Path, tmp_path: Path, settings: LoraSettings, message: str
) -> None:
    folder = saved(tiny_policy(tiny_llama), tmp_path)
    model = LoraModel.load(tiny_llama)
    model.create_adapter("a", settings, seed=0)
    with pytest.raises(CheckpointError, match=message):
        model.load_adapter("a", folder)


def test_an_adapter_of_another_base_model_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = saved(tiny_policy(tiny_llama), tmp_path)
    tensors = load_file(folder / WEIGHTS)
    model = LoraModel.load(tiny_llama)
    key, value = next(iter(tensors.items()))
    for changed, message in (
        ({**tensors, key: torch.cat([value, value], 1)}, "does not fit the base model"),
        ({**tensors, f"{key}.more": value.clone()}, "weights without a match"),
        ({k: v for k, v in tensors.items() if k != key}, "weights without a match"),
    ):
        save_file(changed, folder / WEIGHTS)
        with pytest.raises(CheckpointError, match=message):
            model.load_adapter("a", folder)
    assert model.adapters() == []


@pytest.mark.parametrize("file", ["adapter_config.json", WEIGHTS])
def test_half_an_adapter_is_refused(tiny_llama: Path, tmp_path: Path, file: str) -> None:
    folder = saved(tiny_policy(tiny_llama), tmp_path)
    content = (folder / file).read_bytes()
    model = LoraModel.load(tiny_llama)
    (folder / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="adapter can't be read"):
        model.load_adapter("a", folder)
    (folder / file).unlink()
    with pytest.raises(CheckpointError, match="adapter can't be read"):
        model.load_adapter("a", folder)
    assert model.adapters() == []


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BaseModelError, match="base model can't be loaded"):
        LoraModel.load(tmp_path)


def test_a_part_that_sees_images_takes_no_adapter(tmp_path: Path) -> None:
    """A tiny Gemma 3 as the 4B is: "all-linear" are the layers that make text."""
    from transformers import AutoModelForCausalLM, Gemma3Config

    text = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 16,
        "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "image_size": 28,
        "num_attention_heads": 4, "patch_size": 14,
    }  # fmt: skip
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = LoraModel(AutoModelForCausalLM.from_config(config), tmp_path)
    model.create_adapter("a", LoraSettings(rank=2), seed=0)
    names = list(model.adapter_weights("a"))
    assert any("q_proj" in name for name in names)
    assert not [name for name in names if "vision" in name or "projector" in name]
