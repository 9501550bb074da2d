"""Lightning's features on every mesh: the numbers of one process, or refused with a reason, as the docs say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import ROOT
from tests.lightning.feature_cases import FEATURES, MESHES, cell
from tests.support.ranks import Group, differences
from tests.support.tiers import spread, tiered

SCRIPT = Path(__file__).with_name("feature_cases.py")
CELLS = [(name, mesh) for name in FEATURES for mesh in MESHES]


def everyday(cell: tuple[str, str]) -> bool:
    return FEATURES[cell[0]].daily == cell[1]


ALIKE = {
    "profiler=pytorch", "profiler=advanced", "ModelCheckpoint(every_n_train_steps)", "plugins=[MixedPrecision()]",
    "limit_train_batches as a share", "overfit_batches as a share", "val_check_interval as a share",
    "check_val_every_n_epoch", "schedule by step", "schedule by plateau", "inference_mode=False", "DeviceStatsMonitor",
    "RichProgressBar", "LearningRateMonitor", "min_epochs", "Timer", "EMA (of autolaunch_strategies)", "EarlyStopping",
    "precision=bf16-true", "CSVLogger", "accumulate_grad_batches",
}  # fmt: skip
"""Features that have another of their kind here, or are in tests of runs."""
assert ALIKE.issubset(FEATURES)
_SELDOM = spread(CELLS, tuple, everyday)


def seldom(cell: tuple[str, str]) -> bool:
    return cell[0] in ALIKE or _SELDOM(cell)


@pytest.mark.parametrize(("name", "mesh"), tiered(CELLS, everyday, seldom))
def test_a_feature_on_a_mesh(one: Group, two: Group, name: str, mesh: str) -> None:
    row = FEATURES[name]
    results = two.read_all(cell(name, mesh))
    if mesh in row.refused:
        assert [row.refused[mesh] in result["refused"] for result in results] == [True, True], results
        return
    expected = one.read(cell(name, ""))
    assert [differences(expected, result, row.tolerance) for result in results] == [[], []]


def table() -> str:
    """The table of docs/lightning.md."""
    lines = [f"| feature | {' | '.join(MESHES)} |", f"|---|{'---|' * len(MESHES)}"]
    for name, row in FEATURES.items():
        cells = " | ".join("refused" if mesh in row.refused else "yes" for mesh in MESHES)
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def test_the_documentation_has_the_table() -> None:
    assert table() in (ROOT / "docs" / "lightning.md").read_text(), f"docs/lightning.md is to have\n{table()}"
