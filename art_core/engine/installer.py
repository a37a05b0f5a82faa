"""pip or uv, run as a process that ends with us and that tells how far it is.

In: an environment's folder, what to do. Out: it is done, or an error that names the known cause.
Left out: what an environment is made of.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from art_core.engine.kept_process import KeptProcess
from art_core.errors import SetupError

Progress = Callable[[str], None]

_LOOK_S, _LINE_S = 0.3, 15.0
"""Seconds between two looks at what it wrote, and between two lines when it writes nothing."""
_WITHIN_S = 3600.0
"""Longest that one command may take."""
_TELLING = re.compile(
    r"\s*(Downloading \S+ \((\d{2,}(\.\d+)? ?Mi?B|[\d.]+ ?Gi?B)\)"
    r"|Installing collected packages|(Resolved|Prepared|Installed|Uninstalled) \d+ packages?)"
)
"""What of its lines is worth showing: files of ten megabytes and more, and the stages."""
_LEFT_OUT = re.compile(r"PYTHON.*|VIRTUAL_ENV|PIP_(USER|TARGET|PREFIX|ROOT|REQUIRE_VIRTUALENV)")
"""Variables that would lead it into another environment than the one that is made."""


@dataclass(frozen=True)
class _Cause:
    """Of a failure, as pip and uv tell it."""

    pattern: str
    """Searched in what they wrote."""
    what: str
    fix: str


_CAUSES = (
    _Cause(
        r"[Nn]o space left on device|Errno 28",
        "the disk is full",
        "Free space there and in the temporary folder (TMPDIR).",
    ),
    _Cause(
        r"NewConnectionError|NameResolutionError|name resolution|ProxyError|ConnectTimeout|"
        r"dns error|tcp connect error|[Cc]onnection (refused|reset|timed out)|unreachable|"
        r"ReadTimeout|client error \(Connect\)|No route to host",
        "the package index can't be reached",
        "Check the network, a proxy (HTTPS_PROXY) or the index (PIP_INDEX_URL), then run it "
        "again: what was fetched is kept.",
    ),
    _Cause(
        r"ensurepip is not available|No module named '?(ensurepip|venv)",
        "this Python can't make environments",
        "Install its venv package (on Debian: apt install python3-venv), or uv.",
    ),
    _Cause(
        r"requires a different Python|Requires-Python|requires-python|no wheels with a matching "
        r"Python|is not a supported wheel on this platform",
        "there is no build for this Python or platform",
        "Say another Python by --python.",
    ),
    _Cause(
        r"No matching distribution found for|Could not find a version that satisfies|"
        r"No solution found|was not found in the package registry",
        "the package index lacks a package",
        "Check the index (PIP_INDEX_URL, UV_DEFAULT_INDEX) and this machine's platform.",
    ),
    _Cause(
        r"[Pp]ermission denied",
        "a folder may not be written",
        "Choose another folder by --path, or ART_HOME.",
    ),
)


class Installer(ABC):
    """Makes one environment.

    Args:
        folder: of the environment.
        work: a folder for its log (`install.log`) and for the record of its process.
        progress: told, in a line each, what takes time.
    """

    name: str

    def __init__(self, folder: Path, work: Path, progress: Progress) -> None:
        self.folder, self.work = folder, work
        self.python = folder / "bin" / "python"
        self._say = progress

    @abstractmethod
    def make(self, python: str) -> None:
        """Make an empty environment for the Python `python`."""

    @abstractmethod
    def install(self, requirements: Sequence[str], *, index: str | None = None) -> None:
        """Install `requirements` and what they need, from `index` alone if one is given."""

    @abstractmethod
    def plan(self, requirement: str) -> list[str]:
        """Names of the distributions that installing `requirement` would bring."""

    @abstractmethod
    def remove(self, distributions: Sequence[str]) -> None:
        """Uninstall `distributions`; those that are not there are passed over."""

    def run(self, command: Sequence[str]) -> str:
        """Run a command to its end; what it wrote.

        Raises:
            SetupError: it failed, or takes too long.
        """
        kept = {name: value for name, value in os.environ.items() if not _LEFT_OUT.fullmatch(name)}
        child = KeptProcess(
            command,
            environment={**kept, "PYTHONNOUSERSITE": "1", "NO_COLOR": "1"},
            folder=self.work,
            log="install.log",
            grace=5.0,
        )
        try:
            status = self._follow(child)
        finally:
            child.stop(at_once=True)
        told = child.told()
        if status != 0:
            raise self._failed(command, status, told)
        return told

    def _follow(self, child: KeptProcess) -> int | None:
        """Wait for the end and tell what is worth it; None if it takes too long."""
        begun = spoken = time.monotonic()
        shown: set[str] = set()
        while (now := time.monotonic()) - begun < _WITHIN_S:
            status = child.wait(_LOOK_S)
            for line in child.told().splitlines():
                if (found := _TELLING.match(line)) and line not in shown:
                    shown.add(line)
                    spoken = now
                    self._say(found.group().strip())
            if status is not None:
                return status
            if now - spoken > _LINE_S:
                spoken = now
                self._say(f"{self.name} is at work ({now - begun:.0f} s)")
        return None

    def _failed(self, command: Sequence[str], status: int | None, told: str) -> SetupError:
        last = "\n".join(told.splitlines()[-8:])
        ended = "takes too long" if status is None else f"ended with status {status}"
        unknown = _Cause("", f"{self.name} {ended}", "Its whole log may say more.")
        cause = next((known for known in _CAUSES if re.search(known.pattern, told)), unknown)
        return SetupError(
            f"the environment of vLLM can't be made: {cause.what}",
            fix=f"{cause.fix} The log is {self.work / 'install.log'}. "
            f"{' '.join(command)} wrote last:\n{last}",
        )


class Pip(Installer):
    """The pip of the environment itself, set up as pip is on this machine."""

    name = "pip"

    def make(self, python: str) -> None:
        self.run([python, "-m", "venv", str(self.folder)])

    def install(self, requirements: Sequence[str], *, index: str | None = None) -> None:
        asked = [] if index is None else ["--index-url", index]
        self._pip("install", "--no-input", "--progress-bar=off", *asked, *requirements)

    def plan(self, requirement: str) -> list[str]:
        report = self.work / "plan.json"
        self._pip("install", "--no-input", "--dry-run", f"--report={report}", requirement)
        planned = json.loads(report.read_text("utf-8"))["install"]
        report.unlink()
        return [str(entry["metadata"]["name"]).lower() for entry in planned]

    def remove(self, distributions: Sequence[str]) -> None:
        self._pip("uninstall", "--yes", *distributions)

    def _pip(self, *arguments: str) -> None:
        pip = [str(self.python), "-m", "pip", "--disable-pip-version-check"]
        self.run([*pip, *arguments])


class Uv(Installer):
    """uv, where it is installed: quicker, and it needs no pip in the environment."""

    name = "uv"

    @staticmethod
    def command() -> str | None:
        """Where uv is; None if it is not installed."""
        return shutil.which(os.environ.get("UV") or "uv")  # uv tells what it runs where it lies

    def make(self, python: str) -> None:
        self._uv("venv", "--no-project", "--python", python, str(self.folder))

    def install(self, requirements: Sequence[str], *, index: str | None = None) -> None:
        asked = [] if index is None else ["--default-index", index]
        self._uv("pip", "install", "--python", str(self.python), *asked, *requirements)

    def plan(self, requirement: str) -> list[str]:
        told = self._uv("pip", "install", "--dry-run", "--python", str(self.python), requirement)
        return [name.lower() for name in re.findall(r"^ \+ ([\w.-]+)==", told, re.MULTILINE)]

    def remove(self, distributions: Sequence[str]) -> None:
        self._uv("pip", "uninstall", "--python", str(self.python), *distributions)

    def _uv(self, *arguments: str) -> str:
        return self.run([self.command() or "uv", *arguments])
