"""A step of some ranks without devices: what it holds beside the plan, and what ranks exchange."""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from autolaunch.planning.dryrun import account_of
from autolaunch_strategies.config import ConfigError, ParallelConfig, parallel_config
from autolaunch_strategies.dry_run.agreement import disagreements
from autolaunch_strategies.dry_run.ranks import pretend_and_compare, pretend_ranks
from autolaunch_strategies.dry_run.step import PretendedRank, Training, _OneStep
from autolaunch_strategies.dry_run.trace import KINDS, Exchange, Trace
from autolaunch_strategies.dry_run.world import NotSaidYet, World
from autolaunch_strategies.mesh.rank_mesh import coordinates, rank_at
from autolaunch_strategies.planner.candidate import Candidate
from autolaunch_strategies.planner.memory import memory_account
from autolaunch_strategies.planner.module_profile import profile_module
from autolaunch_strategies.planner.profile import ModelProfile, Recipe
from autolaunch_strategies.planner.recipe import recipe_of
from autolaunch_strategies.torch_private.pretended import own_chunk_alone, pretended_group, whole_shapes_outside
from autolaunch_strategies.torch_private.tracing import fake_tensors
from tests.dry_run.pretending import pretended_ranks, training_of
from tests.planner import memory_cases as cases
from tests.planner.test_memory import CPU
from tests.support.messages import assert_told
from tests.support.one_rank import without_process_group
from tests.support.ranks import start
from tests.support.tiers import but_one_in, spread, tiered

AGREES = (
    *("one", "accumulates", "full", "selective", "every_second", "mp", "mp_sp", "mp_full"),
    *("ddp", "zero1", "zero1_accumulates", "zero2_accumulates", "zero3", "dp_mp_zero2", "dp_pp_zero3"),
    *("exact", "gpipe", "1f1b", "1f1b_4", "1f1b_full", "interleaved", "interleaved_zb", "zbv", "dualpipev"),
    *("cp_gather", "cp_ring", "cp_ulysses", "cp_usp", "cp_accumulates", "cp_selective", "cp_zero1", "cp_zero3"),
    *("cp_mp", "cp_mp_sp", "cp_1f1b", "cp_exact", "hybrid"),
    *("exact_full", "exact_zero1", "exact_alone", "exact_alone_full", "gpipe_full"),
    *("interleaved_zb_full", "zbv_full", "zbv_full_zero1", "zbv_alone", "dualpipev_full"),
    *("1f1b_every_second", "interleaved_every_second"),
)
"""Of zero3_full the plan counts 5.04 % more: the buffer of a block that is not gathered any more."""
AGREES_MIXED = (*(name for name in AGREES if name != "dualpipev"), "zero3_full")
"""With bf16-mixed. Of dualpipev the plan counts 5 % more."""
MORE = {
    "mp_full": cases.case(mp=2, recompute=1),
    "cp_exact": cases.case(pp=2, cp=2, pipeline="exact", microbatches=4),
    "cp_usp": cases.case(cp=4, backend="usp", ulysses=2),
    "cp_accumulates": cases.case(cp=2, backend="ring", microbatches=4),
    "cp_selective": cases.case(cp=2, backend="ring", recompute=-1),
    "cp_zero1": cases.case(cp=2, backend="ring", level=1),
    "cp_zero3": cases.case(dp=2, cp=2, level=3),
    "cp_mp": cases.case(mp=2, cp=2),
    "cp_mp_sp": cases.case(mp=2, cp=2, backend="ring", sequence_parallel=1),
    "cp_1f1b": cases.case(pp=2, cp=2, backend="ring", pipeline="1f1b", microbatches=4),
    "exact_full": cases.case(pp=2, pipeline="exact", microbatches=4, recompute=1),
    "exact_zero1": cases.case(dp=2, pp=2, level=1, pipeline="exact", microbatches=4),
    "exact_alone": cases.case(dp=2, pp=2, level=1, pipeline="exact"),
    "exact_alone_full": cases.case(dp=2, pp=2, level=3, pipeline="exact", recompute=1),
    "gpipe_full": cases.case(pp=2, pipeline="gpipe", microbatches=4, recompute=1),
    "interleaved_zb_full": cases.case(
        pp=2, pipeline="interleaved_zero_bubble", virtual_stages=2, microbatches=4, recompute=1
    ),
    "zbv_full": cases.case(pp=2, pipeline="zbv_zero_bubble", virtual_stages=2, microbatches=4, recompute=1),
    "zbv_alone": cases.case(pp=2, pipeline="zbv_zero_bubble", virtual_stages=2),
    "1f1b_every_second": cases.case(pp=2, pipeline="1f1b", microbatches=4, recompute=2),
    "interleaved_every_second": cases.case(
        pp=2, pipeline="interleaved_1f1b", virtual_stages=2, microbatches=4, recompute=2
    ),
    "zbv_full_zero1": cases.case(
        dp=2, pp=2, level=1, pipeline="zbv_zero_bubble", virtual_stages=2, microbatches=4, recompute=1
    ),
    "dualpipev_full": cases.case(pp=2, pipeline="dualpipev", virtual_stages=2, microbatches=4, recompute=1),
    "1f1b_sp": cases.case(mp=2, pp=2, sequence_parallel=1, pipeline="1f1b", microbatches=4),
    "interleaved_zb_cp": cases.case(cp=2, pp=2, pipeline="interleaved_zero_bubble", virtual_stages=2, microbatches=4),
    "zbv_cp_full": cases.case(cp=2, pp=2, pipeline="zbv_zero_bubble", virtual_stages=2, microbatches=4, recompute=1),
    "zbv_sp": cases.case(mp=2, pp=2, sequence_parallel=1, pipeline="zbv_zero_bubble", virtual_stages=2, microbatches=4),
}
"""Beside those that real runs are measured by."""


