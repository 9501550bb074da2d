"""The order tables of torch.distributed.pipelining."""

from __future__ import annotations

from typing import Any


def pipeline_order(
    name: str, ranks: int, microbatches: int, virtual_stages: int
) -> tuple[tuple[tuple[int, str, int], ...], ...]:
    """Per rank the (stage, kind, microbatch) of a schedule of torch.distributed.pipelining, in order.

    Kinds are F, B (all of the backward), I (only that for inputs) and W (only that for weights); idle steps are left
    out, and a forward and a backward that torch runs as one follow each other.

    Args:
        name: of a class in torch.distributed.pipelining.schedules.
    """
    from types import SimpleNamespace

    from torch.distributed.pipelining import schedules

    # A table depends on these numbers alone, and real stages would need process groups.
    shape = {"num_stages": ranks * virtual_stages, "group_size": ranks, "group_rank": 0, "submod": None}
    stages: Any = [SimpleNamespace(**shape) for _ in range(virtual_stages)]
    order = getattr(schedules, name)(stages, microbatches).pipeline_order
    return tuple(
        tuple(
            (part.stage_index, part.computation_type.value, part.microbatch_index)
            for action in order[rank]
            if action is not None
            for part in action.sub_actions or (action,)
        )
        for rank in range(ranks)
    )
