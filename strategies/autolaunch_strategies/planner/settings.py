"""A candidate as settings of the config. Torch-free."""

from __future__ import annotations

from autolaunch_strategies.planner.candidate import PIPELINES, Candidate
from autolaunch_strategies.planner.profile import ModelProfile, Recipe
from autolaunch_strategies.planner.stages import cut

LEVELS = ("ddp", "zero1", "zero2", "fsdp")
"""The option of the group dp for each sharding level."""


def overrides(candidate: Candidate, profile: ModelProfile, recipe: Recipe) -> list[str]:
    """What to write on the command line to run a candidate; of axes with one rank, nothing.

    Every key that says how a batch is cut is there, so that none that was set before remains. A balanced cut is written
    out, by the names of the blocks that end the stages: what the runtime would find balanced may be another one.
    """
    c = candidate
    assert c.pipeline < len(PIPELINES), "not in the runtime"
    settings = [f"mesh={c.mesh.name}"]
    hybrid = c.level > 0 and c.replicate > 1
    settings.append(f"dp={'hsdp' if hybrid and c.level == 3 else LEVELS[c.level]}")
    if hybrid:
        settings.append(f"dp.replicate={c.replicate}")
    if c.mp > 1:
        settings.append(f"mp={'seq_parallel' if c.sequence_parallel else 'auto'}")
    if c.pp > 1:
        settings += [f"pp={c.pipeline_name}", f"pp.microbatches={c.microbatches}"]
        if c.virtual_stages != c.schedule.least_stages:
            settings.append(f"pp.virtual_stages={c.virtual_stages}")
        if c.split:
            ends = ", ".join(f"{name}: END" for name in cut_names(candidate, profile))
            settings.append(f"pp.split_spec={{{ends}}}")
    if c.cp > 1:
        settings.append(f"cp={c.backend_name}")
        if c.context_backend.is_mixed:
            settings.append(f"cp.ulysses={c.ulysses}")
    if profile.experts:
        settings.append(f"ep={c.ep}")
    settings.append(f"recompute={c.recompute_name}")
    settings.append(f"compile={str(c.compile == 1).lower()}")
    settings.append(f"data.microbatches={c.microbatches if c.pp == 1 else 1}")
    return settings


def cut_names(candidate: Candidate, profile: ModelProfile) -> list[str]:
    """The blocks that end every stage but the last."""
    c = candidate
    sizes = cut(profile, c.pipeline_name, c.pp, c.virtual_stages, c.split).sizes
    return [profile.block_names[end - 1] for end in sizes.cumsum()[:-1]]
