"""One GRPO step on one adapter: samples -> rows -> loss -> gradient -> AdamW.

In: the samples of a step. Out: the adapter changed in place, and figures; or an exception and the
adapter as it was. The same checkpoint, samples and settings give the same bits again, at the same
number of threads.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from art_core.batch.forest import Row, Sample
from art_core.batch.minibatches import minibatches
from art_core.config import TrainConfig
from art_core.errors import ARTError, CheckpointError, TrainingError
from art_core.nn.lora import LoraModel
from art_core.training.logprobs import entry_logprobs
from art_core.training.loss import LossParts, clipped_policy_loss
from art_core.training.rows import rows_for

OPTIMIZER = "optimizer.safetensors"
STATE = "trainer.json"
OnProgress = Callable[[int, int], None]
"""Called with (positions done, positions in all)."""


class Trainer:
    """Trains the adapter `name` of `model`; every method runs on the model's owner thread.

    Args:
        seed: of the order in which trajectories are dealt to minibatches.
    """

    def __init__(self, model: LoraModel, name: str, *, seed: int) -> None:
        self._model = model
        self._name = name
        self._seed = seed
        self._updates = 0
        with model.training(name) as parameters:
            self._parameters = parameters
        self._optimizer = torch.optim.AdamW(self._parameters, lr=0.0)

    def step(
        self,
        samples: Sequence[Sample],
        config: TrainConfig,
        *,
        on_progress: OnProgress | None = None,
    ) -> dict[str, float]:
        """One train call: `config.minibatches` optimizer steps over `samples`.

        Raises:
            GroupError: a sample is too long for a row.
            TrainingError: loss, gradient or new weights were not finite, or torch failed (out of
                memory). The adapter is unchanged.
        """
        begun = time.perf_counter()
        parts = self._rows(samples, config)
        total = sum(len(row) for rows in parts for row in rows)
        done = 0
        figures: list[dict[str, float]] = []
        with self._model.training(self._name), self.undone_on_error():
            if len(parts) > 1:
                parts = [[self._settle_old(row) for row in rows] for rows in parts]
            for rows in parts:
                figures.append(self._update(rows, config, on_progress, done, total))
                done += sum(len(row) for row in rows)
        mean = {key: math.fsum(f[key] for f in figures) / len(figures) for key in figures[0]}
        return {
            **mean,
            "tokens_trained": sum(len(s.sampled_ids) for s in samples),
            "tokens_computed": total,
            "tokens_naive": sum(len(s.prompt_ids) + len(s.sampled_ids) for s in samples),
            "train_seconds": time.perf_counter() - begun,
        }

    def _rows(self, samples: Sequence[Sample], config: TrainConfig) -> list[list[Row]]:
        """Rows of each optimizer step."""
        key = (self._seed % 2**64, self._updates)
        parts = minibatches(samples, config, key=key)
        return [rows_for(self._model, part, config.max_tokens_per_row) for part in parts]

    def _settle_old(self, row: Row) -> Row:
        """Old logprobs of distorted entries, taken before the first of several updates."""
        if not row.entries.distorted.any():
            return row
        with torch.no_grad():
            logprobs = entry_logprobs(self._model, row)[0].double().cpu().numpy()
        entries = row.entries
        old = np.where(entries.distorted, logprobs, entries.logprob)
        settled = np.zeros_like(entries.distorted)
        return replace(row, entries=replace(entries, logprob=old, distorted=settled))

    def _update(
        self,
        rows: Sequence[Row],
        config: TrainConfig,
        on_progress: OnProgress | None,
        done: int,
        total: int,
    ) -> dict[str, float]:
        sums = {"loss": 0.0, "entropy": 0.0, "clipped": 0.0, "kl": 0.0}
        self._optimizer.zero_grad(set_to_none=True)
        for row in rows:
            loss = self._loss(row, config)
            loss.loss.backward()
            sums["loss"] += float(loss.loss.detach())
            sums["entropy"] += loss.entropy
            sums["clipped"] += loss.clipped
            sums["kl"] += loss.kl
            done += len(row)
            if on_progress is not None:
                on_progress(done, total)
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, config.max_grad_norm))
        if not (math.isfinite(norm) and math.isfinite(sums["loss"])):
            raise TrainingError(
                "loss or gradient is not finite",
                got={"loss": sums["loss"], "grad_norm": norm},
                expected="finite numbers",
                fix="The adapter is unchanged. Lower the learning rate, or look for wild rewards.",
            )
        for group in self._optimizer.param_groups:
            group.update(
                lr=config.learning_rate, betas=config.adam_betas, weight_decay=config.weight_decay
            )
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if not bool(torch.nn.utils.get_total_norm(self._parameters).isfinite()):
            raise TrainingError(
                "the update made weights that are not finite",
                got={"learning_rate": config.learning_rate},
                fix="The adapter is unchanged. Lower the learning rate.",
            )
        self._updates += 1
        return {**sums, "grad_norm": norm}

    def _loss(self, row: Row, config: TrainConfig) -> LossParts:
        logprobs, entropies = entry_logprobs(
            self._model, row, entropy_gradient=config.entropy_coef != 0
        )
        entries = row.entries

        def tensor(values: object) -> Tensor:
            return torch.as_tensor(values, device=logprobs.device).to(logprobs.dtype)

        distorted = torch.from_numpy(entries.distorted).to(logprobs.device)
        old = torch.where(distorted, logprobs.detach(), tensor(entries.logprob))
        return clipped_policy_loss(
            logprobs,
            entropies,
            old,
            tensor(entries.advantage),
            tensor(entries.weight),
            epsilon=config.epsilon,
            epsilon_high=config.epsilon_high,
            entropy_coef=config.entropy_coef,
        )

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Put adapter and optimizer back as they were if the body raises."""
        weights = [p.detach().clone() for p in self._parameters]
        moments = self._moments()
        updates = self._updates
        try:
            yield
        except BaseException as error:
            self._optimizer.zero_grad(set_to_none=True)
            with torch.no_grad():
                for parameter, weight in zip(self._parameters, weights, strict=True):
                    parameter.copy_(weight)
            self._set_moments(moments)
            self._updates = updates
            if isinstance(error, RuntimeError) and not isinstance(error, ARTError):
                raise TrainingError(
                    f"the step failed ({error})",
                    fix="The adapter is unchanged. If memory ran out, lower "
                    "TrainConfig(max_tokens_per_row=...).",
                ) from error
            raise

    # Checkpoints

    def save(self, folder: Path) -> None:
        """Write adapter, optimizer moments and counters into `folder`."""
        from safetensors.torch import save_file

        self._model.save_adapter(self._name, folder)
        save_file(self._moments(), folder / OPTIMIZER)
        state = {"updates": self._updates, "seed": self._seed}
        (folder / STATE).write_text(json.dumps(state))

    def load(self, folder: Path) -> None:
        """Go on from `folder`; an adapter alone starts with a fresh optimizer.

        Raises:
            CheckpointError: the files are no checkpoint of this adapter.
        """
        self._model.load_adapter(self._name, folder)
        if not (folder / OPTIMIZER).exists():
            self._set_moments({})
            return
        self._updates, self._seed, moments = _read_state(folder)
        self._set_moments(moments, source=folder)

    def _moments(self) -> dict[str, Tensor]:
        """The optimizer's tensors, by parameter and name."""
        found: dict[str, Tensor] = {}
        for i, parameter in enumerate(self._parameters):
            for key, value in self._optimizer.state.get(parameter, {}).items():
                found[f"{i}.{key}"] = value.detach().clone()
        return found

    def _set_moments(self, moments: dict[str, Tensor], *, source: Path | None = None) -> None:
        state: dict[Tensor, dict[str, Tensor]] = {}
        for key, value in moments.items():
            index, _, name = key.partition(".")
            parameter = self._parameters[int(index)] if int(index) < len(self._parameters) else None
            if parameter is None or value.shape not in (parameter.shape, torch.Size()):
                raise CheckpointError(
                    f"optimizer state {key} fits no weight of the adapter",
                    got=str(source),
                    fix="Choose another step.",
                )
            # torch keeps the counter of steps on the CPU
            value = value if name == "step" else value.to(parameter.device)
            state.setdefault(parameter, {})[name] = value
        self._optimizer.state.clear()
        self._optimizer.state.update(state)


def _read_state(folder: Path) -> tuple[int, int, dict[str, Tensor]]:
    """Number of updates, seed and optimizer moments."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        state = json.loads((folder / STATE).read_text("utf-8"))
        return int(state["updates"]), int(state["seed"]), load_file(folder / OPTIMIZER)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"optimizer state can't be read ({error})",
            got=str(folder),
            fix="Choose another step.",
        ) from error
