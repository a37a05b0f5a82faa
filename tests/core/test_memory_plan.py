"""A step's memory before it is computed: what is said, refused and recommended."""

from __future__ import annotations

import logging
import mmap
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from art_core.config import LoraSettings, TrainConfig
from art_core.errors import NotEnoughMemory
from art_core.nn.keeping import drops_out
from art_core.nn.lora import LoraModel
from art_core.readiness.memory import GIB
from art_core.readiness.shape import shape_of
from art_core.readiness.sizes import sizes_of
from art_core.readiness.step_memory import Step
from art_core.training import attempt, memory_plan
from art_core.training.memory_peak import MemoryPeak, Room, room_on
from art_core.training.memory_plan import MemoryPlan, Planner
from art_core.training.requests import Lesson, Opening
from art_core.training.trainer import Trainer
from art_core.training.workbench import Workbench
from tests.core.samples import policy_calls
from tests.core.tiny_policy import NAME, same_bits, tiny_policy, weights
from tests.readiness.models import shape

CPU = torch.device("cpu")
CONFIG = TrainConfig(learning_rate=1e-3, max_tokens_per_row=24)


def plan(available: float, *, gpu: bool = True, again: bool = True) -> MemoryPlan:
    """Of Llama 3.1 8B in 16 bits, rank 8, a row of 16,384, on a device of 80 GiB."""
    step = Step(row=16_384, weights=15 * GIB, adapter=20_971_520)
    room = Room("a device", 80 * GIB, int(available * GIB))
    return MemoryPlan(shape("llama-3.1-8b"), step, room, gpu, recomputes=gpu and again)


def test_a_processor_computes_nothing_again() -> None:
    """32 layers keep 4 x 4096 + 3 x 4096 + 4 x 1024 + 3 x 14336 numbers of 16,384 positions."""
    kept = 32 * (7 * 4096 + 4 * 1024 + 3 * 14336) * 16_384 * 2
    on_cpu = plan(200, gpu=False)
    assert on_cpu.need.parts["kept for the backward pass"] == kept
    assert on_cpu.expected == on_cpu.need.total
    assert plan(60, gpu=False).lacks
    assert not plan(60).lacks


def test_a_gpu_computes_layers_again_as_the_module_will() -> None:
    roomy, narrow = plan(200), plan(60)
    assert roomy.keeping == 32
    assert 0 < narrow.keeping < 32
    assert narrow.expected == narrow.need.at(narrow.keeping) < 60 * GIB
    assert f"{32 - narrow.keeping} of 32 layers computed again" in str(narrow)
    assert "weights 15.0 GiB" in str(narrow)


def test_where_layers_drop_out_nothing_is_computed_again() -> None:
    """GPT-2 and OPT on a GPU; the advice is that for a GPU all the same."""
    keeps = plan(60, again=False)
    assert keeps.lacks
    assert keeps.expected == keeps.need.total
    assert keeps.figures()["memory/layers_again"] == 0
    assert any("on the GPU" in change for change in plan(20, again=False).changes(100))


def test_a_module_says_whether_it_can_compute_again(tiny_llama: Path, tmp_path: Path) -> None:
    """By the config that transformers gives OPT: dropout 0.1. On a processor none does."""
    from transformers import LlamaConfig, OPTConfig

    assert drops_out(OPTConfig().to_dict())
    assert not drops_out(LlamaConfig().to_dict())
    model = tiny_policy(tiny_llama)
    assert not model.recomputes
    planned = Planner(model, trained=1).plan(100, updates=1)
    assert planned is not None
    assert not planned.recomputes


def test_advice_names_the_settings_of_the_step() -> None:
    with pytest.raises(NotEnoughMemory, match=r'TrainSFTConfig\(beyond_memory="try"\)'):
        plan(20).check(longest_call=1000, settings="TrainSFTConfig")


def test_what_does_not_fit_is_refused_with_what_to_change() -> None:
    lacking = plan(20)
    row = lacking.longest_row()
    assert replace(lacking, step=replace(lacking.step, row=row)).need.least <= 20 * GIB
    assert replace(lacking, step=replace(lacking.step, row=row + 1)).need.least > 20 * GIB
    with pytest.raises(NotEnoughMemory) as caught:
        lacking.check(longest_call=1000)
    said = str(caught.value)
    assert "a row of 16384 tokens does not fit on a device" in said
    assert "got '20.0 GiB for it'" in said
    assert f"Set max_tokens_per_row={row}." in said
    assert 'TrainConfig(beyond_memory="try")' in said
    assert "while_training" in said, "60 of 80 GiB are others'"
    assert "in 4 bits" in said


def test_a_call_that_is_too_long_is_named() -> None:
    lacking = plan(20)
    changes = lacking.changes(longest_call=16_384)
    assert changes[0] == f"Keep calls under {lacking.longest_row()} tokens (the longest has 16384)."


def test_weights_that_do_not_fit_leave_no_row() -> None:
    lacking = plan(10)
    assert lacking.lacks
    assert lacking.longest_row() == 0
    assert not any("max_tokens_per_row" in change for change in lacking.changes(100))


def test_an_estimate_may_be_a_tenth_too_high() -> None:
    """Only what would not fit then either is refused."""
    exact = plan(100).need.least / GIB
    assert not plan(exact * 0.91).lacks
    assert plan(exact * 0.89).lacks
    assert plan(exact * 0.91).is_tight


