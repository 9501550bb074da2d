"""Compilation of blocks, in place: names of parameters stay what they are, hooks around a block stay eager."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from autolaunch_strategies.model.blocks import Block
from autolaunch_strategies.training.traced_block import TracedForward


def apply_compile(blocks: Iterable[Block], mode: bool | str) -> None:
    """Compile the forward of every block by itself. Nothing in it is sharded along mp."""
    compiler = _compiler(mode)
    for block in blocks:
        block.module.forward = functools.wraps(block.module.forward)(compiler(block.module.forward))


def compile_traced(
    forwards: Mapping[Block, Callable[..., Any]],
    mode: bool | str,
    group: dist.ProcessGroup,
    saved: Mapping[Block, Collection[Any]],
    around: Callable[[], Hashable] = lambda: None,
) -> None:
    """Trace a forward of every block by itself, and compile what each rank of mp computes of it.

    Blocks that come to the same graph share what it is compiled to. One that can't be traced runs as it is.

    Args:
        forwards: of every block, what is traced.
        group: the ranks of mp.
        saved: the operators whose results alone a block keeps for its backward pass; of others those that take least
            memory are kept.
        around: what forwards depend on beside blocks and arguments.
    """
    compile_graph = _Shared(_compiler(mode))
    for block, forward in forwards.items():
        traced = TracedForward(block, forward, group, compile_graph, saved.get(block), around)
        block.module.forward = functools.wraps(block.module.forward)(traced)


def _compiler(mode: bool | str) -> Callable[[Any], Any]:
    options: dict[str, Any] = {} if mode is True else {"mode": mode}
    return functools.partial(torch.compile, **options)


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
