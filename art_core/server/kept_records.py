"""How long token records are kept: bounded by age and by size, the oldest go first.

In: a record store, looked at now and then. Out: fewer records in it. Age is counted by this
process's own clock, from when a record was first seen, so that a jump of the system's time deletes
nothing; after a restart what is there counts as new.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from art_core.records import RecordStore

_PART = 1000
"""Records deleted at once, so that calls need not wait long for the store."""


@dataclass
class KeptRecords:
    """The bounds of one store.

    Args:
        seconds: how long a record is kept.
        size: bytes that all may take; beyond, the oldest go before their time.
        grace: seconds for which none goes, whatever the size.
    """

    store: RecordStore
    seconds: float = 7 * 24 * 3600.0
    size: int = 16 * 2**30
    grace: float = 3600.0
    _seen: deque[tuple[float, int]] = field(default_factory=deque)
    """(when, number of the newest record then), the oldest first."""

    def look(self, now: float | None = None) -> int:
        """Delete what is beyond the bounds; how many records that were.

        Args:
            now: seconds of a clock that only goes on; None: this process's.
        """
        now = time.monotonic() if now is None else now
        gone = self._drop(self._older_than(now - self.seconds), all_of_them=True)
        mature = self._older_than(now - self.grace)
        gone += self._drop(mature, all_of_them=False)
        self._seen.append((now, self.store.newest()))
        while len(self._seen) > 1 and self._seen[1][0] <= now - self.seconds:
            self._seen.popleft()
        return gone

    def _older_than(self, then: float) -> int:
        """Number of the newest record that was there at that time."""
        return max((number for when, number in self._seen if when <= then), default=0)

    def _drop(self, up_to: int, *, all_of_them: bool) -> int:
        gone = 0
        while up_to and (all_of_them or self.store.size() > self.size):
            part = self.store.drop(up_to, at_most=_PART)
            gone += part
            if part == 0:
                break
        return gone
