"""Several backward passes that count as one, and what is left of them when one raises."""

from __future__ import annotations

from pathlib import Path

import torch

from autolaunch_strategies.data_parallel.gradients import GradientAverage
from autolaunch_strategies.data_parallel.groups import GradientGroup
from tests.support.ranks import start, torchrun

SCRIPT = """
import copy
from contextlib import nullcontext
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from autolaunch_strategies.config import DataParallel, parse_mesh
from autolaunch_strategies.data_parallel import gradients
from autolaunch_strategies.data_parallel.sharding import apply_data_parallel
from autolaunch_strategies.mesh.process_group import leave_process_group
from autolaunch_strategies.mesh.rank_mesh import RankMesh
from autolaunch_strategies.model.blocks import find_blocks

class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def passes(data_parallel, data, fail):
    with data_parallel.several_backwards():
        for part in data.chunk(2):
            data_parallel.root(part).square().mean().mul(0.5).backward()
            if fail:
                raise KeyError
    data_parallel.finish_backward()

def check(mesh, level):
    torch.manual_seed(level)
    whole, x = Blocks(), torch.randn(8, 4)
    whole(x).square().mean().backward()
    torch.manual_seed(level)
    model = Blocks()
    data_parallel = apply_data_parallel(model, find_blocks(model), mesh, DataParallel(sharding_level=level))
    data_parallel.begin()
    mine = x.chunk(2)[dist.get_rank()]
    try:
        passes(data_parallel, mine, fail=True)
    except KeyError:
        model.zero_grad()
    if level == 0:  # single passes are averaged, too
        model(mine).square().mean().backward()
        data_parallel.finish_backward()
        compare(model, whole)
        model.zero_grad()
    passes(data_parallel, mine, fail=False)
    compare(model, whole)
    model.zero_grad()
    model(mine).square().mean().backward(create_graph=True)
    data_parallel.finish_backward()
    compare(model, whole)
    data_parallel.forget_gathered()
    for each, data, accumulating in ((whole, x, nullcontext), (model, mine, data_parallel.accumulating)):
        each.zero_grad()
        with accumulating():
            penalty = slope(each, data).square().mean()
            each(data).mean().backward()
            data_parallel.finish_backward()
        for loss in (slope(each, data.flip(-1)).square().mean(), penalty):
            loss.backward()
            data_parallel.finish_backward()
    compare(model, whole)

def slope(model, data):
    data = data.clone().requires_grad_()
    return torch.autograd.grad(model(data).sum(), data, create_graph=True)[0]

def compare(model, whole):
    expected = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        torch.testing.assert_close(gradient, expected[name].grad, msg=lambda text: f"{name}: {text}")

class Shared(Blocks):
    # One layer, called several times: recomputed in passes within the pass, its gradient comes in as many parts.

    def forward(self, x):
        x = self.head(x) + x
        for _ in range(3):
            x = checkpoint(self.blocks[0], x, use_reentrant=True)
        return x

def check_parts(mesh):
    gradients.BUCKET_BYTES = 1
    torch.manual_seed(9)
    whole, x = Shared(), torch.randn(8, 4)
    model = copy.deepcopy(whole)
    data_parallel = apply_data_parallel(model, find_blocks(model), mesh, DataParallel(sharding_level=0))
    for _ in range(3):  # from the second one on buckets might go as soon as they are full
        data_parallel.begin()
        whole.zero_grad()
        model.zero_grad()
        whole(x).square().mean().backward()
        model(x.chunk(2)[dist.get_rank()]).square().mean().backward()
        data_parallel.finish_backward()
        used = {name: item for name, item in model.named_parameters() if item.grad is not None}
        assert len(used) == 4
        for name, item in used.items():
            torch.testing.assert_close(item.grad, whole.get_parameter(name).grad)

dist.init_process_group("gloo")
mesh = RankMesh.build(parse_mesh("2"), 1, 2, "cpu")
for level in range(4):
    check(mesh, level)
    # Nothing has been gathered yet, and gradients are summed in another type than weights are gathered in.
    model = Blocks()
    data_parallel = apply_data_parallel(model, find_blocks(model), mesh, DataParallel(sharding_level=level))
    data_parallel.begin(torch.bfloat16)
    try:
        with data_parallel.several_backwards():
            raise KeyError
    except KeyError:
        pass
check_parts(mesh)
del mesh, data_parallel, model
leave_process_group()
"""


def test_passes_that_raised_leave_nothing_behind(tmp_path: Path) -> None:
    script = tmp_path / "passes.py"
    script.write_text(SCRIPT)
    done = start(torchrun(2, str(script)), timeout=120)
    assert done.returncode == 0, done.stdout[-4000:]


def test_gradients_that_were_averaged_are_not_divided_again() -> None:
    """Of experts, whose gradients come from more ranks than average them: loops that accumulate average every pass."""
    weight, frozen = (torch.nn.Parameter(torch.ones(2), requires_grad=trained) for trained in (True, False))
    average = GradientAverage({weight: GradientGroup(None, 4), frozen: GradientGroup(None, 4)})
    for expected in (1.0, 2.0):
        (4 * weight).sum().backward()
        average.finish()
        assert weight.grad is not None and weight.grad.tolist() == [expected] * 2
    frozen.requires_grad_(True)
    (4 * frozen).sum().backward()
    average.finish()
    assert frozen.grad is not None and frozen.grad.tolist() == [1.0] * 2
    average.remove()
    (4 * weight).sum().backward()
    assert weight.grad.tolist() == [6.0] * 2