@functools.cache
def candidate(name: str) -> Candidate:
    return cases.candidate((cases.CASES | MORE)[name])


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    return profile_module(cases.module(), cases.POSITIONS, device_type="cpu")


@pytest.fixture(autouse=True)
def nobody_else() -> None:
    without_process_group()


def training(name: str) -> Training:
    return training_of(candidate(name), cases.module)


@functools.cache
def pretended(name: str, precision: str = "32-true") -> list[PretendedRank]:
    return pretended_ranks(training(name), precision)


DAILY = ("one", "zero3", "1f1b", "cp_ring")


def parts(name: str) -> list[tuple[str, Any]]:
    """What a case has of levels, schedules, backends and recomputation."""
    kinds = ("level", "replicate", "pipeline", "backend", "recompute", "sequence_parallel")
    return [item for item in (cases.CASES | MORE)[name].items() if item[0] in kinds]


@pytest.mark.parametrize("name", tiered(AGREES, DAILY, spread(AGREES, parts, DAILY)))
def test_the_plan_says_what_a_step_holds(name: str, profile: ModelProfile) -> None:
    account = memory_account(profile, Recipe(batch_size=cases.BATCH), CPU, candidate(name))
    for rank in pretended(name):
        assert not rank.notes
        ours = account[rank.pipe_rank]
        assert ours["optimizer"] == pytest.approx(rank.held["optimizer"], rel=0.01)
        assert ours["total"] == pytest.approx(rank.total, rel=0.05)


LARGE = (
    "accumulates",
    "mp",
    "ddp",
    "zero1",
    "zero2_accumulates",
    "zero3",
    "dp_pp_zero3",
    "1f1b",
    "exact",
    "exact_alone",
)
LARGE_DAILY = ("zero3", "1f1b")


