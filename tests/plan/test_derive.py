"""Plans that are derived by dataflow, and those that `transformers` models bring: on shapes alone, without ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
from autolaunch_strategies.config import ConfigError, ModelParallel
from autolaunch_strategies.model.construction import Construction
from autolaunch_strategies.model.example_inputs import example_inputs
from autolaunch_strategies.plan.choose import plan_for
from autolaunch_strategies.plan.derive import derive_plan
from autolaunch_strategies.plan.rules import Rule, read_plan
from autolaunch_strategies.plan.transformers_plans import transformers_plan
from autolaunch_strategies.tensor.model_parallel import matched
from tests.support.messages import Told, assert_only_told
from tests.support.tiers import in_turn, tiered
from tests.support.zoo import CAUSAL, Encoder, Layer, VisionTransformer, make

C, R = "ColWiseParallel", "RowWiseParallel"
BEGIN, PAUSE, END = ({f"SequenceParallel{name}": {"need_transpose": False}} for name in ("Begin", "Disable", "End"))


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with Construction(0).recording():
        return build()


def written(rules: list[Rule]) -> dict[str, Any]:
    return {rule.pattern: rule.to_yaml() for rule in rules}


LLAMA = {
    "model.embed_tokens": R,
    "model.layers.*.self_attn.q_proj": C,
    "model.layers.*.self_attn.k_proj": C,
    "model.layers.*.self_attn.v_proj": C,
    "model.layers.*.self_attn.o_proj": R,
    "model.layers.*.mlp.gate_proj": C,
    "model.layers.*.mlp.up_proj": C,
    "model.layers.*.mlp.down_proj": R,
    "lm_head": C,
}
GPT2 = {
    "transformer.wte": R,
    "transformer.h.*.attn.c_attn": C,
    "transformer.h.*.attn.c_proj": R,
    "transformer.h.*.mlp.c_fc": C,
    "transformer.h.*.mlp.c_proj": R,
    "lm_head": C,
}


class Unplaceable(nn.Module):
    """Blocks with one linear layer each: no pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class LooksAtValues(nn.Module):
    """No shapes without data, outside of any part that could be stepped over."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x[x.sum(-1) > 0].reshape(-1, 8)).sum() if bool(x.sum() > 0) else self.proj(x)


class Cumulative(nn.Module):
    """A block whose pair has an operator between it that sharded tensors are not known to go through."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 16), nn.Linear(16, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).cumsum(-1))


