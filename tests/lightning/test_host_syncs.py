"""In a steady step the host waits for its GPU nowhere: watched on a CPU, where all that is read is seen."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lightning.host_sync_cases import GROUPS, STEPS, watched
from tests.support.host_reads import HostReads
from tests.support.one_rank import without_process_group
from tests.support.ranks import GroupOf
from tests.support.tiers import tiered

CASES = Path(__file__).parent / "host_sync_cases.py"
AGREES = "lightning/votes.py:_greatest"
AGREE_ON_TRAINED = "pipeline/run.py:agree_on_trained"
IN_STAGES = ("exact", "1f1b", "interleaved_1f1b", "zbv_zero_bubble")
ALLOWED = {
    AGREES: "hosts agree whether a signal came, in their own memory",
    "checkpoint/sharded.py:random_state": "of generators, whose state is the host's",
    "pipeline/run.py:_random_state": "of generators, whose state is the host's",
    "data/loader.py:_batch": "batches that are still the host's",
    "data_parallel/gradients.py:_widest": "hosts agree on the type of a norm over stages",
    AGREE_ON_TRAINED: "hosts agree on what is trained, in their own memory, once a batch",
    "pipeline/broadcast.py:_exchange": "what hosts tell each other, apart from the values on devices",
    "torch_private/unused_parameters.py:_agree": "copied to the device from pinned memory",
    "torch_private/unused_parameters.py:_compare_orders": "copied to pinned memory in the pass before",
    "tensor/vocabulary_loss.py:vocabulary_cross_entropy": "on a CPU a target that is no class is an error",
    "tensor/replicas.py:_replicated_except": "torch fills what a mask says with a number that is the host's",
    "report/metrics.py:read": "of the step before, which has long arrived",
    "torch.optim": "counts of steps, the host's unless an update is fused, and then it reads none",
}


def assert_no_wait(found: Counter[str]) -> None:
    assert found.keys() - ALLOWED.keys() == set()
    assert found[AGREES] == 2 * STEPS  # filled and read, once for each optimizer step


def test_a_steady_step_reads_nothing_of_the_device() -> None:
    without_process_group()
    found = watched()
    assert_no_wait(found)
    assert found["report/metrics.py:read"] == STEPS


def test_reads_are_seen() -> None:
    reads, values = HostReads(), torch.arange(3.0)
    reads.begin()
    bool(values[0] > 1), int(values[1]), values.tolist(), values[values > 1], values.nonzero(), values.new_tensor([2])
    torch.tensor([1.0], device="cpu")
    reads.end()
    values.tolist()
    assert reads.found == {"lightning/test_host_syncs.py:test_reads_are_seen": 7}


@pytest.mark.parametrize(
    "case", tiered(GROUPS["two"], [], ["tensor parallel", "level 0", "level 2", "exact", "gather"])
)
def test_neither_does_one_on_a_mesh(group_of: GroupOf, case: str) -> None:
    ranks: Any = group_of(CASES, "two", 2)
    for found in ranks.read_all(case):
        assert_no_wait(Counter(found))
        # Filled and read, once for each batch, and nowhere else.
        assert found.get(AGREE_ON_TRAINED, 0) == (2 * STEPS if case in IN_STAGES else 0)
