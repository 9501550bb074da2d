"""Gradients of gradients of sharded modules: penalties on gradients, forces that are gradients of an energy.

What a backward pass computes that is to be differentiated itself (`create_graph=True`) has saved whole parameters. The
pass that differentiates it begins with them, before it comes to any module of the forward pass that would have
`fully_shard` gather them again: had they been freed, it would read freed memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction
from torch.multiprocessing.reductions import StorageWeakRef

from autolaunch_strategies.torch_private.backward import AfterBackward, adds_to_any, is_differentiating
from autolaunch_strategies.torch_private.fsdp import (
    abandon_several_backwards,
    begin_several_backwards,
    end_several_backwards,
    parameter_groups,
)


class SecondDerivatives:
    """Keeps the parameters of a sharded module whole from a backward pass that may be differentiated until it has been.

    Passes until then may go through a module any number of times, by what was computed forward and by what was computed
    backward, so gradients are exchanged at their ends. A pass that adds to gradients (`Tensor.backward`) keeps nothing:
    they are exchanged, which can't be differentiated.

    Args:
        root: the outermost sharded module, initialised.
        exchanges: whether a backward pass of this moment reduce-scatters gradients, and whether it sums them over
            replicas.
    """

    def __init__(self, root: nn.Module, exchanges: Callable[[], tuple[bool, bool]]) -> None:
        assert isinstance(root, FSDPModule)
        self._root, self._exchanges = root, exchanges
        self._context: Any = root._get_fsdp_state()._state_ctx
        self._groups = [group for state in self._context.all_states for group in parameter_groups(state)]
        self._frees_after_forward: list[Any] = []
        """`post_forward_mesh_info` of each group, by which it frees after its forward pass; taken from it meanwhile."""
        self._marks: list[StorageWeakRef] = []
        """Saved by what may be differentiated, and let go with all else that it has saved."""
        self._follows = False
        self._after = AfterBackward(self._end)
        _mark_gradients()
        for group in self._groups:
            group.post_backward = self._noticed(group, group.post_backward)
            group.marked = self._marked

    @property
    def is_kept(self) -> bool:
        """Whether parameters are kept whole for a backward pass that has not ended."""
        return bool(self._frees_after_forward)

    def forget(self) -> None:
        """No backward pass follows. What is whole may be freed."""
        if not self.is_kept:
            return
        if self._follows:  # it was left by an error
            abandon_several_backwards(self._root, self._exchanges()[0])
        self._root.set_reshard_after_backward(True)
        self._free_after_forward()

    def _noticed(self, group: Any, end_module: Callable[..., None]) -> Callable[..., None]:
        def post_backward(*unused: Any) -> None:
            if is_differentiating():
                if torch.is_grad_enabled():
                    self._begin()
                elif self.is_kept:
                    self._follow()
                if self.is_kept:  # what accumulates has set it for all passes in the meantime
                    group.reshard_after_backward = False
            end_module(*unused)

        return post_backward

    def _marked(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """A gradient of what is computed from arguments of a module, to be differentiated."""
        if not self.is_kept or gradient is None or not gradient.requires_grad:
            return gradient
        mark = torch.empty(1)
        self._marks.append(StorageWeakRef(mark.untyped_storage()))
        marked: torch.Tensor = _Marked.apply(gradient, mark)
        return marked

    def _begin(self) -> None:
        """A backward pass that may be differentiated has come to a module."""
        if self.is_kept or not self._context.is_last_backward:  # of several nothing is freed
            return
        gathered = (item for group in self._groups for item in group.fsdp_params if hasattr(item, "_unsharded_param"))
        if adds_to_any(item._unsharded_param for item in gathered):
            return
        self._root.set_reshard_after_backward(False)
        for group in self._groups:
            self._frees_after_forward.append(group.post_forward_mesh_info)
            group.post_forward_mesh_info = None

    def _follow(self) -> None:
        """A backward pass that is not differentiated has come to a module."""
        if self._follows:
            return
        if not self._context.is_last_backward:  # others follow, and whoever counts them frees
            self._free_after_forward()
            return
        self._follows = True
        begin_several_backwards(self._root)
        self._after.arm()

    def _end(self) -> None:
        exchange, all_reduce = self._exchanges()
        self._marks = [mark for mark in self._marks if not mark.expired()]
        if not self._marks:  # else it was retained, or this pass was one of something else
            self._free_after_forward()
        end_several_backwards(self._root, exchange, all_reduce, free=not self.is_kept)
        self._follows = False

    def _free_after_forward(self) -> None:
        for group, info in zip(self._groups, self._frees_after_forward, strict=True):
            group.post_forward_mesh_info = info
        self._frees_after_forward.clear()
        self._marks.clear()
        self._follows = False


class _Marked(torch.autograd.Function):
    """The same tensor, in a graph that keeps `mark` as long as it can be differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: torch.Tensor, mark: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(context: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
        context.save_for_backward(inputs[1])

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def _mark_gradients() -> None:
    """Let every group with `marked` see the gradients that a backward pass to be differentiated leaves it with."""
    function: Any = RegisterPostBackwardFunction
    own = function.backward
    if getattr(own, "marks", False):
        return

    def backward(context: Any, *gradients: Any) -> Any:
        results = own(context, *gradients)
        marked = getattr(context.param_group, "marked", None)
        if marked is None or not torch.is_grad_enabled():
            return results
        return tuple(map(marked, results))

    vars(backward)["marks"] = True
    function.backward = staticmethod(backward)
