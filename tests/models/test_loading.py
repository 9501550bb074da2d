"""Weights from safetensors onto a mesh: bit by bit what `transformers` reads, for every family of the zoo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.load_cases import GROUPS
from tests.support.ranks import Group

pytest.importorskip("transformers")

SCRIPT = Path(__file__).with_name("load_cases.py")
pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


@pytest.mark.parametrize("case", GROUPS["four"])
def test_four_ranks(four: Group, case: str) -> None:
    assert four.read_all(case) == [[]] * 4


def test_a_constructor_that_needs_memory(one: Group) -> None:
    assert one.read("memory") == []
