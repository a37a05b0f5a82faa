"""The trainer against plain transformers and peft, one sequence at a time."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from art_core.batch.forest import plant
from art_core.batch.minibatches import minibatches
from art_core.batch.sample import Sample
from art_core.config import LoraSettings, TrainConfig
from art_core.errors import CheckpointError, GroupError, NonFiniteStep, TrainingError
from art_core.nn.lora import LoraModel
from art_core.training import logprobs
from art_core.training.logprobs import entry_logprobs
from art_core.training.moments import OPTIMIZER, STATE
from art_core.training.trainer import Trainer
from tests.core.samples import learned, make_sample
from tests.core.samples import policy_calls as calls
from tests.core.tiny_policy import (
    NAME,
    in_peft,
    reference_logprobs,
    reference_loss,
    reference_parameters,
    same_bits,
    tensors_alive,
    tiny_policy,
    weights,
)

# A step big enough to be seen in every weight.
CONFIG = TrainConfig(learning_rate=1e-3, entropy_coef=0.01)


def peft_twin(model: LoraModel, base: Path, folder: Path) -> Any:
    model.save_adapter(NAME, folder)
    return in_peft(base, folder, model.dtype)


def worst(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference over all tensors, relative to the largest expected value."""
    assert got.keys() == expected.keys()
    scale = max(float(value.abs().max()) for value in expected.values())
    return max(float((got[key] - expected[key]).abs().max()) for key in got) / scale


def moments(trainer: Trainer, folder: Path) -> dict[str, Tensor]:
    folder.mkdir()
    trainer.save(folder)
    return load_file(folder / OPTIMIZER)


# --- exactness -----------------------------------------------------------------------------------


def entries_alone(twin: Any, samples: list[Sample]) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
    alone = {}
    for sample in samples:
        logprobs, entropies = reference_logprobs(twin, sample)
        for token in range(len(logprobs)):
            alone[sample.call, token] = (logprobs[token], entropies[token])
    return alone


def differences(model: LoraModel, twin: Any, samples: list[Sample]) -> tuple[Tensor, Tensor]:
    """|packed - alone| of the logprob and of the entropy of every entry."""
    (row,) = plant(samples, 10_000)
    alone = entries_alone(twin, samples)
    model.activate(NAME)
    logprobs, entropies = entry_logprobs(model, row)
    token: dict[int, int] = {}
    off = []
    for i, call in enumerate(row.entries.call.tolist()):
        expected = alone[call, token.get(call, 0)]
        token[call] = token.get(call, 0) + 1
        off.append(torch.stack([logprobs[i] - expected[0], entropies[i] - expected[1]]).abs())
    columns = torch.stack(off).detach()
    return columns[:, 0], columns[:, 1]


def test_packed_tree_equals_each_sequence_alone(tiny_llama: Path, tmp_path: Path) -> None:
    """DESIGN section 8: float64 on the tiny model <= 1e-10, logprobs and entropies."""
    model = tiny_policy(tiny_llama)
    logprobs, entropies = differences(model, peft_twin(model, tiny_llama, tmp_path), calls())
    assert logprobs.max() <= 1e-10
    assert entropies.max() <= 1e-10


def test_packed_tree_in_float32(tiny_llama: Path, tmp_path: Path) -> None:
    """DESIGN section 8: fp32 mean <= 1e-5, max <= 2e-4."""
    model = tiny_policy(tiny_llama, dtype=torch.float32)
    logprobs, _ = differences(model, peft_twin(model, tiny_llama, tmp_path), calls())
    assert logprobs.mean() <= 1e-5
    assert logprobs.max() <= 2e-4


def test_gradients_equal_each_sequence_alone(tiny_llama: Path, tmp_path: Path) -> None:
    """LoRA gradients of the packed loss, <= 1e-10 relative; read off Adam's first moment.

    After one update from nothing it is (1 - beta1) g, arXiv:1412.6980, algorithm 1.
    """
    model = tiny_policy(tiny_llama)
    twin = peft_twin(model, tiny_llama, tmp_path)
    reference_loss(twin, calls(), entropy_coef=CONFIG.entropy_coef).backward()
    expected = {key: p.grad for key, p in reference_parameters(twin).items()}

    trainer = Trainer(model, NAME, seed=0)
    trainer.step(calls(), CONFIG.model_copy(update={"max_grad_norm": 1e9}))
    saved = moments(trainer, tmp_path / "after")
    got = {
        key: saved[f"{i}.exp_avg"] / (1 - CONFIG.adam_betas[0]) for i, key in enumerate(expected)
    }
    assert worst(got, expected) <= 1e-10  # type: ignore[arg-type]  # every gradient is there


