"""Whether every call was recorded, and with its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from art_core.calls import ModelCall
from art_core.plural import plural
from art_core.transport import CALLER_LEFT
from art_langgraph.rehearsal.blame import place_of
from art_langgraph.rehearsal.checks.ending import lost
from art_langgraph.rehearsal.finding import Finding
from art_langgraph.rehearsal.played import Rehearsal
from art_langgraph.rehearsal.wording import listed, place, shortened

_THREADS = (
    "Start the thread with langchain_core.runnables.config.ContextThreadPoolExecutor, or give the "
    "call the node's config: llm.invoke(messages, config=config)."
)


def check_recording(rehearsal: Rehearsal) -> Iterator[Finding]:
    """Calls that lost their rollout, and whatever else the record lacks."""
    stray = [play for play in rehearsal.plays if lost(play.error)]
    noted = dict.fromkeys(reason for play in rehearsal.plays for reason in play.incomplete)
    away = [reason for reason in noted if "lost its rollout" in reason]
    if stray or away:
        error = next((play.error for play in stray), None)
        where = "" if error is None else place_of(error)
        yield Finding(
            "recording",
            "fail",
            f"a call lost its rollout{where}: it was made in a thread that LangGraph did not start",
            _THREADS,
        )
    rest = [reason for reason in noted if reason not in away]
    if rest:
        yield Finding(
            "recording",
            "fail" if any("/responses" in reason for reason in rest) else "warn",
            f"the record is not whole: {listed(shortened(r, 160) for r in rest)}",
            _mending(rest),
        )
    if not (stray or away or rest) and any(play.calls for play in rehearsal.plays):
        yield Finding("recording", "pass", "every call is recorded in its rollout")


def _mending(reasons: Sequence[str]) -> str:
    """What to do where a record is not whole."""
    if any("is recorded" in reason for reason in reasons):
        return "Only chat completions are recorded: leave use_responses_api off."
    if any("no callback saw" in reason for reason in reasons):
        return _THREADS
    return "Await what the graph starts before it ends."


def check_tokens(rehearsal: Rehearsal) -> Iterator[Finding]:
    """Calls whose sampled tokens are known, and why those of others are not."""
    calls = [call for play in rehearsal.plays for call in play.policy_calls]
    if not calls:
        return
    bare = [call for call in calls if not call.trainable and not _was_left(call)]
    tokens = sum(len(c.sampled_ids) for c in calls if c.sampled_ids is not None)
    context = sum(len(c.prompt_ids) for c in calls if c.prompt_ids is not None)
    for node in dict.fromkeys(place(call.origin.node) for call in bare):
        mine = [call for call in bare if place(call.origin.node) == node]
        why = dict.fromkeys(shortened(call.error or "no token ids came back", 200) for call in mine)
        yield Finding(
            "tokens",
            "fail",
            f"{plural(len(mine), 'call')} of {node} can't be trained: {listed(why)}",
            "Mend what the endpoint refuses; other calls of the rollout train all the same.",
        )
    if not bare and not tokens:
        yield Finding(
            "tokens",
            "fail",
            f"no answer came to its end in {plural(len(calls), 'call')}: nothing can be trained",
            "Read streams to their end.",
        )
    if tokens:
        yield Finding(
            "tokens",
            "pass",
            f"{tokens:,} sampled tokens can be trained, {context:,} are read as context",
        )


def check_streams(rehearsal: Rehearsal) -> Iterator[Finding]:
    """Streams, and those that nobody read to their end."""
    calls = [call for play in rehearsal.plays for call in play.policy_calls]
    streams = [call for call in calls if call.request.get("stream")]
    left = [call for call in calls if _was_left(call)]
    if left:
        nodes = listed(dict.fromkeys(place(call.origin.node) for call in left))
        yield Finding(
            "streams",
            "warn",
            f"{plural(len(left), 'call')} of {nodes} was left before its end and can't be trained",
            "Read streams to their end; to end an answer early, use stop= or max_tokens=.",
        )
    elif streams:
        yield Finding("streams", "pass", f"{plural(len(streams), 'stream')}, each read to its end")


def _was_left(call: ModelCall) -> bool:
    return call.error in CALLER_LEFT
