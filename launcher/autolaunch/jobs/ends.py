"""How each job ended, kept in its own directory and in that of its sweep, and the table that a sweep prints."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autolaunch.directories import shown
from autolaunch.job import write_beside
from autolaunch.report.readable import counted
from autolaunch_strategies.config import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

SUMMARY, METRICS = "summary.json", "metrics.csv"

END_FILE = ".hydra/end.json"
"""Where a job says how it ended, in its own directory."""

ENDS = ".ends"
"""The directory in that of a sweep where its jobs say how they ended, each in a file: they may be anywhere, and what
lies below a sweep's directory need not be its own."""


@dataclass(frozen=True)
class JobEnd:
    """How a job ended: what the process that runs it leaves for the one that started the command."""

    number: int
    """Of the job in its sweep."""
    overrides: list[str]
    status: str
    """`finished`, `failed`, `misconfigured`, `interrupted`, `timed_out`."""
    exit_code: int
    directory: str
    message: str = ""
    """What a person is told; empty if it finished."""

    def write(self) -> None:
        """Write it into the job's directory."""
        write_beside(Path(self.directory) / END_FILE, json.dumps(asdict(self)))

    def tell(self, sweep: Path) -> None:
        """Write it into the directory of its sweep, for the process that prints the table."""
        write_beside(sweep / ENDS / f"{self.number}.json", json.dumps(asdict(self)))


def forget_end(directory: Path) -> None:
    """Remove what an earlier job has left in its own directory, before that is run into again.

    Raises:
        ConfigError: it can't be removed.
    """
    _remove(directory / END_FILE)


def forget_ends(sweep: Path) -> None:
    """Remove what the jobs of an earlier sweep have told in its directory.

    Raises:
        ConfigError: it can't be removed.
    """
    for path in (sweep / ENDS).glob("*.json"):
        _remove(path)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(shown(path), f"cannot be removed: {error.strerror}", "a directory of one's own") from None


def read_ends(sweep: Path) -> list[JobEnd]:
    """Every job of a sweep that has ended, by number."""
    ends = [JobEnd(**json.loads(path.read_text(encoding="utf-8"))) for path in (sweep / ENDS).glob("*.json")]
    return sorted(ends, key=lambda end: end.number)


def print_table(jobs: Sequence[JobEnd], sweep_dir: Path, console: Console) -> None:
    """Print one row per job: number, what it has of its own, status, loss, step time, directory in the sweep's."""
    from rich.text import Text

    from autolaunch.report.page import framed_table

    interrupted = sum(job.status == "interrupted" for job in jobs)
    failed = sum(job.exit_code != 0 for job in jobs) - interrupted
    outcome = f"{failed} failed" + (f", {interrupted} interrupted" if interrupted else "")
    heading = Text(f"\n{counted(len(jobs), 'job')}, {outcome}, in {shown(sweep_dir)}", style="bold")
    console.print(heading, soft_wrap=True)
    table = framed_table(console)
    table.add_column("job", justify="right", no_wrap=True)
    table.add_column("overrides", overflow="fold")
    table.add_column("status", no_wrap=True)
    table.add_column("loss", justify="right", no_wrap=True)
    table.add_column("step time", justify="right", no_wrap=True)
    table.add_column("directory", overflow="fold")
    everywhere = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    for job in jobs:
        directory = Path(job.directory)
        summary = read_summary(directory)
        table.add_row(
            str(job.number),
            Text(" ".join(item for item in job.overrides if item not in everywhere)),
            Text(job.status, style="green" if job.exit_code == 0 else "red"),
            _loss(summary),
            _number(summary.get("step_time_s"), "{:.3f} s"),
            str(directory.relative_to(sweep_dir) if directory.is_relative_to(sweep_dir) else directory),
        )
    console.print(table)


def metrics_state(directory: Path) -> tuple[int, int, int] | None:
    """What changes with every row of metrics.csv, whatever clocks say; None if there is no such file."""
    try:
        stat = (directory / METRICS).stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def last_row(directory: Path, before: tuple[int, int, int] | None) -> dict[str, str]:
    """The last row of metrics.csv; empty if the file is as it was `before` a run: its rows are of earlier ones."""
    if metrics_state(directory) in (None, before):
        return {}
    text = (directory / METRICS).read_text(encoding="utf-8")
    whole, _, _ = text.rpartition("\n")  # a killed process leaves half a row behind
    return next(reversed(list(csv.DictReader(whole.splitlines()))), {})


def read_summary(directory: Path) -> dict[str, Any]:
    """summary.json of a run; empty if there is none."""
    path = directory / SUMMARY
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _loss(summary: Mapping[str, Any]) -> str:
    """The loss of a training; of an evaluation the first thing that it measured, with its name."""
    name, value = next(iter((summary.get("metrics") or {}).items()), ("", None))
    if isinstance(summary.get("loss"), int | float) or value is None:
        return _number(summary.get("loss"), "{:.4f}")
    return f"{name} {_number(value, '{:.4f}')}"


def _number(value: Any, form: str) -> str:
    return form.format(value) if isinstance(value, int | float) else "-"
