"""The seam between an inference engine and everything above it: ids in, ids and logprobs out.

An engine knows nothing of chat, tools or HTTP. It answers requests for one base model with any
of its adapters. No torch here: the scripted engine implements it too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from art_core.calls import Ids, Sampling
from art_core.errors import ContextOverflow, EngineError

if TYPE_CHECKING:
    from art_core.engine.forms.answer_form import AnswerForm

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class AdapterRef:
    """A policy: a model's LoRA at a step. The base model is None, not an AdapterRef."""

    model: str
    step: int

    def __str__(self) -> str:
        return f"{self.model}@{self.step}"


@dataclass(frozen=True)
class Grammar:
    """Which token sequences are allowed."""

    kind: str
    """"json_schema" or "tool_call"; kept in the call's `Sampling.grammar`."""
    lark: str
    """The grammar in llguidance's Lark dialect."""


@dataclass(frozen=True)
class GenerateRequest:
    """One sequence to sample."""

    request_id: str
    prompt_ids: Ids
    """[P] int32, P >= 1."""
    adapter: AdapterRef | None
    sampling: Sampling
    """With a `seed`, token t's noise depends on (seed, t) alone, not on the batch. None: an engine
    that can draw without one does."""
    grammar: Grammar | None = None
    stream: bool = True
    """False: nobody looks at it before its end, so that one delta will do."""


def check_prompt(ids: Ids, *, vocab_size: int, context_length: int) -> None:
    """See that a prompt can be read, and answered.

    Raises:
        EngineError: it is empty, or has ids that the model does not know.
        ContextOverflow: it fills the context.
    """
    if len(ids) == 0 or ids.min() < 0 or ids.max() >= vocab_size:
        raise EngineError(
            "a prompt can't be read",
            got=ids.tolist()[:20],
            expected=f"at least one id, each from 0 to {vocab_size - 1}",
            fix="Check that the tokenizer is the base model's.",
        )
    if len(ids) >= context_length:
        raise ContextOverflow(
            "a prompt leaves no room for an answer",
            got=f"{len(ids)} ids",
            expected=f"fewer than the model's context of {context_length}",
            fix="Shorten the messages.",
        )


@dataclass(frozen=True)
class Delta:
    """Tokens sampled since the last delta; the last one has a finish reason."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    """Natural log, of the distribution that was sampled from."""
    finish_reason: FinishReason | None = None
    cached_tokens: int = field(default=0)
    """Prompt positions that were not computed again (known in the last delta)."""


class Tokenizer(Protocol):
    """Text to ids and back for one base model, and its chat template."""

    vocab_size: int
    eos_ids: frozenset[int]
    """Ids that end a turn."""
    special_ids: frozenset[int]
    """Ids of control tokens, which are no part of an answer's text."""
    form: AnswerForm
    """How the base model's answers are read."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special-token text becomes its id; nothing is added in front."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of `ids`; broken UTF-8 becomes U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that `token_id` stands for; a character may be spread over several tokens."""
        ...

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The chat template's text for `messages`."""
        ...


class Engine(Protocol):
    """What the OpenAI routes need of an engine. Every method may be called from any event loop."""

    base_model: str
    context_length: int
    tokenizer: Tokenizer

    def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Sample one sequence. Closing the iterator cancels it.

        Raises:
            EngineError: the engine is closed or failed, or does not know the adapter.
        """
        ...

    async def load_adapter(self, adapter: AdapterRef, path: Path) -> None:
        """Make `adapter` servable from the peft folder `path`."""
        ...

    async def unload_adapter(self, adapter: AdapterRef) -> None:
        """Forget `adapter`; unknown ones are ignored."""
        ...

    def adapters(self) -> list[AdapterRef]:
        """The adapters that can be asked for."""
        ...

    async def close(self) -> None:
        """Stop; running calls end with an EngineError. Safe to call twice."""
        ...
