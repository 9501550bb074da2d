"""Dry runs in forks beside those in one process, for test_dry_run.py: a process without threads."""

from __future__ import annotations

import os
import sys
from typing import Any

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.dry_run import forks
from autolaunch_strategies.dry_run.ranks import pretend_ranks
from tests.dry_run.pretending import pretended_ranks, training_of
from tests.planner import memory_cases as cases


def vanishing() -> Any:
    """The module of the cases, whose step ends its process."""
    built = cases.module()
    built.training_step = lambda batch: os._exit(3)
    return built


def main(names: list[str]) -> None:
    for name in names:
        training = training_of(cases.candidate(cases.CASES[name]), cases.module)
        assert forks.can_fork()
        in_forks, can_fork = pretended_ranks(training), forks.can_fork
        forks.can_fork = lambda: False
        here, forks.can_fork = pretended_ranks(training), can_fork
        for one, other in zip(in_forks, here, strict=True):
            assert one.exchanges == other.exchanges and one.held == other.held
            assert abs(one.total - other.total) <= 8, "a number that torch makes once in a process"
        print(name, [rank.rank for rank in in_forks])
    try:
        pretend_ranks(training_of(cases.candidate(cases.CASES["one"]), vanishing), [0])
    except ConfigError as error:
        print(error.problem)


if __name__ == "__main__":
    main(sys.argv[1:])
