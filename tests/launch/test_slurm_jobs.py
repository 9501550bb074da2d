"""launch=slurm on a real Slurm of two nodes: jobs that are interrupted go on by themselves."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import slurm_cluster as slurm
from tests.support.commands import Commands, Run, assert_same_curve
from tests.support.messages import assert_told

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(slurm.missing()), reason=f"no {', '.join(slurm.missing())} on this machine"),
]

STEPS = 8
TINY = (
    *("model.num_layers=2", "model.hidden_size=32", "model.intermediate_size=64", "model.num_heads=4"),
    *("model.num_kv_heads=2", "data.seq_len=32", "data.batch_size=8", "trainer.accelerator=cpu"),
)
FAULTS = textwrap.dedent("""
    import os
    import time
    from pathlib import Path

    import lightning as L


    class Once(L.Callback):
        "Sends a signal to one rank in the middle of a step, the first time that the job is there."

        def __init__(self, step, signum, rank, mark):
            self.step, self.signum, self.rank, self.mark = step, signum, rank, Path(mark)

        def on_before_optimizer_step(self, trainer, module, optimizer):
            if trainer.global_step + 1 == self.step and trainer.global_rank == self.rank and not self.mark.exists():
                self.mark.touch()
                os.kill(os.getpid(), self.signum)


    class Slow(L.Callback):
        def on_train_batch_end(self, *args):
            time.sleep(0.6)
""")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm.cluster(tmp_path_factory.mktemp("slurm")) as env:
        yield env


@pytest.fixture(scope="module")
def command(cluster: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Commands:
    directory = tmp_path_factory.mktemp("my jobs")  # a space, as people have them
    (directory / "faults.py").write_text(FAULTS)
    # The names of the nodes are Slurm's alone: they do not resolve.
    return Commands(
        directory, *TINY, timeout=800, SLURM_CONF=cluster["SLURM_CONF"], MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1"
    )


def once(name: str, step: int, signum: signal.Signals, rank: int) -> str:
    node = f"{{_target_: faults.Once, step: {step}, signum: {int(signum)}, rank: {rank}, mark: {name}.mark}}"
    return f"+callbacks.{name}={node}"


def starts(run: Run) -> list[tuple[int, int]]:
    ends = json.loads((run.directory / ".hydra" / "starts.json").read_text())
    return [(end["code"], end["step"]) for end in ends]


def test_a_killed_rank_and_a_warning_cost_a_requeue_each(command: Commands) -> None:
    """Killed on the second node at step 3, told of preemption at step 6: the curve is that of a run of one process."""
    whole = command("mesh=1", f"trainer.max_steps={STEPS}")
    run = command(
        *("launch=slurm", "launch.nodes=2", "mesh=4", f"trainer.max_steps={STEPS}", "checkpoint.every_n_steps=1"),
        *(once("killed", 3, signal.SIGKILL, 3), once("warned", 6, signal.SIGUSR1, 2)),
    )
    (killed, at), *others = starts(run)
    assert (killed not in (0, 75), at, others) == (True, 2, [(75, 6), (0, STEPS)]), run.screen
    assert "step_0000002.ckpt" in run.screen and "stopped by SIGUSR1 after step 6" in run.screen
    assert run.summary["status"] == "finished"
    assert_same_curve(run, whole)


def test_a_time_limit_costs_nothing(command: Commands) -> None:
    """Slurm warns, the ranks save and leave, the job is queued again: until it is done."""
    steps = ("trainer.max_steps=120", "checkpoint.every_minutes=null")
    whole = command("mesh=1", *steps)
    run = command(
        *("launch=slurm", "launch.nodes=2", "mesh=2", *steps, "launch.time=2:00", "checkpoint.emergency_seconds=5"),
        "+callbacks.slow={_target_: faults.Slow}",
    )
    assert len(starts(run)) > 1 and {code for code, _ in starts(run)[:-1]} == {75}, run.screen
    assert_same_curve(run, whole)


def test_ctrl_c_leaves_the_job_and_scancel_ends_it(command: Commands) -> None:
    directory = command.directory / "left"
    words = [*TINY, "launch=slurm", "launch.nodes=2", "mesh=2", "trainer.max_steps=100000", f"output_dir={directory}"]
    with (command.directory / "screen").open("w+") as screen:
        process = subprocess.Popen(
            [sys.executable, "-m", "autolaunch", *words],
            cwd=command.directory,
            env=command.environment,
            stdout=screen,
            stderr=screen,
        )
        try:
            _wait_for_rows(directory / "metrics.csv", 4)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()
        screen.seek(0)
        told = screen.read()
    number = told.split("scancel ")[1].split()[0]
    assert f"tail -F '{directory}/logs/slurm.log'" in told and "Traceback" not in told
    assert not (directory / "summary.json").exists()
    _wait_for_rows(directory / "metrics.csv", len((directory / "metrics.csv").read_text().splitlines()) + 1)
    subprocess.run(["scancel", number], env=command.environment, check=True)
    end = time.monotonic() + 120
    while "JobState=CANCELLED" not in (state := _state(command, number)):
        assert time.monotonic() < end, state
        time.sleep(0.5)
    assert "Restarts=0" in state
    assert len(list((directory / "checkpoints").iterdir())) == 1


def test_what_slurm_refuses_is_told(command: Commands) -> None:
    run = command("launch=slurm", "launch.partition=nowhere", code=2)
    assert_told(run.screen, "launch=slurm", "partition", "nowhere", write=f"sbatch '{run.directory}/job.sbatch'")


def _wait_for_rows(file: Path, rows: int) -> None:
    end = time.monotonic() + 200
    while not file.exists() or len(file.read_text().splitlines()) < rows:
        assert time.monotonic() < end, f"{file} never had {rows} rows"
        time.sleep(0.3)


def _state(command: Commands, number: str) -> str:
    asked = ["scontrol", "-o", "show", "job", number]
    return subprocess.run(asked, env=command.environment, capture_output=True, text=True).stdout
