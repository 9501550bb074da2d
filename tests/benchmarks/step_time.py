"""Step time of MeshStrategy under lightning's Trainer, beside a hand-written PyTorch loop with the same model.

    python tests/benchmarks/step_time.py [--ranks 1 2] [--rounds 12]

In one set of processes both take turns, five steps each, so that the machine's drift hits both. Printed is the median
of the ratio of neighbouring turns. The hand-written loop uses DistributedDataParallel for level 0 and `fully_shard` on
every block and the root for level 3; on one rank it uses neither.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

STEPS_PER_TURN = 5
TURNS_TO_WARM_UP = 2
BATCH, LENGTH = 16, 256
SIZES: dict[str, Any] = {"size": "debug"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=12, help="turns of each; the first two are warm-up")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(arguments.rounds)
        return
    print(f"{'ranks':>5} {'level':>5} {'by hand':>10} {'MeshStrategy':>13} {'ratio':>7}", flush=True)
    for ranks in arguments.ranks:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
        subprocess.run([*command, __file__, "--rounds", str(arguments.rounds)], check=True, env=_environment())


def _environment() -> dict[str, str]:
    root = Path(__file__).resolve().parents[2]
    paths = [str(root / "launcher"), str(root / "strategies"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def run_rank(rounds: int) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    world_size = int(os.environ["WORLD_SIZE"])
    for level in (3,) if world_size == 1 else (0, 3):
        by_hand, ours, ratio = measure(world_size, level, rounds)
        if os.environ["RANK"] == "0":
            shown = "-" if world_size == 1 else str(level)
            print(f"{world_size:>5} {shown:>5} {by_hand:>8.3f} s {ours:>11.3f} s {ratio:>7.3f}", flush=True)
    sys.stdout.flush()
    os._exit(0)


def measure(world_size: int, level: int, rounds: int) -> tuple[float, float, float]:
    """(seconds per step by hand, seconds per step with MeshStrategy, median ratio of neighbouring turns)."""
    by_hand, ours = ([wall for wall, _ in turns] for turns in take_turns(world_size, level, rounds))
    ratio = statistics.median(b / a for a, b in zip(by_hand, ours, strict=True))
    return statistics.median(by_hand), statistics.median(ours), ratio


def take_turns(world_size: int, level: int, rounds: int) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Of each turn by hand, and of each of ours: seconds per step, and processor seconds of this rank."""
    import lightning.pytorch as pl
    import torch
    from torch.nn import functional as F

    from autolaunch.models.llama import Llama
    from autolaunch.models.llama_config import llama_config
    from autolaunch_strategies import MeshStrategy

    tokens = torch.randint(0, 256, (BATCH // world_size, LENGTH + 1), generator=torch.Generator().manual_seed(0))

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Llama(llama_config(SIZES))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self.model(batch[:, :-1])
            return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    class TakeTurns(pl.Callback):
        def __init__(self) -> None:
            self.by_hand: list[tuple[float, float]] = []
            self.ours: list[tuple[float, float]] = []
            self.loop: HandWritten | None = None

        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if args[2] % STEPS_PER_TURN == 0:
                self.loop = self.loop or HandWritten(world_size, level, tokens)
                self._begin()
                self.loop.steps(STEPS_PER_TURN)
                self._end(self.by_hand)
                self._begin()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if (batch_idx + 1) % STEPS_PER_TURN == 0:
                self._end(self.ours)

        def _begin(self) -> None:
            self.begin = time.perf_counter(), time.process_time()

        def _end(self, turns: list[tuple[float, float]]) -> None:
            now = time.perf_counter(), time.process_time()
            turns.append(((now[0] - self.begin[0]) / STEPS_PER_TURN, (now[1] - self.begin[1]) / STEPS_PER_TURN))

    turns = TakeTurns()
    trainer = pl.Trainer(
        strategy=MeshStrategy(mesh=str(world_size), dp=level),
        accelerator="cpu",
        max_steps=rounds * STEPS_PER_TURN,
        gradient_clip_val=1.0,
        callbacks=[turns],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = torch.utils.data.DataLoader([tokens] * (rounds * STEPS_PER_TURN), batch_size=None)
    trainer.fit(Module(), batches)
    return turns.by_hand[TURNS_TO_WARM_UP:], turns.ours[TURNS_TO_WARM_UP:]


class HandWritten:
    """The loop that a person writes: model, DDP or FSDP2, AdamW, clipping."""

    def __init__(self, world_size: int, level: int, tokens: Any) -> None:
        import torch
        from torch.distributed.fsdp import fully_shard
        from torch.nn.parallel import DistributedDataParallel

        from autolaunch.models.llama import Llama
        from autolaunch.models.llama_config import llama_config

        torch.manual_seed(0)
        self.tokens = tokens
        self.model: Any = Llama(llama_config(SIZES))
        if world_size > 1 and level == 0:
            self.model = DistributedDataParallel(self.model)
        elif world_size > 1:
            for layer in self.model.model.layers:
                fully_shard(layer)
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)  # as ours

    def steps(self, count: int) -> None:
        import torch
        from torch.nn import functional as F

        for _ in range(count):
            logits = self.model(self.tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()


if __name__ == "__main__":
    main()
