"""What a call of a block does: it is tried out on tensors of its own, apart from what a rank holds and exchanges."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from autolaunch_strategies.dry_run.trace import Apart, Event, Exchange, Trace
from autolaunch_strategies.sharded_sequence.shard import SequenceShard
from autolaunch_strategies.torch_private.backward import run_backward, version_of
from autolaunch_strategies.torch_private.modes import without_autocast
from autolaunch_strategies.tracing.likeness import CONSTANTS, Like, Unlike, are_same, attributes_of


@dataclass(frozen=True)
class Input:
    """A tensor among the arguments of a call."""

    like: Like
    needs_gradient: bool
    shard: tuple[Any, ...] = ()
    """Of one whose sequence is sharded: how."""


@dataclass(frozen=True)
class Output:
    """What a call returns at one place: a tensor that it makes, one that it was given, or a constant."""

    like: Like | None = None
    storage: int = -1
    is_differentiable: bool = False
    shard: tuple[Any, ...] = ()
    """Of a tensor whose sequence is sharded: how."""
    given: int | None = None
    """Which of the arguments it is."""
    constant: Any = None
    is_kept: bool = False
    """Whether the backward pass needs it."""


@dataclass(frozen=True)
class Tried:
    """What a call did. Storages have the numbers of its `Apart`."""

    forward: tuple[Event, ...]
    forward_exchanges: tuple[Exchange, ...]
    inputs: tuple[int | None, ...]
    """Storage of each `Input`; None if nothing holds it after the forward pass."""
    outputs: tuple[Output, ...]
    spec: TreeSpec
    """Of what it returned."""
    backward: tuple[Event, ...] = ()
    backward_exchanges: tuple[Exchange, ...] = ()
    given: tuple[int | None, ...] = ()
    """Storages of the gradients of outputs that there are."""
    to_inputs: tuple[Like | int | None, ...] = ()
    """The gradient of each `Input`; a number: it is that one of those that were given; None: it has none."""
    to_parameters: tuple[Like | None, ...] = ()
    of_parameters: tuple[int | None, ...] = ()
    """Storages of gradients of parameters that had none before."""

    @property
    def made(self) -> list[Output]:
        """Tensors that it makes."""
        return [output for output in self.outputs if output.like is not None]


@dataclass
class Arguments:
    """What a call is given."""

    leaves: list[Any]
    """An `Input` for each tensor, everything else as it is."""
    spec: TreeSpec

    @classmethod
    def of(cls, leaves: Sequence[Any], spec: TreeSpec) -> Arguments:
        """Of a call."""
        return cls([_input(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)

    @property
    def key(self) -> Hashable:
        """What calls have in common that are given the like.

        Raises:
            Unlike: there is something of which that can't be said.
        """
        return self.spec, tuple(map(_key, self.leaves))


class Trial:
    """Tries calls of a block out.

    Args:
        forward: of the block, with whatever wraps it.
        arguments: of one call.
        parameters: those that are trained.
        differentiates: whether the call is one whose backward pass may follow.
        autocast: that of the forward pass; backward passes run in none.
    """

    def __init__(
        self,
        trace: Trace,
        module: nn.Module,
        forward: Callable[..., Any],
        arguments: Arguments,
        parameters: Sequence[nn.Parameter],
        differentiates: bool,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.trace, self.module, self.forward, self.arguments = trace, module, forward, arguments
        self.parameters, self.differentiates, self.autocast = parameters, differentiates, autocast

    def run(self, gradients: Sequence[Like | None] | None = None, there: Sequence[Like | None] = ()) -> Tried:
        """Forward and backward.

        Args:
            gradients: of outputs that are differentiable; None: such as the outputs are.
            there: gradients that parameters have, to which theirs are added.

        Raises:
            Unlike: it is not to be said of other blocks.
        """
        before = attributes_of(self.module)
        with self.trace.apart() as apart:
            try:
                tried = self._run(apart, gradients, there)
            except Exception as error:  # if a step fails, too, that is told of the step
                raise Unlike(f"{type(error).__name__}: {error}") from error
        if apart.alive:
            raise Unlike(f"{len(apart.alive)} tensors of a block outlive its backward pass")
        if not are_same(attributes_of(self.module), before):
            raise Unlike("a call changes attributes")
        return tried

    def _run(self, apart: Apart, gradients: Sequence[Like | None] | None, there: Sequence[Like | None]) -> Tried:
        with _aliases(self.module, self.parameters) as aliases:
            backward = _Backward()
            tried, start = self._forward(apart, backward, gradients)
            if start is not None:
                tried = self._backward(apart, backward, tried, start, aliases, there)
            for alias in aliases:
                alias.parameter.grad = None
        return tried

    def _forward(
        self, apart: Apart, backward: _Backward, gradients: Sequence[Like | None] | None
    ) -> tuple[Tried, torch.Tensor | None]:
        """(what the forward pass did, where the backward pass begins)."""
        trace, number = self.trace, self.trace.number_apart
        with torch.set_grad_enabled(self.differentiates), self.autocast():
            leaves = [
                self._fresh(item, backward) if isinstance(item, Input) else item for item in self.arguments.leaves
            ]
            fresh = [opened(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
            storages, versions = [number(tensor) for tensor in fresh], [version_of(tensor) for tensor in fresh]
            begin = len(apart.events)
            args, kwargs = tree_unflatten(leaves, self.arguments.spec)
            returned, spec = tree_flatten(self.forward(*args, **kwargs))
            if not self._are_given(leaves, args, kwargs) or [version_of(tensor) for tensor in fresh] != versions:
                raise Unlike("it changes what it is given")
            del args, kwargs, fresh
            outputs = [self._output(item, leaves, storages) for item in returned]
            roots = [opened(item) for item, out in zip(returned, outputs, strict=True) if out.is_differentiable]
            events, exchanges = tuple(apart.events[begin:]), tuple(apart.exchanges)
            backward.likes = [output.like for output in outputs if output.is_differentiable]
            backward.likes = backward.likes if gradients is None else [*gradients]
            start = _Starts.apply(backward, trace, apart, *roots) if roots else None
            del leaves, returned, roots
        made = [output.storage for output in outputs if output.like is not None]
        if len(set(made)) < len(made):
            raise Unlike("outputs share memory")
        outputs = [replace(output, is_kept=output.storage in apart.alive) for output in outputs]
        inputs = tuple(storage if storage in apart.alive else None for storage in storages)
        return Tried(events, exchanges, inputs, tuple(outputs), spec), start

    def _are_given(self, leaves: Sequence[Any], args: Any, kwargs: Any) -> bool:
        """Whether arguments hold what they held, and nothing else."""
        now, spec = tree_flatten((args, kwargs))
        return spec == self.arguments.spec and all(map(operator.is_, now, leaves))

    def _backward(
        self,
        apart: Apart,
        backward: _Backward,
        tried: Tried,
        start: torch.Tensor,
        aliases: Sequence[_Alias],
        there: Sequence[Like | None],
    ) -> Tried:
        number = self.trace.number_apart
        for alias, like in zip(aliases, there, strict=False):
            alias.parameter.grad = None if like is None else like.make()
        leaves = _leaves_behind(start)
        if not leaves <= {*backward.roots, *(id(alias.parameter) for alias in aliases)}:
            raise Unlike("its backward pass reaches other parameters than its own")
        before = {number(alias.parameter.grad) for alias in aliases if alias.parameter.grad is not None}
        with without_autocast("cpu"):
            run_backward(start)
        events = tuple(apart.events[backward.begin :])
        to_inputs = tuple(self._to_input(backward, place) for place in range(len(tried.inputs)))
        of_inputs = [number(item) for item in backward.to_inputs.values()]
        there_now = [number(alias.parameter.grad) for alias in aliases if alias.parameter.grad is not None]
        of_parameters = [item for item in there_now if item not in before]
        if len({*of_inputs, *of_parameters}) < len(of_inputs) + len(of_parameters):
            raise Unlike("gradients share memory")
        backward.to_inputs.clear()
        backward.roots.clear()
        return replace(
            tried,
            backward=events,
            backward_exchanges=tuple(apart.exchanges[len(tried.forward_exchanges) :]),
            given=tuple(backward.given),
            to_inputs=to_inputs,
            to_parameters=tuple(alias.like for alias in aliases),
            of_parameters=tuple(of_parameters),
        )

    def _fresh(self, item: Input, backward: _Backward) -> torch.Tensor:
        """What is given in place of an argument: held by nothing but what keeps it."""
        if item.needs_gradient and self.differentiates:
            root = torch.empty(0, requires_grad=True)
            backward.roots[id(root)] = root
            tensor = _Catches.apply(root, item.like, backward)
        else:
            tensor = item.like.make().requires_grad_(item.needs_gradient)
        backward.inputs += 1
        return SequenceShard.of(tensor, *item.shard) if item.shard else tensor

    def _output(self, item: Any, given: Sequence[Any], storages: Sequence[int | None]) -> Output:
        if isinstance(item, torch.Tensor):
            for place, leaf in enumerate(given):
                if item is leaf:
                    return Output(given=place)
            tensor = opened(item)
            number = self.trace.number_apart(tensor)
            if number is None or number in storages:
                raise Unlike("it returns a view of what it is given")
            return Output(Like.of_made(tensor), number, tensor.requires_grad, _shard(item))
        if not isinstance(item, CONSTANTS):
            raise Unlike(f"it returns a {type(item).__name__}")
        return Output(constant=item)

    def _to_input(self, backward: _Backward, place: int) -> Like | int | None:
        gradient = backward.to_inputs.get(place)
        if gradient is None:
            return None
        number = self.trace.number_apart(gradient)
        if number not in backward.given:
            return Like.of_made(gradient)
        which = backward.given.index(number)
        if Like.of(gradient) != [like for like in backward.likes if like is not None][which]:
            raise Unlike("a gradient is a view of another one")
        return which


@dataclass
class _Backward:
    """What a backward pass is given, and what it gives."""

    likes: list[Like | None] = field(default_factory=list)
    """Of the gradients that it is given, an entry for each output."""
    given: list[int | None] = field(default_factory=list)
    """Their storages."""
    begin: int = 0
    """How many events there were when it began."""
    to_inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    inputs: int = 0
    """How many there are so far."""
    roots: dict[int, torch.Tensor] = field(default_factory=dict)
    """What inputs that need gradients hang on, by id."""


class _Catches(torch.autograd.Function):
    """An input whose gradient is kept."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, like: Like, backward: _Backward) -> torch.Tensor:
        ctx.kept, ctx.place = backward, backward.inputs
        return like.make()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.kept.to_inputs[ctx.place] = gradients[0]
        return None, None, None


