"""The run folder: its name rule, its owner, its files."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from art_core.errors import ConfigError, RunFolderError, RunLocked
from art_core.rundir import RunDir

# --- names


@pytest.mark.parametrize(
    ("project", "name"), [("../up", "a"), ("p", "a/b"), ("p", ".."), ("", "a")]
)
def test_a_bad_name_makes_nothing(tmp_path: Path, project: str, name: str) -> None:
    with pytest.raises(ConfigError):
        RunDir.open(tmp_path / "art", project, name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("project", "name", "twin"), [("p", "Agent", "agent"), ("P", "agent", "p")]
)
def test_a_name_that_differs_only_by_case_is_refused(
    tmp_path: Path, project: str, name: str, twin: str
) -> None:
    RunDir.open(tmp_path, "p", "agent").close()
    with pytest.raises(ConfigError, match=f"the folder {twin!r} is there already"):
        RunDir.open(tmp_path, project, name)
    RunDir.open(tmp_path, "p", "agent").close()


# --- layout and model.json


def test_the_layout_is_arts(tmp_path: Path) -> None:
    with RunDir.open(tmp_path, "shop", "agent-001") as run:
        assert run.path == tmp_path / "shop" / "models" / "agent-001"
        assert (run.project, run.name) == ("shop", "agent-001")
        assert run.trajectories("val") == run.path / "trajectories" / "val"
        with pytest.raises(ConfigError, match="split name"):
            run.trajectories("../val")


def test_a_relative_base_path_is_fixed_when_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with RunDir.open(".art", "p", "m") as run:
        monkeypatch.chdir("/")
        assert run.path == tmp_path / ".art" / "p" / "models" / "m"
        assert run.read_state() is None


def test_model_json_records_what_the_run_is(tmp_path: Path) -> None:
    with RunDir.open(tmp_path, "p", "m", base_model="tiny", config={"seed": 1}) as run:
        first = json.loads(run.model_json.read_text())
    assert first | {"created": "-"} == {
        "version": 1,
        "project": "p",
        "name": "m",
        "base_model": "tiny",
        "created": "-",
        "config": {"seed": 1},
    }
    assert first["created"].endswith("+00:00")
    with RunDir.open(tmp_path, "p", "m", base_model="tiny", config={"seed": 2}) as run:
        assert json.loads(run.model_json.read_text()) == first | {"config": {"seed": 2}}


def test_another_base_model_is_refused_and_both_are_named(tmp_path: Path) -> None:
    RunDir.open(tmp_path, "p", "m", base_model="tiny").close()
    with pytest.raises(ConfigError, match=r"'huge'.*'tiny'"):
        RunDir.open(tmp_path, "p", "m", base_model="huge")
    with RunDir.open(tmp_path, "p", "m", base_model="tiny") as run:  # and it was given free
        assert run.locked


def test_a_folder_of_art_is_taken_over_with_what_it_says(tmp_path: Path) -> None:
    folder = tmp_path / "p" / "models" / "m"
    folder.mkdir(parents=True)
    theirs = {"name": "m", "project": "p", "base_model": "tiny", "entity": "me"}
    (folder / "model.json").write_text(json.dumps(theirs))
    with RunDir.open(tmp_path, "p", "m", base_model="tiny") as run:
        assert theirs.items() <= json.loads(run.model_json.read_text()).items()


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("{", RunFolderError, "can't be read"),
        ("[]", RunFolderError, "no JSON object"),
        ('{"version": 2}', ConfigError, "layout version"),
    ],
)
def test_a_model_json_that_is_not_ours_is_refused(
    tmp_path: Path, text: str, error: type[Exception], says: str
) -> None:
    folder = tmp_path / "p" / "models" / "m"
    folder.mkdir(parents=True)
    (folder / "model.json").write_text(text)
    with pytest.raises(error, match=says):
        RunDir.open(tmp_path, "p", "m")
    assert (folder / "model.json").read_text() == text


# --- the owner (case 077)

HOLD = textwrap.dedent("""
    import sys
    from art_core.rundir import RunDir
    run = RunDir.open(sys.argv[1], "p", "m")
    print("open", flush=True)
    sys.stdin.read()
