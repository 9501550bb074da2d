"""Which part of the run this process is: its device, its ranks, its share of the data and of random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from autolaunch_strategies.apply.check import config_errors
from autolaunch_strategies.checkpoint.sharded import share_random_state
from autolaunch_strategies.config import MeshShape, ParallelConfig, raise_all
from autolaunch_strategies.mesh.process_group import check_world_size, ensure_process_group
from autolaunch_strategies.mesh.rank_mesh import RankMesh
from autolaunch_strategies.torch_private.collectives import set_all_timeouts

STEPS_OF_TIMEOUT = 10
"""A collective may take as long as so many first steps, whatever the timeout."""


class Place:
    """The place of this process. Known step by step: its `environment`, the devices and nodes, the mesh (`join`).

    Args:
        parallel: the whole parallel config; its mesh may have an open size (-1), which `spread` fills.
        backend: torch.distributed's backend; None for the device's own.
        timeout: of collectives once the first step is done, in seconds.
        first_step_timeout: of collectives before, and where ranks may take their time (`patient`).

    Raises:
        ConfigError: the config contradicts itself.
    """

    def __init__(
        self,
        parallel: ParallelConfig,
        backend: str | None = None,
        timeout: float = 600.0,
        first_step_timeout: float = 1800.0,
    ) -> None:
        self.parallel = parallel
        self.environment: ClusterEnvironment | None = None
        self.devices: list[torch.device] | None = None
        """Of this machine, one for each local rank once `spread` has been called."""
        self.num_nodes = 1
        self._backend, self.timeout = backend, timeout
        self.first_step_timeout = max(timeout, first_step_timeout)
        self._timeout_now = self.first_step_timeout
        self._open_shape = parallel.mesh if -1 in parallel.mesh.sizes.values() else None
        if self._open_shape is None:
            raise_all(config_errors(parallel))
        self._rank_mesh: RankMesh | None = None
        self._rng_begun = False
        self.seed = 0
        """Of every random number of the run, the same on every rank. Exists from `join` on."""

    @property
    def shape(self) -> MeshShape:
        """The mesh's shape; an open size (-1) is filled once the number of devices is known."""
        return self.parallel.mesh

    @property
    def rank_mesh(self) -> RankMesh:
        """This process in the mesh. Exists from `join` on."""
        assert self._rank_mesh is not None, "the mesh exists only while the trainer runs"
        return self._rank_mesh

    @property
    def data_differs(self) -> bool:
        """Whether data differs between ranks."""
        return self._open_shape is not None or self.shape.dp > 1

    @property
    def dp_rank(self) -> int:
        """Which share of each batch this rank trains on."""
        return self.rank_mesh.coordinate["dp"]

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        assert self.devices
        return self.devices[self.local_rank % len(self.devices)]

    @property
    def local_rank(self) -> int:
        """The number of this process on its machine."""
        return self.environment.local_rank() if self.environment is not None else 0

    @property
    def global_rank(self) -> int:
        """The number of this process in the run."""
        if dist.is_initialized():
            return dist.get_rank()
        return self.environment.global_rank() if self.environment is not None else 0

    @property
    def world_size(self) -> int:
        """Processes of the run."""
        if dist.is_initialized():
            return dist.get_world_size()
        return self.environment.world_size() if self.environment is not None else 1

    @property
    def starts_processes(self) -> bool:
        """Whether this process has to start the other ranks."""
        assert self.environment is not None
        return not self.environment.creates_processes_externally and self.shape.size > 1

    def spread(self, num_nodes: int) -> None:
        """Give each rank of this machine one of `devices`, and fill an open size of the mesh.

        Raises:
            ConfigError: there are not as many devices or processes as the mesh has ranks.
        """
        self.num_nodes = num_nodes
        if not self.devices:
            return
        environment, devices = self.environment, self.devices
        # Lightning's own children count as started, too, but their environment learns the world size only from us.
        started = (
            environment is not None
            and environment.creates_processes_externally
            and not isinstance(environment, LightningEnvironment)
        )
        if self._open_shape is not None:
            world_size = environment.world_size() if started and environment else len(devices) * num_nodes
            self.parallel.mesh = self._open_shape.resolve(world_size)
        raise_all(config_errors(self.parallel, devices[0].type))
        if started and environment is not None:
            check_world_size(self.shape, environment.world_size())
        local_ranks = max(1, self.shape.size // num_nodes)
        whose = f"are asked for (devices={len(devices)}, num_nodes={num_nodes})"
        if devices[0].type == "cpu":
            if len(devices) not in (1, local_ranks):  # 1 is also what devices="auto" gives on a CPU
                check_world_size(self.shape, len(devices) * num_nodes, whose)
            self.devices = [torch.device("cpu")] * local_ranks
            return
        if len(devices) < local_ranks and not started:
            check_world_size(self.shape, len(devices) * num_nodes, whose)
        self.devices = devices[:local_ranks]

    def announce(self) -> None:
        """Tell the cluster environment (if it wants to know) and lightning's rank-zero switches who we are."""
        if self.environment is not None and not dist.is_initialized():
            local_ranks = len(self.devices or ())
            self.environment.set_global_rank(self.environment.node_rank() * local_ranks + self.local_rank)
            self.environment.set_world_size(self.num_nodes * local_ranks)
        _set_rank(self.global_rank if self.shape.size > 1 else 0)

    def join(self) -> None:
        """Join the process group and build the mesh, unless that has been done; draw what one process would.

        Collective.
        """
        assert self.environment is not None
        ensure_process_group(
            self.shape, self.environment, self.device, self._backend, timedelta(seconds=self.first_step_timeout)
        )
        if not self._rng_begun:  # afterwards each dp rank has its own
            assert dist.group.WORLD is not None
            share_random_state(dist.group.WORLD)
            self.seed = torch.initial_seed()
        _set_rank(dist.get_rank())
        if self._rank_mesh is None:
            replicate, shard = self.parallel.dp.split(self.shape.dp)
            self._rank_mesh = RankMesh.build(
                self.shape, replicate, shard, self.device.type, ulysses=self.parallel.ulysses
            )

    def apply_timeout(self) -> None:
        """Give every process group of the run the timeout of this moment, those that have been made since, too."""
        set_all_timeouts(self._timeout_now)

    def shorten_timeouts(self, step_seconds: float) -> None:
        """The first step is done, and took so long: from now on a rank that does not come is missed sooner.

        A stage of a pipeline waits for what others compute, so never sooner than in ten times a step.
        """
        self._timeout_now = min(self.first_step_timeout, max(self.timeout, STEPS_OF_TIMEOUT * step_seconds))
        self.apply_timeout()

    @contextmanager
    def patient(self) -> Iterator[None]:
        """While ranks read or write files, which may take one of them much longer than the others."""
        set_all_timeouts(self.first_step_timeout)
        try:
            yield
        finally:
            if dist.is_initialized():
                self.apply_timeout()

    def begin_random_streams(self) -> None:
        """Give every dp rank random numbers of its own, once; ranks that hold parts of one replica share theirs."""
        if self._rng_begun:
            return
        self._rng_begun = True
        if self.dp_rank > 0:
            seed = (torch.initial_seed() + 0x9E3779B9 * self.dp_rank) % 2**32
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)


def _set_rank(rank: int) -> None:
    # Both are functions that lightning keeps the rank on.
    rank_zero_only.rank = fabric_rank_zero_only.rank = rank  # type: ignore[attr-defined]  # of a function
