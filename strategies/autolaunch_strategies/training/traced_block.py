"""The forward of a block with something sharded along mp or cp, as a graph of what this rank computes of it.

`torch.compile` does not follow sharded tensors and the modes that make plain ones fit through Python. So the forward
runs once on shapes, with both, and what it comes to (operators on this rank's parts, and collectives) is kept as a
graph, which costs less of the processor's time than the Python it stands for, and which can be compiled.

What goes in and out is plain: parts of parameters and of what the block is called with. A graph holds for calls of one
`signature`; what that does not tell (a block that counts its calls, that draws Python's random numbers, hooks that are
none of ours) is found while it is traced, and such a block runs as it is.
"""

from __future__ import annotations

import logging
import operator
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from autolaunch_strategies.model.blocks import Block
from autolaunch_strategies.torch_private.collectives import OF_THE_MACHINE
from autolaunch_strategies.torch_private.joint_graph import each_operator_is_seen, is_eager_forced, traced_jointly
from autolaunch_strategies.torch_private.modes import outside_of_modes, without_torch_functions
from autolaunch_strategies.torch_private.parts import Layout, layout_of, parts_of, with_layout
from autolaunch_strategies.torch_private.tracing import errors_not_logged
from autolaunch_strategies.tracing.state import attributes_kept
from autolaunch_strategies.tracing.unreadable import reason_of

log = logging.getLogger(__name__)

_MOST_GRAPHS = 8
"""A block that is called with more kinds of tensors than this is not traced for each further one."""
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout)


class _CanNotBeTraced(Exception):
    """Why a block runs as it is."""


@dataclass(frozen=True)
class _Constant:
    """What is no tensor."""

    value: Any
    kind: type
    """1, 1.0 and True are equal."""


_Kind = Layout | _Constant | None
"""How a leaf comes out of a plain tensor, or without one; None: it is the tensor."""


def _opened(leaves: list[Any]) -> tuple[list[torch.Tensor], list[_Kind]]:
    """The plain tensors in `leaves`, and what each leaf is. Differentiable."""
    tensors: list[Any] = []
    kinds: list[_Kind] = []
    sharded: list[int] = []
    for leaf in leaves:
        if type(leaf) is DTensor:
            sharded.append(len(tensors))
            tensors.append(leaf)
            kinds.append(layout_of(leaf))
        elif isinstance(leaf, torch.Tensor):
            if type(leaf) not in (torch.Tensor, nn.Parameter) and not each_operator_is_seen():  # as tracing wraps them
                raise _CanNotBeTraced(f"a {type(leaf).__name__} comes in or out")
            tensors.append(leaf)
            kinds.append(None)
        elif isinstance(leaf, _PLAIN):
            kinds.append(_Constant(leaf, type(leaf)))
        else:
            raise _CanNotBeTraced(f"a {type(leaf).__name__} comes in or out")
    for place, part in zip(sharded, parts_of([tensors[place] for place in sharded]), strict=True):
        tensors[place] = part
    return tensors, kinds


def _closed(tensors: Collection[torch.Tensor], kinds: list[_Kind]) -> list[Any]:
    """The inverse of `_opened`."""
    parts = iter(tensors)
    leaves: list[Any] = []
    for kind in kinds:
        if isinstance(kind, _Constant):
            leaves.append(kind.value)
        else:
            leaves.append(next(parts) if kind is None else with_layout(next(parts), kind))
    return leaves


@dataclass
class _Traced:
    """A graph, and how its outputs come to be those of the block."""

    run: Callable[..., Any] = field(init=False)
    kinds: list[_Kind] = field(default_factory=list)
    spec: TreeSpec | None = None

    def closed(self, outputs: Collection[torch.Tensor]) -> Any:
        assert self.spec is not None
        return tree_unflatten(_closed(outputs, self.kinds), self.spec)


