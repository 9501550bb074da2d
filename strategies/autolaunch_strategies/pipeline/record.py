"""One forward pass on shapes alone, seen as a sequence of unit calls: who needs what from whom.

The units of a model are the parts that a stage of a pipeline holds as a whole (blocks, the embedding, the head). What
runs between them is glue. A *leaf* is one tensor in what a unit call returns. Every operation is followed, so that for
each leaf it is known which later unit calls need it, through whatever glue: a cut between two calls has to carry
exactly the leaves from before it that something behind it needs.

What hooks are shown inside of a unit counts as returned, too: so do models of `transformers` collect hidden states and
the logits of routers. A stage that does not run the unit shows them what arrived.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten
from torch.utils.flop_counter import flop_registry

from autolaunch_strategies.plan.trace import Untraceable, stepping_over
from autolaunch_strategies.torch_private.calls import has_forward_hooks, intercept_calls, run_call
from autolaunch_strategies.torch_private.random_state import saved_random_state
from autolaunch_strategies.torch_private.tracing import fake_tensors, is_random, storage_key, writes_to


class Leaf(NamedTuple):
    """A tensor that a unit call returned: the call's number, and its place in the flattened output."""

    call: int
    place: int


_INSIDE = -1
"""The place of tensors that a unit call made but did not return."""

Leaves = frozenset[Leaf]
_NONE: Leaves = frozenset()


@dataclass(frozen=True)
class Shown:
    """An output that hooks of a module inside of a unit (or of the unit) were shown."""

    module: str
    turn: int
    """Which of the calls of the module in this call of the unit."""
    spec: TreeSpec
    first: int
    """The place of its first leaf: they stand behind those that the unit returned."""

    @property
    def places(self) -> range:
        """The places of its leaves."""
        return range(self.first, self.first + self.spec.num_leaves)


@dataclass
class UnitCall:
    """One call of a unit: what it returned and which earlier leaves it needs."""

    unit: str
    reads: Leaves
    spec: TreeSpec
    shapes: list[tuple[int, ...] | None]
    """Of every leaf; None for what is no tensor."""
    from_data: list[bool]
    """Of every leaf: whether its values depend on the inputs of the model."""
    draws: frozenset[int] = frozenset()
    """The random numbers it needs that glue drew, by number of the draw."""
    changed: set[int] = field(default_factory=set)
    """Places of leaves that glue or another unit changes in place afterwards."""
    shown: list[Shown] = field(default_factory=list)
    """In order; empty if nothing of what any unit shows is needed outside of it."""


@dataclass
class Recording:
    """What one forward pass of a model shows."""

    origin: str
    calls: list[UnitCall] = field(default_factory=list)
    output_reads: Leaves = _NONE
    """The leaves that the output of the model needs behind the last unit call."""
    may_draw: bool = True
    """Whether anything in the model may draw random numbers; False only if it is known that nothing does."""
    output_draws: frozenset[int] = frozenset()
    """The random numbers that the output of the model needs behind the last unit call."""
    uses: dict[str, set[int]] = field(default_factory=dict)
    """Parameter -> numbers of the unit calls that use it."""
    glue_uses: dict[str, int] = field(default_factory=dict)
    """Parameter -> the number of unit calls that lie before its first use outside of them."""
    executed: list[str] = field(default_factory=list)
    """Modules in the order of their first call."""
    costs: dict[str, float] = field(default_factory=dict)
    """Unit -> floating point operations of its calls."""
    untraceable: dict[str, str] = field(default_factory=dict)

    def needed_behind(self, call: int) -> list[Leaf]:
        """The leaves of call number `call` and of those before it that anything behind it needs, in order."""
        later: Leaves = self.output_reads.union(*(item.reads for item in self.calls[call + 1 :]))
        return sorted(leaf for leaf in later if leaf.call <= call)

    def hidden_reads(self) -> dict[str, str]:
        """Unit -> who reads a tensor that was made in it but not returned ("" is the model's output)."""
        found: dict[str, str] = {}
        for reader, reads in [(call.unit, call.reads) for call in self.calls] + [("", self.output_reads)]:
            for leaf in reads:
                if leaf.place == _INSIDE:
                    found.setdefault(self.calls[leaf.call].unit, reader)
        return found


