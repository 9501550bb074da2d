"""The forward pass of divided attention as one operator of torch: what it does inside is nobody else's business.

Selective recomputation can then keep its outputs, as those of torch's own attention, and nothing travels again; and
what it changes in place while it adds up parts is not taken for a change of something kept.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from autolaunch_strategies.mesh.layout import Layout
from autolaunch_strategies.torch_private.collectives import group_called

Forward = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None", dist.ProcessGroup, Layout, bool, float],
    tuple[torch.Tensor, torch.Tensor],
]
"""(q, k, v, mask, group, layout, causal, scale) -> (output, log-sum-exp), both new."""

_WAYS: dict[str, Forward] = {}
_LIBRARY = torch.library.Library("autolaunch", "FRAGMENT")
_LIBRARY.define(
    "context_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, str way, str group, int[] layout, bool causal, "
    "float scale) -> (Tensor, Tensor)"
)


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    way: str,
    group: str,
    layout: list[int],
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _WAYS[way](q, k, v, mask, group_called(group), Layout(*layout), causal, scale)


_LIBRARY.impl("context_attention", _run, "CompositeExplicitAutograd")

CONTEXT_ATTENTION = torch.ops.autolaunch.context_attention
"""The operator."""


def as_operator(way: str, forward: Forward) -> Forward:
    """`forward` as a call of the operator."""
    _WAYS[way] = forward

    def call(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        group: dist.ProcessGroup,
        layout: Layout,
        causal: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = [layout.size, layout.ranks, layout.ulysses]
        return CONTEXT_ATTENTION(q, k, v, mask, way, group.group_name, sizes, causal, scale)

    return call
