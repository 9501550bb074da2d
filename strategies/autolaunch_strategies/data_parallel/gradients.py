"""Gradients of replicated parameters summed over ranks, and one gradient norm over every axis of the mesh."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils.hooks import RemovableHandle

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.data_parallel.groups import GradientGroup
from autolaunch_strategies.torch_private.collectives import host_device
from autolaunch_strategies.torch_private.flat_tensors import flattened, parts_like
from autolaunch_strategies.torch_private.modes import without_torch_functions

BUCKET_BYTES = 25 * 2**20
"""Gradients travel in pieces of about this size, so that communication overlaps with the backward pass."""


class GradientAverage:
    """Averages the gradients of replicated parameters over their groups, in buckets, while the backward pass runs.

    Used for everything at sharding level 0, and at the other levels for what `fully_shard` cannot hold (scalars).
    A parameter without a gradient on this rank counts as zero if another rank has one, and keeps none otherwise.
    Parameters may be frozen and unfrozen between backward passes, on all ranks alike. The first pass in which a
    parameter has a gradient waits for all: it shows whether some come in several parts (a shared layer under
    `checkpoint(use_reentrant=True)`), and then every pass does.

    Args:
        groups: parameters in the order of definition, each with its group; gradients are expected in about the reverse
            order.
    """

    def __init__(self, groups: Mapping[nn.Parameter, GradientGroup]) -> None:
        self.enabled = True
        self._groups = {key: group for key, group in groups.items() if key.is_floating_point() or key.is_complex()}
        self._never_averaged = list(self._groups)
        self._come_in_parts = False
        self._seen: set[int] = set()
        """Places of those that have had a gradient in a pass that is over."""
        self._trained: list[bool] = []
        """Of every parameter whether it was trained when buckets were filled."""
        self._running: list[tuple[_Bucket, PackedGradients, dist.Work | None]] = []
        self._fill_buckets()
        self._hooks = [
            _when_accumulated(parameter, partial(self._gradient_ready, place))
            for place, parameter in enumerate(self._groups)
        ]
        self._hooks += [
            _when_computed(parameter, group.share) for parameter, group in self._groups.items() if group.share != 1
        ]

    def when_accumulated(self, hook: Callable[[nn.Parameter], None]) -> None:
        """Call a hook with each parameter whose gradient has been added up, also of those that are trained later."""
        for parameter in self._groups:
            _when_accumulated(parameter, hook)

    def take_as_seen(self) -> None:
        """Go on as behind a first pass in which every gradient came at once."""
        self._seen.update(range(len(self._groups)))

    def _fill_buckets(self) -> None:
        """Share out what is trained now, before anything of a pass is on its way."""
        trained = [parameter.requires_grad for parameter in self._groups]
        if trained == self._trained:
            return
        self._trained = trained
        self._buckets = _buckets({key: group for key, group in self._groups.items() if key.requires_grad})
        places = {id(parameter): place for place, parameter in enumerate(self._groups)}
        self._places = [[places[id(parameter)] for parameter in bucket.parameters] for bucket in self._buckets]
        """Of every bucket the places of its parameters among all of them."""
        self._bucket_of = {place: index for index, bucket in enumerate(self._places) for place in bucket}
        self._forget_pass()

    def _forget_pass(self) -> None:
        self._running.clear()
        self._missing = [set(places) for places in self._places]
        """Of every bucket the places of those whose gradients are not there yet."""
        self._next, self._has_begun = 0, False

    def finish(self) -> None:
        """Wait until every gradient is the average. Every rank calls it once after each synchronised backward."""
        if not self.enabled:
            return
        if not self._has_begun:  # this rank has no gradients at all
            self._fill_buckets()
        while self._next < len(self._buckets):
            self._start(self._next)
        for _, _, work in self._running:
            if work is not None:
                work.wait()
        for size in {bucket.group.size for bucket, _, _ in self._running}:
            torch._foreach_div_([packed.flat for bucket, packed, _ in self._running if bucket.group.size == size], size)
        for _, packed, _ in self._running:
            packed.unpack()
        if len(self._seen) < len(self._groups):
            self._seen.update(*(set(all_of) - left for all_of, left in zip(self._places, self._missing, strict=True)))
        with without_torch_functions():
            self._never_averaged = [parameter for parameter in self._never_averaged if parameter.grad is None]
        self._forget_pass()

    def not_averaged(self) -> list[nn.Parameter]:
        """Those that have a gradient that was never averaged: it was assigned, and not made by `backward`."""
        with without_torch_functions():
            return [parameter for parameter in self._never_averaged if parameter.grad is not None]

    def remove(self) -> None:
        """Take the hooks off the parameters again."""
        for hook in self._hooks:
            hook.remove()

    def _gradient_ready(self, place: int, parameter: nn.Parameter) -> None:
        if not self.enabled:
            return
        if not self._has_begun:
            self._fill_buckets()
            self._has_begun = True
        index = self._bucket_of[place]
        if place not in self._missing[index]:
            self._come_in_parts = True
            if index < self._next:
                raise _comes_in_parts(parameter)
        self._missing[index].discard(place)
        # In order on every rank, whatever the order of the gradients: collectives must match.
        while self._may_start():
            self._start(self._next)

    def _may_start(self) -> bool:
        """Whether the gradients of the next bucket are there, and known to come at once."""
        if self._come_in_parts or self._next == len(self._missing) or self._missing[self._next]:
            return False
        return self._seen.issuperset(self._places[self._next])

    def _start(self, index: int) -> None:
        bucket = self._buckets[index]
        packed, ranks = PackedGradients(bucket.parameters, bucket.take_views), bucket.group.ranks
        work = None if ranks is None else dist.all_reduce(packed.flat, group=ranks, async_op=True)
        self._running.append((bucket, packed, work))
        self._next = index + 1


def _comes_in_parts(parameter: nn.Parameter) -> ConfigError:
    return ConfigError(
        f"dp: a parameter of shape {list(parameter.shape)}",
        "its gradient comes in several parts in this backward pass, and came at once before: the first part is on its "
        "way to the other ranks",
        "checkpoint(..., use_reentrant=False); or dp=fsdp",
        "use_reentrant=False",
    )


def _when_accumulated(parameter: nn.Parameter, hook: Callable[[nn.Parameter], None]) -> RemovableHandle:
    """Call a hook when a gradient has been added up."""
    return _hooked(parameter, lambda: parameter.register_post_accumulate_grad_hook(hook))


def _when_computed(parameter: nn.Parameter, factor: float) -> RemovableHandle:
    """Multiply each new gradient, before it is added to what there is.

    What is averaged is the same on all ranks, so that its mean is itself and later passes add to it; of sums that are
    divided by another number than there are ranks that would not be so.
    """

    def scaled(gradient: torch.Tensor | None) -> torch.Tensor | None:
        return None if gradient is None else gradient * factor  # None where no token came

    return _hooked(parameter, lambda: parameter.register_hook(scaled))


def _hooked(parameter: nn.Parameter, register: Callable[[], RemovableHandle]) -> RemovableHandle:
    """Frozen parameters take no hooks, and may be trained later."""
    trained = parameter.requires_grad
    parameter.requires_grad_(True)
    handle = register()
    parameter.requires_grad_(trained)
    return handle


@dataclass(frozen=True)
class _Bucket:
    parameters: list[nn.Parameter]
    group: GradientGroup

    @cached_property
    def take_views(self) -> bool:
        """As of `PackedGradients`."""
        return take_views(self.parameters)


@torch.no_grad()
def _buckets(groups: Mapping[nn.Parameter, GradientGroup]) -> list[_Bucket]:
    buckets: list[_Bucket] = []
    filled, kind = 0, None
    for parameter, group in reversed(list(groups.items())):
        size = _local(parameter).numel() * parameter.dtype.itemsize
        if kind != (parameter.dtype, parameter.device, group) or filled + size > BUCKET_BYTES:
            buckets.append(_Bucket([], group))
            filled, kind = 0, (parameter.dtype, parameter.device, group)
        buckets[-1].parameters.append(parameter)
        filled += size
    return buckets


def take_views(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether gradients of parameters can be views of one tensor: all or none, since a single view would keep it."""
    return all(not isinstance(item, DTensor) and item.is_contiguous() for item in parameters)


