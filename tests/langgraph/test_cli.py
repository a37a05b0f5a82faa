"""The command as its users start it: statuses, messages, and output on every kind of stdout.

Each setting is a real process. Those that need a terminal open a pseudo-terminal, which Windows has
not: there they are skipped by name.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="art-langgraph[train] is not installed")
pytest.importorskip("torch", reason="art-langgraph[train] is not installed")

from art_core.rundir import RunDir
from art_langgraph.cli import main
from art_langgraph.cli.quickstart import choose_run
from art_langgraph.quickstart.recipe import Recipe
from tests.langgraph.recorded_run import NAME, RECIPE, SHOWN_TEXTS, record

SECONDS = 300
COMMAND = (sys.executable, "-c", "import sys; from art_langgraph.cli import main; sys.exit(main())")
ESCAPE, RETURN = b"\x1b", b"\r"
COLOR = re.compile(rb"\x1b\[[0-9;]*3[0-7]m")

SHOW_TEXTS = """
import sys
from art_core.calls import ModelCall
from art_core.trajectories import Trajectory, TrajectoryGroup
from art_langgraph.cli.console import prepare_streams
from art_langgraph.cli.quickstart_view import Narrator
from art_langgraph.quickstart.recipe import Recipe
from tests.langgraph.recorded_run import MODEL_TEXTS, RECIPE, trajectory
from art_langgraph.quickstart.clientele import make_clientele
prepare_streams()
customer = make_clientele(RECIPE).held_out[0]
for text in MODEL_TEXTS:
    Narrator(RECIPE, False).first(TrajectoryGroup([trajectory(customer, right=False, said=text)]))
"""

needs_pty = pytest.mark.skipif(
    sys.platform == "win32", reason="not on this platform: no pseudo-terminals"
)


def environment(**settings: str) -> dict[str, str]:
    """This process's, without what would decide about colours and widths, with `settings`."""
    unwanted = {"NO_COLOR", "FORCE_COLOR", "CI", "COLUMNS", "LINES", "TTY_COMPATIBLE"}
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    return kept | {"TERM": "xterm-256color", "PYTHONPATH": str(Path.cwd())} | settings


def piped(*command: str, **settings: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment(**settings),
        timeout=SECONDS,
        check=False,
    )


