"""`parallelize`: the model and the optimizer of an ordinary training loop, made to run on a mesh of devices."""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from autolaunch_strategies.apply.check import config_errors
from autolaunch_strategies.apply.order import Parallelized, apply_parallelism
from autolaunch_strategies.apply.registry import all_applied, applied_to, register
from autolaunch_strategies.checkpoint.sharded import share_random_state
from autolaunch_strategies.config import (
    SAME_DATA_AXES,
    ConfigError,
    DataParallel,
    ModelParallel,
    ParallelConfig,
    PipelineParallel,
    nearest,
    parallel_config,
    raise_all,
)
from autolaunch_strategies.data_parallel.gradients import gradient_norm, scale_gradients
from autolaunch_strategies.data_parallel.outside import GathersOnUse
from autolaunch_strategies.loop.process_mesh import ProcessMesh, get_mesh, process_mesh, set_mesh
from autolaunch_strategies.loop.staged import forward_backward_of
from autolaunch_strategies.mesh.process_group import check_world_size, ensure_process_group
from autolaunch_strategies.mesh.rank_mesh import RankMesh
from autolaunch_strategies.pipeline.cut import drop_placeholders, whole_model
from autolaunch_strategies.pipeline.run import Pipeline
from autolaunch_strategies.plan.context import context_config
from autolaunch_strategies.plan.rules import read_plan
from autolaunch_strategies.tensor.sharding_errors import explained
from autolaunch_strategies.tensor.views import MixedTensors
from autolaunch_strategies.torch_private.backward import AfterBackward
from autolaunch_strategies.training.optimizers import (
    adapt_optimizer,
    check_optimizer,
    check_optimizer_in_stages,
    follow_parameters,
    parameter_names,
)

log = logging.getLogger(__name__)

_KEYS = ("dp_config", "mp_config", "pp_config", "cp_config", "ep")

_OPTIMIZERS: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_MODES: dict[DeviceMesh, MixedTensors] = {}
_GATHERING: list[GathersOnUse] = []


