"""Which share of a step's communication is hidden behind computing, by the profiler, on several GPUs.

    python tests/benchmarks/gpu_overlap.py [--gpus 2] [--size 1b] [--length 4096] [--meshes 2 1x2 1x1x2 ...]

Every mesh trains llama in bf16 for a few steps; three of them are profiled on each rank. Kernels of NCCL are
communication, all other kernels are computing. Printed for rank 0: seconds of a step, of communication in it, which
share of that passes while something is computed, and which share of the step nothing is computed. `--cpu` runs it
over gloo, whose transfers are then the communication, to see that it works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MESHES = {
    "2": {"dp": 3}, "2-ddp": {"dp": 0}, "1x2": {"mp": "seq_parallel"}, "1x1x2": {"pp": "1f1b"}, "cp2": {"cp": "ring"},
    "4": {"dp": 3}, "2x2": {"dp": 3, "mp": "seq_parallel"}, "2x1x2": {"dp": 3, "pp": "1f1b"}, "1x1x4": {"pp": "1f1b"},
    "8": {"dp": 3}, "2x2x2": {"dp": 3, "mp": "seq_parallel", "pp": "1f1b"},
}  # fmt: skip
"""Name, which begins with the mesh, and options of the strategy."""
SEQUENCES, MICROBATCHES, WARM_UP, STEPS = 8, 8, 4, 3

Spans = list[tuple[float, float]]
"""(begin, end) in microseconds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--size", default="1b")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--meshes", nargs="+", default=list(MESHES), choices=MESHES, metavar="MESH")
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(arguments)
        return
    root = Path(__file__).resolve().parents[2]
    paths = [str(root / "launcher"), str(root / "strategies"), str(root), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    titles = ("step", "transfers", "hidden", "idle")
    print(*(f"{title:>10}" for title in titles), " mesh", flush=True)
    for name in arguments.meshes:
        ranks = size_of(name)
        if ranks > arguments.gpus:
            continue
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
        subprocess.run([*command, __file__, *sys.argv[1:]], check=True, env={**env, "OVERLAP_MESH": name})


def size_of(name: str) -> int:
    """How many ranks a mesh has."""
    ranks = 1
    for size in name.split("-")[0].removeprefix("cp").split("x"):
        ranks *= int(size)
    return ranks


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """The same time without overlaps, in order."""
    joined: Spans = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)


def in_both(one: Spans, other: Spans) -> float:
    """The time that is in both of two unions."""
    return length(one) + length(other) - length(union([*one, *other]))


def spans_of(events: Iterable[Any], on_cpu: bool) -> tuple[Spans, Spans]:
    """When something was transferred, and when something was computed, from the events of a profile."""
    from torch.autograd import DeviceType

    transfers: Spans = []
    computing: Spans = []
    for event in events:
        is_transfer = ("gloo:" if on_cpu else "nccl") in event.name.lower()
        if on_cpu:
            if not is_transfer and not event.name.startswith("aten::"):
                continue
        elif event.device_type != DeviceType.CUDA or event.name.lower().startswith(("memcpy", "memset")):
            continue
        span = event.time_range.start, event.time_range.end
        (transfers if is_transfer else computing).append(span)
    return union(transfers), union(computing)


def run_rank(arguments: argparse.Namespace) -> None:
    import lightning.pytorch as pl
    import torch
    from torch.nn import functional as F
    from torch.profiler import ProfilerActivity, profile

    from autolaunch.models.llama import Llama
    from autolaunch.models.llama_config import llama_config
    from autolaunch_strategies import MeshStrategy

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    name = os.environ["OVERLAP_MESH"]
    sizes = {"size": arguments.size, "max_seq_len": arguments.length}
    config = llama_config(sizes)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (SEQUENCES, arguments.length + 1), generator=generator)
    if not arguments.cpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

    class Module(pl.LightningModule):
        def configure_model(self) -> None:
            if not hasattr(self, "model"):
                self.model = Llama(config)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-5)

    class Profiles(pl.Callback):
        def __init__(self) -> None:
            activities = [ProfilerActivity.CPU] if arguments.cpu else [ProfilerActivity.CUDA]
            self.profile = profile(activities=activities)
            self.seconds = 0.0

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx + 1 not in (WARM_UP, WARM_UP + STEPS):
                return
            if not arguments.cpu:
                torch.cuda.synchronize()
            if batch_idx + 1 == WARM_UP:
                self.profile.start()
                self.seconds = -time.perf_counter()
            else:
                self.seconds += time.perf_counter()
                self.profile.stop()

    options = dict(MESHES[name])
    if "pp" in options:
        options["pp"] = {"schedule": options["pp"], "loss": "microbatch", "microbatches": MICROBATCHES}
    mesh = name.split("-")[0]
    profiles, steps = Profiles(), WARM_UP + STEPS
    trainer = pl.Trainer(
        strategy=MeshStrategy(mesh="1x1x1x2" if mesh == "cp2" else mesh, **options),
        accelerator="cpu" if arguments.cpu else "cuda",
        precision="32-true" if arguments.cpu else "bf16-mixed",
        max_steps=steps,
        callbacks=[profiles],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader([tokens] * steps, batch_size=None))
    if os.environ["RANK"] == "0":
        transfers, computing = spans_of(profiles.profile.events() or [], arguments.cpu)
        span, passed = profiles.seconds / STEPS, length(transfers) / STEPS / 1e6
        hidden = in_both(transfers, computing) / length(transfers) if transfers else 0.0
        idle = 1 - length(computing) / STEPS / 1e6 / span
        print(f"{span:>9.4f}s {passed:>9.4f}s {hidden:>10.1%} {idle:>10.1%}  {name}", flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
