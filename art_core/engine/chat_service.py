"""Chat completions over an engine: everything between a request's JSON and the engine's tokens.

In: the parsed body of a request, the rollout it belongs to. Out: the body of the response, or the
events of a stream; and a token record of every call, stored before the last byte is given out,
also of calls that broke off. HTTP is left to `openai_routes`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, cast

from art_core.calls import Ids, Logprobs
from art_core.engine.answer import Answer, Piece
from art_core.engine.api_errors import error_response
from art_core.engine.base import Delta, Engine, GenerateRequest, Grammar
from art_core.engine.chat_request import ChatRequest, parse_chat_request
from art_core.engine.chat_wire import DONE, KEEP_ALIVE, Envelope, event
from art_core.engine.forms.answer_form import AS_IT_IS
from art_core.engine.forms.spelling import Speller
from art_core.engine.gate import Gate
from art_core.engine.grammar import json_grammar, tool_call_grammar
from art_core.engine.messages import template_messages
from art_core.engine.model_card import model_cards
from art_core.engine.model_registry import ModelRegistry, Served
from art_core.engine.pasts import Past, Rollouts, noise_key
from art_core.engine.prompt import PromptBuild, PromptBuilder
from art_core.engine.tokenize_request import parse_tokenize_request, tokenize_response
from art_core.engine.waiting import items, pauses, side_by_side
from art_core.errors import ARTError, ContextOverflow, EngineError
from art_core.records import RecordStore, TokenRecord

_log = logging.getLogger(__name__)

_ENDING = 64
"""Letters of a prompt's end, which may open a thought."""
_QUEUED_PIECES = 64
"""Pieces that wait for a slow reader before the engine's stream is no longer drained."""


