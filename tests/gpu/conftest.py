"""Tests that need a GPU: `pytest tests/gpu` on any machine that has one; elsewhere they are skipped.

Those that take `device` run on the CPU, too, in the full tier (of a long product a choice): so they are known to work
before there is a GPU.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
LONG, ONE_IN = 3, 7
"""Of a product of more parameters than this, one case in so many is `full` on the CPU, and the rest `every`."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = {mark.args[0] for mark in metafunc.definition.iter_markers("parametrize") if "device" in mark.args[0]}
    if "device" in metafunc.fixturenames and not chosen:
        metafunc.parametrize("device", ["cuda", pytest.param("cpu", marks=pytest.mark.full)], scope="module")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # All items of the session come by here.
    seen = Counter[object]()
    needs_one = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is false")
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if HERE not in item.path.parents:
            continue
        if parameters.get("device") != "cpu":
            item.add_marker(pytest.mark.gpu)
            item.add_marker(needs_one)
            continue
        which = item.path, item.name.partition("[")[0]
        if seen[which] % ONE_IN:
            item.add_marker(pytest.mark.every)
        seen[which] += 1 if len(parameters) > LONG else ONE_IN
