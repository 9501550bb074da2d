"""Step time of a pipeline under lightning's Trainer, beside a script written with torch.distributed.pipelining.

    python tests/benchmarks/pp_step_time.py [--ranks 2 4] [--schedules exact gpipe 1f1b interleaved_1f1b] [--rounds 14]

The script by hand builds a `PipelineStage` of every part of the Llama of `model=llama` and runs torch's schedule of the
same name; ours is a plain LightningModule with the whole model. Same weights, cuts, schedule, microbatches and
optimizer. In one set of processes both take turns, so that the machine's drift hits both. Printed are the medians of
the ratio of neighbouring turns: of the time that passes, and of the processor time of all ranks together, which tells
more where other programs run; and the ratio of the fastest turns. Losses of both are compared in every turn.
"""

from __future__ import annotations

import argparse
import cProfile
import logging
import os
import pstats
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

STEPS_PER_TURN = 1
TURNS_TO_WARM_UP = 2
LEARNING_RATE = 1e-4
SIZES = {
    "size": "debug",
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_layers": 8,
    "num_heads": 6,
    "num_kv_heads": 6,
    "vocab_size": 1024,
}
TINY = {**SIZES, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "num_kv_heads": 2, "vocab_size": 64}
SCHEDULES = ("exact", "gpipe", "1f1b", "interleaved_1f1b")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES)
    parser.add_argument("--rounds", type=int, default=14, help=f"turns of each; {TURNS_TO_WARM_UP} are warm-up")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="tokens of each of the two samples of a microbatch")
    parser.add_argument("--tiny", action="store_true", help="hardly any arithmetic: what a step costs by itself")
    parser.add_argument("--profile", action="store_true", help="print where ranks spend Python's time in our steps")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(arguments)
        return
    titles = ("by hand", "ours", "ratio", "fastest", "processor")
    print(f"{'ranks':>5} {'schedule':>17}", *(f"{title:>10}" for title in titles), flush=True)
    for ranks in arguments.ranks:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
        subprocess.run([*command, __file__, *sys.argv[1:]], check=True, env=_environment())


