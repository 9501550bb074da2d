"""eval: benchmarks of lm-evaluation-harness on an exported model."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from autolaunch.data.tokenizers import tokenizer_files
from autolaunch.job import ResolvedJob, write_beside
from autolaunch.launch.place import Place
from autolaunch.machine.devices import visible_devices
from autolaunch.report.summary_file import write_summary
from autolaunch.report.terminal import Terminal
from autolaunch.tasks import export
from autolaunch_strategies.checkpoint.record import record_of
from autolaunch_strategies.config import ConfigError

FILE = "eval.json"
"""What the tasks gave, in the directory of the run."""


def run(job: ResolvedJob, place: Place) -> dict[str, Any]:
    """Run `eval.tasks` on `eval.path`, or on the export of `ckpt_path`; returns the summary.

    Raises:
        ConfigError: the model has no tokenizer, or lm-evaluation-harness has no such task.
    """
    started, keys = time.time(), job.config["eval"]
    with _model(job, place) as directory:
        if not tokenizer_files(directory):
            raise ConfigError(
                f"eval: {directory}", "has no tokenizer, so no question can be asked", "a model with tokenizer.json"
            )
        results = _results(keys, directory, visible_devices(job.config["trainer"]["accelerator"])[0])
    write_beside(job.output_dir / FILE, json.dumps(results["results"], indent=2, default=str) + "\n")
    numbers = {
        f"{task}/{name.removesuffix(',none')}": value
        for task, values in results["results"].items()
        for name, value in values.items()
        if isinstance(value, int | float)
    }
    console = Terminal()
    for name, value in numbers.items():
        console.print(f"{name}  {value:.4g}", markup=False, highlight=False)
    summary = {
        "task": "eval",
        "status": "finished",
        "world_size": 1,
        "mesh": "1",
        "model": keys["path"] or job.config["ckpt_path"],
        "metrics": numbers,
        "seconds": time.time() - started,
    }
    write_summary(job.output_dir, summary)
    return summary


@contextmanager
def _model(job: ResolvedJob, place: Place) -> Iterator[Path]:
    """The directory of the model; of a checkpoint, one that is removed again."""
    if job.config["eval"]["path"] is not None:
        yield Path(job.config["eval"]["path"]).expanduser().absolute()
        return
    with tempfile.TemporaryDirectory(dir=job.output_dir) as temporary:
        target = Path(temporary) / "model"
        merged = bool(record_of(Path(job.config["ckpt_path"])).get("adapter"))
        config = {**job.config, "export_path": str(target), "export_merged": merged}
        export.run(replace(job, config=config), place)
        yield target


def _results(keys: Mapping[str, Any], directory: Path, device: str) -> dict[str, Any]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=keys["include_path"])
    unknown = [name for name in keys["tasks"] if not manager.match_tasks([name])]
    if unknown:
        raise ConfigError(
            f"eval.tasks: {unknown[0]}",
            "lm-evaluation-harness has no such task",
            "those that `lm_eval ls tasks` lists; eval.include_path for your own",
        )
    results: dict[str, Any] = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(directory)},
        tasks=list(keys["tasks"]),
        task_manager=manager,
        num_fewshot=keys["num_fewshot"],
        limit=keys["limit"],
        batch_size=keys["batch_size"],
        apply_chat_template=keys["chat_template"],
        device=device,
        log_samples=False,
    )
    return results
