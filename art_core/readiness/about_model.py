"""What the doctor says of a base model: whether it can be served and trained, and what to mind.

In: its shape, its chat, how it computes, how long calls shall be. Out: findings. Memory has a file
of its own (about_memory.py).
"""

from __future__ import annotations

from collections.abc import Callable

from art_core.errors import ARTError
from art_core.finding import Finding, Status
from art_core.readiness.append_only import AppendOnly
from art_core.readiness.chat import Chat
from art_core.readiness.computes import Computed, Unknown
from art_core.readiness.limits import (
    RANKS,
    check_trainable,
    check_vllm_takes_adapters,
    served_rank,
)
from art_core.readiness.memory import GIB, Load
from art_core.readiness.model_files import ModelFiles
from art_core.readiness.shape import Shape
from art_core.readiness.sizes import Sizes
from art_core.readiness.tool_parser import READ_HERE, ParserFound


def about_model(
    files: ModelFiles,
    shape: Shape,
    sizes: Sizes | None,
    chat: Chat | ARTError,
    computed: Computed | Unknown,
    load: Load,
) -> list[Finding]:
    """One finding or more for each thing."""
    found = [_kind(shape, sizes), _weights(files, shape), _context(shape, computed, load)]
    if isinstance(chat, ARTError):
        found.append(Finding("chat template", "fail", chat.what, chat.fix))
    else:
        found += [_template(chat), *_tools(chat), _reasoning(chat), *_histories(chat.histories)]
    found += _computing(computed, load)
    return [*found, *_adapters(shape, computed, load)]


def _kind(shape: Shape, sizes: Sizes | None) -> Finding:
    count = f"{sizes.total / 1e9:.2f} billion weights" if sizes else "an unknown number of weights"
    kinds = {kind: shape.layers.count(kind) for kind in dict.fromkeys(shape.layers)}
    layers = ", ".join(f"{count} of {kind.replace('_', ' ')}" for kind, count in kinds.items())
    head = "its head is the embedding" if shape.tied else "a head of its own"
    more = "; its vision part is left out" if shape.sees_images else ""
    what = f"{shape.architecture}, {count}, {len(shape.layers)} layers ({layers}), {head}{more}"
    return Finding("kind", "pass", what)


def _weights(files: ModelFiles, shape: Shape) -> Finding:
    kept = shape.quantisation
    form = f"quantised ({kept.method}, about {kept.bits} bits)" if kept else "not quantised"
    if files.weight_bytes is None:
        what = f"not here; config and template are enough to look. {form.capitalize()}"
        return Finding("weights", "skipped", what, "art-langgraph model fetch fetches them.")
    return Finding(
        "weights", "pass", f"{files.weight_bytes / GIB:.2f} GiB in {files.folder}, {form}"
    )


def _context(shape: Shape, computed: Computed | Unknown, load: Load) -> Finding:
    usable = computed.context_length if isinstance(computed, Computed) else shape.context
    what = f"{usable:,} tokens"
    if usable < shape.context:
        what += f" of {shape.context:,}: beyond, its rotary embeddings depend on a call's length"
    if load.length > usable:
        return Finding(
            "context", "fail", f"{what}; calls of {load.length:,} are too long", "Shorten calls."
        )
    return Finding("context", "pass", what)


def _template(chat: Chat) -> Finding:
    if not chat.stands_in:
        return Finding("chat template", "pass", "its own")
    own = "its own knows no tools" if chat.has_own else "it has none"
    return Finding(
        "chat template",
        "pass",
        f"ours for ChatML stands in ({own}): art_core/engine/hermes_chatml.jinja. Serve it with "
        "the same one elsewhere",
    )


def _tools(chat: Chat) -> list[Finding]:
    found = chat.tool_parser
    if not chat.takes_tools:
        return [
            Finding(
                "tools",
                "warn",
                "its chat template shows no tools, so an agent can't call any",
                "Choose a model that is made for tools, or an agent without them.",
            )
        ]
    served = [_parser("tool parser", found, "EngineConfig.tool_parser")]
    for refusal in chat.histories.refusals:
        if refusal.where == _AT_ONCE:
            what = "its template takes one call an answer: the first ends it"
            served.append(Finding("tools", "pass", what))
        elif "tool" in refusal.where:
            what = f"{refusal.where}: refused ({_short(refusal.reason)})"
            fix = _WHEN_REFUSED.get(refusal.where, "See that your agent does without.")
            served.append(Finding("tools", "warn", what, fix))
    if found.name not in READ_HERE:
        served.append(
            Finding(
                "tools",
                "warn",
                "calls in this form can't be read, and requests with tools are refused",
                "Name a form that is right (EngineConfig.tool_parser), or take a Qwen, a Llama 3, "
                "a Mistral, a GPT-OSS or a SmolLM2.",
            )
        )
    return served


_AT_ONCE = "tool calls at once"
_WHEN_REFUSED = {
    "words beside a tool call": "Prompt it to call without words.",
}


