"""`to_distributed`: equal to one process on 1 to 8 devices, every weight trained, batches whole, refusals."""

from __future__ import annotations

import functools
import os
import re
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from autolaunch_strategies import ConfigError, InputSpec, ToDistributedConfig
from autolaunch_strategies.data_parallel.first_batch import first_batch
from autolaunch_strategies.data_parallel.loader import Share, check_loader, cut_batch, global_batch_size
from autolaunch_strategies.paddle.example_batch import example_of
from tests import ROOT
from tests.support.ranks import Group, GroupOf, start, torchrun
from tests.support.tiers import tiered

SCRIPT = Path(__file__).with_name("cases.py")
EXAMPLE = ROOT / "examples" / "to_distributed.py"
RANKS = {"one": 1, "two": 2, "three": 3, "four": 4, "six": 6, "eight": 8}


@pytest.fixture(scope="module")
def groups(group_of: GroupOf) -> Callable[[str], Group]:
    return functools.cache(lambda name: group_of(SCRIPT, name, RANKS[name]))


# The cases compare losses and every weight with one process themselves; a difference is an exception on its rank.

TAILS = [f"tail_of_{size}_level{level}" for size in (6, 5) for level in (0, 3)]
OF_TWO = [
    "shuffled_twice",
    "node_num_none",
    "spec_of_inputs",
    "spec_as_in_paddle",
    *(f"variant_{mesh}_level{level}" for mesh in ("2", "1x2") for level in (0, 3)),
    *(f"gpt2_of_transformers_{mesh}" for mesh in ("2", "1x2")),
    *(f"gqa_llama_{mesh}_recomputed" for mesh in ("2", "1x2")),
    "staged_on_one_stage",
    *TAILS,
    "tail_below_ranks",
    "tail_of_transformers",
    "groups_frozen_parameters_and_scheduler",
    "sgd_momentum",
    "adafactor",
    "loaders",
]
OF_FOUR = [
    "two_nodes",
    *(f"sequences_2x2_level{level}" for level in range(4)),
    "hybrid",
    "staged",
    "divided_sequences",
    "tail_of_1_2x2",
    "groups_frozen_parameters_and_scheduler",
    "ranks_of_one_replica_get_the_same",
]
MODELS = {
    "gqa_llama": ["one", "two", "three", "four", "six"],
    "layer_norm_bias_gelu_sdpa": ["one", "two", "three", "four"],
    "convolutions": ["one", "two", "three"],
    "perceptron": ["two", "three"],
    "gpt2_of_transformers": ["one", "two"],
    "looks_at_values": ["one", "two"],
    "batch_of_4_heads_of_6": ["three"],
    "batch_of_2": ["six"],
}


@pytest.mark.parametrize(
    ("model", "group"),
    tiered(
        [(model, group) for model, where in MODELS.items() for group in where],
        lambda item: item[1] in ("one", "two") and item != ("gpt2_of_transformers", "two"),
        lambda item: item[1] in ("three", "four", "six") and item != ("batch_of_2", "six"),
    ),
)
def test_what_the_planner_chooses_trains_as_one_process(groups: Any, model: str, group: str) -> None:
    found = [groups(group).read(model, rank) for rank in range(RANKS[group])]
    assert all(one == found[0] for one in found)
    sizes = [int(size) for size in found[0]["mesh"].split("x")]
    assert torch.tensor(sizes).prod() == RANKS[group]
    if model in ("convolutions", "perceptron"):
        assert found[0]["mesh"] == str(RANKS[group])  # nothing can be divided
    if model == "batch_of_4_heads_of_6":
        assert found[0]["mesh"] == "1x3"  # 3 does not divide the batch
    if model == "batch_of_2":
        assert found[0]["mesh"] in ("1x6", "2x3")
    assert ("can't be profiled" in found[0]["told"]) == (model == "looks_at_values")
    assert "because" in found[0]["told"]


LONG = {
    "variant_2_level0", "variant_1x2_level3", "gpt2_of_transformers_2", "gqa_llama_1x2_recomputed",
    "tail_of_6_level0", "variant_1x2_level0", "tail_of_5_level3", "tail_of_transformers", "sgd_momentum",
}  # fmt: skip
"""What is left when every model has met a mesh and every level a batch that does not divide."""


@pytest.mark.parametrize("case", tiered(OF_TWO, lambda case: case not in LONG, ["variant_1x2_level0"]))
def test_on_two_processes(groups: Any, case: str) -> None:
    for rank in range(2):
        groups("two").read(case, rank)


@pytest.mark.parametrize("case", tiered([*TAILS, "tail_below_ranks", "loaders"], [], [*TAILS[1:], "loaders"]))
def test_on_three_processes(groups: Any, case: str) -> None:
    for rank in range(3):
        groups("three").read(case, rank)


