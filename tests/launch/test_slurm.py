"""Ranks that srun starts, on a real Slurm of two nodes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT
from tests.support import slurm_cluster as slurm

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(slurm.missing()), reason=f"no {', '.join(slurm.missing())} on this machine"),
]


SCRIPT = textwrap.dedent("""
    import dataclasses, json, os, signal, sys, time
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from autolaunch.job import ResolvedJob
    from autolaunch.launch import rendezvous
    from autolaunch.launch.place import place
    from autolaunch.worker import leave, run_rank

    def total(job, place):
        x = torch.tensor([float(place.rank)])
        dist.all_reduce(x)
        text = json.dumps({"sum": x.item(), "node": os.environ["SLURMD_NODENAME"], "place": dataclasses.asdict(place)})
        (job.output_dir / f"rank_{place.rank}.json").write_text(text)

    def boom(job, place):
        dist.barrier()
        if place.rank == 3:
            raise ValueError("boom")
        dist.barrier()

    def killed(job, place):
        dist.barrier()
        if place.rank == 3:
            (job.output_dir / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(200)

    def make_job():
        launch = {"logs": "rank0", "start_timeout": 60.0, "stop_timeout": 5.0, "hang_timeout": 5.0}
        launch |= {"first_step_timeout": 60.0}
        config = {"task": f"srun_ranks:{sys.argv[2]}", "trainer": {"accelerator": "cpu"}, "launch": launch}
        return ResolvedJob(config, Path(sys.argv[1]), where.world_size, [], "0")

    if __name__ == "__main__":
        where = place()
        store = rendezvous.connect(where, 60)
        job = rendezvous.share_job(store, where, make_job)
        leave(run_rank(job, where, store))
""")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm.cluster(tmp_path_factory.mktemp("slurm")) as env:
        yield env


def srun(environment: dict[str, str], directory: Path, what: str) -> subprocess.CompletedProcess[str]:
    script = directory / "srun_ranks.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join([str(ROOT / "launcher"), str(ROOT / "strategies"), str(directory)])
    # The names of the nodes are Slurm's alone: they do not resolve.
    env = environment | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    return subprocess.run(
        ["srun", "--nodes=2", "--ntasks-per-node=2", sys.executable, str(script), str(directory / "out"), what],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_two_nodes_of_two_ranks(environment: dict[str, str], tmp_path: Path) -> None:
    run = srun(environment, tmp_path, "total")
    assert run.returncode == 0, run.stderr
    for rank in range(4):
        found = json.loads((tmp_path / "out" / f"rank_{rank}.json").read_text())
        assert (found["sum"], found["node"]) == (6.0, f"n{1 + rank // 2}")
        place = found["place"]
        assert (place["kind"], place["rank"], place["world_size"]) == ("slurm", rank, 4)
        assert (place["local_rank"], place["local_world_size"], place["node_rank"]) == (rank % 2, 2, rank // 2)


@pytest.mark.full
def test_failure_on_the_second_node_is_told_once(environment: dict[str, str], tmp_path: Path) -> None:
    run = srun(environment, tmp_path, "boom")
    assert run.returncode == 1
    assert "rank 3 of 4 failed: ValueError: boom\nTraceback (most recent call last):\n" in run.stderr
    assert run.stderr.count("of 4 failed:") == 1


@pytest.mark.full
def test_a_dead_rank_on_the_second_node_ends_all_in_seconds(environment: dict[str, str], tmp_path: Path) -> None:
    run = srun(environment, tmp_path, "killed")
    assert (tmp_path / "out" / "killed").exists(), run.stderr
    assert time.time() - (tmp_path / "out" / "killed").stat().st_mtime < 30
    assert run.returncode != 0
    assert re.search(r"rank 3 of 4 on \S+ has gone without a word", run.stderr)
