"""Predicted against published step times: errors before and after calibration, and what choosing by prediction costs.

    python tests/benchmarks/planner_published.py [--rows FILE.csv] [--source NAME] [--residuals]

Rows have the columns of `published_runs.csv`, described in `published_runs.md`; blanks are what a source doesn't state.
Nothing here is fitted to a row: what differs between rows is read from their columns and from words in their notes.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "strategies"), str(ROOT)]

from autolaunch_strategies.config import CP_BACKENDS  # noqa: E402 - behind the path
from autolaunch_strategies.planner.candidate import (  # noqa: E402 - behind the path
    FULL,
    NO_RECOMPUTE,
    SELECTIVE,
    Candidate,
    Candidates,
)
from autolaunch_strategies.planner.fit import Run, fit  # noqa: E402 - behind the path
from autolaunch_strategies.planner.hardware import Hardware, Link, hardware_from  # noqa: E402 - behind the path
from autolaunch_strategies.planner.profile import ModelProfile, Recipe  # noqa: E402 - behind the path
from autolaunch_strategies.planner.time import step_time  # noqa: E402 - behind the path
from tests.support.megatron import NUMBERS, empty_stages, scattered_sends  # noqa: E402 - behind the path
from tests.support.transformer_profile import transformer_profile  # noqa: E402 - behind the path

ROWS = Path(__file__).with_name("published_runs.csv")

FITTED = (
    "matmul", "attention", "memory", "kernel_s", "intra", "inter", "p2p", "latency", "hidden_dp", "microbatch_s",
    "step_s",
)  # fmt: skip
"""What calibration changes."""

MEGATRON = ("korthikanti", "zerobubble", "megatron_sc21", "mbridge", "mit_orcd")
"""How the sources begin that ran Megatron or what is like it."""

SCHEDULES_IN_NOTES = {
    "zb2p": "zero_bubble_2p",
    "zb-2p": "zero_bubble_2p",
    "zb1p": "zero_bubble_1p",
    "zb-1p": "zero_bubble_1p",
    "zbv": "zbv_zero_bubble",
    "zb-v": "zbv_zero_bubble",
    "dualpipev": "dualpipev",
    "gpipe": "gpipe",
}


@dataclass(frozen=True)
class Published:
    """One published measurement."""

    source: str
    model: str
    sweep: tuple[str, ...]
    """Rows with equal ones differ in nothing but how they run."""
    run: Run
    profile: ModelProfile
    """As `run` has it, but for what stages send."""
    memory_gib: float | None
    row: dict[str, str]
    ran: bool
    """Whether it did; else it ran out of memory."""

    @property
    def timed(self) -> bool:
        """Whether its step time is known."""
        return self.run.seconds > 0


def read(path: Path = ROWS, with_failures: bool = False) -> list[Published]:
    """All rows of a file, those without a step time included (`seconds` is 0 there).

    Args:
        with_failures: those that ran out of memory, too.
    """
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = [published for row in rows if (published := _published(row)) is not None]
    return [item for item in found if item.ran or with_failures]


def _number(row: dict[str, str], key: str, default: float) -> float:
    text = (row.get(key) or "").strip()
    try:
        return float(text)
    except ValueError:
        return default


def _whole(row: dict[str, str], key: str, default: int) -> int:
    return int(_number(row, key, default))


def _published(row: dict[str, str]) -> Published | None:
    note = (row.get("note") or "").lower()
    if re.search(r"fail=|\bfailed\b", note):
        return None
    if re.search(r"(nv|mx)fp4", f"{row.get('precision') or ''} {note}".lower()):
        return None  # no type of the planner's: it would be taken for another one
    hidden, layers = _whole(row, "hidden", 0), _whole(row, "layers", 0)
    devices = _whole(row, "n_gpus", 0)
    if not (hidden and layers and devices):
        return None
    mp, pp, cp = (max(_whole(row, key, 1), 1) for key in ("tp", "pp", "cp"))
    dp = max(_whole(row, "dp", 0) or devices // (mp * pp * cp), 1)
    level = _whole(row, "zero", 0)
    micro = max(_number(row, "mbs", 1), 1)
    batch = _whole(row, "gbs", 0) or int(dp * micro)
    microbatches = max(round(batch / (dp * micro)), 1)
    profile, recipe = _model(row, note), _recipe(row, note, batch, level)
    pipeline, virtual = _pipeline(note, pp, max(_whole(row, "vp", 2 if "interleaved" in note else 1), 1), layers)
    ring = "ulysses" if "ulysses" in note else "gather" if re.search("all.?gather", note) else "ring"
    candidate = Candidate(
        dp=dp,
        mp=mp,
        pp=pp,
        cp=cp,
        level=level,
        replicate=_replicate(note, dp * cp) if level else dp * cp,
        sequence_parallel=_whole(row, "seq_parallel", int(recipe.compute in ("fp8", "bf16"))) if mp > 1 else 0,
        pipeline=NUMBERS[pipeline],
        virtual_stages=virtual,
        split=int(layers % (pp * virtual) > 0),
        microbatches=microbatches,
        recompute=_recompute(row),
        compile=int(bool(re.search(r"(?<!no )\bcompile", note))),
        backend=CP_BACKENDS.index(ring) if cp > 1 else 0,
        ulysses=cp if ring == "ulysses" else 1,
    )
    torch_stack = ("torch" if "cudnn" in note else "torch_2024") if _is_torch(row, note) else "megatron"
    stack = torch_stack if profile.kinds[0].attention else "megatron_2021"
    hardware = _hardware(row, devices, stack)
    seconds = _seconds(row, note, profile, recipe, candidate, devices)
    sweep = tuple(row.get(key) or "" for key in ("source", "model", "n_gpus", "gbs", "seq", "gpu", "precision"))
    if "AsyncTP" in (row.get("note") or ""):  # nothing that could be chosen here
        sweep += ("AsyncTP",)
    memory = _number(row, "mem_gib", 0) or None
    sends = profile if candidate.sequence_parallel else _model(row, note, sends_over=mp)
    run = Run(sends, recipe, candidate, seconds, hardware)
    ran = re.search(r"\boom\b", note) is None
    return Published(row["source"], row["model"], sweep, run, profile, memory, row, ran)


def _is_torch(row: dict[str, str], note: str) -> bool:
    """Whether torch's own kernels ran, or a compiler's."""
    return bool(re.search("torchtitan|fsdp|foundry|mpt|maxtext", f"{row['source']} {note}".lower()))


def _model(row: dict[str, str], note: str, sends_over: int = 1) -> ModelProfile:
    hidden, heads, seq = _whole(row, "hidden", 0), _whole(row, "heads", 0), _whole(row, "seq", 2048)
    heads = heads or hidden // 128
    ffn = _whole(row, "ffn", 0) or 4 * hidden
    name = row["model"].lower()
    modern = (row.get("precision") or "").lower()[:4] not in ("fp16", "") or "flash" in note
    every_second = row.get("recompute") == "selective_op"  # what torchtitan computes again
    is_torch, dropout = _is_torch(row, note), "dropout" in note
    written_out = is_torch and "maxtext" not in f"{row['source']} {note}".lower()
    glu = "llama" in name or "mistral" in name or "mixtral" in name or "qwen" in name or ffn != 4 * hidden
    vocab, mp = _whole(row, "vocab", 51200), max(_whole(row, "tp", 1), 1)
    if mp > 1:  # vocabularies are made divisible where they are divided, and are else as stated
        vocab = math.ceil(vocab / (128 * mp)) * 128 * mp
    key_heads = _whole(row, "kv_heads", heads)
    return _profile(
        *(_whole(row, "layers", 0), hidden, heads, seq, vocab, key_heads, ffn),
        *(glu, modern, name, sends_over, every_second, written_out and glu, is_torch, dropout),
    )


@functools.cache
def _profile(
    layers: int,
    hidden: int,
    heads: int,
    seq: int,
    vocab: int,
    kv_heads: int,
    ffn: int,
    glu: bool,
    modern: bool,
    name: str,
    sends_over: int,
    every_second: bool,
    written_out: bool,
    is_torch: bool,
    dropout: bool,
) -> ModelProfile:
    """`modern`: fused attention, and dropout only with `dropout`; else as Megatron of 2021. `written_out`: as Llama's
    code in torch. Megatron's loss takes exponentials in place (`cross_entropy.py`), and its selective recomputation is
    that of attention.
    """
    profile = transformer_profile(
        layers,
        hidden,
        heads,
        seq,
        vocab,
        kv_heads=kv_heads,
        ffn=ffn,
        glu=glu,
        attention="fused" if modern else "plain",
        dropout=dropout or not modern,
        bias=not glu,
        tied=not glu,
        learned_positions=not glu,
        selective="outputs" if is_torch else "attention",
        logit_bytes=12 if is_torch else 6,
        written_out=written_out,
        name=name,
    )
    if every_second:
        (kind,) = profile.kinds
        products = tuple(dataclasses.replace(item, kept=place % 2 == 0) for place, item in enumerate(kind.matmuls))
        profile = dataclasses.replace(profile, kinds=(dataclasses.replace(kind, matmuls=products),))
    return scattered_sends(profile, sends_over)


def _recipe(row: dict[str, str], note: str, batch: int, level: int) -> Recipe:
    precision = (row.get("precision") or "bf16").lower().removeprefix("mx")  # mxfp8 runs on the same units as fp8
    compute = next((kind for kind in ("fp8", "bf16", "fp16", "tf32", "fp32") if precision.startswith(kind)), "bf16")
    torch_native = level == 3
    return _cached_recipe(
        batch,
        compute,
        4 if torch_native else 2,
        2 if compute == "fp16" else 4,
        8 if torch_native else 12,
        "rowwise" in note,
    )


@functools.cache
def _cached_recipe(batch: int, compute: str, parameter: int, gradient: int, optimizer: int, rowwise: bool) -> Recipe:
    return Recipe(
        batch_size=batch,
        compute=compute,
        rowwise=rowwise,
        parameter_bytes=parameter,
        gathered_bytes=2,
        gradient_bytes=gradient,
        reduce_bytes=gradient,
        optimizer_bytes=optimizer,
    )


def _recompute(row: dict[str, str]) -> int:
    text = (row.get("recompute") or "none").lower()
    if text.startswith("select"):
        return SELECTIVE
    if text.startswith("full") or text in ("1", "true", "yes"):
        return FULL
    return NO_RECOMPUTE


def _pipeline(note: str, pp: int, virtual: int, layers: int) -> tuple[str, int]:
    """The schedule that a note names, else 1F1B, interleaved with several stages per rank."""
    if pp == 1:
        return "none", 1
    virtual = min(virtual, (layers + 2) // pp)  # the embedding and the head may count as layers
    stated = next((schedule for word, schedule in SCHEDULES_IN_NOTES.items() if word in note), None)
    if stated is not None and re.search(r"sched\w*[=: ]+(\S+?)[;,\s]", note + ";"):
        stated = None
        word = re.search(r"sched\w*[=: ]+([\w-]+)", note)
        if word:
            stated = SCHEDULES_IN_NOTES.get(word[1])
    if stated is not None:
        return stated, {"zbv_zero_bubble": 2, "dualpipev": 2}.get(stated, 1)
    return ("interleaved_1f1b", virtual) if virtual > 1 else ("1f1b", 1)


def _replicate(note: str, size: int) -> int:
    """Replicas of hybrid sharding, where a note says that there are some."""
    if not re.search(r"hsdp|hybrid", note):
        return 1
    stated = re.search(r"replicas?[=: ]+(\d+)|(\d+)[ -]?replica", note)
    ranks = re.search(r"(?:hsdp|hybrid)\w*[=: ]+(\d+)", note)  # of a group that shards
    if ranks and not stated:
        return size // int(ranks[1]) if size % int(ranks[1]) == 0 else 1
    if stated:
        found = int(next(group for group in stated.groups() if group))
        return found if size % found == 0 else 1
    return max(size // 8, 1) if size % 8 == 0 else 1


POWER = {"h100": 700.0, "h200": 700.0, "a100": 400.0}
"""Watts of the usual kind."""
LIMITED = 0.75
"""A device that is limited to fewer watts is slower by the ratio to this power, as products of 8,192 in bf16 are: 585
TFLOP/s on an H100 of 500 W (pytorch/FBGEMM, pull request 2546), 755 with the same multiprocessors at 700 W (`stacks`);
the 114 of an H100 PCIe, 350 W, reach 433 (pytorch/ao, pull request 3342), which is 0.75, too, for each of them."""


def _hardware(row: dict[str, str], devices: int, stack: str) -> Hardware:
    gpu = row["gpu"].lower()
    per_node = _whole(row, "gpus_per_node", 0)
    hardware = _device(gpu, _number(row, "gpu_mem_gb", 80), stack)
    per_node = per_node or hardware.devices_per_node
    intra = _number(row, "intra_bw_GBs", 0) * 1e9 or hardware.intra.bytes_per_s
    inter = _number(row, "inter_bw_GBs", 0) * 1e9 or hardware.inter.bytes_per_s
    return _sized(gpu, _number(row, "gpu_mem_gb", 80), per_node, max(devices // per_node, 1), intra, inter, stack)


@functools.cache
def _device(gpu: str, memory: float, stack: str) -> Hardware:
    names = ("gb300", "gb200", "b300", "b200", "h200", "h100", "h800", "a100", "a800")
    found = next((name for name in names if name in gpu), None)
    if found is None:  # by its memory: the nearest kind that is known
        found = "b200" if memory > 150 else "h200" if memory > 100 else "h100" if memory > 41 else "a100"
        print(f"unknown GPU {gpu}: taken for {found}", file=sys.stderr)
    file = {"h800": "h100", "a800": "a100"}.get(found, found)
    file = ("a100_40" if memory < 60 or "40" in gpu else "a100_80") if file == "a100" else file
    values = yaml.safe_load((ROOT / f"conf/cluster/{file}.yaml").read_text())
    values.pop("defaults", None)
    values["stack"] = stack
    hardware = hardware_from(values)
    if "h100" in gpu and memory == 96:  # not HBM3 (torchtitan, benchmarks/: 2.4 TB/s)
        hardware = dataclasses.replace(hardware, memory_bytes_per_s=2.4e12)
    if found in ("h800", "a800"):
        hardware = dataclasses.replace(hardware, intra=Link(200e9, hardware.intra.latency_s))
    watts = re.search(r"(\d+)w\b", gpu)
    if watts and found in POWER:
        factor = min((float(watts[1]) / POWER[found]) ** LIMITED, 1.0)
        hardware = dataclasses.replace(hardware, flops={key: value * factor for key, value in hardware.flops.items()})
    return hardware


@functools.cache
def _sized(gpu: str, memory: float, per_node: int, nodes: int, intra: float, inter: float, stack: str) -> Hardware:
    hardware = _device(gpu, memory, stack)
    return dataclasses.replace(
        hardware,
        devices_per_node=per_node,
        nodes=nodes,
        intra=Link(intra, hardware.intra.latency_s),
        inter=Link(inter, hardware.inter.latency_s),
    )


def _seconds(
    row: dict[str, str], note: str, profile: ModelProfile, recipe: Recipe, candidate: Candidate, devices: int
) -> float:
    """Of a step: as stated, else from tokens per second, else from flops by the convention that the note names."""
    stated = _number(row, "step_time_s", 0)
    if stated:
        return stated
    tokens = _number(row, "tokens_s_gpu", 0)
    if tokens:
        return recipe.batch_size * profile.positions / (tokens * devices)
    rate = _number(row, "tflops_per_gpu", 0) * 1e12
    if not rate:
        return 0.0
    full = bool(re.search(r"incl[a-z.]* recompute|=hw\b|hardware", note)) and candidate.recompute == FULL
    causal = "causal" in note
    hidden, kind = _whole(row, "hidden", 0), profile.kinds[0]
    weights = sum(item.flops for item in kind.matmuls if item.divided != "count")
    square = 4.0 * profile.positions**2 * hidden * (0.5 if causal else 1.0)
    blocks = len(profile.blocks) * (weights + square)
    flops = recipe.batch_size * (3 * (blocks + profile.after.flops) + (blocks if full else 0))
    return flops / (rate * devices)


# --- evaluation --------------------------------------------------------------------------------------------------


Kind = tuple[str, str, str]


def predict(rows: Sequence[Published], fitted: Mapping[Kind, Hardware] = MappingProxyType({})) -> np.ndarray:
    """[rows] seconds; with what was fitted for the kind of a row's machine, or its own constants."""
    groups: dict[tuple[int, int, int], list[int]] = {}
    for index, item in enumerate(rows):
        run = item.run
        groups.setdefault((id(run.profile), id(run.recipe), id(run.hardware)), []).append(index)
    result = np.zeros(len(rows))
    for group in groups.values():
        run = rows[group[0]].run
        hardware = run.hardware
        assert hardware is not None
        known = fitted.get(hardware.kind)
        if known is not None:
            hardware = hardware.with_constants(known.constants, known.origin, known.residuals)
        candidates = Candidates.of(rows[index].run.candidate for index in group)
        with empty_stages():
            result[group] = step_time(run.profile, run.recipe, hardware, candidates).seconds
    return result