def hand_adamw(
    parameters: dict[str, Tensor], gradients: list[dict[str, Tensor]], config: TrainConfig
) -> dict[str, Tensor]:
    """AdamW as printed (arXiv:1711.05101, algorithm 2), eps 1e-8, on gradients clipped as one."""
    beta1, beta2 = config.adam_betas
    state = {key: value.detach().clone() for key, value in parameters.items()}
    m = {key: torch.zeros_like(value) for key, value in state.items()}
    v = {key: torch.zeros_like(value) for key, value in state.items()}
    for t, raw in enumerate(gradients, start=1):
        norm = math.sqrt(sum(float((g * g).sum()) for g in raw.values()))
        scale = min(1.0, config.max_grad_norm / (norm + 1e-6))
        for key, g in raw.items():
            g = g * scale
            m[key] = beta1 * m[key] + (1 - beta1) * g
            v[key] = beta2 * v[key] + (1 - beta2) * g * g
            rise = (m[key] / (1 - beta1**t)) / ((v[key] / (1 - beta2**t)).sqrt() + 1e-8)
            decayed = state[key] * (1 - config.learning_rate * config.weight_decay)
            state[key] = decayed - config.learning_rate * rise
    return state


def gradients_alone(
    model: LoraModel, base: Path, folder: Path, samples: list[Sample], config: TrainConfig
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters and their gradients, in plain peft."""
    twin = peft_twin(model, base, folder)
    reference_loss(twin, samples, entropy_coef=config.entropy_coef).backward()
    parameters = reference_parameters(twin)
    gradients = {key: p.grad for key, p in parameters.items() if p.grad is not None}
    assert len(gradients) == len(parameters)
    return {key: p.detach() for key, p in parameters.items()}, gradients


def test_two_steps_computed_by_hand(tiny_llama: Path, tmp_path: Path) -> None:
    """Two GRPO steps, clipped gradients and weight decay included, to 1e-10."""
    config = CONFIG.model_copy(update={"max_grad_norm": 0.05, "weight_decay": 0.1})
    model = tiny_policy(tiny_llama)
    trainer = Trainer(model, NAME, seed=0)
    start, first = gradients_alone(model, tiny_llama, tmp_path / "0", calls(0), config)
    trainer.step(calls(0), config)
    assert worst(weights(model), hand_adamw(start, [first], config)) <= 1e-10
    _, second = gradients_alone(model, tiny_llama, tmp_path / "1", calls(1), config)
    figures = trainer.step(calls(1), config)
    assert worst(weights(model), hand_adamw(start, [first, second], config)) <= 1e-10
    norm = math.sqrt(sum(float((g * g).sum()) for g in second.values()))
    assert norm > 0.05, "the clip was to be tried"
    assert figures["grad_norm"] == pytest.approx(norm, rel=1e-9)


def test_figures(tiny_llama: Path, tmp_path: Path) -> None:
    """Loss, entropy and kl are those of the step before its update; tokens are counted by hand."""
    model, samples = tiny_policy(tiny_llama), calls()
    twin = peft_twin(model, tiny_llama, tmp_path)
    figures = Trainer(model, NAME, seed=0).step(samples, CONFIG)
    total = sum(len(s.sampled_ids) for s in samples)
    entropy = sum(float(reference_logprobs(twin, s)[1].sum().detach()) for s in samples) / total
    loss = reference_loss(twin, samples, entropy_coef=CONFIG.entropy_coef).detach()
    assert figures["loss"] == pytest.approx(float(loss), rel=1e-9)
    assert figures["entropy"] == pytest.approx(entropy, rel=1e-9)
    assert figures["tokens_trained"] == total
    assert figures["tokens_naive"] == sum(len(s.prompt_ids) + len(s.sampled_ids) for s in samples)
    prefixes = {tuple(s.path[: n + 1].tolist()) for s in samples for n in range(len(s.path))}
    assert figures["tokens_computed"] == len(prefixes) < figures["tokens_naive"]


@pytest.mark.parametrize("max_tokens_per_row", [20, 24, 33])
def test_how_rows_are_cut_is_no_matter(tiny_llama: Path, max_tokens_per_row: int) -> None:
    """One row or many: the same gradient, hence the same norm and the same weights after it."""
    one, many = tiny_policy(tiny_llama), tiny_policy(tiny_llama)
    whole = Trainer(one, NAME, seed=0).step(calls(), CONFIG)
    cut = Trainer(many, NAME, seed=0).step(
        calls(), CONFIG.model_copy(update={"max_tokens_per_row": max_tokens_per_row})
    )
    assert cut["tokens_computed"] > whole["tokens_computed"], "stems are computed once a row"
    for figure in ("loss", "entropy", "kl", "clipped", "grad_norm"):
        assert cut[figure] == pytest.approx(whole[figure], rel=1e-10)
    assert worst(weights(many), weights(one)) <= 1e-10


def test_how_the_head_is_cut_is_no_matter(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = tiny_policy(tiny_llama), tiny_policy(tiny_llama)
    expected = Trainer(whole, NAME, seed=0).step(calls(), CONFIG)
    monkeypatch.setattr(logprobs, "chunk_size", lambda positions, held, least: 3)
    got = Trainer(cut, NAME, seed=0).step(calls(), CONFIG)
    assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-10)
    assert worst(weights(cut), weights(whole)) <= 1e-10


# --- temperature, distorted calls ----------------------------------------------------------------


def test_temperature_divides_the_logits(tiny_llama: Path, tmp_path: Path) -> None:
    """At T = .5 the logprob is that of softmax(2 logits); a greedy call is read at T = 1."""
    model = tiny_policy(tiny_llama)
    twin = peft_twin(model, tiny_llama, tmp_path)
    model.activate(NAME)
    path = torch.tensor([[1, 2, 3]])
    logits = twin(input_ids=path).logits[0, -1].detach()
    for temperature, divisor in ((0.5, 0.5), (1.0, 1.0), (2.0, 2.0), (0.0, 1.0)):
        (row,) = plant([make_sample([1, 2, 3], [9], temperature=temperature)], 10)
        got = entry_logprobs(model, row)[0].detach()
        expected = torch.log_softmax(logits / divisor, 0)[9]
        assert float(got) == pytest.approx(float(expected), abs=1e-12)


def trainers_own_logprobs(model: LoraModel, sample: Sample) -> Any:
    """In float64, so that nothing is lost on the way."""
    model.activate(NAME)
    (row,) = plant([sample], 10_000)
    return entry_logprobs(model, row)[0].detach().numpy()


@pytest.mark.parametrize("minibatches", [1, 3])
def test_distorted_calls_use_the_trainers_recompute(tiny_llama: Path, minibatches: int) -> None:
    """What their sampler said is no matter: old logprobs are those of the policy as it stood
    before the first of the updates.
    """
    config = CONFIG.model_copy(update={"minibatches": minibatches})
    distorted = [s._replace(distorted=True) for s in calls()]
    plain = [
        s._replace(distorted=False, logprobs=trainers_own_logprobs(tiny_policy(tiny_llama), s))
        for s in distorted
    ]
    ours, expected = tiny_policy(tiny_llama), tiny_policy(tiny_llama)
    figures = Trainer(ours, NAME, seed=0).step(distorted, config)
    wanted = Trainer(expected, NAME, seed=0).step(plain, config)
    assert worst(weights(ours), weights(expected)) <= 1e-10
    assert figures["kl"] == pytest.approx(wanted["kl"], abs=1e-12)
    assert (figures["kl"] > 1e-9) is (minibatches > 1)


# --- minibatches ---------------------------------------------------------------------------------


def updates(trainer: Trainer, folder: Path) -> int:
    folder.mkdir()
    trainer.save(folder)
    count: int = json.loads((folder / STATE).read_text())["updates"]
    return count


@pytest.mark.parametrize(("asked", "made"), [(1, 1), (3, 3), (50, 10)])
def test_each_minibatch_is_an_update(
    tiny_llama: Path, tmp_path: Path, asked: int, made: int
) -> None:
    """Never more than there are trajectories, which are ten."""
    assert len({s.trajectory for s in calls()}) == 10
    trainer = Trainer(tiny_policy(tiny_llama), NAME, seed=0)
    trainer.step(calls(), CONFIG.model_copy(update={"minibatches": asked}))
    assert updates(trainer, tmp_path / "after") == made


def test_minibatches_computed_by_hand(tiny_llama: Path, tmp_path: Path) -> None:
    """The second update's ratios are against the policy before the first, to 1e-10."""
    config = CONFIG.model_copy(update={"minibatches": 2})
    model, by_hand = tiny_policy(tiny_llama), tiny_policy(tiny_llama)
    samples = [s._replace(distorted=False) for s in calls()]
    Trainer(model, NAME, seed=3).step(samples, config)
    parameters: dict[str, Tensor] = {}
    seen: list[dict[str, Tensor]] = []
    for i, part in enumerate(minibatches(samples, config, key=(3, 0))):
        now, gradients = gradients_alone(by_hand, tiny_llama, tmp_path / str(i), part, config)
        parameters = parameters or now
        seen.append(gradients)
        after = hand_adamw(parameters, seen, config)
        for key, weight in by_hand.adapter_weights(NAME).items():
            weight.copy_(after[key])
    assert worst(weights(model), weights(by_hand)) <= 1e-10


# --- faults --------------------------------------------------------------------------------------


def trained_once(tiny_llama: Path, dtype: torch.dtype = torch.float64) -> tuple[LoraModel, Trainer]:
    """So that there are moments to lose."""
    model = tiny_policy(tiny_llama, dtype=dtype)
    trainer = Trainer(model, NAME, seed=0)
    trainer.step(calls(), CONFIG)
    return model, trainer


def wild() -> list[Sample]:
    """A call whose advantage is infinite, and so the loss."""
    return [*calls(), make_sample([5], [6], advantage=-math.inf, logprobs=[-5.0], call=99)]


def fail(*_: object) -> None:
    raise RuntimeError("DefaultCPUAllocator: not enough memory")


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("samples", "changes", "on_progress", "error", "message"),
    [
        (wild(), {}, None, TrainingError, r"not finite.* The adapter is unchanged"),
        (wild(), {"minibatches": 3}, None, TrainingError, "not finite"),
        (calls(), {"learning_rate": 1e308}, None, TrainingError, "weights that are not finite"),
        (calls(), {}, fail, TrainingError, r"not enough memory.*max_tokens_per_row"),
        (calls(), {}, interrupt, KeyboardInterrupt, None),
    ],
    ids=["gradient", "gradient of a later minibatch", "weights", "out of memory", "Ctrl-C"],
)
def test_a_failed_step_leaves_everything_as_it_was(
    tiny_llama: Path,
    tmp_path: Path,
    samples: list[Sample],
    changes: dict[str, Any],
    on_progress: Any,
    error: type[BaseException],
    message: str | None,
) -> None:
    """Case 090: weights and moments bitwise as before, the next step is as if nothing happened."""
    model, trainer = trained_once(tiny_llama, torch.float32)
    before, moments_before = weights(model), moments(trainer, tmp_path / "before")
    with pytest.raises(error, match=message):
        trainer.step(samples, CONFIG.model_copy(update=changes), on_progress=on_progress)
    assert same_bits(weights(model), before)
    assert same_bits(moments(trainer, tmp_path / "after"), moments_before)

    untouched_model, untouched = trained_once(tiny_llama, torch.float32)
    trainer.step(calls(1), CONFIG)
    untouched.step(calls(1), CONFIG)
    assert same_bits(weights(model), weights(untouched_model))


