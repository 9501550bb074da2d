"""Metrics of torchmetrics: over which ranks they exchange their states, and their states as data."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from autolaunch_strategies.lightning.replacement import Replacement
from autolaunch_strategies.tensor.views import plain


class _HereOnly(Replacement):
    """A `Replacement` that copies made in this process keep: what it does is right for them, too."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _HereOnly:
        return self


def place_metrics(module: nn.Module, device: torch.device) -> None:
    """Move the states of every metric of a module to `device`: they are no buffers, so that nothing else would."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, nn.Parameter) or tensor.is_meta else tensor.to(device)

    for metric in module.modules():
        if isinstance(metric, Metric) and metric.device != device:
            metric._apply(moved)


def exchange_metrics_over(group: dist.ProcessGroup | None, module: nn.Module) -> None:
    """Let every torchmetrics metric of a module exchange its state over `group`, and not over all ranks.

    So do copies of a metric; pickles don't. A group that the user gave a metric stays.

    Args:
        group: the ranks whose data differ; None if there is just one: nothing is exchanged then.
    """
    for metric in module.modules():
        if not isinstance(metric, Metric) or metric.process_group not in (None, dist.group.WORLD):
            continue
        available, gather = (
            item.original if isinstance(item, Replacement) else item
            for item in (metric.distributed_available_fn, metric.dist_sync_fn)
        )
        metric.process_group = None
        metric.distributed_available_fn = _HereOnly(functools.partial(_available, available, group), available)
        if group is not None:
            metric.dist_sync_fn = _HereOnly(functools.partial(_gather, gather or gather_all_tensors, group), gather)
        else:
            metric.dist_sync_fn = gather


def _available(original: Callable[[], bool], group: dist.ProcessGroup | None) -> bool:
    return group is not None and bool(original())


def _gather(original: Callable[..., Any], own: dist.ProcessGroup, tensor: Tensor, group: Any = None) -> Any:
    return original(tensor, group=own if group in (None, dist.group.WORLD) else group)


class StepValues:
    """Lets metrics that a training step logs by step say of its batch what they would say on one device.

    A metric joins what it collects over ranks when an epoch ends; of a single batch it knows this rank's part, unless
    ``dist_sync_on_step`` is set. Which metrics are logged by step shows when they are logged; until then all join, for
    `_STEPS` steps. One that is logged for the first time after these joins from then on; that its first value is of
    this rank's part is told.
    """

    _STEPS = 100

    def __init__(self) -> None:
        self._undecided: list[tuple[Metric, bool]] | None = None
        """Metrics that were not logged yet, each with whether it joins anyway."""
        self._left = self._STEPS

    @contextmanager
    def joined(self, module: pl.LightningModule) -> Iterator[None]:
        """A training step runs within it."""
        if self._undecided is None:
            metrics = [item for item in module.modules() if isinstance(item, Metric)]
            self._undecided = [(metric, bool(metric.dist_sync_on_step)) for metric in metrics]
        undecided, all_join = self._undecided, self._left > 0
        if not undecided:
            yield
            return
        for metric, joins in undecided:
            metric.dist_sync_on_step = joins or all_join
        try:
            yield
        finally:
            for metric, joins in undecided:
                metric.dist_sync_on_step = joins
        self._left = max(self._left - 1, 0)
        results: Any = module.trainer._results or {}
        by_step: dict[int, bool] = {}
        for item in results.values():
            if not item.is_tensor:
                by_step[id(item.value)] = item.meta.on_step or by_step.get(id(item.value), False)
        for metric, joins in undecided:
            metric.dist_sync_on_step = joins or by_step.get(id(metric), False)
            if metric.dist_sync_on_step and not joins and not all_join:
                rank_zero_warn(
                    f"a {type(metric).__name__} is logged by step for the first time after {self._STEPS} steps: this "
                    "value is that of the first rank's part of the batch, the next ones are of the whole batch"
                )
        self._undecided = [(metric, joins) for metric, joins in undecided if id(metric) not in by_step]


_NO_STATE = {
    *vars(nn.Module()), "update", "compute", "_update_signature", "process_group", "dist_sync_fn",
    "distributed_available_fn", "dist_sync_on_step", "_device", "_defaults", "_persistent", "_reductions", "_cache",
}  # fmt: skip


@dataclass
class _OnDevice:
    """A tensor on its way from one device of its metric to that of another rank's."""

    tensor: Tensor


