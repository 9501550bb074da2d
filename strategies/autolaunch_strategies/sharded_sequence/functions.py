"""What torch functions do with sequence shards: the rule of the table where there is one, and else on whole tensors."""

# Why not ATen functions (`__torch_dispatch__`): a linear layer is several of them (65 µs of host time, 24 here; a block
# forward and backward 1,290, 580 here), and each function of a backward pass needs a rule, too. Below autograd, what a
# rank adds to the gradient of a parameter can't stay its own, so that every gradient is summed over ranks at once. And
# `MixedTensors` (mp) sees torch functions only: neither mixed operands nor sharded vocabularies would be its anymore.

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from autolaunch_strategies.model.random_positions import by_position
from autolaunch_strategies.sharded_sequence.collectives import TRAFFIC
from autolaunch_strategies.sharded_sequence.parts import NeedsWhole, map_leaves, whole
from autolaunch_strategies.sharded_sequence.shard import SequenceShard, cut
from autolaunch_strategies.sharded_sequence.spelling import changes_first
from autolaunch_strategies.sharded_sequence.table import RULES

log = logging.getLogger(__name__)


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """`func` of arguments of which some are sequence shards: shards, plain tensors, or whatever it returns."""
    if not args and "input" in kwargs:
        args, kwargs = (kwargs["input"],), {name: value for name, value in kwargs.items() if name != "input"}
    rule = RULES.get(func)
    if rule is not None:
        try:
            return rule(func, args, kwargs)
        except NeedsWhole:
            pass
    return on_whole(func, args, kwargs)


def on_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """`func` on gathered tensors, on every rank; what it changes in place is cut again.

    Raises:
        RuntimeError: it changes the shape of a shard in place.
    """
    name = getattr(func, "__name__", str(func))
    TRAFFIC.repeated |= {name}
    _log_once(name)
    if isinstance(kwargs.get("out"), SequenceShard):
        raise RuntimeError(f"{name}(out=...) can't write into a tensor of which each rank holds a part (cp)")
    whole_args, whole_kwargs = map_leaves(whole, (args, kwargs))
    first = args[0] if args else None
    if not isinstance(first, SequenceShard) or not changes_first(func):
        return by_position(func)(*whole_args, **whole_kwargs)
    changed = whole_args[0].clone()
    func(changed, *whole_args[1:], **whole_kwargs)
    if changed.shape != first.sizes:
        raise RuntimeError(f"{name} can't change the shape of a tensor of which each rank holds a part (cp) in place")
    first.local.copy_(cut(changed, first.sequence_dim, first.positions, first.group))
    return None if name == "__setitem__" else first


@lru_cache(maxsize=256)
def _log_once(name: str) -> None:
    log.info("cp: %s runs on sequences gathered from all ranks", name)


SequenceShard.computes = staticmethod(run)
