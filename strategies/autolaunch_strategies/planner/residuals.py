"""What constants leave unexplained of measured runs, and how far it is believed of others. Torch-free.

A Gaussian process on the logarithm of measured over predicted seconds (Rasmussen and Williams, Gaussian Processes for
Machine Learning, 2006: predictions by equation 2.25, lengths by the marginal likelihood, 5.8). Its covariance is a
product of exponentials, one for each thing in which two runs may differ, each with a length of its own: what makes no
difference between the measured runs gets a long one, so that only likeness in what matters counts. Far from every
measured run nothing is corrected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autolaunch_strategies.planner.profile import COMPUTE_TYPES

if TYPE_CHECKING:
    from autolaunch_strategies.planner.candidate import Candidates
    from autolaunch_strategies.planner.profile import ModelProfile, Recipe

Floats = NDArray[np.float64]

SIZES = (
    "dp", "mp", "pp", "cp", "replicate", "microbatches", "virtual_stages", "ulysses", "ep",
    "microbatch", "positions", "blocks", "width", "peak_tflops",
)  # fmt: skip
"""In which runs differ by a factor: fields of `Candidate`, positions of one microbatch on one device, positions of a
sequence, blocks, the square root of the parameters of a block, and the peak of a device."""
KINDS = ("level", "sequence_parallel", "pipeline", "split", "recompute", "backend", "compile", "compute")
"""In which runs are the same or not: fields of `Candidate`, and the type of matrix products."""
FEATURES = (*SIZES, *KINDS)

LENGTH, AMPLITUDE, NOISE = 4.0, 0.05, 0.03
"""What is usual: doublings of a size, or differences of kind, over which likeness falls to 1/e; standard deviation of
what constants leave unexplained, and of a measurement."""
_LENGTHS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
_AMPLITUDES = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8)
_NOISES = (0.01, 0.02, 0.03, 0.05, 0.08)
_SIGMA_LENGTH, _SIGMA_HEIGHT, _ROUNDS = 1.0, 0.7, 3
"""Standard deviations of the logarithms of lengths, and of amplitude and noise; turns in which all are tried."""


@dataclass(frozen=True)
class Residuals:
    """Measured runs, and what predictions without this were off by."""

    runs: tuple[tuple[float, ...], ...]
    """[m, len(FEATURES)]; kinds by number."""
    logs: tuple[float, ...]
    """[m]: logarithm of measured over predicted seconds."""
    lengths: tuple[float, ...] = (LENGTH,) * len(FEATURES)
    amplitude: float = AMPLITUDE
    noise: float = NOISE

    def likeness(self, columns: Sequence[Floats]) -> Floats:
        """[n, m] between 0 and 1: how much what `features` has described is like each of the runs."""
        same, distance = np.zeros((1, len(self.runs))), np.zeros((1, len(self.runs)))
        for column, own, name, length in zip(columns, self._columns, FEATURES, self.lengths, strict=True):
            apart = _apart(name, column[:, None], own[None]) / length
            if len(column) == 1:
                same = same + apart
            else:
                distance = distance + apart
        return np.asarray(np.exp(-(same + distance)))

    def correction(self, columns: Sequence[Floats]) -> Floats:
        """[n] or [1]: logarithm of what the predicted seconds are to be multiplied by."""
        return np.asarray(self.likeness(columns) @ self._weights)

    @cached_property
    def _columns(self) -> tuple[Floats, ...]:
        return tuple(np.asarray(column, dtype=np.float64) for column in zip(*self.runs, strict=True))

    @cached_property
    def _weights(self) -> Floats:
        covariance = _covariance(self.likeness(self._columns), self.amplitude, self.noise)
        return np.asarray(self.amplitude**2 * np.linalg.solve(covariance, np.asarray(self.logs)))


def features(profile: ModelProfile, recipe: Recipe, peak: float, candidates: Candidates) -> list[Floats]:
    """Columns in the order of `FEATURES`, [n] or, where all candidates have the same value, [1].

    Args:
        peak: operations per second.
    """
    c, blocks = candidates, max(len(profile.blocks), 1)
    inside = sum(profile.kinds[kind].parameters for kind in profile.blocks) or profile.parameters
    values: dict[str, float | NDArray[np.generic]] = {
        "microbatch": recipe.batch_size * profile.positions / (c.dp * c.cp * c.microbatches),
        "positions": profile.positions,
        "blocks": blocks,
        "width": math.sqrt(max(inside / blocks, 1.0)),
        "peak_tflops": peak / 1e12,
        "compute": COMPUTE_TYPES.index(recipe.compute),
    }
    columns = []
    for name in FEATURES:
        column = np.atleast_1d(np.asarray(values.get(name, getattr(c, name, None)), dtype=np.float64))
        columns.append(column[:1] if (column == column[0]).all() else column)
    return columns


def learned(runs: Sequence[Sequence[float]], logs: Sequence[float]) -> Residuals:
    """The process with the lengths, amplitude and noise that make these runs most likely, given what is usual.

    Args:
        runs: [m, len(FEATURES)], at least one.
        logs: [m], as `Residuals.logs`.
    """
    rows = tuple(tuple(float(value) for value in run) for run in runs)
    observed = np.asarray(logs, dtype=np.float64)
    columns = [np.asarray(column) for column in zip(*rows, strict=True)]
    apart = np.stack(
        [_apart(name, own[:, None], own[None]) for name, own in zip(FEATURES, columns, strict=True)], axis=-1
    )
    differ = [index for index in range(len(FEATURES)) if apart[..., index].any()]

    def value(lengths: Floats, amplitude: float, noise: float) -> float:
        """Logarithm of the likelihood and of the priors, but for what is always the same."""
        covariance = _covariance(np.exp(-(apart @ (1 / lengths))), amplitude, noise)
        factor = np.linalg.cholesky(covariance)
        scaled = np.linalg.solve(factor, observed)
        prior = np.sum((np.log(lengths / LENGTH) / _SIGMA_LENGTH) ** 2)
        prior += (math.log(amplitude / AMPLITUDE) ** 2 + math.log(noise / NOISE) ** 2) / _SIGMA_HEIGHT**2
        return float(-0.5 * (scaled @ scaled + prior) - np.log(np.diag(factor)).sum())

    lengths, amplitude, noise = np.full(len(FEATURES), LENGTH), AMPLITUDE, NOISE
    best = value(lengths, amplitude, noise)
    for _ in range(_ROUNDS):
        before = best
        for index in differ:
            for length in _LENGTHS:
                tried = lengths.copy()
                tried[index] = length
                if (likelihood := value(tried, amplitude, noise)) > best:
                    best, lengths = likelihood, tried
        heights = [(a, b) for a in _AMPLITUDES for b in _NOISES]
        for a, b in heights:
            if (likelihood := value(lengths, a, b)) > best:
                best, amplitude, noise = likelihood, a, b
        if best - before < 0.01:
            break
    return Residuals(rows, tuple(observed.tolist()), tuple(lengths.tolist()), amplitude, noise)


def _apart(name: str, one: Floats, other: Floats) -> Floats:
    """How far values of a feature are from each other: doublings of a size; 1 for another kind."""
    if name in SIZES:
        return np.asarray(np.abs(np.log2(one) - np.log2(other)))
    return np.asarray(one != other, dtype=np.float64)


def _covariance(likeness: Floats, amplitude: float, noise: float) -> Floats:
    return amplitude**2 * likeness + noise**2 * np.eye(len(likeness))
