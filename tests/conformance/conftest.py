"""One vLLM for the whole session, on the CPU, with SmolLM2 and adapters; its endpoint in front.

Where no environment with vLLM is to be had, its tests skip themselves by name. Run:
`pytest -m vllm tests/conformance`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="art-langgraph[train] is not installed")

from art_core.config import VllmConfig
from art_core.engine.base import AdapterRef
from art_core.engine.openai_routes import ChatService, ModelRegistry, create_app
from art_core.engine.runtime import VllmRuntime, find_runtime
from art_core.engine.serving import LoopbackServer
from art_core.engine.tokenizer import HFTokenizer
from art_core.engine.vllm import VllmEngine
from art_core.engine.vllm_launch import start_vllm, vllm_settings
from art_core.errors import RuntimeMissing
from art_core.records import RecordStore
from tests.engine.conformance import Served
from tests.engine.house import NAMES, Plain, write_adapters

NOISE = 2e-3
"""Nats: vLLM's float32 kernels against torch's, through 30 layers."""
CONTEXT = 1024


def runtime() -> VllmRuntime:
    """The CPU build of vLLM, or a skip."""
    try:
        found = find_runtime()
    except RuntimeMissing as error:
        pytest.skip(f"no environment with vLLM: {error}")
    if not found.is_cpu:
        pytest.skip(f"not on this platform: {found.python} has vLLM for GPUs")
    return found


class VllmHouse:
    """A vLLM with its endpoint and the adapters `NAMES`."""

    def __init__(self, base: Path, adapters: dict[str, Path], folder: Path) -> None:
        config = VllmConfig(
            context_length=CONTEXT,
            max_adapters=2,
            kept_adapters=3,  # fewer than there are: some are read again
            extra_args=("--enforce-eager", "--max-num-seqs", "32"),
            environment=(("OMP_NUM_THREADS", "1"), ("VLLM_CPU_OMP_THREADS_BIND", "nobind")),
        )
        settings = vllm_settings(base, config, rank=4, context_length=8192, free_share=None)
        self.engine: VllmEngine = start_vllm(
            settings,
            HFTokenizer(base),
            runtime=runtime(),
            folder=folder,
            base_model="base",
            vocab_size=49152,
        )
        self.records = RecordStore(None)
        self.models = ModelRegistry("base")
        self.service = ChatService(self.engine, self.records, self.models)
        asyncio.run(self._publish(adapters))
        self.server = LoopbackServer(create_app(self.service)).start()

    async def _publish(self, adapters: dict[str, Path]) -> None:
        for name, path in adapters.items():
            model, step = name.split("@")
            await self.engine.load_adapter(AdapterRef(model, int(step)), path)
            self.models.publish(model, int(step))

    def served(self, plain: Plain) -> Served:
        return Served(
            base_url=self.server.base_url,
            base_model="base",
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
        self.server.stop()
        asyncio.run(self.engine.close())
        self.records.close()


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
    made = VllmHouse(smollm2, adapters, tmp_path_factory.mktemp("vllm"))
    yield made
    made.close()
