"""An optimizer that was made for a model before the model's parameters were sharded."""

from __future__ import annotations

import copy
import functools
import logging
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.torch_private.meshes import local_index, local_part
from autolaunch_strategies.torch_private.random_state import saved_random_state, seed_torch

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


def check_optimizer_in_stages(optimizer: torch.optim.Optimizer) -> None:
    """Check that `optimizer` computes the same where each stage of a pipeline has it update its own parameters.

    It is tried on small tensors, one for each parameter: what becomes of some must not depend on gradients of others.
    An optimizer that can't be tried so is believed.

    Raises:
        ConfigError: it depends on them, as second-order steps and norms over all parameters do.
    """
    if _joins_parameters(optimizer):
        raise ConfigError(
            f"pp with {type(optimizer).__name__}",
            "what it does to one parameter depends on the gradients of others, and each stage has its own "
            "parameters alone",
            "optimizers that treat each parameter by itself, such as AdamW, or a mesh with pp of size 1",
        )


def _joins_parameters(optimizer: torch.optim.Optimizer) -> bool:
    if type(optimizer) in _BY_ELEMENT or isinstance(optimizer, _ON_WHOLE):
        return False
    if isinstance(optimizer, torch.optim.LBFGS):  # its line search moves nothing where the loss of a trial is constant
        return True
    firsts = [group["params"][0] for group in optimizer.param_groups if group["params"]]
    try:
        together = _tried(optimizer, set(_parameters(optimizer)))
        parts = [_tried(optimizer, {*some}) for some in (firsts, firsts[:1])]
    except Exception:
        return False
    return any(
        not torch.allclose(moved, together[parameter], rtol=1e-3, atol=0.0, equal_nan=True)
        for part in parts
        for parameter, moved in part.items()
    )


