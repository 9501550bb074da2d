"""The one fixed order in which everything is applied to a module, and the account of it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autolaunch_strategies.apply.steps import BEGIN, STEPS, Look, Site, Step, if_any, without_cache
from autolaunch_strategies.config import AXES, ParallelConfig
from autolaunch_strategies.context.parallel import ContextParallelModule, both
from autolaunch_strategies.data_parallel.loader import Counted
from autolaunch_strategies.data_parallel.sharding import DataParallelModule
from autolaunch_strategies.experts.load import ExpertLoad
from autolaunch_strategies.mesh.rank_mesh import RankMesh
from autolaunch_strategies.model.blocks import Blocks, find_blocks
from autolaunch_strategies.model.construction import Construction
from autolaunch_strategies.model.counts import Counts, count_parameters
from autolaunch_strategies.model.materialise import WeightFiles, place_on, share_values
from autolaunch_strategies.pipeline.run import Pipeline
from autolaunch_strategies.tensor.model_parallel import ModelParallelModule
from autolaunch_strategies.tracing.step import Step as TracedStep
from autolaunch_strategies.training.traced_block import TracedForward

ORDER = (*(step.name for step in STEPS), "optimizer")


@dataclass
class Parallelized:
    """What was done to a module: handles for the strategy, and an account of it for plan.yaml."""

    module: nn.Module
    config: ParallelConfig
    mesh: RankMesh
    data_parallel: DataParallelModule
    model_parallel: ModelParallelModule
    context_parallel: ContextParallelModule
    counts: Counts
    blocks: Blocks
    account: dict[str, Any] = field(default_factory=dict)
    traced: list[TracedForward] = field(default_factory=list)
    """Forwards of blocks that run as graphs of what this rank computes."""
    pipeline: Pipeline | None = None
    """The stages of this rank if the module is cut: `group`, the ranks that hold the other stages, `device`, where this
    rank computes, and `counts(parameter)`, False for a parameter whose first holder is another stage (True for one
    that is not of this module)."""
    counted: Counted = field(default_factory=Counted)
    """Asked in training whether this rank's batch counts; by default every one does."""
    expert_load: ExpertLoad | None = None
    """What counts the tokens of experts, if anything does; set by whoever has it count, before all this was done."""

    def now(self) -> dict[str, Any]:
        """The account, with what steps have shown since."""
        reasons = {traced.name: f"runs as it is: {traced.reason}" for traced in self.traced if traced.reason}
        compiled = self.account["compile"]
        return self.account | {"compile": compiled | if_any("reasons", compiled.get("reasons", {}) | reasons)}

    def running(self) -> AbstractContextManager[None]:
        """Forward and backward passes of the module run within it."""
        # What shards heads is asked before what shards sequences, so it is entered after it.
        within = both(self.context_parallel.running(), self.model_parallel.running())
        return both(within, self.data_parallel.running())  # asked first: what it gathers may be sharded along mp


def apply_parallelism(
    module: nn.Module,
    config: ParallelConfig,
    mesh: RankMesh,
    device: torch.device,
    construction: Construction | None = None,
    files: WeightFiles | None = None,
    own_plan: Mapping[str, Any] | None = None,
    training: TracedStep | None = None,
    autocast: torch.dtype | None = None,
) -> Parallelized:
    """Apply a parallel config to `module` in place and give it its values. Collective over the whole mesh.

    Args:
        module: any module; parameters on meta if it was built within `construction.recording()`.
        device: where this rank computes.
        files: weights to start from, by parameter name.
        own_plan: the mp plan that comes with the model.
        training: what the module does with a batch, where nothing else shows how the model is called.
        autocast: the type that forward passes are cast to, if the caller runs them in autocast.

    Raises:
        ConfigError: the config does not fit the module. Apart from its values and device that is then as it was, unless
            it is a style that does not fit.
    """
    counts = count_parameters(module)
    if construction is not None:
        construction.remember(module)
    if not all(type(parameter) is nn.Parameter for parameter in module.parameters()):
        place_on(module, device)  # such as quantized weights, which are made when they arrive there
    share_values(module, mesh.group(*AXES), device)
    blocks = find_blocks(module)
    with without_cache(module, config, keep=True):
        steps = _planned(Look(module, config, blocks, own_plan, training, autocast))
    site = Site(module, mesh, device, blocks, construction, files)
    for step in steps.values():
        step.apply(site)
    for kind in BEGIN:
        steps[kind].begin(site)
    dp, mp, cp = site.data_parallel, site.model_parallel, site.context_parallel
    assert dp is not None and mp is not None and cp is not None
    account = _account(config, blocks, steps)
    return Parallelized(
        module, config, mesh, dp, mp, cp, counts, site.blocks, account, site.traced, site.pipeline, site.counted
    )


def foresee(
    module: nn.Module,
    config: ParallelConfig,
    own_plan: Mapping[str, Any] | None = None,
    training: TracedStep | None = None,
    autocast: torch.dtype | None = None,
) -> dict[str, Any]:
    """The account that `apply_parallelism` would give of `module` (may be on meta), without touching it.

    Raises:
        ConfigError: the config does not fit the module.
    """
    blocks = find_blocks(module)
    with without_cache(module, config):
        return _account(config, blocks, _planned(Look(module, config, blocks, own_plan, training, autocast)))


def _planned(look: Look) -> dict[type[Step], Step]:
    """The first half of every step, in order."""
    return {kind: kind(look) for kind in STEPS}


def _account(config: ParallelConfig, blocks: Blocks, steps: Mapping[type[Step], Step]) -> dict[str, Any]:
    """Everything that is applied, in order and with reasons, as plain data for plan.yaml."""
    account: dict[str, Any] = {
        "order": list(ORDER),
        "mesh": {"shape": config.mesh.name, "ranks": config.mesh.size, "rank_order": list(config.mesh.order)},
        "blocks": {"found": [block.name for block in blocks], **if_any("reasons", blocks.reasons)},
    }
    for step in steps.values():
        account |= step.account()
    return account
