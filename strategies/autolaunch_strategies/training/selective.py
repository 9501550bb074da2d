"""Torch's selective activation checkpoint, made to count only calls of operators that it may keep.

Torch tells the calls of an operator apart by their number, and ends a run whose repetition of a block has more of them
than the first pass had. What is called beside the model's own code differs between the two: `fully_shard` gathers a
module within a block in one of them and finds it gathered in the other, with copies and marks for profilers. Calls of
what is never kept need no number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


def contexts_that_keep(packets: Collection[Any]) -> tuple[AbstractContextManager, AbstractContextManager]:
    """The contexts of a pass and of its repetition: what overloads of `packets` give is kept, all else repeated."""

    first, again = create_selective_checkpoint_contexts(policy_that_keeps(packets))
    return _Limited(first, packets), _Limited(again, packets)


def policy_that_keeps(packets: Collection[Any]) -> Callable[..., CheckpointPolicy]:
    """The same as torch wants it for what is compiled, where it marks operators and counts none."""

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if _is_of(operator, packets) else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _is_of(operator: Any, packets: Collection[Any]) -> bool:
    return getattr(operator, "overloadpacket", None) in packets


class _Limited(TorchDispatchMode):
    """A mode of torch's checkpoint that sees only overloads of `packets`."""

    supports_higher_order_operators = True

    def __init__(self, mode: Any, packets: Collection[Any]) -> None:
        super().__init__()
        self._mode, self._packets = mode, packets

    @classmethod
    def ignore_compile_internals(cls) -> bool:  # as torch's two modes have it
        return True

    def __enter__(self) -> Any:
        with self._mode:  # which counts from its beginning on
            pass
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_of(func, self._packets):
            return self._mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))
