"""How long a plan takes: `OMP_NUM_THREADS=1 python tests/benchmarks/planner_speed.py [--command]`.

`--command` times `autolaunch plan` for Llama 70B on 1,024 devices by processor time, with an empty cache and with a
profile that was kept. Aims on a machine at rest: 2.5 s, and 1.2 s. Without it, what comes after profiling:

For each model and number of devices the least of several turns: candidates, their memory and time, the choice with its
uncertainty (and the processor time of that, which other work on the machine disturbs less), its account as plain data,
and one answer to `why`. Aims: 0.3 s on 16,384 devices, 1 s on 65,536.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
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


COMMAND = (
    *("plan", "model=llama", "model.size=70b", "cluster=h100x1024", "data=synthetic", "data.seq_len=8192"),
    *("data.batch_size=1024", "data.num_validation_sequences=0", "precision=bf16-mixed", "output_dir=plan"),
)


def time_the_command(turns: int) -> None:
    """Print the processor seconds of the command without and with a profile that was kept."""
    roots = [str(ROOT / "launcher"), str(ROOT / "strategies")]
    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(roots), "XDG_CACHE_HOME": directory}

        def run() -> None:
            words = [sys.executable, "-m", "autolaunch", *COMMAND]
            subprocess.run(words, cwd=directory, env=environment, check=True, capture_output=True)

        def clock() -> float:
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            return used.ru_utime + used.ru_stime

        print(f"with an empty cache  {least(1, run, clock)[0]:.2f} s of processor time, aim 2.5 s")
        print(f"with a kept profile  {least(turns, run, clock)[0]:.2f} s of processor time, aim 1.2 s")


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