def _reasoning(chat: Chat) -> Finding:
    if chat.reasoning_parser.name is None and chat.reasoning_parser.sure:
        return Finding("reasoning", "pass", f"no parser needed: {chat.reasoning_parser.why}")
    return _parser("reasoning parser", chat.reasoning_parser, "EngineConfig.reasoning_parser")


def _parser(check: str, found: ParserFound, setting: str) -> Finding:
    if found.name is None:
        return Finding(
            check, "warn", found.why, f"If you know one that reads it, name it ({setting})."
        )
    what = f"{found.name} ({found.why})"
    if found.sure:
        return Finding(check, "pass", what)
    return Finding(check, "warn", f"likely {what}", f"Look at an answer; name another ({setting}).")


def _histories(seen: AppendOnly) -> list[Finding]:
    """Breaks of one cause are one finding."""
    found = []
    causes = {each.why: [b for b in seen.breaks if b.why == each.why] for each in seen.breaks}
    for why, breaks in causes.items():
        first = breaks[0]
        where = "; ".join(each.where for each in breaks)
        what = f"{why} (in: {where}). {first.was!r} becomes {first.becomes!r}"
        found.append(Finding("histories", "warn", what, _what_it_costs(why)))
    for refusal in seen.refusals:
        if "tool" not in refusal.where:
            what = f"{refusal.where}: refused ({_short(refusal.reason)})"
            found.append(Finding("histories", "warn", what, "See that your agent does without."))
    if seen.kept:
        found.insert(0, Finding("histories", "pass", f"kept in: {'; '.join(seen.kept)}"))
    return found


def _what_it_costs(why: str) -> str:
    """Of a history that is rewritten: what it means, and what avoids it."""
    if "date" in why:
        return "Only runs past midnight are touched: their calls are trained one by one."
    if "words beside" in why:
        return "The model does not see them again. Prompt it to call without words."
    if "thinking" in why:
        return (
            "Training is right all the same, but calls after a new question are not joined with "
            "those before it: slower. One question a conversation avoids it."
        )
    return (
        "Training is right all the same, but such calls are not joined with those before: slower. "
        "One question a conversation avoids it, or another model."
    )


def _computing(computed: Computed | Unknown, load: Load) -> list[Finding]:
    if isinstance(computed, Unknown):
        status: Status = "fail" if computed.is_fault else "skipped"
        fix = "" if computed.is_fault else "pip install 'art-langgraph[train]'"
        return [Finding("computing", status, f"trees or rows: {computed.why}", fix)]
    if computed.why_alone is not None:
        return [
            Finding(
                "computing",
                "warn",
                f"every call by itself, not as trees: {computed.why_alone}",
                "It trains, but what calls have in common is computed for each: slower.",
            ),
            Finding(
                "embedded engine",
                "warn",
                "can't serve it: it keeps keys and values only",
                "Serve it by vLLM.",
            ),
        ]
    found = [Finding("computing", "pass", "trees: what calls have in common is computed once")]
    served = min((computed.context_length, *computed.windows))
    if not computed.is_plain:
        what = "can't serve it: its attention has capped scores or sinks"
        found.append(Finding("embedded engine", "warn", what, "Serve it by vLLM."))
    elif served < load.length:
        what = f"serves calls up to {served:,} tokens: beyond, a sliding window hides the beginning"
        found.append(Finding("embedded engine", "warn", what, "Serve it by vLLM for longer ones."))
    else:
        found.append(Finding("embedded engine", "pass", f"serves calls up to {served:,} tokens"))
    return found


def _adapters(shape: Shape, computed: Computed | Unknown, load: Load) -> list[Finding]:
    found = []
    if isinstance(computed, Computed):
        if computed.why_no_adapter:
            found.append(
                Finding(
                    "LoRA", "fail", computed.why_no_adapter, "Set LoraSettings(target_modules=...)."
                )
            )
        else:
            experts = "; experts take none" if _has_experts(shape) else ""
            found.append(Finding("LoRA", "pass", f"on {', '.join(computed.targets)}{experts}"))
    carried = _raised(lambda: check_vllm_takes_adapters(shape))
    if carried is not None:
        found.append(Finding("LoRA in vLLM", "fail", carried.what, carried.fix))
    else:
        found.append(_rank(load))
    trainable = _raised(lambda: check_trainable(shape.quantisation))
    if trainable is not None:
        what = f"{trainable.what} ({shape.quantisation.method if shape.quantisation else ''})"
        found.append(Finding("training", "fail", what, trainable.fix))
    return found


def _rank(load: Load) -> Finding:
    error = _raised(lambda: served_rank(load.rank))
    if error is not None:
        return Finding("LoRA in vLLM", "fail", str(error), error.fix)
    limit = served_rank(load.rank)
    what = f"rank {load.rank} is served with --max-lora-rank {limit}; {RANKS[-1]} is the most"
    return Finding("LoRA in vLLM", "pass", what)


def _raised(check: Callable[[], object]) -> ARTError | None:
    try:
        check()
    except ARTError as error:
        return error
    return None


def _has_experts(shape: Shape) -> bool:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return any(shape.text.get(name) for name in names)


def _short(text: str) -> str:
    return text if len(text) <= 100 else text[:97] + "..."
