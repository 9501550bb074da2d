"""Sending what crosses a cut from one rank of a pipeline to another, and its gradients back."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from autolaunch_strategies.pipeline.record import PLAIN, Leaf
from autolaunch_strategies.sharded_sequence.shard import Positions, SequenceShard
from autolaunch_strategies.torch_private.collectives import host_device
from autolaunch_strategies.torch_private.meshes import local_shape


@dataclass(frozen=True)
class Axes:
    """Over which other axes leaves may be sharded, along with the stages."""

    mp: DeviceMesh | None = None
    cp: dist.ProcessGroup | None = None

    def groups(self) -> list[dist.ProcessGroup]:
        """This rank's peers along each."""
        groups = [None if self.mp is None else self.mp.get_group(), self.cp]
        return [group for group in groups if group is not None]


@dataclass(frozen=True)
class SequenceDim:
    """Which dim of a leaf is sharded along cp, and which of its entries each rank holds."""

    dim: int
    positions: Positions


class LeafMeta(NamedTuple):
    """What a stage has to know of a leaf that another one made."""

    shape: tuple[int, ...]
    """Of the whole tensor; () for what is no tensor. Along a dim that is sharded along cp, of this rank's part."""
    dtype: torch.dtype | None = None
    """None: no tensor, but `constant`."""
    requires_grad: bool = False
    placements: tuple[Placement, ...] | None = None
    """Of a DTensor over the mp axis."""
    sequence: SequenceDim | None = None
    """Of a sequence that is sharded along cp."""
    constant: Any = None

    @classmethod
    def of(cls, leaf: Any) -> LeafMeta:
        """The meta of a leaf; what is neither a tensor nor plain data counts as None."""
        if isinstance(leaf, SequenceShard):
            return cls.of(leaf.local)._replace(sequence=SequenceDim(leaf.sequence_dim, leaf.positions))
        if isinstance(leaf, DTensor):
            return cls(tuple(leaf.shape), leaf.dtype, leaf.requires_grad, tuple(leaf.placements))
        if isinstance(leaf, torch.Tensor):
            return cls(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
        return cls((), constant=leaf if isinstance(leaf, PLAIN) else None)

    def local_shape(self, axes: Axes) -> tuple[int, ...]:
        """The shape of this rank's part."""
        if self.placements is None or axes.mp is None:
            return self.shape
        return local_shape(self.shape, axes.mp, self.placements)

    def resized(self, dim: int | None, parts: Sequence[LeafMeta]) -> LeafMeta:
        """The meta of leaves joined along `dim` (None: of one of them)."""
        if dim is None:
            return self
        shape = list(self.shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        sequence = self.sequence
        if sequence is not None and sequence.dim == dim:  # rows of the batch that are flattened into the sequence
            positions = sequence.positions.one_row()
            rows = sum(part.sequence.positions.rows or 0 for part in parts if part.sequence is not None)
            sequence = SequenceDim(dim, positions.flattened(rows))
        return self._replace(shape=tuple(shape), sequence=sequence)

    def wrapped(self, local: torch.Tensor, axes: Axes) -> torch.Tensor:
        """`local` (this rank's part) as the leaf, differentiably."""
        leaf = local
        if self.placements is not None and axes.mp is not None:
            whole = torch.empty(self.shape, device="meta")
            leaf = DTensor.from_local(
                local, axes.mp, self.placements, run_check=False, shape=whole.shape, stride=whole.stride()
            )
        if self.sequence is not None and axes.cp is not None:
            leaf = SequenceShard.of(leaf, self.sequence.dim, self.sequence.positions, axes.cp)
        return leaf


def local_part(leaf: torch.Tensor) -> torch.Tensor:
    """This rank's part of a leaf as a plain tensor, differentiably."""
    if type(leaf) is torch.Tensor:
        return leaf
    if isinstance(leaf, SequenceShard):
        leaf = leaf.local
    return leaf.to_local() if isinstance(leaf, DTensor) else leaf


def closed(leaf: Any) -> Any:
    """A leaf that can travel: a DTensor without open sums; anything else as it is."""
    if type(leaf) is torch.Tensor:
        return leaf
    if isinstance(leaf, SequenceShard):
        local = closed(leaf.local)
        return leaf if local is leaf.local else SequenceShard.of(local, leaf.sequence_dim, leaf.positions, leaf.group)
    if isinstance(leaf, DTensor) and any(placement.is_partial() for placement in leaf.placements):
        return leaf.redistribute(placements=[Replicate() if item.is_partial() else item for item in leaf.placements])
    return leaf


Metas = tuple[tuple[LeafMeta, ...], ...]
"""Of every unit call so far, of every leaf."""


class Header(NamedTuple):
    """What will cross the cut in front of a stage; sent to it once."""

    metas: Metas
    carry: tuple[Leaf, ...]
    """The leaves that travel, in this order."""

    def shapes(self, axes: Axes) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape of this rank's part and type of everything that travels."""
        shapes = []
        for leaf in self.carry:
            meta = self.metas[leaf.call][leaf.place]
            assert meta.dtype is not None, "only tensors travel"
            shapes.append((meta.local_shape(axes), meta.dtype))
        return shapes


_MOST_HEADERS = 512


class Channel:
    """The transfers of one rank of a pipeline.

    What goes from one rank to another, activations and gradients alike, has a group of its own, so on a GPU a queue of
    its own: it waits for nothing but what was sent there before. Shapes travel once for every kind of call: both ends
    remember what they know by the same key.

    Args:
        group: all ranks of the pipeline.
        routes: by (from, to) within it, of all that this rank sends or receives.
    """

    def __init__(
        self, group: dist.ProcessGroup, routes: Mapping[tuple[int, int], dist.ProcessGroup], device: torch.device
    ) -> None:
        self.group, self.device = group, device
        self._routes = {route: (pair, 1 - pair.rank()) for route, pair in routes.items()}
        """The group of two, and the other one's rank in it."""
        self._host = host_device(device, group)  # the host needs the values of headers at once
        self._sent_headers: dict[int, dict[Any, Header]] = {}
        self._received_headers: dict[int, dict[Any, Header]] = {}
        self._running: list[tuple[dist.Work, torch.Tensor]] = []

    def connect(self) -> None:
        """Send something on every route, so that the first batch does not wait for connections. Collective."""
        works = []
        for source, to in self._routes:  # ranks meet at each in the same order
            for device in dict.fromkeys((self.device, self._host)):
                if source == self.group.rank():
                    self.send([torch.zeros(1, device=device)], to)
                else:
                    works += self.receive([((1,), torch.float32)], source, device)[1]
        for work in works:
            work.wait()
        self.finish()

    def send(self, tensors: Sequence[torch.Tensor], to: int) -> None:
        """Begin to send tensors to rank `to` of the group."""
        route, other = self._routes[self.group.rank(), to]
        for tensor in tensors:
            kept = tensor.detach().contiguous()
            work = dist.isend(kept, group=route, group_dst=other)
            assert work is not None
            self._running.append((work, kept))
        while self._running and self._running[0][0].is_completed():
            self._running.pop(0)

    def receive(
        self, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], source: int, device: torch.device | None = None
    ) -> tuple[list[torch.Tensor], list[dist.Work]]:
        """Begin to receive tensors from rank `source` of the group: buffers, and what to wait for.

        Args:
            device: where they are; by default where the rank computes.
        """
        route, other = self._routes[source, self.group.rank()]
        buffers = [torch.empty(shape, dtype=dtype, device=device or self.device) for shape, dtype in shapes]
        works = []
        for buffer in buffers:
            work = dist.irecv(buffer, group=route, group_src=other)
            assert work is not None
            works.append(work)
        return buffers, works

    def send_header(self, key: Any, header: Header, to: int) -> None:
        """Send a header to a rank that does not know that of `key` yet.

        Raises:
            RuntimeError: it is not the header that was sent for the same key.
        """
        known = self._sent_headers.setdefault(to, {})
        if key in known:
            if known[key] != header:
                raise RuntimeError(
                    "pp: activations have other shapes than in an earlier call with inputs of the same shapes; "
                    "with pp.loss=microbatch what training_step makes of a batch must have fixed sizes "
                    "(pp.loss=exact takes any)"
                )
            return
        _remember(known, key, header)
        data = torch.frombuffer(bytearray(pickle.dumps(header)), dtype=torch.uint8).to(self._host)
        self.send([torch.tensor([data.numel()], device=self._host), data], to)

    def knows_header(self, key: Any, source: int) -> bool:
        """Whether `receive_header` would not wait: nor are shapes of what rank `source` sends next unknown then."""
        return key in self._received_headers.get(source, {})

    def receive_header(self, key: Any, source: int) -> Header:
        """The header that rank `source` sent for `key`; it is received once."""
        known = self._received_headers.setdefault(source, {})
        if key not in known:
            (size,), works = self.receive([((1,), torch.int64)], source, self._host)
            works[0].wait()
            (data,), works = self.receive([((int(size),), torch.uint8)], source, self._host)
            works[0].wait()
            _remember(known, key, pickle.loads(bytes(data.cpu().numpy())))
        return known[key]

    def finish(self) -> None:
        """Wait until everything has been sent."""
        for work, _ in self._running:
            work.wait()
        self._running.clear()


Expected = TypeVar("Expected")
Arrival = TypeVar("Arrival")


class Arrivals(Generic[Expected, Arrival]):
    """What other ranks send in a batch: receives begin as early as shapes are known, in the order of what is sent.

    Args:
        begin: begins to receive something; or gives None where its shapes aren't known yet and it is not to wait.
    """

    def __init__(self, begin: Callable[[Expected, bool], Arrival | None]) -> None:
        self._begin = begin
        self._expected: dict[int, deque[Expected]] = {}
        self._begun: dict[Expected, Arrival] = {}

    def expect(self, item: Expected, source: int) -> None:
        """Something comes from rank `source`, after all that was expected from there before."""
        queue = self._expected.setdefault(source, deque())
        queue.append(item)
        while queue and (arrival := self._begin(queue[0], False)) is not None:
            self._begun[queue.popleft()] = arrival

    def take(self, item: Expected, source: int) -> Arrival:
        """What came of something that was expected, or how to wait for it; its shapes are waited for."""
        queue = self._expected[source]
        while item not in self._begun:
            arrival = self._begin(queue[0], True)
            assert arrival is not None
            self._begun[queue.popleft()] = arrival
        return self._begun.pop(item)


def _remember(known: dict[Any, Header], key: Any, header: Header) -> None:
    """Keep a header; when there are too many, all are forgotten, which both ends do at the same one."""
    if len(known) >= _MOST_HEADERS:
        known.clear()
    known[key] = header
