"""Rules for functions of rows: products with matrices, norms, lookups. A position is a row, and stays one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autolaunch_strategies.sharded_sequence.parts import (
    NeedsWhole,
    Rule,
    as_shards,
    from_right,
    longest_in,
    named,
    on_own_part,
    only_shard,
    parts_of,
    shards_in,
    whole,
)
from autolaunch_strategies.sharded_sequence.shard import SequenceShard

_ORDER = ("input", "second", "third", "fourth", "fifth", "sixth", "seventh")


def rows(consumed: Callable[[dict[str, Any]], int | None], added: int = 0) -> Rule:
    """Functions of rows of the first argument, whose last dims they consume and put others in their place.

    Args:
        consumed: how many dims, of the arguments by name (`normalized_shape` or `second`); None: not row by row.
        added: how many dims more there are afterwards.
    """

    def rule(func: Any, args: Any, kwargs: Any) -> Any:
        right = from_right(only_shard(args, kwargs))
        count = consumed(named(_ORDER, args, kwargs))
        if count is None or right <= count:
            raise NeedsWhole
        return on_own_part(func, args, kwargs, right + added)

    return rule


def normalized_dims(arguments: dict[str, Any]) -> int:
    """How many dims `layer_norm` is over."""
    shape: Any = arguments.get("normalized_shape", arguments.get("second"))
    return 1 if isinstance(shape, int) else len(shape)


def looked_up(arguments: dict[str, Any]) -> int | None:
    """No dims of the indices are consumed. Rows that are rescaled, or counted, have to be the same on every rank."""
    scaled = arguments.get("max_norm", arguments.get("fourth")) is not None
    return None if scaled or arguments.get("scale_grad_by_freq", arguments.get("sixth")) else 0


def one_hot_dims(arguments: dict[str, Any]) -> int | None:
    """None are consumed, if it does not depend on all indices how many classes there are."""
    return None if arguments.get("num_classes", arguments.get("second", -1)) == -1 else 0


def matmul(func: Any, args: Any, kwargs: Any) -> Any:
    """Products of rows, or of matrices of which the sequence only counts how many there are."""
    if kwargs or len(args) != 2:
        raise NeedsWhole
    left, right = args
    lead = longest_in(args)
    place = from_right(lead)
    if place > 2 and left.dim() > 1 and right.dim() > 1:
        return as_shards(func(*parts_of(args, lead, place)), lead, place)
    if len(shards_in(args)) > 1:
        raise NeedsWhole
    if place > 2:  # one of the two is a vector
        parts = left.local if left is lead else left, right.local if right is lead else right
        return as_shards(func(*parts), lead, place - 1)
    if place != 2 or left is not lead:
        raise NeedsWhole
    return as_shards(func(left.local, right), lead, 1 if right.dim() == 1 else 2)


def addmm(func: Any, args: Any, kwargs: Any) -> Any:
    """added + left @ right of matrices, the sequence being the rows of `left`."""
    if len(args) != 3:
        raise NeedsWhole
    added, left, right = args
    if not isinstance(left, SequenceShard) or from_right(left) != 2 or isinstance(right, SequenceShard):
        raise NeedsWhole
    return as_shards(func(parts_of(added, left, 2), left.local, right, **kwargs), left, 2)


def einsum(func: Any, args: Any, kwargs: Any) -> Any:
    """Sums of products in which the sequence has one letter, and keeps it."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    if not isinstance(equation, str) or "->" not in equation or "." in equation or kwargs:
        raise NeedsWhole
    terms_in, term_out = equation.replace(" ", "").split("->")
    terms = terms_in.split(",")
    if len(terms) != len(operands):
        raise NeedsWhole
    lead, term = next(
        (item, term) for item, term in zip(operands, terms, strict=True) if isinstance(item, SequenceShard)
    )
    letter = term[lead.sequence_dim]
    if letter not in term_out or any(term.count(letter) > 1 for term in terms):
        raise NeedsWhole
    parts = [
        parts_of(item, lead, len(term) - term.index(letter), exact=True) if letter in term else whole(item)
        for item, term in zip(operands, terms, strict=True)
    ]
    return as_shards(func(equation, *parts), lead, len(term_out) - term_out.index(letter))
