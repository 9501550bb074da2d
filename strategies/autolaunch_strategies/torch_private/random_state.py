"""Random numbers of torch, kept and seeded on one device, and those of Python and numpy."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def saved_random_state(device: torch.device) -> Iterator[None]:
    """Run a block with torch's random state put back afterwards, on the CPU and on `device`."""
    devices = [] if device.type in ("cpu", "meta") else [device]
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        yield


@contextmanager
def all_random_numbers_kept(device: torch.device) -> Iterator[None]:
    """`saved_random_state`, and with it Python's and numpy's."""
    states = random.getstate(), np.random.get_state()
    with saved_random_state(device):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's random numbers on the CPU and on `device`, where it is the current one of its kind.

    Unlike `torch.manual_seed` it leaves all other devices alone: for each kind that is not in use yet, that one keeps
    a written stack trace, which takes longer than a small forward pass.
    """
    torch.default_generator.manual_seed(seed)
    if device.type not in ("cpu", "meta"):
        torch.get_device_module(device).manual_seed(seed)
