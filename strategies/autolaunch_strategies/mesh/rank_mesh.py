"""Ranks and coordinates, and the `DeviceMesh` that torch works with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autolaunch_strategies.config import AXES, AXIS_TABLE, SAME_DATA_AXES, SHARDING_AXES, MeshShape
from autolaunch_strategies.mesh.layout import Peers
from autolaunch_strategies.torch_private.collectives import group_of_some
from autolaunch_strategies.torch_private.meshes import flatten_mesh, forget_meshes, join_meshes
from autolaunch_strategies.torch_private.modes import outside_of_modes

_DIMS = {axis.name: axis.dims for axis in AXIS_TABLE}
_SHARDED_OVER = tuple(dim for axis in SHARDING_AXES for dim in _DIMS[axis] if dim != "dp_replicate")


def coordinates(shape: MeshShape, rank: int) -> dict[str, int]:
    """Position of `rank` along each axis; the last axis of `shape.order` varies fastest."""
    position = {}
    for axis in reversed(shape.order):
        rank, position[axis] = divmod(rank, shape.sizes[axis])
    assert rank == 0, "the rank lies outside the mesh"
    return {axis: position[axis] for axis in AXES}


def rank_at(shape: MeshShape, position: dict[str, int]) -> int:
    """The rank at a position along each axis (0 where an axis is not named); inverse of `coordinates`."""
    rank = 0
    for axis in shape.order:
        rank = rank * shape.sizes[axis] + position.get(axis, 0)
    return rank


@dataclass(frozen=True)
class RankMesh:
    """This process in the mesh: its coordinates, and the torch sub-meshes and groups it belongs to.

    The dp axis is held as `dp_replicate` x `dp_shard`, so that hybrid sharding is a choice of sizes; the cp axis as
    `cp_ring` x `cp_ulysses` if both have more than one rank, else as one dim `cp`. Axes of size 1 are left out of
    torch's mesh: asking for them gives None, and nothing is created for them.
    """

    shape: MeshShape
    rank: int
    """The place of this process in the mesh; its global rank unless ranks were laid out otherwise."""
    replicate: int
    shard: int
    device_mesh: DeviceMesh
    ulysses: int = 1
    _sub_meshes: dict[tuple[str, ...], DeviceMesh | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Those that were asked for: steps ask for groups, and torch makes a mesh of tensors each time."""

    @classmethod
    def build(
        cls,
        shape: MeshShape,
        replicate: int,
        shard: int,
        device_type: str,
        ranks: list[int] | None = None,
        ulysses: int = 1,
    ) -> RankMesh:
        """Create torch's mesh over the default process group. Collective: every rank calls it once.

        Args:
            replicate, shard: how the dp axis is divided; their product is `shape.dp`.
            device_type: `cpu` or `cuda`.
            ranks: which rank stands at each place of the mesh, in its order; by default 0, 1, 2, ... Along dp every
                rank stays where it is (it has its share of the data); along the other axes ranks are put in ascending
                order, as torch numbers the ranks of a group so, whatever their order in its mesh.
            ulysses: how many neighbours along cp exchange heads for positions with each other; divides `shape.cp`.
        """
        assert replicate * shard == shape.dp and dist.get_world_size() == shape.size
        assert shape.cp % ulysses == 0
        forget_meshes()  # an earlier one of this process may have had an axis with the same ranks
        sizes = {**shape.sizes, "dp_replicate": replicate, "dp_shard": shard, "cp_ring": 1, "cp_ulysses": 1}
        if 1 < ulysses < shape.cp:
            sizes |= {"cp": 1, "cp_ring": shape.cp // ulysses, "cp_ulysses": ulysses}
        kept = {part for part, size in sizes.items() if size > 1 and part != "dp"}
        if not kept.intersection(_SHARDED_OVER):
            kept.add("dp_shard")  # `fully_shard` wants something to shard over, be it one rank
        names = [part for axis in shape.order for part in _DIMS[axis] if part in kept]
        dims = tuple(sizes[name] for name in names)
        if ranks is None or ranks == list(range(shape.size)):
            device_mesh = init_device_mesh(device_type, dims, mesh_dim_names=tuple(names))
            return cls(shape, dist.get_rank(), replicate, shard, device_mesh, ulysses)
        placed = torch.tensor(ranks).view([shape.sizes[axis] for axis in shape.order])
        for axis in SAME_DATA_AXES:  # ranks sorted along one axis stay so when they are sorted along the next
            placed = placed.sort(dim=shape.order.index(axis)).values
        device_mesh = DeviceMesh(device_type, placed.reshape(dims), mesh_dim_names=tuple(names))
        place = placed.flatten().tolist().index(dist.get_rank())
        return cls(shape, place, replicate, shard, device_mesh, ulysses)

    @property
    def coordinate(self) -> dict[str, int]:
        """Position of this rank along each axis."""
        return coordinates(self.shape, self.rank)

    def sub_mesh(self, *axes: str) -> DeviceMesh | None:
        """The 1-D mesh of this rank's peers along `axes` taken together; None if they have one rank in all."""
        if axes not in self._sub_meshes:
            self._sub_meshes[axes] = self._sub_mesh(axes)
        return self._sub_meshes[axes]

    def _sub_mesh(self, axes: tuple[str, ...]) -> DeviceMesh | None:
        assert self.device_mesh.mesh_dim_names is not None
        sizes = dict(zip(self.device_mesh.mesh_dim_names, self.device_mesh.shape, strict=True))
        wanted = {part for axis in axes for part in _DIMS[axis]}
        present = tuple(name for name, size in sizes.items() if name in wanted and size > 1)
        return flatten_mesh(self.device_mesh, present) if present else None

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The process group of `sub_mesh(*axes)`; None if it has one rank only."""
        mesh = self.sub_mesh(*axes)
        return None if mesh is None else mesh.get_group()

    def routes(self, axis: str, pairs: Sequence[tuple[int, int]]) -> dict[tuple[int, int], dist.ProcessGroup]:
        """One group of two ranks for each pair of places along an axis that this rank is one of.

        The same two in the other order are another pair, with a group of its own. Collective: every rank of the mesh
        calls it, with the same pairs.
        """
        names = self.device_mesh.mesh_dim_names
        assert names is not None
        with outside_of_modes():
            along = self.device_mesh.mesh.movedim(names.index(axis), -1)
            lines = along.reshape(-1, along.shape[-1]).sort(dim=-1).values.tolist()  # as torch numbers ranks of a group
        place = next(line.index(dist.get_rank()) for line in lines if dist.get_rank() in line)
        rounds: list[list[tuple[int, int]]] = []  # in each, every place comes once at most
        for pair in pairs:
            free = (some for some in rounds if not {place for other in some for place in other}.intersection(pair))
            some = next(free, None)
            if some is None:
                rounds.append(some := [])
            some.append(pair)
        routes: dict[tuple[int, int], dist.ProcessGroup] = {}
        for some in rounds:
            group = group_of_some([[line[one], line[other]] for line in lines for one, other in some], f"{axis} p2p")
            if group is not None:
                routes[next(pair for pair in some if place in pair)] = group
        return routes

    def cp_peers(self) -> Peers | None:
        """The ranks with which this one shares sequences; None if cp has one rank."""
        group = self.group("cp")
        if group is None:
            return None
        if self.ulysses in (1, self.shape.cp):
            return Peers(group, *((group, None) if self.ulysses == 1 else (None, group)))
        return Peers(group, self.device_mesh["cp_ring"].get_group(), self.device_mesh["cp_ulysses"].get_group())

    def sharding_mesh(self) -> DeviceMesh:
        """The mesh for `fully_shard`: 1-D over what is sharded, or 2-D (replicate, shard) for hybrid sharding.

        Parameters are sharded over dp_shard x cp together.
        """
        assert self.device_mesh.mesh_dim_names is not None
        names = self.device_mesh.mesh_dim_names
        shard = tuple(name for name in names if name in _SHARDED_OVER)
        assert shard, "nothing to shard over"
        flat = flatten_mesh(self.device_mesh, shard)
        if "dp_replicate" not in names:
            return flat
        return join_meshes(self.device_mesh["dp_replicate"], flat)

    def expert_mesh(self, ep: int, over_replicas: bool) -> DeviceMesh:
        """The mesh of the parameters of experts: dims `dp_replicate` (if there are replicas), `efsdp` and `ep`.

        The ranks of dp_shard x cp x mp, neighbours first, are cut into groups of `ep`: within one each rank has other
        experts, and ranks at the same place of theirs, along efsdp, have the same. Stages have meshes of their own.
        Collective: every rank of the mesh calls it, and gets another one each time.

        Args:
            over_replicas: take replicas for ranks of dp_shard, where nothing is sharded over dp.
        """
        names = self.device_mesh.mesh_dim_names
        assert names is not None
        outer = [name for name in ("pp", *(() if over_replicas else ("dp_replicate",))) if name in names]
        inner = [name for name in names if name not in outer]
        sizes = [self.device_mesh.size(names.index(name)) for name in outer]
        with outside_of_modes():  # ranks are values, also where tensors have none
            ranks = self.device_mesh.mesh.permute([names.index(name) for name in (*outer, *inner)]).reshape(*sizes, -1)
            assert ranks.shape[-1] % ep == 0
            ranks = ranks.sort(dim=-1).values.reshape(*sizes, -1, ep)
        whole = DeviceMesh(self.device_mesh.device_type, ranks, mesh_dim_names=(*outer, "efsdp", "ep"))
        return whole[tuple(name for name in whole.mesh_dim_names or () if name != "pp")]
