"""A base model with named LoRA adapters, called a row at a time.

In: a folder with a Hugging Face causal model; adapters by name. Out: hidden states of a `Row`'s
positions, logits of chosen ones. One thread owns a `LoraModel`: which adapter is active is state
of the module (`disable_adapter()` in another thread would change answers in flight).
The module stays in eval mode, also in training: adapters have no dropout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from art_core.config import LoraSettings
from art_core.errors import BaseModelError, CheckpointError
from art_core.nn import attention
from art_core.nn.linear import use_onednn

WEIGHTS = "adapter_model.safetensors"


class LoraModel:
    """Load with `LoraModel.load`; not thread-safe by design."""

    def __init__(self, base: Any, path: Path) -> None:
        self.path = path
        self.config = base.config
        self._causal = base.eval().requires_grad_(False)
        use_onednn(self._causal)
        self._head = base.get_output_embeddings()
        self._peft: Any = None
        self._active: str | None = None
        self._trainable = False
        _check_head(self.config)

    @classmethod
    def load(cls, path: Path, *, dtype: torch.dtype = torch.float32) -> LoraModel:
        """Load the base model in `path`.

        Raises:
            BaseModelError: it can't be loaded, or its output head is not a plain matrix.
        """
        from transformers import AutoModelForCausalLM

        try:
            base = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, attn_implementation=attention.register(), local_files_only=True
            )
        except (OSError, ValueError, KeyError) as error:
            raise BaseModelError(
                f"base model can't be loaded ({error})",
                got=str(path),
                expected="a causal model that transformers can load",
                fix="Check the folder, or fetch the model again.",
            ) from error
        return cls(base, path)

    @property
    def context_length(self) -> int:
        """Positions the base model was made for."""
        return int(self.config.max_position_embeddings)

    @property
    def vocab_size(self) -> int:
        return int(self._head.weight.shape[0])

    @property
    def layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def device(self) -> torch.device:
        return cast(torch.device, self._head.weight.device)

    @property
    def dtype(self) -> torch.dtype:
        return cast(torch.dtype, self._head.weight.dtype)

    def hidden(self, ids: Tensor, depth: Tensor, row: attention.Row) -> Tensor:
        """ids, depth: [N] -> hidden states [N, H] under the active adapter."""
        out = self._causal.base_model(
            input_ids=ids.unsqueeze(0),
            position_ids=depth.unsqueeze(0),
            use_cache=False,
            art_row=row,
        )
        return cast(Tensor, out.last_hidden_state[0])

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> [n, V]."""
        return cast(Tensor, self._head(hidden))

    # Adapters

    def adapters(self) -> list[str]:
        """Names of the adapters in memory."""
        return list(self._peft.peft_config) if self._peft is not None else []

    def create_adapter(self, name: str, settings: LoraSettings, *, seed: int) -> None:
        """Add a fresh adapter: A from `seed`, B zero, so that it changes nothing yet."""
        from peft import LoraConfig

        target = settings.target_modules
        self._add(
            name,
            LoraConfig(
                r=settings.rank,
                lora_alpha=cast(int, settings.alpha),
                target_modules=target if isinstance(target, str) else list(target),
                lora_dropout=0.0,
                bias="none",
                task_type="CAUSAL_LM",
                base_model_name_or_path=str(self.path.name),
            ),
            seed,
        )

    def load_adapter(self, name: str, folder: Path) -> None:
        """Add the adapter saved in `folder` (peft's format).

        Raises:
            CheckpointError: the folder is no adapter of this base model.
        """
        from peft import LoraConfig
        from peft.utils import set_peft_model_state_dict
        from safetensors.torch import load_file

        try:
            config = LoraConfig.from_pretrained(str(folder))
            weights = load_file(folder / WEIGHTS)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"adapter can't be read ({error})",
                got=str(folder),
                expected=f"adapter_config.json and {WEIGHTS}",
                fix="Choose another step.",
            ) from error
        if name not in self.adapters():
            self._add(name, config, seed=0)
        outcome = set_peft_model_state_dict(self._peft, weights, adapter_name=name)
        if outcome.unexpected_keys:
            self.drop_adapter(name)
            raise CheckpointError(
                "adapter has weights that this base model has no place for",
                got=outcome.unexpected_keys[:3],
                expected=f"an adapter trained on {self.path.name}",
                fix="Check base_model.",
            )

    def save_adapter(self, name: str, folder: Path) -> None:
        """Write the adapter in peft's format."""
        from safetensors.torch import save_file

        self._peft.peft_config[name].save_pretrained(str(folder))
        weights = {key: value.contiguous() for key, value in self.adapter_weights(name).items()}
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})

    def adapter_weights(self, name: str) -> dict[str, Tensor]:
        """The adapter's tensors under peft's file keys, in a fixed order."""
        from peft.utils import get_peft_model_state_dict

        state = get_peft_model_state_dict(self._peft, adapter_name=name, save_embedding_layers=False)
        return dict(sorted(state.items()))

    def drop_adapter(self, name: str) -> None:
        """Forget the adapter; unknown names are ignored."""
        if name not in self.adapters():
            return
        self.activate(None)
        self._peft.delete_adapter(name)

    def activate(self, name: str | None) -> None:
        """Answer with this adapter from now on; None is the base model."""
        if self._peft is None or (name == self._active and not self._trainable):
            return
        self._switch(name, trainable=False)

    @contextmanager
    def training(self, name: str) -> Iterator[list[Tensor]]:
        """The adapter active with gradients; yields its parameters in a fixed order."""
        before = self._active
        self._switch(name, trainable=True)
        try:
            yield [p for _, p in self._named_parameters(name)]
        finally:
            self._switch(before if before in self.adapters() else None, trainable=False)

    def _named_parameters(self, name: str) -> list[tuple[str, Tensor]]:
        found = [(n, p) for n, p in self._peft.named_parameters() if f".{name}." in n]
        return sorted(found, key=lambda item: item[0])

    def _add(self, name: str, config: Any, seed: int) -> None:
        from peft import get_peft_model

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if self._peft is None:
                self._peft = get_peft_model(self._causal, config, adapter_name=name)
            else:
                self._peft.add_adapter(name, config)
        self._peft.eval()
        self._trainable = True  # peft leaves a fresh adapter trainable
        self.activate(None)

    def _switch(self, name: str | None, *, trainable: bool) -> None:
        tuner = self._peft.base_model
        if name is None:
            tuner.disable_adapter_layers()
        else:
            tuner.enable_adapter_layers()
            tuner.set_adapter(name, inference_mode=not trainable)
            if trainable and not all(p.requires_grad for _, p in self._named_parameters(name)):
                raise AssertionError(f"adapter {name} is not trainable after set_adapter")
        self._active, self._trainable = name, trainable


def _check_head(config: Any) -> None:
    """Rows call the output matrix directly, which is exact only if nothing follows it."""
    for knob, neutral in (("final_logit_softcapping", None), ("logit_scale", 1.0), ("logits_scaling", 1.0)):
        value = getattr(config, knob, neutral)
        if value not in (neutral, None):
            raise BaseModelError(
                f"base model changes its logits after the head ({knob})",
                got=value,
                expected="a plain output matrix",
                fix="Choose a base model without it for the embedded engine.",
            )
