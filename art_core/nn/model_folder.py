"""What a base model's folder holds, read from its small files and weight headers alone.

In: a folder in Hugging Face format. Out: `BaseModelInfo`, or an error that names the missing or
damaged file. It leaves out loading: no tensor is read and nothing heavy is imported.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from art_core.errors import BaseModelError

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
_MAX_HEADER = 100_000_000  # bytes; the safetensors format allows no longer header
_AGAIN = "Download the model again, or name a folder that is whole."


@dataclass(frozen=True)
class BaseModelInfo:
    """Facts of a base model."""

    path: Path
    architecture: str
    """Class of the model, e.g. "LlamaForCausalLM"."""
    context_length: int | None
    """Positions the model was made for; None: its config leaves that to the defaults of its kind,
    as those of models that see images too often do."""
    vocab_size: int
    """Rows of the embedding."""
    dtype: str
    """Of most of the stored weights: "float32", "bfloat16", "float16", ..."""
    has_chat_template: bool
    tied: bool
    """True if the output head is the embedding."""


def inspect_base_model(path: Path) -> BaseModelInfo:
    """Check that the folder `path` holds a whole causal language model, and say what it is.

    Every weight file that the index names must be there, with a readable header and every byte
    that the header promises; a tokenizer must be there too.

    Raises:
        BaseModelError: naming the file that is missing or damaged.
    """
    if not path.is_dir():
        raise BaseModelError(
            "no base model there", got=str(path), expected="a folder", fix="Check the path."
        )
    config = _read_json(path / "config.json")
    text_config = config.get("text_config") or config
    headers = {name: _read_header(path / name) for name in _weight_files(path)}
    if not any((path / name).is_file() for name in _TOKENIZERS):
        raise _missing(path / "tokenizer.json")
    tensors = {name: entry for header in headers.values() for name, entry in header.items()}
    return BaseModelInfo(
        path=path,
        architecture=str(_first(config.get("architectures"), path, "architectures")),
        context_length=_optional(text_config, "max_position_embeddings", path),
        vocab_size=_optional(text_config, "vocab_size", path) or _embedded(tensors, path),
        dtype=_main_dtype(tensors),
        has_chat_template=_has_chat_template(path),
        tied=bool(text_config.get("tie_word_embeddings", "lm_head.weight" not in tensors)),
    )


def _weight_files(path: Path) -> list[str]:
    """Names of the weight files; those that an index names are checked to be there."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise BaseModelError(
                "the weight index is damaged",
                got=str(index),
                expected='a "weight_map" of tensor names to files',
                fix=_AGAIN,
            )
        shards = sorted({str(name) for name in weight_map.values()})
        for shard in shards:
            if not (path / shard).is_file():
                raise _missing(path / shard)
        return shards
    if (path / "model.safetensors").is_file():
        return ["model.safetensors"]
    if any(path.glob("*.bin")):
        raise BaseModelError(
            "the weights are pickled, and loading a pickle runs its code",
            got=str(path),
            expected="model.safetensors",
            fix="Convert the weights to safetensors, or use a model that ships them.",
        )
    raise _missing(path / "model.safetensors")


def _read_header(path: Path) -> dict[str, Any]:
    """Tensor name -> {dtype, shape, data_offsets} of a safetensors file, checked against its size.

    The layout is 8 bytes of little-endian header length, the JSON header, then the data.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size, _MAX_HEADER):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        promised = 8 + length + max((e["data_offsets"][1] for e in header.values()), default=0)
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BaseModelError(
            f"a weight file can't be read ({error})",
            got=str(path),
            expected="a safetensors file",
            fix=_AGAIN,
        ) from error
    if promised != size:
        raise BaseModelError(
            "a weight file is damaged or only half downloaded",
            got=f"{path} with {size} bytes",
            expected=f"{promised} bytes",
            fix=_AGAIN,
        )
    return dict(header)


def _main_dtype(tensors: dict[str, Any]) -> str:
    """The dtype that most of the stored numbers have."""
    counts: Counter[str] = Counter()
    for entry in tensors.values():
        counts[str(entry["dtype"])] += prod(entry["shape"])
    name = counts.most_common(1)[0][0] if counts else "F32"
    return _DTYPES.get(name, name.lower())


def _has_chat_template(path: Path) -> bool:
    if (path / "chat_template.jinja").is_file() or (path / "chat_template.json").is_file():
        return True
    config = path / "tokenizer_config.json"
    return config.is_file() and bool(_read_json(config).get("chat_template"))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise _missing(path)
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BaseModelError(
            f"a file can't be read ({error})", got=str(path), expected="JSON", fix=_AGAIN
        ) from error
    if not isinstance(value, dict):
        raise BaseModelError(
            "a file is damaged", got=str(path), expected="a JSON object", fix=_AGAIN
        )
    return value


def _first(value: Any, path: Path, key: str) -> Any:
    if isinstance(value, list) and value:
        return value[0]
    raise _unknown(path, key, value)


def _optional(config: dict[str, Any], key: str, path: Path) -> int | None:
    """A size; None where nothing is said of it and the model is described in part only."""
    value = config.get(key)
    if isinstance(value, int) and value > 0:
        return value
    if value is None and isinstance(config.get("model_type"), str) and "hidden_size" in config:
        return None
    raise _unknown(path, key, value)


def _embedded(tensors: dict[str, Any], path: Path) -> int:
    """Rows of the embedding."""
    for name, entry in tensors.items():
        if name.endswith(("embed_tokens.weight", "wte.weight")):
            return int(entry["shape"][0])
    raise _unknown(path, "vocab_size", None)


def _unknown(path: Path, key: str, value: Any) -> BaseModelError:
    return BaseModelError(
        f"{path / 'config.json'} has no usable {key!r}",
        got=value,
        expected="the config of a causal language model",
        fix="Use a decoder-only text model.",
    )


def _missing(file: Path) -> BaseModelError:
    return BaseModelError(
        "the base model is not whole: a file is missing", got=str(file), fix=_AGAIN
    )
