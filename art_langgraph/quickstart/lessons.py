"""Labelled examples: conversations as they should go, for the supervised step before the training.

In: a customer, the shop. Out: a conversation in OpenAI's format, the shop's answer taken from its
own tool. What stands before the customer's message is the agent's prompt and is not learned.
"""

from __future__ import annotations

import json
from typing import Any

from langchain_core.messages import convert_to_openai_messages
from langchain_core.utils.function_calling import convert_to_openai_tool

import art_core as art
from art_langgraph.quickstart.customers import Customer
from art_langgraph.quickstart.shop import EXAMPLES, SYSTEM, Shop, shop_tools


def lesson(customer: Customer, shop: Shop) -> art.Trajectory:
    """The right tool, the right arguments, and what the tool returned as the answer."""
    tools = {tool.name: tool for tool in shop_tools(shop)}
    found = tools[customer.tool].invoke(customer.arguments)
    call = {"name": customer.tool, "arguments": json.dumps(customer.arguments)}
    return art.Trajectory(
        messages_and_choices=[
            {"role": "system", "content": SYSTEM},
            *_unlearned(convert_to_openai_messages(EXAMPLES)),
            {"role": "user", "content": customer.message},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "lesson", "type": "function", "function": call}],
            },
            {"role": "tool", "content": found, "tool_call_id": "lesson"},
            {"role": "assistant", "content": found},
        ],
        tools=[convert_to_openai_tool(tool) for tool in tools.values()],
        metadata={"customer": customer.id, "tool": customer.tool},
    )


def _unlearned(messages: Any) -> list[dict[str, Any]]:
    """The messages; answers among them weigh nothing."""
    return [{**m, "weight": 0} if m["role"] == "assistant" else m for m in messages]