def test_an_error_after_two_steps_undoes_both(tiny_llama: Path, tmp_path: Path) -> None:
    """As when a checkpoint can't be written; what was put back is not the copy that is kept."""
    model, trainer = trained_once(tiny_llama)
    before = weights(model), moments(trainer, tmp_path / "before")

    def fail_at_the_end() -> None:
        with trainer.undone_on_error():
            with pytest.raises(NonFiniteStep):
                trainer.step(calls(), CONFIG.model_copy(update={"learning_rate": 1e308}))
            trainer.step(calls(), CONFIG)
            trainer.step(calls(), CONFIG)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_at_the_end()
    assert same_bits(weights(model), before[0])
    assert same_bits(moments(trainer, tmp_path / "after"), before[1])


def test_a_call_too_long_for_a_row_changes_nothing(tiny_llama: Path) -> None:
    model, trainer = trained_once(tiny_llama)
    before = weights(model)
    with pytest.raises(GroupError, match="max_tokens_per_row=16"):
        trainer.step(
            [make_sample([1] * 20, [2])], CONFIG.model_copy(update={"max_tokens_per_row": 16})
        )
    assert same_bits(weights(model), before)


def test_progress_is_told_row_by_row(tiny_llama: Path) -> None:
    told: list[tuple[int, int]] = []
    config = CONFIG.model_copy(update={"max_tokens_per_row": 20, "minibatches": 2})
    figures = Trainer(tiny_policy(tiny_llama), NAME, seed=0).step(
        calls(), config, on_progress=lambda done, total: told.append((done, total))
    )
    total = figures["tokens_computed"]
    assert len(told) > 2
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (total, total)


