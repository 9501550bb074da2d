"""Processor time per block, with tensors so small that it is the host's: what a GPU would wait for.

    python tests/benchmarks/host_time.py [dp0 dp3 1f1b exact ring ...] [--ranks 2] [--rounds 12] [--calls]
        [--backend inductor]

A step of eight tiny llama blocks: forward, backward, AdamW. Ours under Lightning's Trainer and the loops by hand of
`step_time` (dp0, dp3), `pp_step_time` (1f1b, exact) and `cp_step_time` (ring) take turns in one set of processes, so
that the machine's drift hits both. Printed are the medians of processor ms of all ranks for each block and microbatch
that they run, and of the ratio of neighbouring turns. The loops by hand take the fused AdamW, as ours do. With --calls
it is the functions that Python calls in a step, of all ranks, and not time: the same on a machine that others load.
Lightning's own loop is some 1,500 of them on each rank, whatever the model (1,000 with pp, where a turn is one step).

Of mp (seq_parallel, tensor_parallel), without a Trainer: torch's own styles (`mp_step_time`), ours, ours with
compile=true, and plain local tensors with two all-reduces per block, as Megatron does it, which is what can be reached;
and what each is of torch's styles. Losses are compared everywhere.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import cp_step_time
import mp_step_time
import pp_step_time
import step_time
from mp_step_time import ByHand, Loop, Ours

BESIDE, PLANS = ("dp0", "dp3", "1f1b", "exact", "ring"), ("seq_parallel", "tensor_parallel")
BLOCKS, STEPS_PER_TURN = 8, 3
SIZES = {
    "size": "debug",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_layers": BLOCKS,
    "num_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 256,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12, help="turns of each; the first two are warm-up")
    parser.add_argument("what", nargs="*", metavar="WHAT", help=f"{', '.join((*BESIDE, *PLANS))} (default: all)")
    parser.add_argument("--backend", default="inductor", help="of torch.compile; eager runs the graphs as they are")
    parser.add_argument("--calls", action="store_true", help="count what Python calls, of dp, pp and cp")
    arguments = parser.parse_args()
    if unknown := set(arguments.what) - {*BESIDE, *PLANS}:
        parser.error(f"unknown: {', '.join(unknown)}")
    if "RANK" in os.environ:
        warnings.filterwarnings("ignore")
        logging.disable(logging.WARNING)
        arguments.plan = arguments.what[0]
        (beside_a_loop if arguments.plan in BESIDE else run_plan)(arguments)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}"]
    options = [f"--rounds={arguments.rounds}", f"--ranks={arguments.ranks}", f"--backend={arguments.backend}"]
    options += ["--calls"] if arguments.calls else []
    for what in arguments.what or (*BESIDE, *PLANS):
        subprocess.run([*command, __file__, what, *options], check=True, env=cp_step_time._environment())


def beside_a_loop(arguments: argparse.Namespace) -> None:
    """dp, pp and cp beside the loops by hand of their own benchmarks."""
    what, ranks, microbatches = arguments.plan, int(os.environ["WORLD_SIZE"]), 1
    each = argparse.Namespace(rounds=arguments.rounds, tiny=True, length=32, steps=5, profile=False)
    if arguments.calls:
        step_time.time = pp_step_time.time = cp_step_time.time = CallClock()  # type: ignore[assignment]
    if what.startswith("dp"):
        step_time.SIZES, step_time.BATCH, step_time.LENGTH = SIZES, 2 * ranks, 32
        turns = step_time.take_turns(ranks, int(what[2:]), arguments.rounds)
        turns = tuple([(wall, processor * ranks) for wall, processor in part] for part in turns)
    elif what == "ring":
        cp_step_time.TINY = {**cp_step_time.TINY, "num_layers": BLOCKS}
        turns = cp_step_time.take_turns(what, each)
    else:
        each.microbatches = microbatches = 4
        turns = pp_step_time.take_turns(what, each)
    if os.environ["RANK"] == "0":
        runs = BLOCKS * microbatches * (1 if what in pp_step_time.SCHEDULES else ranks)
        scale, unit = (1, "calls") if arguments.calls else (1e3 / runs, "ms")
        by_hand, ours = ([processor * scale for _, processor in part] for part in turns)
        ratio = statistics.median(second / first for first, second in zip(by_hand, ours, strict=True))
        by_hand, ours = statistics.median(by_hand), statistics.median(ours)
        print(f"{what:16} by hand {by_hand:9.3f} {unit}   ours {ours:9.3f} {unit}   {ratio:5.2f}", flush=True)
    sys.stdout.flush()
    os._exit(0)


class CallClock:
    """In the place of `time`: every second look at the time of the processor says how much Python called meanwhile."""

    perf_counter = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self._count, self._counts = 0, False

    def process_time(self) -> int:
        sys.setprofile(None)
        self._counts = not self._counts
        if not self._counts:
            return self._count
        self._count = 0
        sys.setprofile(self._see)
        return 0

    def _see(self, frame: Any, event: str, what: Any) -> None:
        self._count += event in ("call", "c_call")


def run_plan(arguments: argparse.Namespace) -> None:
    """mp, in four ways."""
    import torch
    import torch.distributed as dist

    from autolaunch_strategies.config import parallel_config
    from autolaunch_strategies.mesh.rank_mesh import RankMesh

    torch.set_num_threads(1)
    torch.compile = functools.partial(torch.compile, backend=arguments.backend)
    dist.init_process_group("gloo")
    ranks, plan = dist.get_world_size(), arguments.plan
    mp_step_time.SIZES.clear()
    mp_step_time.SIZES.update(SIZES)
    tokens = torch.randint(0, SIZES["vocab_size"], (2, 33), generator=torch.Generator().manual_seed(0))
    configs = [parallel_config({"mp": ranks}, mp=plan, compile=compiled) for compiled in (False, True)]
    mesh = RankMesh.build(configs[0].mesh, 1, 1, "cpu")
    loops: dict[str, Loop] = {
        "torch's styles": ByHand(mesh.sub_mesh("mp"), tokens, plan),
        "ours": Ours(mesh, configs[0], tokens),
        "ours, compiled": Ours(mesh, configs[1], tokens),
        "local tensors": Local(mesh.group("mp"), tokens),
    }
    for loop in loops.values():
        loop.steps(2)
    losses = {name: loop.loss for name, loop in loops.items()}
    assert max(losses.values()) - min(losses.values()) < 1e-4 * max(losses.values()), losses
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(arguments.rounds):
        for name, loop in loops.items():
            dist.barrier()
            begin = time.process_time()
            loop.steps(STEPS_PER_TURN)
            seconds[name].append((time.process_time() - begin) / STEPS_PER_TURN / BLOCKS)
    if dist.get_rank() == 0:
        print(f"{plan} on {ranks} ranks, compiled by {arguments.backend}")
        first = statistics.median(seconds["torch's styles"][2:])
        for name, values in seconds.items():
            middle = statistics.median(values[2:])
            print(f"{name:16} {middle * 1e3:7.3f} ms per block   {middle / first:5.2f}", flush=True)
    sys.stdout.flush()
    os._exit(0)


class Local(Loop):
    """Every rank has plain parts of the matrices of blocks; embedding, norms and head are whole."""

    def __init__(self, group: Any, tokens: Any) -> None:
        import torch.distributed as dist
        from torch import nn

        from autolaunch_strategies.training.optimizers import prefer_fused

        self.tokens, self.model = tokens, mp_step_time._model()
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        for layer in self.model.model.layers:
            for part, columns, row in (
                (layer.self_attn, ("q_proj", "k_proj", "v_proj"), "o_proj"),
                (layer.mlp, ("gate_proj", "up_proj"), "down_proj"),
            ):
                for name in (*columns, row):
                    linear = getattr(part, name)
                    own = linear.weight.detach().chunk(ranks, dim=int(name == row))[rank]
                    linear.weight = nn.Parameter(own.clone().contiguous())
                part.register_forward_pre_hook(lambda _, args: (_entering(group).apply(args[0]), *args[1:]))
                part.register_forward_hook(lambda _, args, output: _leaving(group).apply(output))
        self.begin()
        prefer_fused(self.optimizer)  # as ours do


@functools.cache
def _entering(group: Any) -> Any:
    """As it is; gradients of all ranks are added up."""
    import torch
    import torch.distributed as dist

    class Entering(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, tensor: Any) -> Any:
            return tensor.view_as(tensor)

        @staticmethod
        def backward(context: Any, *gradients: Any) -> Any:
            total = gradients[0].contiguous()
            dist.all_reduce(total, group=group)
            return total

    return Entering


@functools.cache
def _leaving(group: Any) -> Any:
    """Added up over ranks; the gradient as it is."""
    import torch
    import torch.distributed as dist

    class Leaving(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, tensor: Any) -> Any:
            total = tensor.clone()
            dist.all_reduce(total, group=group)
            return total

        @staticmethod
        def backward(context: Any, *gradients: Any) -> Any:
            return gradients[0]

    return Leaving


if __name__ == "__main__":
    main()
