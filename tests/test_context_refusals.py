"""What cp can't do is refused on every rank before anything is trained, with the way out; or named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))
from context_cases import GROUPS
from context_runs import run_group
from pipeline_runs import Results

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Results:
    directory = tmp_path_factory.mktemp("context")
    return run_group(directory / "refused", "refused", directory)


KEY_PHRASES: dict[str, tuple[str, ...]] = {
    **{f"odd-length-{name}": ("13", "cp.pad=true") for name in ("gather", "ring", "ulysses")},
    "half-length": ("14", "cp.pad=true"),
    **{
        f"no-attention-{name}": ("cp=2 but no attention call was intercepted in model",)
        for name in ("gather", "ring", "ulysses")
    },
    "ring-dropout": ("dropout", "cp=gather"),
    "ring-hf-dropout": ("dropout", "cp=gather"),
    "ulysses-heads": ("3", "heads", "cp="),
    **{
        f"mixes-{kind}": ("model.blocks.0",) for kind in ("convolution", "cumsum", "own-attention", "positions", "last")
    },
    "no-model-called": ("17", "cp.pad=true"),
    "t5": ("cp",),
    "bart": ("cp",),
}
"""What the message of each has to say: what is wrong, where, and what to write instead."""


@pytest.mark.parametrize("case", GROUPS["refused"])
def test_refused(refused: Results, case: str) -> None:
    found = [refused.read(case, rank) for rank in (0, 1)]
    assert [item["type"] for item in found] == ["ConfigError"] * 2, found
    assert [item["steps"] for item in found] == [0, 0]
    for phrase in KEY_PHRASES[case]:
        assert phrase in found[0]["message"]
    assert found[0]["message"] == found[1]["message"]
