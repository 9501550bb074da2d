"""A signal ends training between two steps, saved; what is kept of checkpoints over restarts and by a logged value."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from autolaunch_strategies.checkpoint.files import complete_checkpoints, read_manifest
from tests.support.commands import Commands, Run, assert_same_curve
from tests.support.messages import assert_told
from tests.support.ranks import environment

pytestmark = pytest.mark.timeout(240)

STEPS = 6
TINY = (
    *("model.num_layers=2", "model.hidden_size=32", "model.intermediate_size=64", "model.num_heads=4"),
    *("model.num_kv_heads=2", "data.seq_len=32", "data.batch_size=8", f"scheduler.total_steps={STEPS}"),
    *(f"trainer.max_steps={STEPS}", "trainer.accelerator=cpu"),
)
STOP = textwrap.dedent("""
    import os
    import lightning as L
    import torch


    class Stop(L.Callback):
        "Sends a signal to one rank in the middle of a step."

        def __init__(self, step, signum, rank):
            self.step, self.signum, self.rank = step, signum, rank

        def on_before_optimizer_step(self, trainer, module, optimizer):
            if trainer.global_step + 1 == self.step and trainer.global_rank == self.rank:
                os.kill(os.getpid(), self.signum)


    class Breaks(L.Callback):
        "Makes a weight not finite after a step."

        def __init__(self, step):
            self.step = step

        def on_train_batch_end(self, trainer, module, *args):
            if trainer.global_step == self.step:
                with torch.no_grad():
                    next(module.parameters()).fill_(float("nan"))


    class Says(L.Callback):
        "Logs a value that falls and rises again: 3, 2, 1, 2, 3 ..."

        def on_train_batch_end(self, trainer, module, *args):
            module.log("valley", float(abs(trainer.global_step - 3)))
""")


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    directory = tmp_path_factory.mktemp("stopping")
    (directory / "stopping.py").write_text(STOP)
    np.save(directory / "tokens.npy", np.random.default_rng(0).integers(0, 257, 5000).astype(np.uint16))
    return Commands(directory, *TINY, timeout=200)


@pytest.fixture(scope="module")
def whole(command: Commands) -> Run:
    return command("mesh=1")


def stop(step: int, signum: signal.Signals, rank: int) -> str:
    node = f"{{_target_: stopping.Stop, step: {step}, signum: {int(signum)}, rank: {rank}}}"
    return f"trainer.callbacks.stop={node}"


@pytest.mark.parametrize(
    ("mesh", "signum", "rank", "code"),
    [
        pytest.param("2", signal.SIGTERM, 1, 75, id="one-rank-of-two"),
        pytest.param("1", signal.SIGUSR1, 0, 75, id="usr1-alone", marks=pytest.mark.full),
        pytest.param("1", signal.SIGINT, 0, 130, id="ctrl-c-alone", marks=pytest.mark.full),
        pytest.param("1x1x2", signal.SIGUSR1, 0, 75, id="stages", marks=pytest.mark.full),
        pytest.param("1x2", signal.SIGTERM, 1, 75, id="mp", marks=pytest.mark.full),
    ],
)
def test_a_signal_saves_and_the_run_goes_on(
    mesh: str, signum: signal.Signals, rank: int, code: int, command: Commands, whole: Run
) -> None:
    name = f"{mesh}-{signum.name}"
    directory = command.directory / name
    stopped = command(f"mesh={mesh}", stop(3, signum, rank), into=directory, code=code)
    said = re.search(r"stopped by (\S+) after step 3; saved in (\S+)", stopped.screen)
    assert said is not None, stopped.screen
    assert said[1] == ("Ctrl-C" if signum == signal.SIGINT else signum.name)
    assert "Traceback" not in stopped.screen
    assert stopped.summary["status"] == "interrupted"
    assert steps_kept(directory) == [3]
    resumed = command(f"mesh={mesh}", "ckpt_path=last", "trainer.callbacks.stop=null", into=directory)
    assert_same_curve(resumed, whole)


@pytest.mark.full
def test_a_signal_to_the_command_saves_on_all_ranks(command: Commands) -> None:
    directory = command.directory / "parent"
    words = [sys.executable, "-m", "autolaunch", *TINY, "mesh=2", "trainer.max_steps=100000", f"output_dir={directory}"]
    process = subprocess.Popen(
        words, cwd=command.directory, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        patience = time.monotonic() + 120
        while not (directory / "metrics.csv").exists() or (directory / "metrics.csv").read_text().count("\n") < 3:
            assert time.monotonic() < patience and process.poll() is None, process.communicate()[0]
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        screen, _ = process.communicate(timeout=100)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 75, screen
    saved = re.search(r"stopped by SIGTERM after step (\d+); saved in (\S+)", screen)
    assert saved is not None, screen
    assert read_manifest(Path(saved[2]))["step"] == int(saved[1])
    assert f"output_dir={directory} ckpt_path=last" in screen


def steps_kept(directory: Path) -> list[int]:
    return [read_manifest(path)["step"] for path in complete_checkpoints(directory / "checkpoints")]


@pytest.mark.full
def test_keep_last_holds_over_restarts(command: Commands) -> None:
    directory = command.directory / "restarts"
    for last in (2, 4, 6):
        steps = f"trainer.max_steps={last}"
        command("mesh=1", steps, "checkpoint.every_n_steps=1", "ckpt_path=last", into=directory)
        assert steps_kept(directory) == [last - 1, last]


@pytest.mark.full
def test_the_best_by_a_logged_value_and_the_last_are_kept(command: Commands) -> None:
    directory = command.directory / "monitored"
    says = "trainer.callbacks.says={_target_: stopping.Says}"
    arguments = ("checkpoint.every_n_steps=1", "checkpoint.monitor=valley", "checkpoint.keep_last=1")
    command("mesh=1", says, *arguments, into=directory)
    assert steps_kept(directory) == [3, STEPS]


def test_a_value_that_is_never_logged_is_said(command: Commands) -> None:
    says = "trainer.callbacks.says={_target_: stopping.Says}"
    run = command("mesh=1", says, "checkpoint.monitor=vally", code=2)
    assert_told(run.screen, "checkpoint.monitor=vally", "logged", write="checkpoint.monitor=valley")
    assert steps_kept(run.directory) == [STEPS]


@pytest.mark.full
def test_minutes(command: Commands) -> None:
    """By the first rank's clock, on all ranks alike."""
    directory = command.directory / "minutes"
    command("mesh=2", "checkpoint.every_minutes=0.00001", "checkpoint.keep_last=-1", into=directory)
    assert steps_kept(directory) == [2, 4, STEPS]  # asked for after a step, written after the next


@pytest.mark.full
def test_losses_that_are_not_finite_end_the_run(command: Commands) -> None:
    """What is kept is what was saved while they were."""
    directory = command.directory / "broken"
    breaks = "trainer.callbacks.breaks={_target_: stopping.Breaks, step: 2}"
    run = command(
        "mesh=2", breaks, "checkpoint.every_n_steps=1", "trainer.nonfinite_patience=3", into=directory, code=1
    )
    assert "not finite since step 3, for 3 steps (trainer.nonfinite_patience)" in run.screen
    assert str(directory / "checkpoints" / "step_0000002.ckpt") in run.screen.replace("\n", "")
    assert "Traceback" not in run.screen
    assert steps_kept(directory) == [1, 2]
    assert run.summary["status"] == "failed"


def test_a_training_without_a_step_has_failed(command: Commands) -> None:
    run = command("mesh=1", "trainer.limit_train_batches=0", code=1)
    assert "not one training step was made" in run.screen
