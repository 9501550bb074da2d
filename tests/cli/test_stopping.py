"""A signal ends training between two steps, saved; what is kept of checkpoints over restarts and by a logged value."""

from __future__ import annotations

import re
import signal
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from autolaunch_strategies.checkpoint.files import complete_checkpoints, read_manifest
from tests.support.commands import Commands, Run, assert_same_curve, terminated
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
    import time
    import lightning as L
    import torch


    class Stop(L.Callback):
        "Sends a signal to one rank in the middle of a step."

        def __init__(self, step, signum, rank):
            self.step, self.signum, self.rank = step, signum, rank

        def on_before_optimizer_step(self, trainer, module, optimizer):
            if trainer.global_step + 1 == self.step and trainer.global_rank == self.rank:
                os.kill(os.getpid(), self.signum)


    class Fails(L.Callback):
        "Lets the step of a rank, or of all, fail, in training or in validation."

        def __init__(self, step, rank=None, within="training_step"):
            self.step, self.rank, self.within = step, rank, within

        def setup(self, trainer, module, stage):
            run = getattr(module, self.within)

            def step(*args, **kwargs):
                if trainer.global_step + 1 == self.step and self.rank in (None, trainer.global_rank):
                    torch.rand(7)
                    run(*args, **kwargs)
                    raise ValueError("a bad sample")
                return run(*args, **kwargs)

            setattr(module, self.within, step)


    class Noise(L.Callback):
        "Weighs the loss of every step by a random number."

        def setup(self, trainer, module, stage):
            run = module.training_step
            module.training_step = lambda *args, **kwargs: run(*args, **kwargs) * (0.5 + torch.rand(()))


    class StopInValidation(L.Callback):
        "Sends a signal to one rank in the second batch of a validation that would take long."

        def __init__(self, step, rank):
            self.step, self.rank = step, rank

        def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
            if trainer.global_step == self.step and batch_idx == 1 and not trainer.sanity_checking:
                if trainer.global_rank == self.rank:
                    os.kill(os.getpid(), 15)
            if trainer.global_step == self.step and batch_idx > 2:
                raise ValueError("went on")


    class Elapses(L.Callback):
        "Lets `trainer.max_time` be over after so many batches."

        def __init__(self, batch):
            self.batch = batch

        def setup(self, trainer, module, stage):
            timer = next(item for item in trainer.callbacks if isinstance(item, L.pytorch.callbacks.Timer))
            batches = trainer.fit_loop.epoch_loop
            timer.time_elapsed = lambda *args: 3601 if batches.total_batch_idx + 1 >= self.batch else 0


    class Hangs(L.Callback):
        "Gets a signal in a step that never ends."

        def on_before_optimizer_step(self, trainer, module, optimizer):
            if trainer.global_step == 2:
                os.kill(os.getpid(), 15)
                time.sleep(1000)


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
    return f"callbacks.stop={node}"


@pytest.mark.parametrize(
    ("mesh", "signum", "rank", "code"),
    [
        pytest.param("2", signal.SIGTERM, 1, 75, id="one-rank-of-two"),
        pytest.param("1", signal.SIGINT, 0, 130, id="ctrl-c-alone", marks=pytest.mark.full),
        pytest.param("1x1x2", signal.SIGUSR1, 0, 75, id="stages", marks=pytest.mark.full),
        pytest.param("1x2", signal.SIGTERM, 1, 75, id="mp", marks=pytest.mark.every),
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
    resumed = command(f"mesh={mesh}", "ckpt_path=last", "callbacks.stop=null", into=directory)
    assert_same_curve(resumed, whole)


@pytest.mark.full
def test_a_signal_to_the_command_saves_on_all_ranks(command: Commands) -> None:
    directory = command.directory / "parent"
    words = [sys.executable, "-m", "autolaunch", *TINY, "mesh=2", "trainer.max_steps=100000", f"output_dir={directory}"]
    code, screen = terminated(words, directory, 3, cwd=command.directory, env=environment())
    assert code == 75, screen
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
    says = "callbacks.says={_target_: stopping.Says}"
    arguments = ("checkpoint.every_n_steps=1", "checkpoint.monitor=valley", "checkpoint.keep_last=1")
    command("mesh=1", says, *arguments, into=directory)
    assert steps_kept(directory) == [3, STEPS]


def test_a_value_that_is_never_logged_is_said(command: Commands) -> None:
    says = "callbacks.says={_target_: stopping.Says}"
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
    breaks = "callbacks.breaks={_target_: stopping.Breaks, step: 2}"
    run = command(
        "mesh=2", breaks, "checkpoint.every_n_steps=1", "trainer.nonfinite_patience=3", into=directory, code=1
    )
    assert "not finite since step 3, for 3 steps (trainer.nonfinite_patience)" in run.screen
    assert str(directory / "checkpoints" / "step_0000001.ckpt") in run.screen.replace("\n", "")
    assert "Traceback" not in run.screen
    assert steps_kept(directory) == [1]  # what the second step had made of the weights was broken before it was saved
    assert run.summary["status"] == "failed"


def test_weights_that_are_not_finite_at_the_end_fail_the_run(command: Commands) -> None:
    """Though the patience (10 steps) has not come to its end."""
    directory = command.directory / "broken_at_the_end"
    breaks = f"callbacks.breaks={{_target_: stopping.Breaks, step: {STEPS - 2}}}"
    run = command("mesh=1", breaks, "checkpoint.every_n_steps=1", into=directory, code=1)
    assert "the weights are not finite at the end of the training" in run.screen
    assert f"step_{STEPS - 3:07d}.ckpt" in run.screen.replace("\n", "") and "Traceback" not in run.screen
    assert run.summary["status"] == "failed"


def test_a_training_without_a_step_has_failed(command: Commands) -> None:
    run = command("mesh=1", "trainer.limit_train_batches=0", code=1)
    assert "not one training step was made" in run.screen


def fails(step: int, rank: int | str = "null", within: str = "training_step") -> str:
    node = f"{{_target_: stopping.Fails, step: {step}, rank: {rank}, within: {within}}}"
    return f"callbacks.stop={node}"


NOISE = ("callbacks.noise={_target_: stopping.Noise}",)


@pytest.mark.full
@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        pytest.param("1", NOISE, id="alone", marks=pytest.mark.every),  # a validation below draws such numbers
        pytest.param("1", ("data.microbatches=2",), id="accumulated", marks=pytest.mark.every),
        pytest.param("2", (), id="fsdp"),
        pytest.param("1x1x2", (), id="stages", marks=pytest.mark.every),
        pytest.param("1x2", (), id="mp", marks=pytest.mark.every),
    ],
)
def test_what_was_done_before_a_step_that_fails_on_all_ranks_is_saved(
    mesh: str, more: tuple[str, ...], command: Commands, whole: Run
) -> None:
    directory = command.directory / f"fails-{mesh}{len(''.join(more))}"
    run = command(f"mesh={mesh}", fails(4), *more, into=directory, code=1)
    assert "ValueError: a bad sample" in run.screen
    assert re.search(r"saved after step 3 in \S+step_0000003.ckpt", run.screen) is not None, run.screen
    assert steps_kept(directory) == [3]
    resumed = command(f"mesh={mesh}", "ckpt_path=last", "callbacks.stop=null", *more, into=directory)
    assert_same_curve(resumed, command("mesh=1", *more) if more else whole)


