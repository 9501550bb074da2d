"""The planner's waiting times of pipelines against simulated tables of the schedules that are run."""

from __future__ import annotations

import numpy as np
import pytest

from autolaunch_strategies.config import SCHEDULE_SPECS, PipelineParallel
from autolaunch_strategies.planner.candidate import PIPELINES, Candidates
from autolaunch_strategies.planner.time import _bubble
from autolaunch_strategies.schedules.schedule import build_schedule, check_schedule, timeline

EXACT, SPLIT = 1e-9, 0.1
"""Allowed difference, as a share of the step: where the backward is whole, and where it is split."""


@pytest.mark.parametrize(
    ("name", "virtual_stages", "allowed"),
    [
        (spec.name, number, SPLIT if spec.splits_backward else EXACT)
        for spec in SCHEDULE_SPECS.values()
        for number in ([spec.least_stages] if spec.most_stages else [2, 4])
    ],
)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_waiting_is_that_of_the_table(name: str, virtual_stages: int, allowed: float, ranks: int) -> None:
    seen = 0
    for microbatches in (1, 2, 3, 4, 6, 8, 12, 16, 24):
        pp = PipelineParallel(name, "microbatch", name, microbatches, virtual_stages)
        if check_schedule(pp, ranks, microbatches):
            continue
        table = build_schedule(name, ranks, microbatches, virtual_stages)
        for forward, backward, weights in ((1, 1, 1), (1, 1.2, 0.8), (1, 0.9, 1.1)):
            simulated = timeline(table, forward, backward + weights, backward / (backward + weights)).length
            own = np.array([[forward], [backward], [weights]], dtype=np.float64)
            column = Candidates(
                pp=ranks, virtual_stages=virtual_stages, microbatches=microbatches, pipeline=PIPELINES.index(name)
            )
            predicted = microbatches * own.sum() + _bubble(column, own, own * ranks)[0]
            whole = microbatches % ranks == 0 or microbatches < ranks or name in ("gpipe", "1f1b")
            assert predicted == pytest.approx(simulated, rel=allowed if whole else SPLIT), (microbatches, forward)
            seen += 1
    assert seen >= 3
