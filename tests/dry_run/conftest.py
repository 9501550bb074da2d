"""Dry runs of tiny models take their ranks one after the other."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """No forks: they cost more than such a step, and a process of pytest-xdist has threads that hold locks."""
    monkeypatch.setattr("autolaunch_strategies.dry_run.forks.can_fork", lambda: False)
