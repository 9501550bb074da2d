"""Runs that start again by themselves: the same curve as without a failure, on all ranks or on those that are left."""

from __future__ import annotations

import re
import sys
import textwrap

import pytest

from tests.support.commands import Commands, Run, assert_same_curve, terminated
from tests.support.ranks import environment, real_torchrun, start

pytestmark = [pytest.mark.timeout(240), pytest.mark.full]

STEPS = 6
TINY = (
    *("model.num_layers=2", "model.hidden_size=32", "model.intermediate_size=64", "model.num_heads=4"),
    *("model.num_kv_heads=2", "data.seq_len=32", "data.batch_size=12", f"scheduler.total_steps={STEPS}"),
    *(f"trainer.max_steps={STEPS}", "trainer.accelerator=cpu"),
)
FAULTS = textwrap.dedent("""
    import os
    import signal
    from pathlib import Path

    import lightning as L


    class Dies(L.Callback):
        "One rank is killed in a step, as often as is said, while there are so many ranks."

        def __init__(self, step, rank, times, world_size):
            self.step, self.rank, self.times, self.world_size = step, rank, times, world_size

        def on_before_optimizer_step(self, trainer, module, optimizer):
            if (trainer.world_size, trainer.global_rank) != (self.world_size, self.rank):
                return
            file = Path(trainer.default_root_dir) / "deaths"
            deaths = int(file.read_text()) if file.exists() else 0
            if trainer.global_step + 1 == self.step and deaths < self.times:
                file.write_text(str(deaths + 1))
                os.kill(os.getpid(), signal.SIGKILL)


    class Raises(L.Callback):
        "Every rank fails in a step."

        def __init__(self, step):
            self.step = step

        def on_before_optimizer_step(self, trainer, module, optimizer):
            if trainer.global_step + 1 == self.step:
                raise ValueError("boom")
""")


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    directory = tmp_path_factory.mktemp("restarts")
    (directory / "faults.py").write_text(FAULTS)
    return Commands(directory, *TINY, timeout=200)


@pytest.fixture(scope="module")
def whole(command: Commands) -> Run:
    return command("mesh=1")


def dies(step: int, rank: int, times: int, world_size: int) -> str:
    node = f"{{_target_: faults.Dies, step: {step}, rank: {rank}, times: {times}, world_size: {world_size}}}"
    return f"callbacks.dies={node}"


@pytest.mark.parametrize(
    ("mesh", "rank", "every", "source"),
    [
        pytest.param("1", 0, "2", "from {}/checkpoints/step_0000004.ckpt", id="alone", marks=pytest.mark.every),
        pytest.param("2", 1, "2", "from {}/checkpoints/step_0000004.ckpt", id="data"),
        pytest.param("1x1x2", 0, "null", "from the start: no checkpoint has been written", id="stages-from-the-start"),
    ],
)
def test_a_rank_that_is_killed(mesh: str, rank: int, every: str, source: str, command: Commands, whole: Run) -> None:
    ranks = 1 if mesh == "1" else 2
    arguments = (f"mesh={mesh}", f"checkpoint.every_n_steps={every}", dies(6, rank, 1, ranks))
    run = command(*arguments, "launch.max_restarts=2")
    assert_same_curve(run, whole)
    assert [row["step"] for row in run.rows] == list(range(1, STEPS + 1))
    assert (run.summary["status"], run.summary["restarts"], run.summary["steps"]) == ("finished", 1, STEPS)
    assert "failed: killed by SIGKILL" in run.screen
    assert f"restart 1 of 2), {source.format(run.directory.name)}" in run.screen


def test_a_bug_is_not_healed(command: Commands) -> None:
    raises = "callbacks.raises={_target_: faults.Raises, step: 4}"
    arguments = ("mesh=2", "checkpoint.every_n_steps=2", "launch.max_restarts=5", "launch.min_devices=1")
    run = command(*arguments, raises, code=1)
    assert "not started again: the second failure in a row after step 3 is a bug" in run.screen
    assert len(re.findall("ValueError: boom", run.screen)) >= 2
    assert (run.summary["status"], run.summary["restarts"]) == ("failed", 1)


@pytest.mark.parametrize(
    ("mesh", "smaller", "left"),
    [pytest.param("4", "3", 3, id="three"), pytest.param("2x2", "1x2", 2, id="mp-stays", marks=pytest.mark.every)],
)
def test_a_rank_that_is_gone_for_good(mesh: str, smaller: str, left: int, command: Commands, whole: Run) -> None:
    """The others go on, and nothing of it is to be seen in the losses."""
    arguments = (f"mesh={mesh}", "checkpoint.every_n_steps=2", dies(4, 3, 99, 4))
    run = command(*arguments, "launch.max_restarts=3", "launch.min_devices=2")
    assert_same_curve(run, whole)
    assert [row["step"] for row in run.rows] == list(range(1, STEPS + 1))
    assert f"rank 3 was lost for the second time after step 3; going on with {left} of 4 ranks" in run.screen
    summary = run.summary
    assert (summary["status"], summary["restarts"], summary["mesh"]) == ("finished", 2, smaller)
    assert summary["world_size"] == left


@pytest.mark.every  # half a minute; test_stopping.py has the same of a run that is not started again
def test_a_signal_after_a_restart(command: Commands) -> None:
    """It saves and ends a run that was started again as any other, and leaves no process."""
    directory = command.directory / "signal"
    words = ["-m", "autolaunch", *TINY, "mesh=2", "trainer.max_steps=100000", f"output_dir={directory}"]
    words += [dies(3, 1, 1, 2), "launch.max_restarts=2", "checkpoint.every_n_steps=2"]
    code, screen = terminated([sys.executable, *words], directory, 5, cwd=command.directory, env=environment())
    assert code == 75, screen
    assert "restart 1 of 2" in screen
    assert re.search(r"stopped by SIGTERM after step \d+; saved in", screen)


def test_the_line_for_torchrun(command: Commands, whole: Run) -> None:
    """Its restarts compose again: one directory, and `ckpt_path=last`."""
    directory = command.directory / "torchrun"
    words = ["--max-restarts=2", "-m", "autolaunch", *TINY, "mesh=2", "checkpoint.every_n_steps=2", dies(6, 1, 1, 2)]
    words = real_torchrun(2, *words, f"output_dir={directory}", "ckpt_path=last")
    done = start(words, 200, cold=True, cwd=command.directory, env=environment())
    assert done.returncode == 0, done.stdout[-6000:]
    assert_same_curve(Run(0, done.stdout, directory), whole)
