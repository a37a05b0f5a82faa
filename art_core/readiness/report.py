"""The doctor's report: everything looked at, and one document of it.

In: findings of the machine and perhaps of a model, and the table of memory. Out: `Report`, and what
of it `--json` prints. Left out: how it looks on a terminal (art_langgraph/cli/doctor_view.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from art_core.finding import Finding, failed
from art_core.readiness.about_memory import Row
from art_core.readiness.memory import Load


@dataclass(frozen=True)
class ModelReport:
    """Of a base model."""

    name: str
    findings: Sequence[Finding]
    table: Sequence[Row]
    """Empty where the number of weights is not known."""
    load: Load
    tool_parser: str | None
    reasoning_parser: str | None


@dataclass(frozen=True)
class Report:
    """Of a machine, and perhaps of a base model."""

    machine: Sequence[Finding]
    model: ModelReport | None

    @property
    def findings(self) -> list[Finding]:
        """All of them."""
        return [*self.machine, *(self.model.findings if self.model else ())]

    @property
    def has_problems(self) -> bool:
        """True if something can't work as it is."""
        return failed(self.findings)


def document(report: Report) -> dict[str, Any]:
    """What `--json` prints; bytes are whole numbers."""
    found: dict[str, Any] = {
        "status": "problems" if report.has_problems else "ok",
        "machine": [asdict(finding) for finding in report.machine],
        "model": None,
    }
    if report.model is not None:
        model = report.model
        found["model"] = {
            "name": model.name,
            "findings": [asdict(finding) for finding in model.findings],
            "memory": [asdict(row) for row in model.table],
            "load": asdict(model.load),
            "tool_parser": model.tool_parser,
            "reasoning_parser": model.reasoning_parser,
        }
    return found
