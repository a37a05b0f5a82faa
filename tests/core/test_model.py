"""Models: names, clients, registration, training, logs and state."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

import art_core as art
from art_core.bookmarks import Bookmark
from art_core.capture import open_scope
from art_core.config import SamplingConfig
from art_core.errors import ConfigError, GroupError, ModelNotRegistered
from art_core.metrics import MetricsLog
from art_core.rundir import RunDir
from art_core.trajectory_files import read_trajectories, trajectory_path
from tests.stub_endpoint import Endpoint, completion, endpoint
from tests.unsupervised import Unsupervised


class NotingBackend(Unsupervised):
    """A backend that serves at an endpoint and notes what it is asked for."""

    def __init__(self, base_url: str = "http://127.0.0.1:1/v1") -> None:
        self.base_url = base_url
        self.step = 0
        self.noted: list[Any] = []

    async def register(self, model: art.TrainableModel) -> art.Inference:
        return art.Inference(self.base_url, "secret", model.name)

    async def train(
        self,
        model: art.TrainableModel,
        groups: Sequence[art.TrajectoryGroup],
        config: art.TrainConfig,
        *,
        bookmark: Bookmark | None = None,
    ) -> art.TrainResult:
        self.step += 1
        self.noted.append(("train", model.name, list(groups), config, bookmark))
        return art.TrainResult(step=self.step, trained=True)

    async def train_sft(
        self,
        model: art.TrainableModel,
        trajectories: Sequence[art.Trajectory],
        config: art.TrainSFTConfig,
        *,
        bookmark: Bookmark | None = None,
    ) -> art.TrainResult:
        self.step += 1
        self.noted.append(("train_sft", model.name, list(trajectories), config, bookmark))
        return art.TrainResult(step=self.step, trained=True)

    async def join(self, model: art.TrainableModel, trajectories: Sequence[art.Trajectory]) -> None:
        self.noted.append(("join", model.name, list(trajectories)))

    async def get_step(self, model: art.TrainableModel) -> int:
        return self.step

    async def log(
        self,
        model: art.TrainableModel,
        groups: Sequence[art.TrajectoryGroup],
        *,
        split: str,
        metrics: dict[str, Any] | None = None,
        step: int | None = None,
    ) -> None:
        self.noted.append(("log", model.name, list(groups), split, metrics, step))

    async def delete_checkpoints(self, model: art.TrainableModel, *, best_metric: str) -> list[int]:
        self.noted.append(("delete", best_metric))
        return [1, 2]

    async def close(self) -> None:
        pass


def trainable(**changes: Any) -> art.TrainableModel:
    fields: dict[str, Any] = {"name": "agent-001", "project": "shop", "base_model": "tiny"}
    return art.TrainableModel(**fields | changes)


async def registered(backend: art.Backend, **changes: Any) -> art.TrainableModel:
    model = trainable(**changes)
    await model.register(backend)
    return model


# --- what a model is


def test_a_class_call_gives_an_instance_of_that_class() -> None:
    class Mine(art.TrainableModel):
        max_turns: int = 3

    assert type(art.Model(name="gpt", project="shop")) is art.Model
    assert type(trainable()) is art.TrainableModel
    mine = Mine(name="a", project="p", base_model="tiny", max_turns=5)
    assert type(mine) is Mine
    assert isinstance(mine, art.Model)
    assert mine.max_turns == 5


def test_a_model_carries_the_callers_config() -> None:
    class Policy(BaseModel):
        max_turns: int = 4

    model = art.TrainableModel[Policy](name="a", project="p", base_model="tiny", config=Policy())
    assert model.config.max_turns == 4
    assert art.Model(name="a", project="p", config={"x": 1}).config == {"x": 1}
    assert art.Model(name="a", project="p").config is None

    def rollout(model: art.Model[Policy]) -> int:  # as ART's examples annotate
        return model.config.max_turns

    assert rollout(model) == 4


@pytest.mark.parametrize(
    "fields",
    [{"name": "openai/gpt"}, {"project": "../x"}, {"name": "agent@3"}, {"name": ""}],
    ids=str,
)
def test_bad_names_are_refused_when_the_model_is_made(fields: dict[str, str]) -> None:
    [kind] = fields
    with pytest.raises(ConfigError, match=f"{'model' if kind == 'name' else kind} name"):
        trainable(**fields)


def test_unknown_settings_and_trackers_are_refused() -> None:
    with pytest.raises(ValidationError, match="learning_rate"):
        trainable(learning_rate=1.0)
    with pytest.raises(ConfigError, match="report_metrics"):
        trainable(report_metrics=["wandb"])


def test_keys_are_not_shown() -> None:
    model = art.Model(
        name="a", project="p", inference_base_url="http://x/v1", inference_api_key="secret"
    )
    assert "secret" not in repr(model)
    assert "secret" not in repr(model.target())


# --- before and after registration


async def test_before_register_a_typed_error_says_what_to_do() -> None:
    model = trainable()
    for use in (model.openai_client, model.target, model.litellm_completion_params, model.backend):
        with pytest.raises(ModelNotRegistered, match=r"'agent-001'.*await model\.register"):
            use()
    for coroutine in (
        model.get_step(),
        model.train([]),
        model.log([]),
        model.delete_checkpoints(),
    ):
        with pytest.raises(ModelNotRegistered):
            await coroutine


async def test_register_fills_the_inference_fields_and_targets() -> None:
    model = await registered(
        NotingBackend(), art_config=art.ModelConfig(sampling=SamplingConfig(max_tokens=50))
    )
    assert model.inference_base_url == "http://127.0.0.1:1/v1"
    assert model.inference_api_key == "secret"
    assert model.get_inference_name() == "agent-001"
    assert model.get_inference_name(3) == "agent-001@3"
    latest = model.target()
    assert (latest.model_name, latest.trains) == ("agent-001", True)
    assert latest.sampling == SamplingConfig(max_tokens=50)
    assert model.target(step=3).model_name == "agent-001@3"
    assert not model.target(step=3).trains
    assert not model.target(evaluation=True).trains
    assert model.litellm_completion_params(2) == {
        "model": "hosted_vllm/agent-001@2",
        "base_url": "http://127.0.0.1:1/v1",
        "api_key": "secret",
        "temperature": 1,
    }


def test_a_hosted_model_needs_an_endpoint_and_has_no_steps() -> None:
    bare = art.Model(name="gpt", project="p")
    with pytest.raises(ConfigError, match="no inference_base_url"):
        bare.openai_client()
    with pytest.raises(ConfigError, match="has no steps"):
        bare.get_inference_name(3)
    hosted = art.Model(
        name="gpt", project="p", inference_base_url="http://x/v1", inference_model_name="gpt-4.1"
    )
    assert hosted.target().model_name == "gpt-4.1"
    assert hosted.target().sampling is None
    assert not hosted.target().trains


# --- calls


async def ask(model: art.Model, name: str | None = None, **settings: Any) -> Any:
    return await model.openai_client().chat.completions.create(
        model=name or model.name, messages=[{"role": "user", "content": "Hi"}], **settings
    )


def requested(stub: Endpoint, name: str) -> list[Any]:
    return [body.get(name) for body in stub.bodies]


async def test_calls_of_the_client_are_recorded_in_the_rollout_around_them() -> None:
    with endpoint(lambda asked: completion("ok", [7, 8], prompt_ids=[1, 2, 3])) as stub:
        model = await registered(NotingBackend(stub.base_url))

        async def rollout() -> art.Trajectory:
            reply = await ask(model)
            return art.Trajectory(messages_and_choices=[reply.choices[0]], reward=1.0)

        [group] = await art.gather_trajectory_groups(
            [art.TrajectoryGroup(rollout() for _ in range(3))], progress=False
        )
    assert len(group) == 3
    for trajectory in group:
        [call] = trajectory.calls
        assert call.prompt_ids is not None
        assert call.sampled_ids is not None
        assert (call.prompt_ids.tolist(), call.sampled_ids.tolist()) == ([1, 2, 3], [7, 8])
        assert call.messages == [{"role": "user", "content": "Hi"}]
    assert requested(stub, "model") == ["agent-001"] * 3
    assert {asked.headers["authorization"] for asked in stub.requests} == {"Bearer secret"}
    assert {asked.headers["x-art-rollout"] for asked in stub.requests} == {
        trajectory.rollout_id for trajectory in group
    }


async def test_what_a_call_asks_for_wins_over_the_models_sampling() -> None:
    with endpoint(lambda asked: completion()) as stub:
        sampling = SamplingConfig(temperature=0.7, max_tokens=50)
        model = await registered(
            NotingBackend(stub.base_url), art_config=art.ModelConfig(sampling=sampling)
        )
        with open_scope():
            await ask(model)
            await ask(model, name=model.get_inference_name(3), temperature=0.0)
    assert requested(stub, "temperature") == [0.7, 0.0]
    assert requested(stub, "model") == ["agent-001", "agent-001@3"]
    assert stub.bodies[0].get("max_completion_tokens") == 50


async def test_the_models_own_name_stands_for_the_hosted_one() -> None:
    with endpoint(lambda asked: completion()) as stub:
        model = art.Model(
            name="baseline",
            project="p",
            inference_base_url=stub.base_url,
            inference_model_name="gpt-4.1",
        )
        await ask(model)
        assert requested(stub, "model") == ["gpt-4.1"]
        assert stub.requests[0].headers["authorization"] == "Bearer none"


def test_one_client_serves_several_event_loops() -> None:
    with endpoint(lambda asked: completion("ok")) as stub:
        model = art.Model(name="m", project="p", inference_base_url=stub.base_url)
        client = model.openai_client()
        for _ in range(2):
            assert asyncio.run(ask(model)).choices[0].message.content == "ok"
        assert model.openai_client() is client
        model.inference_api_key = "another"
        assert model.openai_client() is not client


# --- training


async def test_train_gives_groups_and_config_to_the_backend() -> None:
    backend = NotingBackend()
    model = await registered(backend)
    one = art.TrajectoryGroup([art.Trajectory(reward=1.0)])
    assert (await model.train(one)).step == 1
    config = art.TrainConfig(learning_rate=1e-5)
    mark = Bookmark("data", {"rows": 1})
    assert (await model.train((g for g in [one, one]), config=config, bookmark=mark)).step == 2
    assert await model.get_step() == 2
    assert backend.noted == [
        ("train", "agent-001", [one], art.TrainConfig(), None),
        ("train", "agent-001", [one, one], config, mark),
    ]


async def test_train_sft_gives_conversations_and_config_to_the_backend() -> None:
    backend = NotingBackend()
    model = await registered(backend)
    one = art.Trajectory()
    mark = Bookmark("rows", {"rows": 1})
    config = art.TrainSFTConfig(batch_size=4)
    assert (await model.train_sft(one)).step == 1
    assert (await model.train_sft(iter([one, one]), config, bookmark=mark)).step == 2
    assert backend.noted == [
        ("train_sft", "agent-001", [one], art.TrainSFTConfig(), None),
        ("train_sft", "agent-001", [one, one], config, mark),
    ]


async def test_train_refuses_what_is_no_group_or_not_awaited() -> None:
    model = await registered(NotingBackend())
    with pytest.raises(GroupError, match=r"item 1 .* is a Trajectory.*Give groups"):
        await model.train([art.TrajectoryGroup([]), art.Trajectory()])  # type: ignore[list-item]  # the fault under test

    async def rollout() -> art.Trajectory:
        return art.Trajectory(reward=1.0)

    pending = art.TrajectoryGroup([rollout(), rollout()])
    with pytest.raises(GroupError, match=r"group 0 has 2 rollouts.*gather_trajectory_groups"):
        await model.train(pending)
    await model.train(await pending)


# --- logs and state


async def test_a_trainable_model_logs_through_its_backend() -> None:
    backend = NotingBackend()
    model = await registered(backend)
    group = art.TrajectoryGroup([art.Trajectory(reward=1.0)])
    await model.log([group], split="val", metrics={"x": 1}, step=4)
    await model.log(metrics={"x": 2})
    assert backend.noted == [
        ("log", "agent-001", [group], "val", {"x": 1}, 4),
        ("log", "agent-001", [], "val", {"x": 2}, None),
    ]
    assert await model.delete_checkpoints("val/won") == [1, 2]
    assert backend.noted[-1] == ("delete", "val/won")


async def test_a_compared_model_logs_into_its_own_run_folder(tmp_path: Path) -> None:
    model = art.Model(name="gpt", project="shop", base_path=str(tmp_path))
    loose: list[art.Trajectory | BaseException]
    loose = [art.Trajectory(reward=1.0), art.Trajectory(reward=0.0), ValueError("x")]
    await model.log(loose, metrics={"cost": 0.5})
    run = RunDir.at(tmp_path, "shop", "gpt")
    [record] = MetricsLog(run.history).read()
    assert (record.step, record.split) == (0, "val")
    assert (record.values["reward"], record.values["cost"]) == (0.5, 0.5)
    [group] = read_trajectories(trajectory_path(run, "val", 0))
    assert (len(group), len(group.exceptions)) == (2, 1)
    assert run.model_json.exists()
    await model.log(art.Trajectory(reward=0.25), split="test", step=3)
    assert read_trajectories(trajectory_path(run, "test", 3))[0].trajectories[0].reward == 0.25


async def test_mixed_or_odd_things_are_not_logged(tmp_path: Path) -> None:
    model = art.Model(name="gpt", project="shop", base_path=str(tmp_path))
    for odd in ([art.Trajectory(), art.TrajectoryGroup([])], [7]):
        with pytest.raises(GroupError, match="not mixed"):
            await model.log(odd)  # type: ignore[arg-type]  # the fault under test


def test_state_is_kept_with_the_run(tmp_path: Path) -> None:
    model = trainable(base_path=str(tmp_path))
    assert model.read_state() is None
    assert model.merge_state({"row": 4}) == {"row": 4}
    model.merge_state({"best": 0.5})
    assert trainable(base_path=str(tmp_path)).read_state() == {"row": 4, "best": 0.5}
    model.overwrite_state({})
    assert model.read_state() == {}


# --- the public names


def test_every_public_name_is_there_and_no_other() -> None:
    for name in art.__all__:
        if name != "LocalBackend":  # needs torch
            assert getattr(art, name) is not None
    assert set(art.__all__) <= set(dir(art))
    with pytest.raises(AttributeError, match="no attribute 'utils'"):
        art.utils  # type: ignore[attr-defined]  # noqa: B018  # the fault under test
