"""launch=slurm: what its keys mean together, and what is wrong with them. Torch-free; nothing is submitted here."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autolaunch.config.schema import IN_ONE_PROCESS
from autolaunch_strategies.config import ConfigError, MeshShape
from autolaunch_strategies.config.values import Where, typed, written

LEEWAY_SECONDS = 30
"""What is added to `checkpoint.emergency_seconds` for the ranks to leave and the job to be requeued."""

_OPTIONS = {
    **dict.fromkeys(("--nodes", "-N"), "launch.nodes"),
    **dict.fromkeys(("--time", "-t"), "launch.time"),
    **dict.fromkeys(("--partition", "-p"), "launch.partition"),
    **dict.fromkeys(("--account", "-A"), "launch.account"),
    **dict.fromkeys(("--qos", "-q"), "launch.qos"),
    **dict.fromkeys(("--gpus-per-node",), "launch.gpus_per_node"),
    **dict.fromkeys(("--cpus-per-task", "-c"), "launch.cpus_per_task"),
    **dict.fromkeys(("--job-name", "-J"), "name"),
    **dict.fromkeys(("--ntasks", "-n", "--ntasks-per-node"), "mesh"),
    **dict.fromkeys(("--requeue", "--no-requeue"), "launch.max_restarts"),
    **dict.fromkeys(("--signal",), "checkpoint.emergency_seconds"),
    **dict.fromkeys(("--output", "-o", "--error", "-e", "--open-mode"), "output_dir"),
}
"""Options of sbatch that the script has already: which key says so."""

_NOT_A_JOB = ("--array", "-a", "--wrap", "--parsable", "--wait", "-W", "--test-only", "--chdir", "-D")
"""Options of sbatch that would make something else of the script than one job that is followed."""


def is_slurm(config: Mapping[str, Any]) -> bool:
    """Whether this config's run is a job of Slurm; a preview of it is not."""
    return config["launch"]["name"] == "slurm" and config["task"] not in IN_ONE_PROCESS


def ranks_per_node(config: Mapping[str, Any], ranks: int) -> int:
    """How many of the ranks each node has."""
    return ranks // config["launch"]["nodes"]


def gpus_per_node(config: Mapping[str, Any], ranks: int) -> int:
    """How many GPUs the job asks for on each node."""
    asked = config["launch"]["gpus_per_node"]
    if asked is not None:
        return asked
    return 0 if config["trainer"]["accelerator"] == "cpu" else ranks_per_node(config, ranks)


def warning_seconds(config: Mapping[str, Any]) -> int | None:
    """How long before its time limit the job is told of it, so that it can save; None if it saves nothing."""
    if config["task"] != "fit" or not config["checkpoint"]["enabled"]:
        return None
    return math.ceil(config["checkpoint"]["emergency_seconds"]) + LEEWAY_SECONDS


