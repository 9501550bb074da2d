"""The panels at the start and the end of a run, and the numbers in them."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from autolaunch.report.readable import readable_bytes, readable_count, readable_seconds
from autolaunch.report.screen import loss_sparkline, show_end, show_start


def shown(width: int = 80, encoding: str = "utf-8") -> tuple[Console, io.TextIOWrapper]:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    return Console(file=file, width=width), file


def text(file: io.TextIOWrapper) -> str:
    file.seek(0)
    return file.read()


def job(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "task": "fit",
        "name": "run",
        "model": {"name": "llama", "size": "debug"},
        "module": None,
        "mesh": {"dp": 4, "mp": 2, "pp": 1, "cp": 1},
        "data": {"name": "text", "batch_size": 16, "seq_len": 256, "microbatches": 2},
        "trainer": {"max_steps": 1000, "max_epochs": None, "max_time": None},
        "optimizer": {"name": "adamw", "lr": 3e-4},
        "scheduler": {"name": "cosine"},
        "precision": "bf16-mixed",
        "recompute": "none",
        "compile": False,
        "dp": {"sharding_level": 3, "replicate": None, "shard": None, "cpu_offload": False},
        "output_dir": str(Path.cwd() / "outputs" / "run"),
    }
    return base | changes


def summary(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "task": "fit",
        "status": "finished",
        "world_size": 8,
        "steps": 1000,
        "loss": 2.0,
        "tokens_per_second": 12345.0,
        "step_time_s": 0.3312,
        "peak_memory_bytes": 3 * 2**29,
        "checkpoint": "/data/last.ckpt",
        "output_dir": "/data",
        "seconds": 331.2,
    }
    return base | changes


def test_the_first_panel() -> None:
    console, file = shown()
    describe = {"dp": {"sharding_level": 3, "replicate": 1, "shard": 4}, "blocks": {"found": ["block"] * 12}}
    show_start(describe, job(), console, parameters=1_240_123)
    assert (
        text(file)
        == """\
╭─ autolaunch fit ─────────────────────────────────────────────────────────────╮
│ model      llama debug · 1.24M parameters                                    │
│ mesh       dp 4 × mp 2 · 8 ranks                                             │
│ data       text · 16 × 256 = 4,096 tokens per step · 2 microbatches          │
│ training   1,000 steps · adamw, lr 0.0003 cosine                             │
│ precision  bf16-mixed · recompute none · compile off                         │
│ sharded    parameters, gradients, optimizer state over dp · 12 blocks        │
│ output     outputs/run                                                       │
╰──────────────────────────────────────────────────────────────────────────────╯
"""
    )


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        pytest.param({"mesh": {"dp": 1}}, "mesh       1 rank", id="one-rank"),
        pytest.param({"module": {"_target_": "mine.Module"}}, "model      mine.Module", id="own-module"),
        pytest.param(
            {"recompute": 2, "compile": "max-autotune"}, "recompute every 2 blocks · compile max-auto", id="n"
        ),
        pytest.param({"recompute": True}, "recompute full · compile", id="recompute-as-a-switch"),
        pytest.param(
            {"trainer": {"max_steps": -1, "max_epochs": 1, "max_time": None}}, "training   1 epoch · adamw", id="epoch"
        ),
        pytest.param(
            {"dp": {"sharding_level": 1, "replicate": 2, "shard": 2, "cpu_offload": False}},
            "sharded    optimizer state over each replica · 2 replicas",
            id="hybrid",
        ),
        pytest.param({"dp": {"sharding_level": 0}}, "sharded    nothing: every rank of dp holds all of it", id="ddp"),
        pytest.param(
            {"adapter": {"name": "lora", "r": 4, "path": None, "modules_to_save": ["lm_head"]}},
            "trained    lora · rank 4 · lm_head whole",
            id="adapter",
        ),
        pytest.param(
            {"adapter": {"name": "dora", "r": None, "path": "tuned", "modules_to_save": None}},
            "trained    dora · from tuned",
            id="published-adapter",
        ),
        pytest.param(
            {"model": {"name": "hf", "trainable": ["lm_head", "model.norm"]}},
            "trained    lm_head, model.norm",
            id="part",
        ),
        pytest.param({"name": "mine", "task": "validate"}, "╭─ autolaunch validate · mine ─", id="title"),
    ],
)
def test_lines_of_the_first_panel(changes: dict[str, Any], line: str) -> None:
    console, file = shown()
    show_start({}, job(**changes), console)
    assert line in text(file)
    assert len(text(file).splitlines()) <= 12


def test_the_last_panel() -> None:
    console, file = shown()
    show_end(summary(), console, losses=[6.0, 5.0, 4.0, 3.0, 2.0])
    assert (
        text(file)
        == """\
