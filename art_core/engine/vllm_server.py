"""One process of vLLM, from its start to its end.

In: `VllmSettings`, a Python that has vLLM, a folder. Out: the address it answers at, whether its
engine does, why it ended. Left out: watching and restarting, which is `vllm_process`.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from art_core.engine.kept_process import KeptProcess
from art_core.engine.vllm_faults import Fault, find_fault
from art_core.engine.vllm_health import is_ready, is_responsive
from art_core.engine.vllm_settings import VllmSettings

Progress = Callable[[str], None]

LOG = "vllm.log"
MODULE = "vllm.entrypoints.openai.api_server"
"""What is run; the `vllm` command of CPU builds looks for a distribution that they are not."""
_LOOK_S = 0.2
"""Between two looks whether it is up."""
_LINE_S = 10.0
"""Between two lines of progress."""


class VllmServer:
    """A server on a port of 127.0.0.1 that was free.

    Args:
        python: has vLLM.
        folder: for its log and its record; of this server alone.
        api_key: what requests must carry.
        grace: seconds that it may take to stop by itself.

    Raises:
        EngineError: another server runs in `folder`, or this is Windows.
    """

    def __init__(
        self, settings: VllmSettings, *, python: Path, folder: Path, api_key: str, grace: float
    ) -> None:
        self._settings = settings
        port = _free_port()
        self.base_url = f"http://127.0.0.1:{port}"
        self._headers: Mapping[str, str] = {"Authorization": f"Bearer {api_key}"}
        self._child = KeptProcess(
            [str(python), "-m", MODULE, *settings.arguments(port)],
            environment=settings.variables(os.environ, python, api_key),
            folder=folder,
            log=LOG,
            grace=grace,
        )

    def await_ready(
        self, *, within: float, say: Progress, given_up: threading.Event
    ) -> Fault | None:
        """Wait until it answers; what is wrong, if it does not.

        Args:
            within: seconds.
            say: told how far it is.
            given_up: nobody waits any more once it is set.
        """
        begun = told = time.monotonic()
        while (now := time.monotonic()) - begun < within and not given_up.is_set():
            if (fault := self.ended(_LOOK_S)) is not None:
                return fault
            if is_ready(self.base_url, self._headers, self._settings.served_name):
                say(f"vLLM is up after {now - begun:.0f} s")
                return None
            if now - told > _LINE_S:
                told = now
                say(f"vLLM is starting ({now - begun:.0f} s): {_last_line(self._child.told())}")
        return self.fault(f"it did not answer within {within:g} s")

    def ended(self, within: float = 0.0) -> Fault | None:
        """Why it ended; None if it has not after `within` seconds."""
        status = self._child.wait(within)
        return None if status is None else find_fault(self._child.told(), status)

    def answers(self, within: float) -> bool:
        """True if its engine answers within so many seconds."""
        return is_responsive(self.base_url, self._headers, within)

    def fault(self, cause: str) -> Fault:
        """What its log says of why it does not answer; `cause` if that is nothing known."""
        return find_fault(self._child.told(), None, otherwise=cause)

    def stop(self, *, at_once: bool = False) -> None:
        """As `KeptProcess.stop`."""
        self._child.stop(at_once=at_once)


def _free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _last_line(told: str) -> str:
    lines = told.split("\n")
    return next((line[:160] for line in reversed(lines) if line.strip()), "nothing told yet")
