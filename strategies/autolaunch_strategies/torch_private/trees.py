"""What torch's trees show of themselves, by version."""

from __future__ import annotations

from torch.utils._pytree import TreeSpec


def children_of(spec: TreeSpec) -> list[TreeSpec]:
    """The specs of what a container holds: an attribute first, a method in later versions."""
    return list(spec.children() if hasattr(spec, "children") else spec.children_specs)