def record(model: nn.Module, units: Sequence[str], args: Any, kwargs: Mapping[str, Any], origin: str = "") -> Recording:
    """Run `model` once on shapes alone (parameters may be on meta). It is left as it was.

    Args:
        units: names of the modules that are units, none inside of another.
        args, kwargs: what the model is called with; values of tensors are not looked at.

    Raises:
        Exception: whatever the model's forward raises on shapes alone.
    """

    def attempt(placeholders: Mapping[str, str]) -> Recording:
        recorder = _Recorder(model, units, origin)
        try:
            recorder.run(args, kwargs)
        except Exception as error:
            raise Untraceable(recorder.inside, error) from error
        recorder.recording.untraceable = dict(placeholders)
        recorder.recording.may_draw |= bool(placeholders)
        return recorder.recording

    return stepping_over(model, attempt)


class _Recorder(TorchDispatchMode):
    def __init__(self, model: nn.Module, units: Sequence[str], origin: str) -> None:
        super().__init__()
        self.model, self.units = model, units
        self.recording = Recording(origin)
        self.stack: list[str] = []
        self.current: int | None = None  # the unit call that is running
        self.origins: dict[int, Leaves] = {}  # memory -> leaves that its values come from
        self.from_data: set[int] = set()  # memory whose values depend on the inputs
        self.draws: dict[int, frozenset[int]] = {}  # memory -> draws of random numbers in glue that are in it
        self.draw_count = 0
        self.has_drawn = False
        self.parameters: dict[int, str] = {}  # memory -> parameter
        self.alive: list[torch.Tensor] = []  # keeps the keys of memory unique
        self.shown: list[tuple[str, Any]] = []  # what hooks were shown in the unit call that is running
        self.quiet = False

    @property
    def inside(self) -> str:
        """The innermost module that is running (empty: the model itself)."""
        return self.stack[-1] if self.stack else ""

    def run(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        with ExitStack() as stack:
            drew = stack.enter_context(_random_state_kept())
            stack.enter_context(fake_tensors())
            state = {name: _like(tensor) for name, tensor in self.model.named_parameters()}
            self.parameters = {storage_key(tensor): name for name, tensor in state.items()}
            state |= {name: _like(tensor) for name, tensor in self.model.named_buffers()}
            args, kwargs = tree_map(
                lambda leaf: _like(leaf) if isinstance(leaf, torch.Tensor) else leaf, (args, dict(kwargs))
            )
            inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
            self.from_data = {storage_key(tensor) for tensor in inputs}
            self.alive += [*state.values(), *inputs]
            stack.enter_context(self._watched())
            stack.enter_context(self)
            output = torch.func.functional_call(self.model, state, args, dict(kwargs))
            tensors = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, torch.Tensor)]
            self.recording.output_reads = _NONE.union(*(self._of(tensor) for tensor in tensors))
            self.recording.output_draws = self._draws_of(tensors)
            self.recording.may_draw = self.has_drawn or drew()
        self._forget_shown_for_nothing()

    def _forget_shown_for_nothing(self) -> None:
        """What hooks are shown counts only if anything of it is needed, but then all of it: hooks may count."""
        calls = self.recording.calls
        read = self.recording.output_reads.union(*(call.reads for call in calls))
        if any(leaf.place >= calls[leaf.call].spec.num_leaves for leaf in read):
            return
        for call in calls:
            call.shown.clear()
            del call.shapes[call.spec.num_leaves :], call.from_data[call.spec.num_leaves :]

    @contextmanager
    def _watched(self) -> Iterator[None]:
        handles = []
        units = [self.model.get_submodule(name) for name in self.units]
        try:
            for name, module in self.model.named_modules():
                if name:
                    handles.append(module.register_forward_pre_hook(self._begins(name)))
                    handles.append(module.register_forward_hook(self._ends))
            for name, module in zip(self.units, units, strict=True):
                intercept_calls(module, self._unit(name, module))
            yield
        finally:
            for handle in handles:
                handle.remove()
            for module in units:
                intercept_calls(module, None)

    def _begins(self, name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if name not in self.recording.executed:
                self.recording.executed.append(name)
            self.stack.append(name)

        return hook

    def _ends(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self.stack.pop()
        if self.current is not None and has_forward_hooks(module, besides=1):
            self.shown.append((name, output))

    def _unit(self, name: str, module: nn.Module) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.current is not None:  # a unit that is called within another
                return run_call(module, *args, **kwargs)
            number = self.current = len(self.recording.calls)
            given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
            made = UnitCall(name, _NONE.union(*(self._of(tensor) for tensor in given)), tree_flatten(())[1], [], [])
            made.draws = self._draws_of(given)
            self.recording.calls.append(made)
            output = run_call(module, *args, **kwargs)
            leaves, made.spec = tree_flatten(output)
            self._keep_shown(number, made, len(leaves))
            self.quiet = True
            # Copies, so that a unit that returns what it was given has leaves of its own, too.
            copies = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            self.quiet = False
            for place, (leaf, copy) in enumerate(zip(leaves, copies, strict=True)):
                made.shapes[place] = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None
                if isinstance(leaf, torch.Tensor):
                    self.alive.append(copy)
                    self.origins[storage_key(copy)] = frozenset({Leaf(number, place)})
                    if storage_key(leaf) in self.from_data:
                        made.from_data[place] = True
                        self.from_data.add(storage_key(copy))
            self.current = None
            return tree_unflatten(copies, made.spec)

        return call

    def _keep_shown(self, number: int, made: UnitCall, returned: int) -> None:
        """Give what hooks were shown in a unit call places behind the `returned` leaves."""
        made.shapes, made.from_data = [None] * returned, [False] * returned
        turns: dict[str, int] = {}
        for name, output in self.shown:
            leaves, spec = tree_flatten(output)
            made.shown.append(Shown(name, turns.get(name, 0), spec, len(made.shapes)))
            turns[name] = turns.get(name, 0) + 1
            for leaf in leaves:
                if isinstance(leaf, torch.Tensor):
                    self.alive.append(leaf)
                    self.origins[storage_key(leaf)] = frozenset({Leaf(number, len(made.shapes))})
                made.from_data.append(isinstance(leaf, torch.Tensor) and storage_key(leaf) in self.from_data)
                made.shapes.append(tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None)
        self.shown.clear()

    def _of(self, tensor: torch.Tensor) -> Leaves:
        return self.origins.get(storage_key(tensor), _NONE)

    def _draws_of(self, tensors: list[torch.Tensor]) -> frozenset[int]:
        nothing: frozenset[int] = frozenset()
        return nothing.union(*(self.draws.get(storage_key(tensor), nothing) for tensor in tensors))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if self.quiet or func.namespace == "prim":  # what it is on, its type: more than half of all calls, no values
            return output
        given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        self._note_parameters(given)
        made = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, torch.Tensor)]
        written: list[torch.Tensor] = []
        if names := writes_to(func):
            by_name = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
            written = [
                leaf for name in names for leaf in tree_flatten(by_name.get(name))[0] if isinstance(leaf, torch.Tensor)
            ]
        origin = _NONE.union(*(self._of(tensor) for tensor in given))
        for leaf in (leaf for tensor in written for leaf in self._of(tensor) if leaf.place != _INSIDE):
            self.recording.calls[leaf.call].changed.add(leaf.place)
        if self.current is not None:
            origin = frozenset({Leaf(self.current, _INSIDE)})
            self._note_cost(func, args, kwargs, output)
        data = any(storage_key(tensor) in self.from_data for tensor in given)
        known = {storage_key(tensor) for tensor in given}  # a window on them is what they are
        changed = [*(tensor for tensor in made if storage_key(tensor) not in known), *written]
        # An operator of somebody else's does not say whether it draws.
        self.has_drawn |= is_random(func) or func.namespace not in ("aten", "prims")
        drawn = self._draws_of(given) if self.current is None else frozenset[int]()
        if self.current is None and is_random(func) and func.overloadpacket is not torch.ops.aten.bernoulli_:
            # bernoulli_ is dropout, of which each stage may have its own.
            drawn |= {self.draw_count}
            self.draw_count += 1
        self.alive += made
        for tensor in changed:
            self.origins[storage_key(tensor)] = origin | self._of(tensor)
            if drawn:
                self.draws[storage_key(tensor)] = drawn | self._draws_of([tensor])
            if data:
                self.from_data.add(storage_key(tensor))
        return output

    def _note_parameters(self, given: list[torch.Tensor]) -> None:
        for tensor in given:
            name = self.parameters.get(storage_key(tensor))
            if name is None:
                continue
            if self.current is not None:
                self.recording.uses.setdefault(name, set()).add(self.current)
            else:
                self.recording.glue_uses.setdefault(name, len(self.recording.calls))

    def _note_cost(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            assert self.current is not None
            unit = self.recording.calls[self.current].unit
            self.recording.costs[unit] = self.recording.costs.get(unit, 0.0) + count(*args, **kwargs, out_val=output)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return fake.requires_grad_(tensor.requires_grad)


@contextmanager
def _random_state_kept() -> Iterator[Callable[[], bool]]:
    """Put random states back afterwards; gives a function that says whether python's or numpy's have changed."""
    states = random.getstate(), np.random.get_state()

    def drew() -> bool:
        return random.getstate() != states[0] or repr(np.random.get_state()) != repr(states[1])

    try:
        with saved_random_state(torch.device("cpu")):
            yield drew
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
