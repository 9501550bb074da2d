"""Every mixture that the installed `transformers` marks as one: found by structure, exact with rows that travel."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.experts.dispatch import Dispatch
from autolaunch_strategies.experts.find import find_mixtures
from autolaunch_strategies.experts.whole import shard_each
from tests.support.one_rank import mesh_of_one_rank

EXPERTS, CHOSEN, WIDTH = 4, 2, 16
CONFIG = SimpleNamespace(
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size", "moe_latent_size"), WIDTH),
    **dict.fromkeys(("hidden_act", "hidden_activation", "mlp_hidden_act"), "silu"),
    **{
        "moe_hidden_size": WIDTH,
        "num_experts_per_tok": CHOSEN,
        "post_norm_eps": 1e-6,
        "mlp_gate_softcap": 5.0,
        "mlp_up_softcap": 5.0,
    },
    **{"swiglu_limit": 7.0, "swiglu_alpha": 1.7, "_experts_implementation": "eager"},
)
REFUSED = {"MuseSparkExperts": "its experts share parameters of another module"}
MODELS = Path(transformers.__file__).parent / "models"
DECORATED = sorted(
    (file.parent.name, name)
    for file in MODELS.glob("*/modeling_*.py")
    for name in re.findall(
        r"^@use_experts_implementation.*?^class (\w+)", file.read_text(encoding="utf-8"), re.M | re.S
    )
)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with mesh_of_one_rank() as made:
        yield made


@pytest.mark.full
@pytest.mark.parametrize(("model", "name"), DECORATED)
def test_a_mixture_of_transformers(model: str, name: str, mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    experts = built(model, name)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    model_of_one = nn.ModuleDict({"experts": experts})
    if name in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[name]):
            find_mixtures(model_of_one)
        return
    (mixture,) = find_mixtures(model_of_one)
    assert (mixture.module, mixture.experts) == (experts, EXPERTS)
    hidden, weights = torch.randn(5, WIDTH), torch.rand(5, CHOSEN)
    index = torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(5)])
    expected = experts(hidden, index, weights)
    assert expected.abs().max() > 0
    list(shard_each(experts, mesh))
    Dispatch(experts, EXPERTS, mesh.get_group(), None)
    torch.testing.assert_close(experts(hidden, index, weights), expected)


def built(model: str, name: str) -> nn.Module:
    file = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    experts: nn.Module = getattr(file, name)(CONFIG)
    return experts


def test_it_is_known_how_transformers_marks_them() -> None:
    assert ("mixtral", "MixtralExperts") in DECORATED
