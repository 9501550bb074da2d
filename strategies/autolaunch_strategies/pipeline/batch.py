"""The one driver of a batch in stages: forward, backward, and what all stages have to agree on behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from autolaunch_strategies.checkpoint.sharded import share_random_state
from autolaunch_strategies.data_parallel.sharding import DataParallelModule
from autolaunch_strategies.model.parts import parameters_in
from autolaunch_strategies.model.random_positions import drawing_of_part
from autolaunch_strategies.pipeline.absent import ReadOfAbsent
from autolaunch_strategies.pipeline.microbatches import Microbatches, cut_leaves, shapes_of
from autolaunch_strategies.pipeline.objective import Objective
from autolaunch_strategies.pipeline.objects import open_dataclasses
from autolaunch_strategies.pipeline.run import Pipeline
from autolaunch_strategies.pipeline.shared import SharedGradients
from autolaunch_strategies.pipeline.structure import BatchDims, samples_in
from autolaunch_strategies.torch_private.trees import flattened, unflattened
from autolaunch_strategies.training.weights import shares_of, weighed

Gradients = dict[nn.Parameter, torch.Tensor]

LossAndOutput = tuple[torch.Tensor | None, Any]
"""The loss of a step, None where there is none, and whatever else of it is to be kept."""


class Exchange(Protocol):
    """How the last stage says what came of a batch. Every call is collective over the stages."""

    def share(self, extra: Mapping[str, torch.Tensor | int]) -> dict[str, Any]:
        """0-dim tensors, and numbers that the host needs, of the last stage, on every rank."""
        ...

    def fail(self, error: Exception, where: str) -> None:
        """In place of `share`, on the last stage: `share` raises on the others."""
        ...


@dataclass
class TrainedBatch:
    """What the steps of the microbatches of one batch gave."""

    microbatches: Microbatches
    samples: list[int]
    """Of each microbatch."""
    loss: torch.Tensor | None
    """The mean over samples, or over items, without a gradient; on the last stage only."""


class StagedBatch:
    """Takes one batch after the other through a model in stages, for whatever loop calls it.

    A loop calls `run`, in which its step goes through `whole` (``pp.loss=exact``) or `by_schedule`
    (``pp.loss=microbatch``), and then `backward`. Every rank of the pipeline does so, with the same batch.

    Args:
        root: the module whose parameters are trained; the pipelined model is in it.
        exchange: how the last stage speaks to the others.
    """

    def __init__(
        self, root: nn.Module, pipeline: Pipeline, data_parallel: DataParallelModule, exchange: Exchange
    ) -> None:
        self.root, self.pipeline, self.data_parallel, self.exchange = root, pipeline, data_parallel, exchange
        self.objective = Objective(pipeline)
        self._shared = SharedGradients(root, pipeline.cutting, pipeline)
        self._units = _units_of_stages(data_parallel, pipeline)
        self._computed: Gradients = {}
        self._batch_dims = BatchDims()

    @property
    def is_exact(self) -> bool:
        """Whether a step runs once for the whole batch, and not once for each microbatch."""
        return self.pipeline.config.loss == "exact"

    # --- forward ----------------------------------------------------------------------------------------------------

    def run(self, where: str, work: Callable[[], LossAndOutput]) -> LossAndOutput:
        """Do `work`; then every rank knows its loss or that it failed, and goes on with the same random numbers.

        Args:
            where: what `work` runs, for the words of an error.

        Returns:
            The loss of the last stage, without a gradient, on every rank, and what `work` gave besides on this one.
        """
        self.pipeline.forget()
        if torch.is_grad_enabled() and not self.pipeline.stays:  # there every call does
            self.pipeline.agree_on_trained()
        try:
            loss, output = work()
        except Exception as error:
            if isinstance(error, ReadOfAbsent) and self.pipeline.stays:
                self.pipeline.tell_of_read(error)
            if self.pipeline.is_last and self.pipeline.others_wait:
                self.exchange.fail(error, where)
            raise
        values: dict[str, Any] = {"drew": int(self.pipeline.drew_behind_call())}
        if loss is not None:
            values["loss"] = loss.detach()
        values = self.exchange.share(values)
        if values["drew"]:
            share_random_state(self.pipeline.group, self.pipeline.last_rank)
        return values.get("loss"), output

    def whole(self, step: Callable[[], LossAndOutput]) -> LossAndOutput:
        """Run a step once for the whole batch; what it gave, on the last stage only."""
        self.data_parallel.gather_rest()
        loss, output = None, None
        with self.pipeline.whole_step():
            loss, output = step()
        if not self.pipeline.stays:  # there each backward pass looks at its own loss
            self.objective.refuse_parameters_outside(loss)
            self.objective.refuse_what_others_keep(loss)
        return loss, output

    def by_schedule(
        self,
        batch: Any,
        step: Callable[[Any, float | torch.Tensor], LossAndOutput],
        whole_loss: Callable[[], torch.Tensor | None],
        scale: float | torch.Tensor = 1.0,
        count: Callable[[Any], Any] | None = None,
    ) -> TrainedBatch:
        """Run a step forward and backward for every microbatch, by the schedule; `backward` gives its gradients.

        Until then, and if anything is raised, ``.grad`` is what it was before.

        Args:
            batch: tensors whose first dim are the samples (`BatchDims`) are cut along it; all else goes into each step.
            step: of a microbatch and its number of items.
            whole_loss: the loss of the step on the whole batch, with which the mean is compared once.
            scale: what the gradients of the mean loss are multiplied by.
            count: the items over which the loss of a microbatch is the mean, and by which it counts in that of the
                batch; by default its samples.

        Raises:
            ConfigError: the mean loss is another one than that of the whole batch.
        """
        self.data_parallel.forget_gathered()
        with gradients_apart(parameters_in(self.pipeline.holders)) as computed:
            trained = self._train(batch, step, scale, count)
        self.objective.refuse_what_others_keep(trained.loss)
        if trained.loss is not None and not self.objective.is_compared:
            try:
                self.objective.compare(trained.loss, trained.microbatches, whole_loss)
            finally:
                self.data_parallel.forget_gathered()  # the comparison gathers again
        self._computed = computed
        return trained

    def _train(
        self,
        batch: Any,
        step: Callable[[Any, float | torch.Tensor], LossAndOutput],
        scale: float | torch.Tensor,
        count: Callable[[Any], Any] | None,
    ) -> TrainedBatch:
        open_dataclasses(batch)
        leaves, spec = flattened(batch)
        batched = self._batch_dims.of(leaves, spec)
        size = samples_in(leaves, batched)
        schedule = self.pipeline.schedule_of(size)
        parts = cut_leaves(leaves, batched, schedule.microbatches)
        samples = [samples_in(part, batched) for part in parts]
        items: list[float | torch.Tensor] = [*samples]
        if count is not None and schedule.microbatches > 1:
            items = [torch.as_tensor(count(unflattened(part, spec)), device=self.pipeline.device) for part in parts]
        shares = shares_of(items)

        def run(number: int) -> LossAndOutput:
            with drawing_of_part(sum(samples[:number]), samples[number], size):
                return step(unflattened(parts[number], spec), items[number])

        self.data_parallel.gather_rest()
        with self.data_parallel.several_backwards() as complete:
            microbatches = self.pipeline.run_schedule(
                schedule,
                run,
                [share * scale for share in shares],
                [(batched, shapes_of(part)) for part in parts],
                keep_outputs=not self.objective.is_compared,
                completed=lambda stage: complete(self._units[stage]),
            )
        if not self.pipeline.is_last:
            return TrainedBatch(microbatches, samples, None)
        losses = [weighed(loss, share) for loss, share in zip(microbatches.losses, shares, strict=True)]
        return TrainedBatch(microbatches, samples, torch.stack(losses).sum())

    # --- backward ---------------------------------------------------------------------------------------------------

    def backward(self, differentiate: Callable[[], Any], loss: torch.Tensor | None = None) -> None:
        """Add the gradients of the batch that was run last to ``.grad``.

        They are averaged over dp and summed over the stages that hold a parameter, unless later passes are to add to
        them first (`DataParallelModule.accumulating`).

        Args:
            differentiate: differentiates the loss of a whole batch, where it is; not called by a schedule.
            loss: in a step that `stays`, what `differentiate` differentiates; gradients may have been summed before.
        """
        if self.pipeline.stays:
            assert loss is not None
            self._add_backward(loss, differentiate)
            return
        if self.is_exact:
            with self.data_parallel.several_backwards() as complete:
                if self.pipeline.is_last:
                    with self.pipeline.clock.busy():
                        differentiate()
                self.pipeline.drain(lambda stage: complete(self._units[stage]))
        else:
            add_gradients(self._computed)
            self._computed = {}
        self.data_parallel.finish_backward()
        if not self.data_parallel.accumulates:
            self._shared.sum()

    def _add_backward(self, loss: torch.Tensor, differentiate: Callable[[], Any]) -> None:
        """One of several backward passes before a step: what is in ``.grad`` has been summed over stages already."""
        with gradients_apart(self._shared.parameters()) as computed:
            with self.data_parallel.several_backwards():
                self.pipeline.drain_calls_in(loss, differentiate)
            self.data_parallel.finish_backward()
            self._shared.sum()
        add_gradients(computed)


def _units_of_stages(data_parallel: DataParallelModule, pipeline: Pipeline) -> dict[int, list[nn.Module]]:
    """Stage of this rank -> what is sharded by itself and belongs to that stage alone, the last one first."""
    units: dict[int, list[nn.Module]] = {stage: [] for stage in pipeline.stages}
    for name, unit in reversed(data_parallel.units().items()):
        holders = pipeline.cutting.holders
        stages = {stage for own, _ in unit.named_parameters() for stage in holders.get(f"{name}.{own}", ())}
        if len(stages) == 1 and (stage := stages.pop()) in units:
            units[stage].append(unit)
    return units


@contextmanager
def gradients_apart(parameters: Iterable[nn.Parameter]) -> Iterator[Gradients]:
    """Within it ``.grad`` has what is computed there alone; what it had before is back at the end.

    Gives a dict that holds what was computed once the block has ended; it stays empty if the block raises.
    """
    before = {parameter: parameter.grad for parameter in parameters}
    computed: Gradients = {}
    for parameter in before:
        parameter.grad = None
    try:
        yield computed
        computed.update((parameter, parameter.grad) for parameter in before if parameter.grad is not None)
    finally:
        for parameter, gradient in before.items():
            parameter.grad = gradient


@torch.no_grad()
def add_gradients(gradients: Gradients) -> None:
    """Add to ``.grad`` what `gradients_apart` gave."""
    for parameter, gradient in gradients.items():
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
