"""What search=auto picks within a few trials, beside the best of all that could be run on this machine.

    python tests/benchmarks/search_local.py [--ranks 4] [--trials 5] [--steps 8] [--dir DIRECTORY] [KEY=VALUE ...]

1. Every candidate of the planner for so many processes of `model=llama` (within the overrides that are given) runs for
   `--steps` timed steps, as the trials of a search do. What was measured is kept in `--dir` and not measured again.
2. `autolaunch -m search=auto search.trials=N` with the same overrides, in a directory of its own.
3. Its pick and the fastest of 1. run in turn, `--turns` times each: a machine drifts over the hours that 1. takes, and
   the least of many noisy figures is too low.

Printed: how much slower the pick is than the best (goal: 5 %), by 1. and by 3., the trials that the search has made,
and the rank correlation of predicted and measured step times. Run it on a machine that does nothing else; with
`autolaunch calibrate cluster=localx4` before it, the planner knows the machine.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from autolaunch.config.cluster import hardware_of
from autolaunch.config.command_line import parse
from autolaunch.config.compose import compose
from autolaunch.instantiate import let_imports_see_the_working_directory
from autolaunch.jobs.run import resolve_job
from autolaunch.planning.choice import profile_of
from autolaunch.planning.wanted import wanted_by
from autolaunch.search.outcome import read_outcome
from autolaunch_strategies.planner.choose import look
from autolaunch_strategies.planner.predictions import PlannerPredictions
from autolaunch_strategies.planner.settings import overrides

MODEL = ["model=llama", "data=synthetic", "data.seq_len=128", "trainer.accelerator=cpu"]
TRIAL = [
    "checkpoint.enabled=false",
    "trainer.limit_val_batches=0",
    "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false",
]
WARM_UP = 2
SECONDS = 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a run of the exhaustive sweep")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--most", type=int, help="stop the exhaustive sweep after so many new runs (it can be resumed)")
    parser.add_argument("--dir", type=Path, default=Path("outputs/search_local"))
    parser.add_argument("overrides", nargs="*", help="what both are restricted to, such as recompute=none")
    arguments = parser.parse_args()
    let_imports_see_the_working_directory()
    directory = arguments.dir.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    typed = [*MODEL, f"cluster=localx{arguments.ranks}", *arguments.overrides]
    predictions = candidates(typed, directory)
    words_of = {" ".join(words): words for words in predictions["overrides"]}
    ways = list(words_of)
    print(f"{len(ways)} configurations", flush=True)

    known = directory / "measured.jsonl"
    measured = read(known)
    made = 0
    for way in ways:
        if way in measured:
            continue
        if arguments.most is not None and made >= arguments.most:
            break
        measured[way] = run(
            typed_of(arguments), words_of[way], directory / "runs" / str(len(measured)), arguments.steps
        )
        made += 1
        with known.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"way": way, **measured[way]}) + "\n")
        print(f"{len(measured)}/{len(ways)} {measured[way]['seconds']} {measured[way]['status']} {way}", flush=True)
    timed = {way: measured[way]["seconds"] for way in ways if way in measured and measured[way]["seconds"]}
    best = min(timed, key=lambda way: timed[way])
    print(f"best of {len(timed)} measured: {timed[best]:.4f} s {best}")
    failed = [way for way in ways if way in measured and not measured[way]["seconds"]]
    print(f"failed: {len(failed)}")
    order = dict(zip(ways, predictions["seconds"], strict=True))
    agreement = correlation([order[way] for way in timed], list(timed.values()))
    print(f"rank correlation of predicted and measured: {agreement:.3f}")

    searched = directory / f"search_{arguments.trials}"
    command = [sys.executable, "-m", "autolaunch", "-m", "search=auto", f"search.trials={arguments.trials}"]
    subprocess.run([*command, *typed, f"output_dir={searched}"], check=True)
    with (searched / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    pick = rows[0]["overrides"]
    print(f"search: {len({row['overrides'] for row in rows})} configurations, {len(rows)} runs; its pick: {pick}")
    if pick not in timed:
        print("the pick is not among those measured by the sweep: let it run to its end")
        return
    print(f"by the sweep: the pick takes {timed[pick]:.4f} s, {timed[pick] / timed[best] - 1:+.1%} of the best")
    if pick == best:
        return
    turns: dict[str, list[float]] = {pick: [], best: []}
    for turn in range(arguments.turns):
        for number, way in enumerate((pick, best)):
            place = directory / "turns" / f"{turn}_{number}"
            turns[way].append(run(typed_of(arguments), words_of[way], place, 2 * arguments.steps)["seconds"])
    ratios = [ours / theirs for ours, theirs in zip(turns[pick], turns[best], strict=True)]
    single = ", ".join(f"{ratio - 1:+.1%}" for ratio in ratios)
    print(f"in turn: {statistics.median(ratios) - 1:+.1%} of the best ({single})")


def typed_of(arguments: argparse.Namespace) -> list[str]:
    """The overrides of a run: without those that a candidate sets."""
    chosen = ("mesh", "dp", "mp", "pp", "cp", "recompute", "data.microbatches")
    kept = [item for item in arguments.overrides if not item.lstrip("+").startswith(chosen)]
    return [*MODEL, *kept]


def candidates(typed: list[str], directory: Path) -> dict[str, list[Any]]:
    """Overrides and predicted seconds of every candidate."""
    composed = compose(parse(["plan", *typed]))
    job = resolve_job(composed.config, composed.config.hydra, directory)
    hardware = hardware_of(job.config["cluster"])
    profile, recipe = profile_of(job.config, hardware.device)
    _, looked = look(profile, recipe, hardware, wanted_by(typed, job.config))
    found = PlannerPredictions(profile, recipe, hardware, [looked.candidates])
    rows = [found.candidates[index] for index in range(len(found.candidates))]
    return {"overrides": [overrides(row, profile, recipe) for row in rows], "seconds": list(found.after([]).seconds)}


def run(typed: list[str], words: list[str], directory: Path, steps: int) -> dict[str, Any]:
    """Median seconds of the steps of one run, or how it failed."""
    command = [sys.executable, "-m", "autolaunch", *typed, *words, *TRIAL]
    command += [f"trainer.max_steps={WARM_UP + steps}", f"output_dir={directory}"]
    env = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    try:
        subprocess.run(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"seconds": None, "status": f"not over after {SECONDS} s"}
    outcome = read_outcome(directory, steps)
    seconds = statistics.median(outcome.seconds) if outcome.seconds else None
    return {"seconds": seconds, "status": f"{outcome.status} {outcome.reason}".strip()}


def read(path: Path) -> dict[str, dict[str, Any]]:
    """What was measured before."""
    if not path.is_file():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    return {row["way"]: {"seconds": row["seconds"], "status": row["status"]} for row in rows}


def correlation(left: list[float], right: list[float]) -> float:
    """Spearman's."""
    if len(left) < 3:
        return float("nan")
    ranks = [np.argsort(np.argsort(values)) for values in (left, right)]
    return float(np.corrcoef(*ranks)[0, 1])


if __name__ == "__main__":
    main()
