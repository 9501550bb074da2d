"""Command lines with context parallelism: what is wrong with them, told before a process starts, and what is chosen."""

from __future__ import annotations

import dataclasses
import io
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch import nn

from autolaunch import cli
from autolaunch.config import across_keys, arithmetic
from autolaunch.config.command_line import parse
from autolaunch.config.compose import compose
from autolaunch.jobs.run import resolve_job
from autolaunch.report.screen import show_plan, show_start
from autolaunch_strategies import ColWiseParallel, ConfigError, ContextParallel, PrepareContextParallel
from autolaunch_strategies.apply.check import config_errors
from autolaunch_strategies.config import CP_BACKENDS, CP_NAMES, MeshShape, cp_backend, parallel_config, ulysses_degree
from autolaunch_strategies.config import ContextParallel as ContextOptions
from autolaunch_strategies.context.marked import marked_by
from autolaunch_strategies.lightning.strategy import MeshStrategy
from autolaunch_strategies.plan.context import context_config, context_rules, other_rules, with_context_plan
from autolaunch_strategies.plan.rules import read_plan
from autolaunch_strategies.tensor.model_parallel import matched
from tests.support.messages import Told, assert_only_told, assert_told
from tests.support.tiers import one_in

STYLES = (
    "ColWiseParallel, RowWiseParallel, GatherWhenUsed, DivideExperts, SequenceParallelBegin, SequenceParallelEnd, "
    "SequenceParallelEnable, SequenceParallelDisable, PrepareContextParallel, ContextParallel, "
    "PrepareLayerInput, PrepareLayerOutput"
)

