"""What can be played: a graph, a recipe of one, or a text that says where one is.

In: a `GraphSource`. Out: a runnable, open as long as it is played. The conventions are LangGraph's
own: factories may take a config and may be (async) functions or context managers. It leaves out
finding what a text names (`graph_names`).
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from langchain_core.runnables import Runnable, RunnableConfig
from langgraph.graph import StateGraph

from art_core.errors import ConfigError
from art_langgraph.graph_names import named_graph

GraphSource: TypeAlias = "Runnable[Any, Any] | StateGraph[Any] | Callable[..., Any] | str"
"""A graph, a graph not yet compiled, any other runnable, or a factory of one: a function, a
coroutine function or a context manager, which may take a config. As text: "package.module:graph",
"path/to/file.py:graph", an id of the working folder's `langgraph.json`, or
"path/langgraph.json:id"."""

_PLAYABLE = "a compiled graph, a StateGraph, another runnable, or a factory of one"


@asynccontextmanager
async def open_graph(
    source: GraphSource, config: RunnableConfig | None = None
) -> AsyncIterator[Runnable[Any, Any]]:
    """The runnable that a source stands for; a factory is called anew each time.

    Args:
        source: see `GraphSource`.
        config: given to a factory that takes one.

    Raises:
        ConfigError: a text names nothing, or what was found or made is no runnable.
    """
    made: Any = named_graph(source) if isinstance(source, str) else source
    if not isinstance(made, Runnable | StateGraph) and callable(made):
        made = _call(made, config or {})
    if inspect.isawaitable(made):
        made = await made
    if hasattr(made, "__aenter__"):
        async with made as opened:
            yield _compiled(opened)
    elif hasattr(made, "__enter__"):
        with made as opened:
            yield _compiled(opened)
    else:
        yield _compiled(made)


def _compiled(graph: Any) -> Runnable[Any, Any]:
    if isinstance(graph, StateGraph):
        return graph.compile()
    if not isinstance(graph, Runnable):
        raise ConfigError("this can't be played", got=graph, expected=_PLAYABLE)
    return graph


def _call(factory: Callable[..., Any], config: RunnableConfig) -> Any:
    """What a factory makes; it is given the config if it has a place for it."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # something built in
        return factory()
    place = next((p for p in parameters if _takes_config(p)), None)
    lacking = [p.name for p in parameters if _is_required(p) and p is not place]
    if lacking:
        raise ConfigError(
            f"the factory {getattr(factory, '__name__', factory)!r} wants more than a config",
            got=", ".join(lacking),
            expected="no argument, or one: the config",
            fix="Bind the rest: functools.partial(factory, ...).",
        )
    if place is None:
        return factory()
    if place.kind is place.POSITIONAL_ONLY:
        return factory(config)
    return factory(**{place.name: config})


def _takes_config(parameter: inspect.Parameter) -> bool:
    """True for a parameter of that name or type, and for the one that must be given."""
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return False
    is_config = parameter.name == "config" or "RunnableConfig" in str(parameter.annotation)
    return is_config or (_is_required(parameter) and parameter.annotation in _UNTYPED)


def _is_required(parameter: inspect.Parameter) -> bool:
    is_one = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return is_one and parameter.default is parameter.empty


_UNTYPED = (inspect.Parameter.empty, dict, "dict", Any, "Any")
