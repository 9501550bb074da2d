"""From what `ckpt_path` says to a checkpoint that is whole, and of this job. Torch-free: before a process starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autolaunch.config.against_schema import alike
from autolaunch.config.schema import Job
from autolaunch.directories import nearest_path
from autolaunch_strategies.checkpoint.files import (
    BESIDE,
    MANIFEST,
    complete_checkpoints,
    order_of_writing,
    problem_with,
    read_manifest,
)
from autolaunch_strategies.checkpoint.record import COMPARED, changes, in_words, record_of, refuse_changes
from autolaunch_strategies.config import ConfigError, as_typed, nearest
from autolaunch_strategies.config.values import written

COMPARING_TASKS = ("fit", "plan")
"""Tasks that go on with a training, or show how they would; all others only use the weights of a checkpoint."""


def resolve_ckpt_path(config: Mapping[str, Any], output_dir: Path) -> str | None:
    """The absolute path of the checkpoint that `ckpt_path` means; None to start from scratch.

    The directory of a run means the newest whole checkpoint in it. `last` is that of `output_dir`; for a run in
    `outputs/<name>/<date>_<time>` or else that of the earlier runs of its name. Which is the newest, the checkpoints
    say. Where there has never been one, `fit` starts from scratch, so that one command serves the first start of a job
    and every restart of it.

    Raises:
        ConfigError: it does not exist, or is damaged or half-written; the previous whole one is offered.
    """
    asked = config["ckpt_path"]
    if asked is None:
        return None
    if not asked:
        allowed = "last, a complete checkpoint, or a run; null to start from scratch"
        raise ConfigError("ckpt_path=", "is empty", allowed, "ckpt_path=null")
    if asked != "last":
        path = Path(asked).expanduser().absolute()
        if (path / "checkpoints").is_dir() and not (path / MANIFEST).exists():
            return str(_newest_of_run(path, asked))
        _refuse_directory_above(path, asked)
        _check(path, f"ckpt_path={asked}")
        return str(path)
    earlier = _earlier_runs(config, output_dir)
    for directory in (output_dir / "checkpoints", *reversed(earlier)):
        candidates = _candidates(directory)
        whole = complete_checkpoints(directory)
        if candidates and not whole:
            _check(candidates[-1], "ckpt_path=last")
        if whole:
            return str(whole[-1])
    if config["task"] == "fit":
        return None
    if name := _name_meant(config, output_dir):
        raise ConfigError(
            "ckpt_path=last",
            f"there is no checkpoint of name={config['name']}; did you mean name={name}?",
            write=f"autolaunch {config['task']} {as_typed('name', name)} ckpt_path=last",
        )
    raise ConfigError(
        "ckpt_path=last",
        f"there is no checkpoint in {output_dir / 'checkpoints'}" + (", nor in an earlier run" if earlier else ""),
        "the path of a checkpoint, or the output_dir of the run that wrote one",
        f"autolaunch {config['task']} ckpt_path=outputs/run/<date>_<time>/checkpoints/<name>",
    )


def _newest_of_run(run: Path, asked: str) -> Path:
    directory = run / "checkpoints"
    candidates, whole = _candidates(directory), complete_checkpoints(directory)
    if candidates and not whole:
        _check(candidates[-1], f"ckpt_path={asked}")
    if not whole:
        raise ConfigError(f"ckpt_path={asked}", f"there is no checkpoint in {directory}", "a run that has written one")
    return whole[-1]


def _refuse_directory_above(path: Path, asked: str) -> None:
    """Raise ConfigError if checkpoints lie below a path that is none: which of them goes on is not ours to guess."""
    if _has_manifest(path) or (newest := _newest_below(path)) is None:
        return
    raise ConfigError(
        f"ckpt_path={asked}",
        f"{path} is neither a checkpoint nor the directory of a run; there are checkpoints below it",
        "a complete checkpoint, or the directory of a run that has written one",
        as_typed("ckpt_path", Path(asked) / newest.relative_to(path)),
    )


def _newest_below(path: Path) -> Path | None:
    """The newest whole checkpoint of the runs in a directory: of one, of those of a name or a sweep, of all names.

    Nothing further down is looked at, as the path may be that of anything.
    """
    inside = _directories_in(path)
    runs = [path, *inside, *(run for directory in inside for run in _directories_in(directory))]
    shelves = [path, *(run / "checkpoints" for run in runs)]
    whole = [checkpoint for shelf in shelves for checkpoint in complete_checkpoints(shelf)]
    return max(whole, key=order_of_writing, default=None)


def _has_manifest(path: Path) -> bool:
    try:
        return (path / MANIFEST).exists()
    except OSError:  # a directory that is closed to us
        return False


def _directories_in(path: Path) -> list[Path]:
    """The directories right below a path; none if it can't be read."""
    try:
        with os.scandir(path) as entries:  # knows which are directories without asking for each of many files
            return [Path(entry.path) for entry in entries if entry.is_dir()]
    except OSError:
        return []


