"""The metrics of a run: one strict JSON line per log call, appended and synced.

In: numbers of any library by name. Out: `history.jsonl` in ART's form, `{"step": 3,
"recorded_at": ..., "train/reward": 0.5}`, where a NaN or infinity is null and spelled out under
`"nonfinite"`; and the lines read back, merged by (split, step), the newest value winning. Left out:
what is measured (runlog.py), and where else it is sent.
"""

from __future__ import annotations

import json
import logging
import math
import numbers
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, TypeAlias

from art_core.errors import ConfigError
from art_core.files import writing
from art_core.names import check_name
from art_core.rundir import utc_now

Value: TypeAlias = int | float | str | None

_log = logging.getLogger(__name__)
SPELLED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True)
class StepMetrics:
    """What is known of one step in one split."""

    step: int
    split: str
    values: dict[str, Value] = field(default_factory=dict)
    """By name, without the split. None: missing, or not finite."""
    nonfinite: dict[str, str] = field(default_factory=dict)
    """"NaN", "Infinity" or "-Infinity" for those that are None because they were that."""


class MetricsLog:
    """The metrics file at `path`; any number of writers and readers side by side."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, step: int, split: str, metrics: Mapping[str, Any]) -> None:
        """Add a line.

        Args:
            step: of the model.
            split: "train", "val", "test" or another name.
            metrics: numbers (Python's, NumPy's, tensors of one element), bools (kept as 0 and 1),
                text or None, by name. A name may already begin with "<split>/".

        Raises:
            ConfigError: a value is of another kind; nothing is written then.
            RunFolderError: the disk is full or refuses.
        """
        check_name("split", split)
        line: dict[str, Any] = {"step": int(step), "recorded_at": utc_now()}
        nonfinite: dict[str, str] = {}
        for name, given in metrics.items():
            key = _clean(f"{split}/{name.removeprefix(f'{split}/')}")
            value = plain_value(name, given)
            if spelling := spell(value):
                nonfinite[key] = spelling
            line[key] = None if spelling else value
        if nonfinite:
            line["nonfinite"] = nonfinite
        self._append_line(json.dumps(line, allow_nan=False))

    def read(self) -> list[StepMetrics]:
        """All steps in order of (step, split). Lines that can't be read are skipped and said."""
        found: dict[tuple[int, str], StepMetrics] = {}
        for line in self._lines():
            for key, value in line.items():
                split, slash, name = key.partition("/")
                if not slash:
                    continue
                record = found.setdefault((line["step"], split), StepMetrics(line["step"], split))
                spelling = spell(value) or line.get("nonfinite", {}).get(key)
                record.values[name] = None if spelling else value
                record.nonfinite.pop(name, None)
                if spelling:
                    record.nonfinite[name] = spelling
        return [found[key] for key in sorted(found)]

    def _append_line(self, text: str) -> None:
        """One write a line, so that writers side by side never mix theirs."""
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab+", buffering=0) as file:
                file.write(b"\n" * _torn(file) + text.encode() + b"\n")
                os.fsync(file.fileno())

    def _lines(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            for number, data in enumerate(file, start=1):
                try:
                    line = json.loads(data, parse_constant=SPELLED.__getitem__)
                except ValueError:
                    line = None
                if isinstance(line, dict) and type(line.get("step")) is int:
                    yield line
                elif data.strip():
                    _log.warning(
                        "%s, line %d is skipped: it is not a JSON object with a step (the last "
                        "line may be cut when a process is killed): %.80r",
                        self.path, number, data,
                    )  # fmt: skip


def best_step(history: Iterable[StepMetrics], metric: str, among: Collection[int]) -> int | None:
    """The step of `among` with the highest finite `metric`, the newest of equals; None if none.

    Args:
        metric: "<split>/<name>", e.g. "val/reward".
    """
    split, _, name = metric.partition("/")
    known = [
        (value, record.step)
        for record in history
        if record.split == split and record.step in among
        if isinstance(value := record.values.get(name), int | float)
    ]
    return max(known)[1] if known else None


def plain_value(name: str, value: Any) -> Value:
    """`value` as Python's own int, float or text; bools as 0 and 1.

    Raises:
        ConfigError: it is none of these and holds none of these.
    """
    if value is None:
        return None
    if isinstance(value, str):
        return _clean(value)
    if not isinstance(value, numbers.Number) and hasattr(value, "item"):
        with suppress(ValueError, RuntimeError):  # it has more than one element
            value = value.item()
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise ConfigError(
        f"metric {name!r} has a value of type {type(value).__name__}",
        got=value,
        expected="a number, a bool, text or None",
        fix="Log one number per name.",
    )


def spell(value: object) -> str | None:
    """JavaScript's name of a value that JSON has no form for; None if it has one."""
    if not isinstance(value, float) or math.isfinite(value):
        return None
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _clean(text: str) -> str:
    """Text without lone surrogates, which strict JSON parsers refuse."""
    return text.encode("utf-8", "replace").decode()


def _torn(file: FileIO) -> bool:
    """True if the last line has no end, because its writer was killed."""
    if file.seek(0, os.SEEK_END) == 0:
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"
