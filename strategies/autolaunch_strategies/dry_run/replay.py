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
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_flatten, tree_unflatten

from autolaunch_strategies.dry_run.trace import GRADIENTS, Trace, local_of
from autolaunch_strategies.dry_run.trial import Arguments, Output, Trial, Tried, opened
from autolaunch_strategies.model.blocks import Block
from autolaunch_strategies.sharded_sequence.shard import SequenceShard
from autolaunch_strategies.torch_private.backward import number_of_backward, version_of
from autolaunch_strategies.torch_private.modes import without_torch_functions
from autolaunch_strategies.torch_private.pretended import (
    has_one_owner,
    keeps_otherwise,
    reaches_all,
    uses_of_a_gradient,
)
from autolaunch_strategies.tracing.likeness import Like, Unlike, kinds_of

MANY = 6
"""Blocks of one kind from which on trying out costs less than it saves."""


class Replays:
    """Takes over the calls of blocks.

    Args:
        averages: whether gradients are exchanged as soon as they are there, between what blocks exchange.
    """

    def __init__(self, trace: Trace, averages: bool = False) -> None:
        self.trace, self.averages = trace, averages
        self._tried: dict[Hashable, tuple[Tried, set[nn.Module | None]]] = {}

    def take_over(self, blocks: Iterable[Block]) -> None:
        """Where there are many of a kind, outside of backward passes. What wraps their forwards stays within.

        Raises:
            Unlike: it can't be told which are alike.
        """
        uses_of_a_gradient()
        kinds = kinds_of(block for block in blocks if not _has_passes_within(block.module))
        for kind, modules in enumerate(kinds.values()):
            for module in modules if len(modules) >= MANY else ():
                is_one_of_two = module in (modules[0], modules[-1])
                module.forward = self._instead_of(module, kind, module if is_one_of_two else None)

    def _instead_of(self, module: nn.Module, kind: Hashable, tried: nn.Module | None) -> Callable[..., Any]:
        own, was, passes = module.forward, _settings(module), set[int]()

        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if _settings(module) != was:
                raise Unlike("settings change between calls")
            if keeps_otherwise():
                raise Unlike("what it keeps goes through hooks")
            return _Call(self, module, own, kind, tried, passes).run(args, kwargs)

        return forward

    def did(self, key: Hashable, by: nn.Module | None, attempt: Callable[[], Tried]) -> Tried:
        """What calls do; `attempt` tries one out, once of the first block of its kind and once of the last.

        Args:
            by: the block, if it is one of these.

        Raises:
            Unlike: they do not do the same.
        """
        known, who = self._tried.get(key, (None, set[nn.Module | None]()))
        if known is not None and (by is None or by in who):
            return known
        found = attempt()
        if known is not None and found != known:
            raise Unlike("the first and the last block of a kind")
        self._tried[key] = found, {*who, by}
        return found


class _Call:
    """One call of a block.

    Args:
        passes: numbers of the backward passes that the block was in.
    """

    def __init__(
        self,
        replays: Replays,
        module: nn.Module,
        own: Callable[..., Any],
        kind: Hashable,
        by: nn.Module | None,
        passes: set[int],
    ) -> None:
        self.replays, self.trace, self.module, self.own = replays, replays.trace, module, own
        self.kind, self.by, self.passes = kind, by, passes
        self.parameters = list(dict.fromkeys(item for item in module.parameters() if item.requires_grad))
        self.gradients: list[Like | None] = []
        """Of the parameters, as the backward pass is about to make them."""

    def run(self, args: Any, kwargs: Any) -> Any:
        """What the block returns."""
        leaves, spec = tree_flatten((args, kwargs))
        inputs = [opened(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        autocast = functools.partial(
            torch.autocast, "cpu", torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")
        )
        differentiates = torch.is_grad_enabled() and bool(self.parameters or any(item.requires_grad for item in inputs))
        arguments = Arguments.of(leaves, spec)
        self.key = self.kind, differentiates, autocast.args, arguments.key
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
        kept.check()
        if torch.is_grad_enabled() or not reaches_all(ctx):
            raise Unlike("a backward pass of some gradients alone, or of which another one is made")
        if (number := number_of_backward()) in call.passes:
            raise Unlike("a block is differentiated twice in one backward pass")
        call.passes.add(number)
        made = zip(gradients, ctx.tried.made, strict=True)
        of_outputs = [gradient for gradient, output in made if output.is_differentiable]
        owned = [gradient is not None and has_one_owner(gradient) for gradient in of_outputs]
        tried = call.of_backward(ctx.tried, of_outputs)
        if tried.backward_exchanges and call.replays.averages:
            raise Unlike("gradients are exchanged between what it exchanges")
        given = [gradient for gradient in of_outputs if gradient is not None]
        owners = [owns for owns, gradient in zip(owned, of_outputs, strict=True) if gradient is not None]
        ends: dict[int, Callable[[], Any]] = {
            number: functools.partial(trace.take_as_freed, gradient) if owns else _nothing
            for number, gradient, owns in zip(tried.given, given, owners, strict=True)
        }
        ends |= {number: functools.partial(kept.held.pop, number, None) for number in kept.held}
        is_gathered = isinstance(call.module, FSDPModule)  # what its parameters get is on the way to their parts
        kinds = {} if is_gathered else dict.fromkeys(tried.of_parameters, GRADIENTS)
        trace.replay(tried.backward, kept.storages, ends, kinds)
        trace.exchanges += tried.backward_exchanges
        kept.end()
        call.trial, call.gradients = None, list(tried.to_parameters)
        with without_torch_functions():
            to_inputs = [given[like] if isinstance(like, int) else like and like.make() for like in tried.to_inputs]
            return None, None, *to_inputs, *(like and torch.empty(0) for like in tried.to_parameters)


class _Weight(torch.autograd.Function):
    """Stands between a parameter and a block, so that gradients are made, and added, one after the other."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, call: _Call, place: int) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.place = call, place
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        like = ctx.call.gradients[ctx.place]
        with without_torch_functions():
            return like and like.make(), None, None


class _Kept:
    """What a replayed block holds for its backward pass."""

    def __init__(self, trace: Trace, storages: dict[int, int], held: dict[int, torch.Tensor]) -> None:
        self.trace, self.storages, self.held = trace, storages, held
        self._versions = self._versions_now()
        self._has_ended = False

    def check(self) -> None:
        """Raise Unlike where autograd would say that there is no backward pass."""
        if self._has_ended:
            raise Unlike("a graph is differentiated more than once")
        if self._versions_now() != self._versions:
            raise Unlike("what it keeps has changed in place")

    def _versions_now(self) -> list[int]:
        return [version_of(part) for part in map(local_of, self.held.values()) if part is not None]

    def end(self) -> None:
        """Hold nothing any more."""
        self._has_ended = True
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


def _nothing() -> None:
    """Somebody else holds it."""


def _has_passes_within(block: nn.Module) -> bool:
    """Whether parts of a block are gathered by themselves, at its calls."""
    return any(isinstance(part, FSDPModule) for part in block.modules() if part is not block)


def _settings(block: nn.Module) -> list[Any]:
    """What may be switched between calls of a block."""
    return [
        (part.training, [item for item in vars(part).values() if isinstance(item, bool | int | float | str)])
        for part in block.modules()
    ] + [item.requires_grad for item in block.parameters()]
