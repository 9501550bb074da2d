"""What `fully_shard` does between the calls that it makes public."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction


def keep_absent_gradients() -> None:
    """Let arguments that a sharded module does not use have no gradient, where `fully_shard` gives them zeros.

    Its zeros are plain also where the argument is a DTensor, to whose other gradients they can't be added.
    """
    function: Any = RegisterPostBackwardFunction
    has_setup = function.setup_context is not torch.autograd.Function.setup_context  # torch 2.11 has none
    name = "setup_context" if has_setup else "forward"
    own = getattr(function, name)
    if getattr(own, "keeps_absent", False):
        return

    def keeping(context: Any, *args: Any) -> Any:
        context.set_materialize_grads(False)
        return own(context, *args)

    vars(keeping)["keeps_absent"] = True
    setattr(function, name, staticmethod(keeping))


def initialise_fsdp(root: nn.Module) -> None:
    """Make `root` the outermost sharded module now, not at its first forward.

    Blocks may then be called by themselves (a callback that runs part of the model) before the first step.
    """
    assert isinstance(root, FSDPModule)
    root._get_fsdp_state()._lazy_init()


def end_left_forward(module: nn.Module) -> None:
    """Let a forward of `module` that an exception ended count as ended: until then nothing of it is freed."""
    assert isinstance(module, FSDPModule)
    state = module._get_fsdp_state()
    if state._state_ctx.iter_forward_root is state:
        state._state_ctx.iter_forward_root = None
    for item in (state, state._fsdp_param_group):
        if item is not None and item._training_state == TrainingState.FORWARD:
            item._training_state = TrainingState.IDLE


_ahead_of_training = ContextVar("_ahead_of_training", default=False)
"""Whether what is gathered will be used by a forward pass that trains."""


def gathers_for_training() -> bool:
    """Whether what a forward pass gathers now is used by one that trains: itself, or the one that follows it."""
    return torch.is_grad_enabled() or _ahead_of_training.get()


@contextmanager
def gathered_once(module: nn.Module) -> Iterator[None]:
    """Within it forwards of `module` gather together what one does, and leave it gathered for the one that follows.

    It is entered with gradients as that one has them; those within may have none.

    To ranks that run `module` once in the meantime nothing is different: neither are there other collectives, nor does
    the order change in which the backward pass gathers again.
    """
    groups = [
        group
        for part in module.modules()
        if isinstance(part, FSDPModule)
        for group in parameter_groups(part._get_fsdp_state())
    ]
    frees = [group.post_forward_mesh_info for group in groups]
    orders = {id(group.comm_ctx): group.comm_ctx.post_forward_order for group in groups}
    lengths = {key: len(order) for key, order in orders.items()}
    places = [len(group._post_forward_indices) for group in groups]
    for group in groups:
        group.post_forward_mesh_info = None
    ahead = _ahead_of_training.set(gathers_for_training())
    try:
        yield
    finally:
        _ahead_of_training.reset(ahead)
        for group, info, count in zip(groups, frees, places, strict=True):
            group.post_forward_mesh_info = info
            del group._post_forward_indices[count:]
        for key, order in orders.items():
            del order[lengths[key] :]


def keep_through_nested_forwards(root: nn.Module) -> None:
    """Let a forward of `root` within its own (`training_step` calls the model as `self(batch)`) free nothing.

    `fully_shard` takes the end of the inner one for the end of both, and the outer one then frees what is kept for the
    backward pass, so that it has to be gathered again.
    """
    assert isinstance(root, FSDPModule)
    state = root._get_fsdp_state()
    nested: list[bool] = []

    def begin(module: nn.Module, args: Any) -> None:
        nested.append(state._training_state == TrainingState.FORWARD)

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if nested.pop():
            for item in (state, *parameter_groups(state)):
                item._training_state = TrainingState.FORWARD

    root.register_forward_pre_hook(begin, prepend=True)
    root.register_forward_hook(end, always_call=True)


def complete_after_backward(root: nn.Module, loss: torch.Tensor) -> None:
    """Let the backward pass of `loss` exchange the gradients of `root`'s own parameters at its end.

    `fully_shard` arranges that for what the forward of `root` returns; `loss` was made outside of it.
    """
    assert isinstance(root, FSDPModule)
    if loss.requires_grad:
        loss.register_hook(root._get_fsdp_state()._pre_backward)


def begin_several_backwards(root: nn.Module) -> None:
    """Let backward passes only add up what they compute in the parameters of `root`, until `end_several_backwards`."""
    assert isinstance(root, FSDPModule)
    root.set_is_last_backward(False)
    root.set_reshard_after_backward(False)
    root.set_requires_gradient_sync(False)


def end_several_backwards(root: nn.Module, exchange: bool, all_reduce: bool, free: bool = True) -> None:
    """Do once what `fully_shard` does at the end of a backward pass.

    Args:
        exchange: reduce-scatter gradients; if not, they stay with the whole parameters.
        all_reduce: sum them over replicas, too, where there are several.
        free: whole parameters, now and after each backward pass from now on.
    """
    assert isinstance(root, FSDPModule)
    root.set_is_last_backward(True)
    root.set_reshard_after_backward(free)
    root.set_requires_gradient_sync(exchange)
    if exchange:
        root.set_requires_all_reduce(all_reduce)
    state = root._get_fsdp_state()
    context: Any = state._state_ctx
    if getattr(context, "manual_backward_finalization_active", False) is None:
        context.manual_backward_finalization_active = False  # torch 2.15: no pass has begun that would say it
    for item in state._state_ctx.all_states:
        for group in parameter_groups(item):
            group.post_backward()
    state._root_post_backward_final_callback()


def exchange_after_last_backward(units: Iterable[nn.Module], exchange: bool, all_reduce: bool) -> None:
    """Do for some sharded modules what `end_several_backwards` does for all, since no backward pass of them follows.

    Not for those with parameters that were used outside of them: what follows such a use may still be differentiated.

    Args:
        units: as `fully_shard` was given them, in the order of their backward passes.
        exchange: as in `end_several_backwards`.
        all_reduce: as in `end_several_backwards`.
    """
    for unit in units:
        assert isinstance(unit, FSDPModule)
        groups = parameter_groups(unit._get_fsdp_state())
        if any(_is_used_outside(group) for group in groups):
            continue
        unit.set_reshard_after_backward(True, recurse=False)
        unit.set_requires_gradient_sync(exchange, recurse=False)
        if exchange:
            unit.set_requires_all_reduce(all_reduce, recurse=False)
        for group in groups:
            group.post_backward()


def abandon_several_backwards(root: nn.Module, exchange: bool) -> None:
    """What `end_several_backwards` does, after an error: no rank is waited for, and what was not exchanged is dropped.

    Args:
        exchange: whether later backward passes exchange gradients.
    """
    assert isinstance(root, FSDPModule)
    end_several_backwards(root, exchange=False, all_reduce=False)
    root.set_requires_gradient_sync(exchange)
    for state in root._get_fsdp_state()._state_ctx.all_states:
        for group in parameter_groups(state):
            for parameter in group.fsdp_params:
                if accumulates_apart(parameter):
                    parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):  # not before it has been gathered once
                    parameter._unsharded_param.grad = None


def gather_in(root: nn.Module, parameters: set[nn.Parameter], dtype: torch.dtype) -> None:
    """Let sharded `parameters` of `root` be gathered and used in `dtype`, with gradients of the type that is stored.

    What `MixedPrecisionPolicy` does to all parameters of a module, done to some of them. Each backward pass adds its
    gradient to a sum in the type that is stored, as autocast does where it casts: only products are in `dtype`.

    Args:
        root: the outermost sharded module, initialised, of which nothing has been gathered yet.
        parameters: as they are sharded; those that are not stored in fp32 stay as they are.
    """
    assert isinstance(root, FSDPModule)
    for state in root._get_fsdp_state()._state_ctx.all_states:
        for group in parameter_groups(state):
            chosen = [
                parameter
                for parameter in group.fsdp_params
                if parameter.sharded_param in parameters and parameter.orig_dtype == torch.float32
            ]
            for parameter in chosen:
                parameter.init_dtype_attrs = _with_type(parameter.init_dtype_attrs, dtype)
                if accumulates_apart(parameter):  # else its gradients have the type that is stored
                    parameter.init_unsharded_param = _summing_gradients(parameter, parameter.init_unsharded_param)
            if chosen:
                _reduce_in(group, torch.float32)
                group._init_mp_dtypes()


def _reduce_in(group: Any, dtype: torch.dtype) -> None:
    """Let gradients of a group be reduced in `dtype`; since torch 2.15 each parameter has a policy of its own."""
    for holder in [group] if hasattr(group, "mp_policy") else group.fsdp_params:
        holder.mp_policy = replace(holder.mp_policy, reduce_dtype=dtype)


def _with_type(initialise: Callable[[Any], None], dtype: torch.dtype) -> Callable[[Any], None]:
    def initialise_types(policy: Any) -> None:  # at each call of `unshard`
        initialise(replace(policy, param_dtype=dtype))

    return initialise_types


def _summing_gradients(parameter: Any, initialise: Callable[[], None]) -> Callable[[], None]:
    def add(unsharded: torch.Tensor) -> None:
        if unsharded.grad is None:  # put off to a pass of its own
            return
        gradient, total = unsharded.grad.to(parameter.reduce_dtype), parameter.unsharded_accumulated_grad
        parameter.unsharded_accumulated_grad = gradient if total is None else total.add_(gradient)
        unsharded.grad = None

    def initialise_unsharded() -> None:
        is_first = not hasattr(parameter, "_unsharded_param")
        initialise()
        if is_first:
            unsharded = parameter._unsharded_param
            needs_gradient = unsharded.requires_grad
            # Hooks are for leaves that need gradients, as one that is frozen now may do later.
            unsharded.requires_grad_().register_post_accumulate_grad_hook(add)
            unsharded.requires_grad_(needs_gradient)

    return initialise_unsharded


def follow_requires_grad(module: nn.Module) -> None:
    """Let gathered parameters of `module` need gradients as its sharded ones do, which is what people switch."""
    assert isinstance(module, FSDPModule)
    for group in parameter_groups(module._get_fsdp_state()):
        for parameter in group.fsdp_params if group.is_unsharded else ():
            parameter.unsharded_param.requires_grad_(parameter.sharded_param.requires_grad)


def is_in_forward(root: nn.Module) -> bool:
    """Whether the forward of `root` is running."""
    assert isinstance(root, FSDPModule)
    return root._get_fsdp_state()._training_state == TrainingState.FORWARD


class UseOutside:
    """A sharded parameter that code uses which is not the forward of the module that gathers it.

    Args:
        state, group, parameter: what `fully_shard` knows of the module, of what it gathers together, of the parameter.
    """

    def __init__(self, state: Any, group: Any, parameter: Any) -> None:
        self._state, self._group, self._parameter = state, group, parameter

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is this parameter, sharded."""
        return self._parameter.sharded_param is tensor

    def gathered(self) -> torch.Tensor:
        """The whole parameter. It stays until the end of the backward pass, if there is one. Collective.

        Backward passes then exchange the gradients of its module at their end: `fully_shard` would do so, and free the
        parameter, as soon as the backward pass of the module's own forward has ended, which what used it before has
        yet to follow.
        """
        (module,) = self._state._modules
        if torch.is_grad_enabled():
            self._group._register_post_backward_hook = lambda args, kwargs: (args, kwargs)  # see `_is_used_outside`
            module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
        follow_requires_grad(module)
        return self._parameter.unsharded_param

    def prepare_backward(self, output: torch.Tensor) -> None:
        """Let a backward pass from `output`, which was computed with it, exchange its gradient."""
        output.register_hook(self._state._pre_backward)


def _is_used_outside(group: Any) -> bool:
    return "_register_post_backward_hook" in vars(group)


def sharded_parameters(root: nn.Module) -> Iterator[UseOutside]:
    """All parameters that `root` and modules in it have sharded."""
    assert isinstance(root, FSDPModule)
    for state in root._get_fsdp_state()._state_ctx.all_states:
        for group in parameter_groups(state):
            for parameter in group.fsdp_params:
                yield UseOutside(state, group, parameter)


def accumulates_apart(parameter: Any) -> bool:
    """Whether gradients of several backward passes add up beside those of autograd, as before torch 2.15."""
    return hasattr(parameter, "accumulate_unsharded_grad_if_needed")


def parameter_groups(state: Any) -> list[Any]:
    """What a sharded module gathers together: one group, or none, before torch 2.13 allowed for several."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
