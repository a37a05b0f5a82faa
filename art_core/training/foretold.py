"""What is said of a run's memory when its model is registered, before anything is played.

In: the trainer. Out: the plan of a step of the usual size, in the log. The plan of a
step itself, and its refusal, come with the step (training/attempt.py).
"""

from __future__ import annotations

import logging
from dataclasses import replace

from art_core.config import TrainConfig
from art_core.training.trainer import Trainer

_log = logging.getLogger(__name__)


def foretell(trainer: Trainer, *, gives_way: bool) -> None:
    """Say whether a step of the usual size will fit.

    Args:
        gives_way: vLLM has memory of the device now, and none of it while a step is trained.
    """
    plan = trainer.plan(TrainConfig().max_tokens_per_row)
    if plan is not None and gives_way:
        plan = replace(plan, room=replace(plan.room, available=plan.room.whole))
    if plan is None:
        _log.info("memory plan: none is known for this kind of model")
    elif plan.lacks:
        changes = " ".join(plan.changes(longest_call=1))
        _log.warning("memory plan: a step will not fit: %s. %s", plan, changes)
    else:
        _log.info("memory plan: %s", plan)