# --- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("minibatches", [1, 2])
def test_training_goes_on_bitwise_after_a_load(
    tiny_llama: Path, tmp_path: Path, minibatches: int
) -> None:
    config = CONFIG.model_copy(update={"minibatches": minibatches})
    model = tiny_policy(tiny_llama, dtype=torch.float32)
    trainer = Trainer(model, NAME, seed=3)
    trainer.step(calls(0), config)
    saved = tmp_path / "saved"
    saved.mkdir()
    trainer.save(saved)
    trainer.step(calls(1), config)

    fresh = LoraModel.load(tiny_llama)
    fresh.create_adapter("another", LoraSettings(rank=4, alpha=8.0), seed=77)
    resumed = Trainer(fresh, "another", seed=99)
    resumed.load(saved)
    resumed.step(calls(1), config)
    assert same_bits(weights(fresh, "another"), weights(model))
    assert same_bits(moments(resumed, tmp_path / "a"), moments(trainer, tmp_path / "b"))


def test_an_adapter_alone_starts_with_a_fresh_optimizer(tiny_llama: Path, tmp_path: Path) -> None:
    model, trainer = trained_once(tiny_llama)
    model.save_adapter(NAME, tmp_path)
    trainer.load(tmp_path)
    assert moments(trainer, tmp_path / "after") == {}


