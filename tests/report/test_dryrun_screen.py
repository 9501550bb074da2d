"""What a dry run shows in the terminal."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from autolaunch.report.dryrun_screen import show_dryrun


def rank(number: int) -> dict[str, Any]:
    kinds = ("parameters", "gradients", "optimizer", "activations", "total")
    return {
        "rank": number,
        "place": {"dp": number // 2, "mp": number % 2, "pp": 0, "cp": 0},
        "memory": dict.fromkeys(kinds, 705544),
        "predicted": {"total": 700_000},
        "collectives": [{"kind": "reduce_scatter_base", "axes": "dp", "count": 5, "bytes": 15_320}],
        "messages": [],
        "notes": [],
    }


@pytest.mark.parametrize("width", [60, 100])
def test_no_number_is_cut(width: int) -> None:
    file = io.StringIO()
    show_dryrun([rank(0), rank(1), rank(2)], [], "2x2", Path("dryrun.json"), Console(file=file, width=width))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in file.getvalue()
    assert file.getvalue().count("689.01") == 5
    assert any(line.split()[-5:] == ["reduce_scatter_base", "dp", "5", "74.8", "KiB"] for line in lines)
    assert "what ranks 0, 1, 2 exchange fits together" in " ".join(file.getvalue().split())
