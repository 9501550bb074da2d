"""calibrate: measure this machine for the planner and write it as a cluster, for `cluster=<file>` and `cluster=local`.

This is what the command decides before it starts one process per rank. Without torch, since loading it would only
delay them; `autolaunch.tasks.calibration` measures.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from autolaunch.config.cluster import hardware_of
from autolaunch.machine.devices import visible_devices
from autolaunch.machine.this_machine import this_machine
from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.planner.hardware import Hardware

MEASURING = "autolaunch.tasks.calibrate.measure:measure"
"""The task of the ranks."""

START_SECONDS, COLLECTIVE_SECONDS = 120.0, 60.0


def calibration(config: Mapping[str, Any], started_ranks: int | None) -> tuple[dict[str, Any], int]:
    """(the config of the ranks that measure, with the time when this `begun`; how many they are).

    As many as `cluster` has devices here, without `cluster` as this machine has; under torchrun or srun those that were
    started, of several nodes together.

    Raises:
        ConfigError: the cluster is another one than this machine.
    """
    # The wait for others is what it measures: no hang.
    launch = {
        **config["launch"],
        "collective_timeout": COLLECTIVE_SECONDS,
        "first_step_timeout": COLLECTIVE_SECONDS,
        "hang_timeout": None,
        "start_timeout": START_SECONDS,
    }
    settled = {**config, "task": MEASURING, "launch": launch, "begun": time.time()}
    if started_ranks is not None:
        return settled, started_ranks
    accelerator = config["trainer"]["accelerator"]
    cluster = config["cluster"] or this_machine(accelerator=accelerator)
    hardware = hardware_of(cluster)
    _check_is_here(hardware, accelerator)
    return {**settled, "cluster": dict(cluster)}, hardware.devices


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
