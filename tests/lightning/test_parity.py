"""Unmodified LightningModules through MeshStrategy give on 2 and 4 ranks what plain Lightning gives in one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import Precision
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from autolaunch_strategies import MeshStrategy
from autolaunch_strategies.config import ConfigError, parallel_config, parse_mesh
from autolaunch_strategies.data_parallel.loader import DistributedLoader, Share
from autolaunch_strategies.data_parallel.order import Order
from autolaunch_strategies.lightning.batches import Batches
from autolaunch_strategies.lightning.refusals import refuse_callbacks, refuse_scaler
from tests.lightning import any_signature
from tests.support.messages import assert_told
from tests.support.ranks import Group, GroupOf, differences
from tests.support.tiers import spread, tiered

SCRIPT = Path(__file__).with_name("cases.py")
LEVELS = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def one(group_of: GroupOf) -> Group:
    return group_of(SCRIPT, "parity", 1, REFERENCE="1")


@pytest.fixture(scope="module")
def two(group_of: GroupOf) -> Group:
    return group_of(SCRIPT, "parity", 2)


@pytest.fixture(scope="module")
def ranks(group_of: GroupOf) -> Group:
    return group_of(SCRIPT, "ranks", 2)


def check(expected: Group, found: Group, case: str, world: int, tolerance: float = 1e-5) -> None:
    for rank in range(world):
        assert (
            differences(without_weights(expected.read(case)), without_weights(found.read(case, rank)), tolerance) == []
        )
        # The optimizer divides tiny gradients by their own size: rounding shows more in weights than in losses.
        assert differences(weights(expected.read(case)), weights(found.read(case, rank)), max(tolerance, 3e-4)) == []


def weights(result: Any) -> Any:
    return result.get("weights") if isinstance(result, dict) else None


def without_weights(result: Any) -> Any:
    return {key: value for key, value in result.items() if key != "weights"} if isinstance(result, dict) else result


SAME = [
    *(
        f"{model}-{level}"
        for model in (
            "autoencoder",
            "classifier",
            "language",
            "accumulate",
            "gan",
            "critic",
            "forces",
            "adafactor",
            "parts-elsewhere",
            "thawed",
        )
        for level in LEVELS
    ),
    *(
        f"{case}-{level}"
        for case in ("by-value", "own-clipping", "double", "hooks", "synchronised")
        for level in (0, 3)
    ),
    *("recompute-full", "recompute-2", "recompute-selective", "compile", "compile-captured", "offload-1", "offload-3"),
    *(
        "tasks_after_each_other",
        "logged_once",
        "early_stopping",
        "spectral",
        "transposed",
        "plateau",
        "clips-in-hook-mp",
    ),
    *(f"{order}-{level}" for order in ("in-order", "shuffled") for level in LEVELS),
    *("per-rank", "own-batches", "whole-along-mp", "closures", "left-over-0", "left-over-3"),
    *(f"{kind}-{level}" for index, kind in enumerate(any_signature.KINDS) for level in (index % 4, (index + 2) % 4)),
    *(f"{kind}-mp" for kind in any_signature.KINDS),
    *("conditioned-of-stream-mp", "evaluated_with_any_signature"),
]


LONG = {
    "adafactor-1", "parts-elsewhere-2", "language-1", "autoencoder-3", "early_stopping", "recompute-2",
    "autoencoder-0", "autoencoder-2", "classifier-1", "classifier-3", "language-0", "language-2", "accumulate-1",
    "accumulate-2", "gan-0", "gan-1", "gan-2", "adafactor-0", "adafactor-2", "parts-elsewhere-0",
    "critic-0", "critic-1", "critic-2", "forces-0", "forces-2", "forces-3",
    "parts-elsewhere-1", "by-value-0", "own-clipping-0", "double-3", "hooks-0", "recompute-full",
    "recompute-selective", "compile", "in-order-0", "in-order-1", "in-order-2", "shuffled-1", "shuffled-3",
    "synchronised-0", "thawed-1", "thawed-2", "offload-1", "compile-captured", "adafactor-3", "own-clipping-3",
    "parts-elsewhere-3", "left-over-0",
    *(f"{kind}-{level}" for kind in any_signature.KINDS for level in LEVELS if f"{kind}-{level}" != "fusion-3"),
}  # fmt: skip
"""Of model x level and option x level: what is left when every two have met."""


def everyday(case: str) -> bool:
    return case not in LONG


def parts(case: str) -> tuple[str, str]:
    """The model, and the level or the option."""
    model, _, level = case.rpartition("-")
    return model, level


@pytest.mark.parametrize("case", tiered(SAME, everyday, spread(SAME, parts, everyday)))
def test_two_ranks_equal_one_process(one: Group, two: Group, case: str) -> None:
    check(one, two, case, 2)


def test_modules_with_any_signature_are_sharded_along_mp_where_they_can_be(ranks: Group) -> None:
    shares = ranks.read("shares_of_kinds")
    assert {kind for kind, said in shares.items() if said["share"] < 0.75} >= {
        "conditioned", "unet", "adversaries", "taught",
    }  # fmt: skip
    assert all(said["warnings"] for said in shares.values() if said["share"] == 1)


@pytest.mark.parametrize("level", tiered([0, 3], [3]))
def test_bf16_mixed_is_close(one: Group, two: Group, level: int) -> None:
    """bf16 products round differently for other sizes of batch: 8 bits of mantissa."""
    check_losses = [result.read(f"bf16-mixed-{level}")["losses"] for result in (one, two)]
    assert differences(*check_losses, 1e-2) == []
    assert differences(one.read(f"language-{level}")["losses"], check_losses[1], 1e-6) != []


@pytest.mark.parametrize("case", tiered(["2", "3", "3-recomputed", "1-offload"], ["3"]))
def test_weights_that_autocast_casts_are_gathered_in_bf16_and_no_number_changes(two: Group, case: str) -> None:
    """Of a model with a tied head, a frozen and an unused layer, over two batches per step."""
    in_bf16, in_fp32 = two.read(f"gathered-{case}")
    sent, whole = in_bf16.pop("sent"), in_fp32.pop("sent")
    assert in_bf16 == in_fp32, "to the last bit"
    gathered, gathered_in_fp32 = sent.pop("_allgather_base_ torch.uint8"), whole.pop("_allgather_base_ torch.float32")
    assert gathered < 0.8 * gathered_in_fp32
    assert sent == whole and list(sent) == ["_reduce_scatter_base_ torch.float32"]


@pytest.mark.parametrize("types", ["types-param_dtype", "types-param_dtype-reduce_dtype"])
def test_types_of_parameters_count_on_one_rank_too(one: Group, two: Group, types: str) -> None:
    alone, losses = (result.read(types)["losses"] for result in (one, two))
    assert differences(alone, losses, 1e-2) == []
    assert differences(one.read("language-2")["losses"][: len(alone)], alone, 1e-5) != []


@pytest.mark.parametrize("key", ["param_dtype", "reduce_dtype"])
def test_types_of_parameters_are_refused_at_level_0(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MeshStrategy(mesh="2", dp={"sharding_level": 0, key: "bf16"})
    assert_told(caught.value, f"dp.{key}=bf16 with dp.sharding_level=0", write=f"dp.sharding_level=3 dp.{key}=bf16")


@pytest.mark.parametrize(
    "case",
    tiered(["hybrid-3", "hybrid-accumulate-1", "hybrid-accumulate-2", "four-3", "three-left-over"], ["hybrid-3"]),
)
def test_four_ranks_equal_one_process(one: Group, four: Group, case: str) -> None:
    check(one, four, case, 4)


def test_initial_weights_do_not_depend_on_the_mesh(two: Group, four: Group, group_of: GroupOf) -> None:
    alone = group_of(SCRIPT, "alone", 1).read("initial_weights")
    assert alone == two.read("initial_weights") == two.read("initial_weights", 1) == four.read("initial_weights", 3)


def test_hooks_counters_and_outputs_are_those_of_one_process(one: Group, two: Group) -> None:
    expected = one.read("hooks-3")
    assert expected["calls"] == 12, "6 batches an epoch, each through the step once"
    assert expected["outputs"] == [["extra", "loss"]] * 12
    assert [two.read("hooks-3", rank)["lines"] for rank in (0, 1)] == [expected["lines"]] * 2


def test_model_with_example_input_array(one: Group, two: Group) -> None:
    assert one.read("summary_of_example_input") == two.read("summary_of_example_input", 1) == 379


def test_it_is_told_once_that_an_assigned_gradient_is_not_averaged(ranks: Group) -> None:
    by_backward, by_hand = ranks.read("assigned_gradients")
    assert by_backward == []
    assert len(by_hand) == 1 and "dp: the gradient of encoder.0.weight was assigned" in by_hand[0]


@pytest.mark.parametrize("case", ["noise_of_an_optimizer", "noise_of_a_bare_optimizer"])
def test_replicas_stay_alike_where_their_optimizer_draws(ranks: Group, case: str) -> None:
    one, other = ranks.read_all(case)
    assert one["weights"] == other["weights"] and one["next"] != other["next"]
    first, second, third = one["weights"]
    moves = [[b - a for a, b in zip(*pair, strict=True)] for pair in ((first, second), (second, third))]
    assert differences(*moves, 1e-4) != []


def test_refusals_come_before_the_first_step(ranks: Group) -> None:
    assert ranks.read("refusals", 0) == ranks.read("refusals", 1)
    assert ranks.read("refusals") == [
        "StochasticWeightAveraging: it averages whole weights; here each rank may hold a part\n"
        "  allowed: averaging the weights of saved checkpoints",
        "WeightAveraging: it averages whole weights; here each rank holds a part\n"
        "  allowed: sharding level 0, or averaging the weights of saved checkpoints\n"
        "  write:   dp.sharding_level=0",
        "WeightAveraging: it averages whole weights; here each rank holds a part\n"
        "  allowed: a mesh with sharding level 0, without mp, or averaging the weights of saved checkpoints",
        "dp: filter is of torch.complex64, and complex numbers can't be sharded\n"
        "  allowed: parameters that stay whole on every rank\n"
        "  write:   dp=ddp",
        "dp: gain (float64) and encoder.0.weight (float32) are trained in one block, and sharded gradients have one "
        "type\n"
        "  allowed: parameters that stay whole on every rank\n"
        "  write:   dp=ddp",
        "dp: words.embed has sparse gradients, which can't be sharded\n"
        "  allowed: sparse=False for words.embed, or parameters that stay whole on every rank\n"
        "  write:   dp=ddp",
        "mesh=2: this module was parallelised before, for mesh=2 with other options\n"
        "  allowed: a MeshStrategy with the same options, or a new module that loads a checkpoint",
    ]
    assert ranks.read("averaged_weights_at_level_0") == "trained"


@pytest.mark.parametrize(
    ("level", "sharded"),
    [
        pytest.param(0, set(), id="0"),
        pytest.param(1, {"parameters", "state", "complete"}, id="1"),
        pytest.param(2, {"parameters", "state", "accumulating", "complete"}, id="2"),
        pytest.param(3, {"parameters", "state", "accumulating", "complete"}, id="3"),
    ],
)
def test_bytes_per_rank(ranks: Group, level: int, sharded: set[str]) -> None:
    for rank in (0, 1):
        found = ranks.read("bytes_per_rank", rank)[str(level)]
        padding = 64  # rows that do not divide, and the one scalar
        wholes = {
            "parameters": "whole",
            "state": "whole_state",
            "accumulating": "whole_trained",
            "complete": "whole_trained",
        }
        for what, whole in wholes.items():
            limit = found[whole] // 2 if what in sharded else found[whole]
            assert limit - padding <= found[what] <= limit + padding, what


def test_whole_parameters_are_freed_after_use_at_level_3(ranks: Group) -> None:
    for rank in (0, 1):
        found = ranks.read("freed_between_uses", rank)
        (kept, block), (freed, _) = found["2"], found["3"]
        assert kept == 3 * block
        assert freed == block


def test_blocks_are_gathered_once_a_step_below_level_3(ranks: Group) -> None:
    found = ranks.read("gathers_of_a_step")
    for level in ("1", "2"):
        assert found[level] == [4, 4], "three blocks and the rest"
    assert found["3"] == [8, 3 * 8], "each for its forward and for its backward"


def test_what_stays_gathered_is_not_used_after_a_step(ranks: Group) -> None:
    found = ranks.read("step_without_a_last_backward")
    assert found["2"] == pytest.approx(found["3"], rel=1e-6)


def test_parameter_unused_on_one_rank_stays_the_same_on_both(ranks: Group) -> None:
    found = ranks.read("unused_on_one_rank", 0)
    assert found == ranks.read("unused_on_one_rank", 1)
    never = [f"never.{name} {step}" for name in ("bias", "weight") for step in range(3)]
    # batch 2, where no rank uses the other one, is a step of its own only where nothing accumulates
    assert found["0 1"][1] == sorted([*never, "sometimes.bias 2", "sometimes.weight 2"])
    assert found["0 2"][1] == never
    for level in "123":
        for every in "12":
            assert differences(found[f"0 {every}"], found[f"{level} {every}"], 1e-6) == []


def test_collectives_are_over_the_ranks_whose_data_differ(ranks: Group) -> None:
    assert ranks.read("reductions", 0) == ranks.read("reductions", 1)
    assert ranks.read("reductions") == {
        "mean": 1.5, "sum": 3.0, "integers": 0.5, "max": 2.0, "all": False, "any": True, "gathered": [1.0, 2.0],
        "gradient": [3.0], "broadcast": {"rank": 0}, "dp": [True, 2],
    }  # fmt: skip


def test_ranks_draw_different_random_numbers(ranks: Group) -> None:
    drawn = ranks.read("augmentation_differs", 0) + ranks.read("augmentation_differs", 1)
    assert len(set(drawn)) == len(drawn) == 32


def test_statistics_are_the_first_ranks_wherever_they_count(ranks: Group) -> None:
    ((training_0, validation_0), told), ((training_1, validation_1), also_told) = (
        ranks.read("statistics_agree", rank) for rank in (0, 1)
    )
    assert training_0 != training_1
    assert validation_0 == validation_1 == training_0
    assert len(told) == 1 and told[0].startswith("lately: ") and also_told == []


def test_a_plan_that_was_asked_for_has_to_shard_something(ranks: Group) -> None:
    for rank in (0, 1):
        assert_told(ranks.read("nothing_to_shard", rank), "mp", "nothing in Sequential", write=None)


def test_a_stream_is_shared_out_unless_it_does_so_itself(ranks: Group) -> None:
    first, second = (ranks.read("streams", rank) for rank in (0, 1))
    assert (first["shared"], second["shared"]) == ([0.0, 1.0, 4.0, 5.0, 8.0], [2.0, 3.0, 6.0, 7.0, 9.0])
    assert (first["left alone"], second["left alone"]) == ([0.0, 2.0, 4.0, 6.0, 8.0], [1.0, 3.0, 5.0, 7.0, 9.0])
    for rank in (first, second):
        assert_told(rank["refused"], "dataloader", "other samples", write="Trainer(use_distributed_sampler=False)")


def test_a_sampler_that_divides_a_replica_is_refused() -> None:
    """What ranks along mp, cp and pp compute together is of the same samples."""

    def share(replicas: int, rank: int, dp_rank: int, dp: int, world: int, way: str = "sampler") -> Any:
        data = TensorDataset(torch.arange(8))
        sampler = DistributedSampler(data, replicas, rank)
        options: dict[str, Any] = {
            "sampler": {"batch_size": 2, "sampler": sampler},
            "order": {"batch_size": 2, "sampler": Order(sampler)},
            "batches": {"batch_sampler": BatchSampler(sampler, 2, False)},
        }[way]
        loader = DataLoader(data, **options)
        return Batches("global").share(loader, dp_rank, dp, world) is loader

    assert share(2, 1, 1, 2, 4) and share(4, 3, 3, 4, 4) and share(1, 0, 0, 1, 2) and share(2, 1, 1, 2, 4, "order")
    for wrong in ((4, 1, 0, 2, 4), (2, 0, 1, 2, 4), (2, 1, 0, 1, 2)):
        for way in ("sampler", "order", "batches"):
            with pytest.raises(ConfigError) as caught:
                share(*wrong, way)
            assert_told(
                caught.value, f"dataloader: DistributedSampler(num_replicas={wrong[0]}, rank={wrong[1]})",
                f"number {wrong[2]} of {wrong[3]} along dp",
                write="DistributedSampler(dataset, **trainer.strategy.distributed_sampler_kwargs)",
            )  # fmt: skip


def test_predictions_tell_which_samples_they_are_of(ranks: Group) -> None:
    assert [ranks.read("predicted", rank)["indices"] for rank in (0, 1)] == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7]]]


def test_a_rank_for_which_nothing_is_left_predicts_nothing(ranks: Group) -> None:
    first, second = (ranks.read("predicted", rank) for rank in (0, 1))
    assert first["values"] == [[[0, 1], [4, 5], [8]], [[5, 6], [9]]]
    assert second["values"] == [[[2, 3], [6, 7]], [[7, 8]]]
    assert first["written"] == [[part, [f"it is {number}" for number in part], part] for part in ([0, 1], [4, 5], [8])]
    written = [[part, [f"it is {number}" for number in part], part] for part in ([2, 3], [6, 7], [])]
    assert second["written"] == written, "called alike, for what is collective"


def test_an_evaluated_batch_has_a_weight_of_its_own() -> None:
    """That of the last batch that was trained on is no news for the losses of routers."""
    batches: Any = Batches("global")
    batches._trainer = SimpleNamespace(_evaluation_loop=SimpleNamespace(_combined_loader=None), _results=None)
    batches._weight = 0.0
    with batches.evaluation_step(pl.LightningModule()):
        assert batches.weight == 1.0
    assert batches.weight == 0.0


def test_a_batch_of_several_loaders_counts_where_this_rank_has_a_part_of_each() -> None:
    """Of a loader that has ended it has none, and of what is repeated to keep step it has none that counts."""
    eight: Any = range(8)  # data enough
    loaders = [DistributedLoader(DataLoader(eight), Share(1, 2), world=1) for _ in range(2)]
    combined, batches = SimpleNamespace(_mode="max_size", flattened=loaders), cast(Any, Batches("global"))
    batches._trainer = SimpleNamespace(_evaluation_loop=SimpleNamespace(_combined_loader=combined), _results=None)

    def weight(*drawn: float | None) -> float:
        for loader, item in zip(loaders, drawn, strict=True):
            loader.weights.extend([] if item is None else [item])
        with batches.evaluation_step(pl.LightningModule()):
            return batches.weight

    assert (weight(1, 1), weight(0.75, 1), weight(0.75, None), weight(0, None), weight(0, 0)) == (1, 1, 0.75, 0, 0)
    with pytest.raises(ConfigError) as caught:
        weight(1, 0)
    assert_told(
        caught.value,
        "dataloader: CombinedLoader(mode='max_size')",
        "several loaders",
        write="DataLoader(..., drop_last=True)",
    )
    combined.flattened = [loaders[0], DataLoader(eight)]  # the second one shares out its data itself
    loaders[0].weights.append(0)
    with pytest.raises(ConfigError, match="several loaders"), batches.evaluation_step(pl.LightningModule()):
        pass


def test_ranks_do_not_look_for_a_batch_size_each() -> None:
    trainer: Any = SimpleNamespace(callbacks=[pl.callbacks.BatchSizeFinder()])
    refuse_callbacks(trainer, parse_mesh("1"), 0)
    with pytest.raises(ConfigError, match="BatchSizeFinder"):
        refuse_callbacks(trainer, parse_mesh("mp2"), 0)


@pytest.mark.parametrize(("mesh", "ep", "told"), [("mp2", 1, "mp=2"), ("pp2", 1, "pp=2"), ("dp2", 2, "ep=2")])
def test_a_scaled_loss_is_refused_where_not_everything_sees_the_scale(mesh: str, ep: int, told: str) -> None:
    scaled: Any = SimpleNamespace(scaler=object())
    refuse_scaler(scaled, parallel_config("dp2xcp2", cp="gather"))
    refuse_scaler(Precision(), parallel_config(mesh, ep=ep))
    with pytest.raises(ConfigError) as caught:
        refuse_scaler(scaled, parallel_config(mesh, ep=ep))
    key = f"precision=16-mixed with {told}"
    assert_told(caught.value, key, "scaled", allowed=("dp and cp",), write="precision=bf16-mixed")


def test_an_unknown_batch_size_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        MeshStrategy(batch_size="per rank")
    assert_told(caught.value, "batch_size='per rank'", "per_rank", write="MeshStrategy(batch_size='per_rank')")
