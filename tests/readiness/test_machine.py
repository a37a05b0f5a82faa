"""What a machine has, looked at for real, and what is said of others."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from art_core.finding import Finding
from art_core.readiness.about_machine import VllmSeen, about_machine
from art_core.readiness.machine import look_around
from art_core.readiness.memory import GIB
from art_core.readiness.places import Place, proxy_in_between, try_folder, try_loopback
from tests.readiness.test_memory import LAPTOP, with_gpus

PLACES = {"models": Place(Path("models"), 50 * GIB, "", "")}
NO_VLLM = VllmSeen(None, why_not="there is no vLLM on this machine", fix="art-langgraph setup vllm")
SMI = """#!/bin/sh
case "$1" in
--query-gpu=*) echo "NVIDIA H200, 143771, 143000, 580.65.06, 9.0";;
*) echo "| NVIDIA-SMI 580.65.06    Driver Version: 580.65.06    CUDA Version: 13.0 |";;
esac
"""


def found(findings: Sequence[Finding], check: str) -> Finding:
    return next(finding for finding in findings if finding.check == check)


def test_this_machine_is_seen() -> None:
    machine = look_around()
    assert machine.cores >= 1
    assert machine.python == ".".join(map(str, sys.version_info[:3]))
    assert machine.packages["langgraph"]
    assert bool(machine.gpus) != bool(machine.why_no_gpu)


@pytest.mark.skipif(sys.platform == "win32", reason="not on this platform: a shell script")
def test_a_gpu_is_read_from_nvidias_own_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    machine = look_around()
    (gpu,) = machine.gpus
    assert (gpu.name, gpu.total, gpu.capability) == ("NVIDIA H200", 143_771 * 2**20, (9, 0))
    assert (machine.driver, machine.cuda) == ("580.65.06", "13.0")
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    machine = look_around()
    assert machine.gpus == ()
    assert machine.why_no_gpu == "nvidia-smi says: NVIDIA-SMI has failed"


def test_a_machine_without_gpu_and_torch_is_no_fault() -> None:
    bare = replace(LAPTOP, packages=dict.fromkeys(LAPTOP.packages))
    findings = about_machine(bare, PLACES, "", NO_VLLM)
    assert {finding.status for finding in findings} == {"pass", "warn", "skipped"}
    assert "pip install 'art-langgraph[train]'" in found(findings, "training").fix
    assert found(findings, "vLLM").status == "skipped"


def test_a_torch_that_can_not_use_the_gpu_is_one() -> None:
    machine = replace(with_gpus(24), why_torch_is_blind="Torch not compiled with CUDA enabled")
    finding = found(about_machine(machine, PLACES, "", NO_VLLM), "training")
    assert (finding.status, finding.fix) == (
        "fail",
        "Install a torch built for CUDA 13.0 or older.",
    )


@pytest.mark.parametrize(("installed", "status"), [(None, "skipped"), ("0.50.2", "pass")])
def test_what_4_bits_need(installed: str | None, status: str) -> None:
    machine = with_gpus(24)
    machine = replace(machine, packages={**machine.packages, "bitsandbytes": installed})
    finding = found(about_machine(machine, PLACES, "", NO_VLLM), "4 bits")
    assert finding.status == status
    assert bool(finding.fix) == (installed is None)
    assert not any(f.check == "4 bits" for f in about_machine(LAPTOP, PLACES, "", NO_VLLM))


@pytest.mark.parametrize(
    ("capability", "free", "status"),
    [((9, 0), 24, "pass"), ((9, 0), 2, "warn"), ((7, 5), 24, "warn"), ((6, 1), 24, "fail")],
)
def test_gpus_that_are_old_or_taken(capability: tuple[int, int], free: int, status: str) -> None:
    machine = with_gpus(24)
    gpu = replace(machine.gpus[0], capability=capability, free=free * GIB)
    findings = about_machine(replace(machine, gpus=(gpu,)), PLACES, "", NO_VLLM)
    assert found(findings, "GPU").status == status


@pytest.mark.parametrize(
    ("vllm", "status"),
    [
        (NO_VLLM, "warn"),
        (VllmSeen("0.32.0", is_cpu=True), "warn"),
        (VllmSeen("0.32.0"), "pass"),
    ],
)
def test_the_vllm_beside_a_gpu(vllm: VllmSeen, status: str) -> None:
    finding = found(about_machine(with_gpus(24), PLACES, "", vllm), "vLLM")
    assert finding.status == status
    assert bool(finding.fix) == (status == "warn")


def test_places_that_can_not_be_used() -> None:
    places = {
        "models": Place(Path("/m"), 0, "Permission denied", ""),
        "runs": Place(Path("/r"), 9 * GIB, "", "SQLite keeps to 'delete' there"),
        "small": Place(Path("/s"), GIB, "", ""),
    }
    findings = about_machine(LAPTOP, places, "", NO_VLLM)
    assert [found(findings, name).status for name in places] == ["fail", "fail", "warn"]
    assert "ART_HOME" in found(findings, "models").fix


@pytest.mark.parametrize(
    ("variables", "proxy"),
    [
        ({}, None),
        ({"HTTPS_PROXY": "http://me:secret@proxy:3128"}, "proxy:3128"),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "localhost, 127.0.0.1"}, None),
    ],
)
def test_a_proxy_may_get_what_is_meant_for_loopback(
    variables: dict[str, str], proxy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert proxy_in_between() == proxy
    finding = found(about_machine(LAPTOP, PLACES, "", NO_VLLM, proxy), "loopback")
    assert finding.status == ("pass" if proxy is None else "warn")


def test_no_loopback_is_a_fault() -> None:
    findings = about_machine(LAPTOP, PLACES, "Permission denied", NO_VLLM)
    assert found(findings, "loopback").status == "fail"


def test_a_folder_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    place = try_folder(tmp_path / "not" / "yet")
    assert (place.why_not, place.why_no_wal) == ("", "")
    assert place.free > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="not on this platform: no /dev/null/")
def test_a_folder_that_can_not_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert try_folder(tmp_path / "file" / "folder").why_not == "Not a directory"


def test_loopback_works_here() -> None:
    assert try_loopback() == ""
