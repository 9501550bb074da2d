"""Runs of the command: each once however often it is asked for, with what it showed and what it left behind."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import warm
from tests.support.ranks import environment, real_torchrun, start

COLUMNS = ("loss", "grad_norm", "lr", "tokens")
"""Of metrics.csv, what a step has on every mesh alike."""


@dataclass(frozen=True)
class Run:
    """A command that has ended."""

    code: int
    screen: str
    """Output and errors, as they came."""
    directory: Path

    @property
    def rows(self) -> list[dict[str, float]]:
        """metrics.csv, without the cells that are empty."""
        with (self.directory / "metrics.csv").open(newline="") as file:
            return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json."""
        return json.loads((self.directory / "summary.json").read_text(encoding="utf-8"))

    @property
    def plan(self) -> dict[str, Any]:
        """plan.yaml."""
        return yaml.safe_load((self.directory / "plan.yaml").read_text(encoding="utf-8"))

    @property
    def checkpoint(self) -> Path:
        """The checkpoint of its last step."""
        return self.checkpoint_at(self.summary["steps"])

    def checkpoint_at(self, step: int) -> Path:
        """The checkpoint of a step."""
        return self.directory / "checkpoints" / f"step_{step:07d}.ckpt"


class Commands:
    """Runs `autolaunch ARGUMENTS`, once however often it is asked for, in a directory of its own below `directory`.

    Args:
        directory: also the working directory of all of them.
        always: arguments of every command; those of a single one come behind them, and win.
        timeout: of one command, in seconds.
        extra: variables of the environment.
    """

    def __init__(self, directory: Path, *always: str, timeout: float = 120, **extra: str) -> None:
        self.directory, self.always, self.timeout = directory, always, timeout
        self.environment = environment(**{"COLUMNS": "100", **extra})
        self._ended: dict[tuple[Any, ...], Run] = {}

    def __call__(
        self,
        *arguments: str | Path,
        code: int | None = 0,
        into: Path | None = None,
        torchrun: int = 0,
        cold: bool = False,
    ) -> Run:
        """The ended command.

        Args:
            code: with which it has to end; None: any.
            into: the output directory.
            torchrun: how many ranks torchrun starts: the real one, in new processes.
            cold: in new processes, whose libraries read the variables of the environment anew.
        """
        key = (arguments, into, torchrun)
        if key not in self._ended:
            directory = into or self.directory / f"run_{len(self._ended)}"
            words = [*self._words([str(argument) for argument in arguments]), f"output_dir={directory}"]
            words = real_torchrun(torchrun, *words) if torchrun else [sys.executable, *words]
            done = start(words, self.timeout, cold=cold or torchrun > 0, cwd=self.directory, env=self.environment)
            self._ended[key] = Run(done.returncode, done.stdout, directory)
        run = self._ended[key]
        assert code is None or run.code == code, f"ended with {run.code}, not {code}:\n{run.screen[-6000:]}"
        return run

    def _words(self, arguments: list[str]) -> list[str]:
        task = arguments[:1] if "=" not in arguments[0] and not arguments[0].startswith("-") else []
        return ["-m", "autolaunch", *task, *self.always, *arguments[len(task) :]]


def assert_same_curve(found: Run, expected: Run, after: int = 0, tolerance: float = 1e-4) -> None:
    """Assert that every step after the step `after` was the same in both runs, and that there are no others."""
    wanted = {int(row["step"]): row for row in expected.rows if row["step"] > after}
    rows = {int(row["step"]): row for row in found.rows}
    assert list(rows) == list(wanted) != []
    for step, row in wanted.items():
        for name in COLUMNS:
            assert rows[step][name] == pytest.approx(row[name], rel=tolerance), f"{name} at step {step}"


def begin(words: Sequence[str], *, cold: bool = False, **options: Any) -> Any:
    """Start a Python process on streams of the caller's, with options that `subprocess.Popen` and `warm.Process` have.

    Args:
        cold: as a new process, with all its imports.
    """
    return (subprocess.Popen if cold or warm.SERVER not in os.environ else warm.Process)(words, **options)


def terminated(words: Sequence[str], directory: Path, lines: int, **options: Any) -> tuple[int, str]:
    """(exit code, output) of a new process that gets SIGTERM when its metrics.csv has so many lines.

    Args:
        words: a command line that writes to `directory`.
    """
    process = begin(words, cold=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    metrics, patience = directory / "metrics.csv", time.monotonic() + 120
    try:
        while not metrics.exists() or metrics.read_text().count("\n") < lines:
            assert time.monotonic() < patience and process.poll() is None, process.communicate()[0]
            time.sleep(0.1)
        process.terminate()
        screen, _ = process.communicate(timeout=100)
    finally:
        process.kill()
        process.wait()
    return process.returncode, screen
