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
from autolaunch_strategies.plan.rules import Rule, merge_plans, read_plan
from autolaunch_strategies.plan.transformers_plans import transformers_plan
from autolaunch_strategies.tensor.model_parallel import matched
from autolaunch_strategies.tensor.share import forestalled, share_in_words, share_per_rank
from tests.support.messages import Told, assert_only_told
from tests.support.tiers import in_turn, tiered
from tests.support.zoo import CAUSAL, Encoder, Layer, VisionTransformer, made, make
from tests.tensor.rest_cases import Alone, Convolutions, Odd

C, R = "ColWiseParallel", "RowWiseParallel"
G: dict[str, Any] = {"ColWiseParallel": {"gather_output": True}}
A: dict[str, Any] = {"RowWiseParallel": {"is_input_parallel": False}}
"""Row-wise by itself, of inputs that are whole."""


def used(*parameters: str) -> dict[str, Any]:
    return {"GatherWhenUsed": {"parameters": list(parameters)}}


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
    "transformer.wpe": G,
    "transformer.h.*.attn.c_attn": C,
    "transformer.h.*.attn.c_proj": R,
    "transformer.h.*.mlp.c_fc": C,
    "transformer.h.*.mlp.c_proj": R,
    "lm_head": C,
}


class Recurrent(nn.Module):
    """Matrices that the layer keeps in a list of its own, too, and one that is hardly worth an exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 5, 32)
        self.rows, self.head = nn.LSTM(32, 32, batch_first=True), nn.Linear(32, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rows(x)[0])


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
            {**LLAMA, "model.layers.*.self_attn.k_proj": G, "model.layers.*.self_attn.v_proj": G},
            id="few-key-value-heads",
        ),
        pytest.param(
            lambda: make("llama", num_attention_heads=2),
            4,
            LLAMA | {f"model.layers.*.self_attn.{name}_proj": G for name in "qkvo"},
            id="heads-do-not-divide",
        ),
        pytest.param(
            lambda: make("llama", intermediate_size=47),
            2,
            LLAMA
            | {f"model.layers.*.mlp.{name}_proj": A for name in ("gate", "up")}
            | {"model.layers.*.mlp.down_proj": G},
            id="size-does-not-divide",
        ),
        pytest.param(
            lambda: make("qwen3_moe"),
            2,
            {**LLAMA, "model.layers.*.mlp.gate": [], "model.layers.*.mlp.experts": used("gate_up_proj", "down_proj")},
            id="experts-in-some-layers",
        ),
        pytest.param(
            VisionTransformer,
            2,
            {
                "patches": G,
                "blocks.*.attn.qkv": C,
                "blocks.*.attn.proj": R,
                "blocks.*.mlp.0": C,
                "blocks.*.mlp.2": R,
                "head": G,
            },
            id="vision-transformer",
        ),
        pytest.param(
            Encoder,
            2,
            {
                "embed": R,
                "encoder.layers.*.self_attn": used("in_proj_weight", "out_proj.weight"),
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
                "*.up": G,
                "*.down": G,
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
        **dict.fromkeys(
            ("self_attn.k_proj", "self_attn.v_proj"),
            "column-wise by itself, outputs gathered: its heads (1) do not divide among 2 ranks",
        ),
        "self_attn.o_proj": "row-wise: it joins the residual stream; fed by self_attn.k_proj, "
        "self_attn.q_proj, self_attn.v_proj",
        **dict.fromkeys(
            ("mlp.gate_proj", "mlp.up_proj"),
            "row-wise by itself: the 47 inputs of mlp.down_proj do not divide among 2 ranks",
        ),
        "mlp.down_proj": "column-wise by itself, outputs gathered: "
        "the 47 inputs of mlp.down_proj do not divide among 2 ranks",
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
                "encoder.layers.*.self_attn": [PAUSE, used("in_proj_weight", "out_proj.weight")],
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
        derive_plan(on_meta(Recurrent), False, 2)
    told = Told("mp", "Recurrent", "2 ranks", allowed=("mp.plan", "mp.base=none", "mp is 1"))
    assert_only_told(raised.value, told)


@pytest.mark.parametrize(
    "build, expected",
    [
        pytest.param(
            Odd,
            {
                "patches": G,
                "positions": R,
                "layers.*": used("turn"),
                "layers.*.attention.qkv": G,
                "layers.*.attention.proj": G,
                "layers.*.mixed": used("in_proj_weight", "out_proj.weight"),
                "layers.*.mlp.0": A,
                "layers.*.mlp.2": G,
                "head": G,
            },
            id="heads-sizes-attention-of-torch",
        ),
        pytest.param(
            Convolutions,
            dict.fromkeys(("stem", "depthwise", "pointwise", "up", "line", "head"), G),
            id="convolutions-even-and-uneven",
        ),
        pytest.param(Alone, {"first": A, "last.0": G, "last.2": A, "last.4": G}, id="no-blocks"),
    ],
)
def test_what_no_pair_divides_is_sharded_by_itself(build: Callable[[], nn.Module], expected: dict[str, Any]) -> None:
    rules = [rule for rule in derive_plan(on_meta(build), False, 2) if rule.styles]
    assert written(rules) == expected


@pytest.mark.parametrize("name", ["bart", "albert", "clip", "convnext", "deberta_v2", "mixtral", "mamba", "swin"])
def test_the_share_of_each_rank(name: str) -> None:
    """By the plan alone; `tensor/test_rest.py` counts what ranks hold."""
    model = on_meta(lambda: made(name))
    rules = plan_for(model, ModelParallel(), None, 2, getattr(model, "example_input_array", None))
    share, whole = share_per_rank(model, matched(model, rules)[0], 2)
    assert 0.5 < share < 0.52
    assert share == pytest.approx(0.5 + sum(whole.values()) / 2, abs=1e-9)


def test_the_share_in_words() -> None:
    model = on_meta(lambda: Recurrent())
    assert share_in_words(*share_per_rank(model, [], 2)) == (
        "each rank holds 100% of the parameters; whole on all of them: "
        "rows.weight_ih_l* 48%, rows.weight_hh_l* 48%, rows.bias_ih_l* 2%"
    )


def test_a_rule_that_others_forestall_is_told() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    base = read_plan({"[01]": C}, "the model's plan")

    def told(plan: dict[str, Any]) -> list[str]:
        return forestalled(model, matched(model, merge_plans(base, plan))[0], 2)

    (warning,) = told({"0": R})
    assert warning.startswith("mp.plan: 0 shards nothing") and "before it stands [01] (null" in warning
    assert told({"0": R, "[01]": None}) == told({"[01]": R}) == told({"1": ["SequenceParallelEnd", G]}) == []


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


class Turned(nn.Module):
    """Uses its parameter raw."""

    def __init__(self, before: nn.Module | None = None) -> None:
        super().__init__()
        self.turn, self.before = nn.Parameter(torch.empty(16, 16)), before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (x if self.before is None else self.before(x)) @ self.turn


class ListsOfTwo(nn.Module):
    """Blocks of two kinds in each of several lists, as many a vision transformer has them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([Turned(), nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))]) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for turned, mlp in self.layers:
            x = mlp(turned(x))
        return x


