"""Serving and training in this process.

`LocalBackend` is in backend.py; a base model in memory with its endpoint in served_base.py; a
registered model, whose steps are made on it, in live_run.py.
"""

from art_core.local.backend import LocalBackend

__all__ = ["LocalBackend"]
