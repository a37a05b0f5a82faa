"""Whether a vLLM server is up, and whether its engine still answers.

In: its address. Out: yes or no, within a bound. Plain loopback HTTP, past any proxy. vLLM's own
/health asks its front end alone, which goes on answering while the engine behind it hangs; whether
it sleeps is a question that travels to the engine and back.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from urllib.parse import urlsplit

_WITHIN = 5.0
"""Longest wait for one answer of a starting server, in seconds."""


def is_ready(base_url: str, headers: Mapping[str, str], served_name: str) -> bool:
    """True if the server at `base_url` takes our key, serves `served_name`, and its engine answers.

    Another program that took the port meanwhile does none of it.
    """
    status, body = _get(base_url, "/v1/models", headers, _WITHIN)
    if status != 200:
        return False
    try:
        names = [str(model["id"]) for model in json.loads(body)["data"]]
    except (ValueError, KeyError, TypeError):
        return False
    return served_name in names and is_responsive(base_url, headers)


def is_responsive(base_url: str, headers: Mapping[str, str], within: float = _WITHIN) -> bool:
    """True if the engine answers within so many seconds."""
    return _get(base_url, "/is_sleeping", headers, within)[0] == 200


def _get(base_url: str, path: str, headers: Mapping[str, str], within: float) -> tuple[int, bytes]:
    """Status and body; status 0 if there is no answer."""
    address = urlsplit(base_url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=within)
    try:
        connection.request("GET", path, headers=dict(headers))
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()
