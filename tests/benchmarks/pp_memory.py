"""What each rank of a pipeline keeps for its backward passes at most, by schedule.

    python tests/benchmarks/pp_memory.py [--ranks 4] [--microbatches 16] [--schedules exact gpipe 1f1b ...]

Counted in the second and third step of the Llama of `model=llama` on the CPU: microbatches between forward and backward
(with two stages per rank each counts at both), and memory of everything that autograd saved, parameters apart.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

SCHEDULES = ("exact", "gpipe", "1f1b", "interleaved_1f1b", "zbv_zero_bubble")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES))
    parser.add_argument("--microbatches", type=int, default=16)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(arguments)
        return
    print("schedule: microbatches kept, memory saved for the backward; by pipe rank, first stage first", flush=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(arguments.ranks), "--standalone"]
    subprocess.run([*command, __file__, *sys.argv[1:]], check=True, env=_environment())


def _environment() -> dict[str, str]:
    root = Path(__file__).resolve().parents[2]
    paths = [str(root / "launcher"), str(root / "strategies"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def run_rank(arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    for schedule in arguments.schedules:
        pipe_rank, kept, saved = most_kept(schedule, arguments)
        table = torch.zeros(arguments.ranks, 2, dtype=torch.int64)
        table[pipe_rank] = torch.tensor([kept, saved])
        dist.all_reduce(table)
        if dist.get_rank() == 0:
            cells = "   ".join(f"{int(row[0]):>3} {int(row[1]) / 2**20:>6.1f} MiB" for row in table)
            print(f"{schedule:>17}: {cells}", flush=True)
    sys.stdout.flush()
    os._exit(0)


def most_kept(schedule: str, arguments: argparse.Namespace) -> tuple[int, int, int]:
    """(pipe rank, most microbatches kept at once, most bytes saved at once)."""
    import lightning.pytorch as pl
    import torch
    from torch.nn import functional as F

    from autolaunch.models.llama import Llama
    from autolaunch.models.llama_config import llama_config
    from autolaunch_strategies import MeshStrategy

    microbatches = arguments.microbatches
    tokens = torch.randint(0, 256, (2 * microbatches, 65), generator=torch.Generator().manual_seed(0))

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Llama(llama_config({"size": "debug", "num_layers": 8}))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self.model(batch[:, :-1])
            return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Works(dict[Any, Any]):
        """What a pipeline keeps between forward and backward, and how many that were at most."""

        most = 0

        def __setitem__(self, job: Any, work: Any) -> None:
            super().__setitem__(job, work)
            self.most = max(self.most, len(self))

    class Watch(pl.Callback):
        def __init__(self) -> None:
            self.uses: Counter[int] = Counter()  # memory -> how often autograd holds it
            self.sizes: dict[int, int] = {}
            self.parameters: set[int] = set()
            self.bytes = self.most_bytes = 0
            self.works = Works()

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:  # the first step records shapes, and keeps outputs to compare losses
                self.parameters = {item.untyped_storage().data_ptr() for item in module.parameters()}
                trainer.strategy._applied.pipeline._works = self.works
                self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda saved: saved.tensor)
                self.hooks.__enter__()

        def on_train_end(self, trainer: Any, module: Any) -> None:
            self.hooks.__exit__()

        def pack(self, tensor: torch.Tensor) -> Saved:
            return Saved(self, tensor)

        def begins(self, key: int, size: int) -> None:
            if key not in self.uses and key not in self.parameters:
                self.sizes[key] = size
                self.bytes += size
                self.most_bytes = max(self.most_bytes, self.bytes)
            self.uses[key] += 1

        def ends(self, key: int) -> None:
            self.uses[key] -= 1
            if not self.uses[key]:
                del self.uses[key]
                self.bytes -= self.sizes.pop(key, 0)

    class Saved:
        """A tensor that autograd saved, for as long as autograd has it."""

        def __init__(self, watch: Watch, tensor: torch.Tensor) -> None:
            self.watch, self.tensor = watch, tensor
            self.key = tensor.untyped_storage().data_ptr()
            watch.begins(self.key, tensor.untyped_storage().nbytes())

        def __del__(self) -> None:
            self.watch.ends(self.key)

    pl.seed_everything(0, verbose=False)
    watch = Watch()
    pp = {"loss": "exact" if schedule == "exact" else "microbatch", "microbatches": microbatches}
    pp["schedule"] = "gpipe" if schedule == "exact" else schedule
    trainer = pl.Trainer(
        strategy=MeshStrategy(mesh=f"1x1x{arguments.ranks}", pp=pp),
        accelerator="cpu",
        max_steps=3,
        callbacks=[watch],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader([tokens] * 3, batch_size=None))
    return trainer.strategy._applied.pipeline.pipe_rank, watch.works.most, watch.most_bytes


if __name__ == "__main__":
    main()
