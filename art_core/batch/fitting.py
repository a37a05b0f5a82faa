"""Calls made to fit the model that is trained: the ids that it knows, the length of a row.

In: trainable calls, the model's vocabulary and context, `TrainConfig.max_tokens_per_row` and
`too_long`. Out: the calls that can be computed, and how many were left out or cut, by cause. Only
single calls can be too long: a trajectory of many is a tree, and its branches may lie in several
rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from art_core.calls import ModelCall
from art_core.config import TrainConfig
from art_core.errors import GroupError

Misfit: TypeAlias = Literal["too long", "cut", "outside the vocabulary"]
"""Why a call is not trained as it is. "too long": for a row or the model, left out. "cut":
the end of its sample is left out, and with it the token that ended the turn. "outside the
vocabulary": it has an id that the model does not know, so that another model's tokenizer must have
made it; left out."""


@dataclass(frozen=True)
class Fitted:
    """What of some calls can be computed."""

    calls: list[ModelCall]
    misfits: Counter[Misfit]


def fit(
    calls: Sequence[ModelCall],
    config: TrainConfig,
    *,
    vocab_size: int | None,
    context_length: int | None,
    where: str,
) -> Fitted:
    """Leave out, cut or refuse what does not fit.

    Args:
        calls: trainable ones.
        vocab_size: ids that the model knows; None: they are not looked at.
        context_length: positions that the model can read; None: as many as a row has.
        where: the trajectory, in words.

    Raises:
        GroupError: a call is too long, and `config.too_long` is "error".
    """
    misfits: Counter[Misfit] = Counter()
    kept = _fitted(calls, config, vocab_size, context_length, where, misfits)
    return Fitted(list(kept), misfits)


def _fitted(
    calls: Sequence[ModelCall],
    config: TrainConfig,
    vocab_size: int | None,
    context_length: int | None,
    where: str,
    misfits: Counter[Misfit],
) -> Iterator[ModelCall]:
    allowed = min(config.max_tokens_per_row, context_length or config.max_tokens_per_row)
    for call in calls:
        if vocab_size is not None and call.highest_id >= vocab_size:
            misfits["outside the vocabulary"] += 1
            continue
        over = _positions(call) - allowed
        if over <= 0:
            yield call
        elif config.too_long == "error":
            raise _refusal(call, config.max_tokens_per_row, context_length, where)
        elif config.too_long == "drop" or over >= _sampled(call):
            misfits["too long"] += 1
        else:
            misfits["cut"] += 1
            yield _cut(call, _sampled(call) - over)


def _cut(call: ModelCall, left: int) -> ModelCall:
    """The call as if it had been stopped after `left` sampled tokens."""
    assert call.sampled_ids is not None
    assert call.logprobs is not None
    return replace(
        call,
        sampled_ids=call.sampled_ids[:left],
        logprobs=call.logprobs[:left],
        finish_reason="length",
    )


def _refusal(call: ModelCall, row: int, context: int | None, where: str) -> GroupError:
    of_row = context is None or row <= context
    return GroupError(
        f"a call of {where}, asked by {call.origin}, is too long for "
        + ("a row" if of_row else "the model"),
        got=_positions(call),
        expected=f"at most max_tokens_per_row={row} tokens"
        if of_row
        else f"at most {context} tokens, its context",
        fix=("Raise TrainConfig(max_tokens_per_row=...), shorten" if of_row else "Shorten")
        + ' the rollout, or set too_long="drop" or "cut".',
    )


def _positions(call: ModelCall) -> int:
    """Ids that are computed: the last sampled one predicts nothing."""
    assert call.prompt_ids is not None
    return len(call.prompt_ids) + _sampled(call) - 1


def _sampled(call: ModelCall) -> int:
    assert call.sampled_ids is not None
    return len(call.sampled_ids)
