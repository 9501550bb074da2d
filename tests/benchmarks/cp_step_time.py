"""Step time of context parallelism under lightning's Trainer, beside a loop that divides sequences by hand.

    python tests/benchmarks/cp_step_time.py [--ranks 2] [--backends ring gather ulysses] [--rounds 14] [--tiny]

The loop by hand runs the Llama of `model=llama` on this rank's positions: tokens, positions and labels are cut by hand,
attention is replaced by what the backend's name says (ring: torch's own `_templated_ring_attention`, private to torch;
gather: keys and values gathered and the rows of each half of this rank's part attended to those before them; ulysses:
an all-to-all on either side), the loss is this rank's sum over the count of all ranks, and gradients are summed in one
message. Ours is a plain LightningModule that knows nothing of it. Same weights, data and optimizer, sharding level 0.

In one set of processes both take turns, so that the machine's drift hits both. Printed are the medians of the ratio of
neighbouring turns: of the time that passes, and of the processor time of all ranks together, which tells more where
other programs run; and the ratio of the fastest turns. `more` is what ours takes more per step, in the median, of the
time and of the processor time of one rank: with --tiny, where there is hardly any arithmetic, our fixed cost. Losses
of both are compared in every turn.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

TURNS_TO_WARM_UP = 3
LEARNING_RATE = 1e-4
SIZES = {
    "size": "debug",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 4,
    "vocab_size": 1024,
    "max_seq_len": 65536,
}
TINY = {**SIZES, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "num_kv_heads": 2, "vocab_size": 64}
BACKENDS = ("ring", "gather", "ulysses")
TESTS = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--rounds", type=int, default=14, help=f"turns of each; {TURNS_TO_WARM_UP} more are warm-up")
    parser.add_argument("--length", type=int, help="positions of the whole sequence (2048; 64 with --tiny)")
    parser.add_argument("--steps", type=int, help="steps per turn (1; 10 with --tiny)")
    parser.add_argument("--tiny", action="store_true", help="hardly any arithmetic: what a step costs by itself")
    parser.add_argument("--profile", action="store_true", help="print where rank 0 spends Python's time in our steps")
    arguments = parser.parse_args()
    arguments.length = arguments.length or (64 if arguments.tiny else 2048)
    arguments.steps = arguments.steps or (10 if arguments.tiny else 1)
    if "RANK" in os.environ:
        run_rank(arguments)
        return
    titles = ("by hand", "ours", "ratio", "fastest", "processor", "more", "(processor)")
    print(f"{'ranks':>5} {'backend':>8}", *(f"{title:>11}" for title in titles), flush=True)
    for ranks in arguments.ranks:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
        subprocess.run([*command, __file__, *sys.argv[1:]], check=True, env=_environment(), timeout=1800)


def _environment() -> dict[str, str]:
    root = TESTS.parent
    paths = [str(root / "launcher"), str(root / "strategies"), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def run_rank(arguments: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    for backend in arguments.backends:
        by_hand, ours, ratio, fastest, processor, more, more_work = measure(backend, arguments)
        if os.environ["RANK"] == "0":
            print(
                f"{os.environ['WORLD_SIZE']:>5} {backend:>8} {by_hand * 1e3:>8.1f} ms {ours * 1e3:>8.1f} ms "
                f"{ratio:>11.3f} {fastest:>11.3f} {processor:>11.3f} {more * 1e3:>8.1f} ms {more_work * 1e3:>8.1f} ms",
                flush=True,
            )
    sys.stdout.flush()
    os._exit(0)  # gloo aborts if groups outlive the process group


def measure(backend: str, arguments: argparse.Namespace) -> tuple[float, ...]:
    """Seconds per step by hand and of ours, three ratios (median, fastest, processor), and two differences."""
    by_hand, ours = take_turns(backend, arguments)
    pairs = list(zip(by_hand, ours, strict=True))
    ratio, processor = (statistics.median(second[kind] / first[kind] for first, second in pairs) for kind in (0, 1))
    more, more_work = (statistics.median(second[kind] - first[kind] for first, second in pairs) for kind in (0, 1))
    first, second = (statistics.median(wall for wall, _ in turn) for turn in (by_hand, ours))
    return first, second, ratio, min(ours)[0] / min(by_hand)[0], processor, more, more_work / dist.get_world_size()


def take_turns(backend: str, arguments: argparse.Namespace) -> tuple[list[tuple[float, float]], ...]:
    """Of each turn by hand, and of each of ours: seconds per step, and processor seconds of all ranks."""
    import lightning.pytorch as pl

    from autolaunch_strategies import MeshStrategy

    ranks, steps = int(os.environ["WORLD_SIZE"]), arguments.steps
    sizes = TINY if arguments.tiny else SIZES
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, sizes["vocab_size"], (1, arguments.length + 1), generator=generator)
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = _model(sizes)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self.model(batch["input_ids"])
            return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)

    class TakeTurns(pl.Callback):
        """Runs the loop by hand before every turn of ours."""

        def __init__(self) -> None:
            self.times: dict[str, list[tuple[float, float]]] = {"by hand": [], "ours": []}
            self.loop: ByHand | None = None
            self.profile = cProfile.Profile()

        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if args[2] % steps == 0:
                self.loop = self.loop or ByHand(backend, sizes, batch)
                self._begin()
                self.loop.steps(steps)
                self._end("by hand")
                self._begin()
                if arguments.profile and len(self.times["by hand"]) > TURNS_TO_WARM_UP:
                    self.profile.enable()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if (batch_idx + 1) % steps:
                return
            self.profile.disable()
            self._end("ours")
            assert self.loop is not None
            loss, other = float(outputs["loss"]), float(self.loop.loss)
            assert abs(loss - other) < 1e-4 * abs(loss), (loss, other)

        def _begin(self) -> None:
            dist.barrier()
            self.begin = time.perf_counter(), time.process_time()

        def _end(self, name: str) -> None:
            wall, own = time.perf_counter() - self.begin[0], time.process_time() - self.begin[1]
            slowest, total = (torch.tensor(value / steps, dtype=torch.float64) for value in (wall, own))
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            dist.all_reduce(total)
            self.times[name].append((float(slowest), float(total)))

    pl.seed_everything(0, verbose=False)
    turns, count = TakeTurns(), (arguments.rounds + TURNS_TO_WARM_UP) * steps
    trainer = pl.Trainer(
        strategy=MeshStrategy(mesh=f"1x1x1x{ranks}", dp=0, cp=backend),
        accelerator="cpu",
        devices=ranks,
        max_steps=count,
        callbacks=[turns],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader([batch] * count, batch_size=None))
    if arguments.profile and dist.get_rank() == 0:
        for order in ("cumulative", "tottime"):
            pstats.Stats(turns.profile).sort_stats(order).print_stats(60)
    dist.barrier()
    return tuple(turns.times[name][TURNS_TO_WARM_UP:] for name in ("by hand", "ours"))


def _model(sizes: dict[str, Any]) -> Any:
    from autolaunch.models.llama import Llama
    from autolaunch.models.llama_config import llama_config

    torch.manual_seed(0)
    return Llama(llama_config(sizes))


class ByHand:
    """Context parallelism as a person would write it around a model that takes positions."""

    def __init__(self, backend: str, sizes: dict[str, Any], batch: Any) -> None:
        ranks, rank, length = dist.get_world_size(), dist.get_rank(), batch["input_ids"].shape[1]
        if backend == "ulysses":
            own = [rank]
            chunk = length // ranks
        else:
            own = [rank, 2 * ranks - 1 - rank]
            chunk = length // (2 * ranks)
        positions = torch.cat([torch.arange(part * chunk, (part + 1) * chunk) for part in own])
        self.input_ids, self.labels = (batch[name][:, positions] for name in ("input_ids", "labels"))
        self.positions, self.count = positions[None], batch["labels"].numel()
        self.model = _model(sizes)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)  # as ours
        self.attention = {"ring": _ring, "gather": _gathered, "ulysses": _by_heads}[backend]
        self.loss: Any = None

    def steps(self, count: int) -> None:
        from tests.context.torch_ring import torch_ring_options

        for _ in range(count):
            self.optimizer.zero_grad()
            with torch_ring_options(balanced=True), _attention_replaced(self.attention):
                logits = self.model(self.input_ids, self.positions)
                loss = F.cross_entropy(logits.flatten(0, 1), self.labels.flatten(), reduction="sum") / self.count
                loss.backward()
            gradients = [parameter.grad for parameter in self.model.parameters()]
            flat = torch.cat([gradient.view(-1) for gradient in gradients])
            dist.all_reduce(flat)
            pieces = flat.split([gradient.numel() for gradient in gradients])
            torch._foreach_copy_(gradients, [piece.view_as(g) for piece, g in zip(pieces, gradients, strict=True)])
            self.optimizer.step()
            self.loss = loss.detach()
            dist.all_reduce(self.loss)


@contextmanager
def _attention_replaced(attention: Callable[..., Any]) -> Iterator[None]:
    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = TORCH_ATTENTION


TORCH_ATTENTION = F.scaled_dot_product_attention


# All are causal: what the model says of masks, it takes from positions that it believes to be those of whole sequences.


def _ring(q: Any, k: Any, v: Any, **options: Any) -> Any:
    from tests.context.torch_ring import TorchRing

    return TorchRing.apply(q, k, v, dist.group.WORLD, True)


def _gathered(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """Each half of this rank's rows attends to all keys up to the last one that it sees."""
    ranks, rank, chunk = dist.get_world_size(), dist.get_rank(), q.shape[2] // 2
    # [rank, k or v, b, h, half, chunk, d]: first halves stand in order, second ones backwards
    halves = _AllGather.apply(torch.stack([k, v])).unflatten(4, (2, chunk)).unbind(4)
    k, v = torch.cat([halves[0], halves[1].flip(0)]).movedim(0, 3).flatten(3, 4)
    outs = []
    for rows, part in zip(q.split(chunk, 2), (rank, 2 * ranks - 1 - rank), strict=True):
        stop = (part + 1) * chunk
        seen = torch.ones(chunk, stop, dtype=torch.bool).tril(stop - chunk)
        outs.append(TORCH_ATTENTION(rows, k[:, :, :stop], v[:, :, :stop], attn_mask=seen))
    return torch.cat(outs, 2)


