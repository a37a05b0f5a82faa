"""A `ChatArt` never goes to a hosted provider by itself, whatever the environment says."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.language_models import GenericFakeChatModel
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from art_core.capture import open_scope
from art_core.errors import CaptureError, ConfigError
from art_langgraph import ChatArt
from tests.stub_endpoint import Endpoint, completion, endpoint, recording, streamed


class Ans(BaseModel):
    x: int


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    """A provider that every variable of the environment leads to, and nothing of ours."""
    with endpoint(lambda _: completion("hosted")) as stub:
        monkeypatch.setenv("OPENAI_API_KEY", "sk-hosted")
        monkeypatch.setenv("OPENAI_ADMIN_KEY", "sk-admin")
        monkeypatch.setenv("OPENAI_ORG_ID", "org-hosted")
        monkeypatch.setenv("OPENAI_PROJECT_ID", "proj-hosted")
        monkeypatch.setenv("OPENAI_BASE_URL", stub.base_url)
        monkeypatch.setenv("OPENAI_API_BASE", stub.base_url)
        monkeypatch.setenv("OPENAI_PROXY", stub.base_url.removesuffix("/v1"))
        yield stub


async def drained(items: Any) -> list[Any]:
    return [item async for item in items]


def events_v3(llm: Any) -> Any:
    with warnings.catch_warnings():  # LangChain marks it as beta
        warnings.simplefilter("ignore")
        return llm.stream_events("hi", version="v3").output


PATHS: dict[str, Any] = {
    "invoke": lambda llm: llm.invoke("hi"),
    "ainvoke": lambda llm: asyncio.run(llm.ainvoke("hi")),
    "stream": lambda llm: list(llm.stream("hi")),
    "astream": lambda llm: asyncio.run(drained(llm.astream("hi"))),
    "batch": lambda llm: llm.batch(["hi"]),
    "abatch": lambda llm: asyncio.run(llm.abatch(["hi"])),
    "events v2": lambda llm: asyncio.run(drained(llm.astream_events("hi", version="v2"))),
    "events v3": events_v3,
    "structured": lambda llm: llm.with_structured_output(Ans).invoke("hi"),
    "tools": lambda llm: llm.bind_tools([Ans]).invoke("hi"),
    "generate": lambda llm: llm.generate_prompt([llm._convert_input("hi")]),
    "bare client": lambda llm: llm.client.create(model="gpt-4o", messages=[]),
    "bare root client": lambda llm: llm.root_client.models.list(),
}


@pytest.mark.parametrize("path", PATHS)
def test_without_a_model_it_is_an_error_on_every_path(hosted: Endpoint, path: str) -> None:
    with pytest.raises(CaptureError, match="ART_BASE_URL"):
        PATHS[path](ChatArt(max_retries=0))
    assert hosted.requests == []


def test_neither_profile_nor_counts_ask_a_provider(hosted: Endpoint) -> None:
    llm = ChatArt()
    assert llm.profile is None
    assert llm.get_num_tokens("x" * 40) in range(10, 14)
    with pytest.raises(ConfigError):
        llm.get_token_ids("x")
    assert hosted.requests == []


@pytest.mark.parametrize("carrier", ["scope", "metadata", "environment"])
def test_its_own_server_learns_nothing_of_the_provider(
    hosted: Endpoint, carrier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: Any = {"metadata": {"art_rollout": "named"}}
    with endpoint([completion("ours")]) as stub:
        if carrier == "environment":
            monkeypatch.setenv("ART_BASE_URL", stub.base_url)
            monkeypatch.setenv("ART_MODEL", "agent@3")
            monkeypatch.setenv("ART_API_KEY", "key")
            said = ChatArt().invoke("hi")
        else:
            with open_scope("named", {None: stub.target()}):
                given = config if carrier == "metadata" else None
                said = ChatArt().invoke("hi", given)
    assert said.content == "ours"
    assert stub.requests[0].headers["authorization"] == "Bearer key"
    assert "hosted" not in repr(stub.requests[0].headers)
    assert hosted.requests == []


def test_a_stand_in_is_the_users_own_choice(hosted: Endpoint) -> None:
    other = ChatOpenAI(model="gpt-4o")
    llm = ChatArt(otherwise=other)
    assert llm.invoke("hi").content == "hosted"
    assert hosted.requests[0].headers["authorization"] == "Bearer sk-hosted"
    with recording([completion("ours")]):
        assert llm.invoke("hi").content == "ours"
    assert len(hosted.requests) == 1
    other.root_client.close()


STAND_IN = {
    name: PATHS[name]
    for name in PATHS
    if name in ("invoke", "ainvoke", "stream", "astream", "batch", "abatch", "events v2")
}


@pytest.mark.parametrize("path", STAND_IN)
def test_the_stand_in_is_found_on_every_path(hosted: Endpoint, path: str) -> None:
    other = GenericFakeChatModel(messages=iter(["other"]))
    assert "other" in str(PATHS[path](ChatArt(otherwise=other)))
    assert hosted.requests == []


def test_what_a_stand_in_can_not_do_is_said(hosted: Endpoint) -> None:
    other = GenericFakeChatModel(messages=iter(["other"]))
    with pytest.raises(ConfigError, match=r"stream_events\(version='v2'\)"):
        events_v3(ChatArt(otherwise=other))
    assert hosted.requests == []


def test_the_metadata_carry_the_role_too() -> None:
    """A thread without the context: the node's config says which rollout, the model which role."""
    with (
        endpoint([completion("p")]) as plan,
        endpoint([streamed("c", [1])]) as code,
        open_scope("named", {"planner": plan.target(), None: code.target()}) as scope,
    ):
        config: Any = {"metadata": {"art_rollout": "named"}}
        token = asyncio.run(outside(ChatArt(role="planner"), config))
        assert token == "p"  # an answer
        assert ChatArt(role="coder").with_config(config).stream("hi") is not None
        assert "".join(str(c.content) for c in ChatArt(role="coder").stream("hi", config)) == "c"
    assert [call.origin.role for call in scope.calls] == ["planner", "coder"]


async def outside(llm: ChatArt, config: Any) -> Any:
    """Ask from a thread that knows nothing of the caller's context."""
    loop = asyncio.get_running_loop()
    said = await loop.run_in_executor(None, lambda: llm.invoke("hi", config))
    return said.content
