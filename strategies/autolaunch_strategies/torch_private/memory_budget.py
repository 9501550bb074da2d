"""How much of a graph's intermediate results its backward pass may keep (torch's `activation_memory_budget`).

All that is used is in torch 2.11 to 2.15: the setting, and `choose_saved_values_set`, to which every partition of a
graph into forward and backward comes.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._functorch import config, partitioners
from torch.utils.checkpoint import CheckpointPolicy

from autolaunch_strategies.torch_private.operators import NAMESPACE
from autolaunch_strategies.torch_private.tracing import draws_numbers

_UNKNOWN_TO_TORCH = (
    torch.ops.aten._scaled_dot_product_cudnn_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
)
"""Kernels of attention that torch takes for elementwise functions, which cost nothing to compute again."""

_LEAST = 1e-6
"""In the place of 0, for which torch forgets what must be kept."""

_NEVER = int(1e9)
"""The distance to the backward pass of what it doesn't need."""

_TORCHS_CHOICE = partitioners.choose_saved_values_set


class MemoryBudget:
    """Within it, graphs that are compiled keep at most a share of what they would keep without it.

    What torch keeps by itself, beyond what a graph is given, is 1; of that, matrix products with the fewest operations
    for their bytes are computed again until the share is reached. It counts operations by shapes, so that ranks whose
    tensors have the same shapes decide the same. Never computed again are collectives, the operators of this engine
    (which send, or are attention whose cost torch doesn't know) and what draws random numbers; so the share may not be
    reached, and ranks that do decide otherwise still wait for the same collectives.

    Args:
        share: 0 to 1. At 1 nothing is different from outside.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self._setting: Any = config.patch("activation_memory_budget", share)

    def __enter__(self) -> None:
        self._setting.__enter__()
        if self.share < 1:
            partitioners.choose_saved_values_set = self._choose  # type: ignore[assignment]  # it has no default here

    def __exit__(self, *error: Any) -> None:
        partitioners.choose_saved_values_set = _TORCHS_CHOICE
        self._setting.__exit__(*error)

    def _choose(
        self, joint_graph: torch.fx.Graph, node_info: partitioners.NodeInfo, memory_budget: float
    ) -> list[torch.fx.Node]:
        for node in joint_graph.nodes:
            if node.op == "call_function" and node_info.is_required_fw(node) and _is_kept(node):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        chosen = _TORCHS_CHOICE(joint_graph, node_info, memory_budget=max(memory_budget, _LEAST))
        return [tensor for node in chosen for tensor in _tensors(node)]


def _is_kept(node: torch.fx.Node) -> bool:
    called = node.target
    if not isinstance(called, torch._ops.OpOverload):
        return False
    known = called.namespace != NAMESPACE and called.overloadpacket not in _UNKNOWN_TO_TORCH
    return not known or draws_numbers(called, node.args, node.kwargs)


def _tensors(node: torch.fx.Node) -> list[torch.fx.Node]:
    """A node that is kept; if it has several results, which torch names whole: those that the backward pass needs."""
    if not isinstance(node.meta.get("val"), tuple | list):
        return [node]
    results: Any = [user for user in node.users if user.target is operator.getitem]
    needed = [result for result in results if result.dist_from_bw < _NEVER]
    return [tensor for user in needed for tensor in _tensors(user)]
