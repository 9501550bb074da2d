"""Candidates as settings of the command line, and back, through the real config."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autolaunch.config.across_keys import check
from autolaunch.config.command_line import parse
from autolaunch.config.compose import compose
from autolaunch.jobs.run import resolve_job
from autolaunch_strategies.config import CP_BACKENDS
from autolaunch_strategies.planner.candidate import FULL, PIPELINES, SELECTIVE, Candidate
from autolaunch_strategies.planner.enumerate import enumerate_candidates
from autolaunch_strategies.planner.settings import cut_names, overrides
from tests.planner.candidates import machines, model, recipe
from tests.support.config_candidate import candidate_of

LLAMA = ["data=synthetic", "model.hidden_size=512", "model.num_heads=8", "model.num_kv_heads=8", "model.num_layers=8"]
LLAMA += ["data.seq_len=1024", "data.batch_size=64"]
PROFILE = model(layers=8, heads=8)


@pytest.fixture(scope="module", autouse=True)
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory of its own, on a machine whose devices are CPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("work"))
        yield Path.cwd()


def job(candidate: Candidate, *before: str) -> dict[str, Any]:
    """The config of the resolved job that the settings of a candidate make, without an error."""
    composed = compose(parse([*LLAMA, "trainer.accelerator=cpu", *before, *overrides(candidate, PROFILE, recipe())]))
    assert composed.errors == []
    config = resolve_job(composed.config, composed.config.hydra, Path.cwd() / "run").config
    assert check(config, Path.cwd())[1] == []
    return config


CASES = [
    pytest.param(
        Candidate(), ["mesh=1", "dp=ddp", "recompute=none", "compile=false", "data.microbatches=1"], id="one rank"
    ),
    pytest.param(
        Candidate(dp=4, level=0, replicate=4, microbatches=2),
        ["mesh=4", "dp=ddp", "recompute=none", "compile=false", "data.microbatches=2"],
        id="ddp",
    ),
    pytest.param(
        Candidate(dp=4, level=3, replicate=2, recompute=FULL),
        ["mesh=4", "dp=hsdp", "dp.replicate=2", "recompute=full", "compile=false", "data.microbatches=1"],
        id="hsdp",
    ),
    pytest.param(
        Candidate(dp=4, level=1, replicate=2, recompute=4, compile=1),
        ["mesh=4", "dp=zero1", "dp.replicate=2", "recompute=4", "compile=true", "data.microbatches=1"],
        id="zero1 in replicas, compiled",
    ),
    pytest.param(
        Candidate(dp=2, mp=2, level=2, sequence_parallel=1, microbatches=4, recompute=SELECTIVE),
        ["mesh=2x2", "dp=zero2", "mp=seq_parallel", "recompute=selective", "compile=false", "data.microbatches=4"],
        id="zero2, sequence parallel",
    ),
    pytest.param(
        Candidate(mp=4, pp=2, pipeline=PIPELINES.index("exact"), microbatches=4),
        [
            "mesh=1x4x2",
            "dp=ddp",
            "mp=auto",
            "pp=exact",
            "pp.microbatches=4",
            "recompute=none",
            "compile=false",
            "data.microbatches=1",
        ],
        id="mp, exact",
    ),
    pytest.param(
        Candidate(pp=2, pipeline=PIPELINES.index("interleaved_1f1b"), virtual_stages=4, microbatches=8),
        [
            "mesh=1x1x2",
            "dp=ddp",
            "pp=interleaved_1f1b",
            "pp.microbatches=8",
            "pp.virtual_stages=4",
            "recompute=none",
            "compile=false",
            "data.microbatches=1",
        ],
        id="interleaved",
    ),
    pytest.param(
        Candidate(cp=4, level=3, backend=CP_BACKENDS.index("usp"), ulysses=2),
        ["mesh=1x1x1x4", "dp=fsdp", "cp=usp", "cp.ulysses=2", "recompute=none", "compile=false", "data.microbatches=1"],
        id="usp",
    ),
    pytest.param(
        Candidate(dp=2, cp=2, level=3, replicate=2, backend=CP_BACKENDS.index("ring")),
        [
            "mesh=2x1x1x2",
            "dp=hsdp",
            "dp.replicate=2",
            "cp=ring",
            "recompute=none",
            "compile=false",
            "data.microbatches=1",
        ],
        id="ring, replicas",
    ),
]


@pytest.mark.parametrize(("candidate", "written"), CASES)
def test_settings(candidate: Candidate, written: list[str]) -> None:
    assert overrides(candidate, PROFILE, recipe()) == written


@pytest.mark.parametrize(("candidate", "written"), CASES)
def test_settings_read_back_from_the_job(candidate: Candidate, written: list[str]) -> None:
    assert candidate_of(job(candidate)) == candidate


def test_any_proposal_is_a_job_without_an_error_and_is_read_back() -> None:
    found, _ = enumerate_candidates(PROFILE, recipe(), machines(8), limit=10**9)
    draw = np.random.default_rng(1)
    for index in draw.choice(len(found), 12, replace=False):
        candidate = found[int(index)]
        assert candidate_of(job(candidate)) == candidate


def test_settings_leave_nothing_of_what_was_set_before() -> None:
    before = ["data.microbatches=8", "pp=1f1b", "mp=seq_parallel"]
    candidate = Candidate(pp=2, dp=2, replicate=2, pipeline=PIPELINES.index("exact"), microbatches=4)
    typed = {item.partition("=")[0] for item in overrides(candidate, PROFILE, recipe())}
    assert candidate_of(job(candidate, *(item for item in before if item.partition("=")[0] not in typed))) == candidate


def test_a_balanced_cut_is_written_out() -> None:
    candidate = Candidate(pp=2, pipeline=PIPELINES.index("1f1b"), split=1, microbatches=4)
    (name,) = cut_names(candidate, PROFILE)
    written = overrides(candidate, PROFILE, recipe())
    assert f"pp.split_spec={{{name}: END}}" in written
    even = cut_names(Candidate(pp=2, pipeline=PIPELINES.index("1f1b")), PROFILE)
    assert PROFILE.block_names.index(name) > PROFILE.block_names.index(even[0])  # the head costs several blocks
    config = job(candidate)
    assert config["pp"]["split_spec"] == {name: "END"}
    assert candidate_of(config) == candidate


def test_what_the_config_leaves_open_is_what_the_runtime_takes() -> None:
    composed = compose(parse([*LLAMA, "trainer.accelerator=cpu", "mesh=2x1x2x2", "pp=1f1b", "cp=usp"]))
    config = resolve_job(composed.config, composed.config.hydra, Path.cwd() / "run").config
    found = candidate_of(config, heads=8)
    assert (found.level, found.replicate, found.microbatches, found.virtual_stages) == (3, 1, 8, 1)
    assert (found.backend_name, found.ulysses, found.split) == ("usp", 2, 0)