WRONG = [
    pytest.param(
        ["mesh=2x1x1x2", "cp=none"],
        Told(
            "mesh=2x1x1x2 with cp=none", "2 ranks along cp", allowed="cp=gather, ring, ulysses, usp", write="cp=gather"
        ),
        id="none",
    ),
    pytest.param(
        ["mesh=cp2", "cp=rnig"],
        Told("cp=rnig", "ring", allowed="gather, none, ring, ulysses, usp", write="cp=ring"),
        id="option",
    ),
    pytest.param(
        ["mesh=cp2", "cp=all2all"],
        Told("cp=all2all", "ulysses", allowed="gather, none, ring, ulysses, usp", write="cp=ulysses"),
        id="option-by-the-name-of-others",
    ),
    pytest.param(
        ["cp.backend=ulises", "cp.ulysses=0", "cp.pad=2", "cp.padding=true"],
        [
            Told("cp.padding=true", "cp.pad", write="cp.pad=true"),
            Told("cp.backend=ulises", "choices", allowed="gather, ring, ulysses, usp, p2p, all2all"),
            Told("cp.ulysses=0", "out of range", allowed="1 or more"),
            Told("cp.pad=2", "true or false"),
        ],
        id="values",
    ),
    pytest.param(
        ["mesh=cp4", "cp.pad=false", "data.seq_len=62"],
        Told(
            "data.seq_len=62",
            "4 ranks of cp",
            "2 x 4 parts",
            allowed="multiples of 8, or cp.pad=true",
            write="data.seq_len=64 or cp.pad=true",
        ),
        id="length",
    ),
    pytest.param(
        ["mesh=cp4", "cp.pad=false", "data.seq_len=62", "model.max_seq_len=63"],
        Told(
            "data.seq_len=62",
            "4 ranks of cp",
            "2 x 4 parts",
            allowed="multiples of 8, or cp.pad=true",
            write="data.seq_len=56 or cp.pad=true",
        ),
        id="length-of-a-model-that-takes-no-longer-one",
    ),
    pytest.param(
        ["mesh=cp4", "cp.pad=false", "data.seq_len=6", "model.max_seq_len=7"],
        Told(
            "data.seq_len=6",
            "4 ranks of cp",
            "2 x 4 parts",
            allowed="multiples of 8, or cp.pad=true",
            write="cp.pad=true",
        ),
        id="length-without-a-fitting-one",
    ),
    pytest.param(
        ["mesh=cp3", "cp=ulysses", "data.seq_len=60"],
        Told(
            "mesh=1x1x1x3 with model=llama and cp=ulysses",
            "4 attention heads",
            "3 ranks of cp",
            allowed=("cp=gather", "cp=ring", "cp.ulysses of 1"),
            write="cp=ring",
        ),
        id="heads-of-ulysses",
    ),
    pytest.param(
        ["mesh=1x2x1x4", "cp=ulysses"],
        Told(
            "mesh=1x2x1x4 with model=llama and cp=ulysses",
            "2 attention heads",
            "4 over 2",
            "4 ranks",
            allowed=("cp=gather", "cp=ring", "cp.ulysses of 1, 2"),
            write="cp=usp",
        ),
        id="heads-of-ulysses-and-mp",
    ),
    pytest.param(
        ["mesh=1x3x1x2", "cp=ulysses"],
        Told(
            "mesh=1x3x1x2 with model=llama", "4 attention heads", "3 ranks of mp", allowed=("1, 2, 4", "mp.base=none")
        ),
        id="heads-of-mp-come-first",
    ),
    pytest.param(
        ["mesh=cp4", "cp=usp", "cp.ulysses=3"],
        Told(
            "cp.ulysses=3",
            "4 ranks of cp",
            "groups of 3",
            allowed="cp.ulysses of 1, 2, 4, or null",
            write="cp.ulysses=null",
        ),
        id="ulysses-that-does-not-divide-cp",
    ),
    pytest.param(
        ["mesh=1x2x1x8", "cp=usp", "cp.ulysses=4"],
        Told(
            "cp.ulysses=4 with model=llama",
            "2 attention heads",
            "4 over 2",
            "4 ranks",
            allowed="cp.ulysses of 1, 2, or null",
            write="cp.ulysses=null",
        ),
        id="ulysses-that-does-not-divide-heads",
    ),
    pytest.param(
        ["mesh=cp2", "cp=ring", "cp.ulysses=2"],
        Told(
            "cp.ulysses=2 with cp.backend=ring",
            "only usp",
            "ring",
            allowed="cp.ulysses=null, or cp=usp",
            write="cp=usp cp.ulysses=2",
        ),
        id="ulysses-of-another-backend",
    ),
    pytest.param(
        ["cp=gather", "cp.ulysses=2"],
        Told(
            "cp.ulysses=2 with cp.backend=gather",
            "only usp",
            "gather",
            allowed="cp.ulysses=null, or cp=usp",
            write="cp=usp cp.ulysses=2",
        ),
        id="ulysses-of-another-backend-on-one-rank",
    ),
    pytest.param(
        ["mesh=cp2", "cp=ring", "model=hf", "model.config={model_type: gpt2, attn_pdrop: 0.1, n_head: 4}"],
        Told(
            "model.config.attn_pdrop=0.1 with cp=ring",
            "without dropout",
            allowed="model.config.attn_pdrop=0.0, or cp=gather, which has it",
            write="++model.config.attn_pdrop=0.0",
        ),
        id="dropout-around-a-ring",
    ),
    pytest.param(
        ["mesh=cp2", "cp.plan={a: ColWiseParallel, b: {ContextParallel: {backend: all2all}}, c: ContextParalel}"],
        [
            Told(
                "cp.plan: a: ColWiseParallel",
                "nothing that cp does",
                allowed=("PrepareContextParallel", "ContextParallel"),
            ),
            Told(
                "cp.plan: b: ContextParallel with backend=ulysses and cp.backend=gather", "one way", write="cp=ulysses"
            ),
            Told("cp.plan: c", "ContextParalel", "ContextParallel", allowed=STYLES),
        ],
        id="plan",
    ),
    pytest.param(
        ["cp.plan={a: {ContextParallel: {backend: alltoall}}, b: {ContextParallel: {degree: 2}}}"],
        [
            Told(
                "cp.plan: a: ContextParallel: backend=alltoall",
                "all2all",
                allowed=("gather, ring, ulysses, usp", "p2p", "all2all"),
            ),
            Told("cp.plan: b", "ContextParallel", "'degree'", allowed="backend"),
        ],
        id="plan-on-one-rank",
    ),
    pytest.param(
        ["mesh=1x2x1x2", "mp.plan={model.layers.*: {PrepareContextParallel: {backend: p2p}}}", "cp=ulysses"],
        Told(
            "mp.plan: model.layers.*: PrepareContextParallel with backend=ring and cp.backend=ulysses",
            "one way",
            write="cp=ring",
        ),
        id="plan-for-mp-with-a-style-for-cp",
    ),
    pytest.param(
        ["+cp.plan.model.layers=PrepareContextParallel"],
        Told("cp.plan.model.layers", "dots", "name of a module", write="'+cp.plan={model.layers: ...}'"),
        id="plan-with-dots",
    ),
]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["autolaunch"])
    for module in (across_keys, arithmetic):
        monkeypatch.setattr(module, "visible_devices", lambda accelerator: ("cpu", None))
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    return tmp_path


