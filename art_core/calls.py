"""`ModelCall`: one LLM call of a run, token for token, as it really happened.

In: the request as sent, the wire response as received, and the server's token record.
Out: an immutable record that can be printed, saved and read back. Identity is
(record id, choice index), never content. What it leaves out: any re-rendering of text to ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from art_core.errors import CaptureError

Ids = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]
Cause: TypeAlias = Literal[
    "not answered",
    "broken answer",
    "mismatch",
    "no ids",
    "no prompt ids",
    "no logprobs",
    "nothing sampled",
    "empty prompt",
    "bad ids",
    "bad logprobs",
    "no server record",
    "orphan",
    "cache replay",
    "several answers",
    "other model",
    "outside the chosen nodes",
    "choice not kept",
]
"""Why a call is not trained. "not answered": the endpoint refused, or was not reached. "broken
answer": it broke off, or its caller left. "mismatch": its parts contradict each other. "no ids": it
has no sampled ids; text is never encoded to get them. "no prompt ids": the backend renders them.
"bad ids": one is negative. "bad logprobs": one is NaN, infinite, above 0, or a stand-in such as
-9999. "no server record": the client saw it, but the server kept nothing under its id. "orphan":
the server answered it, but no client saw that. "several answers": it is a sibling (n > 1) that
never reached the graph.
"""
_LOWEST, _HIGHEST = -1000.0, 1e-3
"""Nats that a sampled token's logprob can have. Rounding may lift a certain token above 0; OpenAI's
and vLLM's -9999 stands for "not known"."""


