"""Every option composes to every key of its schema, and a user can add options without touching the package."""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from autolaunch.config.against_schema import field_types, node_schema, validate
from autolaunch.config.command_line import parse
from autolaunch.config.compose import compose, resolved, unresolvable
from autolaunch.config.help import known_keys, print_info
from autolaunch.config.origin import Origin
from autolaunch.config.schema import FAMILIES, Job
from autolaunch.directories import CONF
from tests.support.tiers import one_in

OPTIONS = sorted((file.parent.name, file.stem) for file in CONF.glob("*/*.yaml"))
NEEDED = {
    ("model", "custom"): ["model._target_=collections.OrderedDict"],
    ("data", "custom"): ["data._target_=collections.OrderedDict"],
    ("optimizer", "custom"): ["optimizer._target_=collections.OrderedDict"],
}
"""What an option cannot do without."""

PACKAGES = {("search", "optuna"): "hydra_plugins.hydra_optuna_sweeper"}
"""What an option needs to be installed."""


def composed(*argv: str) -> dict[str, Any]:
    """The resolved and validated config of a command line."""
    config = compose(parse(argv))
    assert config.errors == []
    OmegaConf.update(config.config, "output_dir", str(Path("out").absolute()))
    assert unresolvable(config.config, config.origin) == []
    values, errors = validate(resolved(config.config), config.origin)
    assert errors == []
    return values


@pytest.mark.parametrize(("group", "option"), one_in(2, [pytest.param(*pair, id="=".join(pair)) for pair in OPTIONS]))
def test_every_option_composes(group: str, option: str) -> None:
    if (group, option) in PACKAGES:
        pytest.importorskip(PACKAGES[group, option])
    values = composed(f"{group}={option}", *NEEDED.get((group, option), []))
    if "name" in (values.get(group) or {}) and not _is_another_name(group, option):
        assert values[group]["name"] == option


def _is_another_name(group: str, option: str) -> bool:
    """Whether all that the file of an option says is which other option of its group it is."""
    return (group, option) in {("cluster", "a100"), ("cluster", "local")}


@pytest.mark.parametrize(("group", "option"), [pytest.param(*pair, id="=".join(pair)) for pair in OPTIONS])
def test_every_option_has_every_key_of_its_schema(group: str, option: str) -> None:
    """So that each can be set on the command line without a + in front."""
    if (group, option) in PACKAGES:
        pytest.importorskip(PACKAGES[group, option])
    values = OmegaConf.to_container(compose(parse([f"{group}={option}"])).config, resolve=False)
    assert isinstance(values, dict)
    schema, _ = node_schema(group, values.get(group))
    if group in ("experiment", "search") or schema is None or values[group] is None:
        return  # it sets keys of several groups, or what the option needs alone, or switches its group off
    assert list(values[group]) == [item.name for item in dataclasses.fields(schema)]


def test_the_primary_config_has_every_key_of_a_job() -> None:
    assert set(composed()) == {item.name for item in dataclasses.fields(Job)}


def _defaults(values: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        schema, _ = node_schema(f"{key}{name}", value)
        if schema is not None and isinstance(value, Mapping):
            yield from _defaults(value, f"{key}{name}.")
        else:
            yield f"{key}{name}", value


def test_the_options_that_nobody_chose_are_the_defaults_of_the_schema() -> None:
    """`--info` shows the schema's, and they serve where a user's own file does not list a key."""
    by_schema, errors = validate({}, lambda key, value: key)
    assert errors == []
    by_files = composed()
    by_files["output_dir"] = None
    assert dict(_defaults(by_schema)) == dict(_defaults(by_files))


def test_every_key_has_a_sentence_of_help() -> None:
    for item in dataclasses.fields(Job):
        schemas = list(FAMILIES.get(item.name, {}).values()) or [field_types(Job)[item.name]]
        for schema in schemas:
            for inner in dataclasses.fields(schema) if dataclasses.is_dataclass(schema) else [item]:
                if inner.name not in ("mp", "pp", "cp"):
                    assert inner.metadata.get("help", "").endswith("."), f"{item.name}.{inner.name}"
    assert {"trainer.max_steps", "model.rope_theta", "data.path", "dp.shard"} <= set(known_keys())
    nested = {"cluster.inter", "cluster.inter.gb_per_s", "callbacks.ema", "callbacks.samples.prompts"}
    assert nested <= set(known_keys()) and "callbacks.ema._target_" not in known_keys()


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("cluster.inter", ["cluster.inter.latency_us", "Bandwidth of one device"]),
        ("cluster.inter.gb_per_s", ["10^9 bytes per second"]),
        ("callbacks.samples", ["callbacks.samples.prompts must be given texts", "temperature 0.0 0: the likeliest"]),
        ("callbacks.early_stopping.patience", ["for so many validations", "callbacks.early_stopping.patience 3"]),
    ],
)
def test_info_of_keys_within_keys_and_of_classes(key: str, said: list[str]) -> None:
    console = Console(width=200, file=io.StringIO())
    print_info(key, [CONF], console)
    page = " ".join(console.file.getvalue().split())
    assert all(part in page for part in said)


