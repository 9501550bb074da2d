"""Which candidate to run next, for how long, and when to stop: successive halving over the planner's predictions.

The predictions are fitted to every trial that has ended, so that each choice knows all of them. Runs are made by the
caller; nothing here starts a process, and the same outcomes lead to the same choices. Torch-free.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autolaunch_strategies.planner.candidate import Candidate, Candidates
from autolaunch_strategies.planner.trials import (
    MEASURED,
    OUT_OF_MEMORY,
    RETRIED,
    VERDICTS,
    WARM_UP,
    Timing,
    Trial,
    timing,
)

Floats = NDArray[np.float64]

ALIKE_AT_FIRST = 2
"""Candidates of one cell (mp, pp, cp, kind of recomputation) in the first half of the trials."""

SAME_END = 3
"""Candidates after which a search gives up that has not measured a single one: it is not their fault."""

TELLS = 2.0
"""How much a run tells of what is wholly like it, beside what is known of it before any run (both as 1 / variance)."""


@dataclass(frozen=True)
class Belief:
    """What is believed of the candidates of a search after some runs."""

    seconds: Floats
    """[n] per step."""
    likeness: Floats
    """[n]: to the runs, between 0 and 1 for each of them, summed up."""
    unexplained: Floats
    """[runs]: logarithm of measured over predicted seconds, by what all candidates have in common (constants)."""


class Predictions(Protocol):
    """What the planner knows of the candidates of a search, in columns [n]."""

    candidates: Candidates
    memory_bytes: Floats
    """Of the fullest device."""
    spread: Floats
    """Standard deviation of the logarithm of the predicted seconds, before any trial."""
    simplicity: NDArray[np.int64]
    """Smaller is simpler; decides between candidates that are equally fast."""

    def after(self, runs: Sequence[tuple[int, float]]) -> Belief:
        """Fitted to runs (index of the candidate, measured seconds)."""
        ...


@dataclass(frozen=True)
class Limits:
    """How much a search may do."""

    trials: int = 8
    """Candidates to run at most."""
    steps: int = 3
    """Timed steps of the first round; every further round doubles them."""
    rounds: int = 3
    keep: float = 0.5
    """Share of the candidates that goes on to the next round."""
    noise: float = 0.02
    """Differences below this share are ties."""
    timeout_s: float | None = None
    """Of a trial; None: `start_s` and three times what is predicted."""
    start_s: float = 120.0
    width: int = 1
    """Trials that may run at the same time without disturbing each other."""


@dataclass(frozen=True)
class Ask:
    """One run that the search wants."""

    index: int
    """The place of the candidate in `Predictions.candidates`."""
    candidate: Candidate
    round: int
    steps: int
    predicted_s: float
    timeout_s: float
    again: bool = False
    """It failed just now, and is tried once more."""


Measure = Callable[[Sequence[Ask]], Iterable[Trial]]
"""Runs what is asked for, and gives the trials in that order; each at once when it is known."""


@dataclass(frozen=True)
class Standing:
    """Where a candidate stands among those that were run."""

    index: int
    candidate: Candidate
    trials: tuple[Trial, ...]
    timing: Timing | None
    """Of its last round that was measured."""
    in_contention: bool
    """Its last run was measured, none failed for good."""
    predicted_s: float
    """Fitted to all trials."""


@dataclass
class Search:
    """A search while it goes on: `trials` holds what is known, also after an exception has ended it."""

    predictions: Predictions
    limits: Limits
    known: Sequence[Trial] = ()
    """Trials of earlier searches under the same conditions; they are not made again."""
    trials: list[Trial] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Why it stopped, and what a person should know; sentences."""
    _runs: dict[int, list[Trial]] = field(default_factory=dict)
    _spare: dict[tuple[int, int], list[Trial]] = field(default_factory=dict)
    _seconds: Floats | None = None
    _sigma: Floats | None = None

    def __post_init__(self) -> None:
        for trial in self.known:
            index = self._index_of(trial.candidate)
            if index is None or trial.outcome.status not in VERDICTS or trial.steps < self._steps(trial.round):
                continue
            if trial.round == 0:
                self._take(index, trial)
            else:
                self._spare.setdefault((index, trial.round), []).append(trial)

    def run(self, measure: Measure) -> None:
        """Ask for runs until it is known which candidate is best, or all that is allowed was done."""
        if not self._first_round(measure):
            return
        for number in range(1, self.limits.rounds):
            contenders = self._contenders(number)
            if len(contenders) < 2:
                break
            # Two runs of one around a run of the other: what drifts on the machine counts for neither.
            order = [contenders[0], contenders[1], contenders[0]] if len(contenders) == 2 else contenders
            self._ask([self._wish(index, number) for index in order], measure)

    def standings(self) -> list[Standing]:
        """All candidates that were run, the best first."""
        seconds, _ = self._predicted()
        standings = [
            Standing(
                index,
                self.predictions.candidates[index],
                tuple(trials),
                self._timing(index),
                self._is_in(index),
                float(seconds[index]),
            )
            for index, trials in self._runs.items()
        ]
        ordered = [item for number in reversed(range(self.limits.rounds)) for item in self._ordered(number)]
        place = {index: number for number, index in enumerate(ordered)}

        def key(item: Standing) -> tuple[float, ...]:
            slow = item.timing.median if item.timing else math.inf
            return (not item.in_contention, place.get(item.index, math.inf), item.timing is None, slow)

        return sorted(standings, key=key)

    def best(self) -> Standing | None:
        """The candidate to use; None if nothing was measured. One that failed later on only if there is no other."""
        standings = [item for item in self.standings() if any(_is_measured(trial) for trial in item.trials)]
        return standings[0] if standings else None

    # --- the first round: which candidates -----------------------------------------------------------------------

    def _first_round(self, measure: Measure) -> bool:
        """Run candidates until enough were run; False if it makes no sense to go on at all."""
        while not self._is_decided():
            wanted = min(self.limits.width, self.limits.trials - len(self._runs))
            picked = self._picked(wanted)
            if not picked:
                break
            self._ask([self._wish(index, 0) for index in picked], measure)
            if self._gives_up():
                return False
        return True

    def _is_decided(self) -> bool:
        if len(self._runs) >= self.limits.trials:
            return True
        measured = [index for index in self._runs if self._is_in(index)]
        if len(measured) < 2:
            return False
        best = min(item.median for index in measured if (item := self._timing(index)))
        seconds, sigma = self._predicted()
        still = self._untried()
        if not still.any():
            return True
        if float((seconds * np.exp(-2 * sigma))[still].min()) <= best:
            return False
        self.notes.append(
            f"stopped after {len(self._runs)} of {self.limits.trials} configurations: of the others the fastest is "
            f"predicted at {float(seconds[still].min()):.3g} s, and {best:.3g} s was measured"
        )
        return True

    def _gives_up(self) -> bool:
        failed = [trials[-1] for trials in self._runs.values()]
        if len(failed) < SAME_END or any(trial.outcome.status in VERDICTS for trial in failed):
            return False
        self.notes.append(
            f"given up: the first {len(failed)} configurations all failed, and none for lack of memory; the last: "
            f"{failed[-1].outcome.reason or failed[-1].outcome.status}"
        )
        return True

    def _picked(self, count: int) -> list[int]:
        """The next candidates: those that may be fastest, few of one kind as long as little is known."""
        seconds, sigma = self._predicted()
        nothing_known = not any(self._is_in(index) for index in self._runs)
        score = np.where(self._untried(), seconds * np.exp(0.0 if nothing_known else -sigma), np.inf)
        cells = self._cells()
        counts = Counter(int(cells[index]) for index in self._runs)
        picked: list[int] = []
        for _ in range(count):
            allowed = score
            if len(self._runs) + len(picked) < math.ceil(self.limits.trials / 2):
                full = [cell for cell, number in counts.items() if number >= ALIKE_AT_FIRST]
                varied = np.where(np.isin(cells, full), np.inf, score)
                allowed = varied if np.isfinite(varied).any() else score
            # The first of equals in the order of simplicity.
            best = np.lexsort((self.predictions.simplicity, allowed))[0]
            if not np.isfinite(allowed[best]):
                break
            picked.append(int(best))
            counts[int(cells[best])] += 1
            score[best] = np.inf
        return picked

    def _untried(self) -> NDArray[np.bool_]:
        """Which candidates were not run, and need less memory than those that had too little."""
        still = np.ones(len(self.predictions.candidates), dtype=bool)
        still[list(self._runs)] = False
        full = [index for index, trials in self._runs.items() if trials[-1].outcome.status == OUT_OF_MEMORY]
        if full:
            # After the second, in bigger steps: what is predicted too low for some is too low for their neighbours.
            limit = self.predictions.memory_bytes[full].min() * 0.95 ** max(0, len(full) - 2)
            still &= self.predictions.memory_bytes < limit
        return still

    def _cells(self) -> NDArray[np.int64]:
        columns = self.predictions.candidates
        keys = np.stack([columns.mp, columns.pp, columns.cp, np.sign(columns.recompute)], axis=1)
        return np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)

    # --- what is known -------------------------------------------------------------------------------------------

    def _predicted(self) -> tuple[Floats, Floats]:
        """(seconds, standard deviation of their logarithm) of every candidate [n], after all trials so far."""
        if self._seconds is None or self._sigma is None:
            measured = [(index, item.median) for index in self._runs if (item := self._timing(index))]
            belief = self.predictions.after(measured)
            self._seconds = belief.seconds
            # Predictions that have been further off than they should are so elsewhere, too.
            expected = self.predictions.spread[[index for index, _ in measured]]
            scale = max(1.0, math.sqrt(np.sum((belief.unexplained / expected) ** 2) / max(1, len(measured))))
            self._sigma = scale * self.predictions.spread / np.sqrt(1 + TELLS * belief.likeness)
        return self._seconds, self._sigma

    def _timing(self, index: int) -> Timing | None:
        """The step times of a candidate in its last round that timed any; None if no round did."""
        timed = [trial for trial in self._runs.get(index, ()) if trial.outcome.seconds]
        if not timed:
            return None
        last = max(trial.round for trial in timed)
        return timing([value for trial in timed if trial.round == last for value in trial.outcome.seconds])

    def _round(self, index: int) -> int:
        return max((trial.round for trial in self._runs[index] if _is_measured(trial)), default=-1)

    def _is_in(self, index: int) -> bool:
        return _is_measured(self._runs[index][-1])

    # --- further rounds: which of them is best -------------------------------------------------------------------

    def _ordered(self, number: int) -> list[int]:
        """Candidates whose last measured round is `number`, fastest first, but of equally fast ones the simplest."""
        runs = [index for index in self._runs if self._round(index) == number]
        timings = {index: item for index in runs if (item := self._timing(index))}
        timings = {index: item for index, item in timings.items() if self._is_in(index)} or timings
        by_time = sorted(timings, key=lambda index: timings[index].median)
        if not by_time:
            return []
        bound = timings[by_time[0]].median * (1 + self.limits.noise)
        ties = [index for index in by_time if timings[index].median <= bound]
        simplest = sorted(ties, key=lambda index: int(self.predictions.simplicity[index]))
        return simplest + by_time[len(ties) :]

    def _contenders(self, number: int) -> list[int]:
        """Who runs in round `number`: the better share of the round before, without those that are beaten already."""
        before = [index for index in self._ordered(number - 1) if self._is_in(index)]
        if len(before) < 2:
            return before
        kept = before[: max(2, math.ceil(len(before) * self.limits.keep))]
        timings = {index: item for index in kept if (item := self._timing(index))}
        fastest = min(timings.values(), key=lambda item: item.median)
        bound = fastest.high * (1 + self.limits.noise)
        open_ones = [index for index in kept if timings[index].low <= bound]
        if len(open_ones) == 1:
            self.notes.append(
                f"stopped after round {number}: the next best is slower by more than the steps differ among themselves"
            )
        return open_ones

    # --- runs ----------------------------------------------------------------------------------------------------

    def _steps(self, number: int) -> int:
        return self.limits.steps * 2**number

    def _wish(self, index: int, number: int, again: bool = False) -> Ask:
        known = self._timing(index)
        seconds = known.median if known else float(self._predicted()[0][index])
        steps = self._steps(number)
        # One more: the first step is the longest.
        timeout = self.limits.timeout_s or self.limits.start_s + 3 * seconds * (WARM_UP + 1 + steps)
        return Ask(index, self.predictions.candidates[index], number, steps, seconds, timeout, again)

    def _ask(self, asks: Sequence[Ask], measure: Measure) -> None:
        """Have runs made, as many at a time as may be; those that fail for no known reason once more."""
        for start in range(0, len(asks), self.limits.width):
            fresh = [ask for ask in asks[start : start + self.limits.width] if not self._replayed(ask)]
            failed = self._measured(fresh, measure)
            self._measured([self._wish(ask.index, ask.round, again=True) for ask in failed], measure)

    def _replayed(self, ask: Ask) -> bool:
        spare = self._spare.get((ask.index, ask.round))
        if not spare:
            return False
        self._take(ask.index, spare.pop(0))
        return True

    def _measured(self, asks: Sequence[Ask], measure: Measure) -> list[Ask]:
        failed = []
        for ask, trial in zip(asks, measure(asks) if asks else (), strict=True):
            self._take(ask.index, trial)
            if trial.outcome.status in RETRIED:
                failed.append(ask)
        return failed

    def _take(self, index: int, trial: Trial) -> None:
        self.trials.append(trial)
        self._runs.setdefault(index, []).append(trial)
        self._seconds = self._sigma = None

    def _index_of(self, candidate: Candidate) -> int | None:
        columns = self.predictions.candidates
        same = np.ones(len(columns), dtype=bool)
        for name, value in vars(candidate).items():
            same &= getattr(columns, name) == value
        places = np.flatnonzero(same)
        return int(places[0]) if len(places) else None


def _is_measured(trial: Trial) -> bool:
    return trial.outcome.status == MEASURED
