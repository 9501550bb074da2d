"""MeshStrategy: the Lightning side of the engine."""

from __future__ import annotations

import functools
import random
import weakref
from collections.abc import Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.seed import pl_worker_init_function, reset_seed
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from autolaunch_strategies.apply import Parallelized, apply_parallelism
from autolaunch_strategies.checkpoint import CheckpointWriter, load_checkpoint, remove_checkpoint, set_random_state
from autolaunch_strategies.config import (
    ConfigError,
    DataParallel,
    MeshShape,
    ModelParallel,
    ParallelConfig,
    parallel_config,
    parse_mesh,
    raise_all,
)
from autolaunch_strategies.construction import Construction
from autolaunch_strategies.gradients import clip_values, gradient_norm, scale_gradients
from autolaunch_strategies.materialise import WeightFiles, share_statistics
from autolaunch_strategies.mesh import RankMesh
from autolaunch_strategies.optimizers import adapt_optimizer
from autolaunch_strategies.process_group import JoinedEnvironment, check_world_size, ensure_process_group
from autolaunch_strategies.termination import Termination
from autolaunch_strategies.views import plain

_PARALLELIZED: weakref.WeakKeyDictionary[nn.Module, Parallelized] = weakref.WeakKeyDictionary()
"""What was done to which module: a second Trainer takes over what the first one parallelised."""


