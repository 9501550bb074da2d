"""torch's random numbers: kept, and seeded on one device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def saved_random_state(device: torch.device) -> Iterator[None]:
    """Run a block with torch's random state put back afterwards, on the CPU and on `device`."""
    devices = [] if device.type in ("cpu", "meta") else [device]
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        yield


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's random numbers on the CPU and on `device`, where it is the current one of its kind.

    Unlike `torch.manual_seed` it leaves all other devices alone: for each kind that is not in use yet, that one keeps
    a written stack trace, which takes longer than a small forward pass.
    """
    torch.default_generator.manual_seed(seed)
    if device.type not in ("cpu", "meta"):
        torch.get_device_module(device).manual_seed(seed)
