"""Lightning's features, each as a run of its own: on one device by plain Lightning, on every mesh through MeshStrategy.

A feature is a function of a `Run`; what it returns must not depend on the mesh. `refused` names the meshes on which it
is not to be had, each with words that the message must contain; `tolerance` is what rounding may make of it.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch import callbacks as its
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autolaunch_strategies import EMA, MeshStrategy
from autolaunch_strategies.config import ConfigError
from tests.context.modules import LENGTH, VOCABULARY, llama
from tests.pipeline.cases import Rows, canonical_names, gathered, metrics, numbers
from tests.pipeline.modules import WIDTH
from tests.support.cases import OUT, RANK, serve

MESHES: dict[str, dict[str, Any]] = {
    "dp2 level 0": {"mesh": "2", "dp": 0}, "dp2 level 3": {"mesh": "2", "dp": 3}, "mp2": {"mesh": "1x2"},
    "pp2": {"mesh": "1x1x2"}, "cp2": {"mesh": "dp1xcp2"},
}  # fmt: skip
"""The columns of the table: a mesh with each axis, along dp with whole and with sharded parameters."""

WHOLE_WEIGHTS = dict.fromkeys(("dp2 level 3", "mp2", "pp2", "cp2"), "whole weights")
"""Where what needs whole weights is refused: cp2 has the usual sharding level, 3."""

SIZES = {mesh: "distributed strategies" if mesh.startswith("dp2") else "tries sizes" for mesh in MESHES}
"""Where the search for a batch size is refused, by lightning itself with dp."""


@dataclass(frozen=True)
class Run:
    """One cell: on which mesh (none: plain Lightning) and where files go."""

    name: str
    mesh: str | None = None

    @property
    def directory(self) -> Path:
        return OUT / re.sub(r"\W+", "-", f"{self.name} {self.mesh}")

    def strategy(self) -> Any:
        return "auto" if self.mesh is None else MeshStrategy(**MESHES[self.mesh], timeout=30)

    def trainer(self, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
        defaults = {
            "accelerator": "cpu", "max_epochs": 2, "logger": False, "enable_checkpointing": False,
            "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
            "log_every_n_steps": 1, "default_root_dir": self.directory,
        }  # fmt: skip
        return pl.Trainer(strategy=self.strategy(), callbacks=list(callbacks), **{**defaults, **options})

    def fit(
        self, *callbacks: pl.Callback, module: pl.LightningModule | None = None, train: Any = None, val: Any = None,
        **options: Any,
    ) -> Fitted:  # fmt: skip
        """Train with the given callbacks and options of the Trainer, and keep what every step showed."""
        pl.seed_everything(1, verbose=False)
        module = Language() if module is None else module
        rows = Rows(canonical_names(module))
        trainer = self.trainer(rows, *callbacks, **options)
        trainer.fit(module, loader() if train is None else train, loader(8) if val is None else val)
        return Fitted(trainer, module, rows)


@dataclass
class Fitted:
    """A run that has ended."""

    trainer: pl.Trainer
    module: pl.LightningModule
    rows: Rows

    def table(self, **more: Any) -> dict[str, Any]:
        """Everything that must not depend on the mesh."""
        rows = self.rows
        return {
            "losses": rows.losses, "norms": rows.norms, "rates": rows.rates, "history": rows.history,
            "metrics": metrics(self.trainer), "step": self.trainer.global_step, "epoch": self.trainer.current_epoch,
            "weights": numbers(gathered(self.module, rows.names)), **more,
        }  # fmt: skip


@dataclass(frozen=True)
class Feature:
    """A row of the table."""

    kind: str
    name: str
    run: Callable[[Run], Any]
    refused: Mapping[str, str] = field(default_factory=dict)
    tolerance: float = 1e-4
    daily: str = ""
    """The mesh on which it runs every day, if any."""


FEATURES: dict[str, Feature] = {}


def feature(kind: str, name: str, **about: Any) -> Callable[[Callable[[Run], Any]], Callable[[Run], Any]]:
    """Make a function of a `Run` a row of the table."""

    def register(run: Callable[[Run], Any]) -> Callable[[Run], Any]:
        assert name not in FEATURES, name
        FEATURES[name] = Feature(kind, name, run, **about)
        return run

    return register


def option(kind: str, name: str, *, about: Mapping[str, Any] | None = None, **options: Any) -> None:
    """A row that is nothing but options of the Trainer."""
    feature(kind, name, **(about or {}))(lambda run: run.fit(**options).table())


# --- what is trained ----------------------------------------------------------------------------------------------


def tokens(count: int = 16, seed: int = 7) -> TensorDataset:
    """Token ids [count, LENGTH + 1]."""
    return TensorDataset(
        torch.randint(3, VOCABULARY, (count, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    )


def loader(count: int = 16, batch_size: int = 4, **options: Any) -> DataLoader:
    """Batches as one device has them."""
    return DataLoader(tokens(count), batch_size=batch_size, **options)


class Language(pl.LightningModule):
    """A language model with metrics of its own, a schedule and hyperparameters."""

    def __init__(self, lr: float = 0.1, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.batch_size = lr, batch_size
        self.model = llama()
        self.top = torchmetrics.classification.MulticlassAccuracy(VOCABULARY, average="micro")

    def loss(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        (ids,) = batch
        logits = self.model(ids[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()), logits

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss, _ = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss, logits = self.loss(batch)
        self.top(logits.flatten(0, 1), batch[0][:, 1:].flatten())
        self.log("val_loss", loss, sync_dist=True)
        self.log("val_top", self.top, on_step=False, on_epoch=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        return self.loss(batch)[1].argmax(-1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def train_dataloader(self) -> DataLoader:
        return loader(batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader:
        return loader(8)


# --- callbacks ----------------------------------------------------------------------------------------------------


@feature("callback", "ModelCheckpoint(monitor, save_last)")
def checkpoint_of_the_best(run: Run) -> Any:
    keep = its.ModelCheckpoint(
        run.directory, "{epoch}-{val_loss:.4f}", monitor="val_loss", save_top_k=1, save_last=True
    )
    fitted = run.fit(keep, enable_checkpointing=True)
    files = sorted(item.name for item in run.directory.iterdir())
    again = fitted.trainer.validate(fitted.module, loader(8), ckpt_path="best", verbose=False)
    return fitted.table(
        files=files, best=Path(keep.best_model_path).name, score=float(keep.best_model_score), again=again
    )


@feature("callback", "ModelCheckpoint(every_n_train_steps)")
def checkpoint_every_few_steps(run: Run) -> Any:
    keep = its.ModelCheckpoint(run.directory, "{step}", every_n_train_steps=3, save_top_k=-1)
    return run.fit(keep, enable_checkpointing=True).table(files=sorted(item.name for item in run.directory.iterdir()))


@feature("callback", "ModelCheckpoint(save_on_exception)")
def checkpoint_at_an_exception(run: Run) -> Any:
    class Fails(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 3:
                raise RuntimeError("it fails here")

    keep = its.ModelCheckpoint(run.directory, save_on_exception=True)
    with contextlib.suppress(RuntimeError):
        run.fit(keep, Fails(), enable_checkpointing=True)
    return sorted(item.name for item in run.directory.iterdir())


@feature("callback", "EarlyStopping")
def early_stopping(run: Run) -> Any:
    stop = its.EarlyStopping("val_loss", min_delta=10.0, patience=1)
    return run.fit(stop, max_epochs=6).table(stopped=stop.stopped_epoch)


@feature("callback", "LearningRateMonitor")
def rates(run: Run) -> Any:
    from lightning.pytorch.loggers import CSVLogger

    fitted = run.fit(its.LearningRateMonitor("step"), logger=CSVLogger(run.directory), module=Scheduled("step"))
    return fitted.table(written=_written(fitted.trainer, run))


class Scheduled(Language):
    """With a schedule of one kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedulers = torch.optim.lr_scheduler
        if self.kind == "plateau":
            schedule = schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}
        schedule = schedulers.StepLR(optimizer, 2 if self.kind == "step" else 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.kind}}


