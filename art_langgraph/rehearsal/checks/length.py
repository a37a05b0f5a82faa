"""How long prompts are, and answers that were cut."""

from __future__ import annotations

from collections.abc import Iterator

from art_core.plural import plural
from art_langgraph.rehearsal.finding import Finding
from art_langgraph.rehearsal.played import Rehearsal
from art_langgraph.rehearsal.wording import listed, place

_SMALL_CONTEXT = 8_192
"""Tokens that SmolLM2 reads; others read more, and every token costs."""


def check_length(rehearsal: Rehearsal) -> Iterator[Finding]:
    """The longest prompt; answers cut by their limit."""
    calls = [call for play in rehearsal.plays for call in play.policy_calls]
    read = {call.key: len(call.prompt_ids) for call in calls if call.prompt_ids is not None}
    if read:
        longest = max((c for c in calls if c.key in read), key=lambda call: read[call.key])
        told = f"the longest prompt has about {read[longest.key]:,} tokens"
        told += f" ({place(longest.origin.node)})"
        too_long = read[longest.key] > _SMALL_CONTEXT
        yield Finding(
            "length",
            "warn" if too_long else "pass",
            told,
            f"SmolLM2-135M reads {_SMALL_CONTEXT:,}: choose a base model with a longer context, or "
            "send less."
            if too_long
            else "",
        )
    cut = [call for call in calls if call.finish_reason == "length"]
    if cut:
        nodes = dict.fromkeys(
            f"{place(c.origin.node)} at max_tokens={c.sampling.max_tokens}" for c in cut
        )
        yield Finding(
            "length",
            "warn",
            f"the token limit cut {plural(len(cut), 'answer')}: {listed(nodes)}",
            "A tool call or JSON that is cut can't be used. Raise max_tokens, or make sure that "
            "short answers are what you want.",
        )
