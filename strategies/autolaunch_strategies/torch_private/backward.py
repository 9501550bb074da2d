"""The backward pass: run with function modes, followed to its end, recognised."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge


class AfterBackward:
    """Calls a function once at the end of every backward pass in which `arm` was called (by hooks of gradients)."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._armed = -1

    def arm(self, *_: Any) -> None:
        """Called within a backward pass, any number of times. One that failed halfway leaves nothing behind."""
        current = number_of_backward()
        if current != self._armed:
            self._armed = current
            torch.autograd.Variable._execution_engine.queue_callback(self._function)


def run_backward(
    loss: torch.Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    """As `Tensor.backward`, but function modes stay active while it runs (and see what is computed again)."""
    chosen = () if inputs is None else (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    if inputs is not None and not chosen:
        raise RuntimeError("`inputs` argument to `backward()` cannot be empty.")
    gradients = torch.autograd._make_grads((loss,), (gradient,), is_grads_batched=False)
    retain = create_graph if retain_graph is None else retain_graph
    torch.autograd.graph._engine_run_backward(
        (loss,), gradients, retain, create_graph, chosen, allow_unreachable=True, accumulate_grad=True
    )


def run_backward_of(outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """As `torch.autograd.backward`, but function modes stay active, as in `run_backward` (torch 2.13 leaves them)."""
    torch.autograd.graph._engine_run_backward(
        tuple(outputs), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def works_in_forks() -> bool:
    """Whether forks of this process can run backward passes.

    Where torch knows devices (of builds for GPUs, fake tensors make it know one), the first backward pass begins a
    thread for each, and from then on autograd refuses to work in forks.
    """
    return not any(_thread_name(thread).startswith("pt_autograd") for thread in Path("/proc/self/task").iterdir())


def _thread_name(thread: Path) -> str:
    with suppress(OSError):  # it has ended since
        return (thread / "comm").read_text()
    return ""


def is_differentiating() -> bool:
    """Whether a backward pass is on its way in this thread."""
    return number_of_backward() != -1


def adds_to_any(leaves: Iterable[torch.Tensor]) -> bool:
    """Whether the backward pass that runs in this thread adds to the gradients of any of these leaves.

    `Tensor.backward` does, and `torch.autograd.grad` returns gradients, also those of leaves.
    """
    for leaf in leaves:
        if leaf.requires_grad:
            with suppress(RuntimeError):  # raised for what `torch.autograd.grad` was asked for
                if torch._C._will_engine_execute_node(get_gradient_edge(leaf).node):
                    return True
    return False


def number_of_backward() -> int:
    """The number of the backward pass that runs in this thread; -1 if none does."""
    return torch._C._current_graph_task_id()


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor, or what it is a view of, was changed in place; -1 for those of inference mode."""
    return -1 if tensor.is_inference() else tensor._version
