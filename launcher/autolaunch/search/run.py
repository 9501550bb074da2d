"""A search from the command line to its results: plans, has trials launched, and always tells what it knows."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.utils import JobStatus
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text

from autolaunch.config.command_line import into_open_group, quoted_mesh
from autolaunch.report.terminal import Terminal
from autolaunch.search.outcome import read_outcome
from autolaunch.search.results import print_results, write_best, write_results
from autolaunch.search.space import Base, candidate_overrides, predictions_of, read_base, trial_overrides
from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.planner.search import Ask, Limits, Predictions, Search, Standing
from autolaunch_strategies.planner.trials import WARM_UP, Trial, append_record, fingerprint, read_record

RECORD = "trials.jsonl"
"""Every trial of the searches in a directory, in the order in which they ended; what makes them resumable."""

START_SECONDS, COMPILE_SECONDS = 120.0, 600.0
"""What a trial may take to start, in addition to its steps."""

_APART = ("SlurmLauncher",)
"""Hydra launchers that give every job machines of its own, so that trials can run at the same time."""

_ELSEWHERE = ("SlurmLauncher",)
"""Hydra launchers whose jobs run on other machines than the command."""


def run_search(
    config: DictConfig, loader: ConfigLoader, launcher: Launcher, arguments: Sequence[str]
) -> Standing | None:
    """Search as `config.search` says and return the best; None if nothing could be measured.

    `results.csv`, `best.yaml` and the table are there however this ends, be it by Ctrl-C.

    Raises:
        ConfigError, ConfigErrors: nothing was run; what was typed cannot be searched.
    """
    directory = Path(config.hydra.sweep.dir).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    console = Terminal()
    kind = type(launcher).__name__
    started = time.monotonic()
    _check_launcher(launcher)
    base = read_base(config, loader, arguments, directory, kind not in _ELSEWHERE)
    predictions = predictions_of(base)
    wanted: dict[str, Any] = dict(base.job.config["search"])
    limits = Limits(
        trials=wanted["trials"],
        steps=wanted["steps"],
        rounds=wanted["rounds"],
        keep=wanted["keep"],
        noise=wanted["noise"],
        timeout_s=wanted["timeout"],
        start_s=COMPILE_SECONDS if predictions.candidates.compile.any() else START_SECONDS,
        width=wanted["trials"] if kind in _APART else 1,
    )
    trials = _Trials(base, launcher, directory, console)
    search = Search(predictions, limits, trials.known(wanted["resume"]))
    _tell_start(console, base, predictions, search, time.monotonic() - started)
    best: Standing | None = None
    try:
        search.run(trials.measure)
    finally:
        best = _tell_end(console, base, search, directory)
    return best


def _check_launcher(launcher: Launcher) -> None:
    """Refuse what would start every trial several times: a job of a launcher starts the ranks of a trial by itself."""
    parameters = getattr(launcher, "params", {})
    for name in ("nodes", "tasks_per_node"):
        if (count := parameters.get(name) or 1) > 1:
            raise ConfigError(
                f"hydra.launcher.{name}={count}",
                "a job of a search is one process on one node, which starts the ranks of its trial",
                "1, with the GPUs or cores of all ranks in hydra.launcher.gpus_per_node or cpus_per_task",
                f"hydra.launcher.{name}=1",
            )


class _Trials:
    """Runs what a search asks for as jobs of a Hydra launcher, and keeps the record of them."""

    def __init__(self, base: Base, launcher: Launcher, directory: Path, console: Console) -> None:
        self.base, self.launcher, self.directory, self.console = base, launcher, directory, console
        self.context = fingerprint(base.facts)
        self._number = _next_number(directory)
        # Its own lines about what it launches would be between ours.
        logging.getLogger(type(launcher).__module__.rpartition(".")[0]).setLevel(logging.WARNING)

    def known(self, resume: str | None) -> list[Trial]:
        """The trials that were made before, here and in the directory of an earlier search.

        Raises:
            ConfigError: there is none.
        """
        trials = read_record(self.directory / RECORD, self.context)
        if resume is not None:
            path = Path(resume)
            where = f"search.resume={resume}"
            if not (path / RECORD).is_file():
                raise ConfigError(where, f"no {RECORD} is in it", "the output directory of a search")
            if path.resolve() != self.directory.resolve():
                # Their directories are not below this one.
                earlier = read_record(path / RECORD, self.context)
                trials += [replace(trial, directory=str(path.resolve() / trial.directory)) for trial in earlier]
        return trials

    def measure(self, asks: Sequence[Ask]) -> Iterator[Trial]:
        """Launch the runs, wait for them, and read from their directories what became of them."""
        candidates = [candidate_overrides(self.base, ask.candidate) for ask in asks]
        first, self._number = self._number, self._number + len(asks)
        batch = [
            self._overrides(ask, overrides, first + position)
            for position, (ask, overrides) in enumerate(zip(asks, candidates, strict=True))
        ]
        error = ""
        try:
            returned: Sequence[Any] = self.launcher.launch(batch, initial_job_idx=first)
        except Exception as raised:
            # submitit raises for the whole batch if one of its jobs died; the others have left their results.
            returned, error = [], f"{type(raised).__name__}: {' '.join(str(raised).split())[:500]}"
        for position, (ask, overrides) in enumerate(zip(asks, candidates, strict=True)):
            directory = self.directory / _subdirectory(first + position)
            message = error
            if position < len(returned) and returned[position].status != JobStatus.COMPLETED:
                message = message or f"{returned[position]._return_value}"
            outcome = read_outcome(directory, ask.steps, message)
            name = str(directory.relative_to(self.directory))
            trial = Trial(ask.candidate, ask.round, ask.steps, ask.predicted_s, outcome, tuple(overrides), name)
            append_record(self.directory / RECORD, trial, self.context)
            self._tell(trial, ask.again)
            yield trial

    def _overrides(self, ask: Ask, candidate: list[str], number: int) -> list[str]:
        typed = trial_overrides(self.base, candidate, WARM_UP + ask.steps, ask.timeout_s)
        typed.append(f"hydra.sweep.subdir={_subdirectory(number)}")
        return [into_open_group(quoted_mesh(item)) for item in typed]

    def _tell(self, trial: Trial, again: bool) -> None:
        outcome = trial.outcome
        words = f"{' '.join(trial.overrides)}: "
        if outcome.seconds:
            before = "before" if trial.round else "predicted"
            words += f"{median(outcome.seconds):.4g} s per step ({before} {trial.predicted_s:.4g} s)"
        else:
            words += f"{outcome.status}: {outcome.reason}"
        prefix = "  again: " if again else "  "
        self.console.print(Text(prefix + words, style="" if outcome.seconds else "red"), soft_wrap=True)


def _subdirectory(number: int) -> str:
    return f"trials/{number}"


def _next_number(directory: Path) -> int:
    """The first number that no directory of a trial has."""
    used = [int(path.name) for path in (directory / "trials").glob("*") if path.name.isdecimal()]
    return max(used, default=-1) + 1


def _tell_start(console: Console, base: Base, predictions: Predictions, search: Search, seconds: float) -> None:
    count, known = len(predictions.candidates), len(search.trials)
    machines = f"{base.hardware.name}: {base.hardware.devices} x {base.hardware.device}, {base.hardware.origin}"
    lines = [
        f"{count} configurations of {base.profile.name} are predicted to fit ({machines}; {seconds:.1f} s); up to "
        f"{search.limits.trials} of them are tried for {search.limits.steps} steps and more"
    ]
    lines += [f"{known} trials are known from before"] if known else []
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def _tell_end(console: Console, base: Base, search: Search, directory: Path) -> Standing | None:
    standings, best = search.standings(), search.best()
    write_results(directory, standings)
    path = None
    if best is not None:
        timed = best.timing
        assert timed is not None
        facts = {
            "search": {
                "chosen": " ".join(best.trials[-1].overrides),
                "step_time_s": timed.median,
                "confidence_95": [timed.low, timed.high],
                "predicted_s": best.trials[0].predicted_s,
                "configurations": len(standings),
                "notes": list(search.notes),
            }
        }
        path = write_best(directory, base.job, best, facts)
    print_results(standings, search.notes, directory, path, console)
    sys.stdout.flush()
    return best