@pytest.mark.full
def test_a_step_that_fails_on_one_rank_ends_the_run_soon_and_says_that_nothing_was_saved(command: Commands) -> None:
    began = time.monotonic()
    run = command("mesh=2", fails(4, 1), code=1)
    assert "rank 1 of 2 failed: ValueError: a bad sample" in run.screen
    assert "no checkpoint was written after step 3: other ranks have not failed in this step" in run.screen
    assert steps_kept(run.directory) == []
    assert time.monotonic() - began < 60


@pytest.mark.full
@pytest.mark.parametrize(("mesh", "how"), [("1", "failure"), ("2", "signal")])
def test_a_validation_is_not_waited_for_and_made_again(mesh: str, how: str, command: Commands) -> None:
    directory = command.directory / f"validation-{mesh}-{how}"
    more = (
        *(NOISE if mesh == "1" else ()),
        "trainer.val_check_interval=2",
        "trainer.check_val_every_n_epoch=null",
        "trainer.limit_val_batches=5",
    )
    stops = "callbacks.stop={_target_: stopping.StopInValidation, step: 4, rank: 0}"
    if how == "failure":
        stops = fails(5, within="validation_step")
    run = command(f"mesh={mesh}", stops, *more, into=directory, code=75 if how == "signal" else 1)
    assert "after step 4" in run.screen
    assert steps_kept(directory) == [4]
    resumed = command(f"mesh={mesh}", "ckpt_path=last", "callbacks.stop=null", *more, into=directory)
    expected = command("mesh=1", *more)
    assert_same_curve(resumed, expected)


@pytest.mark.full
@pytest.mark.parametrize("torchrun", [0, pytest.param(2, marks=pytest.mark.every)])
def test_a_step_that_does_not_end_is_not_waited_for_any_longer(torchrun: int, command: Commands) -> None:
    began = time.monotonic()
    hangs = "callbacks.stop={_target_: stopping.Hangs}"
    mesh = f"mesh={torchrun or 1}"
    run = command(mesh, hangs, "checkpoint.emergency_seconds=3", torchrun=torchrun, code=1 if torchrun else 143)
    assert "no checkpoint was written within 3 s (checkpoint.emergency_seconds)" in run.screen
    assert time.monotonic() - began < 60


@pytest.mark.full
def test_an_elapsed_time_saves(command: Commands) -> None:
    """Also in the middle of a step of several batches, which the resumed run makes as a whole."""
    directory = command.directory / "elapsed"
    more = ("data.microbatches=2",)
    says = "callbacks.stop={_target_: stopping.Elapses, batch: 5}"
    command("mesh=1", says, *more, "trainer.max_time=00:01:00:00", into=directory)
    assert steps_kept(directory) == [2]
    resumed = command("mesh=1", "ckpt_path=last", "callbacks.stop=null", *more, into=directory)
    assert_same_curve(resumed, command("mesh=1", *more))
