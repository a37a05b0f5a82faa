"""One train call on one adapter: samples -> rows -> loss -> gradient -> AdamW.

In: the samples of a step. Out: the adapter changed in place, and figures; or an exception and the
adapter as it was. The same checkpoint, samples and settings give the same bits again, at the same
number of threads.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from art_core.batch.forest import Row
from art_core.batch.minibatches import minibatches
from art_core.batch.sample import Sample
from art_core.config import TrainConfig, TrainSFTConfig
from art_core.errors import ARTError, TrainingError
from art_core.nn.lora import LoraModel
from art_core.training.attempt import Attempts
from art_core.training.entropy import EntropyBonus
from art_core.training.figures import figures_of_call, figures_of_update
from art_core.training.finite import check_gradient, check_weights, first_bad
from art_core.training.known import KnownRow, known_rows
from art_core.training.logprobs import entry_logprobs
from art_core.training.loss import LossParts, cross_entropy, row_loss
from art_core.training.memory_plan import MemoryPlan, Planner
from art_core.training.moments import (
    OPTIMIZER,
    TrainerState,
    copies,
    get_moments,
    put_back,
    read_state,
    set_moments,
    write_state,
)
from art_core.training.optimizer import MOMENT_BYTES, Kind, make_optimizer
from art_core.training.rows import rows_for
from art_core.training.watch import OnProgress, Watch, Work


@dataclass(eq=False)
class _Before:
    """What is put back if a step fails."""

    state: TrainerState
    tensors: tuple[list[Tensor], dict[str, Tensor]] | None = None
    """Weights and moments, from when they are about to change."""


class Trainer:
    """Trains the adapter `name` of `model`; every method runs on the model's owner thread.

    Args:
        seed: of the order in which trajectories are dealt to minibatches.
        optimizer: see `TrainerConfig.optimizer`.
        held: as in `Planner`.

    Raises:
        ConfigError: that optimizer can't be had here.
    """

    def __init__(
        self,
        model: LoraModel,
        name: str,
        *,
        seed: int,
        optimizer: Kind = "adamw",
        held: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._model = model
        self._name = name
        self._state = TrainerState(updates=0, seed=seed)
        with model.training(name) as parameters:
            self._parameters = parameters
        self._names = list(model.adapter_weights(name))
        self._befores: list[_Before] = []
        self._optimizer = make_optimizer(parameters, optimizer)
        trained = sum(parameter.numel() for parameter in self._parameters)
        planner = Planner(model, trained=trained, moments=MOMENT_BYTES[optimizer], held=held)
        self._attempts = Attempts(planner, self.undone_on_error, model.forget_from, model.device)

    @property
    def running(self) -> float:
        """The running baseline, kept with the checkpoint; see `TrainConfig.baseline`."""
        return self._state.running

    @running.setter
    def running(self, value: float) -> None:
        self._state = replace(self._state, running=value)

    def step(
        self,
        samples: Sequence[Sample],
        config: TrainConfig,
        *,
        reference: Path | None = None,
        on_progress: OnProgress | None = None,
    ) -> dict[str, float]:
        """One train call: `config.minibatches` optimizer steps over `samples`.

        If memory runs out, it is tried once more, from the beginning: with rows of half the size
        where calls allow it, and on a GPU with every layer computing again what it kept.

        Args:
            reference: folder of the adapter that `config.kl_penalty_coef` holds the policy to;
                None: the base model.

        Raises:
            GroupError: a sample is too long for a row.
            NonFiniteStep: loss, gradient or new weights were not finite.
            NotEnoughMemory: by the estimate it can't fit; nothing was computed.
            TrainingError: torch failed, or memory ran out twice. The adapter is unchanged.
            CheckpointError: the reference is no adapter of this base model.
        """

        def work(watch: Watch, row_size: int) -> dict[str, float]:
            key = (self._state.seed % 2**64, self._state.updates)
            with watch.phases.of("pack"):
                parts = minibatches(samples, config, key=key)
                updates = [rows_for(self._model, part, row_size) for part in parts]
            watch.plan(updates)
            return self._learn(updates, config, reference, watch)

        return self.attempt(work, samples, config, on_progress)

    def plan(self, row: int) -> MemoryPlan | None:
        """What a step with a row of so many positions would take; None: there is no estimate."""
        return self._attempts.planner.plan(row, 1)

    def attempt(
        self,
        work: Work,
        samples: Sequence[Sample],
        config: TrainConfig | TrainSFTConfig,
        on_progress: OnProgress | None,
    ) -> dict[str, float]:
        """Do `work`, and add how much it was and how long it took; an error undoes it.

        If memory runs out, it is tried once more, from the beginning: with rows of half the size
        where calls allow it, and on a GPU with every layer computing again what it kept.

        Args:
            samples: all that it trains.

        Raises:
            NotEnoughMemory: by the estimate it can't fit; nothing was computed.
            TrainingError: torch failed, or memory ran out twice.
        """
        begun = time.perf_counter()
        found = self._attempts.run(work, samples, config, on_progress)
        calls = [sample for sample in samples if not sample.observed]
        return {
            **found,
            "tokens_trained": sum(len(s.sampled_ids) for s in calls),
            "tokens_naive": sum(len(s.prompt_ids) + len(s.sampled_ids) for s in calls),
            "train_seconds": time.perf_counter() - begun,
        }

    def _learn(
        self,
        updates: Sequence[Sequence[Row]],
        config: TrainConfig,
        reference: Path | None,
        watch: Watch,
    ) -> dict[str, float]:
        with watch.phases.of("known logprobs"):
            known, figures = known_rows(
                self._model, self._name, updates, config, reference, watch.tell
            )
        with self.training():
            each = [self._update(rows, config, watch) for rows in known]
        return {
            **figures_of_call(each),
            **figures,
            "old_recomputed": float(config.old_logprobs == "recomputed"),
            "tokens_computed": watch.total,
        }

    def _update(
        self, rows: Sequence[KnownRow], config: TrainConfig, watch: Watch
    ) -> dict[str, float]:
        """One optimizer step."""
        self._optimizer.zero_grad(set_to_none=True)
        bonus = self._bonus(config)
        parts = []
        for row in rows:
            watch.begin(row.row)
            with watch.phases.of("forward"):
                part = self._loss(row, config, bonus.weight)
            with watch.phases.of("backward"):
                part.loss.backward()
            parts.append(replace(part, loss=part.loss.detach()))
            watch.end(row.row)
        self._keep()  # while the GPU is at work: the figures wait for it
        with watch.phases.of("optimizer"):
            figures = figures_of_update(parts, rows)
            norm = self.descend(figures["loss"], config, config.learning_rate)
        if config.entropy_target is not None:
            bonus_after = bonus.after(
                figures["entropy"], target=config.entropy_target, step=config.entropy_step
            )
            self._state = replace(self._state, bonus=bonus_after)
            figures["entropy_coef"] = bonus.weight
        return {**figures, "grad_norm": norm}

    def _bonus(self, config: TrainConfig) -> EntropyBonus:
        """Of the update to come."""
        if config.entropy_target is None or self._state.bonus is None:
            return EntropyBonus(config.entropy_coef, acts=True)
        return self._state.bonus

    def descend(
        self, loss: float, config: TrainConfig | TrainSFTConfig, learning_rate: float
    ) -> float:
        """Take the gradients that were gathered for `loss`: clip, update. Returns their norm.

        Raises:
            NonFiniteStep: `loss`, a gradient or a new weight is not finite.
        """
        self._keep()
        named = self._named()
        gradients = {name: p.grad for name, p in named.items() if p.grad is not None}
        norm = torch.nn.utils.get_total_norm(list(gradients.values()))
        check_gradient(gradients, loss=loss, norm=float(norm))
        torch.nn.utils.clip_grads_with_norm_(self._parameters, config.max_grad_norm, norm)
        for group in self._optimizer.param_groups:
            group.update(
                lr=learning_rate, betas=config.adam_betas, weight_decay=config.weight_decay
            )
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        check_weights(named, learning_rate=learning_rate)
        self._state = replace(self._state, updates=self._state.updates + 1)
        return float(norm)

    def _loss(self, known: KnownRow, config: TrainConfig, entropy_coef: float) -> LossParts:
        logprobs, entropies = entry_logprobs(
            self._model, known.row, entropy_gradient=entropy_coef != 0
        )
        parts = row_loss(known.tokens(logprobs, entropies), config, entropy_coef=entropy_coef)
        observed = known.observed(logprobs)
        if observed is None:
            return parts
        told = cross_entropy(*observed)
        return replace(parts, loss=parts.loss + told, observed=told.detach())

    def _named(self) -> dict[str, Tensor]:
        """The parameters under the names that they have in an adapter's file."""
        return dict(zip(self._names, self._parameters, strict=True))

    @contextmanager
    def training(self) -> Iterator[LoraModel]:
        """The model, with this adapter taking gradients."""
        with self._model.training(self._name):
            yield self._model

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Put adapter and optimizer back as they were if the body raises.

        Raises:
            TrainingError: for an error of torch, or want of memory. Neither it nor another error of
                ours holds a tensor.
        """
        before = _Before(self._state)
        self._befores.append(before)
        try:
            yield
        except BaseException as error:
            self._optimizer.zero_grad(set_to_none=True)
            if before.tensors is not None:
                weights, moments = before.tensors
                with torch.no_grad():
                    torch._foreach_copy_(self._parameters, weights)
                    put_back(self._optimizer, self._parameters, moments)
                del weights, moments  # an error keeps this frame alive
            self._state = before.state
            if isinstance(error, RuntimeError | MemoryError | ARTError):
                traceback.clear_frames(error.__traceback__)  # they hold the tensors of the step
            if isinstance(error, RuntimeError | MemoryError):
                raise TrainingError(
                    f"the step failed ({error})",
                    fix="The adapter is unchanged. If memory ran out, lower max_tokens_per_row.",
                ) from error
            raise
        finally:
            self._befores.remove(before)
            before.tensors = None  # an error keeps this frame alive

    def _keep(self) -> None:
        """Copy what the optimizer is about to change, for those who may have to undo it."""
        waiting = [before for before in self._befores if before.tensors is None]
        if waiting:
            moments = get_moments(self._optimizer, self._parameters)
            tensors = (copies(self._parameters), moments)
            for before in waiting:
                before.tensors = tensors

    # Checkpoints

    def save(self, folder: Path) -> None:
        """Write adapter, optimizer moments and counters into `folder`.

        Raises:
            TrainingError: a weight or a moment is not finite; nothing is written.
        """
        moments = get_moments(self._optimizer, self._parameters)
        bad = first_bad({**self._model.adapter_weights(self._name), **moments})
        if bad is not None:
            raise TrainingError(
                f"{bad} is not finite",
                fix="It is not saved. Register the model again to go on from its last step.",
            )
        self._model.save_adapter(self._name, folder)
        write_state(folder, self._state, moments)

    def load(self, folder: Path) -> None:
        """Go on from `folder`; an adapter alone starts with a fresh optimizer.

        Raises:
            CheckpointError: the files are no checkpoint of this adapter.
        """
        self._keep()
        self._model.load_adapter(self._name, folder)
        if not (folder / OPTIMIZER).exists():
            set_moments(self._optimizer, self._parameters, {})
            return
        self._state, moments = read_state(folder)
        set_moments(self._optimizer, self._parameters, moments, source=folder)