def test_info_on_a_narrow_terminal_has_room_for_its_text() -> None:
    console = Console(width=50, file=io.StringIO())
    print_info("trainer", [CONF], console)
    assert "\n  trainer.max_steps  null\n      Optimizer steps after which training ends " in console.file.getvalue()


@pytest.mark.parametrize(
    ("typed", "sizes"),
    [
        pytest.param("8", (8, 1, 1, 1), id="integer"),
        pytest.param("4x2", (4, 2, 1, 1), id="two-axes"),
        pytest.param("2x2x2", (2, 2, 2, 1), id="three-axes"),
        pytest.param("1x2x3x4", (1, 2, 3, 4), id="four-axes"),
        pytest.param("dp4xmp2", (4, 2, 1, 1), id="by-name"),
        pytest.param("dp4xtp2", (4, 2, 1, 1), id="other-spelling"),
        pytest.param("dp-1xmp2", (-1, 2, 1, 1), id="open-axis"),
        pytest.param("cp2", (1, 1, 1, 2), id="one-axis-by-name"),
        pytest.param("all", (-1, 1, 1, 1), id="preset"),
    ],
)
def test_mesh(typed: str, sizes: tuple[int, ...]) -> None:
    mesh = composed(f"mesh={typed}")["mesh"]
    assert tuple(mesh[axis] for axis in ("dp", "mp", "pp", "cp")) == sizes
    assert mesh["order"] == ["pp", "dp", "cp", "mp"]
    assert composed(f"mesh={typed}", "mesh.order=[dp,pp,mp,cp]")["mesh"]["order"] == ["dp", "pp", "mp", "cp"]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a user's own configs; its parent is the working directory."""
    files = {
        "model/tiny.yaml": "defaults: [llama]\nnum_layers: 1\n",
        "model/net.yaml": "name: net\n_target_: my_net.Net\nwidth: 8\n",
        "experiment/wide.yaml": "# @package _global_\n"
        "defaults: [override /mesh: 4x2, override /model: tiny]\nseed: 7\n",
        "train.yaml": "defaults: [config, _self_]\nname: mine\ntrainer:\n  max_steps: 5\n",
    }
    for name, text in files.items():
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "mine"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        pytest.param(["model=tiny"], {"model.num_layers": 1, "model.name": "llama"}, id="own-model-file"),
        pytest.param(["model=net"], {"model._target_": "my_net.Net", "model.width": 8}, id="own-model-class"),
        pytest.param(["model=net", "model.width=9"], {"model.width": 9}, id="argument-of-own-class"),
        pytest.param(["model=net", "+model.depth=2"], {"model.depth": 2}, id="new-argument-of-own-class"),
        pytest.param(
            ["experiment=wide"], {"mesh.dp": 4, "mesh.mp": 2, "seed": 7, "model.num_layers": 1}, id="own-experiment"
        ),
        pytest.param(["experiment=wide", "mesh=2", "seed=8"], {"mesh.dp": 2, "mesh.mp": 1, "seed": 8}, id="typed-wins"),
        pytest.param(["--config-name", "train"], {"name": "mine", "trainer.max_steps": 5}, id="own-primary-config"),
    ],
)
def test_users_extend_by_files(argv: list[str], expected: dict[str, Any], mine: Path) -> None:
    values = composed("--config-dir", "mine", *argv)
    assert {key: OmegaConf.select(OmegaConf.create(values), key) for key in expected} == expected


def test_users_extend_by_the_search_path(mine: Path) -> None:
    assert composed(f"hydra.searchpath=[file://{mine}]", "model=tiny")["model"]["num_layers"] == 1