def parallelize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    mesh: str | int | ProcessMesh | DeviceMesh | None = None,
    config: Mapping[str, Any] | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Turn a model and an optimizer for one device into parallel ones, in place. Every rank calls it.

    The training loop stays as it is: ``loss = criterion(model(x)); loss.backward(); optimizer.step()``. Each rank along
    dp trains on its own share of the batch (``get_mesh().coordinate(rank)["dp"]``); gradients are averaged over dp by
    the end of every backward pass, so the loss is the mean over a share. Ranks along mp, pp and cp are given the same
    data. Every rank gets the values of the first one; ranks along these also get the same random state (ranks along
    dp keep what they have: seed them differently if their dropout should differ). Clip with `clip_grad_norm_` of
    this package: torch's own can't join gradients that are sharded differently. From the first call that shards
    layers on, torch functions called by this thread take sharded and plain tensors together (`views.MixedTensors`).

    With an axis pp in the mesh the model is cut into stages, and one call takes the place of forward and backward::

        loss = model.forward_backward(lambda x, y: criterion(model(x), y), x, y)

    Its first argument, the step, calls the model once and returns the loss; what follows is the batch, which the step
    is called with. By default (``loss="exact"``) the step sees the whole batch, and any loss is right. With
    ``loss="microbatch"`` it is called for parts of the batch, in the order of the schedule, and the loss has to be a
    mean over samples: the first call checks that. Either way the call returns the loss of this rank's share of the
    batch, a 0-dim tensor without a gradient, on every rank, and gradients are complete: `clip_grad_norm_` and
    ``optimizer.step()`` follow as always, and several calls before a step add up. ``model(x)`` alone runs forward only,
    on all ranks together, and gives each of them the output; ``loss.backward()`` on it is an error. Parameters keep
    their names, and a rank has those of its own stages: in ``model.parameters()``, both ``state_dict()`` and the
    optimizer's groups, whose order and options stay even where nothing is left in them. On a mesh where pp has one rank
    the call is there, too, so that one loop serves every mesh.

    Args:
        model: any module that holds its values; the same object is returned.
        optimizer: any of torch's except LBFGS, over parameters of `model`. Groups, their options, state and schedulers
            are kept. One made afterwards, from the parallel model's parameters, works as well.
        mesh: a shape (8, "4x2", "dp4xmp2"), a ProcessMesh or a DeviceMesh with named dims; by default what `set_mesh`
            was given. Another one takes its place.
        config: any of ``dp_config={"sharding_level": 0..3}`` (and the other fields of `DataParallel`),
            ``mp_config={"parallelize_plan": {pattern: style or [style, ...]}}`` and
            ``pp_config={"split_spec": prefix, list or {name: SplitPoint.END}, "global_spec": name or list}``
            (and the other fields of `PipelineParallel`: loss, schedule, microbatches, ...), and
            ``cp_config={"parallelize_plan": {pattern: PrepareContextParallel() or ContextParallel()}}`` (and backend,
            ulysses, pad of `config.ContextParallel`), and ``ep``: over how many ranks of dp x cp x mp the experts of
            a mixture are shared out; styles are ours, torch's `ParallelStyle` objects, or as in YAML.
            Replicas average gradients also without a dp_config, an axis pp has stages without a pp_config, and along an
            axis cp sequences are sharded in every block without a cp_config. With None or nothing in it nothing is
            done. It is not changed.

    Raises:
        ConfigError: a wrong config or mesh, something that was parallelised before, a model
            on meta, an optimizer that can't follow, a model that can't be cut. Fields are named as in YAML: pp.loss.
    """
    chosen = _checked(config)
    if not chosen:
        if config is not None:
            log.warning(
                "parallelize: the config has none of %s; nothing is done "
                "(dp_config={'sharding_level': 3} shards over dp)",
                ", ".join(_KEYS),
            )
        return model, optimizer
    place = _mesh(mesh)
    return parallelize_with(model, optimizer, place, _settings(chosen, place))


def parallelize_with(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, place: ProcessMesh, settings: ParallelConfig
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """`parallelize` with settings that have been checked; `place` has their mesh."""
    names = parameter_names(model)
    refuse_second_time(model, optimizer)
    if settings.pp is not None and hasattr(model, "forward_backward"):
        raise ConfigError(
            f"model={type(model).__name__}",
            "it has a `forward_backward` of its own, which is the name of the call that trains a batch in stages",
            "another name for it",
        )
    if on_meta := [name for parameter, name in names.items() if parameter.is_meta]:
        raise ConfigError(
            f"the model's {on_meta[0]}", "is on the meta device and has no values", "a model built on a real device"
        )
    if optimizer is not None:
        check_optimizer(optimizer, names)
        if settings.pp is not None:
            check_optimizer_in_stages(optimizer)
    device = next((parameter.device for parameter in names), torch.device("cpu"))
    ranks = _join(place, settings, device)
    applied = apply_parallelism(model, settings, ranks, device)
    register(applied)
    for axis in SAME_DATA_AXES:  # what several ranks hold whole, or compute again, must stay equal
        if (group := ranks.group(axis)) is not None:
            share_random_state(group)
    _exchange_gradients(applied)
    if settings.pp is not None:
        train = forward_backward_of(model, applied.pipeline, applied.data_parallel)
        model.__dict__["forward_backward"] = _checked_afterwards(train, applied, ranks.group("pp"))
    if applied.context_parallel.sequences is not None:
        _enter_from_now_on(applied.context_parallel.sequences.calls, *_MODES.values(), *_GATHERING)
        model.register_forward_hook(_report_context)
    if applied.model_parallel.mode is not None:
        _mix_from_now_on(applied.model_parallel.mode)
        model.register_forward_hook(_explain_errors, always_call=True)
    if (gathers := applied.data_parallel.gathers) is not None:
        _enter_from_now_on(gathers)
        _GATHERING.append(gathers)
    if optimizer is not None:
        _train_here(optimizer, names, applied)
        _OPTIMIZERS.add(optimizer)
    return model, optimizer


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """As `torch.nn.utils.clip_grad_norm_`, for gradients of which some are sharded, over any axes. Collective.

    Returns:
        the norm of all gradients together before clipping: 0-dim, plain, equal on every rank.

    Raises:
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set.
    """
    chosen: list[Any] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    pipelines, known = _pipelines_of(chosen)
    if pipelines:
        counted = [item for item in chosen if known.get(id(item), pipelines[0]).counts(item)]
        norm = gradient_norm(counted, norm_type, pipelines[0].group, device=pipelines[0].device)
    else:
        norm = gradient_norm(chosen, norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"the norm of order {norm_type} of the gradients is {norm.item()}, so they can't be clipped")
    scale_gradients(chosen, norm, max_norm)
    return norm


def _pipelines_of(parameters: list[Any]) -> tuple[list[Pipeline], dict[int, Pipeline]]:
    """The pipelines of the models that these parameters belong to, and which belongs to which.

    Of all models, where they belong to none: a stage may hold nothing of what is clipped, and has to take part.
    """
    models = {id(item): applied for applied in all_applied() for item in applied.module.parameters()}
    owners = [models[id(item)] for item in parameters if id(item) in models] or all_applied()
    pipelines = {id(applied.pipeline): applied.pipeline for applied in owners if applied.pipeline is not None}
    known = {id(item): models[id(item)].pipeline for item in parameters if id(item) in models}
    return list(pipelines.values()), {key: pipeline for key, pipeline in known.items() if pipeline is not None}


def _checked(config: Any) -> dict[str, Any]:
    """The configs that are given, by key."""
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise ConfigError("config", f"a mapping is needed, not {type(config).__name__}", ", ".join(_KEYS))
    for key in config:
        if key not in _KEYS:
            close = nearest(str(key), _KEYS)
            raise ConfigError(
                f"config[{key!r}]", "no such key" + (f"; did you mean {close}?" if close else ""), ", ".join(_KEYS)
            )
    chosen = {key: value for key, value in config.items() if value is not None}
    for key, value in chosen.items():
        if key != "ep" and not isinstance(value, Mapping):
            raise ConfigError(key, f"a mapping is needed, not {type(value).__name__}")
    return chosen


def _mesh(mesh: Any) -> ProcessMesh:
    known = get_mesh()
    if mesh is None and known is None:
        raise ConfigError(
            "mesh", "there is none", "parallelize(mesh=...) or set_mesh before", 'parallelize(..., mesh="2x2")'
        )
    if mesh is None:
        assert known is not None
        return known
    place = process_mesh(mesh)
    if known is not None and known != place:
        log.warning("parallelize: %s takes the place of the mesh that was set before, %s", place, known)
    set_mesh(place)
    return place


def _settings(chosen: dict[str, Any], mesh: ProcessMesh) -> ParallelConfig:
    for key, axis in (("dp_config", "dp"), ("mp_config", "mp"), ("pp_config", "pp"), ("cp_config", "cp")):
        if key in chosen and axis not in mesh.dim_names:
            raise ConfigError(key, f"{mesh} has no axis {axis}", f"a mesh with {axis!r} among its dim_names")
    dp = dict(chosen.get("dp_config", {"sharding_level": 0}))
    if "sharding_level" not in dp:
        log.warning("parallelize: dp_config has no sharding_level; level 0 is used: nothing is sharded over dp")
        dp["sharding_level"] = 0
    if isinstance(dp["sharding_level"], str) and dp["sharding_level"].isdecimal():
        dp["sharding_level"] = int(dp["sharding_level"])
    plan = _plan(chosen, mesh)
    pp = dict(chosen.get("pp_config", {})) if "pp" in mesh.dim_names else None
    cp = context_config(chosen.get("cp_config", {}), read_plan(plan, "parallelize_plan")) if _has_cp(mesh) else None
    mp = ModelParallel("parallelize", base="none", plan=plan)
    config = parallel_config(mesh.to_shape(), dp, mp, pp, cp, ep=chosen.get("ep", 1))
    assert isinstance(config.dp, DataParallel) and isinstance(config.pp, PipelineParallel | None)
    raise_all(config_errors(config))
    return config


def _has_cp(mesh: ProcessMesh) -> bool:
    return "cp" in mesh.dim_names


def _plan(chosen: dict[str, Any], mesh: ProcessMesh) -> dict[str, Any]:
    mp_config = chosen.get("mp_config", {})
    if unknown := [key for key in mp_config if key != "parallelize_plan"]:
        raise ConfigError(f"mp_config[{unknown[0]!r}]", "no such key", "parallelize_plan")
    plan = mp_config.get("parallelize_plan")
    if not plan:
        if mesh.axis_size("mp") > 1 or "mp_config" in chosen:
            log.warning("parallelize: there is no parallelize_plan, so all ranks along mp do the same work")
        return {}
    read_plan(plan, "parallelize_plan")
    return dict(plan)


def refuse_second_time(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise ConfigError if one of them was parallelised before."""
    if applied_to(model) is not None or any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ConfigError(f"model={type(model).__name__}", "it is parallelised already", "one call for each model")
    if optimizer is not None and optimizer in _OPTIMIZERS:
        raise ConfigError(
            f"optimizer={type(optimizer).__name__}", "it is parallelised already", "one call for each optimizer"
        )


