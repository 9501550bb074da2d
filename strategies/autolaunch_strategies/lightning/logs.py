"""What a step logs, as records that can be merged and sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from autolaunch_strategies.training.weights import shares_of

LOG_ARGUMENTS = (
    "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist", "sync_dist_group",
    "add_dataloader_idx", "batch_size", "metric_attribute", "rank_zero_only",
)  # fmt: skip
"""What `self.log` takes behind a name and a value, by position."""


@dataclass
class LogCall:
    """One call of `self.log`: a number or 0-dim tensor, or (`path`) a metric with its value of this batch, if any."""

    name: str
    value: Tensor | float | None
    options: dict[str, Any]
    batch_size: float | None = None
    path: str | None = None
    returned_by: str | None = None
    """The path of the metric of which `value` is what its call returned."""


@dataclass
class Part:
    """What one run of the step logged, and how many samples it saw."""

    samples: float | Tensor
    records: list[LogCall] = field(default_factory=list)


@dataclass(frozen=True)
class Entry:
    """A record without its numbers. `dtype` is None if there is no value."""

    name: str
    dtype: torch.dtype | None
    has_batch_size: bool
    path: str | None
    options: tuple[tuple[str, Any], ...]


Structure = tuple[tuple[Entry, ...], tuple[tuple[str, torch.dtype | None], ...]]
"""The log calls of a step and the names and types of what travels with them: None for a number of the host's."""


def type_of(value: Tensor | float | None) -> torch.dtype | None:
    """The type of a logged value: lightning makes numbers floats of the default type, at least of 32 bits."""
    if value is None or isinstance(value, Tensor):
        return None if value is None else value.dtype
    default = torch.get_default_dtype()
    return default if default in (torch.float32, torch.float64) else torch.float32


def merged(parts: Iterable[Part]) -> list[LogCall]:
    """What several runs of a step logged, as one run on the whole batch would have logged it."""
    parts = [part for part in parts if part.records]
    if len(parts) <= 1:
        return parts[0].records if parts else []
    calls: dict[tuple[str, int], list[tuple[float | Tensor, LogCall]]] = {}
    for part in parts:
        times: dict[str, int] = {}
        for record in part.records:
            times[record.name] = times.get(record.name, -1) + 1
            weight = part.samples if record.batch_size is None else record.batch_size
            calls.setdefault((record.name, times[record.name]), []).append((weight, record))
    return [_merged_call(runs) for runs in calls.values()]


def _merged_call(runs: Sequence[tuple[float | Tensor, LogCall]]) -> LogCall:
    weights, records = zip(*runs, strict=True)
    first, latest = records[0], records[-1]
    if len(records) == 1 or latest.path is not None:
        return latest
    sizes = [record.batch_size for record in records]
    batch_size = sum(sizes) if None not in sizes else None
    values = [torch.as_tensor(record.value, dtype=torch.float64) for record in records]
    function = first.options.get("reduce_fx", "mean")
    name = function.lower() if isinstance(function, str) else getattr(function, "__name__", "")
    match name:
        case "sum":
            value = torch.stack(values).sum()
        case "max" | "min":
            value = getattr(torch.stack(values), name)()
        case _:
            value = torch.stack([share * value for share, value in zip(shares_of(weights), values, strict=True)]).sum()
    dtype = first.value.dtype if isinstance(first.value, Tensor) and first.value.is_floating_point() else type_of(0.0)
    return replace(first, value=value.to(dtype), batch_size=batch_size)