def _written(trainer: pl.Trainer, run: Run) -> Any:
    """What a CSVLogger has written, on every rank."""
    rows = trainer.strategy.broadcast(_csv(trainer.logger.log_dir) if RANK == 0 else None)
    return rows


def _csv(directory: Any) -> Any:
    import csv

    with (Path(directory) / "metrics.csv").open() as file:
        return [
            {key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)
        ]  # fmt: skip


@feature("callback", "StochasticWeightAveraging", refused=dict.fromkeys(MESHES, "averages whole weights"))
def stochastic(run: Run) -> Any:
    return run.fit(its.StochasticWeightAveraging(1e-2, swa_epoch_start=1), max_epochs=3).table()


@feature("callback", "WeightAveraging", refused=WHOLE_WEIGHTS)
def averaged(run: Run) -> Any:
    return run.fit(its.WeightAveraging()).table()


@feature("callback", "EMAWeightAveraging", refused=WHOLE_WEIGHTS, daily="dp2 level 0")
def moving_average(run: Run) -> Any:
    keep = its.ModelCheckpoint(run.directory, "kept", save_top_k=-1)
    fitted = run.fit(its.EMAWeightAveraging(decay=0.8), keep, enable_checkpointing=True, max_epochs=1)
    pl.seed_everything(1, verbose=False)
    module = Language()
    rows = Rows(canonical_names(module))
    second = run.trainer(rows, its.EMAWeightAveraging(decay=0.8), max_epochs=2)
    second.fit(module, loader(), loader(8), ckpt_path=run.directory / "kept.ckpt", weights_only=False)
    return fitted.table(resumed=Fitted(second, module, rows).table())


