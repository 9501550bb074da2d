"""`-m search=auto` from the command line to results.csv, best.yaml and the table, with trials that are made up.

The model is profiled by formula and the trials take the place of `jobs.start.run`; everything between is real.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from autolaunch import cli
from autolaunch.config import across_keys
from autolaunch.job import ResolvedJob
from autolaunch.jobs import start
from autolaunch.launch.end import RunEnd
from autolaunch.machine import this_machine
from autolaunch.search import space
from autolaunch_strategies.planner.profile import ModelProfile, Recipe
from tests.support.config_candidate import candidate_of
from tests.support.messages import Told, assert_only_told
from tests.support.transformer_profile import transformer_profile

Outcome = tuple[int, str, str]
OOM = "rank 1 of 4 failed: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


class Trials:
    """Stands in for `start.run`: says how long a step takes, or how a trial ends."""

    def __init__(self) -> None:
        self.jobs: list[ResolvedJob] = []
        self.ends: Callable[[dict[str, Any], int], float | RunEnd | BaseException] = lambda config, number: seconds_of(
            config
        )

    def __call__(self, job: ResolvedJob, *, isolated: bool = False) -> RunEnd:
        assert isolated
        self.jobs.append(job)
        end = self.ends(job.config, len(self.jobs) - 1)
        if isinstance(end, BaseException):
            raise end
        if isinstance(end, RunEnd):
            return end
        lines = ["step,loss,grad_norm,lr,tokens,step_time_s"]
        for step in range(1, job.config["trainer"]["max_steps"] + 1):
            seconds = 10.0 if step <= 2 else end
            lines.append(f"{step},2.5,1.0,0.001,{4096 * step},{seconds!r}")
        (job.output_dir / "metrics.csv").write_text("\n".join(lines) + "\n")
        summary = {"status": "finished", "step_time_s": end, "peak_memory_bytes": 2**30, "steps": len(lines) - 1}
        (job.output_dir / "summary.json").write_text(json.dumps(summary))
        return RunEnd("finished", 0)

    @property
    def ways(self) -> list[str]:
        return [job.choices["mesh"] for job in self.jobs]


FULL = pytest.mark.full


def seconds_of(config: dict[str, Any]) -> float:
    """Pipelines are best here, which the planner can't know."""
    way = candidate_of(config)
    return 0.1 * (way.mp + way.cp + (2 if way.pp == 1 else 1)) + 0.001 * way.level + 0.01 * (way.recompute != 0)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Trials:
    made = Trials()
    monkeypatch.setattr(start, "run", made)

    def profiled(job: ResolvedJob, device: str) -> tuple[ModelProfile, Recipe]:
        profile = transformer_profile(4, 128, 4, 64, 512, element_bytes=4, name="debug")
        return profile, Recipe(batch_size=job.config["data"]["batch_size"])

    monkeypatch.setattr(space, "profile_apart", profiled)
    return made


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Runs `autolaunch -m search=auto ...` in this process, in an empty directory: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["autolaunch"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    for module in (across_keys, this_machine):
        monkeypatch.setattr(module, "visible_devices", lambda accelerator: ("cpu", None))
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # what was calibrated here changes what is tried

    def run(*argv: str) -> Outcome:
        code = cli.run(["-m", "search=auto", "output_dir=out", "data=synthetic", "data.seq_len=64", *argv])
        return code, *capfd.readouterr()

    return run


def results() -> list[dict[str, str]]:
    with Path("out/results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_search(command: Callable[..., Outcome], trials: Trials) -> None:
    code, out, err = command("cluster=localx4", "search.trials=6", "optimizer.lr=0.5", "trainer.max_steps=1000")
    assert (code, err) == (0, "")
    rows = results()
    assert len(rows) == len(trials.jobs)
    measured = {row["overrides"]: float(row["measured_s"]) for row in rows}
    assert len(measured) == 6
    best = yaml.safe_load(Path("out/best.yaml").read_text())
    fastest = min(measured, key=lambda way: measured[way])
    assert rows[0]["rank"] == "1" and measured[rows[0]["overrides"]] <= 1.02 * measured[fastest]
    assert best["reasons"]["search"]["chosen"] == rows[0]["overrides"]
    assert "run the best:  autolaunch experiment=out/best.yaml" in out
    assert "6 configurations in " in out and ", 0 without a result, in out" in out
    job = trials.jobs[0]
    assert job.config["trainer"]["max_steps"] == 5 and job.config["scheduler"]["total_steps"] == 1000
    assert job.config["checkpoint"]["enabled"] is False and job.config["trainer"]["limit_val_batches"] == 0
    assert job.config["search"]["timeout"] > 120
    assert all(candidate_of(item.config).ranks == 4 for item in trials.jobs)
    assert [item.output_dir for item in trials.jobs] == [
        Path(f"out/trials/{n}").absolute() for n in range(len(trials.jobs))
    ]
    # Steps are timed without the first two, which took 10 s.
    assert all(value < 2 for value in measured.values())


@pytest.mark.full
def test_the_best_runs_as_it_was_typed(command: Callable[..., Outcome], trials: Trials) -> None:
    typed = ["optimizer.lr=0.5", "trainer.max_steps=77", "checkpoint.keep_last=5", "name=mine"]
    assert command("cluster=localx4", "search.trials=3", *typed)[0] == 0
    count = len(trials.jobs)
    chosen = results()[0]
    trial = ResolvedJob.read(Path("out") / chosen["directory"] / ".hydra/job.json")

    def run(job: ResolvedJob, *, isolated: bool = False) -> RunEnd:
        ran.append(job)
        return RunEnd("finished", 0)

    ran: list[ResolvedJob] = []
    start.run = run  # the fixture puts it back
    assert cli.run(["experiment=out/best.yaml"]) == 0
    ((job),) = ran
    assert candidate_of(job.config) == candidate_of(trial.config)
    for key in ("mesh", "dp", "mp", "pp", "cp", "ep", "recompute", "compile", "data", "model"):
        assert job.config[key] == trial.config[key], key
    assert job.config["trainer"]["max_steps"] == 77 and job.config["optimizer"]["lr"] == 0.5
    assert job.config["checkpoint"]["enabled"] is True and job.config["checkpoint"]["keep_last"] == 5
    assert (job.config["name"], job.config["search"], job.config["cluster"]) == ("mine", None, None)
    assert job.config["scheduler"]["total_steps"] is None
    assert len(trials.jobs) == count


@pytest.mark.parametrize(
    ("typed", "holds"),
    [
        pytest.param(["mesh=2x2"], lambda way: (way.dp, way.mp) == (2, 2), id="mesh"),
        pytest.param(
            ["mesh=4,2x2"], lambda way: (way.dp, way.mp) in ((4, 1), (2, 2)), id="meshes", marks=pytest.mark.every
        ),
        pytest.param(
            ["mesh=dp2xpp2,pp4"],
            lambda way: (way.dp, way.pp) in ((2, 2), (1, 4)),
            id="meshes-alike",
            marks=pytest.mark.every,
        ),
        pytest.param(["cluster=localx4", "mesh.pp=2"], lambda way: way.pp == 2, id="axis"),
        pytest.param(
            ["mesh=4", "dp=zero1,ddp"],
            lambda way: way.dp == 4 and way.level in (0, 1),
            id="levels",
            marks=pytest.mark.every,
        ),
        pytest.param(
            ["mesh=4", "dp=zero1,zero2"],
            lambda way: way.dp == 4 and way.level in (1, 2),
            id="levels-alike",
            marks=FULL,
        ),
        pytest.param(["mesh=4", "recompute=full"], lambda way: way.recompute == 1, id="recompute", marks=FULL),
    ],
)
def test_what_was_typed_is_kept(
    typed: list[str],
    holds: Callable[[Any], bool],
    command: Callable[..., Outcome],
    trials: Trials,
    request: pytest.FixtureRequest,
) -> None:
    code, _, err = command(*typed, "search.trials=4", "search.rounds=1")
    assert (code, err) == (0, "")
    ways = [candidate_of(job.config) for job in trials.jobs]
    assert ways and all(holds(way) for way in ways)
    if "alike" in request.node.callspec.id:  # what is predicted to be far slower need not be tried
        assert len({(way.mesh, way.level) for way in ways}) > 1


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        pytest.param(
            ["optimizer.lr=0.1,0.2"],
            Told(
                "optimizer.lr=0.1,0.2", "search=auto", allowed=("mesh, dp, mp, pp, cp, recompute, data.microbatches",)
            ),
            id="other-keys",
        ),
        pytest.param(["mesh=2,4"], Told("meshes of 2, 4 ranks", "numbers of devices", allowed="one size"), id="sizes"),
        pytest.param(["task=validate"], Told("validate with search=auto", "only training", allowed="fit"), id="task"),
        pytest.param(
            ["mesh=4", "trainer.max_stepz=3"],
            Told("trainer.max_stepz=3", "trainer.max_steps", write="trainer.max_steps=3"),
            id="key",
        ),
        pytest.param(
            ["mesh=4", "search.keep=2"],
            Told("search.keep=2", "out of range", allowed="more than 0, less than 1"),
            id="search-key",
        ),
        pytest.param(
            ["mesh=4", "search.resume=nowhere"], Told("search.resume=nowhere", "no trials.jsonl"), id="resume"
        ),
        pytest.param(
            ["mesh=3", "data.batch_size=16"],
            Told("data.batch_size=16", "3 data parallel ranks", write="data.batch_size=15 or data.batch_size=18"),
            id="nothing-fits",
        ),
        pytest.param(
            ["cluster=h100x64", "data.batch_size=64"],
            Told(
                "search=auto with cluster=h100x64",
                "one machine",
                "8",
                allowed="a cluster of one node; autolaunch plan for all of them",
                write="cluster=h100x8",
            ),
            id="several-machines",
        ),
    ],
)
def test_refused(typed: list[str], told: Told, command: Callable[..., Outcome], trials: Trials) -> None:
    code, _, err = command(*typed)
    assert code == 2
    assert_only_told(err, told)
    assert trials.jobs == []


