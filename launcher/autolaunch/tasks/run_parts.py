"""The parts of a run on one rank: seeds, strategy, trainer, module, data, all from the resolved job."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler

from autolaunch.instantiate import build
from autolaunch.job import ResolvedJob
from autolaunch.models import build_module
from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.lightning.strategy import MeshStrategy
from autolaunch_strategies.model.construction import Construction

NOT_OF_LIGHTNING = ("accelerator", "accumulate_grad_batches", "callbacks", "profiler")
"""Keys of `trainer` that lightning's Trainer is not given as they are; all others are arguments of it."""


def build_strategy(config: Mapping[str, Any]) -> MeshStrategy:
    """The strategy of a resolved job."""
    return MeshStrategy(
        mesh=config["mesh"],
        dp=config["dp"],
        mp=config["mp"],
        pp=config["pp"],
        cp=config["cp"],
        recompute=config["recompute"],
        recompute_save=config["recompute_save"],
        compile=config["compile"],
        own_plan=own_plan(config),
        timeout=config["launch"]["collective_timeout"],
        asynchronous_checkpoints=config["checkpoint"]["asynchronous"],
    )


def own_plan(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The plan for mp that the job's model comes with, if it brings one of the wanted kind."""
    if config["mp"] is None or config["module"]:
        return None
    plans = config["model"].get("mp_plans") or {}
    return plans.get("seq_parallel" if config["mp"]["sequence_parallel"] else "tensor_parallel")


def build_trainer(
    job: ResolvedJob, strategy: MeshStrategy, callbacks: list[pl.Callback], loggers: list[Any]
) -> pl.Trainer:
    """The lightning Trainer of a resolved job; the user's own callbacks and loggers stand behind the given ones."""
    config = job.config
    trainer = config["trainer"]
    own_callbacks = [
        build(node, f"trainer.callbacks.{name}") for name, node in trainer["callbacks"].items() if node is not None
    ]
    own_loggers = [build(node, f"logger.{name}") for name, node in config["logger"].items() if node is not None]
    checkpoints = config["checkpoint"]
    saving = checkpoints["enabled"] and not trainer["fast_dev_run"]
    if saving and config["task"] == "fit":
        callbacks = [*callbacks, Checkpoints(job.output_dir / "checkpoints", checkpoints)]
    arguments = {name: value for name, value in trainer.items() if name not in NOT_OF_LIGHTNING}
    arguments["max_epochs"] = -1 if trainer["max_epochs"] is None else trainer["max_epochs"]
    return pl.Trainer(
        strategy=strategy,
        accelerator="cuda" if trainer["accelerator"] == "gpu" else trainer["accelerator"],
        precision=config["precision"],
        accumulate_grad_batches=trainer["accumulate_grad_batches"] or config["data"].get("microbatches", 1),
        callbacks=[*callbacks, *own_callbacks],
        logger=[*loggers, *own_loggers],
        enable_checkpointing=saving,
        default_root_dir=str(job.output_dir),
        profiler=_profiler(trainer["profiler"], job.output_dir),
        use_distributed_sampler="_target_" in config["data"],  # our own data know their share
        **arguments,
    )


def _profiler(name: str | None, output_dir: Path) -> Profiler | None:
    """Lightning's profiler of this name; what it has measured is written to `<task>-profile*` in the directory."""
    if name is None:
        return None
    kinds: dict[str, Callable[..., Profiler]] = {
        "simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler,
    }  # fmt: skip
    return kinds[name](dirpath=output_dir, filename="profile")


def construct_module(
    config: Mapping[str, Any], strategy: MeshStrategy, precision: Precision, device: torch.device
) -> pl.LightningModule:
    """Build the LightningModule without memory for its parameters; the strategy gives each rank its part of them.

    A constructor that can't run so (it reads a file into a parameter, say) runs in memory instead, on every rank.
    """
    construction = Construction(config["seed"])
    try:
        with precision.module_init_context(), construction.recording():
            module = build_module(config)
    except ConfigError:
        raise
    except Exception as reason:
        pl.seed_everything(config["seed"], workers=True, verbose=False)
        with precision.module_init_context():
            module = build_module(config)
        warnings.warn(
            f"the model was built whole in memory on every rank, because its constructor can't run without: {reason}",
            stacklevel=2,
        )
        return module
    strategy.construction = construction
    model = config["model"]
    if not config["module"] and model.get("name") == "hf" and model.get("path") and model.get("pretrained"):
        strategy.files = _PretrainedFiles(model["path"], module)
    return module


class _PretrainedFiles:
    """The files of a pretrained model under the names of the LightningModule around it."""

    def __init__(self, directory: str, module: pl.LightningModule) -> None:
        from autolaunch.models.pretrained import SafetensorsWeights

        self._weights = SafetensorsWeights(directory)
        # Of attributes, torch's stubs say that they are tensors or modules.
        matching = self._weights.matching(module.model)  # type: ignore[arg-type]
        self._sources = {f"model.{name}": source for name, source in matching.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> torch.Tensor:
        return self._weights.read(self._sources[name], index)


class Checkpoints(ModelCheckpoint):
    """Checkpoints every so many steps and at the end of training; the last few (or the best) are kept."""

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        super().__init__(
            dirpath=directory,
            filename="step_{step:07.0f}",
            auto_insert_metric_name=False,
            # Kept are those with the highest step, unless another value says which are best.
            monitor=config["monitor"] or "step",
            mode=config["mode"] if config["monitor"] else "max",
            save_top_k=config["keep_last"],
            every_n_train_steps=config["every_n_steps"] or 0,
            save_on_train_epoch_end=False,
        )

    @property
    def state_key(self) -> str:
        """One name, however often is saved: a run may go on with another interval."""
        return type(self).__name__

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Nothing: checkpoints are written at steps and at the end."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._last_global_step_saved != trainer.global_step:
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))
        super().on_train_end(trainer, pl_module)


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Keep lightning's banners, hints and rank-zero notes off the terminal: our own screen says what matters."""
    import logging

    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "lightning")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    with warnings.catch_warnings():
        for message in (
            ".*does not have many workers.*",
            ".*sync_dist=True.*",
            ".*Checkpoint directory .* exists and is not empty.*",
            ".*functorch.*",
            ".*number of training batches .* is smaller than the logging interval.*",
            ".*You defined a `validation_step` but have no `val_dataloader`.*",
            ".*Attempted to get default timeout for nccl backend.*",
            ".*`srun` command is available on your system but is not used.*",
            ".*treespec, LeafSpec.*",
            ".*The dirpath has changed from.*",
        ):
            warnings.filterwarnings("ignore", message=message)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
