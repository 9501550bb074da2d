"""Sub-meshes of a `DeviceMesh`, and which part of a DTensor a rank holds."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import _from_local_no_grad
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from autolaunch_strategies.torch_private.modes import outside_of_modes


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
    shape, offset = _part(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))


def with_local(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor as `tensor`, of which this rank holds `local`, wherever that is.

    `DTensor.from_local` would move it to the kind of device that the mesh has, away from host memory.
    """
    return _from_local_no_grad(local.detach(), tensor._spec)


def local_shape(shape: Iterable[int], mesh: DeviceMesh, placements: Iterable[Any]) -> tuple[int, ...]:
    """The shape of this rank's part of a DTensor of the given shape."""
    return _part(torch.Size(shape), mesh, tuple(placements))[0]


_Part = tuple[tuple[int, ...], tuple[int, ...]]
_PARTS: dict[Hashable, _Part] = {}


def _part(shape: torch.Size, mesh: DeviceMesh, placements: tuple[Any, ...]) -> _Part:
    """(shape, offset) of this rank's part.

    Where two axes shard one dim torch lists every index of the dim and cuts the list for all ranks: on a large mesh
    that takes longer than all else, and layers ask for the same again. Not of modes: the list is one of values.
    """
    key = (shape, tuple(mesh.shape), tuple(mesh.get_coordinate() or ()), placements)
    if key not in _PARTS:
        with outside_of_modes():
            own_shape, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
        _PARTS[key] = tuple(own_shape), tuple(offset)
    return _PARTS[key]


def join_meshes(*meshes: DeviceMesh) -> DeviceMesh:
    """One mesh with the dims of several, parts of the same mesh, in whatever order that one has them."""
    return DeviceMesh._concatenate(list(meshes))
