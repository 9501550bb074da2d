"""Steady steps of the built-in language model, watched for values that the host reads."""

from __future__ import annotations

import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from autolaunch.config.against_schema import validate
from autolaunch.config.microbatches import with_batch_parts
from autolaunch.data import build_data
from autolaunch.job import ResolvedJob
from autolaunch.report.metrics import StepMetrics
from autolaunch.tasks.run_parts import build_strategy, build_trainer, construct_module, quiet_lightning
from autolaunch_strategies.config import raise_all
from tests.support.cases import WORLD, serve
from tests.support.host_reads import HostReads

LLAMA = {"name": "llama", "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2}
WARM, STEPS = 3, 2
"""Steps before it is watched, and how many are."""


class Watches(pl.Callback):
    """Comes last, so that what others do at the end of a step is seen."""

    def __init__(self) -> None:
        self.reads = HostReads()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == WARM and not self.reads.runs:
            self.reads.begin()
        elif trainer.global_step == WARM + STEPS:
            self.reads.end()


def watched(**values: Any) -> Counter[str]:
    """Where values were read in two steps of two microbatches, with metrics that are read late, as on a GPU."""
    watches = Watches()
    fit(watches, "cpu", **values)
    return watches.reads.found


def fit(watches: pl.Callback, accelerator: str, clip: float | None = 1.0, layers: int = 2, **values: Any) -> None:
    """Train `WARM + STEPS + 1` steps with a callback that comes last."""
    values = {
        "task": "fit", "seed": 1, "model": {**LLAMA, "num_layers": layers}, "scheduler": {"name": "constant"},
        "checkpoint": {"enabled": False}, "mesh": dict.fromkeys(("dp", "mp", "pp", "cp"), 1), "logger": {},
        "data": {"name": "synthetic", "seq_len": 16, "batch_size": 4, "microbatches": 2},
        "trainer": {
            "accelerator": accelerator, "max_steps": WARM + STEPS + 1, "limit_val_batches": 0,
            "enable_progress_bar": False, "gradient_clip_val": clip,
        },
        **values,
    }  # fmt: skip
    config, wrong = validate(values)
    raise_all(wrong)
    config = with_batch_parts(config, values["mesh"]["pp"])
    with tempfile.TemporaryDirectory() as directory, quiet_lightning():
        strategy = build_strategy(config)
        job = ResolvedJob(config, Path(directory), WORLD, [], "0")
        trainer = build_trainer(job, strategy, StepMetrics(late=True), [watches], [])
        module = construct_module(config, strategy, trainer.precision_plugin, strategy.root_device)
        trainer.fit(module, datamodule=build_data(config["data"], config["seed"]))


def mesh(**sizes: int) -> dict[str, int]:
    return {"dp": 1, "mp": 1, "pp": 1, "cp": 1, **sizes}


def staged(schedule: str) -> dict[str, Any]:
    return {"mesh": mesh(pp=2), "pp": {"loss": "microbatch", "schedule": schedule}}


WHOLE = {"dp": {"sharding_level": 0}}
GROUPS: dict[str, dict[str, Any]] = {
    "two": {
        "level 0": partial(watched, mesh=mesh(dp=2), **WHOLE),
        "level 0, not clipped": partial(watched, mesh=mesh(dp=2), clip=None, **WHOLE),
        "level 2": partial(watched, mesh=mesh(dp=2), dp={"sharding_level": 2}),
        "level 3": partial(watched, mesh=mesh(dp=2), dp={"sharding_level": 3}),
        "exact": partial(watched, mesh=mesh(pp=2)),
        **{
            schedule: partial(watched, layers=4, **staged(schedule))
            for schedule in ("1f1b", "interleaved_1f1b", "zbv_zero_bubble")
        },
        "tensor parallel": partial(watched, mesh=mesh(mp=2), mp={"name": "tensor_parallel"}),
        "sequence parallel": partial(watched, mesh=mesh(mp=2), mp={"name": "seq_parallel", "sequence_parallel": True}),
        **{
            backend: partial(watched, mesh=mesh(cp=2), cp={"backend": backend})
            for backend in ("ring", "gather", "ulysses")
        },
    },
}

if __name__ == "__main__":
    serve(GROUPS)
