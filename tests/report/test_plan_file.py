"""plan.yaml is an experiment file that Hydra composes to the run it came from."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf, open_dict

from autolaunch.config.sources import register
from autolaunch.job import ResolvedJob
from autolaunch.report.plan_file import read_plan, write_plan
from autolaunch.tasks.fit import _Screen
from tests import ROOT

CONF = ROOT / "conf"


def composed(*overrides: str) -> tuple[dict[str, Any], dict[str, str]]:
    """(resolved job, choices) as the command composes them."""
    register()
    with initialize_config_dir(str(CONF), version_base=None):
        config = compose("config", [*overrides], return_hydra_config=True)
    choices = OmegaConf.to_container(config.hydra.runtime.choices)
    with open_dict(config):
        config.pop("hydra")
    job = OmegaConf.to_container(config, resolve=True)
    assert isinstance(job, dict) and isinstance(choices, dict)
    return {str(key): value for key, value in job.items()}, {str(key): str(value) for key, value in choices.items()}


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param([], id="defaults"),
        pytest.param(["mesh=4x1", "dp=zero1", "optimizer=sgd", "optimizer.lr=1e-3"], id="other-options"),
        pytest.param(["mesh.order=[dp,pp,cp,mp]", "data.path=[a.txt,b.txt]", "recompute_save=[]"], id="lists"),
        pytest.param(["name='1e3'", "trainer.gradient_clip_val=null", "model.rope_scaling={factor: 8.0}"], id="values"),
        pytest.param(["experiment=smoke", "+callbacks.mine={_target_: a.B, n: 1}"], id="experiment"),
    ],
)
def test_hydra_composes_the_same_job_from_it(tmp_path: Path, overrides: list[str]) -> None:
    job, choices = composed(f"output_dir={tmp_path}", *overrides)
    shape = {"1x1": "1"}.get(choices["mesh"], choices["mesh"])
    path = write_plan(tmp_path, job, {"dp": {"level": 3, "why": ("a", "b")}}, choices | {"mesh": shape})
    again, choices_again = composed(f"output_dir={tmp_path}", f"experiment={path}")
    assert again == job
    del choices["experiment"], choices_again["experiment"]
    assert choices_again == choices
    assert read_plan(path)["reasons"] == {"dp": {"level": 3, "why": ["a", "b"]}}


def test_what_belongs_to_one_run_is_left_out(tmp_path: Path) -> None:
    job, choices = composed("logger=tensorboard", f"output_dir={tmp_path}", "ckpt_path=last", "task=plan")
    path = write_plan(tmp_path, job, {}, choices)
    plan = read_plan(path)
    assert not plan.keys() & {"task", "output_dir", "ckpt_path", "export_path", "hydra", "reasons"}
    assert plan["logger"]["tensorboard"]["save_dir"] == "${output_dir}"
    assert str(tmp_path) not in path.read_text()


def test_the_text(tmp_path: Path) -> None:
    config = {
        "optimizer": {"lr": 3e-4, "betas": [0.9, 0.95]},
        "own_key": "a, b: c",
        "mesh": {"dp": 2, "mp": 1, "pp": 1, "cp": 1, "order": ["pp", "dp", "cp", "mp"]},
        "name": "run",
        "model": {"name": "llama", "vocab_size": None},
        "output_dir": "out",
        "logger": {"x": {"dir": "out/x", "other": "dropout/x", "uri": "file:out/x"}},
    }
    choices = {"model": "llama", "mesh": "2", "experiment": "mine", "hydra/launcher": "basic"}
    path = write_plan(tmp_path, config, {"order": ["styles", "shard"]}, choices)
    assert path == tmp_path / "plan.yaml"
    assert [item.name for item in tmp_path.iterdir()] == ["plan.yaml"]
    assert (
        path.read_text()
        == """\
# @package _global_
# Written by autolaunch. Do the same again with `autolaunch experiment=<this file>`; change it here, or behind that
# with key=value: the keys below win over the options of their groups.
defaults:
- override /mesh: '2'
- override /model: llama
- _self_

# --- What is trained ---
name: run
model:
  name: llama
  vocab_size: null

# --- On which devices, and how ---
mesh:
  order:
  - pp
  - dp
  - cp
  - mp

# --- How it learns ---
optimizer:
  lr: 0.0003
  betas:
  - 0.9
  - 0.95

# --- What is written ---
logger:
  x:
    dir: ${output_dir}/x
    other: dropout/x
    uri: file:${output_dir}/x

# --- Further keys ---
own_key: 'a, b: c'

# --- What was applied, and why (not read back) ---
reasons:
  order:
  - styles
  - shard
"""
    )


def test_what_the_first_batch_shows_of_compiled_blocks_is_added(tmp_path: Path) -> None:
    job, choices = composed(f"output_dir={tmp_path}", "compile=true")
    screen = _Screen(cast(ResolvedJob, SimpleNamespace(config=job, output_dir=tmp_path, choices=choices)))
    screen._account = {"order": ["compile"], "compile": {"mode": True, "blocks": ["h.0"]}}
    shown = {"mode": True, "blocks": ["h.0"], "reasons": {"h.0": "runs as it is: it draws random numbers of Python's"}}
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(describe=lambda: {"compile": shown}))
    screen.on_train_batch_end(trainer)
    assert read_plan(tmp_path / "plan.yaml")["reasons"] == {"order": ["compile"], "compile": shown}
    (tmp_path / "plan.yaml").unlink()
    screen.on_train_batch_end(trainer)  # once
    assert not (tmp_path / "plan.yaml").exists()
