"""`MemoryPeak`: how much memory a step took at its worst moment, and what there is to have.

In: a device. Out: bytes. On a GPU they are those of torch's tensors; without one, of the whole
process. Nothing here waits for the GPU.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from art_core.readiness.machine import memory_now

_STATUS, _FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Room:
    """What a device has for this process."""

    name: str
    whole: int
    """Bytes of the device."""
    available: int
    """Bytes that this process has and may still get; 0: the system does not tell."""

    @property
    def others(self) -> int:
        """Bytes that others have: the engine's process, other programs."""
        return max(0, self.whole - self.available)


def room_on(device: torch.device) -> Room:
    """Look at the device now."""
    if device.type == "cuda":
        free, whole = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_reserved(device)
        return Room(torch.cuda.get_device_name(device), whole, free + own)
    whole, free = memory_now()
    own = _status("RssAnon") + _status("RssShmem")  # pages of files are among the free ones
    return Room("this machine", whole, free + own if whole else 0)


class MemoryPeak:
    """Begins to look when it is made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            _forget_peak()

    @property
    def bytes(self) -> int:
        """The peak since then; 0 where the system does not tell."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return _status("VmHWM")


def _forget_peak() -> None:
    """Have Linux begin the process's peak anew; else it is that of its whole life."""
    try:
        _FORGET.write_text("5")
    except OSError:  # not Linux, or a container that forbids it
        return


def _status(name: str) -> int:
    """Bytes of a line of Linux's status of this process."""
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text("ascii"), re.MULTILINE)
    except OSError:  # not Linux
        return 0
    return int(found[1]) * 1024 if found else 0
