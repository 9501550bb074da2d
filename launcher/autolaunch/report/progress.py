"""The progress of a run on the terminal: a bar where there is one, else a plain line every now and then."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console, RenderableType
from rich.constrain import Constrain
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from autolaunch.models.optimizer import steps_left
from autolaunch.report.memory import peak_memory_bytes
from autolaunch.report.metrics import StepMetrics
from autolaunch.report.metrics_csv import StepRecord
from autolaunch.report.page import WIDEST
from autolaunch.report.readable import readable_bytes, readable_count
from autolaunch.report.terminal import Terminal

SECONDS_BETWEEN_LINES = 10.0


class ProgressLine(ProgressBar):
    """Shows steps, time, loss, speed and memory on rank 0; replaces lightning's own progress bar.

    Shows the values that `metrics` has measured and measures nothing itself, so it costs no wait for the device.
    Comes after `metrics` in the Trainer's list of callbacks.
    """

    def __init__(self, metrics: StepMetrics, console: Console | None = None) -> None:
        super().__init__()
        self._metrics = metrics
        self._console = console or Terminal()
        self._is_bar = self._console.is_interactive and self._console.file.isatty()
        self._enabled = True
        self._shown = ExitStack()
        self._bar: _Bar | None = None
        self._training: TaskID | None = None
        self._evaluation: TaskID | None = None
        self._shown_step = 0
        self._last_step: int | None = None
        self._record: StepRecord | None = None
        self._line_due = 0.0
        self._evaluated_since = 0.0
        self._validation: dict[str, float] = {}

    def disable(self) -> None:
        """Show nothing."""
        self._enabled = False

    def enable(self) -> None:
        """Show progress again."""
        self._enabled = True

    # --- training ------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._line_due = 0.0
        self._shown_step, self._last_step = trainer.global_step, _last_step(trainer)
        if self._start_bar():
            assert self._bar is not None
            self._training = self._bar.add_task("training", total=self._last_step, completed=self._shown_step)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._enabled or trainer.global_step == self._shown_step:
            return
        self._shown_step, self._last_step = trainer.global_step, _last_step(trainer)
        measured, self._record = self._metrics.latest is not self._record, self._metrics.latest
        if self._bar is not None and self._training is not None:
            self._bar.update(self._training, completed=self._shown_step, total=self._last_step)
            if measured:
                self._bar.values = self._values()
        elif measured and time.monotonic() >= self._line_due:
            self._print_line(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._bar is not None:
            self._bar.values = self._values()
            self._bar.refresh()
        elif self._enabled and self._line_due != math.inf:
            self._print_line(trainer)
        self._line_due = math.inf
        self._stop_bar()

    def _print_line(self, trainer: pl.Trainer) -> None:
        latest = self._metrics.latest
        if latest is None:
            return
        total = self._last_step
        step = f"step {latest.step}" if total is None else f"step {latest.step:>{len(str(total))}}/{total}"
        values = "  ".join(f"{name} {value}".strip() for name, value in self._values())
        self._console.print(f"{step}  {values}", markup=False, highlight=False, soft_wrap=True)
        # The last step's line is printed only once, though the end of training would print it as well.
        self._line_due = math.inf if latest.step == total else time.monotonic() + SECONDS_BETWEEN_LINES

    def _values(self) -> list[tuple[str, str]]:
        """(label, value) pairs of the latest record."""
        latest = self._metrics.latest
        if latest is None:
            return []
        pairs = [] if latest.loss is None else [("loss", f"{latest.loss:.4f}")]
        if self._metrics.seconds[-1] > 0:
            rate = readable_count(self._metrics.tokens_timed[-1] / self._metrics.seconds[-1])
            pairs.append(("", f"{rate} {'tok' if self._metrics.counted == 'tokens' else self._metrics.counted}/s"))
        pairs.append(("", f"{latest.step_time_s:.3g} s/step"))
        pairs.append(("", readable_bytes(peak_memory_bytes())))
        return [*pairs, *((name, f"{value:.4f}") for name, value in self._validation.items())]

    # --- validate, test, predict ---------------------------------------------------------------------------------

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._begin_evaluation("validation", trainer.num_val_batches)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin_evaluation("test", trainer.num_test_batches)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin_evaluation("predict", trainer.num_predict_batches)

    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if not trainer.sanity_checking:
            self._advance_evaluation()

    def on_test_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._advance_evaluation()

    def on_predict_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._advance_evaluation()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        if trainer.state.fn == "fit":
            # Lightning does not tell which loop a value comes from; by custom the names of these begin with val.
            logged = trainer.callback_metrics.items()
            self._validation = {name: float(value) for name, value in logged if name.startswith("val")}
        self._end_evaluation(trainer)

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_evaluation(trainer)

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_evaluation(trainer)

    def _begin_evaluation(self, what: str, batches: int | float | Iterable[int | float]) -> None:
        self._evaluated_since = time.monotonic()
        if self._start_bar():
            assert self._bar is not None
            total = sum(batches) if isinstance(batches, Iterable) else batches
            self._evaluation = self._bar.add_task(what, total=None if math.isinf(total) else total)

    def _advance_evaluation(self) -> None:
        if self._bar is not None and self._evaluation is not None:
            self._bar.advance(self._evaluation)

    def _end_evaluation(self, trainer: pl.Trainer) -> None:
        if self._bar is not None:
            if self._training is None:
                self._stop_bar()
            elif self._evaluation is not None:
                self._bar.remove_task(self._evaluation)
                self._bar.values = self._values()
            self._evaluation = None
        elif self._enabled and trainer.state.fn == "fit":
            values = "  ".join(f"{name} {value:.4f}" for name, value in self._validation.items())
            took = f"{time.monotonic() - self._evaluated_since:.1f} s"
            line = f"validation at step {trainer.global_step}  {values}  {took}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    # --- the terminal --------------------------------------------------------------------------------------------

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop_bar()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stop_bar()

    def _start_bar(self) -> bool:
        """Put the bar on the terminal if it is not there yet; False where there is none."""
        if not (self._enabled and self._is_bar):
            return False
        if self._bar is None:
            self._bar = self._shown.enter_context(_Bar(self._console))
            self._shown.enter_context(_log_above_the_bar())
        return True

    def _stop_bar(self) -> None:
        self._shown.close()
        self._bar = self._training = self._evaluation = None


class _Bar(Progress):
    """One line per task, and a line with the latest values below."""

    def __init__(self, console: Console) -> None:
        self.values: list[tuple[str, str]] = []
        super().__init__(
            TextColumn("[bold]{task.description}"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("[dim]left"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
            refresh_per_second=4,
            # A stream that goes elsewhere (2> errors.txt) has to keep going there.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )

    def get_renderables(self) -> Iterable[RenderableType]:
        yield Constrain(self.make_tasks_table(self.tasks), WIDEST)
        if self.values:
            line = Text()
            for label, value in self.values:
                line.append("   " if line else "")
                if label:
                    line.append(f"{label} ", style="dim")
                line.append(value, style="bold" if label == "loss" else "")
            yield line


@contextmanager
def _log_above_the_bar() -> Iterator[None]:
    """Send log handlers that hold the terminal's stream through the bar's, else they write into the middle of it."""
    redirected = {sys.__stdout__: sys.stdout, sys.__stderr__: sys.stderr}
    loggers = [
        logging.getLogger(),
        *(x for x in logging.Logger.manager.loggerDict.values() if isinstance(x, logging.Logger)),
    ]
    changed: list[tuple[logging.StreamHandler[Any], Any]] = []
    for handler in {handler for logger in loggers for handler in logger.handlers}:
        if isinstance(handler, logging.StreamHandler) and handler.stream in redirected:
            changed.append((handler, handler.stream))
            handler.setStream(redirected[handler.stream])
    try:
        yield
    finally:
        for handler, stream in changed:
            handler.setStream(stream)


def _last_step(trainer: pl.Trainer) -> int | None:
    """The step with which training will end, None if only time or the data tells."""
    left = steps_left(trainer)
    return None if math.isinf(left) else trainer.global_step + int(left)
