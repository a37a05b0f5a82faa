"""vLLM as a supervised child, against a stub of it that is a real process with a real child."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from art_core.engine.keeper import start_of
from art_core.engine.vllm_process import Supervision, VllmProcess
from art_core.errors import EngineDied, EngineError, EngineStartFailed
from tests.engine.supervised import (
    HANG_AFTER,
    QUICK,
    all_gone,
    ask,
    keeper,
    pids,
    said,
    supervised,
    wait_for,
)

pytestmark = pytest.mark.skipif(os.name == "nt", reason="not on this platform: vLLM is Unix only")


def test_it_serves_and_leaves_nothing_behind(tmp_path: Path) -> None:
    told: list[str] = []
    process = supervised(tmp_path)
    with process.start(told.append):
        assert process.state == "ready"
        assert ask(process, "/v1/chat/completions") == {"text": "hello"}
        running = [*pids(tmp_path), keeper(tmp_path)]
        assert not all_gone(running)
    assert (process.state, all_gone(running)) == ("stopped", True)
    assert said(tmp_path, "stopping"), "it was not given the time to stop by itself"
    assert not (tmp_path / "run" / "process.json").exists()
    assert "starting vLLM at http://127.0.0.1:" in told[0]
    assert "up after" in told[-1]


def test_it_sees_what_it_needs_and_nothing_else_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTHONPATH": "/somewhere",
        "OPENAI_API_KEY": "secret",
        "RANK": "3",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "1",
    }
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    with supervised(tmp_path, "--max-loras=7", "--seed", "3") as process:
        about = ask(process, "/stub/about")
    seen = about["environ"]
    assert {name for name in ours if name in seen} == {"CUDA_VISIBLE_DEVICES"}
    assert seen["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == seen["VLLM_SERVER_DEV_MODE"] == "1"
    assert seen["PATH"].split(":")[0] == str(tmp_path)
    argv = about["argv"]
    assert argv[:2] == ["-m", "vllm.entrypoints.openai.api_server"]
    given = dict(pairwise(argv))
    assert given["--logprobs-mode"] == "processed_logprobs"
    assert given["--generation-config"] == "vllm"
    assert given["--host"] == "127.0.0.1"
    assert "--enable-lora" in argv
    assert "--max-loras" not in argv, "what the user gives wins"
    assert argv[-3:] == ["--max-loras=7", "--seed", "3"]


def test_a_refused_start_says_why_and_what_to_do(tmp_path: Path) -> None:
    reason = tmp_path / "reason"
    noise = "\n".join(f"noise {n}" for n in range(1000))
    reason.write_text(f"{noise}\ntorch.OutOfMemoryError: CUDA out of memory. Tried to ...")
    process = supervised(tmp_path, f"--stub-says={reason}")
    with pytest.raises(EngineStartFailed, match="the GPU is out of memory") as failed:
        process.start()
    assert "gpu_memory_utilization" in str(failed.value)
    assert str(process.log) in str(failed.value)
    assert failed.value.tail.splitlines()[-1].startswith("torch.OutOfMemoryError")
    assert len(failed.value.tail.splitlines()) == 15
    assert process.state == "failed"
    with pytest.raises(EngineStartFailed, match="out of memory"):
        process.start()


def test_a_taken_port_is_given_up_for_another(tmp_path: Path) -> None:
    reason = tmp_path / "reason"
    reason.write_text("OSError: [Errno 98] Address already in use")
    with supervised(tmp_path, f"--stub-says={reason}", "--stub-forgets") as process:
        assert process.starts == 2
        assert process.state == "ready"


def test_a_port_that_stays_taken_is_an_error(tmp_path: Path) -> None:
    reason = tmp_path / "reason"
    reason.write_text("OSError: [Errno 98] Address already in use")
    process = supervised(tmp_path, f"--stub-says={reason}")
    with pytest.raises(EngineStartFailed, match="port was taken"):
        process.start()
    assert process.starts == 3


def test_a_python_that_is_none(tmp_path: Path) -> None:
    process = supervised(tmp_path)
    (tmp_path / "stub-python").unlink()
    with pytest.raises(EngineStartFailed, match="can't be run"):
        process.start()


def test_a_start_that_takes_too_long(tmp_path: Path) -> None:
    process = supervised(
        tmp_path, "--stub-slow=60", supervision=Supervision(start_within=1.0, stop_within=0.2)
    )
    with pytest.raises(EngineStartFailed, match="did not answer within 1 s"):
        process.start()
    is_there = (tmp_path / "run" / "work" / "pids.json").exists()  # not yet, on a busy machine
    assert not is_there or all_gone(pids(tmp_path))


def test_a_stop_while_it_starts(tmp_path: Path) -> None:
    process = supervised(tmp_path, "--stub-slow=60")
    with ThreadPoolExecutor(1) as pool:
        start = pool.submit(process.start)
        wait_for(lambda: (tmp_path / "run" / "work" / "pids.json").exists())
        process.stop()
        with pytest.raises(EngineError, match="stopped while it started"):
            start.result()
    assert process.state == "stopped"
    assert all_gone(pids(tmp_path))


def test_one_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    process = supervised(tmp_path, "--stub-stubborn").start()
    running = pids(tmp_path)
    process.stop()
    process.stop()
    assert all_gone(running)


async def test_what_is_stopped_can_not_be_asked(tmp_path: Path) -> None:
    process = supervised(tmp_path)
    process.stop()
    with pytest.raises(EngineError, match="can't be asked now: got 'stopped'"):
        await process.ready(1.0)
    with pytest.raises(EngineError, match="can't be asked now: got 'stopped'"):
        process.start()


# It dies


def test_killed_while_idle_it_is_back_and_its_owner_knows(tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []

    def load_again(process: VllmProcess) -> None:
        ask(process, "/v1/load_lora_adapter", lora_name="agent@1")
        told.append((process.state, process.starts))

    with supervised(tmp_path, on_restart=load_again) as process:
        dead = pids(tmp_path)
        os.kill(dead[0], signal.SIGKILL)
        wait_for(lambda: process.starts == 2 and process.state == "ready")
        assert told == [("restarting", 2)]
        assert all_gone(dead), "its engine lives on"
        assert ask(process, "/v1/chat/completions") == {"text": "hello"}


def test_killed_while_starting(tmp_path: Path) -> None:
    process = supervised(tmp_path, "--stub-slow=60")
    with ThreadPoolExecutor(1) as pool:
        start = pool.submit(process.start)
        wait_for(lambda: (tmp_path / "run" / "work" / "pids.json").exists())
        os.kill(pids(tmp_path)[0], signal.SIGKILL)
        with pytest.raises(EngineStartFailed, match="killed, as the system does when memory"):
            start.result()
    assert all_gone(pids(tmp_path))


@pytest.mark.parametrize(
    ("route", "word"), [("/v1/chat/completions", "called"), ("/v1/load_lora_adapter", "loading")]
)
def test_killed_while_it_works_the_call_ends_and_it_is_back(
    route: str, word: str, tmp_path: Path
) -> None:
    patient = Supervision(look_every=0.1, hang_after=30.0, first_pause=0.05)
    with supervised(tmp_path, supervision=patient) as process, ThreadPoolExecutor(1) as pool:
        call = pool.submit(ask, process, route, lora_name="a", seconds=60)
        wait_for(lambda: said(tmp_path, word))
        os.kill(pids(tmp_path)[0], signal.SIGKILL)
        assert isinstance(call.exception(timeout=20), OSError)
        wait_for(lambda: process.starts == 2 and process.state == "ready")


def test_killed_while_stopping(tmp_path: Path) -> None:
    process = supervised(tmp_path, "--stub-stubborn", supervision=Supervision(stop_within=60.0))
    process.start()
    running = pids(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        stop = pool.submit(process.stop)
        time.sleep(0.2)
        os.kill(running[0], signal.SIGKILL)
        stop.result(timeout=20)
    assert process.state == "stopped"
    assert process.starts == 1
    assert all_gone(running)


def test_a_killed_keeper_leaves_nothing_behind(tmp_path: Path) -> None:
    with supervised(tmp_path) as process:
        dead = pids(tmp_path)
        os.kill(keeper(tmp_path), signal.SIGKILL)
        wait_for(lambda: process.starts == 2 and process.state == "ready")
        assert all_gone(dead)


def test_a_hung_engine_is_noticed_and_replaced(tmp_path: Path) -> None:
    with supervised(tmp_path) as process:
        engine = pids(tmp_path)[1]
        os.kill(engine, signal.SIGSTOP)
        wait_for(lambda: process.starts == 2 and process.state == "ready")
        assert all_gone([engine])


def test_a_long_silence_that_was_announced_is_no_hang(tmp_path: Path) -> None:
    with supervised(tmp_path) as process:
        with process.patiently():
            ask(process, "/v1/load_lora_adapter", lora_name="a", seconds=4 * HANG_AFTER)
        assert process.starts == 1
        assert process.state == "ready"


async def test_it_is_given_up_after_so_many_faults(tmp_path: Path) -> None:
    reason = tmp_path / "reason"
    process = supervised(tmp_path, f"--stub-says={reason}").start()
    reason.write_text("RuntimeError: No CUDA GPUs are available")
    os.kill(pids(tmp_path)[0], signal.SIGKILL)
    wait_for(lambda: process.state != "ready")
    with pytest.raises(
        EngineDied, match=r"could not be restarted.*finds none.*2 times before.*setup vllm"
    ):
        await process.ready(20.0)
    assert process.state == "failed"
    assert process.starts == 1 + QUICK.restarts
    process.stop()
    assert all_gone(pids(tmp_path))


def test_an_owner_that_fails_to_load_again_counts_as_a_fault(tmp_path: Path) -> None:
    def refuse(process: VllmProcess) -> None:
        raise RuntimeError("no adapters")

    with supervised(tmp_path, on_restart=refuse) as process:
        os.kill(pids(tmp_path)[0], signal.SIGKILL)
        wait_for(lambda: process.state == "failed")
        assert process.starts == 1 + QUICK.restarts
        assert all_gone(pids(tmp_path))


def test_stopped_while_it_restarts(tmp_path: Path) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def hold(process: VllmProcess) -> None:
        reached.set()
        go_on.wait(20)

    process = supervised(tmp_path, on_restart=hold).start()
    os.kill(pids(tmp_path)[0], signal.SIGKILL)
    assert reached.wait(20)
    with ThreadPoolExecutor(1) as pool:
        stop = pool.submit(process.stop)
        wait_for(lambda: all_gone(pids(tmp_path)))
        go_on.set()
        stop.result(timeout=20)
    assert process.state == "stopped"
    assert process.starts == 2


def test_one_that_dies_while_its_gpu_is_lent_is_started_afterwards(tmp_path: Path) -> None:
    with supervised(tmp_path).start() as process:
        with process.staying_down():
            os.kill(pids(tmp_path)[0], signal.SIGKILL)
            wait_for(lambda: process.state == "restarting")
            time.sleep(4 * QUICK.first_pause)
            assert process.starts == 1
        wait_for(lambda: process.state == "ready")
        assert process.starts == 2
        with process.staying_down():
            os.kill(pids(tmp_path)[0], signal.SIGKILL)
            wait_for(lambda: process.state == "restarting")
            process.stop()  # does not wait for the end of the loan
    assert process.state == "stopped"


def test_a_log_that_somebody_removed_is_no_fault(tmp_path: Path) -> None:
    with supervised(tmp_path) as process:
        process.log.unlink()
        os.kill(pids(tmp_path)[0], signal.SIGKILL)
        wait_for(lambda: process.starts == 2 and process.state == "ready")


# Its parent dies


def parent(folder: Path, moment: str) -> subprocess.Popen[bytes]:
    """A process that has brought a stub in `folder` to `moment`."""
    command = [sys.executable, "-m", "tests.engine.supervised", str(folder), moment]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


MOMENTS = {
    "starting": "starting",
    "idle": "listening",
    "calling": "called",
    "loading": "loading",
    "stopping": "listening",
}
"""What the stub has said when the moment has come."""


@pytest.mark.parametrize("moment", MOMENTS)
def test_no_orphan_after_kill_9_of_the_parent(moment: str, tmp_path: Path) -> None:
    with parent(tmp_path, moment) as killed:
        wait_for(lambda: said(tmp_path, MOMENTS[moment]))
        wait_for(lambda: (tmp_path / "run" / "process.json").exists())
        wait_for(lambda: (tmp_path / "run" / "work" / "pids.json").exists())
        if moment == "stopping":
            assert killed.stdout is not None
            assert killed.stdout.readline() == b"stopping\n"
        left = [*pids(tmp_path), keeper(tmp_path)]
        assert not all_gone(left)
        killed.kill()
    wait_for(lambda: all_gone(left))
    wait_for(lambda: not (tmp_path / "run" / "process.json").exists())


def test_what_a_crash_left_is_ended_by_the_next_start(tmp_path: Path) -> None:
    """Parent and keeper die at once: the kernel takes the server, nobody the engine."""
    with parent(tmp_path, "idle") as killed:
        wait_for(lambda: said(tmp_path, "listening"))
        server, engine = pids(tmp_path)
        os.kill(keeper(tmp_path), signal.SIGSTOP)  # it would be quicker than this test
        killed.kill()
        killed.wait()
        os.kill(keeper(tmp_path), signal.SIGKILL)
    wait_for(lambda: all_gone([server]))
    assert start_of(engine) is not None
    with supervised(tmp_path):
        assert all_gone([engine])


def test_a_foreign_process_with_a_recorded_number_is_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as foreign:
        record = tmp_path / "run" / "process.json"
        record.parent.mkdir()
        another_time = (foreign.pid, "an earlier boot 17")
        known = dict.fromkeys(("owner", "keeper", "main"), another_time)
        record.write_text(json.dumps({**known, "folder": str(tmp_path / "run" / "work")}))
        with supervised(tmp_path):
            assert start_of(foreign.pid) is not None
        foreign.kill()


def test_a_damaged_record_is_put_aside(tmp_path: Path) -> None:
    record = tmp_path / "run" / "process.json"
    record.parent.mkdir()
    record.write_text('{"owner": [1')
    with supervised(tmp_path) as process:
        assert process.state == "ready"


def test_two_at_once_need_two_folders(tmp_path: Path) -> None:
    with supervised(tmp_path), supervised(tmp_path / "other") as other:
        assert other.state == "ready"
        with pytest.raises(EngineError, match="a program runs there already"):
            supervised(tmp_path).start()
