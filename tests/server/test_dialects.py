"""A rollout's URL for clients of other APIs: what they were answered trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

import art_core as art
from tests.core.small_run import CONFIG
from tests.server.server_process import KEY, ServerProcess

pytest.importorskip("fastapi", reason="art-langgraph[server] is not installed")
anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")

ASK: Any = [{"role": "user", "content": "Hi"}]


async def of_anthropic(url: str) -> None:
    """Plain, streamed, and once without the key."""
    root = url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=root, api_key=KEY, max_retries=0) as client:
        asked: Any = {"model": "other", "max_tokens": 8, "messages": ASK}
        await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            await stream.get_final_message()
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**{**asked, "model": "nobody"})
    async with anthropic.AsyncAnthropic(base_url=root, api_key="guess", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(**asked)


async def of_responses(url: str) -> None:
    """Plain and streamed."""
    async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        await client.responses.create(model="other", input="Hi", max_output_tokens=8)
        async with client.responses.stream(model="other", input=ASK, max_output_tokens=8) as stream:
            await stream.until_done()  # cut at the limit, it has no final response for this client


async def of_completions(url: str) -> None:
    """A bare prompt, plain and streamed."""
    async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        await client.completions.create(model="other", prompt="Once upon", max_tokens=8)
        async for _ in await client.completions.create(
            model="other", prompt="Once upon", max_tokens=8, stream=True
        ):
            pass


async def test_the_apis_of_others_give_trajectories_that_train(
    tiny_llama: Path, tmp_path: Path
) -> None:
    with ServerProcess(tmp_path, tiny_llama) as server:
        async with server.backend() as backend:
            model = server.model(tiny_llama, name="other")
            await model.register(backend)
            trajectories = []
            for talk, reward in (
                (of_anthropic, 0.0),
                (of_responses, 1.0),
                (of_completions, 0.5),
            ):
                url = await backend.rollout_url(model)
                await talk(url.base_url)
                trajectory = await backend.trajectory(url.rollout_id)
                assert [call.trainable for call in trajectory.calls] == [True, True]
                trajectory.reward = reward
                trajectories.append(trajectory)
            result = await model.train([art.TrajectoryGroup(trajectories)], CONFIG)
            assert result.trained
        assert not [line for line in server.log if "Traceback" in line or KEY in line]
