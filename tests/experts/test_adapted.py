"""LoRA on parameters of experts: what each rank changes of its own ones is its part of what PEFT changes of all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.experts.changed import ChangedExperts
from autolaunch_strategies.experts.find import find_mixtures, find_routers
from tests.experts.cases import EXPERTS, made

peft = pytest.importorskip("peft", reason="adapters are PEFT's")


@pytest.mark.parametrize("local", [1, 4])
@pytest.mark.parametrize(
    ("family", "parameters"),
    [
        ("mixtral", ["gate_up_proj", "down_proj"]),  # [experts, out, in]
        ("gpt_oss", ["gate_up_proj", "down_proj"]),  # [experts, in, out]
        ("gpt_oss", ["gate_up_proj_bias"]),  # [experts, out]
    ],
)
def test_parts_of_ranks_are_what_peft_changes(family: str, parameters: list[str], local: int) -> None:
    model = adapted(family, *parameters)
    mixture = find_mixtures(model)[0]
    assert [adapter.parameter_name for adapter in mixture.adapters] == parameters[::-1]
    for adapter in mixture.adapters:
        nn.init.normal_(adapter.lora_B["default"].weight)
    for name, adapter in zip(parameters[::-1], mixture.adapters, strict=True):
        whole = mixture.module.get_parameter(name)
        expected = whole + adapter.get_delta_weight("default")
        parts = [
            ChangedExperts(mixture.adapters, first, local, None)(name, whole[first : first + local])
            for first in range(0, EXPERTS, local)
        ]
        assert not torch.equal(whole, expected)
        torch.testing.assert_close(torch.cat(parts), expected)


def test_adapters_that_are_off_change_nothing() -> None:
    model = adapted("mixtral", "down_proj")
    mixture = find_mixtures(model)[0]
    change = ChangedExperts(mixture.adapters, 0, EXPERTS, None)
    own = mixture.module.get_parameter("down_proj")
    with model.disable_adapter():
        assert change("down_proj", own) is own
    assert change("gate_up_proj", own) is own  # which has none
    assert change("down_proj", own) is not own


def test_the_router_is_found_beside_adapters() -> None:
    model, plain = adapted("mixtral", "down_proj"), made("mixtral", {})
    assert len(find_routers(model)) == len(find_routers(plain)) == 2
    assert find_mixtures(model)[0].place == f"base_model.model.{find_mixtures(plain)[0].name}"


def test_an_adapter_of_another_kind_is_refused() -> None:
    model: Any = made("mixtral", {})
    model.model.layers[0].mlp.experts = nn.ModuleDict({"base_layer": model.model.layers[0].mlp.experts})
    with pytest.raises(ConfigError, match="an adapter is around it of which nothing is known, ModuleDict"):
        find_mixtures(model)


def adapted(family: str, *parameters: str) -> Any:
    names = [f"experts.{name}" for name in parameters]
    return peft.get_peft_model(made(family, {}), peft.LoraConfig(r=3, target_modules=[], target_parameters=names))
