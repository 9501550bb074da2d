"""`to_distributed`: a training for one device, made to run on many in a way that is chosen for it."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader

from autolaunch_strategies.apply.registry import applied_to
from autolaunch_strategies.config import AXES, DEFAULT_ORDER, ConfigError, ConfigErrors, MeshShape
from autolaunch_strategies.data_parallel.loader import DistributedLoader, Share, check_loader
from autolaunch_strategies.loop.parallelize import parallelize_with, refuse_second_time
from autolaunch_strategies.loop.process_mesh import ProcessMesh, set_mesh
from autolaunch_strategies.mesh.process_group import ensure_process_group
from autolaunch_strategies.paddle.automatic_choice import Choice, choose, example_named
from autolaunch_strategies.paddle.config import ToDistributedConfig, checked_config

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_CHOICES: weakref.WeakKeyDictionary[nn.Module, Choice] = weakref.WeakKeyDictionary()


def to_distributed(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataloader: DataLoader,
    device_num: int,
    node_num: int | None = 1,
    config: ToDistributedConfig | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer, DistributedLoader]:
    """Make a training for one device run on ``device_num * node_num`` of them, in the way that should be fastest.

    Every process calls it, with what a training on one device has; torchrun starts them
    (``torchrun --nproc-per-node 4 train.py``). The loop stays as it is::

        model, optimizer, loader = to_distributed(model, optimizer, loader, device_num=4)
        for inputs, labels in loader:
            loss, _ = model(inputs, labels=labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    The planner chooses on the first rank: it runs the model on shapes alone, lists what the machine, the model and the
    size of the batch allow, and takes the simplest of the fastest ways that fit into memory. `parallelize` carries it
    out. ``loader.plan`` is the `Choice`; `describe` puts it into words, and the first rank logs it (level INFO).

    Batches stay those of one process. With n ranks along dp each gets 1/n of every batch, in its order, and an n that
    does not divide the batch size is not chosen. The loss of a rank is that of its part; ``loader.global_mean(loss)``
    is that of the whole batch. Gradients are averaged over ranks, so the loss has to be a mean over samples, as for
    `parallelize`; where it leaves out samples or tokens by their values (padding), the mean of the ranks' means is
    taken. Clip with `clip_grad_norm_` of this package.

    By default batches are shared out and layers sharded (dp and mp). ``config.axes`` allows pipelines and sharded
    sequences, too: they ask for ``model.forward_backward`` in the loop and for fused attention in the model.

    Args:
        model: any module that holds its values, with code for one device; the same object is returned.
        optimizer: over parameters of `model`; the same object is returned, with its groups, options and schedulers.
        dataloader: the loader of one process; its batch size is that of all ranks together. See `DistributedLoader`.
        device_num: devices of each node.
        node_num: nodes; None is 1.

    Raises:
        ConfigError: another number of processes, arguments of wrong types, a batch size that can't be shared out, a
            model that can't be sharded as `config` wants, and what `parallelize` refuses; on every rank.
    """
    config = checked_config(config)
    devices, nodes = _count("device_num", device_num), _count("node_num", 1 if node_num is None else node_num)
    _check_types(model, optimizer, dataloader)
    check_loader(dataloader)
    refuse_second_time(model, optimizer)
    _check_world(devices, nodes)
    device = _own_device(model, optimizer)
    environment = TorchElasticEnvironment() if TorchElasticEnvironment.detect() else LightningEnvironment()
    ensure_process_group(MeshShape(dp=devices * nodes), environment, device, None, timedelta(minutes=30))
    choice = _made_by_first_rank(lambda: choose(model, optimizer, dataloader, config, devices, nodes, device))
    mesh = choice.mesh
    place = _process_mesh(mesh, has_pp=choice.settings.pp is not None)
    share = Share(place.coordinate(dist.get_rank())["dp"], mesh.dp)
    loader = DistributedLoader(dataloader, share, mesh.size, choice, only_even=mesh.pp * mesh.cp > 1)
    set_mesh(place)
    with example_named(model, choice.example):
        parallelize_with(model, optimizer, place, choice.settings)
    if mesh.dp > 1:
        model.register_forward_hook(_weighing(loader))
        applied = applied_to(model)
        assert applied is not None
        applied.counted.ask = lambda: loader.weight > 0
    _CHOICES[model] = choice
    if dist.get_rank() == 0:
        log.info("%s", choice)
    return model, optimizer, loader


def describe(model: nn.Module) -> str:
    """What `to_distributed` has chosen for `model`, and why, in words.

    Raises:
        ConfigError: it was not called with this model.
    """
    if model not in _CHOICES:
        raise ConfigError(f"model={type(model).__name__}", "to_distributed was not called with it")
    return str(_CHOICES[model])


# --- checks ------------------------------------------------------------------------------------------------------


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value!r}", "not a number of devices", "a whole number, 1 or more")
    return value


def _check_types(model: Any, optimizer: Any, dataloader: Any) -> None:
    wanted: tuple[tuple[str, Any, type, str], ...] = (
        ("model", model, nn.Module, "torch.nn.Module"),
        ("optimizer", optimizer, torch.optim.Optimizer, "torch.optim.Optimizer"),
        ("dataloader", dataloader, DataLoader, "torch.utils.data.DataLoader"),
    )
    for name, value, kind, called in wanted:
        if not isinstance(value, kind):
            raise ConfigError(
                name, f"a {called} is needed, not {type(value).__name__}",
                "to_distributed(model, optimizer, dataloader, device_num)",
            )  # fmt: skip


def _check_world(devices: int, nodes: int) -> None:
    if dist.is_initialized():
        started = dist.get_world_size()
    else:
        started = TorchElasticEnvironment().world_size() if TorchElasticEnvironment.detect() else 1
    if started == devices * nodes:
        return
    # Where torchrun has started this, its own line is the one that is known to fit.
    command = f"torchrun --nproc-per-node {devices}"
    if nodes > 1:
        command = f"torchrun --nnodes {nodes} --nproc-per-node {devices} --rdzv-endpoint <first node>:29500"
    raise ConfigError(
        f"device_num={devices}, node_num={nodes}",
        f"{devices * nodes} processes are needed, one for each device, but {started} "
        + ("was started" if started == 1 else "were started"),
        "device_num x node_num as many as torchrun starts",
        f"{command} <script>",
    )


def _own_device(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.device:
    """Where this rank computes. Of several GPUs on a machine each rank has its own: what is on another one is moved."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device.type != "cuda":
        return device
    local_rank = int(os.environ.get("LOCAL_RANK", device.index or 0))
    own = torch.device("cuda", local_rank % torch.cuda.device_count())  # it may see its own one alone
    torch.cuda.set_device(own)
    if device != own:
        model.to(own)  # in place: the optimizer holds the same parameters
        for state in optimizer.state.values():
            moved = {key: value.to(own) for key, value in state.items() if _is_on_gpu(value)}
            state.update(moved)
    return own


def _is_on_gpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def _process_mesh(mesh: MeshShape, has_pp: bool) -> ProcessMesh:
    """The mesh with dp, and the axes that are used; ranks in the usual order."""
    named = [axis for axis in DEFAULT_ORDER if axis == "dp" or mesh.sizes[axis] > 1 or (axis == "pp" and has_pp)]
    ranks = torch.arange(mesh.size).view([mesh.sizes[axis] for axis in named])
    assert set(named) <= set(AXES)
    return ProcessMesh(ranks.tolist(), named)


# --- ranks together ----------------------------------------------------------------------------------------------


def _made_by_first_rank(make: Callable[[], Result]) -> Result:
    """What `make` returns on the first rank, or the error that it raises there, on every rank. Collective."""
    outcome: list[Any] = [None]
    failed: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome = [(True, make())]
        except Exception as error:
            failed = error
            known = isinstance(error, ConfigError | ConfigErrors)
            outcome = [(False, error if known else RuntimeError(f"{type(error).__name__} on the first rank: {error}"))]
    dist.broadcast_object_list(outcome, 0)
    succeeded, result = outcome[0]
    if failed is not None:
        raise failed
    if not succeeded:
        raise result
    return result


def _weighing(loader: DistributedLoader) -> Callable[..., Any]:
    """A hook that weighs the gradients of a batch that was not shared out evenly: the mean over ranks is then right.

    They are weighed where they flow into the outputs of the model; what a loss adds beside them (decay of weights) is
    the same on every rank, and stays.
    """

    def weigh(module: nn.Module, args: Any, output: Any) -> Any:
        weight = loader.weight
        if weight == 1.0 or not torch.is_grad_enabled():
            return None
        leaves, shape = tree_flatten(output)
        if strange := [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor | int | float | str | None)]:
            raise ConfigError(
                "dataloader",
                "its last batch can't be shared out evenly, and tensors in what the model returns can't be found to "
                f"weigh it: a {type(strange[0]).__name__} is in it",
                "drop_last=True, or a model that returns tensors, lists, tuples or dicts",
            )
        return tree_unflatten([_weighed(leaf, weight) for leaf in leaves], shape)

    return weigh


def _weighed(leaf: Any, weight: float) -> Any:
    if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
        return leaf
    # A view of its own: gradients that flow on within the model (from a loss into logits) are not weighed twice.
    own = leaf.view_as(leaf)
    own.register_hook(lambda gradient: gradient * weight)
    return own
