"""How fast the commands answer that only read config, beside the time that importing torch alone would take.

    python tests/benchmarks/command_line.py [--runs 7]

Figures to hold on 2 cores: `--cfg job` <= 0.5 s, `--help` <= 0.6 s (medians).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = {
    "autolaunch --cfg job": ["-m", "autolaunch", "--cfg", "job"],
    "autolaunch --help": ["-m", "autolaunch", "--help"],
    "autolaunch --info trainer": ["-m", "autolaunch", "--info", "trainer"],
    "a wrong config": ["-m", "autolaunch", "trainer.max_step=3"],
    "import torch": ["-c", "import torch"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    runs = parser.parse_args().runs
    root = Path(__file__).resolve().parents[2]
    paths = [str(root / "launcher"), str(root / "strategies"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    medians = {}
    print(f"{'command':<28} {'best':>8} {'median':>8} {'of import torch':>16}")
    for name, arguments in reversed(COMMANDS.items()):
        times = []
        for _ in range(runs):
            begin = time.perf_counter()
            subprocess.run([sys.executable, *arguments], env=environment, capture_output=True)
            times.append(time.perf_counter() - begin)
        medians[name] = statistics.median(times)
        ratio = medians[name] / medians["import torch"]
        print(f"{name:<28} {min(times):>6.2f} s {medians[name]:>6.2f} s {ratio:>16.2f}", flush=True)


if __name__ == "__main__":
    main()
