"""Who am I among the processes of a run, and the default process group."""

from __future__ import annotations

import atexit
import gc
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment

from autolaunch_strategies.config import ConfigError, MeshShape


class JoinedEnvironment(ClusterEnvironment):
    """For processes that have joined a process group already: torch.distributed knows the ranks."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        return dist.is_initialized()

    def world_size(self) -> int:
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        pass  # torch.distributed says

    def global_rank(self) -> int:
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        pass  # torch.distributed says

    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def node_rank(self) -> int:
        return int(os.environ.get("GROUP_RANK", "0"))


def ensure_process_group(
    shape: MeshShape, environment: ClusterEnvironment, device: torch.device, backend: str | None, timeout: timedelta
) -> None:
    """Join the default process group unless this process has; check that it has one process per rank of the mesh.

    Raises:
        ConfigError: the number of processes is not the size of the mesh.
    """
    if not dist.is_initialized():
        world_size = environment.world_size()
        if shape.size == 1:
            world_size = 1
            rank, store = 0, dist.HashStore()
            dist.init_process_group(
                backend or default_backend(device), store=store, rank=rank, world_size=1, timeout=timeout
            )
        else:
            check_world_size(shape, world_size)
            os.environ["MASTER_ADDR"] = environment.main_address
            os.environ["MASTER_PORT"] = str(environment.main_port)
            dist.init_process_group(
                backend or default_backend(device),
                rank=environment.global_rank(),
                world_size=world_size,
                timeout=timeout,
                device_id=None if device.type == "cpu" else device,
            )
        atexit.register(leave_process_group)
    check_world_size(shape, dist.get_world_size())


def check_world_size(shape: MeshShape, world_size: int, whose: str = "were started") -> None:
    """Raise ConfigError unless `world_size` processes are what the mesh needs; `whose` says where they come from."""
    if shape.size != world_size:
        sizes = " x ".join(f"{axis}={size}" for axis, size in shape.sizes.items() if size > 1) or "dp=1"
        raise ConfigError(
            f"mesh={shape.name}",
            f"the mesh has {shape.size} ranks ({sizes}), but {world_size} processes {whose}",
            f"one process per rank: devices x nodes = {shape.size}",
            f"mesh={world_size}",
        )


def default_backend(device: torch.device) -> str:
    """gloo for the CPU; both gloo and nccl for a GPU, so that checkpoints can travel through host memory."""
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


def leave_process_group() -> None:
    """Destroy the default process group; meshes that refer to it should be gone (gloo aborts at exit otherwise)."""
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
