"""How the blocks of a model are shared out to the stages of a pipeline, and which rank has which stage. Torch-free."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autolaunch_strategies.config import SCHEDULES, PipelineParallel
from autolaunch_strategies.pipeline.split import even_sizes
from autolaunch_strategies.planner.profile import ModelProfile
from autolaunch_strategies.schedules.schedule import placement

_TOTAL = 2**30
"""What all weights add up to as integers: their sums of squares are exact in 64 bits."""


@dataclass(frozen=True)
class Cut:
    """A model in stages. What runs before the blocks belongs to stage 0, what runs after them to the last stage."""

    blocks: NDArray[np.int64]
    """[stages, kinds]: blocks of each kind in every stage, in order of stages."""
    rank_of_stage: NDArray[np.int64]
    """[stages]: pipe rank."""

    @property
    def sizes(self) -> NDArray[np.int64]:
        """[stages]: blocks of all kinds."""
        return self.blocks.sum(axis=1)


def cut(
    profile: ModelProfile,
    pipeline: str,
    pp: int,
    virtual_stages: int,
    split: int,
    weights: Sequence[float] | None = None,
) -> Cut:
    """The stages of a model in one pipeline.

    Args:
        pipeline: a name of `candidate.PIPELINES`.
        split: 0: as many blocks for each stage, as `pp.split=even` has it; 1: so that the costliest stage costs least.
        weights: [2 + blocks]: cost of what runs before the blocks, of each block, of what runs after them; forward
            flops if None.
    """
    stages = pp * virtual_stages
    assert stages <= max(1, len(profile.blocks)), f"{len(profile.blocks)} blocks in {stages} stages"
    if split and stages > 1:
        sizes = balanced_sizes(block_flops(profile) if weights is None else weights, stages)
    else:
        sizes = even_sizes(len(profile.blocks), stages)
    blocks = np.zeros((stages, len(profile.kinds)), dtype=np.int64)
    np.add.at(blocks, (np.repeat(np.arange(stages), sizes), np.asarray(profile.blocks, dtype=np.int64)), 1)
    return Cut(blocks, np.asarray(rank_of_stage(pipeline, pp, virtual_stages), dtype=np.int64))


def rank_of_stage(pipeline: str, pp: int, virtual_stages: int) -> tuple[int, ...]:
    """[stages]: the pipe rank of every stage, as the runtime places it."""
    if pipeline in SCHEDULES:
        return placement(PipelineParallel(pipeline, "microbatch", pipeline, virtual_stages=virtual_stages), pp)
    assert virtual_stages == 1, f"{pipeline} has one stage per rank"
    return tuple(range(pp))


def block_flops(profile: ModelProfile) -> list[float]:
    """[2 + blocks]: forward flops of what runs before the blocks, of each block, of what runs after them."""
    kinds = [kind.flops for kind in profile.kinds]
    return [profile.before.flops, *(kinds[kind] for kind in profile.blocks), profile.after.flops]


def balanced_sizes(weights: Sequence[float], stages: int) -> list[int]:
    """How many blocks each stage has (at least one), in their order, so that the costliest stage costs least.

    Among such cuts it is one whose costs, and then whose numbers of blocks, are the most even (the smallest sum of
    squares); among those, the one whose first stages have the most. The least cost of the costliest stage is found by
    bisection over greedy packings, the most even cut below it by dynamic programming over the sizes that fit.

    Args:
        weights: [2 + blocks], 0 or more, as of `block_flops`; the first is added to the first stage, the last to the
            last one.
    """
    count = len(weights) - 2
    assert 1 <= stages <= count, f"{count} blocks in {stages} stages"
    return list(_balanced_sizes(tuple(_prefix_sums(weights)), stages))


@functools.lru_cache(maxsize=256)
def _balanced_sizes(sums: tuple[int, ...], stages: int) -> tuple[int, ...]:
    count = len(sums) - 1
    largest = _least_largest(sums, stages)
    widest = max(bisect_right(sums, sums[begin] + largest) - 1 - begin for begin in range(count))
    # Begin and size of a stage [begin, size] -> its cost; what ends beyond the last block, or costs too much: no.
    size = np.arange(widest, 0, -1)
    end = np.arange(count)[:, None] + size
    inside = end <= count
    end = np.minimum(end, count)
    cost = np.asarray(sums)[end] - np.asarray(sums)[:-1, None]
    impossible = np.iinfo(np.int64).max // 2
    squares = np.where(inside & (cost <= largest), cost**2, impossible)
    least = np.full(count + 1, impossible)  # by begin: of the blocks from there on, in as many stages as rounds so far
    least_sizes = np.full(count + 1, impossible)
    least[count] = least_sizes[count] = 0
    chosen = []
    for _ in range(stages):
        costs = np.minimum(squares + least[end], impossible)
        best = costs.min(axis=1)
        sizes = np.where(costs == best[:, None], size**2 + least_sizes[end], impossible)
        choice = sizes.argmin(axis=1)
        chosen.append(size[choice])
        least = np.append(best, impossible)
        least_sizes = np.append(np.minimum(sizes[np.arange(count), choice], impossible), impossible)
    assert least[0] < impossible
    result, begin = [], 0
    for sizes in reversed(chosen):
        result.append(int(sizes[begin]))
        begin += result[-1]
    return tuple(result)


def _prefix_sums(weights: Sequence[float]) -> list[int]:
    """[blocks + 1]: integer sums of the blocks before each place; the ends have what runs before and after the blocks.

    Equal weights are equal integers, whatever their place: sums of floats would depend on it.
    """
    total = float(sum(weights))
    whole = all(float(weight).is_integer() for weight in weights) and total <= _TOTAL
    scaled = [int(weight) if whole else round(weight * (_TOTAL / total)) for weight in weights]
    sums = [0]
    for weight in scaled[1:-1]:
        sums.append(sums[-1] + weight)
    sums[0] -= scaled[0]
    sums[-1] += scaled[-1]
    return sums


def _least_largest(sums: Sequence[int], stages: int) -> int:
    """The least possible cost of the costliest of at most so many stages.

    With fewer stages than asked for some stage has several blocks, and cutting it costs nothing.
    """
    count = len(sums) - 1
    low = max(max(sums[place + 1] - sums[place] for place in range(count)), -(-(sums[-1] - sums[0]) // stages))
    high = sums[-1] - sums[0]
    while low < high:
        middle = (low + high) // 2
        place = used = 0
        while place < count and used < stages:
            place = bisect_right(sums, sums[place] + middle) - 1
            used += 1
        if place >= count:
            high = middle
        else:
            low = middle + 1
    return low


def unevenness(weights: Sequence[float], stages: int) -> float:
    """By what share the costliest stage of the even cut costs more than that of the balanced one; 0: by nothing.

    Args:
        weights: as of `balanced_sizes`.
    """
    sums = _prefix_sums(weights)
    ends = np.append(0, np.cumsum(even_sizes(len(weights) - 2, stages)))
    largest = int(np.diff(np.asarray(sums)[ends]).max())
    return largest / least - 1 if (least := _least_largest(sums, stages)) else 0.0
