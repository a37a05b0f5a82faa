"""A small shop in SQLite, the tools over it, and the support agent that uses them.

In: a customer's message. Out: a LangGraph agent (`create_agent`, or the same by hand as a
StateGraph) that must pick the right tool, copy order numbers, names and amounts from the message
into it, and say what it returned. Nothing here knows of training.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import BaseTool, tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

SYSTEM = (
    "You answer customers of a shop. First call one tool, then tell the customer what it returned."
)


def _written(tool: str, **arguments: str) -> AIMessage:
    """A call as the model writes it."""
    call = json.dumps({"name": tool, "arguments": arguments})
    return AIMessage(f"<tool_call>\n{call}\n</tool_call>")


def _called(tool: str, **arguments: str) -> AIMessage:
    """A call as LangChain reads it."""
    return AIMessage("", tool_calls=[{"name": tool, "args": arguments, "id": "example"}])


EXAMPLES: list[AnyMessage] = [
    HumanMessage("Please refund 20.50 for order A102."),
    _called("refund", order="A102", amount="20.50"),
    ToolMessage("Refunded 20.50, reference R101.", tool_call_id="example"),
    AIMessage("Refunded 20.50, reference R101."),
    HumanMessage("I am Ann Bell. What is my customer number?"),
    _written("look_up", name="Ann Bell"),
    HumanMessage("Where is my order A101?"),
    _written("order_status", order="A101"),
]
"""Each tool at work, before the customer's message. What a small model never samples by itself
can't be rewarded; it sees no more than this of the work, the rest it finds out."""


@dataclass(frozen=True)
class Order:
    """One row of the shop."""

    number: str
    name: str
    """Of the customer."""
    customer: str
    """The customer's number."""
    status: str
    reference: str
    """What a refund of it is booked under."""


class Shop:
    """The orders, in a database of their own. Thread-safe: tools run where the graph runs them."""

    def __init__(self, orders: Sequence[Order]) -> None:
        self._db = sqlite3.connect(":memory:", check_same_thread=False)
        self._db.execute(
            "CREATE TABLE orders"
            " (number TEXT PRIMARY KEY, name TEXT, customer TEXT, status TEXT, reference TEXT)"
        )
        self._db.executemany(
            "INSERT INTO orders VALUES (?, ?, ?, ?, ?)",
            [(o.number, o.name, o.customer, o.status, o.reference) for o in orders],
        )
        self._db.commit()

    def find(self, column: str, value: str) -> Order | None:
        """The order whose `column` ("number" or "name") is `value`."""
        if column not in ("number", "name"):
            raise ValueError(f"no such column: {column!r}")
        query = f"SELECT * FROM orders WHERE {column} = ?"  # one of two names, see above
        row = self._db.execute(query, (value,)).fetchone()
        return Order(*row) if row else None

    def close(self) -> None:
        """Give the memory back."""
        self._db.close()


def shop_tools(shop: Shop) -> list[BaseTool]:
    """The three tools."""

    @tool
    def refund(order: str, amount: str) -> str:
        """Refund an amount"""
        found = shop.find("number", order)
        return f"Refunded {amount}, reference {found.reference}." if found else f"No order {order}."

    @tool
    def look_up(name: str) -> str:
        """Customer number of a person"""
        found = shop.find("name", name)
        return f"{name} is customer {found.customer}." if found else f"No customer {name}."

    @tool
    def order_status(order: str) -> str:
        """Status of an order"""
        found = shop.find("number", order)
        return f"Order {order} is {found.status}." if found else f"No order {order}."

    return [order_status, refund, look_up]


def support_agent(model: BaseChatModel, shop: Shop) -> Any:
    """The agent, as LangChain makes it."""
    return create_agent(model, shop_tools(shop), system_prompt=SYSTEM)


def support_graph(model: BaseChatModel, shop: Shop) -> Any:
    """The same agent as a graph made by hand."""
    tools = shop_tools(shop)
    bound = model.bind_tools(tools)

    async def agent(state: MessagesState) -> dict[str, Any]:
        answer = await bound.ainvoke([SystemMessage(SYSTEM), *state["messages"]])
        return {"messages": [answer]}

    graph = StateGraph(MessagesState)
    graph.add_node("agent", agent)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition)
    graph.add_edge("tools", "agent")
    return graph.compile()
