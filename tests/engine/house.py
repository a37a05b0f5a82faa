"""An embedded engine with its endpoint and adapters, and the same policies as peft runs them."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from art_core.config import EngineConfig, LoraSettings
from art_core.engine.base import AdapterRef
from art_core.engine.embedded import EmbeddedEngine
from art_core.engine.openai_routes import ChatService, ModelRegistry, create_app
from art_core.engine.serving import LoopbackServer
from art_core.engine.tokenizer import HFTokenizer
from art_core.nn.lora import LoraModel
from art_core.records import RecordStore
from tests.engine.conformance import Served

STEPS = (0, 1, 2)
NAMES = [*(f"agent@{step}" for step in STEPS), "other@5"]


def write_adapters(base: Path, folder: Path, scale: float) -> dict[str, Path]:
    """Adapters on disk in peft's format, for `NAMES`; they change the answers by `scale`."""
    model = LoraModel.load(base)
    saved = {}
    for seed, name in enumerate(NAMES):
        module_name = name.replace("@", "_")
        model.create_adapter(module_name, LoraSettings(rank=4), seed=seed)
        generator = torch.Generator().manual_seed(seed)
        with model.training(module_name) as parameters, torch.no_grad():
            for parameter in parameters:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += scale * noise / parameter.shape[1] ** 0.5
        saved[name] = folder / name
        saved[name].mkdir()
        model.save_adapter(module_name, saved[name])
    return saved


class Plain:
    """The policies as transformers and peft run them: a sequence alone, no cache."""

    def __init__(self, base: Path, adapters: dict[str, Path]) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft's, about transformers
            model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="sdpa")
            first, *others = adapters
            self._model: Any = PeftModel.from_pretrained(model, adapters[first], first)
            for name in others:
                self._model.load_adapter(adapters[name], name)
        self._model.eval()
        self._names = set(adapters)

    def logits(self, name: str, prompt: Sequence[int], sampled: Sequence[int]) -> Tensor:
        """[S, V]: what predicts each sampled id."""
        ids = torch.tensor([[*prompt, *sampled]])
        with torch.no_grad():
            if name in self._names:
                self._model.set_adapter(name)
                logits = self._model(input_ids=ids, use_cache=False).logits
            else:
                with self._model.disable_adapter():
                    logits = self._model(input_ids=ids, use_cache=False).logits
        found: Tensor = logits[0, len(prompt) - 1 : -1]
        return found


class House:
    """An engine with its endpoint, `agent` live at step 2 and the other steps on disk."""

    def __init__(self, base: Path, adapters: dict[str, Path], **config: Any) -> None:
        settings = EngineConfig(threads=1, **config)
        tokenizer = HFTokenizer(base)
        self.engine = EmbeddedEngine(
            LoraModel.load(base), tokenizer, base_model="base", config=settings
        )
        self.records = RecordStore(None)
        models = ModelRegistry("base")
        self.service = ChatService(self.engine, self.records, models)
        asyncio.run(self._publish(models, adapters))
        self.server = LoopbackServer(create_app(self.service)).start()

    async def _publish(self, models: ModelRegistry, adapters: dict[str, Path]) -> None:
        for name, path in adapters.items():
            model, step = name.split("@")
            ref = AdapterRef(model, int(step))
            await self.engine.load_adapter(ref, path)
            models.publish(model, int(step))

        def live(module: LoraModel) -> None:
            module.load_adapter("live", adapters["agent@2"])
            self.engine.adopt(AdapterRef("agent", 2), "live")

        await self.engine.exclusive(live)

    def served(self, plain: Plain, noise: float) -> Served:
        return Served(
            base_url=self.server.base_url,
            base_model="base",
            policies=list(NAMES),
            latest={"agent": "agent@2", "other": "other@5"},
            logits=plain.logits,
            noise=noise,
            context_length=self.engine.context_length,
            eos_ids=self.engine.tokenizer.eos_ids,
            decode=self.engine.tokenizer.decode,
        )

    def close(self) -> None:
        self.server.stop()
        asyncio.run(self.engine.close())
        self.records.close()
