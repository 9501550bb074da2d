"""`recompute=budget`: compiled blocks keep a share of what they would keep; numbers stay those of one eager process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autolaunch_strategies.model.blocks import Block
from autolaunch_strategies.training.compile import apply_compile
from tests.support.cases import no_compiler
from tests.support.ranks import Group, GroupOf, problems
from tests.support.tiers import tiered

pytest.importorskip("transformers")  # modules of the cases
from tests.training.budget_cases import SHARES, TWO

SCRIPT = Path(__file__).with_name("budget_cases.py")
TOLERANCE = 1e-5


class Layer(nn.Module):
    """A block with attention and dropout; its sizes tell what is kept of it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, width = x.shape
        q, k, v = (part.view(b, n, 4, -1).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, width)
        x = x + F.dropout(self.out(y), 0.1)
        noise = torch.bernoulli(torch.full_like(x, 0.9))  # not among the functions that torch knows to be random
        return x + self.down(F.gelu(self.up(self.between(x) * noise)))


def kept_and_gradients(share: float | None, compiled: bool = True) -> tuple[int, list[torch.Tensor]]:
    """(bytes that a block keeps for its backward pass, beside its parameters; gradients)."""
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(2, 16, 32, requires_grad=True)
    if compiled:
        apply_compile([Block("layer", layer)], True, share)
    staying = {item.untyped_storage()._cdata for item in layer.parameters()}
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in staying:
            storages[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = layer(x)
    torch.manual_seed(1)  # the backward pass draws nothing, or nothing that this changes
    (output * torch.arange(32.0)).square().mean().backward()
    return sum(storages.values()), [x.grad, *(item.grad for item in layer.parameters())]


def test_bytes_fall_with_the_budget_and_gradients_do_not_change() -> None:
    _, expected = kept_and_gradients(None, compiled=False)
    compiled, _ = kept_and_gradients(None)
    rows = [kept_and_gradients(share) for share in (1.0, 0.7, 0.4, 0.1, 0.0)]
    assert kept_and_gradients(None)[0] == compiled  # a second model of this process is not compiled as the first
    sizes = [size for size, _ in rows]
    assert sizes[0] == compiled
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) >= 4, sizes
    given = 2 * 16 * 32 * 4
    # What blocks are given; attention's output and log-sum-exp; what was drawn, twice: no more at 0.
    assert sizes[-1] <= given * 4 + given // 2, (sizes, given)
    for _, gradients in rows:
        torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-6)


def test_the_budget_of_one_block_is_not_that_of_others() -> None:
    from torch._functorch import config, partitioners

    before = config.activation_memory_budget, partitioners.choose_saved_values_set
    kept_and_gradients(0.0)
    assert (config.activation_memory_budget, partitioners.choose_saved_values_set) == before
    layer = Layer()
    apply_compile([Block("layer", layer)], True, 0.5)
    with pytest.raises(RuntimeError, match="shape"):
        layer(torch.zeros(1, 1, 31))
    assert (config.activation_memory_budget, partitioners.choose_saved_values_set) == before


class Drops(nn.Module):
    """Nothing in it costs more to compute again than to keep, but what is drawn at random."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.dropout(x.exp(), 0.2) * 2).sin() * F.dropout(x, 0.1).exp()


@pytest.mark.parametrize("share", (0.3, 0.0))
def test_what_is_drawn_is_kept_where_nothing_else_is(share: float) -> None:
    gradients = []
    for block in (Drops(), Drops()):
        if gradients:
            apply_compile([Block("drops", block)], True, share)
        torch.manual_seed(0)
        x = torch.randn(4, 8, 32, requires_grad=True)
        output = block(x)
        torch.manual_seed(1)
        output.square().mean().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.fixture(autouse=True)
def only_captured() -> Iterator[None]:
    with no_compiler():
        yield


@pytest.fixture(scope="module")
def one(group_of: GroupOf) -> Group:
    return group_of(SCRIPT, "one", 1)


@pytest.fixture(scope="module")
def two(group_of: GroupOf) -> Group:
    return group_of(SCRIPT, "two", 2)


@pytest.fixture(scope="module")
def four(group_of: GroupOf) -> Group:
    return group_of(SCRIPT, "four", 4)


PAIRS = list(itertools.product(TWO, SHARES))


OF_CI = {("seq_parallel", 0.0), ("ring", 0.0), ("fsdp", 0.5), ("pipeline", 0.5)}
"""Each axis; the first of them is run below anyway."""


@pytest.mark.parametrize(("mesh", "share"), tiered(PAIRS, [], lambda pair: pair not in OF_CI))
def test_two_ranks_equal_one_process(one: Group, two: Group, mesh: str, share: float) -> None:
    assert problems(one, two, "plain", f"{mesh}-{share}", TOLERANCE) == []


@pytest.mark.every  # a minute
def test_four_ranks_equal_one_process(one: Group, four: Group) -> None:
    assert problems(one, four, "plain", "ring-in-graphs-0.0", TOLERANCE) == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("group", "mesh"),
    [("two", "seq_parallel"), pytest.param("four", "ring-in-graphs", marks=pytest.mark.every)],
)
def test_products_are_computed_again_and_nothing_travels_again(
    group: str, mesh: str, request: pytest.FixtureRequest
) -> None:
    ranks: Group = request.getfixturevalue(group)
    plain, least = (ranks.read(f"{mesh}-{share}")["calls"] for share in (None, 0.0))
    assert plain["aten.mm"] < least["aten.mm"]
    travels = {name: count for name, count in plain.items() if name.startswith(("_c10d_functional", "autolaunch"))}
    assert ("autolaunch.context_attention" in travels) == (group == "four")
    assert travels and {name: least.get(name) for name in travels} == travels
