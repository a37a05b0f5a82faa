"""`Finding`: what one check says, of a rehearsal, a machine or a base model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

Status: TypeAlias = Literal["pass", "warn", "fail", "skipped"]
"""pass: right. warn: works, but look at it. fail: can't work so. skipped: could not be seen."""


@dataclass(frozen=True)
class Finding:
    """One line of the result."""

    check: str
    """What was looked at, in one or two words; several findings may share it."""
    status: Status
    what: str
    """What was seen, in one sentence."""
    fix: str = ""
    """What to do; empty where there is nothing to be done."""


def failed(findings: Iterable[Finding]) -> bool:
    """True if something can't work as it is."""
    return any(finding.status == "fail" for finding in findings)
