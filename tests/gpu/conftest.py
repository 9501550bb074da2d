"""Tests that need a GPU: `pytest tests/gpu` on any machine that has one; elsewhere they are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # All items of the session come by here.
    needs_one = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is false")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(needs_one)
