"""The models' files under tests/data, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from art_core.readiness.dialogue import Dialogue
from art_core.readiness.model_files import ModelFiles, read_model
from art_core.readiness.shape import Shape, shape_of

DATA = Path(__file__).parents[1] / "data"
MODELS = sorted(folder.name for folder in (DATA / "models").iterdir())
WITH_TEMPLATE = [n for n in MODELS if (DATA / "models" / n / "chat_template.jinja").is_file()]


def folder(name: str) -> Path:
    """Of the model `name`."""
    return DATA / "models" / name


def files(name: str) -> ModelFiles:
    """What is in it."""
    return read_model(folder(name))


def shape(name: str, **changes: Any) -> Shape:
    """Of its config, with `changes`."""
    config = json.loads((folder(name) / "config.json").read_text("utf-8"))
    return shape_of({**config, **changes})


def dialogue(name: str) -> Dialogue:
    """Its own template."""
    found = files(name)
    assert found.template is not None
    return Dialogue(found.template, found.special_tokens, found.names)


def template(name: str) -> str:
    """A template without a model."""
    return (DATA / "templates" / f"{name}.jinja").read_text("utf-8")
