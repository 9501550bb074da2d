"""Which of many cases a plain `pytest` runs, which `pytest -m full` adds, and which only `pytest -m every` does.

A full product (model x mesh x level x schedule x backend) finds hardly more than a choice of it. One that has every
model and every mesh runs every day. A wider one (`spread`), marked `full`, is for every change that lands: it has a
budget of minutes. The rest is marked `every`: for who changes what it is about.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

Some = Collection[Any] | Callable[[Any], bool]
"""Some of many values, or what says of a value whether it is one."""


def tiered(values: Iterable[Any], everyday: Some, seldom: Some = ()) -> list[Any]:
    """Values for `pytest.mark.parametrize`: those not `everyday` are marked `every` if `seldom`, and else `full`.

    Raises:
        AssertionError: something is everyday or seldom, but no value; or nothing is left that is `full` or everyday.
    """
    values = list(values)
    daily, rare = _choice(values, everyday), _choice(values, seldom)
    marked = []
    for value in values:
        marks = () if daily(value) else pytest.mark.every if rare(value) else pytest.mark.full
        marked.append(pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks))
    assert not values or not all(rare(value) and not daily(value) for value in values), "all of them are seldom run"
    return marked


def _choice(values: Sequence[Any], some: Some) -> Callable[[Any], bool]:
    if callable(some):
        return some
    unknown = [value for value in some if value not in values]
    assert not unknown, f"no such cases: {unknown}"
    return some.__contains__


def one_in(count: int, values: Iterable[Any], full: int = 1) -> list[Any]:
    """Values for `pytest.mark.parametrize` from a long table of equals.

    Every `count`th of them runs every day, and of the others every `full`th is `full`; the rest is `every`.
    """
    chosen, others = [], itertools.cycle([pytest.mark.full, *[pytest.mark.every] * (full - 1)])
    for index, value in enumerate(values):
        parameter = value if isinstance(value, ParameterSet) else ParameterSet.extract_from(value)
        marks = [*parameter.marks, *([next(others)] if index % count else [])]
        chosen.append(pytest.param(*parameter.values, marks=marks, id=parameter.id))
    return chosen


def spread(
    values: Iterable[Any], parts: Callable[[Any], Iterable[Any]], everyday: Some = (), times: int = 1
) -> Callable[[Any], bool]:
    """Says of a value of a long product whether it is `seldom`: not in a choice that has every part `times` times.

    Args:
        parts: of a value, such as its model and its mesh.
        everyday: what has parts, too, and is in no need of a choice.
        times: how often a part is to be in what runs every day and in the choice, together.
    """
    values = list(values)
    daily = _choice(values, everyday)
    seen = Counter(part for value in values if daily(value) for part in parts(value))
    left = [value for value in values if not daily(value)]
    while left:
        wanted = [sum(seen[part] < times for part in parts(value)) for value in left]
        if not max(wanted):
            break
        # Of those that have most of what is wanted, one whose parts are the rarest yet.
        best = min(range(len(left)), key=lambda index: (-wanted[index], sum(seen[part] for part in parts(left[index]))))
        seen.update(parts(left.pop(best)))
    return left.__contains__


def but_one_in(count: int, values: Sequence[Any], everyday: Some = ()) -> Callable[[Any], bool]:
    """Says of a value of a long table of equals whether it is `seldom`: all are, but every `count`th not `everyday`."""
    daily = _choice(values, everyday)
    left = [value for value in values if not daily(value)]
    return [value for index, value in enumerate(left) if index % count].__contains__


def in_turn(names: Sequence[str], ways: Sequence[Any]) -> set[tuple[str, Any]]:
    """Pairs of which every name is in one, and every way in about as many as any other."""
    return {(name, ways[index % len(ways)]) for index, name in enumerate(names)}


def of_the_day(families: Sequence[str], axis: str) -> set[str]:
    """The families of models that meet this axis every day: each meets one of mp, pp and cp, and others in full."""
    return {name for name, its in in_turn(families, ("mp", "pp", "cp")) if its == axis}
