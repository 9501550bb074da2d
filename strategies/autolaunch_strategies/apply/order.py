"""The one fixed order in which everything is applied to a module."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from autolaunch_strategies.config import ParallelConfig
from autolaunch_strategies.context.marked import Marked, marked_by
from autolaunch_strategies.context.parallel import (
    ContextParallelModule,
    account_of_context,
    both,
    divide,
    prepare_context,
)
from autolaunch_strategies.data_parallel.sharding import DataParallelModule, apply_data_parallel, sharding_reasons
from autolaunch_strategies.mesh.rank_mesh import RankMesh
from autolaunch_strategies.model.blocks import Blocks, find_blocks
from autolaunch_strategies.model.construction import Construction
from autolaunch_strategies.model.materialise import WeightFiles, materialise, share_values
from autolaunch_strategies.pipeline.build import CutModel, account_of_pipeline, plan_cut
from autolaunch_strategies.pipeline.cut import Cutting
from autolaunch_strategies.pipeline.run import Pipeline
from autolaunch_strategies.plan.choose import plan_for, planned_part
from autolaunch_strategies.plan.context import context_rules, other_rules, with_context_plan
from autolaunch_strategies.plan.rules import Match, Rule, read_plan
from autolaunch_strategies.tensor.model_parallel import ModelParallelModule, account_of_plan, apply_plan, matched
from autolaunch_strategies.training.recompute import apply_compile, apply_recompute, recomputed_blocks

log = logging.getLogger(__name__)

CONTEXT_PLAN = "cp.plan"
"""What rules that `ContextParallel.plan` brings call their source."""

ORDER = ("cut stages (pp)", "styles (mp, cp)", "recompute", "compile", "shard (dp)", "materialise", "optimizer")


@dataclass
class Parallelized:
    """What was done to a module: handles for the strategy, and an account of it for plan.yaml."""

    module: nn.Module
    config: ParallelConfig
    data_parallel: DataParallelModule
    model_parallel: ModelParallelModule
    context_parallel: ContextParallelModule
    parameter_count: int
    blocks: Blocks
    account: dict[str, Any] = field(default_factory=dict)
    pipeline: Pipeline | None = None
    """The stages of this rank if the module is cut: `group`, the ranks that hold the other stages, `device`, where this
    rank computes, and `counts(parameter)`, False for a parameter whose first holder is another stage (True for one
    that is not of this module)."""

    def running(self) -> AbstractContextManager[None]:
        """Forward and backward passes of the module run within it."""
        # What divides heads is asked before what divides sequences, so it is entered after it.
        return both(self.context_parallel.running(), self.model_parallel.running())


def apply_parallelism(
    module: nn.Module,
    config: ParallelConfig,
    mesh: RankMesh,
    device: torch.device,
    construction: Construction | None = None,
    files: WeightFiles | None = None,
    own_plan: Mapping[str, Any] | None = None,
) -> Parallelized:
    """Apply a parallel config to `module` in place and give it its values. Collective over the whole mesh.

    Args:
        module: any module; parameters on meta if it was built within `construction.recording()`.
        device: where this rank computes.
        files: weights to start from, by parameter name.
        own_plan: the mp plan that comes with the model.
    """
    count = sum(parameter.numel() for parameter in module.parameters())
    if config.mesh.pp * config.mesh.cp > 1 or config.recompute.mode != "none":
        _without_cache(module)
    if construction is not None:
        construction.remember(module)
    share_values(_moved(module, device), mesh.group("pp", "dp", "cp", "mp"))
    blocks = find_blocks(module)
    rules, model, prefix = _plan(module, config, own_plan)
    found = matched(model, rules, prefix)
    cutting, stages = _cut(module, blocks, config), None
    own_blocks = blocks
    if cutting is not None:
        assert config.pp is not None
        stages = CutModel.make(module, cutting, config.pp, mesh)
        own_blocks = stages.own_blocks(blocks)
    absent = stages.held.lacks if stages is not None else lambda module: False
    model_parallel = apply_plan(model, rules, mesh.sub_mesh("mp"), prefix, found, absent)
    if model_parallel.mode is not None and config.recompute.mode == "selective":
        model_parallel.mode.replicate.remembers = False
    marked = _marked(model, found[0], prefix, config)
    if model_parallel.mode is None:  # it has told them all
        for warning in _warnings_of(found[1], of_context=True):
            log.warning(warning)
    context_parallel = prepare_context(module, config.cp, mesh, marked, device)
    apply_recompute(own_blocks, config.recompute, lambda: both(context_parallel.repeating(), model_parallel.running()))
    apply_compile(own_blocks, config.compile)
    data_parallel = apply_data_parallel(module, own_blocks, mesh, config.dp)
    materialise(module, device, construction, files)
    model_parallel.begin()
    data_parallel.begin()
    divide(context_parallel, module, own_blocks, marked, lambda module: not absent(module))
    pipeline = stages.pipeline(device) if stages is not None else None
    account = _account(
        config, module, blocks, data_parallel.reasons, _plan_account(rules, found), marked, cutting, found[1]
    )
    return Parallelized(
        module, config, data_parallel, model_parallel, context_parallel, count, own_blocks, account, pipeline
    )


def _cut(module: nn.Module, blocks: Blocks, config: ParallelConfig) -> Cutting | None:
    """How `module` is cut into stages; None where pp has one rank."""
    if config.mesh.pp == 1:
        return None
    assert config.pp is not None
    return plan_cut(module, blocks, config.pp, config.mesh.pp, wrapped=isinstance(module, pl.LightningModule))


def _plan(
    module: nn.Module, config: ParallelConfig, own_plan: Mapping[str, Any] | None
) -> tuple[list[Rule], nn.Module, str]:
    """(rules, the module that they speak of, its prefix): of axes with one rank they say nothing."""
    model, prefix = planned_part(module)
    rules: list[Rule] = []
    if config.mesh.mp > 1:
        assert config.mp is not None
        example = getattr(module, "example_input_array", None)
        rules = plan_for(model, config.mp, own_plan, config.mesh.mp, example)
    elif config.mp is not None:
        rules = context_rules([*read_plan(own_plan, "the model's plan"), *read_plan(config.mp.plan)])
    if config.mesh.cp > 1:
        rules = with_context_plan(rules, config.cp)
    else:
        rules = other_rules(rules)
    return rules, model, prefix


def _marked(model: nn.Module, matches: list[Match], prefix: str, config: ParallelConfig) -> Marked:
    """What a plan says of cp; names are those in the whole module."""
    if config.mesh.cp == 1:
        return Marked()
    assert config.cp is not None
    return marked_by(model, matches, config.cp.backend).within(prefix)


def _plan_account(rules: list[Rule], found: tuple[list[Match], list[str]]) -> dict[str, Any]:
    """What a plan does along mp, as plain data; what stands in it for cp stays in it."""
    matches, warnings = found
    kept = [rule for rule in rules if rule.source != CONTEXT_PLAN]
    if not other_rules(kept):
        return {}
    ours = [match for match in matches if match.rule.source != CONTEXT_PLAN]
    return account_of_plan(kept, ours, _warnings_of(warnings, of_context=False))


def _warnings_of(warnings: list[str], of_context: bool) -> list[str]:
    return [warning for warning in warnings if warning.startswith(f"{CONTEXT_PLAN}: ") == of_context]


def foresee(module: nn.Module, config: ParallelConfig, own_plan: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The account that `apply_parallelism` would give of `module` (may be on meta), without touching it."""
    blocks = find_blocks(module)
    if config.mesh.pp * config.mesh.cp > 1:
        _without_cache(module)
    sharding = sharding_reasons(module, blocks, config.dp, config.mesh.dp * config.mesh.cp, config.mesh.pp > 1)
    rules, model, prefix = _plan(module, config, own_plan)
    found = matched(model, rules, prefix)
    marked = _marked(model, found[0], prefix, config)
    cutting = _cut(module, blocks, config)
    return _account(config, module, blocks, sharding, _plan_account(rules, found), marked, cutting, found[1])


