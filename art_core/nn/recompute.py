"""Decoder layers that forget what they computed, and compute it again for the backward pass.

In: a model, and how many positions a row has. Out: as many layers as have to forget for the row to
fit in the GPU's memory; the others keep everything, since computing again costs a third of a step.
How much a layer keeps is measured on the first row. On a CPU nothing is forgotten.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from art_core.nn.keeping import drops_out, layers_that_keep

_log = logging.getLogger(__name__)


class Recompute:
    """Chooses for each row which layers forget."""

    def __init__(self, causal: Any) -> None:
        from transformers.modeling_layers import GradientCheckpointingLayer

        found: list[Any] = [
            m for m in causal.modules() if isinstance(m, GradientCheckpointingLayer)
        ]
        if causal.device.type != "cuda" or drops_out(causal.config.to_dict()):
            found = []
        self._layers = found
        self._inputs = causal.config.get_text_config().hidden_size * causal.dtype.itemsize
        """Bytes that a layer which forgets keeps for a position."""
        self._kept: float | None = None
        """Bytes that a layer keeps for a position; None until it was measured."""
        self._forgets_from: int | None = None
        """Positions of a row from which on every layer forgets; None: as memory is left."""
        for layer in self._layers:
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

    @property
    def can(self) -> bool:
        """Whether layers may forget at all."""
        return bool(self._layers)

    def forget_from(self, positions: int) -> bool:
        """Let every layer forget in rows of at least so many positions, which have run out of
        memory; False if they did already, or can't."""
        if not self._layers or (self._forgets_from or positions + 1) <= positions:
            return False
        self._forgets_from = positions
        return True

    @contextmanager
    def for_row(self, positions: int) -> Iterator[None]:
        """Within it a forward pass with gradients fits in memory, if it can."""
        if not self._layers or not torch.is_grad_enabled():
            yield
            return
        forgetful = self._layers[self._keeping(positions) :]
        for layer in forgetful:
            layer.gradient_checkpointing = layer.training = True
        try:
            if self._kept is None:
                with self._measured(self._layers[0], positions):
                    yield
            else:
                yield
        finally:
            for layer in forgetful:
                layer.gradient_checkpointing = layer.training = False

    def _keeping(self, positions: int) -> int:
        """How many layers may keep what they compute of a row: of the first, one to be measured."""
        if self._kept is None:
            return 1
        if self._forgets_from is not None and positions >= self._forgets_from:
            return 0
        device = next(self._layers[0].parameters()).device
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        layer, inputs = int(self._kept * positions), self._inputs * positions
        return layers_that_keep(free + unused, layer, inputs, len(self._layers))

    @contextmanager
    def _measured(self, layer: Any, positions: int) -> Iterator[None]:
        """Learn what `layer` keeps while the body runs it."""
        device = next(layer.parameters()).device
        held: list[int] = []

        def note(*_: Any) -> None:
            held.append(torch.cuda.memory_allocated(device))

        hooks = (layer.register_forward_pre_hook(note), layer.register_forward_hook(note))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if len(held) == 2:
            self._kept = max(held[1] - held[0], 1) / positions
            _log.info("a decoder layer keeps %.0f bytes for a position", self._kept)
