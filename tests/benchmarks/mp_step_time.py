"""Step time of model=llama with mp=seq_parallel, beside the same model parallelised by hand with torch's own styles.

    python tests/benchmarks/mp_step_time.py [--ranks 2] [--rounds 12] [--plan seq_parallel]

By hand means what torchtitan does: `parallelize_module` with column-wise and row-wise layers on plain local tensors,
sequence parallel norms, and `loss_parallel`. In one set of processes both take turns, so that the machine's drift hits
both. Printed is the median of the ratio of neighbouring turns. Before that, losses and gradients of both are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import os
import pstats
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

STEPS_PER_TURN = 2
BATCH, LENGTH = 2, 128
SIZES = {
    "size": "debug",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_layers": 4,
    "num_heads": 8,
    "num_kv_heads": 4,
    "vocab_size": 4096,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12, help="turns of each; the first two are warm-up")
    parser.add_argument("--plan", default="seq_parallel", choices=("seq_parallel", "tensor_parallel"))
    parser.add_argument("--profile", action="store_true", help="print where rank 0 spends Python's time in our steps")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(arguments)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}"]
    subprocess.run([*command, __file__, *sys.argv[1:]], check=True, env=_environment())


def _environment() -> dict[str, str]:
    root = Path(__file__).resolve().parents[2]
    paths = [str(root / "launcher"), str(root / "strategies"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def run_rank(arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from autolaunch_strategies.config import parallel_config
    from autolaunch_strategies.mesh.rank_mesh import RankMesh

    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    config = parallel_config({"mp": ranks}, mp=arguments.plan)
    mesh = RankMesh.build(config.mesh, 1, 1, "cpu")
    tokens = torch.randint(0, SIZES["vocab_size"], (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    by_hand = ByHand(mesh.sub_mesh("mp"), tokens, arguments.plan)
    ours = Ours(mesh, config, tokens)
    for loop in (by_hand, ours):
        loop.steps(1)
    assert abs(by_hand.loss - ours.loss) < 1e-4 * by_hand.loss, (by_hand.loss, ours.loss)
    assert abs(by_hand.norm() - ours.norm()) < 1e-3 * by_hand.norm(), (by_hand.norm(), ours.norm())
    times: dict[str, list[float]] = {"by hand": [], "ours": []}
    for _ in range(arguments.rounds):
        for name, loop in (("by hand", by_hand), ("ours", ours)):
            dist.barrier()
            begin = time.perf_counter()
            loop.steps(STEPS_PER_TURN)
            times[name].append((time.perf_counter() - begin) / STEPS_PER_TURN)
    if arguments.profile:
        profile = cProfile.Profile()
        profile.runcall(ours.steps, 4)
        if dist.get_rank() == 0:
            pstats.Stats(profile).sort_stats("cumulative").print_stats(60)
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    if dist.get_rank() == 0:
        first, second = times["by hand"][2:], times["ours"][2:]
        ratio = statistics.median(b / a for a, b in zip(first, second, strict=True))
        print(f"{arguments.plan} on {ranks} ranks: by hand {statistics.median(first):.3f} s, ", end="")
        print(f"ours {statistics.median(second):.3f} s, ratio {ratio:.3f}", flush=True)
    sys.stdout.flush()
    os._exit(0)


class Loop:
    """Forward, loss, backward, step; equal first weights."""

    model: Any
    tokens: Any
    loss: float

    def begin(self, learning_rate: float = 1e-4) -> None:
        import torch

        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate)

    def running(self) -> Any:
        return contextlib.nullcontext()

    def steps(self, count: int) -> None:
        from torch.nn import functional as F

        for _ in range(count):
            self.optimizer.zero_grad()
            with self.running():
                logits = self.model(self.tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())
                loss.backward()
            self.finish()
            self.optimizer.step()
            self.loss = float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss)

    def finish(self) -> None:
        """After each backward pass."""

    def norm(self) -> float:
        from autolaunch_strategies.data_parallel.gradients import gradient_norm

        return float(gradient_norm(self.model.parameters()))


def _model() -> Any:
    import torch

    from autolaunch.models.llama import Llama
    from autolaunch.models.llama_config import llama_config

    torch.manual_seed(0)
    return Llama(llama_config(SIZES))


class ByHand(Loop):
    """As torchtitan writes it."""

    def __init__(self, mesh: Any, tokens: Any, plan: str) -> None:
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            RowwiseParallel,
            SequenceParallel,
            loss_parallel,
            parallelize_module,
        )

        self.tokens, self.model, self.running = tokens, _model(), loss_parallel
        whole, cut = Replicate(), Shard(1) if plan == "seq_parallel" else Replicate()
        styles: dict[str, Any] = {
            "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=cut),
            "lm_head": ColwiseParallel(input_layouts=cut, output_layouts=Shard(-1), use_local_output=False),
        }
        if plan == "seq_parallel":
            styles["model.norm"] = SequenceParallel(use_local_output=True)
        parallelize_module(self.model, mesh, styles)
        for layer in self.model.model.layers:
            inner: dict[str, Any] = {
                "self_attn.q_proj": ColwiseParallel(),
                "self_attn.k_proj": ColwiseParallel(),
                "self_attn.v_proj": ColwiseParallel(),
                "self_attn.o_proj": RowwiseParallel(output_layouts=cut),
                "mlp.gate_proj": ColwiseParallel(),
                "mlp.up_proj": ColwiseParallel(),
                "mlp.down_proj": RowwiseParallel(output_layouts=cut),
            }
            if plan == "seq_parallel":
                inner |= {
                    "input_layernorm": SequenceParallel(use_local_output=True),
                    "post_attention_layernorm": SequenceParallel(use_local_output=True),
                    "self_attn": PrepareModuleInput(
                        input_layouts=(cut, *[None] * 3), desired_input_layouts=(whole, *[None] * 3)
                    ),
                    "mlp": PrepareModuleInput(input_layouts=(cut,), desired_input_layouts=(whole,)),
                }
            parallelize_module(layer, mesh, inner)
        self.begin()


class Ours(Loop):
    """As the strategy does it."""

    def __init__(self, mesh: Any, config: Any, tokens: Any) -> None:
        import torch

        from autolaunch.config.schema import LLAMA_PLANS
        from autolaunch_strategies.apply.order import apply_parallelism
        from autolaunch_strategies.training.optimizers import adapt_optimizer, prefer_fused

        self.tokens, self.model = tokens, _model()
        applied = apply_parallelism(self.model, config, mesh, torch.device("cpu"), own_plan=LLAMA_PLANS[config.mp.name])
        self.running = applied.model_parallel.running
        self.finish = applied.data_parallel.finish_backward
        self.begin()
        prefer_fused(self.optimizer)
        adapt_optimizer(self.optimizer)


if __name__ == "__main__":
    main()
