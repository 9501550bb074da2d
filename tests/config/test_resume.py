"""From `ckpt_path` to a whole checkpoint, before a process starts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autolaunch.config.resume import check_that_it_goes_on, damage_passed_over, resolve_ckpt_path, what_last_is
from autolaunch_strategies.checkpoint.files import MANIFEST, complete_checkpoints, problem_with, write_manifest
from autolaunch_strategies.config import ConfigError
from tests.support.messages import Told, assert_only_told, assert_told


def checkpoint(directory: Path, step: int, written: float | None = None, **run: Any) -> Path:
    path = directory / f"step_{step:07d}.ckpt"
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"x" * 100)
    (path / "meta.pt").write_bytes(b"y" * 10)
    write_manifest(path, step, "2", run=run, written=written)
    return path


def resolve(ckpt_path: str | None, output_dir: Path, task: str = "fit") -> str | None:
    return resolve_ckpt_path({"ckpt_path": ckpt_path, "task": task, "name": "run"}, output_dir)


def refusal(ckpt_path: str, output_dir: Path, task: str = "fit") -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolve(ckpt_path, output_dir, task)
    return caught.value


def test_last_is_the_newest_by_what_checkpoints_say(tmp_path: Path) -> None:
    former = checkpoint(tmp_path / "checkpoints", 20, written=1e9)  # given up, and gone back to an earlier one
    newest = checkpoint(tmp_path / "checkpoints", 12, written=1e9 + 60)
    checkpoint(tmp_path / "checkpoints", 10, written=1e9 - 60)
    for number, path in enumerate((newest, former)):  # as a copy leaves them
        os.utime(path, (number, number))
        os.utime(path / MANIFEST, (number, number))
    assert resolve("last", tmp_path) == str(newest)


def test_checkpoints_that_do_not_say_when_are_older_and_sorted_by_step(tmp_path: Path) -> None:
    old = [checkpoint(tmp_path / "checkpoints", step) for step in (20, 5)]
    for path in old:
        manifest = json.loads((path / MANIFEST).read_text())
        (path / MANIFEST).write_text(
            json.dumps({key: manifest[key] for key in ("step", "mesh", "files")} | {"format": 2})
        )
    assert resolve("last", tmp_path) == str(old[0])
    newest = checkpoint(tmp_path / "checkpoints", 3)
    assert complete_checkpoints(tmp_path / "checkpoints") == [old[1], old[0], newest]


def test_last_of_an_earlier_run_of_the_same_name(tmp_path: Path) -> None:
    runs = tmp_path / "outputs" / "run"
    checkpoint(runs / "2026-01-01_00-00-00" / "checkpoints", 9, written=1e9)
    newest = checkpoint(runs / "2026-01-02_00-00-00" / "checkpoints", 3, written=1e9 + 60)
    (runs / "2026-01-03_00-00-00").mkdir()
    assert resolve("last", runs / "2026-01-04_00-00-00") == str(newest)
    assert what_last_is(newest, runs / "2026-01-04_00-00-00") == f"ckpt_path=last: step 3, {newest}"
    assert what_last_is(newest, newest.parent.parent) is None


def test_a_run_that_is_called_otherwise_is_named(tmp_path: Path) -> None:
    checkpoint(tmp_path / "outputs" / "runs" / "2026-01-01_00-00-00" / "checkpoints", 9)
    told = refusal("last", tmp_path / "outputs" / "run" / "2026-01-04_00-00-00", "validate")
    assert_told(told, "ckpt_path=last", "did you mean name=runs?", write="autolaunch validate name=runs ckpt_path=last")


def test_the_name_of_a_directory_is_no_time(tmp_path: Path) -> None:
    """The hour that comes twice when summer ends, another time zone, a directory that was copied or renamed."""
    runs = tmp_path / "outputs" / "run"
    newest = checkpoint(runs / "2026-10-25_02-10-00" / "checkpoints", 9, written=1e9 + 60)
    checkpoint(runs / "2026-10-25_02-50-00" / "checkpoints", 3, written=1e9)
    assert resolve("last", runs / "2026-10-25_02-55-00") == str(newest)


def test_another_directory_beside_is_not_an_earlier_run(tmp_path: Path) -> None:
    checkpoint(tmp_path / "other" / "checkpoints", 9)
    assert resolve("last", tmp_path / "mine") is None


def test_last_starts_from_scratch_only_for_fit(tmp_path: Path) -> None:
    assert resolve("last", tmp_path) is None
    told = Told(
        "ckpt_path=last",
        "no checkpoint",
        f"{tmp_path}/checkpoints",
        allowed=("output_dir",),
        write="autolaunch validate ckpt_path=outputs/run/<date>_<time>/checkpoints/<name>",
    )
    assert_only_told(refusal("last", tmp_path, "validate"), told)


def test_what_a_killed_run_was_writing_is_passed_over(tmp_path: Path) -> None:
    good = checkpoint(tmp_path / "checkpoints", 5)
    (tmp_path / "checkpoints" / "step_0000010.ckpt.writing").mkdir()
    assert resolve("last", tmp_path) == str(good)


@pytest.mark.parametrize(
    ("damage", "facts"),
    [
        (lambda p: (p / "__0_0.distcp").write_bytes(b"x" * 99), ["damaged", "__0_0.distcp", "99 bytes", "100"]),
        (lambda p: (p / "__0_0.distcp").unlink(), ["damaged", "__0_0.distcp", "missing"]),
        (lambda p: (p / MANIFEST).unlink(), ["not a complete checkpoint", f"no readable {MANIFEST}"]),
        (lambda p: (p / MANIFEST).write_text('{"fi'), ["not a complete checkpoint", f"no readable {MANIFEST}"]),
    ],
    ids=["short", "missing", "no-manifest", "broken-manifest"],
)
def test_a_damaged_checkpoint_gives_way_to_the_previous_one_for_last_only(
    tmp_path: Path, damage: Callable[[Path], Any], facts: list[str]
) -> None:
    good, bad = checkpoint(tmp_path / "checkpoints", 5), checkpoint(tmp_path / "checkpoints", 10)
    damage(bad)
    told = Told(f"ckpt_path={bad}", str(bad), *facts, allowed="a complete checkpoint", write=f"ckpt_path={good}")
    assert_only_told(refusal(str(bad), tmp_path), told)
    assert resolve("last", tmp_path) == str(good)
    passed_over = damage_passed_over(good)
    assert passed_over is not None
    assert all(fact in passed_over for fact in [str(bad), *facts])


def test_a_damaged_checkpoint_without_another(tmp_path: Path) -> None:
    bad = checkpoint(tmp_path / "checkpoints", 10)
    (bad / "meta.pt").unlink()
    told = Told(f"ckpt_path={bad}", str(bad), "damaged", "meta.pt is missing", allowed=(f"none in {bad.parent}",))
    assert_only_told(refusal(str(bad), tmp_path), told)


def test_absent_and_empty_paths(tmp_path: Path) -> None:
    absent, empty = tmp_path / "absent.ckpt", tmp_path / "empty.ckpt"
    empty.touch()
    assert problem_with(absent) == "does not exist"
    assert problem_with(empty) == "is an empty file"
    assert_told(refusal(str(absent), tmp_path), f"ckpt_path={absent}", str(absent), "does not exist")
    assert_told(refusal("lst", tmp_path), "ckpt_path=lst", "does not exist", write="ckpt_path=last")
    there = checkpoint(tmp_path / "checkpoints", 100)
    for asked, meant in ((there.with_name("step_000100.ckpt"), there), (tmp_path / "chekpoints" / there.name, there)):
        assert_told(refusal(str(asked), tmp_path), f"ckpt_path={asked}", "does not exist", write=f"ckpt_path={meant}")


def test_a_directory_above_checkpoints_is_told_with_the_newest_below_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, swept = Path("outputs", "small"), Path("outputs", "swept")
    run_of_it, sweep = name / "2026-01-02_00-00-00", swept / "2026-01-03_00-00-00_sweep"
    monkeypatch.chdir(tmp_path)
    checkpoint(tmp_path / name / "2026-01-01_00-00-00" / "checkpoints", 9, written=1e9)
    of_it = name / checkpoint(tmp_path / run_of_it / "checkpoints", 5, written=1e9 + 60).relative_to(tmp_path / name)
    damaged = checkpoint(tmp_path / run_of_it / "checkpoints", 7, written=1e9 + 90)
    (damaged / "meta.pt").unlink()
    of_sweep = swept / checkpoint(tmp_path / sweep / "1" / "checkpoints", 3, written=1e9).relative_to(tmp_path / swept)
    for asked, newest in (
        (name, of_it),
        (tmp_path / name, tmp_path / of_it),
        (run_of_it / "checkpoints", of_it),
        (sweep, of_sweep),
        (swept, of_sweep),
        (Path("outputs"), of_it),
    ):
        told = Told(
            f"ckpt_path={asked}",
            "neither a checkpoint nor the directory of a run",
            allowed="a complete checkpoint, or the directory of a run that has written one",
            write=f"ckpt_path={newest}",
        )
        assert_only_told(refusal(str(asked), tmp_path / "here"), told)
        assert resolve(str(newest), tmp_path / "here") == str(tmp_path / newest)
    for absent in ("outputs/smal", "outputs/unlike_any"):
        error = refusal(absent, tmp_path / "here")
        meant = f"ckpt_path={tmp_path / of_it}" if absent == "outputs/smal" else ""  # else that of any other run
        assert_told(error, f"ckpt_path={absent}", "does not exist", write=meant)


def test_a_directory_without_checkpoints_below_is_said_to_hold_none(tmp_path: Path) -> None:
    deep = tmp_path / "deep"
    checkpoint(deep / "one" / "two" / "three" / "checkpoints", 5)  # further down than runs are
    (deep / "one" / "checkpoints" / "step_0000001.ckpt.writing").mkdir(parents=True)
    told = Told(f"ckpt_path={deep}", str(deep), "not a complete checkpoint", allowed=(f"none in {deep}",))
    assert_only_told(refusal(str(deep), tmp_path / "here"), told)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_directory_that_can_not_be_read_holds_none(tmp_path: Path) -> None:
    (tmp_path / "runs" / "closed").mkdir(parents=True)
    (tmp_path / "runs" / "closed").chmod(0)
    newest = checkpoint(tmp_path / "runs" / "open" / "checkpoints", 5)
    assert_told(
        refusal(str(tmp_path / "runs"), tmp_path), f"ckpt_path={tmp_path / 'runs'}", write=f"ckpt_path={newest}"
    )


def test_complete_checkpoints_are_sorted_by_time_and_skip_links(tmp_path: Path) -> None:
    early, late = checkpoint(tmp_path, 5), checkpoint(tmp_path, 20)
    (tmp_path / "last.ckpt").symlink_to(late)
    assert complete_checkpoints(tmp_path) == [early, late]


# --- the run that wrote it ---------------------------------------------------------------------------------------

MINE = {"seed": 0, "optimizer": "torch.optim.AdamW", "model": {"hidden_size": 32}, "trainer.max_steps": 6}


def goes_on(
    path: Path, output_dir: Path, *allowed: str, ckpt_path: str = "last", name: str = "run", **here: Any
) -> None:
    config = {"ckpt_path": ckpt_path, "task": "fit", "name": name, "resume": {"allow": list(allowed)}}
    check_that_it_goes_on(config, path, output_dir, {**MINE, **here})


def test_what_may_not_change_is_refused_with_the_line_that_allows_it(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "checkpoints", 5, **MINE)
    goes_on(path, tmp_path)
    goes_on(path, tmp_path, **{"trainer.max_steps": 8})
    other = {"seed": 1, "optimizer": "torch.optim.SGD"}
    for allowed in ([], ["seed"], ["seed", "model"]):
        with pytest.raises(ConfigError) as caught:
            goes_on(path, tmp_path, *allowed, **other)
        facts = ("optimizer (torch.optim.AdamW there, torch.optim.SGD here)", "seed (0 there, 1 here)")
        assert_told(caught.value, f"ckpt_path={path}", *facts, write="resume.allow=[optimizer,seed]")
    goes_on(path, tmp_path, "seed", "optimizer", **other)


def test_another_job_of_the_default_name_is_not_continued(tmp_path: Path) -> None:
    runs = tmp_path / "outputs" / "run"
    path = checkpoint(runs / "second" / "checkpoints", 5, **{**MINE, "model": {"hidden_size": 64}})
    with pytest.raises(ConfigError) as caught:
        goes_on(path, runs / "third")
    facts = ("another job", "hidden_size 64 there, 32 here", str(path))
    assert_told(caught.value, "ckpt_path=last", *facts, allowed=("a name for each job",), write="name=my_job")
    mine = checkpoint(runs / "first" / "checkpoints", 3, written=1e9, **MINE)
    with pytest.raises(ConfigError) as caught:
        goes_on(path, runs / "third")
    assert_told(caught.value, "ckpt_path=last", *facts, write=f"ckpt_path={mine}")
    goes_on(path, runs / "third", "model")


def test_a_name_of_ones_own_or_a_path_says_which_job(tmp_path: Path) -> None:
    runs = tmp_path / "outputs" / "mine"
    path = checkpoint(runs / "first" / "checkpoints", 5, **{**MINE, "seed": 3})
    for options in ({"name": "mine"}, {"ckpt_path": str(path)}):
        with pytest.raises(ConfigError) as caught:
            goes_on(path, runs / "second", **options)
        assert_told(caught.value, f"ckpt_path={path}", "seed (3 there, 0 here)", write="resume.allow=[seed]")


def test_a_checkpoint_without_a_record_is_not_refused(tmp_path: Path) -> None:
    goes_on(checkpoint(tmp_path / "checkpoints", 5), tmp_path)