class MeshStrategy(ParallelStrategy):
    """Trains an unmodified LightningModule on a mesh of devices.

    Usable as ``Trainer(strategy=MeshStrategy(mesh="4x2", dp={"sharding_level": 3}))`` or, once this module has been
    imported, as ``Trainer(strategy="autolaunch")``. Precision is the Trainer's.

    Args:
        mesh: a shape such as ``"8"``, ``"4x2"`` or ``"dp4xmp2"``, or ``"auto"``: every device along dp.
        dp: a sharding level, or the fields of `DataParallel` as a mapping.
        mp: `auto`, `tensor_parallel`, `seq_parallel`, or the fields of `ModelParallel` as a mapping.
        pp, cp: later axes; None as long as they have one rank.
        recompute: activation checkpointing: none, full, n (every n-th block), selective.
        recompute_save: operators whose outputs selective recomputation keeps.
        compile: compile every block: True or a mode of `torch.compile`.
        process_group_backend: torch.distributed's backend; by default gloo for CPU, nccl (and gloo) for GPU.
        timeout: seconds after which a collective that a rank never joins is an error.
        asynchronous_checkpoints: write checkpoints in the background.
        trust_checkpoints: unpickle checkpoint metadata of any type (hyperparameters held in OmegaConf containers
            need it). False restricts it to what `torch.load(weights_only=True)` allows.
        own_plan: the mp plan that comes with the model, if it brings one.
        construction, files: where the values of a module on meta come from (see `apply_parallelism`).

    Raises:
        ConfigError: a wrong shape, an unknown or inconsistent option.
    """

    strategy_name = "autolaunch"

    def __init__(
        self,
        mesh: str | int | MeshShape | Mapping[str, Any] = "auto",
        dp: DataParallel | Mapping[str, Any] | int | None = None,
        mp: ModelParallel | Mapping[str, Any] | str | None = "auto",
        pp: Mapping[str, Any] | None = None,
        cp: Mapping[str, Any] | None = None,
        *,
        recompute: str | int = "none",
        recompute_save: Iterable[str] = ("mm", "attention"),
        compile: bool | str = False,
        process_group_backend: str | None = None,
        timeout: float = 1800.0,
        asynchronous_checkpoints: bool = False,
        trust_checkpoints: bool = True,
        construction: Construction | None = None,
        files: WeightFiles | None = None,
        own_plan: Mapping[str, Any] | None = None,
        **plugins: Any,
    ) -> None:
        if dist.is_initialized():
            plugins.setdefault("cluster_environment", JoinedEnvironment())
        self._open_shape: MeshShape | None = None
        self._num_nodes = 1
        super().__init__(**plugins)
        if mesh == "auto":
            mesh = parse_mesh("-1")
        self.parallel: ParallelConfig = parallel_config(mesh, dp, mp, pp, cp, recompute, recompute_save, compile)
        if -1 in self.parallel.mesh.sizes.values():
            self._open_shape = self.parallel.mesh
        else:
            raise_all(self.parallel.check())
        self.construction, self.files, self.own_plan = construction, files, own_plan
        self._backend, self._timeout = process_group_backend, timedelta(seconds=timeout)
        self._trust_checkpoints = trust_checkpoints
        self._writer = CheckpointWriter(asynchronous_checkpoints)
        self._forward_redirection = _ForwardRedirection()
        self._grad_norm: torch.Tensor | None = None
        self._in_manual_step = False
        self._failed = False
        self._rank_mesh: RankMesh | None = None
        self._rng_begun = False
        self._pending_rng: dict[str, Any] | None = None

    # --- who am I ---------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> MeshShape:
        """The mesh's shape; an open size (-1) is filled once the number of devices is known."""
        return self.parallel.mesh

    @property
    def rank_mesh(self) -> RankMesh:
        """This process in the mesh. Exists from `setup_environment` on."""
        assert self._rank_mesh is not None, "the mesh exists only while the trainer runs"
        return self._rank_mesh

    @property
    def is_distributed(self) -> bool:
        """Whether data differs between ranks: with one rank along dp the user's own sampler stays as it is."""
        return self._open_shape is not None or self.shape.dp > 1

    @property
    def global_rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else super().global_rank

    @property
    def world_size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else super().world_size

    @property
    def dp_rank(self) -> int:
        """Which share of each batch this rank trains on."""
        return self.rank_mesh.coordinate["dp"]

    @property
    def dp_size(self) -> int:
        """Into how many shares each batch is cut."""
        return self.shape.dp

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices
        return self.parallel_devices[self.local_rank % len(self.parallel_devices)]

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes
        if self._parallel_devices:  # lightning tells the devices first
            self._parallel_devices = self._one_device_per_local_rank(self._parallel_devices)

    @property
    def num_processes(self) -> int:
        """Processes on this machine."""
        return len(self.parallel_devices or ())

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._parallel_devices = devices and list(devices)

    def _one_device_per_local_rank(self, devices: list[torch.device]) -> list[torch.device]:
        environment = self.cluster_environment
        # Lightning's own children count as started, too, but their environment learns the world size only from us.
        started = (
            environment is not None
            and environment.creates_processes_externally
            and not isinstance(environment, LightningEnvironment)
        )
        if self._open_shape is not None:
            world_size = environment.world_size() if started and environment else len(devices) * self.num_nodes
            self.parallel.mesh = self._open_shape.resolve(world_size)
            raise_all(self.parallel.check())
        if started and environment is not None:
            check_world_size(self.shape, environment.world_size())
        wanted = max(1, self.shape.size // self.num_nodes)
        whose = f"are asked for (devices={len(devices)}, num_nodes={self.num_nodes})"
        if devices[0].type == "cpu":
            if len(devices) not in (1, wanted):  # 1 is also what devices="auto" gives on a CPU
                check_world_size(self.shape, len(devices) * self.num_nodes, whose)
            return [torch.device("cpu")] * wanted
        if len(devices) < wanted and not started:
            check_world_size(self.shape, len(devices) * self.num_nodes, whose)
        return devices[:wanted]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.dp_size, "rank": self.dp_rank}

    # --- start and end ----------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally and self.shape.size > 1:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment (if it wants to know) and lightning's rank-zero switches who we are."""
        if self.cluster_environment is not None and not dist.is_initialized():
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        _set_rank(self.global_rank if self.shape.size > 1 else 0)

    def setup_environment(self) -> None:
        assert self.accelerator is not None and self.cluster_environment is not None
        self.accelerator.setup_device(self.root_device)
        reset_seed()
        self.set_world_ranks()
        ensure_process_group(self.shape, self.cluster_environment, self.root_device, self._backend, self._timeout)
        _set_rank(dist.get_rank())
        if self._rank_mesh is None:
            replicate, shard = self.parallel.dp.split(self.shape.dp)
            self._rank_mesh = RankMesh.build(self.shape, replicate, shard, self.root_device.type)
        if self.lightning_module is not None:
            self.lightning_module._device_mesh = self._rank_mesh.device_mesh

    def setup(self, trainer: pl.Trainer) -> None:
        self._failed = False
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        Termination(trainer, self.root_device)
        for loop in (
            trainer.fit_loop.epoch_loop.val_loop,
            trainer.validate_loop,
            trainer.test_loop,
            trainer.predict_loop,
        ):
            loop.inference_mode = False  # tensors made in inference mode can't be gathered and used in training again
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            _refuse_what_cannot_work(trainer, sharded=self.shape.dp > 1 and self.parallel.dp.sharding_level > 0)
        self.model = self.lightning_module
        self._parallelize(self.lightning_module, fitting)
        if fitting:
            self._reset_optimizers()
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self._begin_random_streams()

    def _reset_optimizers(self) -> None:
        self.optimizers, self.lr_scheduler_configs = [], []

    def _parallelize(self, module: pl.LightningModule, fitting: bool) -> None:
        existing = _PARALLELIZED.get(module)
        if existing is not None:
            if existing.config != self.parallel:
                raise ConfigError(
                    f"mesh={self.shape.name}",
                    f"this module was parallelised before, for mesh={existing.config.mesh.name}"
                    + ("" if existing.config.mesh != self.shape else " with other options"),
                    "a MeshStrategy with the same options, or a new module that loads a checkpoint",
                )
            self._applied = existing
            return
        if self._layer_sync and fitting:
            module = cast(pl.LightningModule, self._layer_sync.apply(module))
        if self.construction is not None:
            self.construction.remember(module)
        with _constants_kept(module, self.precision_plugin):
            self.precision_plugin.convert_module(module)
        self._applied = apply_parallelism(
            module, self.parallel, self.rank_mesh, self.root_device, self.construction, self.files, self.own_plan
        )
        self.construction = None  # the record keeps every meta tensor alive; it has served
        _PARALLELIZED[module] = self._applied

    def model_to_device(self) -> None:
        """Nothing: `setup` puts every parameter where it belongs."""

    def tensor_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Where lightning builds modules itself (`configure_model`): as `model_sharded_context`."""
        return self.precision_plugin.tensor_init_context()

    def model_sharded_context(self) -> AbstractContextManager[Any]:  # type: ignore[override]
        """The context of `configure_model`: what is built there takes no memory until it is sharded."""
        if self.construction is None:
            self.construction = Construction(seed=self.broadcast(torch.initial_seed()) % 2**31)
        return self.construction.recording()

    def _begin_random_streams(self) -> None:
        """Give every dp rank random numbers of its own; ranks that hold parts of one replica share theirs."""
        if self._rng_begun:
            return
        self._rng_begun = True
        if self.dp_rank > 0:
            seed = (torch.initial_seed() + 0x9E3779B9 * self.dp_rank) % 2**32
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)

    def on_exception(self, exception: BaseException) -> None:
        self._failed = True

    def teardown(self) -> None:
        self._writer.finish(together=not self._failed)
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    def describe(self) -> dict[str, Any]:
        """What was applied to the module, in order and with reasons, as plain data."""
        return self._applied.account

    @property
    def parameter_count(self) -> int:
        """Number of parameters of the whole model."""
        return self._applied.parameter_count

    # --- steps ------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            return self._as_forward("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._as_forward("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._as_forward("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._as_forward("predict_step", *args, **kwargs)

    def _as_forward(self, step: str, *args: Any, **kwargs: Any) -> Any:
        with self._applied.model_parallel.running():
            return tree_map(plain, self._gathered(step, *args, **kwargs))

    def backward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self._applied.model_parallel.running():  # recomputed blocks run their forward within it
            return super().backward(*args, **kwargs)

    def _gathered(self, step: str, *args: Any, **kwargs: Any) -> Any:
        """Run a step of the module as its forward, so that sharded parameters outside of blocks are whole within it."""
        module = self.lightning_module
        assert module is not None
        if not isinstance(module, FSDPModule):
            return getattr(module, step)(*args, **kwargs)
        if step == "training_step" and not module.automatic_optimization:
            # Backward passes and optimizer steps happen within it: it can't be one forward. After each of them
            # parameters are sharded, as hooks expect them; the next call of a part of the model gathers again.
            self._applied.data_parallel.gather_rest()
            self._in_manual_step = True
            try:
                return getattr(module, step)(*args, **kwargs)
            finally:
                self._in_manual_step = False
        output = self._forward_redirection(module, module, step, *args, **kwargs)
        if step != "training_step":  # no backward will free what was gathered
            self._applied.data_parallel.forget_gathered()
        return output

    @contextmanager
    def block_backward_sync(self) -> Generator:
        with self._applied.data_parallel.accumulating():
            yield

    def on_validation_start(self) -> None:
        self._share_statistics()

    def on_test_start(self) -> None:
        self._share_statistics()

    def on_predict_start(self) -> None:
        self._share_statistics()

    def _share_statistics(self) -> None:
        assert self.lightning_module is not None
        share_statistics(self.lightning_module, self.rank_mesh.group("dp", "cp"))

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        if self._in_manual_step:
            self._applied.data_parallel.begin_backward(closure_loss)

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        self._applied.data_parallel.finish_backward()

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            adapt_optimizer(optimizer)
            optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, *_: Any) -> None:
        """Free parameters that something gathered between the backward pass and the step: their values are old."""
        self._applied.data_parallel.forget_gathered()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        self._grad_norm = None
        return super().optimizer_step(*args, **kwargs)

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        # The plugin's own clipping knows one device only; whichever plugin the user chose, this replaces just that.
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]
        self.precision_plugin.clip_grad_by_value = self._clip_by_value  # type: ignore[method-assign]

    def _clip_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        parameters = list(self.precision_plugin.main_params(optimizer))
        self._grad_norm = gradient_norm(parameters)
        scale_gradients(parameters, self._grad_norm, clip_val)

    def _clip_by_value(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        parameters = list(self.precision_plugin.main_params(optimizer))
        self._grad_norm = gradient_norm(parameters)
        clip_values(parameters, clip_val)

    @property
    def last_grad_norm(self) -> torch.Tensor:
        """Norm of all gradients of the last optimizer step before clipping; collective when nothing was clipped."""
        if self._grad_norm is None:
            assert self.lightning_module is not None
            self._grad_norm = gradient_norm(self.lightning_module.parameters())
        return self._grad_norm

    # --- collectives ------------------------------------------------------------------------------------------------

    def _data_group(self, group: Any) -> dist.ProcessGroup | None:
        """The ranks whose data differ: what "all" means to a LightningModule, also when it says WORLD."""
        if group is None or group is dist.group.WORLD:
            return self.rank_mesh.group("dp", "cp")
        return group

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks whose data differ (dp and cp); anything else is returned as it is."""
        group = self._data_group(group)
        if not isinstance(tensor, torch.Tensor) or group is None:
            return tensor
        name = str(reduce_op).rsplit(".", 1)[-1].lower() if reduce_op is not None else "mean"
        total = tensor.detach().clone().to(self.root_device)
        if name in ("mean", "avg") and not total.is_floating_point():
            total = total.float()
        operator = {"mean": "SUM", "avg": "SUM"}.get(name, name.upper())
        dist.all_reduce(total, op=getattr(dist.ReduceOp, operator), group=group)
        return total / group.size() if name in ("mean", "avg") else total

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """One answer for every rank of the mesh: whether all (or any) of them say yes."""
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes)
        return bool(votes == dist.get_world_size()) if all else bool(votes > 0)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """The tensors of all ranks whose data differ, [ranks, *tensor.shape]; of one rank only, the tensor as it is."""
        group = self._data_group(group)
        if group is None:
            return tensor
        tensor = tensor.contiguous().to(self.root_device)
        if sync_grads:
            from torch.distributed.nn.functional import all_gather

            return torch.stack(all_gather(tensor, group=group))
        gathered = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(gathered, tensor, group=group)
        return torch.stack(gathered)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier(device_ids=None if self.root_device.type == "cpu" else [self.root_device.index])

    # --- data -------------------------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: Any) -> Any:
        """Seed loader workers by dp rank: ranks that hold parts of one replica draw the same augmentations."""
        if isinstance(dataloader, DataLoader) and dataloader.num_workers and dataloader.worker_init_fn is None:
            dataloader.worker_init_fn = functools.partial(pl_worker_init_function, rank=self.dp_rank)
        return dataloader

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        assert self.lightning_module is not None
        if self._pending_rng is not None and self.lightning_module.trainer.training:
            set_random_state(self._pending_rng)
            self._pending_rng = None
        return super().batch_to_device(batch, device, dataloader_idx)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        self._share_statistics()
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Nothing yet: `save_checkpoint` writes optimizers itself, by parameter name."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError("MeshStrategy writes checkpoint directories; it takes no storage_options")
        assert self.lightning_module is not None
        optimizers = self.optimizers if "optimizer_states" in checkpoint else []
        path = Path(self.broadcast(str(filepath)))
        self._writer.save(path, checkpoint, self.lightning_module, optimizers, self.rank_mesh)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.lightning_module is not None
        self._writer.finish()
        trust = self._trust_checkpoints if weights_only is None else not weights_only
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        optimizers = self.optimizers if fitting else []
        checkpoint = load_checkpoint(Path(checkpoint_path), self.lightning_module, optimizers, self.rank_mesh, trust)
        state = checkpoint.pop("random_state", None)
        if fitting and state is not None:
            set_random_state(state)  # for the loaders of a new epoch
            if _in_the_middle_of_an_epoch(checkpoint):
                self._pending_rng = state  # making the loaders again draws numbers that the first run did not draw
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing: `load_checkpoint` has filled the parameters."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: `load_checkpoint` has filled the optimizers."""

    def remove_checkpoint(self, filepath: Any) -> None:
        self._writer.finish()
        path = Path(filepath)
        if self.is_global_zero and path.is_dir() and not path.is_symlink():
            remove_checkpoint(path)
        else:
            super().remove_checkpoint(filepath)


