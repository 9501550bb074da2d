"""What publications have and our runtime has not: two schedules, empty stages, and what Megatron frees and sends.

The two schedules stand behind those of the runtime in `PIPELINE_SPECS` once this is imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from autolaunch_strategies.config import ScheduleSpec
from autolaunch_strategies.planner import memory
from autolaunch_strategies.planner import time as planner_time
from autolaunch_strategies.planner.candidate import PIPELINE_SPECS
from autolaunch_strategies.planner.profile import ModelProfile, Part
from autolaunch_strategies.planner.stages import Cut, cut
from autolaunch_strategies.schedules.in_flight import Flight, in_flight

_ONE_STAGE: Mapping[str, Any] = {"least_stages": 1, "most_stages": 1, "splits_backward": True}
PIPELINE_SPECS += [
    ScheduleSpec("zero_bubble_1p", waits=((1, 1, -1), (1, 0, 0)), **_ONE_STAGE),
    ScheduleSpec("zero_bubble_2p", waits=((1, 1, -2), (0.02, 0.02, 0.02)), **_ONE_STAGE),  # no step ends together
]
NUMBERS = {spec.name: number for number, spec in enumerate(PIPELINE_SPECS)}
"""Of all schedules, as in `Candidate.pipeline`."""


def scattered_sends(profile: ModelProfile, mp: int) -> ModelProfile:
    """A profile for the time of a step in which each rank of mp sends its share of what goes from stage to stage.

    For mp without sequence parallelism; with it our runtime does the same.
    """
    kinds = tuple(dataclasses.replace(kind, output_bytes=kind.output_bytes / mp) for kind in profile.kinds)
    return dataclasses.replace(profile, kinds=kinds)


def gathers_again(profile: ModelProfile, sequence_parallel: bool) -> ModelProfile:
    """A profile for memory where what has been gathered along mp is freed and, for the backward pass, gathered again,
    and sequences are sharded around the blocks, too, with sequence parallelism."""

    def around(part: Part) -> Part:
        return dataclasses.replace(part, sharded_saved_bytes=part.saved_bytes, sharded_peak_bytes=part.peak_bytes)

    kinds = tuple(dataclasses.replace(kind, exchange_bytes=0) for kind in profile.kinds)
    profile = dataclasses.replace(profile, kinds=kinds)
    if not sequence_parallel:
        return profile
    return dataclasses.replace(profile, before=around(profile.before), after=around(profile.after))


@contextmanager
def empty_stages() -> Iterator[None]:
    """Within it, a model may have more stages than blocks: the embedding and the head count as blocks, too."""
    with mock.patch.object(planner_time, "cut", _cut):
        yield


def _cut(profile: ModelProfile, pipeline: str, pp: int, virtual_stages: int, split: int) -> Cut:
    stages = pp * virtual_stages
    if stages <= len(profile.blocks):
        return cut(profile, pipeline, pp, virtual_stages, split)
    blocks = np.zeros((stages, len(profile.kinds)), dtype=np.int64)
    where = np.linspace(1, stages - 2, len(profile.blocks)).round().astype(int)
    np.add.at(blocks, (where, np.asarray(profile.blocks, dtype=np.int64)), 1)
    return Cut(blocks, np.arange(stages) % pp)


@contextmanager
def memory_of(megatron: bool, cut_as: Callable[..., Cut]) -> Iterator[None]:
    """Within it, the planner's memory is that of other training loops, and knows the schedules of publications.

    All drop the gradients of a step before the next one. Megatron has room for them all the time, and frees what a
    stage has sent.

    Args:
        cut_as: takes the place of `stages.cut`.
    """
    put_amounts = memory._put_amounts

    def put(*args: Any) -> None:
        put_amounts(*args)
        columns, pieces = args[-2:]
        for amounts in {id(array): array for array in pieces.values()}.values():
            for suffix in ("", "_before", "_after", "_shared"):
                state, gradients, stale = (columns.at[f"{name}{suffix}"] for name in ("state", "gradients", "stale"))
                amounts[stale] = 0
                if megatron:
                    amounts[state] += amounts[gradients]
                    amounts[gradients] = 0
            if megatron:
                amounts[columns.at["output"]] = 0

    with mock.patch.multiple(memory, _put_amounts=put, in_flight=_in_flight, cut=cut_as):
        yield


def _in_flight(spec: ScheduleSpec, ranks: int, virtual_stages: int, microbatches: int) -> Flight:
    """All ranks hold as much as the first one does with 1F1B, or twice as much."""
    most = {"zero_bubble_1p": ranks, "zero_bubble_2p": 2 * ranks}.get(spec.name)
    if most is None:
        return in_flight(spec, ranks, virtual_stages, microbatches)
    return Flight.of(np.full((ranks, 1, 1), min(most, microbatches)))
