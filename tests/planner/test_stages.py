"""Cuts of a model into the stages of a pipeline."""

from __future__ import annotations

import itertools
import random
import time

import numpy as np
import pytest

from autolaunch_strategies.config import PP_NAMES, SCHEDULES
from autolaunch_strategies.pipeline.split import even_sizes
from autolaunch_strategies.planner.profile import MatMul, ModelProfile, Part
from autolaunch_strategies.planner.stages import balanced_sizes, cut, rank_of_stage
from autolaunch_strategies.schedules.schedule import default_virtual_stages, placement


def profile_of(costs: list[int], before: int = 0, after: int = 0) -> ModelProfile:
    """A model whose blocks cost so many flops; equal ones are of one kind."""
    distinct = sorted(set(costs))
    kinds = tuple(part(f"block {cost}", cost) for cost in distinct)
    names = tuple(f"layers.{index}" for index in range(len(costs)))
    blocks = tuple(distinct.index(cost) for cost in costs)
    return ModelProfile("test", 8, part("before", before), kinds, blocks, names, part("after", after))


def part(name: str, flops: int) -> Part:
    return Part(name, parameters=10, matmuls=(MatMul(1, 1, 1, flops / 2),) if flops else ())


def all_cuts(count: int, stages: int) -> list[list[int]]:
    """Every way to share out so many blocks, at least one to each stage."""
    ends = itertools.combinations(range(1, count), stages - 1)
    return [[end - begin for begin, end in itertools.pairwise((0, *inner, count))] for inner in ends]


def loads(weights: list[int], sizes: list[int]) -> list[int]:
    ends = list(itertools.accumulate(sizes))
    costs = [sum(weights[1:-1][end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    costs[0] += weights[0]
    costs[-1] += weights[-1]
    return costs


def by_brute_force(weights: list[int], stages: int) -> list[int]:
    def order(sizes: list[int]) -> tuple:
        costs = loads(weights, sizes)
        return max(costs), sum(cost**2 for cost in costs), sum(size**2 for size in sizes), [-size for size in sizes]

    return min(all_cuts(len(weights) - 2, stages), key=order)


@pytest.mark.parametrize("seed", range(8))
def test_balanced_cuts_against_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(50):
        count = draw.randint(1, 11)
        weights = [draw.choice((0, 1, 1, 2, 3, draw.randint(0, 9))) for _ in range(count + 2)]
        stages = draw.randint(1, count)
        assert balanced_sizes(weights, stages) == by_brute_force(weights, stages), (weights, stages)


@pytest.mark.parametrize("seed", range(4))
def test_largest_stage_of_fractional_weights(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(25):
        count = draw.randint(1, 10)
        weights = [draw.random() * 1e15 for _ in range(count + 2)]
        stages = draw.randint(1, count)
        least = min(max(loads(weights, sizes)) for sizes in all_cuts(count, stages))
        assert max(loads(weights, balanced_sizes(weights, stages))) == pytest.approx(least, rel=1e-7)


def test_equal_blocks_with_a_costly_head() -> None:
    assert balanced_sizes([0.01, *[0.1] * 126, 0.066], 16) == [7, *[8] * 14, 7]  # Llama 3 405B, 16 stages
    assert balanced_sizes([0.0, *[0.1] * 8, 0.24], 2) == [5, 3]
    assert balanced_sizes([0.0, *[0.0] * 6, 0.0], 4) == [2, 2, 1, 1]


def test_many_stages_take_milliseconds() -> None:
    draw = random.Random(0)
    weights = [draw.random() for _ in range(130)]
    seconds = []
    for _ in range(5):
        begin = time.process_time()
        sizes = balanced_sizes(weights, 64)
        seconds.append(time.process_time() - begin)
    assert sum(sizes) == 128
    assert len(sizes) == 64
    assert min(seconds) < 0.03


def test_even_cut_is_the_runtimes() -> None:
    found = cut(profile_of([5] * 10), "interleaved_1f1b", 2, 2, split=0)
    assert found.sizes.tolist() == even_sizes(10, 4) == [3, 3, 2, 2]
    assert found.rank_of_stage.tolist() == [0, 1, 0, 1]


def test_blocks_of_every_kind_are_counted() -> None:
    found = cut(profile_of([3, 1, 1, 3, 1, 1]), "1f1b", 2, 1, split=0)
    assert found.blocks.tolist() == [[2, 1], [2, 1]]
    found = cut(profile_of([3, 1, 1, 3, 1, 1], after=4), "1f1b", 2, 1, split=1)
    assert found.blocks.tolist() == [[2, 2], [2, 0]]
    assert cut(profile_of([1] * 4), "1f1b", 2, 1, 1, weights=[9, 1, 1, 1, 1, 0]).sizes.tolist() == [1, 3]


def test_one_rank_has_everything() -> None:
    for split in (0, 1):
        found = cut(profile_of([1, 2, 1]), "none", 1, 1, split)
        assert (found.blocks.tolist(), found.rank_of_stage.tolist()) == ([[2, 1]], [0])


@pytest.mark.parametrize("name", ["exact", *SCHEDULES])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_of_stages_are_the_runtimes(name: str, ranks: int) -> None:
    virtual_stages = 1 if name == "exact" else default_virtual_stages(name)
    pipeline = PP_NAMES[name]
    assert pipeline is not None
    assert rank_of_stage(name, ranks, virtual_stages) == placement(pipeline, ranks)
    assert np.bincount(rank_of_stage(name, ranks, virtual_stages)).tolist() == [virtual_stages] * ranks
