"""An optimizer that was made for a model before the model's parameters were sharded."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.torch_private.meshes import local_index

log = logging.getLogger(__name__)


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """One name of every parameter of `model`, to find what stands in its place later."""
    return {parameter: name for name, parameter in model.named_parameters()}


def check_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> None:
    """Check that `optimizer` can be parallelised together with the model whose parameters have these names.

    Raises:
        ConfigError: it holds parameters of something else, or treats all parameters as one vector (LBFGS).
    """
    where = f"optimizer={type(optimizer).__name__}"
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(where, "it joins all parameters into one vector", "any other optimizer")
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                raise ConfigError(
                    where,
                    f"group {index} has a parameter of shape {tuple(parameter.shape)} that is not the model's",
                    "an optimizer over parameters of the model; put other modules into one model with it",
                )


@torch.no_grad()
def follow_parameters(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], model: nn.Module) -> None:
    """Have `optimizer` train the parameters that now stand under the names of the ones it was made with, in place.

    Groups, their options and their order stay, so schedulers bound to the optimizer go on working. State that exists is
    sharded as the parameters are, with the values of the first rank. Collective.
    """
    standing = dict(model.named_parameters(remove_duplicate=False))
    for group in optimizer.param_groups:
        before = list(group["params"])
        group["params"][:] = [standing[names[parameter]] for parameter in before]
        for old, new in zip(before, group["params"], strict=True):
            if old in optimizer.state:
                state = optimizer.state.pop(old)
                optimizer.state[new] = {key: _placed_as(value, old, new) for key, value in state.items()}


def adapt_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Let `optimizer`, whose parameters may be sharded, compute what it computes on one device. Once is enough."""
    if optimizer in _ADAPTED or not any(isinstance(item, DTensor) for item in _parameters(optimizer)):
        return
    _ADAPTED.add(optimizer)
    _run_per_parameter(optimizer)
    if isinstance(optimizer, (*_ON_PARTS, *_ON_WHOLE)):
        placeholders = _Placeholders(whole=isinstance(optimizer, _ON_WHOLE))
        optimizer.register_step_pre_hook(placeholders.enter)
        optimizer.register_step_post_hook(placeholders.leave)


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class _Placeholders:
    """Plain tensors in the place of sharded parameters, gradients and state during one step of an optimizer.

    For optimizers with operations that sharded tensors do not have: those that treat every element by itself get
    each rank's own part, those that need rows, columns or norms of a matrix get it whole.
    """

    def __init__(self, whole: bool) -> None:
        self.whole = whole
        self._standing: list[tuple[list[torch.Tensor], int, DTensor]] = []

    def enter(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Before a step; of one with a closure, when that has made the gradients."""

        def after(closure: Any) -> Any:
            def run() -> Any:
                loss = closure()
                self._put(optimizer)
                return loss

            return run

        own, *rest = args
        arguments = {**kwargs, **({"closure": rest[0]} if rest else {})}
        if arguments.get("closure") is None:
            self._put(optimizer)
            return args, kwargs
        return (own, *rest[1:]), {**arguments, "closure": after(arguments["closure"])}

    @torch.no_grad()
    def _put(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                if not isinstance(parameter, DTensor) or parameter.grad is None:
                    continue
                plain = nn.Parameter(self._plain(parameter.detach()), requires_grad=parameter.requires_grad)
                plain.grad = self._plain(parameter.grad)
                if parameter in optimizer.state:
                    state = optimizer.state.pop(parameter)
                    optimizer.state[plain] = {key: self._plain(value) for key, value in state.items()}
                self._standing.append((group["params"], index, parameter))
                group["params"][index] = plain

    @torch.no_grad()
    def leave(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameters, index, parameter in self._standing:
            plain = parameters[index]
            parameters[index] = parameter
            if self.whole:
                parameter.to_local().copy_(plain[local_index(parameter)])
            state = optimizer.state.pop(plain, {})
            optimizer.state[parameter] = {key: self._sharded(value, plain, parameter) for key, value in state.items()}
        self._standing.clear()

    def _plain(self, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        return value.full_tensor() if self.whole else value.to_local()

    def _sharded(self, value: Any, plain: torch.Tensor, parameter: DTensor) -> Any:
        if not isinstance(value, torch.Tensor) or value.shape != plain.shape or _is_number(value, plain):
            return value
        return _part_of(value, parameter) if self.whole else _wrapped(value, parameter)


_ON_PARTS: tuple[type, ...] = (torch.optim.Rprop,)
_ON_WHOLE: tuple[type, ...] = (
    torch.optim.Adafactor,
    *([torch.optim.Muon] if hasattr(torch.optim, "Muon") else []),
)
_ADAPTED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def _part_of(whole: torch.Tensor, like: DTensor) -> DTensor:
    return _wrapped(whole[local_index(like)].clone(memory_format=torch.contiguous_format), like)


def _wrapped(local: torch.Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _run_per_parameter(optimizer: torch.optim.Optimizer) -> None:
    """Have groups that hold plain and sharded parameters updated one parameter after the other.

    torch's `foreach` and `fused` ways put a whole group into one call, which can't mix them. The numbers are the same.
    """
    for group in optimizer.param_groups:
        kinds = {parameter.device_mesh if isinstance(parameter, DTensor) else None for parameter in group["params"]}
        if len(kinds) < 2:
            continue
        for option in ("foreach", "fused"):
            if option in group:
                if group[option]:
                    log.warning(
                        "optimizer: %s=True is left out for a group with parameters sharded differently", option
                    )
                group[option] = False


def _is_number(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a state is one number for the whole parameter, such as a count of steps, and not one for each element."""
    return value.dim() == 0 or (value.numel() == 1 and value.shape != parameter.shape)


def _placed_as(value: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or _is_number(value, old):
        return value
    if dist.get_world_size() > 1:
        dist.broadcast(value, 0)
    if not isinstance(new, DTensor):
        return value
    if value.shape != old.shape:
        return DTensor.from_local(value, new.device_mesh, [Replicate()] * new.device_mesh.ndim, run_check=False)
    return _part_of(value, new)
