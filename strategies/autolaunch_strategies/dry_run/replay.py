"""Blocks that are alike do alike: one of each kind is run, and what it did is said again of the others.

A call of a block is tried out once (`trial`). From then on a call of a block of its kind that is given the like is one
autograd function that tells the trace what the trial allocated, freed and exchanged, in the same order; what comes out
of it, gradients too, are tensors as any. What stands around a block is run as it is: gathering parameters, adding up
gradients, hooks of modules and parameters.

The last block of a kind is tried out, too, and has to do what the first one did. Where it does something else, or one
does what can't be said again (it keeps something beyond its backward pass, or changes attributes), `Unlike` is raised:
then the step has to be run without replays.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_flatten, tree_unflatten

from autolaunch_strategies.dry_run.trace import GRADIENTS, Trace
from autolaunch_strategies.dry_run.trial import (
    CONSTANTS,
    Arguments,
    Like,
    Output,
    Trial,
    Tried,
    Unlike,
    needs_gradient,
    opened,
)
from autolaunch_strategies.model.blocks import Block
from autolaunch_strategies.sharded_sequence.shard import SequenceShard
from autolaunch_strategies.torch_private.modes import without_torch_functions

MANY = 6
"""Blocks of one kind from which on trying out costs less than it saves."""


class Replays:
    """Takes over the calls of blocks."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.passes: list[Sequence[torch.Tensor | None]] = []
        """Of the backward passes that run, the innermost last: the gradients with which they began."""
        self._tried: dict[Hashable, Tried] = {}
        self._by: set[tuple[Hashable, nn.Module | None]] = set()

    def take_over(self, blocks: Iterable[Block]) -> None:
        """Where there are many of a kind. What wraps their forwards stays within."""
        kinds: dict[Hashable, list[nn.Module]] = defaultdict(list)
        for block in blocks:
            parts = block.module.modules()
            if not any(isinstance(part, FSDPModule) for part in parts if part is not block.module):  # with own passes
                kinds[_kind(block)].append(block.module)
        for kind, modules in kinds.items():
            for module in modules if len(modules) >= MANY else ():
                is_one_of_two = module in (modules[0], modules[-1])
                module.forward = self._instead_of(module, kind, module if is_one_of_two else None)

    def _instead_of(self, module: nn.Module, kind: Hashable, tried: nn.Module | None) -> Callable[..., Any]:
        own = module.forward

        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return _Call(self, module, own, kind, tried).run(args, kwargs)

        return forward

    def did(self, key: Hashable, by: nn.Module | None, attempt: Callable[[], Tried]) -> Tried:
        """What calls do; `attempt` tries one out, once of the first block of its kind and once of the last.

        Args:
            by: the block, if it is one of these.

        Raises:
            Unlike: they do not do the same.
        """
        known = self._tried.get(key)
        if known is not None and (by is None or (key, by) in self._by):
            return known
        found = attempt()
        if known is not None and found != known:
            raise Unlike("the first and the last block of a kind")
        self._tried[key] = found
        self._by.add((key, by))
        return found


class _Call:
    """One call of a block."""

    def __init__(
        self, replays: Replays, module: nn.Module, own: Callable[..., Any], kind: Hashable, by: nn.Module | None
    ) -> None:
        self.replays, self.trace, self.module, self.own = replays, replays.trace, module, own
        self.kind, self.by = kind, by
        self.parameters = list(dict.fromkeys(item for item in module.parameters() if item.requires_grad))
        self.gradients: list[Like | None] = []
        """Of the parameters, as the backward pass is about to make them."""

    def run(self, args: Any, kwargs: Any) -> Any:
        """What the block returns."""
        leaves, spec = tree_flatten((args, kwargs))
        inputs = [opened(leaf) for leaf in leaves if needs_gradient(leaf)]
        autocast = functools.partial(
            torch.autocast, "cpu", torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")
        )
        differentiates = torch.is_grad_enabled() and bool(self.parameters or inputs)
        arguments = Arguments.of(leaves, spec)
        self.key = self.kind, self.module.training, differentiates, autocast.args, arguments.key
        self.trial = Trial(self.trace, self.module, self.own, arguments, self.parameters, differentiates, autocast)
        tried = self.replays.did((self.key, None, None), self.by, self.trial.run)
        with without_torch_functions():  # none of the block's own
            if differentiates:
                weights = [_Weight.apply(parameter, self, place) for place, parameter in enumerate(self.parameters)]
                made = iter(_Replayed.apply(self, tried, *inputs, *weights))
            else:
                made = iter(self.forward(tried, {}))
        return tree_unflatten([_returned(output, made, leaves) for output in tried.outputs], tried.spec)

    def forward(self, tried: Tried, storages: dict[int, int]) -> list[torch.Tensor]:
        """What the forward pass makes."""
        self.trace.replay(tried.forward, storages)
        self.trace.exchanges += tried.forward_exchanges
        return [self._in_place_of(storages, output) for output in tried.made]

    def _in_place_of(self, storages: dict[int, int], output: Output) -> torch.Tensor:
        assert output.like is not None
        self.trace.replay([(output.storage, 0)], storages)
        storages.pop(output.storage, None)
        return output.like.make()

    def of_backward(self, tried: Tried, gradients: Sequence[torch.Tensor | None]) -> Tried:
        """What the backward pass does with these gradients of outputs, behind a forward pass."""
        likes = tuple(None if gradient is None else Like.of(gradient) for gradient in gradients)
        there = tuple(None if parameter.grad is None else Like.of(parameter.grad) for parameter in self.parameters)
        if likes == tuple(output.like for output in tried.made if output.is_differentiable) and not any(there):
            return tried  # such gradients it was tried with
        found = self.replays.did((self.key, likes, there), self.by, lambda: self.trial.run(likes, there))
        if found.forward != tried.forward:
            raise Unlike("forward passes of a block differ")
        return found


