"""How each job ended, kept in its own directory, and the table that a sweep prints at the end."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autolaunch.directories import shown
from autolaunch.job import write_beside

SUMMARY, METRICS = "summary.json", "metrics.csv"

END_FILE = ".hydra/end.json"
"""Where a job says how it ended, in its own directory."""


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
        """Write it into the job's directory, for the process that prints the table."""
        path = Path(self.directory) / END_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        write_beside(path, json.dumps(asdict(self)))


def forget_ends(directory: Path) -> None:
    """Remove what earlier jobs have left in this directory or below, before it is run into again."""
    for path in directory.rglob(END_FILE):
        path.unlink()


def read_ends(directory: Path) -> list[JobEnd]:
    """Every job that has ended in this directory or below, by number."""
    ends = [JobEnd(**json.loads(path.read_text(encoding="utf-8"))) for path in directory.rglob(END_FILE)]
    return sorted(ends, key=lambda end: end.number)


def print_table(jobs: Sequence[JobEnd], sweep_dir: Path, console: Console) -> None:
    """Print one row per job: number, what it has of its own, status, loss, step time, directory in the sweep's."""
    failed = sum(job.exit_code != 0 for job in jobs)
    console.print(Text(f"\n{len(jobs)} jobs, {failed} failed, in {shown(sweep_dir)}", style="bold"), soft_wrap=True)
    table = Table()
    table.add_column("job", justify="right")
    table.add_column("overrides", overflow="fold")
    table.add_column("status")
    table.add_column("loss", justify="right")
    table.add_column("step time", justify="right")
    table.add_column("directory", overflow="fold")
    everywhere = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    for job in jobs:
        summary = read_summary(Path(job.directory))
        table.add_row(
            str(job.number),
            Text(" ".join(item for item in job.overrides if item not in everywhere)),
            Text(job.status, style="green" if job.exit_code == 0 else "red"),
            _number(summary.get("loss"), "{:.4f}"),
            _number(summary.get("step_time_s"), "{:.3f} s"),
            str(Path(job.directory).relative_to(sweep_dir)),
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


def _number(value: Any, form: str) -> str:
    return form.format(value) if isinstance(value, int | float) else "-"
