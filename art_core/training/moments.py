"""The optimizer's state as named tensors, and a trainer's state on disk.

In: an optimizer and the parameters it updates. Out: "3.exp_avg" -> tensor, and back; the files of a
checkpoint beside the adapter. Of one with moments in 8 bits the tables that are the same for all
parameters are left out: they are no state.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from art_core.errors import CheckpointError
from art_core.training.entropy import EntropyBonus

OPTIMIZER = "optimizer.safetensors"
STATE = "trainer.json"

_TABLES = ("qmap1", "qmap2")
"""What bitsandbytes reads numbers of 8 bits by."""


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
        f"{i}.{key}": value if isinstance(value, Tensor) else torch.tensor(value)
        for i, parameter in enumerate(parameters)
        for key, value in optimizer.state.get(parameter, {}).items()
        if key not in _TABLES
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
        CheckpointError: they are of other parameters, or of another kind of optimizer.
    """
    kept: dict[int, dict[str, Tensor]] = {}
    for key, value in moments.items():
        index, _, name = key.partition(".")
        kept.setdefault(int(index), {})[name] = value
    state: dict[Tensor, dict[str, Any]] = {}
    for i, own in kept.items():
        if i >= len(parameters):
            raise _misfit(f"optimizer state {i} fits no weight of the adapter", source)
        made = _in_8_bits if hasattr(optimizer, "init_state") else _as_torch
        state[parameters[i]] = made(optimizer, parameters[i], own, source)
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
        if key not in _TABLES
    }
    if held.keys() != moments.keys():
        own = dict(zip(moments, copies(list(moments.values())), strict=True))
        set_moments(optimizer, parameters, own)
        return
    tensors = {key: value for key, value in held.items() if isinstance(value, Tensor)}
    if tensors:
        torch._foreach_copy_(list(tensors.values()), [moments[key] for key in tensors])
    for key in held.keys() - tensors.keys():  # numbers: bitsandbytes counts steps in Python
        index, _, name = key.partition(".")
        optimizer.state[parameters[int(index)]][name] = moments[key].item()


def _as_torch(
    optimizer: Any, parameter: Tensor, own: dict[str, Tensor], source: Path | None
) -> dict[str, Any]:
    if "state1" in own:
        raise _misfit("the optimizer's state is in 8 bits", source)
    for name, value in own.items():
        if value.shape not in (parameter.shape, torch.Size()):
            raise _misfit(f"optimizer state {name} fits no weight of the adapter", source)
    return {name: value.to(parameter.device) for name, value in own.items()}


def _in_8_bits(
    optimizer: Any, parameter: Tensor, own: dict[str, Tensor], source: Path | None
) -> dict[str, Any]:
    """As bitsandbytes begins it, then filled: so its tables are there."""
    optimizer.init_state(optimizer.param_groups[0], parameter, 0, 0)
    made: dict[str, Any] = optimizer.state[parameter]
    wanted = {name: value for name, value in made.items() if name not in _TABLES}
    if own.keys() != wanted.keys():
        raise _misfit("the optimizer's state is not in 8 bits", source)
    for name, value in wanted.items():
        if not isinstance(value, Tensor):
            made[name] = int(own[name])
        elif value.shape == own[name].shape:
            made[name] = own[name].to(parameter.device)
        else:
            raise _misfit(f"optimizer state {name} fits no weight of the adapter", source)
    return made


def _misfit(what: str, source: Path | None) -> CheckpointError:
    return CheckpointError(
        what,
        got=str(source),
        expected="the state of TrainerConfig.optimizer on this adapter",
        fix="Choose another step, or set the optimizer that the run began with.",
    )


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
