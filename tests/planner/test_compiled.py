"""What compiled blocks keep and move, against torch's own partitioner in real passes; and that the planner uses it."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import nn

from autolaunch.models.llama import Llama
from autolaunch.models.llama_config import llama_config
from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.model.blocks import find_blocks
from autolaunch_strategies.planner import choose
from autolaunch_strategies.planner.candidate import PIPELINES, SELECTIVE, Candidate, Candidates
from autolaunch_strategies.planner.choose import make_plan
from autolaunch_strategies.planner.compiled import JointPass, Kernel
from autolaunch_strategies.planner.enumerate import enumerate_candidates
from autolaunch_strategies.planner.explain import why
from autolaunch_strategies.planner.hardware import Hardware
from autolaunch_strategies.planner.memory import memory_account, peak_memory
from autolaunch_strategies.planner.module_profile import profile_module
from autolaunch_strategies.planner.plan import Plan
from autolaunch_strategies.planner.profile import Compiled, ModelProfile, Recipe
from autolaunch_strategies.planner.reasons import reasons
from autolaunch_strategies.planner.settings import overrides
from autolaunch_strategies.planner.time import step_time
from tests.planner.candidates import llama, machines, recipe
from tests.planner.test_profile import transformer
from tests.support.tiers import tiered
from tests.support.transformer_profile import transformer_profile

POSITIONS, WIDTH, VOCABULARY = 64, 64, 96


def own_llama() -> nn.Module:
    sizes = {"num_layers": 2, "hidden_size": WIDTH, "num_heads": 4, "num_kv_heads": 2, "vocab_size": VOCABULARY}
    return Llama(llama_config({**sizes, "max_seq_len": POSITIONS}))


def gpt2() -> nn.Module:
    sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": POSITIONS}
    tokens = {"bos_token_id": 0, "eos_token_id": 1}
    return transformer("gpt2", **sizes, **tokens, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def mixture() -> nn.Module:
    return transformer(
        "qwen3_moe", hidden_size=WIDTH, intermediate_size=2 * WIDTH, moe_intermediate_size=WIDTH, num_experts=4,
        num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip


def really_kept(model: nn.Module, batch: int, narrow: bool, backend: str | None) -> int:
    """Bytes of activations that the second block of a model keeps, with parameters and what depends on them alone."""
    torch._dynamo.reset()
    block = list(find_blocks(model))[1].module
    forward = block.forward if backend is None else torch.compile(block.forward, backend=backend)
    kept: dict[int, torch.Tensor] = {}
    inside = False

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if inside:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        inside = True
        try:
            return forward(*args, **kwargs)
        finally:
            inside = False

    original, block.forward = block.forward, run
    tokens = torch.zeros(batch, POSITIONS, dtype=torch.int64)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    try:
        with hooks, torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            output = model(tokens)
        assert getattr(output, "logits", output).requires_grad
    finally:
        block.forward = original
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


MODELS = {"llama": own_llama, "gpt2": gpt2, "mixture": mixture}
CASES = [(name, narrow) for name in MODELS for narrow in ("bf16", "fp32")]


@pytest.mark.parametrize(("name", "numbers"), tiered(CASES, [("llama", "bf16")], [("llama", "fp32"), ("gpt2", "bf16")]))
def test_kept_is_what_torch_keeps(name: str, numbers: str) -> None:
    model, narrow = MODELS[name]().train(), numbers == "bf16"
    profile = profile_module(model, POSITIONS, precision="bf16-mixed" if narrow else "32-true", device_type="cpu")
    (kind,) = profile.kinds
    assert kind.compiled is not None
    for backend, predicted in ((None, kind.saved_bytes), ("aot_eager_decomp_partition", kind.compiled.saved_bytes)):
        two, three = (really_kept(model, batch, narrow, backend) for batch in (2, 3))
        assert predicted == pytest.approx(three - two, rel=0.01), backend
    assert kind.compiled.saved_bytes < 0.85 * kind.saved_bytes
    assert kind.compiled.moved_bytes < 0.85 * kind.moved_bytes
    assert kind.compiled.kernels < kind.kernels
    eager, fused = kind.backward_pass, kind.compiled.backward_pass
    assert fused.moved_bytes < 0.85 * eager.moved_bytes and fused.kernels < eager.kernels


# --- the graph -------------------------------------------------------------------------------------------------------


def chain(*operators: tuple[str, Kernel, list[int], int, int]) -> JointPass:
    """Operators (name, what it becomes, what it reads, what it makes, its bytes) behind the value 0 of 100 bytes."""
    joint = JointPass()
    joint.begins_with(0, 100, False)
    for name, kernel, read, made, size in operators:
        joint.forward(name, kernel, read, [(made, size, False, False)], 100, (name, tuple(read)))
    return joint


def back(joint: JointPass, kernel: Kernel, reads: int) -> None:
    """An operator of the backward pass that reads a value, and whose result nobody reads."""
    joint.backward(kernel, [reads], [], 100)


FUSED, PRODUCT, ALONE = Kernel.FUSED, Kernel.PRODUCT, Kernel.ALONE


def test_what_is_between_two_products_is_computed_again() -> None:
    joint = chain(("mm", PRODUCT, [0], 1, 100), ("gelu", FUSED, [1], 2, 100), ("mul", FUSED, [2], 3, 100))
    back(joint, FUSED, 2)  # of mul
    back(joint, FUSED, 1)  # of gelu
    assert joint.kept() == {1: (100, False, False)}
    back(joint, PRODUCT, 3)  # a product of the backward pass reads it from memory: it is kept, not computed again
    assert joint.kept().keys() == {1, 3}


def test_what_is_equal_is_kept_once_and_what_is_drawn_is_not_drawn_again() -> None:
    joint = chain(("relu", FUSED, [0], 1, 100), ("relu", FUSED, [0], 2, 100), ("native_dropout", FUSED, [2], 3, 25))
    for number in (1, 2):
        back(joint, PRODUCT, number)
    back(joint, FUSED, 3)
    assert joint.kept().keys() == {1, 3}


def test_small_results_of_reductions_are_kept() -> None:
    joint = chain(("mm", PRODUCT, [0], 1, 400), ("mean", FUSED, [1], 2, 4), ("mul", FUSED, [1, 2], 3, 400))
    back(joint, FUSED, 2)
    assert joint.kept().keys() == {2}


def test_neighbours_are_one_kernel_and_what_lies_between_them_is_not_moved() -> None:
    joint = chain(
        *(("relu", FUSED, [0], 1, 100), ("mul", FUSED, [1], 2, 100), ("mm", PRODUCT, [2], 3, 100)),
        *(("add", FUSED, [0, 3], 4, 100), ("cumsum", ALONE, [4], 5, 100)),
    )
    kernels = joint.kernels([], [5])
    assert kernels.count == 4
    # relu and mul read 0 and write 2; add reads 0 and 3 and writes 4; cumsum reads 4 and writes 5.
    assert kernels.moved == (200 + 300 + 200, 0, 0)


def test_neighbours_that_go_over_the_same_value_are_one_kernel() -> None:
    joint = chain(*(("mul", FUSED, [0], 1, 100), ("relu", FUSED, [0], 2, 100), ("sum", FUSED, [0], 3, 1)))
    assert joint.kernels([], [1, 2, 3]).moved == (100 + 200 + 100 + 1, 0, 0)  # a sum goes over it in its own way


def test_a_backward_pass_computes_again_what_is_not_kept_in_the_kernel_that_reads_it() -> None:
    joint = chain(("mm", PRODUCT, [0], 1, 100), ("gelu", FUSED, [1], 2, 100), ("mul", FUSED, [2], 3, 100))
    joint.backward(FUSED, [2], [(10, 100, False, False)], 200)  # of mul
    joint.backward(FUSED, [1, 10], [(11, 100, False, False)], 200)  # of gelu
    joint.backward(PRODUCT, [11], [(12, 100, False, False)], 100)  # of mm
    kernels = joint.backward_kernels([1])
    assert kernels.count == 2
    # One kernel reads 1, from which 2 is made again, and a gradient that comes from elsewhere; it writes 11.
    assert kernels.moved == (100 + 100 + 100, 0, 0)


# --- the plan --------------------------------------------------------------------------------------------------------


EAGER = transformer_profile(
    32, 4096, 32, 8192, 128256, kv_heads=8, ffn=14336, glu=True, written_out=True, name="Llama"
)  # fmt: skip
"""Llama 3 8B as torch runs its code: a kernel for each operator."""


@pytest.fixture(scope="module")
def plan() -> Plan:
    """On one node of GPUs."""
    return make_plan(EAGER, recipe(128), machines(8))


def test_compiled_where_that_gains(plan: Plan) -> None:
    assert plan.chosen.compile
    assert "compile=true" in overrides(plan.chosen, plan.profile, plan.recipe)
    (sentence,) = (item for item in reasons(plan) if item.startswith("compile=true"))
    assert re.search(r"adds [^:]*elementwise work \(\+\d+\.\d% of the step\)", sentence)
    eager = why(plan, {"compile": "false"})
    assert eager.candidate is not None and not eager.candidate.compile
    assert eager.seconds is not None and eager.seconds > plan.seconds * 1.03


def test_not_compiled_for_less_than_the_noise() -> None:
    assert not make_plan(llama("8b"), recipe(128), machines(8)).chosen.compile  # all of whose kernels are fused


def test_what_is_asked_for_is_kept() -> None:
    for value in (0, 1):
        plan = make_plan(llama("8b"), recipe(128), machines(8), {"compile": (value,)})
        assert plan.chosen.compile == value and set(plan.looked.candidates.compile.tolist()) == {value}


def on_cpus() -> Hardware:
    return dataclasses.replace(machines(8), device="cpu")


def refused(reason: str) -> ModelProfile:
    return dataclasses.replace(llama("8b"), refused={"compile": reason})


@pytest.mark.parametrize(
    ("profile", "hardware", "reason"),
    [
        pytest.param(llama("8b"), on_cpus(), "a C++ compiler takes a minute", id="cpu"),
        pytest.param(refused("it asks who has tokens"), machines(8), "it asks who has tokens", id="model"),
    ],
)
def test_left_alone_with_a_reason(profile: ModelProfile, hardware: Hardware, reason: str) -> None:
    plan = make_plan(profile, recipe(128), hardware)
    assert not plan.looked.candidates.compile.any()
    assert any(item.startswith("compile=false") and reason in item for item in reasons(plan))
    typed = why(plan, {"compile": "true"})  # which is run, all the same
    assert typed.candidate is not None and typed.candidate.compile


def test_a_short_run_is_not_compiled() -> None:
    def planned(steps: int | None) -> Plan:
        return make_plan(EAGER, dataclasses.replace(recipe(128), steps=steps), machines(8))

    long = planned(None)
    gain = make_plan(EAGER, recipe(128), machines(8), {"compile": [0]}).seconds - long.seconds
    enough = int(choose.COMPILE_S / gain)
    short = planned(enough // 2)
    assert not short.chosen.compile and planned(2 * enough + 2).chosen.compile and long.chosen.compile
    assert any("compiling takes about" in item and f"{enough // 2:,} steps" in item for item in reasons(short))


def test_a_word_that_is_none_is_refused(plan: Plan) -> None:
    with pytest.raises(ConfigError) as caught:
        why(plan, {"compile": "yes"})
    assert "true, false" in str(caught.value)


def test_memory_of_compiled_blocks() -> None:
    profile, machine = llama("8b"), machines(8)
    (kind,) = profile.kinds
    compiled = Compiled(0, 0, 1, 0.5 * kind.saved_bytes, 0.5 * kind.sharded_saved_bytes)
    profile = dataclasses.replace(profile, kinds=(dataclasses.replace(kind, compiled=compiled),))
    kept = [
        memory_account(profile, recipe(8), machine, Candidate(dp=8, level=3, compile=number))[0]["activations"]
        for number in (0, 1)
    ]
    blocks = 32 * kind.saved_bytes
    assert kept[0] - kept[1] == pytest.approx(0.5 * blocks, rel=0.05)
    ways = Candidates(dp=8, level=3, recompute=SELECTIVE, compile=[0, 1])
    selective = peak_memory(profile, recipe(8), machine, ways).bytes
    assert selective[1] <= selective[0]


def test_gradients_of_weights_are_not_put_off_by_compiled_blocks() -> None:
    def bubble(compiled: int, name: str) -> float:
        way = Candidates(
            pp=8, microbatches=32, virtual_stages=2, pipeline=PIPELINES.index(name), compile=compiled
        )  # fmt: skip
        same = dataclasses.replace(llama("8b"), kinds=tuple(dataclasses.replace(kind, compiled=None) for kind in KINDS))
        return float(step_time(same, Recipe(64, "bf16"), machines(8), way).parts["bubble"][0])

    assert bubble(1, "interleaved_zero_bubble") == pytest.approx(bubble(0, "interleaved_1f1b"), rel=0.02)
    assert bubble(0, "interleaved_zero_bubble") < 0.8 * bubble(1, "interleaved_zero_bubble")


KINDS = llama("8b").kinds


def test_experts_in_a_list_are_left_alone_and_a_mixture_in_one_piece_is_not() -> None:
    assert "compile" not in profile_module(mixture(), POSITIONS).refused
    candidates, _ = enumerate_candidates(llama("8b"), recipe(128), machines(8), {"mp": (2,), "pp": (1,)})
    assert set(candidates.compile.tolist()) == {0, 1}
