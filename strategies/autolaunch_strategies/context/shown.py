"""What forward hooks within sharded modules are shown: tensors of whole sequences, as everything outside is.

`transformers` collects router logits and hidden states with hooks, and its losses are computed from them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from autolaunch_strategies.model.parts import modules_of
from autolaunch_strategies.sharded_sequence.shard import SequenceShard
from autolaunch_strategies.torch_private.calls import change_forward_hooks, with_forward_hooks

_OF_LAYOUTS = ("autolaunch_strategies.tensor.styles", "autolaunch_strategies.data_parallel", "torch.distributed")
"""Where hooks come from that change or gather tensors on the way, and not look at them."""


ShardOf = Callable[[torch.Tensor], "torch.Tensor | None"]
"""A tensor of this rank's part -> that of the whole sequence; None: it is shown as it is."""


def show_whole(module: nn.Module, shard_of: ShardOf, is_trial: Callable[[], bool]) -> None:
    """Have the hooks on outputs of `module` and its parts be shown what `shard_of` makes of tensors. Idempotent.

    Args:
        is_trial: whether what runs is only tried out: hooks are not called then.
    """
    for part in with_forward_hooks(modules_of(module)):
        change_forward_hooks(part, lambda hook: _shown(hook, shard_of, is_trial))


def _shown(hook: Callable[..., Any], shard_of: ShardOf, is_trial: Callable[[], bool]) -> Callable[..., Any] | None:
    home = getattr(hook, "__module__", None) or ""
    return None if isinstance(hook, _Shown) or home.startswith(_OF_LAYOUTS) else _Shown(hook, shard_of, is_trial)


class _Shown:
    """A hook that sees whole sequences, and may return another output."""

    def __init__(self, hook: Callable[..., Any], shard_of: ShardOf, is_trial: Callable[[], bool]) -> None:
        self.hook, self.shard_of, self.is_trial = hook, shard_of, is_trial

    def __call__(self, module: nn.Module, *values: Any) -> Any:
        if self.is_trial():
            return None
        changed = self.hook(module, *tree_map(self._whole, values))
        return tree_map(lambda leaf: leaf.local if isinstance(leaf, SequenceShard) else leaf, changed)

    def _whole(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        shard = self.shard_of(leaf)
        return leaf if shard is None else shard
