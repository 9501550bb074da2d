"""All rows of the table: the first of every library, then the second, and so on."""

from __future__ import annotations

from functools import cache
from itertools import zip_longest

from tests.gauntlet.models import TABLES
from tests.gauntlet.row import Row

MESHES = {"2": "dp", "1x2": "mp", "1x1x2": "pp", "dp1xcp2": "cp"}
"""Mesh -> its axis; cp is for models with a sequence."""
FOUR = ("2x2", "1x2x2", "dp2xcp2")
ON_FOUR = {
    "litgpt:Llama-3.2-1B", "timm:vit_base_patch16_clip_224", "transformers:MBartForConditionalGeneration",
    "transformers:ModernBertForMaskedLM", "transformers:SmolLM3ForCausalLM", "x-transformers:decoder-flash",
}  # fmt: skip
"""Rows for meshes of two axes: four processes a cell."""


@cache
def rows() -> dict[str, Row]:
    """Every row by its key."""
    table: dict[str, Row] = {}
    for row in (row for turn in zip_longest(*TABLES) for row in turn if row is not None):
        assert row.key not in table, f"{row.key} is there twice"
        table[row.key] = row
    return table


def row_of(key: str) -> Row:
    return rows()[key]


def meshes_of(row: Row) -> list[str]:
    """The meshes that a row is trained on."""
    meshes = [*MESHES, *(FOUR if row.key in ON_FOUR else ())]
    return [mesh for mesh in meshes if "cp" not in mesh or row.sequence]
