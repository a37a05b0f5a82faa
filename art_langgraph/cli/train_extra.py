"""The extra "train": what of it is not installed here, and the message that says so.

In: names of modules beside those that every training step needs. Out: names, or an error.
"""

from __future__ import annotations

from importlib.util import find_spec

from art_core.errors import ConfigError

_STEP = ("torch", "transformers", "peft", "tokenizers", "pyarrow")
"""What a training step needs."""


def missing(*also: str) -> list[str]:
    """What of a training step's needs, and of `also`, is not installed."""
    return [name for name in (*_STEP, *also) if find_spec(name) is None]


def check_installed(what: str, *also: str) -> None:
    """See that `what` can be done.

    Raises:
        ConfigError: something is not installed.
    """
    if absent := missing(*also):
        raise ConfigError(
            f"{what} needs packages that are not installed ({', '.join(absent)})",
            fix="Run: pip install 'art-langgraph[train]'",
        )
