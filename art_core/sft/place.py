"""How far a run over a file has come, as it is kept in every checkpoint.

In: a run's identity, what its order of rows depends on; the held-out file, if there is one. Out: a
`Place`, to JSON and back. What is of another file, order or held-out file is refused or forgotten.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from art_core.errors import ConfigError
from art_core.sft.file import ConversationFile

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where to go on."""

    rows: int
    """Given out and trained, over all epochs."""
    losses: tuple[tuple[int, float], ...] = ()
    """(step, loss of the held-out file) so far."""
    stopped: bool = False
    """Early, since the held-out loss did not fall."""
    eval_fingerprint: str | None = None
    """Of the held-out file that the losses are of; None: there are none."""

    def seen_with(self, eval_fingerprint: str | None) -> Place:
        """Without the losses of another held-out file, and what they decided.

        Args:
            eval_fingerprint: of today's; None: nothing is looked at, so that nothing is forgotten.
        """
        if eval_fingerprint is None or self.eval_fingerprint in (None, eval_fingerprint):
            return self
        _log.info("the held-out file is another than before: its losses begin anew")
        return Place(self.rows)

    def kept(self, identity: Mapping[str, Any]) -> dict[str, Any]:
        """JSON-ready; see `place_of`."""
        return {
            "rows": self.rows,
            "losses": [list(pair) for pair in self.losses],
            "stopped": self.stopped,
            "eval_fingerprint": self.eval_fingerprint,
            **identity,
        }


def identity_of(file: ConversationFile, *, seed: int, window: int) -> dict[str, Any]:
    """What the order of the rows depends on."""
    return {
        "fingerprint": file.fingerprint,
        "rows_in_file": len(file),
        "seed": seed,
        "shuffle_buffer_size": window,
    }


def place_of(kept: Mapping[str, Any], identity: Mapping[str, Any]) -> Place:
    """The place that `Place.kept` made.

    Raises:
        ConfigError: it is in another file or order.
    """
    for key, own in identity.items():
        if kept.get(key) != own:
            raise ConfigError(
                f"the model's checkpoint has a place in another file or order: its {key!r}",
                got=own,
                expected=repr(kept.get(key)),
                fix="Go on with the same file and settings, or give this run a name of its own: "
                "train_sft_from_file(..., name=...).",
            )
    losses = tuple((int(step), float(loss)) for step, loss in kept["losses"])
    # In older checkpoints losses may be of any file.
    of = kept.get("eval_fingerprint") or ("unknown" if losses else None)
    return Place(int(kept["rows"]), losses, bool(kept["stopped"]), of)
