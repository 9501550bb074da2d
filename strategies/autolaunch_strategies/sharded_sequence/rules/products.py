"""Rules for functions of rows: products with matrices, norms, lookups. A position is a row, and stays one."""

from __future__ import annotations

import string
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from autolaunch_strategies.model.random_positions import by_position, holding
from autolaunch_strategies.model.random_streams import stream_of
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
from autolaunch_strategies.torch_private.attention import ATTENTION_ARGUMENTS, HEADS

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
    """Products of rows, or of matrices of which the sequence only counts how many there are.

    Rows are multiplied with a whole matrix, gathered if it is sharded: so attention that is written out gathers its
    keys and its values, and has the scores of this rank's queries only.
    """
    if kwargs or len(args) != 2:
        raise NeedsWhole
    left, right = args
    if isinstance(left, SequenceShard) and from_right(left) == 2 and (right.dim() == 1 or _is_matrix(right)):
        return as_shards(func(left.local, whole(right)), left, 1 if right.dim() == 1 else 2)
    lead = longest_in(args)
    place = from_right(lead)
    if place > 2 and left.dim() > 1 and right.dim() > 1:
        return as_shards(func(*parts_of(args, lead, place)), lead, place)
    if len(shards_in(args)) > 1:
        raise NeedsWhole
    if place <= 2:
        raise NeedsWhole
    # one of the two is a vector
    parts = left.local if left is lead else left, right.local if right is lead else right
    return as_shards(func(*parts), lead, place - 1)


def _is_matrix(tensor: Any) -> bool:
    """Whether it counts no matrices by a sharded sequence."""
    return not isinstance(tensor, SequenceShard) or from_right(tensor) <= 2


def addmm(func: Any, args: Any, kwargs: Any) -> Any:
    """added + left @ right of matrices, or of several, the sequence being the rows of `left`."""
    arguments = named(("input", *(("batch1", "batch2") if "b" in func.__name__ else ("mat1", "mat2"))), args, kwargs)
    added, left, right = (arguments.pop(name) for name in list(arguments)[:3])
    if not isinstance(left, SequenceShard) or from_right(left) != 2 or not _is_matrix(right):
        raise NeedsWhole
    return as_shards(func(parts_of(added, left, 2), left.local, whole(right), **arguments), left, 2)


def einsum(func: Any, args: Any, kwargs: Any) -> Any:
    """Sums of products in which the sequence has one letter, and keeps it."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    if not isinstance(equation, str) or "->" not in equation or kwargs:
        raise NeedsWhole
    terms_in, term_out = equation.replace(" ", "").split("->")
    terms = terms_in.split(",")
    if len(terms) != len(operands):
        raise NeedsWhole
    terms, term_out = _with_named_dims(terms, term_out, [item.dim() for item in operands])
    equation = f"{','.join(terms)}->{term_out}"
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


def _with_named_dims(terms: list[str], term_out: str, dims: list[int]) -> tuple[list[str], str]:
    """The terms of an equation with letters instead of an ellipsis, which broadcasts from the right."""
    free = [letter for letter in string.ascii_letters if letter not in "".join((*terms, term_out))]
    counts = [dim - len(term) + 3 for term, dim in zip(terms, dims, strict=True) if "..." in term]
    if len(free) < max(counts, default=0):
        raise NeedsWhole

    def named_dims(term: str, count: int) -> str:
        return term.replace("...", "".join(free[:count][::-1]))

    expanded = [named_dims(term, dim - len(term) + 3) for term, dim in zip(terms, dims, strict=True)]
    return expanded, named_dims(term_out, max(counts, default=0))


def attention(func: Any, args: Any, kwargs: Any) -> Any:
    """`scaled_dot_product_attention` of this rank's queries to all keys: what no backend of cp computes."""
    arguments = named(ATTENTION_ARGUMENTS, args, kwargs)
    query, keys, values = (arguments.pop(name) for name in HEADS)
    if not isinstance(query, SequenceShard) or from_right(query) != 2 or not _is_matrix(keys) or not _is_matrix(values):
        raise NeedsWhole
    if arguments.pop("is_causal", False):
        held = query.positions.of_rank(query.group.rank(), query.local.device)
        arguments["attn_mask"] = torch.arange(keys.shape[-2], device=held.device) <= held[:, None]
    elif isinstance(arguments.get("attn_mask"), torch.Tensor):
        arguments["attn_mask"] = parts_of(arguments["attn_mask"], query, 2)
    rank, positions = query.group.rank(), query.positions
    drops = stream_of(f"cp{rank}", query.local.device) if arguments.get("dropout_p") else nullcontext()
    with drops, holding({query.sequence_dim: (positions.of_rank(rank), positions.size)}):
        return as_shards(by_position(func)(query.local, whole(keys), whole(values), **arguments), query, 2)
