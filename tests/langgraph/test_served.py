"""What a `ChatArt` knows of the model behind it: profile, token ids and counts, all asked late."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage, trim_messages
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from art_core.capture import open_scope
from art_core.errors import ConfigError
from art_langgraph import ChatArt
from tests.stub_endpoint import Answer, Asked, endpoint, refusal


class Ans(BaseModel):
    x: int


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


# --- profile


@pytest.mark.usefixtures("scope")
def test_our_endpoint_says_what_its_model_can_do() -> None:
    """The scripted engine's context is 32768; it calls tools, obeys schemas, and reads text."""
    profile = ChatArt().profile
    assert profile is not None
    assert profile["name"] == "agent@3"
    assert profile["max_input_tokens"] == 32768
    assert profile["tool_calling"] is True
    assert profile["tool_choice"] is True
    assert profile["structured_output"] is True
    assert profile["image_inputs"] is False


def test_it_is_asked_for_at_use_and_not_when_built(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = ChatArt()
    assert llm.profile is None
    with endpoint(vllm) as stub:
        monkeypatch.setenv("ART_BASE_URL", stub.base_url)
        monkeypatch.setenv("ART_MODEL", "agent-001")
        ChatArt(), create_agent(llm, [add])
        assert stub.requests == []
        assert llm.profile is not None
        assert llm.profile["max_input_tokens"] == 4096
    assert [asked.path for asked in stub.requests] == ["/v1/models"]


def vllm(asked: Asked) -> Answer:
    """As vLLM 0.32 lists a base model and an adapter, which has no length of its own."""
    if asked.path != "/v1/models":
        return refusal(404)
    shape = {"object": "model", "owned_by": "vllm"}
    base = {"id": "base", "max_model_len": 4096, "parent": None, **shape}
    lora = {"id": "agent-001", "max_model_len": None, "parent": "base", **shape}
    return Answer({"object": "list", "data": [base, lora]})


def test_of_vllm_is_known_what_each_of_them_can_do() -> None:
    """It says how long the context is, and nothing of tools. `create_agent(response_format=...)`
    asks it for JSON by the same key as it asks our own endpoint."""
    with endpoint(vllm) as stub, open_scope(None, {None: stub.target(model_name="agent-001")}):
        assert ChatArt().profile == {
            "name": "agent-001",
            "max_input_tokens": 4096,
            "structured_output": True,
        }


def test_what_a_server_does_not_say_is_not_promised() -> None:
    card = {"id": "agent@3", "max_model_len": 4096, "owned_by": "someone"}
    with endpoint([Answer({"data": [card]})]) as stub, open_scope(None, {None: stub.target()}):
        assert ChatArt().profile == {"name": "agent@3", "max_input_tokens": 4096}


@pytest.mark.parametrize(
    "answer",
    [
        refusal(404),
        refusal(401),
        Answer({"data": []}),
        Answer({"data": [{"id": "agent@3"}]}),
        Answer({"data": None}),
        Answer([]),
        Answer(b"<html>"),
    ],
)
def test_without_a_word_there_is_no_profile(answer: Answer) -> None:
    with endpoint(lambda _: answer) as stub, open_scope(None, {None: stub.target()}):
        assert ChatArt().profile is None


def test_unknown_keys_of_a_newer_server_are_left_out() -> None:
    """LangChain warns of a profile with keys that it does not know."""
    told = {"tool_calling": True, "reads_minds": True}
    card = {"id": "agent@3", "max_model_len": 10, "art_profile": told}
    with endpoint([Answer({"data": [card]})]) as stub, open_scope(None, {None: stub.target()}):
        profile = ChatArt().profile
    assert profile == {"name": "agent@3", "tool_calling": True, "max_input_tokens": 10}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ChatArt(profile=profile)


def test_a_profile_that_was_given_stays() -> None:
    assert ChatArt(profile={"max_input_tokens": 5}).profile == {"max_input_tokens": 5}


def test_the_stand_in_answers_for_itself_if_it_is_openais() -> None:
    """Another provider's may promise what can't be asked of it through a ChatOpenAI."""
    theirs: Any = {"structured_output": True, "max_input_tokens": 7}
    openai = ChatOpenAI(model="gpt-4o", api_key="k", profile=theirs)
    other = GenericFakeChatModel(messages=iter([]), profile=theirs)
    assert ChatArt(otherwise=openai).profile == theirs
    assert ChatArt(otherwise=other).profile is None


def test_half_an_environment_does_not_keep_a_graph_from_being_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ART_MODEL", "agent")
    assert ChatArt().profile is None


# --- counts


def conversation() -> list[Any]:
    call = {"name": "add", "args": {"a": 1, "b": 2}, "id": "c1", "type": "tool_call"}
    return [
        ("system", "You add."),
        ("user", "What is 1 + 2? 你好"),
        AIMessage("", tool_calls=[call]),
        ToolMessage("3", tool_call_id="c1"),
    ]


@pytest.mark.usefixtures("scope")
def test_counts_are_those_of_the_call() -> None:
    """What the server then says it has read, with tools and without."""
    llm = ChatArt()
    for tools in ([], [add]):
        counted = llm.get_num_tokens_from_messages(conversation(), tools=tools)
        said = (llm.bind_tools(tools) if tools else llm).invoke(conversation())
        assert said.usage_metadata is not None
        assert counted == said.usage_metadata["input_tokens"]


@pytest.mark.usefixtures("scope")
def test_in_a_rollout_its_own_words_count_as_they_were_sampled() -> None:
    llm = ChatArt()
    said = llm.invoke("hello")
    history = [HumanMessage("hello"), said, HumanMessage("again")]
    counted = llm.get_num_tokens_from_messages(history)
    after = llm.invoke(history)
    assert after.usage_metadata is not None
    assert counted == after.usage_metadata["input_tokens"]


@pytest.mark.usefixtures("scope")
def test_ids_are_those_of_the_served_tokenizer() -> None:
    """Bytes of UTF-8: "h", then the two of "é"."""
    assert ChatArt().get_token_ids("hé") == [104, 195, 169]
    assert ChatArt().get_num_tokens("hé") == 3
    assert ChatArt().get_token_ids("") == []


@pytest.mark.usefixtures("scope")
def test_messages_are_trimmed_by_the_servers_count() -> None:
    """Each turn below is 35 tokens of the template, 8 open the answer: two fit into 100."""
    turns = [HumanMessage("x" * 10), AIMessage("y" * 5), HumanMessage("z" * 10)]
    llm = ChatArt()
    sizes = [llm.get_num_tokens_from_messages(turns[place:]) for place in range(3)]
    kept = trim_messages(turns, max_tokens=sizes[1], token_counter=llm, strategy="last")
    assert kept == turns[1:]


def test_plain_vllm_is_asked_in_its_own_shape() -> None:
    def rule(asked: Asked) -> Answer:
        assert asked.path == "/tokenize"
        assert asked.headers["authorization"] == "Bearer key"
        return Answer({"count": 3, "max_model_len": 9, "tokens": [1, 2, 3], "token_strs": None})

    with endpoint(rule) as stub, open_scope(None, {None: stub.target()}):
        assert ChatArt().get_token_ids("abc") == [1, 2, 3]
        assert ChatArt().get_num_tokens_from_messages([HumanMessage("hi")], tools=[add]) == 3
    text, chat = stub.bodies
    assert text == {"model": "agent@3", "prompt": "abc", "add_special_tokens": False}
    assert chat["messages"] == [{"role": "user", "content": "hi"}]
    assert chat["tools"][0]["function"]["name"] == "add"


@pytest.mark.parametrize("answer", [refusal(404), refusal(400), refusal(500), Answer(b"no")])
def test_where_nobody_counts_it_is_estimated(answer: Answer) -> None:
    """A quarter of the characters; three more a message, and its role's."""
    with endpoint(lambda _: answer) as stub, open_scope(None, {None: stub.target()}):
        check_estimates()


def test_where_nobody_listens_it_is_estimated_too(monkeypatch: pytest.MonkeyPatch) -> None:
    check_estimates()
    monkeypatch.setenv("ART_BASE_URL", "http://127.0.0.1:1/v1")
    monkeypatch.setenv("ART_MODEL", "agent")
    check_estimates()


def check_estimates() -> None:
    llm = ChatArt()
    assert llm.get_num_tokens("x" * 400) in range(100, 104)
    assert llm.get_num_tokens_from_messages([AIMessage("x" * 400)]) in range(100, 110)
    assert llm.get_num_tokens_from_messages([AIMessage("")], tools=[add]) > 10
    assert llm.get_num_tokens_from_messages([]) == 0
    with pytest.raises(ConfigError, match=r"/tokenize.*custom_get_token_ids"):
        llm.get_token_ids("x")


def test_a_server_without_the_route_is_not_asked_again_and_again() -> None:
    with endpoint(lambda _: refusal(404)) as stub, open_scope(None, {None: stub.target()}):
        for _ in range(5):
            ChatArt().get_num_tokens("x")
    assert len(stub.requests) == 1


def test_a_server_that_tells_no_length_is_not_asked_again_and_again() -> None:
    """An agent looks at the profile before each of its calls, and waits for the answer."""
    listed = {"data": [{"id": "agent@3"}]}
    with endpoint(lambda _: Answer(listed)) as stub, open_scope(None, {None: stub.target()}):
        assert [ChatArt().profile for _ in range(5)] == [None] * 5
    assert len(stub.requests) == 1


def test_a_hosted_provider_is_not_asked_at_all() -> None:
    target = {"token_data": False}
    with endpoint([]) as stub, open_scope(None, {None: stub.target(**target)}):
        assert ChatArt().get_num_tokens("x" * 400) in range(100, 104)
        assert ChatArt().profile is None
    assert stub.requests == []


def test_ones_own_tokenizer_wins() -> None:
    llm = ChatArt(custom_get_token_ids=lambda text: [len(text)])
    assert llm.get_token_ids("xx") == [2]
    assert llm.get_num_tokens("xx") == 1
