"""Modules and parameters are those that torch finds."""

from __future__ import annotations

from torch import nn

from autolaunch_strategies.model.parts import modules_of, parameters_in


def test_parts_are_those_of_torch() -> None:
    shared, model = nn.Linear(2, 2), nn.Module()
    model.first, model.nothing = nn.Sequential(shared, nn.LayerNorm(2), nn.Sequential(nn.Linear(2, 2))), None
    model.own, model.last = nn.Parameter(shared.weight.detach()), nn.ModuleDict({"a": shared, "b": nn.Linear(2, 2)})
    model.last["b"].weight = shared.weight
    model.register_parameter("missing", None)
    modules = modules_of(model)
    parameters = list(map(id, parameters_in(modules)))
    assert len(modules) == len(set(modules)) and set(modules) == set(model.modules())
    assert len(parameters) == len(set(parameters)) and set(parameters) == set(map(id, model.parameters()))
