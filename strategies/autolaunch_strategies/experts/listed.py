"""Experts that are modules of a list, called one by one by the code of the mixture around them.

Which of them get tokens, and in which order, is for that code to say, and each rank may call others. So that no rank
waits for a call that another one leaves out, the forward of the mixture runs twice: first every expert notes the rows
that it is called with and answers with ones; then all rows travel at once, and the forward runs again and gets what
experts have made of them. Gradients flow through both as through one.

Every parameter of every expert is sharded over the ranks of ep along one of its dims, so that all ranks have parameters
of the same names, and what goes by names stays as it is. While experts run, a rank has its own ones whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map_only

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.experts.dispatch import Dispatch
from autolaunch_strategies.experts.find import Mixture, refusal
from autolaunch_strategies.experts.whole import whole_experts
from autolaunch_strategies.model.random_positions import drawing_again
from autolaunch_strategies.tensor.views import plain
from autolaunch_strategies.torch_private.backward import version_of


class _Computes(nn.Module):
    """What a list becomes: a module, since `fully_shard` gathers and frees parameters around the call of one."""

    def forward(self, rows: torch.Tensor, numbers: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """What the experts of this rank make of rows [N, D]; `numbers` [N] says whose they are, counted from its first.

        Collective over `group`, in backward, too.
        """
        experts = list(self.children())
        local = len(experts) // group.size()
        order = numbers.argsort(stable=True)
        counts = numbers.new_zeros(local).scatter_add_(0, numbers, torch.ones_like(numbers)).tolist()
        own = whole_experts(experts, [count > 0 for count in counts], group)
        made = []
        first = local * group.rank()
        for expert, parameters, part in zip(
            experts[first : first + local], own, rows[order].split(counts), strict=True
        ):
            if len(part):
                made.append(functional_call(expert, parameters, (part,)))
        one = next(iter(own[0].values()))
        return _tied(torch.cat(made)[order.argsort()] if made else rows, one)  # backward comes here in any case


class _List(_Computes, nn.ModuleList):
    pass


class _Dict(_Computes, nn.ModuleDict):
    pass


class _DispatchToList(Dispatch):
    """Takes the place of the forward of a list."""

    def _made(self, rows: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self._forward(rows, numbers, self.group)


@dataclass
class _Call:
    """One call of an expert."""

    number: int
    shape: torch.Size
    rows: torch.Tensor
    """[N, D], with the history that they have on this rank."""


class ListedExperts:
    """Takes the place of the forward of a mixture whose code calls the experts of a list, and of theirs."""

    def __init__(self, mixture: Mixture, group: dist.ProcessGroup, same_tokens: dist.ProcessGroup | None) -> None:
        assert mixture.caller is not None
        self.mixture, self.caller, self.list = mixture, mixture.caller, mixture.module
        self._now: Callable[..., Any] | None = None
        """What a call of an expert does: its number, its own forward, its arguments."""
        self._is_known = False
        """Whether a pass has shown that what experts are called with does not depend on what they return."""
        experts = list(self.list.children())
        self.list.__class__ = _Dict if isinstance(self.list, nn.ModuleDict) else _List
        self.dispatch = _DispatchToList(self.list, mixture.experts, group, same_tokens)
        for number, expert in enumerate(experts):
            expert.forward = functools.wraps(expert.forward)(functools.partial(self._called, number, expert.forward))
        inside = {part for expert in experts for part in expert.modules()}
        self._around = [part for part in self.caller.modules() if part not in inside]
        self._forward: Callable[..., Any] = self.caller.forward
        self.caller.forward = functools.wraps(self._forward)(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the mixture returns, with experts of all ranks. Every rank of the group calls it as often."""
        calls = self._noted(args, kwargs)
        rows = torch.cat([call.rows for call in calls]) if calls else self._no_rows(args, kwargs)
        numbers = torch.tensor([call.number for call in calls], device=rows.device, dtype=torch.int64)
        lengths = torch.tensor([len(call.rows) for call in calls], device=rows.device, dtype=torch.int64)
        numbers = numbers.repeat_interleave(lengths, output_size=len(rows)).unsqueeze(-1)
        made = self._running(_compute, self.list, rows, numbers, rows.new_ones((len(rows), 1)))
        parts = list(zip(calls, made.split([len(call.rows) for call in calls]), strict=True)) if calls else []
        result = self._running(functools.partial(self._answer, parts), self._forward, *args, **kwargs)
        if parts:
            raise self._refusal("it calls them differently when it runs again on the same tokens")
        self._is_known = True
        # Backward has to come to the exchanges on a rank that had no rows for any expert, too.
        return result if calls else tree_map_only(torch.Tensor, lambda item: _tied(item, made), result)

    def _running(self, now: Callable[..., Any], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._now = now
        try:
            return forward(*args, **kwargs)
        finally:
            self._now = None

    def _called(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._now is None:
            raise self._refusal("one is called by other code than the forward of the module that has the list")
        return self._now(number, forward, *args, **kwargs)

    def _noted(self, args: Any, kwargs: Any) -> list[_Call]:
        """How experts are called. Leaves no trace but these calls: it runs on copies, and its random numbers return."""
        calls: list[_Call] = []

        def note(number: int, forward: Callable[..., Any], *inputs: Any, **named: Any) -> torch.Tensor:
            if named or len(inputs) != 1 or not isinstance(inputs[0], torch.Tensor):
                raise self._refusal("they are called with more than one tensor of rows")
            rows = plain(inputs[0])
            calls.append(_Call(number, rows.shape, rows.reshape(-1, rows.shape[-1])))
            return torch.ones_like(rows, dtype=_type_of_results(rows))

        buffers = [
            (part, key, item) for part in self._around for key, item in part._buffers.items() if item is not None
        ]
        versions = [version_of(item) for _, _, item in buffers]
        attributes = [(part, dict(part.__dict__)) for part in self._around]
        tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
        devices = {item.device for item in tensors if item.device.type == "cuda"}
        copies = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        with torch.random.fork_rng(devices), drawing_again():
            self._running(note, self._forward, *copies[0], **copies[1])
        for (part, key, item), version in zip(buffers, versions, strict=True):
            if part._buffers[key] is not item or version_of(item) != version:
                raise self._refusal(f"it changes its buffer `{key}` while it runs, and it has to run twice")
        for part, before in attributes:
            part.__dict__.clear()
            part.__dict__.update(before)
        return calls

    def _answer(
        self, parts: list[tuple[_Call, torch.Tensor]], number: int, forward: Any, inputs: torch.Tensor
    ) -> torch.Tensor:
        if not parts or (parts[0][0].number, parts[0][0].shape) != (number, inputs.shape):
            raise self._refusal("it calls them differently when it runs again on the same tokens")
        call, made = parts.pop(0)
        if not self._is_known:
            rows = plain(inputs).reshape(call.rows.shape)
            if not torch.allclose(rows, call.rows, equal_nan=True):
                raise self._refusal("one is called with what another one, or it itself, has returned")
        return made.to(_type_of_results(made)).reshape(call.shape)

    def _no_rows(self, args: Any, kwargs: Any) -> torch.Tensor:
        tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
        first = plain(next(item for item in tensors if item.is_floating_point()))
        return first.reshape(-1, first.shape[-1])[:0]

    def _refusal(self, why: str) -> ConfigError:
        return refusal(self.mixture.name, self.list, why)


def _compute(number: int, forward: Callable[..., Any], rows: torch.Tensor) -> Any:
    made = forward(rows)
    if not isinstance(made, torch.Tensor) or made.shape != rows.shape:
        raise ConfigError(
            f"ep with an expert of {type(made).__name__}",
            f"called with rows of shape {tuple(rows.shape)} it returns something of another shape",
            "ep=1, or experts that return as many numbers for a row as it has",
            "ep=1",
        )
    return made


def _type_of_results(rows: torch.Tensor) -> torch.dtype:
    kind = rows.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype


def _tied(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A copy of `tensor` whose backward pass comes to `other`, too, with zeros."""
    tied: torch.Tensor = _Tied.apply(tensor, other)
    return tied


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        context.like = other.shape, other.dtype, other.device
        return tensor.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        shape, dtype, device = context.like
        return gradients[0], torch.zeros(shape, dtype=dtype, device=device)
