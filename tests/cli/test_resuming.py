"""Going on from a checkpoint: what has to be the same, what may change and then counts, and which one is the last."""

from __future__ import annotations

from pathlib import Path

import pytest

from autolaunch.cli import run
from autolaunch_strategies.checkpoint.files import write_manifest
from autolaunch_strategies.checkpoint.record import record_of
from tests.support.commands import Commands, Run, assert_same_curve
from tests.support.messages import Told, assert_only_told

pytestmark = pytest.mark.timeout(240)

TINY = (
    *("model.num_layers=2", "model.hidden_size=32", "model.intermediate_size=64", "model.num_heads=4"),
    *("model.num_kv_heads=2", "data.seq_len=32", "data.batch_size=8", "scheduler.total_steps=8"),
    "trainer.accelerator=cpu",
)


def _checkpoint(directory: Path, **run: object) -> Path:
    path = directory / "checkpoints" / "step_0000005.ckpt"
    path.mkdir(parents=True)
    (path / "meta.pt").write_bytes(b"x")
    write_manifest(path, 5, "2", run=run)
    return path


def test_what_differs_is_refused_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _checkpoint(tmp_path / "run", seed=3, optimizer="torch.optim.SGD", batch_size=16)
    assert run([f"output_dir={tmp_path / 'run'}", "ckpt_path=last", "mesh=2", "resume.allow=[seed]"]) == 2
    facts = ("optimizer (torch.optim.SGD there, torch.optim.AdamW here)", "seed (3 there, 0 here)")
    told = Told(f"ckpt_path={path}", *facts, allowed=None, write="resume.allow=[optimizer,seed]")
    assert_only_told(capsys.readouterr().err, told)
    assert [item.name for item in (tmp_path / "run").iterdir()] == ["checkpoints"]


def test_another_job_of_the_default_name_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = _checkpoint(tmp_path / "outputs" / "run" / "2026-01-01_00-00-00", seed=3)
    assert run(["ckpt_path=last"]) == 2
    told = Told("ckpt_path=last", "another job", "seed (3 there, 0 here)", str(path), allowed=None, write="name=my_job")
    assert_only_told(capsys.readouterr().err, told)
    assert len(list((tmp_path / "outputs" / "run").iterdir())) == 1


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    return Commands(tmp_path_factory.mktemp("resuming"), *TINY, timeout=200)


@pytest.fixture(scope="module")
def half(command: Commands) -> Run:
    return command("mesh=1", "trainer.max_steps=3")


@pytest.mark.full
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        pytest.param(("optimizer.lr=0.02",), "optimizer.lr (0.001 there, 0.02 here)", id="lr"),
        pytest.param(
            ("optimizer.weight_decay=0.9",),
            "optimizer.weight_decay (0.1 there, 0.9 here)",
            id="decay",
            marks=pytest.mark.every,
        ),
        pytest.param(
            ("optimizer=sgd", "resume.allow=[optimizer]", "optimizer.lr=0.1"), "begins without state", id="optimizer"
        ),
    ],
)
def test_what_is_typed_counts_on_every_mesh(changes: tuple[str, ...], told: str, command: Commands, half: Run) -> None:
    again = (*changes, "trainer.max_steps=6", f"ckpt_path={half.checkpoint}")
    alone, two = command("mesh=1", *again), command("mesh=2", *again)
    assert told in alone.screen and told in two.screen
    assert "mesh (1 there, 2 here)" in two.screen and "trainer.max_steps (3 there, 6 here)" in two.screen
    assert_same_curve(two, alone)
    unchanged = command("mesh=1", "trainer.max_steps=6", f"ckpt_path={half.checkpoint}")
    assert alone.rows[0]["loss"] == pytest.approx(unchanged.rows[0]["loss"], rel=1e-6)  # the same weights and data
    assert alone.rows[-1]["loss"] != pytest.approx(unchanged.rows[-1]["loss"], rel=1e-5)
    if lr := dict(item.split("=", 1) for item in changes).get("optimizer.lr"):
        ratio = float(lr) / 0.001
        assert [row["lr"] for row in alone.rows] == pytest.approx([ratio * row["lr"] for row in unchanged.rows])


@pytest.mark.full
def test_the_last_of_the_runs_of_a_name(command: Commands) -> None:
    runs = command.directory / "outputs" / "run"
    job = ("mesh=1", "checkpoint.every_n_steps=1", "ckpt_path=last")
    first = command(*job, "trainer.max_steps=2", into=runs / "b")
    second = command(*job, "trainer.max_steps=4", into=runs / "a")
    assert f"ckpt_path=last: step 2, {first.checkpoint}" in second.screen
    assert [row["step"] for row in second.rows] == [3, 4]
    third = command(*job, "trainer.max_steps=5", into=runs / "c")
    assert [row["step"] for row in third.rows] == [5]
    record = record_of(third.checkpoint)
    assert (record["optimizer"], record["batch_size"], record["seq_len"]) == ("torch.optim.AdamW", 8, 32)
    other = command(*job, "model.hidden_size=64", into=runs / "d", code=2)
    told = Told("ckpt_path=last", "another job", "hidden_size 32 there, 64 here", allowed=None, write="name=my_job")
    assert_only_told(other.screen, told)
    assert not (runs / "d" / "logs").exists()
