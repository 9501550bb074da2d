"""How a run ended, in a few figures: what `summary_file` writes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from autolaunch.report.memory import peak_memory_bytes
from autolaunch.report.metrics import StepMetrics


def collect_summary(
    trainer: pl.Trainer,
    step_metrics: StepMetrics | None,
    started: float,
    *,
    task: str,
    status: str = "finished",
    metrics: Mapping[str, Any] | None = None,
    error: str | None = None,
    pipeline: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The figures of a run, the same on every rank; on a finished run a collective over all of them.

    Args:
        started: `time.time()` at which the run began.
        status: finished, failed or interrupted; only a finished run asks the other ranks, which may be gone otherwise.
        metrics: what validate or test found.
        error: what went wrong.
        pipeline: what is expected of a pipeline; needed on the first rank only.
    """
    strategy = trainer.strategy
    training = task == "fit" and step_metrics is not None
    latest = step_metrics.latest if step_metrics else None
    summary: dict[str, Any] = {
        "task": task,
        "status": status,
        "world_size": int(getattr(strategy, "world_size", trainer.world_size)),
        "mesh": _mesh_name(trainer),
        "steps": trainer.global_step,
        "loss": latest.loss if latest else None,
        "tokens_per_second": step_metrics.tokens_per_second() if training and step_metrics else None,
        "step_time_s": step_metrics.median_step_time() if training and step_metrics else None,
        "peak_memory_bytes": peak_memory_bytes(),
        "parameters": _parameters(trainer),
        "checkpoint": _checkpoint(trainer) if task == "fit" else None,
        "seconds": time.time() - started,
    }
    if training and step_metrics is not None and step_metrics.counted != "tokens":
        summary["counted"] = step_metrics.counted
    if training and step_metrics is not None and step_metrics.worst_expert_load is not None:
        layer, imbalance = step_metrics.worst_expert_load
        summary["experts"] = {"worst_layer": layer, "imbalance": imbalance}
    if metrics is not None:
        summary["metrics"] = {name: float(value) for name, value in metrics.items()}
    if error is not None:
        summary["error"] = error
    if status == "finished" and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        peak = torch.tensor(summary["peak_memory_bytes"], dtype=torch.int64, device=strategy.root_device)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        summary["peak_memory_bytes"] = int(peak)
        measured = getattr(strategy, "measured_idle_share", None)
        share = measured() if measured is not None and task == "fit" else None
        if pipeline is not None:
            summary["pipeline"] = {**pipeline, "measured_idle_share": share}
        # Clocks differ from rank to rank: rank 0's are the ones that count.
        shared = [summary]
        dist.broadcast_object_list(shared, src=0, device=strategy.root_device)
        summary = shared[0]
    return summary


def _mesh_name(trainer: pl.Trainer) -> str:
    parallel = getattr(trainer.strategy, "parallel", None)
    return parallel.mesh.name if parallel is not None else str(trainer.world_size)


def _parameters(trainer: pl.Trainer) -> int:
    count = getattr(trainer.strategy, "parameter_count", None)
    return int(count if count is not None else sum(p.numel() for p in trainer.lightning_module.parameters()))


def _checkpoint(trainer: pl.Trainer) -> str | None:
    """The best checkpoint where a value is monitored, else the newest one."""
    callback = trainer.checkpoint_callback
    newest, best = getattr(callback, "last_model_path", ""), getattr(callback, "best_model_path", "")
    return (best or newest if getattr(callback, "monitor", None) else newest or best) or None
