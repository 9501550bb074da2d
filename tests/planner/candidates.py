"""Models, recipes and machines for the tests of the planner."""

from __future__ import annotations

from typing import Any

from autolaunch_strategies.planner.hardware import Hardware, Link
from autolaunch_strategies.planner.profile import ModelProfile, Recipe
from tests.support.transformer_profile import transformer_profile

GIB = 2.0**30


def model(layers: int = 8, heads: int = 8, positions: int = 1024, **options: Any) -> ModelProfile:
    """A small decoder."""
    return transformer_profile(layers, 64 * heads, heads, positions, 32000, glu=True, name="small", **options)


def llama(size: str, positions: int = 8192) -> ModelProfile:
    """Llama 3."""
    layers, hidden, heads, ffn = {
        "8b": (32, 4096, 32, 14336),
        "70b": (80, 8192, 64, 28672),
        "405b": (126, 16384, 128, 53248),
    }[size]
    return transformer_profile(layers, hidden, heads, positions, 128256, kv_heads=8, ffn=ffn, glu=True, name=size)


def recipe(batch_size: int = 64, **options: Any) -> Recipe:
    """bf16 with a master copy."""
    sizes = {"parameter_bytes": 2, "gathered_bytes": 2, "gradient_bytes": 2, "reduce_bytes": 4, "optimizer_bytes": 12}
    return Recipe(batch_size, "bf16", **{**sizes, **options})


def machines(devices: int = 8, node: int = 8, memory: float = 80 * GIB) -> Hardware:
    """Nodes like those of H100s."""
    each = min(devices, node)
    flops = {"bf16": 989e12, "fp32": 67e12}
    return Hardware("h100", "cuda", devices // each, each, memory, flops, 3.35e12, Link(450e9, 5e-6), Link(50e9, 1e-5))