""")


@contextmanager
def other_process(base: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds run p/m under `base`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(base)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        assert process.stdin is not None
        process.stdin.close()


def test_the_holder_is_named_and_a_killed_one_gives_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with other_process(tmp_path) as process:
        with pytest.raises(RunLocked) as caught:
            RunDir.open(tmp_path, "p", "m")
        holder = RunDir.at(tmp_path, "p", "m").holder()
        assert holder is not None
        assert (holder.pid, holder.host) == (process.pid, socket.gethostname())
        said = str(caught.value)
        assert f"process {process.pid} " in said
        assert holder.host in said
        assert f"since {holder.since}" in said

        process.kill()
        process.wait()
        with caplog.at_level(logging.WARNING), RunDir.open(tmp_path, "p", "m"):
            assert f"taken over from process {process.pid} " in caplog.text


def test_the_lock_decides_and_not_the_process_number(tmp_path: Path) -> None:
    """holder.json of a dead run names a process that is alive: this one's parent."""
    with RunDir.open(tmp_path, "p", "m") as run:
        alive = {"pid": os.getppid(), "host": socket.gethostname(), "command": "x", "since": "-"}
    (run.path / "holder.json").write_text(json.dumps(alive))
    RunDir.open(tmp_path, "p", "m").close()


def test_two_owners_in_one_process_are_refused_too(tmp_path: Path) -> None:
    first = RunDir.open(tmp_path, "p", "m")
    with pytest.raises(RunLocked, match=f"process {os.getpid()} "):
        RunDir.open(tmp_path, "p", "m")
    RunDir.open(tmp_path, "p", "another").close()
    closer = threading.Thread(target=first.close)  # the lock is the object's, not the thread's
    closer.start()
    closer.join()
    assert not first.locked
    first.close()
    with RunDir.open(tmp_path, "p", "m") as second:
        assert second.locked
        first.close()
        assert second.holder() is not None
    assert second.holder() is None


def test_readers_need_no_lock(tmp_path: Path) -> None:
    with RunDir.open(tmp_path, "p", "m") as owner:
        owner.merge_state({"a": 1})
        reader = RunDir.at(tmp_path, "p", "m")
        assert reader.read_state() == {"a": 1}
        assert not reader.locked
    assert not (RunDir.at(tmp_path, "p", "nobody").path).exists()


def test_a_folder_that_can_not_be_written_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="can't be written"):
        RunDir.open(tmp_path / "file", "p", "m")
    deep = tmp_path.joinpath(*["x" * 200] * 19)  # 19 * 201 bytes and more; Linux allows 4095
    with pytest.raises(RunFolderError, match="choose a shorter"):
        RunDir.open(deep, "p" * 100, "m" * 100)


def test_what_killed_owners_left_is_removed_by_the_next(tmp_path: Path) -> None:
    with RunDir.open(tmp_path, "p", "m") as run:
        pass
    kept = [run.checkpoints / "notes" / "a", run.trajectories("val") / "0001.parquet"]
    left = [
        run.checkpoints / ".tmp-0003-0123456789ab" / "adapter.safetensors",
        run.trajectories("val") / ".tmp-0001.parquet-0123456789ab",
        run.path / ".tmp-state.json-0123456789ab",
    ]
    for path in [*kept, *left]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    RunDir.open(tmp_path, "p", "m").close()
    assert all(path.exists() for path in kept)
    assert not any(path.exists() for path in left)
    assert not (run.checkpoints / ".tmp-0003-0123456789ab").exists()


# --- state.json


def test_state_is_merged_and_overwritten(tmp_path: Path) -> None:
    run = RunDir.at(tmp_path, "p", "m")
    assert run.read_state() is None
    assert run.merge_state({"a": 1, "b": [1]}) == {"a": 1, "b": [1]}
    assert run.merge_state({"a": 2}) == {"a": 2, "b": [1]}
    run.overwrite_state({"c": "\u00e9"})
    assert run.read_state() == {"c": "\u00e9"}


@pytest.mark.parametrize("value", [float("nan"), object(), {1, 2}], ids=["nan", "object", "set"])
def test_a_state_without_json_form_is_refused_and_the_old_kept(
    tmp_path: Path, value: object
) -> None:
    run = RunDir.at(tmp_path, "p", "m")
    run.overwrite_state({"a": 1})
    with pytest.raises(ConfigError, match=r"state\.json"):
        run.merge_state({"b": value})
    assert run.read_state() == {"a": 1}


def test_merging_from_threads_loses_nothing(tmp_path: Path) -> None:
    run = RunDir.at(tmp_path, "p", "m")
    threads = [threading.Thread(target=run.merge_state, args=({str(i): i},)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert run.read_state() == {str(i): i for i in range(16)}
