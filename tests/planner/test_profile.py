"""Profiles of modules: against closed formulas, and against what real passes keep, on one process and on two.

As a script, on two ranks, it measures what ranks of mp keep.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from autolaunch.config.schema import LLAMA_PLANS
from autolaunch.models.language_model import LanguageModel
from autolaunch.models.llama import Llama
from autolaunch.models.llama_config import llama_config
from autolaunch_strategies.config import ConfigError, ModelParallel, parallel_config
from autolaunch_strategies.lightning.first_step import first_step
from autolaunch_strategies.model.example_inputs import ExampleInputs
from autolaunch_strategies.plan.choose import plan_for
from autolaunch_strategies.planner import first_look
from autolaunch_strategies.planner.measured_pass import default_loss
from autolaunch_strategies.planner.module_profile import profile_module
from autolaunch_strategies.planner.profile import MatMul, ModelProfile
from autolaunch_strategies.planner.profile_cache import cached_profile, fingerprint
from autolaunch_strategies.planner.recipe import recipe_of
from autolaunch_strategies.torch_private.calls import run_call
from tests.lightning import any_signature
from tests.support.tiers import tiered

POSITIONS, VOCABULARY = 32, 96
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64,
    "vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


def transformer(kind: str, **values: Any) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = AutoConfig.for_model(kind, **values)
    config.use_cache = False  # as in training by this engine
    return (AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM).from_config(config)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)
        )  # fmt: skip
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.second(torch.relu(self.norm(self.first(x)))))


class Images(nn.Module):
    image_size = 16

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(*(Residual(8) for _ in range(3)))
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Mixed(nn.Module):
    """Blocks of one class that differ: every second one is wider."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 16)) for width in (32, 64, 32, 64)
        )
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: Llama(llama_config({"size": "debug"})),
    "gpt2": lambda: transformer(
        "gpt2", n_embd=32, n_layer=3, n_head=4, vocab_size=VOCABULARY, n_positions=64, bos_token_id=0, eos_token_id=1
    ),
    "bert": lambda: transformer("bert", **SIZES),
    "mixtral": lambda: transformer(
        "mixtral", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, **SIZES
    ),
    "gemma2": lambda: transformer("gemma2", num_key_value_heads=2, head_dim=8, sliding_window=8, **SIZES),
    "qwen3": lambda: transformer("qwen3", num_key_value_heads=2, head_dim=8, **SIZES),
    "phi3": lambda: transformer("phi3", num_key_value_heads=2, **SIZES),
    "perceptron": Perceptron,
    "images": Images,
    "mixed": Mixed,
}


def batch_for(name: str, batch: int) -> torch.Tensor:
    torch.manual_seed(1)
    if name == "images":
        return torch.randn(batch, 3, 16, 16)
    if name == "perceptron":
        return torch.randn(batch, POSITIONS, 16)
    return torch.randint(0, VOCABULARY, (1, POSITIONS)).expand(batch, -1).contiguous()


def profile_of(name: str, model: nn.Module, **arguments: Any) -> ModelProfile:
    plan = LLAMA_PLANS["tensor_parallel"] if name == "llama" else None
    return profile_module(model, POSITIONS, own_plan=plan, **{"device_type": "cpu", **arguments})


