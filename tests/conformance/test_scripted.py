"""The scripted engine, as far as the suite asks nothing of what is sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="art-langgraph[train] is not installed")

from torch import Tensor

from art_core.engine.base import AdapterRef
from art_core.engine.openai_routes import ChatService, ModelRegistry, create_app
from art_core.engine.scripted import ScriptedEngine
from art_core.engine.serving import LoopbackServer
from art_core.records import RecordStore
from tests.engine.conformance import Served, Serving

CONTEXT = 512
POLICIES = ["agent@0", "agent@1", "other@5"]


def no_logits(name: str, prompt: Sequence[int], sampled: Sequence[int]) -> Tensor:
    raise AssertionError("a script has no logits")


class TestScripted(Serving):
    """Answers that repeat the end of their prompt."""

    @pytest.fixture
    def served(self) -> Iterator[Served]:
        engine = ScriptedEngine(
            lambda prompt, request: f"héllo 😀 {prompt[-60:]}", context_length=CONTEXT
        )
        models, records = ModelRegistry("scripted"), RecordStore(None)
        for name in POLICIES:
            model, step = name.split("@")
            asyncio.run(engine.load_adapter(AdapterRef(model, int(step)), Path("nowhere")))
            models.publish(model, int(step))
        with LoopbackServer(create_app(ChatService(engine, records, models))) as server:
            yield Served(
                base_url=server.base_url,
                base_model="scripted",
                policies=POLICIES,
                latest={"agent": "agent@1", "other": "other@5"},
                logits=no_logits,
                noise=0.0,
                context_length=CONTEXT,
                eos_ids=engine.tokenizer.eos_ids,
                decode=engine.tokenizer.decode,
            )
        records.close()
