"""cluster=...: the machines that are planned for, as the config has them, and as the planner reads them. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autolaunch_strategies.config import option
from autolaunch_strategies.planner.stacks import GENERATIONS, STACKS, TORCH

if TYPE_CHECKING:
    from collections.abc import Mapping

    from autolaunch_strategies.planner.hardware import Hardware

LOCAL = "local"
"""The profile of the machine at hand."""


@dataclass
class _Link:
    gb_per_s: float | None = option("Bandwidth of one device in one direction, 10^9 bytes per second.", None, gt=0)
    latency_us: float | None = option("Microseconds before the first byte arrives.", None, gt=0)


@dataclass
class IntraLink(_Link):
    """Between devices of one fast domain: NVLink, or the memory that the processes of a node share."""


@dataclass
class InterLink(_Link):
    """Between nodes: the network."""


@dataclass
class Cluster:
    """cluster=h100x1024 (a profile x devices), cluster=local, cluster=localx4, or the path of a YAML file."""

    name: str = option("Which machines these are; set by the group.", "cluster")
    device: str = option("Kind of device.", "cuda", choices=("cuda", "cpu"))
    generation: str | None = option(
        "Of the devices: what is known of their kernels (null: nothing).", None, choices=(*GENERATIONS, None)
    )
    stack: str = option(
        "The software whose speed is planned with; this runtime is torch.", TORCH, choices=tuple(STACKS)
    )
    nodes: int = option("Number of equal nodes.", 1, ge=1)
    devices_per_node: int = option("Devices of a node; of CPUs, ranks that share the node.", 8, ge=1)
    memory_gib: float | None = option("Memory of one device, GiB; of CPUs, of one rank.", None, gt=0)
    peak_tflops: dict[str, Any] = option(
        "Peak of dense matrix products of one device in TFLOP/s, by type: fp32, tf32, bf16, fp16, fp8.", {}
    )
    memory_gb_per_s: float | None = option("Memory bandwidth of one device, 10^9 bytes per second.", None, gt=0)
    intra: IntraLink = field(default_factory=IntraLink)
    inter: InterLink = field(default_factory=InterLink)
    domain: int = option("Devices that `intra` joins (0: those of a node).", 0, ge=0)
    processors: int | None = option("Cores that the ranks of a node share (null: every rank has a device).", None, ge=1)
    curves: dict[str, Any] = option(
        "Measured collectives: {all_reduce: [{ranks: 2, kib: [4, 1024], us: [90, 700]}]}; take the place of `intra`.",
        {},
    )
    constants: dict[str, Any] = option(
        "Efficiencies and fixed costs that are not the usual ones; `autolaunch calibrate` measures them.", {}
    )
    origin: str = option("Where the numbers come from: built in, calibrated, fitted.", "given")


def hardware_of(cluster: Mapping[str, Any]) -> Hardware:
    """The `cluster` node of a resolved config as the planner's data.

    Raises:
        ConfigError: a number is absent or impossible; the key is named as `cluster.KEY`.
    """
    from autolaunch_strategies.planner.hardware import hardware_from

    return hardware_from(cluster, where="cluster")
