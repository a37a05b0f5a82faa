"""Faults of a request in OpenAI's error shape, so that any OpenAI client can act on them.

In: an exception. Out: (HTTP status, body) with `{"error": {message, type, param, code}}`.
"""

from __future__ import annotations

from typing import Any

from art_core.errors import ARTError, ContextOverflow

_UNSET = object()
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "server_error",
}


class ApiError(ARTError):
    """A request that can't be answered as it is.

    Args:
        what, got, expected, fix: as in `ARTError`.
        param: the field at fault, in OpenAI's dotted form ("messages.[0].content").
        code: OpenAI's machine-readable code, e.g. "model_not_found".
        status: HTTP status, 400-499, or 503.
        retry_after: seconds after which to come again; None says nothing of it.
    """

    def __init__(
        self,
        what: str,
        *,
        got: object = _UNSET,
        expected: str = "",
        fix: str = "",
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        retry_after: int | None = None,
    ) -> None:
        if got is _UNSET:
            super().__init__(what, expected=expected, fix=fix)
        else:
            super().__init__(what, got=_short(got), expected=expected, fix=fix)
        self.param, self.code, self.status = param, code, status
        self.retry_after = retry_after


def error_response(error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and body for `error`: 4xx for the caller's faults, 500 for ours."""
    if isinstance(error, ApiError):
        kind = _KINDS.get(error.status, "invalid_request_error")
        return error.status, _body(str(error), kind, error.param, error.code)
    if isinstance(error, ContextOverflow):
        return 400, _body(
            str(error), "invalid_request_error", "messages", "context_length_exceeded"
        )
    code = type(error).__name__ if isinstance(error, ARTError) else "internal_error"
    return 500, _body(str(error) or repr(error), "server_error", None, code)


def error_headers(error: Exception) -> dict[str, str]:
    """What an answer for `error` says in its headers: when to come again, in whole seconds."""
    after = error.retry_after if isinstance(error, ApiError) else None
    return {} if after is None else {"retry-after": str(after)}


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _short(value: object) -> object:
    """`value`, or a cut text of it where showing all of it would drown the message."""
    text = repr(value)
    return value if len(text) <= 200 else _Cut(text[:200] + "...")


class _Cut(str):
    """A text whose repr is itself."""

    def __repr__(self) -> str:
        return str(self)
