"""Rollout ids that can't be made up: a URL for clients that run none of our code.

In: a rollout's id and the server's secret, a file that only its owner reads. Out: "<id>.<mac>", and
the id of one that is right. It says which rollout a call belongs to, and lets nobody in: where a
key is set, it is asked for all the same.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
from hashlib import sha256
from pathlib import Path

from art_core.errors import ConfigError

_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._:-]{0,149}")
"""What goes through a path as it is. The first letter is no dot: "." and ".." are places."""


class Signer:
    """Signs rollout ids.

    Args:
        file: has the secret; made if missing.
    """

    def __init__(self, file: Path) -> None:
        if not file.exists():
            aside = file.with_name(f".tmp-{file.name}")
            handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(handle, "wb") as out:
                out.write(secrets.token_bytes(32))
            aside.replace(file)
        self._secret = file.read_bytes()

    def sign(self, rollout_id: str) -> str:
        """The id as it stands in a URL.

        Raises:
            ConfigError: it can't.
        """
        if not _ID.fullmatch(rollout_id):
            raise ConfigError(
                "a rollout id can't stand in a URL",
                got=rollout_id,
                expected="1 to 150 letters, digits and . _ : -, not beginning with a dot",
            )
        return f"{rollout_id}.{self._mac(rollout_id)}"

    def read(self, signed: str) -> str | None:
        """The id; None if it is signed by another, or not at all."""
        rollout_id, _, mac = signed.rpartition(".")
        is_right = hmac.compare_digest(mac.encode(), self._mac(rollout_id).encode())
        return rollout_id if is_right and rollout_id else None

    def _mac(self, rollout_id: str) -> str:
        return hmac.new(self._secret, rollout_id.encode(), sha256).hexdigest()[:32]
