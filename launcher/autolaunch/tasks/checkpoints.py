"""When a run writes a checkpoint, and which ones it keeps."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from autolaunch.launch.failure import is_peer_lost
from autolaunch.report.metrics import StepMetrics
from autolaunch.report.readable import readable_bytes
from autolaunch_strategies.checkpoint.files import (
    REPLACED,
    clear_leftovers,
    complete_checkpoints,
    order_of_writing,
)
from autolaunch_strategies.config import ConfigError, nearest
from autolaunch_strategies.lightning.votes import TrainingStopped
from autolaunch_strategies.pipeline.failure import StageFailedError

_NAME = re.compile(r"step_\d{7,}\.ckpt")


class Checkpoints(ModelCheckpoint):
    """Checkpoints every so many steps and minutes, at the end, and when a signal ends training.

    The newest one is always kept, so that the run can go on from it; beside it the newest others, or the best by a
    logged value. That holds over restarts: what counts is what stands in the directory of the run that goes on. What
    another one has left there is neither counted nor removed.

    Args:
        directory: of the checkpoints.
        config: the keys of `autolaunch.config.schema.Checkpoint`.
        steps: after a failure nothing is saved while what it measures is not finite.
    """

    def __init__(self, directory: Path, config: Mapping[str, Any], steps: StepMetrics) -> None:
        # Of lightning's class only names and places are used, which loggers and `ckpt_path="best"` ask for.
        super().__init__(dirpath=directory, monitor=None, mode=config["mode"], save_top_k=-1, every_n_train_steps=0)
        self.directory, self.steps = directory, steps
        self.monitor = config["monitor"]
        self.keep: int = config["keep_last"]
        self.every_n_steps: int | None = config["every_n_steps"]
        self.seconds = None if config["every_minutes"] is None else 60 * config["every_minutes"]
        self._next_save = float("inf")
        self._is_validated: bool | None = None
        """Whether the monitored value is one of validation; None until the first one has shown it."""
        self._validated_at: int | None = None
        """The global step of the last validation."""
        self._scores: dict[str, float | None] = {}
        """Name of a kept checkpoint -> the monitored value when it was written, the oldest first."""
        self._own: set[str] = set()
        """Names of all checkpoints of this run, also of those that are to be removed."""

    @property
    def state_key(self) -> str:
        """One name, however often is saved: a run may go on with another interval."""
        return type(self).__name__

    def state_dict(self) -> dict[str, Any]:
        """The monitored values of the checkpoints that are kept."""
        return {"scores": self._scores}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up `state_dict()`; of an older format nothing is known."""
        self._scores = dict(state_dict.get("scores", {}))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at what the run that goes on has left in the directory."""
        if self.seconds is not None:
            self._next_save = time.monotonic() + self.seconds
        self._last_global_step_saved = trainer.global_step
        names: list[str] = []
        problem = ""
        if trainer.is_global_zero:
            clear_leftovers(self.directory, lambda name: _NAME.fullmatch(name) is not None)
            names = self._written_before(trainer.ckpt_path)
            problem = self._no_space(pl_module, trainer, len(names))
        names, problem = trainer.strategy.broadcast((names, problem))
        if problem:
            raise ConfigError(
                f"output_dir={self.directory.parent}",
                problem,
                "a directory on a larger disk, or checkpoint.enabled=false, which writes none",
            )
        self._scores = {name: self._scores.get(name) for name in names}
        self._own = set(names)

    def _written_before(self, ckpt_path: Any) -> list[str]:
        """Names of the checkpoints of the run that goes on, the oldest first; none if it begins, or began elsewhere.

        Args:
            ckpt_path: from which checkpoint it goes on; what was written after that is of the same run.
        """
        if ckpt_path is None or Path(ckpt_path).parent.resolve() != self.directory.resolve():
            return []
        chosen = Path(ckpt_path)
        if not chosen.exists():  # it was to be replaced, and has its name again
            chosen = chosen.with_name(chosen.name.removesuffix(REPLACED))
        since = order_of_writing(chosen)
        whole = complete_checkpoints(self.directory)
        return [item.name for item in whole if item.name in self._scores or order_of_writing(item) >= since]

    def _no_space(self, pl_module: pl.LightningModule, trainer: pl.Trainer, written: int) -> str:
        """Why the disk does not hold two checkpoints: one is removed when the next is written. Empty if it does.

        Args:
            written: how many are there already.
        """
        strategy: Any = trainer.strategy
        trained = strategy.trained_count
        kept = strategy.parameter_count if getattr(pl_module, "adapted", None) is None else trained
        states = max((_states_per_parameter(optimizer) for optimizer in trainer.optimizers), default=0)
        size = next((item.element_size() for item in pl_module.parameters()), 4)
        one = size * (kept + states * trained)
        self.directory.mkdir(parents=True, exist_ok=True)
        free, needed = shutil.disk_usage(self.directory).free, one * max(1, 2 - written)
        if free >= needed:
            return ""
        two = readable_bytes(2 * one)
        return f"{readable_bytes(free)} are free on this disk, and two checkpoints of this model take {two}"

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if it is time, by steps or by the first rank's clock."""
        step, votes = trainer.global_step, trainer.strategy.votes  # type: ignore[attr-defined]  # a MeshStrategy
        if trainer.fit_loop._should_accumulate() or step == self._last_global_step_saved:
            return
        if trainer.is_global_zero and time.monotonic() >= self._next_save:
            votes.ask_to_save()
        if (
            self.every_n_steps is not None
            and step % self.every_n_steps == 0
            and not self._waits_for_validation(trainer)
        ) or votes.save_agreed:
            self.save(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Nothing: checkpoints are written at steps, and at the end."""

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save if the monitored value is one of validation.

        Raises:
            ConfigError: after the first validation, nothing of that name has been logged.
        """
        if self.monitor is None or trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        self._validated_at = trainer.global_step
        if self._is_validated is None:
            results = trainer.fit_loop.epoch_loop.val_loop._results
            self._is_validated = self.monitor in results.metrics(on_step=False)["callback"]
            self._check_that_it_is_logged(trainer)
        if self._is_validated and trainer.global_step != self._last_global_step_saved:
            self.save(trainer)
        elif self._is_validated and (name := self._name(trainer)) in self._scores:  # by time, right before
            self._scores[name] = float(trainer.callback_metrics[self.monitor])
            self._name_the_best()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the end of training.

        Raises:
            ConfigError: nothing of the monitored name has been logged.
        """
        if trainer.global_step != self._last_global_step_saved:
            self.save(trainer, finished=False)  # `max_time` ends it after any batch
        self._check_that_it_is_logged(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Save when all ranks end training together: at a signal, or because all have failed in the same step.

        Where that was saved, or why nothing was, is a note of the exception; of a signal, its `checkpoint`. What is
        written in the background is waited for before.

        Raises:
            RuntimeError: after a signal, it could not be written.
        """
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if isinstance(exception, TrainingStopped):
            try:
                if self._has_to_save(trainer):
                    self.save(trainer, finished=False)
                trainer.strategy.checkpoints.finish()  # type: ignore[attr-defined]  # a MeshStrategy
            except RuntimeError as reason:
                reason.add_note(f"a signal stopped training after step {trainer.global_step}{self._newest_is()}")
                raise
            exception.checkpoint = self._newest_whole()
        elif isinstance(exception, Exception) and trainer.global_step > 0 and not _of_another_rank(exception):
            self._save_after(exception, trainer)

    def _save_after(self, exception: Exception, trainer: pl.Trainer) -> None:
        """Save what a failure left of training, and add to the exception where, or why not. Only if all ranks fail."""
        if self.steps.not_finite_since is not None:
            return  # the newest checkpoint is the one to go on from
        votes, step = trainer.strategy.votes, trainer.global_step  # type: ignore[attr-defined]  # a MeshStrategy
        votes.limit(exception)
        if not self._has_to_save(trainer):
            exception.add_note(f"step {step} was the last one that was done, and is saved in {self.directory}")
            votes.end_limit()
            return

        try:
            votes.unfinished()
            if not votes.all_can_save():
                raise RuntimeError("other ranks have not failed in this step, and wait for this one")
            self.save(trainer, finished=False)
            trainer.strategy.checkpoints.finish()  # type: ignore[attr-defined]  # a MeshStrategy
            if step != self._last_global_step_saved:
                raise RuntimeError("weights are not finite")
        except Exception as reason:
            exception.add_note(f"no checkpoint was written after step {step}: {reason}{self._newest_is()}")
        else:
            exception.add_note(f"saved after step {step} in {self.last_model_path}")
        votes.end_limit()

    def _has_to_save(self, trainer: pl.Trainer) -> bool:
        """Whether the last step that was done is not saved; waits for what is written, but for no other rank."""
        failed = trainer.strategy.checkpoints.finish(together=False)  # type: ignore[attr-defined]  # a MeshStrategy
        return failed is not None or trainer.global_step != self._last_global_step_saved

    def _newest_whole(self) -> Path | None:
        """The newest checkpoint of this run; none if a signal came before its first step."""
        return next((item for item in reversed(complete_checkpoints(self.directory)) if item.name in self._own), None)

    def _newest_is(self) -> str:
        newest = self._newest_whole()
        return "" if newest is None else f"; the newest whole checkpoint is {newest}"

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        self._own.add(Path(filepath).name)
        super()._save_checkpoint(trainer, filepath)

    def save(self, trainer: pl.Trainer, finished: bool = True) -> None:
        """Write a checkpoint now, and remove those that are not kept any more. Collective.

        Weights that are not finite are no checkpoint to go on from, and take no other one's place.

        Args:
            finished: whether a step was just done; if not, the checkpoint is of the moment in which it began.
        """
        self.steps.catch_up()
        if not trainer.strategy.weights_are_finite():  # type: ignore[attr-defined]  # a MeshStrategy
            self._wait_for_next_save(trainer)
            return
        name = self._name(trainer)
        score = trainer.callback_metrics.get(self.monitor) if self.monitor else None
        if self._is_validated and self._validated_at != trainer.global_step:
            score = None  # lightning keeps the value of an earlier validation, which is of other weights
        self._scores.pop(name, None)
        self._scores[name] = None if score is None else float(score)
        self.current_score = score
        self._name_the_best()
        path = str(self.directory / name)
        self.last_model_path = path
        strategy: Any = trainer.strategy
        strategy.checkpoints.as_of = None if finished else strategy.votes.unfinished()
        try:
            self._save_checkpoint(trainer, path)
        finally:
            strategy.checkpoints.as_of = None
        for left_out in [known for known in self._scores if known not in self._kept()]:
            del self._scores[left_out]
            trainer.strategy.remove_checkpoint(str(self.directory / left_out))
        self._wait_for_next_save(trainer)

    def _wait_for_next_save(self, trainer: pl.Trainer) -> None:
        if self.seconds is not None:
            self._next_save = time.monotonic() + self.seconds
        trainer.strategy.votes.saved()  # type: ignore[attr-defined]  # a MeshStrategy

    def _name(self, trainer: pl.Trainer) -> str:
        return f"step_{trainer.global_step:07d}.ckpt"

    def _kept(self) -> list[str]:
        names = list(self._scores)
        if self.keep == -1:
            return names
        if self.monitor is None:
            return names[-self.keep :]
        return [*self._best_first()[: self.keep], names[-1]]

    def _best_first(self) -> list[str]:
        sign = 1 if self.mode == "min" else -1
        known = {name: sign * score for name, score in self._scores.items() if score is not None and score == score}
        return sorted(known, key=lambda name: known[name])

    def _name_the_best(self) -> None:
        """What loggers ask for."""
        best = self._best_first()[:1] if self.monitor else list(self._scores)[-1:]
        self.best_model_path = str(self.directory / best[0]) if best else ""
        self.best_k_models = {
            str(self.directory / name): torch.tensor(float("nan") if score is None else score)
            for name, score in self._scores.items()
        }
        score = self._scores[best[0]] if best else None
        self.best_model_score = None if score is None else torch.tensor(score)

    def _waits_for_validation(self, trainer: pl.Trainer) -> bool:
        """Whether a checkpoint of this step would be ranked by the validation of an earlier one."""
        if self.monitor is None or self._is_validated is False:
            return False
        return self._is_validated is True or (
            self.monitor not in trainer.callback_metrics and bool(trainer.enable_validation)
        )

    def _check_that_it_is_logged(self, trainer: pl.Trainer) -> None:
        if self.monitor is None or self.monitor in trainer.callback_metrics:
            return
        raise never_logged("checkpoint.monitor", self.monitor, trainer)


def never_logged(key: str, monitor: str, trainer: pl.Trainer) -> ConfigError:
    """What is said of a key with the name of a value that nobody has logged when it is looked for."""
    names = sorted(trainer.callback_metrics)
    close = nearest(monitor, names)
    return ConfigError(
        f"{key}={monitor}",
        "nothing of that name has been logged",
        ", ".join(names) or "the names that self.log(...) is given",
        f"{key}={close}" if close else "",
    )


def _states_per_parameter(optimizer: torch.optim.Optimizer) -> int:
    """Tensors of a parameter's size that an optimizer keeps: Adam and its kin two, with momentum one."""
    return 2 if "betas" in optimizer.defaults else 1 if optimizer.defaults.get("momentum") else 0


def _of_another_rank(error: BaseException) -> bool:
    """Whether this rank only lost contact with another one; a stage that is told of another's error did not."""
    return is_peer_lost(error) and not isinstance(error, StageFailedError)
