"""One HTTP exchange with a chat-completions endpoint, read into `ModelCall`s.

In: the request body as sent and the reply as it was read, from our endpoint, vLLM or any other
OpenAI-compatible server. Out: one call per choice. Where ids contradict each other, or the
answer broke off, the call keeps an error and no ids: nothing is picked silently, nothing encoded
again. It leaves out the network (`transport`), reading bytes (`reply`) and the
rollout (`capture`).
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from art_core.calls import Cause, Ids, Logprobs, ModelCall, Origin, Sampling
from art_core.reply import Choice, Reply

_BROKEN_OFF = frozenset({"abort", "aborted", "cancelled", "error"})
"""Finish reasons by which a server says that the answer is not whole."""
_NAMED_ID = re.compile(r"token_id:(\d+)")
_LOGPROB = itemgetter("logprob")
_MAX_LOGPROB = float(np.finfo(np.float32).max)


def calls_of_reply(
    reply: Reply,
    request: dict[str, Any],
    raw: bytes,
    *,
    origin: Origin,
    started: float,
    ended: float,
) -> list[ModelCall]:
    """The calls of one exchange, one per choice, in the order of their index; never empty.

    Args:
        reply: what came, as it was read.
        request: body of the request as sent.
        raw: response body as received, after content decoding; whatever came before a break.
        origin: who asked.
        started: seconds since the epoch.
        ended: seconds since the epoch.

    The calls of a broken or contradicting exchange have `error` set and no ids.
    """
    model, step = split_step(reply.policy or str(request.get("model") or ""))
    sampling = _sampling(reply.sampling, request)
    fault = reply.error or reply.prompt_fault or _prompt_fault(reply) or _count_fault(reply)
    broken: Cause | None = "not answered" if reply.refused else "broken answer"
    calls = []
    for choice in reply.choices or [Choice(index=0)]:
        tokens = _tokens(choice)
        cut = reply.error or _broken_off(choice)
        wrong = fault or cut or tokens.fault
        calls.append(
            ModelCall(
                record_id=choice.record_id or f"local-{uuid.uuid4().hex}",
                model=model,
                step=step,
                request=request,
                message=choice.message,
                finish_reason=choice.finish_reason,
                choice_index=choice.index,
                response=raw,
                prompt_ids=None if wrong else _array(reply.prompt_ids),
                sampled_ids=None if wrong else _array(tokens.ids),
                logprobs=None if wrong else tokens.logprobs,
                sampling=sampling,
                origin=origin,
                started=started,
                ended=ended,
                error=wrong,
                left_out=broken if cut else "mismatch" if wrong else None,
            )
        )
    return calls


# --- ids and logprobs


@dataclass(frozen=True)
class _Tokens:
    ids: list[int] | None = None
    logprobs: Logprobs | None = None
    fault: str | None = None


def _tokens(choice: Choice) -> _Tokens:
    """Ids and logprobs of a choice, if every source of them says the same."""
    entries = choice.entries
    named = _named_ids(entries)
    ids = named if choice.token_ids is None else choice.token_ids
    if ids is None:
        return _Tokens()
    if fault := _bad_id("token_ids", ids):
        return _Tokens(fault=fault)
    if entries is None:
        return _Tokens(ids=ids)
    if len(entries) != len(ids):
        return _Tokens(fault=f"{len(ids)} token ids came with {len(entries)} logprobs")
    if named is not None and named != ids:
        return _Tokens(fault=f"token_ids are {_short(ids)} but logprobs name {_short(named)}")
    logprobs, fault = _logprobs(entries)
    return _Tokens(ids=None if fault else ids, logprobs=logprobs, fault=fault)


def _logprobs(entries: Sequence[Any]) -> tuple[Logprobs | None, str | None]:
    """The logprobs of the entries, or what is wrong with them."""
    try:
        values = np.fromiter(map(_LOGPROB, entries), np.float64, len(entries))
        if (np.abs(values) <= _MAX_LOGPROB).all():
            return values.astype(np.float32), None
    except (KeyError, TypeError, ValueError, OverflowError):  # missing, null, a string, 10**400
        pass
    told = [entry.get("logprob") if isinstance(entry, dict) else None for entry in entries]
    wrong = next(i for i, value in enumerate(told) if not _is_number(value))
    return None, f"logprob {wrong} is {told[wrong]!r:.100}, not a finite number"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and -_MAX_LOGPROB <= value <= _MAX_LOGPROB


def _named_ids(entries: Sequence[Any] | None) -> list[int] | None:
    """Ids that the entries spell as "token_id:N"; None unless all do (text may look like it)."""
    ids = []
    for entry in entries or ():
        token = entry.get("token") if isinstance(entry, dict) else None
        if not isinstance(token, str) or not (match := _NAMED_ID.fullmatch(token)):
            return None
        ids.append(int(match[1]))
    return ids or None


def _count_fault(reply: Reply) -> str | None:
    """What the server counted against what it sent; None if equal or not known."""
    told = reply.usage.get("completion_tokens")
    ids = [choice.token_ids or _named_ids(choice.entries) for choice in reply.choices]
    if not isinstance(told, int) or not ids or None in ids:
        return None
    received = sum(len(part) for part in ids if part is not None)
    if received == told:
        return None
    return f"{received} token ids received, usage says {told} completion tokens"


def _prompt_fault(reply: Reply) -> str | None:
    """What is wrong with the prompt's ids; a usage of 0 means that nobody counted."""
    if reply.prompt_ids is None:
        return None
    told, received = reply.usage.get("prompt_tokens"), len(reply.prompt_ids)
    if isinstance(told, int) and told not in (0, received):
        return f"{received} prompt ids received, usage says {told} prompt tokens"
    return _bad_id("prompt_token_ids", reply.prompt_ids)