@pytest.mark.parametrize(
    "case",
    tiered(
        OF_FOUR,
        ["sequences_2x2_level3", "staged"],
        [*(f"sequences_2x2_level{level}" for level in range(3)), "groups_frozen_parameters_and_scheduler"],
    ),
)
def test_on_four_processes(groups: Any, case: str) -> None:
    for rank in range(4):
        found = groups("four").read(case, rank)
        if case.startswith("sequences"):
            assert found["sequence"]


@pytest.mark.parametrize("group", tiered(["one", "two", "four", "eight"], ["two"], ["four", "eight"]))
def test_example(groups: Any, group: str) -> None:
    found = [groups(group).read("example", rank) for rank in range(RANKS[group])]
    assert all(one["losses"] == found[0]["losses"] for one in found)
    printed = [float(value) for value in re.findall(r"^step \d: loss (\S+)$", found[0]["printed"], re.MULTILINE)]
    assert printed == pytest.approx(groups("one").read("example")["losses"], rel=1e-5) and len(printed) == 4
    assert not any(one["printed"] for one in found[1:])


@pytest.mark.parametrize(
    ("group", "case", "sequence"),
    tiered(
        [
            ("two", "example_1x2", True),
            ("two", "example_1x2_without_sequences", False),
            ("four", "example_2x2", True),
            ("four", "example_1x4", True),
            ("four", "example_two_nodes", True),
            ("eight", "example_4x2", True),
            ("eight", "example_1x8", True),
        ],
        [("two", "example_1x2", True)],
        lambda case: case[1] not in ("example_1x2", "example_2x2"),
    ),
)
def test_example_on_a_mesh(groups: Any, group: str, case: str, sequence: bool) -> None:
    for rank in range(RANKS[group]):
        assert groups(group).read(case, rank)["sequence"] == sequence


def test_example_as_a_script() -> None:
    """What a person runs; the choice and its reasons are shown once."""
    done = start(torchrun(2, str(EXAMPLE), "--small"))
    assert done.returncode == 0, done.stdout[-4000:]
    assert len(re.findall(r"^step \d: loss \S+$", done.stdout, re.MULTILINE)) == 4
    assert len(re.findall(r"^to_distributed: ", done.stdout, re.MULTILINE)) == 1 and "  because " in done.stdout


# --- refusals -----------------------------------------------------------------------------------------------------


def test_refusals(groups: Any) -> None:
    found = groups("two").read("refusals")
    assert found == groups("two").read("refusals", 1)
    one_call = "it is parallelised already\n  allowed: one call for each model"
    assert found == {
        "twice": f"model=Variant: {one_call}",
        "world": "device_num=4, node_num=1: 4 processes are needed, one for each device, but 2 were started\n"
        "  allowed: device_num x node_num as many as torchrun starts\n"
        "  write:   torchrun --nproc-per-node 4 <script>",
        "world of nodes": "device_num=4, node_num=2: 8 processes are needed, one for each device, but 2 were started\n"
        "  allowed: device_num x node_num as many as torchrun starts\n"
        "  write:   torchrun --nnodes 2 --nproc-per-node 4 --rdzv-endpoint <first node>:29500 <script>",
        "device_num": "device_num=0: not a number of devices\n  allowed: a whole number, 1 or more",
        "node_num": "node_num='2': not a number of devices\n  allowed: a whole number, 1 or more",
        "model": "model: a torch.nn.Module is needed, not function\n"
        "  allowed: to_distributed(model, optimizer, dataloader, device_num)",
        "optimizer": "optimizer: a torch.optim.Optimizer is needed, not str\n"
        "  allowed: to_distributed(model, optimizer, dataloader, device_num)",
        "dataloader": "dataloader: a torch.utils.data.DataLoader is needed, not list\n"
        "  allowed: to_distributed(model, optimizer, dataloader, device_num)",
        "sampler": "dataloader: DistributedSampler: it shares out the data among ranks already, and each of them would "
        "get a part of its part\n"
        "  allowed: the loader of one process: shuffle=True, or a sampler that goes through all data; without "
        "set_epoch\n  write:   DataLoader(dataset, batch_size=<of all ranks>, shuffle=True)",
        "config": "config: a ToDistributedConfig is needed, not dict\n"
        "  allowed: fields: input_spec, sequence_parallel, axes, mesh, dp, mp, pp, cp, recompute, compile, ep, "
        "hardware\n"
        "  write:   ToDistributedConfig(sequence_parallel=...)",
        "input_spec": "config.input_spec: a list of InputSpec is needed, not a list of list\n"
        "  allowed: one InputSpec for each tensor that the model is called with\n"
        '  write:   ToDistributedConfig(input_spec=[InputSpec([4, 1024], "int64", "input_ids")])',
        "sequence_parallel": "config.sequence_parallel='yes': not True or False\n  allowed: True or False",
        "axes": "config.axes=('dp', 'ep'): no axis is called 'ep'\n  allowed: dp, mp, pp, cp",
        "mesh": "config.mesh=2x2: the mesh has 4 ranks, but device_num x node_num is 2\n  allowed: a mesh of 2 ranks",
        "batch": "config.mesh=2 with batches of 3: 2 ranks along dp can't share out 3 samples evenly, and the batch of "
        "all ranks stays what it is\n  allowed: a batch size that 2 divides, or a dp that divides 3\n"
        "  write:   DataLoader(..., batch_size=4)",
        "no mesh of this model": found["no mesh of this model"],
        "divided": found["divided"],
        "spec": "InputSpec(dtype='int65'): no type of torch\n  allowed: int64, float32, bfloat16, ...",
    }
    told = found["no mesh of this model"].splitlines()
    assert told[0] == "device_num x node_num = 2 with batches of 3: no way to run on 2 devices is left"
    assert "    batches of 3 can't be shared out among 2 ranks along dp" in told
    assert told[-1].startswith("  allowed: a loader with batch_size=4; 1 device; ")
    assert found["divided"].startswith("mp: nothing in Scale can be sharded among 2 ranks")


