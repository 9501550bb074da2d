"""Sequence shards: torch functions on them give what they give on whole tensors, values and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autolaunch_strategies.mesh.layout import Layout
from autolaunch_strategies.sharded_sequence.shard import Positions
from tests.support.ranks import Group, GroupOf

SCRIPT = Path(__file__).parent / "cases.py"


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.full)])
def results(request: pytest.FixtureRequest, group_of: GroupOf) -> tuple[int, Group]:
    return request.param, group_of(SCRIPT, "all", request.param)


@pytest.mark.parametrize("results", [2], indirect=True)  # a minute of processor time on four
def test_functions_on_shards_are_those_on_whole_tensors(results: tuple[int, Group]) -> None:
    world, written = results
    for rank in range(world):
        failures = written.read("functions", rank)
        assert len(failures) >= 4
        assert not any(failures.values()), "\n".join(
            f"{layout}, {name}: {text}" for layout, failed in failures.items() for name, text in failed.items()
        )


@pytest.mark.parametrize("case", ["collectives", "backward_of_a_shard", "narrow_types", "kept_tables_serve_every_mode"])
def test_on_every_rank(results: tuple[int, Group], case: str) -> None:
    world, written = results
    for rank in range(world):
        written.read(case, rank)


def test_a_shard_says_what_the_whole_is(results: tuple[int, Group]) -> None:
    world, written = results
    size = 4 * world - 1
    last = written.read("attributes", world - 1)
    assert last["same"]
    assert f"shape=[2, {size}, 3]" in last["text"] and f"4 of {size} along dim 1" in last["text"]
    assert f"3 of {size}" in written.read("attributes", 0)["text"]


def test_what_torch_functions_do_not_see_is_an_error(results: tuple[int, Group]) -> None:
    messages = results[1].read("what_torch_functions_do_not_see")
    for way in ("its output", "its gradient", "itself", "dispatch"):
        assert "tensor.whole()" in messages[way], messages
    assert "differentiate by parameters" in messages["grad"]
    assert "in place" in messages["shape"]


def test_random_numbers(results: tuple[int, Group]) -> None:
    world, written = results
    each = [written.read("random_numbers", rank) for rank in range(world)]
    assert len({str(numbers["rows"]) for numbers in each}) == world  # masks of their own
    assert len({numbers["after"] for numbers in each}) == 1  # and default generators in step
    assert len({numbers["same elsewhere"] for numbers in each}) == 1
    assert len({numbers["noise"][2] for numbers in each}) == world
    for numbers in each:
        assert numbers["repeats"] and numbers["nothing is drawn"]
        assert 0.4 < numbers["share"] < 0.6
        assert all(0.8 < spread < 1.2 for spread in numbers["noise"][:2])


def test_shards_of_sharded_tensors(results: tuple[int, Group]) -> None:
    world, written = results
    for rank in range(world):
        failures = written.read("mp", rank)
        assert not failures, "\n".join(f"{name}: {text}" for name, text in failures.items())


@pytest.mark.parametrize("layout", [Layout(16, 2), Layout(13, 2), Layout(13, 4, 2), Layout(16, 4, 4), Layout(3, 4)])
def test_positions(layout: Layout) -> None:
    positions = Positions.of_layout(layout)
    size = layout.size

    def entries(these: Positions) -> list[list[int]]:
        return [these.of_rank(rank).tolist() for rank in range(layout.ranks)]

    held = [layout.positions(rank).tolist() for rank in range(layout.ranks)]
    assert entries(positions) == held and positions.size == size
    assert positions.counts == tuple(len(part) for part in held)
    assert positions.narrowed(0, size) == positions
    part = positions.narrowed(1, size - 1)
    assert entries(part) == [[entry - 1 for entry in row if 1 <= entry < size - 1] for row in held]
    flat = positions.flattened(3)
    assert entries(flat) == [[outer * size + entry for outer in range(3) for entry in row] for row in held]
    assert flat.one_row() == positions and flat.flattened(2) == positions.flattened(6) and flat.rows == 3
    some = flat.narrowed(2, 2 * size)
    assert some.rows is None
    assert entries(some) == [[entry - 2 for entry in row if 2 <= entry < 2 * size] for row in entries(flat)]
    for these in (positions, part, flat, some):
        together = torch.cat([these.of_rank(rank) for rank in range(layout.ranks)])
        order = these.order(torch.device("cpu"))
        in_order = together if order is None else together[order]
        assert in_order.tolist() == list(range(these.size))
        assert these.of_rank(0) is these.of_rank(0)  # kept
        assert [these.held_before(these.size, rank) for rank in range(layout.ranks)] == list(these.counts)
