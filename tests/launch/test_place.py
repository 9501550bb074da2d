"""Who am I: what torchrun and srun say in the environment, and how the job travels between ranks that they started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autolaunch import worker
from autolaunch.job import ResolvedJob
from autolaunch.launch import rendezvous
from autolaunch.launch.place import Place, check_master_resolves, place
from autolaunch.machine import affinity, devices
from autolaunch.machine.devices import visible_devices
from autolaunch_strategies.config import ConfigError
from tests import ROOT
from tests.support.messages import Told, assert_only_told, assert_told

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"} | {
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "5", "SLURM_PROCID": "4"} | {
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "n[1-2,7]",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, Place(), id="alone"),
        pytest.param({"RANK": "0"}, Place(), id="a stray variable"),
        pytest.param(TORCHRUN, Place("torchrun", 3, 4, 1, 2, 1, "10.0.0.1", 29500), id="torchrun"),
        pytest.param(
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
            Place("torchrun", 1, 2, 0, 1, 1, "h", 1),
            id="one process per machine",
        ),
        pytest.param(SLURM, Place("slurm", 4, 5, 0, 1, 2, "n1", 15217), id="srun"),
        pytest.param(
            SLURM | {"SLURM_RESTART_COUNT": "2"}, Place("slurm", 4, 5, 0, 1, 2, "n1", 17211), id="srun, queued again"
        ),
        pytest.param(SLURM | {"SLURM_STEP_ID": ""}, Place(), id="sbatch script"),
        pytest.param(SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, Place(), id="srun of one task"),
        pytest.param(
            SLURM | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4000"},
            Place("slurm", 4, 5, 0, 1, 2, "127.0.0.1", 4000),
            id="srun with an address",
        ),
        pytest.param(SLURM | TORCHRUN, Place("torchrun", 3, 4, 1, 2, 1, "10.0.0.1", 29500), id="torchrun inside srun"),
    ],
)
def test_place(environ: dict[str, str], expected: Place) -> None:
    assert place(environ) == expected


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("gpu-[001-004]", "gpu-001"),
        ("gpu-[08,11-12],m1", "gpu-08"),
        ("r[2-3]n[5,7]-ib", "r2n5-ib"),
        ("m1,gpu[1-2]", "m1"),
    ],
)
def test_first_host(nodes: str, first: str) -> None:
    assert place(SLURM | {"SLURM_STEP_NODELIST": nodes}).master_addr == first


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        pytest.param(
            TORCHRUN | {"MASTER_ADDR": ""},
            Told("RANK=3 WORLD_SIZE=4", "not MASTER_ADDR", allowed=None, write="unset RANK WORLD_SIZE"),
            id="half of torchrun",
        ),
        pytest.param(
            {"WORLD_SIZE": "2"},
            Told("WORLD_SIZE=2", "not RANK, MASTER_ADDR", allowed=None, write="unset WORLD_SIZE"),
            id="a third of torchrun",
        ),
        pytest.param(
            TORCHRUN | {"RANK": "4"},
            Told("RANK=4", "not a number", allowed="0 to 3"),
            id="rank beyond the world",
        ),
        pytest.param(
            TORCHRUN | {"WORLD_SIZE": "two"},
            Told("WORLD_SIZE=two", "not a number", allowed="1 or more"),
            id="not a number",
        ),
        pytest.param(
            TORCHRUN | {"MASTER_PORT": ""},
            Told("MASTER_PORT", "missing", allowed="1 to 65535"),
            id="no port",
        ),
        pytest.param(
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x"},
            Told("SLURM_STEP_TASKS_PER_NODE=2(x", "list of task counts", allowed="such as 4(x2),3"),
            id="tasks per node",
        ),
        pytest.param(SLURM | {"SLURM_NODEID": "3"}, Told("SLURM_NODEID=3", "3 nodes", allowed="0 to 2"), id="node id"),
        pytest.param(
            SLURM | {"SLURM_STEP_NODELIST": ""},
            Told("SLURM_STEP_NODELIST=", "list of hosts", allowed="such as n[1-4,7],m2"),
            id="no hosts",
        ),
    ],
)
def test_senseless_environment(environ: dict[str, str], told: Told) -> None:
    with pytest.raises(ConfigError) as error:
        place(environ)
    assert_only_told(error.value, told)


def test_master_without_address() -> None:
    with pytest.raises(ConfigError) as error:
        check_master_resolves(Place("torchrun", 1, 2, master_addr="no-such-host.invalid", master_port=1))
    write = "export MASTER_ADDR=<address of the node of rank 0>"
    assert_told(error.value, "MASTER_ADDR=no-such-host.invalid", "rank 0", "no address", write=write)


@pytest.mark.parametrize(
    ("visible", "count"), [("", 0), ("-1", 0), ("0,2", 2), ("0,-1,2", 1), ("GPU-8a1f,GPU-77", 2), ("MIG-1", 1)]
)
def test_visible_devices(monkeypatch: pytest.MonkeyPatch, visible: str, count: int) -> None:
    monkeypatch.setattr("autolaunch.machine.devices.metadata.version", lambda name: "2.13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_devices("gpu") == ("gpu", count)
    assert visible_devices("auto") == (("gpu", count) if count else ("cpu", None))
    assert visible_devices("cpu") == ("cpu", None)


def test_cpu_build_of_torch_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autolaunch.machine.devices.metadata.version", lambda name: "2.13.0+cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert visible_devices("auto") == ("cpu", None)


def test_gpus_of_rocm_and_of_wsl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files stand in for the devices, a script for the driver."""
    monkeypatch.setattr(devices, "ROOT", tmp_path)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/dxg").touch()
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA RTX (UUID: GPU-1)'\necho 'GPU 1: NVIDIA RTX (UUID: GPU-2)'\n")
    driver.chmod(0o755)
    monkeypatch.setattr("autolaunch.machine.devices.metadata.version", lambda name: "2.13.0+cu130")
    monkeypatch.setenv("PATH", "")
    assert visible_devices("auto") == ("cpu", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert devices.visible_gpus() == ["0", "1"]

    monkeypatch.setattr("autolaunch.machine.devices.metadata.version", lambda name: "2.13.0+rocm7.0")
    assert visible_devices("auto") == ("cpu", None)
    (tmp_path / "dev/kfd").touch()
    for number, gpu in enumerate((0, 4711, 815, 42)):
        node = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        (node / "gpu_id").write_text(f"{gpu}\n")
    assert devices.visible_gpus() == ["0", "1", "2"]
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1,2")
    assert devices.visible_gpus() == ["0", "1"]
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert devices.visible_gpus() == ["1"]
    assert devices.visible_variable() == "HIP_VISIBLE_DEVICES"


def test_what_runs_on_gpus_set_leaves_what_the_user_has_set(tmp_path: Path) -> None:
    usual = devices.gpu_environment(tmp_path, {})
    assert usual["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert usual["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/nccl_trace_rank_"
    own = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}
    left = devices.gpu_environment(tmp_path, own)
    assert usual.keys() - left.keys() == {"PYTORCH_ALLOC_CONF", "TORCH_FR_BUFFER_SIZE"}


def test_ranks_with_a_gpu_connect_when_groups_are_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NCCL would otherwise connect two stages within the first schedule. Nothing is joined here."""
    joined: list[dict[str, Any]] = []

    def join(backend: str, **named: Any) -> None:
        joined.append({"backend": backend, **named})

    monkeypatch.setattr("torch.distributed.init_process_group", join)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    chosen: list[Any] = []
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    monkeypatch.setattr("autolaunch.worker.visible_devices", lambda accelerator: ("gpu", 4))
    job = ResolvedJob({"trainer": {"accelerator": "auto"}, "launch": {"numa": False}}, tmp_path, 8, [], "0")
    where = Place("torchrun", 6, 8, local_rank=6, local_world_size=8)
    store = torch.distributed.HashStore()
    rendezvous.join(store, where, 5, worker._gpu(job, where))
    rendezvous.join(store, where, 5)
    assert [item["device_id"] for item in joined] == [torch.device("cuda", 2), None]
    assert [item["backend"] for item in joined] == ["cpu:gloo,cuda:nccl", "gloo"]
    assert chosen == [torch.device("cuda", 2)]


def test_job_survives_the_file(tmp_path: Path) -> None:
    job = ResolvedJob({"a": [1, 2.5, None], "b": {"c": True}}, tmp_path / "out", 4, ["mesh=4"], "0.1.0")
    assert ResolvedJob.read(job.write()) == job
    assert [file.name for file in job.path.parent.iterdir()] == ["job.json"]


def test_parent_imports_no_torch() -> None:
    code = "import sys, autolaunch.launch.local, autolaunch.worker; assert 'torch' not in sys.modules"
    path = os.pathsep.join(str(ROOT / part) for part in ("launcher", "strategies"))
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, check=True, timeout=60)


SCRIPT = textwrap.dedent("""
    import sys
    from pathlib import Path
    from autolaunch.job import ResolvedJob
    from autolaunch.launch import rendezvous
    from autolaunch.launch.place import place
    from autolaunch.worker import leave, run_rank
    from autolaunch_strategies.config import ConfigError

    def make_job():
        if sys.argv[2] == "refuse":
            raise ConfigError("mesh=3", "does not fit")
        config = {
            "task": "ranks_task:" + sys.argv[2],
            "trainer": {"accelerator": "cpu"},
            "launch": {"logs": "rank0", "start_timeout": 60.0, "stop_timeout": 5.0}
            | {"hang_timeout": 5.0, "first_step_timeout": 60.0},
        }
        return ResolvedJob(config, Path(sys.argv[1]), where.world_size, [], "0")

    where = place()
    store = rendezvous.connect(where, 60)
    try:
        job = rendezvous.share_job(store, where, make_job)
    except ConfigError as error:
        print("told:", error, flush=True)
        leave(rendezvous.exit_code_of(error))
    except SystemExit as error:
        leave(error.code)
    leave(run_rank(job, where, store))
""")

TASK = textwrap.dedent("""
    import os, torch
    import torch.distributed as dist

    def total(job, place):
        x = torch.tensor([float(place.rank)])
        dist.all_reduce(x)
        (job.output_dir / f"sum_{place.rank}").write_text(
            f"{x.item()} {os.environ['RANK']} {os.environ['LOCAL_RANK']} {os.environ['TORCHELASTIC_RUN_ID'] != ''}")

    def fail(job, place):
        dist.barrier()
        if place.rank == 1:
            raise ValueError("boom")
        dist.barrier()
""")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "ranks.py").write_text(SCRIPT)
    (tmp_path / "ranks_task.py").write_text(TASK)
    return tmp_path / "ranks.py"


def torchrun(script: Path, ranks: int, what: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([*(str(ROOT / part) for part in ("launcher", "strategies")), str(script.parent)])
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d"]
    return subprocess.run(
        [*command, "--rdzv-endpoint=127.0.0.1:0", str(script), str(script.parent / "out"), what],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.timeout(150)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.every)])
def test_torchrun(script: Path, ranks: int) -> None:
    run = torchrun(script, ranks, "total")
    assert run.returncode == 0, run.stderr
    for rank in range(ranks):
        text = (script.parent / "out" / f"sum_{rank}").read_text()
        assert text == f"{float(sum(range(ranks)))} {rank} {rank} True"


@pytest.mark.timeout(150)
@pytest.mark.full
def test_torchrun_refused_job_is_told_once(script: Path) -> None:
    run = torchrun(script, 2, "refuse")
    assert run.stdout.splitlines() == ["told: mesh=3: does not fit"]
    assert "exitcode  : 2" in run.stderr
    assert 'Traceback (most recent call last):\n  File "' + str(script) not in run.stderr


@pytest.mark.timeout(150)
def test_torchrun_names_the_rank_that_failed(script: Path) -> None:
    run = torchrun(script, 2, "fail")
    assert run.returncode == 1
    assert 'rank 1 of 2 failed: ValueError: boom\nTraceback (most recent call last):\n  File "' in run.stderr
    assert run.stderr.count("of 2 failed:") == 1
    root_cause = run.stderr.partition("Root Cause (first observed failure):")[2]
    assert "rank      : 1 (local_rank: 1)" in root_cause and "ValueError: boom" in root_cause


@pytest.mark.timeout(60)
def test_master_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    from autolaunch.launch.rendezvous import RankMissing, connect

    where = Place("slurm", 1, 2, master_addr="127.0.0.1", master_port=1)
    with pytest.raises(RankMissing, match=r"^rank 1 .*rank 0 .*127\.0\.0\.1:1 .*1 s \(launch\.start_timeout\)$"):
        connect(where, 1)


@pytest.mark.timeout(60)
def test_rank_that_never_comes_is_named() -> None:
    from autolaunch.launch.rendezvous import RankMissing, connect, share_job

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = Place("slurm", 0, 3, master_addr="127.0.0.1", master_port=port)
    store = connect(where, 5)
    job = ResolvedJob({}, Path("/nowhere"), 3, [], "0")
    store.set("job_taken/1", "1")
    with pytest.raises(RankMissing, match=r"^rank 2 of 3 .*0\.1 s \(launch\.start_timeout\)$"):
        share_job(store, where, lambda: job, timeout=0.1)


def test_ranks_wait_for_rank_0_as_long_as_it_lives() -> None:
    """It may wait for the run before, or download weights."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    first, second = (Place("slurm", rank, 2, master_addr="127.0.0.1", master_port=port) for rank in (0, 1))
    store, other = rendezvous.connect(first, 1), rendezvous.connect(second, 1)
    with pytest.raises(rendezvous.RankMissing, match=r"^rank 1 .*rank 0.* silent .*0\.2 s \(launch\.start_timeout\)$"):
        rendezvous.share_job(other, second, pytest.fail, timeout=0.2)
    job, taken = ResolvedJob({}, Path("/nowhere"), 2, [], "0"), []
    rank_1 = threading.Thread(target=lambda: taken.append(rendezvous.share_job(other, second, pytest.fail, 1)))
    rank_1.start()

    def make_job() -> ResolvedJob:
        time.sleep(2.5)
        return job

    before = threading.active_count()
    assert rendezvous.share_job(store, first, make_job, timeout=1) == job
    rank_1.join()
    assert taken == [job]
    assert threading.active_count() == before - 1


def test_a_port_that_is_taken_is_a_wrong_config_only_if_it_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of Slurm is queued again after a failure, and not after a wrong config."""
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        where = Place("slurm", 0, 2, master_addr="127.0.0.1", master_port=port)
        with pytest.raises(rendezvous.RankMissing, match=rf"^rank 0 .*127\.0\.0\.1:{port}"):
            rendezvous.connect(where, 5)
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(ConfigError) as error:
            rendezvous.connect(where, 5)
    assert_told(error.value, f"MASTER_PORT={port}", "rank 0", "listen", write="export MASTER_PORT=<port>")


def test_ranks_run_on_processors_beside_their_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = os.sched_getaffinity(0)
    node, gpu = tmp_path / "sys/devices/system/node/node1", tmp_path / "sys/bus/pci/devices/0001:3b:00.0"
    node.mkdir(parents=True)
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text("1\n")
    (node / "cpulist").write_text(f"{min(mine)},4096-4098\n")
    monkeypatch.setattr("autolaunch.machine.affinity.ROOT", tmp_path)
    monkeypatch.setattr("autolaunch.worker.visible_devices", lambda accelerator: ("gpu", 4))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    where = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: where)
    beginning, seen = threading.Event(), []
    other = threading.Thread(target=lambda: (beginning.wait(), seen.append(os.sched_getaffinity(0))))
    other.start()
    try:
        for numa, expected in ((False, mine), (True, {min(mine)})):
            job = ResolvedJob({"trainer": {"accelerator": "auto"}, "launch": {"numa": numa}}, tmp_path, 1, [], "0")
            worker._gpu(job, Place())
            assert os.sched_getaffinity(0) == expected
        beginning.set()
        other.join()
        assert seen == [{min(mine)}]
        (gpu / "numa_node").write_text("-1\n")  # one node, or nothing known
        assert affinity.processors_beside("0001:3b:00.0") == affinity.processors_beside("0001:3c:00.0") == set()
    finally:
        beginning.set()
        affinity.run_on(mine)
