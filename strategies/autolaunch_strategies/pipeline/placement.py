"""Which rank of a pipeline holds which stages."""

from __future__ import annotations

from collections.abc import Sequence


def pipe_rank(rank_of_stage: Sequence[int], ranks: int, coordinate: int) -> int:
    """The pipe rank at a coordinate of the pp axis: the last stage is at coordinate 0, on global rank 0.

    There lightning's "rank zero" runs what follows the call of the model.
    """
    return coordinate if rank_of_stage[-1] == 0 else ranks - 1 - coordinate


def group_rank(rank_of_stage: Sequence[int], ranks: int, stage: int) -> int:
    """The coordinate of the pp axis at which a stage is held: the inverse of `pipe_rank`."""
    return pipe_rank(rank_of_stage, ranks, rank_of_stage[stage])


def stages_of(rank_of_stage: Sequence[int], pipe_rank: int) -> tuple[int, ...]:
    """The stages that a pipe rank holds, first stage first."""
    return tuple(stage for stage, rank in enumerate(rank_of_stage) if rank == pipe_rank)
