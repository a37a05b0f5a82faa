"""How a `ChatArt` is copied, stored, configured and wrapped: always a model that works."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.load import dumpd, dumps, loads
from langchain_core.runnables import ConfigurableField
from langchain_openai import ChatOpenAI

from art_langgraph import ChatArt
from tests.stub_endpoint import completion, recording, refusal

pytestmark = pytest.mark.filterwarnings("ignore:The function `loads` is in beta")


class Planner(ChatArt):
    """A user's own class."""


def stored(llm: ChatArt) -> Any:
    allowed = [ChatArt, Planner, ChatOpenAI]
    return loads(dumps(llm), valid_namespaces=["art_langgraph", "tests"], allowed_objects=allowed)


COPIES: dict[str, Callable[[ChatArt], Any]] = {
    "pickle": lambda llm: pickle.loads(pickle.dumps(llm)),  # noqa: S301  # our own bytes
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "model_copy": lambda llm: llm.model_copy(),
    "dumps and loads": stored,
}
SETTINGS: dict[str, Any] = {
    "role": "planner",
    "temperature": 0.3,
    "max_tokens": 9,
    "stream_usage": False,
    "tags": ["t"],
    "metadata": {"team": {"size": 3}},
    "stop": ["x"],
}
NOT_STORED = {"tags", "metadata"}
"""LangChain serialises no model's."""


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("kind", [ChatArt, Planner])
def test_a_copy_has_the_settings_and_works(kind: type[ChatArt], how: str) -> None:
    llm = kind(**SETTINGS)
    other = COPIES[how](llm)
    assert type(other) is kind
    kept = SETTINGS.keys() - (NOT_STORED if how == "dumps and loads" else set())
    assert {k: getattr(other, k) for k in kept} == {k: getattr(llm, k) for k in kept}
    with recording([completion("yo", [5])]) as (stub, scope):
        assert other.invoke("hi").content == "yo"
    assert (stub.bodies[0]["temperature"], stub.bodies[0]["stop"]) == (0.3, ["x"])
    assert scope.calls[0].origin.role == "planner"
    assert scope.calls[0].trainable


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "copy", "model_copy"])
def test_a_given_profile_is_copied(how: str) -> None:
    llm = ChatArt(profile={"max_input_tokens": 512})
    assert COPIES[how](llm).profile == {"max_input_tokens": 512}


def test_a_serialised_model_is_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under its own id, with its stand-in, whose key stays a secret of the environment."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-hosted")
    llm = ChatArt(role="planner", otherwise=ChatOpenAI(model="gpt-4o"))
    shown = dumps(llm)
    assert dumpd(llm)["id"] == ["art_langgraph", "chat_model", "ChatArt"]
    assert "sk-hosted" not in shown
    assert "art.invalid" not in shown
    again = loads(
        shown,
        valid_namespaces=["art_langgraph"],
        allowed_objects=[ChatArt, ChatOpenAI],
        secrets_map={"OPENAI_API_KEY": "sk-other"},
    )
    assert (again.role, again.otherwise.model_name) == ("planner", "gpt-4o")
    assert dumps(again) == shown


def test_a_deep_copy_shares_no_container() -> None:
    llm = ChatArt(metadata={"a": [1]}, otherwise=GenericFakeChatModel(messages=iter(["x"])))
    other = copy.deepcopy(llm)
    assert other.metadata is not None
    assert llm.metadata is not None
    other.metadata["a"].append(2)
    assert llm.metadata["a"] == [1]
    assert other.otherwise is llm.otherwise


def test_a_copy_with_another_setting_uses_it_with_a_cache_around() -> None:
    """The cache is off in a rollout, which must not bring back the settings copied from."""
    set_llm_cache(InMemoryCache())
    try:
        with recording([completion()] * 2) as (stub, _):
            llm = ChatArt(temperature=0.2)
            llm.invoke("hi")
            llm.model_copy(update={"temperature": 0.7}).invoke("hi")
    finally:
        set_llm_cache(None)
    assert [body["temperature"] for body in stub.bodies] == [0.2, 0.7]


def test_its_name_in_traces_is_its_own() -> None:
    assert ChatArt()._llm_type == "art-chat"
    with recording([], model_name="agent-001@3"):
        params = ChatArt()._get_ls_params()
    assert (params["ls_provider"], params["ls_model_name"]) == ("art", "agent-001@3")
    assert ChatArt()._get_ls_params()["ls_model_name"] == "art"


# --- wrappers


def test_fields_are_configurable() -> None:
    llm = ChatArt(role="planner").configurable_fields(
        temperature=ConfigurableField(id="t"), max_tokens=ConfigurableField(id="most")
    )
    with recording([completion()] * 2) as (stub, scope):
        llm.with_config(configurable={"t": 0.25}).invoke("hi")
        llm.invoke("hi", config={"configurable": {"t": 0.5, "most": 7}})
    assert [body["temperature"] for body in stub.bodies] == [0.25, 0.5]
    assert stub.bodies[1]["max_completion_tokens"] == 7
    assert [call.origin.role for call in scope.calls] == ["planner"] * 2
    assert all(call.trainable for call in scope.calls)


def test_alternatives_are_configurable() -> None:
    llm = ChatArt().configurable_alternatives(
        ConfigurableField(id="llm"),
        default_key="art",
        other=GenericFakeChatModel(messages=iter(["other"])),
    )
    with recording([completion("ours")]) as (_, scope):
        assert llm.invoke("hi").content == "ours"
        assert llm.with_config(configurable={"llm": "other"}).invoke("hi").content == "other"
    assert len(scope.calls) == 1


def test_bound_settings_and_config_reach_the_call() -> None:
    llm = ChatArt().bind(temperature=0.5, stop=["."]).with_config(tags=["t"], run_name="asks")
    with recording([completion()]) as (stub, scope):
        llm.invoke("hi")
    assert (stub.bodies[0]["temperature"], stub.bodies[0]["stop"]) == (0.5, ["."])
    assert scope.calls[0].trainable


def test_with_retry_every_try_is_a_call() -> None:
    llm = ChatArt(max_retries=0).with_retry(stop_after_attempt=2, wait_exponential_jitter=False)
    with recording([refusal(500), completion("second")]) as (_, scope):
        assert llm.invoke("hi").content == "second"
    assert [call.trainable for call in scope.calls] == [False, True]
    assert scope.calls[0].error == "HTTP 500: no"


def test_with_fallbacks_the_next_model_answers() -> None:
    spare = ChatArt(role="spare")
    llm = ChatArt(max_retries=0).with_fallbacks([spare])
    with recording([refusal(500), completion("spare")]) as (_, scope):
        assert llm.invoke("hi").content == "spare"
    assert [(call.origin.role, call.trainable) for call in scope.calls] == [
        (None, False),
        ("spare", True),
    ]
