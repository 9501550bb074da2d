"""MeshStrategy: what lightning asks of a strategy, answered by the parts of the engine that it holds."""

from __future__ import annotations

import hashlib
import logging
import signal
import time
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_flatten, tree_map

from autolaunch_strategies.apply.order import apply_parallelism
from autolaunch_strategies.apply.registry import applied_to, register
from autolaunch_strategies.config import (
    SHARDING_AXES,
    ConfigError,
    ContextParallel,
    DataParallel,
    MeshShape,
    ModelParallel,
    PipelineParallel,
    parallel_config,
    parse_mesh,
)
from autolaunch_strategies.data_parallel.gradients import (
    are_finite,
    clip_values,
    gradient_norm,
    multiply_gradients,
    scale_gradients,
)
from autolaunch_strategies.data_parallel.position import ordered
from autolaunch_strategies.experts.load import ExpertLoad
from autolaunch_strategies.lightning.batches import Batches
from autolaunch_strategies.lightning.checkpoints import Checkpoints
from autolaunch_strategies.lightning.collectives import Collectives
from autolaunch_strategies.lightning.ema import check_averages
from autolaunch_strategies.lightning.first_step import FirstStep
from autolaunch_strategies.lightning.gradient_norms import replace_grad_norm
from autolaunch_strategies.lightning.hooks import gradients_are_read
from autolaunch_strategies.lightning.items import ItemCounts
from autolaunch_strategies.lightning.metrics import StepValues, exchange_metrics_over, place_metrics
from autolaunch_strategies.lightning.monitored import MonitoredLogs
from autolaunch_strategies.lightning.place import Place
from autolaunch_strategies.lightning.positions import Positions
from autolaunch_strategies.lightning.refusals import (
    refuse_callbacks,
    refuse_module_in_stages,
    refuse_scaler,
)
from autolaunch_strategies.lightning.replaced import replace_functions
from autolaunch_strategies.lightning.staged_steps import StagedSteps
from autolaunch_strategies.lightning.summaries import show_whole_models
from autolaunch_strategies.lightning.votes import Votes
from autolaunch_strategies.mesh.process_group import JoinedEnvironment
from autolaunch_strategies.mesh.rank_mesh import RankMesh
from autolaunch_strategies.model.construction import Construction
from autolaunch_strategies.model.materialise import WeightFiles, share_statistics
from autolaunch_strategies.model.random_positions import PositionedNumbers
from autolaunch_strategies.pipeline.cut import drop_placeholders, whole_model
from autolaunch_strategies.pipeline.idle import idle_share
from autolaunch_strategies.pipeline.structure import BatchDims, samples_in
from autolaunch_strategies.plan.choose import planned_part
from autolaunch_strategies.tensor.views import plain
from autolaunch_strategies.training.optimizers import (
    adapt_optimizer,
    check_optimizer_in_stages,
    draw_alike,
    prefer_fused,
)
from autolaunch_strategies.training.weights import weighed

log = logging.getLogger(__name__)


