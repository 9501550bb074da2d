"""Which tensors and blocks are alike: blocks by all that hangs on them, down to functions and what these close over."""

from __future__ import annotations

import functools
import types
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autolaunch_strategies.model.blocks import Block
from autolaunch_strategies.torch_private.meshes import of_local, sharded_as
from autolaunch_strategies.torch_private.tracing import has_no_values

CONSTANTS = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)


class Unlike(BaseException):
    """A block does what can't be said of another one.

    No Exception: user code must not catch it.
    """


@dataclass(frozen=True)
class Like:
    """A tensor by everything but its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    sharded: Any = None
    """Of a DTensor: how; the rest is that of this rank's part."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Like:
        """As a tensor is.

        Raises:
            Unlike: it is of a class that nobody here knows.
        """
        if isinstance(tensor, DTensor):
            local = tensor._local_tensor
            return cls(tuple(local.shape), local.stride(), local.dtype, sharded_as(tensor))
        if type(tensor) not in (torch.Tensor, nn.Parameter) and not has_no_values(tensor):
            raise Unlike(f"a tensor is a {type(tensor).__name__}")
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @classmethod
    def of_made(cls, tensor: torch.Tensor) -> Like:
        """As a tensor is that a block made, and all of its storage.

        Raises:
            Unlike: it is a part of a larger one.
        """
        like = cls.of(tensor)
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        elements = 1 + sum((size - 1) * step for size, step in zip(like.shape, like.stride, strict=True))
        if local.untyped_storage().nbytes() != elements * local.itemsize * (0 not in like.shape):
            raise Unlike("it makes a part of a larger tensor")
        return like

    def make(self) -> torch.Tensor:
        """A new one."""
        local = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        return local if self.sharded is None else of_local(local, self.sharded)


_MOST = 20_000
"""Objects of one block that are looked at."""
_OUTSIDE = ("__composable_api", "_compiled_call_impl")
"""Beginnings of names of attributes of a block that are for what stands around its forward."""
_EMPTY = frozenset(name for name, item in vars(nn.Module()).items() if not item)
"""Attributes that every module has, and that hold nothing in most."""


def kinds_of(blocks: Iterable[Block]) -> dict[Hashable, list[nn.Module]]:
    """Blocks by what they have in common, in order. The number of a block where each has its own is no difference.

    Raises:
        Unlike: there is something of which it can't be told.
    """
    of_class: dict[type, list[Block]] = {}
    for block in blocks:
        of_class.setdefault(type(block.module), []).append(block)
    kinds: dict[Hashable, list[nn.Module]] = {}
    for alike in of_class.values():
        numbers, shared = places_of_numbers(alike), _Shared()
        for block in alike:
            _described(block.module, numbers, shared)
        shared.is_known = True
        for block in alike:
            kinds.setdefault(_described(block.module, numbers, shared), []).append(block.module)
    return kinds


def places_of_numbers(blocks: list[Block]) -> set[tuple[str, str]]:
    """(part, attribute) where each of several blocks has its own number."""
    places: list[set[tuple[str, str]]] = []
    for block in blocks:
        number = next((int(part) for part in reversed(block.name.split(".")) if part.isdigit()), None)
        places.append(
            {
                (name, key)
                for name, part in block.module.named_modules()
                for key, item in vars(part).items()
                if type(item) is int and item == number
            }
        )
    return set.intersection(*places) if len(blocks) > 1 else set()


class _Shared:
    """Objects that hang on several blocks, such as what knows all of a model: they are no difference."""

    def __init__(self) -> None:
        self.is_known = False
        self._owners: dict[int, tuple[nn.Module, Any]] = {}
        self._items: set[int] = set()

    def has(self, item: Any, block: nn.Module) -> bool:
        """Whether it is one of them; until all are known, whether it is now known to be one."""
        if not self.is_known:
            owner, _ = self._owners.setdefault(id(item), (block, item))
            if owner is not block:
                self._items.add(id(item))
        return id(item) in self._items