@dataclass
class _Call:
    """One request on its way."""

    request: ChatRequest
    served: Served
    rollout_id: str | None
    past: Past
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
        keyed: noise of calls that name no seed is keyed by rollout and prompt, so that a repeated
            rollout finds the same again; else the engine draws as it likes.
    """

    def __init__(
        self,
        engine: Engine,
        records: RecordStore,
        models: ModelRegistry,
        *,
        keep_alive: float = 10.0,
        keyed: bool = True,
    ) -> None:
        self.engine = engine
        self.records = records
        self.models = models
        self.drifts: Counter[str] = Counter()
        """How many prompts did not extend an earlier call that they should extend, by reason."""
        self.gate = Gate()
        """Held while the policy changes; calls wait in front of it."""
        self._keep_alive, self._keyed = keep_alive, keyed
        self._lock = threading.Lock()
        self._prompts = PromptBuilder(engine.tokenizer)
        self._rollouts = Rollouts(records)

    async def complete(self, body: object, *, rollout_id: str | None = None) -> dict[str, Any]:
        """The response to a request that does not stream.

        Raises:
            ApiError, ContextOverflow: the request can't be answered as it is.
            EngineError: the engine failed; what was sampled is in the records, incomplete.
        """
        request = parse_chat_request(body)
        await self.gate.wait()
        call = self._begin(request, rollout_id)
        try:
            await side_by_side(self._play(call, i, _drop) for i in range(len(call.answers)))
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
        request = parse_chat_request(body)
        is_open = False
        try:
            async with aclosing(self._events(request, rollout_id)) as events:
                async for data in events:
                    is_open = True
                    yield data
        except Exception as error:
            if not is_open:
                raise
            if not isinstance(error, ARTError):
                _log.exception("a stream broke off")
            yield event(error_response(error)[1])

    async def _events(
        self, request: ChatRequest, rollout_id: str | None
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(pauses(self.gate.wait(), self._keep_alive)) as beats:
            async for _ in beats:
                yield KEEP_ALIVE
        call = self._begin(request, rollout_id)
        pieces: asyncio.Queue[tuple[int, Piece] | None] = asyncio.Queue(_QUEUED_PIECES)
        players = asyncio.create_task(self._play_into(call, pieces))
        is_first = True
        try:
            async for item in items(pieces, self._keep_alive):
                if item is None:
                    yield KEEP_ALIVE
                    continue
                chunks = call.envelope.chunks(*item)
                if is_first:
                    is_first = False
                    chunks = call.envelope.first(len(call.answers)) + chunks
                if all(answer.finish_reason for answer in call.answers):
                    self._store(call)
                for chunk in chunks:
                    yield event(chunk)
            await players
            if request.include_usage:
                yield event(call.envelope.last(call.answers))
            yield DONE
        finally:
            players.cancel()
            await asyncio.gather(players, return_exceptions=True)
            self._store(call)

    def list_models(self) -> dict[str, Any]:
        """The body of `GET /v1/models`."""
        return {"object": "list", "data": model_cards(self.models.names(), self.engine)}

    def model(self, name: str) -> dict[str, Any]:
        """The body of `GET /v1/models/{name}`.

        Raises:
            ApiError: 404.
        """
        self.models.resolve(name)
        return model_cards([name], self.engine)[0]

    def tokenize(self, body: object, *, rollout_id: str | None = None) -> dict[str, Any]:
        """The response to a tokenize request, in vLLM's shape.

        The ids of messages are those that a call with them would be answered from, in a rollout
        its recorded ids included.

        Raises:
            ApiError: the request can't be answered as it is, or names a model not served here.
        """
        request = parse_tokenize_request(body)
        if request.model is not None:
            self.models.resolve(request.model)
        tokenizer = self.engine.tokenizer
        if request.prompt is not None:
            ids = tokenizer.encode(request.prompt)
        elif request.add_generation_prompt:
            with self._lock:
                past = self._rollouts.past(rollout_id, request.messages, request.tools)
                prompt = self._prompts.build(request.messages, request.tools, past.history)
            ids = prompt.ids.tolist()
        else:
            plain = template_messages(request.messages)
            text = tokenizer.render(plain, tools=request.tools, add_generation_prompt=False)
            ids = tokenizer.encode(text)
        return tokenize_response(request, ids, tokenizer, self.engine.context_length)

    def _begin(self, request: ChatRequest, rollout_id: str | None) -> _Call:
        served = self.models.resolve(request.model)
        with self._lock:
            past = self._rollouts.past(rollout_id, request.messages, request.tools)
            if request.prompt is None:
                prompt = self._prompts.build(request.messages, request.tools, past.history)
            else:
                prompt = self._prompts.plain(request.prompt)
            self._check_length(request, len(prompt.ids))
            noise = past.seed(served.seed, prompt.ids)
        if prompt.drift is not None:
            self.drifts[prompt.drift] += 1
        grammar = _grammar(request, Speller(self.engine.tokenizer, prompt.text[-_ENDING:]))
        seed = request.seed
        if seed is None and self._keyed:
            seed = noise
        return self._call(request, served, rollout_id, past, prompt, grammar, seed)

    def _call(
        self,
        request: ChatRequest,
        served: Served,
        rollout_id: str | None,
        past: Past,
        prompt: PromptBuild,
        grammar: Grammar | None,
        seed: int | None,
    ) -> _Call:
        record_id = uuid.uuid4().hex[:20]
        sampling = request.sampling(
            served.sampling, seed=seed, grammar=grammar.kind if grammar else None
        )
        started = time.time()
        answers = [self._answer(request, prompt, record_id, i) for i in range(request.n)]
        return _Call(
            request=request,
            served=served,
            rollout_id=rollout_id,
            past=past,
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
                    sampling=replace(sampling, seed=_seed_of(seed, i)),
                    grammar=grammar,
                    stream=request.stream or answer.is_watched,
                )
                for i, answer in enumerate(answers)
            ],
            answers=answers,
            started=started,
        )

    def _answer(
        self, request: ChatRequest, prompt: PromptBuild, record_id: str, index: int
    ) -> Answer:
        several = None if request.parallel_tool_calls and request.named_tool is None else 1
        return Answer(
            self.engine.tokenizer,
            call_id_prefix=f"call_{record_id}" if index == 0 else f"call_{record_id}_{index}",
            stop=request.stop,
            min_tokens=request.min_tokens,
            tools=request.callable_tools,
            tool_limit=several,
            prompt=prompt.text[-_ENDING:],
            form=None if request.prompt is None else AS_IT_IS,
        )

    async def _play_into(
        self, call: _Call, pieces: asyncio.Queue[tuple[int, Piece] | None]
    ) -> None:
        """Play all choices into `pieces`; None says that there will be no more."""

        async def put(index: int, piece: Piece) -> None:
            await pieces.put((index, piece))

        try:
            await side_by_side(self._play(call, i, put) for i in range(len(call.answers)))
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
                logprobs=cast(Logprobs, answer.logprobs),
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
            for record in records:
                call.past.add(record)

    def _check_length(self, request: ChatRequest, prompt: int) -> None:
        limit, asked = self.engine.context_length, request.max_tokens or 1
        if prompt + asked > limit:
            raise ContextOverflow(
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{prompt + asked} tokens ({prompt} in the messages, {asked} in the completion)",
                fix="Please reduce the length of the messages or completion.",
            )


def _seed_of(seed: int | None, choice: int) -> int | None:
    """Each choice has noise of its own."""
    return seed if seed is None or choice == 0 else noise_key(seed, choice)


def _grammar(request: ChatRequest, spell: Speller) -> Grammar | None:
    """What the answer is held to; free text, and free choice of a tool, need no grammar."""
    schema = request.answer_schema
    several = request.parallel_tool_calls and request.named_tool is None
    if request.tool_choice == "required":
        return tool_call_grammar(request.callable_tools, spell, several=several)
    if schema is None:
        return None
    if request.callable_tools:
        return tool_call_grammar(request.callable_tools, spell, several=several, or_json=schema)
    return json_grammar(schema, spell)


async def _drop(index: int, piece: Piece) -> None:
    """An unstreamed answer needs no pieces."""
