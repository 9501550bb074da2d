"""How processes of a user's own script come to be ranks, and how they end."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from tests.support.commands import begin
from tests.support.ranks import environment, start, torchrun

TRAIN = """
import json, os, sys
import lightning.pytorch as pl, torch
from tests.lightning.modules import AutoEncoder
from autolaunch_strategies import MeshStrategy

def main(mesh):
    data = torch.utils.data.TensorDataset(torch.randn(8, 16), torch.zeros(8))
    trainer = pl.Trainer(strategy=MeshStrategy(mesh=mesh, timeout=60), accelerator="cpu", max_epochs=1, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(AutoEncoder(), torch.utils.data.DataLoader(data, batch_size=2))
    s = trainer.strategy
    print("RESULT " + json.dumps([s.global_rank, s.world_size, s.dp_rank, s.dp_size, trainer.global_step]), flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN + "\nmain(sys.argv[1])\n")
    return path


def results(output: str) -> list[list[int]]:
    return sorted(json.loads(found) for found in re.findall(r"RESULT (\[.*?\])", output))


TWO = [[0, 2, 0, 2, 4], [1, 2, 1, 2, 4]]
"""As many steps as on one process: the loader's batches are those of all ranks."""


@pytest.mark.parametrize("mesh", ["2", "auto"])
def test_torchrun(script: Path, mesh: str) -> None:
    done = start(torchrun(2, str(script), mesh))
    assert (done.returncode, results(done.stdout)) == (0, TWO), done.stdout


def test_plain_python_starts_the_other_ranks(script: Path) -> None:
    done = start([sys.executable, str(script), "2"])
    assert (done.returncode, results(done.stdout)) == (0, TWO), done.stdout


def test_single_process(script: Path) -> None:
    done = start([sys.executable, str(script), "auto"])
    assert (done.returncode, results(done.stdout)) == (0, [[0, 1, 0, 1, 4]]), done.stdout


def test_slurm_environment(script: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NODEID": "0", "SLURM_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1", "MASTER_PORT": str(port),
    }  # fmt: skip
    with tempfile.TemporaryFile() as output:
        ranks = [
            begin(
                [sys.executable, str(script), "2"], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env=environment(**common, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)),
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            codes = [process.wait(90) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        output.seek(0)
        text = output.read().decode()
    assert (codes, results(text)) == ([0, 0], TWO), text


# --- before any process group exists ----------------------------------------------------------------------------------

MISMATCHES = {
    "mesh-of-other-size-under-torchrun": (
        {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"},
        {"mesh": "4"}, {},
        "mesh=4: the mesh has 4 ranks (dp=4), but 2 processes were started\n"
        "  allowed: one process per rank: devices x nodes = 4\n  write:   mesh=2",
    ),
    "devices": (
        {}, {"mesh": "2"}, {"devices": 3},
        "mesh=2: the mesh has 2 ranks (dp=2), but 3 processes are asked for (devices=3, num_nodes=1)\n"
        "  allowed: one process per rank: devices x nodes = 2\n  write:   mesh=3",
    ),
    "devices-and-nodes": (
        {}, {"mesh": "4"}, {"devices": 3, "num_nodes": 2},
        "mesh=4: the mesh has 4 ranks (dp=4), but 6 processes are asked for (devices=3, num_nodes=2)\n"
        "  allowed: one process per rank: devices x nodes = 4\n  write:   mesh=6",
    ),
    "unknown-option": (
        {}, {"mesh": "2", "dp": {"shardinglevel": 3}}, {},
        "dp.shardinglevel: no such key; did you mean dp.sharding_level?\n"
        "  allowed: sharding_level, replicate, shard, param_dtype, reduce_dtype, cpu_offload",
    ),
    "unknown-level": (
        {}, {"mesh": "2", "dp": 4}, {}, "dp.sharding_level=4: not one of the choices\n  allowed: 0, 1, 2, 3",
    ),
    "hybrid-that-does-not-multiply": (
        {}, {"mesh": "4", "dp": {"replicate": 3}}, {},
        "dp.replicate=3 dp.shard=null: their product must be the size of the dp axis, 4\n"
        "  allowed: replicate x shard = 1 x 4, 2 x 2, 4 x 1",
    ),
    "offload-without-sharding": (
        {}, {"mesh": "2", "dp": {"sharding_level": 0, "cpu_offload": True}}, {},
        "dp.cpu_offload=true with dp.sharding_level=0: only sharded state can be kept in host memory\n"
        "  allowed: dp.sharding_level 1, 2 or 3\n  write:   dp.sharding_level=3 dp.cpu_offload=true",
    ),
    "recompute": (
        {}, {"mesh": "2", "recompute": "some"}, {},
        "recompute=some: no such way of activation checkpointing\n"
        "  allowed: none, full, selective, budget, offload, or a number n for every n-th block",
    ),
    "wrong-name": (
        {}, "autolaunchh", {},
        "You selected an invalid strategy name: `strategy='autolaunchh'`. It must be either a string or an instance of "
        "`lightning.pytorch.strategies.Strategy`.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISMATCHES)
def test_one_message_and_no_process_group(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning.pytorch as pl
    import torch.distributed as dist

    from autolaunch_strategies import MeshStrategy

    variables, options, trainer, message = MISMATCHES[case]
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    if variables:  # what tells torchrun's processes from others
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert not dist.is_initialized()
    with pytest.raises(ValueError) as caught:
        strategy = options if isinstance(options, str) else MeshStrategy(**options)
        pl.Trainer(strategy=strategy, accelerator="cpu", logger=False, enable_checkpointing=False, **trainer)
    assert str(caught.value).startswith(message) if case == "wrong-name" else str(caught.value) == message
    assert not dist.is_initialized()


def test_ranks_on_two_machines() -> None:
    import lightning.pytorch as pl

    from autolaunch_strategies import MeshStrategy

    for mesh in ("4", "auto"):
        trainer = pl.Trainer(
            strategy=MeshStrategy(mesh=mesh), accelerator="cpu", devices=2, num_nodes=2, logger=False,
            enable_checkpointing=False,
        )  # fmt: skip
        strategy = trainer.strategy
        assert (strategy.shape.name, strategy.num_processes, trainer.world_size) == ("4", 2, 4)


# --- the registered name ----------------------------------------------------------------------------------------------


@pytest.mark.full  # about the order of imports, so in new processes
@pytest.mark.parametrize(
    "imports",
    [
        pytest.param("import autolaunch; import lightning.pytorch as pl", id="before-lightning"),
        pytest.param("import lightning.pytorch as pl; import autolaunch", id="after-lightning"),
        pytest.param(
            "import autolaunch_strategies.lightning.strategy; import lightning.pytorch as pl",
            id="the-engine-alone",
        ),
    ],
)
def test_registered_name(imports: str) -> None:
    code = """
        options = dict(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
        trainer = pl.Trainer(strategy="autolaunch", **options)
        from autolaunch_strategies import MeshStrategy
        print(type(trainer.strategy) is MeshStrategy, trainer.strategy.shape.name)
    """
    done = start([sys.executable, "-c", imports + textwrap.dedent(code)], cold=True)
    assert done.stdout.splitlines()[-1:] == ["True 1"], done.stdout


def test_importing_the_package_imports_neither_torch_nor_lightning() -> None:
    code = "import sys, autolaunch; print(sorted({'torch', 'lightning', 'numpy'} & sys.modules.keys()))"
    assert start([sys.executable, "-c", code], cold=True).stdout == "[]\n"


def test_lightning_is_imported_without_transformers_and_the_metric_that_needs_them_has_them() -> None:
    code = """
        import sys, autolaunch, lightning.pytorch
        from torchmetrics.functional.text import bert
        print("transformers" in sys.modules)
        print(bert.AutoModel.from_config.__qualname__, "transformers" in sys.modules)
    """
    assert start([sys.executable, "-c", textwrap.dedent(code)], cold=True).stdout.splitlines() == [
        "False",
        "_BaseAutoModelClass.from_config True",
    ]


# --- the end ----------------------------------------------------------------------------------------------------------

MANY = """
import random, socket
import torch._dynamo  # torch imports it at the first optimizer step

def free_port():
    # Linux gives no connection a port below 32768 by itself: one that is free now still is when rank 0 wants it.
    while True:
        try:
            with socket.create_server(("127.0.0.1", random.randrange(15000, 30000))) as server:
                return server.getsockname()[1]
        except OSError:
            pass

for _ in range(int(sys.argv[1])):
    port = free_port()
    children = []
    for rank in range(2):
        child = os.fork()  # torch is imported once for all of them
        if child == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                              GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="x")
            main("2")
            sys.exit(0)  # ends as any script does: atexit, then the interpreter's own end
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print("CODES", codes, flush=True)
"""


@pytest.mark.parametrize("runs", [3, pytest.param(10, marks=pytest.mark.every)])
def test_runs_end_with_exit_code_0(runs: int, tmp_path: Path) -> None:
    path = tmp_path / "many.py"
    path.write_text(TRAIN + MANY)
    done = start([sys.executable, str(path), str(runs)], timeout=180)
    codes = [line for line in done.stdout.splitlines() if line.startswith("CODES")]
    assert codes == ["CODES [0, 0]"] * runs, done.stdout[-3000:]