def calibrated(rows: Sequence[Published], names: Sequence[str] = FITTED) -> dict[Kind, Hardware]:
    """The machines of these rows with constants fitted to them: one for each kind of device and stack."""
    machines = {machine.kind: machine for item in rows if (machine := item.run.hardware) is not None}
    with empty_stages():
        return {kind: fit(machine, [item.run for item in rows], names) for kind, machine in machines.items()}


def from_others(rows: Sequence[Published], others: Sequence[Published], sample: int = 60) -> np.ndarray:
    """Errors of the rows of one source with constants fitted to up to so many rows of other sources."""
    picked = np.random.default_rng(0).permutation(len(others))[:sample]
    return errors(rows, predict(rows, calibrated([others[index] for index in sorted(picked)])))


def errors(rows: Sequence[Published], predicted: np.ndarray) -> np.ndarray:
    """[rows] |predicted / observed - 1|."""
    return np.abs(predicted / np.array([item.run.seconds for item in rows]) - 1)


def after_calibration(rows: Sequence[Published], count: int = 5, repeats: int = 5) -> np.ndarray:
    """Errors of the rows that were not used, over all repeats; empty with too few rows."""
    if len(rows) < count + 2:
        return np.zeros(0)
    found = []
    for repeat in range(repeats):
        order = np.random.default_rng(repeat).permutation(len(rows))
        used, rest = ([rows[index] for index in part] for part in (order[:count], order[count:]))
        found.append(errors(rest, predict(rest, calibrated(used))))
    return np.concatenate(found)


