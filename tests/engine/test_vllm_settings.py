"""vLLM's command line and environment, as settings make them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from art_core.engine.vllm_settings import VllmSettings
from art_core.errors import ConfigError

MODEL = Path("/models/m")


def flags(settings: VllmSettings) -> dict[str, str]:
    return dict(pairwise(settings.arguments(5000)))


@pytest.mark.parametrize(("rank", "slots"), [(1, "1"), (2, "8"), (8, "8"), (9, "16"), (512, "512")])
def test_slots_have_the_next_rank_that_vllm_takes(rank: int, slots: str) -> None:
    settings = VllmSettings(model=MODEL, served_name="m", lora_rank=rank)
    assert flags(settings)["--max-lora-rank"] == slots


def test_sleep_is_asked_for_only_when_set_and_parsers_never() -> None:
    plain = VllmSettings(model=MODEL, served_name="m").arguments(5000)
    assert "--enable-sleep-mode" not in plain
    assert not [flag for flag in plain if "parser" in flag]
    full = VllmSettings(model=MODEL, served_name="m", sleep_mode=True)
    assert "--enable-sleep-mode" in full.arguments(5000)


@pytest.mark.parametrize("own", [("--dtype", "half"), ("--dtype=half",)])
def test_what_the_user_gives_stands_alone(own: tuple[str, ...]) -> None:
    settings = VllmSettings(model=MODEL, served_name="m", dtype="float32", extra_args=own)
    assert "float32" not in settings.arguments(5000)


def test_a_switch_can_be_turned_off() -> None:
    settings = VllmSettings(
        model=MODEL, served_name="m", extra_args=("--no-disable-uvicorn-access-log",)
    )
    assert "--disable-uvicorn-access-log" not in settings.arguments(5000)


@pytest.mark.parametrize("flag", ["--port", "--host=0.0.0.0", "--served_model_name", "--api-key"])
def test_what_we_rely_on_can_not_be_overridden(flag: str) -> None:
    with pytest.raises(ConfigError, match="set elsewhere"):
        VllmSettings(model=MODEL, served_name="m", extra_args=(flag, "x"))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"lora_rank": 513}, "expected 1 to 512"),
        ({"cpu_cache_gb": 0.0}, "more than 0"),
        ({"max_loras": 1}, "at least 2"),
        ({"gpu_memory_utilization": 90.0}, "at most 1"),
    ],
)
def test_what_can_not_work_is_refused(wrong: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        VllmSettings(model=MODEL, served_name="m", **wrong)  # type: ignore[arg-type]  # one of each


def test_variables_of_the_user_win() -> None:
    settings = VllmSettings(
        model=MODEL, served_name="m", environment=(("HF_HUB_OFFLINE", "0"), ("PYTHONPATH", "/mine"))
    )
    seen = settings.variables({"PATH": "/bin", "PYTHONPATH": "/ours"}, Path("/env/bin/python"), "k")
    assert seen["HF_HUB_OFFLINE"] == "0"
    assert seen["PYTHONPATH"] == "/mine"
    assert seen["PATH"] == "/env/bin:/bin"


@pytest.mark.parametrize(("asked", "given"), [(0.5, "1"), (1.0, "1"), (1.5, "2"), (4, "4")])
def test_vllm_reads_the_cache_of_a_cpu_as_a_whole_number(asked: float, given: str) -> None:
    settings = VllmSettings(model=MODEL, served_name="m", cpu_cache_gb=asked)
    assert settings.variables({}, Path("/p"), "k")["VLLM_CPU_KVCACHE_SPACE"] == given
