"""Predicted against published memory of a device, and whether a run fits.

    python tests/benchmarks/planner_published_memory.py [--rows FILE.csv] [--source NAME] [--residuals]

Rows have the columns of `published_runs.csv`; errors are those of rows with `mem_gib`. Whether a run fits is asked of
all rows of a source that has some which ran out of memory (`planner_layouts.py` asks it of 964 more). Nothing is
fitted. What was measured differs between sources, and is read from the rows:

- unit: `mem_gib` holds GiB, but where the note says "GB" what stands there is 1e9 bytes;
- what counts: the allocator's peak or a sum of parts. What the allocator wastes and what the driver takes beyond it is
  in rows whose notes name nvidia-smi only, and what the allocator wastes in those of tools that print what it reserved;
- state: bytes of parameters, gradients and optimizer for a parameter where a note gives them, else by precision;
- streams: `reserved` holds one pool for each stream, each at its own peak (`beside`);
- stack: Megatron (levels below 3) frees what it has sent or gathered, and makes its loss of scores in place. PyTorch's
  own (level 3) computes cross entropy in fp32 with a kernel for each operation, and its `selective_op` keeps the output
  of every second matrix product.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "strategies")]

from autolaunch_strategies.planner.candidate import Candidate, Candidates  # noqa: E402 - behind the path
from autolaunch_strategies.planner.hardware import Hardware  # noqa: E402 - behind the path
from autolaunch_strategies.planner.memory import memory_account, peak_memory  # noqa: E402 - behind the path
from autolaunch_strategies.planner.plan import MEASURED, SURE  # noqa: E402 - behind the path
from autolaunch_strategies.planner.profile import ModelProfile, Recipe  # noqa: E402 - behind the path
from autolaunch_strategies.planner.stages import Cut, cut  # noqa: E402 - behind the path
from tests.benchmarks.planner_published import ROWS, Published, read  # noqa: E402 - behind the path
from tests.support.megatron import gathers_again, memory_of  # noqa: E402 - behind the path

GOALS = ("korthikanti22_fig1", "zerobubble_table4", "torchtitan_202412")
GOAL = 0.05
FP32_LOSS = 14.6
"""Bytes for each logit of `cross_entropy(logits.float(), ...)` as traced with 16k tokens of Llama 3: logits (2), their
log-softmax (4), two gradients of 4 when that is differentiated, and what belongs to the head's input."""
FP32_LOSS_OVER_RANKS = 18
"""With logits divided over mp (torch.distributed.tensor.parallel.loss): 2, 4, and three fp32 tensors at a time."""
RESERVED = ("torchtitan",)
"""Sources whose tool prints what the allocator reserved."""


@dataclass(frozen=True)
class Error:
    """A row with its prediction."""

    row: Published
    published: float
    predicted: float

    @property
    def relative(self) -> float:
        """Of the prediction."""
        return self.predicted / self.published - 1


def errors(path: Path = ROWS) -> list[Error]:
    """Of every row with a memory."""
    found = []
    for item in read(path):
        if item.memory_gib is None:
            continue
        found.append(Error(item, item.memory_gib * unit(item), needed(item, *case(item))))
    return found


def needed(item: Published, profile: ModelProfile, recipe: Recipe, hardware: Hardware) -> float:
    """Predicted bytes of the fullest device."""
    candidates = Candidates.of([candidate_of(item)])
    with as_published(item):
        return float(peak_memory(profile, recipe, hardware, candidates).bytes[0]) + beside(item)


def shares(path: Path = ROWS) -> Iterator[tuple[Published, float]]:
    """(row, the predicted share of a device's memory), with what allocation wastes and the runtime takes."""
    rows = read(path, with_failures=True)
    failed = {item.source for item in rows if not item.ran}
    for item in rows:
        if item.source in failed:
            profile, recipe, _ = case(item)
            assert item.run.hardware is not None
            yield item, needed(item, profile, recipe, item.run.hardware) / item.run.hardware.memory_bytes


