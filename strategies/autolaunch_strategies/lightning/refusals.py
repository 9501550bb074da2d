"""What of lightning can't be joined with a mesh, or with stages."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden

from autolaunch_strategies.config import SHARDING_AXES, ConfigError, MeshShape, ParallelConfig, PipelineParallel

_NEED_WHOLE_WEIGHTS: dict[type, tuple[str, str]] = {
    pl.callbacks.WeightAveraging: ("averages", "averaging the weights of saved checkpoints"),
    pl.callbacks.ModelPruning: ("masks", "pruning the weights of a checkpoint"),
}
"""Callbacks that work wherever every rank holds the whole model: what they do to weights, and what else can be done."""


def refuse_callbacks(trainer: pl.Trainer, mesh: MeshShape, level: int) -> None:
    """Raise ConfigError for callbacks that need whole weights, or that try things out by themselves on each rank.

    Args:
        level: the sharding level along dp and cp.
    """
    cut = [axis for axis in ("mp", "pp") if mesh.sizes[axis] > 1]
    sharded = bool(cut) or (level > 0 and any(mesh.sizes[axis] > 1 for axis in SHARDING_AXES))
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by a connector, not by the class
        if isinstance(callback, pl.callbacks.StochasticWeightAveraging):
            raise ConfigError(
                "StochasticWeightAveraging",
                "it averages whole weights; here each rank may hold a part",
                "averaging the weights of saved checkpoints",
            )
        does = next((words for kind, words in _NEED_WHOLE_WEIGHTS.items() if isinstance(callback, kind)), None)
        if does is not None and sharded:
            raise ConfigError(
                type(callback).__name__,
                f"it {does[0]} whole weights; here each rank holds a part",
                f"{'a mesh with sharding level 0, without ' + ' and '.join(cut) if cut else 'sharding level 0'}, or "
                f"{does[1]}",
                "" if cut else "dp.sharding_level=0",
            )
        if isinstance(callback, pl.callbacks.BatchSizeFinder) and mesh.size > 1:
            raise ConfigError(
                type(callback).__name__,
                "it tries sizes until one rank runs out of memory, while the others wait for it",
                "a size that was found on one device, or what `autolaunch plan` says of memory",
            )


def refuse_scaler(precision: Precision, config: ParallelConfig) -> None:
    """Raise ConfigError for fp16 with a scaled loss where parts of a backward pass would not see the scale.

    Stages differentiate their microbatches before the loss is scaled; and of parameters that are sharded in different
    ways, one rank may find an overflow that the others do not.
    """
    axes = [f"{axis}={config.mesh.sizes[axis]}" for axis in ("mp", "pp") if config.mesh.sizes[axis] > 1]
    axes += [f"ep={config.ep}"] if config.ep > 1 else []
    if getattr(precision, "scaler", None) is not None and axes:
        raise ConfigError(
            f"precision=16-mixed with {', '.join(axes)}",
            "the loss is scaled, and not every part of the backward pass would know by how much",
            "bf16-mixed, which needs no scale; 16-mixed with dp and cp alone",
            "precision=bf16-mixed",
        )


def refuse_module_in_stages(module: pl.LightningModule, pp: PipelineParallel) -> None:
    """Raise ConfigError for modules whose training can't be run in stages."""
    if not module.automatic_optimization and pp.loss == "microbatch":
        raise ConfigError(
            f"pp={pp.schedule} with {type(module).__name__}",
            "it optimizes by hand (automatic_optimization=False), so its step holds backward passes and optimizer "
            "steps, and can't be run for one microbatch after the other",
            "pp=exact, automatic optimization, or a mesh with pp of size 1",
            "pp=exact",
        )
    if is_overridden("backward", module, parent=pl.LightningModule):
        raise ConfigError(
            f"pp with {type(module).__name__}",
            "it overrides `backward`, which stages other than the last, that have no loss, can't run",
            "a module that leaves `backward` to lightning, or a mesh with pp of size 1",
        )
