"""One rank of a mesh, pretended: built, cut, sharded, and trained for a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import _configure_optimizers
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map

from autolaunch_strategies.apply.order import Parallelized, apply_parallelism
from autolaunch_strategies.config import SCHEDULE_SPECS, ConfigError, ParallelConfig
from autolaunch_strategies.context.parallel import gathering
from autolaunch_strategies.data_parallel.gradients import gradient_norm, scale_gradients
from autolaunch_strategies.dry_run.replay import Replays
from autolaunch_strategies.dry_run.trace import GRADIENTS, KINDS, OPTIMIZER, PARAMETERS, Exchange, Trace
from autolaunch_strategies.dry_run.world import PretendedExchange, Way, World
from autolaunch_strategies.experts.find import countable_mixtures
from autolaunch_strategies.mesh.rank_mesh import RankMesh
from autolaunch_strategies.model.construction import Construction
from autolaunch_strategies.model.materialise import become
from autolaunch_strategies.pipeline.batch import LossAndOutput, StagedBatch
from autolaunch_strategies.pipeline.cut import drop_placeholders, whole_model
from autolaunch_strategies.planner.device_functions import unpacked_sequences
from autolaunch_strategies.tensor.views import plain
from autolaunch_strategies.torch_private.calls import no_weak_references
from autolaunch_strategies.torch_private.pretended import (
    addresses_of_fakes,
    meshes_outside,
    own_chunk_alone,
    pretended_group,
    ranges_not_recorded,
    swaps_of_fakes,
    whole_shapes_outside,
)
from autolaunch_strategies.torch_private.tracing import fake_tensors
from autolaunch_strategies.tracing.likeness import Unlike
from autolaunch_strategies.tracing.step import Step
from autolaunch_strategies.training.optimizers import adapt_optimizer, prefer_fused

log = logging.getLogger(__name__)

CPU = torch.device("cpu")
EVEN = "each expert is taken to get as many tokens as any other: the values that say it do not exist here"


@dataclass(frozen=True)
class Training:
    """What every rank trains."""

    parallel: ParallelConfig
    build: Callable[[], tuple[pl.LightningModule, Construction | None]]
    """The module, on meta if its constructor was recorded; a new one for every rank."""
    step: Callable[[pl.LightningModule, Any], Step]
    """The training step of a module with a batch."""
    batch: Callable[[], Any]
    """A rank's share of a batch; shapes alone matter."""
    accumulated: int = 1
    """Batches of an optimizer step, each with a backward pass."""
    precision: Precision | None = None
    own_plan: Mapping[str, Any] | None = None
    clip: float | None = None
    """To which norm gradients are clipped."""
    built: list[tuple[pl.LightningModule, Construction | None]] = field(default_factory=list)
    """Modules that are built already, for a step each."""


@dataclass(frozen=True)
class PretendedRank:
    """What a rank did in a step of a training that goes on (with optimizer state, and gradients of the step before)."""

    rank: int
    coordinate: dict[str, int]
    pipe_rank: int
    """Its place in the order of the stages."""
    memory: dict[str, int]
    """Bytes by `trace.KINDS` at the fullest moment."""
    held: dict[str, int]
    """Bytes of all parameters, gradients and optimizer state, whenever they are held."""
    exchanges: list[Exchange]
    """In order."""
    notes: tuple[str, ...] = ()
    """What a user should know of how it ran."""

    @property
    def total(self) -> int:
        """Bytes at the fullest moment."""
        return sum(self.memory[kind] for kind in KINDS)


def pretend(
    training: Training, rank: int, world: World, until: Way | None = None, replays: bool = True
) -> PretendedRank:
    """Run one step as `rank` of the mesh.

    Args:
        until: only as far as it says something new on this way.
        replays: whether one of many blocks that are alike is run for all of them, if that can be.

    Raises:
        ConfigError: as a run would.
        NotSaidYet: it needs to hear from another rank, which has to be pretended before.
        Said: it has said something new on the way `until`.
    """
    if replays:
        try:
            return _pretend(training, rank, world, until, replays=True)
        except (Unlike, Exception) as reason:  # if it was not for the replays, that is told of the whole step
            log.debug("rank %d is run block by block: %s", rank, reason)
    return _pretend(training, rank, world, until, replays=False)


