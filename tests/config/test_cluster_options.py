"""`cluster=` on the command line: profiles of any size, files, this machine, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from autolaunch import cli
from autolaunch.config.against_schema import validate
from autolaunch.config.command_line import parse
from autolaunch.config.compose import compose as compose_line
from autolaunch.jobs.run import resolve_job
from autolaunch.machine import this_machine
from autolaunch_strategies.planner.hardware import hardware_from
from tests import ROOT
from tests.support.messages import Told, assert_only_told, assert_told
from tests.support.tiers import one_in

Compose = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def nothing_is_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def compose(capsys: pytest.CaptureFixture[str]) -> Compose:
    """Composes `cluster` of a command line."""

    def composed(*words: str) -> dict[str, Any]:
        assert cli.run(["--cfg", "job", "-p", "cluster", *words]) == 0, capsys.readouterr().err
        values = yaml.safe_load(capsys.readouterr().out)
        hardware_from(values)
        return dict(values)

    return composed


@pytest.mark.parametrize(
    ("cluster", "name", "nodes", "per_node"),
    [
        ("h100", "h100", 1, 8),
        ("h100x1024", "h100", 128, 8),
        ("h100x16384", "h100", 2048, 8),
        ("h100x8", "h100", 1, 8),
        ("h100x3", "h100", 1, 3),
        ("h100x1", "h100", 1, 1),
        ("a100x16", "a100_80", 2, 8),
        ("a100_40x16", "a100_40", 2, 8),
        ("gb200x144", "gb200", 36, 4),
        ("gb200x2", "gb200", 1, 2),
        ("cpux5", "cpu", 1, 5),
    ],
)
def test_sizes(cluster: str, name: str, nodes: int, per_node: int, compose: Compose) -> None:
    values = compose(f"cluster={cluster}")
    assert (values["name"], values["nodes"], values["devices_per_node"]) == (name, nodes, per_node)


def test_ranks_of_a_cpu_share_its_memory(compose: Compose) -> None:
    whole, parts = compose("cluster=cpu"), compose("cluster=cpux16")
    assert parts["memory_gib"] == whole["memory_gib"] / 2
    assert parts["processors"] == whole["processors"]


def test_single_numbers_can_be_replaced(compose: Compose) -> None:
    values = compose("cluster=h100x16", "cluster.nodes=3", "cluster.inter.gb_per_s=25", "cluster.peak_tflops.bf16=900")
    hardware = hardware_from(values)
    assert (hardware.devices, hardware.inter.bytes_per_s, hardware.flops["bf16"]) == (24, 25e9, 900e12)


@pytest.mark.parametrize(
    ("cluster", "told"),
    [
        (
            "h100x12",
            Told("cluster=h100x12", "12 devices", "nodes of 8", allowed=("up to 8",), write="cluster=h100x16"),
        ),
        (
            "h100x17",
            Told("cluster=h100x17", "17 devices", "nodes of 8", allowed=("up to 8",), write="cluster=h100x16"),
        ),
        (
            "gb200x6",
            Told("cluster=gb200x6", "6 devices", "nodes of 4", allowed=("up to 4",), write="cluster=gb200x8"),
        ),
        ("h100x0", Told("cluster=h100x0", "at least 1", allowed=("h100xN",), write="cluster=h100x8")),
        ("h100x-16", Told("cluster=h100x-16", "at least 1", allowed=("h100xN",), write="cluster=h100x16")),
        ("h100x08", Told("cluster=h100x08", "no zero", allowed=("h100xN",), write="cluster=h100x8")),
        (
            "h100x100000000",
            Told("cluster=h100x100000000", "100,000,000", allowed=("up to 1,048,576",), write="cluster=h100x1048576"),
        ),
        (
            "h101",
            Told(
                "cluster=h101",
                "h100",
                allowed="a100, a100_40, a100_80, b200, b300, cpu, gb200, gb300, h100, h200, local, "
                "each also with a number, as h100xN with N devices",
                write="cluster=h100",
            ),
        ),
        ("h101x64", Told("cluster=h101x64", "h100x64", allowed=("h100xN",), write="cluster=h100x64")),
        ("H100x64", Told("cluster=H100x64", "h100x64", allowed=("h100xN",), write="cluster=h100x64")),
        ("h1000x8", Told("cluster=h1000x8", "h100x8", allowed=("h100xN",), write="cluster=h100x8")),
        ("gb20X144", Told("cluster=gb20X144", "gb200x144", allowed=("h100xN",), write="cluster=gb200x144")),
        ("h101x0", Told("cluster=h101x0", "h100x8", allowed=("h100xN",), write="cluster=h100x8")),
        ("zzzzx4", Told("cluster=zzzzx4", "no option", allowed=("h100xN",))),
    ],
    ids=lambda value: getattr(value, "key", None),
)
def test_what_is_refused(cluster: str, told: Told, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--cfg", "job", f"cluster={cluster}"]) == 2
    assert_only_told(capsys.readouterr().err, told)


def test_more_nodes_than_can_be_planned_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", "data=synthetic", "cluster=h100", "cluster.nodes=12500000"]) == 2
    key = "cluster.nodes=12500000 cluster.devices_per_node=8"
    told = Told(key, "100,000,000", allowed=("up to 1,048,576",), write="cluster.nodes=131072")
    assert_only_told(capsys.readouterr().err, told)


def test_a_number_of_no_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    for words, ranks in ((["mesh=16"], 16), (["mesh=2x2"], 4), ([], 8)):
        assert cli.run(["plan", *words, "cluster.memory_gib=2"]) == 2
        write = f"cluster=h100x{ranks} cluster.memory_gib=2"
        told = Told("cluster.memory_gib=2", "no cluster", allowed=("cluster=local", "h100xN"), write=write)
        assert_only_told(capsys.readouterr().err, told)


def test_a_number_of_a_misspelt_cluster_is_no_second_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", "cluster=h101x64", "cluster.memory_gib=2"]) == 2
    assert_only_told(capsys.readouterr().err, Told("cluster=h101x64", "h100x64", write="cluster=h100x64"))


def test_a_misspelt_cluster_of_an_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text("# @package _global_\ndefaults:\n  - override /cluster: h101x64\n")
    assert cli.run(["plan", "experiment=mine.yaml"]) == 2
    assert_told(capsys.readouterr().err, "cluster: h101x64 (mine.yaml)", "h100x64", allowed=("h100xN",))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["plan", "cluster=h100x8", "launch.devices=4"],
            Told(
                "launch.devices=4 with cluster=h100x8",
                "two numbers",
                allowed="cluster=h100x4 alone, or launch.devices=null",
                write="cluster=h100x4",
            ),
        ),
        (
            ["plan", "cluster=h100x8", "launch.devices=12"],
            Told("launch.devices=12 with cluster=h100x8", "two numbers", write="launch.devices=null"),
        ),
        (
            ["mesh=auto", "cluster=cpux2", "launch.devices=3"],
            Told("launch.devices=3 with cluster=cpux2", "two numbers", write="launch.devices=null"),
        ),
        (
            ["plan", "cluster=h100x8", "launch=slurm", "launch.nodes=2"],
            Told(
                "launch.nodes=2 with cluster=h100x8",
                "2 nodes",
                "1 of 8 devices",
                allowed="launch.nodes=1, or a cluster of 2 nodes",
                write="launch.nodes=1",
            ),
        ),
        (
            ["mesh=auto", "cluster=h100x16", "launch=slurm", "launch.submit=false"],
            Told(
                "launch.nodes=1 (conf/launch/slurm.yaml) with cluster=h100x16",
                "1 node",
                "2 of 8 devices",
                write="launch.nodes=2",
            ),
        ),
        (
            ["plan", "cluster=h100x8", "launch=slurm", "launch.gpus_per_node=4"],
            Told("launch.gpus_per_node=4 with cluster=h100x8", "has 8", write="launch.gpus_per_node=8"),
        ),
    ],
    ids=lambda value: getattr(value, "key", None),
)
def test_a_launcher_with_other_devices_than_the_cluster(
    words: list[str], told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(words) == 2
    assert_only_told(capsys.readouterr().err, told)


@pytest.mark.parametrize(
    "words",
    [
        ["task=plan", "cluster=h100x4", "launch.devices=4"],
        ["task=plan", "cluster=h100x16", "launch=slurm", "launch.nodes=2", "launch.gpus_per_node=8"],
        ["task=plan", "cluster=h100x8", "mesh=dp-1xmp2", "launch=slurm"],
        ["cluster=h100x16", "launch=slurm", "launch.nodes=2", "launch.submit=false"],
        ["cluster=cpux4", "launch.max_restarts=1", "launch.min_devices=2"],
        # What a file says of another run, and the number of a cluster that nobody has typed.
        ["task=plan", "cluster=h100x1024", "experiment=mine.yaml"],
        ["task=plan", "cluster=h100x64", "launch=slurm"],
        ["cluster=localx2", "launch.devices=4"],
    ],
    ids=" ".join,
)
def test_a_launcher_that_agrees_with_the_cluster(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mesh that the planner has yet to choose is held against neither nodes nor fewest devices."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("# @package _global_\nlaunch:\n  devices: 2\n")
    composed = compose_line(parse(words))
    resolve_job(composed.config, composed.config.hydra, tmp_path / "run")


MINE = """
name: mine
device: cuda
nodes: 1
devices_per_node: 6
memory_gib: 30
peak_tflops: {bf16: 100}
memory_gb_per_s: 900
intra: {gb_per_s: 50, latency_us: 5}
inter: {gb_per_s: 5, latency_us: 50}
"""


def test_a_file_anywhere(tmp_path: Path, compose: Compose) -> None:
    (tmp_path / "somewhere").mkdir()
    (tmp_path / "somewhere" / "mine.yaml").write_text(MINE)
    assert compose("cluster=somewhere/mine.yaml")["name"] == "mine"
    assert compose("cluster=somewhere/mine.yaml", "cluster.nodes=4")["nodes"] == 4


def test_a_profile_of_ones_own_has_sizes_too(
    tmp_path: Path, compose: Compose, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own" / "cluster").mkdir(parents=True)
    (tmp_path / "own" / "cluster" / "mine.yaml").write_text(MINE)
    (tmp_path / "own" / "cluster" / "slower.yaml").write_text(
        "defaults: [mine, _self_]\nname: slower\nmemory_gb_per_s: 600\n"
    )
    assert compose("--config-dir", "own", "cluster=mine")["devices_per_node"] == 6
    values = compose("--config-dir", "own", "cluster=minex12")
    assert (values["nodes"], values["devices_per_node"], values["memory_gib"]) == (2, 6, 30)
    values = compose("--config-dir", "own", "cluster=slowerx18")
    assert (values["name"], values["nodes"], values["memory_gb_per_s"]) == ("slower", 3, 600)
    assert cli.run(["--config-dir", "own", "--cfg", "job", "cluster=slowerx8"]) == 2
    assert_told(capsys.readouterr().err, "cluster=slowerx8", "8 devices", "nodes of 6", write="cluster=slowerx6")


def test_a_file_without_keys_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "list.yaml").write_text("- 1\n")
    assert cli.run(["--cfg", "job", "cluster=list.yaml"]) == 2
    assert_told(capsys.readouterr().err, "cluster=list.yaml", "no keys")


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "visible_devices", lambda accelerator: ("cpu", None))
    monkeypatch.setattr(this_machine, "_cores", lambda: 2)
    monkeypatch.setattr(this_machine, "memory_gib", lambda: 20.0)


@pytest.mark.usefixtures("two_cores")
def test_this_machine_without_gpus(compose: Compose) -> None:
    values = compose("cluster=local")
    assert (values["name"], values["device"], values["devices_per_node"], values["processors"]) == (
        "local",
        "cpu",
        2,
        2,
    )
    assert values["memory_gib"] == 9
    assert values["origin"] == "guessed from the profile cpu; `autolaunch calibrate cluster=localx2` measures"
    values = compose("cluster=localx4")
    assert (values["devices_per_node"], values["processors"], values["memory_gib"]) == (4, 2, 4.5)


@pytest.mark.usefixtures("two_cores")
def test_what_was_calibrated_here_is_used(compose: Compose) -> None:
    stored = {**yaml.safe_load(MINE), "device": "cpu", "origin": "calibrated with 4 ranks"}
    file = this_machine.machine_file("cpu", 4)
    file.parent.mkdir(parents=True)
    file.write_text(yaml.safe_dump(stored))
    values = compose("cluster=localx4")
    assert (values["name"], values["origin"], values["memory_gb_per_s"]) == ("local", "calibrated with 4 ranks", 900)
    assert compose("cluster=localx2")["origin"] == "calibrated with 4 ranks, and not with 2"
    this_machine.machine_file("cpu", 2).write_text(yaml.safe_dump({**stored, "origin": "calibrated with 2 ranks"}))
    assert compose("cluster=local")["origin"] == "calibrated with 2 ranks"
    this_machine.machine_file("cpu", 2).write_text("no: [yaml")
    assert compose("cluster=local")["origin"] == "calibrated with 4 ranks, and not with 2"


@pytest.mark.usefixtures("two_cores")
def test_what_was_calibrated_for_other_constants_is_not_used(compose: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by another version of the planner, in which they mean something else or have other names."""
    mine = {**yaml.safe_load(MINE), "device": "cpu", "origin": "calibrated with 2 ranks"}

    @dataclasses.dataclass
    class Others:
        speed: float = 1.0

    with monkeypatch.context() as context:
        context.setattr(this_machine, "Constants", Others)
        file = this_machine.machine_file("cpu", 2)
        file.parent.mkdir(parents=True)
        file.write_text(yaml.safe_dump({**mine, "constants": {"speed": 2.0}}))
    assert compose("cluster=local")["origin"].startswith("guessed from the profile cpu")


