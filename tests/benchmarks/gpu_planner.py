"""The planner's step time and peak memory beside those of runs, on the GPUs of this machine.

    python tests/benchmarks/gpu_planner.py [--gpus 1] [--no-calibration] [--steps 20] [KEY=VALUE ...]

First `autolaunch calibrate` measures the machine. Then each way below is planned, and its plan is run. Printed for
each: seconds of a step (the median without the first five) and bytes at the peak, predicted and measured, and by how
much the prediction is too high. Goals: 10 % of the step, 5 % of the peak. Keys are for every way; without any it is
llama-1b in bf16. `--cpu` runs a tiny model where there is no GPU, to see that it works.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

MODEL = ["model=llama", "model.size=1b", "data=synthetic", "data.seq_len=4096", "data.batch_size=8"]
MODEL += ["precision=bf16-mixed"]
TINY = ["model=llama", "data=synthetic", "data.seq_len=128", "data.batch_size=8", "precision=32-true"]
WAYS: dict[int, list[str]] = {
    1: [
        "mesh=1 recompute=none data.microbatches=8",
        "mesh=1 recompute=full data.microbatches=4",
        "mesh=1 recompute=full data.microbatches=1",
        "mesh=1 recompute=none data.microbatches=8 compile=true",
    ],
    2: ["mesh=2 dp=fsdp", "mesh=2 dp=ddp", "mesh=1x2 mp=seq_parallel", "mesh=1x1x2 pp=1f1b", "mesh=cp2 cp=ring"],
    4: ["mesh=4 dp=fsdp", "mesh=2x2 mp=seq_parallel", "mesh=2x1x2 pp=1f1b"],
    8: ["mesh=8 dp=fsdp", "mesh=4x2 mp=seq_parallel", "mesh=2x2x2 mp=seq_parallel pp=1f1b"],
}
"""By the number of GPUs."""
FIRST_STEPS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--no-calibration", action="store_true")
    parser.add_argument("--steps", type=int, default=20, help="of each run; the first five do not count")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    always = [f"cluster=localx{arguments.gpus}", *(TINY if arguments.cpu else MODEL)]
    always += ["trainer.accelerator=cpu" if arguments.cpu else "trainer.accelerator=gpu", *arguments.keys]
    titles = ("step", "predicted", "too high", "peak", "predicted", "too high")
    with tempfile.TemporaryDirectory() as directory:
        if not arguments.no_calibration:
            autolaunch(Path(directory) / "calibration", "calibrate", always[0], always[len(always) - 1])
        print(*(f"{title:>10}" for title in titles), " way", flush=True)
        for number, way in enumerate(way for count, ways in WAYS.items() if count <= arguments.gpus for way in ways):
            planned, run = Path(directory) / f"plan_{number}", Path(directory) / f"run_{number}"
            try:
                autolaunch(planned, "plan", *always, *way.split())
                autolaunch(run, f"+plan={planned / 'plan.yaml'}", *quiet(arguments.steps))
            except subprocess.CalledProcessError as error:
                print(f"{way}: {error.output[-1000:]}", flush=True)
                continue
            chosen = yaml.safe_load((planned / "plan.yaml").read_text())["reasons"]["choice"]["chosen"]
            seconds, peak = measured(run)
            print(
                *(f"{value:>9.4g}s" for value in (seconds, chosen["seconds"])),
                f"{chosen['seconds'] / seconds - 1:>+10.1%}",
                *(f"{value / 2**30:>7.2f}GiB" for value in (peak, chosen["memory_bytes"])),
                f"{chosen['memory_bytes'] / peak - 1:>+10.1%}  {way}",
                flush=True,
            )


def quiet(steps: int) -> list[str]:
    """Keys of a run that does nothing but train."""
    return [
        f"trainer.max_steps={steps}", f"scheduler.total_steps={steps}", "trainer.log_every_n_steps=1",
        "trainer.limit_val_batches=0", "trainer.enable_progress_bar=false", "checkpoint.enabled=false",
    ]  # fmt: skip


def measured(directory: Path) -> tuple[float, float]:
    """(seconds of a step, bytes at the peak) of a run."""
    with (directory / "metrics.csv").open(newline="") as file:
        seconds = [float(row["step_time_s"]) for row in csv.DictReader(file) if row["step_time_s"]]
    summary: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    return statistics.median(seconds[FIRST_STEPS:]), float(summary["peak_memory_bytes"])


def autolaunch(directory: Path, *words: str) -> None:
    """Run the command into a directory."""
    root = Path(__file__).resolve().parents[2]
    paths = [str(root / "launcher"), str(root / "strategies"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "autolaunch", *words, f"output_dir={directory}"]
    subprocess.run(command, env=env, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


if __name__ == "__main__":
    main()
