"""How sure a prediction is, given how uncertain the constants are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autolaunch_strategies.planner.candidate import Candidates
from autolaunch_strategies.planner.constants import TIME_CONSTANTS, Constants
from autolaunch_strategies.planner.hardware import Hardware
from autolaunch_strategies.planner.profile import ModelProfile, Recipe
from autolaunch_strategies.planner.time import step_time

Floats = NDArray[np.float64]


def sampled_times(
    profile: ModelProfile,
    recipe: Recipe,
    hardware: Hardware,
    candidates: Candidates,
    samples: int = 64,
    scale: float = 1.0,
    names: Sequence[str] = TIME_CONSTANTS,
) -> Floats:
    """Step times with constants drawn from their distributions (log-normal about those of `hardware`).

    The draws are the same in every call, so that candidates can be compared sample by sample.

    Args:
        scale: multiplies the standard deviations; below 1 once constants are fitted to this machine.

    Returns:
        [samples, n] seconds.
    """
    random = np.random.default_rng(0)
    sigma = {item.name: float(item.metadata["sigma"]) for item in dataclasses.fields(Constants)}
    result = np.zeros((samples, len(candidates)))
    for sample in range(samples):
        factors = np.exp(scale * random.standard_normal(len(names)) * [sigma[name] for name in names])
        values = {
            name: getattr(hardware.constants, name) * float(factor) for name, factor in zip(names, factors, strict=True)
        }
        machine = dataclasses.replace(hardware, constants=dataclasses.replace(hardware.constants, **values))
        result[sample] = step_time(profile, recipe, machine, candidates).seconds
    return result


def spread(
    profile: ModelProfile, recipe: Recipe, hardware: Hardware, candidates: Candidates, samples: int = 64
) -> Floats:
    """Relative standard deviation of the predicted step time of each candidate, [n]."""
    times = sampled_times(profile, recipe, hardware, candidates, samples)
    return np.asarray(np.std(np.log(times), axis=0))