@dataclass(frozen=True)
class Choice:
    """What choosing by prediction gives in one sweep."""

    sweep: tuple[str, ...]
    rows: int
    correlation: float
    regret: tuple[float, float, float]
    """Best observed time among the first 1, 3 and 5 by prediction, over the best of all, minus 1."""


def choice(rows: Sequence[Published], predicted: np.ndarray) -> Choice:
    """Of one sweep."""
    observed = np.array([item.run.seconds for item in rows])
    order = np.argsort(predicted, kind="stable")
    regret = tuple(float(observed[order[:first]].min() / observed.min() - 1) for first in (1, 3, 5))
    ranks = [np.argsort(np.argsort(values)) for values in (predicted, observed)]
    return Choice(rows[0].sweep, len(rows), float(np.corrcoef(*ranks)[0, 1]), regret)


def sweeps(rows: Iterable[Published], least: int = 4) -> list[list[Published]]:
    """Groups of rows that differ in nothing but how they run."""
    groups: dict[tuple[str, ...], list[Published]] = {}
    for item in rows:
        groups.setdefault(item.sweep, []).append(item)
    return [group for group in groups.values() if len(group) >= least]


def held_out_choices(rows: Sequence[Published], sample: int = 60) -> list[Choice]:
    """Choices in all sweeps of a source, with constants fitted to a sample of its other models."""
    found = []
    for model in sorted({item.model for item in rows}):
        own = sweeps(item for item in rows if item.model == model)
        others = [item for item in rows if item.model != model]
        if not own:
            continue
        fitted: dict[Kind, Hardware] = {}
        if others:
            picked = np.random.default_rng(0).permutation(len(others))[:sample]
            fitted = calibrated([others[index] for index in sorted(picked)])
        found += [choice(group, predict(group, fitted)) for group in own]
    return found


