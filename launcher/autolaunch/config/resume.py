"""From what `ckpt_path` says to a checkpoint that is whole. Torch-free: checked before a process starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autolaunch_strategies.checkpoint.files import WRITING, complete_checkpoints, problem_with
from autolaunch_strategies.config import ConfigError


def resolve_ckpt_path(config: Mapping[str, Any], output_dir: Path) -> str | None:
    """The absolute path of the checkpoint that `ckpt_path` means; None to start from scratch.

    `last` is the furthest trained whole checkpoint in `<output_dir>/checkpoints`; for a run in
    `outputs/<name>/<date>_<time>` or else that of the newest earlier run of its name. Where there has never been one,
    `fit` starts from scratch, so that one command serves the first start of a job and every restart of it.

    Raises:
        ConfigError: it does not exist, or is damaged or half-written; the previous whole one is offered.
    """
    asked = config["ckpt_path"]
    if asked is None:
        return None
    if asked != "last":
        path = Path(asked).expanduser().absolute()
        _check(path, f"ckpt_path={asked}")
        return str(path)
    runs = output_dir.parent
    earlier: list[Path] = []
    if runs.name == config["name"] and runs.parent.name == "outputs" and runs.is_dir():
        earlier = sorted((item for item in runs.iterdir() if item != output_dir), reverse=True)  # named by time
    for directory in (item / "checkpoints" for item in (output_dir, *earlier)):
        candidates = _candidates(directory)
        whole = complete_checkpoints(directory)
        if candidates and not whole:
            _check(candidates[-1], "ckpt_path=last")
        if whole:
            return str(whole[-1])
    if config["task"] == "fit":
        return None
    raise ConfigError(
        "ckpt_path=last",
        f"there is no checkpoint in {output_dir / 'checkpoints'}" + (", nor in an earlier run" if earlier else ""),
        "the path of a checkpoint, or the output_dir of the run that wrote one",
        f"autolaunch {config['task']} ckpt_path=outputs/run/<date>_<time>/checkpoints/<name>",
    )


def damage_passed_over(chosen: Path) -> str | None:
    """Which newer checkpoint than `chosen` in its directory is damaged, and how; None if none is."""
    newer = [item for item in _candidates(chosen.parent) if item.stat().st_mtime_ns > chosen.stat().st_mtime_ns]
    damaged = ((item, problem_with(item)) for item in reversed(newer))
    return next((f"{item} {problem}" for item, problem in damaged if problem is not None), None)


def _candidates(directory: Path) -> list[Path]:
    """What stands in a checkpoint directory, oldest first; not what was being written when its run was killed."""
    if not directory.is_dir():
        return []
    entries = [item for item in directory.iterdir() if item.is_dir() and not item.name.endswith((WRITING, ".replaced"))]
    return sorted(entries, key=lambda item: item.stat().st_mtime_ns)


def _check(path: Path, where: str) -> None:
    problem = problem_with(path)
    if problem is None:
        return
    whole = [item for item in complete_checkpoints(path.parent) if item != path]
    raise ConfigError(
        where,
        f"{path} {problem}",
        "a complete checkpoint" if whole else f"a complete checkpoint; there is none in {path.parent}",
        f"ckpt_path={whole[-1]}" if whole else "",
    )