def _join(mesh: ProcessMesh, config: ParallelConfig, device: torch.device) -> RankMesh:
    """Join the process group (torchrun's, if this process has joined none) and make torch's mesh over it."""
    started = TorchElasticEnvironment.detect()
    if not dist.is_initialized() and not started:
        check_world_size(config.mesh, 1)
    environment = TorchElasticEnvironment() if started else LightningEnvironment()
    ensure_process_group(config.mesh, environment, device, None, timedelta(minutes=30))
    replicate, shard = config.dp.split(config.mesh.dp)
    return RankMesh.build(config.mesh, replicate, shard, device.type, mesh.process_ids, config.ulysses)


def _train_here(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], applied: Parallelized) -> None:
    """Have `optimizer` train what stands in the place of its parameters, of those that this rank holds. Collective."""
    if applied.pipeline is None:
        follow_parameters(optimizer, names, applied.module)
    else:
        with whole_model(applied.pipeline.held) as whole:
            follow_parameters(optimizer, names, whole)
        drop_placeholders(optimizer, applied.pipeline.held)
    adapt_optimizer(optimizer)


def _exchange_gradients(applied: Parallelized) -> None:
    """Do for every backward pass and optimizer step what a trainer would do around them.

    Of a model that is cut into stages, `forward_backward` does the first of it.
    """
    average = applied.data_parallel.average
    if average is not None and applied.pipeline is None:
        average.when_accumulated(AfterBackward(average.finish).arm)
    if isinstance(applied.module, FSDPModule) and applied.pipeline is None:
        applied.module.register_forward_hook(_free_unless_training)
    if not _STEP_HOOKS:  # of every optimizer, those made later, too
        _STEP_HOOKS.append(register_optimizer_step_pre_hook(lambda optimizer, *_: adapt_optimizer(optimizer)))
        _STEP_HOOKS.append(register_optimizer_step_post_hook(_forget_all_gathered))


