"""The engine that answers from vLLM: a child process, spoken to in token ids.

In: requests from any event loop. Out: streams of sampled tokens, under the adapter that each
request names. A call that meets a vLLM that died is asked once more when it is back, unless
something of it was given out; adapters are loaded again by themselves. While it sleeps, calls wait.
Left out: the process itself (vllm_process.py) and whether a swap is true (swap_proof.py).
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, nullcontext
from pathlib import Path
from typing import cast

import numpy as np

from art_core.calls import Ids, Logprobs
from art_core.engine.base import (
    AdapterRef,
    Delta,
    FinishReason,
    GenerateRequest,
    Tokenizer,
    check_prompt,
)
from art_core.engine.gate import Gate
from art_core.engine.vllm_adapters import AdapterShelf, to_its_end
from art_core.engine.vllm_http import EngineUnreachable, Refused, Server, VllmHttp
from art_core.engine.vllm_wire import VERSION_PATH, End, Tokens, generate_body, score_body
from art_core.errors import EngineError

_READY_SECONDS = 900.0
"""How long a call waits for a vLLM that is started again."""
_LOOK_SECONDS = 0.02
_RESET_TRIES = 50
"""The prefix cache can't be emptied while a call that just ended still holds its blocks."""


class VllmEngine:
    """Serves a base model and its adapters from one vLLM. Implements `base.Engine`.

    Args:
        server: vLLM, up, with the door in it (`VllmSettings` of `vllm_launch`).
        tokenizer: of the base model.
        base_model: the name it is served under above this engine.
        context_length: tokens of prompt and answer; what vLLM was started with.
        vocab_size: ids that the model has; others are refused.
        shelf: its adapters.
        scores_alone: while it scores no call is answered. The CPU build of vLLM 0.32.0 dies of a
            scoring beside other calls: `add_lora_logits` takes the batch's adapters, one a call,
            for those of the positions scored (`punica_cpu.py`).
    """

    def __init__(
        self,
        server: Server,
        tokenizer: Tokenizer,
        *,
        base_model: str,
        context_length: int,
        vocab_size: int,
        shelf: AdapterShelf,
        http: VllmHttp,
        scores_alone: bool = False,
    ) -> None:
        self.base_model = base_model
        self.context_length = context_length
        self.tokenizer = tokenizer
        self.shelf = shelf
        self.server = server
        self._vocab_size = vocab_size
        self._http = http
        self._scores_alone = scores_alone
        self._awake = Gate()
        self._lock = threading.Lock()
        self._running = 0
        self._is_held = False
        self._is_closed = False

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """As `base.Engine.generate`.

        Raises:
            ContextOverflow: the prompt leaves no room for a token.
            ApiError: a temperature that vLLM can't sample at.
        """
        self._check(request)
        given = False
        async with self._counted():
            for is_last in (False, True):
                starts = self.server.starts
                try:
                    async with aclosing(self._sampled(request)) as deltas:
                        async for delta in deltas:
                            given = True
                            yield delta
                    return
                except (EngineUnreachable, _NotLoaded) as error:
                    if given or is_last or self._is_closed:
                        raise self._ended(error) from error
                await self._back(starts)

    async def score(self, adapter: AdapterRef | None, ids: Ids) -> Logprobs:
        """[T - 1] natural-log probabilities of ids[1:], each after those before it, at T = 1.

        Raises:
            EngineError: vLLM failed, or does not know the adapter.
        """
        async with self._by_itself() if self._scores_alone else nullcontext():
            starts = self.server.starts
            try:
                return await self._scored(adapter, ids)
            except (EngineUnreachable, _NotLoaded):
                await self._back(starts)
            return await self._scored(adapter, ids)

    async def load_adapter(self, adapter: AdapterRef, path: Path) -> None:
        """Make a saved step servable; vLLM reads it when it is first asked for.

        Raises:
            CheckpointError: vLLM can't serve it as it was trained.
        """
        await asyncio.to_thread(self.shelf.add, adapter, path)

    async def unload_adapter(self, adapter: AdapterRef) -> None:
        """As `base.Engine.unload_adapter`; calls that it answers now go on to their end."""
        await self.shelf.forget(adapter)

    def adapters(self) -> list[AdapterRef]:
        """As `base.Engine.adapters`."""
        return self.shelf.known()

    @property
    def running(self) -> int:
        """Requests being answered now."""
        return self._running

    @asynccontextmanager
    async def asleep(self) -> AsyncIterator[None]:
        """vLLM without the GPU's memory: for a trainer on the same GPU.

        Calls are held first, running ones waited for, then it sleeps; afterwards it is woken, its
        caches are emptied, and only then do calls go on. Woken also if what ran meanwhile failed.
        Level 1 keeps the weights in the machine's memory: after level 2 the base model would be
        noise, without an error. One that dies meanwhile is started again afterwards: at once, it
        would take the memory that the trainer has.

        Raises:
            EngineError: it does not sleep, or does not wake up.
        """
        if not self._hold():
            raise EngineError("vLLM sleeps already", fix="Wait for the step under way.")
        try:
            await self._drained()
            try:
                await self._sleep()
                with self.server.staying_down():
                    yield
            finally:  # also where it did not say that it sleeps
                await to_its_end(self._wake())
        finally:
            self._go_on()

    async def forget_prompts(self) -> None:
        """Empty the prefix cache.

        Raises:
            EngineError: calls hold it all the time.
        """
        for _ in range(_RESET_TRIES):
            told = await self._http.post("/reset_prefix_cache")
            if not isinstance(told, dict) or told.get("success", True):
                return
            await asyncio.sleep(_LOOK_SECONDS)
        raise EngineError("vLLM's prefix cache can't be emptied", fix="Look at vLLM's log.")

    async def close(self) -> None:
        """As `base.Engine.close`."""
        self._is_closed = True
        await asyncio.to_thread(self.server.stop)
        self.shelf.close()

    # How it is done

    async def _sampled(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """One try of a call."""
        async with self.shelf.use(request.adapter) as name:
            body = generate_body(
                request,
                name,
                eos_ids=self.tokenizer.eos_ids,
                room=self.context_length - len(request.prompt_ids),
            )
            held: Tokens | None = None  # the last of them goes out with the finish reason
            async with aclosing(self._frames(name, body)) as frames:
                async for frame in frames:
                    if isinstance(frame, End):
                        yield _last(held, frame)
                        return
                    if held is not None:
                        yield Delta(held.ids.tolist(), held.logprobs.tolist())
                    held = frame
        raise EngineUnreachable("vLLM ended a call without saying how")

    async def _scored(self, adapter: AdapterRef | None, ids: Ids) -> Logprobs:
        """One try of a scoring."""
        async with self.shelf.use(adapter) as name:
            body = score_body(f"score-{uuid.uuid4().hex}", name, ids)
            async with aclosing(self._frames(name, body)) as frames:
                parts = [frame.logprobs async for frame in frames if isinstance(frame, Tokens)]
        scored = np.concatenate([np.empty(0, np.float32), *parts])
        if len(scored) != len(ids) - 1:
            raise EngineError(
                "vLLM did not score a sequence whole",
                got=f"{len(scored)} logprobs",
                expected=f"{len(ids) - 1}",
            )
        return scored

    async def _frames(self, name: str | None, body: bytes) -> AsyncGenerator[Tokens | End, None]:
        """As `VllmHttp.frames`; an adapter that vLLM does not know is loaded again next time."""
        try:
            async with aclosing(self._http.frames(body)) as frames:
                async for frame in frames:
                    yield frame
        except Refused as error:
            if error.status != 404 or name is None:
                raise
            self.shelf.lost(name)
            raise _NotLoaded(str(error)) from error

    async def _back(self, starts: int) -> None:
        """Return once vLLM answers again; that it died is seen a moment after a call broke.

        Args:
            starts: of it, when the call was made.

        Raises:
            EngineError: it is down for good, or does not answer in time.
        """
        deadline = time.monotonic() + _READY_SECONDS
        while True:
            await self.server.ready(_READY_SECONDS)
            if self.server.starts != starts:
                return
            try:
                await self._http.get(VERSION_PATH)
            except EngineUnreachable:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_LOOK_SECONDS)
            else:
                return

    def _check(self, request: GenerateRequest) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed", fix="Register the model again.")
        check_prompt(
            request.prompt_ids,
            vocab_size=self._vocab_size,
            context_length=self.context_length,
        )

    def _ended(self, error: EngineError) -> EngineError:
        if self._is_closed:
            return EngineError("the engine was closed", fix="Register the model again.")
        return EngineError(f"a call broke off: {error}", fix="Ask again.")

    @asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        """One of the running calls, begun while vLLM is awake."""
        is_in = False
        while not is_in:
            await self._awake.wait()
            with self._lock:
                if is_in := not self._is_held:
                    self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1

    @asynccontextmanager
    async def _by_itself(self) -> AsyncIterator[None]:
        """No call is answered meanwhile; they wait."""
        while not self._hold():
            await self._awake.wait()
        try:
            await self._drained()
            yield
        finally:
            self._go_on()

    def _hold(self) -> bool:
        """Let no call begin; False if somebody else does so."""
        with self._lock:
            if self._is_held:
                return False
            self._awake.hold()
            self._is_held = True
            return True

    def _go_on(self) -> None:
        """Let calls begin again."""
        with self._lock:
            self._is_held = False
        self._awake.release()

    async def _drained(self) -> None:
        """No call is being answered; they run on other event loops, so that one has to look."""
        while self._running:  # noqa: ASYNC110 - an Event belongs to one loop
            await asyncio.sleep(_LOOK_SECONDS)

    async def _sleep(self) -> None:
        """Asleep; one that is down is waited for, since it can't be asked to start asleep."""
        for is_last in (False, True):
            starts = self.server.starts
            try:
                with self.server.patiently():
                    await self._http.post("/sleep?level=1&mode=wait")
                return
            except EngineUnreachable:
                if is_last:
                    raise
            await self._back(starts)

    async def _wake(self) -> None:
        """Awake, with nothing in its caches. One that died meanwhile is started now, awake."""
        starts = self.server.starts
        with self.server.patiently():
            try:
                await self._http.post("/wake_up")
            except EngineUnreachable:
                await self._back(starts)
            await self.forget_prompts()


class _NotLoaded(EngineError):
    """vLLM does not know an adapter that it was given: it was started again."""


def _last(held: Tokens | None, end: End) -> Delta:
    if end.finish_reason not in ("stop", "length"):
        raise EngineError(f"vLLM ended a call by {end.finish_reason!r}", fix="Ask again.")
    ids, logprobs = ([], []) if held is None else (held.ids.tolist(), held.logprobs.tolist())
    return Delta(ids, logprobs, cast(FinishReason, end.finish_reason), end.cached_tokens)