class MeshStrategy(ParallelStrategy):
    """Trains an unmodified LightningModule on a mesh of devices.

    Usable as ``Trainer(strategy=MeshStrategy(mesh="4x2", dp={"sharding_level": 3}))`` or, once this module has been
    imported, as ``Trainer(strategy="autolaunch")``. Precision is the Trainer's.

    Args:
        mesh: a shape such as ``"8"``, ``"4x2"`` or ``"dp4xmp2"``, or ``"auto"``: every device along dp.
        dp: ddp, zero1, zero2, fsdp, hsdp, a sharding level, or the fields of `DataParallel` as a mapping.
        mp: `auto`, `tensor_parallel`, `seq_parallel`, or the fields of `ModelParallel` as a mapping.
        pp: `exact`, the name of a schedule (`1f1b`, ...), or the fields of `PipelineParallel` as a mapping.
        cp: `gather`, `ring`, `ulysses`, `usp`, or the fields of `ContextParallel` as a mapping.
        recompute: activation checkpointing: none, full, n (every n-th block), selective, budget (chosen when blocks are
            compiled), offload (to the host).
        recompute_save: operators whose outputs selective recomputation keeps.
        recompute_budget: with budget, the share (0 to 1) that compiled blocks may keep of what they would; 0.5 if None.
        compile: compile every block: True or a mode of `torch.compile`.
        random_numbers: what dropout drops while training: what a generator on each rank says (by_rank; on one rank the
            numbers of plain Lightning; on several `torch.rand(())` in modules of the model is the same), or what
            belongs to the place of an element in the run (by_position; the same on every mesh, and other ones than
            by_rank).
        ep: over how many ranks of dp x cp x mp the experts of a mixture are shared out.
        float8: the recipe (rowwise, tensorwise) by which linear layers of blocks multiply in float8, by torchao; the
            Trainer's precision is that of everything else.
        process_group_backend: torch.distributed's backend; by default gloo for CPU, nccl (and gloo) for GPU.
        timeout: seconds after which a collective that a rank never joins is an error, once the first training step is
            done; at least ten times as long as that step.
        first_step_timeout: the same before, and while a checkpoint is written.
        asynchronous_checkpoints: write checkpoints in the background.
        trust_checkpoints: run what checkpoints' pickles name. Otherwise one that holds more than tensors and plain data
            (numbers, texts, containers, OmegaConf's, NumPy's, and what `torch.serialization.add_safe_globals` adds) is
            refused. ``trainer.fit(weights_only=...)`` says it for one call.
        verify_checkpoints: before loading, compare the content of the files with their hashes (hash), or their sizes
            only (size).
        own_plan: the mp plan that comes with the model, if it brings one.
        batch_size: what the batch size of a `DataLoader` counts: the samples of all ranks (global), so that every mesh
            trains on the batches of one process, in their order; or those of each rank (per_rank), which are then as
            many of these batches, one after the other. ``Trainer(use_distributed_sampler=False)`` leaves loaders alone.
        recorded: what checkpoints say about the run beside the class of the optimizer and the batch size of loaders:
            plain data by name. A resumed run in which `optimizer`, `batch_size`, `seed`, `seq_len`, `data` or `model`
            is another than in the run that saved is refused; what else has changed is logged.
        allow_on_resume: which of these may be another. A new optimizer begins without state.
        data_position: what a resume in the middle of an epoch does where the place in the training data can't be found
            again, as in an iterable dataset without `state_dict`: it is refused (required), reads what was trained on
            once more and throws it away (read_again), or begins the epoch's data again (start_over).
        construction: where the values of a module on meta come from (see `apply_parallelism`).
        files: the same where they come from files.

    Raises:
        ConfigError: a wrong shape, an unknown or inconsistent option.
    """

    strategy_name = "autolaunch"

    def __init__(
        self,
        mesh: str | int | MeshShape | Mapping[str, Any] = "auto",
        dp: DataParallel | Mapping[str, Any] | int | str | None = None,
        mp: ModelParallel | Mapping[str, Any] | str | None = "auto",
        pp: PipelineParallel | Mapping[str, Any] | str | None = "exact",
        cp: ContextParallel | Mapping[str, Any] | str | None = "gather",
        *,
        recompute: str | int = "none",
        recompute_save: Iterable[str] = ("mm", "attention"),
        recompute_budget: float | None = None,
        compile: bool | str = False,
        random_numbers: str = "by_rank",
        ep: int = 1,
        float8: str | None = None,
        process_group_backend: str | None = None,
        timeout: float = 600.0,
        first_step_timeout: float = 1800.0,
        asynchronous_checkpoints: bool = False,
        trust_checkpoints: bool = False,
        verify_checkpoints: str = "hash",
        construction: Construction | None = None,
        files: WeightFiles | None = None,
        own_plan: Mapping[str, Any] | None = None,
        batch_size: str = "global",
        recorded: Mapping[str, Any] | None = None,
        allow_on_resume: Collection[str] = (),
        data_position: str = "required",
        **plugins: Any,
    ) -> None:
        if mesh == "auto":
            mesh = parse_mesh("-1")
        self.parallel = parallel_config(
            mesh, dp, mp, pp, cp, recompute, recompute_save, compile, random_numbers, ep, float8, recompute_budget
        )
        self.place = Place(self.parallel, process_group_backend, timeout, first_step_timeout)
        self.collectives = Collectives(self.place)
        self.batches = Batches(batch_size)
        self.positions = Positions(data_position)
        self.checkpoints = Checkpoints(
            self.place,
            self.positions,
            asynchronous_checkpoints,
            trust_checkpoints,
            verify_checkpoints,
            recorded,
            allow_on_resume,
            lambda: self.batches.samples_per_step(self.dp_size),
        )
        if dist.is_initialized():
            plugins.setdefault("cluster_environment", JoinedEnvironment())
        super().__init__(**plugins)
        self.construction, self.files, self.own_plan = construction, files, own_plan
        self.first_step = FirstStep()
        self.stop_signals: tuple[signal.Signals, ...] = ()
        """Signals of which the first ends training between two steps, and nobody else is told; see `Votes`."""
        self.stop_seconds: float | None = None
        """How long training may take to end after one of them, or to save after a failure."""
        self.stopped_too_late: Callable[[int | BaseException], None] | None = None
        """What happens after that, in another thread; it is told the signal's number or the failure."""
        self.votes: Votes | None = None
        """What the ranks agree on between two steps, from `setup` on."""
        self._grad_norm: torch.Tensor | None = None
        self._in_manual_step = False
        self._failed = False
        self._after_closure: Any = None
        self._monitored: MonitoredLogs | None = None
        self._warned_of_assigned = self._told_of_statistics = False
        self._steps: StagedSteps | None = None
        self._numbers: PositionedNumbers | None = None
        self._batch_dims = BatchDims()
        self._items: ItemCounts | None = None
        self._samples_before = 0
        self._first_step_began: float | None = None
        self._is_warm = False
        """Whether the first training step is done."""
        self._step_of_updates, self._updates = -1, 0
        """The step of the last update of an optimizer, and how many before that one were in this step."""

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    # --- the place of this process ----------------------------------------------------------------------------------

    @property
    def shape(self) -> MeshShape:
        """The mesh's shape; an open size (-1) is filled once the number of devices is known."""
        return self.place.shape

    @property
    def rank_mesh(self) -> RankMesh:
        """This process in the mesh. Exists from `setup_environment` on."""
        return self.place.rank_mesh

    @property
    def is_distributed(self) -> bool:
        """Whether data differs between ranks: with one rank along dp the user's own sampler stays as it is."""
        return self.place.data_differs

    @property
    def global_rank(self) -> int:
        return self.place.global_rank

    @property
    def world_size(self) -> int:
        return self.place.world_size

    @property
    def dp_rank(self) -> int:
        """Which share of each batch this rank trains on."""
        return self.place.dp_rank

    @property
    def dp_size(self) -> int:
        """Into how many shares each batch is cut."""
        return self.shape.dp

    @property
    def root_device(self) -> torch.device:
        return self.place.device

    @property
    def cluster_environment(self) -> ClusterEnvironment | None:
        return self.place.environment

    @cluster_environment.setter
    def cluster_environment(self, environment: ClusterEnvironment | None) -> None:
        self.place.environment = environment

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        return self.place.devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self.place.devices = devices and list(devices)

    @property
    def num_nodes(self) -> int:
        return self.place.num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self.place.spread(num_nodes)  # lightning sets the devices first

    @property
    def num_processes(self) -> int:
        """Processes on this machine."""
        return len(self.parallel_devices or ())

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.dp_size, "rank": self.dp_rank}

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self.place.starts_processes:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        self.place.announce()

    def setup_environment(self) -> None:
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        self.set_world_ranks()
        self.place.join()
        if self.lightning_module is not None:
            self.lightning_module._device_mesh = self.rank_mesh.device_mesh

    def process_dataloader(self, dataloader: Any) -> Any:
        dataloader = self.first_step.give_back(dataloader)
        is_trained_on = self._module.trainer.training
        if is_trained_on:
            dataloader = ordered(dataloader)
        shared = self.batches.share(dataloader, self.dp_rank, self.dp_size, self.shape.size)
        return self.positions.loader(dataloader, shared) if is_trained_on else shared

    # --- collectives ------------------------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if self.batches.is_in_step and reduce_op in ("mean", "avg") and isinstance(tensor, torch.Tensor):
            tensor = weighed(tensor, self.batch_weight)  # what a training step logs is a mean
        return self.collectives.reduce(tensor, group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return self.collectives.reduce_boolean_decision(decision, all)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        return self.collectives.all_gather(tensor, group, sync_grads)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self.collectives.broadcast(obj, src)

    def barrier(self, name: str | None = None) -> None:
        self.collectives.barrier()

    # --- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._share_statistics()
        return self._module.state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Nothing yet: `save_checkpoint` writes optimizers itself, by parameter name."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError("MeshStrategy writes checkpoint directories; it takes no storage_options")
        optimizers = self.optimizers if "optimizer_states" in checkpoint else []
        with self.place.patient():
            self.checkpoints.save(Path(self.broadcast(str(filepath))), checkpoint, self._module, optimizers)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        fitting = self._module.trainer.state.fn == TrainerFn.FITTING
        trust = None if weights_only is None else not weights_only
        checkpoint = self.checkpoints.load(Path(checkpoint_path), self._module, self.optimizers, fitting, trust)
        if fitting:
            check_averages(self._module.trainer)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """`load_checkpoint` has filled the parameters; here come those that a hook has changed."""
        self.checkpoints.fill_changed(checkpoint.get("state_dict", {}), self._module)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: `load_checkpoint` has filled the optimizers."""

    def remove_checkpoint(self, filepath: Any) -> None:
        if not self.checkpoints.remove(Path(filepath)):
            super().remove_checkpoint(filepath)

    # --- start and end ----------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer) -> None:
        self._failed = False
        assert self.accelerator is not None
        module = self._module
        self.accelerator.setup(trainer)
        self.votes = Votes(trainer, self.root_device, self.stop_signals, self.stop_seconds, self.stopped_too_late)
        self.votes.before_resumed_validation = self.positions.before_validation
        replace_grad_norm()
        self.batches.connect(trainer)
        self.positions.connect(trainer)
        for loop in (
            trainer.fit_loop.epoch_loop.val_loop,
            trainer.validate_loop,
            trainer.test_loop,
            trainer.predict_loop,
        ):
            loop.inference_mode = False  # tensors made in inference mode can't be gathered and used in training again
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and self.shape.pp > 1:
            assert self.parallel.pp is not None
            refuse_module_in_stages(module, self.parallel.pp)
        if fitting:
            refuse_callbacks(trainer, self.shape, self.parallel.dp.sharding_level)
            refuse_scaler(self.precision_plugin, self.parallel)
        self.model = module
        self._parallelize(module, fitting)
        self._applied.counted.ask = self.batches.is_counted
        if self._applied.expert_load is not None:
            self._applied.expert_load.counted.ask = self.batches.is_counted
        self._model_name = type(planned_part(module)[0]).__name__
        self._step_values = StepValues()
        if self.shape.mp * self.shape.pp * self.shape.cp > 1:
            exchange_metrics_over(self.rank_mesh.group("dp"), module)
        count = getattr(module, "num_items_in_batch", None)
        self._items = ItemCounts(count, self.rank_mesh.group("dp"), self.root_device) if callable(count) else None
        if self._applied.pipeline is not None:
            pipeline, data_parallel = self._applied.pipeline, self._applied.data_parallel
            self._steps = StagedSteps(
                module, pipeline, data_parallel, self.rank_mesh.group("dp"), lambda: self.loss_weight, count
            )
            self._steps.relay.install()
        show_whole_models(trainer, self._applied)
        if fitting and self.shape.dp > 1 and "log" not in vars(module):  # the relay of stages averages all logs itself
            self._monitored = MonitoredLogs(module)
            self._monitored.install()
        if fitting:
            self._reset_optimizers()
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting and self.parallel.random_numbers == "by_position":
            self._numbers = PositionedNumbers(module, self.place.seed, attention=self.shape.cp == 1)
        elif fitting and self.shape.dp > 1:
            self._numbers = PositionedNumbers(module, self.place.seed, only_single=True)
        self.place.begin_random_streams()
        self.place.apply_timeout()

    def _reset_optimizers(self) -> None:
        self.optimizers, self.lr_scheduler_configs = [], []

    def _parallelize(self, module: pl.LightningModule, fitting: bool) -> None:
        existing = applied_to(module)  # by a Trainer before this one
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
            self.construction.settle(module, leave=[module.trainer])
            self.construction.remember(module)
        place_metrics(module, self.root_device)
        with _constants_kept(module, self.precision_plugin):
            self.precision_plugin.convert_module(module)
        # Without training, too: the next Trainer may train. In compiled mixtures what counts breaks graphs of blocks.
        load = None if self.parallel.compile and self.parallel.ep == 1 else ExpertLoad(module)
        self._applied = apply_parallelism(
            module,
            self.parallel,
            self.rank_mesh,
            self.root_device,
            self.construction,
            self.files,
            self.own_plan,
            self.first_step.of(module.trainer, module, self.broadcast),
            _autocast_dtype(self.precision_plugin),
        )
        self._applied.expert_load = load
        self.construction = None  # the record keeps every meta tensor alive; it has served
        register(self._applied)

    def model_to_device(self) -> None:
        """Nothing: `setup` puts every parameter where it belongs."""

    # Lightning's own two are generators under `contextmanager`, of which a type checker asks for the same class.
    def tensor_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:  # type: ignore[override]  # lightning's stubs: a Generator
        """Where lightning builds modules itself (`configure_model`): as `model_sharded_context`."""
        return self.precision_plugin.tensor_init_context()

    def model_sharded_context(self) -> AbstractContextManager[Any]:  # type: ignore[override]  # a Generator, too
        """The context of `configure_model`: what is built there takes no memory until it is sharded."""
        if self.construction is None:
            self.construction = Construction(seed=self.broadcast(torch.initial_seed()) % 2**31)
        return self.construction.recording()

    def on_exception(self, exception: BaseException) -> None:
        self._failed = True

    def teardown(self) -> None:
        if self._steps is not None:
            self._steps.relay.remove()
            self._steps = None
        if self._monitored is not None:
            self._monitored.remove()
            self._monitored = None
        if (not_written := self.checkpoints.finish(together=not self._failed)) is not None:
            warnings.warn(str(not_written), stacklevel=2)  # what went wrong before is what is raised
        if self.votes is not None:
            self.votes.end_limit()
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    def describe(self) -> dict[str, Any]:
        """What was applied to the module, in order and with reasons, as plain data; what steps showed is in it, too."""
        return self._applied.now()

    def worst_expert_load(self) -> tuple[str, float] | None:
        """(the layer of experts with the least even load, tokens of its busiest expert over those of the mean one).

        Over all ranks, of everything trained since the last call; None without a mixture of experts. Collective.
        """
        load = self._applied.expert_load
        return None if load is None else load.worst(self.rank_mesh, self.root_device)

    def expert_tokens(self, before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Names of this stage's layers of experts -> [experts], how many tokens each has got in training, on all ranks.

        None are counted with `compile`. Collective over the ranks of a stage.

        Args:
            before: what the one who asks was told so far, empty at first; it is brought up to date, so that the counts
                are those since the last call.
        """
        load = self._applied.expert_load
        return {} if load is None else load.tokens(before, self.rank_mesh)

    def measured_idle_share(self) -> float | None:
        """The share of a training step, from 0 to 1, in which the ranks of a pipeline computed nothing.

        None without a pipeline, and before the first step. Collective over all ranks.
        """
        pipeline = self._applied.pipeline
        if pipeline is None:
            return None
        return idle_share(pipeline.clock, pipeline.pipe_rank, pipeline.group.size(), pipeline.device)

    def lacks(self, module: nn.Module) -> bool:
        """Whether other stages of a pipeline hold parameters of `module`, so that its output may be a placeholder."""
        return self._applied.pipeline is not None and self._applied.pipeline.held.lacks(module)

    @property
    def parameter_count(self) -> int:
        """Number of parameters of the whole model."""
        return self._applied.counts.parameters

    @property
    def trained_count(self) -> int:
        """How many of them were not frozen when training was set up."""
        return self._applied.counts.trained

    def weights_are_finite(self) -> bool:
        """Whether all weights that are trained are finite, those of all ranks. Collective; waits for the device."""
        trained = [item for item in self._module.parameters() if item.requires_grad and not item.is_meta]
        return self.reduce_boolean_decision(are_finite(trained))

    # --- steps ------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._first_step_began is None:
            self._first_step_began = time.monotonic()
        joined = self._step_values.joined(self._module) if self._steps is None and self.shape.dp > 1 else nullcontext()
        counted = self.batches.step(self._module)
        with counted, self._numbers_of_step(args), self.precision_plugin.train_step_context(), joined:
            if self._items is not None:
                self._items.begin(args[0], *self._place_in_step(), is_counted=self.batches.is_counted())
            output = self._as_forward("training_step", *args, **kwargs)
        if self._steps is None and self._module.automatic_optimization and gradients_are_read(self._module):
            self._applied.data_parallel.forget_until_backward()  # gradients belong to sharded parameters
        return output

    def _numbers_of_step(self, args: Any) -> AbstractContextManager[None]:
        if self._numbers is None:
            return nullcontext()
        if self._numbers.only_single:
            return self._numbers.step(self._module.trainer.fit_loop.epoch_loop.total_batch_idx, 0, 0)
        leaves, form = tree_flatten(args[:1])
        samples = samples_in(leaves, self._batch_dims.of(leaves, form))
        first, together = self.batches.place(samples, self.dp_rank, self.dp_size)
        number, before = self._optimizer_step(together)
        return self._numbers.step(number, samples, before + first)

    def _optimizer_step(self, samples: int) -> tuple[int, int]:
        """(the number of the present one, how many samples its earlier batches had), before a batch of `samples`."""
        trainer = self._module.trainer
        batches = trainer.fit_loop.epoch_loop
        if not self._module.automatic_optimization:
            return batches.total_batch_idx, 0
        before = 0 if batches.batch_idx % trainer.accumulate_grad_batches == 0 else self._samples_before
        self._samples_before = before + samples
        return trainer.global_step, before

    def _place_in_step(self) -> tuple[int, int]:
        """(the number of the present batch in its optimizer step, how many batches are accumulated in a step)."""
        trainer = self._module.trainer
        if not self._module.automatic_optimization:
            return 0, 1
        batches = trainer.accumulate_grad_batches
        return trainer.fit_loop.epoch_loop.batch_idx % batches, batches

    @property
    def batch_weight(self) -> float | torch.Tensor:
        """The weight of this rank's mean over the last training batch in the mean over dp: 1 if all parts are equal.

        By samples, or by what the module counts (`num_items_in_batch`): then it may be a 0-dim tensor.
        """
        return self.batches.weight if self._items is None else self._items.weight

    @property
    def loss_weight(self) -> float | torch.Tensor:
        """`batch_weight` times what the batch counts beside the first one of its optimizer step."""
        return self.batches.weight if self._items is None else self._items.loss_weight

    @property
    def step_scale(self) -> float | torch.Tensor | None:
        """What the sum of weighed losses over the batches of the last step is multiplied by; None: by nothing."""
        return None if self._items is None else self._items.step_scale

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context(), self.batches.evaluation_step(self._module, *args[2:3]):
            return self._as_forward("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context(), self.batches.evaluation_step(self._module, *args[2:3]):
            return self._as_forward("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._as_forward("predict_step", *args, **kwargs)

    def evaluate(self, step: str, *args: Any) -> Any:
        """What the method `step` of the module returns, run as its evaluation steps are, without gradients. Collective.

        Of a pipeline the last stage has it; the others have None. The module must be in evaluation mode.
        """
        with torch.no_grad(), self.precision_plugin.predict_step_context():
            return self._as_forward(step, *args)

    def _as_forward(self, step: str, *args: Any, **kwargs: Any) -> Any:
        with self._applied.running():
            if self._steps is None:
                output = tree_map(plain, self._gathered(step, *args, **kwargs))
            else:
                method = getattr(self._module, step)
                if step == "training_step":
                    output = self._steps.training_step(method, *args, **kwargs)
                else:
                    output = self._steps.evaluation_step(step, method, *args, **kwargs)
        self._applied.context_parallel.report(self._model_name, self.rank_mesh.group("pp"))
        return output

    def backward(
        self, closure_loss: torch.Tensor, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        closure_loss = weighed(closure_loss, self.loss_weight)
        plugin, module = self.precision_plugin, self._module
        numbers = nullcontext() if self._numbers is None else self._numbers.backward()
        with self._applied.running(), numbers:  # recomputed blocks run their forward within it
            if self._steps is None and self._in_manual_step:
                self._applied.data_parallel.begin_backward(closure_loss)
            loss = plugin.pre_backward(closure_loss, module)
            if self._steps is None:
                plugin.backward(loss, module, optimizer, *args, **kwargs)
                self._applied.data_parallel.finish_backward()  # on_after_backward sees the gradients of all ranks
            else:
                self._steps.backward(lambda: plugin.backward(loss, module, optimizer, *args, **kwargs), loss)
            if self._items is not None and not self._applied.data_parallel.accumulates:
                multiply_gradients(module.parameters(), self._items.step_scale)
            return plugin.post_backward(loss, module)

    def _gathered(self, step: str, *args: Any, **kwargs: Any) -> Any:
        """Run a step of the module as its forward, so that sharded parameters outside of blocks are whole within it."""
        module = self._module
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

    def _share_statistics(self) -> None:
        group = self.rank_mesh.group(*SHARDING_AXES)
        others = share_statistics(self._module, group)
        if others and not self._told_of_statistics and dist.get_rank(group) == 0:
            warnings.warn(
                f"{', '.join(others[:3])}{', ...' if others[3:] else ''}: a forward has computed other values on other "
                "ranks, from their parts of the batch. The first rank's are kept, which are not those of one device: "
                "average them over the ranks where they are computed (batch norm's are)",
                stacklevel=2,
            )
        self._told_of_statistics |= bool(others)

    def on_train_start(self) -> None:
        self.checkpoints.compare_batch_size()
        self.positions.begin()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.positions.trains()
        self.batches.begin()

    def on_validation_start(self) -> None:
        self._share_statistics()

    def on_test_start(self) -> None:
        self._share_statistics()

    def on_predict_start(self) -> None:
        self._share_statistics()

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        pipeline = self._applied.pipeline
        if pipeline is None:
            super().setup_optimizers(trainer)
        else:
            with whole_model(pipeline.held) as whole:  # what groups parameters sees those of every stage
                super().setup_optimizers(trainer)
                for optimizer in self.optimizers:
                    check_optimizer_in_stages(optimizer)
                names = {parameter: name for name, parameter in whole.named_parameters()}
                self.checkpoints.optimizer_names = [
                    [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
                    for optimizer in self.optimizers
                ]
            for optimizer in self.optimizers:
                drop_placeholders(optimizer, pipeline.held)
        for optimizer in self.optimizers:
            adapt_optimizer(optimizer)
            prefer_fused(optimizer)
            if self.parallel.dp.split(self.shape.dp)[0] > 1:
                draw_alike(optimizer, self._seed_of_update, self.root_device)
            optimizer.register_step_post_hook(self._after_step)

    def _seed_of_update(self) -> int:
        """Of the random numbers of the optimizer step that follows; replicas of what this rank holds have the same."""
        _, shards = self.parallel.dp.split(self.shape.dp)
        part = self.dp_rank % shards
        step = self._module.trainer.global_step  # which steps of a bare optimizer, by hand, do not change
        self._updates = self._updates + 1 if step == self._step_of_updates else 0
        self._step_of_updates = step
        words = f"{self.place.seed}:{step}:{self._updates}:{part}"
        return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=4).digest(), "little")

    def weights_changed(self) -> None:
        """Weights were changed from outside of a step: what is gathered of them is freed, as its values are old."""
        self._applied.data_parallel.forget_gathered()

    def _after_step(self, *_: Any) -> None:
        self._warn_of_assigned_gradients()
        self.weights_changed()  # something may have gathered them between the backward pass and the step

    def _warn_of_assigned_gradients(self) -> None:
        average = self._applied.data_parallel.average
        assigned = [] if average is None or self._warned_of_assigned else average.not_averaged()
        if assigned:
            self._warned_of_assigned = True
            name = next(name for name, item in self._module.named_parameters() if item is assigned[0])
            log.warning(
                "dp: the gradient of %s was assigned and did not come from backward(), so it is not averaged over "
                "ranks, whose weights may part; write self.manual_backward(loss), or average it with self.all_gather",
                name,
            )

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        self._grad_norm = None
        result = super().optimizer_step(*args, **kwargs)
        self._applied.data_parallel.end_step()
        if not self._is_warm and self._first_step_began is not None:
            self._is_warm = True
            self.place.shorten_timeouts(time.monotonic() - self._first_step_began)
        return result

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        # The plugin's own clipping knows one device only; whichever plugin the user chose, this replaces just that.
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]  # of this object alone
        self.precision_plugin.clip_grad_by_value = self._clip_by_value  # type: ignore[method-assign]  # of this object alone
        # Lightning has no hook between those that look at gradients and the optimizer's step.
        vars(self.precision_plugin).pop("_after_closure", None)  # that of an earlier `fit`
        self._after_closure = self.precision_plugin._after_closure
        self.precision_plugin._after_closure = self._before_update  # type: ignore[method-assign,assignment]  # of this object alone

    def _before_update(self, *args: Any) -> None:
        with self._applied.model_parallel.running():  # hooks may clip gradients that are sharded along mp
            self._after_closure(*args)
        if self.votes is not None:
            self.votes.updates = True

    def _clip_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        parameters = list(self.precision_plugin.main_params(optimizer))
        self._grad_norm = self._norm_of(parameters)
        scale_gradients(parameters, self._grad_norm, clip_val)

    def _clip_by_value(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        parameters = list(self.precision_plugin.main_params(optimizer))
        self._grad_norm = self._norm_of(parameters)
        clip_values(parameters, clip_val)

    @property
    def last_grad_norm(self) -> torch.Tensor:
        """Norm of all gradients of the last optimizer step before clipping; collective when nothing was clipped."""
        if self._grad_norm is None:
            self._grad_norm = self._norm_of(self._module.parameters())
        return self._grad_norm

    def _norm_of(self, parameters: Iterable[nn.Parameter]) -> torch.Tensor:
        pipeline = self._applied.pipeline
        if pipeline is None:
            return gradient_norm(parameters)
        return gradient_norm(parameters, 2.0, pipeline.group, pipeline.counts, pipeline.device)


def _autocast_dtype(precision: Precision) -> torch.dtype | None:
    """The type to which steps are cast, if all that they add up stays in fp32 without a scale."""
    return torch.bfloat16 if isinstance(precision, MixedPrecision) and precision.precision == "bf16-mixed" else None


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


replace_functions()
StrategyRegistry.register(
    MeshStrategy.strategy_name,
    MeshStrategy,
    description="Train an unmodified LightningModule on an N-D device mesh",
    override=True,  # `import autolaunch` may have announced the name before
)
