"""Process groups without peers, and what operators on fake tensors can't answer."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from autolaunch_strategies.torch_private.fake_results import FakeTensorsWithResults
from autolaunch_strategies.torch_private.meshes import forget_meshes
from autolaunch_strategies.torch_private.modes import outside_of_modes


@contextmanager
def pretended_group(rank: int, world_size: int) -> Iterator[None]:
    """Within it this process is `rank` of a default process group whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


@contextmanager
def meshes_outside() -> Iterator[None]:
    """Within it meshes are made and cut of real tensors, whatever mode is active: their ranks are values."""
    with ExitStack() as stack:
        for name in ("__init__", "__getitem__", "_flatten", "_concatenate"):
            if (own := getattr(DeviceMesh, name, None)) is not None:
                stack.callback(setattr, DeviceMesh, name, DeviceMesh.__dict__[name])
                setattr(DeviceMesh, name, _outside(own))
        yield


@contextmanager
def whole_shapes_outside() -> Iterator[None]:
    """Within it no mode sees how DTensors find out what an operator gives: on fake tensors of the whole shape.

    All in one mode, where they make a new one for each, and write down for it who does.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator as Propagator

    own, mode = Propagator._propagate_tensor_meta_non_cached, FakeTensorsWithResults()

    def outside(self: Propagator, op_schema: Any) -> Any:
        with outside_of_modes(), mode:
            return own(self, op_schema)

    Propagator._propagate_tensor_meta_non_cached = outside  # type: ignore[method-assign]  # there is no hook
    try:
        yield
    finally:
        Propagator._propagate_tensor_meta_non_cached = own  # type: ignore[method-assign]  # as it was


def _outside(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        with outside_of_modes():
            return function(*args, **kwargs)

    return outside


@contextmanager
def swaps_of_fakes() -> Iterator[None]:
    """Within it `torch.utils.swap_tensors` takes fake tensors, of which their mode keeps weak references."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    own = torch.utils.swap_tensors
    modes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, FakeTensorMode)]

    def swap(one: torch.Tensor, other: torch.Tensor) -> None:
        for mode in modes:
            mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
        own(one, other)

    torch.utils.swap_tensors = swap
    try:
        yield
    finally:
        torch.utils.swap_tensors = own


