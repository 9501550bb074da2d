"""Steady steps of the built-in language model, watched for reads of values by the host."""

from __future__ import annotations

import itertools
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

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
WARM, STEPS = 4, 7


def allowed(place: str) -> bool:
    return False


class Watches(pl.Callback):
    """From the end of step `WARM` to that of the step before the last one."""

    def __init__(self) -> None:
        self.reads = HostReads(allowed)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == WARM and not self.reads.runs:
            self.reads.begin()
        elif trainer.global_step == STEPS - 1:
            self.reads.end()


def watched(stages: int = 1, log_every_n_steps: int = 100, **values: Any) -> dict[str, int]:
    values = {
        "task": "fit", "mesh": {"dp": 1, "mp": 1, "pp": 1, "cp": 1}, "model": LLAMA,
        "data": {"name": "synthetic", "seq_len": 16, "batch_size": 4, "microbatches": 2},
        "scheduler": {"name": "constant"},
        "trainer": {
            "accelerator": "cpu", "max_steps": STEPS, "limit_val_batches": 0, "enable_progress_bar": False,
            "log_every_n_steps": log_every_n_steps,
        },
        "checkpoint": {"enabled": False}, "logger": {}, "seed": 1, **values,
    }  # fmt: skip
    config, wrong = validate(values)
    raise_all(wrong)
    config = with_batch_parts(config, stages)
    with tempfile.TemporaryDirectory() as directory, quiet_lightning():
        job = ResolvedJob(config, Path(directory), WORLD, [], "0")
        watches, steps = Watches(), StepMetrics()
        strategy = build_strategy(config)
        trainer = build_trainer(job, strategy, steps, [watches], [])
        module = construct_module(config, strategy, trainer.precision_plugin, torch.device("cpu"))
        trainer.fit(module, datamodule=build_data(config["data"], config["seed"]))
    return watches.reads.found


def main() -> None:
    pass


GROUPS = {
    "one": {"one": watched},
    "two": {
        "level 0": partial(watched, mesh={"dp": 2, "mp": 1, "pp": 1, "cp": 1}, dp={"sharding_level": 0}),
        "level 3": partial(watched, mesh={"dp": 2, "mp": 1, "pp": 1, "cp": 1}, dp={"sharding_level": 3}),
        "1f1b": partial(watched, 2, mesh={"dp": 1, "mp": 1, "pp": 2, "cp": 1}, pp={"loss": "microbatch", "schedule": "1f1b"}),
        "exact": partial(watched, 2, mesh={"dp": 1, "mp": 1, "pp": 2, "cp": 1}),
        "ring": partial(watched, mesh={"dp": 1, "mp": 1, "pp": 1, "cp": 2}, cp={"backend": "ring"}),
        "mp": partial(watched, mesh={"dp": 1, "mp": 2, "pp": 1, "cp": 1}),
    },
}

if __name__ == "__main__":
    serve(GROUPS)