def test_a_rule_names_only_the_blocks_that_it_was_decided_for() -> None:
    model = on_meta(ListsOfTwo)
    rules = derive_plan(model, False, 2, torch.ones(2, 16))
    styled = {match.module for match in matched(model, rules)[0]}
    mlps = {f"layers.{block}.1.{layer}" for block in (0, 1) for layer in (0, 2)}
    assert styled == {"layers.0.0", "layers.1.0"} | mlps


class Scaled(nn.Sequential):
    """A list of blocks with a parameter of its own."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


@pytest.mark.parametrize(
    ("container", "pattern"),
    [
        pytest.param(nn.Sequential, "*", id="blocks-alone"),
        pytest.param(Scaled, "(0|1)", id="a-parameter"),
        pytest.param(lambda *blocks: nn.Sequential(*blocks, nn.Identity()), "(0|1)", id="a-module"),
    ],
)
def test_a_rule_leaves_out_what_stands_beside_the_blocks(container: Callable[..., nn.Module], pattern: str) -> None:
    model = on_meta(lambda: container(*(Turned(nn.LayerNorm(16)) for _ in range(2))))
    rules = derive_plan(model, False, 2, torch.ones(2, 16))
    assert [(match.module, match.only) for match in matched(model, rules)[0]] == [("0", None), ("1", None)]
    assert [rule.pattern for rule in rules] == [pattern]
