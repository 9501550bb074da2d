"""What blocks do in a step, where parameters are sharded: what would be wrong is told, and not trained on."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import start, torchrun

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from autolaunch_strategies.config import ConfigError, DataParallel, parse_mesh
from autolaunch_strategies.data_parallel.sharding import apply_data_parallel
from autolaunch_strategies.mesh.process_group import leave_process_group
from autolaunch_strategies.mesh.rank_mesh import RankMesh
from autolaunch_strategies.model.blocks import find_blocks

class Towers(nn.Module):
    # Two blocks of one shape: the samples say which of them is called.
    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.towers[int(x[0, 0] > 0)](x))

class Clamped(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)

class Table(nn.Embedding):
    def forward(self, x):
        return super().forward((x > 0).long())

class Half(nn.Linear):
    # One of its arguments is not used.
    def forward(self, x, unused):
        return super().forward(x)

def told(model, level, data):
    try:
        data_parallel = apply_data_parallel(model, find_blocks(model), mesh, DataParallel(sharding_level=level))
        data_parallel.begin()
        for _ in range(2):
            data_parallel.root(data).square().mean().backward()
            data_parallel.finish_backward()
    except ConfigError as error:
        return str(error)
    return ""

dist.init_process_group("gloo")
mesh = RankMesh.build(parse_mesh("2"), 1, 2, "cpu")
x = torch.randn(4, 4)
for level in range(4):
    mine = x.clone()
    mine[0, 0] = dist.get_rank() - 0.5
    found = told(Towers(), level, mine)
    assert ("dp: in one step ranks have called sharded blocks in different orders" in found) is (level > 0), found
    mine[0, 0] = 0.5  # all ranks have samples of one kind
    assert told(Towers(), level, mine) == ""
    found = told(nn.Sequential(nn.Linear(4, 4), Clamped(4, 4)), level, x)
    assert ("dp: 1.weight is written into between forward and backward" in found) is (level > 0), found
    found = told(nn.Sequential(Table(2, 4, max_norm=0.5), nn.Linear(4, 1)), level, x)
    assert "dp: 0(max_norm=0.5) shortens the rows that it looks up" in found, found
    model = Half(4, 4)
    unused = torch.zeros(4, requires_grad=True)
    apply_data_parallel(model, find_blocks(model), mesh, DataParallel(sharding_level=level)).begin()
    model(x, unused).sum().backward()
    assert unused.grad is None  # zeros could not be added to other gradients of it where it is sharded along mp
leave_process_group()
"""


def test_each_level(tmp_path: Path) -> None:
    script = tmp_path / "steps.py"
    script.write_text(SCRIPT)
    done = start(torchrun(2, str(script)), timeout=120)
    assert done.returncode == 0, done.stdout[-4000:]
