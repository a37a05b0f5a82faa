"""Customers of the shop: what they write, and what a good answer does.

In: a seed. Out: scenarios for training, and held-out ones in other wordings about other orders.
The reward reads the graph's final state and nothing else, in named parts that sum to at most 1.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage

from art_langgraph.quickstart.shop import Order

TOOLS = ("order_status", "refund", "look_up")
_ARGUMENTS = {
    "order_status": ("order",),
    "refund": ("order", "amount"),
    "look_up": ("name",),
}
PARTS = {"tool": 0.2, "arguments": 0.2, "answer": 0.6}
"""The reward's parts and what each is worth."""

_FIRST = (
    "Ben", "Paul", "Anna", "Max", "Jack", "Peter", "Maria", "Victor", "Alice", "Simon", "David",
    "Tom", "Sam", "Adam", "Jane", "Mary", "Mark", "George",
)  # fmt: skip
_LAST = (
    "Stone", "Rivera", "Young", "Hill", "Lind", "Garcia", "Khan", "Walker", "Silva", "Weber",
    "Costa", "Singh", "Frost", "Dahl",
)  # fmt: skip
_STATUS = ("shipped", "delivered", "delayed", "cancelled", "packed", "lost")

_Wordings: TypeAlias = dict[str, tuple[str, ...]]
_TRAINING: _Wordings = {
    "order_status": (
        "Where is my order {order}?",
        "Can you tell me the status of order {order}?",
        "I am still waiting for order {order}, what is going on?",
        "Has order {order} been sent yet?",
        "Order number {order}. Is it on its way?",
        "How is order {order} doing?",
        "Is {order} delivered? It is an order of mine.",
        "What happened to my order {order}?",
        "Did you ship order {order}?",
        "I have not received order {order}.",
        "Any idea when order {order} gets here?",
        "Is there a delay with {order}? It is my order.",
        "Track order {order} for me, please.",
        "I bought a lamp, order {order}. Has it left the shop?",
        "My parcel is late. The order is {order}.",
        "Please keep me posted about {order}, my order.",
    ),
    "refund": (
        "Please refund {amount} for order {order}.",
        "I want {amount} back for order {order}.",
        "Order {order} arrived broken, give me {amount} back.",
        "Can I get a refund of {amount} on order {order}?",
        "{order} was damaged. Pay me back the {amount}.",
        "Give back my {amount}. The order was {order}.",
        "I paid {amount} too much on order {order}.",
        "My order {order} is incomplete, I want {amount} returned.",
        "Refund order {order}, it was {amount}.",
        "I sent order {order} back. When do I get my {amount}?",
        "The lamp of order {order} does not work, please pay me {amount}.",
        "You charged me {amount} too much. It was order {order}.",
        "I returned {order} last week and still wait for my {amount}.",
        "Order {order} never came. I ask for a refund of {amount}.",
        "Take {order} back and return the {amount}, please.",
        "About the {amount} for order {order}: I want them back.",
    ),
    "look_up": (
        "Please look up the customer number of {name}.",
        "My name is {name}, can you look up my customer number?",
        "I lost my customer number. I am {name}.",
        "Which customer number does {name} have?",
        "{name} here, what is my number?",
        "What is the customer number of {name}?",
        "I forgot my number. My name is {name}.",
        "Is there a customer named {name}?",
        "Tell me the number of {name}.",
        "I am {name} and need my customer number.",
        "Who am I in your files? The name is {name}.",
        "Please search for {name} among your customers.",
        "Can you tell me which number {name} got?",
        "Customer number of {name}, please.",
        "I signed up as {name}. What was my number?",
        "You have me as {name}. Which number is that?",
    ),
}
_CHECKS: _Wordings = {
    "order_status": (
        "Could you check on order {order} for me?",
        "It has been ten days. Where did {order} go?",
        "Please check on my order {order}.",
        "What is new with order {order}?",
        "Will order {order} be here by Friday?",
        "I would like to know how far order {order} is.",
        "My neighbour got his parcel, I did not. Mine is order {order}.",
        "Order {order}: sent or not?",
    ),
    "refund": (
        "I would like {amount} for order {order}, it came too late.",
        "Can you return {amount} to me? Order {order} was wrong.",
        "For order {order} you still owe me {amount}.",
        "Money back for order {order}, please. It cost {amount}.",
        "The cup in order {order} is cracked, so please refund {amount}.",
        "I paid {amount} for {order} and want it back.",
        "Please pay {amount} back to me, the order is {order}.",
        "Two of three books were missing in {order}, that is {amount} for me.",
    ),
    "look_up": (
        "What number am I under? {name} is my name.",
        "Can you find the customer {name}?",
        "Give me the customer number for {name}, please.",
        "Do you know {name}? I mean the customer.",
        "Hello, {name} speaking. I need my customer number.",
        "Which number did you give {name}?",
        "I can not find my customer number. My name is {name}.",
        "Is {name} in your list of customers?",
    ),
}
_HELD_OUT: _Wordings = {
    "order_status": (
        "Hello, any news about order {order}?",
        "When will {order} arrive? That is my order.",
        "I ordered last week, number {order}. Where is it?",
        "Can I know the state of my order {order}?",
        "Order {order} has not come yet.",
        "Was {order} sent out? I am waiting.",
    ),
    "refund": (
        "The item in order {order} is faulty, I would like my {amount} refunded.",
        "You owe me {amount} for order {order}.",
        "Send me back {amount}, please. It is order {order}.",
        "I claim {amount} for order {order}, the box was empty.",
        "Could you pay back {amount}? It is about {order}.",
        "I am not happy with {order}, I want my {amount} back.",
    ),
    "look_up": (
        "This is {name}. Can you find my customer number?",
        "Do you have a customer called {name}?",
        "I need the number of the customer {name}.",
        "Under which number is {name} known to you?",
        "{name} is my name, what customer number do I have?",
        "Find the number of {name} for me.",
    ),
}
WORDINGS = {"lesson": _TRAINING, "train": _TRAINING, "check": _CHECKS, "held-out": _HELD_OUT}
"""What customers write, by what they are there for; what is trained on is in no other."""


