"""What every style has in common."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.tensor.views import Replicator, plain
from autolaunch_strategies.torch_private.gradient_hooks import has_gradient_hooks


@dataclass
class Region:
    """Where a plan is applied: the model, the mesh of the mp axis, and what the styles share.

    Styles for cp need nothing of mp, so that they are applied without it, too.
    """

    model: nn.Module
    mp_mesh: DeviceMesh | None = None
    mp_replicate: Replicator | None = None
    sequence_parallel_within: set[str] = field(default_factory=set)
    """Names of modules whose output goes back into a sequence parallel region."""
    replaced: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    """Parameters that were placed: what stood there before -> what stands there now."""
    context_backend: str | None = None
    """What the cp axis does (`config.CP_BACKENDS`); None where it has one rank: then nothing is marked."""
    context_regions: dict[str, str] = field(default_factory=dict)
    """Names of modules within which sequences are sharded along cp -> backend."""
    context_attention: dict[str, str] = field(default_factory=dict)
    """Names of modules whose attention is over whole sequences -> backend."""
    _owners: dict[int, list[tuple[nn.Module, str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for module in self.model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                self._owners.setdefault(id(parameter), []).append((module, name))

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the mp axis."""
        assert self.mp_mesh is not None, "a style for mp, but mp has one rank"
        return self.mp_mesh

    @property
    def replicate(self) -> Replicator:
        """Makes tensors ones that every rank of mp has whole."""
        assert self.mp_replicate is not None, "a style for mp, but mp has one rank"
        return self.mp_replicate

    def shard(self, module: nn.Module, name: str, placement: Placement) -> bool:
        """Shard a parameter among the ranks, unless an earlier rule has placed it. Ties to it stay ties.

        Returns:
            whether it was placed now.
        """
        parameter = module._parameters[name]
        if parameter is None or isinstance(parameter, DTensor):
            return False
        sharded = nn.Parameter(
            distribute_tensor(parameter.detach(), self.mesh, [placement], src_data_rank=None),
            requires_grad=parameter.requires_grad,
        )
        sharded.__dict__.update(parameter.__dict__)
        for owner, _ in self._owners[id(parameter)]:
            if owner is not module and isinstance(owner, nn.Embedding):  # tied to it, with or without a rule of its own
                change_first_output(owner, plain)
        self._replace(parameter, sharded)
        return True

    def replacing_parameters(
        self, module: nn.Module, change: Callable[[], Any], except_for: Collection[str] = ()
    ) -> None:
        """Run something that puts new parameters into `module`, and carry ties of the old ones over to them.

        Args:
            except_for: names of parameters that are none of the model's.
        """
        before = dict(module.named_parameters())
        change()
        for name, replacement in module.named_parameters():
            if name in before and before[name] is not replacement and name not in except_for:
                replacement.__dict__.update(before[name].__dict__)
                self._replace(before[name], replacement)

    def _replace(self, old: nn.Parameter, new: nn.Parameter) -> None:
        owners = self._owners.pop(id(old))
        if has_gradient_hooks(old):
            holder, own = owners[0]
            path = next(path for path, module in self.model.named_modules() if module is holder)
            raise hooked(f"{path}.{own}".lstrip("."))
        for owner, name in owners:
            owner._parameters[name] = new
        self._owners[id(new)] = owners
        self.replaced[old] = new


def hooked(name: str, patterns: Iterable[str] = ()) -> ConfigError:
    """Of a parameter with hooks on its gradient that rules with these patterns, or others, would shard."""
    removed = ", ".join(f"{pattern}: null" for pattern in dict.fromkeys(patterns))
    return ConfigError(
        "mp.plan",
        f"{name} has hooks on its gradient, which would not run: what is sharded along mp is another parameter",
        "no rule for it, so that it stays whole on every rank along mp; or no hooks",
        f"'mp.plan={{{removed}}}'" if removed else "",
    )


class Style(ABC):
    """One thing that is done to one module: parameters placed, hooks added. Hooks of several styles stack."""

    def sharded_dims(self, module: nn.Module, only: str | None, ranks: int) -> Mapping[str, int]:
        """Parameter, by its name within `module` -> the dim along which it is sharded; those of nobody knows which
        (torch's styles, a user's own) are not told."""
        return {}

    @abstractmethod
    def apply(self, region: Region, name: str, module: nn.Module, only: str | None) -> None:
        """Apply this style to `module`, which the model calls `name`.

        Args:
            only: the one parameter that the rule names, or None for the module's usual ones.

        Raises:
            ConfigError: the style does not fit this module.
        """


def change_first_input(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Have `module` called with its first tensor changed, whether it comes by position, by keyword, or in a tuple.

    Of keywords the one counts that stands first in the module's forward.
    """
    order = list(inspect.signature(module.forward).parameters)

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        changed, is_changed = _first_changed(args, change)
        if is_changed:
            return changed, kwargs
        for key in sorted(kwargs, key=lambda key: order.index(key) if key in order else len(order)):
            value, is_changed = _first_changed(kwargs[key], change, floating=True)
            if is_changed:
                return args, {**kwargs, key: value}
        return args, kwargs

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _first_changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor], floating: bool = False) -> Any:
    """(`value` with its first tensor changed, whether there is one)."""
    if isinstance(value, torch.Tensor):
        return (value, False) if floating and not value.is_floating_point() else (change(value), True)
    if type(value) in (tuple, list):
        for index, item in enumerate(value):
            changed, is_changed = _first_changed(item, change, floating)
            if is_changed:
                return type(value)([*value[:index], changed, *value[index + 1 :]]), True
    return value, False


def change_first_output(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Have the first tensor that `module` returns changed; the rest of a tuple, a list or an output object stays."""

    def hook(_: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return change(output)
        if isinstance(output, tuple | list):
            values = list(output)
            for index, value in enumerate(values):
                if isinstance(value, torch.Tensor):
                    values[index] = change(value)
                    break
            return type(output)(values) if type(output) in (tuple, list) else type(output)(*values)
        if isinstance(output, dict):
            for key, value in output.items():
                if isinstance(value, torch.Tensor):
                    output[key] = change(value)
                    break
        return output

    module.register_forward_hook(hook)


def gather_while_it_runs(module: nn.Module, parameters: Collection[tuple[nn.Module, str]]) -> None:
    """Have sharded parameters, of `module` or within it, whole and plain while the forward of `module` runs.

    The forward, and not hooks around it, since it alone runs again where activations are recomputed.

    Args:
        parameters: (the module that has it, its name there).
    """
    forward = module.forward

    @functools.wraps(forward)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        sharded = [holder._parameters[name] for holder, name in parameters]
        try:
            for (holder, name), parameter in zip(parameters, sharded, strict=True):
                holder._parameters[name] = plain(parameter)
            return forward(*args, **kwargs)
        finally:
            for (holder, name), parameter in zip(parameters, sharded, strict=True):
                holder._parameters[name] = parameter

    module.forward = gathered