def test_a_plan_is_an_experiment(mine: Path) -> None:
    plan = mine / "plan.yaml"
    plan.write_text(
        "# @package _global_\n"
        "defaults: [override /mesh: '2', override /dp: zero1]\nseed: 3\nreasons:\n  mesh: asked for\n"
    )
    values = composed("experiment=mine/plan.yaml", "mesh=4")
    assert (values["mesh"]["dp"], values["dp"]["sharding_level"], values["seed"]) == (4, 1, 3)
    assert "reasons" not in values
    assert composed(f"experiment={plan}")["mesh"]["dp"] == 2


@pytest.mark.parametrize(
    ("typed", "where"),
    [
        pytest.param(["trainer.max_steps=3"], "trainer.max_steps=3", id="typed"),
        pytest.param([], "trainer.max_steps=null (conf/trainer/default.yaml)", id="group-file"),
        pytest.param(
            ["experiment=smoke"], "trainer.max_steps=10 (conf/experiment/smoke.yaml)", id="experiment-over-group"
        ),
        pytest.param(
            ["--config-dir", "mine", "--config-name", "train"], "trainer.max_steps=5 (mine/train.yaml)", id="own-file"
        ),
    ],
)
def test_where_a_value_was_written(typed: list[str], where: str, mine: Path) -> None:
    config = compose(parse(typed))
    origin: Origin = config.origin
    assert origin("trainer.max_steps", config.config.trainer.max_steps) == where


def test_the_file_of_a_value_may_be_given_by_its_path(mine: Path) -> None:
    (mine / "plan.yaml").write_text("# @package _global_\nmatmul_precision: high\n")
    for typed in ("+plan=mine/plan.yaml", "experiment=mine/plan.yaml", f"experiment={mine / 'plan.yaml'}"):
        config = compose(parse([typed]))
        assert config.origin("matmul_precision", "high") == "matmul_precision=high (mine/plan.yaml)"
    (mine / "machines.yaml").write_text("device: cpu\nmemory_gib: 3\n")
    config = compose(parse(["cluster=mine/machines.yaml"]))
    assert config.origin("cluster.memory_gib", 3) == "cluster.memory_gib=3 (mine/machines.yaml)"


PAGES = [
    pytest.param(["--help"], "Groups and their options", id="help"),
    pytest.param(["--version"], "autolaunch ", id="version"),
    pytest.param(["--info", "trainer.max_steps"], "Optimizer steps after which training ends", id="info-key"),
    pytest.param(["--info", "dp"], "options: ddp, fsdp, hsdp, zero1, zero2", id="info-group"),
    pytest.param(["--info", "mesh=auto"], "how many ranks along each axis", id="info-mesh-auto"),
    pytest.param(["--info", "logger=csv,wandb"], "options: ", id="info-several-options"),
    pytest.param(["--info", "mp"], "Rules of your own, `pattern: style`", id="info-optional-group"),
    pytest.param(["--info", "searchpath"], "mesh://", id="info-of-hydra"),
    pytest.param(["--hydra-help"], "hydra", id="hydra-help"),
    pytest.param(["mesh=4x2", "--cfg", "job"], "mp: 2", id="cfg"),
    pytest.param(["mesh=4x2", "--cfg", "job", "--package", "mesh"], "# @package mesh\ndp: 4", id="cfg-of-a-group"),
    pytest.param(["-sc", "install=bash"], "complete", id="completion"),
]
SUBPROCESS = """
import sys
from autolaunch.cli import run
code = run(sys.argv[1:])
heavy = {"torch", "lightning", "numpy", "transformers"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else code)
"""


@pytest.mark.parametrize(("argv", "text"), PAGES)
def test_pages_import_no_torch(argv: list[str], text: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "200"}
    result = subprocess.run(
        [sys.executable, "-c", SUBPROCESS, *argv],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert text in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_page_lists_options_of_the_user(mine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from autolaunch import cli

    assert cli.run(["--help", "--config-dir", "mine"]) == 0
    assert "custom, hf, llama, net, tiny" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("typed", "steps"),
    [
        ([], 100),
        (["trainer.max_steps=7", "trainer.max_epochs=2"], 7),
        (["trainer.max_epochs=2"], -1),
        (["trainer.max_time=00:01:00:00"], -1),
        (["trainer.max_epochs=-1"], 100),
    ],
)
def test_a_training_ends_where_it_is_said(typed: list[str], steps: int) -> None:
    values, errors = validate(resolved(compose(parse([*typed, "scheduler=constant"])).config))
    assert (errors, values["trainer"]["max_steps"]) == ([], steps)
