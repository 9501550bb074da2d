"""The one fixed order in which everything is applied to a module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autolaunch_strategies.blocks import Blocks, find_blocks
from autolaunch_strategies.config import ParallelConfig
from autolaunch_strategies.construction import Construction
from autolaunch_strategies.data_parallel import DataParallelModule, apply_data_parallel, sharding_reasons
from autolaunch_strategies.materialise import WeightFiles, materialise, share_values
from autolaunch_strategies.mesh import RankMesh
from autolaunch_strategies.model_parallel import ModelParallelModule, account_of_plan, apply_plan, matched
from autolaunch_strategies.plan.choose import plan_for, planned_part
from autolaunch_strategies.plan.rules import Rule
from autolaunch_strategies.recompute import apply_compile, apply_recompute, recomputed_blocks

ORDER = ("styles (mp)", "recompute", "compile", "shard (dp)", "materialise", "optimizer")


@dataclass
class Parallelized:
    """What was done to a module: handles for the strategy, and an account of it for plan.yaml."""

    module: nn.Module
    config: ParallelConfig
    data_parallel: DataParallelModule
    model_parallel: ModelParallelModule
    parameter_count: int
    blocks: Blocks
    account: dict[str, Any] = field(default_factory=dict)
    pipeline: Any = None
    """The stages of this rank if the module is cut: `group`, the ranks that hold the other stages, `device`, where this
    rank computes, and `counts(parameter)`, False for a parameter whose first holder is another stage (True for one
    that is not of this module)."""


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
    if construction is not None:
        construction.remember(module)
    share_values(_moved(module, device), mesh.group("pp", "dp", "cp", "mp"))
    blocks = find_blocks(module)
    rules, model, prefix = _plan(module, config, own_plan)
    model_parallel = apply_plan(model, rules, mesh.sub_mesh("mp"), prefix)
    if model_parallel.mode is not None and config.recompute.mode == "selective":
        model_parallel.mode.replicate.remembers = False
    recomputed = apply_recompute(blocks, config.recompute, model_parallel.running)
    compiled = apply_compile(blocks, config.compile)
    data_parallel = apply_data_parallel(module, blocks, mesh, config.dp)
    materialise(module, device, construction, files)
    model_parallel.begin()
    data_parallel.begin()
    account = _account(config, blocks, recomputed, compiled, data_parallel.reasons, model_parallel.account)
    return Parallelized(module, config, data_parallel, model_parallel, count, blocks, account)


def _plan(
    module: nn.Module, config: ParallelConfig, own_plan: Mapping[str, Any] | None
) -> tuple[list[Rule], nn.Module, str]:
    """(rules, the module that they speak of, its prefix): no rules where mp has one rank."""
    model, prefix = planned_part(module)
    if config.mesh.mp == 1:
        return [], model, prefix
    assert config.mp is not None
    example = getattr(module, "example_input_array", None)
    return plan_for(model, config.mp, own_plan, config.mesh.mp, example), model, prefix


def foresee(module: nn.Module, config: ParallelConfig, own_plan: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The account that `apply_parallelism` would give of `module` (may be on meta), without touching it."""
    blocks = find_blocks(module)
    compiled = [block.name for block in blocks] if config.compile else []
    sharding = sharding_reasons(module, blocks, config.dp, config.mesh.dp * config.mesh.cp)
    rules, model, prefix = _plan(module, config, own_plan)
    account = account_of_plan(rules, *matched(model, rules, prefix)) if rules else {}
    return _account(config, blocks, recomputed_blocks(blocks, config.recompute), compiled, sharding, account)


def _account(
    config: ParallelConfig,
    blocks: Blocks,
    recomputed: dict[str, str],
    compiled: list[str],
    sharding: dict[str, str],
    plan: dict[str, Any],
) -> dict[str, Any]:
    """Everything that is applied, in order and with reasons, as plain data for plan.yaml."""
    return {
        "order": list(ORDER),
        "mesh": {"shape": config.mesh.name, "ranks": config.mesh.size, "rank_order": list(config.mesh.order)},
        "blocks": {"found": [block.name for block in blocks], **_if_any("reasons", blocks.reasons)},
        **_if_any("mp", plan),
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


def _moved(module: nn.Module, device: torch.device) -> nn.Module:
    """`module` with everything that is not on meta on `device`."""
    if device.type == "cpu":
        return module
    return module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
