"""Chat completions over an engine: everything between a request's JSON and the engine's tokens.

In: the parsed body of a request, the rollout it belongs to. Out: the body of the response, or the
events of a stream; and a token record of every call, stored before the last byte is given out,
also of calls that broke off. HTTP is left to `openai_routes`.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
import threading
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, cast

from art_core.calls import Ids
from art_core.engine.answer import Answer, Piece
from art_core.engine.api_errors import error_response
from art_core.engine.base import Delta, Engine, GenerateRequest, Grammar
from art_core.engine.chat_request import ChatRequest, parse_chat_request
from art_core.engine.chat_wire import DONE, KEEP_ALIVE, Envelope, event
from art_core.engine.grammar import json_grammar, tool_call_grammar
from art_core.engine.history import Conversations, History
from art_core.engine.messages import template_messages
from art_core.engine.model_registry import ModelRegistry, Served
from art_core.engine.prompt import PromptBuild, PromptBuilder
from art_core.errors import ARTError, ContextOverflow, EngineError
from art_core.records import RecordStore, TokenRecord

_log = logging.getLogger(__name__)

_KEPT_ROLLOUTS = 1024
_QUEUED_PIECES = 64
"""Pieces that wait for a slow reader before the engine's stream is no longer drained."""


@dataclass
class _Rollout:
    """What a rollout's calls share."""

    history: History
    seen: Counter[bytes] = field(default_factory=Counter)
    """How often each prompt was asked for."""


@dataclass
class _Call:
    """One request on its way."""

    request: ChatRequest
    served: Served
    rollout_id: str | None
    before: tuple[TokenRecord, ...]
    """Records of the conversation so far, where no rollout keeps them."""
    envelope: Envelope
    engine_requests: list[GenerateRequest]
    answers: list[Answer]
    started: float
    is_stored: bool = False


