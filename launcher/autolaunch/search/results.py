"""What a search leaves behind: results.csv, best.yaml, and the table on the terminal. Torch-free."""

from __future__ import annotations

import csv
import io
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autolaunch.directories import shown
from autolaunch.job import ResolvedJob, write_beside
from autolaunch.report.page import framed_table
from autolaunch.report.plan_file import write_plan
from autolaunch.report.readable import readable_bytes
from autolaunch_strategies.config import as_typed
from autolaunch_strategies.planner.search import Standing
from autolaunch_strategies.planner.trials import MEASURED, OUT_OF_MEMORY, Trial, timing

RESULTS, BEST = "results.csv", "best.yaml"

COLUMNS = (
    "rank",
    "overrides",
    "status",
    "reason",
    "predicted_s",
    "measured_s",
    "low_s",
    "high_s",
    "tokens_per_second",
    "memory_bytes",
    "steps",
    "round",
    "fitted_s",
    "directory",
)
"""Of results.csv, a row per trial. predicted_s: before the trial; fitted_s: fitted to all trials;
low_s and high_s: 95 % confidence of the median measured_s."""

_OF_THE_CANDIDATE = ("mesh", "dp", "mp", "pp", "cp", "ep", "recompute", "compile", "data")
"""Keys of the config that best.yaml has from the trial; the others are those of the command line."""


def write_results(directory: Path, standings: Sequence[Standing]) -> Path:
    """Write `<directory>/results.csv` and return its path: complete, or what was there before."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for rank, standing in enumerate(standings, start=1):
        for trial in standing.trials:
            outcome = trial.outcome
            timed = timing(outcome.seconds) if outcome.seconds else None
            writer.writerow(
                {
                    "rank": rank if standing.timing else "",
                    "overrides": " ".join(trial.overrides),
                    "status": outcome.status,
                    "reason": outcome.reason,
                    "predicted_s": _digits(trial.predicted_s),
                    "measured_s": _digits(timed.median) if timed else "",
                    "low_s": _digits(timed.low) if timed else "",
                    "high_s": _digits(timed.high) if timed else "",
                    "tokens_per_second": _digits(outcome.tokens_per_second),
                    "memory_bytes": outcome.memory_bytes if outcome.memory_bytes is not None else "",
                    "steps": len(outcome.seconds),
                    "round": trial.round,
                    "fitted_s": _digits(standing.predicted_s),
                    "directory": trial.directory,
                }
            )
    path = directory / RESULTS
    write_beside(path, text.getvalue())
    return path


def write_best(directory: Path, base: ResolvedJob, best: Standing, facts: Mapping[str, Any]) -> Path:
    """Write `<directory>/best.yaml`, an experiment file that runs the best as it was typed, and return its path.

    Args:
        directory: of the search.
        base: the job that was typed.
        facts: what the file's reader may want to know; not read back.
    """
    trial = next(item for item in reversed(best.trials) if item.outcome.status == MEASURED)
    job = ResolvedJob.read(directory / trial.directory / ".hydra" / "job.json")
    own = {key: value for key, value in base.config.items() if key not in ("search", "cluster", "why", "full")}
    config = {**own, **{key: job.config[key] for key in _OF_THE_CANDIDATE}, "output_dir": str(job.output_dir)}
    groups = {group: option for group, option in base.choices.items() if group not in ("search", "cluster")}
    choices = groups | {group: job.choices[group] for group in _OF_THE_CANDIDATE if group in job.choices}
    with tempfile.TemporaryDirectory(dir=directory) as beside:
        return write_plan(beside, config, dict(facts), choices).replace(directory / BEST)


def print_results(
    standings: Sequence[Standing], notes: Sequence[str], directory: Path, best: Path | None, console: Console
) -> None:
    """Print one row per configuration, the best first, what failed and why, and what to type next."""
    failed = sum(not item.in_contention for item in standings)
    runs = sum(len(item.trials) for item in standings)
    counted = f"{_count(len(standings), 'configuration')} in {_count(runs, 'run')}"
    heading = f"\n{counted}, {failed} without a result, in {shown(directory)}"
    console.print(Text(heading, style="bold"), soft_wrap=True)
    if standings:
        console.print(_table(standings, console))
    for item in standings:
        trial = item.trials[-1]
        if trial.outcome.reason:
            where = f" ({shown(directory / trial.directory)})" if trial.directory else ""
            words = f"{' '.join(trial.overrides)}: {trial.outcome.status}: {trial.outcome.reason}{where}"
            console.print(Text(words, style="" if trial.outcome.status == OUT_OF_MEMORY else "red"), soft_wrap=True)
        elif again := next((other for other in item.trials if other.outcome.status != MEASURED), None):
            words = f"{' '.join(trial.overrides)}: ran the second time; the first time {again.outcome.reason}"
            console.print(Text(words, style="yellow"), soft_wrap=True)
    for note in notes:
        console.print(Text(note), soft_wrap=True)
    if best is not None:
        console.print(
            Text(f"run the best:  autolaunch {as_typed('experiment', shown(best))}", style="green"), soft_wrap=True
        )
    else:
        console.print(Text("no configuration was measured", style="red"), soft_wrap=True)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _table(standings: Sequence[Standing], console: Console) -> Table:
    table = framed_table(console)
    table.add_column("", justify="right")
    table.add_column("configuration", overflow="fold")
    for name in ("step time", "predicted", "tokens/s", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    said = [set(item.trials[-1].overrides) for item in standings]
    everywhere = set.intersection(*said) if len(said) > 1 else set()
    for rank, item in enumerate(standings, start=1):
        trial = item.trials[-1]
        measured = [other.outcome for other in item.trials if other.outcome.seconds]
        table.add_row(
            str(rank) if item.timing else "",
            Text(" ".join(text for text in trial.overrides if text not in everywhere)),
            _outcome(item),
            f"{item.trials[0].predicted_s:.4g} s",
            f"{tokens:,.0f}" if measured and (tokens := measured[-1].tokens_per_second) else "-",
            readable_bytes(memory) if (memory := _memory(item.trials)) is not None else "-",
        )
    return table


def _outcome(item: Standing) -> Text:
    if item.in_contention and item.timing:
        return Text(f"{item.timing.median:.4g} s")
    return Text(item.trials[-1].outcome.status, style="red")


def _memory(trials: Sequence[Trial]) -> int | None:
    return max((item.outcome.memory_bytes for item in trials if item.outcome.memory_bytes is not None), default=None)


def _digits(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
