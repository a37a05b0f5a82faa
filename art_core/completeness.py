"""What of a rollout can be trained, and what was left out, by cause: `Completeness`.

In: the calls of a trajectory. Out: counts that add up, printable, one record a trajectory or a sum
over many. It leaves out finding the causes: those who see them write them into the calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from art_core.calls import Cause, ModelCall


@dataclass(frozen=True)
class Completeness:
    """Counts of calls; a call with several answers counts once for each."""

    answered: int = 0
    """The server answered them whole, as far as is known on this side."""
    seen: int = 0
    """The client saw them, whole or not."""
    kept: int = 0
    """They can be trained."""
    tokens: int = 0
    """Sampled tokens of those that are kept."""
    rendered: int = 0
    """Of those that are kept, how many had their prompt rendered: the server sent no ids of it."""
    left_out: Mapping[Cause, int] = field(default_factory=dict)
    """The rest, by cause."""
    notes: tuple[str, ...] = ()
    """What else is known to be missing; see `Scope.incomplete`."""

    @property
    def is_whole(self) -> bool:
        """True if nothing is missing that was the policy's: context may be left out."""
        return not self.notes and not set(self.left_out) - _CONTEXT

    def __add__(self, other: Completeness) -> Completeness:
        return Completeness(
            self.answered + other.answered,
            self.seen + other.seen,
            self.kept + other.kept,
            self.tokens + other.tokens,
            self.rendered + other.rendered,
            dict(Counter(self.left_out) + Counter(other.left_out)),
            self.notes + other.notes,
        )

    def __str__(self) -> str:
        told = f"{self.answered} calls answered, {self.seen} seen, {self.kept} kept"
        lines = [f"{told} with {self.tokens} tokens to train"]
        if self.rendered:
            lines.append(f"prompts rendered by the chat template, not as sent: {self.rendered}")
        if self.left_out:
            causes = ", ".join(f"{number} {cause}" for cause, number in self.left_out.items())
            lines.append(f"left out: {causes}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def figures(self) -> dict[str, float]:
        """The counts as metrics: "calls/answered", "calls/left_out/no ids", ..."""
        counts = {name: float(getattr(self, name)) for name in ("answered", "seen", "kept")}
        counts |= {f"left_out/{cause}": float(n) for cause, n in self.left_out.items()}
        counts |= {"rendered": float(self.rendered)} if self.rendered else {}
        return {f"calls/{name}": number for name, number in counts.items()}


def completeness_of(
    calls: Iterable[ModelCall],
    chosen: Collection[tuple[str, int]] | None = None,
    notes: Iterable[str] = (),
) -> Completeness:
    """The report on the calls of one trajectory.

    Args:
        calls: all that were captured.
        chosen: keys of the calls whose Choice the user kept; None: all may be trained.
        notes: see `Completeness.notes`.
    """
    answered = seen = kept = tokens = rendered = 0
    left_out: Counter[Cause] = Counter()
    for call in calls:
        cause = cause_of(call)
        if cause is None and chosen is not None and call.key not in chosen:
            cause = "choice not kept"
        seen += cause != "orphan"
        answered += call.error is None
        if cause is not None:
            left_out[cause] += 1
        elif call.sampled_ids is not None:
            kept += 1
            tokens += len(call.sampled_ids)
            rendered += call.prompt_rendered
    return Completeness(answered, seen, kept, tokens, rendered, dict(left_out), tuple(notes))


def cause_of(call: ModelCall) -> Cause | None:
    """Why a call can't be trained; None if it can."""
    if call.left_out is not None:
        return call.left_out
    if call.error is not None:
        return "broken answer"
    if call.sampled_ids is None:
        return "no ids"
    if not len(call.sampled_ids):
        return "nothing sampled"
    if call.logprobs is None:
        return "no logprobs"
    return "no prompt ids" if call.prompt_ids is None else None


_CONTEXT = frozenset[Cause](
    {
        "other model",
        "outside the chosen nodes",
        "choice not kept",
        "several answers",
        "cache replay",
    }
)