def seconds_of(limit: str) -> int | None:
    """The seconds of a time limit as Slurm reads it: M:S, H:M:S, D-H, D-H:M, D-H:M:S; None for anything else."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if match is None or (match[1] is None and match[3] is None):
        return None
    parts = [int(part) for part in match.groups()[1:] if part is not None]
    if match[1] is None and len(parts) == 2:
        parts = [0, *parts]
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return int(match[1] or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def fitted_to_nodes(shape: MeshShape, config: Mapping[str, Any]) -> MeshShape:
    """The mesh on the nodes of a job, with a size of -1 filled in.

    Raises:
        ConfigError: its ranks are not shared evenly by the nodes, or are more than the GPUs that are asked for.
    """
    launch, name = config["launch"], f"mesh={shape.name}"
    nodes, gpus = launch["nodes"], launch["gpus_per_node"]
    if -1 in shape.sizes.values():
        if not gpus:
            raise ConfigError(
                name,
                "-1 takes what is left of the devices, and how many a node has is not said",
                "a size, or launch.gpus_per_node beside it",
                f"{name} launch.gpus_per_node=8",
            )
        shape = shape.resolve(nodes * gpus, name)
    if shape.size % nodes:
        even = [str(count) for count in range(1, min(shape.size, 2 * nodes) + 1) if shape.size % count == 0]
        raise ConfigError(
            f"{name} with launch.nodes={nodes}",
            f"{shape.size} rank{'s' if shape.size > 1 else ''} cannot be shared evenly by {nodes} nodes",
            f"launch.nodes={', '.join(even)}",
            f"launch.nodes={even[-1]}",
        )
    per_node = ranks_per_node(config, shape.size)
    if gpus and per_node > gpus:
        raise ConfigError(
            f"{name} with launch.gpus_per_node={gpus}",
            f"{per_node} ranks on each of {nodes} node{'s' if nodes > 1 else ''}, one GPU for each",
            f"a mesh of up to {nodes * gpus} ranks, or more nodes",
            f"launch.gpus_per_node={per_node}",
        )
    return shape


def check_slurm(
    config: Mapping[str, Any], output_dir: Path, where: Where = typed, started_ranks: int | None = None
) -> Iterator[ConfigError]:
    """Everything else that is wrong with a config whose `launch` is Slurm; nothing for any other."""
    launch = config["launch"]
    if launch["name"] != "slurm" or config["task"] == "plan":
        return
    if started_ranks is not None:
        yield ConfigError(
            "launch=slurm",
            f"it submits a job, and these {started_ranks} ranks are started already",
            "the same line without torchrun or srun; launch=local here",
            "launch=local",
        )
    elif config["task"] in IN_ONE_PROCESS:
        yield ConfigError(
            "launch=slurm",
            f"{config['task']} is done by one process, here",
            "fit, validate, test, predict; launch=local for the others",
            "launch=local",
        )
    elif config["search"] is not None:
        yield ConfigError(
            f"search={config['search']['name']} with launch=slurm",
            "a search measures on the devices of the machine that it runs on",
            "the search inside a job of one node: sbatch of the same line with launch=local",
            "launch=local",
        )
    elif config["task"] == "compare" and (idle := next((k for k in ("submit", "follow") if not launch[k]), "")):
        yield ConfigError(
            where(f"launch.{idle}", False),
            "compare reads what its jobs have written, and would not wait for them",
            "true; or runs of fit, and compare with their directories when they have ended",
            f"launch.{idle}=true",
        )
    elif launch["submit"] and shutil.which("sbatch") is None:
        yield ConfigError(
            "launch=slurm",
            "there is no sbatch on this machine",
            "a machine that submits jobs; launch.submit=false, which only writes the script",
            "launch.submit=false",
        )
    yield from _time(config, where)
    for key in ("partition", "account", "qos"):
        value = launch[key]
        if value is not None and not re.fullmatch(r"[^\s\"'\\#]+", value):
            yield ConfigError(
                where(f"launch.{key}", value), "this cannot be a name", "a name without spaces, quotes and the like"
            )
    if "\n" in f"{config['name']}{output_dir}{Path.cwd()}":
        yield ConfigError("launch=slurm", "the lines of a script cannot name what holds a line break", "another name")
    for item in launch["sbatch"]:
        yield from _option(item)


def _time(config: Mapping[str, Any], where: Where) -> Iterator[ConfigError]:
    limit, warning = config["launch"]["time"], warning_seconds(config)
    if limit is None:
        return
    seconds = seconds_of(limit)
    if seconds is None:
        yield ConfigError(
            where("launch.time", limit),
            "no time limit, or one that could be read in two ways (of 4:00:00 without quotes YAML makes a number)",
            "H:M:S, D-H, D-H:M:S; in a YAML file in quotes",
            "launch.time=4:00:00",
        )
    elif warning is not None and seconds <= warning:
        yield ConfigError(
            where("launch.time", limit),
            f"the ranks are told {warning} s before the end, to save within checkpoint.emergency_seconds="
            f"{written(config['checkpoint']['emergency_seconds'])}",
            f"more than {warning // 60}:{warning % 60:02d}, or fewer checkpoint.emergency_seconds",
            "launch.time=1:00:00",
        )


def _option(item: str) -> Iterator[ConfigError]:
    """What is wrong with one of `launch.sbatch`."""
    shown = f"launch.sbatch: {item}"
    if not re.fullmatch(r"-[^\n]+", item):
        yield ConfigError(shown, "no option of sbatch", "options as sbatch has them", "'launch.sbatch=[--exclusive]'")
        return
    name = re.split(r"[= ]", item, maxsplit=1)[0]
    if not name.startswith("--"):
        name = name[:2]
    if name in _NOT_A_JOB:
        yield ConfigError(shown, "the script is one job that runs here and is followed", "other options of sbatch")
    elif name in _OPTIONS:
        value = re.split(r"[= ]", item, maxsplit=1)[1:] if item.startswith("--") else [item[2:].strip()]
        key = _OPTIONS[name]
        own = key.startswith("launch.") and key != "launch.max_restarts" and value and value[0]
        yield ConfigError(shown, f"{key} says this", f"{key}=", f"{key}={value[0]}" if own else "")
