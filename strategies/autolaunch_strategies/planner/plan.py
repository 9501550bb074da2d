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

TIGHT = 1.05
"""Share of a device's memory up to which a prediction may be wrong and the candidate fit after all."""

BANDS = (0.01, 0.03, 0.05, 0.1)
"""For which shares of the least time it is counted how many candidates are within them."""


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
        """[n]: those of which one is chosen: that fit for sure; if none does, that may."""
        return self.fits if self.fits.any() else self.may_fit

    @cached_property
    def simplicity(self) -> Ints:
        """[n]: see `simplicity`."""
        return simplicity(self.candidates)

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

    @property
    def simplicity(self) -> int:
        """The value of the function `simplicity` for the chosen candidate: less is simpler."""
        return int(simplicity(Candidates.of([self.chosen]))[0])

    @property
    def plateau(self) -> dict[str, int]:
        """How many candidates are within a share of the least time."""
        seconds = self.looked.seconds[self.looked.pool]
        return {f"{band:.0%}": int((seconds <= seconds.min() * (1 + band)).sum()) for band in BANDS}


def simplicity(candidates: Candidates) -> Ints:
    """[n]: less is simpler: fewer axes in use first (dp is the least of them), then options that ask for less and are
    better known."""
    c = candidates
    axes = sum((getattr(c, axis) > 1) * weight for axis, weight in {"dp": 90, "mp": 100, "pp": 100, "cp": 100}.items())
    of_pipeline = of_schedules("complexity", c.pipeline)
    of_level = np.asarray([0, 2, 2, 1])[c.level] + 2 * ((c.level > 0) & (c.replicate > 1))
    of_recompute = np.select([c.recompute == 0, c.recompute == 1, c.recompute < 0], [0, 1, 2], 3)
    accumulates = (c.pp == 1) & (c.microbatches > 1)
    of_context = of_backends("complexity", c.backend)
    rest = of_pipeline + of_level + of_recompute + accumulates + of_context + 10 * (c.ep > 1)
    return np.asarray(axes + rest + c.sequence_parallel + c.split + (c.virtual_stages > 2), dtype=np.int64)
