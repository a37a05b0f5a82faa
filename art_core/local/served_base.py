"""One base model in memory, with the endpoint that its adapters answer at.

In: a model's folder, its settings, and where its token records are kept. Out: the module on its
bench, an engine, its service and a running server, which end together. Left out: whose adapters
they are (live_run.py).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from art_core.config import EngineConfig, ModelConfig, TrainerConfig
from art_core.engine.base import Engine
from art_core.engine.chat_service import ChatService
from art_core.engine.embedded import EmbeddedEngine
from art_core.engine.model_registry import ModelRegistry
from art_core.engine.openai_routes import create_app
from art_core.engine.runtime import VllmRuntime, find_runtime
from art_core.engine.serving import LoopbackServer
from art_core.engine.tokenizer import HFTokenizer
from art_core.engine.vllm_launch import GpuRoom, start_vllm, vllm_settings
from art_core.errors import ConfigError, RuntimeMissing
from art_core.local.bench import Bench, EmbeddedBench, OwnBench
from art_core.local.garbage import search_less_often
from art_core.local.workbench_apart import WorkbenchApart
from art_core.nn.memory import keep_freed_memory
from art_core.records import RecordStore
from art_core.training.requests import Loading
from art_core.training.workbench import Workbench, load_module

_log = logging.getLogger(__name__)


@dataclass
class ServedBase:
    """Made by `open`, ended by `close`."""

    base_model: str
    """The name it is served under."""
    trainer: TrainerConfig
    """How it was loaded."""
    bench: Bench
    engine: Engine
    service: ChatService
    server: LoopbackServer | None
    """None: another one answers out of `service`."""

    @classmethod
    def open(
        cls, name: str, path: Path, folder: Path, config: ModelConfig, *, listens: bool = True
    ) -> Self:
        """Load the base model, start its engine and open its endpoint.

        Args:
            listens: False opens no endpoint.
            folder: where token records are kept, and vLLM and the trainer have their own files.

        Raises:
            BaseModelError: it is damaged, or of a kind that can't be used.
            ConfigError: the trainer is set to what is not to be had here.
            RuntimeMissing, EngineStartFailed: vLLM is asked for, and is not there or did not start.
            TrainerDied: the trainer's process ended while it loaded the base model.
        """
        keep_freed_memory()
        search_less_often()
        torch.set_flush_denormal(True)
        store = RecordStore(folder / "records.sqlite")
        try:
            engine, bench = _make(name, path, folder, config)
        except BaseException:
            store.close()
            raise
        try:
            keyed = _is_keyed(config.engine, engine)
            service = ChatService(engine, store, ModelRegistry(name), keyed=keyed)
            server = LoopbackServer(create_app(service)).start() if listens else None
        except BaseException:
            asyncio.run(engine.close())
            bench.close()
            store.close()
            raise
        return cls(name, config.trainer, bench, engine, service, server)

    @property
    def base_url(self) -> str:
        """Of its endpoint."""
        assert self.server is not None, "it was opened without an endpoint"
        return self.server.base_url

    async def close(self) -> None:
        """Stop answering: first the endpoint, then what stands behind it."""
        try:
            if self.server is not None:
                await asyncio.to_thread(self.server.stop)
        finally:
            try:
                await self.engine.close()
            finally:
                await asyncio.to_thread(self.bench.close)
                self.service.records.close()


def _make(name: str, path: Path, folder: Path, config: ModelConfig) -> tuple[Engine, Bench]:
    """The engine that answers, and the module on its bench."""
    runtime = _runtime(config.engine)
    if runtime is None:
        _check_needs_no_gpu(config.trainer, "the embedded engine, which computes on a processor")
        return _embedded(name, path, config.engine)
    return _vllm(name, path, folder, config, runtime)


def _check_needs_no_gpu(config: TrainerConfig, got: str) -> None:
    """See that a step can be computed on a processor.

    Raises:
        ConfigError: it is to be computed in a way that is made for GPUs.
    """
    for name, usual in TrainerConfig():
        value = getattr(config, name)
        if value != usual:
            raise ConfigError(
                f"TrainerConfig({name}={value!r}) needs a GPU",
                got=got,
                fix=f"Take a machine with an NVIDIA GPU and vLLM, or leave {name} as it is "
                f"({usual!r}).",
            )


def _is_keyed(config: EngineConfig, engine: Engine) -> bool:
    """Whether calls that name no seed are given one; it costs vLLM on a GPU dearly."""
    if isinstance(engine, EmbeddedEngine):
        return True
    asked = config.vllm.keyed_noise
    return not torch.cuda.is_available() if asked is None else asked


def _runtime(config: EngineConfig) -> VllmRuntime | None:
    """The vLLM to serve with; None: the embedded engine serves."""
    if config.kind == "embedded" or (config.kind == "auto" and not torch.cuda.is_available()):
        return None
    try:
        return find_runtime(config.vllm.python)
    except RuntimeMissing as error:
        if config.kind == "vllm":
            raise
        _log.warning("vLLM does not serve: %s", error)
        return None


def _embedded(name: str, path: Path, config: EngineConfig) -> tuple[Engine, Bench]:
    if torch.cuda.is_available():
        _log.warning(
            "%s is served and trained on the CPU though there is a GPU: the embedded engine has no "
            "other place. For the GPU: art-langgraph setup vllm, and EngineConfig(kind='vllm')",
            name,
        )
    tokenizer = _tokenizer(path, config)  # first: what is wrong with it is seen at once
    model = load_module(Loading(path))
    workbench = Workbench(model, cached=config.cache_tokens)
    engine = EmbeddedEngine(model, tokenizer, base_model=name, config=config)
    return engine, EmbeddedBench(engine, workbench)


def _tokenizer(path: Path, config: EngineConfig) -> HFTokenizer:
    """The base model's; what is doubtful of how its answers are read is told."""
    made = HFTokenizer(
        path, tool_parser=config.tool_parser, reasoning_parser=config.reasoning_parser
    )
    for doubt in made.form.doubts:
        _log.warning("%s: %s", path.name, doubt)
    return made


