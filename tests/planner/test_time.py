"""Predicted step times: each term against a calculation by hand, and what has to hold between candidates."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from autolaunch_strategies.config import CP_BACKENDS
from autolaunch_strategies.planner.candidate import FULL, PIPELINES, SELECTIVE, Candidate, Candidates
from autolaunch_strategies.planner.collectives import collective_time, local_members
from autolaunch_strategies.planner.constants import Constants
from autolaunch_strategies.planner.hardware import Curve, Hardware, Link
from autolaunch_strategies.planner.profile import Attention, BackwardPass, Compiled, MatMul, ModelProfile, Part, Recipe
from autolaunch_strategies.planner.time import (
    COMPILED_SHARDED,
    PARTS,
    StepTime,
    flops_per_step,
    soft_max,
    step_time,
)
from autolaunch_strategies.planner.uncertainty import sampled_times, spread
from autolaunch_strategies.schedules.schedule import build_schedule, timeline
from tests.support.megatron import NUMBERS
from tests.support.transformer_profile import transformer_profile

FREE = {
    **dict.fromkeys(("kernel_s", "mp_kernel_s", "hidden_dp", "hidden_mp", "hidden_cp", "hidden_pp"), 1e-30),
    **dict.fromkeys(("start_s", "group_s", "action_s", "cp_s", "microbatch_s", "step_s", "slice_s"), 1e-30),
    **dict.fromkeys(("matmul", "fp8", "attention", "memory", "intra", "inter", "p2p", "latency"), 1.0),
}
"""Constants with which only data sheets count."""


def machine(**changes: object) -> Hardware:
    constants = dataclasses.replace(Constants(), **{**FREE, **changes.pop("constants", {})})
    base = Hardware(
        "h", "cuda", 4, 8, 80 * 2**30, {"fp32": 1e12, "bf16": 1e14}, 1e12, Link(1e11, 0.0), Link(1e10, 0.0),
        constants=constants,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def model(block: Part, blocks: int = 8, after: Part | None = None) -> ModelProfile:
    return ModelProfile(
        "m", 1024, Part("before", 0), (block,), (0,) * blocks, tuple(map(str, range(blocks))),
        after or Part("after", 0),
        element_bytes=2, heads=8,
    )  # fmt: skip


def of(profile: ModelProfile, recipe: Recipe, hardware: Hardware, **fields: object) -> StepTime:
    return step_time(profile, recipe, hardware, Candidates(**fields))


BIG = MatMul(2**20, 2**16, 2**16, 1, "columns")
PLAIN = Recipe(8, "bf16", 2, 2, 0, 0, 2, 0)


def test_large_products_run_at_the_peak() -> None:
    found = of(model(Part("b", 0, matmuls=(BIG,))), PLAIN, machine())
    assert found.parts["compute"][0] == pytest.approx(3 * 8 * 8 * BIG.flops / 1e14, rel=0.02)


def test_what_is_not_trained_has_less_of_a_backward_pass() -> None:
    def times(block: Part) -> StepTime:
        return of(model(block), PLAIN, machine(), dp=8, level=0)

    adapted = dataclasses.replace(BIG, right_gradient=False)
    whole, frozen = Part("b", 10**9, matmuls=(BIG,)), Part("b", 10**9, matmuls=(adapted,), trained=0.0)
    assert times(frozen).parts["compute"][0] == pytest.approx(2 / 3 * times(whole).parts["compute"][0], rel=1e-3)
    assert times(whole).parts["dp"][0] > 0 and times(whole).parts["optimizer"][0] > 0
    assert times(frozen).parts["dp"][0] == times(frozen).parts["optimizer"][0] == 0
    in_front = dataclasses.replace(frozen, matmuls=(BIG,), has_backward=False)
    assert times(in_front).parts["compute"][0] == pytest.approx(1 / 3 * times(whole).parts["compute"][0], rel=1e-3)


def test_small_products_are_far_from_it() -> None:
    small = MatMul(64, 64, 64)
    found = of(model(Part("b", 0, matmuls=(small,))), PLAIN, machine())
    assert found.parts["compute"][0] > 20 * 3 * 8 * 8 * small.flops / 1e14


def test_sides_that_are_no_multiples_of_eight_are_slow_in_16_bits_alone() -> None:
    odd, even = (model(Part("b", 0, matmuls=(MatMul(2**16, 8192, columns),))) for columns in (8191, 8192))
    slow, fast = (of(item, PLAIN, machine()).seconds[0] for item in (odd, even))
    assert slow > 1.8 * fast
    full = dataclasses.replace(PLAIN, compute="fp32")
    slow, fast = (of(item, full, machine()).seconds[0] for item in (odd, even))
    assert slow == pytest.approx(fast, rel=1e-2)


def test_attention_backward_is_two_and_a_half_forwards() -> None:
    attention = Attention(8, 8, 128, 2**20, causal=True)
    block = Part("b", 0, attention=attention)
    found = of(model(block, 1), PLAIN, machine())
    assert found.parts["attention"][0] == pytest.approx(8 * 3.5 * attention.flops / 1e14, rel=1e-3)
    again = of(model(block, 1), PLAIN, machine(), recompute=[FULL, SELECTIVE, 2])
    assert again.parts["attention"] / found.parts["attention"] == pytest.approx([4.5 / 3.5, 1, 4 / 3.5])


def test_moved_bytes_under_mp_and_sequence_parallelism() -> None:
    block = Part("b", 0, moved_bytes=1e9, sharded_moved_bytes=4e8)
    found = of(model(block, 1), PLAIN, machine(), mp=[1, 4, 4], sequence_parallel=[0, 0, 1])
    expected = np.array([1e9, 6e8 + 1e8, 2.5e8]) * 2.6 * 8 / 1e12
    assert found.parts["elementwise"] == pytest.approx(expected)


def test_gradients_are_written_once_and_read_when_there_are_several_microbatches() -> None:
    block = Part("b", 10**9)
    recipe = dataclasses.replace(PLAIN, gradient_bytes=2)
    one = of(model(block, 1), recipe, machine(), microbatches=1).parts["elementwise"][0]
    four = of(model(block, 1), recipe, machine(), microbatches=4).parts["elementwise"][0]
    assert one == pytest.approx(2e9 / 1e12) and four == pytest.approx(4 * 4e9 / 1e12)


def test_a_recorded_backward_pass_counts_in_place_of_the_usual_one() -> None:
    backward = BackwardPass(3e9, 1e9, kernels=300, sharded_kernels=50)
    block = Part("b", 0, moved_bytes=1e9, sharded_moved_bytes=4e8, kernels=100, backward=backward)
    found = of(model(block, 1), PLAIN, machine(), mp=[1, 4], recompute=[0, FULL])
    assert found.parts["elementwise"] == pytest.approx(np.array([4e9, 2.25e9 + 2 * 7e8]) * 8 / 1e12)
    launched = of(model(block, 1), PLAIN, machine(constants={"kernel_s": 1.0}), recompute=[0, FULL])
    assert launched.parts["kernels"] == pytest.approx([400, 500], rel=1e-3)


def test_every_kernel_takes_a_device_a_moment_by_itself() -> None:
    hardware = machine(constants={"start_s": 1e-5})
    block = Part("b", 0, kernels=100)
    found = of(model(block), PLAIN, hardware, microbatches=[1, 8])
    assert found.parts["elementwise"] == pytest.approx([8 * 100 * 2.5e-5, 8 * 8 * 100 * 2.5e-5])
    processors = of(model(block), PLAIN, machine(device="cpu", constants={"start_s": 1e-5}))
    assert processors.parts["elementwise"][0] == pytest.approx(0)


def test_narrow_heads_have_slower_attention() -> None:
    hardware = machine(constants={"attention_width": 64.0})
    wide, narrow, wider = (
        of(model(Part("b", 0, attention=Attention(heads, heads, width, 2**20, causal=True)), 1), PLAIN, hardware)
        for heads, width in ((8, 128), (16, 64), (4, 256))
    )
    assert narrow.parts["attention"] / wide.parts["attention"] == pytest.approx([(1 / 3 * 2) / (1 / 2)], rel=1e-3)
    assert wider.parts["attention"] == pytest.approx(wide.parts["attention"], rel=1e-6)


def test_products_of_fp32_take_their_own_rate_in_a_narrower_recipe() -> None:
    hardware = machine(flops={"fp32": 1e12, "tf32": 1e13, "bf16": 1e14})
    full = dataclasses.replace(BIG, in_fp32=True)
    rates = [
        of(model(Part("b", 0, matmuls=(item,)), 1), dataclasses.replace(PLAIN, full=kind), hardware).parts["compute"][0]
        for item, kind in ((BIG, "fp32"), (full, "fp32"), (full, "tf32"))
    ]
    assert rates == pytest.approx([3 * 8 * BIG.flops / rate for rate in (1e14, 1e12, 1e13)], rel=0.02)
    assert of(model(Part("b", 0, matmuls=(full,)), 1), PLAIN, machine(flops={"bf16": 1e14})).seconds[0] > 0


def test_launching_kernels_matters_where_devices_have_less_to_do() -> None:
    hardware = machine(constants={"kernel_s": 1e-5})
    block = Part("b", 0, kernels=100)
    found = of(model(block), PLAIN, hardware, microbatches=[1, 8])
    assert found.parts["kernels"] == pytest.approx([8 * 100 * 2.5e-5, 8 * 8 * 100 * 2.5e-5])
    busy = of(model(dataclasses.replace(block, matmuls=(BIG,))), PLAIN, hardware)
    assert busy.parts["kernels"][0] < 1e-3 * busy.parts["compute"][0]


def test_kernels_on_divided_tensors_cost_more() -> None:
    hardware = machine(constants={"kernel_s": 1e-5, "mp_kernel_s": 5e-5})
    block = Part("b", 0, kernels=100, sharded_kernels=40)
    found = of(model(block, 1), PLAIN, hardware, mp=[1, 2])
    assert found.parts["kernels"] == pytest.approx([2.5 * 1e-3, 2.5 * 3e-3])
    whole = of(model(block, 1), PLAIN, hardware, mp=2, sequence_parallel=1)
    assert whole.parts["kernels"] == pytest.approx([2.5 * 6e-3])  # all of them are DTensors then
    fewer = dataclasses.replace(block, compiled=Compiled(0, 0, 30, 0, 0))
    compiled = of(model(fewer, 1), PLAIN, hardware, mp=[1, 2], compile=1)
    kernels, sharded = 0.3e-3, COMPILED_SHARDED * 2e-3
    assert compiled.parts["kernels"] == pytest.approx([2.5 * kernels, 2.5 * (kernels + sharded)])
    elsewhere = of(model(Part("b", 0, kernels=100), 1), PLAIN, hardware, mp=2, sequence_parallel=1)
    assert elsewhere.parts["kernels"] == pytest.approx([2.5 * 1e-3])  # runtimes without DTensors have none


def test_on_processors_launching_adds_to_computing() -> None:
    block = Part("b", 0, kernels=100, matmuls=(BIG,))
    hardware = machine(device="cpu", constants={"kernel_s": 1.0})
    found = of(model(block, 1), PLAIN, hardware)
    assert found.parts["kernels"][0] == pytest.approx(250.0)


def test_exchanges_of_mp() -> None:
    block = Part("b", 0, exchanges=2, exchange_bytes=1e8)
    found = of(
        model(block, 1), PLAIN, machine(), mp=[1, 8, 8, 8], sequence_parallel=[0, 0, 1, 0], recompute=[0, 0, 0, 1]
    )
    once = 2 * 7 / 8 * 8e8 / 1e11  # all-reduce of eight sequences in one
    in_order = 2 * 2 * 8e8 / 1e12  # what they gather and what is scattered is copied: read and written
    assert found.parts["mp"] == pytest.approx([0, 4 * once, 4 * (once + in_order), 6 * once])
    one_by_one = of(model(block, 1), PLAIN, machine(), mp=8, sequence_parallel=1, microbatches=8)
    assert one_by_one.parts["mp"] == pytest.approx(4 * (once + in_order / 2))  # one sequence is gathered in order
    megatron = of(model(block, 1), PLAIN, machine(stack="megatron"), mp=8, sequence_parallel=1)
    assert megatron.parts["mp"] == pytest.approx(4 * once)


def test_exchanges_of_mp_beyond_a_domain_go_through_its_own_links() -> None:
    block = Part("b", 0, exchanges=1, exchange_bytes=1e8)
    found = of(model(block, 1), PLAIN, machine(domain=4), mp=[4, 8])
    assert found.parts["mp"] == pytest.approx([2 * 2 * 3 / 4 * 8e8 / 1e11, 2 * 2 * 7 / 8 * 8e8 / 4e10])


@pytest.mark.parametrize(
    ("kind", "ranks", "stride", "expected"),
    [
        ("all_reduce", 8, 1, 2 * 7 / 8 * 1e9 / 1e11),
        ("all_gather", 8, 1, 7 / 8 * 1e9 / 1e11),
        ("reduce_scatter", 32, 1, 31 / 32 * 1e9 / 8e10),
        ("all_reduce", 4, 8, 2 * 3 / 4 * 1e9 / 1e10),
        ("all_gather", 16, 2, 15 / 16 * 1e9 / 4e10),
        ("all_to_all", 8, 1, 7 / 8 * 1e9 / 1e11),
        ("all_to_all", 16, 1, 7 / 16 * 1e9 / 1e11 + 8 / 16 * 1e9 / 1e10),
        ("p2p", 2, 4, 1e9 / 1e11),
        ("p2p", 2, 8, 1e9 / 1e10),
        ("all_reduce", 1, 1, 0.0),
    ],
)
def test_collectives(kind: str, ranks: int, stride: int, expected: float) -> None:
    assert collective_time(machine(), kind, ranks, stride, 1e9) == pytest.approx(expected)


def test_latencies_of_collectives() -> None:
    hardware = machine(intra=Link(1e11, 1e-6), inter=Link(1e10, 1e-5))
    assert collective_time(hardware, "all_reduce", [8, 32], 1, 0.0) == pytest.approx([6e-6, 6e-6 + 4e-5])
    # A ring: one step for every other rank, of which those between four nodes are three.
    step, between = 1.9 / 8 * 1e-6, 4 / 20 * 1e-5
    expected = [1e-6 + 7 * step, 1e-6 + 28 * step + 3 * between]
    assert collective_time(hardware, "all_gather", [8, 32], 1, 0.0) == pytest.approx(expected)
    # Of large groups it is most of the time, and a larger message is worth the longer steps of the other protocol.
    ring = (
        collective_time(hardware, "reduce_scatter", [32, 1024], 1, 1e8) - np.array([31 / 32, 1023 / 1024]) * 1e8 / 8e10
    )
    assert 10 < ring[1] / ring[0] < 40
    on_cpu = dataclasses.replace(hardware, device="cpu")
    assert collective_time(on_cpu, "all_gather", [8, 32], 1, 0.0) == pytest.approx([3e-6, 3e-6 + 2e-5])


def test_members_of_a_group_in_a_domain() -> None:
    assert local_members([8, 16, 4, 4], [1, 1, 2, 8], 8).tolist() == [8, 8, 4, 1]


def test_measured_collectives_replace_the_formula_within_a_domain() -> None:
    curve = Curve(2, (1e3, 1e6), (1e-4, 1e-2)), Curve(4, (1e3, 1e6), (2e-4, 2e-2))
    hardware = machine(curves={"all_gather": curve})
    found = collective_time(hardware, "all_gather", [2, 4, 4, 8, 32], 1, [1e6, 1e6, 10.0, 1e6, 1e6])
    assert found[:4] == pytest.approx([1e-2, 2e-2, 2e-4, 3e-2])
    assert found[4] == pytest.approx(31 / 32 * 1e6 / 8e10)
    beyond = collective_time(hardware, "all_gather", 2, 1, 2e6)
    assert beyond == pytest.approx(1e-2 + 1e6 * (1e-2 - 1e-4) / (1e6 - 1e3))
    assert collective_time(hardware, "reduce_scatter", 2, 1, 1e6) == pytest.approx(0.5e6 / 1e11)


def test_exchanges_of_cp() -> None:
    attention = Attention(8, 2, 128, 4096, causal=True)
    profile = model(Part("b", 0, attention=attention), 1)
    keys, queries = 8 * 4096 * 128 * 2 * 2.0, 8 * 4096 * 128 * 8 * 2.0
    backends = [CP_BACKENDS.index(name) for name in ("gather", "ring", "ulysses")]
    hardware = machine(constants={"attention": 1e6})  # attention takes no time that could hide anything
    # Of two key heads four ranks each need one: ulysses sends each of them twice.
    found = of(profile, PLAIN, hardware, cp=4, backend=backends, ulysses=[1, 1, 4]).parts["cp"]
    around = 3 / 4 * 2 * keys / 1e11
    assert found == pytest.approx(
        [3 * around, (1 + 1 + 2) * around, 2 * 3 / 4 * 2 * (queries + 2 * keys) / 4 / 1e11], rel=1e-3
    )


def test_attention_hides_exchanges_of_a_ring() -> None:
    attention = Attention(8, 2, 128, 2**20, causal=True)
    profile = model(Part("b", 0, attention=attention), 1)
    hardware = machine(constants={"hidden_cp": 1.0})
    ring, gather = of(profile, PLAIN, hardware, cp=4, backend=[1, 0]).parts["cp"]
    nothing = of(profile, PLAIN, machine(), cp=4, backend=1).parts["cp"][0]
    assert ring == pytest.approx(nothing / 4) and gather > ring


HEAVY = Part("b", 10**9, matmuls=(BIG,))


def test_exchange_of_gradients_by_level() -> None:
    profile, hardware = model(Part("b", 10**9), 2), machine()
    recipe = Recipe(32, "bf16", 2, 2, 0, 2, 4, 0)
    found = of(profile, recipe, hardware, dp=8, level=[0, 1, 2, 3], microbatches=2, replicate=[8, 1, 1, 1]).parts["dp"]
    gather, scatter = 7 / 8 * 4e9 / 1e11, 7 / 8 * 8e9 / 1e11
    expected = [2 * scatter, gather + scatter, gather + 2 * scatter, 2 * (2 * gather + scatter)]
    assert found == pytest.approx(expected, rel=1e-6)


def test_sharding_within_nodes_reduces_between_them_once() -> None:
    recipe = Recipe(64, "bf16", 2, 2, 0, 2, 2, 0)
    found = of(model(Part("b", 10**9), 1), recipe, machine(), dp=32, level=2, replicate=4, microbatches=2).parts["dp"]
    within = 7 / 8 * 2e9 / 1e11
    assert found[0] == pytest.approx(3 * within + 2 * 3 / 4 * 2e9 / 8 / 1e10, rel=1e-6)


def test_level_3_keeps_parameters_in_a_pipeline() -> None:
    found = of(model(Part("b", 10**8), 8), PLAIN, machine(), dp=2, pp=2, pipeline=2, level=[2, 3], microbatches=4)
    assert found.parts["dp"][0] == found.parts["dp"][1] > 0


def test_the_last_backward_hides_the_exchange_of_gradients() -> None:
    shown = of(model(HEAVY), PLAIN, machine(), dp=8).parts["dp"][0]
    hidden = of(model(HEAVY), PLAIN, machine(constants={"hidden_dp": 0.9}), dp=8).parts["dp"][0]
    assert hidden == pytest.approx(0.1 * shown, rel=0.02)


def test_each_group_of_parameters_costs_host_time() -> None:
    hardware = machine(constants={"group_s": 1e-3})
    found = of(model(Part("b", 1)), PLAIN, hardware, dp=2, level=[1, 2, 3], microbatches=4).parts["dp"]
    assert found == pytest.approx([9e-3 * 2, 9e-3 * 5, 9e-3 * 8], rel=1e-3)


def test_optimizer() -> None:
    recipe = Recipe(8, "bf16", 2, 2, 0, 4, 4, 12)
    found = of(model(Part("b", 10**9, 10**9), 2), recipe, machine(), mp=[1, 2, 1], dp=[1, 1, 4], level=[0, 0, 1])
    expected = np.array([2e9, 1e9, 5e8]) * (24 + 8 + 4) / 1e12
    assert found.parts["optimizer"] == pytest.approx(expected)


def test_fixed_costs() -> None:
    found = of(
        model(Part("b", 0)), PLAIN, machine(constants={"step_s": 0.5, "microbatch_s": 0.01}), microbatches=[1, 8]
    )
    assert found.parts["fixed"] == pytest.approx([0.51, 0.58])


@pytest.mark.parametrize(
    ("name", "virtual", "microbatches", "tolerance"),
    [
        ("gpipe", 1, 8, 0.01),
        ("1f1b", 1, 8, 0.01),
        ("1f1b", 1, 16, 0.01),
        ("looped_bfs", 2, 8, 0.02),
        ("interleaved_1f1b", 2, 8, 0.02),
        ("interleaved_1f1b", 4, 16, 0.02),
        ("interleaved_zero_bubble", 2, 16, 0.05),
        ("zbv_zero_bubble", 2, 16, 0.05),
        ("dualpipev", 2, 16, 0.05),
    ],
)
def test_pipelines_take_as_long_as_their_tables(name: str, virtual: int, microbatches: int, tolerance: float) -> None:
    """Against the simulation of the schedule that really runs, with stages of equal cost."""
    ranks = 4
    profile = model(Part("b", 0, matmuls=(MatMul(2**15, 2**14, 2**14),)), 16)
    found = of(
        profile, dataclasses.replace(PLAIN, batch_size=microbatches), machine(), pp=ranks, virtual_stages=virtual,
        pipeline=PIPELINES.index(name), microbatches=microbatches,
    )  # fmt: skip
    drawn = timeline(build_schedule(name, ranks, microbatches, virtual))
    busy = found.parts["compute"][0]
    simulated = busy / (1 - drawn.idle_share)
    assert found.seconds[0] == pytest.approx(simulated, rel=tolerance)


def test_published_schedules_without_bubbles() -> None:
    numbers = [NUMBERS[name] for name in ("1f1b", "zero_bubble_1p", "zero_bubble_2p")]
    profile = model(Part("b", 0, matmuls=(MatMul(2**15, 2**14, 2**14),)), 16)
    found = of(profile, PLAIN, machine(), pp=4, pipeline=numbers, microbatches=8)
    f1b, one, two = found.parts["bubble"]
    assert one == pytest.approx(f1b / 3, rel=0.02) and two < 0.03 * f1b


def test_exact_waits_for_the_loss_of_the_whole_batch() -> None:
    """With microbatches the last stage computes the loss while the first, which has more to do, is busy."""
    block = Part("b", 0, matmuls=(MatMul(2**15, 2**14, 2**14),))
    profile = model(block, 16, Part("after", 0, moved_bytes=1e9))
    profile = dataclasses.replace(profile, before=dataclasses.replace(block, name="before"))
    gpipe, exact = of(profile, PLAIN, machine(), pp=4, pipeline=[2, 1], microbatches=8).seconds
    assert exact - gpipe == pytest.approx((8 - 1) * 2.6e9 / 1e12)


def test_the_head_makes_the_last_stage_the_busiest() -> None:
    block = Part("b", 0, matmuls=(MatMul(2**15, 2**14, 2**14),))
    head = Part("after", 0, matmuls=(MatMul(2**15, 2**14, 2**15),))
    even = of(model(block, 8, head), PLAIN, machine(), pp=4, pipeline=3, microbatches=8, split=[0, 1])
    without = of(model(block, 8), PLAIN, machine(), pp=4, pipeline=3, microbatches=8)
    assert even.parts["compute"][0] == pytest.approx(2 * without.parts["compute"][0], rel=0.02)
    assert even.seconds[1] < even.seconds[0]


def test_sends_between_stages() -> None:
    profile = model(Part("b", 0, output_bytes=1e8), 8)
    hardware = machine(constants={"hidden_pp": 0.5})
    found = of(profile, PLAIN, hardware, pp=2, pipeline=[3, 5], virtual_stages=[1, 2], microbatches=8)
    assert found.parts["pp"] == pytest.approx([8 * 2 * 0.5 * 1e8 / 1e11, 8 * 4 * 0.5 * 1e8 / 1e11])
    far = of(profile, PLAIN, hardware, pp=2, dp=8, pipeline=3, microbatches=1)
    assert far.parts["pp"][0] == pytest.approx(2 * 0.5 * 1e8 / 1e10)


def test_actions_of_a_schedule() -> None:
    hardware = machine(constants={"action_s": 1e-3})
    found = of(model(Part("b", 0), 8), PLAIN, hardware, pp=2, pipeline=[3, 6], virtual_stages=[1, 2], microbatches=8)
    assert found.parts["pp"] == pytest.approx([8 * 2e-3, 8 * 6e-3])


def test_ranks_that_share_processors() -> None:
    """Four ranks on two cores: twice the time; with a pipeline idle cores help the others."""
    hardware = machine(device="cpu", nodes=1, devices_per_node=4, processors=2)
    profile, recipe = (
        model(Part("b", 0, matmuls=(MatMul(2**15, 2**14, 2**14),)), 16),
        dataclasses.replace(PLAIN, batch_size=4),
    )
    alone = of(profile, recipe, dataclasses.replace(hardware, processors=None), dp=4, pp=1).seconds[0]
    shared = of(profile, recipe, hardware, dp=4, pp=1).seconds[0]
    assert 2 * alone <= shared <= 2.1 * alone
    single = of(profile, recipe, hardware).seconds[0]
    assert single == of(profile, recipe, dataclasses.replace(hardware, processors=None)).seconds[0]
    pipeline = of(profile, recipe, hardware, pp=4, pipeline=2, microbatches=1).seconds[0]
    free = of(profile, recipe, dataclasses.replace(hardware, processors=None), pp=4, pipeline=2, microbatches=1)
    assert pipeline == pytest.approx(free.seconds[0], rel=0.05)  # one rank at a time: two cores are enough


@pytest.mark.parametrize(
    ("fields", "part", "exchanges", "others", "together"),
    [
        ({"dp": 4}, "dp", 1, 0, 4),
        ({"dp": 4, "level": 1}, "dp", 9 * 2, 0, 4),
        ({"dp": 4, "level": 2, "microbatches": 2}, "dp", 9 * 3, 0, 4),
        ({"dp": 4, "level": 3}, "dp", 9 * 3, 0, 4),
        ({"dp": 4, "level": 3, "microbatches": 2}, "dp", 9 * 6, 0, 4),
        ({"mp": 4}, "mp", 8 * 2 * 2, 0, 4),
        ({"mp": 4, "recompute": FULL}, "mp", 8 * 2 * 3, 0, 4),
        ({"mp": 4, "sequence_parallel": 1, "microbatches": 2}, "mp", 8 * 2 * 2 * 2 * 2, 0, 4),
        ({"cp": 4, "microbatches": 2}, "cp", 8 * 2 * 2, 1, 4),  # gradients are exchanged over cp, too
        ({"dp": 2, "mp": 2}, "mp", 8 * 2 * 2, 1, 2),
        ({"dp": 2, "mp": 2}, "dp", 1, 8 * 2 * 2, 4),
        ({"dp": 2, "mp": 2, "level": 3}, "dp", 9 * 3, 8 * 2 * 2, 4),
        ({"dp": 2, "mp": 2, "level": 3}, "mp", 8 * 2 * 2, 9 * 3, 4),  # waits for dp spread over mp
    ],
)
def test_ranks_that_share_processors_wait_at_exchanges(
    fields: dict[str, int], part: str, exchanges: int, others: int, together: int
) -> None:
    """Between exchanges they get apart by the root of turn x time, but by two turns at most; the last one counts."""
    block = Part("b", 0, attention=Attention(2, 2, 1, 1, causal=True), exchanges=2)
    last = {2: 0.589, 4: 1.049}[together]
    for slice_s, step_s in ((1e-3, 1e-6), (1e-6, 10.0)):
        own = machine(
            device="cpu", nodes=1, devices_per_node=4, processors=2, constants={"slice_s": slice_s, "step_s": step_s}
        )
        none = dataclasses.replace(own, constants=dataclasses.replace(own.constants, slice_s=1e-30))
        found, without = (of(model(block), PLAIN, hardware, **fields) for hardware in (own, none))
        waited = (found.parts[part] - without.parts[part])[0]
        apart = 2e-6 if step_s > 1 else math.sqrt(slice_s * without.seconds[0] / (exchanges + others))
        assert waited == pytest.approx(last * exchanges * apart, rel=0.02)
        enough = dataclasses.replace(own, processors=4)
        assert of(model(block), PLAIN, enough, **fields).parts[part][0] < 1e-3 * waited


def test_recomputation_that_keeps_products() -> None:
    kept, lost = MatMul(2**15, 2**14, 2**14), MatMul(2**15, 2**14, 2**14, kept=False)
    profile = model(Part("b", 0, matmuls=(kept, lost), moved_bytes=1e9, selective_share=0.5), 1)
    found = of(profile, PLAIN, machine(), recompute=[0, SELECTIVE, FULL])
    assert found.parts["compute"] == pytest.approx(found.parts["compute"][0] * np.array([1, 7 / 6, 8 / 6]), rel=1e-2)
    assert found.parts["elementwise"] == pytest.approx(8e-3 * np.array([2.6, 3.1, 3.6]))


LLAMA = transformer_profile(16, 2048, 16, 4096, 32000, kv_heads=8, ffn=5632, glu=True)
USUAL = dataclasses.replace(machine(intra=Link(1e11, 5e-6), inter=Link(1e10, 2e-5)), constants=Constants())


def candidates() -> Candidates:
    rows = []
    for mp, pp, cp in ((1, 1, 1), (2, 1, 1), (2, 2, 1), (1, 4, 1), (1, 2, 2), (4, 1, 2)):
        for level in range(4):
            for pipeline, virtual in [(0, 1)] if pp == 1 else [(1, 1), (3, 1), (5, 2), (6, 2), (7, 2)]:
                for micro, recompute, split in ((1, 0, 0), (4, -1, 1), (8, 3, 0), (8, 1, 1)):
                    dp = 32 // (mp * pp * cp)
                    rows.append(
                        Candidate(
                            dp, mp, pp, cp, level, 1 if level else dp * cp, int(mp > 1 and micro > 1), pipeline,
                            virtual, split if pp > 1 else 0, micro, recompute, 1,
                        )
                    )  # fmt: skip
    return Candidates.of(rows)


RECIPE = Recipe(256, "bf16", 4, 2, 0, 4, 4, 8)


def test_parts_add_up_and_nothing_is_negative() -> None:
    found = step_time(LLAMA, RECIPE, USUAL, candidates())
    assert tuple(found.parts) == PARTS
    assert np.sum(list(found.parts.values()), axis=0) == pytest.approx(found.seconds)
    assert all((values >= 0).all() and np.isfinite(values).all() for values in found.parts.values())
    shared = step_time(LLAMA, RECIPE, dataclasses.replace(USUAL, processors=2, device="cpu"), candidates())
    assert np.sum(list(shared.parts.values()), axis=0) == pytest.approx(shared.seconds)


def test_many_at_once_equal_one_at_a_time() -> None:
    every = candidates()
    together = step_time(LLAMA, RECIPE, USUAL, every)
    for index in range(0, len(every), 7):
        alone = step_time(LLAMA, RECIPE, USUAL, Candidates.of([every[index]]))
        assert alone.seconds[0] == pytest.approx(together.seconds[index], rel=1e-12)
        for name in PARTS:
            assert alone.parts[name][0] == pytest.approx(together.parts[name][index], rel=1e-9, abs=1e-15)


def test_same_inputs_same_bytes() -> None:
    one, two = (step_time(LLAMA, RECIPE, USUAL, candidates()) for _ in range(2))
    assert one.seconds.tobytes() == two.seconds.tobytes()
    few = candidates().select(np.arange(10))
    assert spread(LLAMA, RECIPE, USUAL, few, 8).tobytes() == spread(LLAMA, RECIPE, USUAL, few, 8).tobytes()


@pytest.mark.parametrize("change", ["flops", "memory", "intra", "inter", "kernel_s", "latency"])
def test_better_machines_are_never_slower(change: str) -> None:
    better = {
        "flops": lambda h: dataclasses.replace(h, flops={key: 2 * value for key, value in h.flops.items()}),
        "memory": lambda h: dataclasses.replace(h, memory_bytes_per_s=2 * h.memory_bytes_per_s),
        "intra": lambda h: dataclasses.replace(h, intra=Link(2 * h.intra.bytes_per_s, h.intra.latency_s)),
        "inter": lambda h: dataclasses.replace(h, inter=Link(2 * h.inter.bytes_per_s, h.inter.latency_s)),
        "kernel_s": lambda h: h.with_constants(dataclasses.replace(h.constants, kernel_s=1e-7), ""),
        "latency": lambda h: h.with_constants(dataclasses.replace(h.constants, latency=0.1), ""),
    }[change](USUAL)
    before, after = (step_time(LLAMA, RECIPE, item, candidates()).seconds for item in (USUAL, better))
    assert (after <= before * (1 + 1e-9)).all() and (after < before).any()


def test_more_work_takes_longer() -> None:
    every = candidates()
    batch = step_time(LLAMA, dataclasses.replace(RECIPE, batch_size=512), USUAL, every).seconds
    deeper = dataclasses.replace(LLAMA, blocks=(0,) * 32, block_names=tuple(map(str, range(32))))
    usual = step_time(LLAMA, RECIPE, USUAL, every).seconds
    assert (batch > usual).all() and (step_time(deeper, RECIPE, USUAL, every).seconds > usual).all()


def test_more_microbatches_shrink_the_bubble_and_nothing_else() -> None:
    found = of(LLAMA, RECIPE, USUAL, pp=4, dp=8, pipeline=3, microbatches=[4, 8, 16, 32])
    share = found.parts["bubble"] / found.seconds
    assert (np.diff(share) < 0).all()


def test_flops_of_a_step() -> None:
    profile = transformer_profile(2, 64, 4, 32, 128)
    block = 2 * 32 * (4 * 64 * 64 + 2 * 64 * 256) + 4 * 4 * 16 * 32 * 32 / 2
    forward = 2 * block + 2 * 32 * 64 * 128
    assert flops_per_step(profile, Recipe(3)) == pytest.approx(9 * forward)
    assert flops_per_step(profile, Recipe(3), FULL) == pytest.approx(3 * (3 * forward + 2 * block))
    plain = transformer_profile(2, 64, 4, 32, 128, attention="plain", selective="attention")
    scores = 4 * 4 * 16 * 32 * 32
    assert flops_per_step(plain, Recipe(1)) == pytest.approx(3 * (forward + scores))
    block = profile.kinds[0]
    frozen = dataclasses.replace(
        profile,
        kinds=(
            dataclasses.replace(
                block, matmuls=tuple(dataclasses.replace(item, right_gradient=False) for item in block.matmuls)
            ),
        ),
    )
    products = 2 * sum(item.flops for item in block.matmuls)
    assert flops_per_step(frozen, Recipe(1)) == pytest.approx(3 * forward - products)
    assert flops_per_step(plain, Recipe(1), SELECTIVE) == pytest.approx(3 * (forward + scores) + 2 * scores)


def test_soft_maximum() -> None:
    assert soft_max(np.array([3.0]), np.array([0.0])) == pytest.approx(3.0)
    assert soft_max(np.array([1.0]), np.array([1.0])) == pytest.approx(2 ** (1 / 6))
    assert soft_max(np.array([1e-60]), np.array([1e-60])) == pytest.approx(1e-60 * 2 ** (1 / 6))


def test_spread_grows_with_what_is_unsure() -> None:
    every = candidates().select([0, 40])
    times = sampled_times(LLAMA, RECIPE, USUAL, every, 200)
    assert times.shape == (200, 2)
    known = sampled_times(LLAMA, RECIPE, USUAL, every, 200, scale=0.1)
    assert (np.log(known).std(axis=0) < 0.2 * np.log(times).std(axis=0)).all()
    assert (spread(LLAMA, RECIPE, USUAL, every) > 0.02).all() and (spread(LLAMA, RECIPE, USUAL, every) < 0.5).all()


@pytest.mark.parametrize(("heads", "kv_heads", "ffn"), [(64, 64, 24576), (8, 2, 3000)])
def test_kept_bytes_follow_the_publication(heads: int, kv_heads: int, ffn: int) -> None:
    s, h = 2048, heads * 96
    block = transformer_profile(
        1, h, heads, s, 51200, kv_heads=kv_heads, ffn=ffn, attention="plain", dropout=True, selective="attention"
    ).kinds[0]
    if ffn == 4 * h and heads == kv_heads:
        assert block.saved_bytes == pytest.approx(s * h * (34 + 5 * heads * s / h))
        assert block.sharded_saved_bytes == pytest.approx(s * h * (24 + 5 * heads * s / h))
        assert block.selective_bytes == pytest.approx(34 * s * h)
    keys = kv_heads * 96
    assert block.saved_bytes == pytest.approx(s * (10 * h + 4 * h + 4 * keys + 4 * ffn) + 5 * heads * s * s)
    assert block.output_bytes == 2 * s * h and not math.isnan(block.peak_bytes)


def test_parameters_of_known_models() -> None:
    assert LLAMA.flops > 0
    llama3 = transformer_profile(32, 4096, 32, 8192, 128256, kv_heads=8, ffn=14336, glu=True)
    assert llama3.parameters == 8_030_261_248
    gpt2 = transformer_profile(12, 768, 12, 1024, 50257, tied=True, bias=True, learned_positions=True)
    assert gpt2.parameters == 124_439_808
