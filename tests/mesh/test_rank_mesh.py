"""The groups of a mesh: who shares sequences with whom, and ranks that are laid out in another order."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from autolaunch_strategies.config import parse_mesh
from autolaunch_strategies.mesh.rank_mesh import RankMesh
from autolaunch_strategies.torch_private.pretended import pretended_group
from tests.support.one_rank import without_process_group
from tests.support.ranks import start, torchrun

SCRIPT = """
import itertools
import torch
import torch.distributed as dist
from torch import nn
from autolaunch_strategies import ColWiseParallel, ProcessMesh, parallelize
from autolaunch_strategies.config import parse_mesh
from autolaunch_strategies.mesh.rank_mesh import RankMesh
from autolaunch_strategies.mesh.process_group import leave_process_group

def ranks_of(group):
    return None if group is None else dist.get_process_group_ranks(group)

def peers(text, ulysses, ranks=None, order="pp,dp,cp,mp"):
    shape = parse_mesh(text, order)
    mesh = RankMesh.build(shape, 1, shape.dp, "cpu", ranks, ulysses)
    listed = [None] * 4
    found = mesh.cp_peers()
    mine = None
    if found is not None:
        assert (found.rank, found.size) == (mesh.coordinate["cp"], shape.cp)
        layout = found.layout(48)
        assert (layout.ranks, layout.ulysses) == (shape.cp, ulysses)
        place, part = divmod(found.rank, ulysses)
        assert found.ring is None or found.ring.rank() == place
        assert found.ulysses is None or found.ulysses.rank() == part
        mine = [ranks_of(group) for group in (found.group, found.ring, found.ulysses)]
    wider = [ranks_of(mesh.group(*axes)) for axes in (("cp",), ("dp", "cp"), ("mp",))]
    sharding = mesh.sharding_mesh()
    assert sharding.ndim == 1 and sharding.size() == shape.dp * shape.cp
    dist.all_gather_object(listed, (mesh.coordinate, mine, wider, sharding.mesh.tolist()))
    coordinates, groups, wider, sharding = zip(*listed)
    return list(coordinates), list(groups), list(wider), list(sharding)

dist.init_process_group("gloo")
everyone = [0, 1, 2, 3]

# a ring, ulysses, both, and one rank
assert peers("cp4", 1)[1] == [[everyone, everyone, None]] * 4
assert peers("cp4", 4)[1] == [[everyone, None, everyone]] * 4
both = peers("cp4", 2)
assert both[1] == [[everyone, ring, part] for part, ring in itertools.product([[0, 1], [2, 3]], [[0, 2], [1, 3]])]
assert both[2] == [[everyone, everyone, None]] * 4 and both[3] == [everyone] * 4
assert peers("4", 1)[1] == [None] * 4

# beside other axes
assert peers("dp2xcp2", 2)[1:] == (
    [[pair, None, pair] for pair in ([0, 1], [0, 1], [2, 3], [2, 3])],
    [[pair, everyone, None] for pair in ([0, 1], [0, 1], [2, 3], [2, 3])],
    [everyone] * 4,
)
assert peers("dp2xcp2", 1, order="pp,cp,dp,mp")[1] == [[pair, pair, None] for pair in ([0, 2], [1, 3]) * 2]

# ranks in another order keep their place along dp; along the other axes torch's order of a group is theirs
shuffled = peers("cp4", 2, [0, 2, 1, 3])
assert shuffled == both
found = peers("dp2xcp2", 1, [0, 3, 2, 1])
assert [place["dp"] for place in found[0]] == [0, 1, 1, 0]
assert found[1] == [[pair, pair, None] for pair in ([0, 3], [1, 2], [1, 2], [0, 3])]
found = peers("mp2xcp2", 1, [0, 3, 2, 1], "pp,dp,cp,mp")
for axis, other in (("cp", "mp"), ("mp", "cp")):  # whoever is the same along one axis is another along the other
    for one, two in itertools.combinations(found[0], 2):
        assert one[axis] != two[axis] or one[other] != two[other]
groups = [(place["mp"], mine[0]) for place, mine in zip(found[0], found[1])]
assert all(one[1] == two[1] for one, two in itertools.combinations(groups, 2) if one[0] == two[0])

# hybrid sharding, with or without anything to shard over, wherever the axes stand
def sharding(text, replicate, order):
    shape = parse_mesh(text, order)
    mesh = RankMesh.build(shape, replicate, shape.dp // replicate, "cpu")
    made = mesh.sharding_mesh()
    assert made.mesh_dim_names[0] == "dp_replicate" and made.shape[0] == replicate
    assert dist.get_process_group_ranks(mesh.group("dp", "cp")) == everyone
    return made.mesh.tolist()

assert sharding("dp2xcp2", 2, "pp,dp,cp,mp") == [[0, 1], [2, 3]]
assert sharding("dp2xcp2", 2, "pp,cp,dp,mp") == [[0, 2], [1, 3]]
assert sharding("4", 4, "pp,dp,cp,mp") == [[0], [1], [2], [3]]
assert sharding("4", 2, "pp,dp,cp,mp") == [[0, 1], [2, 3]]

# what a layer gathers over ranks in another order
torch.manual_seed(0)
layer, x = nn.Linear(8, 12), torch.randn(3, 8)
expected = layer(x).detach()
model, _ = parallelize(nn.Sequential(layer), None, ProcessMesh([3, 1, 0, 2], ["mp"]),
                       {"mp_config": {"parallelize_plan": {"0": ColWiseParallel(gather_output=True)}}})
torch.testing.assert_close(model(x), expected)
leave_process_group()
"""


def test_groups(tmp_path: Path) -> None:
    script = tmp_path / "groups.py"
    script.write_text(SCRIPT)
    done = start(torchrun(4, str(script)), timeout=180)
    assert done.returncode == 0, done.stdout[-4000:]


def test_a_second_mesh_of_the_same_ranks_has_groups_of_its_own() -> None:
    """Torch remembers results by mesh, and takes an equal one for it; ranks that remember different ones would hang."""
    without_process_group()
    with pretended_group(0, 4):
        for text in ("dp2xmp2", "mp2xpp2", "dp2xmp2"):
            mesh = RankMesh.build(parse_mesh(text), 1, 1 if "dp" not in text else 2, "cpu")
            along = mesh.sub_mesh("mp")
            assert along is not None
            rows = DTensor.from_local(torch.ones(2, 2), along, [Shard(0)])
            columns = DTensor.from_local(torch.ones(2, 2), along, [Shard(1)])
            results = rows + rows, rows @ columns, rows.sum(), rows.redistribute(placements=[Replicate()]).mul(2)
            assert [result.device_mesh.get_group() is mesh.group("mp") for result in results] == [True] * 4
