"""The loop that ART's users know by heart, line for line, on the real engine with SmolLM2."""

from pathlib import Path

import pytest

import art_core as art

NUM_STEPS, GROUP_SIZE = 1, 3


@pytest.mark.model
async def test_the_cheatsheet_runs(smollm2: Path, tmp_path: Path) -> None:
    scenarios = ["Name a colour.", "Name a fruit."]
    base_model = "HuggingFaceTB/SmolLM2-135M-Instruct"
    path = str(tmp_path)

    def score(text: str) -> float:
        return len(text) / 100

    model = art.TrainableModel(name="agent-001", project="my-agent", base_model=base_model)
    backend = art.LocalBackend(path=path, show_progress=False)
    await model.register(backend)

    async def rollout(model: art.Model, scenario: str) -> art.Trajectory:
        client = model.openai_client()
        traj = art.Trajectory(
            messages_and_choices=[{"role": "user", "content": scenario}], reward=0.0
        )
        completion = await client.chat.completions.create(
            model=model.name, messages=[{"role": "user", "content": scenario}], max_tokens=24
        )
        traj.messages_and_choices.append(completion.choices[0])
        traj.reward = score(completion.choices[0].message.content or "")
        return traj

    groups: list[art.TrajectoryGroup] = []
    for step in range(await model.get_step(), NUM_STEPS):
        groups = await art.gather_trajectory_groups(
            art.TrajectoryGroup(rollout(model, s) for _ in range(GROUP_SIZE)) for s in scenarios
        )
        assert [len(group) for group in groups] == [GROUP_SIZE, GROUP_SIZE]
        result = await model.train(groups, config=art.TrainConfig(learning_rate=1e-5))
        assert result.step == step + 1

    assert await model.get_step() == 1
    for group in groups:
        for traj in group:
            (call,) = traj.calls
            assert call.trainable
            assert call.sampled_ids is not None
            assert call.step == 0  # the policy that played; step 1 was learned from it
            # An answer that was cut has all 24 tokens; the end of the turn may be the 24th.
            assert len(call.sampled_ids) == 24 or call.finish_reason == "stop"
    await backend.close()