def _environment() -> dict[str, str]:
    root = Path(__file__).resolve().parents[2]
    paths = [str(root / "launcher"), str(root / "strategies"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def run_rank(arguments: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    for schedule in arguments.schedules:
        turns = measure(schedule, arguments)
        if os.environ["RANK"] == "0":
            by_hand, ours, ratio, fastest, processor = turns
            print(
                f"{os.environ['WORLD_SIZE']:>5} {schedule:>17} {by_hand:>8.3f} s {ours:>8.3f} s {ratio:>10.3f} "
                f"{fastest:>10.3f} {processor:>10.3f}",
                flush=True,
            )
    sys.stdout.flush()
    os._exit(0)


def measure(schedule: str, arguments: argparse.Namespace) -> tuple[float, float, float, float, float]:
    """Medians of seconds per step by hand and of ours, and three ratios: median, fastest, of processor time."""
    by_hand, ours = take_turns(schedule, arguments)
    ratios = [
        statistics.median(second[kind] / first[kind] for first, second in zip(by_hand, ours, strict=True))
        for kind in (0, 1)
    ]
    first, second = (statistics.median(wall for wall, _ in turn) / STEPS_PER_TURN for turn in (by_hand, ours))
    fastest = min(ours)[0] / min(by_hand)[0]
    return first, second, ratios[0], fastest, ratios[1]


def take_turns(schedule: str, arguments: argparse.Namespace) -> tuple[list[tuple[float, float]], ...]:
    """Of each turn by hand, and of each of ours: seconds, and processor seconds of all ranks."""
    import lightning.pytorch as pl
    import torch
    import torch.distributed as dist
    from torch.nn import functional as F

    from autolaunch_strategies import MeshStrategy

    ranks, microbatches = int(os.environ["WORLD_SIZE"]), arguments.microbatches
    sizes = TINY if arguments.tiny else SIZES
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, sizes["vocab_size"], (2 * microbatches, arguments.length + 1), generator=generator)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = _model(sizes)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self.model(batch[:, :-1])
            return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)

    class TakeTurns(pl.Callback):
        """Runs the loop by hand before every turn of ours."""

        def __init__(self) -> None:
            self.times: dict[str, list[tuple[float, float]]] = {"by hand": [], "ours": []}
            self.loop: ByHand | None = None
            self.profile = cProfile.Profile()

        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if args[2] % STEPS_PER_TURN == 0:
                self.loop = self.loop or ByHand(schedule, microbatches, sizes, tokens)
                self._begin()
                self.loop.steps(STEPS_PER_TURN)
                self._end("by hand")
                self._begin()
                if arguments.profile and len(self.times["by hand"]) > TURNS_TO_WARM_UP:
                    self.profile.enable()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.profile.disable()
            if (batch_idx + 1) % STEPS_PER_TURN:
                return
            self._end("ours")
            assert self.loop is not None
            loss = float(outputs["loss"])
            assert abs(loss - self.loop.loss()) < 1e-4 * abs(loss), (loss, self.loop.loss())

        def _begin(self) -> None:
            dist.barrier()
            self.begin = time.perf_counter(), time.process_time()

        def _end(self, name: str) -> None:
            wall, own = time.perf_counter() - self.begin[0], time.process_time() - self.begin[1]
            both = torch.tensor([own, 0.0])
            both[1] = wall
            summed = both.clone()
            dist.all_reduce(summed)
            dist.all_reduce(both, dist.ReduceOp.MAX)
            self.times[name].append((float(both[1]), float(summed[0])))

    pl.seed_everything(0, verbose=False)
    turns = TakeTurns()
    pp = {"loss": "exact" if schedule == "exact" else "microbatch", "microbatches": microbatches}
    pp["schedule"] = "gpipe" if schedule == "exact" else schedule
    trainer = pl.Trainer(
        strategy=MeshStrategy(mesh=f"1x1x{ranks}", pp=pp),
        accelerator="cpu",
        max_steps=arguments.rounds * STEPS_PER_TURN,
        callbacks=[turns],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = torch.utils.data.DataLoader([tokens] * (arguments.rounds * STEPS_PER_TURN), batch_size=None)
    trainer.fit(Module(), batches)
    for rank in range(ranks if arguments.profile else 0):
        dist.barrier()
        if dist.get_rank() == rank:
            print(f"--- rank {rank}", flush=True)
            pstats.Stats(turns.profile).sort_stats("cumulative").print_stats(400)
            pstats.Stats(turns.profile).sort_stats("tottime").print_stats(40)
    return tuple(turns.times[name][TURNS_TO_WARM_UP:] for name in ("by hand", "ours"))


def _model(sizes: dict[str, Any]) -> Any:
    import torch

    from autolaunch.models.llama import Llama
    from autolaunch.models.llama_config import llama_config

    torch.manual_seed(0)
    return Llama(llama_config(sizes))


class ByHand:
    """As torch's tutorial of pipelining does it: parts that a person wrote, and torch's schedule."""

    def __init__(self, schedule: str, microbatches: int, sizes: dict[str, Any], tokens: Any) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
        from torch.nn import functional as F

        ranks, rank = dist.get_world_size(), dist.get_rank()
        self.tokens, self.is_first, self.is_last = tokens, rank == 0, rank == ranks - 1
        model, count = _model(sizes), ranks * (2 if schedule == "interleaved_1f1b" else 1)
        self.parts = [_part(model, index, count) for index in range(count) if index % ranks == rank]
        stages = [
            PipelineStage(part, index, count, torch.device("cpu"))
            for part, index in zip(self.parts, range(rank, count, ranks), strict=True)
        ]

        def loss(logits: Any, target: Any) -> Any:
            return F.cross_entropy(logits.flatten(0, 1), target.flatten())

        kinds: dict[str, Any] = {"1f1b": Schedule1F1B, "interleaved_1f1b": ScheduleInterleaved1F1B}
        kind = kinds.get(schedule, ScheduleGPipe)
        self.schedule = kind(stages if len(stages) > 1 else stages[0], microbatches, loss_fn=loss)
        parameters = [parameter for part in self.parts for parameter in part.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)  # as ours
        self.losses: list[Any] = []

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.losses = []
            given = (self.tokens[:, :-1],) if self.is_first else ()
            if self.is_last:
                self.schedule.step(*given, target=self.tokens[:, 1:], losses=self.losses)
            else:
                self.schedule.step(*given)
            self.optimizer.step()

    def loss(self) -> float:
        """Of the last step, on every rank."""
        import torch
        import torch.distributed as dist

        loss = torch.stack(self.losses).mean() if self.is_last else torch.zeros(())
        dist.all_reduce(loss)
        return float(loss)


def _part(model: Any, index: int, count: int) -> Any:
    import torch
    from torch import nn

    layers = SIZES["num_layers"] // count

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = model.model.embed_tokens if index == 0 else None
            self.layers = model.model.layers[index * layers : (index + 1) * layers]
            self.norm = model.model.norm if index == count - 1 else None
            self.lm_head = model.lm_head if index == count - 1 else None
            self.rotary_emb = model.model.rotary_emb

        def forward(self, x: Any) -> Any:
            cos, sin = self.rotary_emb(torch.arange(x.shape[1]).unsqueeze(0), torch.float32)
            if self.embed_tokens is not None:
                x = self.embed_tokens(x)
            for layer in self.layers:
                x = layer(x, cos, sin)
            return x if self.lm_head is None else self.lm_head(self.norm(x))

    return Part()


if __name__ == "__main__":
    main()
