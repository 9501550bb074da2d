"""What a call changes in the modules that it runs, put back afterwards."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from autolaunch_strategies.model.random_positions import draws_uncounted
from autolaunch_strategies.torch_private.random_state import all_random_numbers_kept

_TRIALS = [0]


@contextmanager
def trial(device: torch.device) -> Iterator[None]:
    """Within it modules run to be tried out, in training, too: random numbers go on behind it as if they had not."""
    _TRIALS[0] += 1
    try:
        with all_random_numbers_kept(device), draws_uncounted():
            yield
    finally:
        _TRIALS[0] -= 1


def is_trial() -> bool:
    """Whether what runs now is a trial, which what adds up over the steps of a run leaves out."""
    return _TRIALS[0] > 0


@contextmanager
def attributes_kept(model: nn.Module, besides: Collection[str] = ()) -> Iterator[None]:
    """Put back afterwards what modules keep of a call (a cached mask): it would be a tensor without values.

    Args:
        besides: names of attributes that are left as they are.
    """
    kinds = (dict, OrderedDict, list, set)
    before = [(module.__dict__, dict(module.__dict__)) for module in model.modules()]
    held = [item for _, own in before for name, item in own.items() if name not in besides]
    contents = [(item, item.copy()) for item in held if type(item) in kinds]
    try:
        yield
    finally:
        for own, was in before:
            was.update({name: own[name] for name in besides if name in own})
        for now, then in (*before, *contents):
            now.clear()
            if isinstance(now, list):
                now.extend(then)
            else:
                now.update(then)


@contextmanager
def values_kept(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Put back afterwards what is written into tensors."""
    before = [(tensor, tensor.clone()) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, then in before:
            if not torch.equal(tensor, then):  # what is written no earlier graph can be differentiated through
                tensor.copy_(then)
