"""Importing without looking for garbage leaves the collector as it was."""

from __future__ import annotations

import gc

import pytest

from autolaunch.garbage import no_garbage_collection


@pytest.mark.parametrize("collects", [True, False])
def test_the_collector_is_as_before(collects: bool) -> None:
    was = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        with pytest.raises(ImportError), no_garbage_collection():
            assert not gc.isenabled()
            raise ImportError("as a package that is not installed")
        assert gc.isenabled() == collects
    finally:
        (gc.enable if was else gc.disable)()
