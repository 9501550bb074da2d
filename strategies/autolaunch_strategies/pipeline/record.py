"""One forward pass on shapes alone, seen as a sequence of unit calls: who needs what from whom.

The units of a model are the parts that a stage of a pipeline holds as a whole (blocks, the embedding, the head). What
runs between them is glue. A *leaf* is one tensor in what a unit call returns. Every operation is followed, so that for
each leaf it is known which later unit calls need it, through whatever glue: a cut between two calls has to carry
exactly the leaves from before it that something behind it needs.

What hooks are shown inside of a unit counts as returned, too: so do models of `transformers` collect hidden states and
the logits of routers. A stage that does not run the unit shows them what arrived.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.flop_counter import flop_registry

from autolaunch_strategies.pipeline.objects import open_dataclasses
from autolaunch_strategies.pipeline.repeats import PLAIN, MadeLeaf, Repeats, Shows, shown_by
from autolaunch_strategies.pipeline.split import call_name
from autolaunch_strategies.torch_private.calls import has_forward_hooks, run_call
from autolaunch_strategies.torch_private.tracing import draws_numbers, storage_key
from autolaunch_strategies.tracing.likeness import Unlike
from autolaunch_strategies.tracing.recorder import Observer, Operation, Recorder, parts_intercepted
from autolaunch_strategies.tracing.shapes import fake_inputs, fake_state, on_shapes_alone
from autolaunch_strategies.tracing.tensors import Labels, tensors_in
from autolaunch_strategies.tracing.unreadable import stepping_over

log = logging.getLogger(__name__)


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
    objects: dict[int, Any] = field(default_factory=dict)
    """Place of a leaf -> the object that it is, if it is neither a tensor nor plain data."""


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
    """Modules in the order of their first call, and `unit@n` for each further call of a unit (n from 1)."""
    times: dict[str, int] = field(default_factory=dict)
    """Module -> how often it is called."""
    costs: dict[str, float] = field(default_factory=dict)
    """Unit -> floating point operations of its calls."""
    untraceable: dict[str, str] = field(default_factory=dict)
    kept_by_glue: set[tuple[str, str]] = field(default_factory=set)
    """(module, attribute) of what glue changes in modules from call to call, such as a counter."""
    changed_inputs: set[int] = field(default_factory=set)
    """The tensors among the arguments of the model that it changes in place, numbered."""

    def needed_behind(self, call: int) -> list[Leaf]:
        """The leaves of call number `call` and of those before it that anything behind it needs, in order."""
        later: Leaves = self.output_reads.union(*(item.reads for item in self.calls[call + 1 :]))
        return sorted(leaf for leaf in later if leaf.call <= call)

    def hidden_reads(self) -> dict[str, str]:
        """Unit -> who reads a tensor that was made in it but not returned ("" is the model's output)."""
        readers: dict[str, str] = {}
        for reader, reads in [(call.unit, call.reads) for call in self.calls] + [("", self.output_reads)]:
            for leaf in reads:
                if leaf.place == _INSIDE:
                    readers.setdefault(self.calls[leaf.call].unit, reader)
        return readers


def record(model: nn.Module, units: Sequence[str], args: Any, kwargs: Mapping[str, Any], origin: str = "") -> Recording:
    """Run `model` once on shapes alone (parameters may be on meta). It is left as it was.

    Of many units that are alike a few are run, if that can be.

    Args:
        units: names of the modules that are units, none inside of another.
        args, kwargs: what the model is called with; values of tensors are not looked at.

    Raises:
        Exception: whatever the model's forward raises on shapes alone.
    """
    open_dataclasses((args, kwargs))
    parts = {name: model.get_submodule(name) for name in units}
    glue = {name: module for name, module in model.named_modules() if not is_within(name, units)}

    def attempt(placeholders: Mapping[str, str], repeats: Repeats) -> Recording:
        liveness = _Liveness(Recording(origin, untraceable=dict(placeholders)), repeats)
        recorder = Recorder(model, [liveness])
        with on_shapes_alone() as drew:
            state = fake_state(model)
            fake_args, fake_kwargs = fake_inputs(args, kwargs)
            liveness.begin({name: state[name] for name, _ in model.named_parameters()}, (fake_args, fake_kwargs))
            liveness.buffers = {storage_key(state[name]): name for name, _ in model.named_buffers()}
            watched = recorder.watching(), parts_intercepted(parts, liveness.unit_call)
            with watched[0], watched[1], _changes_noted(model, glue, liveness.recording.kept_by_glue):
                liveness.end(recorder.call(state, fake_args, fake_kwargs))
            liveness.recording.may_draw = liveness.has_drawn or drew() or bool(placeholders)
        return liveness.recording

    repeated: list[Repeats] = []

    def attempt_with_repeats(placeholders: Mapping[str, str]) -> Recording:
        repeated.append(Repeats(parts))  # placeholders are no difference between units, if all of a class are
        return attempt(placeholders, repeated[-1])

    try:
        return stepping_over(model, attempt_with_repeats)
    except (Unlike, Exception) as reason:
        if not any(repeats.has_any for repeats in repeated):
            raise
        log.debug("every unit is run: %s", reason)
    return stepping_over(model, lambda placeholders: attempt(placeholders, Repeats({})))


def is_within(name: str, units: Iterable[str]) -> bool:
    """Whether a module is one of `units` or inside of one."""
    return any(name == unit or name.startswith(f"{unit}.") for unit in units)


@contextmanager
def _changes_noted(model: nn.Module, glue: Mapping[str, nn.Module], noted: set[tuple[str, str]]) -> Iterator[None]:
    """Within it a call of `model` notes which attributes and buffers of modules it sets to something else."""

    def values() -> dict[tuple[str, str], Any]:
        return {
            (name, key): value
            for name, module in glue.items()
            for own in (module.__dict__, module._buffers)
            for key, value in own.items()
            if type(value) in (int, float) or isinstance(value, torch.Tensor)  # a flag says what was done for good
        }

    before: dict[tuple[str, str], Any] = {}

    def begins(module: nn.Module, args: Any) -> None:
        before.update(values())

    def ends(module: nn.Module, args: Any, output: Any) -> None:
        changed = (place for place, value in values().items() if place not in before or before[place] is not value)
        noted.update(changed)

    handles = [model.register_forward_pre_hook(begins), model.register_forward_hook(ends)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Liveness(Observer):
    """Follows what unit calls return to everything that needs it."""

    def __init__(self, recording: Recording, repeats: Repeats) -> None:
        self.recording, self._repeats = recording, repeats
        self.has_drawn = False
        self._current: int | None = None
        """The number of the unit call that is running."""
        self._parameters = Labels[str]()
        self._origins = Labels[Leaf]()
        """The leaves that values come from."""
        self._inputs = Labels[int]()
        """The inputs of the model that values come from, numbered."""
        self._draws = Labels[int]()
        """The draws of random numbers in glue that values come from, numbered."""
        self._draw_count = 0
        self._shown: list[tuple[str, Any]] = []
        """What hooks were shown in the unit call that is running."""
        self._names: frozenset[str] = frozenset()
        """Of the parameters."""
        self._parts: list[str] = []
        """The modules that were called in the unit call that is running."""
        self._used: set[str] = set()
        """The parameters that it used."""
        self._writes_elsewhere = False
        """Whether it changed what it has not made."""
        self._is_unheard = False
        self._given: dict[int, int] = {}
        """The inputs of the model by their memory, numbered."""
        self.buffers: dict[int, str] = {}
        """The names of buffers by their memory."""

    def begin(self, parameters: Mapping[str, torch.Tensor], inputs: Any) -> None:
        """Make known what is there before anything runs."""
        self._names = frozenset(parameters)
        for name, parameter in parameters.items():
            self._parameters.put(parameter, {name})
        for number, tensor in enumerate(tensors_in(inputs)):
            self._inputs.put(tensor, {number})
            self._given[storage_key(tensor)] = number

    def end(self, output: Any) -> None:
        """Note what the output of the model needs."""
        open_dataclasses(output)
        tensors = tensors_in(output)
        self.recording.output_reads = self._origins.of(*tensors)
        self.recording.output_draws = self._draws.of(*tensors)
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

    def module_begins(self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        self._begin(name)

    def _begin(self, name: str) -> None:
        if self._is_unheard:
            return
        times = self.recording.times
        if name not in times:
            self.recording.executed.append(name)
        times[name] = times.get(name, 0) + 1
        if self._current is not None:
            self._parts.append(name)

    def module_ends(self, name: str, module: nn.Module, output: Any) -> None:
        if self._current is None or self._is_unheard:
            return
        if has_forward_hooks(module, besides=1):  # the one is the recorder's
            self._shown.append((name, output))

    def unit_call(self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run a unit, or say of it what one that is alike has shown; what it returns has memory of its own."""
        number = self._current = len(self.recording.calls)
        if before := sum(call.unit == name for call in self.recording.calls):
            self.recording.executed.append(call_name(name, before))
        open_dataclasses((args, kwargs))
        inputs = [*tensors_in((args, kwargs)), *_tensors_in_objects((args, kwargs))]
        call = UnitCall(name, self._origins.of(*inputs), tree_flatten(())[1], [], [])
        call.draws = self._draws.of(*inputs)
        self.recording.calls.append(call)
        key = None if before else self._repeats.key(name, args, kwargs, self._labels)
        shows = self._repeats.shown(name, key)
        if shows is None or not self._has_own_parameters(name, shows):
            leaves, inputs_of = self._run(call, module, args, kwargs, key)
        else:
            leaves, inputs_of = self._say_again(call, shows)
        for place, (leaf, inputs_in_leaf) in enumerate(zip(leaves, inputs_of, strict=True)):
            if isinstance(leaf, torch.Tensor):
                call.shapes[place] = tuple(leaf.shape)
                self._origins.put(leaf, {Leaf(number, place)})
                call.from_data[place] = bool(inputs_in_leaf)
                self._inputs.add(leaf, inputs_in_leaf)
            elif not isinstance(leaf, PLAIN):
                call.objects[place] = leaf
        self._current = None
        return tree_unflatten(leaves, call.spec)

    @contextmanager
    def _unheard(self) -> Iterator[None]:
        """Within it nothing is noted."""
        self._is_unheard = True
        try:
            yield
        finally:
            self._is_unheard = False

    def _labels(self, tensor: torch.Tensor) -> Hashable:
        """Where the values of an argument of a unit come from, but for other units."""
        return self._inputs.of(tensor), self._parameters.of(tensor)

    def _has_own_parameters(self, unit: str, shows: Shows) -> bool:
        """Whether a unit has parameters of its own where others have: they may be those of somebody else."""
        return all(f"{unit}.{name}" in self._names for name in shows.parameters)

    def _run(
        self, call: UnitCall, module: nn.Module, args: Any, kwargs: Mapping[str, Any], key: Hashable
    ) -> tuple[list[Any], list[frozenset[int]]]:
        """(copies of what a unit returns, for each the inputs of the model that it comes from)."""
        if key is not None:
            with self._unheard():
                key = key if self._repeats.leaves_nothing(call.unit, args, kwargs) else None
        given, flops = (call.reads, call.draws), self.recording.costs.get(call.unit, 0.0)
        self._parts, self._used, self._writes_elsewhere = [], set(), False
        output = run_call(module, *args, **kwargs)
        open_dataclasses(output)
        leaves, call.spec = tree_flatten(output)
        self._keep_shown(len(self.recording.calls) - 1, call, len(leaves))
        inputs_of = [self._inputs.of(leaf) if isinstance(leaf, torch.Tensor) else frozenset[int]() for leaf in leaves]
        with self._unheard():
            # Copies, so that a unit that returns what it was called with has leaves of its own, too.
            copies = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        does_more = self._writes_elsewhere or call.shown or (call.reads, call.draws) != given
        if key is not None and not does_more:
            flops = self.recording.costs.get(call.unit, 0.0) - flops
            self._repeats.note(key, shown_by(call.unit, self._parts, self._used, flops, call.spec, copies, inputs_of))
        return copies, inputs_of

    def _say_again(self, call: UnitCall, shows: Shows) -> tuple[list[Any], list[frozenset[int]]]:
        """As `_run`, of a unit that is not run."""
        for part in shows.parts:
            self._begin(f"{call.unit}.{part}" if part else call.unit)
        for name in shows.parameters:
            self.recording.uses.setdefault(f"{call.unit}.{name}", set()).add(len(self.recording.calls) - 1)
        if shows.flops:
            self.recording.costs[call.unit] = self.recording.costs.get(call.unit, 0.0) + shows.flops
        call.spec, places = shows.spec, range(shows.spec.num_leaves)
        call.shapes, call.from_data = [None for _ in places], [False for _ in places]
        with self._unheard():
            leaves = [leaf.make() if isinstance(leaf, MadeLeaf) else leaf for leaf in shows.leaves]
        return leaves, [leaf.inputs if isinstance(leaf, MadeLeaf) else frozenset() for leaf in shows.leaves]

    def _keep_shown(self, number: int, call: UnitCall, returned: int) -> None:
        """Give what hooks were shown in a unit call places behind the `returned` leaves."""
        call.shapes, call.from_data = [None] * returned, [False] * returned
        turns: dict[str, int] = {}
        for name, output in self._shown:
            open_dataclasses(output)
            leaves, spec = tree_flatten(output)
            call.shown.append(Shown(name, turns.get(name, 0), spec, len(call.shapes)))
            turns[name] = turns.get(name, 0) + 1
            for leaf in leaves:
                if isinstance(leaf, torch.Tensor):
                    self._origins.put(leaf, {Leaf(number, len(call.shapes))})
                call.from_data.append(isinstance(leaf, torch.Tensor) and bool(self._inputs.of(leaf)))
                call.shapes.append(tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None)
        self._shown.clear()

    def operator(self, operation: Operation) -> None:
        if self._is_unheard:
            return
        read = dict.fromkeys(storage_key(tensor) for tensor in operation.inputs)
        self._note_parameters(read)
        for leaf in self._origins.of(*operation.written):
            if leaf.place != _INSIDE:
                self.recording.calls[leaf.call].changed.add(leaf.place)
        self._note_written({storage_key(tensor) for tensor in operation.written})
        operator = operation.operator
        random = draws_numbers(operator, operation.args, operation.kwargs)
        # An operator of somebody else's does not say whether it draws.
        self.has_drawn |= random or operator.namespace not in ("aten", "prims")
        if self._current is not None:
            inside = Leaf(self._current, _INSIDE)
            origins, draws = frozenset({inside}), frozenset[int]()
            call = self.recording.calls[self._current]
            self._writes_elsewhere |= any(inside not in self._origins.of(tensor) for tensor in operation.written)
            self._note_reads(call, read)
            self._note_cost(call.unit, operation)
        else:
            origins, draws = self._origins.at(read), self._draws.at(read)
            if random and operator.overloadpacket is not torch.ops.aten.bernoulli_:
                # bernoulli_ is dropout, of which each stage may have its own.
                draws |= {self._draw_count}
                self._draw_count += 1
        inputs = self._inputs.at(read)
        # A window on what is read is what that is.
        created = [tensor for tensor in operation.outputs if storage_key(tensor) not in read]
        for tensor in (*created, *operation.written):
            self._origins.add(tensor, origins)
            self._draws.add(tensor, draws)
            self._inputs.add(tensor, inputs)

    def _note_reads(self, call: UnitCall, keys: Iterable[int]) -> None:
        """What a unit reads may also be held by objects in its arguments, at any depth, as by a cache of keys.

        What another unit made and did not return does not count: each unit makes anew what all of them keep.
        """
        call.reads |= {leaf for leaf in self._origins.at(keys) if leaf.place != _INSIDE}
        call.draws |= self._draws.at(keys)

    def _note_written(self, keys: Iterable[int]) -> None:
        for key in keys:
            if key in self._given:
                self.recording.changed_inputs.add(self._given[key])
            if self._current is None and key in self.buffers:
                module, _, buffer = self.buffers[key].rpartition(".")
                self.recording.kept_by_glue.add((module, buffer))

    def _note_parameters(self, keys: Iterable[int]) -> None:
        for name in (name for key in keys for name in self._parameters.at((key,))):
            if self._current is not None:
                self._used.add(name)
                self.recording.uses.setdefault(name, set()).add(self._current)
            else:
                self.recording.glue_uses.setdefault(name, len(self.recording.calls))

    def _note_cost(self, unit: str, operation: Operation) -> None:
        count = flop_registry.get(operation.operator.overloadpacket)
        if count is not None:
            flops = count(*operation.args, **operation.kwargs, out_val=operation.output)
            self.recording.costs[unit] = self.recording.costs.get(unit, 0.0) + flops


def _tensors_in_objects(values: Any) -> list[torch.Tensor]:
    """The tensors that objects among `values` hold in their attributes."""
    objects = [leaf for leaf in tree_flatten(values)[0] if not isinstance(leaf, (*PLAIN, torch.Tensor, nn.Module))]
    return [tensor for item in objects for tensor in tensors_in(list(getattr(item, "__dict__", {}).values()))]