def test_faults_are_named(command: Callable[..., Outcome], trials: Trials) -> None:
    """Each of four ways fails in its own manner; the rest is measured."""

    def ends(config: dict[str, Any], number: int) -> float | RunEnd | BaseException:
        failing.setdefault(str(candidate_of(config)), len(failing))
        match failing[str(candidate_of(config))]:
            case 0:
                return RunEnd("failed", 1, message="rank 2 of 4 failed: ValueError: boom\nTraceback ...")
            case 1:
                return RunEnd("timed_out", 1, message="not over after 121 s (search.timeout)\nwhere rank 0 is: ...")
            case 2:
                return float("nan")
            case 3:
                return RunEnd("failed", 2, message="data.path: no such file")
        return seconds_of(config)

    def ends_with_nan(config: dict[str, Any], number: int) -> float | RunEnd | BaseException:
        end = ends(config, number)
        if end != end:
            directory = trials.jobs[-1].output_dir
            (directory / "metrics.csv").write_text("step,loss,grad_norm,lr,tokens,step_time_s\n3,nan,1.0,0.1,64,0.5\n")
            (directory / "summary.json").write_text('{"status": "failed", "steps": 3}')
            return RunEnd("failed", 1, message="the run failed: loss nan: the weights are not finite")
        return end

    failing: dict[str, int] = {}
    # One is measured before the others fail, so that the search does not give up.
    trials.ends = lambda config, number: seconds_of(config) if number == 0 else ends_with_nan(config, number)
    code, out, _ = command("cluster=localx4", "search.trials=6", "search.rounds=1")
    assert code == 0
    found = {(row["status"], row["reason"]) for row in results()}
    assert found >= {
        ("crash", "rank 2 of 4 failed: ValueError: boom"),
        ("hang", "not over after 121 s (search.timeout)"),
        ("not a number", "the loss of step 3 is nan"),
        ("misconfigured", "data.path: no such file"),
        ("measured", ""),
    }
    for _, reason in found:
        assert reason in out
    statuses = [row["status"] for row in results()]
    # The others are tried twice.
    assert (statuses.count("crash"), statuses.count("hang"), statuses.count("not a number")) == (2, 2, 2)
    assert statuses.count("misconfigured") == 1
    assert ", 4 without a result, " in out