def verdicts(found: Iterable[tuple[Published, float]]) -> Iterator[str]:
    """Per source and limit: how often it was told rightly whether a run fits."""
    yield f"{'fits':<24} {'rows':>4} {'failed':>6} {'limit':>6} {'right':>7}  fits, and no  no, and ran"
    by_source: dict[str, list[tuple[bool, float]]] = {}
    for item, share in found:
        by_source.setdefault(item.source, []).append((item.ran, share))
    for source, rows in by_source.items():
        for limit in (SURE, MEASURED, 1.0):
            wrongly = [sum(ran != fits for ran, share in rows if (share <= limit) == fits) for fits in (True, False)]
            yield (
                f"{source:<24} {len(rows):>4} {sum(not ran for ran, _ in rows):>6} {limit:>6.0%} "
                f"{1 - sum(wrongly) / len(rows):>7.1%} {wrongly[0]:>13} {wrongly[1]:>11}"
            )


def is_megatron(item: Published) -> bool:
    """Else PyTorch's own training stack."""
    return item.run.candidate.level < 3


def as_published(item: Published) -> AbstractContextManager[None]:
    """Within it, memory is that of a row's training loop, cut as the row says."""
    return memory_of(is_megatron(item), functools.partial(_cut, item.row["note"].lower()))


def unit(item: Published) -> float:
    """Bytes of what the column counts in."""
    return 1e9 if re.search(r"\bmem\w* in GB\b", item.row["note"]) else 2.0**30


def case(item: Published) -> tuple[ModelProfile, Recipe, Hardware]:
    """Of a row."""
    assert item.run.hardware is not None
    return _profile(item, item.profile), _recipe(item, item.run.recipe), _hardware(item, item.run.hardware)


def beside(item: Published) -> float:
    """Bytes that torch's allocator reserves for streams other than the main one, which can't use what those free.

    Of sources that print what was reserved. `fully_shard` allocates on streams of their own what gathers put out (two
    blocks at a time) and the sharded gradients (`_fsdp_collectives.py`), and a stage of torch's pipelines a gradient
    that arrives for each microbatch (`stage.py`).
    """
    candidate, profile, recipe = candidate_of(item), item.profile, item.run.recipe
    if candidate.level != 3 or not item.source.startswith(RESERVED):
        return 0.0
    (kind,) = profile.kinds
    parameters = kind.parameters / candidate.mp
    blocks = len(profile.blocks) / candidate.pp
    gathered = 2 * parameters * recipe.gathered_bytes
    gradients = blocks * parameters * recipe.gradient_bytes / int(Candidates.of([candidate]).shard[0])
    if candidate.pp == 1:
        return gathered + gradients
    sequences = recipe.batch_size / candidate.dp
    return gathered + gradients + sequences * kind.output_bytes / candidate.cp / candidate.mp


def candidate_of(item: Published) -> Candidate:
    """How a row ran; where the microbatches of a pipeline are not stated, there are as many as stages (torchtitan)."""
    candidate = item.run.candidate
    if candidate.pp > 1 and not item.row["mbs"]:
        on_rank = item.run.recipe.batch_size // candidate.dp
        return dataclasses.replace(candidate, microbatches=min(candidate.pp * candidate.virtual_stages, on_rank))
    return candidate


def _profile(item: Published, profile: ModelProfile) -> ModelProfile:
    """As Megatron has it, or with the loss and the selective recomputation of PyTorch's own training stack."""
    if is_megatron(item):
        return gathers_again(profile, bool(item.run.candidate.sequence_parallel))
    logits = profile.after.sharded_saved_bytes / 4  # they are kept in fp32
    loss = (FP32_LOSS if item.run.candidate.mp == 1 else FP32_LOSS_OVER_RANKS) - 4
    (kind,) = profile.kinds
    if item.row["recompute"] == "selective_op":
        hidden, attention = kind.output_bytes, kind.attention
        assert attention is not None
        element = profile.element_bytes * profile.positions
        query, key = (element * heads * attention.head_dim for heads in (attention.heads, attention.key_heads))
        up = element * float(item.row["ffn"])
        # Of q, k, v, attention's output, gate, up and down, in order: every second; attention itself; the input.
        kind = dataclasses.replace(
            kind,
            selective_bytes=query + key + up + hidden + query + hidden,
            sharded_selective_bytes=query + key + up + query,
        )
    return dataclasses.replace(profile, kinds=(kind,), loss_bytes=loss * logits, sharded_loss_bytes=loss * logits)


