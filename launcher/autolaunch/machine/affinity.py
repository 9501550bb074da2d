"""On which processors a rank runs: those beside its GPU, where memory of the host is near to both."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from autolaunch.machine.devices import ROOT


def processors_beside(pci_address: str) -> set[int]:
    """The processors that this process may use in the NUMA node of a device; empty if the system does not know it.

    Args:
        pci_address: as the system writes it: `0000:3b:00.0`.
    """
    with contextlib.suppress(OSError, ValueError):
        node = int((ROOT / "sys/bus/pci/devices" / pci_address / "numa_node").read_text())
        if node >= 0:  # -1: there is one node only, or nothing is known
            ranges = (ROOT / f"sys/devices/system/node/node{node}/cpulist").read_text()
            return _numbers(ranges) & os.sched_getaffinity(0)
    return set()


def run_on(processors: set[int]) -> None:
    """Keep all threads of this process on some processors, but for those that keep to others of their own."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    for entry in Path("/proc/self/task").iterdir():
        thread = int(entry.name)
        with contextlib.suppress(OSError):  # it may have ended
            if os.sched_getaffinity(thread) == before:
                os.sched_setaffinity(thread, processors)


def _numbers(ranges: str) -> set[int]:
    """`0-3,8` as {0, 1, 2, 3, 8}."""
    found: set[int] = set()
    for part in filter(None, ranges.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
