"""Faults of the run surface as HTTP answers: a status, OpenAI's error shape, and the typed error.

In: an exception. Out: a status and a body whose "art" part the client raises as the same class
(wire/errors.py). Paths of this machine are taken out of what is told.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from art_core import errors
from art_core.engine.api_errors import ApiError, error_response
from art_core.wire.errors import error_to_json

_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (errors.ModelNotRegistered, 404),
    (errors.PayloadTooLarge, 413),
    (errors.PayloadError, 400),
    (errors.UnknownRecords, 409),
    (errors.RunLocked, 409),
    (errors.CheckpointError, 409),
    (errors.BaseModelError, 422),
    (errors.ConfigError, 400),
    (errors.GroupError, 422),
)


class Teller:
    """Says what went wrong.

    Args:
        hidden: folders of this machine that a client has no business to know.
    """

    def __init__(self, *hidden: Path) -> None:
        names = sorted({str(path) for path in hidden}, key=len, reverse=True)
        self._hidden = re.compile("|".join(map(re.escape, names))) if names else None

    def shown(self, text: str) -> str:
        """`text` without those folders."""
        return self._hidden.sub("<server>", text) if self._hidden is not None else text

    def answer(self, error: Exception) -> tuple[int, dict[str, Any]]:
        """Status and body."""
        if isinstance(error, ApiError):
            return error_response(error)
        status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
        if isinstance(error, errors.ServerError) and error.status is not None:
            status = error.status
        kind = "invalid_request_error" if status < 500 else "server_error"
        told = error_to_json(error, shown=self.shown)
        if not isinstance(error, errors.ARTError):
            told["message"] = "an internal error; the server's log says more"
        body = {
            "message": told["message"],
            "type": kind,
            "param": None,
            "code": told["class"] if isinstance(error, errors.ARTError) else "internal_error",
        }
        return status, {"error": body, "art": told}
