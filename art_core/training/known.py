"""What is known of a train call's tokens before its first update, computed without gradients.

In: the rows of each update, the policy and a reference. Out: a `KnownRow` for each row: what ratios
are against, logprobs of the reference, advantages with the KL in them; computed once for all
updates, and only where the settings ask for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from art_core.batch.forest import Float, Int, Row
from art_core.config import TrainConfig
from art_core.nn.lora import LoraModel
from art_core.nn.upload import upload
from art_core.training import kl
from art_core.training.entropy import least_of_top
from art_core.training.logprobs import entry_logprobs
from art_core.training.loss import Tokens


@dataclass(frozen=True, eq=False)
class KnownRow:
    """A row, and columns [P] of those of its E entries that the policy sampled."""

    row: Row
    own: npt.NDArray[np.bool_]
    """[E] which entries those are; the others were observed."""
    old: Float
    """What ratios are against; NaN: the policy of the moment, so that the ratio is 1."""
    advantage: Float
    sampler: Float | None = None
    """The sampler's logprobs where they are weighed against `old`, and `old` itself where they are
    distorted. None: there is nothing to weigh."""
    now: Float | None = None
    """Logprobs of the policy as the train call found it. None: they were not asked for."""
    reference: Float | None = None
    """None: there is no reference."""
    entropy: Float | None = None
    """As `now`, in nats."""
    left_out: npt.NDArray[np.bool_] | None = None
    """Entries that the policy loss does not look at; None: none."""

    def tokens(self, logprobs: Tensor, entropies: Tensor) -> Tokens:
        """With what the policy of the moment says of the row's entries [E]."""
        device, entries, own = logprobs.device, self.row.entries, self.own
        if not own.all():
            at = upload(np.flatnonzero(own), device)
            logprobs, entropies = logprobs[at], entropies[at]

        def tensor(values: Float | Int) -> Tensor:
            return upload(values, device).to(logprobs.dtype)

        old, out = tensor(self.old), self.left_out
        return Tokens(
            new=logprobs,
            entropy=entropies,
            old=torch.where(old.isnan(), logprobs.detach(), old),
            advantage=tensor(self.advantage),
            weight=tensor(entries.weight[own]),
            call=upload(entries.call[own], device),
            sampler=None if self.sampler is None else tensor(self.sampler),
            reference=None if self.reference is None else tensor(self.reference),
            staleness=tensor(entries.staleness[own]),
            left_out=None if out is None else upload(out, device),
        )

    def observed(self, logprobs: Tensor) -> tuple[Tensor, Tensor] | None:
        """(logprob, weight) of the entries that were observed; None: there are none."""
        if self.own.all():
            return None
        weight = upload(self.row.entries.weight[~self.own], logprobs.device)
        at = upload(np.flatnonzero(~self.own), logprobs.device)
        return logprobs[at], weight.to(logprobs.dtype)


def known_rows(
    model: LoraModel,
    name: str,
    updates: Sequence[Sequence[Row]],
    config: TrainConfig,
    reference: Path | None,
    on_row: Callable[[], None] = lambda: None,
) -> tuple[list[list[KnownRow]], dict[str, float]]:
    """The rows of each update with what the settings ask for, and figures to log.

    Args:
        name: the adapter that is trained.
        reference: folder of the reference's adapter; None: the base model.
        on_row: called after each row that was computed.

    Raises:
        CheckpointError: the reference is no adapter of this base model.
    """
    shaped = bool(config.kl_penalty_coef) and config.kl_penalty in ("advantage", "reward")
    rows = []

    def passed(row: Row) -> tuple[Float, Float]:
        found = _passed(model, row)
        on_row()
        return found

    every = shaped or config.old_logprobs == "recomputed" or config.entropy_top_share < 1.0
    with model.acting(name):
        for row in (row for update in updates for row in update):
            now = entropy = None
            if every or (len(updates) > 1 and row.entries.distorted.any()):
                now, entropy = (column[~row.entries.observed] for column in passed(row))
            rows.append(replace(_begun(row, now, config), entropy=entropy))
    if config.entropy_top_share < 1.0:
        rows = _of_high_entropy(rows, config.entropy_top_share)
    figures: dict[str, float] = {}
    if config.kl_penalty_coef:
        with _adapter(model, name, reference) as other, model.acting(other):
            rows = [replace(row, reference=passed(row.row)[0][row.own]) for row in rows]
    if shaped:
        rows, figures = _with_kl(rows, config)
    following = iter(rows)
    return [[next(following) for _ in update] for update in updates], figures


def _begun(row: Row, now: Float | None, config: TrainConfig) -> KnownRow:
    own = ~row.entries.observed
    recomputed = np.full(own.sum(), np.nan) if now is None else now
    said = np.where(row.entries.distorted[own], recomputed, row.entries.logprob[own])
    old, sampler = said, None
    if config.old_logprobs == "recomputed":
        old, sampler = recomputed, said
    return KnownRow(row, own, old, row.entries.advantage[own], sampler=sampler, now=now)


def _passed(model: LoraModel, row: Row) -> tuple[Float, Float]:
    """Logprobs and entropies of the row's entries under the active adapter."""
    with torch.no_grad():
        logprobs, entropies = entry_logprobs(model, row)
    return logprobs.double().cpu().numpy(), entropies.double().cpu().numpy()


def _of_high_entropy(rows: Sequence[KnownRow], share: float) -> list[KnownRow]:
    columns = [row.entropy for row in rows if row.entropy is not None]
    least = least_of_top(np.concatenate(columns), share)
    return [replace(r, left_out=c < least) for r, c in zip(rows, columns, strict=True)]


@contextmanager
def _adapter(model: LoraModel, name: str, folder: Path | None) -> Iterator[str | None]:
    """The reference in memory, for as long as it is needed."""
    if folder is None:
        yield None
        return
    reference = f"{name}-reference"
    model.load_adapter(reference, folder)
    try:
        yield reference
    finally:
        model.drop_adapter(reference)


def _with_kl(
    rows: Sequence[KnownRow], config: TrainConfig
) -> tuple[list[KnownRow], dict[str, float]]:
    """The rows with the KL in their advantages, and none left for the loss."""
    gaps, estimates, coef = [], [], config.kl_penalty_coef
    for row in rows:
        assert row.now is not None
        assert row.reference is not None
        now, reference = torch.from_numpy(row.now), torch.from_numpy(row.reference)
        gaps.append(kl.k1(now, reference))
        estimates.append(kl.k3(now, reference))
    mean = torch.cat(gaps).mean()
    shaped = []
    for row, gap in zip(rows, gaps, strict=True):
        before = torch.from_numpy(row.advantage)
        if config.kl_penalty == "reward":
            after = kl.penalised(before, gap, coef=coef)
        else:
            after = kl.centred(before, gap, mean, coef=coef)
        shaped.append(replace(row, advantage=after.numpy(), reference=None))
    return shaped, {"kl_reference": float(torch.cat(estimates).mean())}
