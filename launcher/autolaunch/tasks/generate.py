"""generate: what a model says behind some prompts, on any mesh."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader, IterableDataset

from autolaunch.job import ResolvedJob, write_beside
from autolaunch.launch.place import Place
from autolaunch.report.metrics import StepMetrics
from autolaunch.report.summary import collect_summary
from autolaunch.report.summary_file import write_summary
from autolaunch.report.terminal import Terminal
from autolaunch.tasks.generation import Sampling
from autolaunch.tasks.run_parts import build_strategy, build_trainer, construct_module, quiet_lightning
from autolaunch.tasks.samples import Writer

FILE = "generated.jsonl"


def run(job: ResolvedJob, place: Place) -> dict[str, Any]:
    """Write what follows `generate.prompts` to generated.jsonl and the screen; collective. Returns the summary."""
    config, started = job.config, time.time()
    keys = config["generate"]
    sampling = Sampling(keys["max_new_tokens"], keys["temperature"], keys["top_p"], config["seed"])
    writer = Writer(config, keys["prompts"], sampling, "generate.prompts")
    with quiet_lightning():
        pl.seed_everything(config["seed"], workers=True, verbose=False)
        strategy, steps, generates = build_strategy(config), StepMetrics(), _Generates(writer)
        strategy.checkpoints.earlier_if_damaged = job.resumes_last
        trainer = build_trainer(job, strategy, steps, [generates], [])
        module = construct_module(config, strategy, trainer.precision_plugin, strategy.root_device)
        nothing = DataLoader(_Nothing(), batch_size=None)
        trainer.predict(module, nothing, ckpt_path=config["ckpt_path"], return_predictions=False)
        summary = collect_summary(trainer, steps, started, task="generate")
    if trainer.is_global_zero:
        console = Terminal()
        for line in writer.lines(generates.texts):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        pairs = zip(keys["prompts"], generates.texts, strict=True)
        rows = [json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False) for prompt, text in pairs]
        write_beside(job.output_dir / FILE, "\n".join(rows) + "\n")
        write_summary(job.output_dir, summary)
    return summary


class _Generates(pl.Callback):
    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.texts: list[str] = []

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.texts = self.writer.write(trainer)


class _Nothing(IterableDataset):
    """No batch: lightning's loop asks for data, and all is done where it begins."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())
