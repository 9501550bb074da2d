"""Compilation of blocks, in place: names of parameters stay what they are, hooks around a block stay eager."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autolaunch_strategies.model.blocks import Block
from autolaunch_strategies.torch_private.async_tensor_parallel import let_ranks_reach_memory, options_to_overlap
from autolaunch_strategies.training.traced_block import TracedForward


def apply_compile(blocks: Iterable[Block], mode: bool | str, budget: float | None = None) -> None:
    """Compile the forward of every block by itself. Nothing in it is sharded along mp or cp.

    Args:
        budget: the share (0 to 1) of what compiled blocks keep for their backward pass that they may keep; the rest is
            computed again.
    """
    _forget_graphs_of_other_budgets(budget)
    compiler = _compiler(mode)
    for block in blocks:
        compiled = compiler(block.module.forward)
        if budget is not None:  # which torch looks at when it compiles, and that is in a call
            compiled = _within(_memory_budget(budget), compiled)
        block.module.forward = functools.wraps(block.module.forward)(compiled)


def parts_to_compile(blocks: Iterable[Block], held: Set[nn.Module]) -> tuple[list[Block], dict[str, str]]:
    """(what is compiled by itself, name of a block that is not compiled as one -> why).

    Args:
        held: mixtures whose experts are shared out. Of a block with one its other children are compiled.
    """
    parts: list[Block] = []
    reasons: dict[str, str] = {}
    for block in blocks:
        if held.isdisjoint(block.module.modules()):
            parts.append(block)
            continue
        children = [
            Block(f"{block.name}.{name}", child)
            for name, child in block.module.named_children()
            if held.isdisjoint(child.modules()) and next(child.parameters(), None) is not None
        ]
        parts += children
        kinds = ", ".join(dict.fromkeys(type(child.module).__name__ for child in children)) or "nothing"
        reasons[block.name] = (
            "how many tokens each of its experts gets is known only while Python runs, so of it are compiled: " + kinds
        )
    return parts, reasons


def compile_traced(
    forwards: Mapping[Block, Callable[..., Any]],
    mode: bool | str,
    group: dist.ProcessGroup,
    saved: Mapping[Block, Collection[Any]],
    around: Callable[[], Hashable] = lambda: None,
    budget: float | None = None,
    overlap: bool = False,
) -> list[TracedForward]:
    """Trace a forward of every block by itself, and compile what each rank computes of it.

    Blocks that come to the same graph share what it is compiled to. One that can't be traced runs as it is.

    Args:
        forwards: of every block, what is traced.
        group: the ranks among which tensors of blocks are sharded, along mp, or else along cp.
        saved: the operators whose results alone a block keeps for its backward pass; of others those that take least
            memory are kept.
        around: what forwards depend on beside blocks and arguments.
        budget: as that of `apply_compile`.
        overlap: whether matrices are multiplied while what they are multiplied with is gathered, or their products are
            scattered, along sequences. Needs CUDA.

    Returns:
        what stands in the place of the forwards.
    """
    if overlap:
        let_ranks_reach_memory(group)
    compile_graph = _Shared(_compiler(mode, overlap))
    within = nullcontext() if budget is None else _memory_budget(budget)
    all_traced = []
    for block, forward in forwards.items():
        traced = TracedForward(block, forward, group, compile_graph, saved.get(block), around, within)
        block.module.forward = functools.wraps(block.module.forward)(traced)
        all_traced.append(traced)
    return all_traced


def _compiler(mode: bool | str, overlap: bool = False) -> Callable[[Any], Any]:
    named = "default" if mode is True else str(mode)
    if overlap:  # torch.compile takes a mode or options
        return functools.partial(torch.compile, options=options_to_overlap(named))
    return functools.partial(torch.compile, mode=named)


def _memory_budget(share: float) -> AbstractContextManager[None]:
    # What it changes takes a second to import, a tenth of the start of every process.
    from autolaunch_strategies.torch_private.memory_budget import MemoryBudget

    return MemoryBudget(share)


def _forget_graphs_of_other_budgets(budget: float | None) -> None:
    """torch finds graphs again by the code that they were made of, for another model of this process, too."""
    global _BUDGET_OF_GRAPHS
    if budget != _BUDGET_OF_GRAPHS:
        torch.compiler.reset()
        _BUDGET_OF_GRAPHS = budget


_BUDGET_OF_GRAPHS: float | None = None


def _within(context: AbstractContextManager[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with context:
            return function(*args, **kwargs)

    return run


class _Shared:
    """Compiles each of several equal graphs once."""

    def __init__(self, compiler: Callable[[Any], Any]) -> None:
        self.compiler = compiler
        self._compiled: dict[Hashable, Callable[..., Any]] = {}

    def __call__(self, graph: torch.fx.GraphModule) -> Callable[..., Any]:
        if any(node.op == "get_attr" for node in graph.graph.nodes):  # constants of its own
            return self.compiler(graph)
        inputs = [node.meta.get("val") for node in graph.graph.nodes if node.op == "placeholder"]
        key = (
            graph.code,
            tuple(
                (item.shape, item.stride(), item.dtype, item.device) if isinstance(item, torch.Tensor) else item
                for item in inputs
            ),
        )
        if key not in self._compiled:
            self._compiled[key] = self.compiler(graph)
        return self._compiled[key]
