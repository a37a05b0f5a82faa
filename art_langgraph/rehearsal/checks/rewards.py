"""Rewards: whether there is anything to learn from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from art_core.batch.scales import are_equal
from art_core.plural import plural
from art_langgraph.rehearsal.blame import named, place_of
from art_langgraph.rehearsal.finding import Finding
from art_langgraph.rehearsal.played import Play, Rehearsal
from art_langgraph.rehearsal.wording import counted


def check_rewards(rehearsal: Rehearsal) -> Iterator[Finding]:
    """Faults of the reward function, and groups whose rewards are all equal."""
    if not rehearsal.rewarded:
        yield Finding(
            "rewards",
            "skipped",
            "no reward function was given, so nobody knows whether there is anything to learn from",
            "Name it by --reward module:function; it takes the trajectory (and the scenario).",
        )
        return
    wrong = [play for play in rehearsal.plays if play.reward_error is not None]
    if wrong:
        yield _fault(wrong, len(rehearsal.plays))
    groups = [rehearsal.group(i) for i in range(len(rehearsal.scenarios))]
    rewards = [[r for play in group if (r := reward(play)) is not None] for group in groups]
    everything = [r for group in rewards for r in group]
    if not everything:
        return
    if max(map(len, groups)) < 2:
        yield Finding(
            "rewards",
            "skipped",
            f"a group of one has no other reward to differ from ({_values(everything)})",
            "Play more rollouts of each scenario: --group 5.",
        )
        return
    flat = [r for r in rewards if len(r) < 2 or are_equal(r)]
    span = f"from {min(everything):g} to {max(everything):g}"
    if not flat:
        yield Finding(
            "rewards",
            "pass",
            f"rewards differ within {counted(len(groups), len(groups), 'group')}, {span}"
            f"{_caveat(rehearsal)}",
        )
    elif len(flat) < len(groups):
        yield Finding(
            "rewards",
            "pass",
            f"rewards differ within {len(groups) - len(flat)} of {plural(len(groups), 'group')}, "
            f"{span}; the others would be skipped in training",
        )
    else:
        unearned = rehearsal.scripted and max(everything) <= 0  # a model may yet
        yield Finding(
            "rewards",
            "skipped" if len(everything) < 2 else "warn" if unearned else "fail",
            f"all rewards of a group are equal ({_values(everything)}): GRPO learns from "
            "differences within a group, and there are none",
            _advice(rehearsal),
        )


def reward(play: Play) -> float | None:
    """What the rollout counts in its group; None if it has no place there."""
    if play.failure is not None or play.reward_error is not None:
        return None
    return play.trajectory.reward


def _fault(wrong: Sequence[Play], total: int) -> Finding:
    error = wrong[0].reward_error
    assert error is not None
    ends = dict.fromkeys(play.trajectory.ended for play in wrong)
    how = f" that ended by {', '.join(ends)}" if set(ends) != {"completed"} else ""
    return Finding(
        "rewards",
        "fail",
        f"the reward function failed on {counted(len(wrong), total, 'rollout')}{how}: "
        f"{named(error)}{place_of(error)}",
        "It is asked of every rollout, also of those that ended badly: look at traj.ended and "
        "traj.state before you read them, and return a number.",
    )


def _caveat(rehearsal: Rehearsal) -> str:
    return (
        ", as these manners do; a model's answers may be more alike" if rehearsal.scripted else ""
    )


def _advice(rehearsal: Rehearsal) -> str:
    if rehearsal.scripted:
        return (
            "A scripted model may be too dull to earn anything: look at what the reward wants, try "
            "--model SmolLM2-135M-Instruct, and give a part of the reward for each part of the job."
        )
    return (
        "Make the reward finer (a part of it for each part of the job), choose easier scenarios "
        "or a stronger base model, or show it how by supervised examples first."
    )


def _values(rewards: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in dict.fromkeys(rewards))
