"""`iterate_dataset`: scenarios in batches, shuffled anew each epoch, resumable to the row.

In: a sequence of scenarios. Out: batches that know their step and epoch, and a small JSON-ready
`state` to go on from. The order depends on the seed, the epoch and the number of scenarios alone.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from art_core.errors import ConfigError
from art_core.progress import progress

T = TypeVar("T")


@dataclass(frozen=True)
class DatasetBatch(Generic[T]):
    """The scenarios of one training step."""

    items: list[T]
    step: int
    """Counted from 0 over all epochs."""
    epoch: int
    """From 0."""
    epoch_step: int
    """From 0 in each epoch."""
    rows: int
    """Scenarios given out over all epochs, this batch included."""
    _source: _Source[T] = field(repr=False, compare=False)

    @property
    def state(self) -> dict[str, Any]:
        """Where to go on after this batch: keep it with the checkpoint, give it as `resume`.

        `model.train(groups, bookmark=art.Bookmark("data", batch.state))`, and after a restart
        `iterate_dataset(..., resume=(await model.bookmarks()).get("data"))`.
        """
        return {"step": self.step + 1, "rows": self.rows, **self._source.identity}


def iterate_dataset(
    dataset: Iterable[T],
    groups_per_step: int = 1,
    num_epochs: int = 1,
    initial_step: int = 0,
    use_tqdm: bool = True,
    *,
    seed: int = 0,
    resume: Mapping[str, Any] | None = None,
) -> Iterator[DatasetBatch[T]]:
    """Give out every scenario once an epoch; the last batch of an epoch may be smaller.

    Args:
        dataset: the scenarios; an iterable is read into a list.
        groups_per_step: scenarios a batch.
        num_epochs: passes over the dataset.
        initial_step: batches of this size that are skipped at the beginning.
        use_tqdm: show progress (ART's name; the display is ours).
        seed: of the shuffles.
        resume: the `state` of the last trained batch. Unlike `initial_step` it finds the right row
            when `groups_per_step` has changed. It wins over `initial_step`.

    Raises:
        ConfigError: an argument can't work, or `resume` is of another dataset or seed: the order
            would be another one, so rows would be left out or come twice.
    """
    source = _Source(list(dataset), seed)
    for name, value, least in (
        ("groups_per_step", groups_per_step, 1),
        ("num_epochs", num_epochs, 0),
        ("initial_step", initial_step, 0),
    ):
        if type(value) is not int or value < least:
            raise ConfigError(name, got=value, expected=f"a whole number from {least} on")
    if resume is not None:
        source.check(resume)
    return _batches(source, groups_per_step, num_epochs, initial_step, resume, use_tqdm)


def _batches(
    source: _Source[T],
    size: int,
    epochs: int,
    initial_step: int,
    resume: Mapping[str, Any] | None,
    shown: bool,
) -> Iterator[DatasetBatch[T]]:
    rows_per_epoch = len(source.items)
    steps_per_epoch = -(-rows_per_epoch // size)
    if resume is not None:
        rows, step = int(resume["rows"]), int(resume["step"])
    else:
        epoch, done = divmod(initial_step, steps_per_epoch) if steps_per_epoch else (0, 0)
        rows, step = epoch * rows_per_epoch + done * size, initial_step
    with progress("steps", shown=shown) as display:
        while rows < epochs * rows_per_epoch:
            epoch, begin = divmod(rows, rows_per_epoch)
            order = source.order(epoch)[begin : begin + size]
            rows += len(order)
            items = [source.items[i] for i in order]
            yield DatasetBatch(items, step, epoch, -(-begin // size), rows, source)
            step += 1
            display.show(rows, epochs * rows_per_epoch, f"epoch {epoch + 1} of {epochs}")
        display.show(rows, epochs * rows_per_epoch, "finished")


class _Source(Generic[T]):
    """The dataset, the order of each epoch, and what tells it from another dataset."""

    def __init__(self, items: list[T], seed: int) -> None:
        self.items = items
        self.seed = seed

    def order(self, epoch: int) -> list[int]:
        order = list(range(len(self.items)))
        random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order

    @cached_property
    def identity(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for item in self.items:
            digest.update(_bytes_of(item) + b"\n")
        return {
            "size": len(self.items),
            "seed": self.seed,
            "fingerprint": digest.hexdigest()[:16],
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that belongs to another order of rows."""
        for name in ("step", "rows", *self.identity):
            if name not in state:
                raise ConfigError(f"resume lacks {name!r}", got=state, expected="a batch's `state`")
        for name, own in self.identity.items():
            if state[name] != own:
                raise ConfigError(
                    f"resume is of another dataset or seed: its {name!r}",
                    got=state[name],
                    expected=repr(own),
                    fix="Go on with the scenarios and the seed of the run, or start a new run.",
                )


def _bytes_of(item: object) -> bytes:
    """Something that changes when the item does, as far as it has a JSON form."""
    try:
        return json.dumps(item, sort_keys=True, default=_jsonable).encode()
    except (TypeError, ValueError):
        return type(item).__qualname__.encode()


def _jsonable(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    return type(value).__qualname__