class ChatService:
    """Answers chat completions with one engine. Its methods may run on any event loop.

    Args:
        engine: samples tokens.
        records: keeps what was sampled.
        models: the names that are served.
        keep_alive: seconds of silence in a stream after which a comment is sent.
    """

    def __init__(
        self,
        engine: Engine,
        records: RecordStore,
        models: ModelRegistry,
        *,
        keep_alive: float = 10.0,
    ) -> None:
        self.engine = engine
        self.records = records
        self.models = models
        self.drifts: Counter[str] = Counter()
        """How many prompts did not extend an earlier call that they should extend, by reason."""
        self._keep_alive = keep_alive
        self._lock = threading.Lock()
        self._prompts = PromptBuilder(engine.tokenizer)
        self._rollouts: OrderedDict[str, _Rollout] = OrderedDict()
        self._conversations = Conversations()
        self._unnamed = itertools.count()

    async def complete(self, body: object, *, rollout_id: str | None = None) -> dict[str, Any]:
        """The response to a request that does not stream.

        Raises:
            ApiError, ContextOverflow: the request can't be answered as it is.
            EngineError: the engine failed; what was sampled is in the records, incomplete.
        """
        call = self._begin(parse_chat_request(body), rollout_id)
        try:
            await _all(self._play(call, i, _drop) for i in range(len(call.answers)))
        finally:
            self._store(call)
        return call.envelope.completion(call.answers)

    async def stream(
        self, body: object, *, rollout_id: str | None = None
    ) -> AsyncGenerator[bytes, None]:
        """The server-sent events of a streamed response.

        Faults before the first event are raised as in `complete`; later ones become an error
        event, after which the stream ends without `[DONE]`. Closing the generator cancels the
        call.
        """
        call = self._begin(parse_chat_request(body), rollout_id)
        pieces: asyncio.Queue[tuple[int, Piece] | None] = asyncio.Queue(_QUEUED_PIECES)
        players = asyncio.create_task(self._play_into(call, pieces))
        is_open = False
        try:
            async for item in _with_pauses(pieces, self._keep_alive):
                if item is None:
                    yield KEEP_ALIVE
                    continue
                if not is_open:
                    is_open = True
                    for chunk in call.envelope.first(len(call.answers)):
                        yield event(chunk)
                chunks = call.envelope.chunks(*item)
                if all(answer.finish_reason for answer in call.answers):
                    self._store(call)
                for chunk in chunks:
                    yield event(chunk)
            await players
            if call.request.include_usage:
                yield event(call.envelope.last(call.answers))
            yield DONE
        except Exception as error:
            if not is_open:
                raise
            if not isinstance(error, ARTError):
                _log.exception("a stream broke off")
            yield event(error_response(error)[1])
        finally:
            players.cancel()
            await asyncio.gather(players, return_exceptions=True)
            self._store(call)

    def list_models(self) -> dict[str, Any]:
        """The body of `GET /v1/models`."""
        return {"object": "list", "data": [_model_card(name) for name in self.models.names()]}

    def model(self, name: str) -> dict[str, Any]:
        """The body of `GET /v1/models/{name}`.

        Raises:
            ApiError: 404.
        """
        self.models.resolve(name)
        return _model_card(name)

    def _begin(self, request: ChatRequest, rollout_id: str | None) -> _Call:
        served = self.models.resolve(request.model)
        grammar = _grammar(request)
        with self._lock:
            rollout = self._rollout(rollout_id)
            before = () if rollout else self._conversation(request)
            history = rollout.history if rollout else History(before)
            prompt = self._prompts.build(request.messages, request.tools, history)
            seed = self._seed(request, served, rollout_id, rollout, prompt.ids)
        if prompt.drift is not None:
            self.drifts[prompt.drift] += 1
        self._check_length(request, len(prompt.ids))
        return self._call(request, served, rollout_id, before, prompt, grammar, seed)

    def _call(
        self,
        request: ChatRequest,
        served: Served,
        rollout_id: str | None,
        before: tuple[TokenRecord, ...],
        prompt: PromptBuild,
        grammar: Grammar | None,
        seed: int,
    ) -> _Call:
        record_id = uuid.uuid4().hex[:20]
        sampling = request.sampling(
            served.sampling, seed=seed, grammar=grammar.kind if grammar else None
        )
        started = time.time()
        return _Call(
            request=request,
            served=served,
            rollout_id=rollout_id,
            before=before,
            envelope=Envelope(
                record_id=record_id,
                model=request.model,
                policy=served.policy,
                sampling=sampling,
                created=int(started),
                prompt_ids=prompt.ids,
                logprobs=request.logprobs,
                return_token_ids=request.return_token_ids,
                tokenizer=self.engine.tokenizer,
                drift=prompt.drift,
            ),
            engine_requests=[
                GenerateRequest(
                    request_id=f"{record_id}-{i}",
                    prompt_ids=prompt.ids,
                    adapter=served.adapter,
                    sampling=replace(sampling, seed=seed if i == 0 else _hash(seed, i)),
                    grammar=grammar,
                )
                for i in range(request.n)
            ],
            answers=[self._answer(request, record_id, i) for i in range(request.n)],
            started=started,
        )

    def _answer(self, request: ChatRequest, record_id: str, index: int) -> Answer:
        several = None if request.parallel_tool_calls and request.named_tool is None else 1
        return Answer(
            self.engine.tokenizer,
            call_id_prefix=f"call_{record_id}" if index == 0 else f"call_{record_id}_{index}",
            stop=request.stop,
            min_tokens=request.min_tokens,
            tool_limit=several if request.callable_tools else 0,
        )

    async def _play_into(
        self, call: _Call, pieces: asyncio.Queue[tuple[int, Piece] | None]
    ) -> None:
        """Play all choices into `pieces`; None says that there will be no more."""

        async def put(index: int, piece: Piece) -> None:
            await pieces.put((index, piece))

        try:
            await _all(self._play(call, i, put) for i in range(len(call.answers)))
        except Exception:
            await pieces.put(None)
            raise
        await pieces.put(None)

    async def _play(self, call: _Call, index: int, give: Callable[[int, Piece], Any]) -> None:
        """Run choice `index` to its end; closing the engine's iterator is what cancels it."""
        answer = call.answers[index]
        deltas = cast(
            AsyncGenerator[Delta, None],  # the protocol says that it can be closed
            self.engine.generate(call.engine_requests[index]),
        )
        async with aclosing(deltas):
            async for delta in deltas:
                await give(index, answer.take(delta))
                if answer.finish_reason is not None:
                    return
        raise EngineError("the engine ended a call without a finish reason")

    def _store(self, call: _Call) -> None:
        """Keep the call's records, once."""
        if call.is_stored:
            return
        call.is_stored = True
        is_complete = all(answer.finish_reason is not None for answer in call.answers)
        records = [
            TokenRecord(
                record_id=call.envelope.record_id,
                choice_index=i,
                rollout_id=call.rollout_id,
                model=call.served.name,
                step=call.served.step,
                prompt_ids=call.envelope.prompt_ids,
                sampled_ids=cast(Ids, answer.ids),  # converted by the record
                logprobs=cast(Any, answer.logprobs),
                sampling=call.engine_requests[i].sampling,
                finish_reason=answer.finish_reason,
                message=answer.message,
                request_messages=call.request.messages,
                tools=call.request.tools,
                created=call.started,
                complete=is_complete,
            )
            for i, answer in enumerate(call.answers)
        ]
        self.records.put(records)
        with self._lock:
            rollout = self._rollout(call.rollout_id)
            for record in records:
                if rollout is None:
                    self._conversations.add(record, call.before)
                else:
                    rollout.history.add(record)

    def _rollout(self, rollout_id: str | None) -> _Rollout | None:
        """The rollout's state, read back from the records if it is not in memory."""
        if rollout_id is None:
            return None
        rollout = self._rollouts.get(rollout_id)
        if rollout is None:
            records = self.records.of_rollout(rollout_id)
            seen = Counter(_digest(r.prompt_ids) for r in records if r.choice_index == 0)
            rollout = self._rollouts[rollout_id] = _Rollout(History(records), seen)
            while len(self._rollouts) > _KEPT_ROLLOUTS:
                self._rollouts.popitem(last=False)
        self._rollouts.move_to_end(rollout_id)
        return rollout

    def _conversation(self, request: ChatRequest) -> tuple[TokenRecord, ...]:
        return self._conversations.records(template_messages(request.messages), request.tools)

    def _seed(
        self,
        request: ChatRequest,
        served: Served,
        rollout_id: str | None,
        rollout: _Rollout | None,
        prompt_ids: Ids,
    ) -> int:
        """The key of the call's sampling noise: the request's own, else one that a repeated run
        finds again.

        Within a rollout it depends on the prompt and on how often that prompt came before, not on
        the order in which parallel nodes happened to ask.
        """
        if rollout is None:
            return (
                request.seed
                if request.seed is not None
                else _hash(served.seed, "unnamed", next(self._unnamed))
            )
        digest = _digest(prompt_ids)
        count = rollout.seen[digest]
        rollout.seen[digest] += 1
        if request.seed is not None:
            return request.seed
        return _hash(served.seed, rollout_id, digest.hex(), count)

    def _check_length(self, request: ChatRequest, prompt: int) -> None:
        limit, asked = self.engine.context_length, request.max_tokens or 1
        if prompt + asked > limit:
            raise ContextOverflow(
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{prompt + asked} tokens ({prompt} in the messages, {asked} in the completion)",
                fix="Please reduce the length of the messages or completion.",
            )