def kept(model: nn.Module, inputs: torch.Tensor, local: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """Bytes that autograd saves in a real pass with the loss, parameters and buffers apart, each memory once."""
    own = {local(item).untyped_storage().data_ptr() for item in (*model.parameters(), *model.buffers())}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = local(tensor).untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = default_loss(model(inputs))
        assert loss is not None
        return sum(saved.values())


def parts(profile: ModelProfile) -> list[Any]:
    return [profile.before, *(profile.kinds[kind] for kind in profile.blocks), profile.after]


# --- one process --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_what_is_kept(name: str) -> None:
    model = MODELS[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    profile = profile_of(name, model)
    assert profile.parameters == sum(item.numel() for item in model.parameters())
    assert profile.refused.keys() <= {"mp", "cp", "ep", "sequence_parallel"}
    assert ("ep" in profile.refused) == (profile.experts == 0) == (name != "mixtral")
    inputs = {batch: batch_for(name, batch) for batch in (2, 3)}
    real = kept(model, inputs[3], lambda item: item) - kept(model, inputs[2], lambda item: item)
    assert sum(part.saved_bytes for part in parts(profile)) == real
    if name != "images":  # batch norm counts the measured passes
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


class Returning(nn.Module):
    """A block that is called with one tensor or two, and returns so many."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.second = kind, nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shares = self.first(x if self.kind in ("unread", "twice") else x + y).softmax(-1)
        if self.kind == "halves":
            return shares[..., :8].tanh(), shares[..., 8:].tanh()
        if self.kind == "one memory":
            first, second = shares.chunk(2, -1)
            return first, second
        return self.second(shares).tanh(), shares  # as blocks return the scores of attention


class Chain(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Returning(kind) for _ in range(4))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for block in (*self.blocks, *self.blocks) if self.kind == "twice" else self.blocks:
            x, shares = block(x, y)
            y = x if self.kind in ("unread", "twice") else shares
        return self.head(x + y)


@pytest.mark.parametrize("kind", ["halves", "one memory", "unread", "twice"])
def test_what_blocks_return_is_kept_once(kind: str) -> None:
    """By whoever follows, if that one keeps it, else by the block; also if nobody reads it."""
    model = Chain(kind)
    example = ExampleInputs("", (torch.zeros(2, 3, 8),), {}, False)
    profile = profile_module(model, example=example, device_type="cpu")
    real = [kept(model, torch.zeros(batch, 3, 8), lambda item: item) for batch in (2, 3)]
    assert sum(part.saved_bytes for part in parts(profile)) == real[1] - real[0]
    assert profile.kinds[0].output_bytes == 3 * (16 if kind in ("halves", "one memory") else 8) * 4


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.RMSNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(lambda x: self.layer(self.norm(x)), x, use_reentrant=False)


def test_kernels_of_cuda_in_what_is_computed_again() -> None:
    model = nn.Sequential(*(Checkpointed() for _ in range(3)))
    example = ExampleInputs("", (torch.zeros(2, 3, 8),), {}, False)
    (kind,) = profile_module(model, example=example, device_type="cuda").kinds
    assert kind.saved_bytes == kind.output_bytes


def test_put_off_gradients_of_weights_keep_what_they_are_made_of() -> None:
    """At the fullest moment of the block, in its MLP, that is the input of the last layer."""
    config = llama_config({"size": "debug"})
    model = Llama(config)
    (kind,) = profile_module(model, 64).kinds
    assert kind.late_bytes == kind.sharded_late_bytes == 64 * config.intermediate_size * 4
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embed" in name)
    assert profile_module(model, 64).kinds[0].late_bytes == 0


@pytest.mark.parametrize("size", tiered(["debug", "8b", "70b", "405b"], ["debug", "8b"]))
def test_flops_of_llama_follow_the_formula(size: str) -> None:
    config = llama_config({"size": size})
    with torch.device("meta"):
        model = Llama(config)
    positions = 64 if size == "debug" else 4096
    begin, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    profile = profile_module(model, positions, own_plan=LLAMA_PLANS["tensor_parallel"], precision="bf16-true")
    seconds = time.process_time() - begin
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    width, head = config.hidden_size, config.head_dim
    layer = 2 * width * head * (config.num_heads + config.num_kv_heads) + 3 * width * config.intermediate_size
    scores = 2 * positions**2 * head * config.num_heads  # causal: half of two products
    expected = config.num_layers * (2 * positions * layer + scores) + 2 * positions * width * config.vocab_size
    assert profile.flops == expected
    assert profile.parameters == sum(item.numel() for item in model.parameters())
    assert len(profile.kinds) == 1 and profile.blocks == (0,) * config.num_layers
    assert profile.block_names[:2] == ("model.layers.0", "model.layers.1")
    assert {config.num_heads, config.num_kv_heads, config.intermediate_size} <= set(profile.mp_sizes)
    assert profile.refused.keys() == {"ep"} and profile.heads == config.num_heads
    assert seconds < 20, "of a few seconds, with room for a busy machine"
    assert grown < 200 * 1024, "KiB"


def test_what_mp_divides_in_llama() -> None:
    config = llama_config({"size": "8b"})
    with torch.device("meta"):
        model = LanguageModel(Llama(config), {}, {}, 1)
    profile = profile_module(model, 8192, own_plan=LLAMA_PLANS["tensor_parallel"], precision="bf16-true")
    (block,) = profile.kinds
    assert profile.block_names[0] == "model.layers.0"
    assert block.matmuls[0] == MatMul(8192, 4096, 4096, 1, "columns")
    assert block.parameters - block.sharded_parameters == 2 * 4096
    assert (block.exchanges, block.exchange_bytes) == (2, 8192 * 4096 * 2)
    # Of one token in bf16: rotated queries and keys, values, what attention returns, its fp32 sums; gate, what SiLU
    # makes of it, up, and their product.
    attention = 2 * (4096 + 1024 + 1024 + 4096) + 4 * 32
    assert block.sharded_saved_bytes == 8192 * (attention + 4 * 2 * 14336)
    # Inputs of q, k, v and of gate, up.
    assert block.gathered_saved_bytes == 8192 * 2 * 2 * 4096
    # Two norms each: the fp32 input, one number per row, the normalised bf16, the scaled bf16.
    assert block.saved_bytes - block.sharded_saved_bytes == 8192 * 2 * (4 * 4096 + 4 + 2 * 2 * 4096)
    outputs = 2 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096) + 2 * 4096 + 4 * 32
    assert block.selective_bytes == 8192 * (outputs + 2 * 4096)
    assert profile.after.sharded_parameters == 4096 * 128256
    # Log-probabilities in fp32 are kept; their gradient and that of the scores come to it.
    logits = 8192 * 128256
    assert profile.after.sharded_saved_bytes == 4 * logits
    assert profile.loss_bytes == pytest.approx(8 * logits, rel=0.02)
    assert profile.sharded_loss_bytes == pytest.approx(8 * logits, rel=0.02)


def test_kinds_of_blocks_and_tied_weights() -> None:
    profile = profile_of("mixed", Mixed())
    assert profile.blocks == (0, 1, 0, 1)
    assert [item.parameters for item in profile.kinds] == [2 * 16 * 32 + 48, 2 * 16 * 64 + 80]
    assert profile.shared_parameters == VOCABULARY * 16 == profile.before.parameters
    assert profile.after.parameters == 0
    assert "scaled_dot_product_attention" in profile.refused["cp"]


class Widening(nn.Module):
    """A block that does more where it is told so."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.linear, self._twice = nn.Linear(8, 8), twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.linear(x)) if self._twice else self.linear(x)


class Stacked(nn.Module):
    def __init__(self, *, called_again: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([*(Widening() for _ in range(6)), *(Widening(twice=True) for _ in range(6))])
        self.called_again = called_again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.layers[3](x) if self.called_again else x


@pytest.mark.parametrize(("called_again", "ran"), [(False, 2), (True, 2 + 13)])
def test_of_blocks_that_are_alike_one_runs(called_again: bool, ran: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless one is called again: what it does may depend on that, so all are run."""
    calls: list[nn.Module] = []

    def counting(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(module)
        return run_call(module, *args, **kwargs)

    monkeypatch.setattr(first_look, "run_call", counting)
    found = profile_module(Stacked(called_again=called_again), example=torch.zeros(2, 4, 8))
    assert len(calls) == ran
    flops = [found.kinds[kind].flops / found.kinds[found.blocks[0]].flops for kind in found.blocks]
    assert flops == ([1, 1, 1, 2, 1, 1] if called_again else [1] * 6) + [2] * 6


def test_experts_count_as_often_as_tokens_go_to_them() -> None:
    block = profile_of("mixtral", MODELS["mixtral"]()).kinds[0]
    experts = [item for item in block.matmuls if item.columns in (128, 32) and item.count > 1]
    assert sum(item.flops for item in experts) == 2 * POSITIONS * 2 * (32 * 128 + 64 * 32)


def test_experts_that_ask_for_values_count_by_their_share() -> None:
    class Experts(nn.Module):
        num_experts, top_k = 4, 1

        def __init__(self) -> None:
            super().__init__()
            self.gate, self.parts = nn.Linear(16, 4), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            chosen, out = self.gate(x).argmax(-1), torch.zeros_like(x)
            for number, part in enumerate(self.parts):
                rows = (chosen == number).nonzero(as_tuple=True)
                if len(rows[0]):
                    out[rows] = part(x[rows])
            return out

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), Experts()) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = x + block(x)
            return x

    profile = profile_module(Model(), 8)
    assert profile.parameters == sum(item.numel() for item in Model().parameters())
    assert profile.kinds[0].flops == 2 * 8 * 16 * (4 + 4 * 16) / 4


def test_convolutions_count_as_products() -> None:
    profile = profile_of("images", Images())
    assert profile.kinds[0].matmuls == (MatMul(256, 72, 8, 2, kept=False),)
    assert profile.positions == 1
    assert "nothing in Images can be sharded" in profile.refused["mp"]  # layers by themselves are no reason for mp


def test_a_model_without_blocks_is_one_part() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    profile = profile_module(model)
    assert profile.kinds == () and profile.before.parameters == 8 * 8 + 8 + 3 * 8 + 3
    assert {"mp", "pp", "cp", "ep"} == profile.refused.keys()


@pytest.mark.parametrize(("precision", "fused"), [("bf16-true", True), ("bf16-mixed", True), ("32-true", False)])
def test_kernels_of_cuda(precision: str, fused: bool) -> None:
    """CUDA has no one kernel for fp32 with shared key heads: scores [heads, s, s] are kept then."""
    model = MODELS["llama"]()
    block = profile_of("llama", model, device_type="cuda", precision=precision).kinds[0]
    assert (block.attention is not None) == fused
    scores = 4 * 4 * POSITIONS**2
    others = profile_of("llama", model, precision=precision, device_type="cpu").kinds[0]
    assert (block.saved_bytes - others.saved_bytes >= scores) == (not fused)


@pytest.mark.parametrize(("precision", "width"), [("bf16-true", 2), ("bf16-mixed", 4), ("32-true", 4)])
def test_a_norm_is_one_kernel_of_cuda(precision: str, width: int) -> None:
    """It keeps its input (autocast makes it fp32), and one number per row; a CPU makes it of eight."""
    model = nn.Sequential(*(nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 64, bias=False)) for _ in range(3)))
    example = ExampleInputs("", (torch.zeros(2, POSITIONS, 64),), {}, False)
    block, on_cpu = (
        profile_module(model, POSITIONS, example=example, precision=precision, device_type=device).kinds[0]
        for device in ("cuda", "cpu")
    )
    narrow = 4 if precision == "32-true" else 2
    assert block.saved_bytes == POSITIONS * (64 * (width + narrow) + 4)
    assert block.kernels == 2 + 2 * (precision == "bf16-mixed") < on_cpu.kernels


def test_mixed_precision_keeps_narrow_activations_and_no_weights() -> None:
    model = MODELS["qwen3"]()
    full, mixed = (
        profile_of("qwen3", model, device_type="cuda", precision=precision) for precision in ("32-true", "bf16-mixed")
    )
    assert mixed.parameters == full.parameters
    assert sum(part.saved_bytes for part in parts(mixed)) < sum(part.saved_bytes for part in parts(full))


def test_sequences_cost_the_same_each() -> None:
    model = MODELS["llama"]()
    one, other = (profile_module(model, positions, device_type="cpu").kinds[0] for positions in (32, 64))
    assert other.saved_bytes == 2 * one.saved_bytes
    assert other.moved_bytes == 2 * one.moved_bytes
    assert other.attention.flops == 4 * one.attention.flops
    assert other.kernels == one.kernels


def test_the_same_again_and_as_text() -> None:
    first, second = (profile_of("gemma2", MODELS["gemma2"]()) for _ in range(2))
    assert first.to_json() == second.to_json()
    assert ModelProfile.from_json(first.to_json()) == first


def test_inputs_that_nobody_knows() -> None:
    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, batch: Any) -> torch.Tensor:
            return self.layer(batch["weather"])

    with pytest.raises(ConfigError, match="example_input_array"):
        profile_module(Strange())
    model = Strange()
    model.example_input_array = ({"weather": torch.zeros(2, 4)},)
    assert profile_module(model).before.matmuls == (MatMul(1, 4, 4, 1, left_gradient=False, in_fp32=True),)
    with pytest.raises(ConfigError, match="precision=17-true"):
        profile_module(Strange(), precision="17-true")


def test_a_loss_of_ones_own() -> None:
    model = Perceptron()
    wide = profile_module(model, POSITIONS, loss=lambda scores: scores.double().exp().square().sum())
    assert wide.loss_bytes > profile_module(model, POSITIONS).loss_bytes
    assert wide.kinds == profile_module(model, POSITIONS).kinds


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, {"compute": "fp32", "parameter_bytes": 4, "cast_bytes": 0, "optimizer_bytes": 8}),
        ({"precision": "bf16-mixed"}, {"compute": "bf16", "parameter_bytes": 4, "cast_bytes": 2, "reduce_bytes": 4}),
        ({}, {"gathers_casts": False}),
        ({"precision": "bf16-mixed"}, {"gathers_casts": True}),
        ({"precision": "bf16-mixed", "dp": {"param_dtype": "fp32"}}, {"gathers_casts": False}),
        ({"precision": "bf16-mixed", "dp": {"reduce_dtype": "bf16"}}, {"gathers_casts": False}),
        (
            {"precision": "bf16-true", "optimizer": "sgd"},
            {"compute": "bf16", "gathered_bytes": 2, "gradient_bytes": 2, "optimizer_bytes": 0},
        ),
        (
            {"dp": {"param_dtype": "bf16", "reduce_dtype": "fp32"}},
            {"compute": "bf16", "parameter_bytes": 4, "gathered_bytes": 2, "gradient_bytes": 4, "reduce_bytes": 4},
        ),
        ({"dp": {"param_dtype": "bf16"}, "precision": "bf16-mixed"}, {"cast_bytes": 0, "reduce_bytes": 2}),
        ({"optimizer": "torch.optim.SGD", "momentum": 0.9}, {"optimizer_bytes": 4}),
        (
            {"precision": "bf16-mixed", "float8": "tensorwise"},
            {"compute": "fp8", "cast_bytes": 2, "gathers_casts": True},
        ),
    ],
)
def test_recipes(arguments: dict[str, Any], expected: dict[str, Any]) -> None:
    recipe = recipe_of(64, **arguments)
    assert {key: getattr(recipe, key) for key in expected} == expected
    assert recipe.batch_size == 64


def test_profiles_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cached_profile(Perceptron(), 8, directory=tmp_path)
    (file,) = tmp_path.iterdir()
    made: list[int] = []
    module = sys.modules["autolaunch_strategies.planner.module_profile"]
    monkeypatch.setattr(module, "profile_module", lambda *_, **__: made.append(1) or first)
    assert cached_profile(Perceptron(), 8, directory=tmp_path) == first and not made
    file.write_text(file.read_text()[:40])
    assert cached_profile(Perceptron(), 8, directory=tmp_path) == first and made == [1]
    assert cached_profile(Perceptron(), 8, directory=tmp_path) == first and made == [1], "it was mended"
    assert not list(tmp_path.glob("*.part"))


def test_fingerprints_tell_models_apart() -> None:
    wide = Perceptron()
    wide.head = nn.Linear(16, 6)
    dropping = Perceptron()
    dropping.layers[0].append(nn.Dropout(0.1))
    frozen = Perceptron()
    frozen.head.requires_grad_(False)
    found = [fingerprint(model, {"positions": 8}) for model in (Perceptron(), wide, dropping, frozen)]
    found.append(fingerprint(Perceptron(), {"positions": 16}))
    assert len(set(found)) == 5
    assert fingerprint(Perceptron(), {"positions": 8}) == found[0]


# --- two processes ------------------------------------------------------------------------------------------------

DIVIDED = [
    *(("llama", False, False), ("llama", True, False), ("gpt2", False, False), ("qwen3", False, False)),
    *(("perceptron", False, False), ("llama", True, True), ("qwen3", False, True)),
]
"""Model, whether sequences are sharded between what mp shards, whether its blocks are compiled."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    from tests.support.ranks import start, torchrun

    out = tmp_path_factory.mktemp("profile") / "kept.json"
    done = start(torchrun(2, __file__, str(out)))
    assert done.returncode == 0, done.stdout[-4000:]
    return json.loads(out.read_text())


@pytest.mark.every  # a minute; tests/dry_run has meshes with mp beside the plan
@pytest.mark.parametrize(("name", "by_sequence", "compiled"), DIVIDED)
def test_what_a_rank_of_mp_keeps(measured: dict[str, int], name: str, by_sequence: bool, compiled: bool) -> None:
    profile = profile_of(name, MODELS[name]())
    each = [part.if_compiled if compiled else part for part in parts(profile)]
    whole = sum(part.saved_bytes for part in each)
    divided = sum(part.sharded_saved_bytes for part in each)
    gathered = sum(part.gathered_saved_bytes for part in parts(profile)) if by_sequence else 0
    rest = whole - divided - gathered
    expected = divided / 2 + gathered + (rest / 2 if by_sequence else rest)
    assert expected == pytest.approx(measured[f"{name} {by_sequence} {compiled}"], rel=0.05)


def measure(out: str) -> None:
    """What this rank keeps per sequence, of two along mp."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from autolaunch_strategies import ProcessMesh
    from autolaunch_strategies.loop.parallelize import parallelize_with
    from tests.support.cases import no_compiler

    def local(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    found = {}
    for name, by_sequence, compiled in DIVIDED:
        torch.manual_seed(0)
        model = MODELS[name]()
        own = LLAMA_PLANS["seq_parallel" if by_sequence else "tensor_parallel"] if name == "llama" else None
        rules = plan_for(model, ModelParallel(sequence_parallel=by_sequence), own, 2)
        plan = {rule.pattern: [style.to_yaml() for style in rule.styles] for rule in rules if rule.styles}
        settings = parallel_config({"mp": 2}, dp=0, mp={"base": "none", "plan": plan}, compile=compiled)
        with no_compiler():
            parallelize_with(model, None, ProcessMesh([[0, 1]], ["dp", "mp"]), settings)
            kept(model, batch_for(name, 2), local)  # what a first pass makes once
            sizes = [kept(model, batch_for(name, batch), local) for batch in (2, 3)]
        found[f"{name} {by_sequence} {compiled}"] = sizes[1] - sizes[0]
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


class Adapted(nn.Module):
    """A frozen layer with a trained one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.frozen(x) + self.up(self.down(x))).relu()


def behind_frozen(block: Callable[[], nn.Module]) -> nn.Module:
    layers = [nn.Embedding(50, 16).requires_grad_(False), *(block() for _ in range(4)), nn.Linear(16, 50)]
    return nn.Sequential(layers[0], nn.Sequential(*layers[1:-1]), layers[-1])


def counted(step: Callable[[], Any]) -> tuple[int, int]:
    """Operations of the forward and of the backward pass, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        loss = step()
        forward = counter.get_total_flops()
        loss.backward()
        return forward, counter.get_total_flops() - forward


@pytest.mark.parametrize("block", [Adapted, lambda: nn.Sequential(nn.Linear(16, 16), nn.GELU())])
def test_blocks_behind_what_is_frozen_count_all(block: Callable[[], nn.Module]) -> None:
    """The first one has no gradient to hand on, so that it is a kind of its own; the others run the same as it."""
    model, ids = behind_frozen(block), torch.zeros(2, 8, dtype=torch.int64)
    profile = profile_module(model, device_type="cpu")
    assert profile.blocks == (0, 1, 1, 1)
    assert counted(lambda: model(ids).sum()) == (2 * profile.flops, 2 * profile.backward_flops)


class Apart(any_signature._Forecast):
    """Its step calls two parts by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(nn.Linear(3, 8), nn.ReLU()), nn.Linear(8, 2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(self.decoder(self.encoder(batch["static"])), batch)


@pytest.mark.parametrize(
    ("kind", "sharded"), [(Apart, False), (any_signature.Adversaries, True), (any_signature.Taught, True)]
)
def test_a_step_that_calls_several_modules_counts_with_all_of_them(kind: Any, sharded: bool) -> None:
    module, batch = kind(), next(iter(any_signature.series()))
    step = first_step(module, lambda: batch)
    before = dict(module.__dict__)
    profile = profile_module(module, device_type="cpu", step=step)
    assert module.__dict__ == before
    assert (profile.name, profile.parameters) == (kind.__name__, sum(item.numel() for item in module.parameters()))
    assert "calls several modules" in profile.refused["pp"]
    assert ("mp" not in profile.refused) == sharded

    def run() -> Any:
        with step.around():
            return step.run(batch)

    assert counted(run) == (8 * profile.flops, 8 * profile.backward_flops)


def test_a_profile_says_what_inputs_were_made_up() -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.head(self.convolution(images).mean((2, 3)))

    guessed = profile_module(Images(), device_type="cpu")
    assert guessed.guessed == "images 224x224 for convolution"
    shown = ExampleInputs("a batch", (torch.empty(16, 3, 32, 32, device="meta"),), is_guess=False)
    known = profile_module(Images(), device_type="cpu", example=shown)
    assert known.guessed == ""
    assert known.flops == pytest.approx(guessed.flops * (30 / 222) ** 2, rel=1e-3)  # but for the head
    assert ModelProfile.from_json(guessed.to_json()) == guessed


if __name__ == "__main__":
    measure(sys.argv[1])
