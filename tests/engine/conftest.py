"""A chat endpoint over the scripted engine, in this process and on a real port."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from art_core.engine.base import AdapterRef, GenerateRequest, Tokenizer
from art_core.engine.openai_routes import ChatService, ModelRegistry, create_app
from art_core.engine.scripted import ScriptedEngine
from art_core.engine.serving import LoopbackServer
from art_core.records import RecordStore, TokenRecord

CALL = '<tool_call>\n{"name": "add", "arguments": {"a":1}}\n</tool_call>'
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time"}},
]


def user(text: str = "hi") -> dict[str, Any]:
    return {"role": "user", "content": text}


@dataclass
class Endpoint:
    """An app, what is behind it, and what it was asked."""

    engine: ScriptedEngine
    records: RecordStore = field(default_factory=RecordStore)
    models: ModelRegistry = field(default_factory=lambda: ModelRegistry("scripted"))
    service: ChatService = field(init=False)
    client: httpx.AsyncClient = field(init=False)
    asked: list[GenerateRequest] = field(default_factory=list)
    says: str | Callable[[str], str] = "héllo 😀"
    """What the engine answers, or a function of the prompt."""

    def __post_init__(self) -> None:
        self.restart()

    async def post(self, *, rollout: str | None = None, **body: Any) -> httpx.Response:
        """A request of defaults and `body`."""
        headers = {} if rollout is None else {"x-art-rollout": rollout}
        body = {"model": "scripted", "messages": [user()], **body}
        return await self.client.post("/v1/chat/completions", json=body, headers=headers)

    async def chat(self, *, rollout: str | None = None, **body: Any) -> dict[str, Any]:
        """The body of a response that must be 200."""
        response = await self.post(rollout=rollout, **body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def stream(self, *, rollout: str | None = None, **body: Any) -> list[dict[str, Any]]:
        """The chunks of a stream that must end well."""
        response = await self.post(rollout=rollout, stream=True, **body)
        assert response.status_code == 200, response.text
        events = response.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        told = [event for event in events[:-2] if not event.startswith(":")]  # no keep-alive
        return [json.loads(event.removeprefix("data: ")) for event in told]

    async def error(self, **body: Any) -> tuple[int, dict[str, Any]]:
        """Status and error object of a response that must be a refusal."""
        response = await self.post(**body)
        error: dict[str, Any] = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return response.status_code, error

    def record(self, body: dict[str, Any], index: int = 0) -> TokenRecord:
        """The record of a response."""
        return self.records.get([body["system_fingerprint"]])[body["system_fingerprint"], index]

    def script(self, prompt: str, request: GenerateRequest) -> str:
        self.asked.append(request)
        return self.says if isinstance(self.says, str) else self.says(prompt)

    def restart(self) -> None:
        """A new process over the same records: nothing is known but what was stored."""
        self.service = ChatService(self.engine, self.records, self.models, keep_alive=0.05)
        app = create_app(self.service, max_body_bytes=100_000)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        )


async def make_endpoint(tokenizer: Tokenizer | None = None) -> Endpoint:
    """An endpoint whose engine answers three tokens at a time, with agent at steps 0, 1 and 3."""
    engine = ScriptedEngine(
        lambda prompt, request: made.script(prompt, request), delta_tokens=3, tokenizer=tokenizer
    )
    made = Endpoint(engine)
    for step in (0, 1, 3):
        await engine.load_adapter(AdapterRef("agent", step), Path("nowhere"))
        made.models.publish("agent", step, seed=7)
    return made


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    made = await make_endpoint()
    yield made
    await made.client.aclose()
    made.records.close()


@pytest.fixture
def server(endpoint: Endpoint) -> Iterator[LoopbackServer]:
    with LoopbackServer(create_app(endpoint.service)) as running:
        yield running