def _described(block: nn.Module, numbers: set[tuple[str, str]], shared: _Shared) -> Hashable:
    description = _Description(block, shared)
    return tuple(
        (
            name,
            type(part),
            tuple(
                (key, description.of(list(item.values()) if "_hooks" in key and isinstance(item, dict) else item))
                for key, item in vars(part).items()
                if (item or key not in _EMPTY)
                and (name, key) not in numbers
                and "state_dict" not in key
                and (name or not _is_outside(key))
            ),
        )
        for name, part in block.named_modules()
    )


def _is_outside(key: str) -> bool:
    return key.startswith(_OUTSIDE) or "_hooks" in key


class _Description:
    """What objects are, by what they hold: those that only who they are tells apart are themselves."""

    def __init__(self, block: nn.Module, shared: _Shared) -> None:
        self._block, self._shared = block, shared
        self._parts = {id(part): name for name, part in block.named_modules()}
        self._seen: dict[int, tuple[int, Any]] = {}
        """Number, and the object, which keeps its id its own."""

    def of(self, item: Any) -> Hashable:
        if isinstance(item, CONSTANTS):
            return type(item), item
        if isinstance(item, nn.Module):
            return nn.Module, self._parts.get(id(item), id(item))
        if isinstance(item, torch.Tensor):
            return Like.of(item), item.requires_grad
        if isinstance(item, type | types.BuiltinFunctionType) or (
            isinstance(item, types.FunctionType) and item.__closure__ is None
        ):
            return item
        if id(item) in self._seen:
            return self._seen[id(item)][0]
        if not isinstance(item, tuple) and self._shared.has(item, self._block):
            return "shared", id(item)
        if len(self._seen) > _MOST:
            raise Unlike("more hangs on a block than can be compared")
        self._seen[id(item)] = len(self._seen), item
        return self._by_content(item)

    def _by_content(self, item: Any) -> Hashable:
        if isinstance(item, list | tuple):
            return type(item), tuple(map(self.of, item))
        if isinstance(item, Mapping):
            return type(item), tuple((self.of(key), self.of(value)) for key, value in item.items())
        if isinstance(item, set | frozenset):
            return type(item), frozenset(map(self.of, item))
        if isinstance(item, functools.partial):
            return functools.partial, self.of(item.func), self.of(item.args), self.of(item.keywords)
        if isinstance(item, types.MethodType):
            return types.MethodType, self.of(item.__self__), self.of(item.__func__)
        if isinstance(item, types.FunctionType):
            return item.__code__, self.of(item.__defaults__), self.of(item.__kwdefaults__), self._closed_over(item)
        if type(item).__hash__ not in (None, object.__hash__):
            return item  # by value
        return (type(item), self.of(vars(item))) if hasattr(item, "__dict__") else id(item)

    def _closed_over(self, function: types.FunctionType) -> tuple[Hashable, ...]:
        return tuple(self.of(cell.cell_contents) for cell in function.__closure__ or ())


def attributes_of(module: nn.Module, besides: Collection[str] = ()) -> dict[Any, tuple[Any, tuple[Any, ...]]]:
    """What a call may not change: attributes, and what those hold that can be added to or replaced.

    Args:
        besides: names of attributes that may change.
    """
    return {
        (name, key): (item, _contents_of(item))
        for name, part in module.named_modules()
        for key, item in [*vars(part).items(), *part._buffers.items()]
        if key not in besides
    }


def _contents_of(item: Any) -> tuple[Any, ...]:
    if isinstance(item, dict):
        return (*item, *item.values())
    return tuple(item) if isinstance(item, list | set) else ()


def are_same(one: dict[Any, tuple[Any, tuple[Any, ...]]], other: dict[Any, tuple[Any, tuple[Any, ...]]]) -> bool:
    """Whether nothing has changed between two looks at `attributes_of` a module; numbers and texts by value."""
    if one.keys() != other.keys():
        return False
    return all(
        is_same(item, before) and len(contents) == len(contents_before) and all(map(is_same, contents, contents_before))
        for (item, contents), (before, contents_before) in ((one[key], other[key]) for key in one)
    )


def is_same(item: Any, before: Any) -> bool:
    """Whether something is still the same object; numbers and texts by value."""
    return item is before or (isinstance(item, CONSTANTS) and type(item) is type(before) and item == before)
