"""The norm of gradients that stand on several stages, some of them sharded, some held by two stages."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import nn

from autolaunch_strategies.data_parallel.gradients import gradient_norm
from tests.support.ranks import start, torchrun

SCRIPT = """
import math
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from autolaunch_strategies.config import parse_mesh
from autolaunch_strategies.data_parallel.gradients import gradient_norm
from autolaunch_strategies.mesh.rank_mesh import RankMesh
from autolaunch_strategies.mesh.process_group import leave_process_group

def check(mesh):
    torch.manual_seed(0)
    gradients = [torch.randn(5, 3), torch.randn(()), torch.randn(4), torch.randn(3, dtype=torch.float64)]
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = gradient
    sharding = mesh.sharding_mesh()
    sharded = nn.Parameter(distribute_tensor(torch.zeros(5, 3), sharding, [Shard(0)], src_data_rank=None))
    sharded.grad = distribute_tensor(gradients[0], sharding, [Shard(0)], src_data_rank=None)
    shared, other, wide = parameters[1:]
    first = mesh.coordinate["pp"] == 1
    cpu, group = torch.device("cpu"), mesh.group("pp")
    for order in (2.0, 1.0, 3.0, math.inf):
        def norm(*mine):
            return gradient_norm(mine, order, group, lambda parameter: first or parameter is not shared, cpu)

        def equal(found, *whole):
            expected = gradient_norm(whole, order)
            torch.testing.assert_close(found, expected)  # the type, too
            listed = [None] * dist.get_world_size()
            dist.all_gather_object(listed, found.item())
            assert len(set(listed)) == 1, listed

        equal(norm(sharded, shared) if first else norm(shared, other), *parameters[:3])
        equal(norm(sharded, shared) if first else norm(shared, wide), *parameters[:2], wide)
        equal(norm(other) if first else norm(), other)
        equal(norm(), *[])

dist.init_process_group("gloo")
check(RankMesh.build(parse_mesh("dp2xpp2"), 1, 2, "cpu"))
leave_process_group()
"""


def test_norm_over_stages_is_that_of_one_device(tmp_path: Path) -> None:
    script = tmp_path / "norms.py"
    script.write_text(SCRIPT)
    done = start(torchrun(4, str(script)), timeout=120)
    assert done.returncode == 0, done.stdout[-4000:]


def test_complex_numbers_count_by_their_absolute_values() -> None:
    torch.manual_seed(0)
    kinds = (torch.complex64, torch.float32, torch.complex128)
    parameters = [nn.Parameter(torch.randn(3, 2, dtype=kind)) for kind in kinds]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    for count in (2, 3):
        some = parameters[:count]
        for order in (1.0, 2.0, math.inf):
            expected = torch.cat([item.grad.abs().flatten().double() for item in some if item.grad is not None])
            torch.testing.assert_close(gradient_norm(some, order).double(), expected.norm(order), rtol=1e-6, atol=0)
