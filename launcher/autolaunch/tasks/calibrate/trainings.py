"""Short trainings of a small Llama, one for each thing that a step can spend its time on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch

from autolaunch.config.against_schema import validate
from autolaunch.config.arithmetic import device_of, with_arithmetic
from autolaunch.config.microbatches import with_batch_parts
from autolaunch.data import build_data
from autolaunch.job import ResolvedJob
from autolaunch.models import build_module
from autolaunch.models.own_plan import own_plan
from autolaunch.report.metrics import StepMetrics
from autolaunch.tasks.run_parts import build_strategy, build_trainer, construct_module, quiet_lightning
from autolaunch_strategies.config import CP_BACKENDS, CP_NAMES, MP_NAMES, PP_NAMES, raise_all
from autolaunch_strategies.model.construction import Construction
from autolaunch_strategies.planner.candidate import FULL, PIPELINES, Candidate
from autolaunch_strategies.planner.module_profile import profile_module
from autolaunch_strategies.planner.profile import ModelProfile, Recipe
from autolaunch_strategies.planner.recipe import recipe_of

STEPS, MORE = 7, 10
"""Of a training, and of one whose steps are short; the first three are warm-up, the median of the others counts."""


@dataclass(frozen=True)
class Training:
    """One training of a few steps."""

    name: str
    candidate: Candidate
    batch: int
    """Sequences of an optimizer step."""
    model: dict[str, Any] = field(default_factory=dict)
    """Keys of `autolaunch.config.schema.LlamaModel`."""
    positions: int = 128
    steps: int = STEPS

    def config(self, job: ResolvedJob) -> dict[str, Any]:
        """The resolved config of this training, with the seed and the devices of `job`."""
        c = self.candidate
        values: dict[str, Any] = {
            "task": "fit",
            "seed": job.config["seed"],
            "mesh": {**c.mesh.sizes, "order": list(c.mesh.order)},
            "model": {"name": "llama", **self.model},
            "data": {
                "name": "synthetic",
                "seq_len": self.positions,
                "batch_size": self.batch,
                "microbatches": c.microbatches,
            },
            "dp": {"sharding_level": c.level},
            "mp": _fields(MP_NAMES["seq_parallel" if c.sequence_parallel else "tensor_parallel"]),
            "pp": _fields(PP_NAMES[c.pipeline_name if c.pp > 1 else "exact"]),
            "cp": _fields(CP_NAMES[c.backend_name]),
            "scheduler": {"name": "constant"},
            "trainer": {
                "accelerator": job.config["trainer"]["accelerator"],
                "max_steps": self.steps,
                "limit_val_batches": 0,
                "enable_progress_bar": False,
            },
            "recompute": c.recompute_name,
            "checkpoint": {"enabled": False},
            "logger": {},
        }
        config, wrong = validate(values)  # and every other key at its default
        raise_all(wrong)
        config, _ = with_arithmetic(config)  # what most people train with there
        return with_batch_parts(config, c.pp)

    def run(self, job: ResolvedJob, device: torch.device) -> float:
        """Train; collective. Returns the median seconds of a step after warm-up."""
        config = self.config(job)
        steps = StepMetrics()
        with quiet_lightning():
            pl.seed_everything(config["seed"], workers=True, verbose=False)
            strategy = build_strategy(config)
            trainer = build_trainer(dataclasses.replace(job, config=config), strategy, steps, [], [])
            module = construct_module(config, strategy, trainer.precision_plugin, device)
            trainer.fit(module, datamodule=build_data(config["data"], config["seed"]))
        seconds = steps.median_step_time()
        assert seconds is not None, "no step was timed"
        return seconds

    def described(self, job: ResolvedJob) -> tuple[ModelProfile, Recipe]:
        """What the planner is told of it."""
        config = self.config(job)
        own = own_plan({**config, "mp": _fields(MP_NAMES["tensor_parallel"])})
        with Construction(config["seed"]).recording():
            module = build_module(config)
        profile = profile_module(
            module, positions=self.positions, own_plan=own, precision=config["precision"], device_type=device_of(config)
        )
        return profile, recipe_of(self.batch, config["precision"], tf32=config["matmul_precision"] == "high")


def trainings(ranks: int, local_ranks: int) -> Iterator[Training]:
    """The trainings for so many ranks, those that say most first."""
    heads = max(4, local_ranks)
    small = {"num_layers": 2, "num_heads": heads, "num_kv_heads": heads}
    small |= {"hidden_size": 32 * heads, "intermediate_size": 96 * heads}
    wide = {**small, "hidden_size": 64 * heads, "intermediate_size": 192 * heads}
    staged = {**small, "num_layers": max(2, local_ranks)}
    n, rest = local_ranks, ranks // local_ranks

    def each(name: str, batch: int, model: dict[str, Any] = small, steps: int = STEPS, **values: Any) -> Training:
        # Axes but dp stay within a node, dp goes over all nodes.
        values = {"dp": rest, "replicate": 1, **values}
        return Training(name, Candidate(**values), batch * values["dp"], model, steps=steps)

    def pipelined(name: str, schedule: str, microbatches: int) -> Training:
        return each(name, 2 * n, staged, pp=n, pipeline=PIPELINES.index(schedule), microbatches=microbatches)

    # In the order of what each adds to those before it: how much nearer it brings predictions of other configurations
    # to those after all trainings (measured with 4 ranks on 2 cores).
    pairs = n > 2 and n % 2 == 0
    yield each("dp, small batch", 1, steps=MORE, dp=ranks)
    if ranks > 1:
        yield each("dp level 3", 2, dp=ranks, level=3)
    if pairs:
        yield each("mp of 2", 2, dp=ranks // 2, mp=2)
        yield each("cp of 2", 4, dp=ranks // 2, cp=2)
        yield each("dp level 3 beside mp", 2, dp=ranks // 2, mp=2, level=3)
    if n > 1:
        yield pipelined("pp 1f1b", "1f1b", 2 * n)
        yield each("cp gather", 4, cp=n)
        yield each("mp", 2, mp=n)
    yield each("dp, large batch", 4, steps=MORE, dp=ranks)
    yield each("dp, 4 microbatches", 4, dp=ranks, microbatches=4)
    if ranks > 1:
        yield each("dp level 1, wide model", 2, wide, dp=ranks, level=1)
    if n > 1:
        yield each("mp, sequence parallel", 2, mp=n, sequence_parallel=1)
    yield each("dp, wide model", 2, wide, dp=ranks)
    if n > 1:
        yield pipelined("pp exact", "exact", n)
        yield each("cp ring", 4, cp=n, backend=CP_BACKENDS.index("ring"))
        yield each("cp ulysses", 4, cp=n, backend=CP_BACKENDS.index("ulysses"), ulysses=n)
    if ranks > 1:
        yield each("dp level 3, 4 microbatches", 4, dp=ranks, level=3, microbatches=4)
        yield each("dp level 1", 2, dp=ranks, level=1)
    yield each("dp, recomputed", 4, dp=ranks, recompute=FULL)


def _fields(axis: Any) -> dict[str, Any]:
    return dataclasses.asdict(axis)
