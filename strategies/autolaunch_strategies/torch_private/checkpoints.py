"""Names of torch.distributed.checkpoint that are not public, and what it takes for the part of a rank, put right."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.distributed.checkpoint import planner_helpers
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.device_mesh import DeviceMesh

from autolaunch_strategies.torch_private.meshes import part_of_rank

__all__ = ["set_element"]

_torchs = planner_helpers.compute_local_shape_and_global_offset


def _shape_and_offset(shape: Iterable[int], mesh: DeviceMesh, placements: Iterable[Any]) -> Any:
    if mesh.get_coordinate() is None:
        return _torchs(shape, mesh, placements)  # type: ignore[arg-type]  # as it was given them
    shape = tuple(shape)
    parts = part_of_rank(shape, mesh, placements)
    sizes = tuple(part.stop - part.start for part in parts)
    # DCP writes one of several parts that begin at one place: those of nothing begin where no other does.
    begins = (part.start if size else whole for part, size, whole in zip(parts, sizes, shape, strict=True))
    return sizes, tuple(begins)


# DCP has no hook for it; with torch's own, uneven parts that are sharded twice overlap in a checkpoint.
planner_helpers.compute_local_shape_and_global_offset = _shape_and_offset  # type: ignore[assignment]  # its names