@pytest.mark.parametrize("name", tiered(LARGE, LARGE_DAILY, but_one_in(2, LARGE, LARGE_DAILY)))
def test_the_plan_knows_what_a_large_vocabulary_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table and a head beside which everything else is small: gathered, made, sent and added as a whole."""
    monkeypatch.setattr(cases, "SIZES", cases.SIZES | {"vocab_size": 131_072})
    monkeypatch.setattr(cases, "POSITIONS", 8)
    large = profile_module(cases.module(), cases.POSITIONS, device_type="cpu")
    account = memory_account(large, Recipe(batch_size=cases.BATCH), CPU, candidate(name))
    for rank in pretended_ranks(training(name), "32-true"):
        assert account[rank.pipe_rank]["total"] == pytest.approx(rank.total, rel=0.02)


@pytest.fixture(scope="module")
def mixed() -> ModelProfile:
    return profile_module(cases.module(), cases.POSITIONS, device_type="cpu", precision="bf16-mixed")


MIXED_DAILY = ("zero3", "dp_pp_zero3", "cp_mp_sp")


@pytest.mark.parametrize("name", tiered(AGREES_MIXED, MIXED_DAILY, but_one_in(8, AGREES_MIXED, MIXED_DAILY)))
def test_the_plan_knows_what_autocast_makes_of_weights(name: str, mixed: ModelProfile) -> None:
    """Where dp shards, they are gathered in its type; elsewhere each microbatch keeps copies of its own."""
    recipe = recipe_of(cases.BATCH, "bf16-mixed")
    account = memory_account(mixed, recipe, CPU, candidate(name))
    for rank in pretended(name, "bf16-mixed"):
        assert account[rank.pipe_rank]["total"] == pytest.approx(rank.total, rel=0.05)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_layers_that_share_an_input_exchange_its_gradient_once(precision: str) -> None:
    """Three for queries, keys and values, two in the MLP; embedding and head have one exchange each."""
    of_layers = 2 * cases.SIZES["num_layers"]
    stream = cases.BATCH * cases.POSITIONS * cases.SIZES["hidden_size"] * 4

    def counts(name: str) -> Counter[str]:
        exchanges = pretended(name, precision)[0].exchanges
        return Counter(item.kind for item in exchanges if item.bytes >= stream // 2)

    assert counts("mp") == {"all_reduce": 2 * of_layers + 2}
    # The head's input is gathered, too, and so is the gradient of the embedding's output.
    gathers = 2 * of_layers + 2
    assert counts("mp_sp") == {
        "all_reduce": 2,
        "all_gather_into_tensor": gathers,
        "reduce_scatter_tensor": 2 * of_layers,
    }


@pytest.mark.parametrize("name", ["zero3", pytest.param("zero1", marks=pytest.mark.full)])
def test_weights_of_linear_layers_travel_in_the_type_of_autocast(name: str, mixed: ModelProfile) -> None:
    blocks = [mixed.kinds[kind] for kind in mixed.blocks]
    assert recipe_of(cases.BATCH, "bf16-mixed").gathers_casts
    gathered = {part: 4 * part.parameters - 2 * part.linear_parameters for part in (mixed.before, mixed.after, *blocks)}
    again = sum(gathered[block] for block in blocks) if name == "zero3" else 0
    expected = gathered[mixed.before] + gathered[mixed.after] + sum(gathered[block] for block in blocks) + again
    (rank, _) = pretended(name, "bf16-mixed")
    assert sum(item.bytes for item in rank.exchanges if "allgather" in item.kind) == expected


@pytest.mark.full
def test_messages_between_stages_and_collectives_of_a_level() -> None:
    first, last = sorted(pretended("1f1b"), key=lambda rank: rank.pipe_rank)
    for here, there in ((first, last), (last, first)):
        sent = [item.bytes for item in here.exchanges if item.kind == "send"]
        assert sent == [2 * 128 * 128 * 4] * 4  # of each microbatch: sequences, positions, width, bytes
        assert sent == [item.bytes for item in there.exchanges if item.kind == "recv_" and item.peer == here.rank]
    gathered = [item for item in pretended("ddp")[0].exchanges if item.kind == "allreduce_"]
    assert sum(item.bytes for item in gathered) >= pretended("ddp")[0].held["parameters"]


def test_only_parts_take_memory() -> None:
    with pretended_group(0, 64), ExitStack() as stack:
        mesh, trace = init_device_mesh("cpu", (64,)), Trace()
        for context in (fake_tensors(), whole_shapes_outside(), trace.watching()):
            stack.enter_context(context)
        part = DTensor.from_local(torch.empty(8, 16), mesh, [Shard(1)], run_check=False)
        with trace.listening():
            half = part.to(torch.bfloat16)
        assert half.shape == (8, 16 * 64)
        assert sum(trace.peak().values()) == 8 * 16 * 4 + 8 * 16 * 2


def test_a_rank_makes_its_chunk_alone() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param as fsdp

    tensor = torch.arange(14).reshape(7, 2)
    for ranks, dim in ((3, 0), (4, 0), (9, 0), (2, 1), (1, 0)):
        all_parts = fsdp._chunk_with_empty(tensor, ranks, dim)
        with own_chunk_alone():
            chunks = fsdp._chunk_with_empty(tensor, ranks, dim)
            assert all(torch.equal(chunks[rank], all_parts[rank]) for rank in range(ranks))


@pytest.mark.parametrize("name", ["exact", "interleaved", "zbv"])
def test_the_step_is_one_of_a_training_that_goes_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, warm_up = pretended_ranks(training(name)), _OneStep.warm_up

    def with_a_step(self: _OneStep) -> None:
        warm_up(self)
        with self.step.around():
            self.run()
        self.name_all()

    monkeypatch.setattr(_OneStep, "warm_up", with_a_step)
    assert pretended_ranks(training(name)) == first


@pytest.mark.parametrize("name", ["1f1b_4", "zbv"])
def test_a_rank_alone_does_what_it_does_beside_others(name: str) -> None:
    for rank in pretended_ranks(training(name)):
        assert pretend_ranks(training(name), [rank.rank]) == [rank]


@pytest.mark.parametrize("answers", [True, False], ids=["ends", "waits"])
def test_a_rank_that_waits_for_ever_is_told(answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def pretend(training: Training, rank: int, world: World, until: Any = None) -> Any:
        if answers and rank == 1:
            return None
        raise NotSaidYet((1 - rank, rank))

    monkeypatch.setattr("autolaunch_strategies.dry_run.ranks.pretend", pretend)
    with pytest.raises(ConfigError, match=r"rank \d waits for what rank \d never sends"):
        pretend_ranks(training("1f1b"), [0])


def part_trained(trained: str) -> Any:
    """The module of the cases, of which these parameters alone are trained."""
    module = cases.module()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(bool(re.search(trained, name)))
    module.configure_optimizers = lambda: torch.optim.AdamW(
        [parameter for parameter in module.parameters() if parameter.requires_grad], lr=1e-3
    )
    return module


@pytest.mark.parametrize(
    ("name", "trained"),
    [
        ("one", "layers.3"),
        *(pytest.param("one", trained, marks=pytest.mark.full) for trained in ("layers.1", "[qv]_proj")),
        *(pytest.param("zero3", trained, marks=pytest.mark.full) for trained in ("layers.3", "layers.1", "[qv]_proj")),
        ("1f1b", "[qv]_proj"),
    ],
)
def test_the_plan_knows_what_is_not_trained(name: str, trained: str) -> None:
    def module() -> Any:
        return part_trained(trained)

    account = memory_account(
        profile_module(module(), cases.POSITIONS, device_type="cpu"),
        Recipe(batch_size=cases.BATCH),
        CPU,
        candidate(name),
    )
    for rank in pretended_ranks(training_of(candidate(name), module)):
        ours = account[rank.pipe_rank]
        assert ours["optimizer"] == pytest.approx(rank.held["optimizer"], rel=0.01)
        assert ours["total"] == pytest.approx(rank.total, rel=0.05)


def test_ranks_that_do_not_agree_are_told() -> None:
    mine, theirs = (Exchange("allreduce_", (0, 1), 8), Exchange("broadcast_", (0, 1), 4))
    (told,) = disagreements({0: [mine, theirs], 1: [theirs, mine]})
    assert "number 1: rank 0 has allreduce of 8 bytes, rank 1 broadcast of 4 bytes" in told
    send, receive = Exchange("send", (0, 1), 8, peer=1), Exchange("recv_", (0, 1), 4, peer=0)
    (told,) = disagreements({0: [send], 1: [receive]})
    assert told == "message 1 from rank 0 to rank 1: 8 bytes sent, 4 bytes received"


@pytest.mark.parametrize("differs", ["mp", "dp"])
def test_one_rank_elsewhere_tells_of_all_neighbours(differs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless whole groups do other things, which is no mistake: then the neighbours themselves are asked."""
    shape = parallel_config("2x2").mesh
    asked = []

    def pretend_ranks(training: Training, ranks: Iterable[int]) -> list[PretendedRank]:
        asked.append(list(ranks))
        done = []
        for rank in asked[-1]:
            place = coordinates(shape, rank)
            along_mp = tuple(rank_at(shape, {"dp": place["dp"], "mp": other}) for other in (0, 1))
            size = 16 if place[differs] else 8
            done.append(PretendedRank(rank, place, 0, {}, {}, [Exchange("allreduce_", along_mp, size)]))
        return done

    monkeypatch.setattr("autolaunch_strategies.dry_run.ranks.pretend_ranks", pretend_ranks)
    ranks, wrong = pretend_and_compare(replace(training("ddp"), parallel=parallel_config("2x2")))
    assert asked == [[0, 3], [0, 1, 2]] and [rank.rank for rank in ranks] == [0, 3, 1, 2]
    number = (
        "collective of the group of 2 ranks, number 1: rank 0 has allreduce of 8 bytes, rank 1 allreduce of 16 bytes"
    )
    assert wrong == ([number] if differs == "mp" else [])


