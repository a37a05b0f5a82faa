"""Who comes to the shop: customers to learn from, to train on, to check by, and to hold out.

In: a recipe. Out: the same orders and customers each time. Every customer has an order of their
own, so that nothing of a held-out one is ever trained on. Left out: what they say (customers.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from art_langgraph.quickstart.customers import Customer, make_customers, make_orders
from art_langgraph.quickstart.recipe import Recipe
from art_langgraph.quickstart.shop import Order


@dataclass(frozen=True)
class Clientele:
    """The orders of a shop, and who asks about which."""

    orders: list[Order]
    training: list[Customer]
    checks: list[Customer]
    held_out: list[Customer]
    lessons: list[Customer]
    """Those of the labelled examples."""

    def of_step(self, step: int, groups: int) -> list[Customer]:
        """The customers of a training step: the next ones in turn."""
        return [self.training[(step * groups + i) % len(self.training)] for i in range(groups)]


def make_clientele(recipe: Recipe) -> Clientele:
    """Orders and customers of `recipe`."""
    parts = (recipe.customers, recipe.checks, recipe.held_out, recipe.lessons)
    orders = make_orders(recipe.seed, sum(parts))
    first, second, third, _ = accumulate(parts)
    return Clientele(
        orders=orders,
        training=make_customers(orders[:first], recipe.seed, "train"),
        checks=make_customers(orders[first:second], recipe.seed, "check"),
        held_out=make_customers(orders[second:third], recipe.seed, "held-out"),
        lessons=make_customers(orders[third:], recipe.seed, "lesson"),
    )