@dataclass(frozen=True)
class Sampling:
    """The settings that really shaped the distribution a call was sampled from."""

    temperature: float = 1.0
    """Logits are divided by it; 0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means off."""
    min_p: float = 0.0
    min_tokens: int = 0
    max_tokens: int | None = None
    """Upper bound of sampled tokens; None means up to the context's end."""
    stop: tuple[str, ...] = ()
    seed: int | None = None
    """Key of the sampling noise; None until the engine has chosen one."""
    grammar: str | None = None
    """Name of the grammar kind that masked tokens ("json_schema", "tool_call"), None if free."""
    presence_penalty: float = 0.0
    """Off the logit of each token that was sampled before."""
    frequency_penalty: float = 0.0
    """Off it for each time that it was."""
    repetition_penalty: float = 1.0
    """The logit of each token of prompt and sample is divided by it, or multiplied if below 0."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""

    @property
    def distorted(self) -> bool:
        """True if the distribution was not softmax(logits / temperature).

        The old logprobs of such a call are recomputed by the trainer.
        """
        return (
            self.grammar is not None
            or self.adjusted
            or self.top_p < 1.0
            or self.top_k > 0
            or self.min_p > 0.0
            or self.min_tokens > 0
            or self.temperature == 0.0
        )

    @property
    def adjusted(self) -> bool:
        """True if logits were changed by penalties or a bias."""
        off = (0.0, 0.0, 1.0, ())
        return off != (
            self.presence_penalty,
            self.frequency_penalty,
            self.repetition_penalty,
            self.logit_bias,
        )

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Sampling:
        """As `dataclasses.asdict` made it, and JSON may have changed it; unknown names are left."""
        known = {name: value for name, value in told.items() if name in _SETTINGS}
        stop, bias = known.get("stop"), known.get("logit_bias")
        known["stop"] = tuple(stop) if isinstance(stop, list | tuple) else ()
        pairs = bias if isinstance(bias, list | tuple) else ()
        known["logit_bias"] = tuple((int(token), float(value)) for token, value in pairs)
        return cls(**known)


_SETTINGS = frozenset(setting.name for setting in fields(Sampling))


@dataclass(frozen=True)
class Origin:
    """Who asked: the place in the graph that a call came from. All None outside a graph."""

    node: str | None = None
    """`langgraph_node`."""
    namespace: str | None = None
    """`langgraph_checkpoint_ns`; tells subgraphs with the same node name apart."""
    task_path: str | None = None
    graph_step: int | None = None
    """`langgraph_step`, counted from 1."""
    attempt: int | None = None
    """Which try of the node (RetryPolicy), counted from 1."""
    role: str | None = None
    """`ChatArt(role=...)`."""
    run_id: str | None = None
    """LangChain run id of the LLM call."""
    parent_run_id: str | None = None
    """LangChain run id of what made the call: a node, or a part of one."""

    def __str__(self) -> str:
        return self.node or self.role or "outside a graph"

    @property
    def path(self) -> tuple[str, ...]:
        """Names of the nodes around the call, the outermost first."""
        parts = [part.partition(":")[0] for part in (self.namespace or "").split("|") if part]
        if self.node is not None and parts[-1:] != [self.node]:
            parts.append(self.node)
        return tuple(parts)

    def is_in(self, node: str) -> bool:
        """True if the call came from `node`, at any depth.

        A name stands for the node and for all that runs in it: of a call in node "model" of the
        subgraph "researcher" these are "model", "researcher" and "researcher/model".
        """
        parts, wanted = self.path, tuple(node.split("/"))
        return any(parts[i : i + len(wanted)] == wanted for i in range(len(parts)))


@dataclass(frozen=True, eq=False)
class ModelCall:
    """One LLM call and one of its choices.

    The three arrays are None when the server sent no token record (another provider's model,
    a broken stream); such a call is context and is never trained. Tokens that can't be right make
    it context too: `left_out` then says why.

    Raises:
        CaptureError: ids are no whole numbers, or beyond int32.
    """

    record_id: str
    """Id of the server's token record; unique per call. Client-made ("local-...") if none."""
    model: str
    """Name of the model without its step, e.g. "agent-001"."""
    step: int | None
    """Step of the policy that answered; None for models that are not being trained."""
    request: dict[str, Any]
    """Body of the request as sent (OpenAI chat completions)."""
    message: dict[str, Any]
    """Assistant message in OpenAI's shape, as the server sent it."""
    finish_reason: str | None
    """"stop", "length", "tool_calls", ...; None if the call broke off."""
    choice_index: int = 0
    response: bytes = b""
    """The wire bytes of the response (all events of a stream)."""
    prompt_ids: Ids | None = None
    """[P] token ids that entered the model."""
    prompt_rendered: bool = False
    """True if the server sent no `prompt_ids` and they are what the chat template makes."""
    sampled_ids: Ids | None = None
    """[S] token ids the model sampled, end-of-turn token included."""
    logprobs: Logprobs | None = None
    """[S] natural-log probability of each sampled id under the distribution sampled from."""
    sampling: Sampling = field(default_factory=Sampling)
    origin: Origin = field(default_factory=Origin)
    started: float = 0.0
    """Seconds since the epoch."""
    ended: float = 0.0
    error: str | None = None
    """What broke the call; its request is kept all the same."""
    left_out: Cause | None = None
    """Why it is context, whatever ids it has; None if nothing is known to speak against it."""
    highest_id: int = field(init=False, repr=False, default=-1)
    """Of prompt and sample; -1 if there are none."""
    reward: float | None = None
    """Of this call alone, beside its trajectory's; see `Trajectory.add_reward`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", self._ids("prompt_ids"))
        object.__setattr__(self, "sampled_ids", self._ids("sampled_ids"))
        object.__setattr__(self, "logprobs", self._logprobs())
        # As unsigned numbers negative ids are the highest: one look at each array is enough.
        known = [
            ids.view(np.uint32) for ids in (self.prompt_ids, self.sampled_ids) if ids is not None
        ]
        highest = max((int(np.maximum.reduce(ids)) for ids in known if len(ids)), default=-1)
        object.__setattr__(self, "highest_id", highest)
        if self.left_out is None:
            object.__setattr__(self, "left_out", self._token_fault())

    def _ids(self, name: str) -> Ids | None:
        value = getattr(self, name)
        if value is None:
            return None
        if isinstance(value, np.ndarray) and value.dtype == np.int32 and value.ndim == 1:
            return np.ascontiguousarray(value)
        try:
            ids = np.asarray(value)
        except ValueError:  # lists of different lengths
            ids = np.empty((1, 1))
        is_flat = ids.ndim == 1 and (ids.dtype.kind in "iu" or not len(ids))
        if not is_flat or (len(ids) and (ids.max() >= 2**31 or ids.min() < -(2**31))):
            raise CaptureError(
                f"{name} of call {self.record_id!r}",
                got=value[:8] if hasattr(value, "__getitem__") else value,
                expected="a flat list of whole numbers below 2**31",
                fix="Give token ids as the server sent them.",
            )
        return np.ascontiguousarray(ids, dtype=np.int32)

    def _logprobs(self) -> Logprobs | None:
        if self.logprobs is None:
            return None
        try:
            return np.ascontiguousarray(self.logprobs, np.float32)
        except (TypeError, ValueError) as error:
            raise CaptureError(
                f"logprobs of call {self.record_id!r}",
                got=self.logprobs[:8],
                expected="a flat list of numbers",
                fix="Give logprobs as the server sent them.",
            ) from error

    def _token_fault(self) -> Cause | None:
        """What of the tokens can't be right; None if nothing."""
        sampled, logprobs = self.sampled_ids, self.logprobs
        if self.prompt_ids is not None and not len(self.prompt_ids):
            return "empty prompt"
        if self.highest_id >= 2**31:
            return "bad ids"
        if logprobs is None or sampled is None:
            return None
        if len(sampled) != len(logprobs):
            return "mismatch"
        if len(logprobs):  # NaN is the least and the greatest of its array, and compares as False
            low, high = np.minimum.reduce(logprobs), np.maximum.reduce(logprobs)
            if not (low >= _LOWEST and high <= _HIGHEST):
                return "bad logprobs"
        return None

    @property
    def key(self) -> tuple[str, int]:
        """Identity of the call."""
        return (self.record_id, self.choice_index)

    @property
    def trainable(self) -> bool:
        """True if every id is known and nothing speaks against training the call."""
        return (
            self.left_out is None
            and self.prompt_ids is not None
            and self.sampled_ids is not None
            and self.logprobs is not None
            and len(self.sampled_ids) > 0
        )

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages of the request."""
        messages: list[dict[str, Any]] = self.request.get("messages", [])
        return messages

    def with_tokens(
        self,
        *,
        prompt_ids: Ids,
        sampled_ids: Ids,
        logprobs: Logprobs,
        sampling: Sampling,
        step: int | None,
    ) -> ModelCall:
        """The same call joined with the server's token record."""
        return replace(
            self,
            prompt_ids=prompt_ids,
            sampled_ids=sampled_ids,
            logprobs=logprobs,
            sampling=sampling,
            step=step,
        )
