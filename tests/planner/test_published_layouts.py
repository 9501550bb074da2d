"""What is chosen for Llama 3 on H100s, beside what others have published, with the reason of each difference.

Published: Llama 3 405B (Grattafiori et al., 2024, table 4) on 16,384: mp8 cp1 pp16 dp128 at 8k, mp8 cp16 pp16 dp8
at 131k; NVIDIA (Megatron-Bridge, performance summaries): 8B on 8: dp8, FSDP; 70B on 64: mp4 pp8 dp2; 405B on 1,024:
mp8 pp8 cp2 dp8, in float8; torchtitan (2024): 8B on 8 and 128: FSDP alone; 70B on 256: mp8, FSDP.

All runs here are `precision=bf16-mixed`: parameters and gradients of 4 bytes, where the published ones had 2 and 4
or 2.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import yaml

from autolaunch_strategies.planner.choose import make_plan
from autolaunch_strategies.planner.hardware import hardware_from
from autolaunch_strategies.planner.recipe import recipe_of
from tests import ROOT
from tests.planner.candidates import llama

H100 = hardware_from(yaml.safe_load((ROOT / "conf/cluster/h100.yaml").read_text(encoding="utf-8")))
MILLION = 2**20


@dataclass(frozen=True)
class Job:
    """A training, and the sizes of the mesh that are expected: dp, mp, pp, cp."""

    size: str
    positions: int
    devices: int
    tokens: int
    mesh: tuple[int, int, int, int]
    why: str


JOBS = [
    Job("8b", 8192, 8, MILLION, (8, 1, 1, 1), "as NVIDIA and torchtitan"),
    Job("8b", 8192, 64, 4 * MILLION, (64, 1, 1, 1), "as torchtitan; gathered parameters fit whole"),
    Job("8b", 8192, 1024, 16 * MILLION, (1024, 1, 1, 1), "as torchtitan; gathered parameters fit whole"),
    Job("8b", 131072, 8, MILLION, (1, 1, 1, 8), "one sequence is all that the eight hold"),
    Job("8b", 131072, 64, 4 * MILLION, (4, 1, 1, 16), "cp16 needs no recomputation, cp8 is 23 % slower with it"),
    Job("70b", 8192, 64, 4 * MILLION, (64, 1, 1, 1), "NVIDIA's is 1 % faster: one axis is simpler than three"),
    Job("70b", 8192, 1024, 16 * MILLION, (1024, 1, 1, 1), "NVIDIA's with half of its stages is 2 % faster: three axes"),
    Job(
        "70b", 131072, 64, 4 * MILLION, (1, 1, 1, 64), "mp8 cp8 is as fast, and two axes; 32 sequences: pipelines wait"
    ),
    Job("405b", 8192, 1024, 16 * MILLION, (4, 8, 32, 1), "of mp8 pp8, fp32 gradients alone are 24 GiB: 5 % slower"),
    # What mp gathers and scatters along sequences torch copies: cp makes that less.
    Job("405b", 8192, 16384, 16 * MILLION, (32, 4, 32, 4), "Llama 3's, with cp2 for its recomputation: 4 % slower"),
    Job("405b", 131072, 1024, 16 * MILLION, (64, 2, 1, 8), "as torchtitan cuts 405B, with half of its mp: 3 % faster"),
    Job("405b", 131072, 16384, 16 * MILLION, (8, 8, 8, 32), "Llama 3's would recompute everything in fp32 gradients"),
]


@pytest.mark.full
@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.size}x{job.devices}-{job.positions // 1024}k")
def test_choices_beside_published_ones(job: Job) -> None:
    hardware = dataclasses.replace(H100, nodes=job.devices // H100.devices_per_node)
    recipe = recipe_of(job.tokens // job.positions, "bf16-mixed")
    plan = make_plan(llama(job.size, job.positions), recipe, hardware)
    one = plan.chosen
    assert (one.dp, one.mp, one.pp, one.cp) == job.mesh, job.why
    assert one.level > 0, "state is shared out wherever memory is short"
    fastest = plan.looked.seconds[plan.looked.pool].min()
    assert plan.seconds <= 1.03 * fastest, "simplicity decides within the model's own error, no further"