def test_where_the_system_tells_nothing_nothing_is_refused() -> None:
    assert not plan(0).lacks


def test_a_plan_counts_the_module_as_the_doctor_does(tiny_llama: Path) -> None:
    model = LoraModel.load(tiny_llama)
    found = shape_of(model.config.to_dict())
    sizes = sizes_of(found)
    assert sizes is not None
    assert model.base_bytes == 4 * sizes.total
    assert model.copied_bytes == 4 * sizes.matrices
    with_adapter = tiny_policy(tiny_llama, dtype=torch.float32)
    assert with_adapter.base_bytes == model.base_bytes
    planned = Planner(with_adapter, trained=4 * sizes.adapter_per_rank).plan(100, updates=1)
    assert planned is not None
    assert planned.need.fixed["weights"] == 4 * sizes.total
    assert planned.need.fixed["adapter and optimizer"] == 16 * 4 * sizes.adapter_per_rank


def test_the_peak_of_a_process() -> None:
    """64 MiB that are written and gone again."""
    before = MemoryPeak(CPU).bytes
    peak = MemoryPeak(CPU)
    if not before or not Path("/proc/self/clear_refs").exists():
        pytest.skip("not on this platform: only Linux tells a process's peak")
    with mmap.mmap(-1, 64 * 2**20) as pages:  # a tensor may get pages that the process has kept
        pages.write(b"1" * len(pages))
    assert peak.bytes >= before + 60 * 2**20
    room = room_on(CPU)
    assert before < room.available <= room.whole


def test_files_in_memory_are_counted_once(tmp_path: Path) -> None:
    """256 MiB of a file, mapped and read: the system has them among what it can give."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("not on this platform: only Linux tells a process's memory")
    file = tmp_path / "weights"
    file.write_bytes(bytes(256 * 2**20))
    before = room_on(CPU).available
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as pages:
        assert sum(pages[at] for at in range(0, len(pages), mmap.PAGESIZE)) == 0
        assert room_on(CPU).available < before + 128 * 2**20


def test_a_step_tells_what_it_planned_and_took(
    tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(tiny_policy(tiny_llama), NAME, seed=0, held=lambda: {"the engine": GIB})
    with caplog.at_level(logging.INFO, logger=attempt.__name__):
        figures = trainer.step(policy_calls(), CONFIG)
        trainer.step(policy_calls(1), CONFIG)
    (told,) = (r.getMessage() for r in caplog.records if "memory plan" in r.getMessage())
    assert "the engine 1.0 GiB" in told
    assert figures["memory/planned_gib"] == pytest.approx(1.0, abs=0.01)
    assert figures["memory/row"] == 24
    assert figures["memory/layers_again"] == 0
    assert figures["memory/available_gib"] > 0
    assert figures["memory/peak_gib"] > 0


def test_what_a_process_has_beside_is_not_free(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second base model with its copy and its engine's keys and values, an adapter that is
    trained beside, with its moments, and one that only answers; gone when they are.
    """
    planned: list[dict[str, int]] = []
    plan = Planner.plan

    def kept(self: Planner, row: int, updates: int) -> MemoryPlan | None:
        found = plan(self, row, updates)
        assert found is not None
        planned.append(dict(found.step.held or {}))
        return found

    monkeypatch.setattr(Planner, "plan", kept)
    module, other = (LoraModel.load(tiny_llama) for _ in range(2))
    bench, second = Workbench(module, cached=100), Workbench(other, cached=1000)
    for name in ("first", "beside"):
        folder = tmp_path / name
        bench.open(Opening(name, LoraSettings(rank=4), 0, "adamw", folder, None))
    module.load_adapter("old", tmp_path / "first" / "0000")
    numbers = module.numbers_of("first")
    pair = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, their width, bytes
    bench.learn(lesson("first", tmp_path), lambda done, total: None, threading.Event())
    assert planned[-1] == {
        "keys and values": 1100 * pair,
        "the program": GIB // 2,
        "other base models": module.base_bytes + module.copied_bytes,
        "other adapters": numbers * (4 + 8) + numbers * 4,
    }
    second.close()
    bench.open(Opening("third", LoraSettings(rank=4), 0, "adamw", tmp_path / "third", None))
    assert "other base models" not in planned[-1]
    assert planned[-1]["keys and values"] == 100 * pair
    bench.close()


def lesson(adapter: str, folder: Path) -> Lesson:
    return Lesson(adapter, 1, folder / adapter, [policy_calls()], CONFIG)


def test_a_step_that_cannot_fit_is_refused_before_anything_is_computed(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine of 1 GiB, of which the engine holds as much already. It goes on if it is told to,
    and the refused call leaves no trace.
    """
    monkeypatch.setattr(memory_plan, "room_on", lambda device: Room("this machine", GIB, GIB // 2))
    model = tiny_policy(tiny_llama)
    trainer = Trainer(model, NAME, seed=0, held=lambda: {"keys and values": GIB})
    before = weights(model)
    with pytest.raises(NotEnoughMemory, match=r"cache_tokens") as caught:
        trainer.step(policy_calls(), CONFIG)
    assert "Nothing was computed" in str(caught.value)
    assert same_bits(weights(model), before)
    figures = trainer.step(policy_calls(), CONFIG.model_copy(update={"beyond_memory": "try"}))
    assert figures["memory/planned_gib"] > figures["memory/available_gib"]
    assert not same_bits(weights(model), before)
