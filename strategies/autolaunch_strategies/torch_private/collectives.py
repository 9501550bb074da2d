"""Process groups by name and with a timeout, and collectives of single tensors."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

OF_THE_MACHINE: tuple[type[Exception], ...] = (
    torch.OutOfMemoryError, MemoryError, dist.DistError, *filter(None, [getattr(torch, "AcceleratorError", None)]),
)  # fmt: skip
"""Errors of the device, or of another rank, and not of what was called: to try something else doesn't help.

Other ranks wait meanwhile, so whatever looks at errors to find out what a model can do raises these at once. Most of
them are a RuntimeError. `torch.AcceleratorError` is new in torch 2.8.
"""

LONG_LIVED = "long timeout"
"""The description of groups whose timeout stays as they were made with."""


def set_all_timeouts(seconds: float) -> None:
    """Let collectives begun from now on fail after `seconds` without an answer: of all groups of this process.

    Those that a `DeviceMesh` has made among them, which can't be told a timeout. Groups `LONG_LIVED` are left alone.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        if group.group_desc != LONG_LIVED:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of backends without timeouts
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def all_gather_single(gathered: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Equal parts of all ranks, one after the other along the first dim; torch 2.13 has a new name for it."""
    function: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    function(gathered, own, group=group)


def reduce_scatter_single(own: torch.Tensor, parts: torch.Tensor, group: dist.ProcessGroup) -> None:
    """This rank's part of the sum over ranks, parts along the first dim; torch 2.13 has a new name for it."""
    function: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    function(own, parts, group=group)


def start_all_gather(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Start gathering flat tensors of all ranks, one after the other; wait for what is returned."""
    # torch 2.13 has a new name for it and warns about the old one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(received, sent, group=group, async_op=True)


def start_passing(
    sent: torch.Tensor, to: int, received: torch.Tensor, source: int, group: dist.ProcessGroup, tag: int
) -> list[Any]:
    """Start sending a tensor to one rank of a group and receiving one from another; wait for all that is returned."""
    if sent.device.type == "cpu":  # where nothing has to begin together: what torch's functions come to in the end
        return [group.send([sent], to, tag), group.recv([received], source, tag)]
    return dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, group=group, tag=tag, group_peer=to),
            dist.P2POp(dist.irecv, received, group=group, tag=tag, group_peer=source),
        ]
    )


def group_of_some(groups: Sequence[Sequence[int]], description: str) -> dist.ProcessGroup | None:
    """The group of this process among groups of global ranks that share none; None if it is in none of them.

    Collective over all ranks of the run, and begun there in the same order. Where the default group is bound to a GPU,
    the communicators are split off its own at once, all of them by one call.
    """
    # Torch warns of ranks that send one by one in a group whose other work would wait for it.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    default = dist.distributed_c10d._get_default_group()
    device = default.bound_device_id
    if device is not None and default._get_backend(device).supports_splitting:
        return dist.split_group(default, [sorted(ranks) for ranks in groups], group_desc=description)
    own = None
    for ranks in groups:
        group = dist.new_group(sorted(ranks), group_desc=description)
        own = group if default.rank() in ranks else own
    return own


def host_device(device: torch.device, group: dist.ProcessGroup | None = None) -> torch.device:
    """Where tensors are whose values the host needs at once: in its own memory, if the group has a backend for it."""
    host = torch.device("cpu")
    if device == host:
        return host
    try:  # what a configuration says of a group, a part of it may have lost when it was split off
        (group or dist.distributed_c10d._get_default_group())._get_backend(host)
    except RuntimeError:
        return device
    return host


def group_called(name: str) -> dist.ProcessGroup:
    """The process group whose `group_name` is `name`."""
    resolve: Any = dist.distributed_c10d._resolve_process_group
    return resolve(name)


def default_store() -> dist.Store:
    """The store at which the ranks of the default process group met; another thread of rank 0 may serve it."""
    return dist.distributed_c10d._get_default_store()
