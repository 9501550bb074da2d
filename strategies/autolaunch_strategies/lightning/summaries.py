"""Lightning's table of modules: it counts parameters, and calls the module with its example inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext

import lightning.pytorch as pl

from autolaunch_strategies.apply.order import Parallelized
from autolaunch_strategies.lightning.replacement import Replacement
from autolaunch_strategies.pipeline.cut import whole_model


def show_whole_models(trainer: pl.Trainer, applied: Parallelized) -> None:
    """Let `ModelSummary` callbacks count the parameters of every stage, and call a module that is sharded."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by a connector, not by the class
        if isinstance(callback, pl.callbacks.ModelSummary):
            summarize = vars(callback).get("on_fit_start", callback.on_fit_start)
            summarize = summarize.original if isinstance(summarize, Replacement) else summarize
            # A hook of one object is replaced: lightning asks no strategy what there is to be counted.
            vars(callback)["on_fit_start"] = Replacement(functools.partial(_within, applied, summarize), summarize)


def _within(
    applied: Parallelized, summarize: Callable[..., None], trainer: pl.Trainer, pl_module: pl.LightningModule
) -> None:
    pipeline = applied.pipeline
    with applied.running(), nullcontext() if pipeline is None else whole_model(pipeline.held):
        summarize(trainer, pl_module)
