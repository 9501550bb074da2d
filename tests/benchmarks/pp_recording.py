"""How long it takes to learn the order of a model's parts for a pipeline: `model=llama model.size=8b` on meta.

    python tests/benchmarks/pp_recording.py [--size 8b] [--ranks 4] [--runs 5] [--profile]

Each run is a process of its own, so that what is loaded and looked up once counts. Counted are the cut (a recorded
forward pass), the copy without memory, and what the first call with a batch learns (two recorded passes: how outputs
depend on the batch). Printed are minimum, median and maximum of the processor time over the runs: all of it is one
thread's, so it is also the time that passes where nothing else runs. Aim: less than 2 s in all.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="8b")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="print where a run spends its time")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once or arguments.profile:
        run_once(arguments)
        return
    command = [sys.executable, __file__, *sys.argv[1:], "--once"]
    lines = [
        subprocess.run(command, check=True, env=_environment(), capture_output=True, text=True).stdout
        for _ in range(arguments.runs)
    ]
    runs = [json.loads(line) for line in lines]
    for name in runs[0]:
        times = sorted(run[name] for run in runs)
        print(f"{name:>22}: {times[0]:.2f} s, {statistics.median(times):.2f} s, {times[-1]:.2f} s", flush=True)


def _environment() -> dict[str, str]:
    root = Path(__file__).resolve().parents[2]
    paths = [str(root / "launcher"), str(root / "strategies"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def run_once(arguments: argparse.Namespace) -> None:
    sys.path[:0] = _environment()["PYTHONPATH"].split(os.pathsep)
    import lightning.pytorch as pl
    import torch

    from autolaunch.models.llama import Llama
    from autolaunch.models.llama_config import llama_config
    from autolaunch_strategies.config import PipelineParallel
    from autolaunch_strategies.model.blocks import find_blocks
    from autolaunch_strategies.pipeline.build import plan_cut
    from autolaunch_strategies.pipeline.structure import Structures, skeleton_of

    module = pl.LightningModule()
    with torch.device("meta"):
        module.model = Llama(llama_config({"size": arguments.size}))
    blocks = find_blocks(module)
    tokens = torch.zeros(16, 128, dtype=torch.int64)
    times: dict[str, float] = {}

    def timed(name: str, work: object) -> object:
        assert callable(work)
        begin = time.process_time()
        result = work()
        times[name] = time.process_time() - begin
        return result

    def everything() -> None:
        cutting = timed("cut", lambda: plan_cut(module, blocks, PipelineParallel(), arguments.ranks, wrapped=True))
        copy = timed("copy without memory", lambda: skeleton_of(module.model))
        structures = Structures(cutting, copy)
        timed("first batch", lambda: structures.of((tokens,), {}, True, several=True))
        times["in all"] = sum(times.values())

    if arguments.profile:
        profile = cProfile.Profile()
        profile.runcall(everything)
        pstats.Stats(profile).sort_stats("cumulative").print_stats(60)
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    else:
        everything()
    print(json.dumps(times))


if __name__ == "__main__":
    main()