@pytest.mark.parametrize(
    ("gpu", "profile"),
    one_in(
        3,
        [
            ("NVIDIA A100-SXM4-40GB", "a100_40"),
            ("NVIDIA A100-SXM4-80GB", "a100_80"),
            ("NVIDIA H100 80GB HBM3", "h100"),
            ("NVIDIA H200", "h200"),
            ("NVIDIA B200", "b200"),
            ("NVIDIA B300 SXM6 AC", "b300"),
            ("NVIDIA GB200", "gb200"),
            ("NVIDIA GB300", "gb300"),
        ],
    ),
)
def test_this_machine_with_gpus(
    gpu: str, profile: str, monkeypatch: pytest.MonkeyPatch, compose: Compose, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(this_machine, "visible_devices", lambda accelerator: ("gpu", 4))
    monkeypatch.setattr(this_machine, "gpu_names", lambda: (gpu,) * 4)
    values = compose("cluster=local")
    assert (values["device"], values["devices_per_node"], values["processors"]) == ("cuda", 4, None)
    assert values["memory_gib"] == compose(f"cluster={profile}")["memory_gib"]
    assert values["origin"].startswith(f"guessed from the profile {profile};")
    assert compose("cluster=localx2")["devices_per_node"] == 2
    assert cli.run(["--cfg", "job", "cluster=localx8"]) == 2
    told = Told("cluster=localx8", "4 GPUs", allowed="up to 4", write="cluster=localx4")
    assert_only_told(capsys.readouterr().err, told)


@pytest.mark.parametrize("name", sorted(file.stem for file in (ROOT / "conf" / "cluster").glob("*.yaml")))
def test_what_is_built_in_fits_the_schema(name: str, compose: Compose) -> None:
    _, errors = validate({"cluster": compose(f"cluster={name}")})
    assert [str(error) for error in errors if str(error).startswith("cluster.")] == []
