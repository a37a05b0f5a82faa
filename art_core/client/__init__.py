"""The light side of the split: `HttpBackend`, which asks a server; no torch here."""

from art_core.client.backend import HttpBackend

__all__ = ["HttpBackend"]
