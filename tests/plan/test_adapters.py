"""Plans of models with LoRA: those of the model without it, carried over to the layers inside."""

from __future__ import annotations

import pytest
from torch import nn

from autolaunch_strategies.plan.adapters import carried_over, without_adapters
from autolaunch_strategies.plan.rules import read_plan


class Lora(nn.Module):
    """Laid out as PEFT's layers are."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, layer.out_features, bias=False)})


class SavedWhole(nn.Module):
    def __init__(self, layer: nn.Module, copy: nn.Module) -> None:
        super().__init__()
        self.original_module = layer
        self.modules_to_save = nn.ModuleDict({"default": copy})


def model(blocks: int = 2, without: int | None = None) -> nn.Module:
    made = [nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}) for _ in range(blocks)]
    for number, block in enumerate(made):
        if number != without:
            for name in ("up", "down"):
                block[name] = Lora(block[name])
    return nn.ModuleDict({"layers": nn.ModuleList(made), "head": SavedWhole(nn.Linear(4, 4), nn.Linear(4, 4))})


PLAN = {
    "layers.*.up": "ColWiseParallel",
    "layers.*.down": "RowWiseParallel",
    "head": [{"SequenceParallelEnd": {"need_transpose": False}}, "ColWiseParallel"],
    "layers.*.up.lora_A.default": {"ColWiseParallel": {"gather_output": True}},
}


def carried(plan: dict[str, object], adapted: nn.Module) -> dict[str, object]:
    return {rule.pattern: rule.to_yaml() for rule in carried_over(read_plan(plan), adapted)}


def test_layers_inside_get_the_styles_and_small_ones_what_fits_them() -> None:
    assert carried(PLAN, model()) == {
        "layers.*.up.base_layer": "ColWiseParallel",
        "layers.*.up.lora_B.default": "ColWiseParallel",
        "layers.*.down.base_layer": "RowWiseParallel",
        "layers.*.down.lora_A.default": "RowWiseParallel",
        "head": {"SequenceParallelEnd": {"need_transpose": False}},
        "head.modules_to_save.default": "ColWiseParallel",
        "head.original_module": "ColWiseParallel",
        "layers.*.up.lora_A.default": {"ColWiseParallel": {"gather_output": True}},
    }


def test_layers_without_adapters_keep_their_rule() -> None:
    rules = carried({"layers.*.(up|down)": "ColWiseParallel"}, model(3, without=1))
    assert rules == {
        r"layers\.1\.up|layers\.1\.down": "ColWiseParallel",
        "(layers.*.(up|down)).base_layer": "ColWiseParallel",
        "(layers.*.(up|down)).lora_B.default": "ColWiseParallel",
    }


@pytest.mark.parametrize("plain", [nn.Linear(2, 2), nn.ModuleDict({"a": nn.Linear(2, 2)})])
def test_models_without_adapters_keep_their_plan(plain: nn.Module) -> None:
    rules = read_plan({".*": "ColWiseParallel"})
    assert carried_over(rules, plain) == rules


def test_adapters_are_back_afterwards() -> None:
    adapted = model()
    names = [name for name, _ in adapted.named_modules()]
    with without_adapters(adapted) as inside:
        assert {type(part) for part in adapted.modules()}.isdisjoint({Lora, SavedWhole})
        assert inside["layers.0.up"] == "base_layer" and inside["head"] == "modules_to_save.default"
    assert [name for name, _ in adapted.named_modules()] == names
