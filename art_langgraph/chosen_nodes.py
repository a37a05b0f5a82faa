"""Which nodes of a graph are trained.

In: names as a user writes them, and where a call came from. Out: whether the call is meant, and an
error that lists the nodes that ran where a name means none.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable
from contextlib import suppress

from langchain_core.runnables import Runnable
from langgraph.pregel import Pregel

from art_core.calls import ModelCall, Origin
from art_core.errors import ConfigError


class UnknownNodes(UserWarning):
    """Some of the chosen nodes neither ran nor are in the graph."""


def is_in(origin: Origin, names: Collection[str] | None) -> bool:
    """True if a call came from one of the nodes `names`, at any depth; None means every node.

    See `Origin.is_in` for what a name stands for.
    """
    return names is None or any(origin.is_in(name) for name in names)


def check_nodes(
    names: Collection[str] | None,
    graph: Runnable[object, object] | None,
    nodes: Iterable[str],
    calls: Iterable[ModelCall],
) -> None:
    """See that every chosen name means a node.

    Args:
        graph: that was played; None if it was not reached.
        nodes: that ran.
        calls: that were captured.

    Raises:
        ConfigError: none of the names does. (If some do, `UnknownNodes` is warned of: a graph
            that a tool runs may not have come to its turn.)
    """
    if not names:
        return
    ran = list(nodes)
    known = {*ran, *_drawn(graph)}
    made = [call.origin for call in calls]
    unknown = [
        name
        for name in names
        if name.split("/")[-1] not in known and not any(is_in(origin, [name]) for origin in made)
    ]
    if not unknown:
        return
    what = "train_nodes names nodes that neither ran nor are in the graph"
    there = ", ".join(repr(name) for name in ran) or "none"
    if len(unknown) == len(names):
        raise ConfigError(what, got=sorted(unknown), expected=f"nodes that ran: {there}")
    warnings.warn(f"{what}: {sorted(unknown)}; nodes that ran: {there}", UnknownNodes, stacklevel=3)


def _drawn(graph: Runnable[object, object] | None) -> set[str]:
    """Names of the graph's nodes, those of its subgraphs included."""
    found: set[str] = set()
    if isinstance(graph, Pregel):
        with suppress(
            Exception
        ):  # some graphs can't be drawn; their own nodes are known all the same
            for name in graph.get_graph(xray=True).nodes:
                found.update(name.split(":"))
        found.update(graph.nodes)
    return found