def test_what_cannot_be_pretended_is_refused() -> None:
    for keys, write in (
        ({"compile": True}, "compile=false"),
        ({"recompute": "offload"}, "recompute=none"),
        ({"recompute": "budget"}, "recompute=none"),
    ):
        with pytest.raises(ConfigError) as caught:
            pretend_ranks(replace(training("ddp"), parallel=parallel_config("2", **keys)), [0])
        assert caught.value.write == write
    with pytest.raises(ConfigError, match="rank=2"):
        pretend_ranks(training("ddp"), [2])


@pytest.mark.parametrize(
    ("parallel", "rank", "stage", "peer", "at"),
    [
        (parallel_config("2x1x2", pp="1f1b"), 0, 1, 2, "stage 0"),
        (parallel_config("2x1x2", pp="1f1b"), 2, 0, 0, "stage 1"),
        (parallel_config("1x1x2", pp="zbv_zero_bubble"), 0, 0, 1, "stage 1"),  # first and last stage are on rank 0
        (parallel_config("cp2", cp="ring"), 0, 0, 1, "cp1"),
        (parallel_config("1x1x2x2", pp="1f1b", cp="ring"), 0, 1, 1, "cp1"),
    ],
    ids=["last-stage", "first-stage", "both", "ring", "ring-in-a-pipeline"],
)
def test_a_peer_is_told_as_what_it_is(parallel: ParallelConfig, rank: int, stage: int, peer: int, at: str) -> None:
    """By the numbers that ranks give their own stages, which are not those of the axis."""
    send = Exchange("send", (rank, peer), 8, peer=peer)
    pretended = PretendedRank(rank, coordinates(parallel.mesh, rank), stage, dict.fromkeys(KINDS, 0), {}, [send])
    (message,) = account_of(pretended, parallel, None)["messages"]
    assert message["at"] == at


