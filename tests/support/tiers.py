"""Which of many cases a plain `pytest` runs; `pytest -m full` runs all.

A full product (model x mesh x level x schedule x backend) finds hardly more than a choice in which every two values
meet once. Such a choice runs every day; the rest is marked `full`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def tiered(values: Iterable[Any], everyday: Collection[Any] | Callable[[Any], bool]) -> list[Any]:
    """Values for `pytest.mark.parametrize`, of which those that are not `everyday` are marked `full`.

    Args:
        everyday: some of the values, or what says of a value whether it is one.

    Raises:
        AssertionError: something is everyday, but no value.
    """
    values = list(values)
    if not callable(everyday):
        unknown = [value for value in everyday if value not in values]
        assert not unknown, f"no such cases: {unknown}"
        chosen: Callable[[Any], bool] = everyday.__contains__
    else:
        chosen = everyday
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=() if chosen(value) else pytest.mark.full
        )
        for value in values
    ]


def one_in(count: int, values: Iterable[Any]) -> list[Any]:
    """Values for `pytest.mark.parametrize` from a long table of equals: every `count`th of them runs every day."""
    chosen = []
    for index, value in enumerate(values):
        parameter = value if isinstance(value, ParameterSet) else ParameterSet.extract_from(value)
        marks = [*parameter.marks, *([pytest.mark.full] if index % count else [])]
        chosen.append(pytest.param(*parameter.values, marks=marks, id=parameter.id))
    return chosen


def in_turn(names: Sequence[str], ways: Sequence[Any]) -> set[tuple[str, Any]]:
    """Pairs of which every name is in one, and every way in about as many as any other."""
    return {(name, ways[index % len(ways)]) for index, name in enumerate(names)}


def of_the_day(families: Sequence[str], axis: str) -> set[str]:
    """The families of models that meet this axis every day: each meets one of mp, pp and cp, and all three in full."""
    return {name for name, its in in_turn(families, ("mp", "pp", "cp")) if its == axis}
