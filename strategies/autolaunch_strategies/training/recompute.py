"""Activation checkpointing of blocks, in place: names of parameters stay what they are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from autolaunch_strategies.config import ConfigError, Recompute
from autolaunch_strategies.context.attention.operator import CONTEXT_ATTENTION
from autolaunch_strategies.context.parallel import both
from autolaunch_strategies.experts.kept import Kept
from autolaunch_strategies.model.blocks import Block
from autolaunch_strategies.model.document_attention import DOCUMENT_ATTENTION
from autolaunch_strategies.model.random_positions import drawing_again
from autolaunch_strategies.training.save_groups import SAVE_GROUPS
from autolaunch_strategies.training.selective import contexts_that_keep, policy_that_keeps


def apply_recompute(
    blocks: Iterable[Block],
    recompute: Recompute,
    running: Callable[[], AbstractContextManager] = nullcontext,
    exchanges: bool = False,
) -> None:
    """Let blocks compute their activations again in the backward pass.

    Args:
        blocks: those of `recomputed_blocks` that this rank has.
        running: gives the context in which a forward pass that begins now runs; a backward pass is not within it.
        exchanges: tokens travel to experts within them. How many go where is not asked again; with `selective`, rows
            that have travelled are kept, too.

    Raises:
        ConfigError: selective with a name that is neither a group nor an aten operator.
    """
    is_selective = recompute.mode == "selective"
    context_fn = functools.partial(_contexts, _selective(recompute.save) if is_selective else None, running)
    if exchanges:
        context_fn = functools.partial(_contexts_with_kept, context_fn, is_selective)
    traced = _selective_when_traced(recompute.save) if is_selective else None
    for block in blocks:
        _replace_forward(block.module, functools.partial(_checkpointed, context_fn, traced))


def recomputed_blocks(blocks: Iterable[Block], recompute: Recompute) -> dict[str, str]:
    """Which blocks a setting is for, and how: block name -> full, selective, budget or offload."""
    if isinstance(recompute.mode, str):
        every, how = int(recompute.mode != "none"), recompute.mode
    else:
        every, how = recompute.mode, "full"
    return {block.name: how for number, block in enumerate(blocks) if every and number % every == 0}


def _replace_forward(module: nn.Module, change: Callable[[Callable], Callable]) -> None:
    forward = module.forward
    module.forward = functools.wraps(forward)(change(forward))


def _contexts(
    selective: Callable | None, running: Callable[[], AbstractContextManager]
) -> tuple[AbstractContextManager, AbstractContextManager]:
    """The contexts of a block's forward pass, which begins now, and of its repetition."""
    first, again = (nullcontext(), nullcontext()) if selective is None else selective()
    return first, both(both(running(), again), drawing_again())


def _contexts_with_kept(
    contexts: Callable[[], tuple[AbstractContextManager, AbstractContextManager]], rows: bool
) -> tuple[AbstractContextManager, AbstractContextManager]:
    (first, again), exchanged = contexts(), Kept(rows)
    return both(first, exchanged.first()), both(again, exchanged.again())


def _checkpointed(context_fn: Callable, selective: Callable | None, forward: Callable) -> Callable:
    # What is compiled is traced once, with what is active then: its passes enter no contexts, and it takes no others.
    traced: dict[str, Any] = {} if selective is None else {"context_fn": selective}

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            return checkpoint(forward, *args, use_reentrant=False, **traced, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=context_fn, **kwargs)

    return run


def saved_operators(save: Iterable[str]) -> set[Any]:
    """The operators that names in `recompute_save` stand for.

    Raises:
        ConfigError: a name that is neither a group nor an aten operator.
    """
    kept: set[Any] = set()
    for name in save:
        operators = SAVE_GROUPS.get(name, (name.removeprefix("aten."),))
        packets = {getattr(torch.ops.aten, operator) for operator in operators if hasattr(torch.ops.aten, operator)}
        if not packets:
            raise ConfigError(
                f"recompute_save={name}",
                "neither a group of operators nor an aten operator",
                f"{', '.join(SAVE_GROUPS)}, or aten.<name>",
            )
        kept |= packets
        if name == "attention":
            kept |= {CONTEXT_ATTENTION, DOCUMENT_ATTENTION}
    return kept


def _selective(save: Iterable[str]) -> Callable:
    return functools.partial(contexts_that_keep, saved_operators(save))


def _selective_when_traced(save: Iterable[str]) -> Callable:
    return functools.partial(create_selective_checkpoint_contexts, policy_that_keeps(saved_operators(save)))
