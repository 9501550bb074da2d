"""fit, validate, test and predict: a resolved job on one rank, through lightning's Trainer."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BasePredictionWriter

from autolaunch.config.command_line import typed_keys
from autolaunch.config.hub import fetch_weights
from autolaunch.data import build_data
from autolaunch.data.progress import listen
from autolaunch.job import ResolvedJob
from autolaunch.launch.end import RunEnd
from autolaunch.launch.failure import RunFailed, describe, show, write_failure
from autolaunch.launch.forked import tell_parent
from autolaunch.launch.heartbeat import PULSE, Activity
from autolaunch.launch.place import Place
from autolaunch.models.facts import model_facts
from autolaunch.models.packed_attention import PackedAttention, settle
from autolaunch.report.logged_config import log_config
from autolaunch.report.metrics import StepMetrics
from autolaunch.report.metrics_csv import MetricsCsv
from autolaunch.report.pipeline import foreseen_timeline, pipeline_summary, with_expectation
from autolaunch.report.plan_file import write_plan
from autolaunch.report.progress import ProgressLine
from autolaunch.report.screen import show_end, show_start
from autolaunch.report.summary import collect_summary
from autolaunch.report.summary_file import write_summary
from autolaunch.report.terminal import Terminal
from autolaunch.tasks.checkpoints import never_logged
from autolaunch.tasks.run_parts import (
    build_strategy,
    build_trainer,
    construct_module,
    leave_clipping,
    quiet_lightning,
    refuse_own_loaders,
)
from autolaunch.tasks.trusted import check_targets


def run(
    job: ResolvedJob, place: Place, steps: StepMetrics | None = None, further: Sequence[pl.Callback] = ()
) -> dict[str, Any]:
    """Run the task of `job` on this rank; collective over all ranks. Returns what summary.json holds.

    Args:
        job: what is run.
        place: of this rank.
        steps: what measures every step; a new one by default.
        further: callbacks beside those of the job.
    """
    with quiet_lightning():
        if job.config["mesh"]["dp"] == 1:  # all ranks log the same
            warnings.filterwarnings("ignore", message=".*sync_dist=True.*")
        if job.config["task"] != "fit":  # there the weights alone are loaded
            warnings.filterwarnings("ignore", message=".*callbacks used to create the checkpoint.*")
        return _run(job, place, steps or StepMetrics(), further)


def _run(job: ResolvedJob, place: Place, steps: StepMetrics, further: Sequence[pl.Callback]) -> dict[str, Any]:
    config, task = job.config, job.config["task"]
    started = time.time()
    fetch_weights(config)  # on another machine than that of the first process
    if job.taken_from is not None and not config["checkpoint"]["trust"]:
        typed = typed_keys(job.overrides)
        taken = [key for key in ("model", "module", "data") if typed.get(key, "custom") == "custom"]
        check_targets(Path(job.taken_from), config, taken, typed)
    pl.seed_everything(config["seed"], workers=True, verbose=False)
    torch.use_deterministic_algorithms(bool(config["trainer"]["deterministic"]))
    strategy = build_strategy(config, job.recorded)
    strategy.checkpoints.earlier_if_damaged = job.resumes_last
    strategy.checkpoints.tell = partial(print, file=sys.stderr, flush=True)
    if task == "fit" and config["checkpoint"]["enabled"]:
        strategy.stop_signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
        if place.kind != "local" and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            strategy.stop_signals += (signal.SIGHUP,)  # there it is how the parent ends a rank at once
        strategy.stop_seconds = config["checkpoint"]["emergency_seconds"]
        strategy.stopped_too_late = partial(_end_now, job, place)
    screen = _Screen(job)
    callbacks: list[pl.Callback] = [screen, *further]
    if config["trainer"]["enable_progress_bar"]:
        callbacks.append(ProgressLine(steps))
    if task == "predict":
        callbacks.append(_PredictionFiles(job.output_dir / "predictions"))
    loggers = [MetricsCsv(job.output_dir)] if task == "fit" else []
    trainer = build_trainer(job, strategy, steps, callbacks, loggers)
    module = construct_module(config, strategy, trainer.precision_plugin, strategy.root_device)
    if config["module"]:
        refuse_own_loaders(module, task, job.choices.get("data"), job.overrides)
    if task == "fit":
        leave_clipping(trainer, module, job.overrides)
    screen.packed_attention = settle(config, module, strategy.root_device)
    listen(partial(PULSE.moved, Activity.STARTING, 0))  # preparing data is no part of the first step
    vocab_size = None if config["module"] else model_facts(config["model"]).vocab_size
    data = build_data(config["data"], config["seed"], vocab_size)
    ckpt_path = config["ckpt_path"]
    metrics: dict[str, Any] | None = None
    try:
        if task == "fit":
            _fit(trainer, module, data, config)
            _check_that_it_trained(trainer, module, steps)
            if ckpt_path is not None and not steps.losses and screen.is_first_rank:
                limits = {name: config["trainer"][name] for name in ("max_steps", "max_epochs", "max_time")}
                said = ", ".join(f"trainer.{name}={value}" for name, value in limits.items() if value is not None)
                print(
                    f"nothing was trained: the checkpoint is at step {trainer.global_step}, where {said} ends",
                    file=sys.stderr,
                )
        elif task == "predict":
            trainer.predict(module, datamodule=data, ckpt_path=ckpt_path, return_predictions=False)
        else:
            run_evaluation = trainer.validate if task == "validate" else trainer.test
            results = run_evaluation(module, datamodule=data, ckpt_path=ckpt_path, verbose=False)
            metrics = {name: value for result in results for name, value in result.items()}
    except BaseException as error:
        if screen.is_first_rank:
            status = "interrupted" if isinstance(error, KeyboardInterrupt | SystemExit) else "failed"
            failed = status == "failed"
            reason = describe(error, job.logs, place.rank, place.world_size).error if failed else None
            summary = collect_summary(
                trainer, steps, started, task=task, status=status, error=reason, pipeline=screen.pipeline
            )
            write_summary(job.output_dir, {**summary, "restarts": job.restarts})
        raise
    summary = collect_summary(trainer, steps, started, task=task, metrics=metrics, pipeline=screen.pipeline)
    summary["restarts"] = job.restarts
    if screen.is_first_rank:
        write_summary(job.output_dir, summary)
        show_end({**summary, "output_dir": str(job.output_dir)}, Terminal(), steps.losses)
    return summary


def _end_now(job: ResolvedJob, place: Place, reason: int | BaseException) -> None:
    """End this process, whose main thread may hang: there was no time left to save after a signal or a failure."""
    seconds = f"within {job.config['checkpoint']['emergency_seconds']:g} s (checkpoint.emergency_seconds)"
    if isinstance(reason, int):
        text = f"stopped by {signal.Signals(reason).name}; no checkpoint was written {seconds}"
        if not tell_parent(RunEnd("interrupted", 128 + reason, message=text)) and place.rank == 0:
            print(text, file=sys.stderr, flush=True)
        os._exit(128 + reason)
    reason.add_note(f"no checkpoint was written: it was not done {seconds}")
    failure = describe(reason, job.logs, place.rank, place.world_size, job.config)
    write_failure(failure, job.logs)
    if not tell_parent(RunEnd("failed", failure.exit_code, failure, failure.render())) and place.kind != "local":
        show(failure)
    os._exit(failure.exit_code)


def _fit(trainer: pl.Trainer, module: pl.LightningModule, data: Any, config: Mapping[str, Any]) -> None:
    """Train; a callback that waits for a value which nobody logs is told as what it is: a name in the config."""
    try:
        trainer.fit(module, datamodule=data, ckpt_path=config["ckpt_path"])
    except RuntimeError as error:
        for name, node in (config["callbacks"] or {}).items():
            monitor = node.get("monitor") if isinstance(node, Mapping) else None
            if monitor and monitor not in trainer.callback_metrics and f"`{monitor}` which is not" in str(error):
                raise never_logged(f"callbacks.{name}.monitor", monitor, trainer) from error
        raise


def _check_that_it_trained(trainer: Any, module: pl.LightningModule, steps: StepMetrics) -> None:
    """Raise RunFailed after a training without a step: its data were empty; or without a loss.

    A finished run that is resumed had some.
    """
    if trainer.global_step == 0 and not trainer.fast_dev_run and trainer.max_steps != 0 and trainer.max_epochs != 0:
        raise RunFailed("not one training step was made: the training data are empty, or all batches were left out")
    if module.automatic_optimization and steps.losses and not steps.has_loss:
        raise RunFailed("training_step has returned no loss in any step: nothing was trained")


class _Screen(pl.Callback):
    """Shows and writes what is about to happen, once, on the first rank, when the model has been parallelised."""

    def __init__(self, job: ResolvedJob) -> None:
        self.job = job
        self.is_first_rank = False
        self.packed_attention: PackedAttention | None = None
        self.pipeline: dict[str, Any] | None = None
        """What is expected of a pipeline in training, on the first rank."""
        self._account: dict[str, Any] | None = None
        """What was written before the first batch, on the first rank."""

    def _begin(self, trainer: pl.Trainer) -> None:
        self.is_first_rank = trainer.is_global_zero
        strategy: Any = trainer.strategy
        if self.is_first_rank:
            account = strategy.describe()
            schedule = foreseen_timeline(account, self.job.config) if self.job.config["task"] == "fit" else None
            if schedule is not None:
                account = with_expectation(account, self.job.config, schedule)
                self.pipeline = pipeline_summary(account)
            if self.packed_attention is not None:
                account |= self.packed_attention.account()
            account |= {"by_device": self.job.by_device} if self.job.by_device else {}
            if self.job.choice is not None:
                account = {"choice": self.job.choice, **account}
            self._account = account
            write_plan(self.job.output_dir, self.job.config, account, self.job.choices)
            log_config(trainer.loggers, self.job.config, self.job.from_environment)
            show_start(account, self.job.config, Terminal(), strategy.parameter_count, strategy.trained_count)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """After the first batch of a run, which blocks could not be compiled is known."""
        account, self._account = self._account, None
        if account is None or not self.job.config["compile"]:
            return
        strategy: Any = trainer.strategy
        compiled = strategy.describe()["compile"]
        if compiled != account["compile"]:
            write_plan(self.job.output_dir, self.job.config, account | {"compile": compiled}, self.job.choices)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "validate":
            self._begin(trainer)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(trainer)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(trainer)


class _PredictionFiles(BasePredictionWriter):
    """Writes each batch's predictions to `<directory>/batch_<n>_part_<dp rank>.pt`, beside and renamed."""

    def __init__(self, directory: Path) -> None:
        super().__init__(write_interval="batch")
        self.directory = directory

    def write_on_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        prediction: Any,
        batch_indices: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        strategy: Any = trainer.strategy
        place = strategy.rank_mesh.coordinate
        if place["mp"] > 0 or place["cp"] > 0 or place["pp"] > 0:
            return  # along mp and cp all have the same predictions, along pp only the first, which holds the last stage
        if not strategy.batches.is_counted():
            return  # predicted only to keep step with the others
        self.directory.mkdir(parents=True, exist_ok=True)
        loader = f"loader_{dataloader_idx}_" if dataloader_idx else ""
        file = self.directory / f"{loader}batch_{batch_idx:06d}_part_{strategy.dp_rank:05d}.pt"
        beside = file.with_suffix(".writing")
        torch.save(prediction, beside)
        beside.replace(file)
