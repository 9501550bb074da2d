"""Sharded parameters that only some ranks use in a step, as experts that a router picks by the data.

`fully_shard` exchanges the gradients that a rank has: ranks that have different ones would wait for tensors of other
sizes than are sent. And it gathers what is called: ranks that call different blocks of one shape would compute with
parts of both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from autolaunch_strategies.torch_private.fsdp import accumulates_apart, gathers_for_training, parameter_groups
from autolaunch_strategies.torch_private.tracing import has_no_values

_ORDERS = 8_388_593
"""A prime number below 2^23: fp32 holds what is smaller, and its negative."""


class UnusedParameters:
    """Lets ranks exchange gradients of parameters that not all of them have used.

    A parameter without a gradient on this rank counts as zero if another rank has one, and keeps none otherwise, as at
    level 0 (`GradientAverage`). Ranks say at the end of a backward pass what they have used; only those that have left
    something out wait for what the others said.

    With that they compare the order in which they have gathered since. On devices that run behind the host it is known
    with the next pass only.

    Args:
        root: the outermost sharded module, initialised.
        refuse_orders: raises, where ranks have gathered in different orders.
        refuse_write: raises, where a parameter (sharded) was written into while it was gathered.
    """

    def __init__(
        self, root: nn.Module, refuse_orders: Callable[[], NoReturn], refuse_write: Callable[[nn.Parameter], NoReturn]
    ) -> None:
        assert isinstance(root, FSDPModule)
        states = root._get_fsdp_state()._state_ctx.all_states
        groups = [group for state in states for group in parameter_groups(state)]
        self._groups = [group for group in groups if group.mesh_info.mesh.size() > 1]
        self._used: set[Any] = set()
        self._left_out: set[Any] = set()
        """Parameters without a gradient, neither of this pass nor of one before it."""
        self._took_part: set[Any] = set()
        """Groups that a backward pass went through which exchanged nothing."""
        self._gathered: dict[DeviceMesh, int] = defaultdict(int)
        """Of each mesh in which order its groups were gathered, as one number below `_ORDERS`."""
        self._orders: list[tuple[torch.Tensor, Any]] = []
        """The largest of these numbers over ranks and of their negatives, not compared yet, and the event behind which
        they are there."""
        self._refuse_orders, self._refuse_write = refuse_orders, refuse_write
        self._versions: dict[Any, tuple[torch.Tensor, int]] = {}
        """Of what was gathered how often it had been written into."""
        for place, group in enumerate(self._groups):
            group.post_backward = self._behind_filling(group, group.post_backward)
            group.unshard = self._noted(place, group, group.unshard)
            group.wait_for_unshard = self._behind_versions(group, group.wait_for_unshard)
        for state in states if self._groups else ():
            state._root_post_backward_final_callback = self._and_agreed(state._root_post_backward_final_callback)

    def _behind_filling(self, group: Any, exchange: Callable[..., None]) -> Callable[..., None]:
        def post_backward(*unused: Any) -> None:
            if not any(hasattr(item, "_unsharded_param") for item in group.fsdp_params):
                return  # never gathered; torch looks for its gradients all the same where none are exchanged
            if group._training_state == TrainingState.PRE_BACKWARD:
                self._took_part.add(group)
            if group.reduce_grads:
                self._fill(group)
            exchange(*unused)

        return post_backward

    def _noted(self, place: int, group: Any, gather: Callable[..., None]) -> Callable[..., None]:
        mesh = group.mesh_info.mesh

        def unshard(*args: Any, **kwargs: Any) -> None:
            before = group._all_gather_result
            gather(*args, **kwargs)
            # What does not train, replicas may do differently (texts that end earlier).
            if before is None and group._all_gather_result is not None and gathers_for_training():
                self._gathered[mesh] = (self._gathered[mesh] * 31 + place + 1) % _ORDERS

        return unshard

    def _behind_versions(self, group: Any, wait: Callable[..., None]) -> Callable[..., None]:
        def wait_for_unshard(*args: Any, **kwargs: Any) -> None:
            wait(*args, **kwargs)
            for item in group.fsdp_params:
                if item not in self._versions and (tensor := getattr(item, "_unsharded_param", None)) is not None:
                    self._versions[item] = tensor, tensor._version

        return wait_for_unshard

    def _fill(self, group: Any) -> None:
        """Give parameters that the pass has left out a gradient of zeros."""
        parameters = [item for item in group.fsdp_params if hasattr(item, "_unsharded_param")]
        filled = {item for item in parameters if _has_gradient(item)}
        self._used |= filled
        if not filled and group not in self._took_part:  # nor on any other rank: no block is called by some alone
            return
        self._took_part.discard(group)
        for item in parameters:
            if item in filled or not item.sharded_param.requires_grad:
                continue
            if item.sharded_param.grad is None:
                self._left_out.add(item)
            item.unsharded_param.grad = torch.zeros_like(item.unsharded_param)
        added_up = any(item.unsharded_accumulated_grad is not None for item in parameters)
        if added_up or len({item.param_dtype for item in parameters}) > 1:
            for item in filter(accumulates_apart, parameters):  # all of one dtype
                item.accumulate_unsharded_grad_if_needed()
                item.to_accumulated_grad_if_needed()

    def _and_agreed(self, complete: Callable[[], None]) -> Callable[[], None]:
        def final_callback() -> None:
            complete()
            self._refuse_written()
            if all(group.reduce_grads and group.all_reduce_grads for group in self._groups):
                self._agree()

        return final_callback

    def _agree(self) -> None:
        """Take the gradients away that are zero because no rank has any. Collective."""
        self._compare_orders()
        by_mesh: dict[DeviceMesh, list[Any]] = defaultdict(list)
        for group in self._groups:
            by_mesh[group.mesh_info.mesh] += group.fsdp_params
        device, left_out = self._groups[0].device, self._left_out - self._used
        for mesh, parameters in by_mesh.items():
            order = float(self._gathered[mesh])
            used = torch.tensor([*(float(item in self._used) for item in parameters), order, -order])
            if device.type == "cuda":  # copied from other memory, the host would wait for the backward pass
                used = used.pin_memory()
            used = used.to(device, non_blocking=True)
            for dim in range(mesh.ndim):
                dist.all_reduce(used, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
            self._orders.append(_sent_to_host(used[-2:]))
            mine = [index for index, item in enumerate(parameters) if item in left_out]
            for index, by_any in zip(mine, used[mine].tolist(), strict=True) if mine else ():
                if not by_any:
                    parameters[index].sharded_param.grad = None
        for done in (self._used, self._left_out, self._took_part, self._gathered):
            done.clear()
        if device.type == "cpu":
            self._compare_orders()

    def _compare_orders(self) -> None:
        orders, self._orders = self._orders, []
        for order, arrived in orders:
            if has_no_values(order):
                continue
            if arrived is not None:
                arrived.synchronize()  # of the pass before
            largest, largest_negative = order.tolist()
            if largest != -largest_negative:
                self._refuse_orders()

    def _refuse_written(self) -> None:
        """Refuse what a forward pass has written into gathered parameters: it is gone when they are freed.

        Not into frozen ones: layers of adapters set those anew in each pass, to what they were.
        """
        for group in self._groups:
            for item in group.fsdp_params:
                tensor = getattr(item, "_unsharded_param", None)
                if tensor is None or not item.sharded_param.requires_grad:
                    continue
                known, version = self._versions.get(item, (tensor, tensor._version))
                if known is tensor and version != tensor._version:
                    self._refuse_write(item.sharded_param)
                self._versions[item] = tensor, tensor._version


def _sent_to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """(a copy in the host's memory, the event behind which it is there): to read it later waits for nothing else."""
    if tensor.device.type != "cuda":
        return tensor, None
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return copy, arrived


def _has_gradient(parameter: Any) -> bool:
    return parameter.unsharded_accumulated_grad is not None or parameter.unsharded_param.grad is not None