@pytest.mark.full
def test_lack_of_memory_is_a_verdict(command: Callable[..., Outcome], trials: Trials) -> None:
    trials.ends = lambda config, number: RunEnd("failed", 1, message=OOM) if number == 0 else seconds_of(config)
    code, out, _ = command("cluster=localx4", "search.trials=3", "search.rounds=1")
    assert code == 0
    assert [row["status"] for row in results()].count("out of memory") == 1
    assert OOM in out
    first = trials.jobs[0]
    assert [job.config["mesh"] for job in trials.jobs].count(first.config["mesh"]) <= len(trials.jobs)
    # The next time it is known.
    count = len(trials.jobs)
    assert command("cluster=localx4", "search.trials=3", "search.rounds=1")[0] == 0
    assert len(trials.jobs) == count


def test_nothing_works(command: Callable[..., Outcome], trials: Trials) -> None:
    trials.ends = lambda config, number: RunEnd("failed", 1, message="rank 0 of 4 failed: FileNotFoundError: data.bin")
    code, out, _ = command("cluster=localx4", "search.trials=4")
    assert code == 1
    assert "given up: the first 3 configurations all failed" in out and "no configuration was measured" in out
    assert "FileNotFoundError: data.bin" in out
    assert len(results()) == 6 and not Path("out/best.yaml").exists()


