"""The work of one rank of a pipeline: passes of its stages, forward and backward, in order."""

from __future__ import annotations

import hashlib
import itertools
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from autolaunch_strategies.config import ConfigError, PipelineParallel
from autolaunch_strategies.context.arguments import is_simple
from autolaunch_strategies.model.parts import modules_of, parameters_in
from autolaunch_strategies.model.random_positions import drawing, drawing_now, drawing_of_part
from autolaunch_strategies.pipeline.absent import INSTEAD, Absent, ReadOfAbsent
from autolaunch_strategies.pipeline.cut import Cutting, Held
from autolaunch_strategies.pipeline.idle import IdleClock
from autolaunch_strategies.pipeline.linear_layers import Casts, StageLinears, WeightGradients, add_weight_gradients
from autolaunch_strategies.pipeline.microbatches import (
    Filled,
    Gradients,
    Microbatches,
    Work,
    cut_leaves,
    shapes_of,
    spread,
)
from autolaunch_strategies.pipeline.objects import open_dataclasses, open_dataclasses_of
from autolaunch_strategies.pipeline.own_memory import cut_off, separate_gradients
from autolaunch_strategies.pipeline.placement import group_rank, pipe_rank, stages_of
from autolaunch_strategies.pipeline.record import Leaf
from autolaunch_strategies.pipeline.sample_trial import Samples, samples_meet, try_samples, what_training_keeps
from autolaunch_strategies.pipeline.stage import StagedModel, pass_of, tail_of
from autolaunch_strategies.pipeline.structure import Structure, Structures, batch_size
from autolaunch_strategies.pipeline.transfer import Arrivals, Axes, Channel, Header, LeafMeta, local_part
from autolaunch_strategies.schedules.schedule import (
    Action,
    Kind,
    Schedule,
    fill_and_drain,
    fitting_microbatches,
    schedule_for_batch,
    with_transfers,
)
from autolaunch_strategies.tensor.views import plain
from autolaunch_strategies.torch_private.backward import run_backward_of
from autolaunch_strategies.torch_private.calls import intercept_calls, intercepted, run_call
from autolaunch_strategies.torch_private.collectives import host_device
from autolaunch_strategies.torch_private.modes import without_autocast
from autolaunch_strategies.torch_private.random_state import all_random_numbers_kept, seed_torch
from autolaunch_strategies.tracing.state import trial
from autolaunch_strategies.tracing.tensors import tensors_in
from autolaunch_strategies.training.batch_statistics import batch_norms
from autolaunch_strategies.training.weights import weighed

log = logging.getLogger(__name__)


class LeaveStep(BaseException):
    """Ends a user's step on a stage that is not the last, where it calls the model.

    No Exception: user code must not catch it.
    """


class Job(NamedTuple):
    """One microbatch at one stage."""

    stage: int
    microbatch: int


@dataclass
class _Arrival:
    """What comes from another stage: this rank's parts of what is carried, or gradients of what was sent."""

    parts: list[torch.Tensor]
    works: list[dist.Work] = field(default_factory=list)
    header: Header = field(default_factory=lambda: Header((), ()))
    """Of what is carried."""

    def wait(self) -> None:
        """Until it is there; on a GPU what is computed from now on waits, and not the host."""
        for work in self.works:
            work.wait()


