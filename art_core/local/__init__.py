"""Serving and training on this machine.

`LocalBackend` is in backend.py; a base model in memory with its endpoint in served_base.py; a
registered model, whose steps are made on it, in live_run.py. Beside vLLM the trained module is in a
process of its own (workbench_apart.py); the embedded engine samples from the very module, so that
there it is in this one.
"""

from art_core.local.backend import LocalBackend

__all__ = ["LocalBackend"]