def test_ctrl_c_keeps_what_there_is(command: Callable[..., Outcome], trials: Trials) -> None:
    trials.ends = lambda config, number: KeyboardInterrupt() if number == 2 else seconds_of(config)
    code, out, err = command("cluster=localx4", "search.trials=4")
    assert (code, err) == (130, "autolaunch: ended by Ctrl-C\n")
    assert len(results()) == 2 and "run the best:" in out
    assert Path("out/best.yaml").is_file()
    # Going on repeats nothing but what was interrupted.
    trials.ends = lambda config, number: seconds_of(config)
    before = [candidate_of(job.config) for job in trials.jobs]
    code, out, _ = command("cluster=localx4", "search.trials=4")
    assert code == 0 and "2 trials are known from before" in out
    after = [candidate_of(job.config) for job in trials.jobs[len(before) :]]
    first_round = [
        way
        for job, way in zip(trials.jobs[len(before) :], after, strict=True)
        if job.config["trainer"]["max_steps"] == 5
    ]
    assert not set(before[:2]) & set(first_round)
    assert first_round[0] == before[2]
    assert len({job.output_dir for job in trials.jobs}) == len(trials.jobs)


@pytest.mark.every  # above and below some trials are known, too
def test_the_same_again_runs_nothing(command: Callable[..., Outcome], trials: Trials) -> None:
    assert command("cluster=localx4", "search.trials=4")[0] == 0
    count, first = len(trials.jobs), results()
    code, out, _ = command("cluster=localx4", "search.trials=4")
    assert (code, len(trials.jobs)) == (0, count)
    assert results() == first and "run the best:" in out
    # Another training is another search.
    assert command("cluster=localx4", "search.trials=1", "data.batch_size=32", "search.rounds=1")[0] == 0
    assert len(trials.jobs) == count + 1


@pytest.mark.full
def test_trials_of_another_directory(command: Callable[..., Outcome], trials: Trials) -> None:
    assert command("cluster=localx4", "search.trials=3")[0] == 0
    Path("out").rename("earlier")
    count = len(trials.jobs)
    assert command("cluster=localx4", "search.trials=3", "search.resume=earlier")[0] == 0
    assert len(trials.jobs) == count
    assert Path("out/best.yaml").is_file() and Path(results()[0]["directory"]).is_dir()


@pytest.mark.full
def test_a_launcher_that_loses_its_jobs(
    command: Callable[..., Outcome], trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """submitit raises for a whole batch when one of its jobs died; what the others have measured is kept."""
    from hydra._internal.core_plugins.basic_launcher import BasicLauncher

    class UncompletedJobError(Exception):
        pass

    launched = BasicLauncher.launch

    def launch_and_lose(self: BasicLauncher, job_overrides: Any, initial_job_idx: int) -> Any:
        if initial_job_idx != 1:
            launched(self, job_overrides, initial_job_idx)
        raise UncompletedJobError(
            "Job 7 (task: 0) with path /x/7_0_result.pkl\nhas not produced any output (state: NODE_FAIL)"
        )

    monkeypatch.setattr(BasicLauncher, "launch", launch_and_lose)
    assert command("cluster=localx4", "search.trials=3", "search.rounds=1")[0] == 0
    rows = results()
    assert [row["status"] for row in rows].count("measured") == 3
    lost = next(row for row in rows if row["status"] == "lost")
    assert lost["reason"].startswith("UncompletedJobError: Job 7 (task: 0)") and "NODE_FAIL" in lost["reason"]


def test_jobs_of_several_tasks_are_refused(
    command: Callable[..., Outcome], trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As submitit has them: each task would start all ranks of a trial."""
    from hydra._internal.core_plugins.basic_launcher import BasicLauncher

    monkeypatch.setattr(BasicLauncher, "params", {"nodes": 1, "tasks_per_node": 4}, raising=False)
    code, _, err = command("cluster=localx4")
    assert code == 2
    told = Told("hydra.launcher.tasks_per_node=4", "one process", "one node", write="hydra.launcher.tasks_per_node=1")
    assert_only_told(err, told)
    assert trials.jobs == []


def test_a_single_run_is_no_search(
    command: Callable[..., Outcome], trials: Trials, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["search=auto", "mesh=2"]) == 2
    told = Told("search=auto", "single run", write="autolaunch -m search=auto mesh=2")
    assert_only_told(capfd.readouterr().err, told)


def test_plain_sweeps_are_as_before(
    command: Callable[..., Outcome], trials: Trials, capfd: pytest.CaptureFixture[str]
) -> None:
    code = cli.run(["-m", "mesh=2,1x2", "output_dir=plain", "trainer.max_steps=4"])
    out = capfd.readouterr().out
    assert code == 0 and trials.ways == ["2", "1x2"]
    assert "2 jobs, 0 failed, in plain" in out and not Path("plain/results.csv").exists()
    assert [job.config["search"] for job in trials.jobs] == [None, None]
