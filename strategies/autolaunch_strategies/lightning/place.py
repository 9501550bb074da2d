"""Which part of the run this process is: its ranks, its device, its share of the data and of random numbers."""

from __future__ import annotations

import functools
import random
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader, IterableDataset

from autolaunch_strategies.apply.check import config_errors
from autolaunch_strategies.checkpoint.sharded import share_random_state
from autolaunch_strategies.config import MeshShape, ParallelConfig, raise_all
from autolaunch_strategies.mesh.process_group import JoinedEnvironment, check_world_size, ensure_process_group
from autolaunch_strategies.mesh.rank_mesh import RankMesh


class PlacedStrategy(ParallelStrategy):
    """The part of a strategy that knows its place in the mesh.

    Args:
        parallel: the whole parallel config; its mesh may have an open size (-1).
        backend: torch.distributed's backend; None for the device's own.
        timeout: of collectives, in seconds.
        plugins: what lightning's `ParallelStrategy` takes.

    Raises:
        ConfigError: the config contradicts itself.
    """

    def __init__(self, parallel: ParallelConfig, backend: str | None, timeout: float, **plugins: Any) -> None:
        if dist.is_initialized():
            plugins.setdefault("cluster_environment", JoinedEnvironment())
        self._open_shape: MeshShape | None = None
        self._num_nodes = 1
        super().__init__(**plugins)
        self.parallel = parallel
        if -1 in self.parallel.mesh.sizes.values():
            self._open_shape = self.parallel.mesh
        else:
            raise_all(config_errors(self.parallel))
        self._backend, self._timeout = backend, timedelta(seconds=timeout)
        self._rank_mesh: RankMesh | None = None
        self._rng_begun = False

    @property
    def shape(self) -> MeshShape:
        """The mesh's shape; an open size (-1) is filled once the number of devices is known."""
        return self.parallel.mesh

    @property
    def rank_mesh(self) -> RankMesh:
        """This process in the mesh. Exists from `setup_environment` on."""
        assert self._rank_mesh is not None, "the mesh exists only while the trainer runs"
        return self._rank_mesh

    @property
    def is_distributed(self) -> bool:
        """Whether data differs between ranks: with one rank along dp the user's own sampler stays as it is."""
        return self._open_shape is not None or self.shape.dp > 1

    @property
    def global_rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else super().global_rank

    @property
    def world_size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else super().world_size

    @property
    def dp_rank(self) -> int:
        """Which share of each batch this rank trains on."""
        return self.rank_mesh.coordinate["dp"]

    @property
    def dp_size(self) -> int:
        """Into how many shares each batch is cut."""
        return self.shape.dp

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices
        return self.parallel_devices[self.local_rank % len(self.parallel_devices)]

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes
        if self._parallel_devices:  # lightning tells the devices first
            self._parallel_devices = self._one_device_per_local_rank(self._parallel_devices)

    @property
    def num_processes(self) -> int:
        """Processes on this machine."""
        return len(self.parallel_devices or ())

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._parallel_devices = devices and list(devices)

    def _one_device_per_local_rank(self, devices: list[torch.device]) -> list[torch.device]:
        environment = self.cluster_environment
        # Lightning's own children count as started, too, but their environment learns the world size only from us.
        started = (
            environment is not None
            and environment.creates_processes_externally
            and not isinstance(environment, LightningEnvironment)
        )
        if self._open_shape is not None:
            world_size = environment.world_size() if started and environment else len(devices) * self.num_nodes
            self.parallel.mesh = self._open_shape.resolve(world_size)
            raise_all(config_errors(self.parallel))
        if started and environment is not None:
            check_world_size(self.shape, environment.world_size())
        wanted = max(1, self.shape.size // self.num_nodes)
        whose = f"are asked for (devices={len(devices)}, num_nodes={self.num_nodes})"
        if devices[0].type == "cpu":
            if len(devices) not in (1, wanted):  # 1 is also what devices="auto" gives on a CPU
                check_world_size(self.shape, len(devices) * self.num_nodes, whose)
            return [torch.device("cpu")] * wanted
        if len(devices) < wanted and not started:
            check_world_size(self.shape, len(devices) * self.num_nodes, whose)
        return devices[:wanted]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.dp_size, "rank": self.dp_rank}

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally and self.shape.size > 1:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment (if it wants to know) and lightning's rank-zero switches who we are."""
        if self.cluster_environment is not None and not dist.is_initialized():
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        _set_rank(self.global_rank if self.shape.size > 1 else 0)

    def setup_environment(self) -> None:
        assert self.accelerator is not None and self.cluster_environment is not None
        self.accelerator.setup_device(self.root_device)
        self.set_world_ranks()
        ensure_process_group(self.shape, self.cluster_environment, self.root_device, self._backend, self._timeout)
        assert dist.group.WORLD is not None
        share_random_state(dist.group.WORLD)  # what one process would draw
        _set_rank(dist.get_rank())
        if self._rank_mesh is None:
            replicate, shard = self.parallel.dp.split(self.shape.dp)
            self._rank_mesh = RankMesh.build(
                self.shape, replicate, shard, self.root_device.type, ulysses=self.parallel.ulysses
            )
        if self.lightning_module is not None:
            self.lightning_module._device_mesh = self._rank_mesh.device_mesh

    def process_dataloader(self, dataloader: Any) -> Any:
        """Seed loader workers by dp rank: ranks that hold parts of one replica draw the same augmentations."""
        if (
            isinstance(dataloader, DataLoader)
            and not isinstance(dataloader.dataset, IterableDataset)  # every rank reads the same stream
            and dataloader.num_workers
            and dataloader.worker_init_fn is None
        ):
            dataloader.worker_init_fn = functools.partial(pl_worker_init_function, rank=self.dp_rank)
        return dataloader

    def _begin_random_streams(self) -> None:
        """Give every dp rank random numbers of its own; ranks that hold parts of one replica share theirs."""
        if self._rng_begun:
            return
        self._rng_begun = True
        if self.dp_rank > 0:
            seed = (torch.initial_seed() + 0x9E3779B9 * self.dp_rank) % 2**32
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)


def _set_rank(rank: int) -> None:
    rank_zero_only.rank = fabric_rank_zero_only.rank = rank  # type: ignore[attr-defined]