@feature("callback", "EMA (of autolaunch_strategies)")
def sharded_average(run: Run) -> Any:
    """Beside the average that Lightning's own takes on one device."""
    kind = its.EMAWeightAveraging if run.mesh is None else EMA
    keep = its.ModelCheckpoint(run.directory, "kept", save_top_k=-1)
    fitted = run.fit(kind(decay=0.8), keep, enable_checkpointing=True, max_epochs=1)
    pl.seed_everything(1, verbose=False)
    module = Language()
    rows = Rows(canonical_names(module))
    second = run.trainer(rows, kind(decay=0.8), max_epochs=2, num_sanity_val_steps=1)
    second.fit(module, loader(), loader(8), ckpt_path=run.directory / "kept.ckpt", weights_only=False)
    return fitted.table(resumed=Fitted(second, module, rows).table())


@feature("callback", "GradientAccumulationScheduler")
def accumulation_by_epoch(run: Run) -> Any:
    return run.fit(its.GradientAccumulationScheduler({0: 1, 1: 2})).table()


@feature("callback", "BackboneFinetuning", daily="pp2")
def finetuning(run: Run) -> Any:
    class Tuned(Language):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = self.model.model

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([item for item in self.parameters() if item.requires_grad], lr=0.1)

    return run.fit(
        its.BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_lr=0.01), module=Tuned(), max_epochs=3
    ).table()


