"""How long a plan takes: `OMP_NUM_THREADS=1 python tests/benchmarks/planner_speed.py [--command]`.

`--command` times `autolaunch plan` for Llama 70B on 1,024 devices, with an empty cache and with a profile that was
kept, its first line, and `autolaunch dryrun` of it, beside `import torch` in an empty process, as they take turns, and
without OMP_NUM_THREADS, which nobody types. The aims are seconds of a machine that imports torch in 1.1 s: imports
compare machines. Without it, what comes after profiling:

For each model and number of devices the least of several turns: candidates, their memory and time, the choice with its
uncertainty (and the processor time of that, which other work on the machine disturbs less), its account as plain data,
and one answer to `why`. Aims: 0.3 s on 16,384 devices, 1 s on 65,536.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "strategies")]
from autolaunch_strategies.planner.choose import make_plan  # noqa: E402 - behind the path
from autolaunch_strategies.planner.enumerate import Space  # noqa: E402 - behind the path
from autolaunch_strategies.planner.explain import why  # noqa: E402 - behind the path
from tests.planner.candidates import llama, machines, recipe  # noqa: E402 - behind the path

CASES = (
    ("8b", 8, 128, 8192, None),
    ("8b", 64, 512, 8192, None),
    ("70b", 1024, 1024, 8192, None),
    ("405b", 16384, 2048, 8192, 0.3),
    ("405b", 16384, 128, 131072, 0.3),
    ("405b", 65536, 4096, 8192, 1.0),
)
"""Size of Llama 3, devices, sequences in a batch, positions, seconds that are aimed at."""


def least(turns: int, function: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> tuple[float, Any]:
    """(seconds of the fastest of some turns, what the last one returned)."""
    seconds, result = [], None
    for _ in range(turns):
        begin = clock()
        result = function()
        seconds.append(clock() - begin)
    return min(seconds), result


PLAN = (
    *("plan", "model=llama", "model.size=70b", "cluster=h100x1024", "data=synthetic", "data.seq_len=8192"),
    *("data.batch_size=1024", "data.num_validation_sequences=0", "precision=bf16-mixed", "output_dir=plan"),
)
DRY_RUN = (
    *("dryrun", "mesh=dp64xmp8xpp2", "model=llama", "model.size=70b", "mp=seq_parallel", "pp=1f1b"),
    *("data.batch_size=128", "output_dir=dryrun"),
)
AIMS = {"first line": 1.0, "plan, profile kept": 1.2, "plan, new": 2.5, "dry run": 10.0}
"""Seconds, where torch is imported in `IMPORT`."""
IMPORT = 1.1


def time_the_command(turns: int) -> None:
    """Print how long the commands take: medians, in seconds and in imports of torch."""
    roots = [str(ROOT / "launcher"), str(ROOT / "strategies")]
    taken: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(roots), "PYTHONUNBUFFERED": "1"}
        environment.pop("OMP_NUM_THREADS", None)  # as users type it

        def run(*words: str, cache: str = "kept") -> tuple[float, float]:
            """(seconds to its first line, and to its end)."""
            begin = time.perf_counter()
            with subprocess.Popen(
                [sys.executable, *words],
                cwd=directory,
                env={**environment, "XDG_CACHE_HOME": f"{directory}/{cache}"},
                stdout=subprocess.PIPE,
                text=True,
            ) as process:
                assert process.stdout is not None
                process.stdout.readline()
                first = time.perf_counter() - begin
                process.stdout.read()
            if process.returncode:
                raise SystemExit(f"{' '.join(words)}: exit code {process.returncode}")
            return first, time.perf_counter() - begin

        run("-m", "autolaunch", *PLAN)
        for turn in range(turns):
            taken["import torch"].append(run("-c", "import torch")[1])
            first, whole = run("-m", "autolaunch", *PLAN)
            taken["first line"].append(first)
            taken["plan, profile kept"].append(whole)
            taken["plan, new"].append(run("-m", "autolaunch", *PLAN, cache=f"empty_{turn}")[1])
            taken["dry run"].append(run("-m", "autolaunch", *DRY_RUN)[1])
    unit = statistics.median(taken.pop("import torch"))
    print(f"{'import torch':<20}{unit:>8.2f} s")
    for what, seconds in taken.items():
        median, aim = statistics.median(seconds), AIMS[what]
        print(f"{what:<20}{median:>8.2f} s, aim {aim:4.1f}{median / unit:>8.2f} imports, aim {aim / IMPORT:.2f}")


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--command", action="store_true", help="time the command, not the planner")
    arguments = parser.parse_args()
    turns = arguments.turns
    if arguments.command:
        return time_the_command(turns)
    print("model  devices  positions  looked at    fit candidates       plan  processor    account        why  aim")
    missed = False
    for size, devices, batch, positions, aim in CASES:
        case = (llama(size, positions), recipe(batch), machines(devices))
        listed, _ = least(turns, lambda case=case: Space(*case, {}).candidates())
        planned, plan = least(turns, lambda case=case: make_plan(*case))
        processor, _ = least(turns, lambda case=case: make_plan(*case), time.process_time)
        told, account = least(turns, plan.to_dict)
        explained, _ = least(turns, lambda plan=plan: why(plan, {"mp": 2}))
        missed |= aim is not None and planned > aim
        times = (f"{seconds * 1e3:>8.0f} ms" for seconds in (listed, planned, processor, told, explained))
        print(
            f"{size:<5}{devices:>9,}{positions:>11,}{len(plan.looked):>11,}{int(plan.looked.fits.sum()):>7,}"
            f"{''.join(times)}  {f'{aim:.1f} s' if aim else '-':<5}  {' '.join(account['chosen']['overrides'])}"
        )
    print("slower than aimed at" if missed else "as fast as aimed at")


if __name__ == "__main__":
    main()
