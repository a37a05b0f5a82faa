"""A finished quickstart as it lies in a run folder, with figures known beforehand.

Two steps of three customers, four rollouts each. Step 0 serves the first tool's customers right and
no others (reward 1/3), step 1 all (reward 1). Held out are three customers, one a tool: before, the
first is served right, the second is told `said`, the third rollout failed by a fault; after, all
are served right.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

import art_core as art
from art_core import checkpoints
from art_core.calls import ModelCall
from art_core.errors import RolloutFailure
from art_core.rundir import RunDir
from art_core.runlog import log_step
from art_core.trajectories import Trajectory, TrajectoryGroup
from art_langgraph.quickstart.clientele import make_clientele
from art_langgraph.quickstart.customers import PARTS, TOOLS, Customer, succeeded, total
from art_langgraph.quickstart.journal import Journal
from art_langgraph.quickstart.recipe import Recipe
from art_langgraph.quickstart.score import score

RECIPE = Recipe().quick()
"""What the command makes of `--quick`."""
NAME = "shop-seed0-quick"
"""What the command calls such a run."""
GATHER_SECONDS = 4.0
PHASES = {"load": 5.0, "warm_up": 3.0, "before": 10.0, "learn": 40.0, "after": 5.0}

MODEL_TEXTS = (
    "see [/foo] here",
    "arr[i] + 1",
    "x [bold]y",
    "plain \x1b]0;owned\x07 z",
    "\x1b[2Jgone",
    "a\rb",
    "\ud83d (lone surrogate)",
    "café → \U0001f600",
    "<script>alert(1)</script> <b>& $look ${title}",
    "right\u202eto left",
)
"""What a model may say: the texts that broke terminals elsewhere, and some for a page."""
SHOWN_TEXTS = (
    "see [/foo] here",
    "arr[i] + 1",
    "x [bold]y",
    "plain \\x1b]0;owned\\x07 z",
    "\\x1b[2Jgone",
    "a\\rb",
    "\N{REPLACEMENT CHARACTER} (lone surrogate)",
    "café → \U0001f600",
    "<script>alert(1)</script> <b>& $look ${title}",
    "right\\u202eto left",
)
"""The same, as people must see them."""


def trajectory(customer: Customer, *, right: bool, said: str = "I don't know.") -> Trajectory:
    """One rollout: served right, or told `said`."""
    asked = {"role": "user", "content": customer.message}
    function = {"name": customer.tool, "arguments": json.dumps(customer.arguments)}
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    returned = {"role": "tool", "content": customer.fact, "tool_call_id": "1"}
    before = [asked, called, returned] if right else [asked]
    answer = {"role": "assistant", "content": f"It is {customer.fact}." if right else said}
    call = ModelCall(
        record_id=f"{customer.id}-{right}",
        model=NAME,
        step=0,
        request={"messages": before},
        message=answer,
        finish_reason="stop",
        response=b"{}",
        prompt_ids=np.array([1, 2], np.int32),
        sampled_ids=np.array([3, 4, 5], np.int32),
        logprobs=np.full(3, -0.5, np.float32),
    )
    parts = dict.fromkeys(PARTS, float(right))
    success = succeeded(parts)
    return Trajectory(
        calls=[call],
        reward=total(parts),
        metrics={**parts, "success": success, f"success/{customer.tool}": success},
        metadata={"customer": customer.id, "tool": customer.tool},
    )


def record(base_path: Path, said: str = "I don't know.") -> tuple[RunDir, Journal]:
    """Write the run under `base_path`."""
    run = RunDir.at(base_path, "quickstart", NAME)
    model = art.TrainableModel(
        name=NAME, project="quickstart", base_model=RECIPE.base_model, base_path=str(base_path)
    )
    clientele = make_clientele(RECIPE)
    warm = RECIPE.warm_up_steps
    for step in range(2):
        groups = [
            TrajectoryGroup(
                trajectory(c, right=step == 1 or c.tool == TOOLS[0])
                for _ in range(RECIPE.group_size)
            )
            for c in clientele.of_step(step, RECIPE.groups)
        ]
        figures = {"entropy": math.nan if step else 1.5, "step_seconds": 8.0}
        log_step(run, "train", warm + step, groups, {**figures, "gather_seconds": GATHER_SECONDS})
    first, second, third = clientele.held_out
    fault = RolloutFailure("the network failed", trajectory=trajectory(third, right=False))
    before = [
        TrajectoryGroup([trajectory(first, right=True)]),
        TrajectoryGroup([trajectory(second, right=False, said=said)]),
        TrajectoryGroup([], exceptions=[fault]),
    ]
    after = [TrajectoryGroup([trajectory(c, right=True)]) for c in clientele.held_out]
    log_step(run, "test", warm, before)
    log_step(run, "test", warm + 2, after)
    journal = Journal(model, RECIPE)
    journal.before = score(clientele.held_out, before, warm)
    journal.after = score(clientele.held_out, after, warm + 2)
    journal.stopped, journal.phases, journal.first_reward_seconds = "max_steps", dict(PHASES), 9.0
    journal.save()
    with RunDir.open(base_path, "quickstart", NAME) as opened:
        for step in range(warm + 3):
            checkpoints.save(opened, step, lambda folder: (folder / "x").touch())
    return run, journal