def _pretend(training: Training, rank: int, world: World, until: Way | None, replays: bool) -> PretendedRank:
    parallel, trace = training.parallel, Trace()
    precision = training.precision or Precision()
    with pretended_group(rank, parallel.mesh.size), ExitStack() as stack:
        replicate, shard = parallel.dp.split(parallel.mesh.dp)
        mesh = RankMesh.build(parallel.mesh, replicate, shard, "cpu", ulysses=parallel.ulysses)
        module, construction = _built(training)
        stack.enter_context(world.heard_by_a_rank(until))
        stack.enter_context(fake_tensors())
        stack.enter_context(meshes_outside())
        stack.enter_context(whole_shapes_outside())
        stack.enter_context(swaps_of_fakes())
        stack.enter_context(own_chunk_alone())
        stack.enter_context(ranges_not_recorded())
        stack.enter_context(addresses_of_fakes())
        stack.enter_context(trace.watching())
        _become_fake(module)
        shown = training.batch()
        if not (isinstance(shown, Mapping) and "position_ids" in shown):
            stack.enter_context(unpacked_sequences())
        module = cast(pl.LightningModule, precision.convert_module(module))
        batch = tree_map(lambda it: torch.empty_like(it, device=CPU) if isinstance(it, torch.Tensor) else it, shown)
        travels = parallel.ep > 1 or parallel.mesh.mp > 1
        notes: tuple[str, ...] = (EVEN,) if travels and countable_mixtures(module) else ()
        step = training.step(module, batch)
        applied = apply_parallelism(
            module,
            parallel,
            mesh,
            CPU,
            construction,
            own_plan=training.own_plan,
            training=step,
            autocast=torch.bfloat16 if precision.precision == "bf16-mixed" else None,
        )
        trainer = _OneStep(training, applied, module, step, batch, precision, trace)
        trainer.warm_up()
        if replays and not _splits_backward(parallel):
            Replays(trace, averages=applied.data_parallel.average is not None).take_over(applied.blocks)
        with trace.listening(), step.around():
            trainer.run()
        trainer.name_all()
        held = trainer.held()
        place = 0 if applied.pipeline is None else applied.pipeline.pipe_rank
        notes += tuple(gathering(applied.context_parallel.sharded))
        return PretendedRank(rank, mesh.coordinate, place, trace.peak(), held, trace.exchanges, notes)


def _built(training: Training) -> tuple[pl.LightningModule, Construction | None]:
    """The module as a step takes it."""
    if training.built:
        return training.built.pop()
    with (training.precision or Precision()).module_init_context():
        module, construction = training.build()
    if construction is not None:
        construction.settle(module)
        construction.remember(module)  # by tensors that are not fake yet
        construction.gives_shapes_alone = True
    return module, construction


def built_once(training: Training) -> Training:
    """The same with a module that is built, for the first step of each fork of this process."""
    with suppress(Exception):  # which is told by a step
        return replace(training, built=[_built(training)])
    return training


def _splits_backward(parallel: ParallelConfig) -> bool:
    """Whether backward passes of blocks come in parts, which one function in place of a block has not."""
    return parallel.mesh.pp > 1 and parallel.pp is not None and SCHEDULE_SPECS[parallel.pp.schedule].splits_backward


