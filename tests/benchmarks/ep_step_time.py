"""A training step of a mixture with its experts shared out (`ep`), beside whole experts and `transformers`' own way.

    torchrun --nproc-per-node 2 tests/benchmarks/ep_step_time.py [--steps 12] [--hidden 256]

Two ranks along dp with sharded weights, on the processor. Printed per variant: processor time of one rank for a step
(what is waited for does not count), and the median time from the beginning of one step to that of the next. On a
machine with other work the first is the one to read. Variants take turns, so that all of them meet the same other work.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from autolaunch_strategies import MeshStrategy

WARM, ROUNDS, BATCH, LENGTH = 3, 2, 4, 128


def config(hidden: int) -> Any:
    """Mixtral of two layers with eight experts."""
    return AutoConfig.for_model(
        "mixtral", hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512, num_local_experts=8, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip


def data(steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return list(torch.randint(3, 512, (2 * BATCH * steps, LENGTH), generator=generator))


class Clock:
    """Processor and wall time from step to step, after the first few."""

    def __init__(self) -> None:
        self.processor, self.wall = list[float](), list[float]()

    def tick(self) -> None:
        self.processor.append(time.process_time())
        self.wall.append(time.perf_counter())

    def steps(self) -> tuple[list[float], list[float]]:
        """(processor time, wall time) of each, seconds."""
        return _differences(self.processor[WARM:]), _differences(self.wall[WARM:])


def _differences(times: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


class Module(pl.LightningModule):
    def __init__(self, hidden: int, clock: Clock) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.clock = AutoModelForCausalLM.from_config(config(hidden)), clock

    def training_step(self, ids: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.clock.tick()
        loss: torch.Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def ours(ep: int, hidden: int, steps: int, _: Path) -> Clock:
    clock = Clock()
    trainer = pl.Trainer(
        strategy=MeshStrategy(mesh="2", ep=ep, dp=3), accelerator="cpu", max_steps=steps, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(hidden, clock), DataLoader(data(steps), batch_size=BATCH))
    return clock


def theirs(ep: int, hidden: int, steps: int, directory: Path) -> Clock:
    from transformers.distributed import DistributedConfig

    model = AutoModelForCausalLM.from_pretrained(
        directory, distributed_config=DistributedConfig(fsdp_size=2, ep_size=ep), dtype=torch.float32
    )
    optimizer, clock = torch.optim.AdamW(model.parameters(), lr=1e-3), Clock()
    model.train()
    batches = torch.stack(data(steps)).view(steps, 2, BATCH, LENGTH)[:, dist.get_rank()]
    for ids in batches:
        clock.tick()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return clock


VARIANTS: dict[str, tuple[Callable[[int, int, int, Path], Clock], int]] = {
    "autolaunch ep=1": (ours, 1),
    "autolaunch ep=2": (ours, 2),
    "transformers ep=1": (theirs, 1),
    "transformers ep=2": (theirs, 2),
}


def main() -> None:
    """Measure every variant in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=256)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    place = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(place)
    directory = Path(str(place[0]))
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config(arguments.hidden)).save_pretrained(directory)
    dist.barrier()
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in VARIANTS}
    for _ in range(ROUNDS):
        for name, (run, ep) in VARIANTS.items():
            for times, new in zip(
                found[name], run(ep, arguments.hidden, arguments.steps, directory).steps(), strict=True
            ):
                times.extend(new)
    if dist.get_rank() == 0:
        for name, (processor, wall) in found.items():
            print(
                f"{name:<18} processor {statistics.median(processor) * 1e3:7.1f} ms, "
                f"wall {statistics.median(wall) * 1e3:7.1f} ms"
            )


if __name__ == "__main__":
    main()
