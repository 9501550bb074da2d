"""`mp.overlap`: inductor finds every collective of sequences beside its multiplication, and numbers stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
from tests.support.ranks import GroupOf

SCRIPT = Path(__file__).with_name("overlap_cases.py")


@pytest.mark.full
@pytest.mark.timeout(600)
def test_every_collective_is_joined_to_its_multiplication(group_of: GroupOf) -> None:
    expected, found = group_of(SCRIPT, "none", 1).read("llama"), group_of(SCRIPT, "1x2", 2).read_all("llama")[0]
    graphs = found["graphs"]  # of forward and backward passes; equal ones are compiled once
    assert graphs[0] == {"before": 4, "left": 0, "fused": 4}  # before and after attention, before and after the MLP
    assert [graph for graph in graphs[1:] if graph["left"] or not graph["fused"] == graph["before"] > 0] == []
    assert len(graphs) > 1
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    for key, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][key], weight, rtol=1e-4, atol=1e-6, msg=f"{key}: {{}}".format)