class Thaws(its.BaseFinetuning):
    """Trains the blocks from the second epoch on, with a group of their own."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.model.model.layers)

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        blocks = pl_module.model.model.layers
        if epoch == 1:
            self.unfreeze_and_add_param_group(blocks, optimizer, lr=0.03)
        elif epoch > 1:  # after a checkpoint they are frozen again
            self.make_trainable(blocks)


@feature("callback", "BaseFinetuning, gone on with", daily="dp2 level 3")
def thawed(run: Run) -> Any:
    def tuned() -> pl.LightningModule:
        module = Language()
        trained = module.parameters
        module.configure_optimizers = lambda: torch.optim.AdamW(
            [item for item in trained() if item.requires_grad], lr=0.01
        )
        return module

    fitted = run.fit(Thaws(), module=tuned())
    path = run.directory / "kept.ckpt"
    fitted.trainer.save_checkpoint(path)
    module = tuned()
    rows = Rows(canonical_names(module))
    trainer = run.trainer(rows, Thaws(), max_epochs=3)
    trainer.fit(module, loader(), loader(8), ckpt_path=path, weights_only=False)
    assert len(trainer.optimizers[0].param_groups) == 2
    return fitted.table(resumed=Fitted(trainer, module, rows).table())


@feature("callback", "LearningRateFinder", daily="dp2 level 0")
def rate_finder(run: Run) -> Any:
    find = its.LearningRateFinder(num_training_steps=6, early_stop_threshold=None)
    fitted = run.fit(find)
    return fitted.table(found=find.optimal_lr.results, suggested=fitted.module.lr)


@feature("callback", "BatchSizeFinder", refused=SIZES)
def size_finder(run: Run) -> Any:
    pl.seed_everything(1, verbose=False)
    trainer = run.trainer(its.BatchSizeFinder(max_trials=1))
    trainer.fit(Language())
    return metrics(trainer)


@feature("callback", "ModelSummary", daily="pp2")
def summary(run: Run) -> Any:
    summaries: list[Any] = []

    class Shows(Language):
        def __init__(self) -> None:
            super().__init__()
            self.example_input_array = (torch.zeros(2, LENGTH, dtype=torch.long),)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model(ids)

    class Keeps(its.ModelSummary):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            found = self._summary(trainer, pl_module)
            summaries.append([found.total_parameters, found.trainable_parameters, found.param_nums])

    return [
        run.fit(Keeps(max_depth=3), module=make(), max_steps=1).table(summary=summaries) for make in (Language, Shows)
    ]


@feature("callback", "ModelPruning", refused=WHOLE_WEIGHTS)
def pruning(run: Run) -> Any:
    return run.fit(its.ModelPruning("l1_unstructured", amount=0.3)).table()


@feature("callback", "DeviceStatsMonitor")
def device_stats(run: Run) -> Any:
    from lightning.pytorch.loggers import CSVLogger

    return run.fit(its.DeviceStatsMonitor(cpu_stats=False), logger=CSVLogger(run.directory)).table()


@feature("callback", "Timer")
def timer(run: Run) -> Any:
    return run.fit(its.Timer({"hours": 1})).table()


@feature("callback", "TQDMProgressBar")
def progress(run: Run) -> Any:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return run.fit(its.TQDMProgressBar(), enable_progress_bar=True).table()


@feature("callback", "RichProgressBar")
def rich_progress(run: Run) -> Any:
    with contextlib.redirect_stdout(io.StringIO()):
        return run.fit(its.RichProgressBar(), its.RichModelSummary(), enable_progress_bar=True).table()


@feature("callback", "BasePredictionWriter")
def prediction_writer(run: Run) -> Any:
    seen: dict[int, list[int]] = {}

    class Writes(its.BasePredictionWriter):
        def write_on_batch_end(
            self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, *_: Any
        ) -> None:
            for index, row in zip(batch_indices, prediction if prediction is not None else (), strict=False):
                seen[index] = row.tolist()

    trainer = run.trainer(Writes("batch"))
    pl.seed_everything(1, verbose=False)
    trainer.predict(Language(), loader(), return_predictions=False)
    return _together(seen)


def _together(mine: dict[Any, Any]) -> dict[str, Any]:
    """What all ranks have, by key."""
    import torch.distributed as dist

    parts: list[Any] = [mine]
    if dist.is_initialized():
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, mine)
    return {str(key): value for part in parts for key, value in sorted(part.items())}


@feature("callback", "LambdaCallback")
def lambdas(run: Run) -> Any:
    lines: list[str] = []

    def note(hook: str) -> Callable[..., None]:
        return lambda trainer, *args, **kwargs: lines.append(f"{hook} {trainer.global_step} {trainer.current_epoch}")

    hooks = [name for name in dir(pl.Callback) if name.startswith("on_") and "checkpoint" not in name]
    said = its.LambdaCallback(**{hook: note(hook) for hook in hooks})
    return run.fit(said, accumulate_grad_batches=2).table(lines=lines)


@feature("callback", "gradients in hooks", daily="dp2 level 0")
def gradients_in_hooks(run: Run) -> Any:
    from tests.pipeline.cases import norm_of

    seen: list[Any] = []
    names: dict[str, str] = {}

    def note(hook: str) -> Callable[..., None]:
        def look(trainer: Any, module: Any, *args: Any) -> None:
            found = gathered(module, names, lambda item: item.grad)
            seen.append([hook, norm_of(found) if found else 0.0])

        return look

    hooks = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end")
    return run.fit(its.LambdaCallback(**{hook: note(hook) for hook in hooks})).table(seen=seen)


@feature("callback", "norms in hooks", daily="dp2 level 3")
def norms_in_hooks(run: Run) -> Any:
    """No gradient is longer than a share of its weight: numbers of which a rank that shards either has a part."""

    def scale(trainer: Any, module: Any, *args: Any) -> None:
        for parameter in module.parameters():
            if parameter.grad is not None:
                most = 0.01 * (float(parameter.detach().norm()) + parameter.detach().abs().max().item())
                if parameter.grad.norm() > most:
                    parameter.grad.mul_(most / parameter.grad.norm().item())

    return run.fit(its.LambdaCallback(on_before_optimizer_step=scale)).table()


# --- loggers ------------------------------------------------------------------------------------------------------


@feature("logger", "CSVLogger")
def csv_logger(run: Run) -> Any:
    from lightning.pytorch.loggers import CSVLogger

    fitted = run.fit(logger=CSVLogger(run.directory))
    fitted.trainer.logger.log_hyperparams({"more": 1})
    fitted.trainer.logger.save()
    return fitted.table(written=_written(fitted.trainer, run))


@feature("logger", "TensorBoardLogger")
def tensorboard(run: Run) -> Any:
    from lightning.pytorch.loggers import TensorBoardLogger

    class Shows(Language):
        def __init__(self) -> None:
            super().__init__()
            self.example_input_array = (torch.zeros(2, LENGTH, dtype=torch.long),)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model(ids)

        def on_train_epoch_end(self) -> None:
            self.logger.experiment.add_scalar("own", 1.0, self.current_epoch)

    fitted = run.fit(module=Shows(), logger=TensorBoardLogger(run.directory, default_hp_metric=False))
    log_dir = Path(fitted.trainer.strategy.broadcast(fitted.trainer.logger.log_dir))
    return fitted.table(written=sorted({item.name.split(".")[0] for item in log_dir.iterdir()}))


# --- tuners -------------------------------------------------------------------------------------------------------


@feature("tuner", "Tuner.lr_find")
def lr_find(run: Run) -> Any:
    pl.seed_everything(1, verbose=False)
    module = Language()
    trainer = run.trainer()
    found = Tuner(trainer).lr_find(module, loader(), num_training=6, early_stop_threshold=None)
    trainer.fit(module, loader(), loader(8))
    return {"found": found.results, "lr": module.lr, "metrics": metrics(trainer)}


@feature("tuner", "Tuner.scale_batch_size", refused=SIZES)
def scale_batch_size(run: Run) -> Any:
    pl.seed_everything(1, verbose=False)
    return Tuner(run.trainer()).scale_batch_size(Language(), max_trials=1, steps_per_trial=1)


# --- metrics ------------------------------------------------------------------------------------------------------


@feature("metrics", "self.log(on_step, on_epoch, reduce_fx)")
def logs(run: Run) -> Any:
    class Logs(Language):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("both", loss, on_step=True, on_epoch=True, sync_dist=True)
            self.log("largest", batch[0].max().float(), on_step=False, on_epoch=True, reduce_fx="max", sync_dist=True)
            self.log("samples", float(len(batch[0])), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
            self.log_dict({"a": loss * 2, "b": 3}, on_epoch=True, sync_dist=True)
            return loss

    return run.fit(module=Logs()).table()


@feature("metrics", "torchmetrics by self.log(on_epoch)")
def metric_objects(run: Run) -> Any:
    return run.fit(module=Measures(False)).table()


@feature("metrics", "torchmetrics by self.log(on_step)", daily="dp2 level 3")
def metric_objects_by_step(run: Run) -> Any:
    return run.fit(module=Measures(True)).table()


@feature("metrics", "torchmetrics by self.log(on_step) in some steps", daily="dp2 level 0")
def metric_objects_by_some_steps(run: Run) -> Any:
    return run.fit(module=Measures(True, every=2)).table()


class Measures(Language):
    """Metrics in training, also a collection of them.

    Args:
        every: of as many steps the last is logged.
    """

    def __init__(self, on_step: bool, every: int = 1) -> None:
        super().__init__()
        self.on_step, self.every = on_step, every
        self.mean = torchmetrics.MeanMetric()
        self.several = torchmetrics.MetricCollection(
            {
                name: torchmetrics.classification.MulticlassAccuracy(VOCABULARY, average=name)
                for name in ("micro", "macro")
            }
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss, logits = self.loss(batch)
        self.mean(loss.detach())
        self.several(logits.detach().flatten(0, 1), batch[0][:, 1:].flatten())
        if (batch_idx + 1) % self.every:
            return loss
        self.log("mean", self.mean, on_step=self.on_step, on_epoch=True)
        self.log_dict(self.several, on_step=self.on_step, on_epoch=True)
        return loss


# --- precision ----------------------------------------------------------------------------------------------------

option("precision", "precision=64-true", precision="64-true")
option("precision", "precision=bf16-mixed", precision="bf16-mixed", about={"tolerance": 3e-2})
option("precision", "precision=bf16-true", precision="bf16-true", about={"tolerance": 1e-1})


@feature("precision", "precision=16-mixed", tolerance=3e-2)
def half(run: Run) -> Any:
    return run.fit(precision="16-mixed").table()


@feature("precision", "plugins=[MixedPrecision()]", tolerance=3e-2)
def own_plugin(run: Run) -> Any:
    from lightning.pytorch.plugins.precision import MixedPrecision

    class Counts(MixedPrecision):
        steps = 0

        def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
            self.steps += 1
            return super().optimizer_step(*args, **kwargs)

    plugin = Counts("bf16-mixed", "cpu")
    return run.fit(plugins=[plugin]).table(steps=plugin.steps)


# --- loops --------------------------------------------------------------------------------------------------------

option("loop", "gradient_clip_val by norm", gradient_clip_val=0.1)
option("loop", "gradient_clip_val by value", gradient_clip_val=0.01, gradient_clip_algorithm="value")
option("loop", "accumulate_grad_batches", accumulate_grad_batches=3)
option("loop", "limit_train_batches", limit_train_batches=3, limit_val_batches=1)
option("loop", "limit_train_batches as a share", limit_train_batches=0.5, limit_val_batches=0.5)
option("loop", "val_check_interval", val_check_interval=3, check_val_every_n_epoch=None)
option("loop", "val_check_interval as a share", val_check_interval=0.5)
option("loop", "check_val_every_n_epoch", check_val_every_n_epoch=2)
option("loop", "overfit_batches", overfit_batches=2)
option("loop", "overfit_batches as a share", overfit_batches=0.5)
option("loop", "fast_dev_run", fast_dev_run=2)
option("loop", "num_sanity_val_steps", num_sanity_val_steps=2)
option("loop", "reload_dataloaders_every_n_epochs", reload_dataloaders_every_n_epochs=1)
option("loop", "inference_mode=True", inference_mode=True)
option("loop", "inference_mode=False", inference_mode=False)
option("loop", "detect_anomaly", detect_anomaly=True, about={"daily": "mp2"})
option("loop", "max_steps", max_steps=5, max_epochs=-1)
option("loop", "min_epochs", min_epochs=2)
option("loop", "max_time", max_time={"hours": 1})
option("loop", "profiler=simple", profiler="simple")
option("loop", "profiler=advanced", profiler="advanced")


@feature("loop", "profiler=pytorch")
def torch_profiler(run: Run) -> Any:
    from lightning.pytorch.profilers import PyTorchProfiler

    return run.fit(profiler=PyTorchProfiler(run.directory, "profile")).table()


@feature("loop", "barebones")
def barebones(run: Run) -> Any:
    class Bare(Language):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.loss(batch)[0]

    off = dict.fromkeys(("enable_checkpointing", "logger", "enable_progress_bar", "enable_model_summary"))
    off |= {"num_sanity_val_steps": None, "log_every_n_steps": None}
    return run.fit(module=Bare(), barebones=True, **off).table()


@feature("loop", "deterministic")
def deterministic(run: Run) -> Any:
    try:
        return run.fit(deterministic=True).table()
    finally:
        torch.use_deterministic_algorithms(False)


@feature("loop", "validate, test")
def evaluation(run: Run) -> Any:
    pl.seed_everything(1, verbose=False)
    module, trainer = Language(), run.trainer()
    return [
        trainer.validate(module, loader(8), verbose=False),
        trainer.test(module, [loader(8), loader(16)], verbose=False),
    ]


@feature("loop", "predict")
def prediction(run: Run) -> Any:
    pl.seed_everything(1, verbose=False)
    module, trainer = Language(), run.trainer()
    found = trainer.predict(module, loader())
    place = getattr(trainer.strategy, "dp_rank", 0)
    parts = _together({f"{index} {place}": part.tolist() for index, part in enumerate(found or ()) if part is not None})
    return [row for _, rows in sorted(parts.items()) for row in rows]


@feature("loop", "several loaders, CombinedLoader")
def several_loaders(run: Run) -> Any:
    class Two(Language):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step([torch.cat([*batch["a"], *batch["b"]])], batch_idx)

    train = CombinedLoader({"a": loader(), "b": loader(8)}, mode="max_size_cycle")
    return run.fit(module=Two(), train=train, val=[loader(8), loader(16)]).table()


@feature("loop", "CombinedLoader(sequential)")
def sequential_loaders(run: Run) -> Any:
    class One(Language):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch["a"], batch_idx)

    return run.fit(module=One(), train=CombinedLoader({"a": loader()}, mode="min_size")).table()


for _kind in ("step", "epoch", "plateau"):
    feature("loop", f"schedule by {_kind}")(lambda run, kind=_kind: run.fit(module=Scheduled(kind)).table())


# --- the module ---------------------------------------------------------------------------------------------------


@feature("module", "configure_model")
def configure_model(run: Run) -> Any:
    return _built_late(run)


@feature("module", "configure_model, precision=bf16-true", tolerance=1e-1)
def configure_model_in_half(run: Run) -> Any:
    return _built_late(run, precision="bf16-true")


def _built_late(run: Run, **options: Any) -> Any:
    class Late(Language):
        def __init__(self) -> None:
            super().__init__()
            del self.model

        def configure_model(self) -> None:
            if not hasattr(self, "model"):
                self.model = llama()
                with torch.no_grad():  # values that no random stream draws
                    for index, item in enumerate(self.model.parameters()):
                        flat = torch.arange(item.numel(), dtype=item.dtype, device=item.device)
                        item.copy_(torch.sin(flat * (index + 1)).view_as(item) * 0.3)

    module = Late()
    fitted = Fitted(run.trainer(rows := Rows({}), **options), module, rows)
    fitted.trainer.fit(module, loader(), loader(8))
    return fitted.table()


@feature("module", "manual optimization, toggle_optimizer")
def by_hand(run: Run) -> Any:
    class ByHand(Language):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            for optimizer, schedule in zip(self.optimizers(), self.lr_schedulers(), strict=True):
                self.toggle_optimizer(optimizer)
                loss = super().training_step(batch, batch_idx)
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, 0.5, "norm")
                optimizer.step()
                schedule.step()
                self.untoggle_optimizer(optimizer)
            return {"loss": loss.detach()}

        def configure_optimizers(self) -> Any:
            parts = self.model.model.parameters(), self.model.lm_head.parameters()
            both = [torch.optim.SGD(part, lr=0.1) for part in parts]
            return both, [torch.optim.lr_scheduler.StepLR(item, 1, 0.9) for item in both]

    return run.fit(module=ByHand()).table()


@feature("module", "configure_gradient_clipping")
def own_clipping(run: Run) -> Any:
    class Clips(Language):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self.clip_gradients(optimizer, 0.05 * (1 + self.global_step), "norm")

    return run.fit(module=Clips()).table()


@feature("module", "optimizer_step, lr_scheduler_step, optimizer_zero_grad")
def optimizer_hooks(run: Run) -> Any:
    class Warms(Scheduled):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 0.02 * (1 + self.global_step)
            optimizer.step(closure=optimizer_closure)

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none=False)

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step()

    return run.fit(module=Warms("epoch")).table()


@feature("module", "None from training_step", refused=dict.fromkeys(MESHES, "returning None"))
def skipped_batch(run: Run) -> Any:
    class Skips(Language):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 else loss

    pl.seed_everything(1, verbose=False)
    module = Skips()
    trainer = run.trainer()
    trainer.fit(module, loader(), loader(8))
    return {"metrics": metrics(trainer), "step": trainer.global_step}


# --- checkpoints --------------------------------------------------------------------------------------------------


@feature("checkpoint", "save_checkpoint, fit(ckpt_path)")
def resumed(run: Run) -> Any:
    fitted = run.fit(max_epochs=1)
    path = run.directory / "kept.ckpt"
    fitted.trainer.save_checkpoint(path)
    pl.seed_everything(2, verbose=False)
    module = Language()
    rows = Rows(canonical_names(module))
    trainer = run.trainer(rows, max_epochs=2)
    trainer.fit(module, loader(), loader(8), ckpt_path=path)
    return fitted.table(resumed=Fitted(trainer, module, rows).table())


@feature("checkpoint", "save_checkpoint(weights_only), validate(ckpt_path)")
def weights_alone(run: Run) -> Any:
    fitted = run.fit(max_epochs=1)
    path = run.directory / "kept.ckpt"
    fitted.trainer.save_checkpoint(path, weights_only=True)
    return run.trainer().validate(Language(), loader(8), ckpt_path=path, verbose=False)


@feature("checkpoint", "load_from_checkpoint, hparams", daily="cp2")
def loaded(run: Run) -> Any:
    module = Language(lr=0.05)
    fitted = run.fit(max_epochs=1, module=module)
    path = run.directory / "kept.ckpt"
    fitted.trainer.save_checkpoint(path)
    whole = Language.load_from_checkpoint(path, batch_size=2)
    weights = numbers({name: item.detach() for name, item in whole.named_parameters()})
    assert weights == numbers(gathered(module, fitted.rows.names))
    return {"weights": weights, "hparams": dict(whole.hparams)}


@feature("checkpoint", "on_save_checkpoint, on_load_checkpoint, state_dict of callbacks and data modules")
def hooks_of_checkpoints(run: Run) -> Any:
    seen: list[Any] = []

    class Keeps(Language):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["own"] = {"step": self.global_step, "tensor": torch.ones(3)}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            seen.append([checkpoint["own"]["step"], checkpoint["own"]["tensor"].tolist(), checkpoint["epoch"]])

    class Counts(pl.Callback):
        count = 0

        def on_train_batch_end(self, *args: Any) -> None:
            self.count += 1

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]

    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            return loader()

        def state_dict(self) -> dict[str, Any]:
            return {"place": 3}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            seen.append(state["place"])

    path = run.directory / "kept.ckpt"
    for epochs in (1, 2):
        pl.seed_everything(1, verbose=False)
        trainer = run.trainer(counts := Counts(), max_epochs=epochs)
        trainer.fit(Keeps(), datamodule=Data(), ckpt_path=path if epochs == 2 else None)
        trainer.save_checkpoint(path)
        seen.append(counts.count)
    return seen


@feature("checkpoint", "weights changed in on_load_checkpoint", daily="mp2")
def changed_when_loaded(run: Run) -> Any:
    class Resets(Language):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"]["model.lm_head.weight"] = torch.linspace(-1, 1, VOCABULARY * WIDTH).view(-1, WIDTH)

    path = run.directory / "kept.ckpt"
    run.fit(max_epochs=1).trainer.save_checkpoint(path)
    return run.trainer().validate(Resets(), loader(8), ckpt_path=path, verbose=False)


@feature(
    "checkpoint",
    "weights renamed in on_save_checkpoint and on_load_checkpoint",
    refused=dict.fromkeys(MESHES, "belongs to another model"),
)
def changed_on_the_way(run: Run) -> Any:
    class Renames(Language):
        """Saves its head under another name, as people do whose model has changed since."""

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            state = checkpoint["state_dict"]
            for name in [name for name in state if name.endswith("lm_head.weight")]:
                state["head"] = state.pop(name)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            state = checkpoint["state_dict"]
            state["model.lm_head.weight"] = state.pop("head")

    path = run.directory / "kept.ckpt"
    fitted = run.fit(module=Renames(), max_epochs=1)
    fitted.trainer.save_checkpoint(path)
    return run.trainer().validate(Renames(), loader(8), ckpt_path=path, verbose=False)


def cell(name: str, mesh: str) -> str:
    """The case of a feature on a mesh."""
    return f"{_slug(name)}@{_slug(mesh)}"


def _slug(words: str) -> str:
    return re.sub(r"\W+", "-", words).strip("-")


def tried(row: Feature, mesh: str) -> Any:
    """What the feature gives on a mesh, or the message with which it is refused."""
    try:
        return row.run(Run(row.name, mesh))
    except Exception as error:
        if isinstance(error, ConfigError) or mesh in row.refused:
            return {"refused": str(error)}
        raise


def groups() -> dict[str, dict[str, Callable[[], Any]]]:
    cases: dict[str, dict[str, Callable[[], Any]]] = {"one": {}, "two": {}}
    for name, row in FEATURES.items():
        cases["one"][cell(name, "")] = lambda row=row: row.run(Run(row.name))
        for mesh in MESHES:
            cases["two"][cell(name, mesh)] = lambda row=row, mesh=mesh: tried(row, mesh)
    return cases


if __name__ == "__main__":
    serve(groups())
