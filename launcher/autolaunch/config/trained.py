"""What a run with trained weights takes from the job that trained them: model, adapter, data. Torch-free.

The job of a checkpoint stands in the directory of its run. It is composed like an experiment file, so that whatever the
command line says wins over it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException

from autolaunch.config.command_line import CommandLine, typed_keys
from autolaunch.config.compose import Composed, compose
from autolaunch.config.recorded import recorded_model
from autolaunch.config.resume import resolve_ckpt_path
from autolaunch.config.sources import JOB_FILE, TAKEN
from autolaunch.job import ResolvedJob
from autolaunch_strategies.checkpoint.record import changes, in_words, plain_record, record_of
from autolaunch_strategies.config import ConfigError, ConfigErrors, quoted

TAKING_TASKS = ("validate", "test", "predict", "generate")
"""Tasks that ask the job of their checkpoint what its weights belong to; `export` reads that job itself."""


def job_file_of(checkpoint: Path) -> Path | None:
    """The file with the job of the run that wrote a checkpoint; None if it does not stand in a run's directory."""
    file = checkpoint.parent.parent / JOB_FILE
    return file if file.is_file() else None


def trained_config(checkpoint: Path) -> dict[str, Any] | None:
    """The config of the run that wrote `checkpoint`, or None if it does not stand in a run's directory.

    Raises:
        ConfigError: the file that holds it can't be read, or holds something else.
    """
    job_file = job_file_of(checkpoint)
    if job_file is None:
        return None
    try:
        config = ResolvedJob.read(job_file).config
        if not isinstance(config["model"], dict):
            raise TypeError("its model is no mapping")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
        raise ConfigError(
            f"ckpt_path={checkpoint}",
            f"the job of its run, {job_file}, can't be read: {type(error).__name__}: {error}",
            "a checkpoint in the directory of its run; or anywhere else, with the keys of its model typed",
        ) from error
    return config


def with_trained_job(line: CommandLine, composed: Composed, output_dir: Path) -> tuple[CommandLine, Composed]:
    """A command line and what it composes to, with the job of its checkpoint below what was typed.

    Nothing changes for other tasks, without a checkpoint in the directory of a run, and where an `experiment=` says
    already what is run.

    Args:
        output_dir: where the run will write; `ckpt_path=last` looks there.

    Raises:
        ConfigError: the job can't be read; or a sweep over checkpoints of several runs that trained different things.
    """
    config = composed.config
    if config.get("task") not in TAKING_TASKS or "experiment" in _keys(line):
        return line, composed
    files = []
    for typed in _checkpoints(line, config.get("ckpt_path")):
        known = {"ckpt_path": typed, "task": config.task, "name": config.get("name")}
        try:
            checkpoint = resolve_ckpt_path(known, output_dir)
        except (ConfigError, ConfigErrors):
            return line, composed  # which is told with everything else that is wrong
        file = None if checkpoint is None else job_file_of(Path(checkpoint))
        if file is None:
            return line, composed
        trained_config(Path(checkpoint or ""))
        files.append(file)
    if not files:
        return line, composed
    other = next((file for file in files[1:] if _what_is_taken(file) != _what_is_taken(files[0])), None)
    if other is not None:
        raise ConfigError(
            f"-m with ckpt_path={files[0].parent.parent}",
            f"and {other.parent.parent}: these runs trained other models, or on other data",
            "the checkpoints of runs that trained the same; a sweep for each",
        )
    with_job = replace(line, overrides=[*line.overrides, f"experiment={quoted(str(files[0]))}"])
    try:
        taken = compose(with_job)
    except (ConfigError, ConfigErrors):
        return line, composed
    if any(error.where.startswith("experiment=") for error in taken.errors):
        return line, composed  # a primary config of one's own, without these groups
    return with_job, taken


def takes_from_job(overrides: Sequence[str]) -> bool:
    """Whether `with_trained_job` added the job of a checkpoint to these overrides."""
    return any(item.startswith("experiment=") and item.rstrip("'\"").endswith(JOB_FILE) for item in overrides)


def check_model(config: Mapping[str, Any], checkpoint: Path, overrides: Sequence[str]) -> None:
    """Check that the model of a job is the one whose weights a checkpoint holds; classes of one's own are not compared.

    Args:
        config: the resolved job; its `ckpt_path` as it was typed.
        checkpoint: what that means.
        overrides: what was typed.

    Raises:
        ConfigError: the model is another one.
    """
    of_the_model = [item for item in overrides if item.lstrip("+~").startswith(("model=", "model.", "experiment="))]
    own = [item for item in of_the_model if not takes_from_job([item])]
    if takes_from_job(overrides) and not own:
        return
    if changed := another_model(config, checkpoint):
        kept = [item for item in overrides if item not in of_the_model and not item.startswith("task=")]
        raise ConfigError(
            f"ckpt_path={config['ckpt_path']}" + (f" with {own[0]}" if own else ""),
            f"{checkpoint} was written by a run with another {in_words(changed)}",
            "the model of that run" + (", which is taken from its job" if job_file_of(checkpoint) else ""),
            shlex.join(["autolaunch", config["task"], *kept]) if job_file_of(checkpoint) else "",
        )


def another_model(config: Mapping[str, Any], checkpoint: Path) -> dict[str, str]:
    """How the model of a job is another than that of the run that wrote a checkpoint, in words; empty if it is not."""
    if config["module"] is not None or "_target_" in config["model"]:
        return {}
    return changes(record_of(checkpoint), {"model": plain_record(recorded_model(config))})


def _keys(line: CommandLine) -> set[str]:
    return set(typed_keys(line.overrides))


def _checkpoints(line: CommandLine, composed: Any) -> list[str]:
    """Every value of `ckpt_path`, of which a sweep has several.

    Args:
        composed: the value that was composed.
    """
    typed = [item for item in line.overrides if item.lstrip("+").startswith("ckpt_path=")]
    with suppress(OverrideParseException):  # which has been told
        for item in OverridesParser.create().parse_overrides(typed):
            if item.is_sweep_override() and item.is_discrete_sweep():
                return [str(value).strip("'\"") for value in item.sweep_string_iterator()]
    return [composed] if isinstance(composed, str) else []


def _what_is_taken(file: Path) -> Any:
    config = json.loads(file.read_text(encoding="utf-8"))["config"]
    return {key: config.get(key) for key in TAKEN}
