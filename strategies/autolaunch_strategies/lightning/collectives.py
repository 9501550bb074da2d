"""What all ranks do together when lightning asks for it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autolaunch_strategies.lightning.place import Place
from autolaunch_strategies.tensor.views import plain


class Collectives:
    """The collectives of a run: "all" means the ranks whose data differ, unless said otherwise.

    Args:
        place: knows the mesh and the device, from its `join` on.
    """

    def __init__(self, place: Place) -> None:
        self.place = place

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks whose data differ (dp); anything else is returned as it is."""
        group = self._data_group(group)
        if isinstance(tensor, DTensor):  # computed from sharded parameters, a norm of them, say
            tensor = plain(tensor)
        if not isinstance(tensor, torch.Tensor) or group is None:
            return tensor
        name = str(reduce_op).rsplit(".", 1)[-1].lower() if reduce_op is not None else "mean"
        total = tensor.detach().clone().to(self.place.device)
        if name in ("mean", "avg") and not total.is_floating_point():
            total = total.float()
        operator = {"mean": "SUM", "avg": "SUM"}.get(name, name.upper())
        dist.all_reduce(total, op=getattr(dist.ReduceOp, operator), group=group)
        return total / group.size() if name in ("mean", "avg") else total

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """One answer for every rank of the mesh: whether all (or any) of them say yes."""
        votes = torch.tensor(int(decision), device=self.place.device)
        dist.all_reduce(votes)
        return bool(votes == dist.get_world_size()) if all else bool(votes > 0)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """The tensors of all ranks whose data differ, [ranks, *tensor.shape]; of one rank only, the tensor as it is."""
        group = self._data_group(group)
        if group is None:
            return tensor
        tensor = tensor.contiguous().to(self.place.device)
        if sync_grads:
            from torch.distributed.nn.functional import all_gather

            return torch.stack(all_gather(tensor, group=group))
        gathered = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(gathered, tensor, group=group)
        return torch.stack(gathered)

    def broadcast(self, item: Any, source: int = 0) -> Any:
        """An object of rank `source` on every rank of the mesh."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return item
        objects = [item]
        dist.broadcast_object_list(objects, source)
        return objects[0]

    def barrier(self) -> None:
        """Wait until every rank of the mesh is here."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            device = self.place.device
            dist.barrier(device_ids=None if device.type == "cpu" else [device.index])

    def _data_group(self, group: Any) -> dist.ProcessGroup | None:
        """The ranks whose data differ: what "all" means to a LightningModule, also when it says WORLD."""
        if group is None or group is dist.group.WORLD:
            return self.place.rank_mesh.group("dp")  # along cp steps see the same whole sequences
        return group
