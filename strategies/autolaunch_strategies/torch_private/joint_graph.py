"""A function traced together with its backward pass (torch's AOTAutograd), as two graphs of plain operators."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import CheckpointPolicy

Compile = Callable[[torch.fx.GraphModule], Callable[..., Any]]


def traced_jointly(
    function: Callable[..., list[torch.Tensor]],
    compile_graph: Compile,
    saved: Collection[Any] | None = None,
    budget: AbstractContextManager[None] = nullcontext(),  # noqa: B008  # it has no state
) -> Callable[..., Any]:
    """`function` as it is traced at its first call, with gradients; later calls run the graphs alone.

    Nothing checks that a later call would take the same way: that is the caller's to know. Which intermediate results
    are kept for the backward pass, and which are computed again, is torch's choice of the least memory.

    Args:
        function: takes and returns plain tensors; what it does with others inside is traced as what that comes to.
        compile_graph: is given the graphs, the forward one first, and returns what runs in their place.
        saved: operators (`torch.ops.aten.mm`) whose results alone are kept; None leaves the choice to torch.
        budget: within which torch chooses.

    Raises:
        Exception: at the first call: whatever `function` raises on tensors without values.
    """
    # Imported here, as they take a fifth of a second of every start, and few runs compile.
    from torch._functorch.aot_autograd import aot_function, make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def compiled(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        return make_boxed_func(compile_graph(gm))

    def partitioned(graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        if saved is not None:
            _say_what_is_kept(graph, saved)
        with budget:
            return min_cut_rematerialization_partition(graph, *args, **kwargs)

    return aot_function(function, fw_compiler=compiled, bw_compiler=compiled, partition_fn=partitioned)


def _say_what_is_kept(graph: torch.fx.GraphModule, saved: Collection[Any]) -> None:
    """Mark the operators of the forward pass as selective checkpointing does."""
    backward: set[torch.fx.Node] = set()
    for node in graph.graph.nodes:
        if "tangents" in str(node.target) or not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
        elif node.target is operator.getitem:  # of an operator with several results
            node.meta |= {key: node.args[0].meta[key] for key in ("recompute", "ac_graph_id")}
        elif node.op == "call_function":
            kept = getattr(node.target, "overloadpacket", None) in saved
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
            node.meta["ac_graph_id"] = 0


def each_operator_is_seen() -> bool:
    """Whether something looks at every operator that runs now: tracing, shapes alone, selective recomputation."""
    return _get_current_dispatch_mode() is not None


def is_eager_forced() -> bool:
    """Whether nothing that is compiled may run now (`torch.compiler.set_stance("force_eager")`)."""
    return torch._dynamo.eval_frame._stance.stance == "force_eager"