def _broken_off(choice: Choice) -> str | None:
    if choice.fault is not None:
        return choice.fault
    if choice.finish_reason in _BROKEN_OFF:
        return f"the server broke the answer off: finish_reason {choice.finish_reason!r}"
    return None


def _bad_id(name: str, ids: Sequence[Any]) -> str | None:
    if not ids or (set(map(type, ids)) == {int} and 0 <= min(ids) <= max(ids) < 2**31):
        return None
    position, value = next(
        (i, v) for i, v in enumerate(ids) if type(v) is not int or not 0 <= v < 2**31
    )
    return f"{name}[{position}] is {value!r}, not a token id"


def _array(ids: list[int] | None) -> Ids | None:
    return None if ids is None else np.asarray(ids, dtype=np.int32)


# --- who answered, and how it sampled


def split_step(name: str) -> tuple[str, int | None]:
    """("agent", 3) of the served name "agent@3"; (name, None) where it pins no step."""
    base, at, step = name.rpartition("@")
    return (base, int(step)) if at and base and step.isdecimal() else (name, None)


def _sampling(told: Mapping[str, Any] | None, request: Mapping[str, Any]) -> Sampling:
    """The effective settings as the server told them, else as they were asked for."""
    if told is not None:
        return Sampling.from_json(told)
    names = (
        "temperature",
        "top_p",
        "min_p",
        "min_tokens",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    )
    asked: dict[str, Any] = {name: _number(request.get(name)) for name in names}
    asked["top_k"] = max(_number(request.get("top_k")) or 0, 0)
    asked["max_tokens"] = _number(request.get("max_completion_tokens") or request.get("max_tokens"))
    asked["grammar"] = _grammar(request)
    asked["logit_bias"] = _bias(request.get("logit_bias"))
    stop = request.get("stop")
    stops = [stop] if isinstance(stop, str) else stop
    asked["stop"] = tuple(stops) if isinstance(stops, list) else ()
    return Sampling(**{name: value for name, value in asked.items() if value is not None})


def _bias(value: Any) -> tuple[tuple[int, float], ...]:
    """OpenAI's mapping of token ids, spelled as text, to what is added."""
    if not isinstance(value, Mapping):
        return ()
    return tuple(
        (int(token), float(bias))
        for token, bias in value.items()
        if str(token).isdecimal() and isinstance(bias, int | float)
    )


def _number(value: Any) -> Any:
    """A setting as a number; None for what is none: the server says so, recording must not."""
    return value if isinstance(value, int | float) else None


def _grammar(request: Mapping[str, Any]) -> str | None:
    """The kind of grammar that the request makes a server apply."""
    response_format = request.get("response_format")
    if isinstance(response_format, Mapping) and response_format.get("type") != "text":
        return str(response_format.get("type"))
    choice = request.get("tool_choice")
    return "tool_call" if isinstance(choice, Mapping) or choice == "required" else None


def _short(ids: Sequence[Any]) -> str:
    head = ", ".join(str(i) for i in ids[:8])
    return f"[{head}]" if len(ids) <= 8 else f"[{head}, ... {len(ids)} in all]"