@pytest.mark.parametrize(("argv", "told"), one_in(2, WRONG))
def test_one_message_and_nothing_else(
    argv: list[str], told: Told | list[Told], workplace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = cli.run(argv)
    assert_only_told(capfd.readouterr().err, told)
    assert code == 2
    assert list(workplace.iterdir()) == []


def job(*argv: str) -> dict[str, Any]:
    """The config of the resolved job of a command line."""
    composed = compose(parse(argv))
    assert composed.errors == []
    return resolve_job(composed.config, composed.config.hydra, Path.cwd() / "run").config


@pytest.mark.parametrize("name", CP_BACKENDS)
@pytest.mark.parametrize("mesh", ["dp2xcp2", "2x2x1x2", "cp4", "8"])
def test_every_option_fits(name: str, mesh: str, workplace: Path) -> None:
    config = job(f"mesh={mesh}", f"cp={name}", "model.num_heads=8")
    made = ContextOptions(**config["cp"])
    assert dataclasses.replace(made, ulysses=None) == CP_NAMES[name]
    assert config_errors(parallel_config(config["mesh"], mp="auto", cp=made)) == []


def test_the_default_serves(workplace: Path) -> None:
    assert job("mesh=cp2")["cp"] == dataclasses.asdict(ContextOptions())
    assert MeshStrategy("cp2").parallel.cp == ContextOptions("gather", "gather")
    assert job("mesh=2", "cp=none")["cp"] is None


@pytest.mark.parametrize(
    "argv",
    [
        pytest.param(["mesh=cp2", "data.seq_len=61"], id="padded"),
        pytest.param(["mesh=2", "data.seq_len=61", "cp=ulysses", "model.num_heads=4"], id="length-of-one-rank"),
        pytest.param(["mesh=2", "cp=usp", "cp.ulysses=64"], id="groups-of-a-larger-mesh"),
        pytest.param(["mesh=2", "cp.plan={a: {ContextParallel: {backend: ulysses}}}"], id="backend-of-another-mesh"),
        pytest.param(["mesh=cp2", "cp.plan={a: {ContextParallel: {backend: p2p}}, b: null}"], id="ring-beside-gather"),
        pytest.param(["mesh=cp2", "cp.backend=all2all"], id="paddles-name"),
        pytest.param(
            ["mesh=cp2", "data=custom", "data._target_=autolaunch.data.Mine", "+data.seq_len=61"], id="own-data"
        ),
        pytest.param(["mesh=1x2x1x4", "cp=ulysses", "mp.base=none"], id="plan-that-may-leave-attention-whole"),
        pytest.param(
            ["mesh=cp2", "model=hf", "model.config={model_type: gpt2, attn_pdrop: 0.1, n_head: 4}"],
            id="dropout-of-gathered-attention",
        ),
        pytest.param(
            ["plan", "mesh=cp2", "cp=usp", "model=hf", "model.config={model_type: gpt2, attn_pdrop: 0.1, n_head: 4}"],
            id="dropout-without-a-ring",
        ),
    ],
)
def test_not_refused(argv: list[str], workplace: Path) -> None:
    job(*argv)


@pytest.mark.parametrize(
    ("cp", "heads", "ulysses"),
    [
        pytest.param(4, 8, 2, id="the most below cp"),
        pytest.param(8, 8, 4, id="the most of several"),
        pytest.param(8, 6, 2, id="the most that divides the heads"),
        pytest.param(6, 3, 3, id="an odd one"),
        pytest.param(4, 3, 1, id="none divides the heads: a ring"),
        pytest.param(2, 4, 2, id="prime: ulysses alone"),
        pytest.param(3, 4, 1, id="prime that does not divide the heads: a ring"),
        pytest.param(8, None, 2, id="heads not known: the least"),
        pytest.param(9, None, 3, id="heads not known, odd"),
        pytest.param(2, None, 1, id="heads not known, prime: a ring"),
        pytest.param(1, 4, 1, id="one rank"),
    ],
)
def test_ulysses_degree(cp: int, heads: int | None, ulysses: int) -> None:
    assert ulysses_degree(cp, heads) == ulysses
    assert cp % ulysses == 0 and (heads or ulysses) % ulysses == 0
    assert ContextOptions(backend="usp").split(cp, heads) == (cp // ulysses, ulysses)


@pytest.mark.parametrize(
    ("argv", "ulysses"),
    [
        pytest.param(["mesh=cp8", "cp=usp"], 4, id="by the heads"),
        pytest.param(["mesh=1x2x1x8", "cp=usp"], 2, id="by the heads of a rank of mp"),
        pytest.param(["mesh=cp8", "cp=usp", "cp.ulysses=2"], 2, id="as asked"),
        pytest.param(["mesh=8", "cp=usp"], None, id="one rank"),
        pytest.param(["mesh=cp8", "cp=ulysses", "model.num_heads=8"], None, id="another backend"),
        pytest.param(["mesh=cp4", "cp=usp", "model=custom", "model._target_=torch.nn.Linear"], 2, id="own model"),
        pytest.param(["mesh=cp4", "cp=usp", "+module._target_=collections.OrderedDict"], None, id="own module"),
    ],
)
def test_usp_is_settled_by_the_model(argv: list[str], ulysses: int | None, workplace: Path) -> None:
    assert job(*argv)["cp"]["ulysses"] == ulysses


@pytest.mark.parametrize(
    ("given", "backend"),
    [
        pytest.param("ring", "ring", id="name"),
        pytest.param("p2p", "ring", id="paddles name"),
        pytest.param({"backend": "all2all", "pad": False}, "ulysses", id="mapping"),
        pytest.param(ContextOptions(backend="p2p"), "ring", id="object"),
        pytest.param({}, "gather", id="empty mapping"),
    ],
)
def test_what_python_code_may_give(given: Any, backend: str) -> None:
    made = parallel_config("cp2", cp=given)
    assert config_errors(made) == [] and made.cp is not None and made.cp.backend == backend
    assert MeshStrategy("cp2", cp=given).parallel.cp == made.cp
    assert made.ulysses == (2 if backend == "ulysses" else 1)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        pytest.param(
            "rnig",
            Told("cp=rnig", "ring", allowed=("gather, ring, ulysses, usp", "p2p", "all2all")),
            id="name",
        ),
        pytest.param(
            {"degree": 2},
            Told("cp.degree", "no such key", allowed="name, backend, ulysses, pad, plan"),
            id="key",
        ),
        pytest.param(
            {"backend": 3},
            Told("cp.backend=3", "choices", allowed="gather, ring, ulysses, usp, p2p, all2all"),
            id="value",
        ),
        pytest.param(
            ContextParallel("ring"),
            Told(
                "cp=ContextParallel",
                "axis cp",
                allowed=("autolaunch_strategies.config.ContextParallel",),
                write="cp='gather'",
            ),
            id="a-style",
        ),
    ],
)
def test_what_python_code_may_not_give(given: Any, told: Told) -> None:
    with pytest.raises(ConfigError) as caught:
        MeshStrategy("cp2", cp=given)
    assert_only_told(caught.value, told)


