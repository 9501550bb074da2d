"""Processor time per block, with tensors so small that it is the host's: what a GPU would wait for.

    python tests/benchmarks/host_time.py [dp0 dp3 1f1b exact ring ...] [--ranks 2] [--rounds 12] [--calls]
        [--backend inductor]

A step of tiny llama blocks: forward, backward, AdamW. Ours under Lightning's Trainer and the loops by hand of
`step_time` (dp0, dp3), `pp_step_time` (1f1b, exact) and `cp_step_time` (ring) take turns in one set of processes, so
that the machine's drift hits both. Each is run at two sizes, with 8 and with 24 blocks (pp: with 8 blocks, and 4 and
12 microbatches), since what a step costs once, Lightning's loop among it, is no cost of a block: from the medians at
both sizes follow what one more block costs for a microbatch on one rank, and what a step costs once on each rank.
Counted is the time of the thread that runs Python. What gloo's own threads do, no GPU waits for. The loops by hand take
the fused AdamW, as ours do. With --calls it is the functions that Python calls and not time: the same on a machine that
others load.

Of mp (seq_parallel, tensor_parallel), without a Trainer: torch's own styles (`mp_step_time`), ours, ours with
compile=true, and plain local tensors with two all-reduces per block, as Megatron does it, which is what can be reached;
and what each is of torch's styles. Losses are compared everywhere.
"""

from __future__ import annotations

import argparse
import functools
import json
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
BLOCKS, MICROBATCHES, SMALL_AND_LARGE = 8, 4, (1, 3)
STEPS_PER_TURN, TURNS_TO_WARM_UP = 3, 2
SIZES = {
    "size": "debug",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 256,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12, help="turns of each; the first are warm-up")
    parser.add_argument("what", nargs="*", metavar="WHAT", help=f"{', '.join((*BESIDE, *PLANS))} (default: all)")
    parser.add_argument("--backend", default="inductor", help="of torch.compile; eager runs the graphs as they are")
    parser.add_argument("--calls", action="store_true", help="count what Python calls, not time")
    parser.add_argument("--times", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.what) - {*BESIDE, *PLANS}:
        parser.error(f"unknown: {', '.join(unknown)}")
    if "RANK" in os.environ:
        warnings.filterwarnings("ignore")
        logging.disable(logging.WARNING)
        run_rank(arguments.what[0], arguments)
        return
    unit, scale, digits = ("calls", 1.0, 0) if arguments.calls else ("ms", 1e3, 3)
    for what in arguments.what or (*BESIDE, *PLANS):
        small, large = (_medians(what, times, arguments) for times in SMALL_AND_LARGE)
        print(f"{what} on {arguments.ranks} ranks", flush=True)
        ratio_to = 0.0
        for name in small:
            runs = [_runs(what, times, arguments.ranks) for times in SMALL_AND_LARGE]
            of_block = (large[name] - small[name]) / (runs[1] - runs[0]) * scale
            once = small[name] * scale / arguments.ranks - of_block * runs[0] / arguments.ranks
            ratio_to = ratio_to or of_block
            print(
                f"    {name:16} {of_block:9.{digits}f} {unit} per block   {of_block / ratio_to:5.2f}"
                f"   and once a step {once:9.{digits}f} {unit}",
                flush=True,
            )


def _medians(what: str, times: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Of each way, by its name: the median of what a step costs all ranks together."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}"]
    options = [f"--rounds={arguments.rounds}", f"--backend={arguments.backend}", f"--times={times}"]
    options += ["--calls"] if arguments.calls else []
    ended = subprocess.run(
        [*command, __file__, what, *options], check=True, env=cp_step_time._environment(), stdout=subprocess.PIPE
    )
    medians: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return medians


def _runs(what: str, times: int, ranks: int) -> int:
    """How often a block runs in a step, in all ranks together."""
    return BLOCKS * times * (MICROBATCHES if what in pp_step_time.SCHEDULES else ranks)


def run_rank(what: str, arguments: argparse.Namespace) -> None:
    import torch.distributed as dist

    clock: Any = CallClock() if arguments.calls else ThreadClock
    if what in BESIDE:
        step_time.time = pp_step_time.time = cp_step_time.time = clock
        by_hand, ours = beside_a_loop(what, arguments)
        seconds = {"by hand": by_hand, "ours": ours}
    else:
        seconds = run_plan(what, arguments, clock)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    if dist.get_rank() == 0:
        print(json.dumps(medians))
    sys.stdout.flush()
    os._exit(0)


def beside_a_loop(what: str, arguments: argparse.Namespace) -> list[list[float]]:
    """dp, pp and cp beside the loops by hand of their own benchmarks: costs of a step in each turn, of all ranks."""
    ranks, times = int(os.environ["WORLD_SIZE"]), arguments.times
    each = argparse.Namespace(
        rounds=arguments.rounds, tiny=True, length=32, steps=STEPS_PER_TURN, profile=False, microbatches=MICROBATCHES
    )
    if what.startswith("dp"):
        step_time.SIZES, step_time.BATCH, step_time.LENGTH = {**SIZES, "num_layers": BLOCKS * times}, 2 * ranks, 32
        turns = step_time.take_turns(ranks, int(what[2:]), arguments.rounds)
        return [[own * ranks for _, own in part] for part in turns]
    if what == "ring":
        cp_step_time.TINY = {**cp_step_time.TINY, "num_layers": BLOCKS * times}
        return [[own for _, own in part] for part in cp_step_time.take_turns(what, each)]
    each.microbatches *= times
    pp_step_time.TINY = {**pp_step_time.TINY, "num_layers": BLOCKS}
    return [[own / pp_step_time.STEPS_PER_TURN for _, own in part] for part in pp_step_time.take_turns(what, each)]


class ThreadClock:
    """In the place of `time`: that of the processor is the time of this thread."""

    perf_counter = staticmethod(time.perf_counter)
    process_time = staticmethod(time.thread_time)


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


def run_plan(plan: str, arguments: argparse.Namespace, clock: Any) -> dict[str, list[float]]:
    """mp, in four ways: what a step costs in each turn, of all ranks."""
    import torch
    import torch.distributed as dist

    from autolaunch_strategies.config import parallel_config
    from autolaunch_strategies.mesh.rank_mesh import RankMesh

    torch.set_num_threads(1)
    torch.compile = functools.partial(torch.compile, backend=arguments.backend)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    mp_step_time.SIZES.clear()
    mp_step_time.SIZES.update(SIZES, num_layers=BLOCKS * arguments.times)
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
    costs: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(arguments.rounds):
        for name, loop in loops.items():
            dist.barrier()
            begin = clock.process_time()
            loop.steps(STEPS_PER_TURN)
            own = torch.tensor(float(clock.process_time() - begin) / STEPS_PER_TURN, dtype=torch.float64)
            dist.all_reduce(own)
            costs[name].append(float(own))
    return {name: values[TURNS_TO_WARM_UP:] for name, values in costs.items()}


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
