"""`mp.overlap`: inductor finds collectives of sequences beside their multiplications, and numbers stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
from tests.support.ranks import GroupOf

SCRIPT = Path(__file__).with_name("overlap_cases.py")


@pytest.mark.every  # minutes of inductor
@pytest.mark.timeout(600)
def test_collectives_are_joined_to_their_multiplications(group_of: GroupOf) -> None:
    expected, found = group_of(SCRIPT, "none", 1).read("llama"), group_of(SCRIPT, "1x2", 2).read_all("llama")[0]
    graphs = found["graphs"]  # of forward and backward passes; equal ones are compiled once
    forward = {"before": 4, "left": 0, "fused": 4}  # before and after attention, before and after the MLP
    backward = {"before": 4, "left": 2, "fused": 2}  # what is scattered is the sum of several products
    assert graphs[0] == forward and backward in graphs
    assert [graph for graph in graphs if graph not in (forward, backward)] == []
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    for key, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][key], weight, rtol=1e-4, atol=1e-6, msg=f"{key}: {{}}".format)
