"""A mesh of one rank in the process of the tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def without_process_group() -> None:
    """End what another test of this process has left."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def mesh_of_one_rank() -> Iterator[DeviceMesh]:
    """Within it there is a process group of this process alone, and its mesh with an axis mp."""
    without_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("mp",))
    dist.destroy_process_group()
