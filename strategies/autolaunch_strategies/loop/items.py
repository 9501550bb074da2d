"""Over how many items the loss of a training loop is the mean, however they are spread over ranks and batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autolaunch_strategies.apply.registry import applied_to


def items_per_rank(model: nn.Module, count: Any) -> torch.Tensor:
    """What a sum of losses over items is divided by, to be part of the mean over the items of all ranks along dp.

    Gradients are averaged over these ranks, so it is the number of items that each would have if all had as many::

        items = items_per_rank(model, sum((labels != -100).sum() for _, labels in batches))
        for tokens, labels in batches:  # of one optimizer step, on this rank
            loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum") / items
            loss.backward()
        optimizer.step()

    A batch or a rank without any item counts for nothing. Collective over the ranks along dp; nothing waits for the
    device.

    Args:
        model: what `parallelize` was given; of one that is not parallelised, `count` is that of all.
        count: the items of all batches of an optimizer step on this rank: a number, or a 0-dim tensor.

    Returns:
        0-dim, not 0: 1 if there are none at all.
    """
    applied = applied_to(model)
    if applied is None:
        total = torch.as_tensor(count)
    else:
        total = torch.as_tensor(count, device=applied.mesh.device_mesh.device_type).detach().clone()
        if (group := applied.mesh.group("dp")) is not None:
            dist.all_reduce(total, group=group)
            total = total / group.size()
    return total.where(total > 0, 1)
