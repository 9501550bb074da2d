"""Profiles that are kept for the next plan: which jobs share one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from autolaunch.config.command_line import parse
from autolaunch.config.compose import compose
from autolaunch.jobs.run import resolve_job
from autolaunch.planning.known_profiles import KnownProfile


def path(*typed: str, adapter: Mapping[str, Any] | None = None) -> Path | None:
    """Where the profile of the job of a command line is kept; `adapter`: what is other in that group."""
    composed = compose(parse(["plan", "data=synthetic", *typed]))
    assert composed.errors == []
    config = resolve_job(composed.config, composed.config.hydra, Path.cwd() / "run").config
    changed = {**config, "adapter": {**config["adapter"], **adapter}} if adapter else config
    return KnownProfile(changed, "cpu").path


@pytest.mark.parametrize(
    "typed",
    [
        ["model.num_layers=3"],
        ["model.trainable=[lm_head]"],
        ["adapter=lora"],
        ["precision=bf16-mixed"],
        ["data.seq_len=32"],
        ["dp.param_dtype=bf16"],
    ],
)
def test_jobs_of_one_model_share_a_profile(typed: list[str]) -> None:
    assert path() == path("data.batch_size=64", "optimizer.lr=1", "mesh=2") != path(*typed) is not None


def test_what_may_change_is_not_kept() -> None:
    assert path("adapter=lora", adapter={"r": 4}) not in (None, path("adapter=lora"))
    assert path("adapter=lora", adapter={"path": "somewhere"}) is None
