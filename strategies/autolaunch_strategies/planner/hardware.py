"""The machines that a training is planned for, as plain data: devices, links between them, and fitted constants."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autolaunch_strategies.planner.constants import Constants

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Link:
    """A way between devices: seconds = latency + bytes / rate."""

    bytes_per_s: float
    """In one direction, for one device."""
    latency_s: float


@dataclass(frozen=True)
class Curve:
    """Measured seconds of one kind of collective in one group: piecewise linear in the bytes that a rank holds of the
    whole result (all_gather) or input (the others)."""

    ranks: int
    bytes: tuple[float, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Hardware:
    """A cluster of equal nodes."""

    name: str
    device: str
    """cuda or cpu."""
    nodes: int
    devices_per_node: int
    memory_bytes: float
    """Of one device (of a CPU: of the node, divided by its ranks)."""
    flops: Mapping[str, float]
    """Peak of matrix products per second by type: fp32, tf32, bf16, fp16, fp8."""
    memory_bytes_per_s: float
    intra: Link
    """Between devices of one fast domain (NVLink, shared memory)."""
    inter: Link
    """Beyond it, for one device."""
    domain: int = 0
    """Devices that `intra` joins; 0: those of a node. 72 for GB200."""
    processors: int | None = None
    """Cores that the ranks of one node share; None where every rank has a device of its own. With more ranks than
    cores, ranks wait for cores, and what one leaves idle another one uses."""
    curves: Mapping[str, tuple[Curve, ...]] = field(default_factory=dict)
    """Kind of collective -> what was measured; takes the place of `intra` there."""
    constants: Constants = field(default_factory=Constants)
    origin: str = "built in"
    """Where the numbers come from: built in, calibrated, fitted to n runs."""

    @property
    def devices(self) -> int:
        """Of all nodes."""
        return self.nodes * self.devices_per_node

    @property
    def domain_size(self) -> int:
        """Devices that `intra` joins."""
        return self.domain or self.devices_per_node

    def with_constants(self, constants: Constants, origin: str) -> Hardware:
        """The same machines with other constants."""
        return dataclasses.replace(self, constants=constants, origin=origin)


def hardware_from(values: Mapping[str, Any]) -> Hardware:
    """Read what `conf/cluster/*.yaml` and `autolaunch calibrate` write (units there: GiB, TFLOP/s, GB/s, us).

    Raises:
        ConfigError: an unknown key, a missing one, or a size that is not positive.
    """
    raise NotImplementedError  # replaced by the owner of this file


def hardware_to(hardware: Hardware) -> dict[str, Any]:
    """The mapping that `hardware_from` reads back."""
    raise NotImplementedError  # replaced by the owner of this file
