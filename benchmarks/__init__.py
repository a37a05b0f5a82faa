"""Benchmarks: one file each, run as `python -m benchmarks.NAME [--quick]`."""