class PackedGradients:
    """This rank's part of the gradients in one 1-D tensor, and behind them for each parameter 1 if it has one, else 0.

    Gradients become views of it where they can: what they were before is freed, and nothing is copied back.

    Args:
        parameters: of one dtype and device.
        take_views: what `take_views` says of them.
        device: where the tensor is; by default where the parameters are.
    """

    @torch.no_grad()
    def __init__(
        self, parameters: Sequence[nn.Parameter], take_views: bool, device: torch.device | None = None
    ) -> None:
        self.parameters = parameters
        with without_torch_functions():
            gradients = [parameter.grad for parameter in parameters]
            pieces = [
                gradient
                if type(gradient) is torch.Tensor and gradient.layout is torch.strided
                else _piece(parameter, gradient)
                for parameter, gradient in zip(parameters, gradients, strict=True)
            ]
            has_gradient = torch.ones(len(parameters), dtype=pieces[0].dtype, device=pieces[0].device)
            for index, gradient in enumerate(gradients):
                if gradient is None:
                    has_gradient[index].zero_()
            pieces.append(has_gradient)
            self.flat = flattened(pieces if device is None else [piece.to(device) for piece in pieces])
            *self._parts, self._has_gradient = parts_like(self.flat, pieces)
            kind = parameters[0].dtype, parameters[0].device
            self._take_views = take_views and kind == (self.flat.dtype, self.flat.device)
            if self._take_views:
                for parameter, gradient, part in zip(parameters, gradients, self._parts, strict=True):
                    if gradient is not None:
                        parameter.grad = part

    @torch.no_grad()
    def unpack(self) -> None:
        """Put the numbers, once they are summed over ranks, in the place of the gradients.

        A parameter that has a gradient on no rank keeps none. Only a rank that has none of a parameter waits to be told
        whether another one has.
        """
        with without_torch_functions():
            present: list[float] | None = None
            copied: list[torch.Tensor] = []
            sources: list[torch.Tensor] = []
            for index, (parameter, part) in enumerate(zip(self.parameters, self._parts, strict=True)):
                gradient = parameter.grad
                if gradient is part:
                    continue
                if gradient is None:
                    present = self._has_gradient.tolist() if present is None else present
                    if not present[index]:
                        continue
                    if self._take_views:
                        parameter.grad = part
                        continue
                if gradient is None or gradient.is_sparse:
                    parameter.grad = gradient = torch.zeros_like(parameter)
                local = _local(gradient)
                if local.data_ptr() != part.data_ptr():
                    copied.append(local)
                    sources.append(part)
            if copied:
                torch._foreach_copy_(copied, sources)