class _OneStep:
    """The optimizer step of one rank, as lightning's loop and `MeshStrategy` run it."""

    def __init__(
        self,
        training: Training,
        applied: Parallelized,
        module: pl.LightningModule,
        step: Step,
        batch: Any,
        precision: Precision,
        trace: Trace,
    ) -> None:
        self.training, self.applied, self.module, self.trace = training, applied, module, trace
        self.step, self.batch, self.precision = step, batch, precision
        self.pipeline, self.data_parallel = applied.pipeline, applied.data_parallel
        if self.data_parallel.average is not None:
            self.data_parallel.average.take_as_seen()  # what a step holds is that of all steps but the first
        self.optimizers = self._configured()
        self._redirected = _ForwardRedirection()
        self._staged: StagedBatch | None = None
        if self.pipeline is not None:
            exchange = PretendedExchange(self.pipeline.group, self.pipeline.last_rank)
            self._staged = StagedBatch(module, self.pipeline, self.data_parallel, exchange)
            # What the first batch of a run is checked for are values, of which there are none.
            self.pipeline.modes_to_check.clear()
            self._staged.objective.is_compared = True

    def _configured(self) -> list[torch.optim.Optimizer]:
        pipeline = self.pipeline
        if pipeline is None:
            optimizers = self._asked()
        else:
            with whole_model(pipeline.held):
                optimizers = self._asked()
            for optimizer in optimizers:
                drop_placeholders(optimizer, pipeline.held)
        for optimizer in optimizers:
            adapt_optimizer(optimizer)
            prefer_fused(optimizer)
        return optimizers

    def _asked(self) -> list[torch.optim.Optimizer]:
        module: Any = self.module
        module._trainer = SimpleNamespace(max_steps=1, max_epochs=-1, estimated_stepping_batches=1)  # the end, if asked
        try:
            return list(_configure_optimizers(module.configure_optimizers())[0])
        finally:
            module._trainer = None

    def warm_up(self) -> None:
        """Bring everything into the state of a training that goes on."""
        self.name_all()
        if self.applied.context_parallel.sequences is not None:
            with self.step.around():
                self.run()  # a first step finds out what runs on parts of sequences
        else:
            for parameter in self._trained():
                parameter.grad = torch.zeros_like(parameter)
            self._update()
        self.name_all()

    def _trained(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def run(self) -> None:
        """Forward, backward, norm, clipping and update."""
        count = self.training.accumulated
        for number in range(count):
            with ExitStack() as stack:
                if number < count - 1:
                    stack.enter_context(self.data_parallel.accumulating())
                loss = self._forward(first=number == 0)
                if number == 0:
                    for optimizer in self.optimizers:
                        optimizer.zero_grad()
                self._backward(loss / count if loss is not None else None)
            self.trace.name(GRADIENTS, (parameter.grad for parameter in self._trained()))
        self._clip()
        self._update()

    def _forward(self, first: bool) -> torch.Tensor | None:
        with self.applied.running(), self.precision.train_step_context():
            if self._staged is not None:
                return self._staged.run("training_step", lambda: self._in_stages(self._staged, first))[1]
            if isinstance(self.module, FSDPModule):
                self.module.__dict__["pretended_step"] = self.step.run
                output = self._redirected(self.module, self.module, "pretended_step", self.batch)
            else:
                output = self.step.run(self.batch)
        return _loss_of(tree_map(plain, output))

    def _in_stages(self, staged: Any, first: bool) -> LossAndOutput:
        if staged.is_exact:
            loss, _ = staged.whole(lambda: (_loss_of(tree_map(plain, self.step.run(self.batch))),) * 2)
            return loss, loss
        if first:
            for parameter in self._trained():
                parameter.grad = None

        def run(part: Any, items: Any) -> LossAndOutput:
            loss = _loss_of(tree_map(plain, self.step.run(part)))
            if loss is None:
                raise self._no_loss()
            return loss, None

        trained = staged.by_schedule(
            self.batch,
            run,
            lambda: None,
            1 / self.training.accumulated,
            getattr(self.module, "num_items_in_batch", None),
        )
        return trained.loss, None

    def _backward(self, loss: torch.Tensor | None) -> None:
        with self.applied.running():
            if self._staged is not None:
                self._staged.backward(lambda: loss.backward() if loss is not None else None)
            else:
                if loss is None:
                    raise self._no_loss()
                loss.backward()
                self.data_parallel.finish_backward()

    def _no_loss(self) -> ConfigError:
        return ConfigError(
            f"dryrun with mesh={self.training.parallel.mesh.name}",
            "training_step returned no loss, and a step without one has no backward pass",
            "the loss as a tensor, or a dict with it as `loss`",
        )

    def _clip(self) -> None:
        parameters = list(self.module.parameters())
        if self.pipeline is None:
            norm = gradient_norm(parameters)
        else:
            norm = gradient_norm(parameters, 2.0, self.pipeline.group, self.pipeline.counts, self.pipeline.device)
        if self.training.clip is not None:
            scale_gradients(parameters, norm, self.training.clip)

    def _update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.data_parallel.end_step()
        self.data_parallel.forget_gathered()

    def name_all(self) -> None:
        """Tell the trace which storages are what."""
        self.trace.name(PARAMETERS, self.module.parameters())
        self.trace.name(PARAMETERS, self.module.buffers())
        self.trace.name(GRADIENTS, (parameter.grad for parameter in self.module.parameters()))
        self.trace.name(OPTIMIZER, self._states())

    def _states(self) -> list[torch.Tensor]:
        return [
            value
            for optimizer in self.optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]

    def held(self) -> dict[str, int]:
        """Bytes of what a rank holds between steps; tensors that share memory count once."""
        tensors: dict[str, list[Any]] = {
            PARAMETERS: [*self.module.parameters(), *self.module.buffers()],
            GRADIENTS: [parameter.grad for parameter in self.module.parameters()],
            OPTIMIZER: self._states(),
        }
        return {kind: self.trace.size(items) for kind, items in tensors.items()}


def _become_fake(module: torch.nn.Module) -> None:
    """Turn tensors into fake ones, those on meta, too: of others torch makes fake ones at every use, and keeps both."""
    with no_weak_references(module):
        for tensor in dict.fromkeys([*module.parameters(), *module.buffers()]):
            like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            become(tensor, like)


def _loss_of(output: Any) -> torch.Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, torch.Tensor) else None
