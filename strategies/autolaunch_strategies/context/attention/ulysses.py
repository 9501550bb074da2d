"""Attention with the sequence of some heads on each rank, instead of some of the sequence of all heads.

DeepSpeed Ulysses (Jacobs et al., 2023): one all-to-all before attention and one after it. With a ring around it:
USP (Fang and Zhao, 2024).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from autolaunch_strategies.context.attention.exchange import heads_to_sequence, sequence_to_heads
from autolaunch_strategies.model.random_positions import holding

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]


def attention_by_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    mask: torch.Tensor | None,
    attention: Attention,
) -> torch.Tensor:
    """Run `attention` on this rank's share of the heads, with the parts of all ranks of `group` in one sequence.

    Key heads are repeated before they travel as often as needed for every rank to get the same number of them, and
    those that its query heads need: never, if the ranks divide their number; else up to the least common multiple.

    Args:
        q: [b, h, s, d], where the ranks divide h. `k`, `v`: [b, h_kv, s, d].
        mask: dim 1 is 1 or h; the share gets its heads of it.
        attention: (q, k, v, mask), each with its share of heads and the sequence n·s -> [b, h/n, n·s, d_v].

    Returns:
        [b, h, s, d_v].
    """
    ranks, rank = group.size(), group.rank()
    heads, key_heads = q.shape[1], k.shape[1]
    assert heads % ranks == 0
    copies = math.lcm(key_heads, ranks) // key_heads
    if copies > 1:
        k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
    q, k, v = sequence_to_heads(group, q, k, v)
    if mask is not None and mask.shape[1] > 1:
        mask = mask.chunk(ranks, 1)[rank]
    own_heads = {1: (torch.arange(heads).chunk(ranks)[rank], heads)}
    with holding(own_heads):
        return heads_to_sequence(group, attention(q, k, v, mask))
