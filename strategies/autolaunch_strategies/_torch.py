"""Every private or version-dependent torch name that the engine uses, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.overrides import TorchFunctionMode


def flatten_mesh(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """The 1-D sub-mesh over `axes` taken together, outermost first, named `a_b`."""
    if len(axes) == 1:
        return mesh[axes[0]]
    return mesh[axes]._flatten("_".join(axes))


def local_index(tensor: DTensor) -> tuple[slice, ...]:
    """Which part of the whole tensor this rank holds, as one slice per dim."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))


def local_shape(shape: Iterable[int], mesh: DeviceMesh, placements: Iterable[Any]) -> tuple[int, ...]:
    """The shape of this rank's part of a DTensor of the given shape."""
    return tuple(compute_local_shape_and_global_offset(torch.Size(shape), mesh, tuple(placements))[0])


def storage_key(tensor: torch.Tensor) -> int:
    """A number that two tensors have in common exactly when they share memory (true on meta, too)."""
    return tensor.untyped_storage()._cdata


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
            for item in (state, *_parameter_groups(state)):
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


def end_several_backwards(root: nn.Module, exchange: bool, all_reduce: bool) -> None:
    """Do once what `fully_shard` does at the end of a backward pass.

    Args:
        exchange: reduce-scatter gradients; if not, they stay with the whole parameters.
        all_reduce: sum them over replicas, too, where there are several.
    """
    assert isinstance(root, FSDPModule)
    root.set_is_last_backward(True)
    root.set_reshard_after_backward(True)
    root.set_requires_gradient_sync(exchange)
    if exchange:
        root.set_requires_all_reduce(all_reduce)
    state = root._get_fsdp_state()
    for item in state._state_ctx.all_states:
        for group in _parameter_groups(item):
            group.post_backward()
    state._root_post_backward_final_callback()


def follow_requires_grad(module: nn.Module) -> None:
    """Let gathered parameters of `module` need gradients as its sharded ones do, which is what people switch."""
    assert isinstance(module, FSDPModule)
    for group in _parameter_groups(module._get_fsdp_state()):
        for parameter in group.fsdp_params if group.is_unsharded else ():
            parameter.unsharded_param.requires_grad_(parameter.sharded_param.requires_grad)


def _parameter_groups(state: Any) -> list[Any]:
    """What a sharded module gathers together: one group, or none, before torch 2.13 allowed for several."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def process_group_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Let collectives of `group` fail after `seconds` without an answer."""
    from datetime import timedelta

    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


@contextmanager
def saved_random_state(device: torch.device) -> Iterator[None]:
    """Run a block with torch's random state put back afterwards, on the CPU and on `device`."""
    devices = [] if device.type in ("cpu", "meta") else [device]
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        yield


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's random numbers on the CPU and on `device`, where it is the current one of its kind.

    Unlike `torch.manual_seed` it leaves all other devices alone: for each kind that is not in use yet, that one keeps
    a written stack trace, which takes longer than a small forward pass.
    """
    torch.default_generator.manual_seed(seed)
    if device.type not in ("cpu", "meta"):
        torch.get_device_module(device).manual_seed(seed)


def is_random(operator: Any) -> bool:
    """Whether an `OpOverload` draws random numbers."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def writes_to(operator: Any) -> list[str]:
    """Names of the arguments that an `OpOverload` changes in place."""
    return [
        argument.name
        for argument in operator._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Within it new tensors have shapes, a device and no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode, log = FakeTensorMode(allow_non_fake_inputs=True), logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)  # it writes whole tracebacks of errors that are caught
    try:
        with mode:
            yield
    finally:
        log.setLevel(level)


class AfterBackward:
    """Calls a function once at the end of every backward pass in which `arm` was called (by hooks of gradients)."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._armed = -1

    def arm(self, *_: Any) -> None:
        """Called within a backward pass, any number of times. One that failed halfway leaves nothing behind."""
        current = torch._C._current_graph_task_id()
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


def is_active(mode: TorchFunctionMode) -> bool:
    """Whether calls of torch functions go through `mode` right now."""
    return any(active is mode for active in torch.overrides._get_current_function_mode_stack())


def intercept_calls(module: nn.Module, handler: Callable[..., Any] | None) -> None:
    """Let `module(...)` call `handler(...)` instead, on this one object; None ends it.

    `run_call` is then what the call would have done.
    """
    if handler is None:
        module.__dict__.pop("_compiled_call_impl", None)
    else:
        module.__dict__["_compiled_call_impl"] = handler


def intercepted(module: nn.Module) -> Callable[..., Any] | None:
    """What stands in the place where `intercept_calls` puts its handler (`module.compile()` uses it, too)."""
    return module.__dict__.get("_compiled_call_impl")


def run_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What `module(...)` does, hooks included, even if its calls are intercepted."""
    return module._call_impl(*args, **kwargs)


def has_forward_hooks(module: nn.Module, besides: int = 0) -> bool:
    """Whether someone is shown what `module` returns, not counting `besides` hooks."""
    return len(module._forward_hooks) > besides


