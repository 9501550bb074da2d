"""Whether a run fits: predictions for a sweep of 964 runs of which 563 ran out of memory.

    pip install openpyxl
    python tests/benchmarks/planner_layouts.py DIRECTORY [--wrong]

DIRECTORY is a checkout of github.com/Aleph-Alpha/NeurIPS-WANT-submission-efficient-parallelization-layouts (Hagemann et
al., "Efficient Parallelization Layouts for Large-Scale Distributed Model Training", 2023): Llama of 13B, 30B and 65B on
A100 80 GB. Its sheets may not be passed on under this project's licence, so they are read where they lie.

Nothing is fitted. The model is traced as any model is, with the kernels that a row names; what its training loop does
beside is taken from its code, github.com/Aleph-Alpha/scaling:

- AdamW in fp32 on shards of level 1, parameters and gradients in bf16, and gradients are dropped after a step;
- layers, embedding, last norm and head are shared out evenly by their number, 1F1B;
- the head's outputs are gathered over mp, and kept (bf16) until their backward pass is over.

Assumed in sight of the runs, since neither says it: a norm that is no kernel computes in fp32, its scale included; a
vocabulary of 128,000 and batches of 2,048 sequences (512 of 8k), with which the sheets' own utilisation comes out; and
an allocator without expandable segments, which finds no place for one more of the largest tensors (scores in fp32)
among what it has cut up.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import yaml
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "strategies")]

from autolaunch_strategies.planner.candidate import (  # noqa: E402 - behind the path
    FULL,
    NO_RECOMPUTE,
    Candidate,
    Candidates,
)
from autolaunch_strategies.planner.hardware import Hardware, hardware_from  # noqa: E402 - behind the path
from autolaunch_strategies.planner.memory import peak_memory  # noqa: E402 - behind the path
from autolaunch_strategies.planner.module_profile import profile_module  # noqa: E402 - behind the path
from autolaunch_strategies.planner.plan import MEASURED, SURE  # noqa: E402 - behind the path
from autolaunch_strategies.planner.profile import ModelProfile, Recipe  # noqa: E402 - behind the path
from autolaunch_strategies.planner.stages import Cut  # noqa: E402 - behind the path
from tests.support.megatron import NUMBERS, memory_of  # noqa: E402 - behind the path

Scores = Literal["flash", "fused", "torch"]

SIZES = {"13B": (40, 5120, 40, 13824), "30B": (60, 6656, 52, 17920), "65B": (80, 8192, 64, 22016)}
"""Layers, hidden size, heads, feed-forward size."""
VOCABULARY = 128_000
BATCH = {2048: 2048, 8192: 512}
"""Sequences of a step, by their length."""
PLAN = {
    "embedding": "RowWiseParallel",
    "blocks.*.(query|key|value|gate|up)": "ColWiseParallel",
    "blocks.*.(out|down)": "RowWiseParallel",
    "head": "ColWiseParallel",
}
NARROW, WIDE = 2, 4
"""Bytes of bf16 and fp32."""


@dataclass(frozen=True)
class Layout:
    """A run of the sheets."""

    size: str
    positions: int
    devices: int
    microbatch: int
    mp: int
    pp: int
    sequence_parallel: bool
    recompute: bool
    kernels: str
    ran: bool

    @property
    def scores(self) -> Scores:
        """What computes attention."""
        return "flash" if "flash" in self.kernels else "fused" if self.kernels == "fused" else "torch"


@dataclass(frozen=True)
class Verdict:
    """What is predicted of a run."""

    layout: Layout
    share: float
    """Of a device's memory."""