_STEP_HOOKS: list[Any] = []


def _free_unless_training(module: nn.Module, *_: Any) -> None:
    applied = applied_to(module)
    if applied is not None and not torch.is_grad_enabled():  # no backward pass will free what was gathered
        applied.data_parallel.forget_gathered()


def _forget_all_gathered(*_: Any) -> None:
    """After an optimizer step, drop whole parameters that were gathered before it: they have the old values."""
    for applied in all_applied():
        applied.data_parallel.forget_gathered()


def _enter_from_now_on(mode: TorchFunctionMode, *above: TorchFunctionMode) -> None:
    """Enter a mode for the rest of the process, below those that are there already and are asked first."""
    for other in reversed(above):
        other.__exit__(None, None, None)
    mode.__enter__()
    for other in above:
        other.__enter__()


def _checked_afterwards(
    train: Callable[..., torch.Tensor], applied: Parallelized, group: dist.ProcessGroup | None
) -> Callable[..., torch.Tensor]:
    """`train`, and then a look whether attention has been seen on any stage."""

    @functools.wraps(train)
    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss = train(*args, **kwargs)
        applied.context_parallel.report(type(applied.module).__name__, group)
        return loss

    return run


def _report_context(module: nn.Module, *_: Any) -> None:
    applied = applied_to(module)
    if applied is not None and applied.pipeline is None:
        applied.context_parallel.report(type(module).__name__, None)


def _mix_from_now_on(mode: MixedTensors) -> None:
    """Enter the mode for the rest of the process: the user's loop has no place where it could be left."""
    if mode.replicate.mesh not in _MODES:
        _MODES[mode.replicate.mesh] = mode
        _enter_from_now_on(mode, *_GATHERING)


def _explain_errors(module: nn.Module, args: Any, output: Any) -> None:
    """Put the words of the plan into an error that leaves the model; hooks can't raise another one."""
    error = sys.exception()
    if output is None and isinstance(error, Exception) and (explanation := explained(error)) is not None:
        error.args = (str(explanation),)
