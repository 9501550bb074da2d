"""Metrics of torchmetrics: over which ranks they exchange their states, and their states as data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from autolaunch_strategies.lightning.replacement import Replacement
from autolaunch_strategies.tensor.views import plain


class _HereOnly(Replacement):
    """A `Replacement` that copies made in this process keep: what it does is right for them, too."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _HereOnly:
        return self


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


_NO_STATE = {
    *vars(nn.Module()), "update", "compute", "_update_signature", "process_group", "dist_sync_fn",
    "distributed_available_fn", "_device", "_defaults", "_persistent", "_reductions", "_cache",
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
