"""What constants leave unexplained of runs: told by what is like them, and by nothing else."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from autolaunch_strategies.planner.calibrate import fitted
from autolaunch_strategies.planner.candidate import Candidate, Candidates
from autolaunch_strategies.planner.fit import Run, fit
from autolaunch_strategies.planner.hardware import Hardware, Link, hardware_to
from autolaunch_strategies.planner.profile import Recipe
from autolaunch_strategies.planner.residuals import FEATURES, LENGTH, Residuals, features, learned
from autolaunch_strategies.planner.time import step_time
from tests.support.transformer_profile import transformer_profile

PROFILE = transformer_profile(12, 1024, 16, 1024, 50304)
RECIPE = Recipe(64, "bf16", 4, 2, 0, 4, 4, 8)
HARDWARE = Hardware(
    "h", "cuda", 2, 8, 80 * 2**30, {"fp32": 2e13, "bf16": 3e14}, 2e12, Link(3e11, 5e-6), Link(2.5e10, 2e-5)
)
ROWS = [
    Candidate(dp=dp, mp=mp, microbatches=microbatches)
    for dp, mp in ((8, 1), (4, 2), (2, 4), (1, 8), (4, 1), (2, 2))
    for microbatches in (1, 2, 4)
]


def rows_of(candidates: list[Candidate]) -> np.ndarray:
    """[n, features]"""
    columns = features(PROFILE, RECIPE, 3e14, Candidates.of(candidates))
    return np.stack(np.broadcast_arrays(*columns), axis=1)


def corrections(residuals: Residuals, candidates: list[Candidate]) -> np.ndarray:
    """[n] factors"""
    found = residuals.correction(features(PROFILE, RECIPE, 3e14, Candidates.of(candidates)))
    return np.exp(found) * np.ones(len(candidates))


def test_features_describe_a_run() -> None:
    run = dict(
        zip(FEATURES, rows_of([Candidate(dp=4, mp=2, pp=2, pipeline=3, microbatches=8, level=1)])[0], strict=True)
    )
    block = PROFILE.kinds[0].parameters
    expected = {"dp": 4, "mp": 2, "pp": 2, "cp": 1, "pipeline": 3, "microbatches": 8, "level": 1, "positions": 1024}
    expected |= {
        "microbatch": 64 / 32 * 1024,
        "blocks": 12,
        "width": math.sqrt(block),
        "peak_tflops": 300,
        "compute": 2,
    }
    assert {name: run[name] for name in expected} == pytest.approx(expected)


def test_a_model_without_blocks_has_features() -> None:
    bare = dataclasses.replace(PROFILE, kinds=(), blocks=(), block_names=())
    columns = features(bare, RECIPE, 1e14, Candidates.of([Candidate()]))
    assert len(columns) == len(FEATURES) and np.isfinite(np.concatenate(columns)).all()


def test_two_runs_against_the_formula() -> None:
    one, two, asked = Candidate(dp=8), Candidate(dp=4, mp=2), Candidate(dp=2, mp=4)
    residuals = Residuals(tuple(map(tuple, rows_of([one, two]).tolist())), (0.1, -0.2), amplitude=0.2, noise=0.05)
    # dp and mp differ by one doubling each, and with dp the positions of a microbatch.
    near, far = math.exp(-3 / LENGTH), math.exp(-6 / LENGTH)
    own, shared = 0.2**2 + 0.05**2, 0.2**2 * near
    determinant = own**2 - shared**2
    first, second = (own * 0.1 + shared * 0.2) / determinant, (-own * 0.2 - shared * 0.1) / determinant
    expected = 0.2**2 * (far * first + near * second)
    assert math.log(corrections(residuals, [asked])[0]) == pytest.approx(expected)


def test_what_makes_no_difference_gets_a_long_length() -> None:
    """Runs with mp of 2 are slower by a quarter whatever else they do; so is one that has not been run."""
    ran = [row for row in ROWS if row != Candidate(dp=2, mp=2, microbatches=4)]
    residuals = learned(rows_of(ran).tolist(), [0.25 * (row.mp == 2) for row in ran])
    lengths = dict(zip(FEATURES, residuals.lengths, strict=True))
    assert lengths["mp"] < lengths["dp"] and lengths["mp"] < lengths["microbatches"]
    assert lengths["pp"] == LENGTH, "no two runs differ in it"
    asked = [Candidate(dp=2, mp=2, microbatches=4), Candidate(dp=1, mp=1, microbatches=4)]
    slower, same = np.log(corrections(residuals, asked))
    assert slower == pytest.approx(0.25, abs=0.05) and same == pytest.approx(0, abs=0.05)


def test_far_from_all_runs_nothing_is_corrected() -> None:
    residuals = learned(rows_of(ROWS).tolist(), [0.3] * len(ROWS))
    far = [Candidate(dp=1024, mp=8, pp=64, pipeline=4, virtual_stages=8, cp=16, backend=2, level=3, recompute=1)]
    assert corrections(residuals, far)[0] == pytest.approx(1, abs=0.05)
    assert corrections(residuals, ROWS[:1])[0] == pytest.approx(math.exp(0.3), rel=0.02)


def test_noise_is_not_believed() -> None:
    """Errors that no likeness explains: a run that is repeated would not be off by as much again."""
    random = np.random.default_rng(0)
    rows = [row for row in ROWS for _ in range(3)]
    residuals = learned(rows_of(rows).tolist(), (0.05 * random.standard_normal(len(rows))).tolist())
    assert np.abs(np.log(corrections(residuals, ROWS))).max() < 0.05
    assert 0.03 <= residuals.noise <= 0.08


def test_the_order_of_runs_makes_no_difference() -> None:
    random = np.random.default_rng(1)
    logs = (0.1 * random.standard_normal(len(ROWS))).tolist()
    one, again = (learned(rows_of(ROWS).tolist(), logs) for _ in range(2))
    back = learned(rows_of(ROWS[::-1]).tolist(), logs[::-1])
    assert one == again and (one.lengths, one.noise, one.amplitude) == (back.lengths, back.noise, back.amplitude)
    assert corrections(back, ROWS) == pytest.approx(corrections(one, ROWS), rel=1e-9)


# --- with constants ---------------------------------------------------------------------------------------------------


def observed(rows: list[Candidate], odd: float) -> list[Run]:
    """As predicted, but with mp of 4 slower by a factor that no constant explains."""
    seconds = step_time(PROFILE, RECIPE, HARDWARE, Candidates.of(rows)).seconds
    return [
        Run(PROFILE, RECIPE, row, float(value) * (odd if row.mp == 4 else 1))
        for row, value in zip(rows, seconds, strict=True)
    ]


def test_a_fit_explains_what_its_constants_cannot() -> None:
    unseen = Candidate(dp=4, mp=4, microbatches=2)
    runs = observed(ROWS, 1.4)
    found = fit(HARDWARE, runs)
    assert found.residuals is not None and len(found.residuals.runs) == len(runs)
    (true,) = (run.seconds for run in observed([unseen], 1.4))
    constants_alone = dataclasses.replace(found, residuals=None)
    whole, alone = (
        step_time(PROFILE, RECIPE, item, Candidates.of([unseen])).seconds[0] for item in (found, constants_alone)
    )
    assert abs(math.log(whole / true)) < 0.06 < abs(math.log(alone / true))


def test_parts_still_add_up() -> None:
    found = fit(HARDWARE, observed(ROWS, 1.4))
    times = step_time(PROFILE, RECIPE, found, Candidates.of(ROWS))
    assert sum(times.parts.values()) == pytest.approx(times.seconds, rel=1e-12)


def test_a_second_fit_takes_the_place_of_the_first() -> None:
    runs = observed(ROWS, 1.4)
    once = fit(HARDWARE, runs)
    plain = dataclasses.replace(once, residuals=None)
    assert fit(once, runs).residuals == fit(plain, runs).residuals


def test_a_calibration_keeps_constants_alone() -> None:
    found = fitted(HARDWARE, observed(ROWS, 1.4))
    assert found.residuals is None and found.constants != HARDWARE.constants
    assert "residuals" not in hardware_to(found)
