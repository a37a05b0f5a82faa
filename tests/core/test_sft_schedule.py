"""Learning rates, computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

import art_core as art
from art_core.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((4, 1.0, "linear", 2), [0.5, 1.0, 1.0, 0.5]),
        ((4, 1.0), [1.0, 0.75, 0.5, 0.25]),
        ((4, 1.0, "linear", 0, 0.2), [1.0, 0.8, 0.6, 0.4]),
        ((4, 2.0, "constant", 1), [2.0, 2.0, 2.0, 2.0]),
        ((3, 1.0, "constant", 3), [1 / 3, 2 / 3, 1.0]),
        ((4, 1.0, "cosine"), [1.0, 0.8535533905932737, 0.5, 0.14644660940672627]),
        ((0, 1.0), []),
    ],
)
def test_rates(arguments: tuple[Any, ...], expected: list[float]) -> None:
    assert art.create_lr_schedule(*arguments) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    "arguments",
    [(4, 0.0), (4, 1.0, "linear", 5), (-1, 1.0), (4, 1.0, "step"), (4, 1.0, "linear", 0, 2.0)],
)
def test_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError):
        art.create_lr_schedule(*arguments)
