"""The machines that a training is planned for, as plain data: devices, links between them, and fitted constants."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autolaunch_strategies.config import ConfigError, nearest
from autolaunch_strategies.planner.constants import Constants
from autolaunch_strategies.planner.profile import COMPUTE_TYPES
from autolaunch_strategies.planner.residuals import Residuals
from autolaunch_strategies.planner.stacks import GENERATIONS, MOST_DEVICES, STACKS, TORCH, constants_of

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
    generation: str | None = None
    """Of `stacks.GENERATIONS`; None where nothing is known of it."""
    stack: str = TORCH
    """Of `stacks.STACKS`: the software that runs the training."""
    constants: Constants = field(default_factory=Constants)
    """As a file has them, else those of generation and stack, else the usual ones."""
    margin_measured: bool = False
    """Whether a file gives `context_bytes` and `fragmentation`, what memory holds besides tensors."""
    residuals: Residuals | None = None
    """What the constants leave unexplained of the runs that they were fitted to; known while these runs are, and no
    part of a file."""
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

    @property
    def kind(self) -> tuple[str, str, str]:
        """What constants belong to: machines of one kind differ in links, sizes and power, not in kernels."""
        return self.device, self.generation or self.name, self.stack

    def peak(self, compute: str) -> float:
        """Matrix products of a type per second; else of the next wider one that is known, or of the slowest."""
        wider = ("fp8", "bf16", "fp32") if compute == "fp8" else (compute, "fp32")
        known = (self.flops[kind] for kind in wider if self.flops.get(kind))
        return next(known, min(rate for rate in self.flops.values() if rate))

    def with_constants(self, constants: Constants, origin: str, residuals: Residuals | None = None) -> Hardware:
        """The same machines with other constants, and with what these leave unexplained in place of what others did."""
        return dataclasses.replace(self, constants=constants, residuals=residuals, origin=origin)


UNITS = {"memory_gib": 2.0**30, "memory_gb_per_s": 1e9, "peak_tflops": 1e12, "gb_per_s": 1e9, "latency_us": 1e-6}
"""What one of a key's unit is, in bytes, seconds and operations."""

_KEYS = (
    "name", "device", "generation", "stack", "nodes", "devices_per_node", "memory_gib", "peak_tflops",
    "memory_gb_per_s", "intra", "inter", "domain", "processors", "curves", "constants", "origin",
)  # fmt: skip


def hardware_from(values: Mapping[str, Any], where: str = "cluster") -> Hardware:
    """Read what `conf/cluster/*.yaml` and `autolaunch calibrate` write.

    Args:
        values: the keys of a file of conf/cluster, in the units that their names say: GiB, TFLOP/s, 10^9 bytes
            per second, microseconds, and KiB in curves. Keys that are null count as absent. `inter` may be absent
            with a single node.
        where: what the mapping is called in messages.

    Raises:
        ConfigError: an unknown key, a missing one, or a size that is not positive.
    """
    _known(values, _KEYS, where)
    nodes = _count(values, "nodes", where, 1)
    intra = _link(_mapping(values, "intra", where), f"{where}.intra")
    inter = _mapping(values, "inter", where)
    has_inter = any(value is not None for value in inter.values())
    per_node = _count(values, "devices_per_node", where, 1)
    if nodes * per_node > MOST_DEVICES:
        raise ConfigError(
            f"{where}.nodes={nodes} {where}.devices_per_node={per_node}",
            f"{nodes * per_node:,} devices are more than can be planned for",
            f"up to {MOST_DEVICES:,} devices",
            f"{where}.nodes={max(1, MOST_DEVICES // per_node)}",
        )
    domain = _count(values, "domain", where, 0, smallest=0)
    if domain and (domain % per_node and per_node % domain):
        raise ConfigError(
            f"{where}.domain={domain}",
            f"is no whole number of nodes of {per_node} devices",
            f"a multiple of {per_node}, a divisor of it, or 0 for a node",
            f"{where}.domain=0",
        )
    device = values.get("device") or "cuda"
    if device not in ("cuda", "cpu"):
        raise ConfigError(f"{where}.device={device}", "not a kind of device", "cuda, cpu", f"{where}.device=cuda")
    generation = _one_of(values, "generation", where, GENERATIONS, None)
    stack = _one_of(values, "stack", where, STACKS, TORCH) or TORCH
    constants = _mapping(values, "constants", where)
    return Hardware(
        name=str(values.get("name") or "cluster"),
        device=device,
        nodes=nodes,
        devices_per_node=per_node,
        memory_bytes=_number(values, "memory_gib", where),
        flops=_peaks(_mapping(values, "peak_tflops", where), f"{where}.peak_tflops"),
        memory_bytes_per_s=_number(values, "memory_gb_per_s", where),
        intra=intra,
        inter=_link(inter, f"{where}.inter") if nodes > 1 or has_inter else intra,
        domain=domain,
        processors=None if values.get("processors") is None else _count(values, "processors", where, None),
        curves=_curves(_mapping(values, "curves", where), f"{where}.curves"),
        generation=generation,
        stack=stack,
        constants=_constants(constants, f"{where}.constants", constants_of(stack, generation)),
        margin_measured=all(constants.get(name) is not None for name in ("context_bytes", "fragmentation")),
        origin=str(values.get("origin") or "given"),
    )


