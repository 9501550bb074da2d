"""Sharded parameters that are used outside of the module that gathers them.

A penalty on all weights, a weight that the loss reads, a layer within a block that the model calls by itself: there the
parameter is a DTensor among plain tensors. `GathersOnUse` sees each such use and puts the gathered parameter in its
place, so that it is what it would be on one device: whole on every rank, its gradient averaged with all others.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from autolaunch_strategies.torch_private.calls import intercept_calls, intercepted, run_call
from autolaunch_strategies.torch_private.fsdp import UseOutside, is_in_forward, sharded_parameters
from autolaunch_strategies.torch_private.modes import changes_first, is_active, is_innermost, pop_mode, push_mode

_QUESTIONS = frozenset(
    ("size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "stride",
     "storage_offset", "is_contiguous", "get_device", "type", "requires_grad_", "retain_grad", "register_hook",
     "register_post_accumulate_grad_hook", "__repr__", "__hash__", "__len__", "__deepcopy__", "__reduce_ex__",
     "__dir__", "__format__")
)  # fmt: skip
"""Methods of tensors that do not look at values."""
_COMPUTED_ATTRIBUTES = tuple(getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag"))


class GathersOnUse(TorchFunctionMode):
    """Active around the modules that gather their own parameters, and not within them, where it would cost time.

    Acts where gradients are computed and within the forward of `root` and of its parts. Optimizers and other code under
    ``torch.no_grad()`` see what is sharded; so does what changes a parameter in place.

    Args:
        root: the outermost sharded module.
    """

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self._root = weakref.ref(root)  # plain loops never leave the mode
        self._forwards = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within it uses are seen."""
        if is_active(self):
            yield
            return
        push_mode(self)
        try:
            yield
        finally:
            if is_innermost(self):  # what leaves a stage of a pipeline may have left a module without its hook
                pop_mode()

    def leave_within(self, module: nn.Module) -> None:
        """Let uses within the forward of `module`, which gathers its parameters, go unseen. Hooks of it come first."""
        left: list[bool] = []

        def begin(module: nn.Module, args: Any) -> None:
            left.append(is_innermost(self))
            if left[-1]:
                pop_mode()

        def end(module: nn.Module, args: Any, output: Any) -> None:
            if left and left.pop():
                push_mode(self)

        module.register_forward_pre_hook(begin, prepend=True)
        module.register_forward_hook(end, always_call=True)

    def act_within(self, module: nn.Module) -> None:
        """Act within the forward of `module`, too, which is a part of the root that people call by itself."""
        own_call = intercepted(module)

        def call(*args: Any, **kwargs: Any) -> Any:  # no hooks: they miss how a stage of a pipeline leaves a forward
            self._forwards += 1
            try:
                return own_call(*args, **kwargs) if own_call is not None else run_call(module, *args, **kwargs)
            finally:
                self._forwards -= 1

        intercept_calls(module, call)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (_has_sharded(args) or _has_sharded(kwargs.values())) and self._is_use(func, args):
            return self._on_gathered(func, args, kwargs)
        return func(*args, **kwargs)

    def _is_use(self, func: Any, args: Any) -> bool:
        # What is detached outside of the forward is looked at or kept, as sharded as it is; gathering would put other
        # parameters into the module while somebody goes through them.
        is_detached, has_gradients = func is torch.Tensor.detach, torch.is_grad_enabled()
        if (is_detached and not has_gradients) or ((is_detached or not has_gradients) and not self._is_in_forward()):
            return False
        name = getattr(func, "__name__", "")
        if name in _QUESTIONS or (name in ("__get__", "__set__", "__delete__") and func not in _COMPUTED_ATTRIBUTES):
            return False
        return not (changes_first(func) and args and any(self._use_of(item) for item in _flat(args[0])))

    def _on_gathered(self, func: Any, args: Any, kwargs: Any) -> Any:
        uses: list[UseOutside] = []

        def gathered(tensor: DTensor) -> torch.Tensor:
            use = self._use_of(tensor)
            if use is None:
                return tensor
            uses.append(use)
            return use.gathered()

        output = func(*tree_map_only(DTensor, gathered, args), **tree_map_only(DTensor, gathered, kwargs))
        if uses and torch.is_grad_enabled():
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    for use in uses:
                        use.prepare_backward(tensor)
        return output

    def _use_of(self, tensor: Any) -> UseOutside | None:
        root = self._root()
        if root is None or type(tensor) is not DTensor or not isinstance(tensor, nn.Parameter):
            return None
        return next((use for use in sharded_parameters(root) if use.is_of(tensor)), None)

    def _is_in_forward(self) -> bool:
        root = self._root()
        return self._forwards > 0 or (root is not None and is_in_forward(root))


def _has_sharded(values: Iterable[Any]) -> bool:
    for value in values:  # asked for every function outside of blocks, so without an iterator of its own
        kind = type(value)
        if kind is DTensor or ((kind is list or kind is tuple) and DTensor in map(type, value)):
            return True
    return False


def _flat(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list | tuple) else (value,)
