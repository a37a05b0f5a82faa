"""What a request brings: its body as strict JSON, and the rollout it belongs to.

In: a request. Out: parsed JSON; the rollout's id, if the request names one.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from art_core.engine.api_errors import ApiError
from art_core.engine.messages import strict_loads

ROLLOUT_HEADER = "x-art-rollout"
_MAX_ROLLOUT_ID = 200


async def read_json(request: Request, limit: int) -> Any:
    """The body, never more than `limit` bytes of it.

    Raises:
        ApiError: it is larger, compressed, or no JSON in UTF-8.
    """
    return _parse(await _read(request, limit))


def rollout_of(request: Request) -> str | None:
    """The rollout's id; None if the request names none.

    Raises:
        ApiError: it is empty, or too long.
    """
    value = request.headers.get(ROLLOUT_HEADER)
    if value is not None and not 0 < len(value) <= _MAX_ROLLOUT_ID:
        raise ApiError(
            f"the header {ROLLOUT_HEADER} has a wrong length",
            got=len(value),
            expected=f"1 to {_MAX_ROLLOUT_ID} characters",
        )
    return value


async def _read(request: Request, limit: int) -> bytes:
    """The body, never more than `limit` bytes of it."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise ApiError(
            "compressed bodies are not taken", got=encoding, expected="identity", status=415
        )
    declared = request.headers.get("content-length", "0")
    parts: list[bytes] = []
    size = int(declared) if declared.isdigit() else 0
    if size <= limit:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > limit:
                break
            parts.append(part)
    if size > limit:
        raise ApiError(
            "the body is too large",
            got=f"{size} bytes or more",
            expected=f"at most {limit}",
            status=413,
        )
    return b"".join(parts)


def _parse(raw: bytes) -> Any:
    """Strict JSON in UTF-8, without half characters; of a key given twice the last one counts."""
    try:
        body = strict_loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8 ({error})") from error
    except UnicodeEncodeError as error:
        raise ApiError(f"a string in the body is half a character ({error})") from error
    except ValueError as error:
        raise ApiError(f"the body is not JSON ({error})") from error
    return body