def _piece(parameter: nn.Parameter, gradient: torch.Tensor | None) -> torch.Tensor:
    """This rank's part of a gradient, dense; zeros where there is none."""
    return torch.zeros_like(_local(parameter)) if gradient is None else _dense(_local(gradient))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor; to be asked for without gradients."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def always(parameter: nn.Parameter) -> bool:
    """Every parameter counts."""
    return True


@torch.no_grad()
def gradient_norm(
    parameters: Iterable[nn.Parameter],
    norm_type: float = 2.0,
    pipeline_group: dist.ProcessGroup | None = None,
    counted: Callable[[nn.Parameter], bool] = always,
    device: torch.device | None = None,
) -> torch.Tensor:
    """The norm of all gradients as if they stood on one device: a 0-dim tensor, equal on every rank.

    Of fp32, or of fp64 if the gradients are. Of complex numbers their absolute values count.

    Collective over the meshes of the gradients, and over `pipeline_group`. A gradient that is sharded counts each
    element once, one that is replicated counts once. Parameters without a gradient count as zero.

    Args:
        parameters: those that this rank holds; none at all is allowed.
        norm_type: p of the p-norm, or infinity.
        pipeline_group: this rank's peers that hold the other stages of the model, if it is cut into stages.
        counted: False for parameters whose gradient another stage counts, since it holds them as well.
        device: where a rank without any gradient takes part; by default the CPU.
    """
    groups: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = defaultdict(list)
    homes: dict[tuple[dist.ProcessGroup, ...], torch.device] = {}
    placed: Any = None
    groups_of_placed: tuple[dist.ProcessGroup, ...] = ()
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or not counted(parameter):
            continue
        sharded_over: tuple[dist.ProcessGroup, ...] = ()
        if isinstance(gradient, DTensor):
            gradient = _without_addends(gradient)
            if placed != (gradient.device_mesh, gradient.placements):  # those of most are those of the one before
                placed = gradient.device_mesh, gradient.placements
                groups_of_placed = _sharded_over(*placed)
            sharded_over = groups_of_placed
        local = _dense(_local(gradient))
        groups[sharded_over].append(local.abs() if local.is_complex() else local)
        if sharded_over not in homes:
            homes[sharded_over] = _where_it_travels(gradient)
    operator = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    total: torch.Tensor | None = None
    for sharded_over, gradients in groups.items():
        precision = torch.float64 if any(item.dtype == torch.float64 for item in gradients) else torch.float32
        part = torch.zeros((), device=homes[sharded_over], dtype=precision)
        if filled := [gradient for gradient in gradients if gradient.numel()]:  # a small shard may be empty
            norms = torch._foreach_norm(filled, norm_type, dtype=precision)
            part = torch.linalg.vector_norm(torch.stack([norm.to(part.device) for norm in norms]), norm_type)
        part = part if math.isinf(norm_type) else part**norm_type
        for group in sharded_over:
            dist.all_reduce(part, op=operator, group=group)
        if total is None:
            total = part
        else:
            total = torch.maximum(total, part) if math.isinf(norm_type) else total + part
    if total is None:
        total = torch.zeros((), device=device)
    precision = total.dtype
    if pipeline_group is not None:
        precision = _widest(precision, pipeline_group, total.device)
        total = total.double()
        dist.all_reduce(total, op=operator, group=pipeline_group)
    return (total if math.isinf(norm_type) else total ** (1.0 / norm_type)).to(precision)


