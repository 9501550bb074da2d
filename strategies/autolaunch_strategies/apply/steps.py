"""What is applied to a model, in the one order there is: each step in two halves, what it would do and doing it.

The first halves look at the untouched model and change nothing: alone they are the preview.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from torch import nn

from autolaunch_strategies.config import MP_NAMES, ParallelConfig
from autolaunch_strategies.config.schedules import SCHEDULE_SPECS
from autolaunch_strategies.context.marked import Marked, marked_by
from autolaunch_strategies.context.parallel import (
    ContextParallelModule,
    account_of_context,
    both,
    prepare_context,
    shard_sequences,
)
from autolaunch_strategies.data_parallel.loader import Counted
from autolaunch_strategies.data_parallel.sharding import (
    DataParallelModule,
    apply_data_parallel,
    refuse_hooked_if_sharded,
    sharding_reasons,
)
from autolaunch_strategies.experts.auxiliary import balance_whole_batch, balanced_models
from autolaunch_strategies.experts.divided import divide_experts, without_experts
from autolaunch_strategies.experts.find import Mixture
from autolaunch_strategies.experts.parallel import (
    ExpertParallelModule,
    account_of_experts,
    apply_experts,
    mixtures_for,
)
from autolaunch_strategies.mesh.rank_mesh import RankMesh
from autolaunch_strategies.model.blocks import Block, Blocks
from autolaunch_strategies.model.construction import Construction
from autolaunch_strategies.model.example_inputs import as_given
from autolaunch_strategies.model.materialise import WeightFiles, materialise, place_on
from autolaunch_strategies.pipeline.build import CutModel, account_of_pipeline, plan_cut
from autolaunch_strategies.pipeline.cut import Cutting
from autolaunch_strategies.pipeline.run import Pipeline
from autolaunch_strategies.plan.choose import plan_for, planned_part
from autolaunch_strategies.plan.context import context_rules, other_rules, with_context_plan
from autolaunch_strategies.plan.derive import NothingToShard
from autolaunch_strategies.plan.rules import Rule, read_plan
from autolaunch_strategies.tensor.hooked import refuse_hooked
from autolaunch_strategies.tensor.model_parallel import ModelParallelModule, account_of_plan, apply_plan, matched
from autolaunch_strategies.tensor.share import forestalled, share_in_words, share_per_rank
from autolaunch_strategies.tracing.inputs import Steps
from autolaunch_strategies.tracing.step import Step as TracedStep
from autolaunch_strategies.training.batch_statistics import batch_norms, share_batch_statistics
from autolaunch_strategies.training.compile import apply_compile, compile_traced, parts_to_compile
from autolaunch_strategies.training.float8 import check_shards, convert, float8_layers
from autolaunch_strategies.training.offload import apply_offload
from autolaunch_strategies.training.recompute import apply_recompute, recomputed_blocks, saved_operators
from autolaunch_strategies.training.traced_block import TracedForward

log = logging.getLogger(__name__)

CONTEXT_PLAN = "cp.plan"
"""What rules that `ContextParallel.plan` brings call their source."""


@dataclass(frozen=True)
class Look:
    """What the first half of every step looks at."""

    module: nn.Module
    """As one device has it; may be on meta."""
    config: ParallelConfig
    blocks: Blocks
    own_plan: Mapping[str, Any] | None = None
    """The mp plan that comes with the model."""
    training: TracedStep | None = None
    """What the module does with a batch, if it is known."""
    autocast: torch.dtype | None = None
    """The type that forward passes are cast to, if they are."""

    @property
    def mixtures(self) -> list[Mixture]:
        """The mixtures whose experts are shared out."""
        return mixtures_for(self.module, self.config)

    def steps(self, model: nn.Module) -> Steps:
        """What the module shows of how `model`, a part of it, is called."""
        example = getattr(self.module, "example_input_array", None)
        if example is None or model is self.module or not _has_forward(self.module):
            return Steps(example, None, self.training)
        inputs = as_given(example)
        forward = TracedStep(inputs.origin, self.module, self.module.forward, lambda: (inputs.args, inputs.kwargs))
        return Steps(None, forward, self.training)


@dataclass
class Site:
    """Where steps are applied on this rank, and what those before have left for those that follow."""

    module: nn.Module
    mesh: RankMesh
    device: torch.device
    blocks: Blocks
    """Of this rank."""
    construction: Construction | None = None
    files: WeightFiles | None = None
    float8: dict[str, nn.Linear] = field(default_factory=dict)
    """Layers that multiply in float8."""
    cut: CutModel | None = None
    pipeline: Pipeline | None = None
    model_parallel: ModelParallelModule | None = None
    context_parallel: ContextParallelModule | None = None
    expert_parallel: ExpertParallelModule = field(default_factory=ExpertParallelModule)
    traced: list[TracedForward] = field(default_factory=list)
    """What stands in the place of the forwards of blocks with tensors sharded along mp or cp, if they are compiled."""
    data_parallel: DataParallelModule | None = None
    counted: Counted = field(default_factory=Counted)

    def is_elsewhere(self, module: nn.Module) -> bool:
        """Whether a module belongs to a stage of another rank."""
        return self.cut is not None and self.cut.held.lacks(module)


class Step:
    """One thing that is applied to a model. Making it is the first half: it decides, and changes nothing."""

    name: ClassVar[str]
    """As plan.yaml calls it."""

    def __init__(self, look: Look) -> None:
        self.config = look.config

    def account(self) -> dict[str, Any]:
        """What it does, with reasons, as plain data: keys of plan.yaml."""
        return {}

    def apply(self, site: Site) -> None:
        """Do it."""

    def begin(self, site: Site) -> None:
        """What waits until every step has been applied and every parameter has its values."""


class Converts(Step):
    """Let linear layers of blocks multiply in float8."""

    name = "convert (float8)"

    def __init__(self, look: Look) -> None:
        super().__init__(look)
        recipe = look.config.float8
        self.layers, self.others = float8_layers(look.blocks) if recipe is not None else ({}, {})
        self.warnings: list[str] = []
        if recipe is not None and not look.config.compile:
            self.warnings.append("float8 without compile=true is slower than bf16: a conversion is a pass of its own")
        if recipe == "tensorwise" and look.config.mesh.size > 1:
            self.warnings.append("scales are those of a rank's share of the batch: the loss is another on each mesh")

    def account(self) -> dict[str, Any]:
        if not self.layers:
            return {}
        kept = if_any("kept", self.others) | if_any("warnings", self.warnings)
        return {"float8": {"recipe": self.config.float8, "layers": len(self.layers), **kept}}

    def apply(self, site: Site) -> None:
        for warning in self.warnings:
            log.warning(warning)
        if self.config.float8 is not None:
            convert(self.layers, self.config.float8, site.device)
            site.float8 = self.layers


class CutStages(Step):
    """Take out of the model what other stages hold; at the end, take over its calls."""

    name = "cut stages (pp)"

    def __init__(self, look: Look) -> None:
        super().__init__(look)
        self.cutting: Cutting | None = None
        if look.config.mesh.pp > 1:
            assert look.config.pp is not None
            wrapped = isinstance(look.module, pl.LightningModule)
            self.cutting = plan_cut(
                look.module, look.blocks, look.config.pp, look.config.mesh.pp, wrapped=wrapped, steps=look.steps
            )

    def account(self) -> dict[str, Any]:
        if self.cutting is None:
            return {}
        assert self.config.pp is not None
        return {"pp": account_of_pipeline(self.cutting, self.config.pp, self.config.mesh)}

    def apply(self, site: Site) -> None:
        if self.cutting is not None:
            assert self.config.pp is not None
            site.cut = CutModel.make(site.module, self.cutting, self.config.pp, site.mesh)
            site.blocks = site.cut.own_blocks(site.blocks)

    def begin(self, site: Site) -> None:
        if site.cut is not None:
            site.pipeline = site.cut.pipeline(site.device)


class SharesStatistics(Step):
    """Let batch norm see the whole batch: the samples of all ranks along dp."""

    name = "batch statistics (dp)"

    def __init__(self, look: Look) -> None:
        super().__init__(look)
        self.names = list(batch_norms(look.module)) if look.config.mesh.dp > 1 else []

    def account(self) -> dict[str, Any]:
        return if_any("batch_statistics", self.names)

    def apply(self, site: Site) -> None:
        share_batch_statistics(site.module, site.mesh.group("dp"), site.counted)


class Styles(Step):
    """Do to each module what the rules of a plan say, along mp and cp."""

    name = "styles (mp, cp)"

    def __init__(self, look: Look) -> None:
        super().__init__(look)
        self.model, prefix = planned_part(look.module)
        self.rules, whole = _rules(look, self.model)
        self.matches, warnings = matched(self.model, self.rules, prefix)
        if not look.config.compile:  # which tokens a rank computes is known only while Python runs
            self.rules, self.matches = divide_experts(self.model, self.rules, self.matches, look.config.mesh.mp)
        experts = {part for mixture in look.mixtures for part in mixture.module.modules()}
        parts = {parameter: look.config.ep for module in experts for parameter in module.parameters()}
        self.rules, self.matches = without_experts(self.model, self.rules, self.matches, experts)
        refuse_hooked(self.model, self.matches, look.config.mesh.mp)
        self.warnings = [*whole, *(line for line in warnings if not line.startswith(f"{CONTEXT_PLAN}: "))]
        self.context_warnings = [line for line in warnings if line.startswith(f"{CONTEXT_PLAN}: ")]
        self.share = ""
        if look.config.mesh.mp > 1 and next(self.model.parameters(), None) is not None:
            self.share = share_in_words(*share_per_rank(self.model, self.matches, look.config.mesh.mp, parts))
            self.warnings += forestalled(self.model, self.matches, look.config.mesh.mp)
        self.marked, self.context = Marked(), dict[str, Any]()
        if look.config.mesh.cp > 1:
            assert look.config.cp is not None
            self.marked = marked_by(self.model, self.matches, look.config.cp.backend).within(prefix)
            blocks = [block.module for block in look.blocks]
            self.context = account_of_context(
                look.config.cp, look.config.mesh.cp, look.module, blocks, self.marked
            ) | if_any("warnings", self.context_warnings)

    def account(self) -> dict[str, Any]:
        rules = [rule for rule in self.rules if rule.source != CONTEXT_PLAN]
        plan = if_any("warnings", self.warnings)
        if other_rules(rules):  # what stands in a plan for cp stays in it
            matches = [match for match in self.matches if match.rule.source != CONTEXT_PLAN]
            plan = account_of_plan(rules, matches, self.warnings)
        plan |= if_any("share", self.share)
        return {**if_any("mp", plan), **if_any("cp", self.context)}

    def apply(self, site: Site) -> None:
        mesh = site.mesh.sub_mesh("mp")
        for warning in (*(self.warnings if mesh is not None else ()), *self.context_warnings):
            log.warning(warning)
        applied = site.model_parallel = apply_plan(self.model, mesh, self.matches, site.is_elsewhere)
        check_shards({name: layer for name, layer in site.float8.items() if not site.is_elsewhere(layer)})
        if applied.mode is not None and self.config.recompute.mode == "selective":
            applied.mode.replicate.remembers = False
        site.context_parallel = prepare_context(site.module, self.config.cp, site.mesh, self.marked, site.device)

    def begin(self, site: Site) -> None:
        assert site.model_parallel is not None and site.context_parallel is not None
        site.model_parallel.begin()
        shard_sequences(site.context_parallel, site.module, site.blocks, self.marked, site.is_elsewhere)


class SharesExperts(Step):
    """Give each rank some of the experts of every mixture, and let tokens travel to them."""

    name = "experts (ep)"

    def __init__(self, look: Look) -> None:
        super().__init__(look)
        self.mixtures = look.mixtures

    def account(self) -> dict[str, Any]:
        if not self.mixtures:
            return {}
        return {"ep": account_of_experts(self.mixtures, self.config.ep, self.config.expert_ranks)}

    def apply(self, site: Site) -> None:
        if self.mixtures:
            site.expert_parallel = apply_experts(site.module, self.mixtures, site.mesh, self.config, site.is_elsewhere)


class BalancesRouters(Step):
    """Let the auxiliary loss of routers see the whole batch: the tokens of all ranks along dp."""

    name = "router losses (dp)"

    def __init__(self, look: Look) -> None:
        super().__init__(look)
        self.models, others = balanced_models(look.module) if look.config.mesh.dp > 1 else ({}, {})
        self.warnings = [
            f"{name} ({type(module).__name__}): its auxiliary loss is computed of each rank's share of the batch"
            for name, module in others.items()
        ]

    def account(self) -> dict[str, Any]:
        names = list(self.models)
        return if_any("router_losses", if_any("whole_batch", names) | if_any("warnings", self.warnings))

    def apply(self, site: Site) -> None:
        for warning in self.warnings:
            log.warning(warning)
        if (group := site.mesh.group("dp")) is not None:
            balance_whole_batch(self.models.values(), group, site.counted)


class Recomputes(Step):
    """Let blocks compute their activations again in the backward pass.

    Blocks with something sharded along mp or cp are compiled here: what is computed again is their graph.
    """

    name = "recompute"

    def __init__(self, look: Look) -> None:
        super().__init__(look)
        self.blocks = recomputed_blocks(look.blocks, look.config.recompute)
        self.held = {mixture.runs for mixture in look.mixtures}

    def account(self) -> dict[str, Any]:
        recompute = self.config.recompute
        budget = {} if recompute.budget is None else {"budget": recompute.budget}
        return {"recompute": {"mode": recompute.mode, **budget, **if_any("blocks", self.blocks)}}

    def apply(self, site: Site) -> None:
        context, model = site.context_parallel, site.model_parallel
        assert context is not None and model is not None
        chosen = [block for block in site.blocks if block.name in self.blocks]
        parts, _ = parts_to_compile(site.blocks, self.held)
        forwards = {part: part.module.forward for part in parts}
        recompute = self.config.recompute
        selective = recompute.mode == "selective"
        if not selective:
            self._compile(site, forwards, {})
        if recompute.mode not in ("offload", "budget"):  # applied around what is compiled, and by compiling
            apply_recompute(
                chosen,
                recompute,
                lambda: both(context.repeating(), model.running()),
                exchanges=bool(site.expert_parallel.dispatches),
            )
        if selective:  # graphs compute again what they have not kept
            self._compile(site, forwards, dict.fromkeys(chosen, saved_operators(recompute.save)))

    def _compile(self, site: Site, forwards: Mapping[Block, Any], saved: Mapping[Block, Any]) -> None:
        context, model = site.context_parallel, site.model_parallel
        assert context is not None and model is not None
        if not self.config.compile:
            return
        overlap = False
        if model.mode is not None:
            group = model.mode.replicate.mesh.get_group()
            overlap = self.config.mp is not None and self.config.mp.overlap
        elif (along_cp := site.mesh.group("cp")) is not None:
            group = along_cp
        else:
            return  # `Compiles` does it
        budget = self.config.recompute.budget
        site.traced = compile_traced(forwards, self.config.compile, group, saved, context.now, budget, overlap)


class Compiles(Step):
    """Compile the forward of every block by itself."""

    name = "compile"

    def __init__(self, look: Look) -> None:
        super().__init__(look)
        self.held = {mixture.runs for mixture in look.mixtures}
        parts, self.reasons = parts_to_compile(look.blocks if look.config.compile else (), self.held)
        self.blocks = [part.name for part in parts]
        pp = look.config.pp if look.config.mesh.pp > 1 else None
        schedule = SCHEDULE_SPECS.get(pp.schedule) if pp is not None else None
        self.warnings = (
            [
                f"pp.schedule={schedule.name} puts the gradients of weights off, but compiled blocks compute them at "
                "once: the numbers are right, the idle time is that of a schedule that does not"
            ]
            if schedule is not None and schedule.splits_backward and self.blocks
            else []
        )

    def account(self) -> dict[str, Any]:
        compiled = {"mode": self.config.compile, **if_any("blocks", self.blocks), **if_any("reasons", self.reasons)}
        return {"compile": compiled | if_any("warnings", self.warnings)}

    def apply(self, site: Site) -> None:
        for warning in self.warnings:
            log.warning(warning)
        assert site.model_parallel is not None
        # Else `Recomputes` has done it.
        if self.config.compile and site.model_parallel.mode is None and site.mesh.group("cp") is None:
            apply_compile(
                parts_to_compile(site.blocks, self.held)[0], self.config.compile, self.config.recompute.budget
            )


class Offloads(Step):
    """Let what blocks keep for their backward pass wait in host memory, compiled or not."""

    name = "offload"

    def __init__(self, look: Look) -> None:
        super().__init__(look)
        offloads = look.config.recompute.mode == "offload"
        self.blocks = recomputed_blocks(look.blocks, look.config.recompute) if offloads else {}

    def apply(self, site: Site) -> None:
        apply_offload(block for block in site.blocks if block.name in self.blocks)


class Shards(Step):
    """Shard what the level of dp says, over dp and cp together."""

    name = "shard (dp)"

    def __init__(self, look: Look) -> None:
        super().__init__(look)
        mesh, dp = look.config.mesh, look.config.dp
        self.autocast = look.autocast if dp.follows_autocast else None
        refuse_hooked_if_sharded(look.module, dp, mesh.dp * mesh.cp)
        self.groups = sharding_reasons(look.module, look.blocks, dp, mesh.dp * mesh.cp, mesh.pp > 1, self.autocast)

    def account(self) -> dict[str, Any]:
        dp = self.config.dp
        replicate, shard = dp.split(self.config.mesh.dp)
        return {
            "dp": {
                "sharding_level": dp.sharding_level,
                "replicate": replicate,
                "shard": shard,
                "groups": self.groups,
            }
        }

    def apply(self, site: Site) -> None:
        site.data_parallel = apply_data_parallel(
            site.module, site.blocks, site.mesh, self.config.dp, site.expert_parallel.groups
        )

    def begin(self, site: Site) -> None:
        assert site.data_parallel is not None
        site.data_parallel.begin(self.autocast)


class Materialises(Step):
    """Give this rank's parameters their values, the same on every mesh."""

    name = "materialise"

    def apply(self, site: Site) -> None:
        place_on(site.module, site.device)
        materialise(site.module, site.device, site.construction, site.files, self.config.dp.cpu_offload)


