"""Experts shared out over ranks: loss, gradient norm, gradients, weights and load are those of one process."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from autolaunch_strategies import ExpertBias, MeshStrategy
from autolaunch_strategies.apply.check import config_errors
from autolaunch_strategies.apply.order import foresee
from autolaunch_strategies.config import ConfigError, parallel_config
from tests.experts.cases import BATCH, DAILY, EXPERTS, GROUPS, PRODUCT, STEPS, Module, data, loss_of, made
from tests.support.ranks import Group
from tests.support.tiers import spread, tiered

_SELDOM = spread((case for _, case in PRODUCT.values()), lambda case: re.split("[:,]", case), DAILY)
"""What is left when each model, each mesh and each setting are there."""
LONG = (
    "gpt_oss:2x2:ep=4,mp=seq_parallel,aux=1,compile=1", "mixtral:1x4:ep=2,recompute=selective,accumulate=8",
    "qwen3_moe:2x2x2:ep=4,aux=1", "deepseek_v3:4:ep=4,dp=2,bias=1,compile=1", "qwen3_moe:1x2x2:ep=1,pp=1f1b",
    "gpt_oss:2x2:ep=1,dp=3,recompute=selective", "own:4:ep=2,dp=3,accumulate=2,recompute=selective",
    "resume:4ep2:2x2ep4",
)  # fmt: skip
"""The longest, of which each part is in another."""


def seldom(case: str) -> bool:
    return case in LONG or _SELDOM(case)


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Group]]:
    directory = tmp_path_factory.mktemp("experts")
    script = Path(__file__).with_name("cases.py")
    made = {ranks: Group(script, directory / ranks, ranks, int(ranks), timeout=270) for ranks in GROUPS}
    yield made
    for group in made.values():
        group.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", tiered((case for cases in GROUPS.values() for case in cases), DAILY, seldom))
def test_a_mixture_trains_as_on_one_process(groups: dict[str, Group], case: str) -> None:
    (ranks,) = (ranks for ranks, cases in GROUPS.items() if case in cases)
    results = groups[ranks].read_all(case)
    expected = results[0]["expected"]
    for key in ("gradients", "weights"):
        assert joined(results, key).keys() == expected[key].keys()
        for name, found in joined(results, key).items():
            assert_close(found, expected[key][name], f"{key}: {name}")
    for result in (item["found"] for item in results):
        for key in ("norms",) if "accumulate" in case else ("norms", "losses"):  # the loss of a part is logged
            assert_close(torch.stack(result[key]), torch.stack(expected[key]), key)
        if "load" in result and "cp=" not in case:  # there the padding of sequences counts, too
            assert result["load"][0] == expected["load"][0]
            assert result["load"][1] == pytest.approx(expected["load"][1])
        if "recompute" in case and "ep=1" not in case:  # counts and rows go, rows come back; then two gradients
            layers = sum(name.endswith(("experts.down_proj", "experts.0.up.bias")) for name in expected["weights"])
            batches = STEPS * (int(case.split("accumulate=")[1].split(",")[0]) if "accumulate" in case else 1)
            again = 2 if "recompute=full" in case else 0  # without the counts
            of_parameters = 3 if case.startswith("own") else 0  # and gradients; whole ones are not kept
            assert result["exchanges"] == layers * batches * (5 + again + of_parameters)
    held = [item["found"]["held"] for item in results]
    assert max(held) * parts(case) <= expected_numbers(expected)
    assert sum(held) * parts(case) * size(case, 2) <= expected_numbers(expected) * len(held)  # a stage may have more


def joined(results: list[Any], key: str) -> dict[str, torch.Tensor]:
    """By name, of all stages."""
    return {name: tensor for result in results for name, tensor in result["found"][key].items()}


def assert_close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    nearly = 1e-4 * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=nearly, msg=lambda text: f"{what}: {text}")


def parts(case: str) -> int:
    """Over how many ranks experts are shared out: of the degree, or of mp."""
    degree = int(case.split("ep=")[1].split(",")[0]) if "ep=" in case else int(case.rpartition("ep")[2])
    return degree if degree > 1 else size(case, 1)


def size(case: str, axis: int) -> int:
    """Of the axis at this place of the mesh."""
    sizes = case.split(":")[1].split("x")
    return int(sizes[axis]) if len(sizes) > axis and sizes[axis].isdigit() else 1


def expected_numbers(expected: Any) -> int:
    return sum(tensor.numel() for name, tensor in expected["weights"].items() if ".experts." in name)


def test_a_bias_that_can_not_follow_the_load_is_refused() -> None:
    trainer = SimpleNamespace(strategy=MeshStrategy(mesh="1"))
    with pytest.raises(ConfigError, match="no mixture of experts in the model has a router with a buffer 'e_score"):
        ExpertBias().setup(trainer, Module(made("mixtral", {})), "fit")
    trainer = SimpleNamespace(strategy=MeshStrategy(mesh="1", compile=True))
    with pytest.raises(ConfigError, match="with compile") as raised:
        ExpertBias().setup(trainer, Module(made("deepseek_v3", {})), "fit")
    assert "ep above 1" in str(raised.value) and raised.value.write == "compile=false"
    with pytest.raises(ConfigError, match="more than 0"):
        ExpertBias(rate=0)


def test_a_bias_follows_the_load_of_a_module_that_was_parallelised_before() -> None:
    """For a validation, and by the first of two Trainers; where nothing is counted, training does not go on."""

    def fit(module: Module, validates: bool = False) -> torch.Tensor:
        """How far biases have moved in one step, each by the rate or not at all."""
        before = module.model.model.layers[1].mlp.gate.e_score_correction_bias.clone()
        trainer = pl.Trainer(
            strategy=MeshStrategy("1"), accelerator="cpu", max_steps=1, callbacks=[ExpertBias(rate=0.5)], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        if validates:
            trainer.validate(module, DataLoader(data(), batch_size=BATCH), verbose=False)
        trainer.fit(module, DataLoader(data(), batch_size=BATCH))
        return module.model.model.layers[1].mlp.gate.e_score_correction_bias - before

    class Validated(Module):
        def validation_step(self, ids: torch.Tensor, batch_idx: int) -> None:
            loss_of(self.model, ids)

    first, then = Module(made("deepseek_v3", {})), Validated(made("deepseek_v3", {}))
    expected = fit(first)
    assert expected.abs().max() == pytest.approx(0.5)
    torch.testing.assert_close(fit(then, validates=True), expected)
    assert fit(first).abs().max() == pytest.approx(0.5)
    first.model.eval()
    with pytest.raises(ConfigError, match="no tokens of experts were counted"):
        fit(first)


def test_what_would_be_done_names_the_experts_and_says_why() -> None:
    model = made("deepseek_v3", {})
    account = foresee(model, parallel_config("8", ep=4))["ep"]
    assert (account["degree"], account["efsdp"]) == (4, 2)
    assert account["plan"] == {"model.layers.1.mlp.experts": "ExpertParallel"}
    assert account["experts_per_rank"] == {"model.layers.1.mlp.experts": EXPERTS // 4}


@pytest.mark.parametrize(
    ("config", "problem", "write"),
    [
        ({"mesh": "4", "ep": 3}, "4 x 1 x 1 = 4", "ep=2"),
        ({"mesh": "4", "dp": {"replicate": 2}, "ep": 4}, "2 x 1 x 1 = 2", "ep=2"),
        ({"mesh": "2x1x2", "ep": 4}, "2 x 1 x 1 = 2", "ep=2"),
    ],
)
def test_a_degree_that_does_not_fit_is_refused(config: dict[str, Any], problem: str, write: str) -> None:
    (error,) = config_errors(parallel_config(**{"mp": "auto", "pp": "exact", **config}))
    assert problem in str(error) and error.write == write


@pytest.mark.parametrize(
    ("name", "ep", "problem"),
    [
        ("mixtral", 16, "8 experts can't be shared out evenly over 16 ranks"),
        ("llama4", 2, "called with (hidden_states)"),
        ("switch", 2, "each is a module of its own"),
        ("dbrx", 2, "its parameters are not [experts, ...]"),
    ],
)
def test_a_model_that_a_degree_does_not_fit_is_refused(name: str, ep: int, problem: str) -> None:
    with torch.device("meta"), pytest.raises(ConfigError, match=r"write: +ep=") as raised:
        model = UNFIT[name]() if name in UNFIT else made(name, {})
        foresee(model, parallel_config(str(ep), ep=ep))
    assert problem in str(raised.value)


def llama4() -> Any:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    sizes = {"hidden_size": 32, "intermediate_size": 16, "intermediate_size_mlp": 16, "num_attention_heads": 4}
    return Llama4ForCausalLM(
        Llama4TextConfig(**sizes, num_hidden_layers=2, num_key_value_heads=2, vocab_size=64, num_local_experts=4)
    )


def switch() -> Any:
    from transformers import SwitchTransformersConfig
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

    return SwitchTransformersSparseMLP(SwitchTransformersConfig(d_model=32, d_ff=16, num_experts=4))


def dbrx() -> Any:
    from transformers import DbrxConfig
    from transformers.models.dbrx.modeling_dbrx import DbrxFFN

    sizes = {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2}
    return DbrxFFN(DbrxConfig(d_model=32, ffn_config=sizes))


UNFIT: dict[str, Callable[[], Any]] = {"llama4": llama4, "switch": switch, "dbrx": dbrx}
