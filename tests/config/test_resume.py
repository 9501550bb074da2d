"""From `ckpt_path` to a whole checkpoint, before a process starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autolaunch.config.resume import damage_passed_over, resolve_ckpt_path
from autolaunch_strategies.checkpoint.files import MANIFEST, complete_checkpoints, problem_with, write_manifest
from autolaunch_strategies.config import ConfigError
from tests.support.messages import Told, assert_only_told, assert_told


def checkpoint(directory: Path, step: int) -> Path:
    path = directory / f"step_{step:07d}.ckpt"
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"x" * 100)
    (path / "meta.pt").write_bytes(b"y" * 10)
    write_manifest(path, step, "2")
    os.utime(path, (step, step))
    return path


def resolve(ckpt_path: str | None, output_dir: Path, task: str = "fit") -> str | None:
    return resolve_ckpt_path({"ckpt_path": ckpt_path, "task": task, "name": "run"}, output_dir)


def refusal(ckpt_path: str, output_dir: Path, task: str = "fit") -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolve(ckpt_path, output_dir, task)
    return caught.value


def test_last_is_the_furthest_trained(tmp_path: Path) -> None:
    checkpoint(tmp_path / "checkpoints", 20)
    checkpoint(tmp_path / "checkpoints", 5)
    assert resolve("last", tmp_path) == str(tmp_path / "checkpoints" / "step_0000020.ckpt")


def test_last_of_an_earlier_run_of_the_same_name(tmp_path: Path) -> None:
    runs = tmp_path / "outputs" / "run"
    checkpoint(runs / "2026-01-01_00-00-00" / "checkpoints", 9)
    newest = checkpoint(runs / "2026-01-02_00-00-00" / "checkpoints", 3)
    (runs / "2026-01-03_00-00-00").mkdir()
    assert resolve("last", runs / "2026-01-04_00-00-00") == str(newest)


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
    os.utime(bad, (10, 10))
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


def test_complete_checkpoints_are_sorted_by_step_and_skip_links(tmp_path: Path) -> None:
    late, early = checkpoint(tmp_path, 20), checkpoint(tmp_path, 5)
    (tmp_path / "last.ckpt").symlink_to(late)
    assert complete_checkpoints(tmp_path) == [early, late]
