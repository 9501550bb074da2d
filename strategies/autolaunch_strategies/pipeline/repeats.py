"""Unit calls that are like one that ran: what it showed is said again of them, without running them.

A model of eighty blocks is recorded by running three or four. Like are calls of units of one kind (`likeness`) with
like arguments, that come from the same inputs. The last unit of a kind is run, too, and has to show what the first one
did; a call that does more than to make something of its arguments (it changes what others hold, reads what it was
not given, or asks for its number) is said of no other.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten

from autolaunch_strategies.model.blocks import Block
from autolaunch_strategies.torch_private.calls import HOOKS, run_call
from autolaunch_strategies.torch_private.tracing import storage_key
from autolaunch_strategies.tracing.likeness import (
    Like,
    Unlike,
    are_same,
    attributes_of,
    is_same,
    kinds_of,
    places_of_numbers,
)
from autolaunch_strategies.tracing.state import attributes_kept
from autolaunch_strategies.tracing.tensors import tensors_in

MANY = 6
"""Units of one kind from which on it is worth to tell which are alike."""

PLAIN = (bool, int, float, str, type(None))
"""What is no tensor and is the same for every stage."""

_SWAPPED = ("_parameters", "_buffers", "_compiled_call_impl")
"""Attributes of modules that are changed to record them, besides hooks."""


@dataclass(frozen=True)
class MadeLeaf:
    """A tensor that a unit call returned."""

    like: Like
    needs_gradient: bool
    inputs: frozenset[int]
    """The inputs of the model that its values come from."""

    def make(self) -> torch.Tensor:
        """One like it."""
        made = self.like.make()
        return made.requires_grad_().clone() if self.needs_gradient else made


@dataclass(frozen=True)
class Shows:
    """What a unit call shows that holds for every like call. Names are those within the unit."""

    parts: tuple[str, ...]
    """The modules that were called, in order, itself first."""
    parameters: frozenset[str]
    """Its own, of those that were used."""
    flops: float
    spec: TreeSpec
    leaves: tuple[Any, ...]
    """Of what it returned: a `MadeLeaf` for every tensor, and plain data."""


class Repeats:
    """What calls of units have shown.

    Args:
        units: by their names.
    """

    def __init__(self, units: Mapping[str, nn.Module]) -> None:
        self._kinds: dict[str, Hashable] = {}
        self._last: set[str] = set()
        self._shown: dict[Hashable, Shows] = {}
        self._units = units
        self._before: dict[str, Any] = {}
        """The attributes of units before the model ran, which changes some in its forward."""
        self._numbers: dict[str, set[tuple[str, str]]] = {}
        """(part, attribute) where a unit has its number."""
        names = {module: name for name, module in units.items() if not _is_watched(module)}
        try:
            kinds = kinds_of(Block(name, module) for module, name in names.items()) if len(names) >= MANY else {}
        except Unlike:
            return
        for number, modules in enumerate(kinds.values()):
            if len(modules) >= MANY:
                self._kinds |= {names[module]: number for module in modules}
                self._last.add(names[modules[-1]])
                numbers = places_of_numbers([Block(names[module], module) for module in modules])
                self._numbers |= {names[module]: numbers for module in modules}
                self._before |= {names[module]: _own_attributes(module) for module in modules}

    @property
    def has_any(self) -> bool:
        """Whether any unit is like others."""
        return bool(self._kinds)

    def key(self, unit: str, args: Any, kwargs: Any, labels: Callable[[torch.Tensor], Hashable]) -> Hashable | None:
        """What like calls have in common; None of one that is like no other.

        Args:
            labels: where the values of a tensor come from.
        """
        if unit not in self._kinds or self._has_changed(unit):
            return None
        leaves, spec = tree_flatten((args, kwargs))
        storages: dict[int, int] = {}
        described: list[Hashable] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                try:
                    like = Like.of(leaf)
                except Unlike:
                    return None
                place = storages.setdefault(storage_key(leaf), len(storages)), leaf.storage_offset()
                described.append((like, leaf.requires_grad, place, labels(leaf)))
            elif isinstance(leaf, PLAIN):
                described.append((type(leaf), leaf))
            else:
                return None
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        return self._kinds[unit], modes, spec, tuple(described)

    def _has_changed(self, unit: str) -> bool:
        """Whether the model has hung hooks on a unit in its forward, or has set an attribute of it."""
        module = self._units[unit]
        watched = _is_watched(module, besides=1)  # the one is the recorder's
        return watched or not are_same(_own_attributes(module), self._before[unit])

    def leaves_nothing(self, unit: str, args: Any, kwargs: Mapping[str, Any]) -> bool:
        """Whether a call of a unit, which is made to find out, sets no attribute.

        Raises:
            Unlike: something that it makes is held somewhere behind it, where others of its kind may look, it changes
                what it is given, or does as its number says.
        """
        module = self._units[unit]
        (leaves, spec), made = tree_flatten((args, kwargs)), _Made()
        with attributes_kept(module):
            for part, key in self._numbers[unit]:
                vars(module.get_submodule(part))[key] = _Number()
            before = attributes_of(module)
            try:
                with made:
                    run_call(module, *args, **kwargs)
            except (AttributeError, TypeError) as error:  # as of an operator that is given a `_Number`
                raise Unlike(f"{type(error).__name__}: {error}") from error
            sets_nothing = are_same(attributes_of(module), before)
        if made.held():
            raise Unlike("a unit leaves something behind")
        leaves_now, spec_now = tree_flatten((args, kwargs))
        if spec_now != spec or not all(map(is_same, leaves_now, leaves)):
            raise Unlike("a unit changes what it is given")
        return sets_nothing

    def shown(self, unit: str, key: Hashable | None) -> Shows | None:
        """What a call is known to show; None if it has to be run."""
        return None if key is None or unit in self._last else self._shown.get(key)

    def note(self, key: Hashable, shows: Shows | None) -> None:
        """Keep what a call has shown; None of one of which nothing can be said again.

        Raises:
            Unlike: a like call has shown something else.
        """
        known = self._shown.get(key)
        if known is not None and known != shows:
            raise Unlike("two units of a kind")
        if shows is not None:
            self._shown[key] = shows


def shown_by(
    unit: str,
    parts: Collection[str],
    parameters: Collection[str],
    flops: float,
    spec: TreeSpec,
    leaves: Iterable[Any],
    inputs_of: Iterable[frozenset[int]],
) -> Shows | None:
    """What a call of `unit` shows; None if a part, a parameter or an output is none that others have, too."""
    made: list[Any] = []
    for leaf, inputs in zip(leaves, inputs_of, strict=True):
        if isinstance(leaf, torch.Tensor):
            try:
                made.append(MadeLeaf(Like.of(leaf), leaf.requires_grad, inputs))
            except Unlike:
                return None
        elif isinstance(leaf, PLAIN):
            made.append(leaf)
        else:
            return None
    own = len(unit) + 1
    if not all(f"{name}.".startswith(f"{unit}.") for name in (*parts, *parameters)):
        return None
    return Shows(
        tuple(name[own:] for name in parts), frozenset(name[own:] for name in parameters), flops, spec, tuple(made)
    )


def _is_watched(unit: nn.Module, besides: int = 0) -> bool:
    """Whether more than `besides` hooks hang on it or a part of it: what they do with what they are shown is theirs."""
    return any(len(getattr(part, hooks)) > besides for part in unit.modules() for hooks in HOOKS)


def _own_attributes(unit: nn.Module) -> dict[Any, Any]:
    """`attributes_of` it, but for what is changed to record it."""
    hooks = {key for part in unit.modules() for key in vars(part) if "_hooks" in key}
    buffers = {name for part in unit.modules() for name in part._buffers}
    return attributes_of(unit, besides={*_SWAPPED, *hooks, *buffers})


def _asks(*_: Any) -> Any:
    raise Unlike("a unit does as its number says")


class _Number:
    """Stands for the number of a unit: what that is used for, but to hand it on, may be different for each."""

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __hash__ = __index__ = __int__ = __float__ = _asks
    __str__ = __repr__ = __format__ = _asks  # part of a name


class _Made(TorchDispatchMode):
    """Knows the tensors that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        given = {id(item) for item in tensors_in((args, kwargs))}
        self._made += [weakref.ref(item) for item in tensors_in(output) if id(item) not in given]
        return output

    def held(self) -> bool:
        """Whether any is held by somebody."""
        return any(item() is not None for item in self._made)