@pytest.mark.parametrize(
    ("file", "content"),
    [
        (OPTIMIZER, b"\xff" * 64),
        (STATE, b"[]"),
        (STATE, b"{"),
        (STATE, None),
        ("adapter_model.safetensors", b"\xff" * 64),
        ("adapter_config.json", b"{"),
    ],
)
def test_a_damaged_checkpoint_is_told(
    tiny_llama: Path, tmp_path: Path, file: str, content: bytes | None
) -> None:
    _, trainer = trained_once(tiny_llama)
    trainer.save(tmp_path)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        trainer.load(tmp_path)


def test_moments_of_another_shape_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    _, trainer = trained_once(tiny_llama)
    trainer.save(tmp_path)
    for wrong in ({"0.exp_avg": torch.zeros(3, 3)}, {"999.exp_avg": torch.zeros(1)}):
        save_file(wrong, tmp_path / OPTIMIZER)
        with pytest.raises(CheckpointError, match="fits no weight"):
            trainer.load(tmp_path)


def test_training_one_adapter_leaves_the_others(tiny_llama: Path) -> None:
    model = tiny_policy(tiny_llama)
    model.create_adapter("other", LoraSettings(rank=4), seed=1)
    before = weights(model, "other")
    Trainer(model, NAME, seed=0).step(calls(), CONFIG)
    assert same_bits(weights(model, "other"), before)