@pytest.mark.parametrize("ulysses", [0, -2, "2", True])
def test_groups_that_are_no_numbers(ulysses: Any) -> None:
    with pytest.raises(ConfigError, match=r"cp\.ulysses="):
        parallel_config("cp4", cp={"backend": "usp", "ulysses": ulysses})


def test_groups_that_are_none() -> None:
    (error,) = config_errors(parallel_config("cp4", cp={"backend": "usp", "ulysses": 3}))
    assert error.allowed == "cp.ulysses of 1, 2, 4, or null"


def test_names_of_backends() -> None:
    assert [cp_backend(name) for name in (*CP_BACKENDS, "p2p", "all2all")] == [*CP_BACKENDS, "ring", "ulysses"]


# --- plans -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = nn.Linear(4, 4), nn.Linear(4, 4)


def marks(plan: dict[str, Any], backend: str = "ring") -> tuple[dict[str, str], dict[str, str]]:
    """What a plan marks in a model of two blocks: (regions, layers that call attention)."""
    model = nn.ModuleDict({"layers": nn.ModuleList([Block(), Block()]), "head": nn.Linear(4, 4)})
    matches, warnings = matched(model, read_plan(plan))
    assert warnings == []
    marked = marked_by(model, matches, backend)
    return marked.regions, marked.attention


