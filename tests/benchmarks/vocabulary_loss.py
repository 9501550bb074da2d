"""Memory of the loss on logits divided over the vocabulary: gathered for torch's cross entropy, or as we do it.

    python tests/benchmarks/vocabulary_loss.py [--ranks 2] [--vocabulary 131072] [--tokens 2048]

Each way runs once in fresh processes: forward and backward of the loss alone. Printed is by how much the resident
memory of a rank rises at its peak (Linux's VmHWM, of the largest rank) above what it held before, logits included.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

WAYS = {"gathered": "gathered logits, torch's cross entropy", "parallel": "vocabulary-parallel"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=131072)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--way", choices=WAYS)
    arguments = parser.parse_args()
    if arguments.way:
        run_rank(arguments)
        return
    peaks = {}
    for way, text in WAYS.items():
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}"]
        command += [__file__, *sys.argv[1:], "--way", way]
        done = subprocess.run(command, check=True, env=_environment(), stdout=subprocess.PIPE, text=True)
        peaks[way] = int(done.stdout.split()[-1])
        print(f"{text:>40}: {peaks[way] / 2**20:7.0f} MiB per rank", flush=True)
    own = arguments.tokens * arguments.vocabulary // arguments.ranks * (2 if arguments.dtype == "bfloat16" else 4)
    print(f"{'logits of one rank':>40}: {own / 2**20:7.0f} MiB")
    print(f"{'ratio':>40}: {peaks['parallel'] / peaks['gathered']:7.3f}")


def _environment() -> dict[str, str]:
    root = Path(__file__).resolve().parents[2]
    paths = [str(root / "strategies"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def resident(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at the highest so far."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def run_rank(arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.nn import functional as F

    from autolaunch_strategies.tensor.views import MixedTensors, plain

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    target = torch.randint(0, arguments.vocabulary, (arguments.tokens,), generator=torch.Generator().manual_seed(0))

    def step(tokens: int) -> int:
        own = torch.zeros(tokens, arguments.vocabulary // mesh.size(), dtype=getattr(torch, arguments.dtype))
        logits = DTensor.from_local(own.requires_grad_(), mesh, [Shard(1)])
        before = resident("VmRSS")
        with MixedTensors(mesh):
            loss = F.cross_entropy(logits if arguments.way == "parallel" else plain(logits), target[:tokens])
            loss.backward()
        return before

    step(8)  # what libraries allocate once is not the loss's
    before = step(arguments.tokens)
    rise = torch.tensor(resident("VmHWM") - before)
    dist.all_reduce(rise, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(int(rise), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
