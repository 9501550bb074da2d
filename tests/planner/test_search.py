"""Which candidate is run next, when a search stops, and what it believes: with outcomes that are made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from autolaunch_strategies.planner.candidate import Candidate, Candidates
from autolaunch_strategies.planner.profile import Recipe
from autolaunch_strategies.planner.residuals import features, learned
from autolaunch_strategies.planner.search import Ask, Belief, Limits, Search
from autolaunch_strategies.planner.trials import (
    CRASH,
    HANG,
    LOST,
    MEASURED,
    MISCONFIGURED,
    NOT_A_NUMBER,
    OUT_OF_MEMORY,
    TOO_SLOW,
    Outcome,
    Trial,
    append_record,
    fingerprint,
    read_record,
    timing,
)
from tests.support.transformer_profile import transformer_profile

GIB = 2.0**30


class Predicted:
    """Predictions of so many seconds and bytes, without constants: runs tell of what is like them."""

    PROFILE, RECIPE = transformer_profile(8, 256, 4, 128, 512), Recipe(64)

    def __init__(
        self,
        rows: Sequence[Candidate],
        seconds: Sequence[float],
        memory: Sequence[float] | None = None,
        spread: float = 0.1,
    ) -> None:
        self.candidates = Candidates.of(rows)
        self._seconds = np.asarray(seconds, dtype=float)
        self.memory_bytes = np.asarray(memory if memory is not None else [GIB] * len(rows), dtype=float)
        self.spread = np.full(len(rows), spread)
        self.simplicity = np.arange(len(rows), dtype=np.int64)

    def after(self, runs: Sequence[tuple[int, float]]) -> Belief:
        columns = features(self.PROFILE, self.RECIPE, 1e14, self.candidates)
        if not runs:
            return Belief(self._seconds, np.zeros(len(self._seconds)), np.zeros(0))
        rows = np.stack(np.broadcast_arrays(*columns, self._seconds)[:-1], axis=1)
        logs = [float(np.log(seconds / self._seconds[index])) for index, seconds in runs]
        found = learned(rows[[index for index, _ in runs]].tolist(), logs)
        likeness = found.likeness(columns).sum(axis=1) * np.ones(len(self._seconds))
        return Belief(self._seconds * np.exp(found.correction(columns)), likeness, np.asarray(logs))


class Machine:
    """Where trials are run: real seconds per step by index, or an outcome; counts what was asked for."""

    def __init__(self, real: dict[int, float | str | list[float | str]] | Callable[[int], float]) -> None:
        self.real, self.asked = real, list[Ask]()

    def __call__(self, asks: Sequence[Ask]) -> Iterator[Trial]:
        for ask in asks:
            self.asked.append(ask)
            value = self.real(ask.index) if callable(self.real) else self.real[ask.index]
            if isinstance(value, list):
                value = value.pop(0)
            outcome = Outcome(value, f"it was {value}") if isinstance(value, str) else self._outcome(value, ask.steps)
            yield Trial(
                ask.candidate, ask.round, ask.steps, ask.predicted_s, outcome, (f"n={ask.index}",), str(ask.index)
            )

    @staticmethod
    def _outcome(seconds: float, steps: int) -> Outcome:
        return Outcome(MEASURED, "", tuple(seconds * (1 + 0.001 * (step % 3 - 1)) for step in range(steps)))

    @property
    def order(self) -> list[int]:
        return [ask.index for ask in self.asked]


def meshes(count: int) -> list[Candidate]:
    """Candidates that have little in common, each of its own cell."""
    return [Candidate(dp=64, mp=2 ** (n % 4), pp=2 ** (n // 4), cp=1 + n % 2) for n in range(count)]


def test_halving_doubles_steps_and_ends_with_two_in_turn() -> None:
    predicted = [1.0 + 0.01 * n for n in range(8)]
    machine = Machine({n: 1.0 + 0.03 * (7 - n) for n in range(8)})
    search = Search(Predicted(meshes(8), predicted, spread=0.5), Limits(trials=8, steps=3, noise=0.0))
    # Steps that differ as much as the candidates do, so that no round ends the search.
    machine._outcome = lambda seconds, steps: Outcome(
        MEASURED, "", tuple(seconds + 0.3 * (s % 3 - 1) for s in range(steps))
    )
    search.run(machine)
    rounds = [[ask.index for ask in machine.asked if ask.round == number] for number in range(3)]
    assert sorted(rounds[0]) == list(range(8))
    assert sorted(rounds[1]) == [4, 5, 6, 7]
    assert rounds[2] == [7, 6, 7]
    assert [{ask.steps for ask in machine.asked if ask.round == number} for number in range(3)] == [{3}, {6}, {12}]
    best = search.best()
    assert best is not None and best.index == 7
    assert best.timing is not None and best.timing.count == 24


def test_the_predicted_best_is_first() -> None:
    machine = Machine(lambda n: 1.0)
    Search(Predicted(meshes(6), [3, 2, 1, 4, 5, 6]), Limits(trials=1)).run(machine)
    assert machine.order == [2]


def test_what_cannot_win_is_not_run() -> None:
    machine = Machine(lambda n: 1.0 + n)
    search = Search(Predicted(meshes(8), [1, 2, 10, 10, 10, 10, 10, 10]), Limits(trials=8))
    search.run(machine)
    assert set(machine.order) == {0, 1}
    assert any("stopped after 2 of 8 configurations" in note for note in search.notes)


def test_what_may_win_is_run() -> None:
    machine = Machine(lambda n: 1.0 + 0.01 * n)
    Search(Predicted(meshes(8), [1.0 + 0.01 * n for n in range(8)]), Limits(trials=8)).run(machine)
    assert {ask.index for ask in machine.asked if ask.round == 0} == set(range(8))


def test_a_clear_leader_needs_no_further_round() -> None:
    machine = Machine({0: 1.0, 1: 2.0, 2: 3.0})
    search = Search(Predicted(meshes(3), [1.0, 1.01, 1.02]), Limits(trials=3))
    search.run(machine)
    assert {ask.round for ask in machine.asked} == {0}
    assert any("stopped after round 1" in note for note in search.notes)


def test_ties_go_to_the_simpler_one() -> None:
    seconds = {0: 1.015, 1: 1.0, 2: 1.3}
    search = Search(Predicted(meshes(3), [1.0, 1.0, 1.0]), Limits(trials=3, noise=0.02))
    search.run(Machine(seconds))
    assert [item.index for item in search.standings()] == [0, 1, 2]
    search = Search(Predicted(meshes(3), [1.0, 1.0, 1.0]), Limits(trials=3, noise=0.01))
    search.run(Machine(seconds))
    assert [item.index for item in search.standings()] == [1, 0, 2]


def test_few_of_a_kind_at_first() -> None:
    alike = [Candidate(dp=8, microbatches=n) for n in range(1, 7)]
    other = [Candidate(dp=4, mp=2), Candidate(dp=2, mp=4), Candidate(dp=4, pp=2)]
    predicted = [1.0] * 6 + [1.1, 1.2, 1.3]
    machine = Machine(lambda n: 1.0)
    Search(Predicted([*alike, *other], predicted, spread=0.3), Limits(trials=8, rounds=1)).run(machine)
    assert sum(index < 6 for index in machine.order[:4]) == 2
    assert sum(index < 6 for index in machine.order) > 2


def test_neighbours_share_what_a_trial_told() -> None:
    """The predictions are wrong by a factor of 4 for mp: two trials of it, and the others of mp are left."""
    rows = [Candidate(dp=4, mp=2, microbatches=n) for n in (1, 2, 4, 8)] + [
        Candidate(dp=8, microbatches=n) for n in (1, 2, 4, 8)
    ]
    predicted = [1.0, 1.01, 1.02, 1.03, 1.5, 1.51, 1.52, 1.53]
    machine = Machine(lambda n: 4.0 if n < 4 else 1.5 + 0.1 * n)
    Search(Predicted(rows, predicted, spread=0.2), Limits(trials=5, rounds=1)).run(machine)
    assert sum(index < 4 for index in machine.order) <= 2


def test_lack_of_memory_prunes_what_needs_more() -> None:
    memory = [4 * GIB, 5 * GIB, 6 * GIB, 3 * GIB, 2 * GIB]
    machine = Machine({0: OUT_OF_MEMORY, 3: 1.2, 4: 1.3})
    search = Search(Predicted(meshes(5), [1.0, 1.01, 1.02, 1.03, 1.04], memory), Limits(trials=5))
    search.run(machine)
    assert {0, 3, 4} == set(machine.order)
    assert machine.order.count(0) == 1
    best = search.best()
    assert best is not None and best.index == 3


@pytest.mark.parametrize("status", [CRASH, HANG, NOT_A_NUMBER, LOST])
def test_other_failures_are_tried_once_more(status: str) -> None:
    machine = Machine({0: [status, 1.0, 1.0, 1.0, 1.0], 1: [status, status], 2: 1.5})
    search = Search(Predicted(meshes(3), [1.0, 1.01, 1.02]), Limits(trials=3, rounds=1))
    search.run(machine)
    assert (machine.order.count(0), machine.order.count(1), machine.order.count(2)) == (2, 2, 1)
    assert [ask.again for ask in machine.asked if ask.index == 1] == [False, True]
    standings = search.standings()
    assert [(item.index, item.in_contention) for item in standings] == [(0, True), (2, True), (1, False)]


def test_wrong_settings_are_not_tried_again() -> None:
    machine = Machine({0: MISCONFIGURED, 1: 1.0})
    Search(Predicted(meshes(2), [1.0, 1.01]), Limits(trials=2, rounds=1)).run(machine)
    assert machine.order == [0, 1]


def test_a_search_gives_up_when_everything_fails() -> None:
    machine = Machine({n: [CRASH] * 9 for n in range(8)})
    search = Search(Predicted(meshes(8), [1.0 + 0.01 * n for n in range(8)]), Limits(trials=8))
    search.run(machine)
    assert len(set(machine.order)) == 3 and len(machine.order) == 6
    assert search.best() is None
    assert any("given up" in note and "it was crash" in note for note in search.notes)


def test_lack_of_memory_is_no_reason_to_give_up() -> None:
    memory = [8 * GIB, 7 * GIB, 6 * GIB, 5 * GIB, 1 * GIB]
    machine = Machine({0: OUT_OF_MEMORY, 1: OUT_OF_MEMORY, 2: OUT_OF_MEMORY, 3: OUT_OF_MEMORY, 4: 1.0})
    search = Search(Predicted(meshes(5), [1.0, 1.01, 1.02, 1.03, 1.04], memory), Limits(trials=5))
    search.run(machine)
    best = search.best()
    assert best is not None and best.index == 4


def test_one_that_fails_later_is_out() -> None:
    class Later(Machine):
        def __call__(self, asks: Sequence[Ask]) -> Iterator[Trial]:
            for ask in asks:
                self.real = {**self.real, 0: HANG if ask.round else 1.0}
                yield from super().__call__([ask])

    search = Search(Predicted(meshes(3), [1.0, 1.01, 1.02]), Limits(trials=3, rounds=2, noise=0.0))
    search.run(Later({0: 1.0, 1: 1.0005, 2: 1.001}))
    best = search.best()
    assert best is not None and best.index == 1
    assert [item.index for item in search.standings() if not item.in_contention] == [0]


def test_too_slow_is_out_but_teaches() -> None:
    class Slow(Machine):
        def __call__(self, asks: Sequence[Ask]) -> Iterator[Trial]:
            for trial in super().__call__(asks):
                if trial.directory == "0":
                    outcome = Outcome(TOO_SLOW, "not over after 9 s", trial.outcome.seconds)
                    trial = Trial(trial.candidate, 0, 3, 1.0, outcome, trial.overrides, "0")
                yield trial

    search = Search(Predicted(meshes(2), [1.0, 1.5]), Limits(trials=2))
    machine = Slow({0: 9.0, 1: 1.6})
    search.run(machine)
    assert machine.order == [0, 1]
    assert [item.index for item in search.standings()] == [1, 0]


def test_several_at_a_time() -> None:
    sizes = []

    def measure(asks: Sequence[Ask]) -> Iterator[Trial]:
        sizes.append(len(asks))
        return machine(asks)

    machine = Machine(lambda n: 1.0 + 0.0001 * n)
    Search(Predicted(meshes(8), [1.0 + 0.001 * n for n in range(8)]), Limits(trials=8, width=8)).run(measure)
    assert sizes == [8, 4, 3]


def test_time_limit_of_a_trial() -> None:
    machine = Machine(lambda n: 1.0)
    Search(Predicted(meshes(1), [2.0]), Limits(trials=1, steps=3, start_s=120)).run(machine)
    assert machine.asked[0].timeout_s == 120 + 3 * 2.0 * (2 + 1 + 3)
    Search(Predicted(meshes(1), [2.0]), Limits(trials=1, timeout_s=7)).run(machine)
    assert machine.asked[1].timeout_s == 7


# --- going on with an earlier search ---------------------------------------------------------------------------------


def recorded(search: Search) -> list[Trial]:
    return list(search.trials)


@pytest.mark.parametrize("cut", range(0, 15))
def test_a_search_goes_on_where_it_was_cut(cut: int) -> None:
    """However many trials were made before: what is asked for then is what was left."""

    def new(known: Sequence[Trial] = ()) -> Search:
        return Search(Predicted(meshes(8), [1.0 + 0.01 * n for n in range(8)]), Limits(trials=8), known)

    def real(n: int) -> float:
        return 1.0 + 0.004 * ((n * 5) % 8)

    whole, machine = new(), Machine(real)
    whole.run(machine)
    rest, again = new(recorded(whole)[:cut]), Machine(real)
    rest.run(again)
    assert [(ask.index, ask.round) for ask in again.asked] == [(ask.index, ask.round) for ask in machine.asked][cut:]
    assert [item.index for item in rest.standings()] == [item.index for item in whole.standings()]


def test_only_verdicts_are_believed_the_next_time() -> None:
    rows = meshes(3)
    known = [
        Trial(rows[0], 0, 3, 1.0, Outcome(CRASH, "boom")),
        Trial(rows[1], 0, 3, 1.0, Outcome(OUT_OF_MEMORY, "full")),
        Trial(Candidate(dp=7), 0, 3, 1.0, Outcome(MEASURED, "", (1.0, 1.0, 1.0))),
    ]
    machine = Machine({0: 1.0, 2: 1.1})
    memory = [1 * GIB, 4 * GIB, 2 * GIB]
    Search(Predicted(rows, [1.0, 1.01, 1.02], memory), Limits(trials=3, rounds=1), known).run(machine)
    assert sorted(machine.order) == [0, 2]


def test_a_trial_with_too_few_steps_is_made_again() -> None:
    rows = meshes(2)
    known = [Trial(rows[0], 0, 3, 1.0, Outcome(MEASURED, "", (1.0, 1.0, 1.0)))]
    machine = Machine({0: 1.0, 1: 2.0})
    Search(Predicted(rows, [1.0, 1.01]), Limits(trials=2, steps=4, rounds=1), known).run(machine)
    assert sorted(machine.order) == [0, 1]


def test_the_record_survives_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    trials = [
        Trial(Candidate(dp=2), 0, 3, 0.5, Outcome(MEASURED, "", (0.4, 0.5), 1e3, 7), ("mesh=2",), "trials/0"),
        Trial(Candidate(mp=2), 1, 6, 0.25, Outcome(HANG, "not over after 9 s"), ("mesh=1x2",), "trials/1"),
    ]
    append_record(path, trials[0], "here")
    with path.open("a") as file:
        file.write('{"context": "here", "cand')
    append_record(path, trials[1], "here")
    append_record(path, trials[1], "elsewhere")
    assert read_record(path, "here") == trials
    assert read_record(path, "nowhere") == read_record(tmp_path / "absent", "here") == []


def test_fingerprints() -> None:
    assert fingerprint({"a": 1, "b": [1, 2]}) == fingerprint({"b": [1, 2], "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})


def test_timing_of_steps() -> None:
    steady = timing([1.0, 1.0, 1.0, 1.0])
    assert (steady.median, steady.low, steady.high, steady.least, steady.count) == (1.0, 1.0, 1.0, 1.0, 4)
    noisy = timing([1.0, 1.1, 1.2, 5.0])
    assert noisy.median == pytest.approx(1.15)
    assert 1.0 <= noisy.low <= noisy.median <= noisy.high <= 5.0
    assert timing([1.0, 1.1, 1.2, 5.0]) == noisy
