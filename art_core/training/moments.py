"""The optimizer's state as named tensors, and a trainer's state on disk.

In: AdamW and the parameters it updates. Out: "3.exp_avg" -> tensor, and back; the files of a
checkpoint beside the adapter.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from art_core.errors import CheckpointError
from art_core.training.entropy import EntropyBonus

OPTIMIZER = "optimizer.safetensors"
STATE = "trainer.json"


@dataclass(frozen=True)
class TrainerState:
    """Numbers that go on with a run."""

    updates: int
    """Optimizer steps so far."""
    seed: int
    running: float = 0.0
    """The running baseline; see `TrainConfig.baseline`."""
    bonus: EntropyBonus | None = None
    """See `TrainConfig.entropy_target`; None before the first update that has one."""


def get_moments(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]
) -> dict[str, Tensor]:
    """A copy of the optimizer's tensors, by parameter and name."""
    held = {
        f"{i}.{key}": value
        for i, parameter in enumerate(parameters)
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    return dict(zip(held, copies(list(held.values())), strict=True))


@torch.no_grad()
def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Of all at once: on a GPU hundreds of small copies wait for each other's launch."""
    found = [torch.empty_like(tensor) for tensor in tensors]
    if found:  # torch refuses none
        torch._foreach_copy_(found, list(tensors))
    return found


def set_moments(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Tensor],
    moments: dict[str, Tensor],
    *,
    source: Path | None = None,
) -> None:
    """Give the optimizer these tensors, and no others.

    Raises:
        CheckpointError: they are of other parameters.
    """
    state: dict[Tensor, dict[str, Tensor]] = {}
    for key, value in moments.items():
        index, _, name = key.partition(".")
        parameter = parameters[int(index)] if int(index) < len(parameters) else None
        if parameter is None or value.shape not in (parameter.shape, torch.Size()):
            raise CheckpointError(
                f"optimizer state {key} fits no weight of the adapter",
                got=str(source),
                fix="Choose another step.",
            )
        state.setdefault(parameter, {})[name] = value.to(parameter.device)
    optimizer.state.clear()
    optimizer.state.update(state)


def put_back(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], moments: dict[str, Tensor]
) -> None:
    """Have the optimizer's state be what `moments` was copied from; they stay the caller's.

    In place where that can be: an undone step may have been undone for want of memory.
    """
    held = {
        f"{i}.{key}": value
        for i, parameter in enumerate(parameters)
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }
    if held.keys() != moments.keys():
        own = dict(zip(moments, copies(list(moments.values())), strict=True))
        set_moments(optimizer, parameters, own)
    elif held:
        torch._foreach_copy_(list(held.values()), [moments[key] for key in held])


def write_state(folder: Path, state: TrainerState, moments: dict[str, Tensor]) -> None:
    """Write both files into `folder`."""
    from safetensors.torch import save_file

    save_file(moments, folder / OPTIMIZER)
    (folder / STATE).write_text(json.dumps(asdict(state)))


def read_state(folder: Path) -> tuple[TrainerState, dict[str, Tensor]]:
    """Read both files.

    Raises:
        CheckpointError: one is damaged or missing.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        state = json.loads((folder / STATE).read_text("utf-8"))
        running = float(state.get("running", 0.0))  # older checkpoints have neither of these
        bonus = None if state.get("bonus") is None else EntropyBonus(**state["bonus"])
        found = TrainerState(int(state["updates"]), int(state["seed"]), running, bonus)
        return found, load_file(folder / OPTIMIZER)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(
            f"optimizer state can't be read ({error})",
            got=str(folder),
            fix="Choose another step.",
        ) from error
