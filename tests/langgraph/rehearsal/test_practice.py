"""A real training step on calls of a graph, with a random tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="art-langgraph[train] is not installed")
pytest.importorskip("transformers", reason="art-langgraph[train] is not installed")

from art_core.nn.base_model import inspect_base_model
from art_core.nn.tiny_model import CONTEXT, write_tiny_model
from art_langgraph.rehearsal.practice import practise
from tests.langgraph.rehearsal import graphs
from tests.langgraph.rehearsal.theater import HELLO


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny", ["Where is order 10437? It is on its way."])


def test_the_tiny_model_is_a_whole_base_model(tiny: Path) -> None:
    info = inspect_base_model(tiny)
    assert info.context_length == CONTEXT
    assert info.architecture == "LlamaForCausalLM"


async def test_a_step_is_learned_saved_and_taken_up_again(tiny: Path, tmp_path: Path) -> None:
    finding = await practise(graphs.agent(), HELLO, tiny, tmp_path / "runs", timeout=60)
    assert finding.status == "pass", finding
    assert "learned a step from" in finding.what
    saved = tmp_path / "runs" / "rehearsal" / "models" / "rehearsal" / "checkpoints" / "0001"
    assert (saved / "adapter_model.safetensors").is_file()


async def test_a_graph_that_asks_nobody_has_nothing_to_learn(tiny: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="without a call to a ChatArt"):
        finding = await practise(graphs.silent(), HELLO, tiny, tmp_path / "runs", timeout=60)
    assert finding.status == "fail"
    assert "made no call to the model" in finding.what


async def test_rollouts_that_all_fail_are_told(tiny: Path, tmp_path: Path) -> None:
    finding = await practise(graphs.failing_first(), HELLO, tiny, tmp_path / "runs", timeout=60)
    assert finding.status == "skipped"
    assert "the group is empty" in finding.what
