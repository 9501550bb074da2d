"""Memory, open files and threads of every rank over a long training with checkpoints and validations: flat or not.

    python tests/benchmarks/soak.py [--steps 2000] [--mesh 2] [key=value ...]

Every rank notes its resident memory, open files and threads at every 20th step. Printed are their means over the
second and the last quarter of the training; to hold: memory grows by less than 2 % or 4 MiB, the others not at all.
The exit code is 1 if one does.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

CALLBACK = """
import os, threading
from pathlib import Path
from lightning.pytorch import Callback


class Notes(Callback):
    def on_train_start(self, trainer, module):
        self.file = open(f"notes_{trainer.global_rank}.csv", "w")

    def on_train_batch_end(self, trainer, module, *args):
        if trainer.global_step % 20 == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            files, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
            values = trainer.global_step, pages * os.sysconf("SC_PAGE_SIZE"), files, threads
            print(*values, sep=",", file=self.file, flush=True)
"""
TINY = (
    *("model.num_layers=2", "model.hidden_size=32", "model.intermediate_size=64", "model.num_heads=4"),
    *("model.num_kv_heads=2", "data.seq_len=32", "data.batch_size=8", "trainer.accelerator=cpu"),
    *("checkpoint.every_n_steps=50", "trainer.val_check_interval=200", "trainer.check_val_every_n_epoch=null"),
    *("trainer.limit_val_batches=2", "+callbacks.notes={_target_: notes.Notes}"),
)


def main() -> int:
    """Run it; 1 if something grows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--mesh", default="2")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "notes.py").write_text(CALLBACK)
        words = [sys.executable, "-m", "autolaunch", f"mesh={arguments.mesh}", f"trainer.max_steps={arguments.steps}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        began = time.monotonic()
        process = subprocess.Popen(
            [*words, *TINY, *arguments.overrides, "output_dir=run"], cwd=directory, env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        parent: list[int] = []
        watch = threading.Thread(target=_note_parent, args=(process, parent), daemon=True)
        watch.start()
        screen, _ = process.communicate()
        seconds = time.monotonic() - began
        if process.returncode != 0:
            print(screen)
            return 1
        grows = False
        for file in sorted(Path(directory).glob("notes_*.csv")):
            grows |= _show(f"rank {file.stem.rpartition('_')[2]}", list(csv.reader(file.read_text().splitlines())))
        quarter = len(parent) // 4
        second, last = (statistics.mean(part) for part in (parent[quarter : 2 * quarter], parent[-quarter:]))
        print(f"parent  memory {second / 2**20:8.1f} -> {last / 2**20:8.1f} MiB")
        print(f"mesh={arguments.mesh}, {arguments.steps} steps in {seconds:.0f} s: {'GROWS' if grows else 'flat'}")
        return int(grows)


def _note_parent(process: subprocess.Popen[str], sizes: list[int]) -> None:
    while process.poll() is None:
        try:
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            return
        sizes.append(pages * os.sysconf("SC_PAGE_SIZE"))
        time.sleep(0.5)


def _show(who: str, rows: list[list[str]]) -> bool:
    """Print the figures of a rank; whether one of them grows."""
    quarter = len(rows) // 4
    means = [
        [statistics.mean(float(row[column]) for row in part) for part in (rows[quarter : 2 * quarter], rows[-quarter:])]
        for column in (1, 2, 3)
    ]
    memory, files, threads = means
    print(
        f"{who}  memory {memory[0] / 2**20:8.1f} -> {memory[1] / 2**20:8.1f} MiB  "
        f"open files {files[0]:.1f} -> {files[1]:.1f}  threads {threads[0]:.1f} -> {threads[1]:.1f}"
    )
    more = memory[1] - memory[0]
    return more > max(0.02 * memory[0], 4 * 2**20) or files[1] > files[0] + 0.5 or threads[1] > threads[0] + 0.5


if __name__ == "__main__":
    sys.exit(main())