@contextmanager
def _constants_kept(module: nn.Module, precision: Any) -> Generator:
    """Leave buffers that are not saved in the precision of their constructor while a half precision plugin converts.

    They are constants such as rotary frequencies, which lose their meaning in 16 bits.
    """
    kept = [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if name in owner._non_persistent_buffers_set and buffer.is_floating_point()
    ]
    yield
    if isinstance(precision, HalfPrecision):
        for owner, name, buffer in kept:
            owner._buffers[name] = buffer


def _set_rank(rank: int) -> None:
    rank_zero_only.rank = fabric_rank_zero_only.rank = rank  # type: ignore[attr-defined]


def _in_the_middle_of_an_epoch(checkpoint: dict[str, Any]) -> bool:
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
    return progress.get("current", {}).get("ready", 0) > 0 and not progress.get("is_last_batch", False)


def _refuse_what_cannot_work(trainer: pl.Trainer, sharded: bool) -> None:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, pl.callbacks.StochasticWeightAveraging):
            raise ConfigError(
                "StochasticWeightAveraging",
                "it averages whole weights; here each rank may hold a part",
                "averaging the weights of saved checkpoints",
            )
        if isinstance(callback, pl.callbacks.WeightAveraging) and sharded:
            raise ConfigError(
                type(callback).__name__,
                "it averages whole weights; here each rank holds a part",
                "sharding level 0, or averaging the weights of saved checkpoints",
                "dp.sharding_level=0",
            )


StrategyRegistry.register(
    MeshStrategy.strategy_name,
    MeshStrategy,
    description="Train an unmodified LightningModule on an N-D device mesh",
    override=True,  # `import autolaunch` may have announced the name before
)
