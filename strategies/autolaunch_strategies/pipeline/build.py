"""A pipeline from a model and a config: cut first, take over the calls when everything else has been applied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autolaunch_strategies.config import ConfigError, MeshShape, PipelineParallel
from autolaunch_strategies.experts.auxiliary import router_losses
from autolaunch_strategies.mesh.rank_mesh import RankMesh, coordinates
from autolaunch_strategies.model.blocks import Block, Blocks
from autolaunch_strategies.pipeline.cut import Cutting, Held, cut, hold
from autolaunch_strategies.pipeline.placement import group_rank, pipe_rank, stages_of
from autolaunch_strategies.pipeline.run import Pipeline
from autolaunch_strategies.pipeline.structure import Structures, skeleton_of
from autolaunch_strategies.pipeline.transfer import Axes, Channel
from autolaunch_strategies.schedules.schedule import placement, routes
from autolaunch_strategies.torch_private.calls import intercepted, is_compiled
from autolaunch_strategies.tracing.inputs import Steps, no_steps
from autolaunch_strategies.training.batch_statistics import batch_norms


@dataclass
class CutModel:
    """A module of which this rank has kept its stages only; its calls are still its own."""

    root: nn.Module
    cutting: Cutting
    held: Held
    structures: Structures
    pp: PipelineParallel
    rank_of_stage: tuple[int, ...]
    mesh: RankMesh

    @classmethod
    def make(cls, root: nn.Module, cutting: Cutting, pp: PipelineParallel, mesh: RankMesh) -> CutModel:
        """Take everything out of `root` that other stages hold."""
        group = mesh.group("pp")
        assert group is not None
        rank_of_stage = placement(pp, group.size())
        model = root.get_submodule(cutting.name.removesuffix("."))
        keep = [item for item in (getattr(root, "_trainer", None), getattr(root, "_fabric", None)) if item is not None]
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoder):  # tensors without sizes can't be told to another stage
                module.use_nested_tensor = False
        structures = Structures(cutting, skeleton_of(model, tuple(keep)))
        own = stages_of(rank_of_stage, pipe_rank(rank_of_stage, group.size(), group.rank()))
        return cls(root, cutting, hold(root, cutting, own), structures, pp, rank_of_stage, mesh)

    def own_blocks(self, blocks: Blocks) -> Blocks:
        """Those blocks of which this rank holds something."""
        kept = [block for block in blocks if _holds_something(block)]
        return Blocks(kept, blocks.reasons)

    def pipeline(self, device: torch.device) -> Pipeline:
        """Take over the calls of the model. Collective: the ranks of all pipelines connect."""
        group = self.mesh.group("pp")
        assert group is not None
        homes = [group_rank(self.rank_of_stage, group.size(), stage) for stage in range(len(self.rank_of_stage))]
        channel = Channel(group, self.mesh.routes("pp", routes(homes)), device)
        channel.connect()
        return Pipeline(
            self.root,
            self.cutting,
            self.held,
            self.structures,
            self.pp,
            self.rank_of_stage,
            group,
            Axes(self.mesh.sub_mesh("mp"), self.mesh.group("cp")),
            channel,
            device,
        )


def _holds_something(block: Block) -> bool:
    return next(block.module.parameters(), None) is not None


def plan_cut(
    root: nn.Module,
    blocks: Blocks,
    pp: PipelineParallel,
    ranks: int,
    wrapped: bool,
    steps: Callable[[nn.Module], Steps] = no_steps,
) -> Cutting:
    """Decide how `root` is cut for so many ranks along pp. Nothing is changed.

    Args:
        wrapped: whether `root` is a module around the model (a LightningModule), and not the model itself.
        steps: what `root` does with a part of it.
    """
    for name, module in root.named_modules():
        if is_compiled(module):
            raise _compiled_whole(name)
    cutting = cut(root, blocks, pp, len(placement(pp, ranks)), wrapped, steps)
    model = root.get_submodule(cutting.name.removesuffix("."))
    if pp.loss == "microbatch" and pp.microbatches != 1:
        _refuse_router_losses(model, cutting.name)
    _refuse_batch_statistics(model, cutting.name, pp)
    parts = {".".join(unit.split(".")[:depth]) for unit in cutting.units for depth in range(unit.count(".") + 1)}
    for name in sorted(parts):
        if intercepted(model.get_submodule(name)) is not None:
            raise _compiled_whole(cutting.name + name)
    return cutting


def _refuse_batch_statistics(model: nn.Module, prefix: str, pp: PipelineParallel) -> None:
    several = pp.microbatches is None if pp.loss == "microbatch" else False
    if pp.allow_batch_statistics or not (several or (pp.microbatches or 1) > 1):
        return
    for name, part in batch_norms(model).items():
        if part.training:
            count = "" if pp.microbatches is None else f"pp.microbatches={pp.microbatches} "
            raise ConfigError(
                f"{count}pp.loss={pp.loss} with {prefix}{name} ({type(part).__name__})",
                "it takes its statistics from one microbatch at a time, so they are not those of the batch",
                "pp=exact with pp.microbatches=1 (or null); other norms; or pp.allow_batch_statistics=true, which is "
                "another result than on one device",
                "pp=exact pp.microbatches=1",
            )


def _refuse_router_losses(model: nn.Module, prefix: str) -> None:
    """The first batch may not show it: routers begin even, and their loss counts little."""
    for name in router_losses(model):
        raise ConfigError(
            f"pp.loss=microbatch with {(prefix + name).removesuffix('.') or 'the model'} (output_router_logits)",
            "the loss of its routers is no mean over microbatches, so it would learn something else than on one device",
            "pp=exact, which computes it of the whole batch; or a model without (output_router_logits=false)",
            "pp=exact",
        )


def _compiled_whole(name: str) -> ConfigError:
    return ConfigError(
        "pp",
        f"{name.removesuffix('.') or 'the model'} is compiled as a whole, so its parts can't be run in stages",
        "compile=true, which compiles every block by itself",
        "compile=true",
    )


def account_of_pipeline(cutting: Cutting, pp: PipelineParallel, mesh: MeshShape) -> dict[str, Any]:
    """How a model is cut, and what each stage holds and on which ranks, as plain data."""
    rank_of_stage = placement(pp, mesh.pp)
    account: dict[str, Any] = {
        "model": cutting.name.removesuffix(".") or "(the module)",
        "schedule": pp.schedule,
        "loss": pp.loss,
        "order_from": cutting.recording.origin,
        "cuts": cutting.cuts,
        "stages": [
            {
                "stage": number,
                "pipe_rank": rank_of_stage[number],
                "ranks": _spans(_ranks_of_stage(rank_of_stage, mesh, number)),
                **stage,
            }
            for number, stage in enumerate(cutting.account())
        ],
    }
    if shared := shared_parameters(cutting):
        account["shared"] = {name: list(stages) for name, stages in shared.items()}
    if cutting.recording.untraceable:
        account["untraceable"] = dict(cutting.recording.untraceable)
    return account


def _ranks_of_stage(rank_of_stage: tuple[int, ...], mesh: MeshShape, stage: int) -> list[int]:
    at = group_rank(rank_of_stage, mesh.pp, stage)
    return [rank for rank in range(mesh.size) if coordinates(mesh, rank)["pp"] == at]


def _spans(numbers: Sequence[int]) -> str:
    """Numbers in order as text, runs of them by their ends: `0-3, 8`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def shared_parameters(cutting: Cutting) -> Mapping[str, tuple[int, ...]]:
    """Parameters that several stages hold, and which."""
    return {name: stages for name, stages in cutting.holders.items() if len(stages) > 1}
