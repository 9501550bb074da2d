"""The parts of a run on one rank: seeds, strategy, trainer, module, data, all from the resolved job."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.utilities.model_helpers import is_overridden

from autolaunch.config.command_line import typed_keys
from autolaunch.config.schema import Trainer, defaults_of
from autolaunch.instantiate import build
from autolaunch.job import PARALLEL_KEYS, ResolvedJob
from autolaunch.models import build_module
from autolaunch.models.own_plan import own_plan
from autolaunch.report.metrics import StepMetrics
from autolaunch.tasks.checkpoints import Checkpoints
from autolaunch.tasks.not_finite import EndsWhenNotFinite
from autolaunch.tasks.optimizer_as_typed import OptimizerAsTyped
from autolaunch.tasks.progress_notes import Moves
from autolaunch.tasks.samples import Samples
from autolaunch.tasks.weight_files import weight_files
from autolaunch_strategies.config import FLOAT8_RECIPES, ConfigError, lightning_precision
from autolaunch_strategies.lightning.strategy import MeshStrategy
from autolaunch_strategies.model.construction import Construction

NOT_OF_LIGHTNING = ("accelerator", "accumulate_grad_batches", "nonfinite_patience", "profiler")
"""Keys of `trainer` that lightning's Trainer is not given as they are; all others are arguments of it."""


def build_strategy(config: Mapping[str, Any], recorded: Mapping[str, Any] | None = None) -> MeshStrategy:
    """The strategy of a resolved job.

    Args:
        recorded: what its checkpoints are to say about it.
    """
    return MeshStrategy(
        **{key: config[key] for key in PARALLEL_KEYS},
        float8=FLOAT8_RECIPES.get(config["precision"]),
        own_plan=own_plan(config),
        timeout=config["launch"]["collective_timeout"],
        first_step_timeout=config["launch"]["first_step_timeout"],
        asynchronous_checkpoints=config["checkpoint"]["asynchronous"],
        trust_checkpoints=config["checkpoint"]["trust"],
        verify_checkpoints=config["checkpoint"]["verify"],
        recorded=recorded,
        allow_on_resume=config["resume"]["allow"],
        data_position=config["checkpoint"]["data_position"],
    )


def build_trainer(
    job: ResolvedJob, strategy: MeshStrategy, steps: StepMetrics, callbacks: list[pl.Callback], loggers: list[Any]
) -> pl.Trainer:
    """The lightning Trainer of a resolved job; the user's own callbacks and loggers stand behind the given ones."""
    config = job.config
    trainer = config["trainer"]
    own_callbacks = [build(node, f"callbacks.{name}") for name, node in config["callbacks"].items() if node is not None]
    for callback in own_callbacks:
        if isinstance(callback, Samples):
            callback.begin(config)
    own_loggers = [build(node, f"logger.{name}") for name, node in config["logger"].items() if node is not None]
    if config["matmul_precision"] is not None:  # on GPUs, of which a process of a sweep may serve several jobs
        torch.set_float32_matmul_precision(config["matmul_precision"])
    checkpoints = config["checkpoint"]
    saving = checkpoints["enabled"] and not trainer["fast_dev_run"]
    if saving and config["task"] == "fit":
        callbacks = [*callbacks, Checkpoints(job.output_dir / "checkpoints", checkpoints, steps)]
    if config["task"] == "fit" and trainer["nonfinite_patience"] is not None:
        callbacks = [*callbacks, EndsWhenNotFinite(steps, trainer["nonfinite_patience"])]
    if config["task"] == "fit" and config["ckpt_path"] is not None and config["module"] is None:
        callbacks = [*callbacks, OptimizerAsTyped()]
    arguments = {name: value for name, value in trainer.items() if name not in NOT_OF_LIGHTNING}
    arguments["max_epochs"] = -1 if trainer["max_epochs"] is None else trainer["max_epochs"]
    return pl.Trainer(
        strategy=strategy,
        accelerator="cuda" if trainer["accelerator"] == "gpu" else trainer["accelerator"],
        precision=lightning_precision(config["precision"]),
        accumulate_grad_batches=trainer["accumulate_grad_batches"] or config["data"].get("microbatches", 1),
        callbacks=[Moves(), steps, *callbacks, *own_callbacks],
        logger=[*loggers, *own_loggers],
        enable_checkpointing=saving,
        default_root_dir=str(job.output_dir),
        profiler=_profiler(trainer["profiler"], job.output_dir),
        **arguments,
    )


_LOADERS = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}


def refuse_own_loaders(module: pl.LightningModule, task: str, data: str | None, typed: Sequence[str]) -> None:
    """Refuse a module with loaders of its own where nobody has said what else it is run on.

    Args:
        data: the chosen option of the group.
        typed: the overrides of the job.

    Raises:
        ConfigError: it would be run on the built-in texts.
    """
    loader = f"{_LOADERS[task]}_dataloader"
    said = data != "text" or any(key.partition(".")[0] == "data" for key in typed_keys(typed))
    if not said and is_overridden(loader, module):
        raise ConfigError(
            f"module._target_={type(module).__module__}.{type(module).__qualname__}",
            f"has a {loader} of its own, which the command does not call: it would run on data=text",
            "a LightningDataModule with that loader; or any other data, typed",
            "data=custom data._target_=package.DataModule",
        )


def leave_clipping(trainer: pl.Trainer, module: pl.LightningModule, typed: Sequence[str]) -> None:
    """Clip no gradients of a module that optimizes by hand: lightning refuses to, and the limit is there by default.

    Args:
        typed: the overrides of the job.

    Raises:
        ConfigError: the limit was set for this run.
    """
    limit = trainer.gradient_clip_val
    if module.automatic_optimization or limit is None:
        return
    key = "trainer.gradient_clip_val"
    if limit != defaults_of(Trainer)["gradient_clip_val"] or key in typed_keys(typed):
        raise ConfigError(
            f"{key}={limit:g}",
            f"{type(module).__name__} optimizes by hand (automatic_optimization=False), where nothing else clips",
            "self.clip_gradients(optimizer, ...) in its training_step",
            f"{key}=null",
        )
    trainer.gradient_clip_val = None


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
    with precision.module_init_context():
        module, construction, reason = constructed(config)
    if construction is None:
        warnings.warn(
            f"the model was built whole in memory on every rank, because its constructor can't run without: {reason}",
            stacklevel=2,
        )
    strategy.construction = construction
    strategy.files = weight_files(config, module, construction)
    return module


def constructed(config: Mapping[str, Any]) -> tuple[pl.LightningModule, Construction | None, Exception | None]:
    """(the LightningModule, what builds its parameters, None); or (it with parameters, None, why those are built)."""
    construction = Construction(config["seed"])
    try:
        with construction.recording():
            return build_module(config), construction, None
    except ConfigError:
        raise
    except Exception as reason:
        pl.seed_everything(config["seed"], workers=True, verbose=False)
        return build_module(config), None, reason


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
            ".*Checkpoint directory .* exists and is not empty.*",
            ".*functorch.*",
            ".*number of training batches .* is smaller than the logging interval.*",
            ".*You defined a `validation_step` but have no `val_dataloader`.*",
            ".*Total length of `list` across ranks is zero.*",  # what our data say where there is nothing to run
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
