"""Small agents as users write them: some right, and each of the others with one fault."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal, TypedDict

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import CachePolicy, interrupt
from pydantic import BaseModel, SecretStr

from art_langgraph import ChatArt

ORDERS = {"10437": "on its way", "10438": "delivered"}


def order_status(order: str) -> str:
    """Where an order is."""
    return ORDERS.get(order, "unknown order")


def refund(order: str, amount: Annotated[float, "Euros"], reason: str = "") -> str:
    """Refund an order."""
    return f"refunded {amount} for {order}"


def agent(**settings: Any) -> Any:
    """LangChain's agent with two tools."""
    return create_agent(ChatArt(**settings), [order_status, refund], checkpointer=InMemorySaver())


def one_node(node: Any, name: str = "think", **compiled: Any) -> Any:
    """A graph of one node over messages."""
    graph = StateGraph(MessagesState)
    graph.add_node(name, node)
    graph.add_edge(START, name)
    graph.add_edge(name, END)
    return graph.compile(**compiled)


def said(llm: Any) -> Any:
    """A node that appends what the model says."""

    def node(state: MessagesState) -> dict[str, Any]:
        return {"messages": [llm.invoke(state["messages"])]}

    return node


def tool_graph(**settings: Any) -> Any:
    """The agent by hand: a StateGraph with a ToolNode, asked by a sync node."""
    graph = StateGraph(MessagesState)
    graph.add_node("think", said(ChatArt(**settings).bind_tools([order_status, refund])))
    graph.add_node("tools", ToolNode([order_status, refund]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    return graph.compile()


class Route(BaseModel):
    """Who goes next."""

    next: Literal["billing", "shipping", "FINISH"]


class Desk(TypedDict):
    """Not a MessagesState: a question, and where it goes."""

    question: str
    next: str
    answers: Annotated[list[str], lambda a, b: [*a, *b]]


def router(method: Literal["json_schema", "function_calling"] = "json_schema") -> Any:
    """A supervisor by structured output, and two workers that report back."""
    boss = ChatArt(role="boss").with_structured_output(Route, method=method)
    worker = ChatArt(role="worker")

    async def decide(state: Desk) -> dict[str, Any]:
        route = await boss.ainvoke([HumanMessage(f"Who: {state['question']}")])
        return {"next": route.next}  # type: ignore[union-attr]  # it is a Route

    async def work(state: Desk) -> dict[str, Any]:
        text = await worker.ainvoke([SystemMessage(state["next"]), HumanMessage(state["question"])])
        return {"answers": [str(text.text)]}

    graph = StateGraph(Desk)
    graph.add_node("boss", decide)
    for name in ("billing", "shipping"):
        graph.add_node(name, work)
        graph.add_edge(name, "boss")
    graph.add_edge(START, "boss")
    graph.add_conditional_edges(
        "boss",
        lambda state: state["next"],
        {"billing": "billing", "shipping": "shipping", "FINISH": END},
    )
    return graph.compile()


def foreign(url: str) -> Any:
    """A node that asks a stock model at `url`."""
    key = SecretStr("sk-none")
    return one_node(said(ChatOpenAI(model="gpt-4o", api_key=key, base_url=url, max_retries=0)))


def in_bare_thread(llm: Any = None) -> Any:
    """The call is made in a thread that LangGraph did not start."""
    llm = llm or ChatArt()

    def node(state: MessagesState) -> dict[str, Any]:
        with ThreadPoolExecutor(1) as pool:
            return {"messages": [pool.submit(llm.invoke, state["messages"]).result()]}

    return one_node(node)


def with_memory() -> Any:
    """What was said is kept in a list outside, and shown to whoever comes next."""
    llm = ChatArt()
    memory: list[str] = []

    def node(state: MessagesState) -> dict[str, Any]:
        told = SystemMessage("Known: " + " ".join(memory))
        answer = llm.invoke([told, *state["messages"]])
        memory.append(str(answer.text))
        return {"messages": [answer]}

    return one_node(node)


def with_clock() -> Any:
    """The prompt tells the time."""
    llm = ChatArt()

    def node(state: MessagesState) -> dict[str, Any]:
        now = SystemMessage(f"It is {time.time_ns()}.")
        return {"messages": [llm.invoke([now, *state["messages"]])]}

    return one_node(node)


def asking() -> Any:
    """A human must agree."""
    llm = ChatArt()

    def node(state: MessagesState) -> dict[str, Any]:
        answer = llm.invoke(state["messages"])
        interrupt("May I send this?")
        return {"messages": [answer]}

    return one_node(node, checkpointer=InMemorySaver())


def parsing() -> Any:
    """Takes the answer for JSON."""
    llm = ChatArt()

    def node(state: MessagesState) -> dict[str, Any]:
        answer = llm.invoke(state["messages"])
        json.loads(str(answer.text))
        return {"messages": [answer]}

    return one_node(node)


def failing_first() -> Any:
    """Raises before any model is asked."""

    def node(state: MessagesState) -> dict[str, Any]:
        raise KeyError("DATABASE")

    return one_node(node)


def failing_tool() -> Any:
    """A tool that raises for what it does not know."""

    def look_up(order: str) -> str:
        """Look an order up."""
        raise LookupError(f"no order {order}")

    return create_agent(ChatArt(), [look_up])


def leaving_streams() -> Any:
    """Reads one chunk and goes on."""
    llm = ChatArt()

    async def node(state: MessagesState) -> dict[str, Any]:
        stream = llm.astream(state["messages"])
        first = await anext(aiter(stream))
        await stream.aclose()  # type: ignore[attr-defined]  # it is a generator
        return {"messages": [first]}

    return one_node(node)


def reading_streams() -> Any:
    """Reads to the end."""
    llm = ChatArt()

    async def node(state: MessagesState) -> dict[str, Any]:
        chunks = [chunk async for chunk in llm.astream(state["messages"])]
        whole = chunks[0]
        for chunk in chunks[1:]:
            whole = whole + chunk
        return {"messages": [whole]}

    return one_node(node)


def cached() -> Any:
    """LangGraph keeps the node's result."""
    from langgraph.cache.memory import InMemoryCache

    graph = StateGraph(MessagesState)
    graph.add_node("think", said(ChatArt()), cache_policy=CachePolicy())
    graph.add_edge(START, "think")
    return graph.compile(cache=InMemoryCache())


def slow() -> Any:
    """Waits for something that does not come."""
    import asyncio

    async def node(state: MessagesState) -> dict[str, Any]:
        await asyncio.sleep(60)
        return {}

    return one_node(node, "wait")


def looping() -> Any:
    """Goes on whatever the policy says."""
    llm = ChatArt()
    graph = StateGraph(MessagesState)
    graph.add_node("think", said(llm))
    graph.add_edge(START, "think")
    graph.add_edge("think", "think")
    return graph.compile()


def rewriting() -> Any:
    """Asks twice; what the policy said first is changed in the second prompt."""
    llm = ChatArt()

    def node(state: MessagesState) -> dict[str, Any]:
        first = llm.invoke(state["messages"])
        second = llm.invoke([*state["messages"], first, HumanMessage("Sure?")])
        return {"messages": [first, HumanMessage("Sure?"), second]}

    return one_node(node)


def silent() -> Any:
    """Asks nobody."""
    return one_node(lambda state: {"messages": ["Hi yourself"]})


def cached_lookup() -> Any:
    """LangGraph keeps what a look-up found; the model is asked each time."""
    from langgraph.cache.memory import InMemoryCache

    graph = StateGraph(MessagesState)
    graph.add_node("look", lambda state: {"messages": ["It is known."]}, cache_policy=CachePolicy())
    graph.add_node("think", said(ChatArt()))
    graph.add_edge(START, "look")
    graph.add_edge("look", "think")
    return graph.compile(cache=InMemoryCache())


def failing_either_way() -> Any:
    """Raises for an answer that calls a tool, and for one that does not."""
    llm = ChatArt().bind_tools([order_status])

    def node(state: MessagesState) -> dict[str, Any]:
        if getattr(llm.invoke(state["messages"]), "tool_calls", None):
            raise KeyError("tools")
        raise LookupError("no tools")

    return one_node(node)
