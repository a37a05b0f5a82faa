"""One vLLM for the whole session, on the CPU, with SmolLM2: what `LocalBackend` starts for a model.

Beside that model, "learner", it serves the adapters of the conformance suite. Where no environment
with vLLM is to be had, its tests skip themselves by name. Run: `pytest -m vllm tests/conformance`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="art-langgraph[train] is not installed")

import art_core as art
from art_core.config import VllmConfig
from art_core.engine.base import AdapterRef
from art_core.engine.runtime import find_runtime
from art_core.engine.vllm import VllmEngine
from art_core.errors import RuntimeMissing
from art_core.local.served_base import ServedBase
from tests.engine.conformance import Served
from tests.engine.house import NAMES, Plain, write_adapters

NOISE = 2e-3
"""Nats: vLLM's float32 kernels against torch's, through 30 layers."""
CONTEXT = 1024
SETTINGS = art.ModelConfig(
    lora=art.LoraSettings(rank=4, alpha=8.0),
    sampling=art.SamplingConfig(max_tokens=12),
    engine=art.EngineConfig(
        kind="vllm",
        threads=1,
        vllm=VllmConfig(
            context_length=CONTEXT,
            max_adapters=2,
            kept_adapters=3,  # fewer than there are: some are read again
            extra_args=("--enforce-eager", "--max-num-seqs", "32"),
            environment=(("OMP_NUM_THREADS", "1"), ("VLLM_CPU_OMP_THREADS_BIND", "nobind")),
        ),
    ),
)


class VllmHouse:
    """A backend that serves with vLLM, the model that it trains, and the adapters `NAMES`."""

    def __init__(self, base: Path, adapters: dict[str, Path], runs: Path) -> None:
        self.runs = runs
        self.begun = threading.Event()
        """Set when a step has computed a row."""
        self.backend = art.LocalBackend(
            show_progress=False, on_progress=lambda *_: self.begun.set()
        )
        self.model: art.TrainableModel[Any] = art.TrainableModel(
            name="learner",
            project="conformance",
            base_model=str(base),
            base_path=str(runs),
            art_config=SETTINGS,
        )
        asyncio.run(self.model.register(self.backend))
        [self.base] = self._bases()
        assert isinstance(self.base.engine, VllmEngine)
        self.engine: VllmEngine = self.base.engine
        self.records = self.base.service.records
        asyncio.run(self._publish(adapters))

    @property
    def run_folder(self) -> Path:
        return self.runs / self.model.project / "models" / self.model.name

    def _bases(self) -> list[ServedBase]:
        """What the backend started: the suite serves its own adapters from it as well."""
        return list(self.backend._bases.values())

    async def _publish(self, adapters: dict[str, Path]) -> None:
        for name, path in adapters.items():
            model, step = name.split("@")
            await self.engine.load_adapter(AdapterRef(model, int(step)), path)
            self.base.service.models.publish(model, int(step))

    def served(self, plain: Plain) -> Served:
        return Served(
            base_url=self.base.base_url,
            base_model=self.base.base_model,
            policies=list(NAMES),
            latest={"agent": "agent@2", "other": "other@5"},
            logits=plain.logits,
            noise=NOISE,
            context_length=CONTEXT,
            eos_ids=self.engine.tokenizer.eos_ids,
            decode=self.engine.tokenizer.decode,
            block=32,
        )

    def close(self) -> None:
        asyncio.run(self.backend.close())


@pytest.fixture(scope="session")
def adapters(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_adapters(smollm2, tmp_path_factory.mktemp("adapters"), scale=0.02)


@pytest.fixture(scope="session")
def plain(smollm2: Path, adapters: dict[str, Path]) -> Plain:
    return Plain(smollm2, adapters)


@pytest.fixture(scope="session")
def house(
    smollm2: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmHouse]:
    try:
        runtime = find_runtime()
    except RuntimeMissing as error:
        pytest.skip(f"no environment with vLLM: {error}")
    if not runtime.is_cpu:
        pytest.skip(f"not on this platform: {runtime.python} has vLLM for GPUs")
    made = VllmHouse(smollm2, adapters, tmp_path_factory.mktemp("runs"))
    yield made
    made.close()