def test_a_batch_that_nothing_divides_is_refused(groups: Any) -> None:
    """Batches of 4 on 3 devices, 4 heads: it says what to change, and nothing is shrunk."""
    for rank in range(3):
        found = groups("three").read("no_way_is_left", rank)
        for told in found.values():
            lines = told.splitlines()
            assert lines[0] == "device_num x node_num = 3 with batches of 4: no way to run on 3 devices is left"
            assert lines[1].strip() == "batches of 4 can't be shared out among 3 ranks along dp"
            assert lines[-1].startswith("  allowed: a loader with batch_size=6; 1 or 2 devices; ")
        assert "mp" in found["three"].splitlines()[2]


def test_stages_need_even_batches(groups: Any) -> None:
    for rank in range(4):
        assert groups("four").read("staged_tail_is_refused", rank) == (
            "dataloader: a batch of 1 samples can't be shared out evenly among 2 ranks along dp, which stages and "
            "sharded sequences need\n  allowed: drop_last=True, or a batch size that divides"
        )


def test_without_torchrun_it_says_what_to_start() -> None:
    from autolaunch_strategies import to_distributed

    assert "RANK" not in os.environ
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ConfigError) as caught:
        to_distributed(model, optimizer, DataLoader(TensorDataset(torch.ones(4, 2)), 4), 4)
    assert str(caught.value) == (
        "device_num=4, node_num=1: 4 processes are needed, one for each device, but 1 was started\n"
        "  allowed: device_num x node_num as many as torchrun starts\n  write:   torchrun --nproc-per-node 4 <script>"
    )


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        pytest.param(lambda: InputSpec("4"), "a shape is a list of sizes", id="shape"),
        pytest.param(lambda: InputSpec([4, 0]), "0 is no size", id="size"),
        pytest.param(lambda: InputSpec([4, 1.5]), "1.5 is no size", id="size type"),
        pytest.param(lambda: ToDistributedConfig(mesh="2y2").check(), "not a mesh shape", id="mesh"),
        pytest.param(lambda: ToDistributedConfig(dp=7).check(), "not one of the choices", id="level"),
        pytest.param(lambda: ToDistributedConfig(mp="none such").check(), "no such plan", id="mp"),
        pytest.param(
            lambda: ToDistributedConfig(recompute="some").check(), "no such way of activation checkpointing", id="again"
        ),
    ],
)
def test_wrong_configs(wrong: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        wrong()
    assert caught.value.problem == problem


# --- shares of batches --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("size", range(1, 20))
def test_shares_are_the_batch_and_weights_make_its_mean(size: int, count: int) -> None:
    values = torch.arange(size, dtype=torch.float64) ** 2
    shares = [Share(index, count) for index in range(count)]
    bounds = [share.bounds(size) for share in shares]
    assert [position for begin, end in bounds for position in range(begin, end)] == list(range(size))
    taken = [values[slice(*share.taken(size))] for share in shares]
    mean = sum(share.weight(size) * part.mean() for share, part in zip(shares, taken, strict=True)) / count
    assert mean == pytest.approx(values.mean().item()) and all(len(part) for part in taken)


def test_cut_batch_follows_what_a_batch_may_be() -> None:
    x = torch.arange(8).view(4, 2)
    batch = {"x": x, "parts": (x[:, 0], [x, x]), "names": ["a", "b", "c", "d"], "step": 3, "scale": torch.tensor(2.0)}
    size, part = cut_batch(batch, Share(1, 2))
    assert size == 4 and part["x"].tolist() == [[4, 5], [6, 7]] and part["names"] == ["c", "d"]
    assert isinstance(part["parts"], tuple) and part["parts"][0].tolist() == [4, 6]
    assert [item.tolist() for item in part["parts"][1]] == [[[4, 5], [6, 7]]] * 2
    assert part["step"] == 3 and part["scale"] is batch["scale"]
    assert cut_batch(x.numpy(), Share(0, 2))[1].tolist() == [[0, 1], [2, 3]]
    tokenized = cut_batch(UserDict(input_ids=x), Share(0, 2))[1]  # what tokenizers of transformers make is one
    assert type(tokenized) is UserDict and tokenized["input_ids"].tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        pytest.param([torch.ones(4), torch.ones(3)], "should be one number, but are 3, 4", id="sizes"),
        pytest.param({"x": 1}, "should be one number, but are none", id="nothing"),
        pytest.param([torch.ones(4), object()], "its batches hold a object", id="stranger"),
    ],
)
def test_batches_that_cannot_be_cut(batch: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        cut_batch(batch, Share(0, 2))


class Counting(Dataset):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index


class Endless(IterableDataset):
    def __init__(self) -> None:
        self.numbers = iter(range(100))

    def __iter__(self) -> Any:
        return self.numbers


def test_the_first_batch_is_looked_at_without_a_trace() -> None:
    torch.manual_seed(4)
    before = torch.get_rng_state()
    loader = DataLoader(Counting(), 4, shuffle=True)
    looked_at = first_batch(loader)
    assert torch.equal(before, torch.get_rng_state())
    assert sorted(looked_at.tolist()) == sorted(set(looked_at.tolist())) and len(looked_at) == 4
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(Counting(), 4, shuffle=True, generator=generator)
    state = generator.get_state()
    first_batch(loader)
    assert torch.equal(state, generator.get_state())
    once = DataLoader(Endless(), 4)
    assert first_batch(once) is None and next(iter(once)).tolist() == [0, 1, 2, 3]


def test_batch_sizes() -> None:
    assert global_batch_size(DataLoader(Counting(), 4)) == 4
    batches = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(Counting()), 5, False)
    assert global_batch_size(DataLoader(Counting(), batch_sampler=batches)) == 5
    assert global_batch_size(DataLoader(Counting(), batch_size=None)) is None


