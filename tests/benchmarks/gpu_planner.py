"""The planner's step time and peak memory beside those of runs, on the GPUs of this machine.

    python tests/benchmarks/gpu_planner.py [--gpus 1] [--no-calibration] [--steps 20] [KEY=VALUE ...]

First `autolaunch calibrate` measures the machine. Then each way below is planned, and its plan is run. Printed for
each: seconds of a step (the median without the first five) and bytes at the peak, predicted and measured, and by how
much the prediction is too high. Goals: 10 % of the step, 5 % of the peak. Bytes are those of tensors alone, as the
allocator counts them: what the runtime takes, and what is lost between allocations, is left out of the plan. Keys are
for every way. `--cpu` runs a tiny model where there is no GPU, to see that it works.
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

LLAMA = ["model=llama", "model.size=1b", "data.seq_len=4096", "data.batch_size=8"]
QWEN = [
    "model=hf", "data.seq_len=4096", "data.batch_size=8", "data.microbatches=4",
    "model.config={model_type:qwen3,hidden_size:1024,intermediate_size:3072,num_hidden_layers:28,"
    "num_attention_heads:16,num_key_value_heads:8,head_dim:128,vocab_size:151936,max_position_embeddings:8192}",
]  # fmt: skip
GPT2 = [
    "model=hf", "data.seq_len=1024", "data.batch_size=32", "data.microbatches=4",
    "model.config={model_type:gpt2,n_layer:24,n_embd:1024,n_head:16,vocab_size:50257,n_positions:1024}",
]  # fmt: skip
MIXTURE = [
    "model=hf", "data.seq_len=4096", "data.batch_size=8", "data.microbatches=4",
    "model.config={model_type:mixtral,num_local_experts:8,hidden_size:1024,intermediate_size:1024,"
    "num_hidden_layers:12,num_attention_heads:16,num_key_value_heads:4,vocab_size:32000}",
]  # fmt: skip
TINY = ["model=llama", "data.seq_len=128", "data.batch_size=8"]
WAYS: dict[int, list[tuple[list[str], str]]] = {
    1: [
        (LLAMA, "mesh=1 recompute=none data.microbatches=8 compile=false"),
        (LLAMA, "mesh=1 recompute=none data.microbatches=8 compile=true"),
        (LLAMA, "mesh=1 recompute=full data.microbatches=4 compile=false"),
        (LLAMA, "mesh=1 recompute=full data.microbatches=1 compile=false"),
        (QWEN, "mesh=1 recompute=none compile=false"),
        (QWEN, "mesh=1 recompute=none compile=false adapter=lora"),
        (GPT2, "mesh=1 recompute=none compile=false"),
        (MIXTURE, "mesh=1 recompute=none compile=false"),
    ],
    2: [(LLAMA, way) for way in ("mesh=2 dp=fsdp", "mesh=2 dp=ddp", "mesh=1x2 mp=seq_parallel", "mesh=1x1x2 pp=1f1b")]
    + [(LLAMA, "mesh=cp2 cp=ring")],
    4: [(LLAMA, way) for way in ("mesh=4 dp=fsdp", "mesh=2x2 mp=seq_parallel", "mesh=2x1x2 pp=1f1b")],
    8: [(LLAMA, way) for way in ("mesh=8 dp=fsdp", "mesh=4x2 mp=seq_parallel", "mesh=2x2x2 mp=seq_parallel pp=1f1b")],
}
"""By the number of GPUs: what is trained, and how."""
TENSORS_ALONE = ["cluster.constants.context_bytes=1", "cluster.constants.fragmentation=1e-9"]
FIRST_STEPS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--no-calibration", action="store_true")
    parser.add_argument("--steps", type=int, default=20, help="of each run; the first five do not count")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    cluster, kind = f"cluster=localx{arguments.gpus}", "cpu" if arguments.cpu else "gpu"
    always = [cluster, "data=synthetic", f"trainer.accelerator={kind}"]
    always += ["precision=32-true" if arguments.cpu else "precision=bf16-mixed", *TENSORS_ALONE, *arguments.keys]
    titles = ("step", "predicted", "too high", "peak", "predicted", "too high")
    with tempfile.TemporaryDirectory() as directory:
        if not arguments.no_calibration:
            autolaunch(Path(directory) / "calibration", "calibrate", cluster, f"trainer.accelerator={kind}")
        print(*(f"{title:>10}" for title in titles), " way", flush=True)
        ways = [way for count, ways in WAYS.items() if count <= arguments.gpus for way in ways]
        for number, (model, way) in enumerate(ways):
            planned, run = Path(directory) / f"plan_{number}", Path(directory) / f"run_{number}"
            try:
                autolaunch(planned, "plan", *(TINY if arguments.cpu else model), *way.split(), *always)
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
                f"{chosen['memory_bytes'] / peak - 1:>+10.1%}  {name_of(model)}{way}",
                flush=True,
            )


def name_of(model: list[str]) -> str:
    config = next((key for key in model if "model_type" in key), "")
    return config.partition("model_type:")[2].partition(",")[0] + " " if config else ""


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