def in_terminal(
    command: Sequence[str], columns: int = 80, settings: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    """Exit status and everything that a terminal of that width is sent."""
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment(**(settings or {}))
    )
    os.close(theirs)
    sent = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux: EIO once the other side is closed
            break
        if not part:
            break
        sent += part
    os.close(ours)
    return process.wait(SECONDS), sent.replace(b"\r\n", b"\n")  # the terminal adds the return


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The command for a run that is finished: it shows the table and writes the report again."""
    path = tmp_path_factory.mktemp("finished")
    record(path / ".art")
    return (
        *COMMAND,
        *("quickstart", "--quick", "--path", str(path / ".art"), "--out", str(path / "report")),
    )


# --- statuses and messages, in this process


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"art-langgraph \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)
    for arguments in (["--help"], ["quickstart", "--help"], ["model", "fetch", "--help"]):
        assert main(arguments) == 0
        assert "Usage: art-langgraph" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["frobnicate"],
        ["quickstart", "--steps", "0"],
        ["quickstart", "--graph", "square"],
        ["quickstart", "--sed", "1"],
        ["model", "fetch"],
    ],
)
def test_wrong_usage_is_status_2(arguments: Sequence[str]) -> None:
    assert main(arguments) == 2


def test_an_unknown_base_model_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["quickstart", "--base-model", "./no-such-folder"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("art-langgraph: no base model there: got './no-such-folder'")
    assert error.count("\n") == 1
    assert "Traceback" not in error
    assert not (tmp_path / ".art").exists()


def test_debug_adds_the_traceback_wherever_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--debug", "model", "show", "x"], ["model", "show", "x", "--debug"]):
        assert main(arguments) == 1
        error = capsys.readouterr().err
        assert "Traceback (most recent call last)" in error
        assert "art-langgraph: no base model there" in error


def test_a_report_folder_that_cannot_be_is_refused_before_anything_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    arguments = ["quickstart", "--out", str(file), "--path", str(tmp_path / ".art")]
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert "--out" in captured.err
    assert captured.out == ""


def test_another_recipe_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / ".art")
    state = tmp_path / ".art" / "quickstart" / "models" / NAME / "state.json"
    kept = json.loads(state.read_text("utf-8"))
    kept["quickstart"]["settings"]["group_size"] = 99
    state.write_text(json.dumps(kept), "utf-8")
    command = ["quickstart", "--quick", "--path", str(tmp_path / ".art"), "--out", str(tmp_path)]
    assert main(command) == 1
    error = capsys.readouterr().err
    assert "group_size" in error
    assert "--fresh" in error
    assert json.loads(state.read_text("utf-8")) == kept


def test_fresh_takes_the_next_name_and_the_newest_run_goes_on(tmp_path: Path) -> None:
    def chosen(*, fresh: bool) -> str:
        model, run = choose_run(RECIPE, tmp_path, quick=True, fresh=fresh)
        assert model.name == run.name
        return run.name

    assert chosen(fresh=False) == chosen(fresh=True) == NAME
    record(tmp_path)
    assert chosen(fresh=False) == NAME
    assert chosen(fresh=True) == f"{NAME}-2"
    for number in (2, 3):
        RunDir.at(tmp_path, "quickstart", f"{NAME}-{number}").path.mkdir()
    assert chosen(fresh=False) == f"{NAME}-3"
    assert chosen(fresh=True) == f"{NAME}-4"


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "shop-seed0"),
        ({"seed": 3}, "shop-seed3"),
        ({"graph": "stategraph"}, "shop-seed0-stategraph"),
        ({"base_model": "Qwen/Qwen2.5-0.5B"}, "shop-seed0-Qwen2-5-0-5B"),
        ({"base_model": "../.."}, "shop-seed0"),
    ],
    ids=str,
)
def test_what_makes_another_run_is_in_its_name(
    changes: dict[str, Any], name: str, tmp_path: Path
) -> None:
    assert choose_run(Recipe(**changes), tmp_path, quick=False, fresh=False)[1].name == name


def test_a_finished_run_is_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / ".art")
    out = tmp_path / "report"
    assert main(["quickstart", "--quick", "--path", str(tmp_path / ".art"), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "is finished" in shown
    assert re.search(r"held-out served right +33% +100%", shown)
    assert "2 steps in 1 min 3 s" in shown
    assert {path.name for path in out.iterdir()} == {"index.html", "report.json", "reward.png"}


# --- every kind of stdout


@pytest.mark.parametrize(
    "settings",
    [{}, {"CI": "true"}, {"COLUMNS": "20", "TERM": "dumb"}],
    ids=str,
)
def test_a_pipe_gets_plain_lines(finished: tuple[str, ...], settings: dict[str, str]) -> None:
    done = piped(*finished, **settings)
    assert done.returncode == 0, done.stderr
    assert ESCAPE not in done.stdout
    assert RETURN not in done.stdout
    assert b"33%" in done.stdout
    assert b"100%" in done.stdout
    assert done.stderr == b""


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
@pytest.mark.parametrize("program", ["table", "conversation"])
def test_any_encoding_will_do(finished: tuple[str, ...], encoding: str, program: str) -> None:
    command = finished if program == "table" else (sys.executable, "-c", SHOW_TEXTS)
    done = piped(*command, PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    done.stdout.decode(encoding)


def test_the_models_text_is_shown_letter_for_letter() -> None:
    done = piped(sys.executable, "-c", SHOW_TEXTS, PYTHONIOENCODING="utf-8")
    assert done.returncode == 0, done.stderr
    shown = done.stdout.decode()
    for text in SHOWN_TEXTS:
        assert text in shown
    assert ESCAPE not in done.stdout
    assert RETURN not in done.stdout


@needs_pty
def test_the_models_text_is_shown_letter_for_letter_on_a_terminal() -> None:
    status, sent = in_terminal((sys.executable, "-c", SHOW_TEXTS), columns=200)
    assert status == 0
    for text in SHOWN_TEXTS:
        assert text.encode() in sent
    assert b"\x1b]0;" not in sent
    assert b"\x1b[2J" not in sent
    assert RETURN not in sent


@needs_pty
@pytest.mark.parametrize(
    ("settings", "escapes", "colors"),
    [
        ({}, True, True),
        ({"NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, False, False),
        ({"CI": "true"}, False, False),
    ],
    ids=str,
)
def test_a_terminal_gets_what_it_can_take(
    settings: dict[str, str], escapes: bool, colors: bool
) -> None:
    script = (
        "from art_langgraph.cli.console import say, show_table\n"
        "say(('done', 'bold'), (' 43%', 'green'))\n"
        "show_table(['', 'before'], [['tool', '1%']])\n"
    )
    status, sent = in_terminal((sys.executable, "-c", script), settings=settings)
    assert status == 0
    assert (ESCAPE in sent) is escapes
    assert (COLOR.search(sent) is not None) is colors
    assert b"43%" in sent


@needs_pty
@pytest.mark.parametrize("columns", [0, 20])
def test_a_narrow_terminal_still_shows_the_figures(finished: tuple[str, ...], columns: int) -> None:
    status, sent = in_terminal(finished, columns)
    assert status == 0
    assert b"33%" in sent
    assert b"100%" in sent


def test_a_reader_who_leaves_ends_it_quietly(finished: tuple[str, ...]) -> None:
    for command in (finished, (*COMMAND, "--help")):
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
        )
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        error = process.stderr.read()
        process.stderr.close()
        assert process.wait(SECONDS) in (0, 141)
        assert error == b""


@pytest.mark.skipif(sys.platform == "win32", reason="not on this platform: shells differ")
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_do_no_harm(finished: tuple[str, ...], closed: str) -> None:
    done = piped("sh", "-c", f'exec "$@" {closed}', "sh", *finished)
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr


# --- the real thing


@pytest.fixture
def quick(smollm2: Path, tmp_path: Path) -> list[str]:
    """A real run of one step."""
    return [
        *COMMAND,
        *("quickstart", "--quick", "--steps", "1", "--base-model", str(smollm2)),
        *("--path", str(tmp_path / ".art"), "--out", str(tmp_path / "report")),
    ]


@pytest.mark.model
@pytest.mark.skipif(sys.platform == "win32", reason="not on this platform: SIGINT to a process")
def test_the_quickstart_from_end_to_end_with_a_ctrl_c(quick: list[str], tmp_path: Path) -> None:
    process = subprocess.Popen(
        quick, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), text=True
    )
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if line.startswith("Held-out before"):
            time.sleep(1.0)  # into the rollouts of the first step
            process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=SECONDS)
    assert process.returncode == 130, error
    assert "Interrupted; step 0 is saved" in said
    assert "The same command goes on from there" in said
    assert "Traceback" not in error
    assert re.search(r"reward +\d\.\d\d = ", said)

    done = piped(*quick)
    shown = done.stdout.decode()
    assert done.returncode == 0, done.stderr.decode()
    assert "Going on from step 0" in shown
    assert "Held-out before" not in shown
    assert "Held-out after" in shown
    report: dict[str, Any] = json.loads((tmp_path / "report" / "report.json").read_text("utf-8"))
    assert report["steps"] in (0, 1)  # 0 where every group's rewards were equal
    assert report["seconds"] > report["phases"]["after"] > 0.0
    assert 0.0 <= report["reward_first"] <= 1.0
    assert len(report["curve"]) == 1
    assert done.stderr == b""
    for name in ("index.html", "reward.png"):
        assert (tmp_path / "report" / name).stat().st_size > 10_000
