"""How a chat model finds the model behind it, call by call, and who is asking.

In: a role, and the metadata of the call's LangChain run. Out: a `Route`. The order: the rollout's
scope, the rollout named in the config's metadata, the environment. It never ends at a hosted
provider by itself. It leaves out sending (`art_core.transport`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from langchain_core.runnables.config import ensure_config
from langgraph.runtime import get_runtime

from art_core.calls import Origin
from art_core.capture import Scope, Target, current_scope, open_scopes, scope_by_id
from art_core.config import environment
from art_core.errors import CaptureError, ConfigError
from art_core.route import Route

ROLLOUT_KEY = "art_rollout"
"""Key of the rollout's id in `config["metadata"]`: the carrier where a ContextVar is lost."""

NAME = "art"
"""Stands in for the name of a ChatArt's model: ChatOpenAI changes its ways for names it knows."""
_OURS = frozenset((NAME,))
_NO_KEY = "none"


@dataclass(frozen=True)
class Here:
    """Whom a call made here would ask."""

    target: Target
    scope: Scope | None
    """The rollout it would be recorded in; None outside one."""


def find_route(
    role: str | None, metadata: Mapping[str, Any], run_id: object | None = None
) -> Route | None:
    """Where a call goes; None if nothing says so.

    Args:
        role: `ChatArt(role=...)`.
        metadata: of the LangChain run that makes the call.
        run_id: of that run.

    Raises:
        ConfigError: the rollout has models, but none for this role; or the environment names an
            endpoint without a model, or a model without an endpoint.
    """
    here = find_here(role, metadata)
    if here is None:
        return None
    names = None if here.target.trains else _OURS
    return Route(here.target, here.scope, origin_of(role, metadata, run_id), names)


def find_here(role: str | None, metadata: Mapping[str, Any]) -> Here | None:
    """Whom a call would ask; None if nothing says so. Arguments and errors as `find_route`."""
    scope = current_scope()
    named = metadata.get(ROLLOUT_KEY)
    scopes = (scope, scope_by_id(named) if isinstance(named, str) else None)
    for found in scopes:
        if found is not None and found.targets:
            return Here(_target_of(found, role), found)
    target = environment_target()
    return None if target is None else Here(target, next(filter(None, scopes), None))


def environment_target(model_name: str | None = None) -> Target | None:
    """What ART_BASE_URL, ART_MODEL and ART_API_KEY say now; None if they say nothing.

    Args:
        model_name: asked for in place of ART_MODEL.

    Raises:
        ConfigError: one of ART_BASE_URL and ART_MODEL is missing, or what is there can't be used.
    """
    env = environment()
    name = model_name or env.model
    if env.base_url is None and env.model is None:
        return None
    if env.base_url is None or name is None:
        missing = "ART_BASE_URL" if env.base_url is None else "ART_MODEL"
        raise ConfigError(
            f"{missing} is not set, though the other of ART_BASE_URL and ART_MODEL is",
            expected="both",
            fix="ART_BASE_URL is an OpenAI-compatible endpoint such as http://127.0.0.1:7999/v1, "
            "ART_MODEL a name it serves, such as agent-001@12.",
        )
    if not env.base_url.startswith(("http://", "https://")):
        raise ConfigError(
            "ART_BASE_URL is no address",
            got=env.base_url,
            expected="http:// or https:// in front",
            fix="For a server on this machine: http://127.0.0.1:7999/v1.",
        )
    key = (env.api_key or _NO_KEY).strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            "ART_API_KEY can't be sent in a header",
            got="(hidden)",
            expected="printable ASCII",
            fix="See how it came into the environment.",
        )
    return Target(env.base_url.strip(), key, name)


def lost_call(role: str | None, metadata: Mapping[str, Any]) -> CaptureError:
    """The error for a call that finds no model."""
    what = "ChatArt has no model to call here"
    if role is not None:
        what += f" for role {role!r}"
    named = metadata.get(ROLLOUT_KEY)
    if isinstance(named, str) and scope_by_id(named) is None:
        what += f"; its rollout {named!r} has ended"
        fix = "A thread goes on when its rollout is over, by a time limit say: nobody waits for it."
    elif open_scopes():
        fix = (
            "A thread that LangGraph did not start has lost the rollout: start it with "
            "langchain_core.runnables.config.ContextThreadPoolExecutor, or give the call the "
            "node's config: llm.invoke(messages, config=config)."
        )
    else:
        fix = (
            "Run the graph with `await art_langgraph.rollout(graph, input, model=model)`, or set "
            "ART_BASE_URL and ART_MODEL, or name a stand-in: ChatArt(otherwise=...)."
        )
    return CaptureError(what, fix=fix)


def note_stray_call(metadata: Mapping[str, Any]) -> None:
    """Mark every rollout open in this process: one of them has lost a call.

    Not if the call names its rollout: that one has ended or has no model, the others lost nothing.
    """
    for scope in () if ROLLOUT_KEY in metadata else open_scopes():
        scope.note("a ChatArt call in this process had lost its rollout; it may have been this one")


def origin_of(role: str | None, metadata: Mapping[str, Any], run_id: object | None) -> Origin:
    """Who asks, as LangGraph wrote it into the run's metadata.

    A node that gives the call metadata of its own replaces LangGraph's; the node's is still around.
    """
    if "langgraph_node" not in metadata:
        metadata = ensure_config()["metadata"]
    node = metadata.get("langgraph_node")
    path = metadata.get("langgraph_path")
    return Origin(
        node=node,
        namespace=metadata.get("langgraph_checkpoint_ns"),
        task_path=None if path is None else _path(path),
        graph_step=metadata.get("langgraph_step"),
        attempt=None if node is None else _attempt(),
        role=role,
        run_id=None if run_id is None else str(run_id),
    )


def _target_of(scope: Scope, role: str | None) -> Target:
    target = scope.target(role)
    if target is None:
        roles = ", ".join(sorted(repr(name) for name in scope.targets))
        raise ConfigError(
            "the rollout has no model for a ChatArt of this role",
            got=role,
            expected=f"one of {roles}",
            fix="Give it one: rollout(..., models={...}), or model= for every other role.",
        )
    return target


def _path(path: Any) -> str:
    """A task path such as ("__pregel_push", ("__pregel_pull", "plan"), 1) as one line."""
    if isinstance(path, tuple | list):
        return "/".join(_path(part) for part in path)
    return str(path)


def _attempt() -> int | None:
    """Which try of the node this is; None where the runtime is out of reach (a bare thread)."""
    try:
        runtime = get_runtime()
    except (RuntimeError, KeyError):
        return None
    info = getattr(runtime, "execution_info", None)
    return None if info is None else int(info.node_attempt)
