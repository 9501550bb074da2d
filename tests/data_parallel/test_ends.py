"""An embedding of tokens and its head, sharded by themselves: the same numbers, each whole only where it is used."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from autolaunch_strategies.config import DataParallel
from autolaunch_strategies.data_parallel.ends import find_ends
from autolaunch_strategies.data_parallel.sharding import sharding_reasons
from autolaunch_strategies.model.blocks import find_blocks
from tests.support.ranks import start, torchrun

SCRIPT = """
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from autolaunch_strategies.config import DataParallel, parse_mesh
from autolaunch_strategies.data_parallel.sharding import apply_data_parallel
from autolaunch_strategies.mesh.process_group import leave_process_group
from autolaunch_strategies.mesh.rank_mesh import RankMesh
from autolaunch_strategies.model.blocks import find_blocks
from tests.data_parallel.test_ends import Words

class Exchanges(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.gathered, self.scattered = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        if name == "_allgather_base_":
            self.gathered.append(args[0].numel())
        if name == "_reduce_scatter_base_":
            self.scattered.append(args[1].numel())
        return func(*args, **(kwargs or {}))

def loss_of(model, tokens):
    return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

def check(mesh, dp, tied=False):
    torch.manual_seed(dp.sharding_level)
    alone, tokens = Words(tied), torch.randint(0, 64, (4, 6))
    torch.manual_seed(dp.sharding_level)
    model = Words(tied)
    data_parallel = apply_data_parallel(model, find_blocks(model), mesh, dp)
    data_parallel.begin()
    whole = {}
    model.head.register_forward_pre_hook(
        lambda *_: whole.update(embedding=not isinstance(model.embedding.weight, DTensor))
    )
    model.embedding.register_forward_pre_hook(
        lambda *_: whole.update(head=not isinstance(model.head.weight, DTensor)), prepend=True
    )
    optimizers = [torch.optim.SGD(item.parameters(), lr=0.5) for item in (alone, model)]
    mine = tokens.chunk(2)[dist.get_rank() // (dist.get_world_size() // 2)]
    for _ in range(3):
        with Exchanges() as exchanges:
            losses = loss_of(alone, tokens), loss_of(model, mine)
            for loss in losses:
                loss.backward()
            data_parallel.finish_backward()
        both = losses[1].detach().clone()
        dist.all_reduce(both)
        torch.testing.assert_close(both / dist.get_world_size(), losses[0].detach())
        named = dict(alone.named_parameters())
        for name, item in model.named_parameters():
            torch.testing.assert_close(item.grad.full_tensor(), named[name].grad, msg=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        data_parallel.end_step()
    for name, item in model.named_parameters():
        torch.testing.assert_close(item.full_tensor(), named[name], msg=name)
    return whole, exchanges

def main():
    dist.init_process_group("gloo")
    mesh = RankMesh.build(parse_mesh("2"), 1, 2, "cpu")
    table, block = 64 * 8, 8 * 8 + 8
    for level in (1, 2, 3):
        whole, exchanges = check(mesh, DataParallel(sharding_level=level))
        freed = level == 3
        assert whole == {"embedding": not freed, "head": False}, (level, whole)
        # The table and the head are gathered once, in groups of their own; what is freed, again.
        expected = [16, table, *[block] * 3, table, *[block] * (3 if freed else 0)]
        assert exchanges.gathered == expected, exchanges.gathered
        assert sorted(exchanges.scattered) == sorted([16, table, *[block] * 3, table]), exchanges.scattered
        check(mesh, DataParallel(sharding_level=level), tied=True)
    del mesh
    leave_process_group()

if __name__ == "__main__":
    main()
"""


class Words(nn.Module):
    """An embedding of 64 tokens, three blocks, a norm and a head."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 64, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class Pictures(nn.Module):
    """A layer for pictures, which only some batches have, beside what a model of transformers calls its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.kinds = nn.Embedding(64, 8), nn.Embedding(2, 8)
        self.pictures = nn.Linear(12, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.classes = nn.Linear(8, 3)

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens


def test_each_end_is_gathered_where_it_is_used_and_no_number_changes(tmp_path: Path) -> None:
    """At levels 1 to 3, untied and tied: losses, gradients and weights of three steps against one process."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    result = start(torchrun(2, str(script)))
    assert result.returncode == 0, result.stdout[-4000:]


@pytest.mark.parametrize(
    ("model", "embeddings", "heads"),
    [(Words(), ["embedding"], ["head"]), (Words(tied=True), [], []), (Pictures(), ["tokens"], [])],
    ids=["untied", "tied", "transformers"],
)
def test_what_is_an_end(model: nn.Module, embeddings: list[str], heads: list[str]) -> None:
    """Not what shares its table, nor what ranks may leave out: they would wait for each other."""
    ends = find_ends(model, find_blocks(model))
    assert (list(ends.embeddings), list(ends.heads)) == (embeddings, heads)


def test_the_reasons_say_when_ends_are_gathered() -> None:
    model = Words()
    reasons = sharding_reasons(model, find_blocks(model), DataParallel(sharding_level=3), 2)
    assert "freed" in reasons["embedding"] and "stays" in reasons["head"]
    staged = sharding_reasons(model, find_blocks(model), DataParallel(sharding_level=3), 2, pipelined=True)
    assert not {"embedding", "head"} & staged.keys()