class TracedForward:
    """Stands in the place of a block's forward.

    Args:
        block: its name is for messages.
        group: the ranks among which a block's tensors are sharded, which all run a graph, or none does.
        traced: the forward that is traced; the block's own is what runs where that fails.
        compile_graph: is given each graph and returns what runs in its place.
        saved: operators whose results alone are kept for the backward pass; None: as it takes least memory.
        around: what the forward depends on beside the block and its arguments, such as what modes know.
        budget: within which it is chosen what is kept for the backward pass.
    """

    def __init__(
        self,
        block: Block,
        traced: Callable[..., Any],
        group: dist.ProcessGroup,
        compile_graph: Callable[[torch.fx.GraphModule], Callable[..., Any]],
        saved: Collection[Any] | None = None,
        around: Callable[[], Hashable] = lambda: None,
        budget: AbstractContextManager[None] = nullcontext(),  # noqa: B008  # it has no state
    ) -> None:
        self.name, self.module, self.forward = block.name, block.module, block.module.forward
        self.traced, self.group, self.compile_graph, self.saved = traced, group, compile_graph, saved
        self.around, self.budget = around, budget
        self.reason = ""
        """Why the block runs as it is; empty while it does not."""
        self._graphs: dict[Hashable, _Traced] = {}
        self._modules = list(self.module.modules())
        self._attributes = _Attributes(self._modules)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.reason or each_operator_is_seen() or is_eager_forced():
            return self.forward(*args, **kwargs)
        try:
            return self._run(args, kwargs)
        except _CanNotBeTraced as reason:
            self.reason = str(reason)
            self._graphs.clear()
            _warn_once(self.name, self.reason)
        return self.forward(*args, **kwargs)

    def _run(self, args: Any, kwargs: Any) -> Any:
        with without_torch_functions():  # all that is looked at and run is plain: no mode has to see it
            places = [
                (tensors, name)
                for module in self._modules
                for tensors in (module._parameters, module._buffers)
                for name in tensors
            ]
            leaves, spec = tree_flatten((args, kwargs))
            tensors, kinds = _opened([*(tensors[name] for tensors, name in places), *leaves])
            signature = self._signature(tensors, kinds, spec)
            traced = self._graphs.get(signature)
            if traced is not None:
                return traced.closed(traced.run(*tensors))
        if len(self._graphs) == _MOST_GRAPHS:
            raise _CanNotBeTraced(f"it is called in more than {_MOST_GRAPHS} ways (sizes of tensors, attributes)")
        traced = _Traced()
        outputs = self._first_run(traced, tensors, places, kinds, spec)
        self._graphs[signature] = traced
        return traced.closed(outputs)

    def _signature(self, tensors: list[torch.Tensor], kinds: list[_Kind], spec: TreeSpec) -> Hashable:
        """What has to be the same for a graph to hold."""
        device = tensors[0].device.type if tensors else "cpu"
        return (
            tuple((item.shape, item.stride(), item.dtype, item.device, item.requires_grad) for item in tensors),
            tuple(kinds),
            spec,
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
            self.around(),
            self._attributes.now(),
        )

    def _first_run(
        self,
        traced: _Traced,
        tensors: list[torch.Tensor],
        places: list[tuple[dict[str, Any], str]],
        kinds: list[_Kind],
        spec: TreeSpec,
    ) -> list[torch.Tensor]:
        """Trace, have the ranks agree that all could, and run.

        Raises:
            _CanNotBeTraced: on every rank, if one of them could not.
        """

        def on_parts(*parts: torch.Tensor) -> list[torch.Tensor]:
            leaves = _closed(parts, kinds)
            with self._without_traces(places, leaves[: len(places)]):
                args, kwargs = tree_unflatten(leaves[len(places) :], spec)
                outputs, traced.spec = tree_flatten(self.traced(*args, **kwargs))
            plain, traced.kinds = _opened(outputs)
            return plain

        def compiled(graph: torch.fx.GraphModule) -> Callable[..., Any]:
            if not voted:  # the graph of the forward pass comes first, and nothing has run yet
                voted.append(True)
                if not self._all_could(True):
                    raise _CanNotBeTraced("other ranks could not trace it")
            return self.compile_graph(graph)

        voted: list[bool] = []
        traced.run = traced_jointly(on_parts, compiled, self.saved, self.budget)
        try:
            self._refuse_hooks()
            with attributes_kept(self.module), errors_not_logged():
                return traced.run(*tensors)
        except OF_THE_MACHINE:
            raise
        except Exception as error:
            if voted and not isinstance(error, _CanNotBeTraced):
                raise  # it ran, or its compiler failed
            if not voted:
                self._all_could(False)
            raise _CanNotBeTraced(str(error) if isinstance(error, _CanNotBeTraced) else reason_of(error)) from error

    def _all_could(self, this_one: bool) -> bool:
        """Whether every rank of the group could trace the block. Collective over it."""
        with outside_of_modes():
            device = next((item.device for item in self.module.parameters()), torch.device("cpu"))
            votes = torch.tensor([int(this_one)], device=device)
            dist.all_reduce(votes, dist.ReduceOp.MIN, group=self.group)
            return bool(votes.item())

    @contextmanager
    def _without_traces(self, places: list[tuple[dict[str, Any], str]], values: list[Any]) -> Iterator[None]:
        """Within it the block's parameters and buffers are `values`, and nothing else may change.

        Raises:
            _CanNotBeTraced: something did, which a graph would not do again.
        """
        before, attributes = [owner[name] for owner, name in places], [_attributes(item) for item in self._modules]
        numbers = random.getstate()
        for (owner, name), value in zip(places, values, strict=True):
            owner[name] = value
        try:
            yield
            replaced = [name for (owner, name), value in zip(places, values, strict=True) if owner[name] is not value]
        finally:
            for (owner, name), value in zip(places, before, strict=True):
                owner[name] = value
        if replaced:
            raise _CanNotBeTraced(f"it puts another tensor in the place of {replaced[0]} when it runs")
        for module, then in zip(self._modules, attributes, strict=True):
            if _attributes(module) != then:
                raise _CanNotBeTraced(f"{type(module).__name__} in it changes its attributes when it runs")
        if random.getstate() != numbers:
            random.setstate(numbers)
            raise _CanNotBeTraced("it draws random numbers of Python's")

    def _refuse_hooks(self) -> None:
        for module in self._modules[1:]:  # those around the block run around its graph
            hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
            foreign = next((hook for hook in hooks if not _is_ours(hook)), None)
            if foreign is not None:
                name = getattr(foreign, "__qualname__", type(foreign).__qualname__)
                raise _CanNotBeTraced(f"{type(module).__name__} in it has a hook ({name}), which a graph has not")


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("autolaunch_strategies.")


