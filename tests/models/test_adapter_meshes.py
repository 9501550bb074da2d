"""Adapters in ten families of models: trained on any mesh as on one process, and what is frozen costs nothing."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.models.adapter_cases import ADAPTED
from tests.support.ranks import Group, differences

SCRIPT = Path(__file__).with_name("adapter_cases.py")
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="adapters are PEFT's"),
]

# Of the product of `adapter_cases.GROUPS`, each family and each mesh in a case or more.
TWO = [
    "llama@dp2-compile", "llama-dora@sp2", "qwen3@mp2", "mistral@cp2-ring", "gemma3@pp2-1f1b", "gpt2@cp2-ulysses",
    "gpt2-dora@pp2-exact", "phi3@dp2-recompute", "qwen3_moe@dp2-level0", "mixtral@mp2", "deepseek_v3@dp2-level3",
    "bert@cp2-gather", "llama-qlora@dp2-level3", "qwen3_moe-qlora@pp2-1f1b", "llama-dropout@sp2", "thaws@dp2-level1",
    "switches@dp2-level2", "thaws@mp2", "switches@pp2-exact", "deepseek_v3@dp2-ep2", "mixtral@mp2-ep2",
]  # fmt: skip
FOUR = [
    "qwen3_moe@dp2xmp2", "llama-dropout@dp2xpp2", "deepseek_v3@mp2xpp2", "llama-qlora@dp2xcp2", "mistral@mp2xcp2",
    "thaws@dp2xpp2", "qwen3_moe@dp2xmp2-ep4", "mixtral@dp4-ep2", "deepseek_v3@dp2xpp2-ep2",
]  # fmt: skip
SELDOM = (
    "llama@dp2-compile", "deepseek_v3@mp2xpp2", "qwen3_moe@dp2xmp2", "deepseek_v3@dp2xpp2-ep2", "llama-dropout@dp2xpp2",
    "mistral@mp2xcp2", "gpt2-dora@pp2-exact", "llama-dora@sp2", "qwen3_moe@dp2xmp2-ep4", "mixtral@mp2", "thaws@mp2",
)  # fmt: skip
"""The longest, whose model and axes are in others; test_adapters.py has DoRA."""


def cases(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.every if name in SELDOM else ()) for name in names]


@pytest.mark.parametrize("case", cases(TWO))
def test_two_ranks(one: Group, two: Group, case: str) -> None:
    check(one, two, case)


@pytest.mark.parametrize("case", cases(FOUR))
def test_four_ranks(one: Group, four: Group, case: str) -> None:
    check(one, four, case)


def check(one: Group, found: Group, case: str) -> None:
    name, mesh = case.split("@")
    if name.endswith("qlora"):
        pytest.importorskip("bitsandbytes", reason="weights of four bits are bitsandbytes'")
    expected: dict[str, Any] = one.read(f"{name}@1")
    weights: dict[str, list[float]] = {}
    frozen = 0
    for result in found.read_all(case):
        weights |= result["weights"]  # with stages, a rank has its own
        for key in ("losses", "norms"):
            assert differences(expected[key], result[key], 1e-5) == []
        numbers = result["numbers"]
        frozen += numbers["frozen"]
        assert numbers["gradients_of_frozen"] == 0
        if name in ADAPTED:
            assert numbers["state"] == 2 * numbers["trained"]  # Adam's two
    assert differences(expected["weights"], weights, 1e-4) == []
    if mesh.startswith(("dp2-", "cp2-")) and mesh != "dp2-level0":
        assert frozen == expected["numbers"]["frozen"]  # all ranks together hold them once
