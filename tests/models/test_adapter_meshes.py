"""Adapters in ten families of models: trained on any mesh as on one process, and what is frozen costs nothing."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.models.adapter_cases import ADAPTED, MESHES, UNFROZEN
from tests.support.ranks import Group, differences
from tests.support.tiers import in_turn

SCRIPT = Path(__file__).with_name("adapter_cases.py")
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="adapters are PEFT's"),
]

NAMES = [*ADAPTED, *UNFROZEN]
NOT_JOINED = {("llama-qlora", "mp"), ("qwen3_moe-qlora", "mp"), ("llama-qlora", "sp"), ("qwen3_moe-qlora", "sp")}
"""What is refused before processes start."""


def cases(group: str, start: int = 0) -> list[str]:
    """Each family on one mesh of the group and each mesh with one family or more, not the same pairs for two groups."""
    meshes = list(MESHES[group])
    pairs = sorted(in_turn(NAMES[start:] + NAMES[:start], meshes) | in_turn(NAMES, meshes[1:] + meshes[:1]))
    return [f"{name}@{mesh}" for name, mesh in pairs if is_joined(name, mesh)]


def is_joined(name: str, mesh: str) -> bool:
    if name == "llama-dropout" and mesh == "dp2-compile":
        return False  # compiled code has no modules, by whose places random numbers could go
    return not any(name == qlora and axis in mesh for qlora, axis in NOT_JOINED)


def check(one: Group, found: Group, case: str) -> None:
    name = case.split("@")[0]
    if name.endswith("qlora"):
        pytest.importorskip("bitsandbytes", reason="weights of four bits are its")
    expected: dict[str, Any] = one.read(f"{name}@1")
    weights: dict[str, list[float]] = {}
    held = {"frozen": 0, "trained": 0}
    for result in found.read_all(case):
        weights |= result["weights"]  # with stages, a rank has its own
        assert differences({key: expected[key] for key in ("losses", "norms")}, result | {}, 1e-5) == []
        # Frozen parameters have no gradients; Adam's state is twice what is trained.
        assert result["numbers"]["gradients"] == 0
        if name in ADAPTED:
            assert result["numbers"]["state"] == 2 * result["numbers"]["trained"]
        held = {key: held[key] + result["numbers"][key] for key in held}
    assert differences(expected["weights"], weights, 1e-4) == []
    if "level0" not in case and "mp" not in case and "sp" not in case and "pp" not in case:
        assert held["frozen"] <= expected["numbers"]["frozen"] * 1.01  # sharded: all ranks together hold them once
