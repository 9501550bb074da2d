"""Processor time per block under mp, with tensors so small that it is the host's: what a GPU would wait for.

    python tests/benchmarks/host_time.py [--ranks 2] [--rounds 12] [--plan seq_parallel] [--backend inductor]

A step of eight tiny llama blocks (forward, backward, AdamW) in four ways, which take turns in one set of processes, so
that the machine's drift hits all: torch's own styles (`mp_step_time`), ours, ours with compile=true, and plain local
tensors with two all-reduces per block, as Megatron does it, which is what can be reached. Printed are medians over
turns, per block, and what each is of torch's styles. Before that, losses are compared.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import mp_step_time
from mp_step_time import ByHand, Loop, Ours

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
    parser.add_argument("--plan", default="seq_parallel", choices=("seq_parallel", "tensor_parallel"))
    parser.add_argument("--backend", default="inductor", help="of torch.compile; eager runs the graphs as they are")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(arguments)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}"]
    subprocess.run([*command, __file__, *sys.argv[1:]], check=True, env=mp_step_time._environment())


def run_rank(arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from autolaunch_strategies.config import parallel_config
    from autolaunch_strategies.mesh.rank_mesh import RankMesh

    warnings.filterwarnings("ignore")
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
