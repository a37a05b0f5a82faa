"""One base model in memory, with the endpoint that its adapters answer at.

In: a model's folder, and where its token records are kept. Out: the module, its engine, its service
and a running server, which end together. Left out: whose adapters they are (live_run.py).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from art_core.config import EngineConfig
from art_core.engine.chat_service import ChatService
from art_core.engine.embedded import EmbeddedEngine
from art_core.engine.model_registry import ModelRegistry
from art_core.engine.openai_routes import create_app
from art_core.engine.serving import LoopbackServer
from art_core.engine.tokenizer import HFTokenizer
from art_core.nn.lora import LoraModel
from art_core.nn.memory import keep_freed_memory
from art_core.records import RecordStore


@dataclass
class ServedBase:
    """Made by `open`, ended by `close`."""

    base_model: str
    """The name it is served under."""
    model: LoraModel
    """Owned by the engine's thread; see `EmbeddedEngine.exclusive`."""
    engine: EmbeddedEngine
    service: ChatService
    server: LoopbackServer

    @classmethod
    def open(cls, name: str, path: Path, records: Path, config: EngineConfig) -> Self:
        """Load the base model and open its endpoint.

        Raises:
            BaseModelError: it is damaged, or of a kind that can't be used.
        """
        keep_freed_memory()
        torch.set_flush_denormal(True)
        model = LoraModel.load(path)
        tokenizer = HFTokenizer(path)
        store = RecordStore(records)
        engine = EmbeddedEngine(model, tokenizer, base_model=name, config=config)
        service = ChatService(engine, store, ModelRegistry(name))
        try:
            server = LoopbackServer(create_app(service)).start()
        except BaseException:
            asyncio.run(engine.close())
            store.close()
            raise
        return cls(name, model, engine, service, server)

    async def close(self) -> None:
        """Stop answering: first the endpoint, then what stands behind it."""
        try:
            await asyncio.to_thread(self.server.stop)
        finally:
            await self.engine.close()
            self.service.records.close()
