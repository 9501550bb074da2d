"""Constants fitted to observed steps, and how well published steps are predicted before and after."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from autolaunch_strategies.planner.candidate import Candidate, Candidates
from autolaunch_strategies.planner.constants import TIME_CONSTANTS, Constants
from autolaunch_strategies.planner.fit import Run, fit, fit_constants
from autolaunch_strategies.planner.hardware import Hardware, Link
from autolaunch_strategies.planner.profile import ModelProfile, Recipe
from autolaunch_strategies.planner.time import step_time
from tests.benchmarks import planner_published as published
from tests.support.transformer_profile import transformer_profile

PROFILE = transformer_profile(12, 1024, 16, 1024, 50304)
SMALL = transformer_profile(12, 256, 4, 256, 1024)
"""So small that launching its kernels takes longer than what they do."""
RECIPE = Recipe(64, "bf16", 4, 2, 0, 4, 4, 8)
HARDWARE = Hardware(
    "h", "cuda", 2, 8, 80 * 2**30, {"fp32": 2e13, "bf16": 3e14}, 2e12, Link(3e11, 5e-6), Link(2.5e10, 2e-5)
)
ROWS = [
    Candidate(dp=8, microbatches=1),
    Candidate(dp=8, microbatches=8),
    Candidate(dp=4, mp=2, microbatches=4),
    Candidate(dp=1, mp=8, microbatches=4),
    Candidate(dp=16, level=3, microbatches=2),
    Candidate(dp=2, pp=4, pipeline=3, microbatches=16),
    Candidate(dp=4, mp=4, microbatches=1, recompute=1),
]


def observed(hardware: Hardware, rows: list[Candidate] = ROWS, profile: ModelProfile = PROFILE) -> list[Run]:
    seconds = step_time(profile, RECIPE, hardware, Candidates.of(rows)).seconds
    return [Run(profile, RECIPE, row, float(value)) for row, value in zip(rows, seconds, strict=True)]


def changed(**values: float) -> Hardware:
    return HARDWARE.with_constants(dataclasses.replace(Constants(), **values), "truth")


def test_without_runs_nothing_changes() -> None:
    assert fit(HARDWARE, []) is HARDWARE


def test_runs_as_predicted_change_nothing() -> None:
    found = fit(HARDWARE, observed(HARDWARE)).constants
    for name in TIME_CONSTANTS:
        assert getattr(found, name) == pytest.approx(getattr(Constants(), name), rel=1e-3)


@pytest.mark.parametrize(("name", "value"), [("kernel_s", 3e-5), ("matmul", 0.6), ("memory", 0.5)])
def test_a_known_constant_is_found(name: str, value: float) -> None:
    profile = SMALL if name == "kernel_s" else PROFILE
    found = fit(HARDWARE, observed(changed(**{name: value}), profile=profile), [name])
    assert getattr(found.constants, name) == pytest.approx(value, rel=0.05)
    assert found.origin == "fitted to 7 runs from built in"


def test_several_constants_predict_runs_that_were_not_seen() -> None:
    truth = changed(kernel_s=2.5e-5, matmul=0.65, intra=0.5, memory=0.6, group_s=4e-4)
    found = fit(HARDWARE, observed(truth), noise=0.01)
    others = Candidates.of(
        [
            Candidate(dp=8, mp=2, microbatches=2),
            Candidate(dp=16, level=2),
            Candidate(dp=4, pp=2, pipeline=3, microbatches=8),
        ]
    )
    before, after, true = (step_time(PROFILE, RECIPE, item, others).seconds for item in (HARDWARE, found, truth))
    assert np.abs(after / true - 1).max() < 0.06 < np.abs(before / true - 1).max()


def test_constants_alone_are_those_of_the_whole_fit() -> None:
    runs = observed(changed(matmul=0.6, kernel_s=2e-5))
    runs[3] = dataclasses.replace(runs[3], seconds=1.3 * runs[3].seconds)
    found = fit(HARDWARE, runs)
    assert fit_constants(HARDWARE, runs) == found.constants
    assert found.residuals is not None and fit_constants(HARDWARE, []) == HARDWARE.constants


def test_runs_on_other_hardware_and_of_other_batches_are_fitted_together() -> None:
    truth = dataclasses.replace(Constants(), matmul=0.6)
    half = dataclasses.replace(HARDWARE, memory_bytes_per_s=HARDWARE.memory_bytes_per_s / 2)
    runs = []
    for machine in (HARDWARE, half):
        for batch in (RECIPE.batch_size, 2 * RECIPE.batch_size, RECIPE.batch_size):
            recipe = dataclasses.replace(RECIPE, batch_size=batch)
            true = dataclasses.replace(machine, constants=truth)
            seconds = step_time(PROFILE, recipe, true, Candidates.of(ROWS[:2])).seconds
            runs += [
                Run(PROFILE, recipe, row, float(value), machine) for row, value in zip(ROWS, seconds, strict=False)
            ]
    assert fit_constants(HARDWARE, runs, ["matmul"]).matmul == pytest.approx(0.6, rel=0.02)


def test_only_named_constants_change() -> None:
    found = fit(HARDWARE, observed(changed(matmul=0.5, kernel_s=3e-5)), ["matmul"]).constants
    assert dataclasses.replace(found, matmul=Constants().matmul) == Constants()


def test_shares_stay_below_one() -> None:
    runs = [dataclasses.replace(run, seconds=run.seconds / 10) for run in observed(HARDWARE)]
    found = fit(HARDWARE, runs).constants
    assert all(0 < getattr(found, name) <= 1 for name in ("matmul", "memory", "intra", "inter", "hidden_dp"))


def test_one_wrong_observation_does_little() -> None:
    runs = observed(changed(matmul=0.6))
    runs[2] = dataclasses.replace(runs[2], seconds=3 * runs[2].seconds)
    assert fit(HARDWARE, runs, ["matmul"]).constants.matmul == pytest.approx(0.6, rel=0.12)


def test_order_of_runs_and_repetition_make_no_difference() -> None:
    runs = observed(changed(matmul=0.6, kernel_s=2e-5))
    one, two = fit(HARDWARE, runs).constants, fit(HARDWARE, runs).constants
    assert one == two
    back = fit(HARDWARE, runs[::-1]).constants
    for name in TIME_CONSTANTS:
        assert getattr(back, name) == pytest.approx(getattr(one, name), rel=1e-6)


# --- published runs: the figures that `benchmarks/planner_published.py` prints ---------------------------------------


@pytest.fixture(scope="module")
def rows() -> list[published.Published]:
    return [item for item in published.read() if item.timed]


def of(rows: list[published.Published], source: str) -> list[published.Published]:
    return [item for item in rows if item.source.startswith(source)]


def test_every_row_is_read(rows: list[published.Published]) -> None:
    every = published.read()
    assert len(every) == 1624 and len(rows) == 1616  # eight rows state memory alone
    assert len(published.read(with_failures=True)) == 1634


@pytest.mark.parametrize("source", ["megatron", "korthikanti", "zerobubble"])
def test_published_steps_before_calibration(rows: list[published.Published], source: str) -> None:
    own = of(rows, source)
    assert published.errors(own, published.predict(own)).mean() < 0.05


@pytest.mark.parametrize("source", ["megatron", "korthikanti", "zerobubble"])
def test_published_steps_after_five_rows(rows: list[published.Published], source: str) -> None:
    assert published.after_calibration(of(rows, source), repeats=2).mean() < 0.05


def test_schedules_are_ordered_as_published(rows: list[published.Published]) -> None:
    groups = published.sweeps(of(rows, "zerobubble"))
    found = [published.choice(group, published.predict(group)) for group in groups]
    assert len(found) == 12 and max(item.regret[0] for item in found) < 0.01
    assert np.mean([item.correlation for item in found]) > 0.8


@pytest.mark.every  # a minute of fits
def test_constants_of_other_models_choose_well(rows: list[published.Published]) -> None:
    own = [item for item in of(rows, "vtrain") if item.row["layers"] in ("12", "24")]
    found = published.held_out_choices(own)
    assert len(found) == 60
    first, of_three, _ = np.mean([item.regret for item in found], axis=0)
    assert first < 0.05 and of_three < 0.01


def test_flops_of_published_rows_follow_their_formula(rows: list[published.Published]) -> None:
    """96 B l s h^2 (1 + s / 6h + V / 16lh), the operations with full recomputation (Narayanan et al., 2021)."""
    for item in of(rows, "megatron"):
        layers, hidden, seq, vocab, batch = (
            float(item.row[key]) for key in ("layers", "hidden", "seq", "vocab", "gbs")
        )
        formula = 96 * batch * seq * layers * hidden**2 * (1 + seq / 6 / hidden + vocab / 16 / layers / hidden)
        stated = formula / (float(item.row["tflops_per_gpu"]) * 1e12 * float(item.row["n_gpus"]))
        assert item.run.seconds == pytest.approx(stated, rel=0.01)


def test_blanks_are_read_as_usual_values(tmp_path: Path) -> None:
    header = published.ROWS.read_text().splitlines()[0]
    names = header.split(",")
    known = {
        "source": "x", "model": "llama", "layers": "16", "hidden": "2048", "seq": "4096", "gpu": "MI300X",
        "gpu_mem_gb": "192", "n_gpus": "16", "tp": "2", "cp": "2", "zero": "3", "gbs": "64", "tokens_s_gpu": "9000",
    }  # fmt: skip
    path = tmp_path / "rows.csv"
    failed = {**known, "note": "OOM"}
    lines = [",".join(row.get(name, "") for name in names) for row in (known, failed)]
    path.write_text("\n".join([header, *lines]))
    (item,) = published.read(path)
    assert item.ran and [row.ran for row in published.read(path, with_failures=True)] == [True, False]
    assert item.run.candidate == Candidate(dp=4, mp=2, cp=2, level=3, sequence_parallel=1, microbatches=16, backend=1)
    assert item.run.seconds == pytest.approx(64 * 4096 / (9000 * 16))
    assert 0.1 < published.predict([item])[0] / item.run.seconds < 10