class _Starts(torch.autograd.Function):
    """Where a backward pass begins: it makes gradients that nobody else holds."""

    @staticmethod
    def forward(ctx: Any, backward: _Backward, trace: Trace, apart: Apart, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.begun, ctx.trace, ctx.apart = backward, trace, apart
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        gradients = [like and like.make() for like in ctx.begun.likes]
        ctx.begun.given = [ctx.trace.number_apart(gradient) for gradient in gradients if gradient is not None]
        ctx.begun.begin = len(ctx.apart.events)
        return None, None, None, *gradients


@dataclass
class _Alias:
    """What takes the place of a parameter: its gradient is none of the parameter's, whose hooks do not run."""

    parameter: nn.Parameter
    like: Like | None = None
    """Of the gradient that it gets."""

    def note(self, gradient: torch.Tensor) -> None:
        self.like = Like.of(gradient)


@contextmanager
def _aliases(module: nn.Module, parameters: Iterable[nn.Parameter]) -> Iterator[list[_Alias]]:
    aliases: dict[nn.Parameter, _Alias] = {}
    for parameter in parameters:
        alias = nn.Parameter(parameter.detach())
        vars(alias).update(vars(parameter))
        aliases[parameter] = _Alias(alias)
        alias.register_hook(aliases[parameter].note)
    owners = [(part, name, item) for part in module.modules() for name, item in part._parameters.items()]
    taken = [(part, name, item) for part, name, item in owners if item in aliases]
    for part, name, item in taken:
        part._parameters[name] = aliases[item].parameter
    try:
        yield list(aliases.values())
    finally:
        for part, name, item in taken:
            part._parameters[name] = item


def opened(leaf: Any) -> Any:
    """What autograd knows of a tensor."""
    return leaf.local if isinstance(leaf, SequenceShard) else leaf


def needs_gradient(leaf: Any) -> bool:
    """Whether something is a tensor of which the backward pass makes a gradient."""
    return isinstance(leaf, torch.Tensor) and bool(opened(leaf).requires_grad)


def _input(leaf: torch.Tensor) -> Input:
    return Input(Like.of(opened(leaf)), needs_gradient(leaf), _shard(leaf))


def _shard(tensor: torch.Tensor) -> tuple[Any, ...]:
    if not isinstance(tensor, SequenceShard):
        return ()
    return tensor.sequence_dim, tensor.positions, tensor.group


def _key(leaf: Any) -> Hashable:
    if not isinstance(leaf, (Input, *CONSTANTS)):
        raise Unlike(f"it is given a {type(leaf).__name__}")
    return type(leaf), leaf


def _leaves_behind(start: torch.Tensor) -> set[int]:
    """Ids of the tensors to which a backward pass adds gradients."""
    found: set[int] = set()
    nodes, seen = [start.grad_fn], set[Any]()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        nodes += [following for following, _ in node.next_functions]
    return found