def state_of(metric: Metric) -> dict[str, Any]:
    """What updates have changed: states, counters, and plain attributes that some metrics set."""
    return {
        name: tree_map(_depart, value) for name, value in vars(metric).items() if name not in _NO_STATE and _data(value)
    }


def _data(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_data, value.values()))
    if isinstance(value, list | tuple | set):
        return all(map(_data, value))
    return value is None or isinstance(value, Tensor | bool | int | float | str | bytes | torch.dtype)


def _depart(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = plain(value.detach())
    return value if value.device.type == "cpu" else _OnDevice(value.cpu())


def arrived(value: Any, device: torch.device) -> Any:
    return value.tensor.to(device) if isinstance(value, _OnDevice) else value


@contextmanager
def kept(metrics: Iterable[Metric]) -> Iterator[None]:
    """What metrics collect within it counts for nothing: afterwards they are as before."""
    states = [(metric, copy.deepcopy(state_of(metric))) for metric in metrics]
    try:
        yield
    finally:
        for metric, state in states:
            vars(metric).update(tree_map(functools.partial(arrived, device=metric.device), state))


@contextmanager
def uncounted(metrics: Iterable[Metric]) -> Iterator[None]:
    """As `kept`, where other ranks collect: lists get as many entries as theirs, without rows.

    Metrics exchange some lists entry by entry, so that ranks with fewer of them would wait for ever.
    """
    metrics = list(metrics)
    lengths = [{name: len(entries) for name, entries in _lists(metric).items()} for metric in metrics]
    with kept(metrics):
        yield
        added = [
            {name: entries[length.get(name, 0) :] for name, entries in _lists(metric).items()}
            for metric, length in zip(metrics, lengths, strict=True)
        ]
    for metric, more in zip(metrics, added, strict=True):
        for name, entries in more.items():
            getattr(metric, name).extend(entry[:0] for entry in entries if isinstance(entry, Tensor) and entry.dim())


def _lists(metric: Metric) -> dict[str, list[Any]]:
    states = {name: getattr(metric, name) for name in metric._defaults}
    return {name: state for name, state in states.items() if isinstance(state, list)}


class BatchValues:
    """The values of metrics for a whole batch, whose step calls them for one microbatch after the other.

    What a call of a metric returns is the value of one microbatch. So a copy of each metric sees the microbatches of
    one batch alone.
    """

    def __init__(self) -> None:
        self._copies: dict[str, Metric] = {}
        self._called: dict[str, Metric] = {}
        self._hooks: list[RemovableHandle] = []
        self.counts = True
        """Whether calls belong to the batch."""

    def begin(self, metrics: Iterable[tuple[str, Metric]]) -> None:
        """A batch begins: `metrics` (by path) are followed until `end`."""
        self._called.clear()
        self._hooks = [
            metric.register_forward_pre_hook(self._follow(path), with_kwargs=True) for path, metric in metrics
        ]

    def end(self) -> None:
        """Follow no longer; values are there until the next batch."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def path_of(self, value: Any) -> str | None:
        """The path of the metric whose last call in this batch returned `value` itself."""
        return next((path for path, metric in self._called.items() if metric._forward_cache is value), None)

    def value(self, path: str | None) -> Tensor | None:
        """The value of a metric for the batch; None if it was not called or has no single value."""
        if path not in self._called:
            return None
        metric = self._copies[path]
        metric._to_sync = metric.dist_sync_on_step  # as for the value that a call returns
        value = metric.compute()
        return value if isinstance(value, Tensor) and value.numel() == 1 else None

    def _follow(self, path: str) -> Callable[..., None]:
        def update(metric: nn.Module, args: Any, kwargs: Any) -> None:
            if not self.counts:
                return
            assert isinstance(metric, Metric)
            if path not in self._copies:
                self._copies[path] = metric.clone()
            if path not in self._called:
                self._called[path] = metric
                self._copies[path].reset()
            self._copies[path].update(*args, **kwargs)

        return update
