"""A backend of torch.distributed that copies to host memory and lets gloo do the rest: several ranks can share a GPU.

NCCL refuses two ranks on one GPU. Importing this registers ``staged``. What arrives is copied to its tensor by `wait`,
so what is read without waiting is wrong here, as on a GPU. It stages tensors of the CPU, too, which shows on any
machine that it does what gloo does.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_map_only

NAME = "staged"


class Copied(dist.Work):
    """Ends when something in host memory has; `wait` copies what came, over `divisor`, to where it is wanted."""

    def __init__(
        self, work: dist.Work, arriving: list[tuple[torch.Tensor, torch.Tensor]], staged: Any, divisor: int
    ) -> None:
        super().__init__()
        self._work, self._arriving, self._staged, self._divisor = work, arriving, staged, divisor

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is None or timeout <= timedelta(0):
            self._work.wait()
        else:
            self._work.wait(timeout)
        for tensor, host in self._arriving:
            tensor.detach().copy_((host if self._divisor == 1 else host / self._divisor).view(tensor.shape))
        self._arriving, self._staged = [], None
        return True

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        results = [tensor for tensor, _ in self._arriving]
        self.wait()
        future.set_result(results)
        return future


def _through_host_memory(name: str, arrives: bool = True) -> Callable[..., dist.Work]:
    """The collective `name` of a group. `arrives`: its first argument is what it writes to."""

    def collective(self: Staged, *args: Any, **kwargs: Any) -> dist.Work:
        staged = tree_map_only(torch.Tensor, _on_host, list(args))
        options = [item for item in (*args, *kwargs.values()) if hasattr(item, "reduceOp")]
        averages = [item for item in options if item.reduceOp == dist.ReduceOp.AVG]
        for item in averages:  # which gloo can't do in all of them
            item.reduceOp = dist.ReduceOp.SUM
        arriving: list[tuple[torch.Tensor, torch.Tensor]] = []
        if arrives:
            arriving = list(zip(tree_flatten(args[0])[0], tree_flatten(staged[0])[0], strict=True))
        work: dist.Work = getattr(self.host, name)(*staged, **kwargs)
        for item in averages:
            item.reduceOp = dist.ReduceOp.AVG
        return Copied(work, arriving, staged, self.size() if averages else 1)

    return collective


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy; on a GPU the host waits for what it is a copy of."""
    return tensor.detach().to("cpu", copy=True).contiguous()


class Staged(dist.ProcessGroup):
    """A group whose collectives pass through host memory."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        gloo._set_sequence_number_for_group()
        self.host = dist.ProcessGroup(store, rank, size)
        for group in (self, self.host):
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)

    def getBackendName(self) -> str:
        return NAME

    allreduce = _through_host_memory("allreduce")
    allreduce_coalesced = _through_host_memory("allreduce_coalesced")
    broadcast = _through_host_memory("broadcast")
    reduce = _through_host_memory("reduce")
    allgather = _through_host_memory("allgather")
    allgather_coalesced = _through_host_memory("allgather_coalesced")
    reduce_scatter = _through_host_memory("reduce_scatter")
    gather = _through_host_memory("gather")
    scatter = _through_host_memory("scatter")
    alltoall = _through_host_memory("alltoall")
    send = _through_host_memory("send", arrives=False)
    recv = _through_host_memory("recv")
    recv_anysource = _through_host_memory("recv_anysource")

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait on the host, whichever device the caller says that it uses."""
        here = dist.BarrierOptions()
        if opts is not None:
            here.timeout, here.asyncOp = opts.timeout, opts.asyncOp
        return Copied(self.host.barrier(here), [], [], 1)


for _names in (
    ("all_gather_single", "_allgather_base"),
    ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    ("reduce_scatter_single", "_reduce_scatter_base"),
    ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    ("all_to_all_single", "alltoall_base"),
):  # torch 2.13 has new names for them
    for _name in _names:
        if hasattr(dist.ProcessGroup, _name):
            setattr(Staged, _name, _through_host_memory(_name))

dist.Backend.register_backend(NAME, Staged, devices=["cpu", "cuda"])
