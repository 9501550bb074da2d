"""A run on one GPU through the real command, beside the same run on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.commands import Run, assert_same_curve
from tests.support.ranks import start

FIRST, LAST = 2, 8
"""Steps on the CPU before the runs that are compared, and their last one."""
JOB = [
    "model=llama", "mesh=1", "data=synthetic", "data.seq_len=64", "data.batch_size=8", f"scheduler.total_steps={LAST}",
    "optimizer.lr=3e-3", "trainer.enable_progress_bar=false", "precision=32-true",
]  # fmt: skip
"""In fp32, unless a run says more: also `precision=`, of which the last one counts."""
FP32 = 1e-5
"""What fp32 leaves open. Measured on CPUs: 2e-7 between meshes; bf16 moves norms of gradients by up to 2e-3, so TF32,
with 3 bits more, by some 1e-4.
"""

Fit = Callable[..., Run]


@pytest.fixture(scope="module")
def fit(tmp_path_factory: pytest.TempPathFactory) -> Fit:
    """Runs `autolaunch fit`, each job once, in processes of their own: CUDA must not come from a fork."""
    ended: dict[tuple[str, ...], Run] = {}
    directory = tmp_path_factory.mktemp("gpu")

    def run(*arguments: str) -> Run:
        if arguments not in ended:
            out = directory / f"run_{len(ended)}"
            command = [sys.executable, "-m", "autolaunch", "fit", *JOB, *arguments, f"output_dir={out}"]
            # Images of NVIDIA's allow TF32 by this variable.
            done = start(command, cold=True, TORCH_ALLOW_TF32_CUBLAS_OVERRIDE="0")
            assert done.returncode == 0, done.stdout[-4000:]
            ended[arguments] = Run(done.returncode, done.stdout, out)
        return ended[arguments]

    return run


@pytest.fixture(scope="module")
def checkpoint(fit: Fit) -> Path:
    """Where all begin: weights are drawn on the device, by random numbers that differ between CPU and GPU."""
    return fit("trainer.accelerator=cpu", f"trainer.max_steps={FIRST}").checkpoint


@pytest.fixture(scope="module")
def on_cpu(fit: Fit, checkpoint: Path) -> Run:
    return fit("trainer.accelerator=cpu", f"trainer.max_steps={LAST}", f"ckpt_path={checkpoint}")


@pytest.fixture(scope="module")
def on_gpu(fit: Fit, checkpoint: Path) -> Run:
    return fit("trainer.accelerator=gpu", f"trainer.max_steps={LAST}", f"ckpt_path={checkpoint}")


def test_a_gpu_trains_as_the_cpu_does(on_cpu: Run, on_gpu: Run) -> None:
    assert len(on_gpu.rows) == LAST - FIRST
    assert_same_curve(on_gpu, on_cpu, after=FIRST, tolerance=FP32)
    assert on_gpu.summary["parameters"] == on_cpu.summary["parameters"]


def test_state_in_host_memory_trains_as_on_the_device(fit: Fit, checkpoint: Path, on_cpu: Run) -> None:
    job = ("trainer.accelerator=gpu", f"trainer.max_steps={LAST}", "dp=fsdp", "dp.cpu_offload=true")
    run = fit(*job, f"ckpt_path={checkpoint}")
    assert_same_curve(run, on_cpu, after=FIRST, tolerance=FP32)


def test_what_is_not_typed_is_bf16_mixed(fit: Fit, checkpoint: Path) -> None:
    always = ("trainer.accelerator=gpu", f"trainer.max_steps={LAST}", f"ckpt_path={checkpoint}")
    typed, chosen = (fit(*always, f"precision={name}") for name in ("bf16-mixed", "null"))
    assert [row["loss"] for row in chosen.rows] == pytest.approx([row["loss"] for row in typed.rows], rel=1e-5)
    assert (chosen.plan["precision"], chosen.plan["matmul_precision"]) == ("bf16-mixed", "high")
    assert chosen.plan["reasons"]["by_device"]["precision"] == "default on GPUs"


def test_bf16_mixed_is_close_to_fp32_and_not_the_same(fit: Fit, checkpoint: Path, on_gpu: Run) -> None:
    run = fit("trainer.accelerator=gpu", f"trainer.max_steps={LAST}", f"ckpt_path={checkpoint}", "precision=bf16-mixed")
    for name, tolerance in (("loss", 1e-3), ("grad_norm", 2e-2)):
        found, expected = ([row[name] for row in each.rows] for each in (run, on_gpu))
        assert found == pytest.approx(expected, rel=tolerance), name
    assert found != pytest.approx(expected, rel=FP32), "these are the norms of fp32"


@pytest.mark.parametrize("compiled", ["false", "true"])
def test_float8_is_close_to_bf16_and_not_the_same(fit: Fit, checkpoint: Path, compiled: str) -> None:
    pytest.importorskip("torchao", reason="float8 is torchao's")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no float8")
    always = (
        "trainer.accelerator=gpu", f"trainer.max_steps={LAST}", f"ckpt_path={checkpoint}", f"compile={compiled}",
    )  # fmt: skip
    float8, bf16 = (fit(*always, f"precision={name}") for name in ("float8", "bf16-mixed"))
    for name, tolerance in (("loss", 5e-3), ("grad_norm", 5e-2)):
        found, expected = ([row[name] for row in each.rows] for each in (float8, bf16))
        assert found == pytest.approx(expected, rel=tolerance), name
        assert found != expected, name


@pytest.mark.parametrize("mode", ["true", "max-autotune-no-cudagraphs"])
def test_a_compiled_run_computes_what_an_eager_one_does(fit: Fit, checkpoint: Path, on_gpu: Run, mode: str) -> None:
    run = fit("trainer.accelerator=gpu", f"trainer.max_steps={LAST}", f"ckpt_path={checkpoint}", f"compile={mode}")
    assert_same_curve(run, on_gpu, after=FIRST, tolerance=1e-4)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_adapters_learn_beside_weights_of_four_bits(fit: Fit, precision: str) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes", reason="weights of four bits are bitsandbytes'")
    run = fit("trainer.accelerator=gpu", f"trainer.max_steps={LAST}", f"precision={precision}", "adapter=qlora")
    assert all(row["grad_norm"] > 0 for row in run.rows)
    assert run.rows[-1]["loss"] < run.rows[0]["loss"]