def check_adapter(config: Mapping[str, Any], checkpoint: Path, record: Mapping[str, Any]) -> None:
    """Check that a checkpoint holds what the model of a job takes: an adapter, or all weights.

    Args:
        config: the job; its `ckpt_path` as it was typed.
        checkpoint: what that means.
        record: what the job's adapter and its frozen weights are, see `autolaunch.config.recorded`.

    Raises:
        ConfigError: an adapter for a model without one, the reverse, or another adapter or other frozen weights.
    """
    there, where = record_of(checkpoint), f"ckpt_path={config['ckpt_path']}"
    if config["task"] == "export":
        if config["export_merged"] and there and "adapter" not in there:
            raise ConfigError(
                "export_merged=true",
                f"{checkpoint} holds a whole model, and no adapter to merge into it",
                "checkpoints of runs with an adapter",
                "export_merged=false",
            )
        return
    if there.get("adapter") and not record:
        base = f" model=hf {as_typed('model.path', there['base_path'])}" if there.get("base_path") else ""
        raise ConfigError(
            where,
            f"{checkpoint} holds an adapter alone, and the job has none",
            "the adapter of its run; for a model of its own, its export with export_merged=true",
            _adapter_keys(there["adapter"]) + base,
        )
    if there and record and not there.get("adapter"):
        export = f"autolaunch export {as_typed('ckpt_path', checkpoint)} export_path=DIRECTORY"
        raise ConfigError(
            where,
            f"{checkpoint} holds a whole model, and the job trains an adapter beside a frozen one",
            "the checkpoint of a run with an adapter; to adapt this model, start from its export",
            f"{export}, then model=hf model.path=DIRECTORY",
        )
    others = changes(there, {name: record[name] for name in ("adapter", "base") if name in record})
    if others and config["task"] not in COMPARING_TASKS:
        raise ConfigError(
            where,
            f"was written by a run with another {in_words(others)}",
            "what that run had",
            _adapter_keys(there["adapter"]) if "adapter" in others else "",
        )


def _adapter_keys(adapter: Mapping[str, Any]) -> str:
    """What is typed for an adapter that was recorded."""
    keys = [f"adapter={adapter['kind']}"]
    for name, value in adapter.items():
        if name != "kind" and value not in ([], ""):
            text = written(value).replace(" ", "")
            keys.append(as_typed(f"adapter.{name}", value) if isinstance(value, str) else f"adapter.{name}={text}")
    return " ".join(keys)


def check_that_it_goes_on(
    config: Mapping[str, Any], checkpoint: Path, output_dir: Path, record: Mapping[str, Any]
) -> None:
    """Check that a training may go on from a checkpoint.

    Args:
        config: the job; its `ckpt_path` as it was typed.
        checkpoint: what that means.
        record: of the job, see `autolaunch.config.recorded`.

    Raises:
        ConfigError: the run that wrote it had another optimizer, seed, ..., which `resume.allow` does not name.
    """
    allowed = config["resume"]["allow"]
    changed = changes(record_of(checkpoint), record)
    try:
        refuse_changes(checkpoint, changed, allowed)
    except ConfigError as error:
        by_default = config["ckpt_path"] == "last" and config["name"] == Job.name
        if not by_default or checkpoint.is_relative_to(output_dir):
            raise
        own = _newest_of_this_job(config, output_dir, record)
        raise ConfigError(
            "ckpt_path=last",
            f"the newest run of the name {config['name']}, which is that of every job without one, is another job: "
            f"{checkpoint} {error.problem}",
            "a name for each job; the path of a checkpoint" + ("" if own else f", with {error.write}"),
            "name=my_job" if own is None else as_typed("ckpt_path", own),
        ) from None