def test_styles_mark_modules() -> None:
    plan = {"layers.*": "PrepareContextParallel", "layers.*.attention": {"ContextParallel": {"backend": "p2p"}}}
    attention = {"layers.0.attention": "ring", "layers.1.attention": "ring"}
    assert marks(plan) == ({"layers.0": "ring", "layers.1": "ring"}, attention)
    assert marks(plan, "gather") == ({"layers.0": "gather", "layers.1": "gather"}, attention)
    objects = {"layers.*": [PrepareContextParallel("all2all"), ContextParallel()], "head": ColWiseParallel()}
    assert marks(objects, "ulysses") == ({"layers.0": "ulysses", "layers.1": "ulysses"},) * 2
    by_path = {"layers.0": {"_target_": "autolaunch_strategies.ContextParallel", "backend": "usp"}}
    assert marks(by_path, "usp") == ({}, {"layers.0": "usp"})


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        pytest.param(
            {"layers.0": ContextParallel("all2all")},
            Told(
                "cp.plan: layers.0: ContextParallel with backend=ulysses and cp.backend=ring",
                "one way",
                write="cp=ulysses",
            ),
            id="another-way",
        ),
        pytest.param(
            {"head.weight": ContextParallel()},
            Told("cp.plan: head.weight: ContextParallel", "parameter", write="head: ContextParallel"),
            id="parameter",
        ),
    ],
)
def test_modules_that_cannot_be_marked(plan: dict[str, Any], told: Told) -> None:
    with pytest.raises(ConfigError) as caught:
        marks(plan)
    assert_only_told(caught.value, told)


def test_a_style_with_an_unknown_backend() -> None:
    with pytest.raises(ConfigError) as caught:
        ContextParallel("flash")
    assert_told(caught.value, "ContextParallel: backend=flash", "no backend")