class Pipeline:
    """One rank's part of a model that is cut into stages.

    Calls of the model are intercepted on the instance. Within a step they run this rank's stages; outside of one they
    run all stages forward and give the output to every rank.
    """

    def __init__(
        self,
        root: nn.Module,
        cutting: Cutting,
        held: Held,
        structures: Structures,
        config: PipelineParallel,
        rank_of_stage: tuple[int, ...],
        group: dist.ProcessGroup,
        axes: Axes,
        channel: Channel,
        device: torch.device,
    ) -> None:
        """Take over the calls of the pipelined model in `root`. Not collective.

        Args:
            rank_of_stage: the pipe rank of every stage.
            group: this rank's peers that hold the other stages.
            channel: to them.
        """
        self.root, self.cutting, self.held, self.structures = root, cutting, held, structures
        self.config, self.rank_of_stage, self.group, self.device = config, rank_of_stage, group, device
        self.axes = axes
        self.model = root.get_submodule(cutting.name.removesuffix("."))
        self.host = host_device(device, group)
        self.pipe_rank = pipe_rank(rank_of_stage, group.size(), group.rank())
        self.stages = stages_of(rank_of_stage, self.pipe_rank)
        self._homes = [group_rank(rank_of_stage, group.size(), stage) for stage in range(len(rank_of_stage))]
        self.calls = 0
        """How often the model has been called in the present step."""
        self.others_wait = False
        """Whether the other stages have done their part of the present step; they can be told of an error then."""
        self.returned_numbers: bool | None = None
        """Whether what the model first returned on this stage, the last one, has no NaN; None before."""
        self.number = 0
        """Of the present step: part of the seeds of what stages draw at random."""
        self.channel = channel
        self.clock = IdleClock(device)
        self._own_call = intercepted(self.model)
        self.staged = StagedModel(self.model, cutting, self.stages, axes, device)
        intercept_calls(self.model, self._called)
        self._in_step: Callable[[Any, Any], Any] | None = None
        self.stays = False
        """Whether steps run to their end on every stage, with the output of the model, and not on the last one only."""
        self._works: dict[Job, Work] = {}
        self._filled: list[tuple[Filled, dict[Job, Work]]] = []
        """Batches that have been run forward in the present step, and can be differentiated."""
        self._drained: list[Filled] = []
        """Those that have been."""
        self._trained: tuple[int, ...] = ()
        self._weights, self._casts = WeightGradients(), Casts()
        self._linears_now: StageLinears | None = None
        """What linear layers run within now, if they run otherwise than elsewhere."""
        self._error: Exception | None = None
        """What a step raised that the other stages are not to wait for."""
        self._state_at_call: Any = None
        self.modes_to_check = {True, False}
        """Of training and evaluation those in which samples were not tried yet."""
        self._is_cut = True
        """False once it is known that only a whole batch gives what the model gives."""
        self.holders = self._with_parameters()
        """The modules that have parameters of their own, as they are in the present step."""
        self._batch_norms, self._warned_of_statistics = batch_norms(self.model), False
        self._seed_of_step = torch.initial_seed()
        self.drew_in_replay = False
        """Whether the replayed step drew random numbers: its loss can't be compared with that of microbatches then."""
        self._first_held: dict[int, tuple[nn.Parameter, bool]] = {}
        self._schedules: dict[int, Schedule] = {}

    # --- who am I ---------------------------------------------------------------------------------------------------

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage: there the model's output and the loss are."""
        return self.last_stage in self.stages

    @property
    def last_stage(self) -> int:
        """The number of the last stage."""
        return len(self.rank_of_stage) - 1

    @property
    def last_rank(self) -> int:
        """The rank within the group that holds the last stage."""
        return self._home(self.last_stage)

    @property
    def name(self) -> str:
        """What a step has to call, as its writer knows it."""
        name = self.cutting.name.removesuffix(".")
        if not self._is_lightning:
            return "model"
        return f"self.{name}" if name else "self"

    @property
    def _is_lightning(self) -> bool:
        return isinstance(self.root, pl.LightningModule)

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank is the one that counts a parameter which several stages may hold."""
        known = self._first_held.get(id(parameter))
        if known is None or known[0] is not parameter:  # sharding puts other objects in the place of parameters
            holders = self.cutting.holders
            self._first_held = {
                id(item): (item, name not in holders or holders[name][0] in self.stages)
                for name, item in self.root.named_parameters()
            }
            known = self._first_held.get(id(parameter), (parameter, self.is_last))
        return known[1]

    def _with_parameters(self) -> list[nn.Module]:
        return [module for module in modules_of(self.root) if module._parameters]

    def _home(self, stage: int) -> int:
        """The rank within the group that holds a stage."""
        return self._homes[stage]

    def _is_here(self, stage: int) -> bool:
        return stage in self.stages

    # --- calls of the model -----------------------------------------------------------------------------------------

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """What a call of the model would do without a pipeline."""
        return self._own_call(*args, **kwargs) if self._own_call else run_call(self.model, *args, **kwargs)

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        if self.staged.running:
            return self._call(*args, **kwargs)
        if not is_simple(args, kwargs):
            open_dataclasses((args, kwargs))
        if self._in_step is None:
            return self._forward_only(args, kwargs)
        self.calls += 1
        if self.calls > 1 and not self.stays:
            raise ConfigError(
                "pp",
                f"the step calls {self.name} more than once; other stages than the last leave the step at the first "
                "call, so a pipeline can run one call per step",
                "one call of the model per step, e.g. with both inputs joined along the batch"
                + ("; or manual optimization, whose steps run on every stage" if self._is_lightning else ""),
            )
        output = self._in_step(args, kwargs)
        if self.returned_numbers is None and self.is_last:
            self.returned_numbers = not any(map(_has_nan, tensors_in(output)))
        return output

    @contextmanager
    def _step(self, call: Callable[[Any, Any], Any]) -> Iterator[None]:
        """Within it the model is called once, and `call` answers; a stage that is not the last may leave."""
        assert self._in_step is None, "a step within a step"
        self._in_step, self.calls = call, 0
        left = False
        try:
            yield
        except LeaveStep:
            left = True
        finally:
            self._in_step = None
            self.clock.stop()
        if self.calls == 0 and not left and not self.stays:
            raise ConfigError(
                "pp",
                f"the step never calls {self.name}(...), so it can't be run in stages",
                f"a step that calls {self.name}(...); a call of its forward, or of a part of it, does not count",
            )

    # --- the whole batch: fill and drain ----------------------------------------------------------------------------

    def whole_step(self) -> AbstractContextManager[None]:
        """Within it the one call of the model runs every microbatch, and returns the output of the whole batch.

        On a stage that is not the last it ends the block. With gradients enabled, `drain` has to follow. If the step
        `stays`, there may be several calls, and each returns the output on every stage.
        """
        return self._step(self._whole)

    def agree_on_trained(self) -> None:
        """Tell the other stages which parameters are trained: what needs gradients across a cut depends on it.

        Collective over the stages; to be called before every batch: a loop may freeze and unfreeze at any time, and a
        rank sees those of its own stages only.
        """
        trained = bytes(parameter.requires_grad for parameter in parameters_in(self.holders))
        own = int.from_bytes(hashlib.blake2b(trained, digest_size=7).digest(), "little")
        of_stages = torch.zeros(self.group.size(), dtype=torch.int64, device=self.host)
        of_stages[self.group.rank()] = own
        dist.all_reduce(of_stages, group=self.group)
        self._trained = tuple(of_stages.tolist())

    def _whole(self, args: Any, kwargs: Any) -> Any:
        if self.stays:
            return self._whole_everywhere(args, kwargs)
        output = self._fill(args, kwargs)
        if not self.is_last:
            raise LeaveStep
        self.others_wait = True
        self._state_at_call = self._random_state()
        self.clock.start()
        return output

    def _whole_everywhere(self, args: Any, kwargs: Any) -> Any:
        """The output of the whole batch on every stage; on others than the last its gradient is not asked for."""
        self.agree_on_trained()
        self._refuse_own_output((args, kwargs))
        output = self._sent_to_all(self._fill(args, kwargs))
        if self._filled and torch.is_grad_enabled() and not self.is_last:
            leaves = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, torch.Tensor)]
            self._filled[-1][0].results = [leaf for leaf in leaves if leaf.requires_grad]
        return output

    def _refuse_own_output(self, inputs: Any) -> None:
        """Raise ConfigError for a call with what an earlier call of the step returned, and needs a gradient of."""
        used = leaves_of(*(leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, torch.Tensor)))
        is_own = torch.tensor(int(any(filled.is_in(used) for filled, _ in self._filled)), device=self.host)
        dist.all_reduce(is_own, dist.ReduceOp.MAX, self.group)
        if is_own:
            raise ConfigError(
                "pp",
                f"the step calls {self.name} with what it returned before, so one call would be differentiated "
                "through the other",
                "what an earlier call returned, without a gradient: detach()",
            )

    def drew_behind_call(self) -> bool:
        """Whether random numbers were drawn since the model was called for a whole batch: other stages did not."""
        state, self._state_at_call = self._state_at_call, None
        return state is not None and state != self._random_state()

    def _random_state(self) -> Any:
        states = [torch.get_rng_state()]
        if self.device.type != "cpu":
            states.append(torch.get_device_module(self.device).get_rng_state(self.device))
        numbers: Any = np.random.get_state()
        return [state.numpy().tobytes() for state in states], random.getstate(), (numbers[1].tobytes(), numbers[2])

    def _fill(self, args: Any, kwargs: Any) -> Any:
        """Run every microbatch through this rank's stages; on the last one the output of the whole batch."""
        leaves, spec = tree_flatten((args, kwargs))
        structure, kind, count = self._way_to_fill(args, kwargs, leaves, spec)
        filled = Filled(structure, count)
        if filled.trains:
            self.clock.begin()
        leaves = filled.cut_before(leaves)
        self._works = {}
        with self._linears() if filled.trains else nullcontext():
            self._run_forward(filled, leaves, spec, kind)
        if filled.trains:
            self._filled.append((filled, self._works))
        output = None
        if self.is_last:
            whole_args, whole_kwargs = tree_unflatten(leaves, spec)
            with self._own_numbers("tail", 0) if structure.may_draw else nullcontext(), self.clock.busy():
                todo = tail_of(structure, *filled.joined(self.axes))
                output = self.staged.run(todo, whole_args, whole_kwargs, self._call)
        self.channel.finish()
        return output

    def _way_to_fill(self, args: Any, kwargs: Any, leaves: list[Any], spec: Any) -> tuple[Structure, Any, int]:
        """(the structure of the call, its kind, the number of microbatches).

        Where the config leaves the number open, a batch that can't be cut is one microbatch.
        """
        training = self.model.training
        wanted = fitting_microbatches("gpipe", self.group.size(), 1, self._most_microbatches(), batch_size(leaves))
        try:
            structure, kind = self.structures.of(args, kwargs, training, wanted > 1)
            if wanted > 1 and self.config.microbatches is None and not structure.is_recorded:
                raise ConfigError(
                    "pp.microbatches",
                    "this call of the model can't be recorded, so it is not known what becomes of its microbatches",
                    "one microbatch",
                    "pp.microbatches=1",
                )
            count = min(max(wanted, 1), structure.samples(leaves))
            if count > 1 and training in self.modes_to_check:
                self.modes_to_check.remove(training)
                self._check_samples(structure, leaves, spec)
        except ConfigError as error:
            if wanted <= 1 or self.config.microbatches is not None or isinstance(error, ReadOfAbsent):
                raise  # what a stage reads may be there on the others, which go on
            self._is_cut = False
            log.warning("pp: %s; so each batch is one microbatch, and stages wait for each other", error.problem)
            structure, kind = self.structures.of(args, kwargs, training, False)
            count = 1
        return structure, kind, count

    def _most_microbatches(self) -> int | None:
        """As many as the config says; one where that leaves it open and the model has to see the whole batch."""
        if not self._is_cut:
            return 1
        if self.config.microbatches is not None or self.config.allow_batch_statistics:
            return self.config.microbatches
        name = next((name for name, part in self._batch_norms.items() if part.training), None)
        if name is None:
            return None
        if not self._warned_of_statistics:
            self._warned_of_statistics = True
            log.warning(
                "pp: %s takes its statistics from the whole batch, so each batch is one microbatch and stages wait for "
                "each other; pp.allow_batch_statistics=true lets it see microbatches, another result",
                name,
            )
        return 1

    def _run_forward(
        self,
        filled: Filled,
        leaves: list[Any],
        spec: Any,
        kind: Any,
        each: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Run the microbatches of flattened arguments through this rank's stages; `filled` takes the last one's.

        Args:
            each: a pass of one stage runs within it.
        """
        parts = cut_leaves(leaves, filled.structure.batched, filled.count)
        keys = [(kind, self._trained, shapes_of(part)) for part in parts]
        samples = [filled.structure.samples(part) for part in parts]
        arrivals = Arrivals(self._begin(keys))
        handed: dict[Job, _Arrival] = {}
        actions = fill_and_drain(self.rank_of_stage, filled.count)[0][self.pipe_rank]
        passes = [Job(action.stage, action.microbatch) for action in actions if action.kind is Kind.F]
        # Glue runs in each pass, and on the last stage once more; what it counts is counted once.
        last = None if self.is_last else passes[-1]
        for action in actions:
            job = Job(action.stage, action.microbatch)
            if action.kind is Kind.RECV_F:
                arrivals.expect(action, self._home(job.stage - 1))
                continue
            if action.kind is Kind.F:
                part_args, part_kwargs = tree_unflatten(_unchanged(parts[job.microbatch], filled.structure), spec)
                arrival = handed.pop(job) if job in handed else self._arrived(arrivals, job)
                drawn = drawing_of_part(sum(samples[: job.microbatch]), samples[job.microbatch], sum(samples))
                with drawn, each(), nullcontext() if job == last else self._glue_kept(filled.structure):
                    self._forward(filled.structure, job, arrival, part_args, part_kwargs, stop=True)
                if job.stage == self.last_stage:
                    filled.take(self._works[job])
                elif self._is_here(job.stage + 1):
                    handed[Job(job.stage + 1, job.microbatch)] = self._handed_on(job)
                else:
                    continue  # what is made is sent next
            else:
                self._send(job, keys[job.microbatch])
            if not filled.trains:
                del self._works[job]

    @torch.no_grad()
    def _check_samples(self, structure: Structure, leaves: list[Any], spec: Any) -> None:
        """Once in training, and in evaluation: whether samples stand along the first dim, and none changes another.

        Two of them run together and one by one; in evaluation if random numbers, or the statistics of batch norm, would
        differ. What the output of the model is made of must agree.

        Raises:
            ConfigError: it does not, or the model does something else in evaluation, which stages can't; on every rank.
        """
        has_statistics = any(part.training for part in self._batch_norms.values())
        evaluates = self.model.training and (structure.may_draw or has_statistics)
        kept = ""
        with trial(self.device):
            if evaluates and not has_statistics:
                kept = what_training_keeps(self.model, self._samples_through(structure, leaves, spec))
            if evaluates:
                structure = self._in_evaluation(leaves, spec)
            tried = try_samples(self.model, evaluates, self._samples_through(structure, leaves, spec))
        self.channel.finish()
        problem = tried.problem(self.name, leaves, self.axes, self.device) if self.is_last else None
        if kept and problem is None:
            problem = samples_meet(
                f"{self.name}.{kept} is another one after two samples in turn than after both together"
            )
        for group in (self.group, *self.axes.groups()):  # one rank may see what those with other stages or parts don't
            problems: list[ConfigError | None] = [None] * group.size()
            dist.all_gather_object(problems, problem, group=group)
            problem = next((item for item in reversed(problems) if item is not None), None)
        if problem is not None:
            raise problem

    def _in_evaluation(self, leaves: list[Any], spec: Any) -> Structure:
        """The structure of a call in evaluation.

        Raises:
            ConfigError: stages can't run it.
        """
        try:
            args, kwargs = tree_unflatten(leaves, spec)
            return self.structures.of(args, kwargs, training=False, several=True)[0]
        except ConfigError as error:
            raise ConfigError(
                "pp.microbatches",
                f"whether samples change each other can't be tried out in evaluation mode ({error.problem}), so "
                "microbatches might change the result",
                "a model that runs alike in training and in evaluation, or one microbatch",
                "pp.microbatches=1",
            ) from error

    def _samples_through(self, structure: Structure, leaves: list[Any], spec: Any) -> Samples:
        """Two samples of a batch, and what runs some of it through the stages."""
        two = [
            (leaf[:2] if is_batched else leaf) if isinstance(leaf, torch.Tensor) else leaf
            for leaf, is_batched in zip(leaves, structure.batched, strict=True)
        ]
        return Samples(
            structure, two, lambda filled, some, each: self._run_forward(filled, some, spec, "samples", each)
        )

    @contextmanager
    def _glue_kept(self, structure: Structure) -> Iterator[None]:
        """Put back afterwards what glue keeps from call to call; within it, it works on copies."""
        before: list[tuple[dict[str, Any], str, Any]] = []
        for name, key in structure.recording.kept_by_glue:
            module = self.model.get_submodule(name)
            own: dict[str, Any] = module._buffers if key in module._buffers else module.__dict__
            before.append((own, key, own.get(key, _ABSENT)))
            if isinstance(own.get(key), torch.Tensor):
                own[key] = own[key].clone()
        try:
            yield
        finally:
            for own, key, value in before:
                own[key] = value
                if value is _ABSENT:
                    del own[key]

    def drain(self, completed: Callable[[int], None]) -> None:
        """Run every microbatch backward through this rank's stages, once the loss has been differentiated.

        Args:
            completed: is told each stage of this rank once nothing of it is left to be differentiated.
        """
        assert len(self._filled) == 1, "one batch has been run forward"
        self._drain(*self._filled.pop(), completed)

    def drain_calls_in(self, loss: torch.Tensor, differentiate: Callable[[], Any]) -> None:
        """Differentiate `loss`, which every stage has, on the last one, and the calls it comes from on all of them.

        Raises:
            ConfigError: it uses parameters of the model itself, of which a stage has its own only; on every stage.
        """
        used = leaves_of(loss)
        # The last stage says which: with a part of the output others may have one more.
        calls = [self.is_last and filled.is_in(used) for filled, _ in self._filled]
        wanted = self._agreed(any(filled.is_in(used) for filled in self._drained), self.used_outside(loss), calls)
        if self.is_last:
            with self.clock.busy():
                differentiate()
        for place in reversed([place for place, is_wanted in enumerate(wanted) if is_wanted]):
            filled, works = self._filled.pop(place)
            self._drain(filled, works, lambda stage: None)  # another call may go through the same stages
            filled.forget()
            self._drained.append(filled)

    def tell_of_read(self, error: ReadOfAbsent) -> None:
        """Raise, on every stage, what is said of a loss that uses parameters, where this one could not compute it."""
        name = error.parameter.removeprefix(self.cutting.name)
        self._agreed(False, [name], [False] * len(self._filled))

    def _agreed(self, again: bool, outside: Sequence[str], calls: Sequence[bool]) -> list[int]:
        """Which calls are to be differentiated; or every stage raises what is wrong on one of them."""
        flags = torch.tensor([again, bool(outside), *calls], dtype=torch.int64, device=self.host)
        dist.all_reduce(flags, dist.ReduceOp.MAX, self.group)
        is_again, is_outside, *wanted = flags.tolist()
        if is_again:
            raise ConfigError(
                "pp",
                f"what a call of {self.name} returned is differentiated a second time; the stages have forgotten it",
                f"one backward pass for the sum of the losses, or another call of {self.name}",
            )
        if is_outside:
            names: list[Any] = [None] * self.group.size()
            dist.all_gather_object(names, outside, group=self.group)
            raise self.uses_outside(next(name for part in names for name in part))
        return wanted

    def _drain(self, filled: Filled, works: dict[Job, Work], completed: Callable[[int], None]) -> None:
        self._works = works
        arrivals = Arrivals(self._begin(()))
        handed: dict[Job, Gradients] = {}
        made: dict[Job, list[torch.Tensor]] = {}
        actions = fill_and_drain(self.rank_of_stage, filled.count)[1][self.pipe_rank]
        last = {action.stage: number for number, action in enumerate(actions)}
        for number, action in enumerate(actions):
            job = Job(action.stage, action.microbatch)
            if action.kind is Kind.RECV_B:
                arrivals.expect(action, self._home(job.stage + 1))
            elif action.kind is Kind.B:
                if job.stage == self.last_stage:
                    gradients = filled.gradients(job.microbatch)
                else:
                    gradients = handed.pop(job) if job in handed else self._arrived_gradients(arrivals, job)
                inputs = self._works[job].inputs
                made[job] = self._backward(job, gradients)
                if job.stage > 0 and self._is_here(job.stage - 1):
                    handed[Job(job.stage - 1, job.microbatch)] = spread(made.pop(job), inputs)
            else:
                self.channel.send(made.pop(job), self._home(job.stage - 1))
            if number == last[action.stage]:
                completed(action.stage)
        self._casts.clear()
        self.channel.finish()
        with self.clock.busy():
            filled.differentiate_before()
        self.clock.end()

    def forget(self) -> None:
        """Begin a step: drop what one left behind that failed halfway."""
        self.holders = self._with_parameters()
        self._seed_of_step = torch.initial_seed()
        self.others_wait = False
        self._filled.clear()
        self._drained.clear()
        self._works = {}
        self._weights.take()
        self._casts.clear()

    def _forward_only(self, args: Any, kwargs: Any) -> Any:
        """Outside of a step: the output on every rank. It can't be differentiated."""
        with torch.no_grad():
            output = self._fill(args, kwargs)
        output = self._sent_to_all(output)
        if not torch.is_grad_enabled():
            return output
        return tree_map_only(torch.Tensor, _not_differentiable, output)

    def _sent_to_all(self, output: Any) -> Any:
        """What the last stage has, on all of them; on the others tensors that need a gradient are leaves."""
        source = dist.get_global_rank(self.group, self.last_rank)
        open_dataclasses(output)
        leaves, spec = tree_flatten(output) if self.is_last else ([], None)
        leaves = [plain(leaf) for leaf in leaves]
        header: list[Any] = [([LeafMeta.of(leaf) for leaf in leaves], spec)]
        dist.broadcast_object_list(header, source, group=self.group)
        metas, spec = header[0]
        open_dataclasses_of(spec)
        output_leaves: list[Any] = []
        for place, meta in enumerate(metas):
            if meta.dtype is None:
                output_leaves.append(meta.constant)
                continue
            if self.is_last:
                tensor = leaves[place].detach().contiguous()
            else:
                tensor = torch.empty(meta.shape, dtype=meta.dtype, device=self.device)
            dist.broadcast(tensor, source, group=self.group)
            output_leaves.append(tensor.requires_grad_(meta.requires_grad))
        return tree_unflatten(leaves if self.is_last else output_leaves, spec)

    # --- microbatches one by one, by a schedule ---------------------------------------------------------------------

    def schedule_of(self, size: int) -> Schedule:
        """The order of work for a batch of `size` samples."""
        if size not in self._schedules:
            self._schedules[size] = schedule_for_batch(self.config, self.rank_of_stage, size)
        return self._schedules[size]

    def run_schedule(
        self,
        schedule: Schedule,
        step: Callable[[int], Any],
        factors: Sequence[float | torch.Tensor],
        keys: Sequence[Any],
        keep_outputs: bool,
        completed: Callable[[int], None],
    ) -> Microbatches:
        """Train on one batch: the step of every microbatch at every stage of this rank, forward and backward.

        What a step raises behind its call of the model, on the last stage, is raised at the end: until then that stage
        answers the others, which would wait for it, with gradients of zero.

        Args:
            step: runs the user's step on a microbatch of that number and returns (its loss, anything else).
            factors: by what the loss of each microbatch is multiplied before it is differentiated.
            keys: per microbatch something hashable that is equal where shapes are.
            keep_outputs: keep what the model returned, for `replay`.
            completed: is told each stage of this rank once nothing of it is left to be differentiated or sent.
        """
        self.clock.begin()
        keys = [(self._trained, key) for key in keys]
        results = Microbatches(works=[] if keep_outputs else None)
        arrivals = Arrivals(self._begin(keys))
        handed: dict[Job, _Arrival] = {}
        handed_back: dict[Job, Gradients] = {}
        input_gradients: dict[Job, list[torch.Tensor]] = {}
        later: dict[Job, Any] = {}
        parts_off = any(action.kind is Kind.W for actions in schedule.actions for action in actions)
        self._error = None
        with all_random_numbers_kept(self.device), self._linears(parts_off):
            actions = with_transfers(schedule)[self.pipe_rank]
            last = {action.stage: number for number, action in enumerate(actions)}
            for number, action in enumerate(actions):
                job = Job(action.stage, action.microbatch)
                before, behind = Job(job.stage - 1, job.microbatch), Job(job.stage + 1, job.microbatch)
                if action.kind is Kind.RECV_F:
                    arrivals.expect(action, self._home(before.stage))
                elif action.kind is Kind.F:
                    arrival = handed.pop(job) if job in handed else self._arrived(arrivals, job)
                    self._step_of(job, arrival, step, factors[job.microbatch], results)
                    if job.stage != self.last_stage and self._is_here(behind.stage):
                        handed[behind] = self._handed_on(job)
                elif action.kind is Kind.SEND_F:
                    self._send(job, keys[job.microbatch])
                elif action.kind is Kind.RECV_B:
                    arrivals.expect(action, self._home(behind.stage))
                elif action.kind in (Kind.B, Kind.I):
                    if job.stage == self.last_stage:
                        gradients: Gradients = [torch.ones_like(output) for output in self._works[job].outputs]
                    else:
                        here = job in handed_back
                        gradients = handed_back.pop(job) if here else self._arrived_gradients(arrivals, job)
                    inputs = self._works[job].inputs
                    input_gradients[job] = self._backward(job, gradients, put_off=action.kind is Kind.I)
                    if action.kind is Kind.I:
                        later[job] = self._weights.take()
                    if before.stage >= 0 and self._is_here(before.stage):
                        handed_back[before] = spread(input_gradients.pop(job), inputs)
                elif action.kind is Kind.SEND_B:
                    self.channel.send(input_gradients.pop(job), self._home(before.stage))
                elif action.kind is Kind.W:
                    with self.clock.busy():
                        add_weight_gradients(later.pop(job))
                if number == last[action.stage]:
                    completed(action.stage)
        self._casts.clear()
        self.channel.finish()
        self.clock.end()
        self.others_wait = True
        error, self._error = self._error, None
        if error is not None:
            raise error
        return results

    def _step_of(
        self,
        job: Job,
        arrival: _Arrival | None,
        step: Callable[[int], Any],
        factor: float | torch.Tensor,
        results: Microbatches,
    ) -> None:
        """Run the user's step for one job: up to its call of the model, on the last stage to its end."""

        def call(args: Any, kwargs: Any) -> Any:
            structure, _ = self.structures.of(args, kwargs, self.model.training, several=False)
            output = self._forward(structure, job, arrival, args, kwargs)
            if job.stage != self.last_stage:
                raise LeaveStep
            self.clock.start()
            return output

        self._seed("step", job.microbatch)  # the user's code draws the same numbers on every stage
        with self._step(call):
            try:
                loss, rest = step(job.microbatch)
            except Exception as error:
                if job not in self._works:
                    raise
                self._error = self._error or error
                self._works[job].outputs.clear()
                return
            work = self._works[job]
            results.losses.append(loss.detach())
            results.rest.append(rest)
            if results.works is not None:
                results.works.append(Work([], [part.detach() for part in work.outputs], work.header))
            work.outputs = [weighed(loss, factor)]

    def replay(self, microbatches: Microbatches, step: Callable[[], Any]) -> Any:
        """What `step`, run once on the whole batch, returns if the model's output is put together from microbatches.

        On the last stage, after `run_schedule`. Nothing is sent; what can be differentiated is only what follows the
        model's last part.
        """
        works = microbatches.works
        assert works is not None, "outputs were not kept"

        def call(args: Any, kwargs: Any) -> Any:
            structure, _ = self.structures.of(args, kwargs, self.model.training, len(works) > 1)
            filled = Filled(structure, len(works))
            for work in works:
                filled.take(work)
            return self.staged.run(tail_of(structure, *filled.joined(self.axes)), args, kwargs, self._call)

        with self._own_numbers("step", 0), self._step(call):
            before = self._random_state()
            output = step()
            self.drew_in_replay = before != self._random_state()
            return output

    def used_outside(self, loss: torch.Tensor) -> list[str]:
        """Parameters of the model that `loss` depends on other than through the call of the model for a whole batch.

        Only those of the last stage are seen; but who uses some of them so, as a penalty on all weights does, uses
        those of other stages, too.
        """
        used = leaves_of(loss)
        glue = self.cutting.recording.glue_uses
        return [name for name, parameter in self.model.named_parameters() if id(parameter) in used and name not in glue]

    def uses_outside(self, name: str) -> ConfigError:
        """What is said of a loss that uses a parameter as `used_outside` tells."""
        return ConfigError(
            "pp",
            f"the loss uses {self.cutting.name}{name} outside of the call of the model, where a stage sees its own "
            "parameters only (a penalty on all weights, say)",
            INSTEAD,
        )

    def kept_without_numbers(self) -> str:
        """The first attribute of the model with a NaN: what stands on this stage for what others have computed."""
        of_every_module = vars(nn.Module())
        for name, module in self.model.named_modules():
            for key, value in vars(module).items():
                kept = [] if key in of_every_module else tensors_in(value)
                if any(_has_nan(tensor) for tensor in kept if not isinstance(tensor, nn.Parameter | Absent)):
                    return f"{self.name}.{name}.{key}" if name else f"{self.name}.{key}"
        return ""

    @contextmanager
    def _linears(self, puts_off: bool = False) -> Iterator[None]:
        """Within it linear layers keep less of each microbatch, and can put off the gradients of their weights."""
        if not puts_off and not torch.is_autocast_enabled(self.device.type):
            yield
            return
        self._linears_now = StageLinears(self._weights, self._casts, puts_off)
        try:
            with self._linears_now:
                yield
        finally:
            self._linears_now = None

    # --- single jobs ------------------------------------------------------------------------------------------------

    def _forward(
        self, structure: Structure, job: Job, arrival: _Arrival | None, args: Any, kwargs: Any, stop: bool = False
    ) -> Any:
        """Run one microbatch through one stage and keep what its backward needs; returns the model's output.

        Args:
            stop: on the last stage, behind its last unit call, too.
        """
        known: dict[Leaf, torch.Tensor] = {}
        inputs: list[torch.Tensor] = []
        if arrival is not None:
            arrival.wait()
            for leaf, part in zip(arrival.header.carry, arrival.parts, strict=True):
                meta = arrival.header.metas[leaf.call][leaf.place]
                if meta.requires_grad and torch.is_grad_enabled():
                    part = cut_off(part)
                inputs.append(part)
                known[leaf] = meta.wrapped(part, self.axes)
        metas = () if arrival is None else arrival.header.metas
        if job.stage == self.last_stage:  # whose failure the others do not see: they get gradients all the same
            self._works[job] = Work(inputs, [], Header(metas, ()))
        todo = pass_of(structure, job.stage, known, metas, stop_at_once=stop and job.stage == self.last_stage)
        own_numbers = self._own_numbers(job.stage, job.microbatch) if structure.may_draw else nullcontext()
        with own_numbers, self.clock.busy():
            output = self.staged.run(todo, args, kwargs, self._call)
        outputs = [local_part(todo.known[leaf]) for leaf in todo.carry]
        self._works[job] = Work(
            inputs, outputs, Header(tuple(todo.metas), todo.carry), drawing_now(), self._linears_now
        )
        return output

    def _backward(self, job: Job, gradients: Gradients, put_off: bool = False) -> list[torch.Tensor]:
        """Differentiate a job: the gradients of those of its inputs that need one."""
        work = self._works.pop(job)
        pairs = [
            (output, gradient)
            for output, gradient in zip(work.outputs, gradients, strict=True)
            if output.requires_grad and gradient is not None
        ]
        if pairs:
            self._weights.put_off = put_off
            # A backward pass has the types of its forward.
            modes = work.linears or nullcontext()  # what is computed again runs as before
            with modes, without_autocast(self.device.type), drawing(work.draws), self.clock.busy():
                run_backward_of([output for output, _ in pairs], [gradient for _, gradient in pairs])
            self._weights.put_off = False
            if job.microbatch == 0:  # the others add to what it has made
                separate_gradients(parameters_in(self.holders))
        return [
            torch.zeros_like(part) if part.grad is None else part.grad for part in work.inputs if part.requires_grad
        ]

    def _handed_on(self, job: Job) -> _Arrival:
        """What the next stage starts from, where it is on this rank, too."""
        work = self._works[job]
        return _Arrival([part.detach() for part in work.outputs], header=work.header)

    def _send(self, job: Job, key: Any) -> None:
        work, to = self._works[job], self._home(job.stage + 1)
        self.channel.send_header((job.stage + 1, key), work.header, to)
        self.channel.send(work.outputs, to)

    def _begin(self, keys: Sequence[Any]) -> Callable[[Action, bool], _Arrival | None]:
        """How receives begin, for `Arrivals`. `keys` of every microbatch say which header tells shapes."""

        def begin(action: Action, wait: bool) -> _Arrival | None:
            job = Job(action.stage, action.microbatch)
            if action.kind is Kind.RECV_B:
                outputs = self._works[job].outputs
                source = self._home(job.stage + 1)
                shapes = [(tuple(item.shape), item.dtype) for item in outputs if item.requires_grad]
                return _Arrival(*self.channel.receive(shapes, source))
            source = self._home(job.stage - 1)
            key = (job.stage, keys[job.microbatch])
            if not wait and not self.channel.knows_header(key, source):
                return None
            header = self.channel.receive_header(key, source)
            return _Arrival(*self.channel.receive(header.shapes(self.axes), source), header)

        return begin

    def _arrived(self, arrivals: Arrivals[Action, _Arrival], job: Job) -> _Arrival | None:
        """What a job starts from, begun to be received; None at the first stage."""
        if job.stage == 0:
            return None
        return arrivals.take(Action(Kind.RECV_F, *job), self._home(job.stage - 1))

    def _arrived_gradients(self, arrivals: Arrivals[Action, _Arrival], job: Job) -> Gradients:
        """The gradients of what a job sent to another rank."""
        arrival = arrivals.take(Action(Kind.RECV_B, *job), self._home(job.stage + 1))
        arrival.wait()
        return spread(arrival.parts, self._works[job].outputs)

    @contextmanager
    def _own_numbers(self, stage: int | str, index: int) -> Iterator[None]:
        """Random numbers for this job only, so that the user's code draws the same ones on every stage."""
        with all_random_numbers_kept(self.device):
            self._seed(stage, index)
            yield

    def _seed(self, stage: int | str, index: int) -> None:
        again = f":{self.calls}" if self.calls > 1 else ""
        text = f"{self._seed_of_step}:{self.number}:{stage}:{index}{again}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")
        seed_torch(seed, self.device)
        random.seed(seed)
        np.random.seed(seed)