def show_output(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Show the forward hooks of `module` an output as if it had been called; what they return does not count."""
    for key, hook in list(module._forward_hooks.items()):
        if key in module._forward_hooks_with_kwargs:
            hook(module, args, kwargs, output)
        else:
            hook(module, args, output)


def pipeline_order(
    name: str, ranks: int, microbatches: int, virtual_stages: int
) -> tuple[tuple[tuple[int, str, int], ...], ...]:
    """Per rank the (stage, kind, microbatch) of a schedule of torch.distributed.pipelining, in order.

    Kinds are F, B (all of the backward), I (only that for inputs) and W (only that for weights); idle steps are left
    out, and a forward and a backward that torch runs as one follow each other.

    Args:
        name: looped_bfs, interleaved_1f1b, interleaved_zero_bubble, zbv_zero_bubble or dualpipev.
    """
    from types import SimpleNamespace

    from torch.distributed.pipelining import schedules

    class_of = {
        "looped_bfs": schedules.ScheduleLoopedBFS,
        "interleaved_1f1b": schedules.ScheduleInterleaved1F1B,
        "interleaved_zero_bubble": schedules.ScheduleInterleavedZeroBubble,
        "zbv_zero_bubble": schedules.ScheduleZBVZeroBubble,
        "dualpipev": schedules.ScheduleDualPipeV,
    }
    # A table depends on these numbers alone, and real stages would need process groups.
    shape = {"num_stages": ranks * virtual_stages, "group_size": ranks, "group_rank": 0, "submod": None}
    stages: Any = [SimpleNamespace(**shape) for _ in range(virtual_stages)]
    order = class_of[name](stages, microbatches).pipeline_order
    return tuple(
        tuple(
            (part.stage_index, part.computation_type.value, part.microbatch_index)
            for action in order[rank]
            if action is not None
            for part in action.sub_actions or (action,)
        )
        for rank in range(ranks)
    )


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile(module)` made this module."""
    from torch._dynamo import OptimizedModule

    return isinstance(module, OptimizedModule)


@contextmanager
def attention_replaced(attention: Callable[..., Any]) -> Iterator[None]:
    """Within it functions of torch that are written in Python call `attention` for scaled dot product attention.

    Function modes don't see those calls: a mode is taken away while a function of torch runs that it let through.
    """
    functional: Any = torch.nn.functional
    original = functional.scaled_dot_product_attention

    def answered(*args: Any, **kwargs: Any) -> Any:
        functional.scaled_dot_product_attention = original  # what answers may use it
        try:
            return attention(*args, **kwargs)
        finally:
            functional.scaled_dot_product_attention = answered

    functional.scaled_dot_product_attention = answered
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """Within it tensors are made that are kept: real ones, whatever mode (fake, inference, device) is active."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode(False):
        yield


def all_gather_single(gathered: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Equal parts of all ranks, one after the other along the first dim; torch 2.13 has a new name for it."""
    function: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    function(gathered, own, group=group)


def reduce_scatter_single(own: torch.Tensor, parts: torch.Tensor, group: dist.ProcessGroup) -> None:
    """This rank's part of the sum over ranks, parts along the first dim; torch 2.13 has a new name for it."""
    function: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    function(own, parts, group=group)


def attention_on_cpu(q: Any, k: Any, v: Any, causal: bool, bias: Any, scale: float) -> tuple[Any, Any]:
    """The attention kernel of CPUs: output [b, h, s_q, d] and log-sum-exp [b, h, s_q]; fewer key heads allowed."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)


def attention_on_cpu_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool, bias: Any, scale: float
) -> tuple[Any, Any, Any]:
    """Gradients of q, k and v of `attention_on_cpu`."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
    )


def flash_attention(q: Any, k: Any, v: Any, causal: bool, scale: float) -> tuple[Any, Any]:
    """The flash kernel of GPUs: output [b, h, s_q, d] and log-sum-exp [b, h, s_q]; fewer key heads allowed."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def flash_attention_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool, scale: float
) -> tuple[Any, Any, Any]:
    """Gradients of q, k and v of `flash_attention`."""
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the random state, read with dropout only
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused, scale=scale
    )


def efficient_attention(q: Any, k: Any, v: Any, causal: bool, bias: Any, scale: float) -> tuple[Any, Any]:
    """The memory-efficient kernel of GPUs: output [b, h, s_q, d_v] and log-sum-exp [b, h, s_q, or more]."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal, scale=scale)
    return out, lse


def efficient_attention_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool, bias: Any, scale: float
) -> tuple[Any, Any, Any]:
    """Gradients of q, k and v of `efficient_attention`; `lse` as long as that returned it."""
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # the random state, read with dropout only
    wanted = [True, True, True, False]
    return torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, bias, out, lse, unused, unused, 0.0, wanted, causal, scale=scale
    )[:3]


def start_all_gather(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Start gathering flat tensors of all ranks, one after the other; wait for what is returned."""
    # torch 2.13 has a new name for it and warns about the old one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(received, sent, group=group, async_op=True)


def join_meshes(*meshes: DeviceMesh) -> DeviceMesh:
    """One mesh with the dims of several, parts of the same mesh, in whatever order that one has them."""
    return DeviceMesh._concatenate(list(meshes))


def group_called(name: str) -> dist.ProcessGroup:
    """The process group whose `group_name` is `name`."""
    resolve: Any = dist.distributed_c10d._resolve_process_group
    return resolve(name)


def is_differentiating() -> bool:
    """Whether a backward pass is on its way in this thread."""
    return torch._C._current_graph_task_id() != -1


without_torch_functions = torch._C.DisableTorchFunction
"""A context in which neither function modes nor subclasses of tensors are asked: attributes are those of the object."""


def change_forward_hooks(module: nn.Module, change: Callable[[Callable], Callable | None]) -> None:
    """Put what `change` returns in the place of each hook on the output of `module`; None leaves it."""
    for key, hook in module._forward_hooks.items():
        changed = change(hook)
        if changed is not None:
            module._forward_hooks[key] = changed