def _vllm(
    name: str, path: Path, folder: Path, config: ModelConfig, runtime: VllmRuntime
) -> tuple[Engine, Bench]:
    """The trainer's process first: vLLM takes what its weights leave of the GPU. This process has
    nothing there."""
    has_gpu = torch.cuda.is_available()
    if not has_gpu and not runtime.is_cpu:
        raise RuntimeMissing(
            "this vLLM is built for GPUs, and PyTorch sees none here",
            got=str(runtime.python),
            expected="a GPU, or vLLM for CPUs",
            fix="Check nvidia-smi, CUDA_VISIBLE_DEVICES and torch.version.cuda; or run: "
            "art-langgraph setup vllm --cpu",
        )
    tokenizer = _tokenizer(path, config.engine)
    if not has_gpu:
        _check_needs_no_gpu(config.trainer, "there is no GPU")
    loading = Loading(
        path,
        on_gpu=has_gpu,
        four_bit=config.trainer.load_in_4bit,
        layers=config.trainer.layers,
        threads=config.engine.threads,
    )
    workbench = WorkbenchApart(loading, folder / "trainer")
    loaded = workbench.loaded
    try:
        settings = vllm_settings(
            path,
            config.engine.vllm,
            rank=config.lora.rank,
            context_length=loaded.context_length,
            room=None if runtime.is_cpu or loaded.gpu is None else GpuRoom(*loaded.gpu),
        )
        engine = start_vllm(
            settings,
            tokenizer,
            runtime=runtime,
            folder=folder / "vllm",
            base_model=name,
            vocab_size=loaded.vocab_size,
            progress=_log.info,
        )
    except BaseException:
        workbench.close()
        raise
    return engine, OwnBench(workbench, engine, sleeps=settings.sleep_mode)
