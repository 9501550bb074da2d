"""Every collective that the engine, FSDP2 and DTensor call, on two ranks, by gloo itself and through host memory."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from autolaunch_strategies.torch_private.collectives import (
    all_gather_single,
    reduce_scatter_single,
    start_all_gather,
    start_passing,
)
from tests.support import staged
from tests.support.cases import RANK, serve


def collectives() -> dict[str, Any]:
    """What each gives on this rank."""
    world, other = dist.group.WORLD, 1 - RANK
    assert world is not None
    own = torch.arange(24.0).view(4, 6) + 100 * RANK
    results: dict[str, Any] = {}

    def into(name: str, buffer: torch.Tensor, *works: Any) -> None:
        for work in works:
            if work is not None:
                work.wait()
        results[name] = buffer.tolist()

    def empty(*shape: int) -> torch.Tensor:
        return torch.full(shape, -1.0)

    for op in ("SUM", "MAX", "MIN", "PRODUCT"):
        into(f"all_reduce {op}", summed := own.clone(), dist.all_reduce(summed, getattr(dist.ReduceOp, op)))
    into("all_reduce async", summed := own.clone(), dist.all_reduce(summed, async_op=True))
    into("all_reduce of a number", number := torch.tensor(RANK + 2), dist.all_reduce(number))
    into("broadcast", told := own.clone(), dist.broadcast(told, 1))
    into("reduce", to_one := own.clone(), dist.reduce(to_one, 0)) if RANK == 0 else dist.reduce(own.clone(), 0)
    into("all_gather_single", gathered := empty(8, 6), all_gather_single(gathered, own, world))
    into("started", gathered := empty(48), start_all_gather(gathered, own.flatten(), world))
    into("reduce_scatter_single", share := empty(2, 6), reduce_scatter_single(share, own, world))
    parts = [empty(4, 6) for _ in range(2)]
    dist.all_gather(parts, own)
    results["all_gather"] = torch.cat(parts).tolist()
    share = empty(2, 6)
    dist.reduce_scatter(share, list(own.chunk(2)))
    results["reduce_scatter"] = share.tolist()
    into("all_to_all_single", swapped := empty(4, 6), dist.all_to_all_single(swapped, own))
    sizes = [1, 3] if RANK == 0 else [3, 1]
    into("all_to_all_single of sizes", swapped := empty(4, 6), dist.all_to_all_single(swapped, own, sizes, sizes))
    parts = [empty(2, 6) for _ in range(2)]
    dist.all_to_all(parts, list(own.chunk(2)))
    results["all_to_all"] = torch.cat(parts).tolist()
    parts = [empty(4, 6) for _ in range(2)]
    dist.gather(own, parts if RANK == 0 else None, 0)
    results["gather"] = torch.cat(parts).tolist()
    into("scatter", share := empty(2, 6), dist.scatter(share, list(own.chunk(2)) if RANK == 0 else None, 0))
    into("send and recv", arrived := empty(4, 6), dist.isend(own, other), dist.irecv(arrived, other))
    into("passing", arrived := empty(4, 6), *start_passing(own, other, arrived, other, world, 7))
    operations = [dist.P2POp(dist.isend, own, other), dist.P2POp(dist.irecv, arrived := empty(4, 6), other)]
    into("batched", arrived, *dist.batch_isend_irecv(operations))
    dist.barrier()
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": RANK})
    results["objects"] = objects
    dist.broadcast_object_list(objects, 1)
    results["told"] = objects
    results["functional"] = [
        (tensor + 0).tolist()
        for tensor in (
            functional.all_reduce(own, "sum", world),
            functional.all_gather_tensor(own, 0, world),
            functional.reduce_scatter_tensor(own, "sum", 0, world),
            functional.all_to_all_single(own, None, None, world),
            functional.broadcast(own, 1, world),
            *functional.all_reduce_coalesced([own, 2 * own], "sum", world),
            *functional.all_gather_into_tensor_coalesced([own, 2 * own], world),
            *functional.reduce_scatter_tensor_coalesced([own, 2 * own], "sum", [0, 0], world),
        )
    ]
    average = own.clone()
    if sys.argv[2] == staged.NAME:
        dist.all_reduce(average, dist.ReduceOp.AVG)
    else:
        dist.all_reduce(average)
        average /= 2
    results["average"] = average.tolist()
    into("average scattered", share := empty(2, 6), dist.reduce_scatter_tensor(share, own, dist.ReduceOp.AVG))
    part = dist.new_group([0, 1])
    into("of a group", summed := own.clone(), dist.all_reduce(summed, group=part))
    return results


def by(backend: str) -> dict[str, Any]:
    dist.init_process_group(backend)
    return collectives()


if __name__ == "__main__":
    serve({name: {"collectives": functools.partial(by, name)} for name in (staged.NAME, "gloo")})
