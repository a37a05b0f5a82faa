"""A file of conversations, read once to check it and then row by row in any order.

In: a path. Out: a `FileReport` of what is in it (`validate`), and rows in a shuffled order that
depends on the seed, the epoch and the file alone (`iterate_file`). Only the offset of each row is
kept in memory. No model is needed, and none is loaded.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO

from art_core.errors import ConfigError, DataFileError
from art_core.plural import plural
from art_core.sft.conversation import Conversation
from art_core.sft.lines import open_lines, parse_line, read_lines
from art_core.sft.shapes import read_row
from art_core.trajectories import Trajectory

_LISTED = 20
"""Refused lines that a report names; the others are counted."""


@dataclass
class FileReport:
    """What a file holds; printable."""

    path: str
    rows: int = 0
    """That can be trained."""
    refused: int = 0
    reasons: list[tuple[int, str]] = field(default_factory=list)
    """(physical line, why) of the first refused rows."""
    untrained: int = 0
    """Rows whose answers all have weight 0; they are left out."""
    repeats: int = 0
    """Rows that say the same as an earlier one; kept unless asked otherwise."""
    shapes: Counter[str] = field(default_factory=Counter)
    """Rows by shape."""
    answers: int = 0
    """Assistant messages with a weight above 0."""
    with_tools: int = 0
    warnings: dict[str, tuple[int, int]] = field(default_factory=dict)
    """What was ignored: how often, and the first line."""

    @property
    def is_clean(self) -> bool:
        """True if every row can be trained, and there is one."""
        return self.rows > 0 and not self.refused

    def __str__(self) -> str:
        shapes = ", ".join(f"{n} {shape}" for shape, n in self.shapes.items())
        rows, answers = plural(self.rows, "row"), plural(self.answers, "answer")
        lines = [f"{self.path}: {rows} to train" + (f" ({shapes})" if shapes else "")]
        lines.append(f"{answers} to learn, {plural(self.with_tools, 'row')} with tools")
        if self.untrained:
            lines.append(
                f"{plural(self.untrained, 'row')} left out: no answer has a weight above 0"
            )
        if self.repeats:
            lines.append(f"{plural(self.repeats, 'repeat')} of an earlier row")
        for text, (number, line) in self.warnings.items():
            lines.append(f"ignored: {text} ({plural(number, 'row')}, first in line {line})")
        lines += [f"line {line} refused: {why}" for line, why in self.reasons]
        if self.refused > len(self.reasons):
            lines.append(f"and {self.refused - len(self.reasons)} more refused")
        return "\n".join(lines)


class ConversationFile:
    """A checked file; close it, or use it as a context.

    Args:
        path: JSON lines, plain or gzip.
        drop_repeats: leave out rows that say the same as an earlier one.

    Raises:
        DataFileError: it is no such file at all. Rows that are refused are in `report`.
    """

    def __init__(self, path: str | Path, *, drop_repeats: bool = False) -> None:
        self.path = Path(path)
        self.report = FileReport(str(path))
        self._offsets = array("Q")
        self._drop_repeats = drop_repeats
        self._seen: set[bytes] = set()
        self._order: tuple[object, list[int]] = (None, [])
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        digest = hashlib.sha256()
        try:
            with open_lines(self.path) as source:
                # A copy: rows are read again by offset, and the file may be packed or change.
                shutil.copyfileobj(source, self._file, 1 << 20)
            self._file.seek(0)
            for line in read_lines(self._file, path=self.path):
                self._take(line.number, line.offset, line.value, line.refusal)
            self._file.seek(0)
            while part := self._file.read(1 << 20):
                digest.update(part)
        except BaseException:
            self.close()
            raise
        self._seen.clear()
        self.fingerprint = digest.hexdigest()[:16]
        """Of the unpacked bytes."""

    def __enter__(self) -> ConversationFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Conversation:
        """Row `index`, read from the file."""
        self._file.seek(self._offsets[index])
        raw = self._file.readline()
        return read_row(parse_line(raw.removeprefix(b"\xef\xbb\xbf")))[1]

    def close(self) -> None:
        """Give the copy of the file free. Safe to call twice."""
        self._file.close()

    def require(self, *, skip_refused: bool = False) -> None:
        """Refuse a file that can't be trained as it is.

        Raises:
            DataFileError: a row is refused (unless `skip_refused`), or there is none to train.
        """
        report = self.report
        if report.refused and not skip_refused:
            line, why = report.reasons[0]
            more = f" ({report.refused} such lines)" if report.refused > 1 else ""
            raise DataFileError(
                f"line {line} of {report.path!r} is refused: {why}{more}",
                fix="Mend the file, or leave such lines out with skip_refused=True. "
                "`art-langgraph sft validate FILE` lists them.",
            )
        if not self._offsets:
            raise DataFileError(
                f"{report.path!r} has no rows to train",
                got={"refused": report.refused, "untrained": report.untrained},
                expected="one conversation a line",
            )

    def order(self, epoch: int, *, seed: int, window: int) -> list[int]:
        """The rows of an epoch: each drawn at random from the next `window` that are left."""
        key = (epoch, seed, window)
        if self._order[0] != key:  # asked for every few rows, and long for a long file
            self._order = (key, _shuffled(len(self), window, random.Random(f"{seed}/{epoch}")))
        return self._order[1]

    def _take(
        self, number: int, offset: int, value: dict[str, object] | None, refusal: str | None
    ) -> None:
        """Put a line into the index or its refusal into the report."""
        report = self.report
        try:
            if value is None:
                raise ValueError(refusal)
            shape, conversation = read_row(value)
        except ValueError as error:
            report.refused += 1
            if len(report.reasons) < _LISTED:
                report.reasons.append((number, str(error)))
            return
        for text in conversation.warnings:
            times, first = report.warnings.get(text, (0, number))
            report.warnings[text] = (times + 1, first)
        if not conversation.trained:
            report.untrained += 1
            return
        key = _digest(conversation)
        if key in self._seen:
            report.repeats += 1
            if self._drop_repeats:
                return
        self._seen.add(key)
        report.shapes[shape] += 1
        report.rows += 1
        report.answers += len(conversation.trained)
        report.with_tools += conversation.tools is not None
        self._offsets.append(offset)


def validate(path: str | Path) -> FileReport:
    """What of a file can be trained, and what is refused and why.

    Raises:
        DataFileError: it is no file of JSON lines at all.
    """
    with ConversationFile(path) as file:
        return file.report


def iterate_file(
    file_path: str | Path,
    epochs: int = 1,
    shuffle_buffer_size: int = 10_000,
    seed: int = 42,
    initial_skip: int = 0,
    *,
    skip_refused: bool = False,
) -> Iterator[Trajectory]:
    """The conversations of a file as trajectories, every one once an epoch.

    Args:
        file_path: OpenAI's fine-tuning rows, ShareGPT's or LangChain's messages, one a line.
        epochs: passes over the file, each in another order.
        shuffle_buffer_size: each row is drawn from so many that are next in the file; 1 keeps the
            file's order.
        seed: of the orders.
        initial_skip: rows that are left out at the beginning, counted over all epochs.
        skip_refused: leave out rows that can't be read, instead of refusing the file.

    Raises:
        DataFileError: the file can't be read, or has a bad row or none.
        ConfigError: a number is out of range.
    """
    check_numbers(epochs=epochs, shuffle_buffer_size=shuffle_buffer_size)
    if initial_skip < 0:
        raise ConfigError("initial_skip", got=initial_skip, expected="0 or more")
    file = ConversationFile(file_path)
    try:
        file.require(skip_refused=skip_refused)
    except DataFileError:
        file.close()
        raise
    return _iterate(file, epochs, shuffle_buffer_size, seed, initial_skip)


def as_trajectory(conversation: Conversation) -> Trajectory:
    """The conversation with its weights in its messages, as `train_sft` takes it."""
    messages = [
        {**message, "weight": conversation.weights[i]} if i in conversation.weights else message
        for i, message in enumerate(conversation.messages)
    ]
    return Trajectory(messages_and_choices=messages, tools=conversation.tools)


def check_numbers(**numbers: int) -> None:
    """Refuse what is no whole number from 1 on."""
    for name, value in numbers.items():
        if type(value) is not int or value < 1:
            raise ConfigError(name, got=value, expected="a whole number from 1 on")


def _iterate(
    file: ConversationFile, epochs: int, window: int, seed: int, skip: int
) -> Iterator[Trajectory]:
    with file:
        for epoch in range(skip // len(file), epochs):
            done = max(0, skip - epoch * len(file))
            for index in file.order(epoch, seed=seed, window=window)[done:]:
                yield as_trajectory(file[index])


def _shuffled(count: int, window: int, rng: random.Random) -> list[int]:
    waiting: list[int] = []
    order: list[int] = []
    for index in range(count):
        waiting.append(index)
        if len(waiting) >= window:
            order.append(_draw(waiting, rng))
    while waiting:
        order.append(_draw(waiting, rng))
    return order


def _draw(waiting: list[int], rng: random.Random) -> int:
    at = rng.randrange(len(waiting))
    waiting[at], waiting[-1] = waiting[-1], waiting[at]
    return waiting.pop()


def _digest(conversation: Conversation) -> bytes:
    said = [conversation.messages, conversation.tools, sorted(conversation.weights.items())]
    return hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=16).digest()
