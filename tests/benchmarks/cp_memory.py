"""What each rank keeps for its backward pass, by the number of ranks along cp.

    python tests/benchmarks/cp_memory.py [--cp 1 2 4] [--length 2048] [--backends gather ring ulysses] [--layers 4]

The Llama of `model=llama` under its language-model module on the CPU. Counted in the second step, at the end of the
forward pass: memory of everything that autograd saved, parameters apart, each piece once; the largest of all ranks.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cp", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--backends", nargs="+", default=["gather", "ring", "ulysses"])
    parser.add_argument("--report", type=Path)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(arguments)
        return
    print(f"saved for the backward, per rank; {arguments.layers} layers, {arguments.length} tokens", flush=True)
    print(f"{'backend':>9} {'cp':>3} {'MiB':>9} {'of cp=1':>8} {'over 1/cp':>10}", flush=True)
    whole = measured(1, "gather", arguments)
    for backend in arguments.backends:
        for cp in arguments.cp:
            saved = whole if cp == 1 else measured(cp, backend, arguments)
            share = saved / whole
            print(f"{backend:>9} {cp:>3} {saved / 2**20:>9.1f} {share:>8.4f} {share * cp:>10.3f}", flush=True)


def measured(cp: int, backend: str, arguments: argparse.Namespace) -> int:
    """The most bytes that any of `cp` ranks keeps."""
    root = Path(__file__).resolve().parents[2]
    paths = [str(root / "launcher"), str(root / "strategies"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={cp}", __file__]
    command += ["--backends", backend, "--length", str(arguments.length), "--layers", str(arguments.layers)]
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [*command, "--report", directory], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip
        if done.returncode:
            sys.exit(done.stdout)
        return max(json.loads(file.read_text()) for file in Path(directory).iterdir())


def run_rank(arguments: argparse.Namespace) -> None:
    import lightning.pytorch as pl
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    from autolaunch.models.language_model import LanguageModel
    from autolaunch.models.llama import Llama
    from autolaunch.models.llama_config import llama_config
    from autolaunch_strategies import MeshStrategy

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    tokens = torch.randint(0, 256, (2, arguments.length), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": item, "labels": item.roll(-1)} for item in tokens]
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 192, "num_heads": 8, "num_kv_heads": 4}
    optimizer = {"name": "sgd", "lr": 0.1, "weight_decay": 0.0, "momentum": 0.0}
    scheduler = {"name": "constant", "warmup_steps": 0, "min_lr_ratio": 0.0, "total_steps": 2}

    class Counts(LanguageModel):
        """Counts in the second step: in the first one everything is looked at."""

        saved: dict[int, int] = {}

        def pack(self, tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.parameters_held:
                self.saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.saved = {}
            self.parameters_held = {item.untyped_storage().data_ptr() for item in self.parameters()}
            with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor):
                return super().training_step(batch, batch_idx)

    model = Llama(llama_config({"size": "debug", "num_layers": arguments.layers, **sizes}))
    module = Counts(model, optimizer, scheduler, 2, labels="next")
    cp = arguments.backends[0] if ranks > 1 else None
    trainer = pl.Trainer(
        strategy=MeshStrategy(mesh=f"cp{ranks}", dp=0, cp=cp), accelerator="cpu", max_steps=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=1))
    assert trainer.global_step == 2
    (arguments.report / os.environ["RANK"]).write_text(json.dumps(sum(module.saved.values())))
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