class WithoutCompiler(TorchDispatchMode):
    """A dispatch mode in which nothing is compiled: the compiler need not be kept out of its every call."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


_PLAIN_OR_FAKE = frozenset((torch.Tensor, torch.nn.Parameter, FakeTensor))


def is_pretended(kinds: Any) -> bool:
    """Whether an operator is called on plain or fake tensors alone: other classes take it apart first."""
    return _PLAIN_OR_FAKE.issuperset(kinds)


def device_of_fake(tensor: Any) -> torch.device | None:
    """The device that a fake tensor pretends to be on; None of a tensor that is not fake."""
    return getattr(tensor, "fake_device", None)


def group_of_collective(operator: Any, args: Any) -> dist.ProcessGroup | None:
    """The group of an operator of `c10d` or `_c10d_functional`; None of one that has none (`wait_tensor`)."""
    if operator.namespace == "c10d":
        boxed = next((item for item in args if isinstance(item, torch.ScriptObject) and _is_group(item)), None)
        return None if boxed is None else dist.ProcessGroup.unbox(boxed)
    arguments = operator._schema.arguments
    at = next((number for number, item in enumerate(arguments) if item.name == "group_name"), None)
    resolve: Any = dist.distributed_c10d._resolve_process_group
    return None if at is None or at >= len(args) else resolve(args[at])


def _is_group(item: Any) -> bool:
    return str(item._type()).endswith("ProcessGroup")


@contextmanager
def addresses_of_fakes() -> Iterator[None]:
    """Within it `data_ptr` of fake tensors tells which share memory, as it does of real ones."""
    of_tensor, of_storage = torch.Tensor.data_ptr, torch.UntypedStorage.data_ptr

    def tensor_address(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.itemsize

    def storage_address(storage: torch.UntypedStorage) -> int:
        return storage._cdata

    torch.Tensor.data_ptr = tensor_address  # type: ignore[assignment, method-assign]  # there is no hook for it
    torch.UntypedStorage.data_ptr = storage_address  # type: ignore[assignment, method-assign]  # nor for this
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # by torch itself
            yield
    finally:
        torch.Tensor.data_ptr = of_tensor  # type: ignore[method-assign]  # as it was
        torch.UntypedStorage.data_ptr = of_storage  # type: ignore[method-assign]  # as it was


def has_one_owner(tensor: Any) -> bool:
    """Whether neither a tensor nor its memory is held by anything in C++ but who asks, who has it from Python."""
    local = getattr(tensor, "_local_tensor", tensor)
    storage = local.untyped_storage()
    owners = torch._C._storage_Use_Count(storage._cdata) - local._is_view()
    own = 1 if local is not tensor else uses_of_a_gradient()
    return tensor._use_count() == uses_of_a_gradient() and local._use_count() == own and owners == 2


@functools.cache
def uses_of_a_gradient() -> int:
    """What counts as one user of a gradient that only a function of autograd has: torch 2.11 itself holds it meanwhile.

    To be asked for once outside of backward passes.
    """
    with outside_of_modes(), torch.enable_grad():
        _CountsUses.apply(torch.zeros(1, requires_grad=True)).neg().neg().sum().backward()
    return _CountsUses.counted


class _CountsUses(torch.autograd.Function):
    counted = 0

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        _CountsUses.counted = gradient._use_count()
        return gradient


def reaches_all(context: Any) -> bool:
    """Whether the backward pass that runs goes on to all that a function of autograd was given.

    Args:
        context: of the function, in its backward pass.
    """
    return all(torch._C._will_engine_execute_node(node) for node, _ in context.next_functions if node is not None)


def keeps_otherwise() -> bool:
    """Whether what is kept for a backward pass goes through hooks now, as within a checkpoint."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


@contextmanager
def ranges_not_recorded() -> Iterator[None]:
    """Within it FSDP and optimizers name no ranges for a profiler: on fake tensors each name is an operator."""
    from torch.autograd.profiler import record_function

    enter, leave = record_function.__enter__, record_function.__exit__
    record_function.__enter__ = lambda self: self  # type: ignore[method-assign]  # there is no switch for it
    record_function.__exit__ = lambda self, *error: None  # type: ignore[method-assign]  # as above
    try:
        yield
    finally:
        record_function.__enter__, record_function.__exit__ = enter, leave  # type: ignore[method-assign]  # as it was


class _Chunks:
    """The parts of a tensor, as `torch.chunk` cuts it, each made when it is asked for; empty ones at the end."""

    def __init__(self, tensor: torch.Tensor, count: int, dim: int) -> None:
        self.tensor, self.dim = tensor, dim
        self.length = -(-tensor.size(dim) // count)

    def __getitem__(self, number: int) -> torch.Tensor:
        begin = number * self.length
        length = min(self.length, self.tensor.size(self.dim) - begin)
        return self.tensor.narrow(self.dim, begin, length) if length > 0 else self.tensor.new_empty(0)


@contextmanager
def own_chunk_alone() -> Iterator[None]:
    """Within it FSDP makes the part of a parameter that it keeps, not those of all ranks: fake ones take long."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    fsdp: Any = _fsdp_param
    own = fsdp._chunk_with_empty
    fsdp._chunk_with_empty = lambda tensor, num_chunks, dim: _Chunks(tensor, num_chunks, dim)
    try:
        yield
    finally:
        fsdp._chunk_with_empty = own


@contextmanager
def resizes_told(tell: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Within it `tell` is given every storage that gets another size."""
    own: Any = torch.UntypedStorage.resize_

    def resize(storage: Any, size: int) -> Any:
        result = own(storage, size)
        tell(storage)
        return result

    torch.UntypedStorage.resize_ = resize  # type: ignore[assignment, method-assign]  # there is no hook for it
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = own  # type: ignore[method-assign]  # as it was
