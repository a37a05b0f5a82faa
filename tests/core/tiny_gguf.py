"""A two-layer Llama as a GGUF file, and as a wheel in a package index: SmolLM2's small twin.

In: folders of a test. Out: `PackagedModel`s whose pins are those of the files just written.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from art_core.nn.packaged import PackagedModel
from art_core.sealed import file_sha256
from tests.conftest import CHATML, byte_letters

HIDDEN, HEADS, KV_HEADS, FEED, CONTEXT = 32, 4, 2, 64, 256
TOKENS = [*(letter for _, letter in byte_letters()), "ĠĠ", "<|im_start|>", "<|im_end|>"]
"""Ids: a byte is its own id, two blanks are 256, then the two marks of a turn."""


def write_gguf(path: Path) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Write a random model to `path`; returns its weights under transformers' names."""
    from gguf import GGUFWriter, TokenType

    weights = random_weights()
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(2)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.NORMAL] * 257 + [TokenType.CONTROL] * 2)
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)
    for name, value in weights.items():
        writer.add_tensor(gguf_name(name), interleaved(name, value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def random_weights() -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Weights of the model under transformers' names; the head is the embedding."""
    kv = HIDDEN * KV_HEADS // HEADS
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (len(TOKENS), HIDDEN)}
    for layer in range(2):
        block = f"model.layers.{layer}."
        shapes |= {
            f"{block}self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{block}self_attn.k_proj.weight": (kv, HIDDEN),
            f"{block}self_attn.v_proj.weight": (kv, HIDDEN),
            f"{block}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{block}mlp.gate_proj.weight": (FEED, HIDDEN),
            f"{block}mlp.up_proj.weight": (FEED, HIDDEN),
            f"{block}mlp.down_proj.weight": (HIDDEN, FEED),
            f"{block}input_layernorm.weight": (HIDDEN,),
            f"{block}post_attention_layernorm.weight": (HIDDEN,),
        }
    shapes["model.norm.weight"] = (HIDDEN,)
    noise = np.random.default_rng(0)
    return {name: noise.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}


def gguf_name(name: str) -> str:
    """llama.cpp's name of a weight."""
    for theirs, ours in {
        "model.layers.": "blk.", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
        "post_attention_layernorm": "ffn_norm", "input_layernorm": "attn_norm",
        "model.embed_tokens": "token_embd", "model.norm": "output_norm",
    }.items():  # fmt: skip
        name = name.replace(theirs, ours)
    return name


def interleaved(
    name: str, value: np.ndarray[Any, np.dtype[np.float32]]
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """`value` as llama.cpp keeps it: in queries and keys, the rows that rotate together adjoin."""
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2], 0)
    if not heads:
        return value
    halves = value.reshape(heads, 2, HIDDEN // HEADS // 2, HIDDEN)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))


def publish(gguf: Path, index: Path) -> PackagedModel:
    """Put `gguf` as a wheel into the package index in folder `index`; returns its pins."""
    # "--" can't be in a name on the hub, so that no test asks the hub.
    wheel = index / "tiny-model" / "tiny_model-1.0-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    info = "tiny_model-1.0.dist-info"
    files = {
        "tiny_model/tiny.gguf": gguf.read_bytes(),
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in files)
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", record)
    (wheel.parent / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>', "utf-8")
    return PackagedModel(
        name="tests/tiny--model",
        distribution="tiny-model",
        version="1.0",
        wheel=wheel.name,
        wheel_size=wheel.stat().st_size,
        wheel_sha256=file_sha256(wheel),
        member="tiny_model/tiny.gguf",
        gguf_sha256=file_sha256(gguf),
        digits_alone=True,
    )
