"""Process groups of gloo that complete what they are given in one thread, where torch takes two.

Both threads write the name of what they have completed to one string, with no lock (`ProcessGroupGloo::runLoop` in
torch 2.13). Names of more than 15 letters lie on the heap, such as that of every functional all-gather of DTensors: if
a thread is interrupted there, on a machine with more ranks than cores, the other one writes to memory that is freed,
and the rank ends by a signal some time later. One thread completes collectives in the order in which they were begun,
which is the same on all ranks of a group.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

DEFAULT_TIMEOUT = timedelta(minutes=30)


def complete_in_one_thread() -> None:
    """Let groups of gloo that are made from now on have one thread each."""
    module: Any = dist.distributed_c10d
    made_by_torch: Any = getattr(module, "ProcessGroupGloo", None)  # absent where torch was built without gloo
    if made_by_torch is None or hasattr(made_by_torch, "in_two_threads"):
        return

    class Kind(type(made_by_torch)):  # type: ignore[misc]  # of pybind11's metaclass only running code knows
        """A group that comes back from C++ is of torch's own class."""

        def __instancecheck__(cls, item: Any) -> bool:
            return isinstance(item, made_by_torch)

    class ProcessGroupGloo(made_by_torch, metaclass=Kind):
        in_two_threads = made_by_torch

        def __init__(
            self, store: Any, rank: int, size: int, timeout: timedelta = DEFAULT_TIMEOUT, **others: Any
        ) -> None:
            if any(others.values()):  # since torch 2.15: what these options can't say
                super().__init__(store, rank, size, timeout, **others)
                return
            options = made_by_torch._Options()
            options._threads, options._timeout = 1, timeout
            names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
            options._devices = [made_by_torch.create_device(interface=name) for name in names] or [
                made_by_torch.create_default_device()
            ]
            super().__init__(store, rank, size, options)

    module.ProcessGroupGloo = ProcessGroupGloo
