"""Modules and parameters are those that torch finds, in its order."""

from __future__ import annotations

from torch import nn

from autolaunch_strategies.model.parts import modules_of, parameters_in


def test_parts_are_those_of_torch() -> None:
    shared, model = nn.Linear(2, 2), nn.Module()
    model.first, model.nothing = nn.Sequential(shared, nn.LayerNorm(2), nn.Sequential(nn.Linear(2, 2))), None
    model.own, model.last = nn.Parameter(shared.weight.detach()), nn.ModuleDict({"a": shared, "b": nn.Linear(2, 2)})
    model.last["b"].weight = shared.weight
    model.register_parameter("missing", None)
    assert modules_of(model) == list(model.modules())
    assert list(map(id, parameters_in(modules_of(model)))) == list(map(id, model.parameters()))
