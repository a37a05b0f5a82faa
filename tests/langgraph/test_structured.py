"""Tools and structured output of a `ChatArt` in every form, over real HTTP, recorded each time."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from pydantic import BaseModel, Field

from art_core.capture import Scope, Target, open_scope
from art_langgraph import ChatArt
from tests.stub_endpoint import Answer, call, completion, recording

pytestmark = pytest.mark.filterwarnings(  # ChatOpenAI's own, of a streamed answer the SDK parsed
    "ignore:Pydantic serializer warnings"
)


class Joke(BaseModel):
    """A joke."""

    setup: str = Field(description="the question")
    punchline: str


class JokeDict(TypedDict):
    """A joke."""

    setup: Annotated[str, ..., "the question"]
    punchline: str


SCHEMAS: dict[str, Any] = {
    "pydantic": Joke,
    "TypedDict": JokeDict,
    "dict": {**Joke.model_json_schema(), "title": "Joke"},
}
METHODS = ("json_schema", "function_calling", "json_mode")
RIGHT = {"setup": "Why do cats purr?", "punchline": "Nobody has found the switch."}


async def drained(items: Any) -> list[Any]:
    return [item async for item in items]


HOW: dict[str, Any] = {
    "invoke": lambda llm: llm.invoke("joke"),
    "ainvoke": lambda llm: asyncio.run(llm.ainvoke("joke")),
    "stream": lambda llm: list(llm.stream("joke"))[-1],
    "astream": lambda llm: asyncio.run(drained(llm.astream("joke")))[-1],
    "batch": lambda llm: llm.batch(["joke", "joke"])[1],
    "abatch": lambda llm: asyncio.run(llm.abatch(["joke", "joke"]))[1],
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("method", METHODS)
def test_structured_output(scope: Scope, method: Any, schema: str, how: str) -> None:
    found = HOW[how](ChatArt().with_structured_output(SCHEMAS[schema], method=method))
    assert found == (Joke(**RIGHT) if schema == "pydantic" else RIGHT)
    assert all(kept.trainable for kept in scope.calls)
    assert {kept.sampling.grammar for kept in scope.calls} == {
        "tool_call" if method == "function_calling" else "json_schema"
    }


@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
@pytest.mark.parametrize("method", METHODS)
def test_the_raw_answer_beside_it(scope: Scope, method: Any, how: str) -> None:
    llm = ChatArt().with_structured_output(Joke, method=method, include_raw=True)
    found = HOW[how](llm)
    assert (found["parsed"], found["parsing_error"]) == (Joke(**RIGHT), None)
    assert isinstance(found["raw"], AIMessage)
    assert scope.calls[0].trainable


@pytest.mark.parametrize("method", ["function_calling", "json_mode"])
def test_an_answer_that_does_not_fit_is_beside_its_error(method: Any) -> None:
    wrong = '{"setup": 1'
    body = completion(wrong, [1, 2])
    if method == "function_calling":
        body = completion(None, [1, 2], tool_calls=[call("Joke", wrong)])
    with recording([body]) as (_, kept):
        llm = ChatArt().with_structured_output(Joke, method=method, include_raw=True)
        found: Any = llm.invoke("joke")
    assert found["parsed"] is None
    assert isinstance(found["raw"], AIMessage)
    assert kept.calls[0].trainable


def test_strict_is_sent(scope: Scope) -> None:
    ChatArt().with_structured_output(Joke, method="json_schema", strict=True).invoke("joke")
    ChatArt().with_structured_output(Joke, method="function_calling", strict=True).invoke("joke")
    by_schema, by_tool = scope.calls
    assert by_schema.request["response_format"]["json_schema"]["strict"] is True
    assert by_tool.request["tools"][0]["function"]["strict"] is True


# --- tools


@tool
def magic_function(input: int) -> int:
    """Magic."""
    return input + 2


@tool
def get_weather(location: str) -> str:
    """The weather."""
    return "sunny"


TOOLS = [get_weather, magic_function]
FORCED = {"type": "function", "function": {"name": "magic_function"}}


@pytest.mark.parametrize(
    ("choice", "sent", "called"),
    [
        (None, None, []),
        ("auto", "auto", []),
        ("none", "none", []),
        ("any", "required", ["get_weather"]),
        ("required", "required", ["get_weather"]),
        (True, "required", ["get_weather"]),
        ("magic_function", FORCED, ["magic_function"]),
        (FORCED, FORCED, ["magic_function"]),
    ],
)
def test_every_form_of_tool_choice(scope: Scope, choice: Any, sent: Any, called: list[str]) -> None:
    said = ChatArt().bind_tools(TOOLS, tool_choice=choice).invoke("Hello!")
    assert [c["name"] for c in said.tool_calls] == called
    assert scope.calls[0].request.get("tool_choice") == sent
    assert scope.calls[0].trainable


def double(input: int) -> int:
    """Twice as much."""
    return 2 * input


OPENAIS = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "given",
    [
        magic_function,
        double,
        Joke,
        JokeDict,
        {"title": "Joke", "description": "A joke.", "type": "object", "properties": {}},
        OPENAIS,
        {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {}}},
    ],
    ids=["tool", "function", "pydantic", "TypedDict", "schema", "OpenAI's", "Anthropic's"],
)
def test_tools_of_every_form(given: Any) -> None:
    with recording([completion()]) as (stub, _):
        ChatArt().bind_tools([given], strict=True, parallel_tool_calls=False).invoke("hi")
    (sent,) = stub.bodies[0]["tools"]
    assert sent["type"] == "function"
    assert (
        sent["function"].get("strict") is True or given is OPENAIS
    )  # LangChain leaves it as it is
    assert stub.bodies[0]["parallel_tool_calls"] is False


def test_without_parallel_calls_there_is_one(server: Target) -> None:
    """The grammar allows several calls, or holds the answer to one."""
    with open_scope(None, {None: server}) as kept:
        ChatArt().bind_tools(TOOLS, tool_choice="any", parallel_tool_calls=False).invoke("Hello!")
    assert kept.calls[0].request["parallel_tool_calls"] is False
    assert len(kept.calls[0].message["tool_calls"]) == 1


# --- events


@pytest.mark.filterwarnings("ignore:astream_events version='v1' is deprecated")
def test_events_of_version_1_and_2(scope: Scope) -> None:
    for version in ("v1", "v2"):
        found = asyncio.run(drained(ChatArt().astream_events("hi", version=version)))
        names = [item["event"] for item in found]
        assert (names[0], names[-1]) == ("on_chat_model_start", "on_chat_model_end")
        texts = [
            item["data"]["chunk"].content
            for item in found
            if item["event"] == "on_chat_model_stream"
        ]
        assert "".join(texts) == "Hello, I am well. And you?"
    assert [kept.trainable for kept in scope.calls] == [True, True]


@pytest.mark.filterwarnings("ignore:.*beta")
def test_events_of_version_3(scope: Scope) -> None:
    llm = ChatArt()

    async def asynchronous() -> str:
        stream = await llm.astream_events("hi", version="v3")
        return str((await stream.output).text)

    assert asyncio.run(asynchronous()) == "Hello, I am well. And you?"
    assert llm.stream_events("hi", version="v3").output.text == "Hello, I am well. And you?"
    assert [kept.trainable for kept in scope.calls] == [True, True]


def test_a_refusal_to_answer_is_no_structured_output() -> None:
    body = completion(None, [1])
    body["choices"][0]["message"]["refusal"] = "I would rather not."
    with recording([Answer(body)]) as (_, kept):
        found: Any = ChatArt().with_structured_output(Joke, include_raw=True).invoke("joke")
    assert found["parsed"] is None
    assert kept.calls[0].trainable
