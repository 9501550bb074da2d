"""Speeds of the machine at hand, each measured by all ranks at once, as in training: products, memory, launches, links.

With more ranks than cores, what a rank computes is given as the seconds that it keeps a core busy, and a collective as
one rank's share of the time on the clock (its seconds x cores / ranks): the model of a step shares the cores out by
itself.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from autolaunch_strategies.planner.hardware import COLLECTIVES, Curve, Link
from autolaunch_strategies.planner.time import BACKWARD_ATTENTION
from autolaunch_strategies.torch_private.collectives import all_gather_single, reduce_scatter_single, start_all_gather

TYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

ROUNDS = 5
"""The median of so many; of three where one takes longer than `LONG` seconds."""
LONG = 0.01

PROBE_SECONDS, VERDICT_SECONDS = 20.0, 150.0
"""After the first a rank that waits for others gives a probe up; after the second, the others themselves."""

_WAITED = re.compile("timed? ?out|connection (closed|reset)|pair closure", re.IGNORECASE)


@dataclass
class Measured:
    """What was found. Every part is absent or empty where its probe failed."""

    flops: dict[str, float] = field(default_factory=dict)
    """Type -> most operations per second of one device (CPU: of one core's share) in matrix products."""
    products: dict[str, dict[int, float]] = field(default_factory=dict)
    """Type -> edge of square matrices -> operations per second."""
    attention: float | None = None
    """Share of the rate of matrix products that fused attention reaches, with so many positions and heads so wide."""
    attention_shape: tuple[int, int] = (0, 0)
    """(positions, width of heads) with which that was measured."""
    memory_bytes_per_s: float | None = None
    kernel_s: float | None = None
    """Host seconds of an eager kernel on a tiny tensor."""
    mp_kernel_s: float | None = None
    """What it takes longer on a DTensor."""
    curves: dict[str, tuple[Curve, ...]] = field(default_factory=dict)
    inter: Link | None = None
    optimizer_bytes_per_s: float | None = None
    """Of a fused AdamW step, seven passes over the parameters: three read, three written, gradients read."""
    hidden: float | None = None
    """Share of an all-gather that a matrix product hides, 0 to 1."""
    failed: dict[str, str] = field(default_factory=dict)
    """Probe -> why there is no result."""


class Bench:
    """All ranks of this run, at their device, ready to measure.

    Args:
        device: of this rank.
        cores: that the ranks of one node share; None where every rank has a device.
        local_ranks: ranks of one node; neighbours in rank numbers.
        seconds: about how long one probe may measure.
    """

    def __init__(self, device: torch.device, cores: int | None, local_ranks: int, seconds: float = 1.0) -> None:
        self.device = device
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if self.ranks > 1 else 0
        self.local_ranks = local_ranks
        self.sharing = max(1.0, local_ranks / cores) if cores else 1.0
        """How many ranks share a core."""
        self.seconds = seconds
        self._together: Any = None
        """The group in which the ranks of a probe keep step; a new one after a failure, which leaves it broken."""
        self._verdicts = dist.new_group(timeout=_duration(VERDICT_SECONDS), backend="gloo") if self.ranks > 1 else None

    # --- the probes ----------------------------------------------------------------------------------------------

    def all(self) -> Measured:
        """Every probe, one after the other; collective. One that fails is named in the result, the rest goes on."""
        speeds = Measured()
        probes: dict[str, Callable[[Measured], None]] = {
            "matmul": self.matmul,
            "attention": self.attention,
            "memory": self.memory,
            "kernels": self.kernels,
            "optimizer": self.optimizer,
        }
        if self.ranks > 1:
            probes["dtensor"] = self.dtensor
            probes |= {kind: self._collective_probe(kind) for kind in COLLECTIVES}
            if self.local_ranks > 1:
                probes["overlap"] = self.overlap
            if self.ranks > self.local_ranks:
                probes["between nodes"] = self.between_nodes
        for name, probe in probes.items():
            reason = self.contained(partial(probe, speeds))
            if reason:
                speeds.failed[name] = reason
        return speeds

    def contained(self, probe: Callable[[], Any]) -> str:
        """Run a probe; empty, or why it failed on the first rank where it did. Collective: all ranks agree on it."""
        reason = ""
        try:
            if self.ranks > 1 and self._together is None:
                self._together = dist.new_group(timeout=_duration(PROBE_SECONDS), backend="gloo")
            probe()
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
        reasons: list[Any] = [reason]
        if self.ranks > 1:
            reasons = [None] * self.ranks
            dist.all_gather_object(reasons, reason, group=self._verdicts)
        # Where a rank waited in vain for another one, it is the other one's reason that counts.
        failures = [text for text in reasons if text]
        if failures:
            self._together = None
        return next((text for text in failures if not _WAITED.search(text)), failures[0] if failures else "")

    def matmul(self, speeds: Measured) -> None:
        """Square matrix products of rising size in every type; the fastest counts."""
        cuda = self.device.type == "cuda"
        edges = (512, 1024, 2048, 4096, 8192) if cuda else (64, 128, 256, 512, 1024)
        for name in TYPES if cuda else ("fp32", "bf16"):
            rates: dict[int, float] = {}
            with _tf32(name == "tf32"):
                for edge in edges:
                    a, b = (torch.randn(edge, edge, device=self.device).to(TYPES[name]) for _ in range(2))
                    seconds = self._busy(partial(torch.mm, a, b), self.seconds / len(edges) / 2)
                    rates[edge] = 2 * edge**3 / seconds
            speeds.products[name] = rates
            speeds.flops[name] = max(rates.values())

    def attention(self, speeds: Measured) -> None:
        """Causal fused attention, forward and backward, in the fastest type that there is."""
        cuda = self.device.type == "cuda"
        heads, positions, width = (16, 4096, 128) if cuda else (4, 1024, 64)
        dtype = torch.bfloat16 if cuda else torch.float32
        q, k, v = (
            torch.randn(1, heads, positions, width, device=self.device).to(dtype).requires_grad_() for _ in range(3)
        )
        gradient = torch.randn(1, heads, positions, width, device=self.device).to(dtype)

        def both() -> None:
            result = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.autograd.grad(result, (q, k, v), gradient)

        seconds = self._busy(both, self.seconds / 2)
        flops = (1 + BACKWARD_ATTENTION) * 2.0 * heads * positions**2 * width
        speeds.attention = flops / seconds / speeds.flops["bf16" if cuda else "fp32"]
        speeds.attention_shape = positions, width

    def between_nodes(self, speeds: Measured) -> None:
        """All-reduces of ranks with the same place in each node: all ways out of a node at once."""
        nodes = self.ranks // self.local_ranks
        curve = self.collective("all_reduce", nodes, [4 << 10, 64 << 20], stride=self.local_ranks)
        rounds = 2 * np.log2(nodes)
        bandwidth = 2 * (nodes - 1) / nodes * curve.bytes[1] / max(curve.seconds[1] - curve.seconds[0], 1e-9)
        speeds.inter = Link(bandwidth, curve.seconds[0] / rounds)

    def memory(self, speeds: Measured) -> None:
        """Add one large tensor to another: two reads and a write of each element."""
        count = (64 if self.device.type == "cuda" else 8) * 2**20
        a, b = (torch.ones(count, device=self.device) for _ in range(2))
        speeds.memory_bytes_per_s = 3 * a.nbytes / self._busy(lambda: a.add_(b), self.seconds)

    def kernels(self, speeds: Measured) -> None:
        """Kernels that have next to nothing to do, with the record for the backward pass that training keeps."""
        x = torch.ones(16, device=self.device, requires_grad=True)
        calls = 50

        def chain() -> None:
            y = x
            for _ in range(calls):
                y = y * 1.5
            y.sum().backward()

        # Forward, backward, and the sum with its own.
        speeds.kernel_s = self._busy(chain, self.seconds / 2) / (2 * calls + 3)

    def dtensor(self, speeds: Measured) -> None:
        """The same on tensors that are sharded over a mesh."""
        mesh = DeviceMesh(self.device.type, list(range(self.ranks)))
        x = distribute_tensor(torch.ones(16 * self.ranks, device=self.device), mesh, [Shard(0)]).requires_grad_()
        calls = 20

        def chain() -> None:
            y = x
            for _ in range(calls):
                y = y * 1.5
            assert isinstance(y, DTensor)
            y.to_local().sum().backward()

        each = self._busy(chain, self.seconds / 2) / (2 * calls + 3)
        plain = speeds.kernel_s if speeds.kernel_s is not None else 0.0
        speeds.mp_kernel_s = max(each - plain, 1e-6)

    def optimizer(self, speeds: Measured) -> None:
        """A fused AdamW step over four million parameters in matrices of different sizes."""
        edge = 2048 if self.device.type == "cuda" else 512
        weights = [torch.nn.Parameter(torch.randn(edge, edge, device=self.device)) for _ in range(4)]
        weights += [torch.nn.Parameter(torch.randn(edge * 8, device=self.device)) for _ in range(4)]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer = torch.optim.AdamW(weights, fused=True)
        seconds = self._busy(lambda: optimizer.step(), self.seconds / 2)
        speeds.optimizer_bytes_per_s = 7 * sum(weight.nbytes for weight in weights) / seconds

    def overlap(self, speeds: Measured) -> None:
        """A matrix product while parameters are gathered: what share of the shorter of the two vanishes."""
        edge = 4096 if self.device.type == "cuda" else 512
        a = torch.randn(edge, edge, device=self.device)
        shard = torch.randn(edge * edge // self.local_ranks, device=self.device)
        whole = torch.empty(shard.numel() * self.local_ranks, device=self.device)
        with self._groups(self.local_ranks) as group:
            gather = self._clock(lambda: all_gather_single(whole, shard, group), self.seconds / 3, group)
            once = self._clock(lambda: a @ a, self.seconds / 6, group)
            products = max(1, round(gather / once))

            def compute() -> None:
                for _ in range(products):
                    a @ a

            def both() -> None:
                work = start_all_gather(whole, shard, group)
                compute()
                work.wait()

            computing = self._clock(compute, self.seconds / 3, group)
            together = self._clock(both, self.seconds / 3, group)
        speeds.hidden = min(max((computing + gather - together) / min(computing, gather), 0.0), 1.0)

    def collective(self, kind: str, ranks: int, sizes: Sequence[int], stride: int = 1) -> Curve:
        """One kind of collective in groups of ranks that are `stride` apart, all groups at once.

        Collective over all ranks.

        Args:
            sizes: rising, bytes of the whole result (all_gather) or of a rank's input (the others).
        """
        seconds = []
        with self._groups(ranks, stride) as group:
            for size in sizes:
                call, exchanges = _exchange(kind, size, ranks, self.device, group)
                seconds.append(self._clock(call, self.seconds / len(sizes), group) / exchanges / self.sharing)
        # Larger messages do not come sooner; where noise says so, the mean of neighbours is as good a guess.
        for i in range(len(seconds) - 2, -1, -1):
            seconds[i] = min(seconds[i], seconds[i + 1])
        return Curve(ranks, tuple(float(size) for size in sizes), tuple(seconds))

    def _collective_probe(self, kind: str) -> Callable[[Measured], None]:
        largest = 64 * 2**20 if self.device.type == "cuda" else 8 * 2**20
        sizes = [size for size in (4 << 10, 256 << 10, 2 << 20, 8 << 20, 64 << 20) if size <= largest]
        shapes = [n for n in sorted({2, self.local_ranks}) if 1 < n <= self.local_ranks and self.local_ranks % n == 0]

        def probe(speeds: Measured) -> None:
            measured = [self.collective(kind, ranks, sizes) for ranks in (shapes[:1] if kind == "p2p" else shapes)]
            if measured:
                speeds.curves[kind] = tuple(measured)

        return probe

    # --- how they are timed --------------------------------------------------------------------------------------

    def _busy(self, call: Callable[[], Any], seconds: float) -> float:
        """Seconds of one core or device that a call takes while all ranks do the same."""
        # Where ranks share cores, the time on the clock says who had to wait, and not how long the work is.
        return self._clock(call, seconds, None, time.process_time if self.sharing > 1 else time.perf_counter)

    def _clock(
        self, call: Callable[[], Any], seconds: float, group: Any, clock: Callable[[], float] = time.perf_counter
    ) -> float:
        """Seconds of a call: the mean over ranks of the median of `ROUNDS`, in about so many seconds altogether."""
        self._keep_step()
        call()
        self._synchronise()
        started = time.perf_counter()
        call()
        self._synchronise()
        first = self._mean(time.perf_counter() - started)  # the same on every rank, so that all do as many
        rounds = ROUNDS if first < LONG else 3
        calls = max(1, min(200, int(seconds / rounds / max(first, 1e-7))))
        times = []
        for _ in range(rounds):
            if group is None:
                self._keep_step()  # nobody is to be alone with the machine
            started = clock()
            for _ in range(calls):
                call()
            self._synchronise()
            times.append((clock() - started) / calls)
        return self._mean(statistics.median(times))

    def _mean(self, seconds: float) -> float:
        if self.ranks == 1:
            return seconds
        total = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(total, group=self._together)
        return total.item() / self.ranks

    def longest(self, seconds: float) -> float:
        """The largest of all ranks' numbers, none of them negative; collective."""
        if self.ranks == 1:
            return seconds
        value = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._verdicts)
        return value.item()

    def _keep_step(self) -> None:
        if self.ranks > 1:
            dist.barrier(group=self._together)

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextlib.contextmanager
    def _groups(self, ranks: int, stride: int = 1) -> Iterator[Any]:
        """This rank's group of ranks that are `stride` apart: a new one, since a failed collective leaves it broken."""
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        timeout = _duration(PROBE_SECONDS)
        own = None
        for block in range(0, self.ranks, ranks * stride):
            for first in range(block, block + stride):
                members = list(range(first, first + ranks * stride, stride))
                group = dist.new_group(members, timeout=timeout, backend=backend)
                own = group if self.rank in members else own
        try:
            yield own
        finally:
            dist.destroy_process_group(own)


def _duration(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)


@contextlib.contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _exchange(kind: str, size: int, ranks: int, device: torch.device, group: Any) -> tuple[Callable[[], Any], int]:
    """(call, how many collectives it is); `size` in bytes, of the result (all_gather) or the input (the others)."""
    count = max(size // 4 // ranks, 1) * ranks
    large, small = torch.ones(count, device=device), torch.ones(count // ranks, device=device)
    if kind == "all_reduce":
        return (lambda: dist.all_reduce(large, group=group)), 1
    if kind == "all_gather":
        return (lambda: all_gather_single(large, small, group)), 1
    if kind == "reduce_scatter":
        return (lambda: reduce_scatter_single(small, large, group)), 1
    if kind == "all_to_all":
        received = torch.empty_like(large)
        return (lambda: dist.all_to_all_single(received, large, group=group)), 1
    assert kind == "p2p", kind
    rank = dist.get_rank(group)
    peer = dist.get_global_rank(group, 1 - rank)

    def there_and_back() -> None:
        # So that what is timed on either rank is a message's whole way.
        for sender in (0, 1):
            if rank == sender:
                dist.send(large, peer, group=group)
            else:
                dist.recv(large, peer, group=group)

    return there_and_back, 2


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def facts(device: torch.device) -> Mapping[str, Any]:
    """What a device says of itself: name and bytes of memory; empty for a CPU."""
    if device.type != "cuda":
        return {}
    properties = torch.cuda.get_device_properties(device)
    return {"name": properties.name, "memory_bytes": properties.total_memory}
