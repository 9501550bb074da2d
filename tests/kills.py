"""Runs that are killed with SIGKILL at random points, on several meshes, and resumed: the curve is the whole one.

    python -m tests.kills --trials 60 [--seed 0] [--warm]

A trial starts `autolaunch mesh=...`, waits for a phase (start, a step, a checkpoint being written, a validation, the
end), kills a rank or the parent a random moment later, looks whether a process is left, and runs the same command
with `ckpt_path=last`. Losses, gradient norms, learning rates and tokens of every step are compared with those of one
process that nobody killed. Printed is a line for each trial; the exit code is the number of those that went wrong.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np

from autolaunch_strategies.checkpoint.files import complete_checkpoints, read_manifest
from tests.support import warm
from tests.support.commands import Commands, Run, assert_same_curve, begin

STEPS = 9
MESHES = ("1", "2", "1x2", "1x1x2", "1x1x1x2")
PHASES = ("step", "saving", "start", "validation", "end")
GONE_SECONDS = 15.0
"""How long ranks may outlive a parent or another rank that was killed."""


class Slow(pl.Callback):
    """Gives every step a length, and writes down which processes the ranks are and when they validate."""

    def __init__(self, seconds: float = 0.05) -> None:
        self.seconds = seconds

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Write this rank's process id."""
        directory = Path(trainer.default_root_dir) / "processes"
        directory.mkdir(exist_ok=True)
        (directory / str(trainer.global_rank)).write_text(str(os.getpid()))

    def on_train_batch_start(self, *_: Any) -> None:
        """Wait."""
        time.sleep(self.seconds)

    def on_validation_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Say so, and wait."""
        (Path(trainer.default_root_dir) / "processes" / "validates").touch()
        time.sleep(self.seconds)


@dataclass(frozen=True)
class Trial:
    """What was killed, when, and what became of it."""

    mesh: str
    phase: str
    victim: str
    reached: int
    """Rows of metrics.csv when it was killed."""
    resumed_from: int | None
    problem: str | None
    seconds: float

    def __str__(self) -> str:
        start = "from scratch" if self.resumed_from is None else f"from step {self.resumed_from}"
        return (
            f"mesh={self.mesh:8} {self.phase:10} {self.victim:7} killed after step {self.reached}, resumed {start:12} "
            f"{self.seconds:5.1f} s  {self.problem or 'exact'}"
        )


class Harness:
    """Runs trials in directories of their own below `directory`.

    Args:
        seed: of what is chosen.
    """

    def __init__(self, directory: Path, seed: int = 0) -> None:
        np.save(directory / "tokens.npy", np.random.default_rng(0).integers(0, 257, 5000).astype(np.uint16))
        self.directory, self.random = directory, random.Random(seed)
        self.commands = Commands(
            directory,
            *("model.num_layers=2", "model.hidden_size=32", "model.intermediate_size=64", "model.num_heads=4"),
            *("model.num_kv_heads=2", "data=tokens", "data.path=tokens.npy", "data.seq_len=32", "data.batch_size=8"),
            *(f"scheduler.total_steps={STEPS}", f"trainer.max_steps={STEPS}", "trainer.accelerator=cpu"),
            *("checkpoint.every_n_steps=2", "trainer.val_check_interval=3", "trainer.check_val_every_n_epoch=null"),
            *("trainer.limit_val_batches=2", "+callbacks.slow={_target_: tests.kills.Slow}"),
            timeout=200,
        )
        self._number = itertools.count()

    def trial(self, mesh: str, phase: str) -> Trial:
        """Kill a run in a phase, resume it, compare."""
        started = time.monotonic()
        directory = self.directory / f"trial_{next(self._number)}"
        arguments = [f"mesh={mesh}", *(["checkpoint.asynchronous=true"] if self.random.random() < 0.3 else [])]
        log = self.directory / f"{directory.name}.log"
        with log.open("wb") as output:
            words = [sys.executable, "-m", "autolaunch", *self.commands.always, *arguments, f"output_dir={directory}"]
            process = begin(
                words, cold=warm.SERVER not in os.environ, cwd=self.directory, env=self.commands.environment,
                stdin=output, stdout=output, stderr=output,
            )  # fmt: skip
            try:
                self._wait_for(phase, directory, process)
                victim, pid = self._victim(directory, process.pid, phase)
                reached = rows(directory)
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    victim = "nobody"  # it has just ended
                problem = self._left_behind(directory, process)
            finally:
                process.kill()
                process.wait()
        kept = complete_checkpoints(directory / "checkpoints")
        resumed_from = read_manifest(kept[-1])["step"] if kept else None
        if problem is None:
            problem = self._difference([*arguments, "ckpt_path=last"], directory)
        if problem is None:
            shutil.rmtree(directory)
        return Trial(mesh, phase, victim, reached, resumed_from, problem, time.monotonic() - started)

    def _wait_for(self, phase: str, directory: Path, process: Any) -> None:
        step = self.random.randrange(1, STEPS - 1)
        reached: dict[str, Callable[[], bool]] = {
            "start": lambda: True,
            "step": lambda: rows(directory) >= step,
            "saving": lambda: rows(directory) >= step - 1 and any((directory / "checkpoints").glob("*.writing")),
            "validation": lambda: (directory / "processes" / "validates").exists() and rows(directory) > 0,
            "end": lambda: rows(directory) >= STEPS,
        }
        end = time.monotonic() + 150
        while not reached[phase]() and process.poll() is None:
            assert time.monotonic() < end, f"{phase} was never reached in {directory}"
            time.sleep(0.001)
        longest = {"start": 4.0, "step": 0.3, "saving": 0.02, "validation": 0.1, "end": 0.5}
        time.sleep(self.random.uniform(0, longest[phase]))

    def _victim(self, directory: Path, parent: int, phase: str) -> tuple[str, int]:
        ranks = [item for item in (directory / "processes").glob("*") if item.name.isdigit()]
        if not ranks or phase == "start" or self.random.random() < 0.3:
            return "parent", parent
        file = self.random.choice(sorted(ranks))
        return f"rank {file.name}", int(file.read_text() or parent)

    def _left_behind(self, directory: Path, process: Any) -> str | None:
        end = time.monotonic() + GONE_SECONDS
        files = [item for item in (directory / "processes").glob("*") if item.name.isdigit()]
        ranks = {item.name: int(text) for item in files if (text := item.read_text())}
        while time.monotonic() < end:
            left = [rank for rank, pid in ranks.items() if _runs(pid)]
            if not left and process.poll() is not None:
                return None
            time.sleep(0.05)
        return f"{GONE_SECONDS:g} s later there is still " + (f"rank {', '.join(left)}" if left else "the parent")

    def _difference(self, arguments: list[str], directory: Path) -> str | None:
        try:
            resumed: Run = self.commands(*arguments, into=directory)
            assert_same_curve(resumed, self.commands("mesh=1"))
        except AssertionError as error:
            return " ".join(str(error).split())[-300:]
        return None


def rows(directory: Path) -> int:
    """How many steps metrics.csv has."""
    try:
        return max(0, (directory / "metrics.csv").read_text().count("\n") - 1)
    except FileNotFoundError:
        return 0


def _runs(pid: int) -> bool:
    """Whether there is such a process that has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def main() -> int:
    """Run the trials of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description=__doc__)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm", action="store_true", help="fork processes that have their imports")
    arguments = parser.parse_args()
    server = warm.start_server() if arguments.warm else None
    wrong = 0
    try:
        with tempfile.TemporaryDirectory() as directory:
            harness = Harness(Path(directory), arguments.seed)
            pairs = list(itertools.product(MESHES, PHASES))
            harness.random.shuffle(pairs)
            for mesh, phase in itertools.islice(itertools.cycle(pairs), arguments.trials):
                trial = harness.trial(mesh, phase)
                wrong += trial.problem is not None
                print(trial, flush=True)
    finally:
        if server is not None:
            server[0].terminate()
            server[0].wait()
    print(f"{arguments.trials - wrong} of {arguments.trials} resumed exactly")
    return min(wrong, 100)


if __name__ == "__main__":
    sys.exit(main())
