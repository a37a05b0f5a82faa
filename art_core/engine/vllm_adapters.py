"""Which adapters vLLM has loaded, under names and paths that are used once and never again.

In: checkpoints by the step they are, calls that need one. Out: the name it is loaded under, for as
long as the call lasts. vLLM's prefix cache is keyed by name and path, and it reads a folder again
when its own memory was short; so each load gets a fresh name and a folder of its own, which holds
the files until no call needs them, whatever becomes of the checkpoint meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import threading
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from art_core.engine.adapter_files import (
    CONFIG,
    WEIGHTS,
    check_servable,
    read_adapter,
    write_null_adapter,
)
from art_core.engine.adapter_folding import fold_into, has_patterns
from art_core.engine.base import AdapterRef
from art_core.engine.vllm_http import EngineUnreachable, Refused, VllmHttp
from art_core.errors import CheckpointError, EngineError
from art_core.nn.base_identity import BaseIdentity
from art_core.sealed import file_sha256, sealed_sha256

_log = logging.getLogger(__name__)
T = TypeVar("T")

_BASE = AdapterRef("", 0)
"""The stand-in for the base model; no model can have its name."""


@dataclass(eq=False)
class Loaded:
    """An adapter in vLLM."""

    ref: AdapterRef
    name: str
    folder: Path
    sha256: str
    """Of the weights in `folder`, which vLLM read."""
    start: int
    """Which start of vLLM it was loaded into."""
    users: int = 0
    """Calls that need it now."""
    asked: float = field(default_factory=time.monotonic)


class AdapterShelf:
    """The adapters of one vLLM. May be used from any event loop.

    Args:
        http: to vLLM, started with `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`.
        folder: for the files that vLLM reads; emptied first, on the checkpoints' disk if it can be.
        slots: adapters kept loaded; of those that no call needs the longest unasked goes.
        max_rank: what vLLM was started with.
        base_shapes: of the base model's weights, to compare with; None: not compared.
        identity: which base model that is; None: not compared.
        stand_in: calls of the base model go through an adapter that changes nothing. The CPU build
            of vLLM 0.32.0 puts the adapter of its last slot on them, where they are in one batch
            with calls of adapters (`lora_ops.py` indexes by -1).
    """

    def __init__(
        self,
        http: VllmHttp,
        folder: Path,
        *,
        slots: int,
        max_rank: int,
        base_shapes: Mapping[str, tuple[int, ...]] | None = None,
        identity: BaseIdentity | None = None,
        stand_in: bool = False,
    ) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._http, self._folder = http, folder
        self._slots = slots
        self._max_rank, self._shapes, self._identity = max_rank, base_shapes, identity
        self._lock = threading.Lock()
        self._paths: dict[AdapterRef, Path] = {}
        self._loaded: dict[AdapterRef, Loaded] = {}
        self._loading: dict[AdapterRef, Future[None]] = {}
        self._wanted: Counter[AdapterRef] = Counter()
        """Calls that are about to use them."""
        self._left: list[Loaded] = []
        """Replaced or forgotten while calls need them."""
        if stand_in:
            path = folder / "base"
            write_null_adapter(path, base_shapes or {})
            self._paths[_BASE] = path

    def known(self) -> list[AdapterRef]:
        """The adapters that can be asked for."""
        refs = [ref for ref in list(self._paths) if ref != _BASE]
        return sorted(refs, key=lambda ref: (ref.model, ref.step))

    def add(self, ref: AdapterRef, path: Path) -> None:
        """Make `ref` known; it is loaded when it is first needed.

        Raises:
            CheckpointError: vLLM can't serve it as it was trained.
        """
        self._check(path)
        with self._lock:
            if self._paths.get(ref) != path:
                self._paths[ref] = path
                self._retire(ref)

    async def forget(self, ref: AdapterRef) -> None:
        """Know `ref` no more; it is unloaded when no call needs it."""
        with self._lock:
            self._paths.pop(ref, None)
            self._retire(ref)
        await self._tidy()

    def loaded(self, ref: AdapterRef) -> Loaded | None:
        """What is loaded as `ref` now."""
        return self._loaded.get(ref)

    @asynccontextmanager
    async def use(self, ref: AdapterRef | None) -> AsyncGenerator[str | None, None]:
        """The name that `ref` is loaded under; it stays loaded meanwhile. None: the base model.

        Raises:
            EngineError: it is not known, or could not be loaded.
        """
        if ref is None and _BASE in self._paths:
            ref = _BASE
        if ref is None:
            yield None
            return
        taken = await self._take(ref)
        try:
            yield taken.name
        finally:
            with self._lock:
                taken.users -= 1
            if self._has_waste():
                await self._tidy()

    def renew(self, ref: AdapterRef) -> None:
        """`ref` is loaded again, under another name, when it is next needed."""
        with self._lock:
            self._retire(ref)

    def lost(self, name: str) -> None:
        """vLLM does not know `name` (any more): it is loaded again when it is next needed."""
        with self._lock:
            for ref, loaded in list(self._loaded.items()):
                if loaded.name == name:
                    self._retire(ref)

    def close(self) -> None:
        """Leave no files behind; vLLM is gone."""
        shutil.rmtree(self._folder, ignore_errors=True)

    # How it is done

    def _check(self, path: Path) -> None:
        check_servable(
            read_adapter(path),
            max_rank=self._max_rank,
            base=self._shapes,
            identity=self._identity,
        )

    async def _take(self, ref: AdapterRef) -> Loaded:
        with self._lock:
            self._wanted[ref] += 1  # else it may go again before this call has it
        try:
            return await self._loaded_for(ref)
        finally:
            with self._lock:
                self._wanted[ref] -= 1

    async def _loaded_for(self, ref: AdapterRef) -> Loaded:
        while True:
            with self._lock:
                loaded = self._loaded.get(ref)
                if loaded is not None and loaded.start != self._http.server.starts:
                    self._retire(ref)
                    loaded = None
                if loaded is not None:
                    loaded.users += 1
                    loaded.asked = time.monotonic()
                    return loaded
                if ref not in self._paths:
                    raise self._unknown(ref)
                waits = self._loading.get(ref)
                mine = None if waits else self._loading.setdefault(ref, Future())
            if waits is not None:  # maybe of another event loop; its fault is raised here too
                await asyncio.shield(asyncio.wrap_future(waits))
            elif mine is not None:
                await to_its_end(self._load_for(ref, mine))

    async def _load_for(self, ref: AdapterRef, mine: Future[None]) -> None:
        """Load `ref`, and tell all that wait for it."""
        try:
            await self._load(ref)
        except BaseException as error:
            with self._lock:
                self._loading.pop(ref, None)
            if isinstance(error, Exception):
                mine.set_exception(error)
                mine.exception()  # somebody has looked, should nobody else wait
            else:
                mine.set_exception(EngineError("the loading of an adapter was cancelled"))
            raise
        with self._lock:
            self._loading.pop(ref, None)
        mine.set_result(None)

    async def _load(self, ref: AdapterRef) -> None:
        path = self._paths.get(ref)
        if path is None:
            raise self._unknown(ref)
        loaded = await asyncio.to_thread(self._stage, ref, path)
        body = {"lora_name": loaded.name, "lora_path": str(loaded.folder)}
        loaded.start = self._http.server.starts  # it may have been started again meanwhile
        try:
            await self._http.post("/v1/load_lora_adapter", body)
        except Refused as error:
            _remove(loaded)
            raise EngineError(
                f"vLLM could not load {ref} ({error})", fix=f"Look at {path} and at vLLM's log."
            ) from error
        except EngineError:
            _remove(loaded)
            raise
        with self._lock:
            if self._paths.get(ref) == path:
                self._loaded[ref] = loaded
            else:  # forgotten, or saved elsewhere, meanwhile
                self._left.append(loaded)
        await self._tidy()

    def _stage(self, ref: AdapterRef, path: Path) -> Loaded:
        """A folder of its own with the adapter's files, which nobody else writes or deletes.

        Raises:
            CheckpointError: the files are damaged, or not to be served.
        """
        self._check(path)
        key = uuid.uuid4().hex
        folder = self._folder / key
        folder.mkdir()
        for name in (CONFIG, WEIGHTS):
            _link(path / name, folder / name)
        sha256, sealed = file_sha256(folder / WEIGHTS), sealed_sha256(path, WEIGHTS)
        if sealed not in (None, sha256):
            shutil.rmtree(folder)
            raise CheckpointError(
                f"checkpoint {path} can't be served",
                got=f"{WEIGHTS} with the SHA-256 {sha256[:12]}...",
                expected=f"{str(sealed)[:12]}..., with which it was saved",
                fix="Choose another step.",
            )
        if has_patterns(read_adapter(path).config):
            for name in (CONFIG, WEIGHTS):
                (folder / name).unlink()  # it may be the checkpoint's own
            fold_into((path / CONFIG, path / WEIGHTS), (folder / CONFIG, folder / WEIGHTS))
        start = self._http.server.starts
        return Loaded(ref, f"{ref}-{key[:12]}", folder, sha256, start)

    def _retire(self, ref: AdapterRef) -> None:
        """Under the lock: what is loaded as `ref` is not given out again."""
        loaded = self._loaded.pop(ref, None)
        if loaded is not None:
            self._left.append(loaded)

    def _has_waste(self) -> bool:
        return bool(self._left) or len(self._loaded) > self._slots

    async def _tidy(self) -> None:
        """Unload what nobody needs: what is leaving, and what is too much."""
        with self._lock:
            idle = sorted(
                (
                    loaded
                    for loaded in self._loaded.values()
                    if not loaded.users and not self._wanted[loaded.ref]
                ),
                key=lambda loaded: loaded.asked,
            )
            for loaded in idle[: max(0, len(self._loaded) - self._slots)]:
                self._retire(loaded.ref)
            gone = [loaded for loaded in self._left if not loaded.users]
            self._left = [loaded for loaded in self._left if loaded.users]
        while gone:
            try:
                await self._unload(gone[-1])
            except BaseException:  # cancelled: whoever tidies next goes on with them
                with self._lock:
                    self._left += gone
                raise
            gone.pop()

    async def _unload(self, loaded: Loaded) -> None:
        try:
            if loaded.start == self._http.server.starts:
                await self._http.post("/v1/unload_lora_adapter", {"lora_name": loaded.name})
        except (Refused, EngineUnreachable) as error:  # then it is not loaded: what we want
            _log.debug("%s was gone already: %s", loaded.name, error)
        _remove(loaded)

    def _unknown(self, ref: AdapterRef) -> EngineError:
        return EngineError(
            "adapter is not served",
            got=str(ref),
            expected=f"one of {[str(known) for known in self.known()]}",
            fix="Load it first.",
        )


def _link(source: Path, target: Path) -> None:
    """One file under two names if the disk can, else a copy."""
    try:
        os.link(source, target)
    except OSError:  # another disk, or one that has no links
        shutil.copyfile(source, target)


def _remove(loaded: Loaded) -> None:
    shutil.rmtree(loaded.folder, ignore_errors=True)


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, which goes on to its end also if the caller is cancelled."""
    return await asyncio.shield(asyncio.ensure_future(work))