╭─ finished ───────────────────────────────────────────────────────────────────╮
│ loss        6.0000 → 2.0000   █▆▅▃▁                                          │
│ steps       1,000 in 5 min 31 s                                              │
│ speed       12.3k tokens/s · 0.331 s per step (median)                       │
│ memory      1.5 GiB at its peak (largest of 8 ranks)                         │
│ checkpoint  /data/last.ckpt                                                  │
│ output      /data                                                            │
╰──────────────────────────────────────────────────────────────────────────────╯
"""
    )


def test_the_last_panel_of_a_run_that_failed_before_its_first_step() -> None:
    console, file = shown()
    nothing = dict.fromkeys(("loss", "tokens_per_second", "step_time_s", "checkpoint", "output_dir"))
    show_end(summary(status="failed", steps=0, world_size=1, error="RuntimeError: [x] is full", **nothing), console)
    assert (
        text(file)
        == """\
╭─ failed ─────────────────────────────────────────────────────────────────────╮
│ steps   0 in 5 min 31 s                                                      │
│ memory  1.5 GiB at its peak                                                  │
│ error   RuntimeError: [x] is full                                            │
╰──────────────────────────────────────────────────────────────────────────────╯
"""
    )


def test_metrics_of_an_evaluation() -> None:
    console, file = shown()
    show_end(summary(task="validate", checkpoint=None, metrics={"val_loss": 2.3456789}), console)
    assert "╭─ validate finished ─" in text(file)
    assert "│ val_loss  2.34568 " in text(file)
    assert "│ time      5 min 31 s " in text(file)


def test_a_console_without_unicode_gets_plain_signs() -> None:
    console, file = shown(encoding="ascii")
    show_start({}, job(), console)
    show_end(summary(), console, losses=[3.0, 2.0])
    assert "dp 4 x mp 2 - 8 ranks" in text(file)
    assert "3.0000 -> 2.0000   #_" in text(file)


@pytest.mark.parametrize(
    ("values", "curve"),
    [
        pytest.param([], "", id="nothing"),
        pytest.param([1.0], "", id="one"),
        pytest.param([2.0, 2.0], "▁▁", id="flat"),
        pytest.param([7.0, 0.0, 7.0], "█▁█", id="ends"),
        pytest.param([1.0, math.nan, 0.0], "█×▁", id="nan"),
        pytest.param([math.nan, math.inf], "××", id="all-nan"),
        pytest.param([8.0, 6.0, 1.0, 1.0, 0.0, 0.0], "█▂▁", id="averaged"),
    ],
)
def test_sparkline(values: list[float], curve: str) -> None:
    assert loss_sparkline(values, width=3) == curve


@pytest.mark.parametrize(
    ("function", "value", "expected"),
    [
        pytest.param(readable_bytes, 0, "0 B", id="no-bytes"),
        pytest.param(readable_bytes, 1536, "1.5 KiB", id="kib"),
        pytest.param(readable_bytes, 349 * 2**20, "349 MiB", id="mib"),
        pytest.param(readable_bytes, 5000 * 2**40, "5000 TiB", id="tib"),
        pytest.param(readable_count, 9431, "9,431", id="whole"),
        pytest.param(readable_count, 999_700, "1.00M", id="rounds-up-to-the-next-unit"),
        pytest.param(readable_count, 405e9, "405B", id="billions"),
        pytest.param(readable_seconds, 0.03123, "0.0312 s", id="short"),
        pytest.param(readable_seconds, 725, "12 min 5 s", id="minutes"),
        pytest.param(readable_seconds, 12000, "3 h 20 min", id="hours"),
    ],
)
def test_readable(function: Any, value: float, expected: str) -> None:
    assert function(value) == expected
