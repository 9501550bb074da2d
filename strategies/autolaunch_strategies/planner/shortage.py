"""What would help where nothing fits: a typed setting left free, a smaller batch, more devices. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from autolaunch_strategies.planner.candidate import Candidate
from autolaunch_strategies.planner.hardware import Hardware
from autolaunch_strategies.planner.plan import Looked
from autolaunch_strategies.planner.profile import Recipe
from autolaunch_strategies.planner.reasons import in_bytes, setting

MOST_DEVICES = 65_536
"""Beyond these none are looked for."""

FULL_NODE = 8
"""Devices up to which a single node that has fewer is taken to grow before there are two of them."""

_AXES = ("dp", "mp", "pp", "cp")

_PREFIXES = {"microbatches": "data.", "replicate": "dp.", "virtual_stages": "pp.", "ulysses": "cp."}
"""Where the keys are that are not told by their group."""

Look = Callable[[Recipe, Hardware, Mapping[str, Sequence[int]]], Looked]
"""Everything that could be run, with its predictions."""


@dataclass(frozen=True)
class Change:
    """One thing that could be written otherwise, and what a device needs then."""

    line: str
    """What to write."""
    memory_bytes: float
    fits: bool

    def __str__(self) -> str:
        return f"{self.line} ({in_bytes(self.memory_bytes)})"


def changes(
    look: Look, recipe: Recipe, hardware: Hardware, wanted: Mapping[str, Sequence[int]], least: float
) -> list[Change]:
    """What fits by itself: a setting of those typed, the largest smaller batch, the least more devices; where none of
    the first two does, the one of them that comes closest, if it helps at all.

    Args:
        least: bytes that a device needs at least as it is.
    """
    here = [*_freed(look, recipe, hardware, wanted), *_smaller_batch(look, recipe, hardware, wanted)]
    fitting = [change for change in here if change.fits]
    helping = [change for change in here if change.memory_bytes < 0.99 * least]
    if not fitting and helping:
        fitting = [min(helping, key=lambda change: change.memory_bytes)]
    return [*fitting, *_more_devices(look, recipe, hardware, wanted)]


def _freed(look: Look, recipe: Recipe, hardware: Hardware, wanted: Mapping[str, Sequence[int]]) -> Iterator[Change]:
    """Each of the settings that were asked for, with the value that fits, or comes closest, in its place."""
    groups = [_AXES, *((name,) for name in wanted if name not in (*_AXES, "devices"))]
    for names in groups:
        if not any(name in wanted for name in names):
            continue
        found = look(recipe, hardware, {name: values for name, values in wanted.items() if name not in names})
        if (change := _change(found, partial(_line, names))) is not None:
            yield change


def _line(names: tuple[str, ...], candidate: Candidate) -> str:
    if names == _AXES:
        return f"mesh={candidate.mesh.name}"
    return _PREFIXES.get(names[0], "") + setting(candidate, names[0])


def _as_it_is(line: str, _: Candidate) -> str:
    return line


def _smaller_batch(
    look: Look, recipe: Recipe, hardware: Hardware, wanted: Mapping[str, Sequence[int]]
) -> Iterator[Change]:
    """The largest batch of halves that fits, or else the smallest that can be run."""
    size, smallest = recipe.batch_size // 2, None
    while size >= 1:
        found = look(dataclasses.replace(recipe, batch_size=size), hardware, wanted)
        change = _change(found, partial(_as_it_is, f"data.batch_size={size}"))
        if change is None:
            break
        smallest = change
        if change.fits:
            break
        size //= 2
    if smallest is not None:
        yield smallest


def _more_devices(
    look: Look, recipe: Recipe, hardware: Hardware, wanted: Mapping[str, Sequence[int]]
) -> Iterator[Change]:
    """The least more devices on which it fits: a doubled number, then fewer of the nodes that the last doubling added.

    Ranks of one CPU share its memory, and do not help.
    """
    if hardware.device == "cpu":
        return
    free = {name: values for name, values in wanted.items() if name != "devices"}

    def with_nodes(nodes: int, each: int) -> Change | None:
        larger = dataclasses.replace(hardware, nodes=nodes, devices_per_node=each)
        line = f"cluster={hardware.name}x{nodes * each}"
        change = _change(look(recipe, larger, free), partial(_as_it_is, line))
        return change if change is not None and change.fits else None

    nodes, each, fitting = hardware.nodes, hardware.devices_per_node, None
    too_few = 0
    while fitting is None and 2 * nodes * each <= MOST_DEVICES:
        too_few = nodes
        nodes, each = (1, 2 * each) if nodes == 1 and 2 * each <= FULL_NODE else (2 * nodes, each)
        fitting = with_nodes(nodes, each)
    if fitting is None:
        return
    while nodes - too_few > 1:
        between = (too_few + nodes) // 2
        fewer = with_nodes(between, each)
        if fewer is None:
            too_few = between
        else:
            nodes, fitting = between, fewer
    yield fitting


def _change(found: Looked, line: Callable[[Candidate], str]) -> Change | None:
    """What comes closest of what was found; the fastest if there are some that fit. None if nothing can be run."""
    if not len(found):
        return None
    fits = bool(found.fits.any())
    index = int(np.where(found.fits, found.seconds, np.inf).argmin() if fits else found.memory_bytes.argmin())
    return Change(line(found.candidates[index]), float(found.memory_bytes[index]), fits)
