"""JSON to and from bytes, several times as fast as `json` and with the same outcome.

In and out: what crosses the wire. pydantic's own parser and writer do the work: they keep big
integers whole, and NaN and infinity as `json` has them. What they refuse and `json` takes (a lone
surrogate, a byte order mark) goes to `json`.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import from_json, to_json


def read_json(raw: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is none.
        RecursionError: it is nested too deep.
    """
    try:
        return from_json(raw)
    except ValueError:
        return json.loads(raw)


def write_json(value: Any) -> bytes:
    """A value from `read_json` as JSON, without blanks."""
    try:
        return to_json(value)
    except ValueError:
        return json.dumps(value, separators=(",", ":")).encode()
