"""What libraries print for their own developers, kept off the user's screen.

In: nothing. Out: no bars but ours, no warnings of how libraries use each other.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

NOISY = r"(huggingface_hub|peft|torch|transformers)\b"
"""Packages whose warnings are for their developers."""


def no_library_bars() -> None:
    """From now on no bars but ours; takes effect in transformers if it is not imported yet."""
    if find_spec("huggingface_hub") is not None:
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()


@contextmanager
def no_library_warnings() -> Iterator[None]:
    """Ignore the warnings of `NOISY`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=NOISY)
        yield
