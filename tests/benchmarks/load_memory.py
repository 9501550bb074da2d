"""How much memory a rank needs to read its part of a pretrained model: at most that part and the largest tensor.

    python tests/benchmarks/load_memory.py [--ranks 1 2 4] [--layers 4] [--experts 32]

A tiny Qwen3-MoE, whose files hold each expert by itself, onto dp=fsdp on the CPU. Counted is anonymous memory of the
process (what is mapped from the files can be given back at any time), sampled while weights are read.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--model", type=Path)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(arguments)
        return
    with tempfile.TemporaryDirectory() as directory:
        total, largest = save(Path(directory), arguments)
        print(f"model {total:.1f} MiB, its largest tensor {largest:.1f} MiB", flush=True)
        print(f"{'ranks':>6} {'peak MiB':>9} {'share + largest':>16}", flush=True)
        for ranks in arguments.ranks:
            print(f"{ranks:>6} {measured(ranks, directory):>9.1f} {total / ranks + largest:>16.1f}", flush=True)


def save(directory: Path, arguments: argparse.Namespace) -> tuple[float, float]:
    """Write the model; (its size, that of its largest tensor) in MiB."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=256, num_hidden_layers=arguments.layers, num_attention_heads=4, head_dim=64,
        num_key_value_heads=2, vocab_size=32000, num_experts=arguments.experts, moe_intermediate_size=256,
        intermediate_size=512,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory, max_shard_size="50MB")
    sizes = [parameter.nbytes / 2**20 for parameter in model.parameters()]
    return sum(sizes), max(sizes)


def measured(ranks: int, directory: str) -> float:
    """The most MiB that any rank had more than before it read weights."""
    root = Path(__file__).resolve().parents[2]
    paths = [str(root / "launcher"), str(root / "strategies"), str(root), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
    done = subprocess.run([*command, "--model", directory], env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return max(json.loads(line)["peak"] for line in done.stdout.splitlines() if line.startswith('{"peak"'))


def run_rank(arguments: argparse.Namespace) -> None:
    """Load the model as the command does, and say how much memory that took."""
    import torch
    from lightning.pytorch.plugins.precision import Precision
    from torch.utils.data import DataLoader

    from autolaunch.tasks.run_parts import construct_module
    from autolaunch_strategies import MeshStrategy
    from autolaunch_strategies.apply import steps
    from tests.lightning.cases import make_trainer
    from tests.models.load_cases import config_of

    strategy = MeshStrategy(mesh=os.environ["WORLD_SIZE"], dp=3)
    read = steps.materialise
    peaks: list[float] = []

    def watched(*arguments: Any) -> None:
        with anonymous_memory(peaks):
            read(*arguments)

    steps.materialise = watched
    module = construct_module(config_of(arguments.model), strategy, Precision(), torch.device("cpu"))
    items = [{"input_ids": torch.arange(8), "labels": torch.arange(1, 9)} for _ in range(4)]
    make_trainer(strategy, max_steps=1).validate(module, DataLoader(items, batch_size=4), verbose=False)
    print(json.dumps({"peak": max(peaks)}), flush=True)


@contextmanager
def anonymous_memory(peaks: list[float]) -> Iterator[None]:
    """Meanwhile note the anonymous memory of this process, in MiB more than at the start, some 500 times a second."""

    def now() -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024

    before, done = now(), threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peaks.append(now() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        peaks.append(now() - before)


if __name__ == "__main__":
    main()