def _grammar(request: ChatRequest) -> Grammar | None:
    """What the answer is held to; free text, and free choice of a tool, need no grammar."""
    schema = request.answer_schema
    several = request.parallel_tool_calls and request.named_tool is None
    if request.tool_choice == "required":
        return tool_call_grammar(request.callable_tools, several=several)
    if schema is None:
        return None
    if request.callable_tools:
        return tool_call_grammar(request.callable_tools, several=several, or_json=schema)
    return json_grammar(schema)


async def _all(jobs: Iterable[Any]) -> None:
    """Run the coroutines side by side; the first fault cancels the others and is raised."""
    waiting = list(jobs)
    if len(waiting) == 1:
        await waiting[0]
        return
    tasks = [asyncio.ensure_future(job) for job in waiting]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _drop(index: int, piece: Piece) -> None:
    """An unstreamed answer needs no pieces."""


async def _with_pauses(
    queue: asyncio.Queue[tuple[int, Piece] | None], seconds: float
) -> AsyncGenerator[tuple[int, Piece] | None, None]:
    """The queue's items up to its None; a None whenever nothing came for `seconds`."""
    while True:
        try:
            async with asyncio.timeout(seconds):
                item = await queue.get()
        except TimeoutError:
            yield None
            continue
        if item is None:
            return
        yield item


def _digest(ids: Ids) -> bytes:
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()


def _hash(*parts: object) -> int:
    """63 bits out of `parts`, the same in every process."""
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _model_card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "art-langgraph"}