STEPS: tuple[type[Step], ...] = (
    Converts, CutStages, SharesStatistics, Styles, SharesExperts, BalancesRouters, Recomputes, Compiles, Offloads,
    Shards, Materialises,
)  # fmt: skip
"""In the order in which they are applied."""

BEGIN: tuple[type[Step], ...] = (Styles, Shards, CutStages)
"""In the order in which they begin: hooks on parameters, what runs on parts of sequences, stages around all of it."""


@contextmanager
def without_cache(module: nn.Module, config: ParallelConfig, keep: bool = False) -> Iterator[None]:
    """Within it, `transformers` fills no cache of keys and values, as it does in training, too.

    A block that runs again would add to it twice, and a stage of a pipeline has a part of it only.

    Args:
        config: where there are no stages, no sharded sequences and nothing to recompute, caches stay.
        keep: leave it switched off afterwards, unless what runs within it raises.
    """
    needed = config.mesh.pp * config.mesh.cp > 1 or config.recompute.mode != "none"
    configs: list[Any] = [getattr(part, "config", None) for part in module.modules()] if needed else []
    switched = {id(item): item for item in configs if getattr(item, "use_cache", None) is True}
    for item in switched.values():
        item.use_cache = False
    try:
        yield
    except BaseException:
        keep = False
        raise
    finally:
        for item in () if keep else switched.values():
            item.use_cache = True