def _not_differentiable(tensor: torch.Tensor) -> torch.Tensor:
    return _ForwardOnly.apply(tensor.detach().requires_grad_()) if tensor.is_floating_point() else tensor


class _ForwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        raise RuntimeError(
            "a call of a model that is cut into pipeline stages runs forward only, so its output can't be "
            "differentiated; write `loss = model.forward_backward(step, *batch)` instead of loss.backward()"
        )


_ABSENT = object()


def _unchanged(leaves: list[Any], structure: Structure) -> list[Any]:
    """Arguments of one pass: what the model changes in place is a copy, since others run on it, too."""
    changed = structure.recording.changed_inputs
    numbers = itertools.count()
    return [leaf.clone() if isinstance(leaf, torch.Tensor) and next(numbers) in changed else leaf for leaf in leaves]


def _has_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and bool(local_part(tensor.detach()).isnan().any())


def leaves_of(*tensors: torch.Tensor) -> set[int]:
    """The `id`s of the leaf tensors, parameters among them, that these depend on, or are."""
    leaf_ids = {id(tensor) for tensor in tensors if tensor.is_leaf}
    seen: set[Any] = set()
    todo = [tensor.grad_fn for tensor in tensors]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaf_ids.add(id(node.variable))
        todo += [following for following, _ in node.next_functions]
    return leaf_ids
