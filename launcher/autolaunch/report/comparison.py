"""Whether runs went the same way, and if not, where they part. Imports no torch."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from autolaunch_strategies.config import ConfigError

MOMENTS = "compare.json"
"""What a run of `compare` went through: see `read_run`."""

BATCH, WEIGHT, BUFFER = "batch", "weight", "buffer"
INPUT, OUTPUT, GRADIENT = "input", "output", "gradient"
FURTHER_OUTPUT = ", output "
"""Between the name of a module and which of several things that it returns it is, if not the first."""

Moments = tuple[float, float]
"""Mean and root mean square of a tensor."""

_NOISE = 1e-3
"""Of the largest root mean square of its kind: what is smaller is rounding (such as the gradient of a key's bias)."""

_ROUNDING = 1e-12
"""Of sums in double precision that are added up in another order on another mesh."""

_IN_FP32 = 1e-6
"""Of numbers in fp32 that are added up in another order."""

_ONE_FACTOR = 1e-2
"""How far factors by which gradients are larger may lie apart, at most, to be taken for one."""

_CONDITIONS = ("lr", "tokens")

_LISTED = 4
"""How many steps a message lists before it leaves out those between the first and the last."""


@dataclass(frozen=True)
class Run:
    """What is known of a run."""

    label: str
    rows: dict[int, dict[str, float]]
    """Step -> loss and grad_norm, as far as they were logged."""
    steps: list[dict[str, dict[str, Moments]]]
    """Of each step kind -> name -> moments; empty for a run of another task than `compare`."""
    classes: dict[str, str]
    """Of its modules."""
    drawing: frozenset[str] = frozenset()
    """Those of its modules that ask a generator for numbers in their forward, or call others that do."""
    by_position: bool = False
    """Whether `random_numbers=by_position`."""
    conditions: dict[int, dict[str, float]] = field(default_factory=dict)
    """Step -> lr and tokens, as far as they were logged: what a step was given, not what came of it."""


@dataclass(frozen=True)
class Difference:
    """The largest relative difference of two runs, and the first one beyond the tolerance."""

    largest: float
    step: int | None = None
    """The first step at which loss or gradient norm differ by more; None if none does."""
    of: str = ""
    values: tuple[float, float] = (0.0, 0.0)
    relative: float = 0.0


@dataclass(frozen=True)
class Parting:
    """The first tensor in which two runs differ, in the order in which a step computes them."""

    kind: str
    name: str
    moments: tuple[Moments, Moments]
    relative: float
    before: float
    """The largest difference of what came before it."""
    count: int
    """How many tensors came before it."""


def read_run(directory: Path, label: str) -> Run:
    """What a run's directory says of its course.

    Raises:
        ConfigError: there is no metrics.csv, or no loss in it, or a file is not as a run writes it.
    """
    path, kept = directory / "metrics.csv", directory / MOMENTS
    if not path.is_file():
        raise ConfigError(
            str(directory), "no training to compare: there is no metrics.csv in it", "the directory of a run"
        )
    rows = _read(path, _logged_rows)
    if not any(rows.values()):
        raise ConfigError(
            str(directory),
            "no training to compare: no loss in its metrics.csv",
            "the directory of a run that trained for a step or more",
        )
    moments: Mapping[str, Any] = _read(kept, json.loads) if kept.is_file() else {}
    drawing, by_position = frozenset(moments.get("drawing", [])), moments.get("random_numbers") == "by_position"
    conditions = _read(path, partial(_logged_rows, keys=_CONDITIONS))
    return Run(label, rows, moments.get("steps", []), moments.get("classes", {}), drawing, by_position, conditions)


def _read(path: Path, understood: Callable[[str], Any]) -> Any:
    try:
        return understood(path.read_text(encoding="utf-8"))
    except (KeyError, TypeError, ValueError) as error:
        problem = f"can't be read as what a run writes: {type(error).__name__}: {error}"
        raise ConfigError(str(path), problem, "the directory of a run, with its files as they were written") from error


def _logged_rows(text: str, keys: Sequence[str] = ("loss", "grad_norm")) -> dict[int, dict[str, float]]:
    whole, _, _ = text.rpartition("\n")  # a killed process leaves half a row behind
    return {
        int(row["step"]): {key: float(row[key]) for key in keys if row.get(key)}
        for row in csv.DictReader(whole.splitlines())
    }


def common_steps(first: Run, second: Run) -> list[int]:
    """The steps of which both runs have logged the loss or the gradient norm.

    Raises:
        ConfigError: there is no such step.
    """
    common = [step for step, logged in first.rows.items() if logged.keys() & second.rows.get(step, {}).keys()]
    if not common:
        raise ConfigError(
            f"{first.label} and {second.label}",
            f"have no logged step in common: the first has {_in_words(_logged(first))}, "
            f"the second {_in_words(_logged(second))}",
            "runs that have logged the same steps",
        )
    return common


def difference(first: Run, second: Run, tolerance: float) -> Difference:
    """How far two runs are apart, over the steps that both have logged.

    Raises:
        ConfigError: there is no such step.
    """
    largest = 0.0
    for step in common_steps(first, second):
        for key in ("loss", "grad_norm"):
            pair = first.rows[step].get(key), second.rows[step].get(key)
            if pair[0] is None or pair[1] is None:
                continue
            relative = _relative(pair[0], pair[1], max(abs(pair[0]), abs(pair[1])))
            if not relative <= tolerance:
                named = "gradient norm" if key == "grad_norm" else key
                return Difference(max(largest, relative), step, named, (pair[0], pair[1]), relative)
            largest = max(largest, relative)
    return Difference(largest)


def parting(first: Run, second: Run, step: int, tolerance: float) -> Parting | None:
    """The first tensor of a step in which they differ; None if none does, or nothing was kept of it."""
    before, count = 0.0, 0
    tolerance = max(tolerance, _ROUNDING)
    if max(step, 1) > min(len(first.steps), len(second.steps)):
        return None
    tables = first.steps[step - 1], second.steps[step - 1]
    for kind in (BATCH, WEIGHT, BUFFER, OUTPUT, GRADIENT):
        both = [table.get(kind, {}) for table in tables]
        smallest = _NOISE * max((moments[1] for table in both for moments in table.values()), default=0.0)
        for name in both[0]:
            if name not in both[1]:
                continue
            moments = both[0][name], both[1][name]
            scale = max(moments[0][1], moments[1][1], 0.0 if kind == BATCH else smallest)
            relative = max(_relative(*pair, scale) for pair in zip(*moments, strict=True))
            if not relative <= tolerance:
                return Parting(kind, name, moments, relative, before, count)
            before, count = max(before, relative), count + 1
    return None


def likely_cause(first: Run, second: Run, step: int, where: Parting | None, tolerance: float) -> str:
    """What such a difference comes from more often than not."""
    if told := _other_conditions(first, second, step):
        return told
    if not first.steps or not second.steps:
        return "what modules computed was not kept: `autolaunch compare` with these keys, and their values side by side"
    if where is None:
        return "outputs of modules and gradients are the same: the loss is a mean over a part of the batch"
    if where.kind == BATCH:
        return "other data, or another order: what of data.*, seed or the loader depends on the ranks?"
    if where.kind == WEIGHT:
        if step == 1:
            return "other weights from the start: what the model draws or loads depends on the ranks"
        return "the optimizer: the same gradients, and other weights after them"
    if where.kind == BUFFER:
        return "what a forward keeps from step to step: it sees a part of the batch, or one microbatch after the other"
    if _same_loss(first, second, step, _IN_FP32) and parting(first, second, step, _IN_FP32) is None:
        return "rounding: numbers are added up in another order, which a larger compare.tolerance passes over"
    if where.kind == GRADIENT:
        factor = _common_factor(first.steps[step - 1][GRADIENT], second.steps[step - 1][GRADIENT], tolerance)
        if factor is not None:
            return (
                f"all gradients are {factor:.4g} times as large: the loss is a sum, or a mean over a part of the batch"
            )
        outputs_kept = first.steps[step - 1].get(OUTPUT) and second.steps[step - 1].get(OUTPUT)
        if outputs_kept and not _same_loss(first, second, step, tolerance):
            return "what makes a loss of them: outputs of modules are the same. Does training_step look at its rank?"
        return "its backward pass, or that of what comes behind it"
    module = where.name.partition(FURTHER_OUTPUT)[0]
    kind = first.classes.get(module, "")
    inputs = [run.steps[step - 1].get(INPUT, {}).get(module) for run in (first, second)]
    if inputs[0] and inputs[1] and not _alike(inputs[0], inputs[1], tolerance):
        around = next((name for name in _around(module) if name in first.classes), "")
        drawn = _of_random_numbers(first, second, around)
        between = "what is computed between modules before it, from the same outputs: its input differs already"
        return f"{between}; {drawn}" if drawn else between
    drawn = _of_random_numbers(first, second, module)
    rest = "it sees a part of the batch, or its rules in mp.plan, its kernel differ"
    return drawn or f"{kind or 'this module'} computes something else with the same weights: {rest}"


def _other_conditions(first: Run, second: Run, until: int) -> str:
    """What is said of the first step, up to `until`, with another learning rate or number of tokens; empty if none."""
    for step in sorted(step for step in first.conditions.keys() & second.conditions.keys() if step <= until):
        one, other = first.conditions[step], second.conditions[step]
        shared = one.keys() & other.keys()
        if "tokens" in shared and one["tokens"] != other["tokens"]:
            pair = f"{one['tokens']:.0f} and {other['tokens']:.0f}"
            return f"other tokens, from step {step} on: {pair} (data.batch_size, data.seq_len, or rows left out)"
        # What a step's rate does shows in the next step.
        if (
            step < until
            and "lr" in shared
            and _relative(one["lr"], other["lr"], max(one["lr"], other["lr"])) > _IN_FP32
        ):
            pair = _both(one["lr"], other["lr"])
            where = "optimizer.lr, scheduler.*, or trainer.max_steps, where the scheduler ends"
            return f"another learning rate, from step {step} on: {pair} ({where})"
    return ""


def _around(module: str) -> Iterator[str]:
    """The names of the modules that `module` is in, the innermost first."""
    while module := module.rpartition(".")[0]:
        yield module


def _of_random_numbers(first: Run, second: Run, module: str) -> str:
    """What is said of a module that draws random numbers in both runs; empty of others."""
    if module not in first.drawing & second.drawing:
        return ""
    drawn = f"random numbers: {first.classes.get(module) or module} draws some in its forward"
    if first.by_position and second.by_position:
        return f"{drawn}, by a function that random_numbers=by_position leaves to the ranks"
    return f"{drawn}, others on every mesh (random_numbers=by_position draws alike)"


def _same_loss(first: Run, second: Run, step: int, tolerance: float) -> bool:
    losses = [run.rows.get(step, {}).get("loss") for run in (first, second)]
    if losses[0] is None or losses[1] is None:
        return True
    return _relative(losses[0], losses[1], max(abs(losses[0]), abs(losses[1]))) <= tolerance


def _alike(one: Moments, other: Moments, tolerance: float) -> bool:
    scale = max(one[1], other[1])
    return all(_relative(*pair, scale) <= max(tolerance, _ROUNDING) for pair in zip(one, other, strict=True))


def print_comparison(runs: Sequence[Run], tolerance: float, console: Console) -> bool:
    """Print how far each run is from the first one, and where it parts. Returns whether all are equal.

    Raises:
        ConfigError: one has logged none of the steps of the first one; nothing is printed then.
    """
    first, equal = runs[0], True
    counts = [len(common_steps(first, run)) for run in runs[1:]]
    alike = len(set(counts)) == 1
    over = f", {_of_its_steps(first, counts[0])}" if alike else ""
    console.print(Text(f"\ncompared with {first.label}{over}:", style="bold"), soft_wrap=True)
    for run, count in zip(runs[1:], counts, strict=True):
        apart = difference(first, run, tolerance)
        name = run.label if alike else f"{run.label}, {_steps(count)}"
        if apart.step is None:
            line = f"  {name}  equal to {_digits(apart.largest)} in loss and gradient norm"
            console.print(Text(line + _of_weights(first, run, tolerance), style="green"), soft_wrap=True)
            continue
        equal = False
        by = f"{apart.relative:.3g}, tolerance {tolerance:g}"
        line = f"  {name}  differs at step {apart.step}: {apart.of} {_both(*apart.values)} ({by})"
        console.print(Text(line, style="red"), soft_wrap=True)
        where = parting(first, run, apart.step, tolerance)
        for told in [] if where is None else _told(where, first):
            console.print(f"    {told}", highlight=False, soft_wrap=True, markup=False)
        cause = likely_cause(first, run, apart.step, where, tolerance)
        console.print(f"    likely: {cause}", highlight=False, soft_wrap=True, markup=False)
    return equal


def _of_weights(first: Run, second: Run, tolerance: float) -> str:
    """What is said of the weights and buffers after the last step, if they were kept.

    No verdict: where a gradient is nothing but rounding, Adam makes steps of its sign.
    """
    steps = len(first.steps)
    if not steps or len(second.steps) != steps:
        return ""
    where = parting(first, second, steps, tolerance)
    return ", and in weights" if where is None else f"; {where.kind}s are not: {where.name} ({_digits(where.relative)})"


def _told(where: Parting, run: Run) -> list[str]:
    """Where two runs part, in lines."""
    kind = run.classes.get(where.name.partition(FURTHER_OUTPUT)[0])
    of = {BATCH: f"{where.name} in the batch", OUTPUT: f"output of {where.name} ({kind})"}
    (mean, rms), (other_mean, other_rms) = where.moments
    lines = [
        f"first in: {of.get(where.kind, f'{where.kind} of {where.name}')}",
        f"          mean {_both(mean, other_mean)}, root mean square {_both(rms, other_rms)}",
    ]
    if where.count:
        lines.append(f"          {where.count} tensors before it are equal to {_digits(where.before)}")
    return lines


def _relative(first: float, second: float, scale: float) -> float:
    if first == second or (math.isnan(first) and math.isnan(second)):
        return 0.0
    return abs(first - second) / scale if scale else math.inf


def _common_factor(first: Mapping[str, Moments], second: Mapping[str, Moments], tolerance: float) -> float | None:
    """By which every gradient of the second run is larger; None if they don't agree on one, or it is 1."""
    largest = max((moments[1] for moments in first.values()), default=0.0)
    factors = [second[name][1] / rms for name, (_, rms) in first.items() if name in second and rms > _NOISE * largest]
    if not factors:
        return None
    apart, factor = min(max(10 * tolerance, _IN_FP32), _ONE_FACTOR), sorted(factors)[len(factors) // 2]
    agree = max(factors) - min(factors) <= apart * max(factors)
    return factor if agree and abs(factor - 1) > apart else None


def _both(first: float, second: float) -> str:
    """Two numbers, with as many digits as it takes to see that they differ."""
    digits = next((digits for digits in range(7, 18) if f"{first:.{digits}g}" != f"{second:.{digits}g}"), 7)
    return f"{first:.{digits}g} and {second:.{digits}g}"


def _digits(relative: float) -> str:
    return "the last bit" if relative == 0 else f"{relative:.0e}"


def _logged(run: Run) -> list[int]:
    return [step for step, logged in run.rows.items() if logged]


def _in_words(steps: Sequence[int]) -> str:
    shown = steps if len(steps) <= _LISTED else [*steps[: _LISTED - 2], "...", steps[-1]]
    return ", ".join(map(str, shown))


def _of_its_steps(run: Run, count: int) -> str:
    """How many of its steps another run is compared with."""
    logged = len(_logged(run))
    return _steps(count) if count == logged else f"{count} of its {_steps(logged)}"


def _steps(count: int) -> str:
    return f"{count} step{'s' if count != 1 else ''}"
