"""What a run computes in where nobody has said it, by the device that it runs on; no device is needed for that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from autolaunch import cli
from autolaunch.config import across_keys, arithmetic
from autolaunch.config.against_schema import validate
from autolaunch.config.arithmetic import arithmetic_words, device_of, with_arithmetic
from autolaunch.job import ResolvedJob
from autolaunch.machine import this_machine
from tests.support.messages import Told, assert_only_told

On = Callable[[str, int | None], None]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> On:
    """Lets this machine show other devices."""

    def show(kind: str, count: int | None) -> None:
        for module in (across_keys, arithmetic):
            monkeypatch.setattr(module, "visible_devices", lambda accelerator: (kind, count))

    return show


def config(**keys: Any) -> dict[str, Any]:
    values, errors = validate(keys)
    assert errors == []
    return values


def chosen(**keys: Any) -> tuple[Any, ...]:
    """(precision, matmul_precision, which of the two were chosen)."""
    values, reasons = with_arithmetic(config(**keys))
    return values["precision"], values["matmul_precision"], sorted(reasons)


@pytest.mark.parametrize(
    ("keys", "on_gpu", "on_cpu"),
    [
        pytest.param(
            {},
            ("bf16-mixed", "high", ["matmul_precision", "precision"]),
            ("32-true", None, ["precision"]),
            id="neither",
        ),
        pytest.param(
            {"precision": "32-true"}, ("32-true", "highest", ["matmul_precision"]), ("32-true", None, []), id="fp32"
        ),
        pytest.param(
            {"precision": "float8"}, ("float8", "high", ["matmul_precision"]), ("float8", None, []), id="float8"
        ),
        pytest.param(
            {"matmul_precision": "medium"},
            ("bf16-mixed", "medium", ["precision"]),
            ("32-true", "medium", ["precision"]),  # which is refused
            id="products",
        ),
    ],
)
def test_what_is_chosen(
    keys: dict[str, Any], on_gpu: tuple[Any, ...], on_cpu: tuple[Any, ...], on: On, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arithmetic, "multiplies_bf16", lambda: True)
    on("gpu", 8)
    assert chosen(**keys) == on_gpu
    on("cpu", None)
    assert chosen(**keys) == on_cpu


@pytest.mark.parametrize(
    ("answers", "precision"),
    [(("9.0", "9.0"), "bf16-mixed"), (("7.5",), "32-true"), ((), "bf16-mixed")],
    ids=["hopper", "turing", "nobody-says"],
)
def test_gpus_without_bf16(answers: tuple[str, ...], precision: str, on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    on("gpu", 1)
    monkeypatch.setattr(this_machine, "_of_gpus", lambda fact: answers)
    values, reasons = with_arithmetic(config())
    assert values["precision"] == precision
    assert reasons["precision"].startswith("default on GPUs")


@pytest.mark.parametrize(
    ("keys", "device"),
    [
        ({"cluster": {"name": "h100", "device": "cuda"}}, "cuda"),
        ({"cluster": {"name": "cpu", "device": "cpu"}}, "cpu"),
        ({"launch": {"name": "slurm"}}, "cuda"),
        ({"launch": {"name": "slurm", "gpus_per_node": 0}}, "cpu"),
        ({"launch": {"name": "slurm"}, "trainer": {"accelerator": "cpu"}}, "cpu"),
    ],
    ids=["cluster-of-gpus", "cluster-of-cpus", "slurm", "slurm-without-gpus", "slurm-on-cpus"],
)
def test_devices_of_other_machines(keys: dict[str, Any], device: str, on: On) -> None:
    """They count, and not those of the machine that composes the job."""
    for kind, count in (("cpu", None), ("gpu", 2)):
        on(kind, count)
        assert device_of(config(**keys)) == device


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["autolaunch"])

    def run(*argv: str) -> tuple[int, str, str]:
        code = cli.run(argv)
        return code, *capfd.readouterr()

    return run


PLAN = ("plan", "data=synthetic", "data.seq_len=64", "data.batch_size=64", "model.size=debug", "output_dir=out")


@pytest.mark.parametrize("cluster", ["h100x8", "cpu"])
def test_a_plan_says_what_its_cluster_computes_in(cluster: str, on: On, command: Any) -> None:
    """On the screen, in plan.yaml, which repeats it, and in the job."""
    on("cpu", None)
    code, out, err = command(*PLAN, f"cluster={cluster}")
    assert code == 0, err
    wanted = ("32-true", None) if cluster == "cpu" else ("bf16-mixed", "high")
    reason = "default on a CPU" if cluster == "cpu" else "default on GPUs"
    assert f"{wanted[0]} ({reason})" in out
    plan = yaml.safe_load(Path("out/plan.yaml").read_text())
    assert (plan["precision"], plan["matmul_precision"]) == wanted
    assert plan["reasons"]["by_device"]["precision"] == reason
    job = ResolvedJob.read("out/.hydra/plan.json")
    assert (job.config["precision"], job.config["matmul_precision"]) == wanted
    assert job.by_device["precision"] == reason


def test_a_run_on_gpus_says_what_it_computes_in(on: On, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "multiplies_bf16", lambda: True)
    on("gpu", 8)
    code, out, err = command(*PLAN, "mesh=8")
    assert code == 0, err
    words = " ".join(out.replace("│", " ").split())
    assert "bf16-mixed (default on GPUs) · fp32 products high (TF32 is finer than the bf16 beside it)" in words
    assert "gathered in bf16" in Path("out/plan.yaml").read_text()  # the rest of the plan goes by it, too


def test_what_was_typed_has_no_reason() -> None:
    values = {"precision": "bf16-true", "matmul_precision": "highest"}
    assert arithmetic_words(values, {}) == ["bf16-true", "fp32 products highest"]


def test_the_help_says_what_is_chosen_here(on: On, command: Any) -> None:
    on("cpu", None)
    assert "here: 32-true (default on a CPU)" in command("--info", "precision")[1]
    assert "here: null (no effect on a CPU)" in command("--info", "matmul_precision")[1]


def test_products_of_a_cpu_are_not_for_choosing(on: On, command: Any) -> None:
    on("cpu", None)
    code, _, err = command("matmul_precision=high", "data=synthetic")
    assert code == 2
    assert_only_told(
        err, Told("matmul_precision=high", "on GPUs", "runs on a CPU", allowed=("null",), write="matmul_precision=null")
    )


@pytest.mark.parametrize("task", ["plan", "dryrun"])
def test_a_plan_for_gpus_is_taken_where_there_is_none(task: str, on: On, command: Any) -> None:
    """Neither runs on the devices of this machine."""
    on("cpu", None)
    code, _, err = command(*PLAN, "cluster=h100x8")
    assert code == 0, err
    assert yaml.safe_load(Path("out/plan.yaml").read_text())["matmul_precision"] == "high"
    code, _, err = command(task, "+plan=out/plan.yaml", "compile=false", "output_dir=again")
    assert code == 0, err
