"""Which algorithm shall be the default: each of them on the quickstart's job and on a tool task.

In: tasks, contenders (contenders.py, which says what is held equal), learning rates, seeds. Every
run is a process of its own (algorithm_run.py), several side by side, each bounded in steps and in
time. Out: `steps.jsonl` and `results.jsonl` in a folder, a table of them, and the benchmark's line
for each task: updates until a step's rollouts earn 0.9 on average, with the quickstart's own
settings and with the best of the others, seed by seed. What is in `results.jsonl` is not played
again, and a run that was cut short goes on where its folder is still there.
Gate: the judge pays what it should, and a step of each contender makes likelier what it was
rewarded for.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np

from art_langgraph.quickstart.recipe import Recipe
from benchmarks.algorithm_diary import RESULTS_FILE
from benchmarks.algorithm_gate import gate, tiny_base
from benchmarks.algorithm_plan import Plan, Run, Task
from benchmarks.comparison import Comparison, machine
from benchmarks.contenders import contenders, own_rate, twins

GOAL = 0.9
"""Mean reward of a step (B10)."""
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_GRACE = 5.0
"""Seconds between asking a run to end and ending it."""

Result = Mapping[str, Any]
"""A line of `results.jsonl`; see `algorithm_run`."""


@dataclass
class Work:
    """Runs to be played side by side."""

    jobs: int
    threads: int
    log: Path
    """What the runs say beside their figures."""
    until: float | None
    """`time.time()` at which all has ended."""
    running: dict[subprocess.Popen[bytes], Plan] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def play(self, plans: Sequence[Plan]) -> None:
        """Play them in order. Whatever ends this ends the runs too."""
        waiting = list(plans)
        with self.log.open("ab") as log, self._none_left():
            while (waiting or self.running) and not self._is_over():
                while waiting and len(self.running) < self.jobs and self._is_worth(waiting[0]):
                    self._start(waiting.pop(0), log)
                if not self.running:
                    return
                self._collect()
                time.sleep(0.2)

    def _is_over(self) -> bool:
        return self.until is not None and time.time() >= self.until

    def _is_worth(self, plan: Plan) -> bool:
        """False if such a run would hardly end; None is known as long as none has."""
        taken = [r["seconds"] for r in read_results(Path(plan.out)) if r["task"] == plan.run.task]
        if self.until is None or not taken:
            return True
        return time.time() + float(statistics.median(taken)) < self.until

    def _start(self, plan: Plan, log: Any) -> None:
        env = {**os.environ, **dict.fromkeys(_THREADS, str(self.threads))}
        env |= {"TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
        command = [sys.executable, "-m", "benchmarks.algorithm_run", json.dumps(asdict(plan))]
        child = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        self.running[child] = plan

    def _collect(self) -> None:
        for child in [c for c in self.running if c.poll() is not None]:
            plan = self.running.pop(child)
            if child.returncode:
                self.failed.append(plan.run.id)
                print(f"{plan.run.id}: failed ({child.returncode}), see {self.log}", flush=True)
                continue
            print(next((_told(r) for r in _of(plan)), f"{plan.run.id}: not through"), flush=True)

    @contextmanager
    def _none_left(self) -> Iterator[None]:
        try:
            yield
        finally:
            for child in self.running:
                child.terminate()
            for child in self.running:
                try:
                    child.wait(_GRACE)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()


def read_results(out: Path) -> list[Result]:
    """Of all runs that are through, one each; a line that was cut short is none."""
    path = out / RESULTS_FILE
    found: dict[str, Result] = {}
    for line in path.read_text("utf-8").splitlines() if path.exists() else []:
        try:
            result = json.loads(line)
        except ValueError:
            continue
        found[result["id"]] = result
    return [*found.values()]


def _of(plan: Plan) -> list[Result]:
    return [result for result in read_results(Path(plan.out)) if result["id"] == plan.run.id]


def _told(result: Result) -> str:
    rewards = " ".join(f"{reward:.2f}" for reward in result["rewards"])
    return (
        f"{result['id']}: {rewards}; held-out {result['before']['success']:.2f} -> "
        f"{result['after']['success']:.2f}, {result['stopped']}, {result['seconds']:.0f} s"
    )


def common_steps(results: Sequence[Result]) -> int:
    """First steps that all runs have: one that was cut by time says nothing of those it lacks."""
    return min(len(r["rewards"]) if r["stopped"] == "time" else r["planned"] for r in results)


def steps_to_goal(result: Result, steps: int) -> float:
    """Train calls before the first of `steps` whose rollouts earn GOAL; inf if none does."""
    rewards = result["rewards"][:steps]
    return next((float(i) for i, reward in enumerate(rewards) if reward >= GOAL), math.inf)


def area(result: Result, steps: int) -> float:
    """Mean reward over `steps`; a run that has learned stays as it was in the end."""
    rewards = result["rewards"][:steps]
    return statistics.fmean([*rewards, *[rewards[-1]] * (steps - len(rewards))])


def table(results: Sequence[Result]) -> str:
    """Of each task, contender and rate: medians over the seeds, and the span in brackets. Rewards
    are those of "first": the steps that all runs of the task have; the rest is of the whole run."""
    head = ("task", "first", "contender", "lr x", "seeds", "steps to 0.9", "mean reward",
            "held-out", "weakest", "entropy", "clipped", "s/step")  # fmt: skip
    rows = [head]
    for key in sorted({_key(result) for result in results}):
        some = [result for result in results if _key(result) == key]
        first = common_steps([result for result in results if result["task"] == key[0]])
        rows.append(
            (
                key[0],
                str(first),
                key[1],
                f"{key[2]:g}",
                str(len(some)),
                _spanned([steps_to_goal(r, first) for r in some], ".0f"),
                _spanned([area(r, first) for r in some], ".2f"),
                _spanned([r["after"]["success"] for r in some], ".2f"),
                _spanned([r["after"]["weakest"] for r in some], ".2f"),
                _spanned([_last(r["entropy"]) for r in some], ".2f"),
                _spanned([_mean(r["clipped"]) for r in some], ".3f"),
                _spanned([r["step_seconds"] for r in some], ".0f"),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = [" | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(
        f"| {line} |" for line in [lines[0], "-|-".join("-" * w for w in widths), *lines[1:]]
    )


def _key(result: Result) -> tuple[str, str, float]:
    return (result["task"], result["contender"], result["rate"])


def _spanned(values: Sequence[float], form: str) -> str:
    middle = format(statistics.median(values), form)
    low, high = format(min(values), form), format(max(values), form)
    return middle if low == high else f"{middle} ({low}-{high})"


def _last(values: Sequence[float | None]) -> float:
    return next((v for v in reversed(values) if v is not None), math.nan)


def _mean(values: Sequence[float | None]) -> float:
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known else math.nan


def verdict(task: str, results: Sequence[Result]) -> Comparison | None:
    """The quickstart's own settings beside the best other contender at its best rate, over the
    seeds and the steps that both have; None if there are no two of them yet."""
    of_task = [result for result in results if result["task"] == task]
    first = common_steps(of_task) if of_task else 0
    sides: dict[tuple[str, str, float], dict[int, Result]] = {}
    for result in of_task:
        sides.setdefault(_key(result), {})[result["seed"]] = result
    mine = [key for key in sides if key[1] == "own"]
    others = [key for key in sides if key[1] != "own"]
    if not mine or not others:
        return None
    own, best = (max(keys, key=lambda k: _rank(sides[k], first)) for keys in (mine, others))
    seeds = sorted(sides[own].keys() & sides[best].keys())
    if not seeds:
        return None
    pairs = np.array([[_counted(sides[key][s], first) for key in (own, best)] for s in seeds])
    ratios = pairs[:, 1] / pairs[:, 0]
    low, high = np.percentile(ratios, [10, 90])
    return Comparison(
        name=f"algorithms {task}",
        ours=float(np.median(pairs[:, 0])),
        peer=float(np.median(pairs[:, 1])),
        peer_name=f"{best[1]} at {best[2]:g} x the learning rate; ours at {own[2]:g} x",
        ratio=round(float(np.median(ratios)), 3),
        goal=f"steps to reward {GOAL} of the first {first}, seeds {seeds}: the default has fewest",
        spread=(round(float(low), 3), round(float(high), 3)),
        machine=machine(),
    )


def _counted(result: Result, steps: int) -> float:
    """Steps to the goal, the steps themselves and not those before; a run that did not get there in
    `steps` is taken to get there in the one after."""
    return min(steps_to_goal(result, steps), float(steps)) + 1.0


def _rank(by_seed: Mapping[int, Result], first: int) -> tuple[int, float, float]:
    """The more seeds, the fewer steps, the more reward on the way, the better."""
    runs = by_seed.values()
    steps = statistics.median(_counted(r, first) for r in runs)
    return (len(by_seed), -steps, statistics.median(area(r, first) for r in runs))


def all_runs(
    tasks: Sequence[Task],
    names: Sequence[str],
    rates: Sequence[float],
    seeds: Sequence[int],
    *,
    own_rates: bool,
) -> list[Run]:
    """Every run, the first rate first, seed after seed, so that what is there soon can be compared.

    own_rates: a contender whose step is made of more or fewer updates is also played at its own
        rate, last.
    """
    own = Recipe().train
    field = contenders(own)
    runs = [
        Run(task, name, rate, seed)
        for rate in rates
        for seed in seeds
        for task in tasks
        for name in names
    ]
    if not own_rates:
        return runs
    return runs + [
        Run(task, name, own_rate(field[name], own), seed)
        for seed in seeds
        for task in tasks
        for name in names
        if own_rate(field[name], own) not in rates
    ]


def parse() -> argparse.Namespace:
    every = [*contenders(Recipe().train)]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the gate, and two runs of noise")
    parser.add_argument("--out", type=Path, default=Path(".art/algorithms"), help="results")
    parser.add_argument("--runs", type=Path, help="run folders (26 MB a step); default: in --out")
    parser.add_argument("--model", default=Recipe().base_model, help="name or folder")
    parser.add_argument("--tasks", nargs="+", default=[*get_args(Task)], choices=get_args(Task))
    parser.add_argument("--contenders", nargs="+", default=every, choices=every)
    parser.add_argument(
        "--rates", nargs="+", type=float, default=[1.0, 0.5], help="x the quickstart's"
    )
    parser.add_argument(
        "--own-rates",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also the rate that makes up for more or fewer updates a step",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--threads", type=int, default=2, help="of each run")
    parser.add_argument("--minutes", type=float, default=20.0, help="a run may learn, all starts")
    parser.add_argument("--steps", type=int, help="of a run, at most; default: the task's own")
    parser.add_argument("--seconds", type=float, help="end after so many, whatever is not through")
    parser.add_argument("--table", action="store_true", help="only show what is there")
    return parser.parse_args()


def compare(args: argparse.Namespace, runs: Sequence[Run], began: float) -> list[str]:
    """Play what is missing of `runs`; return those that failed."""
    out, folders = args.out.resolve(), (args.runs or args.out / "runs").resolve()
    out.mkdir(parents=True, exist_ok=True)
    done = {result["id"] for result in read_results(out)}
    until = (
        None if args.seconds is None else time.time() + args.seconds - (time.monotonic() - began)
    )
    plans = [
        Plan(
            run=run,
            out=str(out),
            runs=str(folders),
            model=args.model,
            seconds=60 * args.minutes,
            until=until and until - 2 * _GRACE,
            steps=args.steps,
            quick=args.quick,
        )
        for run in runs
        if run.id not in done
    ]
    print(f"{len(done)} runs are there, {len(plans)} to play", flush=True)
    work = Work(args.jobs, args.threads, out / "log.txt", until and until - _GRACE)
    work.play(plans)
    return work.failed


def report(out: Path) -> None:
    """The table and the lines."""
    results = read_results(out)
    print(table(results))
    print(json.dumps({"left out": twins(Recipe().train)}))
    for task in get_args(Task):
        found = verdict(task, results)
        if found is not None:
            print(found.line())


def quick(args: argparse.Namespace, began: float) -> None:
    """The gate, and two contenders on both tasks with a model of noise: twice, the second for
    nothing.

    Raises:
        RuntimeError: a part does not work.
    """
    print(json.dumps(gate()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        args.out, args.runs, args.steps = Path(folder) / "out", None, 1
        args.model = str(tiny_base(Path(folder)))
        runs = all_runs(args.tasks, ["own", "dppo"], [1.0], [0], own_rates=True)
        for _ in range(2):
            failed = compare(args, runs, began)
            if failed or len(read_results(args.out)) != len(runs):
                raise RuntimeError((args.out / "log.txt").read_text("utf-8"))
        report(args.out)


def main() -> None:
    """Play what is missing, show what is there."""
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the runs end with it
    args = parse()
    if args.quick:
        quick(args, began)
        return
    failed: list[str] = []
    if not args.table:
        runs = all_runs(
            args.tasks, args.contenders, args.rates, args.seeds, own_rates=args.own_rates
        )
        failed = compare(args, runs, began)
    report(args.out)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