def _account(
    config: ParallelConfig,
    module: nn.Module,
    blocks: Blocks,
    sharding: dict[str, str],
    plan: dict[str, Any],
    marked: Marked,
    cutting: Cutting | None,
    warnings: list[str],
) -> dict[str, Any]:
    """Everything that is applied, in order and with reasons, as plain data for plan.yaml."""
    recomputed = recomputed_blocks(blocks, config.recompute)
    compiled = [block.name for block in blocks] if config.compile else []
    stages = {}
    if cutting is not None:
        assert config.pp is not None
        stages = account_of_pipeline(cutting, config.pp, config.mesh)
    context = {}
    if config.mesh.cp > 1:
        assert config.cp is not None
        context = account_of_context(config.cp, config.mesh.cp, module, [block.module for block in blocks], marked)
        context |= _if_any("warnings", _warnings_of(warnings, of_context=True))
    return {
        "order": list(ORDER),
        "mesh": {"shape": config.mesh.name, "ranks": config.mesh.size, "rank_order": list(config.mesh.order)},
        "blocks": {"found": [block.name for block in blocks], **_if_any("reasons", blocks.reasons)},
        **_if_any("pp", stages),
        **_if_any("mp", plan),
        **_if_any("cp", context),
        "recompute": {"mode": config.recompute.mode, **_if_any("blocks", recomputed)},
        "compile": {"mode": config.compile, **_if_any("blocks", compiled)},
        "dp": {
            "sharding_level": config.dp.sharding_level,
            **dict(zip(("replicate", "shard"), config.dp.split(config.mesh.dp), strict=True)),
            "groups": sharding,
        },
    }


def _if_any(key: str, value: Any) -> dict[str, Any]:
    return {key: value} if value else {}


def _without_cache(module: nn.Module) -> None:
    """Switch off the cache of keys and values that `transformers` fills in training, too.

    A block that runs again would add to it twice, and a stage of a pipeline has a part of it only.
    """
    for part in module.modules():
        config = getattr(part, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False  # type: ignore[union-attr]


def _moved(module: nn.Module, device: torch.device) -> nn.Module:
    """`module` with everything that is not on meta on `device`."""
    if device.type == "cpu":
        return module
    return module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