def _attributes(module: nn.Module) -> tuple[Any, ...]:
    """What a module's forward may depend on beside tensors: values of plain attributes, others by identity."""
    return tuple(
        value if type(value) in _PLAIN else (id(value), *value) if name in _NAMED else (id(value), _length(value))
        for name, value in module.__dict__.items()
        if name not in ("_parameters", "_buffers")
    )


class _Attributes:
    """The attributes of some modules, as a number that is the same exactly while they are.

    Where everything is the object that it was at the last call, which is seen without looking at each by itself, they
    are not compared again.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._number = -1
        self._before: list[tuple[tuple[str, ...], tuple[Any, ...]]] = []
        """Of each module the names of its attributes, and the objects that they were."""
        self._holders: list[tuple[Any, bool]] = []
        """Those of them that others can be put into, and whether it counts by what names these are in them."""
        self._held: list[tuple[Any, ...] | int] = []

    def now(self) -> int:
        """The number for what they are now."""
        if not self._are_same():
            attributes = tuple(map(_attributes, self._modules))
            self._number = self._numbers.setdefault(attributes, len(self._numbers))
            of_modules = [vars(module) for module in self._modules]
            self._before = [(tuple(items), tuple(items.values())) for items in of_modules]
            self._holders = [
                (value, name in _NAMED)
                for items in of_modules
                for name, value in items.items()
                if name in _NAMED or type(value) in _SIZED
            ]
            self._held = self._in_holders()
        return self._number

    def _are_same(self) -> bool:
        if not self._before:
            return False
        for module, (names, values) in zip(self._modules, self._before, strict=True):
            items = vars(module)
            if tuple(items) != names or not all(map(operator.is_, items.values(), values)):
                return False
        return self._in_holders() == self._held

    def _in_holders(self) -> list[tuple[Any, ...] | int]:
        return [tuple(value) if is_named else len(value) for value, is_named in self._holders]


_NAMED = ("_modules", "_forward_hooks", "_forward_pre_hooks")


def _length(value: Any) -> int:
    return len(value) if type(value) in _SIZED else 0


_SIZED = (list, dict, set, OrderedDict, deque)


def _warn_once(name: str, reason: str) -> None:
    if reason not in _REASONS:
        _REASONS.add(reason)
        log.warning("compile: %s (and others for the same reason) runs as it is: %s", name, reason)


_REASONS: set[str] = set()
