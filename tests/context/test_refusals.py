"""What cp can't do is refused on every rank before anything is trained, with the way out; or named."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")
from tests.context.cases import GROUPS, RANKS, THREE
from tests.support.ranks import Group, GroupOf

SCRIPT = Path(__file__).with_name("cases.py")
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def refused(group_of: GroupOf) -> Group:
    return group_of(SCRIPT, "refused", RANKS["refused"])


_PARTS = "a sequence of {} positions can't be cut into 2 x 2 parts of equal length"
_PADDED = 'or padding\n  write:   cp={"pad": True}'
KEY_PHRASES: dict[str, tuple[str, ...]] = {
    **{f"odd-length-{name}": ("with model.model.layers.0", _PARTS.format(13), _PADDED) for name in THREE},
    "half-length": ("with model.encoder.layers.0", _PARTS.format(14), _PADDED),
    "class-token": ("with model.blocks.0", _PARTS.format(17), _PADDED),
    "ring-dropout": ("cp=ring: attention drops out 0.5 of its weights, which a ring cannot", 'write:   cp="gather"'),
    "ring-hf-dropout": ("cp=ring: attention drops out 0.5 of its weights", "attn_pdrop", 'write:   cp="gather"'),
    "ulysses-heads": ("cp=ulysses: 3 heads of attention cannot be shared evenly by 2 ranks", 'write:   cp="gather"'),
    "ring-learned-bias": ("cp=ring: a mask of attention needs a gradient (a learned bias), which a ring cannot give",),
}
"""What the message of each has to say: what is wrong, where, and what to write instead."""


@pytest.mark.parametrize("case", GROUPS["refused"])
def test_refused(refused: Group, case: str) -> None:
    found = [refused.read(case, rank) for rank in (0, 1)]
    assert [item["type"] for item in found] == ["ConfigError"] * 2, found
    assert [item["steps"] for item in found] == [0, 0]
    for phrase in KEY_PHRASES[case]:
        assert phrase in found[0]["message"]
    assert found[0]["message"] == found[1]["message"]
