"""When a run is started again, from where and on how many ranks: by what its starts leave behind.

The starts are stand-ins here; `test_restarts.py` has real ones.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from autolaunch import cli
from autolaunch.config import across_keys
from autolaunch.config.against_schema import validate
from autolaunch.config.command_line import parse
from autolaunch.config.compose import compose, resolved
from autolaunch.job import ResolvedJob
from autolaunch.jobs import restarts, start
from autolaunch.launch.end import PREEMPTED, RunEnd
from autolaunch.launch.failure import Failure, write_failure
from autolaunch_strategies.checkpoint.files import write_manifest
from autolaunch_strategies.config import ConfigErrors
from tests.support.messages import Told, assert_only_told

FINISHED = RunEnd("finished", 0)


def failure(job: ResolvedJob, rank: int, error: str, peer_lost: bool = False) -> Failure:
    return Failure(rank, job.world_size, error, "", "log", "host", 1, 1, peer_lost)


@dataclass
class Start:
    """What one start of a run does: steps, checkpoints, an end."""

    to: int
    """The step that it reaches."""
    saved: tuple[int, ...] = ()
    """The steps of its checkpoints."""
    end: RunEnd | None = None
    """None: a rank fails."""
    rank: int = 0
    """That one."""
    error: str | None = None
    """Its error; None if it is lost without one."""
    signal: bool = False
    """A signal comes while the failed ranks are ended."""

    def run(self, job: ResolvedJob) -> RunEnd:
        job.logs.mkdir(exist_ok=True)
        for report in job.logs.glob("failure_*"):
            report.unlink()
        rows = "".join(f"{step},1.0\n" for step in range(1, self.to + 1))
        (job.output_dir / "metrics.csv").write_text(f"step,loss\n{rows}")
        written = time.time_ns() - 3600 * 10**9  # by the clock of a file server that is behind
        os.utime(job.output_dir / "metrics.csv", ns=(written, written))
        for step in self.saved:
            save(job.output_dir, step)
        if self.signal:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.end is not None:
            return self.end
        failed = failure(job, self.rank, self.error or "killed by SIGKILL")
        if self.error is not None:
            write_failure(failed, job.logs)
        return RunEnd("failed", 1, failed, failed.render())


def save(directory: Path, step: int) -> None:
    path = directory / "checkpoints" / f"step_{step:07d}.ckpt"
    path.mkdir(parents=True, exist_ok=True)
    (path / "meta.pt").write_bytes(b"x" * step)
    write_manifest(path, step, "1")


@dataclass
class Ended:
    """A command that has ended."""

    code: int
    screen: str
    jobs: list[ResolvedJob] = field(default_factory=list)
    """Of each start."""

    @property
    def resumed(self) -> list[str | None]:
        """Names of the checkpoints from which the starts went on."""
        return [path and Path(path).name for job in self.jobs for path in [job.config["ckpt_path"]]]

    @property
    def summary(self) -> dict[str, object]:
        return json.loads((self.jobs[-1].output_dir / "summary.json").read_text())


Command = Callable[..., Ended]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Runs `autolaunch ... output_dir=out` in this process with these starts, the last of which may happen again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["autolaunch"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    for module in (across_keys, restarts):
        monkeypatch.setattr(module, "visible_devices", lambda accelerator: ("cpu", None))
    monkeypatch.setattr(restarts, "FIRST_WAIT", 0.001)

    def run(*argv: str, starts: list[Start]) -> Ended:
        jobs: list[ResolvedJob] = []

        def stand_in(job: ResolvedJob, *, isolated: bool = False) -> RunEnd:
            assert isolated, "a rank that takes its process with it must leave somebody to start it again"
            jobs.append(job)
            return starts[min(len(jobs), len(starts)) - 1].run(job)

        monkeypatch.setattr(start, "run", stand_in)
        code = cli.run([*argv, "output_dir=out"])
        out, err = capfd.readouterr()
        return Ended(code, out + err, jobs)

    return run


def test_a_failed_run_goes_on_from_its_newest_checkpoint(command: Command) -> None:
    starts = [Start(5, (2, 4)), Start(7, error="OSError: disk"), Start(9, end=FINISHED)]
    told = command("mesh=2", "launch.max_restarts=3", starts=starts)
    assert told.code == 0
    assert told.resumed == [None, "step_0000004.ckpt", "step_0000004.ckpt"]
    assert [(job.restarts, job.resumes_last) for job in told.jobs] == [(0, False), (1, True), (2, True)]
    assert re.findall(r"restart \d of \d", told.screen) == ["restart 1 of 3", "restart 2 of 3"]
    assert "killed by SIGKILL" in told.screen and "OSError: disk" in told.screen


def test_checkpoints_of_another_run_in_the_directory_are_not_gone_on_from(command: Command) -> None:
    save(Path("out"), 100)
    save(Path("out"), 2)
    save(Path("out"), 4)
    there = "ckpt_path=out/checkpoints/step_0000002.ckpt"
    starts = [Start(3), Start(5, (4,)), Start(7, end=FINISHED)]
    told = command("mesh=2", "launch.max_restarts=3", there, starts=starts)
    assert told.resumed == ["step_0000002.ckpt", "step_0000002.ckpt", "step_0000004.ckpt"]
    assert "none has been written since" in told.screen


def test_before_its_first_checkpoint_a_resumed_run_starts_where_it_started(command: Command) -> None:
    save(Path("out"), 2)
    told = command("ckpt_path=last", "launch.max_restarts=1", starts=[Start(3), Start(5, end=FINISHED)])
    assert told.resumed == ["step_0000002.ckpt"] * 2
    assert "none has been written since" in told.screen


@pytest.mark.parametrize(
    ("end", "code"),
    [
        pytest.param(RunEnd("failed", 2, message="model.size=9b: no such size"), 2, id="config"),
        pytest.param(RunEnd("interrupted", PREEMPTED, message="saved"), 75, id="preempted"),
        pytest.param(RunEnd("interrupted", 130, message="stopped by Ctrl-C"), 130, id="ctrl-c"),
    ],
)
def test_what_is_no_failure_is_not_started_again(end: RunEnd, code: int, command: Command) -> None:
    told = command("launch.max_restarts=3", starts=[Start(3, end=end)])
    assert (told.code, len(told.jobs)) == (code, 1)


def test_a_failure_that_repeats_is_a_bug(command: Command) -> None:
    told = command("mesh=4", "launch.max_restarts=9", "launch.min_devices=2", starts=[Start(5, (4,), error="E: boom")])
    assert (told.code, len(told.jobs)) == (1, 2)
    assert "not started again: the second failure in a row after step 5 is a bug" in told.screen
    assert (told.summary["status"], told.summary["restarts"], told.summary["steps"]) == ("failed", 1, 5)


def test_restarts_are_used_up(command: Command) -> None:
    told = command("mesh=2", "launch.max_restarts=2", starts=[Start(5), Start(6), Start(7)])
    assert (told.code, len(told.jobs)) == (1, 3)
    assert "all 2 restarts (launch.max_restarts) are used up" in told.screen


def test_a_signal_while_a_failed_run_is_ended_counts(command: Command) -> None:
    told = command("mesh=2", "launch.max_restarts=2", starts=[Start(5, signal=True)])
    assert (told.code, len(told.jobs)) == (1, 1)


def test_a_signal_before_the_restart_ends_it(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_WAIT", 30.0)
    sleep = restarts.time.sleep
    monkeypatch.setattr(restarts.time, "sleep", lambda seconds: (os.kill(os.getpid(), signal.SIGTERM), sleep(seconds)))
    told = command("mesh=2", "launch.max_restarts=2", starts=[Start(5, (4,))])
    assert (told.code, len(told.jobs)) == (PREEMPTED, 1)
    assert re.search(r"stopped by SIGTERM after step 4; saved in \S+step_0000004.ckpt", told.screen)
    assert (told.summary["status"], told.summary["restarts"]) == ("interrupted", 1)


def test_a_rank_that_is_lost_at_the_same_step_is_left_out(command: Command) -> None:
    starts = [Start(5, (4,), rank=3), Start(5, rank=3), Start(9, end=FINISHED)]
    told = command("mesh=4", "data.batch_size=12", "launch.max_restarts=3", "launch.min_devices=2", starts=starts)
    assert told.code == 0
    assert [job.world_size for job in told.jobs] == [4, 4, 3]
    assert "rank 3 was lost for the second time after step 5; going on with 3 of 4 ranks: mesh=3" in told.screen
    assert told.jobs[-1].config["mesh"]["dp"] == 3 and told.jobs[-1].choices["mesh"] == "3"


def test_without_a_number_of_ranks_all_are_needed(command: Command) -> None:
    told = command("mesh=4", "launch.max_restarts=3", starts=[Start(5, (4,), rank=3)])
    assert (told.code, len(told.jobs)) == (1, 2)
    assert "launch.min_devices=3 lets a run go on without such a rank" in told.screen


def test_another_rank_lost_at_the_same_step_is_a_bug(command: Command) -> None:
    starts = [Start(5, rank=3), Start(5, rank=2)]
    told = command("mesh=4", "launch.max_restarts=9", "launch.min_devices=1", starts=starts)
    assert (told.code, len(told.jobs)) == (1, 2)


def test_a_rank_left_out_in_vain_is_a_bug(command: Command) -> None:
    starts = [Start(5, rank=1), Start(5, rank=1), Start(5, rank=0)]
    told = command("mesh=4", "launch.max_restarts=9", "launch.min_devices=1", starts=starts)
    assert (told.code, len(told.jobs)) == (1, 3)
    assert "it fails after step 5 without the rank that was left out, too" in told.screen


@pytest.mark.parametrize(
    ("mesh", "arguments", "smaller"),
    [
        pytest.param("4", ["data.batch_size=16"], "2", id="batch"),
        pytest.param("2x2", [], "1x2", id="mp-stays"),
        pytest.param("1x2x2", [], "1x2", id="one-stage", marks=pytest.mark.full),
        pytest.param("1x1x1x4", ["data.seq_len=48"], "1x1x1x3", id="cp", marks=pytest.mark.full),
        pytest.param("1x4", [], "1x2", id="heads", marks=pytest.mark.full),
        pytest.param(
            "2x2",
            ["data=custom", "data._target_=collections.OrderedDict"],
            "2",
            id="own-data-keep-dp",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "4", ["dp=hsdp", "dp.replicate=2", "data.batch_size=12"], "2", id="replicas", marks=pytest.mark.full
        ),
    ],
)
def test_the_mesh_of_three_ranks_is_one_that_fits(
    mesh: str, arguments: list[str], smaller: str, command: Command
) -> None:
    starts = [Start(5, rank=1), Start(5, rank=1), Start(9, end=FINISHED)]
    told = command(f"mesh={mesh}", *arguments, "launch.max_restarts=3", "launch.min_devices=1", starts=starts)
    assert told.code == 0, told.screen
    assert told.jobs[-1].choices["mesh"] == smaller


def test_no_mesh_of_so_many_ranks(command: Command) -> None:
    starts = [Start(5, rank=1)]
    told = command("mesh=4", "data.batch_size=16", "launch.max_restarts=3", "launch.min_devices=3", starts=starts)
    assert (told.code, len(told.jobs)) == (1, 2), told.screen
    assert "no mesh of 3 (launch.min_devices) to 3 ranks fits" in told.screen


def test_gpus_that_do_not_answer_are_left_out(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: what a device says of itself needs no second failure. A spare one takes the place."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,5,6,7")
    broken = {"5"}

    def count() -> list[str]:
        return os.environ["CUDA_VISIBLE_DEVICES"].split(",")

    for module in (across_keys, restarts):
        monkeypatch.setattr(module, "visible_devices", lambda accelerator: ("gpu", len(count())))
    monkeypatch.setattr(restarts, "visible_gpus", count)
    monkeypatch.setattr(restarts, "gpus_that_answer", lambda gpus: [gpu for gpu in gpus if gpu not in broken])
    seen: list[str] = []

    class Looks(Start):
        def run(self, job: ResolvedJob) -> RunEnd:
            seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
            if len(seen) == 2:
                broken.add("0")
            return super().run(job)

    starts: list[Start] = [Looks(5, (4,), error="RuntimeError: CUDA error"), Looks(5, error="RuntimeError: CUDA error")]
    starts.append(Looks(9, end=FINISHED))
    arguments = ("data.batch_size=12", "launch.max_restarts=3", "launch.min_devices=3", "launch.devices=4")
    told = command("mesh=4", *arguments, starts=starts)
    assert told.code == 0, told.screen
    assert seen == ["0,2,5,6,7", "0,2,6,7", "2,6,7"]
    assert [job.world_size for job in told.jobs] == [4, 4, 3]
    assert "no answer from GPU 5\n" in told.screen
    assert "no answer from GPU 0; going on with 3 of 4 ranks: mesh=3" in told.screen


def test_a_plan_is_made_here(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one process does for any mesh is not started again, and has no process of its own."""
    asked: list[bool] = []
    monkeypatch.setattr(start, "run", lambda job, *, isolated=False: asked.append(isolated) or FINISHED)
    assert cli.run(["plan", "mesh=2", "launch.max_restarts=1", "output_dir=out"]) == 0
    assert asked == [False]


def test_trials_of_a_search_are_not_started_again(tmp_path: Path) -> None:
    composed = compose(parse(["-m", "search=auto", "mesh=2", "launch.max_restarts=1"]))
    config = resolved(composed.config)
    _, errors = across_keys.check(validate(config)[0], tmp_path)
    assert_only_told(
        ConfigErrors(errors),
        [Told("launch.max_restarts=1", "trial", allowed=("single runs",), write="launch.max_restarts=0")],
    )
