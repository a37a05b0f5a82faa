"""What every backend does, here or on another machine: the whole of `art_core.backend.Backend`.

A test module derives from `BackendConformance` and gives the fixtures `backend` and `make` (a model
by its name, not registered yet). Left out: that a step has the same bytes everywhere, which is in
tests/server/test_split.py.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import art_core as art
from art_core.errors import (
    ConfigError,
    GroupError,
    ModelNotRegistered,
    NoTrainableTokens,
    RewardError,
    StaleCall,
    WrongModel,
)
from tests.core.sample import make_call
from tests.core.small_run import CONFIG, play, say

Make = Callable[[str], art.TrainableModel[Any]]
SAID: list[Any] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
]
SFT = art.TrainSFTConfig(learning_rate=1e-2)


class BackendConformance:
    """Each test has a model of its own, so that all may share a backend."""

    async def test_a_model_registered_twice_is_one(self, backend: art.Backend, make: Make) -> None:
        first, again = await backend.register(make("r1")), await backend.register(make("r1"))
        assert first == again
        assert first.base_url.endswith("/v1")
        assert first.model_name == "r1"
        assert first.api_key not in repr(first)

    async def test_other_settings_under_one_name_are_refused(
        self, backend: art.Backend, make: Make
    ) -> None:
        model = make("r2")
        await model.register(backend)
        other = model.art_config.model_copy(update={"seed": 5})
        with pytest.raises(ConfigError, match="art_config"):
            await backend.register(model.model_copy(update={"art_config": other}))

    async def test_who_is_not_registered_is_told(self, backend: art.Backend, make: Make) -> None:
        stranger = make("stranger")
        groups = [art.TrajectoryGroup([art.Trajectory(reward=1.0)])]
        mark = art.Bookmark("file", {})
        for asked in (
            backend.get_step(stranger),
            backend.train(stranger, groups, CONFIG),
            backend.train_sft(stranger, list(groups[0]), SFT),
            backend.sft_loss(stranger, list(groups[0]), SFT),
            backend.join(stranger, list(groups[0])),
            backend.bookmarks(stranger),
            backend.set_bookmark(stranger, mark),
            backend.log(stranger, groups, split="val"),
            backend.delete_checkpoints(stranger, best_metric="val/reward"),
        ):
            with pytest.raises(ModelNotRegistered):
                await asked

    async def test_a_step_is_learned_served_and_told(
        self, backend: art.Backend, make: Make
    ) -> None:
        model = make("learns")
        await model.register(backend)
        assert await model.get_step() == 0
        groups = await play(model, (0.0, 1.0), (1.0, 1.0))
        result = await model.train(groups, CONFIG)
        assert (result.step, result.trained, await model.get_step()) == (1, True, 1)
        assert math.isfinite(result.metrics["loss"])
        assert [(s.group, s.trajectories) for s in result.skipped] == [(1, 2)]  # equal rewards
        answers = [(await say(model, name=n)).model_extra for n in ("learns", "learns@0")]
        assert [(a or {}).get("art_policy") for a in answers] == ["learns@1", "learns@0"]

    async def test_a_step_with_nothing_to_learn_is_none(
        self, backend: art.Backend, make: Make
    ) -> None:
        model = make("equal")
        await model.register(backend)
        result = await model.train(await play(model, (1.0, 1.0)), CONFIG)
        assert (result.step, result.trained) == (0, False)
        assert result.reasons

    async def test_what_cannot_be_trained_is_refused_and_nothing_changes(
        self, backend: art.Backend, make: Make
    ) -> None:
        model = make("refuses")
        await model.register(backend)
        [group] = await play(model, (0.0, 1.0))
        call = group.trajectories[0].calls[0]

        def of(*calls: art.ModelCall, reward: Any = 1.0) -> list[art.TrajectoryGroup]:
            odd = art.Trajectory(reward=0.0, calls=list(calls))
            odd.reward = reward
            return [art.TrajectoryGroup([*group.trajectories, odd])]

        foreign = make_call(model="another", record_id="local-1", step=0)
        future = make_call(model="refuses", record_id="local-2", step=-9)
        without: dict[str, Any] = dict.fromkeys(("prompt_ids", "sampled_ids", "logprobs"))
        blank = make_call(model="refuses", record_id="local-3", step=0, **without)
        for groups, kind in (
            (of(call, reward=None), RewardError),
            (of(call, reward="good"), RewardError),
            (of(foreign), WrongModel),
            (of(future), StaleCall),
            (of(blank), NoTrainableTokens),
        ):
            with pytest.raises(kind) as caught:
                await model.train(groups, CONFIG)
            assert isinstance(caught.value, GroupError)
            assert caught.value.what
        assert await model.get_step() == 0

    async def test_bookmarks_go_with_the_step(self, backend: art.Backend, make: Make) -> None:
        model = make("marks")
        await model.register(backend)
        assert await model.bookmarks() == {}
        place = {"row": 3, "name": "caf\u00e9", "seen": [1, None, 0.5]}
        await backend.set_bookmark(model, art.Bookmark("first", place))
        rows = [art.Trajectory(messages_and_choices=SAID)]
        await model.train_sft(rows, SFT, bookmark=art.Bookmark("second", {"row": 1}))
        assert await model.bookmarks() == {"first": place, "second": {"row": 1}}

    async def test_supervised_steps_lower_the_loss(self, backend: art.Backend, make: Make) -> None:
        model = make("copies")
        await model.register(backend)
        rows = [art.Trajectory(messages_and_choices=SAID)]
        before = await model.sft_loss(rows)
        result = await model.train_sft(rows, SFT)
        assert (result.step, result.trained) == (1, True)
        assert await model.sft_loss(rows) < before
        with pytest.raises(NoTrainableTokens):
            await model.train_sft([art.Trajectory(messages_and_choices=SAID[:1])], SFT)
        rates = art.TrainSFTConfig(learning_rate=(1e-3, 1e-3, 1e-3))
        with pytest.raises(ConfigError, match="learning"):
            await model.train_sft(rows, rates)

    async def test_calls_are_joined_in_place(self, backend: art.Backend, make: Make) -> None:
        model = make("joins")
        await model.register(backend)
        [group] = await play(model, (0.0, 1.0))
        first, second = group.trajectories
        whole = first.calls[0]
        assert whole.sampled_ids is not None
        for name in ("prompt_ids", "sampled_ids", "logprobs"):
            object.__setattr__(first.calls[0], name, None)
        kept = [call.key for call in second.calls]
        unknown = make_call(record_id="nobody", prompt_ids=None, sampled_ids=None, logprobs=None)
        first.calls.append(unknown)
        await model.join(group)
        [joined] = [call for call in first.calls if call.key == whole.key]
        assert joined.sampled_ids is not None
        assert joined.sampled_ids.dtype == np.int32
        assert joined.trainable
        assert [call.left_out for call in first.calls if call.record_id == "nobody"] == [
            "no server record"
        ]
        assert [call.key for call in second.calls] == kept
        await model.join([])

    async def test_logs_and_the_best_checkpoint(self, backend: art.Backend, make: Make) -> None:
        model = make("logs")
        await model.register(backend)
        await model.log([art.Trajectory(reward=1.0)], split="val", step=0)
        await model.train_sft([art.Trajectory(messages_and_choices=SAID)], SFT)
        await model.log([art.Trajectory(reward=0.5), ValueError("odd")], split="val")
        await model.train_sft([art.Trajectory(messages_and_choices=SAID)], SFT)
        await model.log(metrics={"reward": np.float32(0.1), "odd": math.nan}, split="val")
        assert await model.delete_checkpoints("val/reward") == [1]
        assert await model.delete_checkpoints("val/reward") == []
        with pytest.raises(ConfigError):
            await model.log(metrics={"odd": object()}, split="val")
        with pytest.raises(ConfigError):
            await model.log(metrics={"x": 1}, split="a/b")

    async def test_a_cancelled_step_is_no_step(self, backend: art.Backend, make: Make) -> None:
        model = make("cancels")
        await model.register(backend)
        groups = await play(model, *([(0.0, 1.0)] * 8))
        long = CONFIG.model_copy(update={"minibatches": 100})
        training = asyncio.create_task(model.train(groups * 20, long))
        await asyncio.sleep(0.5)
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training
        assert await model.get_step() == 0
        assert (await model.train(groups, CONFIG)).step == 1
