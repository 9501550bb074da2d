"""Expert parallelism applied to a model, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from autolaunch_strategies.config import SHARDING_AXES, ConfigError, ParallelConfig
from autolaunch_strategies.config.experts import check_experts
from autolaunch_strategies.data_parallel.groups import GradientGroup
from autolaunch_strategies.experts.dispatch import Dispatch
from autolaunch_strategies.experts.find import Mixture, find_mixtures, refusal
from autolaunch_strategies.experts.listed import ListedExperts
from autolaunch_strategies.experts.whole import dim_to_shard, shard_each
from autolaunch_strategies.mesh.rank_mesh import RankMesh
from autolaunch_strategies.torch_private.gradient_hooks import has_gradient_hooks
from autolaunch_strategies.torch_private.meshes import flatten_mesh


@dataclass
class ExpertParallelModule:
    """A model whose experts are shared out."""

    dispatches: dict[str, Dispatch] = field(default_factory=dict)
    """By the names of the modules that hold experts, those of this rank's stages."""
    groups: dict[str, GradientGroup] = field(default_factory=dict)
    """Names of parameters of experts -> their gradient group."""


def mixtures_for(model: nn.Module, config: ParallelConfig) -> list[Mixture]:
    """The mixtures of `model`, each of which the ranks of a degree can share; none where it is 1.

    Raises:
        ConfigError: it has none, or the degree does not divide the experts of one.
    """
    if config.ep == 1:
        return []
    mixtures = find_mixtures(model)
    if not mixtures:
        check_experts(config.ep, 0, type(model).__name__, config.expert_ranks)
    for mixture in mixtures:
        whose = f"{mixture.name} ({type(mixture.module).__name__})"
        check_experts(config.ep, mixture.experts, whose, config.expert_ranks)
        for name, parameter in mixture.module.named_parameters():
            if has_gradient_hooks(parameter):
                raise _hooked(f"{mixture.name}.{name}", config.ep)
        if mixture.caller is not None:
            for name, parameter in mixture.module.named_parameters():
                if dim_to_shard(parameter, config.ep) is None:
                    raise refusal(
                        mixture.name,
                        mixture.module,
                        f"{name} has {tuple(parameter.shape)} numbers, which {config.ep} ranks can't share evenly",
                    )
    return mixtures


def _hooked(name: str, ep: int) -> ConfigError:
    return ConfigError(
        f"ep={ep}",
        f"{name} has hooks on its gradient, which would not run: what is shared out is another parameter",
        "ep=1, or no hooks",
        "ep=1",
    )


def account_of_experts(mixtures: Iterable[Mixture], ep: int, ranks: int) -> dict[str, Any]:
    """What is done, as plain data for plan.yaml; `ranks` of dp-shard x cp x mp."""
    return {
        "degree": ep,
        "efsdp": ranks // ep,
        "plan": {mixture.name: "ExpertParallel" for mixture in mixtures},
        "reasons": {mixture.name: mixture.why for mixture in mixtures},
        "experts_per_rank": {mixture.name: mixture.experts // ep for mixture in mixtures},
    }


def apply_experts(
    root: nn.Module,
    mixtures: Iterable[Mixture],
    mesh: RankMesh,
    config: ParallelConfig,
    is_elsewhere: Callable[[nn.Module], bool] = lambda module: False,
) -> ExpertParallelModule:
    """Give each rank its experts of every mixture, and let tokens travel to them. Parameters may be on meta.

    Collective over the whole mesh.
    """
    experts = mesh.expert_mesh(config.ep, over_replicas=config.dp.sharding_level == 0)
    same_tokens = mesh.group("mp")
    applied = ExpertParallelModule()
    placed: set[nn.Parameter] = set()
    for mixture in mixtures:
        if is_elsewhere(mixture.module):
            continue
        if mixture.caller is not None:
            placed.update(shard_each(mixture.module, experts["ep"]))
            listed = ListedExperts(mixture, experts["ep"].get_group(), same_tokens)
            applied.dispatches[mixture.name] = listed.dispatch
            continue
        placed.update(_shard(mixture.module, experts["ep"]))
        applied.dispatches[mixture.name] = Dispatch(
            mixture.module, mixture.experts, experts["ep"].get_group(), same_tokens, mixture.adapters
        )
    group = _gradient_group(mesh, experts)
    applied.groups = {name: group for name, parameter in root.named_parameters() if parameter in placed}
    return applied


def _gradient_group(mesh: RankMesh, experts: DeviceMesh) -> GradientGroup:
    """Ranks with the same experts. Together they have computed with every token of the batch, as all ranks have."""
    dims = [name for name in experts.mesh_dim_names or () if name != "ep"]
    replicas = flatten_mesh(experts, tuple(dims))
    parts = mesh.group(*SHARDING_AXES)
    return GradientGroup(
        replicas.get_group() if replicas.size() > 1 else None,
        1 if parts is None else parts.size(),
        experts[tuple(dims)],
    )


def _shard(module: nn.Module, mesh: DeviceMesh) -> Iterable[nn.Parameter]:
    for name, parameter in list(module.named_parameters(recurse=False)):
        sharded = nn.Parameter(
            distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None),
            requires_grad=parameter.requires_grad,
        )
        sharded.__dict__.update(parameter.__dict__)
        module._parameters[name] = sharded
        yield sharded