class Norm(nn.Module):
    def __init__(self, width: int, kernel: bool) -> None:
        super().__init__()
        self.scale, self.kernel = nn.Parameter(torch.ones(width)), kernel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kernel:
            return F.rms_norm(x, self.scale.shape, self.scale, 1e-6)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return (normed * self.scale).type_as(x)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, feed_forward: int, scores: Scores, norm_kernel: bool) -> None:
        super().__init__()
        self.heads, self.scores = heads, scores
        self.norm, self.other_norm = Norm(width, norm_kernel), Norm(width, norm_kernel)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, feed_forward, bias=False) for _ in range(2))
        self.down = nn.Linear(feed_forward, width, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        query, key, value = (
            layer(normed).view(*x.shape[:2], self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        query, key = (heads * turns + torch.cat(heads.chunk(2, -1)[::-1], -1) * turns for heads in (query, key))
        x = x + self.out(self.attention(query, key, value).transpose(1, 2).reshape(x.shape))
        normed = self.other_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if self.scores == "flash":
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        scores = query @ key.transpose(-1, -2)
        if self.scores == "torch":
            scores = scores.float()
        return scores.softmax(-1).to(value.dtype) @ value


class Llama(nn.Module):
    def __init__(self, size: str, positions: int, scores: Scores, norm_kernel: bool) -> None:
        super().__init__()
        layers, width, heads, feed_forward = SIZES[size]
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads, feed_forward, scores, norm_kernel) for _ in range(layers))
        self.norm = Norm(width, norm_kernel)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("turns", torch.ones(positions, width // heads))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.turns)
        return self.head(self.norm(x))


@functools.cache
def profile(size: str, positions: int, scores: Scores, norm_kernel: bool) -> ModelProfile:
    """Of the model, and of what its training loop keeps of the scores of the vocabulary."""
    with torch.device("meta"):
        model = Llama(size, positions, scores, norm_kernel)
    traced = profile_module(model, positions, own_plan=PLAN, precision="bf16-true", device_type="cuda")
    whole = dataclasses.replace(traced.after, sharded_saved_bytes=0, sharded_peak_bytes=0)
    outputs = positions * VOCABULARY
    loss = traced.loss_bytes + outputs * (NARROW + WIDE)
    return dataclasses.replace(traced, after=whole, loss_bytes=loss, sharded_loss_bytes=0, forward_loss_bytes=None)


def verdicts(layouts: Iterable[Layout]) -> Iterator[Verdict]:
    """A prediction for each."""
    hardware = a100()
    with memory_of(megatron=False, cut_as=evenly):
        for one in layouts:
            model = profile(one.size, one.positions, one.scores, "RMS kernel" in one.kernels)
            batch, dp = BATCH[one.positions], one.devices // (one.mp * one.pp)
            recipe = Recipe(
                batch_size=batch,
                compute="bf16",
                parameter_bytes=NARROW,
                gathered_bytes=NARROW,
                gradient_bytes=NARROW,
                reduce_bytes=NARROW,
                optimizer_bytes=3 * WIDE,
            )
            candidate = Candidate(
                dp=dp,
                mp=one.mp,
                pp=one.pp,
                level=1,
                sequence_parallel=int(one.sequence_parallel and one.mp > 1),
                pipeline=NUMBERS["1f1b" if one.pp > 1 else "none"],
                microbatches=batch // (dp * one.microbatch),
                recompute=FULL if one.recompute else NO_RECOMPUTE,
            )
            needed = peak_memory(model, recipe, hardware, Candidates.of([candidate])).bytes[0]
            yield Verdict(one, float(needed / hardware.memory_bytes))


def a100() -> Hardware:
    values = yaml.safe_load((ROOT / "conf/cluster/a100_80.yaml").read_text())
    return hardware_from({key: value for key, value in values.items() if key != "defaults"})


def evenly(model: ModelProfile, _: str, pp: int, *__: Any) -> Cut:
    """Embedding, blocks, norm and head: as many for each stage, the first ones have one more."""
    count = len(model.blocks) + 3
    sizes = np.full(pp, count // pp)
    sizes[: count % pp] += 1
    sizes[0] -= 1
    sizes[-1] -= 2
    return Cut(sizes[:, None], np.arange(pp))


def read(directory: Path) -> list[Layout]:
    """All runs of the sheets that ended, one way or the other."""
    import openpyxl

    found = []
    for path in sorted(directory.glob("data/**/*.xlsx")):
        size = re.search(r"_(\d+B)_", path.name)
        assert size is not None, path
        _, titles, *rows = openpyxl.load_workbook(path).worksheets[0].iter_rows(values_only=True)
        for row in (dict(zip(titles, values, strict=True)) for values in rows):
            outcome = str(row["Average Step Time"])
            ran = re.fullmatch(r"[\d.]+", outcome) is not None
            if row["World Size"] is None or not (ran or outcome == "OOM Error"):
                continue
            found.append(
                Layout(
                    size=size[1],
                    positions=8192 if "_8k_" in path.name else 2048,
                    devices=int(row["World Size"]),
                    microbatch=int(row["micro_batch_size"]),
                    mp=int(row["model_parallel_size"]),
                    pp=int(row["pipe_parallel_size"]),
                    sequence_parallel=bool(row.get("sequence_parallel")),
                    recompute=row["activation_checkpointing_type"] == "every_layer",
                    kernels=str(row["kernel"]),
                    ran=ran,
                )
            )
    return found


def report(found: list[Verdict]) -> Iterator[str]:
    """How many verdicts are right, at several limits and by kernels."""
    share, ran = np.array([item.share for item in found]), np.array([item.layout.ran for item in found])

    def line(name: str, limit: float, chosen: Any) -> str:
        fits, really = share[chosen] <= limit, ran[chosen]
        return (
            f"{name:<32} {len(fits):>5} {(fits == really).mean():>7.1%} {(fits & ~really).sum():>14}"
            f" {(~fits & really).sum():>14}"
        )

    yield f"{'':<32} {'runs':>5} {'right':>7} {'fits, and no':>14} {'no, and ran':>14}"
    everything = np.ones(len(found), dtype=bool)
    for limit in (SURE, MEASURED, 1.0):
        yield line(f"all, up to {limit:.0%} of the memory", limit, everything)
    yield f"up to {MEASURED:.0%}:"
    groups: dict[str, list[str]] = {
        "kernels": [item.layout.kernels for item in found],
        "recompute": [str(item.layout.recompute) for item in found],
        "size": [item.layout.size for item in found],
    }
    for title, values in groups.items():
        for value in sorted(set(values)):
            yield line(f"{title} {value}", MEASURED, np.array(values) == value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--wrong", action="store_true", help="every run of which the opposite is predicted")
    arguments = parser.parse_args()
    found = list(verdicts(read(arguments.directory)))
    if arguments.wrong:
        for item in sorted(found, key=lambda item: item.share):
            if (item.share <= MEASURED) != item.layout.ran:
                print(f"{item.share:7.1%} {item.layout}")
    print("\n".join(report(found)))


if __name__ == "__main__":
    main()
