"""Are ways to train `model=llama` on this machine put in the right order by the calibrated planner?

    python tests/benchmarks/planner_order.py [--work outputs/planner_order] [--rounds 2]

Calibrates with four ranks, measures each case of `CASES` in short trainings through the command, predicts each, and
prints both beside each other. Goal: of pairs that differ by more than 20 % as measured, none is predicted the other way
round.
What was measured is kept in `<work>/measured.json` and not measured again; `--remeasure` begins anew. Wants a quiet
machine: rounds go over all cases in turn, and the least median counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from autolaunch.models.llama import Llama
from autolaunch.models.llama_config import llama_config
from autolaunch_strategies.config import CP_BACKENDS
from autolaunch_strategies.planner.candidate import FULL, PIPELINES, Candidate, Candidates
from autolaunch_strategies.planner.enumerate import enumerate_candidates
from autolaunch_strategies.planner.hardware import Hardware, hardware_from
from autolaunch_strategies.planner.module_profile import profile_module
from autolaunch_strategies.planner.profile import ModelProfile, Recipe
from autolaunch_strategies.planner.time import step_time

RANKS, BATCH, POSITIONS = 4, 16, 256
MODEL = ("model=llama", "data=synthetic", f"data.seq_len={POSITIONS}", f"data.batch_size={BATCH}")
FAR = 1.2
"""Measured times that differ by this factor have to be told apart."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to train."""

    overrides: str
    candidate: Candidate


def _pipeline(name: str, pp: int, microbatches: int, virtual_stages: int = 1, **values: int) -> Case:
    dp = values.get("dp", 1)
    mp = values.get("mp", 1)
    candidate = Candidate(
        pp=pp, pipeline=PIPELINES.index(name), microbatches=microbatches, virtual_stages=virtual_stages, **values
    )
    mesh = f"dp{dp}xmp{mp}xpp{pp}"
    sharding = f" dp.sharding_level={values.get('level', 0)}"
    return Case(f"mesh={mesh} pp={name} data.microbatches={microbatches}{sharding}", candidate)


def _data(level: int, microbatches: int = 1, recompute: int = 0) -> Case:
    again = " recompute=full" if recompute else ""
    return Case(
        f"mesh=4 dp.sharding_level={level} data.microbatches={microbatches}{again}",
        Candidate(dp=4, level=level, microbatches=microbatches, recompute=recompute),
    )


def _context(backend: str, cp: int = 4, **values: int) -> Case:
    dp, mp = values.get("dp", 1), values.get("mp", 1)
    ulysses = {"ulysses": cp, "usp": cp // 2}.get(backend, 1)
    candidate = Candidate(cp=cp, backend=CP_BACKENDS.index(backend), ulysses=ulysses, **values)
    return Case(f"mesh=dp{dp}xmp{mp}xcp{cp} cp={backend} dp.sharding_level=0", candidate)


def _model(mp: int, sequence_parallel: int = 0, dp: int = 1, level: int = 0, microbatches: int = 1) -> Case:
    name = "seq_parallel" if sequence_parallel else "tensor_parallel"
    return Case(
        f"mesh={dp}x{mp} mp={name} dp.sharding_level={level} data.microbatches={microbatches}",
        Candidate(dp=dp, mp=mp, level=level, sequence_parallel=sequence_parallel, microbatches=microbatches),
    )


CASES = (
    _data(0),
    _data(0, microbatches=2),
    _data(0, microbatches=4),
    _data(0, recompute=FULL),
    _data(1),
    _data(1, microbatches=4),
    _data(2),
    _data(2, microbatches=4),
    _data(3),
    _data(3, microbatches=4),
    _data(3, recompute=FULL),
    _model(4),
    _model(4, sequence_parallel=1),
    _model(4, microbatches=4),
    _model(2, dp=2),
    _model(2, sequence_parallel=1, dp=2),
    _model(2, dp=2, level=3),
    _model(2, dp=2, microbatches=4),
    _pipeline("exact", 4, 4),
    _pipeline("exact", 4, 8),
    _pipeline("exact", 2, 4, dp=2),
    _pipeline("1f1b", 4, 4),
    _pipeline("1f1b", 4, 16),
    _pipeline("gpipe", 4, 4),
    _pipeline("1f1b", 2, 4, dp=2),
    _pipeline("1f1b", 2, 4, dp=2, level=3),
    _pipeline("zbv_zero_bubble", 2, 4, virtual_stages=2, dp=2),
    _pipeline("1f1b", 2, 4, mp=2),
    _context("gather"),
    _context("ring"),
    _context("ulysses"),
    _context("usp"),
    _context("gather", cp=2, dp=2),
    _context("ring", cp=2, dp=2),
    _context("ulysses", cp=2, mp=2),
)


def main() -> None:
    arguments = _arguments()
    arguments.work.mkdir(parents=True, exist_ok=True)
    cluster = arguments.cluster or _calibrate(arguments.work, arguments.recalibrate)
    hardware = hardware_from(yaml.safe_load(cluster.read_text(encoding="utf-8")))
    profile, recipe = _described()
    cases = _candidates(profile, recipe, hardware)
    times = _measure(arguments, cases)
    cases = [case for case in cases if case.overrides in times]
    predicted = step_time(profile, recipe, hardware, Candidates.of(case.candidate for case in cases))
    measured = [times[case.overrides] for case in cases]
    _print_table(cases, measured, predicted)
    wrong = _print_order(cases, measured, predicted.seconds.tolist())
    sys.exit(1 if wrong else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("outputs/planner_order"), help="where everything is kept")
    parser.add_argument("--rounds", type=int, default=2, help="trainings of each case")
    parser.add_argument("--steps", type=int, default=15, help="optimizer steps of a training")
    parser.add_argument("--cluster", type=Path, help="a calibrated cluster.yaml, instead of calibrating")
    parser.add_argument("--recalibrate", action="store_true", help="calibrate again")
    parser.add_argument("--remeasure", action="store_true", help="forget what was measured")
    parser.add_argument("--only", default="", help="measure only cases with this text in their overrides")
    return parser.parse_args()


def _autolaunch(*words: str, timeout: float) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "autolaunch", *words], capture_output=True, text=True, timeout=timeout, env=environment
    )


