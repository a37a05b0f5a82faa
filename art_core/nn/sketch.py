"""A tiny random model of a base model's kind, to see how that kind computes without its weights.

In: the folder of a base model, of which only `config.json` is read. Out: whether its positions can
be shared, and if not why; how far its context goes; which of its layers take an adapter. The model
is as `LoraModel` makes it, so what trains the real one decides here too. Run as a program
(`python -m art_core.nn.sketch FOLDER`) it prints that as one JSON object, so that whoever asks need
not load torch.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from art_core.config import LoraSettings
from art_core.errors import ARTError, BaseModelError
from art_core.nn.lora import LoraModel

_HEADS, _KEY_HEADS = 4, 2
_VOCABULARY = 64
_WIDE = 0.2
"""Initial values so large that every layer matters (in float64 nothing drowns)."""
_SMALL: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "n_group": 1,
    "topk_group": 1,
    "initializer_range": _WIDE,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
"""Settings of configs that have them; those of heads and layers depend on the config."""


@dataclass(frozen=True)
class Computes:
    """How models of a kind compute."""

    why_alone: str | None
    """Why every call is computed by itself; None: trees of calls are computed at once."""
    is_plain: bool
    """Scores are scaled products in every layer: what the embedded engine serves."""
    windows: tuple[int, ...]
    """Of its sliding layers, in positions; known where positions are shared."""
    context_length: int
    """Positions, as far as keys do not depend on what follows."""
    targets: tuple[str, ...]
    """Names of the layers that take an adapter under "all-linear"; empty where none can be put."""
    why_no_adapter: str | None
    config: dict[str, Any]
    """Of the language model, with what `config.json` leaves to its kind's defaults."""


def look(folder: Path) -> Computes:
    """How the model in `folder` computes.

    Raises:
        BaseModelError: transformers does not know its kind, or it is no causal language model.
    """
    config, base = _sketch(folder)
    model = LoraModel(base, folder)
    targets, why_no_adapter = _targets(model)
    return Computes(
        why_alone=model.why_alone,
        is_plain=model.is_plain,
        windows=model.windows,
        context_length=model.context_length,
        targets=targets,
        why_no_adapter=why_no_adapter,
        config=config,
    )


def _sketch(folder: Path) -> tuple[dict[str, Any], Any]:
    """(the whole config, a tiny model of its kind)."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

    try:
        whole = AutoConfig.from_pretrained(folder, local_files_only=True)
        if type(whole) not in MODEL_FOR_CAUSAL_LM_MAPPING:  # what loads the real one looks there
            raise ValueError(f"{type(whole).__name__} is no causal language model's")
        config = whole.get_text_config()
        small = _shrunk(config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(
                small, dtype=torch.float64, experts_implementation="eager"
            )
            _let_all_matter(model)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise BaseModelError(
            f"transformers can't make a model of this kind ({error})",
            got=str(folder),
            expected="the config of a causal language model",
            fix="Update transformers, or choose another base model.",
        ) from error
    return config.to_dict(), model


def _shrunk(config: Any) -> Any:
    """The same kind, tiny: as many layers as show every kind of layer, few and whole heads."""
    given = config.to_dict()
    layers = _layers(given)
    changed = {key: value for key, value in _SMALL.items() if key in given}
    head = given.get("head_dim") or given["hidden_size"] // given["num_attention_heads"]
    changed |= {"num_hidden_layers": layers, "num_attention_heads": _HEADS}
    changed["hidden_size"] = head * _HEADS  # some kinds take the size of a head from this
    if "num_key_value_heads" in given:
        alike = given["num_key_value_heads"] in (None, given["num_attention_heads"])
        changed["num_key_value_heads"] = _HEADS if alike else _KEY_HEADS
    for key, value in given.items():
        if isinstance(value, list) and len(value) == given["num_hidden_layers"]:
            changed[key] = value[:layers]
    kept = {key: value for key, value in given.items() if key not in ("quantization_config",)}
    return type(config).from_dict({**kept, **changed})


def _layers(given: dict[str, Any]) -> int:
    """Layers from the first on that hold every kind, at least two."""
    kinds = given.get("layer_types") or []
    firsts = [kinds.index(kind) for kind in set(kinds)]
    return max(2, *(first + 1 for first in firsts)) if firsts else 2


def _let_all_matter(model: Any) -> None:
    """No layer is idle for want of an initial value."""
    for parameter in model.parameters():
        if parameter.numel() > 1 and float(parameter.detach().std()) == 0:
            torch.nn.init.normal_(parameter, float(parameter.detach().mean()), 0.1)


def _targets(model: LoraModel) -> tuple[tuple[str, ...], str | None]:
    try:
        model.create_adapter("look", LoraSettings(rank=1), seed=0)
    except ARTError as error:
        return (), str(error)
    names = {
        key.rpartition(".lora_")[0].rpartition(".")[2] for key in model.adapter_weights("look")
    }
    return tuple(sorted(names)), None


def main() -> int:
    """Look at the folder that is the first argument; errors are printed as JSON too."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    try:
        found = asdict(look(Path(sys.argv[1])))
    except ARTError as error:
        found = {"error": str(error)}
    sys.stdout.write(json.dumps(found, default=str) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
