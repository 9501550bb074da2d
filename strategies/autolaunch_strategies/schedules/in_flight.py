"""How many microbatches a rank holds at its fullest moments, by what is true of its schedule. Torch-free.

These are formulas, and no counts of the real tables: for 1,024 devices a plan looks at 74 pipelines, whose tables take
2.2 s to make, and the whole plan 0.3 s. Tests compare the formulas with the tables of every schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autolaunch_strategies.config import ScheduleSpec

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Flight:
    """Microbatches between their forward and their backward passes, at the fullest moments of every pipe rank."""

    flying: Ints
    """[pipe ranks, moments, stages of the rank]: those whose activations are kept."""
    waiting: Ints
    """[pipe ranks, moments, stages of the rank]: those that only wait for the gradients of their weights."""
    behind: Bools
    """[moments]: whether a backward pass has just ended, whose microbatch waits by now; else one may begin."""

    @classmethod
    def of(cls, flying: Ints, waiting: Ints | None = None, behind: Bools | None = None) -> Flight:
        """Nothing waits, and no backward pass has ended, unless it is said."""
        moments = flying.shape[1]
        return cls(
            flying,
            np.zeros_like(flying) if waiting is None else waiting,
            np.zeros(moments, dtype=np.bool_) if behind is None else behind,
        )


def in_flight(spec: ScheduleSpec, ranks: int, virtual_stages: int, microbatches: int) -> Flight:
    """What a schedule has in flight. Where all forward passes come first counts are in units of all microbatches."""
    rank = np.arange(ranks)
    if spec.all_forward_first:
        return Flight.of(np.ones((ranks, 1, virtual_stages), dtype=np.int64))
    if spec.most_stages == 1:
        return Flight.of(np.minimum(ranks - rank, microbatches)[:, None, None])
    if spec.v_shaped:
        return _on_the_way_back(spec.pairs_passes, rank, ranks, microbatches)
    return _in_rounds(spec.splits_backward, rank, ranks, virtual_stages, microbatches)


def _on_the_way_back(pairs_passes: bool, rank: Ints, ranks: int, microbatches: int) -> Flight:
    """Two stages for each rank, the second one on the way back (arXiv 2401.10241 and 2412.19437)."""
    zero = np.zeros_like(rank)
    if pairs_passes:
        moments = [
            ((2 * ranks - rank, rank + 1), (zero, zero)),
            ((2 * ranks - 1 - rank, rank), (zero, zero + 1)),
            ((ranks - 1 - rank, zero), ((rank + 2) // 2, (rank + 1) // 2)),
        ]
    elif microbatches <= ranks:
        back = np.minimum(rank, microbatches - 1)
        moments = [
            ((zero + microbatches, back + 1), (zero, zero)),
            ((zero + microbatches, back), (zero, zero + 1)),
            ((zero + microbatches - 1, back), (zero + 1, zero)),
        ]
    else:  # exact from twice as many microbatches as ranks, an upper bound below
        moments = [
            ((2 * ranks - 1 - rank, rank + 1), (zero, zero)),
            ((2 * ranks - rank, rank), (zero, zero)),
            ((2 * ranks - 2 - rank, rank + 1), (zero, zero + 1)),
            ((2 * ranks - 1 - rank, rank), (zero + 1, zero)),
            ((ranks - 1 - rank, zero), (rank + 1, rank)),
        ]
    flying = np.stack([np.stack(of_stages, axis=1) for of_stages, _ in moments], axis=1)
    waiting = np.stack([np.stack(of_stages, axis=1) for _, of_stages in moments], axis=1)
    behind = np.array([bool(np.any(of_stages)) for _, of_stages in moments])
    return Flight(np.minimum(flying, microbatches), np.minimum(waiting, microbatches), behind)


def _in_rounds(splits_backward: bool, rank: Ints, ranks: int, virtual_stages: int, microbatches: int) -> Flight:
    """Stages take turns: a round of microbatches forward through each (arXiv 2104.04473), then one pass of each kind.

    While passes alternate, forward ones go through the rank's stages in order, backward ones in the opposite order;
    what is in flight is looked at whenever either changes its stage.
    """
    size = microbatches // max(1, microbatches // ranks)  # of a round
    all_passes = microbatches * virtual_stages
    ahead = (virtual_stages - 1) * size + (1 if splits_backward else 2) * (ranks - 1 - rank) + 1
    ahead = np.minimum(ahead, all_passes)[:, None]
    turn = np.broadcast_to(np.arange(virtual_stages) * size, (ranks, virtual_stages))
    # Passes go to the next stage after each `size`: backward ones, forward ones, and gradients of weights.
    done = np.concatenate([turn, turn - ahead, *([turn + rank[:, None]] if splits_backward else [])], axis=1)
    done = np.concatenate([done % (size * virtual_stages), rank[:, None]], axis=1)
    done = np.minimum(done, all_passes - 1)  # backward passes so far
    order = np.arange(virtual_stages)

    def through(passes: Ints, turns: Ints) -> Ints:
        """How many of the first passes went through the stages that have these turns in a round."""
        rounds, rest = np.divmod(passes[..., None], size * virtual_stages)
        return rounds * size + np.clip(rest - turns * size, 0, size)

    forward = through(np.minimum(ahead + done, all_passes), order)
    flying = forward - through(done, order[::-1])
    if not splits_backward:
        return Flight.of(flying)
    # Gradients of weights follow as many backward passes later as there are ranks before this one.
    weights = through(np.maximum(done - rank[:, None], 0), order[::-1])
    later = through(done + 1, order[::-1])
    return Flight(
        np.concatenate([flying, forward - later], axis=1),
        np.concatenate([through(done, order[::-1]) - weights, later - weights], axis=1),
        np.repeat([False, True], flying.shape[1]),
    )
