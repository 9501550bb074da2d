"""What is measured at every logged step."""

from __future__ import annotations

import math
import statistics
import time
from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import lightning.pytorch as pl
import torch

from autolaunch.report.metrics_csv import MetricsCsv, StepRecord


@dataclass(frozen=True)
class _Measured:
    """The values of a step on their way from the device, and what the host knows of it."""

    trainer: pl.Trainer
    step: int
    steps: int
    """Since the record before."""
    names: tuple[str, ...]
    values: torch.Tensor
    """Of each name, [n]; in the host's memory once they have arrived."""
    arrival: torch.cuda.Event | None
    lr: float | None
    for_loggers: bool
    imbalance: float | None

    def read(self) -> dict[str, float]:
        """Wait until they are there."""
        if self.arrival is not None:
            self.arrival.synchronize()
        return dict(zip(self.names, self.values.tolist(), strict=True))


class StepMetrics(pl.Callback):
    """Measures loss, gradient norm, learning rate, tokens and time at every `trainer.log_every_n_steps`-th step.

    The values go to every logger of the Trainer; `latest` and the histories are there for the progress line and the
    summary. Every rank needs this callback: there is one collective per logged step.

    On a GPU the host never waits for the step that it has just begun: the values of a step are read when the next one
    has been begun, or in `catch_up`, which is called before anything is saved, validated or ended.

    Args:
        late: whether values are read a step late; by default they are on a GPU.
    """

    def __init__(self, late: bool | None = None) -> None:
        self._late = late
        self._measured: _Measured | None = None
        self.latest: StepRecord | None = None
        self.tokens = 0
        self.counted = "tokens"
        """What batches were counted in: tokens, or samples if they hold none."""
        # One entry per record; arrays, because a run may have millions of them.
        self.steps, self.losses = array("q"), array("d")
        self.not_finite_since: int | None = None
        """The logged step from which on loss or gradient norm have not been finite; None if they are. Equal on all
        ranks."""
        self.seconds, self.steps_timed, self.tokens_timed = array("d"), array("q"), array("q")
        self.has_loss = False
        """Whether any batch of this rank had a loss."""
        self.worst_expert_load: tuple[str, float] | None = None
        """At the latest record, of a mixture: which layer has the least even load, and its busiest over its mean."""
        self._csv: MetricsCsv | None = None
        self._data_parallel = 1
        self._loss_sum: torch.Tensor | None = None
        self._batches = 0
        self._uncounted_tokens = 0
        self._tokens_of_unfinished_step = 0
        self._lr: Any = None
        self._step = self._recorded_step = 0
        self._since = self._last_event = self._excluded = 0.0
        self._paused_at: float | None = None

    # --- what lightning calls ------------------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._data_parallel = getattr(trainer.strategy, "dp_size", trainer.world_size)
        self._step = self._recorded_step = trainer.global_step
        self._csv = next((logger for logger in trainer.loggers if isinstance(logger, MetricsCsv)), None)
        if not trainer.is_global_zero:
            self._csv = None
        if self._csv is not None:
            self._csv.open(trainer.global_step)
        self._since = self._last_event = time.perf_counter()
        self._excluded, self._paused_at = 0.0, None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._csv is not None and self._measured is None:
            self._csv.write_row()  # whatever was logged at the step before has arrived by now
        if self._paused_at is not None:
            self._excluded += time.perf_counter() - self._paused_at
            self._paused_at = None

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        # Now, because schedulers have moved on when the batch ends.
        groups = optimizer.param_groups  # none where configure_optimizers returns None
        lr = groups[0].get("lr") if groups else None
        self._lr = lr.clone() if isinstance(lr, torch.Tensor) else lr

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._batches == 0:
            self._loss_sum = None
            self.counted = "tokens" if holds_tokens(batch) else "samples"
        self._batches += 1
        tokens = count_tokens(batch)
        self._uncounted_tokens += tokens
        self._tokens_of_unfinished_step += tokens
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor):
            self.has_loss = True
            # Lightning has divided it by the number of microbatches, so the sum is the mean already.
            wide = torch.float32 if loss.device.type == "mps" else torch.float64
            weight = getattr(trainer.strategy, "loss_weight", 1.0)  # of parts of a batch that do not count alike
            share = loss.detach().to(wide).mean() * weight
            self._loss_sum = share if self._loss_sum is None else self._loss_sum + share
        if trainer.global_step > self._step:
            self._end_step(trainer, pl_module)
        self._last_event = time.perf_counter()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            if trainer.strategy.root_device.type != "cpu":
                torch.accelerator.synchronize()  # the device may still be at work on the steps to be timed
            self.catch_up()
            self._pause(time.perf_counter())

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.catch_up()
        if self._csv is not None:
            self._csv.write_row()  # a run that is killed from here on resumes behind this row
        self._pause(self._last_event)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.catch_up()
        if self._step > self._recorded_step:
            self._measured = self._measure(trainer, grad_norm=None)  # validation may have dropped the gradients
            self.catch_up()
        if self._csv is not None:
            self._csv.write_row()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.catch_up(wait=False)
        if self._csv is not None:
            self._csv.write_row()

    def state_dict(self) -> dict[str, Any]:
        # Ranks have equal shares here; the exact sum is only known at logged steps. What a step has had of its batches
        # that is not done counts for nothing: a resumed run makes it again.
        self.catch_up()
        finished = self._uncounted_tokens - self._tokens_of_unfinished_step
        return {"tokens": self.tokens + finished * self._data_parallel}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tokens = state_dict["tokens"]

    def catch_up(self, wait: bool = True) -> None:
        """Take in what was measured of the latest logged step; nothing happens if that was done.

        Args:
            wait: for the device, where it has not come so far.
        """
        measured = self._measured
        if measured is None or not (wait or measured.arrival is None or measured.arrival.query()):
            return
        self._measured = None
        values = asdict(self._record(measured)) | {"expert_imbalance": measured.imbalance}
        if not measured.for_loggers or not measured.trainer.is_global_zero:
            return
        known = {name: value for name, value in values.items() if value is not None}
        for logger in measured.trainer.loggers:
            if isinstance(logger, MetricsCsv):
                logger.add(known)
            else:
                shown = {name: value for name, value in known.items() if name != "step"}
                logger.log_metrics(shown, step=measured.step - 1)  # lightning counts from 0

    # --- what the summary reads ----------------------------------------------------------------------------------

    def median_step_time(self) -> float | None:
        """Median seconds per optimizer step after warm-up (the first tenth, at least 3 steps); None without a step."""
        timed = self._after_warm_up()
        return statistics.median(self.seconds[i] / self.steps_timed[i] for i in timed) if timed else None

    def tokens_per_second(self) -> float | None:
        """Tokens of all ranks per second of training after warm-up; None without a step."""
        timed = self._after_warm_up()
        return sum(self.tokens_timed[i] for i in timed) / sum(self.seconds[i] for i in timed) if timed else None

    def _after_warm_up(self) -> list[int]:
        if not self.steps:
            return []
        first = self.steps[0] - self.steps_timed[0]
        warm_up = max(3, (self.steps[-1] - first) // 10)
        behind = [i for i, step in enumerate(self.steps) if step - self.steps_timed[i] - first >= warm_up]
        return behind or list(range(len(self.steps)))

    # --- one step ------------------------------------------------------------------------------------------------

    def _end_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.catch_up()  # before the row of its step ends
        previous, self._step = self._step, trainer.global_step  # with several optimizers it moves by more than one
        if self._loss_sum is not None:
            expected = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            scale = getattr(trainer.strategy, "step_scale", None)
            if scale is not None:
                self._loss_sum = self._loss_sum * scale
            elif self._batches != expected:  # the last step of an epoch may have fewer microbatches
                self._loss_sum = self._loss_sum * (expected / self._batches)
        self._batches = self._tokens_of_unfinished_step = 0
        if self._csv is not None:
            self._csv.begin_row(self._step)
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
        if every and self._step // every > previous // every:
            worst = getattr(trainer.strategy, "worst_expert_load", lambda: None)()
            self.worst_expert_load = worst or self.worst_expert_load
            grad_norm = getattr(trainer.strategy, "last_grad_norm", None)
            self._measured = self._measure(trainer, grad_norm, for_loggers=True, imbalance=worst and worst[1])
            if not (trainer.strategy.root_device.type == "cuda" if self._late is None else self._late):
                self.catch_up()

    def _measure(
        self,
        trainer: pl.Trainer,
        grad_norm: torch.Tensor | None,
        for_loggers: bool = False,
        imbalance: float | None = None,
    ) -> _Measured:
        """Begin to measure the step that has just ended. A collective over the data parallel ranks."""
        device = trainer.strategy.root_device
        wide = torch.float32 if device.type == "mps" else torch.float64
        tokens = torch.full((), self._uncounted_tokens, dtype=wide, device=device)
        loss = torch.full_like(tokens, math.nan) if self._loss_sum is None else self._loss_sum.to(device, wide)
        reduced: torch.Tensor = trainer.strategy.reduce(torch.stack([tokens, loss]), reduce_op="mean")
        further = {"grad_norm": grad_norm, "lr": self._lr}
        on_device = {name: item for name, item in further.items() if isinstance(item, torch.Tensor)}
        values = torch.stack([*reduced, *(item.detach().to(device, wide).reshape(()) for item in on_device.values())])
        arrival = None
        if device.type == "cuda":
            values = torch.empty(len(values), dtype=wide, pin_memory=True).copy_(values, non_blocking=True)
            arrival = torch.cuda.Event()
            arrival.record(torch.cuda.current_stream(device))
        self._uncounted_tokens = 0
        names = ("tokens", "no loss" if self._loss_sum is None else "loss", *on_device)
        lr = None if self._lr is None or "lr" in on_device else float(self._lr)
        steps = self._step - self._recorded_step
        self._recorded_step = self._step
        return _Measured(trainer, self._step, steps, names, values, arrival, lr, for_loggers, imbalance)

    def _record(self, measured: _Measured) -> StepRecord:
        values = measured.read()
        now = time.perf_counter()  # after the values have arrived: the device is done with the step
        new_tokens = round(values["tokens"] * self._data_parallel)
        self.tokens += new_tokens
        paused = self._excluded + (now - self._paused_at if self._paused_at is not None else 0.0)
        elapsed = now - self._since - paused
        record = StepRecord(
            step=measured.step,
            loss=values.get("loss"),
            grad_norm=values.get("grad_norm"),
            lr=values.get("lr", measured.lr),
            tokens=self.tokens,
            step_time_s=elapsed / measured.steps,
        )
        is_finite = all(value is None or math.isfinite(value) for value in (record.loss, record.grad_norm))
        self.not_finite_since = None if is_finite else self.not_finite_since or measured.step
        self.steps.append(measured.step)
        self.losses.append(values.get("loss", math.nan))
        self.seconds.append(elapsed)
        self.steps_timed.append(measured.steps)
        self.tokens_timed.append(new_tokens)
        self.latest, self._since, self._excluded = record, now, 0.0
        if self._paused_at is not None:
            self._paused_at = now
        return record

    def _pause(self, since: float) -> None:
        """Stop the clock until the next batch starts."""
        if self._paused_at is None:
            self._paused_at = since


_OF_TOKENS = ("input_ids", "labels")


def holds_tokens(batch: Any) -> bool:
    """Whether `count_tokens` finds tokens in a batch: of one label for each sample it doesn't."""
    parts: Any = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    named = [batch.get(name) for name in _OF_TOKENS] if isinstance(batch, Mapping) else []
    return any(isinstance(it, torch.Tensor) and it.ndim > 1 for it in named) or any(map(holds_tokens, parts))


def count_tokens(batch: Any) -> int:
    """Tokens in a batch: elements of `input_ids` or `labels`; else its samples, the first dim of its first tensor."""
    if isinstance(batch, Mapping):
        for name in _OF_TOKENS:
            if isinstance(batch.get(name), torch.Tensor):
                return int(batch[name].numel())
        parts: Any = batch.values()
    elif isinstance(batch, torch.Tensor):
        return int(batch.shape[0]) if batch.ndim else 1
    elif isinstance(batch, list | tuple):
        parts = batch
    else:
        return 0
    return next((count for count in map(count_tokens, parts) if count), 0)
