"""Sub-meshes of a `DeviceMesh`, and which part of a DTensor a rank holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard


def forget_meshes() -> None:
    """Drop what torch remembers of sharded operators: it takes a mesh for another one of the same ranks.

    What comes of an operator would be on the other one, whose groups have ended or are not those that other ranks use.
    """
    from torch.distributed.tensor import _redistribute, debug

    debug._clear_sharding_prop_cache()
    getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()


def flatten_mesh(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """The 1-D sub-mesh over `axes` taken together, outermost first, named `a_b`."""
    if len(axes) == 1:
        return mesh[axes[0]]
    return mesh[axes]._flatten("_".join(axes))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor, not differentiable; any other tensor as it is.

    `to_local` would make an object for autograd each time, which costs ten times as much.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def local_index(tensor: DTensor) -> tuple[slice, ...]:
    """Which part of the whole tensor this rank holds, as one slice per dim."""
    return part_of_rank(tensor.shape, tensor.device_mesh, tensor.placements)


def part_of_rank(shape: Iterable[int], mesh: DeviceMesh, placements: Iterable[Any]) -> tuple[slice, ...]:
    """Which part of a DTensor this rank holds, as one slice per dim.

    As torch's `compute_local_shape_and_global_offset`, which errs where parts of a dim sharded twice are not even.

    `fully_shard` shards once more what another axis has sharded, and calls it `_StridedShard`: it comes last.
    """
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank outside of the mesh holds no part"
    sharded = [(axis, item) for axis, item in enumerate(placements) if item.is_shard() or _is_strided(item)]
    parts = [(0, size) for size in shape]
    for axis, placement in sorted(sharded, key=lambda item: _is_strided(item[1])):
        start, length = parts[placement.dim]
        each = -(-length // mesh.size(axis))
        first = min(each * coordinate[axis], length)
        parts[placement.dim] = start + first, min(each, length - first)
    return tuple(slice(start, start + length) for start, length in parts)


def _is_strided(placement: Any) -> bool:
    return isinstance(placement, _StridedShard)


def sharded_as(tensor: DTensor) -> Any:
    """How a DTensor is sharded, its whole shape included; two that are sharded alike are equal, and can be keys."""
    return tensor._spec


def of_local(local: torch.Tensor, sharded: Any) -> DTensor:
    """A DTensor that is sharded as `sharded_as` said, of which this rank holds `local`; autograd sees nothing."""
    make: Any = DTensor  # whose constructor torch's stubs do not know
    sharded_tensor: DTensor = make(local, sharded, requires_grad=local.requires_grad)
    return sharded_tensor


def with_local(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor as `tensor`, of which this rank holds `local`, wherever that is.

    `DTensor.from_local` would move it to the kind of device that the mesh has, away from host memory.
    """
    return of_local(local.detach(), sharded_as(tensor))


def local_shape(shape: Iterable[int], mesh: DeviceMesh, placements: Iterable[Any]) -> tuple[int, ...]:
    """The shape of this rank's part of a DTensor of the given shape."""
    return tuple(part.stop - part.start for part in part_of_rank(shape, mesh, placements))


def join_meshes(*meshes: DeviceMesh) -> DeviceMesh:
    """One mesh with the dims of several, parts of the same mesh, in whatever order that one has them."""
    return DeviceMesh._concatenate(list(meshes))