def _recipe(item: Published, recipe: Recipe) -> Recipe:
    """With the state that a note gives: `params+grad+opt=<GiB>`."""
    stated = re.search(r"params\+grad\+opt=([\d.]+)", item.row["note"])
    if not stated:
        return recipe
    candidate, profile = item.run.candidate, item.profile
    blocks = sum(profile.kinds[kind].parameters for kind in profile.blocks) / (candidate.mp * candidate.pp)
    of_parameter = round(float(stated[1]) * 2**30 / blocks)
    return dataclasses.replace(recipe, gradient_bytes=of_parameter - recipe.parameter_bytes - recipe.optimizer_bytes)


def _hardware(item: Published, hardware: Hardware) -> Hardware:
    constants = hardware.constants
    nvidia_smi = "nvidia-smi" in item.row["note"].lower()
    reserved = nvidia_smi or item.source.startswith(RESERVED)
    constants = dataclasses.replace(
        constants,
        context_bytes=constants.context_bytes if nvidia_smi else 0.0,
        fragmentation=constants.fragmentation if reserved else 0.0,
    )
    return hardware.with_constants(constants, "published")


def _cut(note: str, profile: ModelProfile, pipeline: str, pp: int, virtual_stages: int, split: int) -> Cut:
    """As `stages.cut`; where embedding and head stand for a block each, as in many publications, so."""
    count, stages = len(profile.blocks), pp * virtual_stages
    if "first/last stage one layer fewer" not in note and not (count % stages and (count + 2) % stages == 0):
        return cut(profile, pipeline, pp, virtual_stages, split)
    sizes = np.full(stages, (count + 2) // stages)
    sizes[[0, -1]] -= 1
    assert sizes.sum() == count, note
    return Cut(sizes[:, None], np.arange(stages) % pp)


def report(rows: Iterable[Error]) -> list[str]:
    """Per source: rows, mean absolute error, mean error, worst row."""
    groups: dict[str, list[Error]] = {}
    for row in rows:
        groups.setdefault(row.row.source, []).append(row)
    lines = [f"{'source':<24} {'rows':>4} {'MAPE':>7} {'bias':>7}  worst"]
    for source, group in groups.items():
        relative = np.array([row.relative for row in group])
        worst = group[int(np.abs(relative).argmax())]
        missed = "  (goal: 5 %)" if source in GOALS and np.abs(relative).mean() > GOAL else ""
        lines.append(
            f"{source:<24} {len(group):>4} {np.abs(relative).mean():>7.1%} {relative.mean():>+7.1%}  "
            f"{worst.relative:+.1%} {described(worst.row)}{missed}"
        )
    return lines


def described(item: Published) -> str:
    """A row in a few words."""
    one = item.run.candidate
    sizes = "x".join(f"{name}{getattr(one, name)}" for name in ("dp", "mp", "pp", "cp") if getattr(one, name) > 1)
    words = [item.model, sizes, one.pipeline_name if one.pp > 1 else "", f"recompute={one.recompute_name}"]
    return " ".join(word for word in [*words, f"s{item.run.profile.positions}", item.row["precision"]] if word)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--source", action="append")
    parser.add_argument("--residuals", action="store_true", help="every row, with the pieces of its fullest rank")
    arguments = parser.parse_args()
    found = [row for row in errors(arguments.rows) if not arguments.source or row.row.source in arguments.source]
    if arguments.residuals:
        for row in found:
            with as_published(row.row):
                account = memory_account(*case(row.row), candidate_of(row.row))
            fullest = max(range(len(account)), key=lambda rank: account[rank]["total"])
            values = {**account[fullest], "beside": beside(row.row)}
            pieces = " ".join(f"{name[:6]} {value / 2**30:.1f}" for name, value in values.items())
            print(f"{row.published / 2**30:7.1f} {row.relative:+7.1%} rank {fullest}: {pieces}  {described(row.row)}")
    print("\n".join(report(found)))
    told = [row for row in shares(arguments.rows) if not arguments.source or row[0].source in arguments.source]
    if told:
        print("\n".join(verdicts(told)))


if __name__ == "__main__":
    main()
