"""A base model with named LoRA adapters, called a row at a time.

In: a folder with a Hugging Face causal model; adapters by name. Out: hidden states of a `Row`'s
positions, logits of chosen ones. One thread owns a `LoraModel`: which adapter is active is state
of the module (`disable_adapter()` in another thread would change answers in flight).
The module stays in eval mode, also in training: adapters have no dropout.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from art_core.config import Layers, LoraSettings
from art_core.errors import BaseModelError, CheckpointError, ConfigError
from art_core.nn import rows, trees
from art_core.nn.base_identity import BaseIdentity, check_base, identify
from art_core.nn.frozen import is_four_bit
from art_core.nn.fused_layers import use_fused_layers
from art_core.nn.fused_lora import use_fused_lora
from art_core.nn.fused_norm import use_fused_norms
from art_core.nn.head import Head, find_head
from art_core.nn.linear import product, use_onednn
from art_core.nn.loading import load_causal
from art_core.nn.merging import Merging
from art_core.nn.recompute import Recompute
from art_core.nn.unsloth_layers import check_unsloth, use_unsloth_layers

_log = logging.getLogger(__name__)

WEIGHTS = "adapter_model.safetensors"

_FILE_PREFIX = "base_model.model."
"""What peft's files put before the base model's own names."""
_SCALE = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
"""Settings of an adapter without which its weights mean something else."""


class LoraModel:
    """Load with `LoraModel.load`; not thread-safe by design."""

    def __init__(self, base: Any, path: Path, *, layers: Layers = "own") -> None:
        self.path = path
        self.config = base.config.get_text_config()
        self.windows: tuple[int, ...] = ()
        """Of its sliding layers, in positions, if positions are shared."""
        self.is_plain = True
        """Scores are scaled products in every layer, but for windows."""
        self.why_alone: str | None = None
        """Why positions can't be shared, if they can't."""
        self._causal = base.eval().requires_grad_(False)
        use_onednn(self._causal)
        use_fused_norms(self._causal)
        self._merging = Merging(self._causal)
        self._tuner: Any = None  # peft's, once there is an adapter
        self._adapted: list[Any] = []  # the layers that it put adapters into
        self._found: dict[str, list[tuple[str, Tensor]]] = {}  # parameters, by adapter
        self._active: str | None = None
        self._trainable = False
        self._applied: str | None = None  # the adapter that the layers know of
        self._decoder = trees.decoder(base)
        self._head = self._find_head()
        self._recompute = Recompute(base)
        if layers == "unsloth":
            use_unsloth_layers(base)
        if self.shares_positions:
            use_fused_layers(base)
        self._rotary_limit = trees.rotary_limit(self.config)
        if self._rotary_limit is not None:
            _log.info(
                "%s is used for up to %d positions: beyond, its rotary embeddings depend on a "
                "sequence's length, so that keys could not be kept",
                path.name,
                self._rotary_limit,
            )

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        four_bit: bool = False,
        layers: Layers = "own",
    ) -> LoraModel:
        """Load the base model in `path`.

        Args:
            four_bit: its linear layers in NF4 (QLoRA); `dtype` is of what is computed with them.

        Raises:
            BaseModelError: it can't be loaded, or makes its logits in a way that is not known.
            ConfigError: 4 bits or Unsloth's layers are asked for, and can't be had here.
        """
        if layers == "unsloth":
            check_unsloth(device, dtype)
        base = load_causal(path, dtype=dtype, device=device, four_bit=four_bit)
        return cls(base, path, layers=layers)

    def _find_head(self) -> Head:
        hidden, logits = trees.alone(self._causal)
        self.why_alone = self._try_trees(logits)
        if self.why_alone is not None:
            _log.warning("%s computes every call by itself: %s", self.path.name, self.why_alone)
        return find_head(
            self._causal.get_output_embeddings(),
            self.config,
            hidden,
            logits,
            tolerance=trees.tolerance(self._causal.dtype),
        )

    def _try_trees(self, alone: Tensor) -> str | None:
        """Let rows say how the model attends; or leave it as it is, and say why.

        alone: logits that it gives as it is.
        """
        base = self._causal
        why_not = trees.why_not_by_config(self.config)
        if why_not is None and not base._can_set_attn_implementation():
            why_not = "its attention can't be replaced"
        if why_not is not None:
            return why_not
        own = base.config._attn_implementation
        base.set_attn_implementation(rows.register())
        found = trees.probe(base, self.config, alone)
        if found.why_not is not None:
            base.set_attn_implementation(own)
            return found.why_not
        scores = found.scores.values()
        self.windows = tuple(sorted({s.window for s in scores if s.window is not None}))
        self.is_plain = all(s.softcap is None and s.sinks is None for s in scores)
        return None

    @cached_property
    def identity(self) -> BaseIdentity:
        """Which base model it is."""
        return identify(self.path)

    @property
    def shares_positions(self) -> bool:
        """True if a row may hold trees; else each row is one sequence."""
        return bool(self._causal.config._attn_implementation == rows.IMPLEMENTATION)

    def check_servable(self) -> None:
        """Whether an engine that keeps keys and values can answer from it.

        Raises:
            BaseModelError: it can't.
        """
        if not self.shares_positions or not self.is_plain:
            raise BaseModelError(
                "the embedded engine can't serve a model of this kind",
                got=self.path.name,
                expected="attention in every layer, its scores plain scaled products",
                fix="Choose another base model, such as a Llama or a Qwen.",
            )

    @property
    def served_length(self) -> int:
        """Positions up to which no sliding window hides anything: what the engine can serve."""
        return min((self.context_length, *self.windows))

    @property
    def context_length(self) -> int:
        """Positions the base model was made for, as far as keys do not depend on what follows."""
        made_for = getattr(self.config, "max_position_embeddings", None)
        return min(int(made_for or sys.maxsize), self._rotary_limit or sys.maxsize)

    @property
    def vocab_size(self) -> int:
        return int(self._head.weight.shape[0])

    @property
    def layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def device(self) -> torch.device:
        return self._head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self._head.weight.dtype

    @property
    def base_bytes(self) -> int:
        """What the base model's weights take."""
        whole = {p.data_ptr(): p.numel() * p.element_size() for p in self._causal.parameters()}
        adapters = {
            p.data_ptr() for name in self.adapters() for _, p in self._named_parameters(name)
        }
        return sum(size for place, size in whole.items() if place not in adapters)

    @property
    def has_four_bits(self) -> bool:
        """True if its linear layers are kept in 4 bits."""
        return any(is_four_bit(module) for module in self._causal.modules())

    @property
    def copied_bytes(self) -> int:
        """What a copy of the weights takes that a step computes with; 0: it takes none."""
        return self._merging.bytes_to_learn

    def hidden(self, ids: Tensor, depth: Tensor, row: rows.Row) -> Tensor:
        """ids, depth: [N] -> hidden states [N, H] under the active adapter.

        A model that does not share positions takes one sequence, and does not ask the row.
        """
        self._apply()
        if self.shares_positions:
            merged = self._merging.weights(self._active, learns=self._trainable)
            if merged is not None:
                return merged.hidden(ids, depth, row)
        more = {"position_ids": depth.unsqueeze(0), "art_row": row} if self.shares_positions else {}
        with self._recompute.for_row(len(ids)):
            out = self._decoder(input_ids=ids.unsqueeze(0), use_cache=False, **more)
        return cast(Tensor, out.last_hidden_state[0])

    @property
    def recomputes(self) -> bool:
        """True if layers may compute again for the backward pass what they did not keep."""
        return self._recompute.can

    def forget_from(self, positions: int) -> bool:
        """As `Recompute.forget_from`: rows so long compute all again instead of keeping any."""
        return self._recompute.forget_from(positions)

    @property
    def head(self) -> Head:
        """What makes logits of hidden states."""
        return self._head

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> [n, V]."""
        if not torch.is_grad_enabled() and self._merging.head is not None:
            return product(hidden, self._merging.head)
        return self._head.logits(hidden)

    # Adapters

    def adapters(self) -> list[str]:
        """Names of the adapters in memory."""
        return list(self._tuner.peft_config) if self._tuner is not None else []

    def create_adapter(self, name: str, settings: LoraSettings, *, seed: int) -> None:
        """Add a fresh adapter: A from `seed`, B zero, so that it changes nothing yet.

        Raises:
            ConfigError: `settings.target_modules` names nothing in the base model.
        """
        from peft import LoraConfig

        target = settings.target_modules
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=cast(int, settings.alpha),  # any number will do
            target_modules=target if isinstance(target, str) else list(target),
            exclude_modules=self._beside() if target == "all-linear" else None,
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
        )
        try:
            self._add(name, config, seed)
        except ValueError as error:
            raise ConfigError(
                f"LoRA can't be added to {self.path.name} ({error})",
                got=target,
                expected='"all-linear", or names of linear layers such as "q_proj"',
                fix="Set LoraSettings(target_modules=...).",
            ) from error

    def load_adapter(self, name: str, folder: Path) -> None:
        """Add the adapter saved in `folder` (peft's format), or overwrite the one of that name.

        Raises:
            CheckpointError: the folder is no adapter of this base model, or one with other
                settings than the adapter that is overwritten.
        """
        config, weights = self._read(folder)
        if name in self.adapters():
            self._check_scale(name, config, folder)
            self._fill(name, weights, folder)
            return
        try:
            self._add(name, config, seed=0)
        except ValueError as error:
            raise _misfit(folder, str(error), self.path.name) from error
        try:
            self._fill(name, weights, folder)
        except CheckpointError:
            self.drop_adapter(name)
            raise

    def _read(self, folder: Path) -> tuple[Any, dict[str, Tensor]]:
        """Settings and weights of an adapter of this base model."""
        config, weights = _read(folder)
        check_base(folder, config.base_model_name_or_path, self.identity)
        config.base_model_name_or_path = None
        return config, weights

    def save_adapter(self, name: str, folder: Path) -> None:
        """Write the adapter in peft's format."""
        from safetensors.torch import save_file

        config = copy(self._tuner.peft_config[name])
        config.base_model_name_or_path = self.identity.name  # no path of this machine
        config.save_pretrained(str(folder))
        weights = {key: value.contiguous() for key, value in self.adapter_weights(name).items()}
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
        self.identity.write(folder)

    def numbers_of(self, name: str) -> int:
        """How many an adapter has."""
        return sum(p.numel() for _, p in self._named_parameters(name))

    def adapter_weights(self, name: str) -> dict[str, Tensor]:
        """The adapter's tensors under peft's file keys, in a fixed order."""
        from peft.utils import get_peft_model_state_dict

        state = get_peft_model_state_dict(
            self._causal, adapter_name=name, save_embedding_layers=False
        )
        return {_FILE_PREFIX + key: value for key, value in sorted(state.items())}

    def drop_adapter(self, name: str) -> None:
        """Forget the adapter; unknown names are ignored."""
        if name not in self.adapters():
            return
        self.activate(None)
        self._apply()
        self._merging.forget()
        self._tuner.set_adapter([], inference_mode=True)  # peft warns when it has to choose another
        self._tuner.delete_adapter(name)
        self._look()

    def activate(self, name: str | None) -> None:
        """Answer with this adapter from now on; None is the base model."""
        if name != self._active or self._trainable:
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

    @contextmanager
    def acting(self, name: str | None) -> Iterator[None]:
        """This adapter active for what is computed meanwhile; None is the base model."""
        before, trainable = self._active, self._trainable
        self.activate(name)
        try:
            yield
        finally:
            self._switch(before, trainable=trainable)

    def _named_parameters(self, name: str) -> list[tuple[str, Tensor]]:
        if name not in self._found:
            found = [(n, p) for n, p in self._causal.named_parameters() if f".{name}." in n]
            self._found[name] = sorted(found, key=lambda item: item[0])
        return self._found[name]

    def _look(self) -> None:
        """See anew where adapters are: walking through a whole model takes 20 ms and more."""
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        kinds = BaseTunerLayer | AuxiliaryTrainingWrapper
        self._adapted = [m for m in self._causal.modules() if isinstance(m, kinds)]
        self._found.clear()

    def _beside(self) -> list[str] | None:
        """Linear layers that make no text: of a part that sees images, say."""
        mine = {id(module) for module in self._decoder.modules()}
        mine.add(id(self._causal.get_output_embeddings()))
        beside = [
            name
            for name, module in self._causal.named_modules()
            if isinstance(module, torch.nn.Linear) and id(module) not in mine
        ]
        return beside or None

    def _add(self, name: str, config: Any, seed: int) -> None:
        """Put a new adapter into the layers; on a ValueError of peft nothing has changed.

        The tuner alone, without the `PeftModel` around it: that one asks transformers for a
        deprecated property and writes the base model's path into `config`, with a warning for each.
        """
        import peft
        from peft.tuners.tuners_utils import cast_adapter_dtype

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if self._tuner is None:
                self._tuner = peft.LoraModel(self._causal, {name: config}, name)
            else:
                self._tuner.peft_config[name] = config
                try:
                    self._tuner.inject_adapter(self._causal, name)
                except ValueError:
                    del self._tuner.peft_config[name]
                    raise
        cast_adapter_dtype(self._causal, name)
        self._causal.eval()
        use_onednn(self._causal)
        use_fused_lora(self._causal)
        self._look()
        self._applied = name  # peft leaves a fresh adapter active, and trainable
        self._switch(None, trainable=False)
        self._apply()

    def _fill(self, name: str, weights: dict[str, Tensor], folder: Path) -> None:
        from peft.utils import set_peft_model_state_dict

        self._merging.forget()
        try:
            fit: Any = set_peft_model_state_dict(self._causal, weights, adapter_name=name)
        except RuntimeError as error:  # a shape is wrong
            raise _misfit(folder, str(error), self.path.name) from error
        missing = [key for key in fit.missing_keys if f".{name}." in key]
        if odd := [*fit.unexpected_keys, *missing]:
            raise _misfit(folder, f"weights without a match: {odd[:3]}", self.path.name)

    def _check_scale(self, name: str, config: Any, folder: Path) -> None:
        mine = self._tuner.peft_config[name]
        other = {key: getattr(config, key) for key in _SCALE}
        wanted = {key: getattr(mine, key) for key in _SCALE}
        wrong = [key for key in _SCALE if other[key] != wanted[key]]
        if wrong:
            raise CheckpointError(
                f"adapter {folder} was made with other LoRA settings",
                got={key: other[key] for key in wrong},
                expected=f"{ {key: wanted[key] for key in wrong} }",
                fix="Give LoraSettings its rank and alpha, or give the model another name.",
            )

    def _switch(self, name: str | None, *, trainable: bool) -> None:
        if name is not None and name not in self.adapters():  # peft would answer as the base model
            raise AssertionError(f"no adapter {name!r} among {self.adapters()}")
        if self._trainable:
            self._require_gradients(False)
        self._active, self._trainable = name, trainable
        if trainable:
            self._apply()
            self._require_gradients(True)

    def _require_gradients(self, wanted: bool) -> None:
        """Of the active adapter's parameters."""
        assert self._active is not None
        for _, parameter in self._named_parameters(self._active):
            parameter.requires_grad_(wanted)

    def _apply(self) -> None:
        """Tell the layers which adapter is active: late, for it takes 10 ms and more."""
        if self._active == self._applied:
            return
        for layer in self._adapted:
            if self._active is None or layer.disable_adapters:
                layer.enable_adapters(self._active is not None)
            if self._active is not None:
                layer.set_adapter(self._active, inference_mode=True)
        if self._active is not None:
            self._tuner.active_adapter = self._active
        self._applied = self._active


def _read(folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """Config and weights of an adapter in peft's format."""
    from peft import LoraConfig
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config = LoraConfig.from_pretrained(str(folder))
        weights = load_file(folder / WEIGHTS)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"adapter can't be read ({error})",
            got=str(folder),
            expected=f"adapter_config.json and {WEIGHTS}",
            fix="Choose another step.",
        ) from error
    return config, weights


def _misfit(folder: Path, reason: str, base: str) -> CheckpointError:
    return CheckpointError(
        f"adapter does not fit the base model ({reason})",
        got=str(folder),
        expected=f"an adapter trained on {base}",
        fix="Check base_model and LoraSettings.",
    )
