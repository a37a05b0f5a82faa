"""Checkpoints of a run: `checkpoints/NNNN/`, each whole or absent.

In: a run folder that this process owns, and a function that writes a step's files. Out: sealed
folders (sealed.py), the newest whole one, and the choice of those to keep. A folder that fails its
check is never used and never counted; a log line names it. Left out: what a checkpoint holds.
"""

from __future__ import annotations

import errno
import json
import logging
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from art_core.errors import CheckpointError
from art_core.metrics import MetricsLog, best_step
from art_core.rundir import RunDir
from art_core.sealed import MANIFEST, find_damage, write_sealed

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint."""

    step: int
    path: Path


def save(run: RunDir, step: int, write: Callable[[Path], None]) -> Path:
    """Keep `step`; return its folder. A kill at any moment leaves the steps that were there.

    Args:
        run: open, so that no other process saves beside.
        step: 0 or more, and not there yet. A damaged folder of that step is replaced.
        write: puts the files into the empty folder it is given.

    Raises:
        CheckpointError: the step is there already, or `write` or the disk failed (`__cause__`);
            what was there before is untouched.
    """
    if not run.locked:
        raise CheckpointError(
            f"{run.path} is not open", fix="Save through RunDir.open(...), which takes its lock."
        )
    return save_into(run.checkpoints, step, write)


def save_into(folder: Path, step: int, write: Callable[[Path], None]) -> Path:
    """As `save`, where the run's owner has lent its folder of checkpoints: to its trainer."""
    target = folder / folder_name(step)
    if target.exists() and damage(target) is None:
        raise CheckpointError(
            f"checkpoint {target} is there already", fix="Save under the next step's number."
        )
    try:
        write_sealed(target, write)
    except Exception as error:  # a serializer tells of a full disk by an error of its own
        raise CheckpointError(
            f"step {step} can't be saved in {folder}: {_reason(error, folder)}",
            fix="The earlier steps are whole; free space or mend the disk, then train on.",
        ) from error
    return target


def latest(run: RunDir) -> Checkpoint | None:
    """The newest whole checkpoint, every byte checked; None if there is none.

    A damaged one is skipped, and a log line names it.
    """
    for step, path in reversed(list(_folders(run))):
        reason = damage(path)
        if reason is None:
            return Checkpoint(step, path)
        _log.warning("checkpoint %s is skipped: %s", path, reason)
    return None


def find(run: RunDir, step: int) -> Checkpoint:
    """The checkpoint of `step`, every byte checked.

    Raises:
        CheckpointError: it is missing or damaged; the message says which steps are there.
    """
    path = run.checkpoints / folder_name(step)
    reason = damage(path) if path.is_dir() else "there is no such folder"
    if reason is not None:
        raise CheckpointError(
            f"checkpoint {path} can't be used: {reason}",
            fix=f"Whole steps there: {steps(run) or 'none'}.",
        )
    return Checkpoint(step, path)


def steps(run: RunDir) -> list[int]:
    """The steps whose folders have every file, in order of number."""
    return [step for step, path in _folders(run) if damage(path, contents=False) is None]


def delete(run: RunDir, doomed: Collection[int]) -> None:
    """Delete these steps. A kill meanwhile leaves each of them whole or gone."""
    for step in doomed:
        path = run.checkpoints / folder_name(step)
        aside = run.checkpoints / f".tmp-{path.name}-{uuid.uuid4().hex[:12]}"
        try:
            path.rename(aside)
            shutil.rmtree(aside)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {path} can't be deleted: {error.strerror or error}",
                fix="Close the programs that read it, then delete again.",
            ) from error


def delete_all_but_best(
    run: RunDir, best_metric: str = "val/reward", *, in_use: Collection[int] = ()
) -> list[int]:
    """Keep the latest step and the best by `best_metric`; return the steps that were deleted.

    A missing, NaN or infinite value never makes a step the best. If no step that is there has a
    value, nothing is deleted and a log line says so.

    Args:
        run: open.
        best_metric: "<split>/<name>", the higher the better.
        in_use: steps to keep as well, e.g. those being served.
    """
    there = steps(run)
    best = best_step(MetricsLog(run.history).read(), best_metric, there)
    if best is None:
        if there:
            _log.warning(
                "%s: no checkpoint is deleted, because none of the steps %s has a finite %r in %s",
                run.path, there, best_metric, run.history.name,
            )  # fmt: skip
        return []
    doomed = [step for step in there if step not in {there[-1], best, *in_use}]
    delete(run, doomed)
    return doomed


def folder_name(step: int) -> str:
    """Four digits or more: "0007".

    Raises:
        CheckpointError: `step` is not a whole number from 0 on.
    """
    if type(step) is not int or step < 0:
        raise CheckpointError("the step of a checkpoint", got=step, expected="0, 1, 2, ...")
    return f"{step:04d}"


def damage(folder: Path, *, contents: bool = True) -> str | None:
    """Why a checkpoint can't be used; None if it is whole.

    A folder without a manifest was not written by us: it counts as whole if it is an adapter in
    peft's form whose tensors are all there, as ART leaves them.

    Args:
        folder: of the checkpoint.
        contents: compare the bytes too, not only names and sizes.
    """
    if (folder / MANIFEST).exists():
        return find_damage(folder, contents=contents)
    try:
        json.loads((folder / "adapter_config.json").read_text("utf-8"))
        return _damaged_tensors(folder / "adapter_model.safetensors")
    except FileNotFoundError as error:
        return f"{MANIFEST} and {Path(error.filename).name} are missing"
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"{MANIFEST} is missing, and the adapter can't be read ({error})"


def _damaged_tensors(path: Path) -> str | None:
    """Why a safetensors file is not whole: eight bytes of length N, N of JSON, then the tensors."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length)) if length <= size else {}
    ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
    expected = 8 + length + max(ends, default=0)
    return f"{path.name} has {size} bytes, not {expected}" if size != expected else None


def _folders(run: RunDir) -> Iterator[tuple[int, Path]]:
    """Folders named by a step, in order of number; others ("notes", ".tmp-...") are not ours."""
    if run.checkpoints.is_dir():
        paths = [p for p in run.checkpoints.iterdir() if p.name.isdecimal() and p.is_dir()]
        yield from sorted((int(p.name), p) for p in paths if p.name == folder_name(int(p.name)))


def _reason(error: BaseException, folder: Path) -> str:
    text = str(error) or type(error).__name__
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    free = shutil.disk_usage(folder.parent).free
    return f"{text} ({free:,} bytes free)" if full or free < 1 << 20 else text
