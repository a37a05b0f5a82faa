"""Base models from the Hugging Face hub, or from its cache on this machine.

In: a repository's name. Out: the folder of its snapshot, or a reason in words. Never hangs: the hub
is asked one bounded question before anything is downloaded. Only what a causal language model
needs is fetched, and nothing pickled.
"""

from __future__ import annotations

import threading
from pathlib import Path
from queue import Empty, SimpleQueue

PROBE_SECONDS = 6.0
"""How long the hub may take to say whether it has a model, name resolution included."""

_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
_DESCRIBING = ["*.json", "*.jinja"]
_UNWANTED = ["original/*", "onnx/*", "consolidated*"]  # the same weights in other formats


def cached(name: str) -> Path | None:
    """The snapshot of `name` that is already in the hub's cache, whole or not; None if none is."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        return Path(
            snapshot_download(
                name, local_files_only=True, allow_patterns=_WANTED, ignore_patterns=_UNWANTED
            )
        )
    except (OSError, HFValidationError):  # not there (LocalEntryNotFoundError is an OSError)
        return None


def why_unavailable(name: str, *, timeout: float = PROBE_SECONDS) -> str | None:
    """Why the hub can't give `name` now; None if it can. Takes at most `timeout` seconds."""
    try:
        from huggingface_hub import HfApi
    except ImportError:
        return "the package huggingface_hub is not installed"
    answer: SimpleQueue[str | None] = SimpleQueue()

    def ask() -> None:
        try:
            HfApi().model_info(name, timeout=timeout)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the reason
            answer.put(_short(error))
        else:
            answer.put(None)

    # A socket timeout does not bound the resolution of names, so the thread is left behind.
    threading.Thread(target=ask, name="art-hub-probe", daemon=True).start()
    try:
        return answer.get(timeout=timeout)
    except Empty:
        return f"no answer within {timeout:g} s"


def fetch(name: str) -> Path:
    """Download the snapshot of `name` into the hub's cache, going on where an earlier try stopped.

    Raises:
        Exception: what `huggingface_hub` raises when the hub stops answering.
    """
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            name, etag_timeout=PROBE_SECONDS, allow_patterns=_WANTED, ignore_patterns=_UNWANTED
        )
    )


def fetch_description(name: str) -> Path:
    """Download what describes `name`, its config, chat template and tokenizer, without weights.

    Raises:
        Exception: what `huggingface_hub` raises when the hub stops answering.
    """
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            name,
            etag_timeout=PROBE_SECONDS,
            allow_patterns=_DESCRIBING,
            ignore_patterns=_UNWANTED,
        )
    )


def _short(error: Exception) -> str:
    """The first line of an error, with its kind."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
