"""Which entries this rank holds of what a module draws numbers for, while it runs on a part of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autolaunch_strategies.mesh.layout import Layout


@dataclass(frozen=True)
class Rows:
    """How a sequence and the samples of a batch stand in the arguments of a module."""

    samples: int = 1
    sequence_dim: int = 1
    """0 where the sequence comes first and samples second."""

    @classmethod
    def of(cls, part: torch.Tensor, sequence_dim: int) -> Rows:
        """Those of an argument that is cut along `sequence_dim`: samples are the other one of its first two dims."""
        return cls(part.shape[1 - sequence_dim] if sequence_dim < 2 <= part.dim() else 1, sequence_dim)


def held_of_part(shape: Sequence[int], layout: Layout, rank: int, rows: Rows) -> dict[int, tuple[torch.Tensor, int]]:
    """What `rank` holds of a tensor of the module's own, as random numbers by position want it (`Held`).

    Such a tensor says nothing but its shape, in which other dims may have the length of a part by chance. So the dim of
    samples is found first, from how they stand in the arguments, then that of the sequence among the others.

    Numbers within attention that cp answers are not drawn by this: that knows of which queries and heads they are.
    """
    if not shape:
        return {}
    positions, local, dims = layout.padded_positions(rank), layout.local, len(shape)
    if dims <= 2 and shape[0] == rows.samples * local:
        return _flattened(positions, layout, rows)
    of_samples = 1 if rows.sequence_dim == 0 and 1 < dims < 4 else 0  # in front of heads they are the first anyway
    if shape[of_samples] != rows.samples:
        of_samples = -1
    usual = 2 if dims == 4 else rows.sequence_dim
    candidates = [dim for dim, count in enumerate(shape) if count == local and dim != of_samples]
    if candidates:
        return {min(candidates, key=lambda dim: abs(dim - usual)): (positions, layout.size)}
    return _flattened(positions, layout, rows) if shape[0] == rows.samples * local else {}


def _flattened(positions: torch.Tensor, layout: Layout, rows: Rows) -> dict[int, tuple[torch.Tensor, int]]:
    """Of a dim in which samples and sequence are flattened, in the order in which they stand."""
    samples = torch.arange(rows.samples)
    if rows.sequence_dim == 0:
        entries = positions[:, None] * rows.samples + samples
    else:
        entries = samples[:, None] * layout.size + positions
    return {0: (entries.flatten(), rows.samples * layout.size)}
