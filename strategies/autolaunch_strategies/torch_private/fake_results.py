"""A fake-tensor mode that remembers what operators returned, for less than torch's own does.

A model on shapes alone calls few different operators on few different shapes, most of them once for each block. Torch
remembers results, too, but finds and makes them anew in twice the time that this takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

ASKS_DEVICE = torch.ops.prim.device.default
"""A question that tensors without memory are asked more often than everything else together."""
MOST_RESULTS = 50_000
"""Then all are forgotten."""

_NOT_REMEMBERED = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_NUMBERS = (int, float, bool)
"""Equal ones of different types give results of different types."""
_PLAIN = (str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


@dataclass(frozen=True, slots=True)
class _Result:
    """A tensor that an operator returned."""

    argument: int | None
    """The place of the argument that it is, or, if it has a shape, whose memory it shares; None: a new one."""
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype | None = None
    device: torch.device | None = None


class FakeTensorsWithResults(FakeTensorMode):
    """`FakeTensorMode` whose operators return what they returned before, made anew, where that is all there is to it.

    Remembered is what functional, view and in-place operators of `aten` returned for plain arguments and tensors that
    are dense, not complex, and without known values. Everything else is torch's.
    """

    _results: dict[Any, Any] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cache_enabled = False  # torch's own, which takes longer than what it spares beside this one
        self._states: dict[torch.device | None, dict[str, Any]] = {}
        """What the constructor of a fake tensor sets, by its device."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What `func` returns."""
        if func is ASKS_DEVICE:
            return args[0].fake_device
        key = self._key(func, args, kwargs)
        if key is None:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        known = self._results.get(key)
        if known is not None:
            if type(known) is _Result:
                return self._made(known, args)
            return known[0](None if item is None else self._made(item, args) for item in known[1])
        output = super().__torch_dispatch__(func, types, args, kwargs or {})
        if len(self._results) >= MOST_RESULTS:
            self._results.clear()
        inside = [item for argument in args if isinstance(argument, list | tuple) for item in argument]
        if (result := self._remembered(output, args, [*inside, *(kwargs or {}).values()])) is not None:
            self._results[key] = result
        return output

    def _key(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
        """What the result depends on; None if it isn't to be remembered."""
        if not _is_remembered(func) or self.shape_env is not None or not args:
            return None
        key: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        if not self._add(key, args):
            return None
        if kwargs:
            key.extend(kwargs)
            if not self._add(key, kwargs.values()):
                return None
        return tuple(key)

    def _add(self, key: list[Any], values: Any) -> bool:
        """Add what counts of arguments; whether there is nothing else."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                dtype = value.dtype
                if (
                    value.fake_mode is not self
                    or value.constant is not None
                    or dtype.is_complex
                    or value.is_neg()
                    or value.layout is not torch.strided
                ):
                    return False
                key += (value.shape, value.stride(), value.storage_offset(), dtype, value.fake_device)
                key += (value.requires_grad, value.is_inference())
            elif kind in _NUMBERS:
                key += (kind, value)
            elif kind in _PLAIN:
                key.append(value)
            elif kind is list or kind is tuple:
                key += (kind, len(value))
                if not self._add(key, value):
                    return False
            else:
                return False
        return True

    def _remembered(self, output: Any, args: Sequence[Any], others: Sequence[Any]) -> Any:
        """What is kept of an output; None if it isn't known how to make it anew."""
        if not isinstance(output, list | tuple):
            return self._result(output, args, others)
        results = [None if item is None else self._result(item, args, others) for item in output]
        unknown = any(result is None and item is not None for item, result in zip(output, results, strict=True))
        # One with names, as decompositions return, is a plain one to whoever called the operator.
        return None if unknown else (list if isinstance(output, list) else tuple, results)

    def _result(self, output: Any, args: Sequence[Any], others: Sequence[Any]) -> _Result | None:
        if type(output) is not FakeTensor:
            return None
        for place, argument in enumerate(args):
            if argument is output:
                return _Result(place)
        if output.constant is not None or output.requires_grad or output.layout is not torch.strided:
            return None
        shared = [place for place, argument in enumerate(args) if _share_memory(argument, output)]
        if len(shared) > 1 or any(_share_memory(item, output) for item in others):
            return None
        result = _Result(
            shared[0] if shared else None,
            tuple(output.shape),
            output.stride(),
            int(output.storage_offset()),
            output.dtype,
            output.fake_device,
        )
        again = self._made(result, args)
        same_keys = torch._C._dispatch_key_set(again) == torch._C._dispatch_key_set(output)
        return result if same_keys and again.untyped_storage().nbytes() == output.untyped_storage().nbytes() else None

    def _made(self, result: _Result, args: Sequence[Any]) -> Any:
        if result.shape is None:
            return args[result.argument]  # type: ignore[index]  # what has no shape is an argument
        if result.argument is None:
            made = torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device="meta")
        else:
            memory = args[result.argument].untyped_storage()
            made = torch.empty(0, dtype=result.dtype, device="meta")
            made.set_(memory, result.offset, result.shape, result.stride)
        state = self._states.get(result.device)
        if state is None:
            fake = FakeTensor(self, made, result.device)
            self._states[result.device] = dict(vars(fake))
            return fake
        # What its constructor does, without the checks and the settings one by one, which take four times as long.
        fake = torch.Tensor._make_subclass(
            FakeTensor, made, False, dispatch_device=True, device_for_backend_keys=result.device
        )
        if self._allow_unsafe_data_ptr_access:
            torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
        else:
            torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(state)
        return fake


def _share_memory(item: Any, output: torch.Tensor) -> bool:
    return isinstance(item, torch.Tensor) and item.untyped_storage()._cdata == output.untyped_storage()._cdata


_asked: dict[Any, bool] = {}


def _is_remembered(operator: Any) -> bool:
    known = _asked.get(operator)
    if known is None:
        known = _asked[operator] = (
            isinstance(operator, torch._ops.OpOverload)
            and operator.namespace == "aten"
            and "resize" not in operator.overloadpacket.__name__  # such an operator may say nothing of it in its tags
            and not _NOT_REMEMBERED.intersection(operator.tags)
            and operator not in FakeTensorMode.lift_fns
        )
    return known
