"""The work of one rank of a pipeline: passes of its stages, forward and backward, in order."""

from __future__ import annotations

import hashlib
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
from torch.utils._pytree import tree_flatten, tree_unflatten

from autolaunch_strategies.config import ConfigError, PipelineParallel
from autolaunch_strategies.pipeline.cut import Cutting, Held
from autolaunch_strategies.pipeline.idle import IdleClock
from autolaunch_strategies.pipeline.microbatches import (
    Filled,
    Gradients,
    Microbatches,
    Work,
    cut_leaves,
    shapes_of,
    spread,
)
from autolaunch_strategies.pipeline.placement import group_rank, pipe_rank, stages_of
from autolaunch_strategies.pipeline.record import Leaf
from autolaunch_strategies.pipeline.stage import StagedModel, pass_of, tail_of
from autolaunch_strategies.pipeline.structure import Structure, Structures, batch_size
from autolaunch_strategies.pipeline.transfer import Axes, Channel, Header, LeafMeta, local_part
from autolaunch_strategies.pipeline.weight_gradients import PutOffWeights, WeightGradients, add_weight_gradients
from autolaunch_strategies.schedules.schedule import (
    Kind,
    Schedule,
    fitting_microbatches,
    forward_only,
    schedule_for_batch,
    with_transfers,
)
from autolaunch_strategies.tensor.views import plain
from autolaunch_strategies.torch_private.calls import intercept_calls, intercepted, run_call
from autolaunch_strategies.torch_private.random_state import saved_random_state, seed_torch
from autolaunch_strategies.training.batch_statistics import batch_norms

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
    """What a job starts from: this rank's parts of what is carried."""

    parts: list[torch.Tensor]
    header: Header
    works: list[dist.Work] = field(default_factory=list)


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
        device: torch.device,
    ) -> None:
        """Take over the calls of the pipelined model in `root`. Not collective.

        Args:
            rank_of_stage: the pipe rank of every stage.
            group: this rank's peers that hold the other stages.
        """
        self.root, self.cutting, self.held, self.structures = root, cutting, held, structures
        self.config, self.rank_of_stage, self.group, self.device = config, rank_of_stage, group, device
        self.axes = axes
        self.model = root.get_submodule(cutting.name.removesuffix("."))
        self.pipe_rank = pipe_rank(rank_of_stage, group.size(), group.rank())
        self.stages = stages_of(rank_of_stage, self.pipe_rank)
        self.calls = 0
        """How often the model has been called in the present step."""
        self.others_wait = False
        """Whether the other stages have done their part of the present step; they can be told of an error then."""
        self.number = 0
        """Of the present step: part of the seeds of what stages draw at random."""
        self.channel = Channel(group, device)
        self.clock = IdleClock(device)
        self._own_call = intercepted(self.model)
        self.staged = StagedModel(self.model, cutting, self.stages, axes, device)
        intercept_calls(self.model, self._called)
        self._in_step: Callable[[Any, Any], Any] | None = None
        self._works: dict[Job, Work] = {}
        self._filled: Filled | None = None
        self._weights = WeightGradients()
        self._state_at_call: Any = None
        self._samples_checked = False
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
        if not isinstance(self.root, pl.LightningModule):
            return "model"
        return f"self.{name}" if name else "self"

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

    def _home(self, stage: int) -> int:
        """The rank within the group that holds a stage."""
        return group_rank(self.rank_of_stage, self.group.size(), stage)

    def _is_here(self, stage: int) -> bool:
        return stage in self.stages

    # --- calls of the model -----------------------------------------------------------------------------------------

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """What a call of the model would do without a pipeline."""
        return self._own_call(*args, **kwargs) if self._own_call else run_call(self.model, *args, **kwargs)

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        if self.staged.running:
            return self._call(*args, **kwargs)
        if self._in_step is None:
            return self._forward_only(args, kwargs)
        self.calls += 1
        if self.calls > 1:
            raise ConfigError(
                "pp",
                f"the step calls {self.name} more than once; other stages than the last leave the step at the first "
                "call, so a pipeline can run one call per step",
                "one call of the model per step, e.g. with both inputs joined along the batch",
            )
        return self._in_step(args, kwargs)

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
        if self.calls == 0 and not left:
            raise ConfigError(
                "pp",
                f"the step never calls {self.name}(...), so it can't be run in stages",
                f"a step that calls {self.name}(...); a call of its forward, or of a part of it, does not count",
            )

    # --- the whole batch: fill and drain ----------------------------------------------------------------------------

    def whole_step(self) -> AbstractContextManager[None]:
        """Within it the one call of the model runs every microbatch, and returns the output of the whole batch.

        On a stage that is not the last it ends the block. With gradients enabled, `drain` has to follow.
        """
        return self._step(self._whole)

    def _whole(self, args: Any, kwargs: Any) -> Any:
        output = self._fill(args, kwargs)
        if not self.is_last:
            raise LeaveStep
        self.others_wait = True
        self._state_at_call = self._random_state()
        self.clock.start()
        return output

    def drew_behind_call(self) -> bool:
        """Whether random numbers were drawn since the model was called for a whole batch: other stages did not."""
        state, self._state_at_call = self._state_at_call, None
        return state is not None and state != self._random_state()

    def _random_state(self) -> Any:
        states = [torch.get_rng_state()]
        if self.device.type != "cpu":
            states.append(torch.get_device_module(self.device).get_rng_state(self.device))
        numpy_state = np.random.get_state(legacy=False)["state"]
        return [state.numpy().tobytes() for state in states], random.getstate(), repr(numpy_state)

    def _fill(self, args: Any, kwargs: Any) -> Any:
        """Run every microbatch through this rank's stages; on the last one the output of the whole batch."""
        leaves, spec = tree_flatten((args, kwargs))
        wanted = fitting_microbatches("gpipe", self.group.size(), 1, self._most_microbatches(), batch_size(leaves))
        count = max(wanted, 1)
        structure, kind = self.structures.of(args, kwargs, self.model.training, count > 1)
        count = min(count, structure.samples(leaves))
        if count > 1 and not self._samples_checked:
            self._samples_checked = True
            self._check_samples(structure, leaves, spec)
        filled = Filled(structure, count)
        if filled.trains:
            self.clock.begin()
        leaves = filled.cut_before(leaves)
        self._run_forward(filled, leaves, spec, kind)
        self._filled = filled if filled.trains else None
        output = None
        if self.is_last:
            whole_args, whole_kwargs = tree_unflatten(leaves, spec)
            with self._own_numbers("tail", 0, structure.may_draw), self.clock.busy():
                todo = tail_of(structure, *filled.joined(self.axes))
                output = self.staged.run(todo, whole_args, whole_kwargs, self._call)
        self.channel.finish()
        return output

    def _most_microbatches(self) -> int | None:
        """As many as the config says; one where that leaves it open and batch norm has to see the whole batch."""
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

    def _run_forward(self, filled: Filled, leaves: list[Any], spec: Any, kind: Any) -> None:
        """Run the microbatches of flattened arguments through this rank's stages; `filled` takes the last one's."""
        parts = cut_leaves(leaves, filled.structure.batched, filled.count)
        keys = [(kind, shapes_of(part)) for part in parts]
        arrivals: dict[Job, _Arrival] = {}
        for action in with_transfers(forward_only(self.rank_of_stage, filled.count))[self.pipe_rank]:
            job = Job(action.stage, action.microbatch)
            if action.kind is Kind.RECV_F:
                arrivals[job] = self._receive(job, keys[job.microbatch])
                continue
            if action.kind is Kind.F:
                part_args, part_kwargs = tree_unflatten(parts[job.microbatch], spec)
                self._forward(filled.structure, job, arrivals.pop(job, None), part_args, part_kwargs, stop=True)
                if job.stage == self.last_stage:
                    filled.take(self._works[job])
                elif self._is_here(job.stage + 1):
                    arrivals[Job(job.stage + 1, job.microbatch)] = self._handed_on(job)
                else:
                    continue  # what is made is sent next
            else:
                self._send(job, keys[job.microbatch])
            if not filled.trains:
                del self._works[job]

    @torch.no_grad()
    def _check_samples(self, structure: Structure, leaves: list[Any], spec: Any) -> None:
        """Once: whether what stands along the first dim are samples, of which none changes what comes of another.

        Two of them run together and one by one, with dropout off. What the output of the model is made of must agree.

        Raises:
            ConfigError: it does not; on every rank.
        """
        two = [leaf[:2] if is_batched else leaf for leaf, is_batched in zip(leaves, structure.batched, strict=True)]
        modes = {module: module.training for module in self.model.modules()}
        together, apart = Filled(structure, 1), Filled(structure, 2)
        try:
            self.model.eval()
            for filled in (together, apart):
                self._run_forward(filled, two, spec, "samples")
        finally:
            for module, mode in modes.items():
                module.training = mode
        self.channel.finish()
        problem = [self._mixed_samples(structure, together, apart, leaves) if self.is_last else None]
        dist.broadcast_object_list(problem, dist.get_global_rank(self.group, self.last_rank), group=self.group)
        if problem[0] is not None:
            raise problem[0]

    def _mixed_samples(
        self, structure: Structure, together: Filled, apart: Filled, leaves: list[Any]
    ) -> ConfigError | None:
        apart_values = apart.joined(self.axes)[0]
        for leaf, value in together.joined(self.axes)[0].items():
            one, other = local_part(value), local_part(apart_values[leaf])
            tolerance = 1e-3 if one.dtype in (torch.float32, torch.float64) else 5e-2
            if one.shape != other.shape or (one.is_floating_point() and _far(one, other, tolerance)):
                shapes = [tuple(item.shape) for item in leaves if isinstance(item, torch.Tensor)]
                return ConfigError(
                    "pp.microbatches",
                    f"{structure.recording.calls[leaf.call].unit} returns something else for a sample when another one "
                    f"is in the batch (tensors of shapes {', '.join(map(str, shapes))} were cut along their first "
                    "dim), so microbatches would change the result",
                    "a model that takes the batch as its first dim and each sample by itself, or one microbatch",
                    "pp.microbatches=1",
                )
        return None

    def drain(self) -> None:
        """Run every microbatch backward through this rank's stages, once the loss has been differentiated."""
        filled, self._filled = self._filled, None
        assert filled is not None, "nothing has been run forward"
        handed: dict[Job, Gradients] = {}
        for stage in reversed(self.stages):
            for index in range(filled.count):
                job = Job(stage, index)
                if stage == self.last_stage:
                    gradients = filled.gradients(index)
                elif job in handed:
                    gradients = handed.pop(job)
                else:
                    gradients, works = self._begin_gradients(job)
                    for work in works:
                        work.wait()
                inputs = self._works[job].inputs
                sent = self._backward(job, gradients)
                if stage > 0 and self._is_here(stage - 1):
                    handed[Job(stage - 1, index)] = spread(sent, inputs)
                elif stage > 0:
                    self.channel.send(sent, self._home(stage - 1))
        self.channel.finish()
        with self.clock.busy():
            filled.differentiate_before()
        self.clock.end()

    def forget(self) -> None:
        """Begin a step: drop what one left behind that failed halfway."""
        self._seed_of_step = torch.initial_seed()
        self.others_wait = False
        self._filled = None
        self._works.clear()
        self._weights.take()

    def _forward_only(self, args: Any, kwargs: Any) -> Any:
        """Outside of a step: the output on every rank. It can't be differentiated."""
        with torch.no_grad():
            output = self._fill(args, kwargs)
        source = dist.get_global_rank(self.group, self.last_rank)
        leaves, spec = tree_flatten(output) if self.is_last else ([], None)
        leaves = [plain(leaf) for leaf in leaves]
        header: list[Any] = [([LeafMeta.of(leaf) for leaf in leaves], spec)]
        dist.broadcast_object_list(header, source, group=self.group)
        metas, spec = header[0]
        output_leaves: list[Any] = []
        for place, meta in enumerate(metas):
            if meta.dtype is None:
                output_leaves.append(meta.constant)
                continue
            tensor = torch.empty(meta.shape, dtype=meta.dtype, device=self.device)
            if self.is_last:
                tensor.copy_(leaves[place])
            dist.broadcast(tensor, source, group=self.group)
            if torch.is_grad_enabled() and meta.dtype.is_floating_point:
                tensor = _ForwardOnly.apply(tensor.requires_grad_())
            output_leaves.append(tensor)
        return tree_unflatten(output_leaves, spec)

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
        factors: Sequence[float],
        keys: Sequence[Any],
        keep_outputs: bool,
    ) -> Microbatches:
        """Train on one batch: the step of every microbatch at every stage of this rank, forward and backward.

        Args:
            step: runs the user's step on a microbatch of that number and returns (its loss, anything else).
            factors: by what the loss of each microbatch is multiplied before it is differentiated.
            keys: per microbatch something hashable that is equal where shapes are.
            keep_outputs: keep what the model returned, for `replay`.
        """
        self.clock.begin()
        results = Microbatches(works=[] if keep_outputs else None)
        arrivals: dict[Job, _Arrival] = {}
        gradients: dict[Job, tuple[Gradients, list[dist.Work]]] = {}
        input_gradients: dict[Job, list[torch.Tensor]] = {}
        later: dict[Job, Any] = {}
        parts_off = any(action.kind is Kind.W for actions in schedule.actions for action in actions)
        put_off = PutOffWeights(self._weights) if parts_off else nullcontext()
        with self._own_numbers("schedule", 0), put_off:
            for action in with_transfers(schedule)[self.pipe_rank]:
                job = Job(action.stage, action.microbatch)
                before, behind = Job(job.stage - 1, job.microbatch), Job(job.stage + 1, job.microbatch)
                if action.kind is Kind.RECV_F:
                    arrivals[job] = self._receive(job, keys[job.microbatch])
                elif action.kind is Kind.F:
                    self._step_of(job, arrivals.pop(job, None), step, factors[job.microbatch], results)
                    if job.stage != self.last_stage and self._is_here(behind.stage):
                        arrivals[behind] = self._handed_on(job)
                elif action.kind is Kind.SEND_F:
                    self._send(job, keys[job.microbatch])
                elif action.kind is Kind.RECV_B:
                    gradients[job] = self._begin_gradients(job)
                elif action.kind in (Kind.B, Kind.I):
                    arrived, works = gradients.pop(job, ((None,), []))
                    for work in works:
                        work.wait()
                    if job.stage == self.last_stage:
                        arrived = [torch.ones_like(self._works[job].outputs[0])]
                    inputs = self._works[job].inputs
                    input_gradients[job] = self._backward(job, arrived, put_off=action.kind is Kind.I)
                    if action.kind is Kind.I:
                        later[job] = self._weights.take()
                    if before.stage >= 0 and self._is_here(before.stage):
                        gradients[before] = spread(input_gradients.pop(job), inputs), []
                elif action.kind is Kind.SEND_B:
                    self.channel.send(input_gradients.pop(job), self._home(before.stage))
                elif action.kind is Kind.W:
                    with self.clock.busy():
                        add_weight_gradients(later.pop(job))
        self.channel.finish()
        self.clock.end()
        self.others_wait = True
        return results

    def _step_of(
        self, job: Job, arrival: _Arrival | None, step: Callable[[int], Any], factor: float, results: Microbatches
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
            loss, rest = step(job.microbatch)
            work = self._works[job]
            results.losses.append(loss.detach())
            results.rest.append(rest)
            if results.works is not None:
                results.works.append(Work([], [part.detach() for part in work.outputs], work.header))
            work.outputs = [loss * factor]

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
            for work in arrival.works:
                work.wait()
            for leaf, part in zip(arrival.header.carry, arrival.parts, strict=True):
                meta = arrival.header.metas[leaf.call][leaf.place]
                if meta.requires_grad and torch.is_grad_enabled():
                    part = part.detach().requires_grad_()
                inputs.append(part)
                known[leaf] = meta.wrapped(part, self.axes)
        metas = () if arrival is None else arrival.header.metas
        todo = pass_of(structure, job.stage, known, metas, stop_at_once=stop and job.stage == self.last_stage)
        with self._own_numbers(job.stage, job.microbatch, structure.may_draw), self.clock.busy():
            output = self.staged.run(todo, args, kwargs, self._call)
        outputs = [local_part(todo.known[leaf]) for leaf in todo.carry]
        self._works[job] = Work(inputs, outputs, Header(tuple(todo.metas), todo.carry))
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
            with torch.autocast(self.device.type, enabled=False), self.clock.busy():
                torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
            self._weights.put_off = False
        return [
            torch.zeros_like(part) if part.grad is None else part.grad for part in work.inputs if part.requires_grad
        ]

    def _handed_on(self, job: Job) -> _Arrival:
        """What the next stage starts from, where it is on this rank, too."""
        work = self._works[job]
        return _Arrival([part.detach() for part in work.outputs], work.header)

    def _send(self, job: Job, key: Any) -> None:
        work, to = self._works[job], self._home(job.stage + 1)
        self.channel.send_header((job.stage + 1, key), work.header, to)
        self.channel.send(work.outputs, to)

    def _receive(self, job: Job, key: Any) -> _Arrival:
        source = self._home(job.stage - 1)
        header = self.channel.receive_header((job.stage, key), source)
        parts, works = self.channel.receive(header.shapes(self.axes), source)
        return _Arrival(parts, header, works)

    def _begin_gradients(self, job: Job) -> tuple[Gradients, list[dist.Work]]:
        outputs = self._works[job].outputs
        shapes = [(tuple(item.shape), item.dtype) for item in outputs if item.requires_grad]
        buffers, works = self.channel.receive(shapes, self._home(job.stage + 1))
        return spread(buffers, outputs), works

    @contextmanager
    def _own_numbers(self, stage: int | str, index: int, needed: bool = True) -> Iterator[None]:
        """Random numbers for this job only, so that the user's code draws the same ones on every stage."""
        if not needed:
            yield
            return
        states = random.getstate(), np.random.get_state()
        with saved_random_state(self.device):
            self._seed(stage, index)
            try:
                yield
            finally:
                random.setstate(states[0])
                np.random.set_state(states[1])

    def _seed(self, stage: int | str, index: int) -> None:
        text = f"{self._seed_of_step}:{self.number}:{stage}:{index}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")
        seed_torch(seed, self.device)
        random.seed(seed)
        np.random.seed(seed)


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


def _far(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    """Whether two tensors differ by more than rounding, measured on the largest value."""
    one, other = one.float(), other.float()
    return bool((one - other).abs().max() > tolerance * one.abs().max().clamp(min=1e-6))


def leaves_of(loss: torch.Tensor) -> set[int]:
    """The `id`s of the leaf tensors, parameters among them, that `loss` depends on."""
    leaf_ids: set[int] = set()
    seen: set[Any] = set()
    todo = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaf_ids.add(id(node.variable))
        todo += [following for following, _ in node.next_functions]
    return leaf_ids