def _newest_of_this_job(config: Mapping[str, Any], output_dir: Path, record: Mapping[str, Any]) -> Path | None:
    for directory in reversed(_earlier_runs(config, output_dir)):
        for checkpoint in reversed(complete_checkpoints(directory)):
            there = record_of(checkpoint)
            if there and not changes(there, record).keys() & COMPARED.keys():
                return checkpoint
    return None


def what_last_is(checkpoint: Path, output_dir: Path) -> str | None:
    """What to say of the checkpoint that `ckpt_path=last` means; None if that is the newest of the run itself."""
    if (damage := damage_passed_over(checkpoint)) is not None:
        return f"ckpt_path=last: {damage}; going on from {checkpoint} instead"
    if not checkpoint.is_relative_to(output_dir):
        return f"ckpt_path=last: step {read_manifest(checkpoint)['step']}, {checkpoint}"
    return None


def damage_passed_over(chosen: Path) -> str | None:
    """Which newer checkpoint than `chosen` in its directory is damaged, and how; None if none is."""
    newer = [item for item in _candidates(chosen.parent) if order_of_writing(item) > order_of_writing(chosen)]
    damaged = ((item, problem_with(item)) for item in reversed(newer))
    return next((f"{item} {problem}" for item, problem in damaged if problem is not None), None)


def _earlier_runs(config: Mapping[str, Any], output_dir: Path) -> list[Path]:
    """The checkpoint directories of the runs of this name that are not empty, the one last written to last."""
    runs = output_dir.parent
    if runs.name != config["name"] or runs.parent.name != "outputs" or not runs.is_dir():
        return []
    newest = {}
    for directory in (item / "checkpoints" for item in runs.iterdir() if item != output_dir):
        if candidates := _candidates(directory):
            newest[directory] = order_of_writing(candidates[-1])
    return sorted(newest, key=lambda directory: newest[directory])


def _name_meant(config: Mapping[str, Any], output_dir: Path) -> str:
    """A name like that of this run, of which there are checkpoints; or an empty string."""
    outputs = output_dir.parent.parent
    if outputs.name != "outputs" or output_dir.parent.name != config["name"]:
        return ""
    return alike(config["name"], sorted({path.parts[-4] for path in outputs.glob("*/*/checkpoints/*")}))


def _candidates(directory: Path) -> list[Path]:
    """What stands in a checkpoint directory, oldest first; not what was being written when its run was killed."""
    if not directory.is_dir():
        return []
    entries = [item for item in directory.iterdir() if item.is_dir() and not item.name.endswith(BESIDE)]
    return sorted(entries, key=order_of_writing)


def _meant(path: Path, asked: str) -> str:
    """What `ckpt_path` was most likely meant to be where nothing is at the path that it says; or an empty string."""
    if nearest(asked, ["last"], cutoff=0.6):
        return "last"
    close = nearest_path(path)
    if close is None:
        return ""
    if (close / "checkpoints").is_dir() or problem_with(close) is None:
        return str(close)
    return str(_newest_below(close) or "")


def _check(path: Path, where: str) -> None:
    problem = problem_with(path)
    if problem is None:
        return
    if not path.exists() and (meant := _meant(path, where.removeprefix("ckpt_path="))):
        raise ConfigError(
            where, f"{path} {problem}", "last, a complete checkpoint, or a run", as_typed("ckpt_path", meant)
        )
    shelves = (path.parent, path.parent / "checkpoints")  # of its own run; those of other runs are something else
    others = [item for shelf in shelves for item in complete_checkpoints(shelf) if item != path]
    other = others[-1] if others else None
    searched = f"{path}, nor beside it" if path.is_dir() and not _has_manifest(path) else f"{path.parent} itself"
    raise ConfigError(
        where,
        f"{path} {problem}",
        "a complete checkpoint" if other else f"a complete checkpoint; there is none in {searched}",
        as_typed("ckpt_path", other) if other else "",
    )