def _by_heads(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """An all-to-all before attention and one after it."""
    ranks = dist.get_world_size()
    # [3, b, h, s, d] -> [rank, 3, b, h/n, s, d], and with the parts of all ranks along s again
    parts = torch.stack(torch.stack([q, k, v]).chunk(ranks, 2))
    q, k, v = _AllToAll.apply(parts).movedim(0, 3).flatten(3, 4)
    out = TORCH_ATTENTION(q, k, v, is_causal=True)
    return _AllToAll.apply(torch.stack(out.chunk(ranks, 2))).movedim(0, 1).flatten(1, 2)


class _AllGather(torch.autograd.Function):
    """[...] -> [ranks, ...]"""

    @staticmethod
    def forward(ctx: Any, own: Any) -> Any:
        from autolaunch_strategies.torch_private.collectives import all_gather_single

        gathered = own.new_empty((dist.get_world_size() * own.shape[0], *own.shape[1:]))
        all_gather_single(gathered, own, dist.group.WORLD)
        return gathered.view(-1, *own.shape)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        from autolaunch_strategies.torch_private.collectives import reduce_scatter_single

        own = torch.empty_like(grad[0], memory_format=torch.contiguous_format)
        reduce_scatter_single(own, grad.flatten(0, 1).contiguous(), dist.group.WORLD)
        return own


class _AllToAll(torch.autograd.Function):
    """[ranks, ...] -> [ranks, ...]"""

    @staticmethod
    def forward(ctx: Any, parts: Any) -> Any:
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _AllToAll.apply(grad.contiguous())


if __name__ == "__main__":
    main()
