"""Seconds from the start of the command to the end of the first training step on 2 ranks, beside torchrun.

    python tests/benchmarks/first_step.py [--rounds 5] [--gpus 2]

`autolaunch mesh=2` and `torchrun --nproc-per-node 2` with a hand-written script (same model, same data shape,
fully_shard) take turns. With `--gpus` each rank has a GPU, and they meet over NCCL. Printed is the median of the ratio
of neighbouring turns; to hold: <= 1.2.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from autolaunch.models.llama import Llama
from autolaunch.models.llama_config import llama_config

device = torch.device(sys.argv[2])
if device.type == "cuda":
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
else:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = Llama(llama_config({"size": "debug"})).to(device)
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
tokens = torch.randint(0, 256, (8, 257)).to(device)
loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
loss.backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
loss.item()
if dist.get_rank() == 0:
    open(sys.argv[1], "w").write(repr(time.time()))
dist.barrier()
os._exit(0)
"""

CALLBACK = """
import time
from lightning.pytorch import Callback


class FirstStep(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 0 and trainer.is_global_zero:
            open(self.path, "w").write(repr(time.time()))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gpus", type=int, default=0)
    arguments = parser.parse_args()
    rounds, ranks = arguments.rounds, arguments.gpus or 2
    root = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory() as directory:
        here = Path(directory)
        (here / "by_hand.py").write_text(SCRIPT)
        (here / "first_step_callback.py").write_text(CALLBACK)
        paths = [str(root / "launcher"), str(root / "strategies"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
        stamp = here / "stamp"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        ours = [sys.executable, "-m", "autolaunch", "model=llama", f"mesh={ranks}", "trainer.max_steps=1"]
        ours += ["trainer.accelerator=gpu" if arguments.gpus else "trainer.accelerator=cpu"]
        ours += ["checkpoint.enabled=false"]
        ours += ["+callbacks.first._target_=first_step_callback.FirstStep"]
        ours += [f"+callbacks.first.path={stamp}"]

        def seconds(command: list[str]) -> float:
            stamp.unlink(missing_ok=True)
            begin = time.time()
            subprocess.run(command, cwd=here, env=environment, check=True, capture_output=True)
            return float(stamp.read_text()) - begin

        by_hand, by_us = [], []
        for _ in range(rounds + 1):  # the first is warm-up
            by_hand.append(seconds([*torchrun, "by_hand.py", str(stamp), "cuda" if arguments.gpus else "cpu"]))
            by_us.append(seconds(ours))
        by_hand, by_us = by_hand[1:], by_us[1:]
        ratio = statistics.median(b / a for a, b in zip(by_hand, by_us, strict=True))
        print(f"torchrun, by hand  {statistics.median(by_hand):6.2f} s")
        print(f"autolaunch         {statistics.median(by_us):6.2f} s")
        print(f"ratio              {ratio:6.2f}")


if __name__ == "__main__":
    main()
