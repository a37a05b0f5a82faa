"""Models as users name them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from art_core.capture import Target, open_scope
from art_core.config import SamplingConfig
from art_core.errors import ConfigError
from art_langgraph.targets import targets_of

TRAINED = Target("http://127.0.0.1/v1", "k", "agent", SamplingConfig(), trains=True)


class Model:
    """What `art.Model` and `art.TrainableModel` offer."""

    def target(self, step: int | None = None, evaluation: bool = False) -> Target:
        return Target("http://127.0.0.1/v1", "k", f"model {step} {evaluation}")


def test_no_model_says_nothing() -> None:
    assert targets_of(None, None, evaluation=False) is None


def test_a_model_is_asked_for_its_target() -> None:
    found = targets_of(Model(), {"judge": TRAINED}, evaluation=True)
    assert found is not None
    assert found[None].model_name == "model None True"
    assert found["judge"] == replace(TRAINED, trains=False)


def test_in_training_a_target_is_kept_as_it_is() -> None:
    assert targets_of(TRAINED, None, evaluation=False) == {None: TRAINED}


def test_a_name_is_asked_for_beside_the_other_models() -> None:
    found = targets_of(TRAINED, {"old": "agent@3"}, evaluation=False)
    assert found is not None
    assert (found["old"].base_url, found["old"].model_name) == (TRAINED.base_url, "agent@3")


def test_else_in_the_scope_around() -> None:
    with open_scope(None, {None: TRAINED}):
        found = targets_of("agent@3", None, evaluation=True)
    assert found == {None: replace(TRAINED, model_name="agent@3", trains=False)}


def test_else_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ART_BASE_URL", "http://127.0.0.1:7999/v1")
    found = targets_of("agent@3", None, evaluation=False)
    assert found == {None: Target("http://127.0.0.1:7999/v1", "none", "agent@3")}


def test_else_it_is_nowhere() -> None:
    with pytest.raises(ConfigError, match=r"'agent@3'.*ART_BASE_URL"):
        targets_of("agent@3", None, evaluation=False)


def test_what_is_no_model_is_refused() -> None:
    wrong: Any = 3
    with pytest.raises(ConfigError, match="got 3"):
        targets_of(wrong, None, evaluation=False)