def hardware_to(hardware: Hardware) -> dict[str, Any]:
    """The mapping that `hardware_from` reads back: ten digits of every number, and only constants that are not usual.

    The keys are in the order of the schema, so that the same machines always make the same file.
    """
    usual = Constants(**constants_of(hardware.stack, hardware.generation))
    constants = {item.name: getattr(hardware.constants, item.name) for item in dataclasses.fields(Constants)}
    values: dict[str, Any] = {
        "name": hardware.name,
        "device": hardware.device,
        "generation": hardware.generation,
        "stack": hardware.stack,
        "nodes": hardware.nodes,
        "devices_per_node": hardware.devices_per_node,
        "memory_gib": _in_unit(hardware.memory_bytes, "memory_gib"),
        "peak_tflops": {name: _in_unit(value, "peak_tflops") for name, value in hardware.flops.items()},
        "memory_gb_per_s": _in_unit(hardware.memory_bytes_per_s, "memory_gb_per_s"),
        "intra": _link_to(hardware.intra),
        "inter": _link_to(hardware.inter),
        "domain": hardware.domain,
        "processors": hardware.processors,
        "curves": {
            kind: [
                {
                    "ranks": curve.ranks,
                    "kib": [_digits(size / 1024) for size in curve.bytes],
                    "us": [_digits(seconds * 1e6) for seconds in curve.seconds],
                }
                for curve in curves
            ]
            for kind, curves in hardware.curves.items()
        },
        "constants": {
            name: _digits(value) for name, value in constants.items() if _digits(value) != _digits(getattr(usual, name))
        },
        "origin": hardware.origin,
    }
    return values


def _digits(value: float) -> float:
    """Ten significant digits: more than anything is measured to, and short ones stay short."""
    return float(f"{value:.10g}")


def _in_unit(value: float, key: str) -> float:
    return _digits(value / UNITS[key])


def _known(values: Mapping[str, Any], keys: Iterable[str], where: str) -> None:
    for key in values:
        if key not in keys:
            close = nearest(str(key), keys)
            raise ConfigError(
                f"{where}.{key}",
                "no such key" + (f"; did you mean {close}?" if close else ""),
                ", ".join(keys),
                f"{where}.{close}={values[key]}" if close and not isinstance(values[key], Mapping) else "",
            )


def _mapping(values: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = values.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}.{key}={value}", "is not a mapping", write=f"{where}.{key}={{...}}")
    return value


def _positive(value: Any, key: str, noun: str = "a number") -> float:
    if value is None:
        raise ConfigError(key, "must be given", f"{noun} above 0", f"{key}=...")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError(f"{key}={value}", "out of range", f"{noun} above 0", f"{key}=...")
    return float(value)


def _number(values: Mapping[str, Any], key: str, where: str) -> float:
    return _positive(values.get(key), f"{where}.{key}") * UNITS[key]


def _count(values: Mapping[str, Any], key: str, where: str, default: int | None, smallest: int = 1) -> int:
    value = values.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        raise ConfigError(
            f"{where}.{key}={value}", "out of range", f"a whole number, {smallest} or more", f"{where}.{key}={smallest}"
        )
    return value


def _link(values: Mapping[str, Any], where: str) -> Link:
    _known(values, ("gb_per_s", "latency_us"), where)
    return Link(_number(values, "gb_per_s", where), _number(values, "latency_us", where))


def _link_to(link: Link) -> dict[str, float]:
    return {"gb_per_s": _in_unit(link.bytes_per_s, "gb_per_s"), "latency_us": _in_unit(link.latency_s, "latency_us")}


def _peaks(values: Mapping[str, Any], where: str) -> dict[str, float]:
    _known(values, COMPUTE_TYPES, where)
    peaks = {
        name: _positive(value, f"{where}.{name}") * UNITS["peak_tflops"]
        for name, value in values.items()
        if value is not None
    }
    if not peaks:
        raise ConfigError(where, "must be given", f"TFLOP/s by type: {', '.join(COMPUTE_TYPES)}", f"{where}.bf16=...")
    return peaks


def _curves(values: Mapping[str, Any], where: str) -> dict[str, tuple[Curve, ...]]:
    _known(values, COLLECTIVES, where)
    curves: dict[str, tuple[Curve, ...]] = {}
    for kind, measured in values.items():
        read = []
        for item in measured or ():
            key = f"{where}.{kind}"
            _known(item, ("ranks", "kib", "us"), key)
            sizes = [_positive(size, f"{key}.kib", "sizes") * 1024 for size in item.get("kib") or ()]
            seconds = [_positive(value, f"{key}.us", "times") * 1e-6 for value in item.get("us") or ()]
            if not sizes or len(sizes) != len(seconds) or sizes != sorted(set(sizes)):
                raise ConfigError(
                    key,
                    f"{len(sizes)} sizes and {len(seconds)} times",
                    "as many rising sizes as times, at least one",
                    "{ranks: 2, kib: [4, 1024], us: [90, 700]}",
                )
            read.append(Curve(_count(item, "ranks", key, None), tuple(sizes), tuple(seconds)))
        if read:
            curves[kind] = tuple(sorted(read, key=lambda curve: curve.ranks))
    return curves


def _one_of(values: Mapping[str, Any], key: str, where: str, known: Iterable[str], default: str | None) -> str | None:
    value = values.get(key)
    if value is None:
        return default
    if value not in known:
        close = nearest(str(value), known) or next(iter(known))
        raise ConfigError(
            f"{where}.{key}={value}", "nothing is known of it", ", ".join(known), f"{where}.{key}={close}"
        )
    return str(value)


def _constants(values: Mapping[str, Any], where: str, usual: Mapping[str, float]) -> Constants:
    """Those that are given, else `usual`, else the defaults."""
    _known(values, [item.name for item in dataclasses.fields(Constants)], where)
    positive = {name: _positive(value, f"{where}.{name}") for name, value in values.items() if value is not None}
    return Constants(**{**usual, **positive})