class _Replayed(torch.autograd.Function):
    """A block, as it was tried out."""

    @staticmethod
    def forward(ctx: Any, call: _Call, tried: Tried, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        storages: dict[int, int] = {}
        made = list(zip(call.forward(tried, storages), tried.made, strict=True))
        ctx.mark_non_differentiable(*(tensor for tensor, output in made if not output.is_differentiable))
        held = {output.storage: tensor.detach() for tensor, output in made if output.is_kept}
        inputs = zip(tried.inputs, tensors, strict=False)  # behind them are the parameters
        held |= {number: tensor.detach() for number, tensor in inputs if number is not None}
        ctx.call, ctx.tried, ctx.kept = call, tried, _Kept(call.trace, storages, held)
        return tuple(tensor for tensor, _ in made)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        call, trace, kept = ctx.call, ctx.call.trace, ctx.kept
        if torch.is_grad_enabled() or kept.has_ended:
            raise Unlike("a graph is differentiated more than once")
        made = zip(gradients, ctx.tried.made, strict=True)
        of_outputs = [gradient for gradient, output in made if output.is_differentiable]
        tried = call.of_backward(ctx.tried, of_outputs)
        given = [gradient for gradient in of_outputs if gradient is not None]
        # Gradients with which a backward pass began are held until it ends.
        ends: dict[int, Callable[[], Any]] = {
            number: functools.partial(trace.take_as_freed, gradient, call.replays.passes[-1])
            for number, gradient in zip(tried.given, given, strict=True)
        }
        ends |= {number: functools.partial(kept.held.pop, number, None) for number in kept.held}
        is_gathered = isinstance(call.module, FSDPModule)  # what its parameters get is on the way to their parts
        kinds = {} if is_gathered else dict.fromkeys(tried.of_parameters, GRADIENTS)
        trace.replay(tried.backward, kept.storages, ends, kinds)
        trace.exchanges += tried.backward_exchanges
        kept.end()
        call.trial, call.gradients = None, list(tried.to_parameters)  # arguments, too, are held no longer
        with without_torch_functions():
            to_inputs = [given[like] if isinstance(like, int) else like and like.make() for like in tried.to_inputs]
            return None, None, *to_inputs, *(like and torch.empty(0) for like in tried.to_parameters)


class _Weight(torch.autograd.Function):
    """Stands between a parameter and a block, so that gradients are made, and added, one after the other."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, call: _Call, place: int) -> torch.Tensor:
        ctx.call, ctx.place = call, place
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        with without_torch_functions():
            return ctx.call.gradients[ctx.place].make(), None, None


class _Kept:
    """What a replayed block holds for its backward pass."""

    def __init__(self, trace: Trace, storages: dict[int, int], held: dict[int, torch.Tensor]) -> None:
        self.trace, self.storages, self.held = trace, storages, held
        self.has_ended = False

    def end(self) -> None:
        """Hold nothing any more."""
        self.has_ended = True
        self.held.clear()
        self.trace.replay([(number, 0) for number in self.storages], self.storages)
        self.storages.clear()

    def __del__(self) -> None:
        self.end()


def _returned(output: Output, made: Iterator[torch.Tensor], given: Sequence[Any]) -> Any:
    if output.given is not None:
        return given[output.given]
    if output.like is None:
        return output.constant
    tensor = next(made)
    return SequenceShard.of(tensor, *output.shard) if output.shard else tensor


def _kind(block: Block) -> Hashable:
    """What blocks have in common that do the same: their parts, sizes and settings, all but their own number."""
    number = next((int(part) for part in reversed(block.name.split(".")) if part.isdigit()), None)
    parts = []
    for name, part in block.module.named_modules():
        own = tuple(
            (key, "its number" if type(item) is int and item == number else item)
            for key, item in vars(part).items()
            if isinstance(item, CONSTANTS)
        )
        tensors = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        parts.append((name, type(part), own, tuple((key, Like.of(item), item.requires_grad) for key, item in tensors)))
    return tuple(parts)
