"""A policy that says what a test tells it, behind a real endpoint; what a run must leave is proved.

In: a function from conversation to answer, and graphs to play. Out: trajectories, each of them
compared with what the endpoint says it answered: its HTTP log, its token records, and the token
trees that training would make of them (`evidence`). Real loopback HTTP, no torch.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from art_core.capture import Target
from art_core.config import SamplingConfig
from art_core.engine.base import AdapterRef, GenerateRequest, Tokenizer
from art_core.engine.openai_routes import ChatService, ModelRegistry, create_app
from art_core.engine.scripted import ScriptedEngine
from art_core.engine.serving import LoopbackServer
from art_core.records import RecordStore
from art_core.trajectories import Trajectory
from art_langgraph import rollout
from tests.langgraph.proofs.evidence import prove

SERVED = {"agent": 3, "helper": 1}
"""Policies that the endpoint serves, and their steps."""
KEY = "k"


@dataclass(frozen=True)
class Talk:
    """What the engine was asked, read back from the prompt that it got."""

    turns: tuple[tuple[str, str], ...]
    """(role, text) of each turn."""
    model: str

    @classmethod
    def of(cls, prompt: str, request: GenerateRequest) -> Talk:
        """Read a ChatML prompt."""
        parts = [part.partition("\n") for part in prompt.split("<|im_start|>")[1:-1]]
        turns = tuple((role, text.removesuffix("<|im_end|>\n")) for role, _, text in parts)
        return cls(turns, request.adapter.model if request.adapter else "scripted")

    @property
    def role(self) -> str:
        """Who spoke last."""
        return self.turns[-1][0]

    @property
    def last(self) -> str:
        """What was said last."""
        return self.turns[-1][1]

    @property
    def system(self) -> str:
        """The first turn, if it is a system message."""
        role, text = self.turns[0]
        return text if role == "system" else ""

    @property
    def user(self) -> str:
        """The user's first turn."""
        return next((text for role, text in self.turns if role == "user"), "")

    def count(self, role: str) -> int:
        """Turns of a role."""
        return sum(turn[0] == role for turn in self.turns)


@dataclass
class Request:
    """What the endpoint's own log knows of a request."""

    rollout_id: str | None
    status: int | None = None
    """None if no response was begun: the client left before."""


Says = Callable[[Talk], str]


def look(q: str) -> str:
    """Look something up."""
    return f"seen {q}"


def uses(tool: str, /, **arguments: Any) -> str:
    """A tool call as a model writes it, spelled as no library would dump it again."""
    written = json.dumps(arguments, separators=(" ,", ":  "))
    return f'<tool_call>\n{{"name": "{tool}", "arguments": {written}}}\n</tool_call>'


@dataclass
class House:
    """The endpoint, what is behind it, and what it saw."""

    says: Says
    delay: float = 0.0
    """Seconds before each delta of four tokens."""
    context_length: int = 32_768
    tokenizer: Tokenizer | None = None
    """None: bytes in ChatML."""
    faults: deque[int] = field(default_factory=deque)
    """Statuses of the next responses, in place of answers."""
    requests: list[Request] = field(default_factory=list)
    """What came, in that order."""
    asked: list[Talk] = field(default_factory=list)
    """What reached the engine."""

    def __enter__(self) -> Self:
        self.engine = ScriptedEngine(
            self._script,
            delta_tokens=4,
            delay=self.delay,
            context_length=self.context_length,
            tokenizer=self.tokenizer,
        )
        self.records = RecordStore(None)
        registry = ModelRegistry("scripted")
        for name, step in SERVED.items():
            # In a thread of its own: the test's loop may be running in this one.
            loading = threading.Thread(target=self._load, args=(AdapterRef(name, step),))
            loading.start()
            loading.join()
            registry.publish(name, step)
        self.service = ChatService(self.engine, self.records, registry)
        door = _Door(create_app(self.service), self)
        self.server = LoopbackServer(door, api_key=KEY).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()
        self.records.close()

    def _load(self, adapter: AdapterRef) -> None:
        asyncio.run(self.engine.load_adapter(adapter, Path("nowhere")))

    def target(self, name: str = "agent") -> Target:
        """A policy in training."""
        return Target(self.server.base_url, KEY, name, SamplingConfig(), trains=True)

    async def play(self, graph: Any, input: Any = "go", **settings: Any) -> Trajectory:
        """A rollout, proved. Text is the user's message."""
        given = {"messages": [("user", input)]} if isinstance(input, str) else input
        trajectory = await rollout(graph, given, model=self.target(), **settings)
        self.prove(trajectory)
        return trajectory

    def prove(self, trajectory: Trajectory) -> None:
        """Fail unless every call of the rollout is a correct training record."""
        mine = [r.rollout_id for r in self.requests if _is_in(r.rollout_id, trajectory.rollout_id)]
        records = [r for id in dict.fromkeys(mine) for r in self.records.of_rollout(str(id))]
        prove(trajectory, len(mine), records)

    async def idle(self) -> None:
        """Wait until the engine has noticed that nobody waits for its answers."""
        await asyncio.to_thread(self._wait)

    def _wait(self) -> None:
        until = time.monotonic() + 20
        while self.engine.running and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.05)  # the record is stored right after

    def _script(self, prompt: str, request: GenerateRequest) -> str:
        talk = Talk.of(prompt, request)
        self.asked.append(talk)
        return self.says(talk)


def _is_in(rollout_id: str | None, outer: str | None) -> bool:
    """True for the rollout itself, and for those played inside it: "a.0" is inside "a"."""
    assert outer is not None
    return rollout_id is not None and (rollout_id + ".").startswith(outer + ".")


class _Door:
    """ASGI middleware that notes what comes and what is answered; with faults, if told to."""

    def __init__(self, app: ASGIApp, house: House) -> None:
        self._app, self._house = app, house

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(Headers(scope=scope).get("x-art-rollout"))
        self._house.requests.append(request)

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                request.status = message["status"]
            await send(message)

        if not self._house.faults:
            await self._app(scope, receive, noted)
            return
        status = self._house.faults.popleft()
        body = json.dumps({"error": {"message": "out of order", "code": None}}).encode()
        headers = [(b"content-type", b"application/json"), (b"retry-after-ms", b"1")]
        await noted({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
