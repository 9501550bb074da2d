"""Modules whose own code sees whole sequences, of which this rank holds a part: what must see more gathers it.

Around the call stand hooks of others (of `fully_shard`, of styles), which know plain tensors only. So parts go through
them plain, and are sequence shards for the `forward` of the module alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from autolaunch_strategies.context.arguments import Form, flattened
from autolaunch_strategies.sharded_sequence.shard import SequenceShard

Shards = dict[int, SequenceShard]
"""The shards among flattened arguments or outputs, by their places."""


class OpenedForward:
    """The `forward` of one module, replaced by one that can be handed sequence shards."""

    def __init__(self, module: nn.Module, proves: Callable[[], bool], current: list[SequenceShard]) -> None:
        """
        Args:
            proves: whether what runs is a trial: then it computes what autograd needs, which must be possible, too.
            current: gets the shards of which hooks see the plain parts, as long as the call lasts.
        """
        self._proves, self._current = proves, current
        self._handed: Shards | None = None
        self._returned: Shards = {}
        forward = module.forward

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            handed, self._handed = self._handed, None
            return forward(*args, **kwargs) if handed is None else self._run(forward, handed, args, kwargs)

        module.forward = run

    def __call__(self, call: Callable[..., Any], leaves: list[Any], form: Form) -> Any:
        """What `call`, which runs the module with its hooks, returns for arguments of which some are shards."""
        self._handed = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, SequenceShard)}
        args, kwargs = form.arguments([leaf.local if isinstance(leaf, SequenceShard) else leaf for leaf in leaves])
        before = len(self._current)
        try:
            outputs, spec = tree_flatten(call(*args, **kwargs))
            return tree_unflatten(_as_shards(outputs, self._returned), spec)
        finally:
            self._handed, self._returned = None, {}
            del self._current[before:]

    def _run(self, forward: Callable[..., Any], handed: Shards, args: Any, kwargs: Any) -> Any:
        leaves, form = flattened(args, kwargs)
        proves = self._proves()
        if proves:
            leaves = [_needing_gradient(leaf) for leaf in leaves]
        leaves = _as_shards(leaves, handed)
        args, kwargs = form.arguments(leaves)
        with torch.set_grad_enabled(proves or torch.is_grad_enabled()):
            outputs, spec = tree_flatten(forward(*args, **kwargs))
        returned = {place: leaf for place, leaf in enumerate(outputs) if isinstance(leaf, SequenceShard)}
        outputs = [leaf.local if isinstance(leaf, SequenceShard) else leaf for leaf in outputs]
        if proves:
            outputs = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in outputs]
        self._returned = returned
        self._current += [leaf for leaf in (*leaves, *returned.values()) if isinstance(leaf, SequenceShard)]
        return tree_unflatten(outputs, spec)


def _as_shards(leaves: list[Any], shards: Shards) -> list[Any]:
    """The leaves with those at the places of `shards` as shards of the same positions again."""
    return [
        SequenceShard.of(leaf, shards[place].sequence_dim, shards[place].positions, shards[place].group)
        if place in shards
        else leaf
        for place, leaf in enumerate(leaves)
    ]


def _needing_gradient(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
        return leaf.detach().requires_grad_()
    return leaf
