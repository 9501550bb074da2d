"""Experts on sequence shards: what they make of a token depends on no other, be it that their code sorts all tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from autolaunch_strategies.experts.find import countable_mixtures
from autolaunch_strategies.sharded_sequence.parts import (
    NeedsWhole,
    as_shards,
    from_right,
    longest_in,
    parts_of,
    shards_in,
)
from autolaunch_strategies.torch_private.calls import forward_restored


@contextmanager
def experts_on_parts(model: nn.Module) -> Iterator[None]:
    """Within it experts that are called with sequence shards compute with what this rank holds of them."""
    with ExitStack() as stack:
        for mixture in countable_mixtures(model):
            stack.enter_context(forward_restored(mixture.module))
            own = mixture.module.forward
            mixture.module.forward = functools.wraps(own)(functools.partial(_on_parts, own))
        yield


def _on_parts(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not shards_in((args, kwargs)):
        return own(*args, **kwargs)
    lead = longest_in((args, kwargs))
    try:
        parts, named = parts_of((args, kwargs), lead, from_right(lead), exact=True)
    except NeedsWhole:
        return own(*args, **kwargs)
    return as_shards(own(*parts, **named), lead, from_right(lead))
