"""`plan cluster=...`, `--why`, `+plan=` and `mesh=auto` on the command line."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from autolaunch import cli
from autolaunch.config.against_schema import validate
from autolaunch.config.command_line import parse
from autolaunch.config.compose import compose, resolved
from autolaunch.planning.wanted import wanted_by
from autolaunch_strategies.config import CP_BACKENDS, ConfigError
from autolaunch_strategies.planner.candidate import PIPELINES
from tests.support.messages import Told, assert_only_told
from tests.support.ranks import environment, start, torchrun

pytestmark = pytest.mark.timeout(240)


Outcome = tuple[int, str, str]

SMALL = ("data=synthetic", "data.seq_len=32", "data.batch_size=4", "data.num_validation_sequences=0")


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Runs `autolaunch ...` in an empty directory, with an empty cache: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["autolaunch"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "100")

    def run(*argv: str) -> Outcome:
        code = cli.run(argv)
        return code, *capfd.readouterr()

    return run


def _read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_a_degree_of_experts_is_kept_where_the_mesh_is_chosen(command: Callable[..., Outcome]) -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes |= {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    model = ["model.config.model_type=qwen3_moe", *(f"model.config.{key}={size}" for key, size in sizes.items())]
    code, _, err = command("plan", "model=hf", *model, *SMALL, "cluster=h100x4", "ep=2", "output_dir=out")
    assert code == 0, err
    assert _read(Path("out/plan.yaml"))["ep"] == 2
    code, _, err = command("plan", "model=hf", *model, *SMALL, "cluster=h100x4", "ep=3", "output_dir=out")
    assert code == 2
    assert_only_told(err, Told("ep=3 with model=hf", "8 experts", allowed=("the 4 ranks", "1, 2, 4"), write="ep=2"))


@pytest.mark.parametrize(
    ("typed", "replicas"), [(("dp=hsdp",), {2, 4}), (("dp.replicate=2",), {2}), (("dp=hsdp", "dp.replicate=4"), {4})]
)
def test_replicas_are_kept_where_the_mesh_is_chosen(
    command: Callable[..., Outcome], typed: tuple[str, ...], replicas: set[int]
) -> None:
    code, _, err = command("plan", *SMALL, "cluster=h100x8", *typed, "output_dir=out")
    assert code == 0, err
    chosen = _read(Path("out/plan.yaml"))
    assert chosen["dp"]["sharding_level"] == 3 and chosen["dp"]["replicate"] in replicas


# --- what was typed ----------------------------------------------------------------------------------------------


def wanted(*words: str) -> dict[str, tuple[int, ...]]:
    """The restrictions that a command line makes."""
    composed = compose(parse(words))
    assert composed.errors == []
    config, errors = validate(resolved(composed.config), composed.origin)
    assert errors == []
    return wanted_by(words, config)


@pytest.mark.parametrize(
    ("words", "restrictions"),
    [
        ([], {}),
        (["model=llama", "data.batch_size=8"], {}),
        (["mesh=4x2"], {"dp": (4,), "mp": (2,), "pp": (1,), "cp": (1,)}),
        (["mesh=dp-1xmp2"], {"mp": (2,), "pp": (1,), "cp": (1,)}),
        (["mesh.mp=4"], {"mp": (4,)}),
        (["dp=zero1"], {"level": (1,)}),
        (["dp=hsdp", "dp.replicate=2"], {"level": (3,), "replicate": (2,)}),
        (["dp=hsdp"], {"level": (3,), "replicate": (2,)}),
        (["cluster=h100x8", "dp=hsdp"], {"level": (3,), "replicate": (2, 4, 8)}),
        (["cluster=h100x8", "dp=hsdp", "dp.replicate=4"], {"level": (3,), "replicate": (4,)}),
        (["mp=seq_parallel"], {"sequence_parallel": (1,)}),
        (["mp=none"], {"mp": (1,)}),
        (["pp=none"], {"pp": (1,)}),
        (["pp=exact"], {"pipeline": (PIPELINES.index("exact"),)}),
        (["pp=1f1b", "pp.microbatches=8"], {"pipeline": (PIPELINES.index("1f1b"),), "microbatches": (8,)}),
        (["pp.split=balanced"], {"split": (1,)}),
        (["cp=ring"], {"backend": (CP_BACKENDS.index("ring"),)}),
        (["cp=none"], {"cp": (1,)}),
        (["recompute=selective"], {"recompute": (-1,)}),
        (["recompute=2"], {"recompute": (2,)}),
        (["data.microbatches=4"], {"microbatches": (4,)}),
    ],
)
def test_what_was_typed_stays(words: list[str], restrictions: dict[str, tuple[int, ...]]) -> None:
    assert wanted(*words) == restrictions


@pytest.mark.parametrize("words", [["dp.shard=2"], ["pp.split_spec=model.layers"]])
def test_what_the_planner_says_itself(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="with cluster="):
        wanted(*words)


# --- plans -------------------------------------------------------------------------------------------------------


def test_a_plan_for_a_cluster_is_chosen_written_and_the_same_again(command: Callable[..., Outcome]) -> None:
    words = ["plan", "cluster=h100x8", "model.size=1b", *SMALL, "data.batch_size=64", "precision=bf16-mixed"]
    code, out, err = command(*words, "output_dir=first")
    assert code == 0, err
    assert "8 ranks" in out and "autolaunch +plan=first/plan.yaml" in out and len(out.splitlines()) <= 40
    assert not list(Path("first").glob("*.svg"))  # pictures are asked for
    code, again, err = command(*words, "output_dir=second", "--why", "mp=8")  # from the profile that was kept
    assert code == 0, err
    assert "why not mp=8" in again
    plan = _read(Path("first/plan.yaml"))
    choice = plan["reasons"]["choice"]
    assert choice["chosen"]["ranks"] == 8 and choice["hardware"]["name"] == "h100"
    assert sum(choice["chosen"]["parts"].values()) == pytest.approx(choice["chosen"]["seconds"], rel=1e-3)
    assert "cluster" not in plan and "why" not in plan
    second = _read(Path("second/plan.yaml"))
    del second["reasons"]["choice"]["why"]
    assert second == plan
    summary = json.loads(Path("first/summary.json").read_text(encoding="utf-8"))
    assert summary["predicted_step_time_s"] == choice["chosen"]["seconds"]

    code, out, err = command(*words, "output_dir=third", "--full")
    assert code == 0, err
    assert {"plan.html", "time.svg", "memory.svg"} <= {path.name for path in Path("third").iterdir()}
    full = _read(Path("third/plan.yaml"))
    assert full["reasons"]["choice"] == choice and {"blocks", "order"} <= full["reasons"].keys()


def test_what_is_typed_is_in_the_plan_and_the_plan_runs(command: Callable[..., Outcome]) -> None:
    words = ["plan", "cluster=cpux2", *SMALL, "mesh.mp=2", "mp=seq_parallel", "recompute=full", "output_dir=planned"]
    code, _, err = command(*words, "trainer.max_steps=2", "optimizer.lr=0.01")
    assert code == 0, err
    assert "- override /mesh: 1x2\n" in Path("planned/plan.yaml").read_text(encoding="utf-8")
    code, _, err = command("+plan=planned/plan.yaml", "output_dir=ran")
    assert code == 0, err
    ran = _read(Path("ran/plan.yaml"))
    assert ran["recompute"] == "full" and ran["mp"]["sequence_parallel"] is True
    assert ran["optimizer"]["lr"] == 0.01
    summary = json.loads(Path("ran/summary.json").read_text(encoding="utf-8"))
    assert (summary["mesh"], summary["steps"]) == ("1x2", 2)


def test_mesh_auto_chooses_for_this_machine_and_runs(command: Callable[..., Outcome]) -> None:
    code, _, err = command("mesh=auto", "launch.devices=2", *SMALL, "trainer.max_steps=2", "output_dir=auto")
    assert code == 0, err
    summary = json.loads(Path("auto/summary.json").read_text(encoding="utf-8"))
    assert (summary["world_size"], summary["steps"]) == (2, 2)
    assert _read(Path("auto/plan.yaml"))["reasons"]["choice"]["hardware"]["name"] == "local"


@pytest.mark.every  # test_cluster_options.py has the key
def test_mesh_auto_changes_a_machine_as_typed(command: Callable[..., Outcome]) -> None:
    words = ("mesh=auto", "launch.devices=2", "cluster.intra.gb_per_s=5", "trainer.max_steps=1", *SMALL)
    code, _, err = command(*words, "output_dir=auto")
    assert code == 0, err
    assert _read(Path("auto/plan.yaml"))["reasons"]["choice"]["hardware"]["name"] == "local"


UNDER_TORCHRUN = ("-m", "autolaunch", "mesh=auto", *SMALL, "trainer.max_steps=2", "output_dir=auto")


@pytest.fixture
def outside(tmp_path: Path) -> dict[str, str]:
    """The environment of processes that know nothing of what other tests have measured."""
    return environment(XDG_CACHE_HOME=str(tmp_path / "cache"), CUDA_VISIBLE_DEVICES="")


def test_mesh_auto_under_torchrun(outside: dict[str, str], tmp_path: Path) -> None:
    done = start(torchrun(2, *UNDER_TORCHRUN), cwd=tmp_path, env=outside)
    assert done.returncode == 0, done.stdout
    assert_chosen_for(tmp_path / "auto", nodes=1, local_ranks=2)


@pytest.mark.full
def test_mesh_auto_under_real_torchrun_on_two_nodes(outside: dict[str, str], tmp_path: Path) -> None:
    """In new processes: two torchruns and their ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}", "--nproc-per-node=1"]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", f"--node-rank={node}", *where, *UNDER_TORCHRUN],
            cwd=tmp_path,
            env=outside,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    try:
        said = [process.communicate(timeout=180)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    assert_chosen_for(tmp_path / "auto", nodes=2, local_ranks=1)


def assert_chosen_for(directory: Path, nodes: int, local_ranks: int) -> None:
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    assert (summary["world_size"], summary["steps"]) == (2, 2)
    hardware = _read(directory / "plan.yaml")["reasons"]["choice"]["hardware"]
    assert (hardware["nodes"], hardware["devices_per_node"]) == (nodes, local_ranks)


@pytest.mark.parametrize(
    ("typed", "key", "problem", "write"),
    [
        ("mesh.dp=3", "mesh.dp=3", "does not divide the 8 devices", "mesh.dp=2"),
        ("mesh.cp=5", "mesh.cp=5", "does not divide the 8 devices", "mesh.cp=4"),
        ("dp.replicate=3", "dp.replicate=3", "does not divide the 8 devices", "dp.replicate=2"),
    ],
)
def test_what_does_not_divide_the_devices(
    command: Callable[..., Outcome], typed: str, key: str, problem: str, write: str
) -> None:
    code, _, err = command("plan", "cluster=h100x8", "model=llama", *SMALL, "data.batch_size=16", typed)
    assert code == 2
    assert_only_told(err, Told(key, problem, allowed=("1, 2, 4, 8",), write=write))


@pytest.mark.every  # test_choice.py has what is said
def test_nothing_fits_is_one_message(command: Callable[..., Outcome]) -> None:
    code, _, err = command("plan", "cluster=a100_40x2", "model.size=70b", *SMALL)
    assert code == 2
    assert "Traceback" not in err and "GiB" in err
    assert not any(Path().glob("outputs/**/plan.yaml"))


def test_a_dry_run_takes_a_cluster_for_a_mesh_that_is_planned(command: Callable[..., Outcome]) -> None:
    typed = ["cluster=h100x64", "data=synthetic"]
    for words, written in (
        (typed, "mesh=auto cluster=h100x64 data=synthetic"),
        (["mesh=8", *typed, "cluster.memory_gib=40"], "mesh=8 data=synthetic"),
    ):
        code, _, err = command("dryrun", *words)
        facts, write = ("no devices", "no cluster"), f"autolaunch dryrun {written}"
        assert_only_told(err, Told("cluster=h100x64", *facts, allowed=("mesh=auto",), write=write))
        assert code == 2
    code, _, err = command("cluster=h100x64")
    assert_only_told(err, Told("cluster=h100x64", "devices that there are", write="autolaunch plan cluster=h100x64"))