def _rules(look: Look, model: nn.Module) -> tuple[list[Rule], list[str]]:
    """(the rules of the plan, why there is none for mp): of axes with one rank they say nothing.

    A model in which nothing can be sharded runs whole along mp where nobody asked for more than `mp=auto`.
    """
    config, whole = look.config, list[str]()
    rules: list[Rule] = []
    if config.mesh.mp > 1:
        assert config.mp is not None
        steps = look.steps(model)
        try:
            rules = plan_for(model, config.mp, look.own_plan, config.mesh.mp, steps.example, steps)
        except NothingToShard as error:
            if config.mp != MP_NAMES["auto"]:
                raise
            ranks = config.mesh.mp
            whole = [
                f"mp: {error.problem}\n  so it runs whole: each of the {ranks} ranks along mp holds all of it and does "
                f"all of the work of its share of the data\n  allowed: {error.allowed}"
            ]
    elif config.mp is not None:
        rules = context_rules([*read_plan(look.own_plan, "the model's plan"), *read_plan(config.mp.plan)])
    return (with_context_plan(rules, config.cp) if config.mesh.cp > 1 else other_rules(rules)), whole


def _has_forward(module: nn.Module) -> bool:
    """Whether a module has a forward that is not the one that says that there is none."""
    return type(module).forward not in (nn.Module.forward, pl.LightningModule.forward) or "forward" in module.__dict__


def if_any(key: str, value: Any) -> dict[str, Any]:
    """`{key: value}`, or nothing where there is no value."""
    return {key: value} if value else {}
