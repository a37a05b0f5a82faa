"""What is wrong about a call, said by `ChatArt`: what it was, and what to do. Or it works."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage

from art_core.capture import Target, open_scope
from art_core.config import SamplingConfig
from art_core.errors import ConfigError
from art_langgraph import ChatArt

HELLO = "Hello, I am well. And you?"
"""What the model says to everything."""


# --- messages


@pytest.mark.usefixtures("scope")
@pytest.mark.parametrize(
    "messages",
    [
        "hi",
        "",
        ["hi", "there"],
        [("system", "s"), ("user", "u"), ("assistant", "a"), ("human", "h"), ("ai", "a")],
        [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        [{"role": "user", "content": [{"type": "text", "text": "u"}]}],
        [HumanMessage("h"), AIMessage("a"), ("user", "u"), {"role": "user", "content": "d"}],
        [("system", "only")],
    ],
)
def test_messages_of_every_form_are_taken(messages: Any) -> None:
    assert ChatArt().invoke(messages).content == HELLO


@pytest.mark.usefixtures("scope")
@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (None, "NoneType"),
        (3, "int"),
        ({"role": "user", "content": "hi"}, "list of BaseMessages"),
        ([("wizard", "hi")], "'wizard'.*Use one of"),
        ([{"role": "user"}], "'role' and 'content'"),
        ([3], "int"),
    ],
)
def test_what_is_no_message_is_named(messages: Any, words: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=words):
        ChatArt().invoke(messages)


@pytest.mark.usefixtures("scope")
def test_no_message_at_all_is_refused() -> None:
    with pytest.raises(openai.BadRequestError, match="at least one message"):
        ChatArt().invoke([])


@pytest.mark.usefixtures("scope")
@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "image", "base64": "AAAA", "mime_type": "image/png"},
        {"type": "audio", "base64": "AAAA", "mime_type": "audio/wav"},
        {"type": "file", "base64": "AAAA", "mime_type": "application/pdf", "filename": "a.pdf"},
    ],
)
@pytest.mark.parametrize("how", ["invoke", "stream"])
def test_an_image_is_refused_with_the_reason(part: dict[str, Any], how: str) -> None:
    message = HumanMessage([{"type": "text", "text": "What is it?"}, part])
    with pytest.raises(openai.BadRequestError, match="reads text only"):
        list(getattr(ChatArt(), how)([message]))


# --- models


@pytest.mark.usefixtures("scope")
def test_another_model_of_the_server_may_be_named() -> None:
    said = ChatArt().invoke("hi", model="scripted")
    assert said.response_metadata["model_name"] == "scripted"


@pytest.mark.usefixtures("scope")
def test_a_model_that_is_not_served_is_named_with_those_that_are() -> None:
    with pytest.raises(openai.NotFoundError, match=r"'gpt-4o'.*Served here: scripted, agent"):
        ChatArt().invoke("hi", model="gpt-4o")


def test_in_training_the_rollout_says_which_model(server: Target) -> None:
    target = replace(server, trains=True, sampling=SamplingConfig())
    with open_scope(None, {None: target}) as scope:
        with pytest.raises(ConfigError, match=r"'gpt-4o'.*'agent@3'.*role"):
            ChatArt().invoke("hi", model="gpt-4o")
        assert ChatArt().invoke("hi", model="agent@3").content == HELLO
    assert len(scope.calls) == 1


# --- servers


@pytest.mark.parametrize("how", ["invoke", "ainvoke", "stream"])
def test_a_server_that_is_down_is_named(how: str) -> None:
    llm = ChatArt(max_retries=0)
    paths: dict[str, Any] = {
        "invoke": lambda: llm.invoke("hi"),
        "ainvoke": lambda: asyncio.run(llm.ainvoke("hi")),
        "stream": lambda: list(llm.stream("hi")),
    }
    target = Target("http://127.0.0.1:1/v1", "key", "agent")
    words = r"http://127.0.0.1:1/v1 did not answer \(ConnectError: .*\).*server runs"
    with open_scope(None, {None: target}) as scope:
        with pytest.raises(openai.APIConnectionError, match=words):
            paths[how]()
    assert [call.trainable for call in scope.calls] == [False]


def test_a_wrong_key_is_said_and_not_shown(server: Target) -> None:
    with open_scope(None, {None: replace(server, api_key="sk-wrong")}):
        with pytest.raises(openai.AuthenticationError, match="ART_API_KEY") as raised:
            ChatArt().invoke("hi")
    assert server.base_url in str(raised.value)
    assert "sk-wrong" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("ART_BASE_URL", "127.0.0.1:7999/v1", "ART_BASE_URL is no address.*http://"),
        ("ART_API_KEY", "schlüssel", "ART_API_KEY can't be sent"),
        ("ART_API_KEY", "a\nb", "ART_API_KEY can't be sent"),
    ],
)
def test_an_environment_that_can_not_work_is_said(
    name: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ART_BASE_URL", "http://127.0.0.1:1/v1")
    monkeypatch.setenv("ART_MODEL", "agent")
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=words) as raised:
        ChatArt().invoke("hi")
    assert "schlüssel" not in str(raised.value)


def test_space_around_a_key_is_no_part_of_it(
    server: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes from files and from copied lines."""
    monkeypatch.setenv("ART_BASE_URL", server.base_url)
    monkeypatch.setenv("ART_MODEL", server.model_name)
    monkeypatch.setenv("ART_API_KEY", f" {server.api_key}\n")
    assert ChatArt().invoke("hi").content == HELLO


@pytest.mark.usefixtures("scope")
def test_a_setting_out_of_range_is_named() -> None:
    with pytest.raises(openai.BadRequestError, match="temperature is out of range: got -1"):
        ChatArt(temperature=-1).invoke("hi")
