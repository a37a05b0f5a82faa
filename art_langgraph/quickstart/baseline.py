"""What an agent earns that does the same for every customer: the floor that learning must leave.

In: customers. Out: the best fixed tool call, with a fixed answer that says every customer's fact
at once, judged by the same `judge` as the agent.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

from art_langgraph.quickstart.customers import Customer, judge, succeeded, total


@dataclass(frozen=True)
class ConstantAnswer:
    """The fixed conduct that earns most."""

    tool: str
    arguments: dict[str, str]
    reward: float
    """Mean over the customers."""
    success: float
    """Share of them who are served right."""


def constant_answer(customers: Sequence[Customer]) -> ConstantAnswer:
    """The best of: for each customer's own call, make it for everybody."""
    answer = " ".join(dict.fromkeys(customer.fact for customer in customers))
    calls = {(c.tool, json.dumps(c.arguments)): c for c in customers}
    tried = [_judged(maker, answer, customers) for maker in calls.values()]
    return max(tried, key=lambda constant: (constant.reward, constant.success))


def _judged(maker: Customer, answer: str, customers: Sequence[Customer]) -> ConstantAnswer:
    call = {"name": maker.tool, "args": dict(maker.arguments), "id": "constant"}
    done = [
        AIMessage("", tool_calls=[call]),
        ToolMessage(maker.fact, tool_call_id="constant"),
        AIMessage(answer),
    ]
    judged = [judge(c, {"messages": [HumanMessage(c.message), *done]}) for c in customers]
    return ConstantAnswer(
        tool=maker.tool,
        arguments=maker.arguments,
        reward=sum(map(total, judged)) / len(judged),
        success=sum(map(succeeded, judged)) / len(judged),
    )
