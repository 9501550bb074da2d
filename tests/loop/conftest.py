"""What every test of plain loops relies on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autolaunch_strategies.loop.process_mesh import _GLOBAL


@pytest.fixture(autouse=True)
def no_global_mesh() -> Iterator[None]:
    """A test sets the mesh of all calls for itself only."""
    before = list(_GLOBAL)
    _GLOBAL.clear()
    yield
    _GLOBAL[:] = before