def main() -> None:
    """Print the figures of each source."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--source", default="", help="only sources whose names begin so")
    parser.add_argument("--residuals", action="store_true", help="each row, too")
    parser.add_argument("--no-sweeps", action="store_true", help="leave out what takes longest")
    args = parser.parse_args()
    rows = [item for item in read(args.rows) if item.timed and item.source.startswith(args.source)]
    print(f"{'source':28s} {'rows':>5s} {'error':>7s} {'bias':>7s} {'after 5':>8s} {'others':>7s} of them")
    together: list[tuple[np.ndarray, np.ndarray]] = []
    for source in dict.fromkeys(item.source for item in rows):
        own = [item for item in rows if item.source == source]
        predicted = predict(own)
        observed = np.array([item.run.seconds for item in own])
        before, after = errors(own, predicted), after_calibration(own)
        bias = float(np.exp(np.mean(np.log(predicted / observed))) - 1)
        text = f"{after.mean():8.1%}" if len(after) else f"{'-':>8s}"
        kinds = {item.run.hardware.kind for item in own if item.run.hardware is not None}
        others = [item for item in rows if item.source != source and item.run.hardware.kind in kinds]
        unseen = f"{from_others(own, others).mean():7.1%} {len(others):7d}" if others else f"{'-':>7s} {0:7d}"
        print(f"{source:28s} {len(own):5d} {before.mean():7.1%} {bias:+7.1%} {text} {unseen}")
        if source.startswith(MEGATRON):
            together.append((before, after))
        if args.residuals:
            for item, value, true in zip(own, predicted, observed, strict=True):
                c = item.run.candidate
                where = f"dp{c.dp} mp{c.mp} pp{c.pp}v{c.virtual_stages} cp{c.cp} z{c.level} m{c.microbatches}"
                print(
                    f"  {item.model:16s} {where:34s} r{c.recompute} {c.pipeline_name:16s} {true:9.3f} {value:9.3f} "
                    f"{value / true - 1:+7.1%}  {(item.row.get('note') or '')[:40]}"
                )
    if len(together) > 1:
        # Every row counts once, however often it was left out of a calibration.
        before = np.concatenate([item for item, _ in together])
        after = np.average([item.mean() for _, item in together], weights=[len(item) for item, _ in together])
        print(f"{'Megatron-class, all rows':28s} {len(before):5d} {before.mean():7.1%} {'':7s} {after:8.1%}")
    if args.no_sweeps:
        return
    print(f"\n{'sweep':28s} {'groups':>6s} {'order':>6s} {'first':>7s} {'of 3':>7s} {'of 5':>7s} {'worst':>7s}")
    for source in dict.fromkeys(item.source for item in rows):
        found = held_out_choices([item for item in rows if item.source == source])
        if found:
            mean = np.mean([item.regret for item in found], axis=0)
            worst = max(item.regret[0] for item in found)
            order = np.mean([item.correlation for item in found])
            print(
                f"{source:28s} {len(found):6d} {order:6.2f} {mean[0]:7.1%} {mean[1]:7.1%} {mean[2]:7.1%} {worst:7.1%}"
            )


if __name__ == "__main__":
    main()
