"""`parallelize` with an ordinary training loop: equal to one process, every optimizer, refusals, random numbers."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autolaunch_strategies import (
    ColWiseParallel,
    ConfigError,
    MeshShape,
    ProcessMesh,
    get_mesh,
    parallelize,
    set_mesh,
)
from autolaunch_strategies.loop.process_mesh import process_mesh
from tests import ROOT
from tests.support.ranks import Group, GroupOf, Ranks, python, start, torchrun
from tests.support.tiers import but_one_in, in_turn, tiered

SCRIPT = Path(__file__).with_name("cases.py")
EXAMPLE = ROOT / "examples" / "parallelize_llama.py"
ADAPTIVE = ["Adam", "AdamW", "AdamW_foreach", "AdamW_fused", "Adamax", "Adagrad", "Adadelta", "NAdam", "RAdam"]
OPTIMIZERS = [*ADAPTIVE, "SGD", "RMSprop", "Rprop", "ASGD", "Adafactor", "Muon"]
CONTINUED = [(name, level) for name in OPTIMIZERS for level in (0, 3)]


@pytest.fixture(scope="module")
def eight(group_of: GroupOf) -> Group:
    return group_of(SCRIPT, "eight", 8)


@pytest.fixture(scope="module")
def optimizers(group_of: GroupOf) -> Group:
    return group_of(SCRIPT, "optimizers", 4)


# The cases compare losses and every weight with one process themselves; a difference is an exception on its rank.


@pytest.mark.parametrize(
    "case",
    tiered(
        [
            "N1_dp2",
            "N2_mp2",
            "N5_mp2_sequence",
            "N5_mp2_sequence_transposed",
            "N5_mp2_sequence_odd_length",
            "N7_dp2_level1",
            "N7_dp2_level2",
            "N7_dp2_level3",
            "N11_tied_dp2_level0",
            "N11_tied_dp2_level1",
            "N13_tied_mp2",
            "N13_tied_mp2_only_embedding_planned",
            "N14_fused_mp2",
            "N18_accumulation_dp2_level0",
            "N18_accumulation_dp2_level1",
            "N18_accumulation_mp2",
            "titan_mp2",
            "titan_loss_parallel",
            "titan_tied",
            "titan_mixed_with_ours",
            "same_as_torch_parallelize_module",
            "values_and_random_state_are_shared",
            "trained_only_later",
            "torch_mesh_is_taken",
            "experts_dp2_ep2_level3",
            "experts_mp2_ep2",
        ],
        lambda case: (
            case
            not in (
                "N5_mp2_sequence",
                "N7_dp2_level1",
                "N11_tied_dp2_level0",
                "N18_accumulation_dp2_level0",
                "N18_accumulation_mp2",
                "titan_tied",
                "N2_mp2",
                "experts_dp2_ep2_level3",
                "experts_mp2_ep2",
            )
        ),
        ["N5_mp2_sequence", "N18_accumulation_mp2", "titan_tied"],
    ),
)
def test_on_two_processes(two: Group, case: str) -> None:
    for rank in range(2):
        two.read(case, rank)


@pytest.mark.parametrize(
    "case",
    tiered(
        [
            *(f"N3_N8_dp2_mp2_level{level}" for level in (1, 2)),
            *(f"N6_dp2_mp2_sequence_level{level}" for level in (0, 3)),
            "N13_tied_dp2_mp2_level3",
            "N14_fused_dp2_mp2_level2",
            "ranks_laid_out_otherwise",
            "a_mesh_like_one_whose_groups_have_ended",
            "titan_dp2_mp2_level0",
            "titan_dp2_mp2_level3",
            "experts_dp2_mp2_ep2_level0",
            "experts_dp2_mp2_ep4_level2",
        ],
        [
            "N3_N8_dp2_mp2_level1",
            "N6_dp2_mp2_sequence_level3",
            "ranks_laid_out_otherwise",
            "a_mesh_like_one_whose_groups_have_ended",
        ],
        [
            "N3_N8_dp2_mp2_level2",
            "N6_dp2_mp2_sequence_level0",
            "N14_fused_dp2_mp2_level2",
            *(f"titan_dp2_mp2_level{level}" for level in (0, 3)),
        ],
    ),
)
def test_on_four_processes(four: Group, case: str) -> None:
    for rank in range(4):
        four.read(case, rank)


@pytest.mark.every  # the example below runs on eight
@pytest.mark.parametrize("case", ["N4_dp4_mp2_sequence_level3", "N2_dp2_mp4"])
def test_on_eight_processes(eight: Group, case: str) -> None:
    for rank in range(8):
        eight.read(case, rank)


@pytest.mark.parametrize(
    ("name", "level"),
    tiered(CONTINUED, in_turn(OPTIMIZERS, (0, 3)), but_one_in(3, CONTINUED, in_turn(OPTIMIZERS, (0, 3)))),
)
def test_every_optimizer_continues_as_on_one_process(optimizers: Group, name: str, level: int) -> None:
    if name == "Muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    optimizers.read(f"{name}_level{level}")


@pytest.mark.parametrize("case", ["groups_frozen_parameters_and_scheduler", "made_afterwards"])
def test_optimizer_keeps_what_it_was_told(optimizers: Group, case: str) -> None:
    for rank in range(4):
        optimizers.read(case, rank)


def test_no_dense_optimizer_of_torch_is_forgotten() -> None:
    tested = {name.split("_")[0] for name in OPTIMIZERS} | {"Optimizer"}
    known = {name for name, item in vars(torch.optim).items() if isinstance(item, type)} - tested
    assert known - {"Muon"} == {"LBFGS", "SparseAdam"}  # refused: one vector of everything; not for dense gradients


@pytest.mark.parametrize("level", range(4))
def test_bytes_of_parameters_gradients_and_state(four: Group, level: int) -> None:
    found = four.read("P4_bytes_of_each_level")
    dp = 1 if level == 0 else 2
    planned, unplanned = 32 * 48 // 2 // dp, 32 // dp
    assert found[f"{level} model.layers.0.mlp.up_proj.weight"] == [planned] * 3 + [32 * 48]
    assert found[f"{level} model.norm.weight"] == [unplanned] * 3 + [32]


def test_refusals(two: Group) -> None:
    found = two.read("refusals")
    assert found == {
        "model twice": "model=Small: it is parallelised already\n  allowed: one call for each model",
        "optimizer twice": "optimizer=SGD: it is parallelised already\n  allowed: one call for each optimizer",
        "stranger": "optimizer=SGD: group 0 has a parameter of shape (3,) that is not the model's\n"
        "  allowed: an optimizer over parameters of the model; put other modules into one model with it",
        "lbfgs": "optimizer=LBFGS: it joins all parameters into one vector\n  allowed: any other optimizer",
        "meta": "the model's scale: is on the meta device and has no values\n  allowed: a model built on a real device",
        "world size": "mesh=1: the mesh has 1 ranks (dp=1), but 2 processes were started\n"
        "  allowed: one process per rank: devices x nodes = 1\n  write:   mesh=2",
        "three dims": found["three dims"],
        "torch style": found["torch style"],
    }
    assert "RowWiseParallel: a parameter of 3 dims" in found["three dims"]
    assert "torch can't apply it to LayerNorm" in found["torch style"]


def test_error_names_module_and_rule(two: Group) -> None:
    assert two.read("mixed_error_names_module_and_rule").splitlines() == [
        "RuntimeError: the model (Odd): the plan has sharded a tensor here, because of mp.plan: block.up, and torch "
        "can't do this with it: aten.add.Tensor got mixed torch.Tensor and DTensor, need to convert all torch.Tensor "
        "to DTensor before calling distributed operators!",
        "  allowed: tensors that stay sharded only between column-wise and row-wise layers",
        "  write:   block.up: {ColWiseParallel: {gather_output: true}}",
    ]


def test_dropout(two: Group) -> None:
    found = two.read("dropout")
    assert found["share dropped here"] == pytest.approx(0.25, abs=0.02)
    assert found["share dropped there"] == pytest.approx(0.25, abs=0.02)
    assert found["share dropped on both"] == pytest.approx(0.25**2, abs=0.02)
    assert found["outputs differ by"] == 0
    assert found["share of outputs dropped"] == pytest.approx(0.25, abs=0.03)


def test_operations_that_sharded_tensors_do_not_survive_run_on_whole_ones(two: Group) -> None:
    two.read_all("operations_that_sharded_tensors_do_not_survive")


def test_random_functions(two: Group) -> None:
    found = two.read("random_functions")
    for name in ("dropout", "alpha_dropout", "bernoulli", "rand_like", "normal_", "rrelu"):
        assert found[f"{name} sharded"] and not found[f"{name} whole"], name
    assert not found["eval sharded"] and not found["eval whole"]
    assert found["uneven"] == [[2, 5], 3] and two.read("random_functions", 1)["uneven"] == [[2, 5], 2]
    assert found["in step"] and found["dropout1d drops whole channels"] and found["own generator as on one process"]


@pytest.mark.full
def test_example_on_eight_processes() -> None:
    def losses(command: list[str]) -> list[float]:
        done = start(command)
        assert done.returncode == 0, done.stdout[-4000:]
        assert ("llama.embed_tokens matches nothing" in done.stdout) == (isinstance(command, Ranks))
        return [float(value) for value in re.findall(r"^step \d: loss (\S+)$", done.stdout, re.MULTILINE)]

    alone = losses(python(str(EXAMPLE)))
    assert len(alone) == 5
    assert losses(torchrun(8, str(EXAMPLE))) == pytest.approx(alone, abs=2e-5)


# --- what is checked before anything is started -------------------------------------------------------------------

ONE = ProcessMesh([[0]], ["dp", "mp"])


@pytest.mark.parametrize(
    ("shape", "ranks"),
    [
        (2, [[[[0]], [[1]]]]),
        ("1x2", [[[[0, 1]]]]),
        ("dp-1xmp2", [[[[0, 1]], [[2, 3]]]]),
        (MeshShape(pp=2), [[[[0]]], [[[1]]]]),
    ],
)
def test_a_shape_is_a_mesh(shape: Any, ranks: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert process_mesh(shape) == ProcessMesh(ranks, ["pp", "dp", "cp", "mp"])


@pytest.mark.parametrize("config", [None, {}, {"dp_config": None}])
def test_nothing_to_do(config: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with caplog.at_level(logging.WARNING):
        assert parallelize(model, optimizer, None, config) == (model, optimizer)
    told = "parallelize: the config has none of dp_config, mp_config, pp_config, cp_config, ep; nothing is done "
    told += "(dp_config={'sharding_level': 3} shards over dp)"
    assert [record.getMessage() for record in caplog.records] == ([] if config is None else [told])


@pytest.mark.parametrize(
    ("mesh", "config", "expected"),
    [
        pytest.param(ONE, {"dp_confg": {}}, "config['dp_confg']: no such key; did you mean dp_config?\n"
                     "  allowed: dp_config, mp_config, pp_config, cp_config, ep", id="key"),
        pytest.param(ONE, [1], "config: a mapping is needed, not list\n"
                     "  allowed: dp_config, mp_config, pp_config, cp_config, ep", id="type"),
        pytest.param(ONE, {"dp_config": 1}, "dp_config: a mapping is needed, not int", id="inner type"),
        pytest.param(ONE, {"cp_config": {}}, "cp_config: ProcessMesh(dp=1, mp=1, ranks=[0]) has no axis cp\n"
                     "  allowed: a mesh with 'cp' among its dim_names", id="no cp"),
        pytest.param(None, {"dp_config": {}}, "mesh: there is none\n"
                     "  allowed: parallelize(mesh=...) or set_mesh before\n"
                     '  write:   parallelize(..., mesh="2x2")', id="no mesh"),
        pytest.param([2], {"dp_config": {}}, "mesh: not a mesh with named dims: [2]\n"
                     '  allowed: a shape (8, "4x2", "dp4xmp2"), ProcessMesh, or DeviceMesh with mesh_dim_names',
                     id="mesh type"),
        pytest.param(ProcessMesh([0], ["mp"]), {"dp_config": {}}, "dp_config: ProcessMesh(mp=1, ranks=[0]) has no axis "
                     "dp\n  allowed: a mesh with 'dp' among its dim_names", id="no dp"),
        pytest.param(ProcessMesh([0], ["dp"]), {"mp_config": {}}, "mp_config: ProcessMesh(dp=1, ranks=[0]) has no axis "
                     "mp\n  allowed: a mesh with 'mp' among its dim_names", id="no mp"),
        pytest.param(ProcessMesh([[0, 1]], ["dp", "cp"]), {"cp_config": {"plan": {}}},
                     "cp_config['plan']: no such key\n  allowed: parallelize_plan, backend, ulysses, pad", id="cp key"),
        pytest.param(ONE, {"dp_config": {"sharding_level": 5}}, "dp.sharding_level=5: not one of the choices\n"
                     "  allowed: 0, 1, 2, 3", id="level"),
        pytest.param(ONE, {"mp_config": {"plan": {}}}, "mp_config['plan']: no such key\n  allowed: parallelize_plan",
                     id="mp key"),
        pytest.param(ONE, {"mp_config": {"parallelize_plan": {"a(": ColWiseParallel()}}}, "mp.plan: 'a(': not a "
                     "pattern: missing ), unterminated subpattern at position 1\n"
                     "  allowed: names, *, or a regular expression", id="pattern"),
        pytest.param(ONE, {"mp_config": {"parallelize_plan": {"a": 3}}}, "parallelize_plan: a: not a style: 3\n"
                     "  allowed: a name, {Name: {argument: value}}, or {_target_: ...}", id="style"),
    ],
)  # fmt: skip
def test_wrong_configs(mesh: Any, config: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parallelize(nn.Linear(2, 2), None, mesh, config)
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("ranks", "names", "expected"),
    [
        pytest.param([[0, 1], [2]], ["dp", "mp"], "lists of different lengths", id="ragged"),
        pytest.param([[0], 1], ["dp", "mp"], "some ranks are nested deeper than others", id="depth"),
        pytest.param([0, 0], ["dp"], "the ranks are [0, 0]", id="twice"),
        pytest.param([0, 2], ["dp"], "the ranks are [0, 2]", id="missing"),
        pytest.param([0, 1], ["x"], "no axis is called 'x'", id="name"),
        pytest.param([[0, 1]], ["mp", "tp"], "an axis is named twice", id="name twice"),
        pytest.param([0, 1], ["dp", "mp"], "1 dims of ranks, but 2 names", id="dims"),
        pytest.param(["0"], ["dp"], "not a rank: '0'", id="text"),
    ],
)
def test_wrong_process_meshes(ranks: Any, names: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ProcessMesh(ranks, names)
    assert caught.value.problem == expected


def test_process_mesh_follows_the_array() -> None:
    mesh = ProcessMesh([[0, 2], [1, 3]], dim_names=["dp", "tp"])
    assert (mesh.shape, mesh.dim_names) == ((2, 2), ("dp", "mp"))
    assert [mesh.coordinate(rank) for rank in range(4)] == [
        {"dp": 0, "mp": 0}, {"dp": 1, "mp": 0}, {"dp": 0, "mp": 1}, {"dp": 1, "mp": 1},
    ]  # fmt: skip
    assert mesh.to_shape().order == ("pp", "cp", "dp", "mp")
    set_mesh(mesh)
    assert get_mesh() is mesh and get_mesh() == ProcessMesh([[0, 2], [1, 3]], ["dp", "mp"])
    assert mesh != ProcessMesh([[0, 1], [2, 3]], ["dp", "mp"])
