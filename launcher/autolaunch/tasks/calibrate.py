"""calibrate: measure this machine for the planner and write it as a cluster, for `cluster=<file>` and `cluster=local`.

This is the part of the process that was started: it starts one process per rank and waits. Without torch, since loading
it would only delay them; `autolaunch.tasks.calibration` measures.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from autolaunch.cluster import hardware_of
from autolaunch.job import ResolvedJob
from autolaunch.launch.devices import visible_devices
from autolaunch.launch.place import Place
from autolaunch.this_machine import this_machine
from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.planner.hardware import Hardware

MEASURING = "autolaunch.tasks.calibration:measure"
"""The task of the ranks."""

START_SECONDS, COLLECTIVE_SECONDS = 120.0, 60.0


class CalibrationFailedError(RuntimeError):
    """The ranks could not measure at all; the message is theirs."""


def run(job: ResolvedJob, place: Place) -> dict[str, Any]:
    """Calibrate with as many ranks as `cluster` has devices here; without `cluster` with all of this machine's.

    Writes `<output_dir>/cluster.yaml`, and the same to the user's cache, where `cluster=local` finds it. Under torchrun
    or srun the ranks that were started measure, those of several nodes together.

    Raises:
        ConfigError: the cluster is another one than this machine.
        CalibrationFailedError: the ranks could not be started, or did not end.
    """
    if place.world_size > 1:
        return _measure_here(job, place)
    cluster = job.config["cluster"] or this_machine(accelerator=job.config["trainer"]["accelerator"])
    hardware = hardware_of(cluster)
    _check_is_here(hardware, job.config["trainer"]["accelerator"])
    config = {**job.config, "cluster": dict(cluster)}
    if hardware.devices == 1:
        return _measure_here(dataclasses.replace(job, config=config), place)
    from autolaunch.launch.local import run_local

    launch = {**config["launch"], "collective_timeout": COLLECTIVE_SECONDS, "start_timeout": START_SECONDS}
    config = {**config, "task": MEASURING, "launch": launch}
    end = run_local(dataclasses.replace(job, config=config, world_size=hardware.devices), launch)
    job.write()
    if end.status == "interrupted":
        raise KeyboardInterrupt
    if end.exit_code:
        raise CalibrationFailedError(end.message)
    return {}


def _measure_here(job: ResolvedJob, place: Place) -> dict[str, Any]:
    from autolaunch.tasks.calibration import measure

    return measure(job, place)


def _check_is_here(hardware: Hardware, accelerator: str) -> None:
    kind, count = visible_devices(accelerator)
    here = "cuda" if kind == "gpu" else "cpu"
    if hardware.device != here or hardware.nodes > 1 or (count is not None and hardware.devices > count):
        size = min(hardware.devices, count) if count is not None else hardware.devices_per_node
        raise ConfigError(
            f"cluster: {hardware.name}, {hardware.nodes} x {hardware.devices_per_node} {hardware.device}",
            "calibrate measures the machine that it runs on"
            + ("; start it on several nodes with torchrun or srun" if hardware.nodes > 1 else ""),
            f"cluster=local, or cluster=localxN for N ranks ({kind})",
            f"autolaunch calibrate cluster=localx{size}",
        )
