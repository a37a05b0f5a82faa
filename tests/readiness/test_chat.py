"""The template that the doctor looks at is the one that the engine's tokenizer asks with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="art-langgraph[train] is not installed")

from art_core.engine.chat_template import hermes_chatml
from art_core.engine.tokenizer import HFTokenizer
from art_core.readiness.chat import chat_of, check_template
from art_core.readiness.dialogue import TOOLS, Dialogue, user
from art_core.readiness.model_files import read_model
from tests.conftest import byte_tokenizer
from tests.readiness.models import files


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen3-8b", "smollm3-3b", None])
def test_both_choose_the_same_template(name: str | None, tmp_path: Path) -> None:
    """On a ChatML tokenizer: templates with and without tools, and none at all."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = files(name).template if name else None
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    model = read_model(tmp_path)
    chosen = check_template(model, hermes_chatml())
    assert (chosen == hermes_chatml()) == (name in ("smollm3-3b", None))
    asked = HFTokenizer(tmp_path).render([user("q")], tools=TOOLS)
    assert Dialogue(chosen, model.special_tokens, model.names).render([user("q")], tools=True) == (
        asked
    )


@pytest.mark.model
def test_smollm2_is_asked_with_ours(smollm2: Path) -> None:
    chat = chat_of(read_model(smollm2), hermes_chatml())
    assert chat.stands_in
    assert chat.has_own
    assert chat.takes_tools
    assert chat.tool_parser.name == "hermes"
    assert (chat.histories.breaks, chat.histories.refusals) == ((), ())