def test_a_step_that_fails_is_told_by_the_line_of_its_code() -> None:
    class Fails(torch.nn.Module):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return tokens.view(-1, 5)

    def module(step: Any) -> Any:
        built = cases.module()
        built.training_step = step
        return built

    with pytest.raises(
        ConfigError, match=r"RuntimeError at `return tokens.view\(-1, 5\)` \(test_dry_run.py:\d+\): shape"
    ) as caught:
        pretend_ranks(training_of(candidate("one"), lambda: module(lambda batch: Fails()(batch))), [0])
    (note,) = caught.value.__notes__
    assert "    return tokens.view(-1, 5)\n" in note and "frames of libraries" in note and "dry_run/step.py" not in note
    for name, mesh in (("one", "1"), ("1f1b", "1x1x2")):
        with pytest.raises(ConfigError) as caught:
            pretend_ranks(training_of(candidate(name), lambda: module(lambda batch: None)), [0])
        assert_told(caught.value, f"dryrun with mesh={mesh}", "training_step returned no loss", allowed=("as `loss`",))


@pytest.mark.full
def test_ranks_side_by_side_do_what_they_do_one_after_the_other() -> None:
    done = start([sys.executable, "-m", "tests.dry_run.side_by_side", "1f1b_4", "zbv"], cold=True)
    ended, says_nothing, both_wait, both_could, cannot_be_sent, *the_same = done.stdout.splitlines()
    assert ended == "the step of rank 0 ended with exit code 3"
    assert says_nothing == "the other says nothing: rank 0 waits for what rank 1 never sends"
    assert the_same == ["1f1b_4 [0, 3]", "zbv [0, 1]"]
    assert re.fullmatch(r"both wait: rank (\d) waits for what rank (?!\1)\d never sends", both_wait)
    assert both_could == "both could begin early: 0"
    assert cannot_be_sent == "one records and listens: 0"