_TRIED_STEPS = 10
_NOT_TRIED = ("state", "step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes that a trial has none of: schedulers wrap `step`, and hooks are for the steps of the run."""


def _tried(optimizer: torch.optim.Optimizer, with_gradients: set[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
    """By how much a copy of `optimizer` moves small tensors in the place of those `with_gradients` in some steps."""
    generator = torch.Generator().manual_seed(0)
    parameters = _parameters(optimizer)
    values = [torch.rand([2] * item.dim(), generator=generator, dtype=torch.float64) for item in parameters]
    small = [nn.Parameter(value.clone()) for value in values]
    copies: dict[int, Any] = {id(parameter): item for parameter, item in zip(parameters, small, strict=True)}
    tried = object.__new__(type(optimizer))  # of its own deep copy torch leaves out what a class of the user's adds
    copies[id(optimizer)] = tried
    own = {key: value for key, value in vars(optimizer).items() if key not in _NOT_TRIED}
    vars(tried).update({key: copy.deepcopy(value, copies) for key, value in own.items()}, state=defaultdict(dict))
    tried._optimizer_step_pre_hooks, tried._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    for group in tried.param_groups:
        if "lr" in group and not group["lr"]:  # a warmup begins, and nothing would move
            group["lr"] = group.get("initial_lr") or 1.0

    def differentiate(step: int) -> Any:
        for index, (parameter, item) in enumerate(zip(parameters, small, strict=True)):
            # Large, for what limits a norm; and some go one way, others to and fro, for what measures a distance.
            gradient = 10 + torch.rand(item.shape, generator=generator, dtype=torch.float64)
            sign = -1 if index % 2 and step % 2 else 1
            item.grad = sign * gradient if parameter in with_gradients else None
        return torch.zeros(())

    with torch.random.fork_rng(devices=[]):
        draws = [torch.default_generator, *(item for item in vars(tried).values() if isinstance(item, torch.Generator))]
        before = [item.get_state() for item in draws]
        for step in range(_TRIED_STEPS):
            differentiate(step)  # some call no closure
            tried.step(functools.partial(differentiate, step))
        if not all(torch.equal(item.get_state(), state) for item, state in zip(draws, before, strict=True)):
            raise RuntimeError("what it draws for one parameter depends on how many come before it")
    moved = (item.detach() - value for item, value in zip(small, values, strict=True))
    return {item: by for item, by in zip(parameters, moved, strict=True) if item in with_gradients}


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
    on_whole = isinstance(optimizer, _ON_WHOLE)
    if not on_whole and type(optimizer) not in _BY_ELEMENT:
        _run_per_parameter(optimizer)
        explains = _ExplainsFailures()
        _before_updates(optimizer, explains.begin)
        _where_updates_fail(optimizer, explains.end)
        return
    placeholders = _Placeholders(on_whole)
    _before_updates(optimizer, placeholders.put)
    optimizer.register_step_post_hook(placeholders.leave)
    _where_updates_fail(optimizer, placeholders.leave)


def draw_alike(optimizer: torch.optim.Optimizer, seed: Callable[[], int], device: torch.device) -> None:
    """Let what torch draws in updates of `optimizer` (noise, stochastic rounding) depend on `seed` alone.

    Ranks that hold replicas draw other numbers for other samples; weights to which each added its own would part.

    Args:
        seed: of an update: the same on ranks that hold the same parameters, and another one for every step.
    """
    kept = ExitStack()

    def begin() -> None:
        kept.enter_context(saved_random_state(device))
        seed_torch(seed(), device)

    def step(take: Callable[[Any], Any], closure: Callable[[], Any] | None) -> Any:
        def run() -> Any:
            kept.close()  # some call their closure, which runs the model, several times
            assert closure is not None
            loss = closure()
            begin()
            return loss

        with kept:
            if closure is None:
                begin()
                return take(None)
            return take(run)

    _around_steps(optimizer, step)


def after_steps(optimizer: torch.optim.Optimizer, act: Callable[[], None]) -> Callable[[], None]:
    """Have `act` called after each step of `optimizer` that updates it; returns what ends that.

    Torch's hooks run again where a class calls the step of its base in its own.
    """
    watching = [act]

    def step(take: Callable[[Any], Any], closure: Callable[[], Any] | None) -> Any:
        loss = take(closure)
        for watcher in watching:
            watcher()
        return loss

    _around_steps(optimizer, step)
    return watching.clear


def prefer_fused(optimizer: torch.optim.Optimizer) -> None:
    """Let Adam and AdamW update all parameters of a group in one pass over memory, where nobody chose another way.

    torch's own choice is one pass for each operation, and on a CPU one for each operation and parameter. The fused pass
    of a CPU goes through memory from where a tensor begins, whatever its strides; that of CUDA refuses unequal ones.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return
    before = [options.get("fused") for options in optimizer.param_groups]
    for options in (optimizer.defaults, *optimizer.param_groups):
        is_chosen = any(options.get(name) for name in ("foreach", "fused", "capturable", "differentiable"))
        refused = False in (options.get("foreach"), options.get("fused"))
        if not is_chosen and not refused and all(map(_can_be_fused, options.get("params", _parameters(optimizer)))):
            options["fused"] = True
    if [options.get("fused") for options in optimizer.param_groups] != before:
        _before_updates(optimizer, _lay_out_gradients)


def _can_be_fused(parameter: torch.Tensor) -> bool:
    part = local_part(parameter) if isinstance(parameter, DTensor) else parameter
    return part.is_floating_point() and part.device.type in ("cpu", "cuda") and part.is_contiguous()


def _before_updates(optimizer: torch.optim.Optimizer, act: Callable[[torch.optim.Optimizer], None]) -> None:
    """Have `act` called in each step right before the update; of a step with a closure, when that made gradients."""

    def enter(_: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        own, *rest = args
        arguments = {**kwargs, **({"closure": rest[0]} if rest else {})}
        closure = arguments.get("closure")
        if closure is None:
            act(optimizer)
            return args, kwargs

        def run() -> Any:
            loss = closure()
            act(optimizer)
            return loss

        return (own, *rest[1:]), {**arguments, "closure": run}

    optimizer.register_step_pre_hook(enter)


def _where_updates_fail(
    optimizer: torch.optim.Optimizer, act: Callable[[torch.optim.Optimizer, BaseException], None]
) -> None:
    """Have `act` called where a step raises, which calls none of its hooks: whoever catches that may go on."""
    known = weakref.ref(optimizer)

    def guarded(take: Callable[[Any], Any], closure: Callable[[], Any] | None) -> Any:
        try:
            return take(closure)
        except BaseException as error:
            failed = known()
            assert failed is not None
            act(failed, error)
            raise

    _around_steps(optimizer, guarded)


def _around_steps(
    optimizer: torch.optim.Optimizer, run: Callable[[Callable[[Any], Any], Callable[[], Any] | None], Any]
) -> None:
    """Have `run` called in place of each step, with what takes the step, given a closure, and the closure."""
    step: Any = getattr(optimizer.step, "__func__", optimizer.step)  # a function where a scheduler has wrapped it
    takes_self, known = step is not optimizer.step, weakref.ref(optimizer)

    @functools.wraps(step)
    def around(_: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = known()
        assert optimizer is not None
        own, is_named = [optimizer] if takes_self else [], "closure" in kwargs

        def take(closure: Callable[[], Any] | None) -> Any:
            if is_named:
                return step(*own, *args, **{**kwargs, "closure": closure})
            return step(*own, *([closure, *args[1:]] if args else []), **kwargs)

        return run(take, kwargs["closure"] if is_named else args[0] if args else None)

    # A method, since schedulers wrap only such; bound to a proxy, or the optimizer would hold itself and its memory.
    optimizer.step = types.MethodType(around, weakref.proxy(optimizer))  # type: ignore[method-assign]


class _ExplainsFailures:
    """Says what can be done with an optimizer of which torch can't run an operation on sharded parameters."""

    _WORDS = ("DTensor", "sharding", "Sharding", "different meshes")

    def __init__(self) -> None:
        self._updates = False
        """Whether gradients are there: what a closure raised is the model's."""

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        self._updates = True

    def end(self, optimizer: torch.optim.Optimizer, error: BaseException) -> None:
        updates, self._updates = self._updates, False
        if not (updates and isinstance(error, RuntimeError) and any(word in str(error) for word in self._WORDS)):
            return
        sharded = [parameter for parameter in _parameters(optimizer) if isinstance(parameter, DTensor)]
        axes = {name for parameter in sharded for name in parameter.device_mesh.mesh_dim_names or ()}
        others = sorted(axes & {"mp", "ep"})  # dp=ddp shards none along cp either
        raise ConfigError(
            f"optimizer={type(optimizer).__name__}",
            f"its step can't be run on sharded parameters: {str(error).splitlines()[0]}",
            "dp=ddp" + f" without {' and '.join(others)}" * bool(others) + ", which shards none; an optimizer of torch",
            "" if others else "dp=ddp",
        ) from error


@torch.no_grad()
def _lay_out_gradients(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            # Parts of sharded ones are laid out where they are put in their place.
            if gradient is None or isinstance(parameter, DTensor) or gradient.stride() == parameter.stride():
                continue
            parameter.grad = _laid_out_as(parameter, gradient)


def _laid_out_as(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """`gradient`, or a copy, with the strides of `parameter`."""
    if gradient.is_sparse or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class _Placeholders:
    """Plain tensors in the place of sharded parameters, gradients and state during one step of an optimizer.

    Optimizers that treat every element by itself get each rank's own part: torch updates many plain tensors at once,
    however their parameters are sharded, and in a tenth of the time that it needs for as many sharded ones. Those that
    need rows, columns or norms of a matrix get it whole.
    """

    def __init__(self, whole: bool) -> None:
        self.whole = whole
        self._standing: list[tuple[list[torch.Tensor], int, DTensor]] = []
        self._parts: dict[DTensor, nn.Parameter] = {}
        self._states: dict[torch.Tensor, dict[str, Any]] = {}
        """Of each placeholder, the state that it stands for."""

    @torch.no_grad()
    def put(self, optimizer: torch.optim.Optimizer) -> None:
        """Before an update."""
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                if not isinstance(parameter, DTensor) or parameter.grad is None:
                    continue
                plain = self._placeholder(parameter)
                plain.grad = _laid_out_as(plain, self._plain(_placed_alike(parameter.grad, parameter)))
                if parameter in optimizer.state:
                    state = {key: self._plain(value) for key, value in optimizer.state[parameter].items()}
                    self._states[plain] = optimizer.state.pop(parameter)  # once nothing can fail any more
                    optimizer.state[plain] = state
                self._standing.append((group["params"], index, parameter))
                group["params"][index] = plain

    def _placeholder(self, parameter: DTensor) -> nn.Parameter:
        if self.whole:
            return nn.Parameter(self._plain(parameter.detach()), requires_grad=parameter.requires_grad)
        part, known = local_part(parameter), self._parts.get(parameter)
        if known is None or known.data_ptr() != part.data_ptr() or known.shape != part.shape:
            known = self._parts[parameter] = nn.Parameter(part.detach(), requires_grad=parameter.requires_grad)
        return known

    @torch.no_grad()
    def leave(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """After a step."""
        for parameters, index, parameter in self._standing:
            plain = parameters[index]
            parameters[index], plain.grad = parameter, None
            if self.whole:
                parameter.to_local().copy_(plain[local_index(parameter)])
            state, before = optimizer.state.pop(plain, {}), self._states.get(plain, {})
            if state:
                optimizer.state[parameter] = {
                    key: self._sharded(value, before.get(key), plain, parameter) for key, value in state.items()
                }
        self._standing.clear()
        self._states.clear()

    def _plain(self, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        return value.full_tensor() if self.whole else local_part(value)

    def _sharded(self, value: Any, before: Any, plain: torch.Tensor, parameter: DTensor) -> Any:
        if isinstance(before, DTensor) and local_part(before) is value:  # changed in place
            return before
        if not isinstance(value, torch.Tensor) or value.shape != plain.shape or _is_number(value, plain):
            return value
        return _part_of(value, parameter) if self.whole else _wrapped(value, parameter)


def _placed_alike(gradient: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    if not isinstance(gradient, DTensor) or gradient.placements == parameter.placements:
        return gradient
    return gradient.redistribute(placements=parameter.placements)


_BY_ELEMENT: frozenset[type] = frozenset(
    {
        torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW,
        torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop,
        torch.optim.SGD,
    }
)  # fmt: skip
"""Not what is derived from them: that may need norms."""
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
