"""Served names."""

from __future__ import annotations

import pytest

from art_core.config import SamplingConfig
from art_core.engine.api_errors import ApiError
from art_core.engine.base import AdapterRef
from art_core.engine.model_registry import ModelRegistry
from art_core.errors import ConfigError


@pytest.fixture
def models() -> ModelRegistry:
    models = ModelRegistry("org/base")
    models.publish("agent", 0, seed=5, sampling=SamplingConfig(temperature=0.5))
    models.publish("agent", 12)
    models.publish("other", 3)
    return models


def test_a_name_is_its_latest_step_and_a_pin_is_that_step(models: ModelRegistry) -> None:
    assert models.resolve("agent").adapter == AdapterRef("agent", 12)
    assert models.resolve("agent@0").adapter == AdapterRef("agent", 0)
    assert models.resolve("other").policy == "other@3"


def test_the_base_model_has_no_adapter(models: ModelRegistry) -> None:
    served = models.resolve("org/base")
    assert (served.adapter, served.step, served.policy) == (None, None, "org/base")


def test_settings_are_those_of_the_last_publish(models: ModelRegistry) -> None:
    models.publish("agent", 13, seed=9, sampling=SamplingConfig(max_tokens=4))
    served = models.resolve("agent@0")
    assert (served.seed, served.sampling.max_tokens) == (9, 4)


@pytest.mark.parametrize(
    "asked", ["nobody", "agent@1", "agent@", "agent@01", "agent@-1", "@0", "a@b@c"]
)
def test_an_unknown_name_is_404_and_names_what_is_there(models: ModelRegistry, asked: str) -> None:
    with pytest.raises(ApiError, match="org/base, agent, agent@0, agent@12, other, other@3") as no:
        models.resolve(asked)
    assert (no.value.status, no.value.code, no.value.param) == (404, "model_not_found", "model")


def test_a_retired_step_is_gone_and_the_name_falls_back(models: ModelRegistry) -> None:
    models.retire("agent", 12)
    models.retire("agent", 99)
    assert models.resolve("agent").step == 0
    models.retire("agent")
    models.retire("agent")
    assert models.names() == ["org/base", "other", "other@3"]


@pytest.mark.parametrize(("name", "step"), [("a@b", 0), ("", 0), ("org/base", 0), ("a", -1)])
def test_names_that_would_be_ambiguous_are_refused(
    models: ModelRegistry, name: str, step: int
) -> None:
    with pytest.raises(ConfigError):
        models.publish(name, step)