class TwoInputs(nn.Module):
    """Runs only on the inputs that its user names."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = (torch.zeros(2, 5, 32), torch.zeros(5, 32))
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        assert positions.shape == x.shape[1:]
        x = x + positions
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    "build, ranks, expected",
    [
        pytest.param(lambda: make("llama"), 2, LLAMA, id="llama"),
        pytest.param(lambda: make("gpt2"), 2, GPT2, id="gpt2-fused-tied"),
        pytest.param(
            lambda: make("gpt2", attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1), 2, GPT2, id="dropout-while-training"
        ),
        pytest.param(lambda: make("llama", vocab_size=65), 2, LLAMA, id="uneven-vocabulary"),
        pytest.param(lambda: make("llama", num_hidden_layers=1), 2, LLAMA, id="one-layer"),
        pytest.param(
            lambda: make("llama"),
            4,
            {**LLAMA, "model.layers.*.self_attn.k_proj": [], "model.layers.*.self_attn.v_proj": []},
            id="few-key-value-heads",
        ),
        pytest.param(
            lambda: make("llama", num_attention_heads=2),
            4,
            LLAMA | {f"model.layers.*.self_attn.{name}_proj": [] for name in "qkvo"},
            id="heads-do-not-divide",
        ),
        pytest.param(
            lambda: make("llama", intermediate_size=47),
            2,
            LLAMA | {f"model.layers.*.mlp.{name}_proj": [] for name in ("gate", "up", "down")},
            id="size-does-not-divide",
        ),
        pytest.param(
            lambda: make("qwen3_moe"),
            2,
            {**LLAMA, "model.layers.*.mlp.gate": [], "model.layers.*.mlp.experts": []},
            id="experts-in-some-layers",
        ),
        pytest.param(
            VisionTransformer,
            2,
            {"blocks.*.attn.qkv": C, "blocks.*.attn.proj": R, "blocks.*.mlp.0": C, "blocks.*.mlp.2": R},
            id="vision-transformer",
        ),
        pytest.param(
            Encoder,
            2,
            {
                "embed": R,
                "encoder.layers.*.self_attn": [],
                "encoder.layers.*.linear1": C,
                "encoder.layers.*.linear2": R,
                "head": C,
            },
            id="torch-encoder",
        ),
        pytest.param(
            TwoInputs,
            2,
            {"layers.*.attn.qkv": C, "layers.*.attn.proj": R, "layers.*.mlp.0": C, "layers.*.mlp.2": R},
            id="example-input-array",
        ),
        pytest.param(
            lambda: nn.Sequential(Layer(), Cumulative(), Layer()),
            2,
            {
                "*.attn.qkv": C,
                "*.attn.proj": R,
                "*.mlp.0": C,
                "*.mlp.2": R,
                "*.up": [],
                "*.down": [],
            },
            id="unsure-operator-in-one-block",
        ),
    ],
)
def test_derived_plan(build: Callable[[], nn.Module], ranks: int, expected: dict[str, Any]) -> None:
    model = on_meta(build)
    rules = derive_plan(model, False, ranks)
    assert written(rules) == expected
    assert all(rule.reason for rule in rules)
    assert matched(model, rules)[1] == []  # every rule matches something


def test_reasons_are_words() -> None:
    rules = derive_plan(on_meta(lambda: make("llama", intermediate_size=47, num_key_value_heads=1)), False, 2)
    reasons = {rule.pattern.removeprefix("model.layers.*."): rule.reason for rule in rules}
    assert reasons == {
        "model.embed_tokens": "row-wise: each rank holds some of the vocabulary",
        "self_attn.q_proj": "column-wise: it feeds self_attn.o_proj",
        "self_attn.k_proj": "whole: its heads (1) do not divide among 2 ranks",
        "self_attn.v_proj": "whole: its heads (1) do not divide among 2 ranks",
        "self_attn.o_proj": "row-wise: it joins the residual stream; fed by self_attn.k_proj, "
        "self_attn.q_proj, self_attn.v_proj",
        **dict.fromkeys(
            ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
            "whole: the 47 inputs of mlp.down_proj do not divide among 2 ranks",
        ),
        "lm_head": "column-wise: logits and loss stay sharded by the vocabulary",
    }


@pytest.mark.parametrize(
    "build, expected",
    [
        pytest.param(
            lambda: make("llama"),
            LLAMA
            | {"model.embed_tokens": [R, BEGIN], "model.norm": END}
            | {f"model.layers.*.{name}": PAUSE for name in ("self_attn", "mlp")},
            id="llama",
        ),
        pytest.param(
            lambda: make("gpt2"),
            GPT2
            | {"transformer.drop": BEGIN, "transformer.ln_f": END}
            | {f"transformer.h.*.{name}": PAUSE for name in ("attn", "mlp")},
            id="dropout-before-the-blocks",
        ),
        pytest.param(
            Encoder,
            {
                "embed": [R, BEGIN],
                "encoder.layers.*.self_attn": PAUSE,
                "encoder.layers.*.linear1": C,
                "encoder.layers.*.linear2": [BEGIN, R],
                "head": [END, C],
            },
            id="linears-without-a-module-around",
        ),
    ],
)
def test_sequence_parallel_plan(build: Callable[[], nn.Module], expected: dict[str, Any]) -> None:
    assert written(derive_plan(on_meta(build), True, 2)) == expected


def test_a_written_plan_says_the_same() -> None:
    rules = derive_plan(on_meta(lambda: make("qwen3_moe")), True, 2)
    assert written(read_plan(written(rules))) == written(rules)


def test_the_model_is_left_as_it_was() -> None:
    model = make("mixtral")
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    state = torch.random.get_rng_state()
    derive_plan(model, True, 2)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(before[name][0] == id(p) and torch.equal(before[name][1], p) for name, p in model.named_parameters())
    hooks = [module for module in model.modules() if module._forward_hooks or module._forward_pre_hooks]
    assert hooks == [] and not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("name", "sequence_parallel"),
    tiered(itertools.product(sorted(CAUSAL), [False, True]), in_turn(sorted(CAUSAL), [False, True])),
)
def test_plan_of_transformers_is_that_of_the_dataflow(name: str, sequence_parallel: bool) -> None:
    """Two independent sources; the derived plan may say more about what stays whole."""
    model = on_meta(lambda: make(name))
    own = transformers_plan(model, sequence_parallel, 2)
    if own is None:
        assert not model._tp_plan
        return
    derived = written(derive_plan(model, sequence_parallel, 2))
    assert written(own) == {key: style for key, style in derived.items() if style or key in written(own)}


def test_plan_of_transformers_that_does_not_divide_gives_way() -> None:
    model = on_meta(lambda: make("llama"))
    assert transformers_plan(model, False, 4) is None
    assert {rule.source for rule in plan_for(model, ModelParallel(), None, 4)} == {"derived"}
    assert {rule.source for rule in plan_for(model, ModelParallel(), None, 2)} == {"the model's tp_plan"}


def test_nothing_to_divide_is_an_error() -> None:
    with pytest.raises(ConfigError) as raised:
        derive_plan(on_meta(Unplaceable), False, 2)
    told = Told("mp", "Unplaceable", "2 ranks", "layers.0.1: whole", allowed=("mp.plan", "mp.base=none", "mp is 1"))
    assert_only_told(raised.value, told)


def test_a_forward_that_needs_data_is_an_error() -> None:
    with pytest.raises(ConfigError) as raised:
        derive_plan(on_meta(LooksAtValues), False, 2)
    told = Told(
        "mp",
        "no plan",
        "LooksAtValues",
        "features for proj",
        allowed=("`example_input_array`",),
        write="mp.base=none and mp.plan",
    )
    assert_only_told(raised.value, told)


@pytest.mark.parametrize(
    "build, expected",
    [
        pytest.param(lambda: make("llama"), [(2, 8)], id="transformers"),
        pytest.param(Encoder, [(2, 8)], id="embedding"),
        pytest.param(VisionTransformer, [(2, 3, 8, 8)], id="named-image-size"),
        pytest.param(lambda: nn.Linear(5, 3), [(2, 8, 5)], id="linear"),
        pytest.param(TwoInputs, [(2, 5, 32), (5, 32)], id="given"),
    ],
)
def test_example_inputs(build: Callable[[], nn.Module], expected: list[tuple[int, ...]]) -> None:
    first = next(example_inputs(build()))
    given = [*first.args, *first.kwargs.values()]
    assert [tuple(value.shape) for value in given if isinstance(value, torch.Tensor)] == expected
