"""Case 007 and its neighbours: roles that chat templates don't know, and system messages anywhere.

Either is right: rendered in the same place as a role that the template knows, or a clear error
before anything is spent. An instruction is never dropped.
"""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langgraph.graph import START, MessagesState, StateGraph

from art_core.engine.base import Tokenizer
from art_core.engine.tokenizer import ByteTokenizer
from art_core.errors import RolloutFailure
from art_langgraph import ChatArt, rollout
from tests.langgraph.proofs.evidence import histories, said
from tests.langgraph.proofs.house import House

DEVELOPER = SystemMessage("rhyme", additional_kwargs={"__openai_role__": "developer"})
CASE_007 = (
    "{% for m in messages %}{% if m.role not in ['system','user','assistant','tool'] %}"
    "{{ raise_exception('unknown role') }}{% endif %}<|s|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ {'name': c.function.name, 'arguments': "
    "c.function.arguments}|tojson }}</call>{% endfor %}<|e|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|s|>assistant\n{% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning') }}{% endif %}"
    "<|s|>{{ m.role }}\n{{ m.content }}<|e|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|s|>assistant\n{% endif %}"
)
"""As the templates of several model families are."""


def byte_tokenizer(template: str) -> Tokenizer:
    """The case's own: bytes, then <|s|> is 256 and <|e|> 257."""
    names = ["<|s|>", "<|e|>", "<|bos|>", "<think>", "</think>", "<call>", "</call>"]
    return ByteTokenizer([*names, "<res>", "</res>"], eos="<|e|>", template=template)


def asks(*messages: Any) -> Any:
    async def node(state: Any) -> Any:
        return {"messages": [await ChatArt(max_retries=0).ainvoke(list(messages))]}

    graph: Any = StateGraph(MessagesState)
    graph.add_node(node)
    graph.add_edge(START, "node")
    return graph


@pytest.mark.parametrize(
    "instruction",
    [
        DEVELOPER,
        ChatMessage(content="rhyme", role="developer"),
        {"role": "developer", "content": "rhyme"},
    ],
    ids=["system message with a role", "chat message", "dict"],
)
async def test_case_007(instruction: Any) -> None:
    """3 trainable tokens, 121 111 257, after a system turn in the same place."""
    with House(lambda _: "yo", tokenizer=byte_tokenizer(CASE_007)) as house:
        trajectory = await house.play(asks(instruction, HumanMessage("hi")))
    (call,) = trajectory.calls
    assert call.request["messages"][0]["role"] == "developer"
    assert call.prompt_ids is not None
    text = "<|s|>system\nrhyme<|e|>\n<|s|>user\nhi<|e|>\n<|s|>assistant\n"
    assert call.prompt_ids.tolist() == byte_tokenizer(CASE_007).encode(text)
    assert call.sampled_ids is not None
    assert call.sampled_ids.tolist() == [121, 111, 257]


LATE: dict[str, Any] = {
    "late system": [HumanMessage("hi"), SystemMessage("rhyme")],
    "late developer": [HumanMessage("hi"), DEVELOPER],
    "two at the start": [SystemMessage("be kind"), DEVELOPER, HumanMessage("hi")],
    "between turns": [HumanMessage("hi"), AIMessage("yo"), SystemMessage("rhyme")],
}


@pytest.mark.parametrize("kind", LATE)
async def test_an_instruction_stays_where_it_was_put(kind: str) -> None:
    messages = LATE[kind]
    with House(lambda _: "yo") as house:
        trajectory = await house.play(asks(*messages))
    kinds = {"human": "user", "ai": "assistant", "system": "system"}
    assert list(house.asked[0].turns) == [(kinds[m.type], m.content) for m in messages]
    assert histories(trajectory) == [["yo"]]


async def test_a_template_that_refuses_a_late_instruction_says_so_first() -> None:
    with House(lambda _: "yo", tokenizer=byte_tokenizer(STRICT)) as house:
        graph = asks(HumanMessage("hi"), SystemMessage("rhyme"))
        with pytest.raises(RolloutFailure, match="must be at the beginning") as failure:
            await rollout(graph, {"messages": []}, model=house.target())
    assert not house.asked
    assert [c.trainable for c in failure.value.trajectory.calls] == [False]


async def test_results_of_functions_and_tools_are_tool_turns() -> None:
    called = AIMessage("", tool_calls=[{"name": "look", "args": {"q": "x"}, "id": "c1"}])
    messages = [HumanMessage("hi"), called, ToolMessage("seen", tool_call_id="c1")]
    function = FunctionMessage(content="counted", name="count")
    with House(lambda _: "yo") as house:
        await house.play(asks(*messages, function))
    assert house.asked[0].turns[-2:] == (("tool", "seen"), ("tool", "counted"))


async def test_a_role_that_nobody_knows_is_refused_by_its_name() -> None:
    with House(lambda _: "yo") as house:
        graph = asks(HumanMessage("hi"), ChatMessage(content="so-so", role="critic"))
        with pytest.raises(RolloutFailure, match="'critic'"):
            await rollout(graph, {"messages": []}, model=house.target())
    assert not house.asked


async def test_a_developers_turn_joins_its_history_by_ids() -> None:
    """The role is another on the wire and in the prompt; the second call still goes on."""

    async def node(state: Any) -> Any:
        first = await ChatArt().ainvoke([DEVELOPER, HumanMessage("hi")])
        more = [DEVELOPER, HumanMessage("hi"), first, HumanMessage("more"), SystemMessage("stop")]
        return {"messages": [await ChatArt().ainvoke(more)]}

    graph: Any = StateGraph(MessagesState)
    graph.add_node(node)
    graph.add_edge(START, "node")
    with House(lambda talk: f"yo {talk.count('system')}") as house:
        trajectory = await house.play(graph)
    assert histories(trajectory) == [["yo 1", "yo 2"]]
    assert not house.service.drifts
    assert [said(c) for c in trajectory.calls] == ["yo 1", "yo 2"]
