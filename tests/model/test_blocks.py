"""Which modules of a model are its blocks."""

from __future__ import annotations

import torch
from torch import nn

from autolaunch_strategies.model.blocks import find_blocks
from autolaunch_strategies.plan.choose import planned_part


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x))


class Mixer(Layer):
    pass


def names(model: nn.Module) -> list[str]:
    return [block.name for block in find_blocks(model)]


def test_the_children_of_a_list_are_blocks() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([Layer(), Layer()])
    model.head = nn.Linear(4, 4)
    assert names(model) == ["layers.0", "layers.1"]


def test_a_list_of_lists_is_not_called_so_what_it_holds_are_blocks() -> None:
    """As x-transformers writes its layers: [norm, attention, residual] each. A norm in a module is no block."""
    model = nn.Module()
    model.layers = nn.ModuleList(
        nn.ModuleList([nn.ModuleList([nn.Sequential(nn.LayerNorm(4)), None]), layer, nn.Identity()])
        for layer in (Layer(), Mixer(), Layer(), Mixer())
    )
    assert names(model) == ["layers.0.1", "layers.1.1", "layers.2.1", "layers.3.1"]


def test_a_dictionary_in_a_list_is_not_called_either() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleDict({"mix": Mixer(), "feed": Layer()}) for _ in range(2))
    assert names(model) == ["layers.0.mix", "layers.0.feed", "layers.1.mix", "layers.1.feed"]


def test_a_sequential_in_a_list_is_called_so_it_is_a_block() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Sequential(Layer(), Layer()) for _ in range(2))
    assert names(model) == ["layers.0", "layers.1"]


def test_lists_of_different_branches_stay_apart() -> None:
    """A U-Net's `down` and `up` hold lists of their own; each is looked at by itself."""
    model = nn.Module()
    model.down = nn.ModuleList([Layer(), Layer()])
    model.up = nn.ModuleList([Mixer(), Mixer()])
    assert names(model) == ["down.0", "down.1", "up.0", "up.1"]


def test_a_block_that_shares_a_parameter_is_none() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([Layer(), Layer(), Layer()])
    model.layers[1].inner.weight = model.layers[0].inner.weight
    assert names(model) == ["layers.2"]
    assert set(find_blocks(model).reasons) == {"layers", "layers.0", "layers.1"}


def test_a_second_name_of_a_part_adds_no_blocks() -> None:
    """As fine-tuning code writes it: `self.backbone = self.model.body`."""
    root, model = nn.Module(), nn.Module()
    model.layers = nn.ModuleList([Layer(), Layer()])
    root.model, root.backbone = model, model.layers
    assert names(root) == ["model.layers.0", "model.layers.1"]
    assert planned_part(root) == (model, "model.")