def test_orders_that_differ_between_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="in_order=True"):
        check_loader(DataLoader(Counting(), 4, num_workers=2, in_order=False))


# --- what a model is called with ----------------------------------------------------------------------------------


class Called(nn.Module):
    def forward(self, ids: Any, mask: Any = None, labels: Any = None) -> None: ...


IDS, MASK, LABELS = torch.ones(4, 6, dtype=torch.long), torch.ones(4, 6), torch.zeros(4)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        pytest.param((IDS, LABELS), ([2, 6],), id="pair"),
        pytest.param(IDS, ([2, 6],), id="tensor"),
        pytest.param({"ids": IDS, "mask": MASK, "labels": LABELS, "other": MASK}, {"ids": [2, 6], "mask": [2, 6]},
                     id="names"),
        pytest.param(({"ids": IDS}, LABELS), {"ids": [2, 6]}, id="dict first"),
        pytest.param({"x": IDS, "y": LABELS}, ([2, 6],), id="other names"),
    ],
)  # fmt: skip
def test_what_a_batch_calls_a_model_with(batch: Any, expected: Any) -> None:
    found = example_of(Called(), None, batch, 4)
    assert found is not None and found.samples == 4 and found.positions == 6
    made = found.with_samples(2)
    shapes = {name: list(item.shape) for name, item in made.items()} if isinstance(made, dict) else tuple(
        list(item.shape) for item in made
    )  # fmt: skip
    assert shapes == expected


def test_specs() -> None:
    named = example_of(Called(), [InputSpec([None, None], "int64", "ids"), InputSpec([4], "int64", "labels")],
                       (IDS, LABELS), 8)  # fmt: skip
    assert named is not None and isinstance(named.inputs, dict) and list(named.inputs) == ["ids"]
    assert named.inputs["ids"].shape == (8, 6)
    by_place = example_of(Called(), [InputSpec([4, -1], "float32", "seq")], IDS, 4)
    assert by_place is not None and isinstance(by_place.inputs, tuple)
    assert by_place.inputs[0].dtype == torch.int64 and by_place.inputs[0].shape == (4, 6)
    alone = example_of(Called(), [InputSpec([4, None], torch.int32)], None, 4)
    assert alone is not None and alone.inputs[0].shape == (4, 1024) and alone.inputs[0].dtype == torch.int32
