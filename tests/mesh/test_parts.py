"""Which part of a parameter a rank holds, where two axes shard the same dim unevenly: as `fully_shard` shards it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import planner_helpers
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from autolaunch_strategies.torch_private import checkpoints
from autolaunch_strategies.torch_private.meshes import part_of_rank


@pytest.mark.parametrize(
    ("rows", "dp", "mp"), [(257, 4, 2), (257, 2, 2), (10, 4, 2), (7, 3, 2), (3, 4, 2), (4, 4, 2), (64, 2, 4)]
)
def test_a_part_of_a_part(rows: int, dp: int, mp: int) -> None:
    placements = (Replicate(), _StridedShard(0, split_factor=mp), Shard(0))
    covered: dict[int, int] = {}
    """First row of a part -> its rows, as checkpoints tell parts apart."""
    for first in range(dp):
        for then in range(mp):
            mesh: Any = SimpleNamespace(get_coordinate=lambda at=(1, first, then): at, size=(2, dp, mp).__getitem__)
            expected = chunk(chunk(torch.arange(rows), mp, then), dp, first)
            part, columns = part_of_rank((rows, 5), mesh, placements)
            torch.testing.assert_close(torch.arange(rows)[part], expected)
            assert columns == slice(0, 5)
            found = planner_helpers.compute_local_shape_and_global_offset((rows, 5), mesh, placements)
            assert found == ((len(expected), 5), (part.start if len(expected) else rows, 0))
            covered.setdefault(found[1][0], found[0][0])
            assert covered[found[1][0]] == found[0][0], "a part of no rows would be written in place of one with rows"
    assert sum(covered.values()) == rows
    assert planner_helpers.compute_local_shape_and_global_offset is checkpoints._shape_and_offset


def chunk(whole: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """As `torch.chunk`; empty for ranks beyond the last one."""
    chunks = whole.chunk(ranks)
    return chunks[rank] if rank < len(chunks) else whole[:0]
