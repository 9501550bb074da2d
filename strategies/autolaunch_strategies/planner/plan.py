"""What the planner looked at, and what it chose: plain data with predictions. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autolaunch_strategies.planner.candidate import Candidate, Candidates, of_backends, of_schedules
from autolaunch_strategies.planner.enumerate import Rejections
from autolaunch_strategies.planner.hardware import Hardware
from autolaunch_strategies.planner.profile import ModelProfile, Recipe

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SURE, MEASURED = 0.92, 0.95
"""Share of a device's memory that a candidate may need to be chosen: where what memory holds besides tensors is
assumed, and where it was measured (`Hardware.margin_measured`). Above `SURE` it is shown as tight all the same."""

TIGHT = 1.05
"""Share of a device's memory up to which a prediction may be wrong and the candidate fit after all."""

BANDS = (0.01, 0.03, 0.05, 0.1)
"""For which shares of the least time it is counted how many candidates are within them."""

DOUBLING = 4
"""What each doubling of mp, pp or cp counts in `simplicity`, in options: less of them leaves more to dp."""

NEARLY_FULL, SHARE_STATE = 0.7, 5
"""From which share of a device's memory on level 0 is no longer simpler than level 1, and by how many options: what
every rank of dp holds is the first thing to share out."""


@dataclass(frozen=True)
class Looked:
    """Candidates with their predictions, the fastest first; those that do not fit have no time, and come last."""

    candidates: Candidates
    seconds: Floats
    """[n]; infinite where the memory does not fit."""
    memory_bytes: Floats
    """[n]: of the fullest device."""
    limit: float
    """Bytes that a device has."""
    share: float
    """Up to which share of them a candidate fits for sure; from there to `TIGHT` it may."""

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def fits(self) -> NDArray[np.bool_]:
        """[n]: which fit for sure."""
        return self.memory_bytes <= self.share * self.limit

    @property
    def may_fit(self) -> NDArray[np.bool_]:
        """[n]: which fit, or may."""
        return self.memory_bytes <= TIGHT * self.limit

    @property
    def pool(self) -> NDArray[np.bool_]:
        """[n]: those of which one is chosen: that fit for sure; if none does, that are predicted to; else that may."""
        predicted = self.memory_bytes <= self.limit
        return next((pool for pool in (self.fits, predicted) if pool.any()), self.may_fit)

    @cached_property
    def simplicity(self) -> Ints:
        """[n]: see `simplicity`."""
        return simplicity(self.candidates, self.memory_bytes / self.limit)

    def select(self, which: Any) -> Looked:
        """Those that a mask or an array of indices names."""
        return dataclasses.replace(
            self,
            candidates=self.candidates.select(which),
            seconds=self.seconds[which],
            memory_bytes=self.memory_bytes[which],
        )


@dataclass(frozen=True)
class Plan:
    """What was chosen for a training on a cluster, and out of what."""

    profile: ModelProfile
    recipe: Recipe
    hardware: Hardware
    wanted: Mapping[str, Sequence[int]]
    memory_share: float
    noise: float
    """Relative differences of predicted times below this are none."""
    looked: Looked
    rejections: Rejections
    chosen: Candidate
    seconds: float
    parts: Mapping[str, float]
    """Name of `time.PARTS` -> seconds; they add up to `seconds`."""
    memory_bytes: float
    spread: float
    """Relative standard deviation of `seconds`."""
    alternatives: Ints
    """Indices in `looked`: the fastest of each kind, the one that needs least memory; without the chosen one."""
    warnings: tuple[str, ...] = ()
    short: str = ""
    """Why a training of so few steps does without compiled blocks, which would be faster; else empty."""

    @property
    def simplicity(self) -> int:
        """The value of the function `simplicity` for the chosen candidate: less is simpler."""
        return int(simplicity(Candidates.of([self.chosen]), self.memory_bytes / self.looked.limit)[0])

    @property
    def plateau(self) -> dict[str, int]:
        """How many candidates are within a share of the least time."""
        seconds = self.looked.seconds[self.looked.pool]
        return {f"{band:.0%}": int((seconds <= seconds.min() * (1 + band)).sum()) for band in BANDS}


def simplicity(candidates: Candidates, filled: Floats | float = 0.0) -> Ints:
    """[n]: less is simpler: fewer axes in use first, then smaller ones, then options that ask for less and are better
    known. dp counts nothing: everyone has it, and devices that no other axis takes are its own.

    Args:
        filled: [n]: share of a device's memory that is needed.
    """
    c = candidates
    axes = sum(100 * (size > 1) + DOUBLING * np.ceil(np.log2(size)) for size in (c.mp, c.pp, c.cp))
    of_pipeline = of_schedules("complexity", c.pipeline)
    of_level = np.asarray([0, 2, 2, 1])[c.level] + 2 * ((c.level > 0) & (c.replicate > 1))
    of_level = of_level + SHARE_STATE * ((c.level == 0) & (c.dp > 1) & (np.asarray(filled) > NEARLY_FULL))
    of_recompute = np.select([c.recompute == 0, c.recompute == 1, c.recompute < 0], [0, 1, 2], 3)
    accumulates = (c.pp == 1) & (c.microbatches > 1)
    of_context = of_backends("complexity", c.backend)
    rest = of_pipeline + of_level + of_recompute + accumulates + of_context + 10 * (c.ep > 1) + c.compile
    return np.asarray(axes + rest + c.sequence_parallel + c.split + (c.virtual_stages > 2), dtype=np.int64)
