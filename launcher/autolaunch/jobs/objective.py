"""What a sweeper that looks for the best is told of each job: one number that the job has logged. Torch-free."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autolaunch.job import write_beside
from autolaunch.jobs.ends import METRICS, read_summary
from autolaunch_strategies.config import ConfigError, nearest

SPEED = ("mesh", "dp", "mp", "pp", "cp", "ep", "recompute", "recompute_save", "recompute_budget", "compile", "launch")
"""Groups and keys that change how fast a run is, and nothing of what it learns."""

_FILE = ".hydra/objective.json"
_VALIDATION_LOSS = re.compile(r"(val|valid|validation)[_/]loss")


@dataclass(frozen=True)
class Objective:
    """The number that a sweep is about; written to its directory, because jobs may run in other processes."""

    metric: str | None
    """Its name; None for the validation loss, or the training loss where there is no validation."""
    direction: str
    """minimize or maximize."""
    reason: str
    """Why it is this one."""

    def write(self, sweep_dir: Path) -> None:
        """Write it to the directory of a sweep."""
        file = sweep_dir / _FILE
        write_beside(file, json.dumps(asdict(self)))

    def __str__(self) -> str:
        name = self.metric or "the validation loss (the training loss where there is no validation)"
        return f"{self.direction} {name}: {self.reason}"


def objective_of(search: Mapping[str, Any] | None, swept: Collection[str]) -> Objective:
    """What the jobs of a sweep are compared by.

    Args:
        search: the group `search`, if there is one.
        swept: the keys that have several values.
    """
    typed, direction = (search or {}).get("objective"), (search or {}).get("direction", "minimize")
    if typed is not None:
        return Objective(typed, direction, "search.objective")
    learning = [key for key in swept if not _is_speed(key)]
    if swept and not learning:
        return Objective("step_time_s", direction, f"{', '.join(swept)} changes the speed alone (search.objective)")
    return Objective(
        None, direction, f"{', '.join(learning) or 'what is swept'} changes what is learned (search.objective)"
    )


def value_for_sweeper(sweep_dir: Path, directory: Path, code: int) -> float:
    """The number of a job that has ended; the worst there is if it has failed.

    Args:
        sweep_dir: of the sweep.
        directory: of the job.
        code: its exit code.

    Raises:
        ConfigError: a job that has finished has logged nothing of that name.
    """
    file = sweep_dir / _FILE
    if not file.is_file():
        return math.inf  # a sweep that runs every combination asks for no number
    objective = Objective(**json.loads(file.read_text(encoding="utf-8")))
    worst = math.inf if objective.direction == "minimize" else -math.inf
    if code:
        return worst
    logged = dict(_logged(directory))
    name = objective.metric
    if name is None:
        name = next((known for known in logged if _VALIDATION_LOSS.fullmatch(known)), "loss")
        Objective(name, objective.direction, objective.reason).write(sweep_dir)  # the same for every job
    if name not in logged:
        close = nearest(name, logged)
        raise ConfigError(
            f"search.objective={name}",
            "nothing of that name has been logged" + (f"; did you mean {close}?" if close else ""),
            ", ".join(logged) or "names of metrics.csv and summary.json",
            f"search.objective={close}" if close else "",
        )
    return logged[name] if math.isfinite(logged[name]) else worst


def _logged(directory: Path) -> Iterator[tuple[str, float]]:
    """Every number that a job has left, by its name: the last of each in metrics.csv; those of summary.json win."""
    if (directory / METRICS).is_file():
        with (directory / METRICS).open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                yield from ((name, float(value)) for name, value in row.items() if value)
    summary = read_summary(directory)
    for name, value in {**summary, **summary.get("metrics", {})}.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield name, float(value)


def _is_speed(key: str) -> bool:
    return key in ("data.microbatches", "data.num_workers") or key.partition(".")[0] in SPEED
