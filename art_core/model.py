"""`Model` and `TrainableModel`: a name under which something answers, and what is kept of it.

In: names, and a backend (or an endpoint of somebody else). Out: clients, targets for rollouts,
training steps, logs and state in the run folder. Left out: how serving and training are done
(backend.py), and where files lie (rundir.py).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping
from typing import Any, Generic, cast

from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator
from typing_extensions import TypeVar  # typing's own knows defaults from Python 3.13 on

from art_core.backend import Backend, TrainResult
from art_core.bookmarks import Bookmark
from art_core.capture import Target
from art_core.config import ModelConfig, TrainConfig, TrainSFTConfig
from art_core.errors import ConfigError, ModelNotRegistered
from art_core.given import Loggable, as_groups, conversations, no_dev_config, settled
from art_core.names import check_name
from art_core.plural import plural
from art_core.progress import progress
from art_core.route import route_to
from art_core.rundir import RunDir
from art_core.runlog import log_step
from art_core.trajectories import Trajectory, TrajectoryGroup
from art_core.transport import HOLD_TIMEOUT, async_client

ConfigT = TypeVar("ConfigT", default=Any)


class Model(BaseModel, Generic[ConfigT]):
    """A model that is not trained: prompted, hosted, compared with.

    Raises:
        ConfigError: a name breaks the rule of `names.check_name`.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    name: str
    """Names its run folder, and stands for it in `client.chat.completions.create(model=...)`."""
    project: str
    entity: str | None = None
    """Whom the run belongs to, for trackers."""
    id: str | None = None
    config: ConfigT = cast(Any, None)  # the caller's own type; None for those who have none
    """Whatever the rollout function wants to know; ours to carry, not to read."""
    inference_api_key: str | None = Field(None, repr=False)
    inference_base_url: str | None = None
    """OpenAI-compatible endpoint, ends in "/v1"."""
    inference_model_name: str | None = None
    """The endpoint's name for it; None means `name`."""
    base_path: str = ".art"
    """Where run folders are kept."""
    report_metrics: list[str] | None = None
    """Trackers that metrics are sent to beside the run folder; none is known yet."""

    _client: tuple[Target, AsyncOpenAI] | None = PrivateAttr(None)

    @field_validator("name", "project")
    @classmethod
    def _is_a_name(cls, value: str, info: Any) -> str:
        return check_name("model" if info.field_name == "name" else "project", value)

    @field_validator("report_metrics")
    @classmethod
    def _is_known(cls, value: list[str] | None) -> list[str] | None:
        if value:
            raise ConfigError(
                "report_metrics", got=value, expected="None; history.jsonl holds every metric"
            )
        return value

    def openai_client(self) -> AsyncOpenAI:
        """A client whose calls are recorded in the rollout around them; one for all event loops.

        `create(model=model.name, ...)` asks for the latest step. What a call asks for wins over
        the model's sampling settings, which fill in the rest.

        Raises:
            ModelNotRegistered: a trainable model has no backend yet.
            ConfigError: another model has no `inference_base_url`.
        """
        target = self.target()
        if self._client is None or self._client[0] != target:
            client = AsyncOpenAI(
                base_url=target.base_url,
                api_key=target.api_key,
                http_client=async_client(route_to(target, self.name)),
                timeout=HOLD_TIMEOUT,
            )
            self._client = (target, client)
        return self._client[1]

    def target(self, step: int | None = None, evaluation: bool = False) -> Target:
        """Where a rollout's calls go.

        Args:
            step: pins a step of a trainable model; None means the latest.
            evaluation: keep the sampling settings that a call asks for.

        Raises:
            As `openai_client`.
        """
        name = self.get_inference_name(step)
        if self.inference_base_url is None:
            raise ConfigError(
                f"model {self.name!r} has no inference_base_url",
                expected='an OpenAI-compatible endpoint such as "https://api.openai.com/v1"',
                fix="Give it to art.Model(...), with inference_api_key.",
            )
        return Target(
            self.inference_base_url, self.inference_api_key or "none", name, token_data=False
        )

    def get_inference_name(self, step: int | None = None) -> str:
        """The name that the endpoint serves it under.

        Raises:
            ConfigError: `step` is given, and the model has no steps.
        """
        if step is not None:
            raise ConfigError(
                f"model {self.name!r} is not trained and has no steps", got=step, expected="None"
            )
        return self.inference_model_name or self.name

    def litellm_completion_params(self, step: int | None = None) -> dict[str, Any]:
        """Keyword arguments for `litellm.acompletion`. Its calls are not captured on this side."""
        target = self.target(step)
        return {
            "model": target.model_name,
            "base_url": target.base_url,
            "api_key": target.api_key,
            "temperature": 1,
        }

    async def get_step(self) -> int:
        """The latest step; always 0 for a model that is not trained."""
        return 0

    async def log(
        self,
        trajectories: Iterable[Loggable] | Loggable | None = None,
        split: str = "val",
        *,
        metrics: dict[str, Any] | None = None,
        step: int | None = None,
    ) -> None:
        """Keep trajectories, their means and further metrics in the run folder.

        Args:
            trajectories: groups; or trajectories and exceptions, which make one group.
            split: "val", "test" or another name; the split "train" is logged by `train`.
            metrics: further figures, by name.
            step: None means the latest.

        Raises:
            ConfigError: a metric is no number, or `split` breaks the rule for names.
            RunFolderError: the disk is full or refuses.
        """
        groups = [] if trajectories is None else as_groups(trajectories)
        step = await self.get_step() if step is None else step
        run = self._run_dir()
        await asyncio.to_thread(run.describe)
        await asyncio.to_thread(log_step, run, split, step, groups, metrics)

    def read_state(self) -> dict[str, Any] | None:
        """The state you keep with the run; None if there is none yet."""
        return self._run_dir().read_state()

    def merge_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Put the keys of `state`, which is JSON-ready, over the state; return the whole."""
        return self._run_dir().merge_state(state)

    def overwrite_state(self, state: dict[str, Any]) -> None:
        """Replace the state by `state`, which is JSON-ready."""
        self._run_dir().overwrite_state(state)

    def _run_dir(self) -> RunDir:
        return RunDir.at(self.base_path, self.project, self.name)


class TrainableModel(Model[ConfigT], Generic[ConfigT]):
    """A model whose adapter is trained by the backend it is registered with."""

    base_model: str
    """A hub id such as "Qwen/Qwen2.5-7B-Instruct", or a folder."""
    art_config: ModelConfig = ModelConfig()
    """How it is sampled and adapted."""

    _backend: Backend | None = PrivateAttr(None)

    async def register(self, backend: Backend) -> None:
        """Bind the model to `backend`, which starts to serve its latest step.

        Raises:
            BaseModelError: the base model is unknown or damaged.
            RunLocked: another process holds the run folder.
        """
        inference = await backend.register(self)
        self._backend = backend
        self.inference_base_url = inference.base_url
        self.inference_api_key = inference.api_key
        self.inference_model_name = inference.model_name

    def backend(self) -> Backend:
        """What the model is registered with.

        Raises:
            ModelNotRegistered: nothing yet.
        """
        if self._backend is None:
            raise ModelNotRegistered(
                f"model {self.name!r} is not registered",
                fix="First: await model.register(backend), e.g. with art.LocalBackend().",
            )
        return self._backend

    def target(self, step: int | None = None, evaluation: bool = False) -> Target:
        """As `Model.target`. The latest step is sampled with `art_config.sampling`, whatever the
        caller asks for; a pinned step, or an evaluation, as the caller asks.
        """
        self.backend()
        plain = super().target(step, evaluation)
        return Target(
            plain.base_url,
            plain.api_key,
            plain.model_name,
            sampling=self.art_config.sampling,
            trains=step is None and not evaluation,
        )

    def get_inference_name(self, step: int | None = None) -> str:
        """ "agent-001", or "agent-001@3" for step 3."""
        name = self.inference_model_name or self.name
        return name if step is None else f"{name}@{step}"

    def litellm_completion_params(self, step: int | None = None) -> dict[str, Any]:
        """As `Model.litellm_completion_params`, with LiteLLM's provider for such endpoints."""
        params = super().litellm_completion_params(step)
        return {**params, "model": f"hosted_vllm/{params['model']}"}

    async def get_step(self) -> int:
        """The latest whole step; 0 before anything was learned."""
        return await self.backend().get_step(self)

    async def join(
        self, trajectories: Trajectory | TrajectoryGroup | Iterable[Trajectory | TrajectoryGroup]
    ) -> None:
        """Complete calls, in place, with the tokens that the backend recorded.

        For rollouts whose chat model is not ours: `train` does it by itself; call it to look at
        `trajectory.completeness` before. Calls that have only one half say which is missing.

        Raises:
            ModelNotRegistered: there is no backend yet.
        """
        if isinstance(trajectories, Trajectory | TrajectoryGroup):
            trajectories = [trajectories]
        single: list[Trajectory] = []
        for part in trajectories:
            single.extend([part] if isinstance(part, Trajectory) else part)
        await self.backend().join(self, single)

    async def train(
        self,
        groups: Iterable[TrajectoryGroup] | TrajectoryGroup,
        config: TrainConfig | None = None,
        *,
        bookmark: Bookmark | None = None,
    ) -> TrainResult:
        """One step on `groups`; the new weights serve the next call. The backend logs it.

        Args:
            groups: what was gathered.
            config: None means the defaults.
            bookmark: kept with the step, so that a killed loop goes on at the right row; see
                `iterate_dataset`.

        Raises:
            ModelNotRegistered: there is no backend yet.
            GroupError: something in `groups` can't be trained as it is; nothing has changed then.
            NotEnoughMemory: by the estimate the step can't fit; nothing was computed.
            TrainingError: the step failed; the weights are those of the last whole step.
        """
        backend = self.backend()
        return await backend.train(
            self, settled(groups), config or TrainConfig(), bookmark=bookmark
        )

    async def bookmarks(self) -> dict[str, dict[str, Any]]:
        """Places in data files and data sets, by name, as the latest step has them."""
        return await self.backend().bookmarks(self)

    async def train_sft(
        self,
        trajectories: Iterable[Trajectory] | Trajectory,
        config: TrainSFTConfig | None = None,
        _config: Mapping[str, Any] | None = None,
        verbose: bool = False,
        *,
        bookmark: Bookmark | None = None,
    ) -> TrainResult:
        """Supervised training: one step, of an optimizer step for each `config.batch_size` of them.

        All assistant messages are learned, each token with the message's "weight" (1 if it has
        none); if some are Choices, exactly these are. Reinforcement learning goes on from the same
        adapter, optimizer and step.

        Args:
            trajectories: conversations; rewards are not looked at.
            config: None means the defaults.
            _config: ART's; refused unless it is empty.
            verbose: show what was learned and what was left out when it is done.
            bookmark: kept with the step; `train_sft_from_file` uses it.

        Raises:
            ModelNotRegistered: there is no backend yet.
            ConfigError: something is set in `_config`.
            NoTrainableTokens: nothing is left to learn; the message counts why.
            NotEnoughMemory: by the estimate the step can't fit; nothing was computed.
            TrainingError: the step failed; the weights are those of the last whole step.
        """
        no_dev_config(_config)
        rows = conversations(trajectories)
        result = await self.backend().train_sft(
            self, rows, config or TrainSFTConfig(), bookmark=bookmark
        )
        if verbose:
            with progress("sft") as display:
                display.show(len(rows), len(rows), _told(result))
        return result

    async def sft_loss(
        self,
        trajectories: Iterable[Trajectory] | Trajectory,
        config: TrainSFTConfig | None = None,
    ) -> float:
        """Loss of the latest step on conversations that it is not trained on, in nats a token.

        Raises:
            ModelNotRegistered, NoTrainableTokens: as `train_sft`.
        """
        return await self.backend().sft_loss(
            self, conversations(trajectories), config or TrainSFTConfig()
        )

    async def log(
        self,
        trajectories: Iterable[Loggable] | Loggable | None = None,
        split: str = "val",
        *,
        metrics: dict[str, Any] | None = None,
        step: int | None = None,
    ) -> None:
        """As `Model.log`, kept by the backend."""
        groups = [] if trajectories is None else as_groups(trajectories)
        await self.backend().log(self, groups, split=split, metrics=metrics, step=step)

    async def delete_checkpoints(self, best_checkpoint_metric: str = "val/reward") -> list[int]:
        """Keep the latest and the best checkpoint; return the steps that were deleted.

        Args:
            best_checkpoint_metric: "<split>/<name>", the higher the better. Where no step has it,
                nothing is deleted.
        """
        return await self.backend().delete_checkpoints(self, best_metric=best_checkpoint_metric)


def _told(result: TrainResult) -> str:
    """What supervised training did, in a line."""
    loss = f"step {result.step}, loss {result.metrics.get('loss', math.nan):.3f}"
    left_out = f"{plural(len(result.skipped), 'row')} left out" if result.skipped else ""
    why = result.reasons[0] if result.reasons else ""
    return "; ".join(part for part in (loss if result.trained else "", left_out, why) if part)
