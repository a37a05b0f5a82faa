"""Who may come through the door into vLLM: nobody without the key, on no path."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from types import SimpleNamespace
from typing import Any

import pytest

from art_core.engine.inside_vllm.art_token_door import HEAD, PATH, TokenDoor

Message = MutableMapping[str, Any]
WITHOUT: list[tuple[bytes, bytes]] = []
WRONG = [(b"authorization", b"Bearer guess")]
RIGHT = [(b"authorization", b"Bearer key")]


HEAD_ONLY = {"request_id": "a", "adapter": None, "stream": False}


class App:
    """vLLM behind the door: keeps what reaches it."""

    def __init__(self) -> None:
        self.reached: list[str] = []

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        self.reached.append(scope.get("path", scope["type"]))


def framed(head: object) -> bytes:
    """The body of a call without ids."""
    text = json.dumps(head).encode()
    return HEAD.pack(len(text)) + text


async def ask(
    app: App, kind: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes | None = None
) -> list[Message]:
    """What the door sends. Without a body the client leaves at once."""
    sent: list[Message] = []
    parts: list[Message] = [] if body is None else [{"type": "http.request", "body": body}]

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        if parts:
            return parts.pop()
        if body is not None:
            await asyncio.sleep(1)
        return {"type": "http.disconnect"}

    scope = {"type": kind, "path": path, "headers": headers, "app": SimpleNamespace(state=None)}
    await TokenDoor(app)(scope, receive, send)
    return sent


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> App:
    monkeypatch.setenv("VLLM_API_KEY", "key")
    return App()


@pytest.mark.parametrize("headers", [WITHOUT, WRONG])
@pytest.mark.parametrize(
    "path",
    [
        PATH,
        "/art/version",
        "/v1/models",
        "/v1/load_lora_adapter",
        "/health",
        "/is_sleeping",
        "/sleep",
        "/collective_rpc",
        "/docs",
    ],
)
async def test_without_the_key_no_path_answers(
    app: App, path: str, headers: list[tuple[bytes, bytes]]
) -> None:
    """vLLM's own check leaves everything beside /v1 open."""
    first, *_ = await ask(app, "http", path, headers)
    assert first["status"] == 401
    assert app.reached == []


async def test_with_the_key_vllms_paths_are_vllms(app: App) -> None:
    for path in ("/sleep", "/v1/models"):
        assert await ask(app, "http", path, RIGHT) == []
    first, *_ = await ask(app, "http", "/art/version", RIGHT)
    assert first["status"] == 200
    assert app.reached == ["/sleep", "/v1/models"]


async def test_a_websocket_needs_the_key_and_the_start_of_the_server_does_not(app: App) -> None:
    [closed] = await ask(app, "websocket", "/v1/realtime", WRONG)
    assert closed["type"] == "websocket.close"
    await ask(app, "websocket", "/v1/realtime", RIGHT)
    await ask(app, "lifespan", "", WITHOUT)
    assert app.reached == ["/v1/realtime", ""]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"\x01", "1 bytes"),
        (framed({}), "lacks sampling, stream, request_id, adapter"),
        (framed(HEAD_ONLY), "lacks sampling"),
        (framed([]), "lacks"),
        (b"\x01\0\0\0{", "Expecting"),
    ],
)
async def test_a_broken_call_is_refused_and_no_fault_of_the_server(
    app: App, body: bytes, told: str
) -> None:
    start, answer = await ask(app, "http", PATH, RIGHT, body)
    assert start["status"] == 400
    assert told in json.loads(answer["body"])["message"]
