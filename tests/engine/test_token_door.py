"""Who may come through the door into vLLM: nobody without the key, on no path."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import pytest

from art_core.engine.inside_vllm.art_token_door import PATH, TokenDoor

Message = MutableMapping[str, Any]
WITHOUT: list[tuple[bytes, bytes]] = []
WRONG = [(b"authorization", b"Bearer guess")]
RIGHT = [(b"authorization", b"Bearer key")]


class App:
    """vLLM behind the door: keeps what reaches it."""

    def __init__(self) -> None:
        self.reached: list[str] = []

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        self.reached.append(scope.get("path", scope["type"]))


async def ask(app: App, kind: str, path: str, headers: list[tuple[bytes, bytes]]) -> list[Message]:
    """What the door sends."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    await TokenDoor(app)({"type": kind, "path": path, "headers": headers}, receive, send)
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
