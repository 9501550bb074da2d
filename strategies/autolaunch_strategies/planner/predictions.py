"""The planner's candidates for a search: those that fit, with what is predicted of them. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autolaunch_strategies.planner.candidate import FIELDS, Candidates
from autolaunch_strategies.planner.fit import Run, fit
from autolaunch_strategies.planner.hardware import Hardware
from autolaunch_strategies.planner.memory import peak_memory
from autolaunch_strategies.planner.plan import TIGHT, simplicity
from autolaunch_strategies.planner.profile import ModelProfile, Recipe
from autolaunch_strategies.planner.residuals import features
from autolaunch_strategies.planner.search import Belief
from autolaunch_strategies.planner.time import step_time
from autolaunch_strategies.planner.uncertainty import spread

Floats = NDArray[np.float64]

SPREAD_OF = 300
"""The spread is computed for so many of the fastest; the others get the median of these."""

LEAST_SPREAD = 0.03


class PlannerPredictions:
    """`search.Predictions` by the models of memory and time; the constants are fitted to the runs."""

    def __init__(self, profile: ModelProfile, recipe: Recipe, hardware: Hardware, spaces: Sequence[Candidates]) -> None:
        """
        Args:
            spaces: what may be run; candidates that several of them hold count once.
        """
        self.profile, self.recipe, self.hardware = profile, recipe, hardware
        rows = np.concatenate([np.stack([getattr(space, name) for name in FIELDS], axis=1) for space in spaces])
        rows = np.unique(rows, axis=0)
        everything = Candidates(**{name: rows[:, column] for column, name in enumerate(FIELDS)})
        memory = peak_memory(profile, recipe, hardware, everything)
        self.limit_bytes = float(memory.limit)
        fits = memory.bytes <= TIGHT * self.limit_bytes
        self.none_fits = len(rows) > 0 and not fits.any()
        if self.none_fits:
            # The prediction may be wrong: those that need the least can be tried.
            fits = memory.bytes <= 1.05 * memory.bytes.min()
        self.candidates = everything.select(fits)
        self.memory_bytes = np.asarray(memory.bytes[fits], dtype=float)
        self.simplicity = simplicity(self.candidates)
        self.spread = self._spread()

    def after(self, runs: Sequence[tuple[int, float]]) -> Belief:
        """The times of all candidates and how far to trust them, learned from runs (index, measured seconds)."""
        observed = [Run(self.profile, self.recipe, self.candidates[index], seconds) for index, seconds in runs]
        fitted = fit(self.hardware, observed)
        seconds = step_time(self.profile, self.recipe, fitted, self.candidates).seconds
        if fitted.residuals is None:
            return Belief(seconds, np.zeros(len(seconds)), np.zeros(0))
        columns = features(self.profile, self.recipe, fitted.peak(self.recipe.compute), self.candidates)
        likeness = fitted.residuals.likeness(columns).sum(axis=1) + np.zeros(len(seconds))
        return Belief(seconds, likeness, np.asarray(fitted.residuals.logs))

    def _spread(self) -> Floats:
        if not len(self.candidates):
            return np.zeros(0)
        seconds = step_time(self.profile, self.recipe, self.hardware, self.candidates).seconds
        fastest = np.argsort(seconds, kind="stable")[:SPREAD_OF]
        known = spread(self.profile, self.recipe, self.hardware, self.candidates.select(fastest))
        result = np.full(len(seconds), float(np.median(known)))
        result[fastest] = known
        return np.maximum(result, LEAST_SPREAD)
