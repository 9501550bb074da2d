"""What the ranks of `autolaunch calibrate` do.

Two parts, by all ranks at once: speeds of single operations and exchanges (`autolaunch_strategies.planner.measure`),
and short trainings of a small Llama through the same engine as any run, to which the planner's constants are fitted.
What fails is named in the file and keeps its usual value.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import time
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table

from autolaunch.config.cluster import hardware_of
from autolaunch.directories import shown
from autolaunch.job import ResolvedJob, write_beside
from autolaunch.launch.place import Place
from autolaunch.machine.devices import visible_devices
from autolaunch.machine.this_machine import machine_file, this_machine
from autolaunch.report.readable import readable_seconds
from autolaunch.report.summary_file import write_summary
from autolaunch.report.terminal import Terminal
from autolaunch.tasks.calibrate.trainings import Training, trainings
from autolaunch_strategies.config import as_typed
from autolaunch_strategies.planner.calibrate import calibrated, fitted
from autolaunch_strategies.planner.candidate import Candidates
from autolaunch_strategies.planner.fit import Run
from autolaunch_strategies.planner.hardware import Hardware, hardware_to
from autolaunch_strategies.planner.measure import Bench, Measured, cores, facts
from autolaunch_strategies.planner.time import step_time

PROBE_SECONDS = 0.12
SECONDS, LAST_SECONDS = 28.5, 2.0
"""Trainings go on as long as the command is expected to be over after the first, given the second for its end."""
LEAST_TRAINING_SECONDS = 8.0
"""Trainings go on at least so long, however long it took to begin (reading torch from a cold disk, say)."""
LIMIT_SECONDS = 180.0
"""A rank that takes longer hangs: it ends itself, and its log says where it was."""


def measure(job: ResolvedJob, place: Place) -> dict[str, Any]:
    """What one rank does; collective. Returns what summary.json holds."""
    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
    try:
        return _measure(job, place)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _measure(job: ResolvedJob, place: Place) -> dict[str, Any]:
    config = job.config
    kind, _ = visible_devices(config["trainer"]["accelerator"])
    # As in `worker`: a rank may see its own device alone.
    device = torch.device("cuda", torch.cuda.current_device()) if kind == "gpu" else torch.device("cpu")
    base = _base(config, place, device)
    bench = Bench(device, base.processors, place.local_world_size, PROBE_SECONDS)
    measured = bench.all()
    ranks = f"{place.world_size} rank{'' if place.world_size == 1 else 's'}"
    hardware = calibrated(base, measured, f"calibrated with {ranks}")
    observed: list[tuple[Training, float]] = []
    clock = _Clock(config["begun"] if place.rank == 0 else None, bench)
    gc.freeze()  # so that collecting after each training looks at what that has left, and not at all of torch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for training in trainings(place.world_size, place.local_world_size):
            if clock.is_late():
                break
            seconds: list[float] = []
            reason = bench.contained(partial(_time, training, job, device, seconds))
            if reason:
                measured.failed[f"training {training.name}"] = reason
            else:
                observed.append((training, bench.longest(seconds[0])))
            gc.collect()
    result: dict[str, Any] = {}
    if place.rank == 0:
        result = _finish(job, place, hardware, measured, observed)
    return result


class _Clock:
    """Says when trainings have to end; all ranks go by the first one's clock.

    Args:
        begun: when the command was, on the first rank.
    """

    def __init__(self, begun: float | None, bench: Bench) -> None:
        self._begun, self._bench = begun, bench
        self._first = self._last = self._now()
        self._longest = 0.0

    def is_late(self) -> bool:
        """Whether another training, as long as the longest so far, could be one too many; collective."""
        now = self._now()
        self._longest, self._last = max(self._longest, now - self._last), now
        enough = now - self._first >= LEAST_TRAINING_SECONDS
        return enough and now + self._longest + LAST_SECONDS > SECONDS

    def _now(self) -> float:
        return self._bench.longest(0.0 if self._begun is None else time.time() - self._begun)


def _time(training: Training, job: ResolvedJob, device: torch.device, seconds: list[float]) -> None:
    seconds.append(training.run(job, device))


def _base(config: Mapping[str, Any], place: Place, device: torch.device) -> Hardware:
    """Guesses for this machine, with the sizes that `cluster` says: an earlier calibration is no part of a new one."""
    local, cluster = place.local_world_size, config["cluster"] or {}
    values = this_machine(local, "cpu" if device.type == "cpu" else "gpu", measured=False)
    values["nodes"] = place.world_size // local
    if device.type == "cuda":
        values["memory_gib"] = facts(device)["memory_bytes"] / 2**30
    elif cluster.get("memory_gib") and cluster.get("devices_per_node") == local:
        values |= {"memory_gib": cluster["memory_gib"], "processors": cluster.get("processors") or cores()}
    return hardware_of(values)


def _finish(
    job: ResolvedJob,
    place: Place,
    hardware: Hardware,
    measured: Measured,
    observed: list[tuple[Training, float]],
) -> dict[str, Any]:
    """Fit, write and show; on the first rank."""
    runs: list[Run] = []
    try:
        runs = _runs(job, observed)
        after = fitted(hardware, runs)
    except Exception as error:
        measured.failed["fit"] = f"{type(error).__name__}: {error}"
        after = hardware
    predicted = [_predicted(run, hardware) for run in runs], [_predicted(run, after) for run in runs]
    rows = [
        {"training": training.name, "seconds": seconds, "before_fit": before, "after_fit": fit}
        for (training, seconds), before, fit in zip(observed, *predicted, strict=False)
    ]
    text = _as_yaml(after, measured)
    path = job.output_dir / "cluster.yaml"
    write_beside(path, text)
    device = after.device
    stored = machine_file(device, place.world_size)
    if after.nodes == 1:
        stored.parent.mkdir(parents=True, exist_ok=True)
        write_beside(stored, text)
    summary = {
        "task": "calibrate",
        "status": "finished",
        "world_size": place.world_size,
        "cluster": str(path),
        "trainings": rows,
        "failed": measured.failed,
        "seconds": time.time() - job.config["begun"],
    }
    write_summary(job.output_dir, summary)
    _show(after, measured, rows, path, Terminal(), time.time() - job.config["begun"])
    return summary


def _runs(job: ResolvedJob, observed: list[tuple[Training, float]]) -> list[Run]:
    profiles: dict[str, Any] = {}
    runs = []
    for training, seconds in observed:
        key = repr((training.model, training.positions))
        if key not in profiles:
            profiles[key] = training.described(job)
        profile, recipe = profiles[key]
        runs.append(Run(profile, dataclasses.replace(recipe, batch_size=training.batch), training.candidate, seconds))
    return runs


def _predicted(run: Run, hardware: Hardware) -> float:
    return float(step_time(run.profile, run.recipe, hardware, Candidates.of([run.candidate])).seconds[0])


def _as_yaml(hardware: Hardware, measured: Measured) -> str:
    lines = ["# Measured by `autolaunch calibrate`; read by cluster=<this file>."]
    lines += [f"# Not measured, left as guessed: {name}: {reason}" for name, reason in measured.failed.items()]
    return "\n".join(lines) + "\n" + yaml.safe_dump(hardware_to(hardware), sort_keys=False, width=120)


def _show(
    hardware: Hardware, measured: Measured, rows: list[dict[str, Any]], path: Path, console: Console, seconds: float
) -> None:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    where = f"{hardware.devices} {'rank' if hardware.device == 'cpu' else 'GPU'}{'' if hardware.devices == 1 else 's'}"
    if hardware.processors:
        where += f" on {hardware.processors} cores"
    table.add_row("machine", where)
    peaks = ", ".join(f"{name} {value / 1e12:.3g}" for name, value in hardware.flops.items())
    table.add_row("matrix products", f"{peaks} TFLOP/s")
    table.add_row("memory", f"{hardware.memory_bytes_per_s / 1e9:.3g} GB/s")
    if measured.optimizer_bytes_per_s:
        table.add_row("AdamW, fused", f"{measured.optimizer_bytes_per_s / 1e9:.3g} GB/s")
    if measured.kernel_s:
        extra = f", on DTensors {measured.mp_kernel_s * 1e6:.3g} us more" if measured.mp_kernel_s else ""
        table.add_row("a kernel, eager", f"{measured.kernel_s * 1e6:.3g} us{extra}")
    for kind, curves in hardware.curves.items():
        for curve in curves:
            small, large = curve.seconds[0], curve.bytes[-1] / curve.seconds[-1]
            table.add_row(f"{kind}, {curve.ranks} ranks", f"{small * 1e6:,.0f} us, then {large / 1e9:.3g} GB/s")
    if measured.hidden is not None:
        table.add_row("overlap", f"{measured.hidden:.0%} of an exchange hides behind computation")
    console.print(table, highlight=False)
    if rows:
        runs = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for column in ("training", "measured", "speeds alone", "with fitted constants"):
            runs.add_column(column, justify="left" if column == "training" else "right")
        for row in rows:
            texts = (readable_seconds(row[key]) for key in ("seconds", "before_fit", "after_fit"))
            runs.add_row(row["training"], *texts)
        console.print()
        console.print(runs, highlight=False)
    for name, reason in measured.failed.items():
        console.print(f"[yellow]not measured: {name}[/]: {reason}", highlight=False)
    console.print(f"\n{seconds:.0f} s; {hardware.origin}: {shown(path)}", highlight=False, soft_wrap=True)
    console.print(
        f"use it: autolaunch plan model=llama {as_typed('cluster', _use(hardware, path))}",
        highlight=False,
        soft_wrap=True,
    )


def _use(hardware: Hardware, path: Path) -> str:
    return f"localx{hardware.devices}" if hardware.nodes == 1 else shown(path)
