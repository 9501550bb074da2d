"""Bring tokens to the ranks that hold their experts, and what these make of them back.

The forward of the experts stays their own: it is called with the rows that have arrived here, each for one expert and
with weight one. What a token's experts return is weighted and summed on the rank that it came from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autolaunch_strategies.experts.changed import ChangedExperts
from autolaunch_strategies.experts.exchange import all_shares, exchange, own_share
from autolaunch_strategies.experts.kept import kept
from autolaunch_strategies.tensor.expert_arguments import ExpertArguments
from autolaunch_strategies.tensor.own_experts import made_by_own
from autolaunch_strategies.torch_private.tracing import has_no_values


class Dispatch:
    """Takes the place of the forward of a module with the parameters of some experts, `experts` in all.

    Args:
        module: with parameters [experts, ...], DTensors over the ranks of `group`.
        group: the ranks over which the experts are shared out.
        same_tokens: ranks that are called with the same tokens, which each does a part of; None if there are none.
        adapters: what PEFT has put around the module.
    """

    def __init__(
        self,
        module: nn.Module,
        experts: int,
        group: dist.ProcessGroup,
        same_tokens: dist.ProcessGroup | None,
        adapters: Sequence[nn.Module] = (),
    ) -> None:
        self.module, self.experts, self.group, self.same_tokens = module, experts, group, same_tokens
        first = self.local * group.rank()
        self._change = ChangedExperts(adapters, first, self.local, same_tokens) if adapters else None
        self._forward: Callable[..., torch.Tensor] = module.forward
        self._arguments, self._place = ExpertArguments(self._forward), 1
        module.forward = functools.wraps(self._forward)(self)

    @property
    def local(self) -> int:
        """How many experts this rank holds."""
        return self.experts // self.group.size()

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What experts make of tokens: hidden [T, D], index [T, K] numbers of experts, weights [T, K]."""
        hidden, index, weights, self._place = self._arguments.read(args, kwargs)
        shape, total = hidden.shape, len(index)
        hidden = hidden.reshape(total, -1)
        if self.same_tokens is not None:
            hidden, weights = own_share(hidden, self.same_tokens), own_share(weights, self.same_tokens)
            index = own_share(index, self.same_tokens)
        mixed = self._mixed(hidden, index, weights)
        if self.same_tokens is not None:
            mixed = all_shares(mixed, total, self.same_tokens)
        # No view: `fully_shard` loses sight of what is changed in place, as models do with what they add.
        return mixed if mixed.shape == shape else mixed.reshape(shape).clone()

    def _mixed(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens, chosen = index.shape
        order = index.flatten().argsort(stable=True)
        sent, received, arriving = kept(lambda: self._counts(index))
        rows = exchange(hidden[order // chosen], sent, received, self.group)
        numbers = torch.arange(self.local, device=index.device).repeat(self.group.size())
        numbers = numbers.repeat_interleave(arriving.flatten(), output_size=sum(received))
        made = self._made(rows, numbers, weights)
        back = exchange(made, received, sent, self.group)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        mixed = back[place].view(tokens, chosen, -1) * weights.unsqueeze(-1)
        return mixed.sum(dim=1).to(hidden.dtype)

    def _made(self, rows: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What own experts make of rows [N, D], each with weight one; `numbers` [N] says whose they are."""
        forward = functools.partial(self._arguments.call, place=self._place)
        return made_by_own(self.module, forward, self.local, rows, numbers, weights, self._change)

    def _counts(self, index: torch.Tensor) -> tuple[list[int], list[int], torch.Tensor]:
        """(rows to each rank, rows from each rank, rows from each rank for each expert of this one)."""
        chosen = index.flatten()
        if has_no_values(index):
            return self._even_counts(chosen)
        counts = chosen.new_zeros(self.experts).scatter_add_(0, chosen, torch.ones_like(chosen)).view(-1, self.local)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        sent, received = torch.stack([counts.sum(dim=1), arriving.sum(dim=1)]).tolist()  # the host waits once
        return sent, received, arriving

    def _even_counts(self, chosen: torch.Tensor) -> tuple[list[int], list[int], torch.Tensor]:
        """As `_counts`, where every expert gets as many rows as any other, of every rank (one more: the first ones)."""
        least, more = divmod(len(chosen), self.experts)
        of_each = [least + (expert < more) for expert in range(self.experts)]
        ranks, own = self.group.size(), self.local * self.group.rank()
        sent = [sum(of_each[self.local * rank : self.local * (rank + 1)]) for rank in range(ranks)]
        arriving = chosen.new_zeros((ranks, self.local))
        dist.all_to_all_single(arriving, torch.empty_like(arriving), group=self.group)
        return sent, [sum(of_each[own : own + self.local])] * ranks, arriving
