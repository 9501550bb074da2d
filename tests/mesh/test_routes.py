"""Groups of two ranks along an axis: who shares which, and by how many calls they are made."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autolaunch_strategies.config import parse_mesh
from autolaunch_strategies.mesh.rank_mesh import RankMesh
from autolaunch_strategies.schedules.schedule import routes
from autolaunch_strategies.torch_private.collectives import group_of_some
from autolaunch_strategies.torch_private.pretended import pretended_group
from tests.support.one_rank import without_process_group

LOOP = routes((0, 1, 2, 3) * 2)


@pytest.fixture(autouse=True)
def nothing_before() -> None:
    without_process_group()


def test_both_ways_between_ranks_that_hold_neighbouring_stages() -> None:
    assert routes((0, 1, 2)) == ((0, 1), (1, 2), (1, 0), (2, 1))
    assert routes((0, 1, 0, 1)) == ((0, 1), (1, 0))
    assert routes((0, 1, 1, 0)) == ((0, 1), (1, 0)), "what stays on a rank is no transfer"
    assert set(LOOP) == {*zip(range(4), (1, 2, 3, 0), strict=True), *zip((1, 2, 3, 0), range(4), strict=True)}


@pytest.mark.parametrize("rank", range(8))
def test_a_rank_has_a_group_for_each_of_its_routes(rank: int) -> None:
    with pretended_group(rank, 8):
        mesh = RankMesh.build(parse_mesh("2x1x4"), 1, 2, "cpu")
        place = mesh.coordinate["pp"]
        found = mesh.routes("pp", LOOP)
        assert set(found) == {pair for pair in LOOP if place in pair}
        assert len(set(map(id, found.values()))) == 4, "each way is a group of its own"
        line = dist.get_process_group_ranks(mesh.group("pp"))
        for pair, group in found.items():
            assert dist.get_process_group_ranks(group) == sorted(line[place] for place in pair)


def test_where_groups_can_be_split_off_those_of_all_pipelines_are_made_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[list[list[int]]] = []

    def split_group(parent: Any, split_ranks: list[list[int]], group_desc: str) -> Any:
        made.append(split_ranks)
        return SimpleNamespace() if any(0 in ranks for ranks in split_ranks) else None

    with pretended_group(0, 8):
        mesh = RankMesh.build(parse_mesh("2x1x4"), 1, 2, "cpu")
        bound = SimpleNamespace(
            rank=lambda: 0,
            bound_device_id=torch.device("cuda", 0),
            _get_backend=lambda _: SimpleNamespace(supports_splitting=True),
        )
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: bound)
        monkeypatch.setattr(dist, "split_group", split_group)
        assert group_of_some([[3, 1]], "p2p") is None and made.pop() == [[1, 3]]
        assert set(mesh.routes("pp", LOOP)) == {(0, 1), (1, 0), (0, 3), (3, 0)}
        monkeypatch.undo()
    assert len(made) == 4 and all(len(ranks) == 4 for ranks in made)
    assert all(len(set(_flat(ranks))) == 8 for ranks in made), "no rank is in two groups of one call"


def _flat(ranks: Iterable[Iterable[int]]) -> list[int]:
    return [rank for some in ranks for rank in some]
