"""Case 090 with memory that really ends: the system refuses what a step asks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.core.short_of_memory import ENVIRONMENT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux", reason="not on this platform: Linux alone limits the space"
    ),
]


@pytest.fixture(scope="module")
def came(tiny_llama: Path) -> dict[str, dict[str, Any]]:
    """What came of each way."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.core.short_of_memory", str(tiny_llama)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["way"]: line for line in lines}


@pytest.mark.parametrize("way", ["step", "reference", "supervised"])
def test_a_row_that_does_not_fit_is_taken_in_halves(
    came: dict[str, dict[str, Any]], way: str
) -> None:
    """A limit of 0.7 of what the row took; the weights are those of the calm step to 1e-6, so that
    nothing was counted twice.
    """
    found = came[way]
    assert found["memory/row_tried_again"] == 23_681 // 2
    assert found["memory/row"] <= 23_681 // 2
    assert found["seconds/lost"] > 0
    assert found["worst"] <= 1e-6


def test_rows_that_were_through_are_not_counted_twice(came: dict[str, dict[str, Any]]) -> None:
    """The third of four fails: it begins anew with the first."""
    found = came["in the middle"]
    assert found["told"][:3] == [5908, 5908 + 5918, found["told"][2]]
    assert found["told"][2] < 5908
    assert found["told"][-1] == found["tokens_computed"]
    assert found["worst"] <= 1e-6


@pytest.mark.parametrize("way", ["in the optimizer", "always"])
def test_where_nothing_helps_the_step_fails_and_leaves_no_trace(
    came: dict[str, dict[str, Any]], way: str
) -> None:
    found = came[way]
    assert "memory ran out at a row of" in found["error"]
    assert "Set TrainConfig(max_tokens_per_row=" in found["error"]
    assert found["unchanged"]
    assert found["alive"] == 0
    assert found.get("next", True), "the next step is as if nothing had been"
    assert found.get("worst", 0.0) <= 1e-6
