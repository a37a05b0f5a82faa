"""The OpenAPI document against the server it describes: no request makes it fail.

schemathesis sends what the document allows, and what it forbids; a status of 500 or above fails.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.server_process import KEY, ServerProcess

pytest.importorskip("fastapi", reason="art-langgraph[server] is not installed")
pytest.importorskip("schemathesis", reason="schemathesis is not installed")

SECONDS = 240


async def test_no_request_makes_the_server_fail(tiny_llama: Path, tmp_path: Path) -> None:
    with ServerProcess(tmp_path, tiny_llama) as server:
        async with server.backend() as backend:
            await server.model(tiny_llama, project="p", name="m").register(backend)
        command = [
            *(str(Path(sys.executable).with_name("schemathesis")), "run"),
            f"{server.url}/api/openapi.json",
            *("-H", f"Authorization: Bearer {KEY}"),
            *("--phases", "coverage,fuzzing", "--max-examples", "12", "--seed", "1"),
            *("--checks", "not_a_server_error", "--continue-on-failure"),
            *("--exclude-path-regex", "/events$"),  # a stream that ends with its job
        ]
        found = subprocess.run(  # noqa: ASYNC221 - nothing else runs on this loop
            command, capture_output=True, text=True, timeout=SECONDS, check=False, cwd=tmp_path
        )
        assert found.returncode == 0, found.stdout[-4000:]
        assert " passed" in found.stdout
        assert not [line for line in server.log if "Traceback" in line]