def _without_addends(gradient: DTensor) -> DTensor:
    for placement in gradient.placements:
        if placement.is_partial():
            summed = [Replicate() if item.is_partial() else item for item in gradient.placements]
            return gradient.redistribute(placements=summed)
    return gradient


def _sharded_over(mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[dist.ProcessGroup, ...]:
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(placements) if not placement.is_replicate())


def _widest(precision: torch.dtype, group: dist.ProcessGroup, device: torch.device) -> torch.dtype:
    """One type for all, whatever a stage has. Hosts agree on it where they can: nobody waits for a norm."""
    wide = torch.tensor(int(precision == torch.float64), device=host_device(device, group))
    dist.all_reduce(wide, op=dist.ReduceOp.MAX, group=group)
    return torch.float64 if wide else torch.float32


def _where_it_travels(gradient: torch.Tensor) -> torch.device:
    """Where what is computed of a gradient meets that of other ranks: gradients in host memory travel on the device."""
    if isinstance(gradient, DTensor) and gradient.device_mesh.device_type != gradient.device.type:
        return torch.device(gradient.device_mesh.device_type)
    return gradient.device


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scale all gradients so that their `norm` is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does."""
    multiply_gradients(parameters, torch.clamp(max_norm / (norm + 1e-6), max=1.0))


@torch.no_grad()
def multiply_gradients(parameters: Iterable[nn.Parameter], factor: float | torch.Tensor) -> None:
    """Multiply all gradients by a number or a 0-dim tensor."""
    if isinstance(factor, float) and factor == 1:
        return
    for gradients in _of_one_kind(parameters):
        kind = gradients[0]
        if isinstance(factor, torch.Tensor):  # of another type it would be applied to one gradient after the other
            by = factor.to(kind.device, kind.dtype if kind.dtype in (torch.float32, torch.float64) else None)
            torch._foreach_mul_(gradients, by)
        else:
            torch._foreach_mul_(gradients, factor)


@torch.no_grad()
def clip_values(parameters: Iterable[nn.Parameter], limit: float) -> None:
    """Clamp every element of every gradient to [-limit, limit]."""
    for gradients in _of_one_kind(parameters):
        torch._foreach_clamp_min_(gradients, -limit)
        torch._foreach_clamp_max_(gradients, limit)


@torch.no_grad()
def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether every number of this rank's parts is finite. Waits for the device."""
    filled = (part for part in map(_local, tensors) if part.numel())
    norms = (torch._foreach_norm(parts, math.inf) for parts in _by_kind(filled))
    return all(bool(torch.stack(of_one_kind).isfinite().all()) for of_one_kind in norms)


def _of_one_kind(parameters: Iterable[nn.Parameter]) -> Iterable[list[torch.Tensor]]:
    """This rank's parts of the gradients, by device and type."""
    return _by_kind(_local(parameter.grad) for parameter in parameters if parameter.grad is not None)


def _by_kind(tensors: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        kinds[tensor.device, tensor.dtype].append(tensor)
    return kinds.values()
