"""Rules for functions that draw random numbers: a rank draws for its own positions, from a stream of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from autolaunch_strategies.model.random_positions import holding
from autolaunch_strategies.model.random_streams import PER_ELEMENT, stream_of
from autolaunch_strategies.sharded_sequence.parts import NeedsWhole, named, shards_in
from autolaunch_strategies.sharded_sequence.rules.pointwise import elementwise

_DROPOUTS = frozenset({F.dropout, F.alpha_dropout, torch.dropout, torch.dropout_})


def random(func: Any, args: Any, kwargs: Any) -> Any:
    """Numbers for each element, of this rank's elements only; others are drawn for the whole tensor."""
    if func not in PER_ELEMENT or kwargs.get("generator") is not None:
        raise NeedsWhole
    if func in _DROPOUTS:
        arguments = named(("input", "p", "training"), args, kwargs)
        training = arguments.get("training", arguments.get("train", func is not F.alpha_dropout))
        if not training or arguments.get("p", 0.5) == 0:
            return elementwise(func, args, kwargs)
    shard = shards_in((args, kwargs))[0]
    rank, positions = shard.group.rank(), shard.positions
    part = {shard.sequence_dim: (positions.of_rank(rank), positions.size)}
    with stream_of(f"cp{rank}", shard.local.device), holding(part):
        return elementwise(func, args, kwargs)
