"""What a forward pass on fake tensors shows: storages, and what operators draw and write."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.torch_version import TorchVersion

FUSED_RMS_NORM = torch.ops.aten._fused_rms_norm.default
FUSED_RMS_NORM_BACKWARD = torch.ops.aten._fused_rms_norm_backward.default
"""What `rms_norm` is on CUDA; on a CPU it is made of other operators."""

JOINS_SHARDED_DIMS = TorchVersion(torch.__version__) >= "2.12"
"""Whether DTensor keeps a dim sharded that an operator joins to others in front of it; torch 2.11 gathers it."""


def storage_key(tensor: torch.Tensor) -> int:
    """A number that two tensors have in common exactly when they share memory (true on meta, too)."""
    return tensor.untyped_storage()._cdata


def is_random(operator: Any) -> bool:
    """Whether an `OpOverload` may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def draws_numbers(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an `OpOverload` draws random numbers: attention that drops nothing out does not."""
    if not is_random(operator):
        return False
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return given != 0
    return True


@functools.cache
def returns_numbers(operator: Any) -> bool:
    """Whether an `OpOverload` returns something, and no tensor."""
    returned = operator._schema.returns
    return bool(returned) and not any("Tensor" in str(value.type) for value in returned)


@functools.cache
def takes_device(operator: Any) -> bool:
    """Whether an `OpOverload` is told on which device its output is made."""
    return any(argument.name == "device" for argument in operator._schema.arguments)


@functools.cache
def argument_names(operator: Any) -> tuple[str, ...]:
    """Of an `OpOverload`, in order."""
    return tuple(argument.name for argument in operator._schema.arguments)


@functools.cache
def writes_to(operator: Any) -> tuple[str, ...]:
    """Names of the arguments that an `OpOverload` changes in place."""
    return tuple(
        argument.name
        for argument in operator._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def reads_values(error: BaseException) -> bool:
    """Whether an error says that an operator's output depends on values, which fake tensors do not have."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return isinstance(error, DataDependentOutputException | DynamicOutputShapeException)


def has_no_values(item: Any) -> bool:
    """Whether something is a tensor that is a shape only, as in a dry run."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(item, FakeTensor)


def _grouped_result(left: torch.Tensor, right: torch.Tensor, offs: Any = None, *_: Any, **__: Any) -> torch.Tensor:
    if left.dim() == 2 and right.dim() == 2:
        shape = (offs.shape[0], left.shape[0], right.shape[1])
    else:
        shape = (
            (*left.shape[:-1], right.shape[-1]) if left.dim() == 3 == right.dim() else (left.shape[-2], right.shape[-1])
        )
    return left.new_empty(shape)


RESULTS_OF_FAKES = {getattr(torch.ops.aten, "_grouped_mm", None): _grouped_result}
"""`OpOverloadPacket` -> what takes its place on fake tensors. Torch's own for `_grouped_mm` knows bf16 alone; kernels
know more types."""


@contextmanager
def _masks_not_compared() -> Iterator[None]:
    """Within it `nn.Transformer` does not look at a mask's values to find out whether attention could do without it.

    Its result is the same; a mask that is not known to be causal is used, and so seen to be needed.
    """
    from torch.nn.modules import transformer

    own = transformer._detect_is_causal_mask

    def is_declared_causal(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    transformer._detect_is_causal_mask = is_declared_causal
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = own


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Within it new tensors have shapes, a device and no memory."""
    from autolaunch_strategies.torch_private.fake_results import FakeTensorsWithResults

    with FakeTensorsWithResults(allow_non_fake_inputs=True), errors_not_logged(), _masks_not_compared():
        yield


@contextmanager
def errors_not_logged() -> Iterator[None]:
    """Within it torch does not write whole tracebacks of errors on fake tensors, which are caught."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