@dataclass(frozen=True)
class Customer:
    """One scenario: a message, and what must be done for it."""

    id: str
    message: str
    tool: str
    arguments: dict[str, str]
    """What the tool must be given, letter for letter."""
    fact: str
    """What the tool returns and the answer must say."""


def make_orders(seed: int, count: int) -> list[Order]:
    """Orders with numbers, names and references of their own."""
    rng = random.Random(seed)
    numbers = rng.sample(range(100, 999), count)
    names = rng.sample([f"{a} {b}" for a in _FIRST for b in _LAST], count)
    customers = rng.sample(range(100, 999), count)
    references = rng.sample(range(100, 999), count)
    return [
        Order(f"A{number}", name, f"C{customer}", rng.choice(_STATUS), f"R{reference}")
        for number, name, customer, reference in zip(
            numbers, names, customers, references, strict=True
        )
    ]


def make_customers(orders: Sequence[Order], seed: int, split: str) -> list[Customer]:
    """One customer an order, the tools in turn; no wording of a tool comes again before all have.

    Args:
        split: "lesson", "train", "check" or "held-out".
    """
    rng = random.Random(f"{seed}/{split}")
    decks: dict[str, list[str]] = {tool: [] for tool in TOOLS}
    customers = []
    for i, order in enumerate(orders):
        name = TOOLS[i % len(TOOLS)]
        if not decks[name]:
            wordings = WORDINGS[split][name]
            decks[name] = rng.sample(wordings, len(wordings))
        amount = f"{rng.randint(3, 99)}.{rng.choice(('00', '50', '25', '90'))}"
        given = {"order": order.number, "amount": amount, "name": order.name}
        fact = {"order_status": order.status, "refund": order.reference, "look_up": order.customer}
        customers.append(
            Customer(
                id=f"{split}-{i}",
                message=decks[name].pop().format(**given),
                tool=name,
                arguments={key: given[key] for key in _ARGUMENTS[name]},
                fact=fact[name],
            )
        )
    return customers


def judge(customer: Customer, state: Any) -> dict[str, float]:
    """The reward's parts, each 0 to 1, from the graph's last state (None: it reached none).

    "arguments" pays for copying the customer's words whatever the tool: a ladder from what a small
    model does by chance to what it should do. "answer" pays only for the whole job.
    """
    messages = _since_the_customer((state or {}).get("messages", []))
    calls = [call for m in messages if isinstance(m, AIMessage) for call in m.tool_calls]
    parts = dict.fromkeys(PARTS, 0.0)
    if not calls:
        return parts
    name, given = calls[0]["name"], calls[0]["args"]
    wanted = customer.arguments
    copied = sum(value in map(str, given.values()) for value in wanted.values())
    parts["tool"] = float(name == customer.tool)
    parts["arguments"] = copied / max(len(wanted), len(given))
    right = name == customer.tool and {k: str(v) for k, v in given.items()} == wanted
    last = messages[-1]
    if right and len(calls) == 1 and isinstance(last, AIMessage):
        said = re.findall(r"\w+", last.text.lower())
        parts["answer"] = float(customer.fact.lower() in said)
    return parts


def _since_the_customer(messages: Sequence[AnyMessage]) -> Sequence[AnyMessage]:
    """What came after the customer's message; the examples stand before it."""
    asked = [i for i, message in enumerate(messages) if isinstance(message, HumanMessage)]
    return messages[asked[-1] + 1 :] if asked else messages


def total(parts: dict[str, float]) -> float:
    """The reward."""
    return sum(PARTS[key] * value for key, value in parts.items())


def succeeded(parts: dict[str, float]) -> bool:
    """Right tool, right arguments, right answer."""
    return all(value == 1.0 for value in parts.values())
