"""Dry runs in forks beside those in one process, for test_dry_run.py: a process without threads."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

import torch

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.dry_run import forks, ranks
from autolaunch_strategies.dry_run.ranks import pretend_ranks
from autolaunch_strategies.dry_run.step import PretendedRank, Training
from autolaunch_strategies.dry_run.world import SAID, World
from tests.dry_run.pretending import pretended_ranks, training_of
from tests.planner import memory_cases as cases


def vanishing() -> Any:
    """The module of the cases, whose step ends its process."""
    built = cases.module()
    built.training_step = lambda batch: os._exit(3)
    return built


def main(names: list[str]) -> None:
    trainings = {name: training_of(cases.candidate(cases.CASES[name]), cases.module) for name in names}
    assert forks.can_fork()
    in_forks = {name: pretended_ranks(training) for name, training in trainings.items()}
    told(training_of(cases.candidate(cases.CASES["one"]), vanishing))
    staged = training_of(cases.candidate(cases.CASES["1f1b"]), cases.module)
    step = ranks.pretend
    for name, needs in (("the other says nothing", {0}), ("both wait", {0, 1}), ("both could begin early", set())):
        ranks.pretend = partial(listen, needs)
        print(name, end=": ")
        told(staged)
    ranks.pretend = record_what_cannot_be_sent
    print("one records and listens", end=": ")
    told(staged)
    ranks.pretend = step
    can_fork, forks.can_fork = forks.can_fork, lambda: False
    for name, training in trainings.items():
        for one, other in zip(in_forks[name], pretended_ranks(training), strict=True):
            assert one.exchanges == other.exchanges and one.held == other.held
            assert abs(one.total - other.total) <= 8, "a number that torch makes once in a process"
        print(name, [rank.rank for rank in in_forks[name]])
    assert can_fork() == (not torch.backends.cuda.is_built()), "autograd has threads where it may know devices"


def told(training: Training) -> None:
    try:
        print(*(rank.rank for rank in pretend_ranks(training, [0])))
    except ConfigError as error:
        print(error.problem)


def listen(needs: set[int], training: Training, rank: int, world: World, until: Any = None) -> PretendedRank:
    """In place of a step: a rank that listens to the other one, if it needs to or if nobody has to."""
    if rank in needs or not needs:
        world.header((1 - rank, rank), 0, must=rank in needs)
    return PretendedRank(rank, {}, 0, {}, {}, [])


def record_what_cannot_be_sent(training: Training, rank: int, world: World, until: Any = None) -> PretendedRank:
    """In place of a step: a rank that records what the other one needs, too; the first stage, rank 1, then listens."""
    assert world._asked("a call") is None and world._caller is not None
    if rank == 1:
        world.header((0, 1), 0, must=True)
    else:
        world._caller.tell((SAID, ((0, 1), 0, "a header")))
    return PretendedRank(rank, {}, 0, {}, {}, [])


if __name__ == "__main__":
    main(sys.argv[1:])