def _calibrate(work: Path, again: bool) -> Path:
    directory = (work / "calibration").absolute()
    if again or not (directory / "cluster.yaml").is_file():
        done = _autolaunch("calibrate", f"cluster=localx{RANKS}", f"output_dir={directory}", timeout=300)
        print(done.stdout + done.stderr)
        if done.returncode:
            sys.exit(done.returncode)
    return directory / "cluster.yaml"


def _candidates(profile: ModelProfile, recipe: Recipe, hardware: Hardware) -> list[Case]:
    """The cases that the planner considers; of the others its reasons are printed."""
    _, rejections = enumerate_candidates(profile, recipe, hardware)
    pointless = {rule.name for rule in rejections.rules if rule.lifted_by}  # considered if asked for
    kept = []
    for case in CASES:
        one = case.candidate
        if one.level == 0:  # all ranks of dp are replicas then
            case = dataclasses.replace(case, candidate=dataclasses.replace(one, replicate=one.dp))
        reasons = [reason for name, reason in rejections.of(case.candidate) if name not in pointless]
        if reasons:
            print(f"no candidate: {case.overrides}: {'; '.join(reasons)}")
        else:
            kept.append(case)
    return kept


def _measure(arguments: argparse.Namespace, cases: list[Case]) -> dict[str, float]:
    """Overrides -> the least of the median step times of the rounds."""
    record = arguments.work / "measured.json"
    known: dict[str, list[float]] = {}
    if record.is_file() and not arguments.remeasure:
        known = json.loads(record.read_text(encoding="utf-8"))
    for turn, case in itertools.product(range(arguments.rounds), cases):
        if arguments.only not in case.overrides or len(known.get(case.overrides, ())) > turn:
            continue
        directory = (arguments.work / "run").absolute()
        shutil.rmtree(directory, ignore_errors=True)
        words = [*MODEL, *case.overrides.split(), f"trainer.max_steps={arguments.steps}", f"output_dir={directory}"]
        quiet = ["checkpoint.enabled=false", "trainer.limit_val_batches=0", "trainer.enable_progress_bar=false"]
        done = _autolaunch(*words, *quiet, timeout=600)
        if done.returncode:
            print(f"{case.overrides}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
            continue
        seconds = json.loads((directory / "summary.json").read_text(encoding="utf-8"))["step_time_s"]
        known.setdefault(case.overrides, []).append(seconds)
        record.write_text(json.dumps(known, indent=1), encoding="utf-8")
        print(f"{seconds:8.4f} s  {case.overrides}", flush=True)
    return {overrides: min(seconds) for overrides, seconds in known.items()}


def _described() -> tuple[ModelProfile, Recipe]:
    values: dict[str, Any] = {"size": "debug"}
    from autolaunch.config.schema import LLAMA_PLANS

    model = Llama(llama_config(values))
    own = LLAMA_PLANS["tensor_parallel"]
    own = {name.removeprefix("model."): style for name, style in own.items()} if not hasattr(model, "model") else own
    profile = profile_module(model, positions=POSITIONS, own_plan=own, device_type="cpu")
    return profile, Recipe(batch_size=BATCH)


def _print_table(cases: list[Case], measured: list[float], predicted: Any) -> None:
    width = max(len(case.overrides) for case in cases)
    print(f"{'case':{width}}  measured  predicted   error  where the predicted time goes (ms)")
    for index in sorted(range(len(cases)), key=lambda i: measured[i]):
        guess = predicted.seconds[index]
        parts = sorted(((values[index], name) for name, values in predicted.parts.items()), reverse=True)
        told = ", ".join(f"{name} {value * 1e3:.0f}" for value, name in parts if value > 0.03 * guess)
        case = cases[index].overrides
        print(f"{case:{width}}  {measured[index]:8.4f}  {guess:9.4f}  {guess / measured[index] - 1:+6.0%}  {told}")
    errors = [abs(predicted.seconds[i] / measured[i] - 1) for i in range(len(cases))]
    print(f"mean absolute error {statistics.mean(errors):.1%}, median {statistics.median(errors):.1%}")


def _print_order(cases: list[Case], measured: list[float], predicted: list[float]) -> int:
    far, wrong = 0, []
    for i, j in itertools.combinations(range(len(cases)), 2):
        fast, slow = (i, j) if measured[i] < measured[j] else (j, i)
        if measured[slow] > FAR * measured[fast]:
            far += 1
            if predicted[slow] <= predicted[fast]:
                wrong.append((fast, slow))
    for fast, slow in wrong:
        print(
            f"wrong order: {cases[fast].overrides} ({measured[fast]:.3f} s, predicted {predicted[fast]:.3f} s) "
            f"is faster than {cases[slow].overrides} ({measured[slow]:.3f} s, predicted {predicted[slow]:.3f} s)"
        )
    best = min(range(len(cases)), key=lambda i: predicted[i])
    print(
        f"pairs that differ by more than {FAR - 1:.0%}: {far}; "
        f"in the wrong order: {len(wrong)} ({len(wrong) / max(far, 1):.1%})"
    )
    print(
        f"the predicted best is {measured[best] / min(measured) - 1:.1%} slower than the measured best: "
        f"{cases[best].overrides}"
    )
    return len(wrong)


if __name__ == "__main__":
    main()
