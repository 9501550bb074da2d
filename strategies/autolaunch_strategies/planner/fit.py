"""Constants from observed step times: the usual values, changed as little as the observations allow.

What constants can't explain of the observations is kept beside them (`residuals`), and believed of what is alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from autolaunch_strategies.planner.candidate import Candidate, Candidates
from autolaunch_strategies.planner.constants import TIME_CONSTANTS, Constants
from autolaunch_strategies.planner.hardware import Hardware
from autolaunch_strategies.planner.profile import ModelProfile, Recipe
from autolaunch_strategies.planner.residuals import FEATURES, features, learned
from autolaunch_strategies.planner.time import step_time

Floats = NDArray[np.float64]

NOISE = 0.05
"""Relative standard deviation of an observation that the model could explain."""
OUTLIER = 2.0
"""Beyond so many times that, an error counts in proportion to its size and no longer to its square (Huber)."""
_STEPS, _DIFFERENCE, _FARTHEST = 6, 1e-4, 1.5


@dataclass(frozen=True)
class Run:
    """An observed training: what ran, and the seconds of its optimizer steps."""

    profile: ModelProfile
    recipe: Recipe
    candidate: Candidate
    seconds: float
    hardware: Hardware | None = None
    """Where it ran, if not on the hardware that is fitted; its constants and residuals are not looked at. Runs on
    another kind of device, or with another stack, say nothing (`Hardware.kind`)."""


def fit(
    hardware: Hardware,
    runs: Sequence[Run],
    names: Sequence[str] | None = None,
    noise: float = NOISE,
    freedom: Mapping[str, float] = MappingProxyType({}),
) -> Hardware:
    """The hardware with constants and residuals that predict the runs: `fit_constants`, then `residuals.learned` of
    what they leave, in place of earlier residuals. With no runs nothing changes. Arguments: of `fit_constants`.
    """
    runs = _of_kind(hardware, runs)
    if not runs:
        return hardware
    observations = _Observations(runs, hardware)
    constants = fit_constants(hardware, runs, names, noise, freedom)
    plural = "run" if len(runs) == 1 else "runs"
    return hardware.with_constants(
        constants,
        f"fitted to {len(runs)} {plural} from {hardware.origin}",
        learned(observations.features().tolist(), (observations.logs - observations.predicted(constants)).tolist()),
    )


def fit_constants(
    hardware: Hardware,
    runs: Sequence[Run],
    names: Sequence[str] | None = None,
    noise: float = NOISE,
    freedom: Mapping[str, float] = MappingProxyType({}),
) -> Constants:
    """The constants that predict the runs, those of `hardware` if there are none.

    Least squares in logarithms (Gauss-Newton): errors of predictions over `noise`, and changes of constants over their
    `sigma`, starting from, and drawn to, the constants of `hardware`.

    Args:
        names: constants that may change; all that the time depends on if None.
        noise: relative standard deviation of one observation.
        freedom: constant -> how many times its `sigma` it may change as easily.
    """
    names = tuple(TIME_CONSTANTS if names is None else names)
    runs = _of_kind(hardware, runs)
    if not runs:
        return hardware.constants
    observations = _Observations(runs, hardware)
    prior = np.log([getattr(hardware.constants, name) for name in names])
    sigma = np.array([_metadata(name, "sigma") * freedom.get(name, 1.0) for name in names])
    most = np.log([_metadata(name, "most") for name in names])

    def constants(logs: Floats) -> Constants:
        return dataclasses.replace(hardware.constants, **dict(zip(names, np.exp(logs).tolist(), strict=True)))

    def predicted(logs: Floats) -> Floats:
        return observations.predicted(constants(logs))

    def cost(residual: Floats, logs: Floats) -> float:
        size = np.abs(residual / noise)
        errors = np.where(size < OUTLIER, size**2, OUTLIER * (2 * size - OUTLIER))
        return float(errors.sum() + np.sum(((logs - prior) / sigma) ** 2))

    observed, logs = observations.logs, prior.copy()
    value = predicted(logs)
    for _ in range(_STEPS):
        slopes = np.stack(
            [(predicted(logs + _DIFFERENCE * unit) - value) / _DIFFERENCE for unit in np.eye(len(names))], axis=1
        )
        errors = (observed - value) / noise
        weight = np.sqrt(np.minimum(1.0, OUTLIER / np.maximum(np.abs(errors), 1e-12)))
        rows = np.concatenate([slopes * (weight / noise)[:, None], np.diag(1 / sigma)])
        goal = np.concatenate([errors * weight, (prior - logs) / sigma])
        step = np.linalg.lstsq(rows, goal, rcond=None)[0]
        step = np.clip(step, -_FARTHEST, _FARTHEST)
        before, scale = cost(observed - value, logs), 1.0
        while scale > 0.05:
            moved = np.minimum(logs + scale * step, most)
            trial = predicted(moved)
            if cost(observed - trial, moved) < before:
                break
            scale /= 2
        else:
            break
        logs, value = moved, trial
        if before - cost(observed - value, logs) < 1e-3 * before:
            break
    return constants(logs)


def _of_kind(hardware: Hardware, runs: Sequence[Run]) -> list[Run]:
    """Those that say something of this hardware."""
    return [run for run in runs if run.hardware is None or run.hardware.kind == hardware.kind]


class _Observations:
    """Runs, those that one call of `step_time` predicts together."""

    def __init__(self, runs: Sequence[Run], hardware: Hardware) -> None:
        self.logs: Floats = np.log([run.seconds for run in runs])
        """[runs] of the observed seconds."""
        indices: dict[tuple[int, Recipe, int], list[int]] = {}
        for index, run in enumerate(runs):
            indices.setdefault((id(run.profile), run.recipe, id(run.hardware)), []).append(index)
        self._groups = [
            (
                group,
                runs[group[0]],
                runs[group[0]].hardware or hardware,
                Candidates.of(runs[i].candidate for i in group),
            )
            for group in indices.values()
        ]

    def predicted(self, constants: Constants) -> Floats:
        """[runs]: logarithms of seconds."""
        result = np.zeros(len(self.logs))
        for group, run, hardware, candidates in self._groups:
            machine = dataclasses.replace(hardware, constants=constants, residuals=None)
            result[group] = np.log(step_time(run.profile, run.recipe, machine, candidates).seconds)
        return result

    def features(self) -> Floats:
        """[runs, features] for `residuals.learned`."""
        rows = np.zeros((len(self.logs), len(FEATURES)))
        for group, run, hardware, candidates in self._groups:
            columns = features(run.profile, run.recipe, hardware.peak(run.recipe.compute), candidates)
            for index, column in enumerate(columns):
                rows[group, index] = column
        return rows


def _metadata(name: str, key: str) -> float:
    return float(next(item for item in dataclasses.fields(Constants) if item.name == name).metadata[key])
