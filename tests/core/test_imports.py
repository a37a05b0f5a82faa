"""What importing the packages may cost and what their source may lean on.

The light side must import where torch and its company are not installed, must do nothing else on
import, and must run on Windows. Not run on Windows: the last is held by reading the source.
"""

from __future__ import annotations

import ast
import json
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import art_core
import art_langgraph

BLOCKED = ["torch", "transformers", "vllm", "peft", "pandas", "pyarrow"]

HEAVY = (
    "art_core.local",
    "art_core.nn",
    "art_core.server",
    "art_core.training",
    "art_core.engine.embedded",
    "art_core.engine.generate",
    "art_core.engine.prefix_cache",
    "art_core.engine.sampling",
)
"""Modules that need torch; all others are light."""

LIGHT_AMONG_HEAVY = {"art_core.nn", "art_core.nn.base_model", "art_core.training"}
"""Their heavy imports are inside functions: the command asks them before anything is loaded."""

WINDOWS_LACKS = {
    "fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty",
    "os.fork", "os.forkpty", "os.getpgid", "os.getuid", "os.killpg", "os.setsid", "os.wait",
    "signal.SIGALRM", "signal.SIGCHLD", "signal.SIGCONT", "signal.SIGHUP", "signal.SIGKILL",
    "signal.SIGPIPE", "signal.SIGQUIT", "signal.SIGSTOP", "signal.SIGTSTP", "signal.SIGUSR1",
    "signal.SIGUSR2", "signal.alarm", "signal.pause", "signal.pthread_kill", "signal.setitimer",
    "loop.add_signal_handler",
}  # fmt: skip
"""Modules, functions and signals that Python has on Unix alone (its library reference says so)."""

IMPORT_ALL = """
import importlib, json, logging, os, sys, threading

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked by this test", name=name)

BLOCKED, MODULES = json.loads(sys.argv[1])
sys.meta_path.insert(0, Blocker())
import openai, pydantic, numpy  # what they do on import is theirs
before = dict(os.environ), set(os.listdir()), list(logging.getLogger().handlers)
for module in MODULES:
    importlib.import_module(module)
assert dict(os.environ) == before[0], "importing changed the environment"
assert set(os.listdir()) == before[1], "importing wrote files"
assert logging.getLogger().handlers == before[2], "importing set up logging"
assert threading.active_count() == 1, f"importing started {threading.enumerate()}"
print(json.dumps([name for name in BLOCKED if name in sys.modules]))
"""


def light_modules() -> list[str]:
    """Names of every light module of both packages."""
    names = ["art_core", "art_langgraph"]
    for package in (art_core, art_langgraph):
        names += [m.name for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    return [n for n in names if not n.startswith(HEAVY) or n in LIGHT_AMONG_HEAVY]


def source_files() -> list[Path]:
    """Every Python file of both packages."""
    folders = [Path(next(iter(package.__path__))) for package in (art_core, art_langgraph)]
    return sorted(file for folder in folders for file in folder.rglob("*.py"))


def unix_only(source: str) -> Iterator[str]:
    """What `source` imports or names that Windows lacks."""
    for node in ast.walk(ast.parse(source)):
        named: list[str] = []
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            named = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            named = [f"{owner(node.value)}.{node.attr}", f"loop.{node.attr}"]
        yield from sorted(WINDOWS_LACKS.intersection(named))


def owner(node: ast.expr) -> str:
    """The name that an attribute is taken from; "" for anything but a plain name."""
    return node.id if isinstance(node, ast.Name) else ""


def test_light_side_imports_without_torch_and_does_nothing_else(tmp_path: Path) -> None:
    modules = light_modules()
    assert {"art_core.trajectories", "art_core.nn.base_model", "art_langgraph"} <= set(modules)
    root = Path(art_core.__path__[0]).parent
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(root)!r})\n{IMPORT_ALL}",
         json.dumps([BLOCKED, modules])],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_the_command_starts_without_the_libraries_of_its_commands() -> None:
    """`art-langgraph --help` is asked for often; LangGraph and LangChain take a second to load."""
    heavy = ["langchain_core", "langchain_openai", "langgraph", "torch", "transformers"]
    code = f"import sys, art_langgraph.cli\nprint([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_public_names_are_what_they_say_whatever_was_imported_before() -> None:
    """A module of the same name would take its place as soon as it is imported."""
    for name in art_langgraph.__all__:
        assert getattr(art_langgraph, name).__module__.startswith("art_langgraph.")
    modules = {module.name for module in pkgutil.iter_modules(art_langgraph.__path__)}
    assert not modules & set(art_langgraph.__all__)


@pytest.mark.parametrize("package", [art_core, art_langgraph], ids=lambda p: str(p.__name__))
def test_packages_say_that_they_are_typed(package: object) -> None:
    """PEP 561: type checkers read the annotations of packages that hold the file py.typed."""
    file = getattr(package, "__file__", None)
    assert isinstance(file, str)
    assert (Path(file).parent / "py.typed").is_file()


UNIX_SCRIPTS = {"keeper.py"}
"""Run as processes of their own, for programs that Windows lacks; they are imported there too."""


@pytest.mark.parametrize(
    "file",
    [file for file in source_files() if file.name not in UNIX_SCRIPTS],
    ids=lambda f: f"{f.parent.name}/{f.name}",
)
def test_source_leans_on_nothing_that_windows_lacks(file: Path) -> None:
    assert list(unix_only(file.read_text("utf-8"))) == []


def test_the_reading_of_source_sees_what_it_must() -> None:
    bad = (
        "import fcntl, os, signal\nfrom os import fork\nos.kill(1, signal.SIGKILL)\n"
        "import asyncio\nasyncio.get_running_loop().add_signal_handler(2, print)\n"
    )
    assert sorted(unix_only(bad)) == [
        "fcntl", "loop.add_signal_handler", "os.fork", "signal.SIGKILL",
    ]  # fmt: skip
    assert list(unix_only("import os, signal\nos.kill(1, signal.SIGTERM)\n")) == []