def test_a_plan_for_cp_goes_behind_the_one_for_mp() -> None:
    plan = {"layers.*": ["PrepareContextParallel"], "head": "ContextParallel"}
    base = read_plan({"layers.*": ["SequenceParallelEnable", "ContextParallel"], "head": "ColWiseParallel"})
    rules = with_context_plan(base, ContextOptions(plan=plan))
    written = [(rule.pattern, rule.to_yaml()) for rule in rules]
    assert written == [
        ("layers.*", ["SequenceParallelEnable", "ContextParallel"]),
        ("head", "ColWiseParallel"),
        ("layers.*", "PrepareContextParallel"),
        ("head", "ContextParallel"),
    ]
    assert [(rule.pattern, rule.to_yaml()) for rule in context_rules(rules)] == [
        ("layers.*", "ContextParallel"), ("layers.*", "PrepareContextParallel"), ("head", "ContextParallel"),
    ]  # fmt: skip
    assert [(rule.pattern, rule.to_yaml()) for rule in other_rules(rules)] == [
        ("layers.*", "SequenceParallelEnable"), ("head", "ColWiseParallel"),
    ]  # fmt: skip
    assert plan == {"layers.*": ["PrepareContextParallel"], "head": "ContextParallel"}
    assert with_context_plan(base, None) == base


@pytest.mark.parametrize(
    ("given", "others", "backend"),
    [
        pytest.param({"parallelize_plan": {"llama": PrepareContextParallel(), "sdpa": ContextParallel()}}, {}, "ring",
                     id="defaults of Paddle"),
        pytest.param({"parallelize_plan": {"sdpa": [ContextParallel("all2all")]}}, {}, "ulysses", id="named"),
        pytest.param({"parallelize_plan": {"sdpa": {"ContextParallel": {"backend": "gather"}}}}, {}, "gather",
                     id="named as in YAML"),
        pytest.param({"parallelize_plan": {"sdpa": ContextParallel("p2p")}, "backend": "gather"}, {}, "gather",
                     id="ring beside gather"),
        pytest.param({}, {"llama": PrepareContextParallel("all2all")}, "ulysses", id="named in the plan for mp"),
        pytest.param({"backend": "all2all", "pad": False}, {"fc": ColWiseParallel()}, "ulysses", id="without a plan"),
        pytest.param({"parallelize_plan": None}, {}, "ring", id="nothing said"),
    ],
)  # fmt: skip
def test_cp_config(given: dict[str, Any], others: dict[str, Any], backend: str) -> None:
    before = {key: dict(value) if isinstance(value, dict) else value for key, value in given.items()}
    made = context_config(given, read_plan(others))
    assert (made.backend, made.pad, made.plan) == (
        backend,
        given.get("pad", True),
        given.get("parallelize_plan") or {},
    )
    assert config_errors(parallel_config("cp2", cp=made)) == []
    made.plan["more"] = None
    assert given == before


@pytest.mark.parametrize(
    ("given", "others", "told"),
    [
        pytest.param(
            {"plan": {}},
            {},
            Told("cp_config['plan']", "no such key", allowed="parallelize_plan, backend, ulysses, pad"),
            id="key",
        ),
        pytest.param(
            {"parallelize_plan": {}},
            {},
            Told("cp_config['parallelize_plan']", "no rule", allowed=("parallelize_plan",)),
            id="empty",
        ),
        pytest.param(
            {"parallelize_plan": ["llama"]}, {}, Told("cp_config['parallelize_plan']", "mapping", "not list"), id="type"
        ),
        pytest.param(
            {"parallelize_plan": {"fc": ColWiseParallel()}},
            {},
            Told(
                "cp_config['parallelize_plan']: fc: ColWiseParallel",
                "nothing that cp does",
                allowed=("PrepareContextParallel", "ContextParallel"),
            ),
            id="style for mp",
        ),
        pytest.param(
            {"backend": "flash"},
            {},
            Told("cp_config['backend']=flash", "no backend", allowed=("gather, ring, ulysses, usp", "p2p", "all2all")),
            id="backend",
        ),
        pytest.param(
            {"parallelize_plan": {"sdpa": ContextParallel("all2all")}},
            {"a": PrepareContextParallel("p2p")},
            Told(
                "cp_config['parallelize_plan']: sdpa: ContextParallel with backend=ulysses and cp.backend=ring",
                "one way",
                write="cp=ulysses",
            ),
            id="two ways",
        ),
    ],
)
def test_wrong_cp_config(given: dict[str, Any], others: dict[str, Any], told: Told) -> None:
    with pytest.raises(ConfigError) as caught:
        context_config(given, read_plan(others))
    assert_only_told(caught.value, told)


