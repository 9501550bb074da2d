"""What ranks of `tests/test_calibrate.py` do: measure with small limits, and with faults."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from autolaunch.job import ResolvedJob
from autolaunch.launch.place import Place
from autolaunch.tasks.calibrate import measure as calibration
from autolaunch_strategies.planner import measure

QUICK = ("dp, small batch", "dp level 3")


def quick(job: ResolvedJob, place: Place) -> dict[str, Any]:
    """All probes in little time, and two trainings."""
    calibration.PROBE_SECONDS = 0.02
    calibration.trainings = _two_trainings
    return calibration.measure(job, place)


def faulty(job: ResolvedJob, place: Place) -> dict[str, Any]:
    """The last rank can't reduce-scatter, in the middle of it, nor take part in the second training."""
    measure.PROBE_SECONDS = 3.0
    exchange = measure._exchange

    def break_one(kind: str, *arguments: Any) -> Any:
        if kind == "reduce_scatter" and place.rank == place.world_size - 1:
            raise OSError("no more reductions today")
        return exchange(kind, *arguments)

    measure._exchange = break_one
    calibration.PROBE_SECONDS = 0.02
    calibration.trainings = _with_a_wrong_one
    return calibration.measure(job, place)


def crash(job: ResolvedJob, place: Place) -> dict[str, Any]:
    """A rank goes without a word."""
    if place.rank == 1:
        import os

        os._exit(7)
    return quick(job, place)


def _two_trainings(ranks: int, local_ranks: int) -> Any:
    return (item for item in _ALL(ranks, local_ranks) if item.name in QUICK)


def _with_a_wrong_one(ranks: int, local_ranks: int) -> Any:
    first, second = itertools.islice(_two_trainings(ranks, local_ranks), 2)
    return iter([dataclasses.replace(first, model={**first.model, "num_heads": 3}), second])


_ALL = calibration.trainings