# --- what is not finite --------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("minibatches", [1, 3])
def test_a_bad_gradient_is_named_and_undone(
    tiny_llama: Path, tmp_path: Path, bad: float, minibatches: int
) -> None:
    """Case 090, nan_once and inf_norm: the gradient of one weight in one row of several."""
    model, trainer = trained_once(tiny_llama, torch.float32)
    before, moments_before = weights(model), moments(trainer, tmp_path / "before")
    name = list(before)[3]
    seen = []

    def spoil(gradient: Tensor) -> Tensor:
        seen.append(gradient)
        return torch.full_like(gradient, bad) if len(seen) == 2 else gradient

    handle = trainer._parameters[3].requires_grad_().register_hook(spoil)
    config = CONFIG.model_copy(update={"max_tokens_per_row": 24, "minibatches": minibatches})
    with pytest.raises(NonFiniteStep, match=r"not finite.* The adapter is unchanged") as caught:
        trainer.step(calls(1), config)
    handle.remove()
    assert caught.value.tensor == name
    assert same_bits(weights(model), before)
    assert same_bits(moments(trainer, tmp_path / "after"), moments_before)

    untouched_model, untouched = trained_once(tiny_llama, torch.float32)
    trainer.step(calls(1), CONFIG)
    untouched.step(calls(1), CONFIG)
    assert same_bits(weights(model), weights(untouched_model))


@pytest.mark.parametrize(
    ("samples", "changes"), [(wild(), {}), (calls(), {"learning_rate": 1e308})]
)
def test_an_error_that_is_kept_holds_no_tensor(
    tiny_llama: Path, samples: list[Sample], changes: dict[str, Any]
) -> None:
    _, trainer = trained_once(tiny_llama)
    there = tensors_alive()
    with pytest.raises(NonFiniteStep) as caught:
        trainer.step(samples, CONFIG.model_copy(update=changes))
    assert tensors_alive() == there
    assert caught.value.tensor.startswith("base_model.model.")


def test_weights_that_are_not_finite_are_never_saved(tiny_llama: Path, tmp_path: Path) -> None:
    """Case 090, nan_weights; moments neither."""
    model, trainer = trained_once(tiny_llama)
    name, weight = list(model.adapter_weights(NAME).items())[2]
    good = weight[0, 0].item()
    weight[0, 0] = math.nan
    with pytest.raises(TrainingError, match=f"{name} is not finite"):
        trainer.save(tmp_path)
    weight[0, 0] = good
    moment = trainer._optimizer.state[trainer._parameters[1]]["exp_avg_sq"]
    moment[0, 0] = math.inf
    with pytest.raises(TrainingError, match=r"1\.exp_avg_sq is not finite"):
        trainer.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_running_baseline_is_kept(tiny_llama: Path, tmp_path: Path) -> None:
    _, trainer = trained_once(tiny_llama)
    trainer.running = 0.25
    trainer.save(tmp_path)
    _, fresh = trained_once(tiny_llama)
    fresh.load(tmp_path)
    assert fresh.running == 0.25

    def fail_after_learning() -> None:
        with fresh.undone_on_error():
            fresh.running = 0.5
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_after_learning()
    assert fresh.running == 0.25


SETTINGS: list[dict[str, Any]] = [
    {"aggregation": "sequence"},
    {"aggregation": "rollout"},
    {"aggregation": "constant", "horizon": 16},
    {"loss_fn": "gspo", "aggregation": "sequence"},
    {"loss_fn": "vespo", "off_policy_delta": 0.05},
    {"old_logprobs": "recomputed", "mismatch": "truncate", "mismatch_level": "sequence"},
    {"kl_penalty_coef": 0.1},
    {"kl_penalty_coef": 0.1, "kl_penalty": "k3", "minibatches": 2},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_no_setting_cares_how_rows_are_cut(tiny_llama: Path, settings: dict[str, Any]) -> None:
    """Case 088: one row or many, the KL and the entropy in it: the same figures and weights."""
    found = []
    for size in (4096, 24):
        model = tiny_policy(tiny_llama)
        config = TrainConfig.model_validate(
            {**CONFIG.model_dump(), "max_tokens_per_row": size, **settings}
        )
        found.append((Trainer(model, NAME, seed=0).step(calls(), config), weights(model)))
    (whole, expected), (cut, got) = found
    assert cut["tokens_computed"] > whole["tokens_computed"]
    for figure in learned(whole) - {"tokens_computed"}:
        assert cut[figure] == pytest.approx(whole[figure], rel=1e-9, abs=1e-12), figure
    assert worst(got, expected) <= 1e-9