# --- pages and panels ------------------------------------------------------------------------------------------------


def test_info_says_what_each_backend_does(workplace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--info", "cp"]) == 0
    page = " ".join(capfd.readouterr().out.split())
    for name in ("none", *CP_BACKENDS):
        assert f"cp={name} " in page
    assert "cp=ring Keys and values go round" in page
    assert "cp.pad true Pad sequences" in page
    assert cli.run(["--info", "cp.plan"]) == 0
    assert "styles: PrepareContextParallel, ContextParallel" in " ".join(capfd.readouterr().out.split())
    assert cli.run(["--info", "mp.plan"]) == 0
    assert "PrepareContextParallel, ContextParallel, PrepareLayerInput" in " ".join(capfd.readouterr().out.split())


def account(**changes: Any) -> dict[str, Any]:
    cp = {"backend": "ring", "ranks": 2, "ulysses": 1, "pad": False, "regions": [], "layers": [], "attention": {}}
    return {
        "order": [],
        "blocks": {"found": []},
        "cp": cp | changes,
        "recompute": {},
        "compile": {},
        "dp": {"sharding_level": 3, "replicate": 1, "shard": 1, "groups": {}},
    }


@pytest.mark.parametrize(
    ("argv", "changes", "line"),
    [
        pytest.param(["data.seq_len=64"], {}, "ring · 2 ranks · 64 → 32 tokens per rank", id="ring"),
        pytest.param(
            ["data.seq_len=61", "cp.pad=true"], {}, "ring · 2 ranks · 61 → 32 tokens per rank, padded", id="pad"
        ),
        pytest.param(
            ["data.seq_len=64"],
            {"backend": "usp", "ranks": 8, "ulysses": 2},
            "usp · 8 ranks (ring of 4 × ulysses of 2) · 64 → 8 tokens per rank",
            id="usp",
        ),
        pytest.param(
            ["data=custom", "data._target_=autolaunch.data.Mine", "+data.seq_len=61"],
            {"backend": "gather"},
            "gather · 2 ranks",
            id="own-data",
        ),
    ],
)
def test_the_line_of_a_panel(argv: list[str], changes: dict[str, Any], line: str, workplace: Path) -> None:
    console = Console(file=io.StringIO(), width=90)
    show_start(account(**changes), job(f"mesh=cp{changes.get('ranks', 2)}", *argv), console)
    rows = [row.strip("│ ") for row in console.file.getvalue().splitlines()]
    assert f"cp         {line}" in rows
    assert any(row.startswith("sharded    parameters, gradients, optimizer state over cp") for row in rows)


def test_where_sequences_are_divided(workplace: Path) -> None:
    blocks = [f"model.layers.{index}" for index in range(4)]
    attention = {f"{block}.attention": "ring" for block in blocks} | {"model.last.attention": "gather"}
    console = Console(file=io.StringIO(), width=120)
    warning = "cp.plan: layer.*: matches nothing"
    told = account(regions=blocks, layers=["model.embedding", "head"], attention=attention, warnings=[warning])
    show_plan(told, job("mesh=cp2"), console, 0, Path("plan.yaml"))
    text = " ".join(console.file.getvalue().split())
    assert "cp model.layers.0 ... model.layers.3, model.embedding, head: each rank has 1/2 of the positions" in text
    assert "cp model.layers.0.attention ... model.layers.3.attention: attention over all positions by ring" in text
    assert "cp model.last.attention: attention over all positions by gather" in text
    assert f"cp {warning}" in text


def test_no_line_without_cp(workplace: Path) -> None:
    console = Console(file=io.StringIO(), width=90)
    show_start({}, job("mesh=2"), console)
    assert "│ cp " not in console.file.getvalue()


def test_a_mesh_may_leave_cp_open() -> None:
    assert MeshStrategy("dp2xcp-1").shape == MeshShape(dp=2, cp=-1)
