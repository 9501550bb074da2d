"""Objects by `_target_`: what is called, with what, and what is said when it cannot be. Imports no torch."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from autolaunch.instantiate import build
from autolaunch_strategies.config import ConfigError
from tests.support.messages import Told, assert_only_told

USERS_MODULE = """
class Net:
    def __init__(self, width, depth=2, *, act=None, params=None):
        self.width, self.depth, self.act, self.params = width, depth, act, params

def scaled(x, by=1):
    return x * by

def anything(**kwargs):
    return kwargs

def fails(width=1):
    raise RuntimeError("my own bug")

constant = 3
"""


@pytest.fixture(autouse=True)
def users_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "users_models.py").write_text(USERS_MODULE)
    (tmp_path / "users_broken.py").write_text("import a_package_that_is_not_there\n")
    (tmp_path / "users_raises.py").write_text("raise OSError('no licence')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("users_models", "users_broken", "users_raises"):
        sys.modules.pop(name, None)


def test_nested_targets_plain_containers_and_objects_by_identity() -> None:
    parameters = [object(), {"group": object()}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Hydra 1.4 warns about targets that nobody vouched for
        net = build(
            {
                "_target_": "users_models.Net",
                "width": {"a": [1, 2]},
                "act": {"_target_": "users_models.anything", "x": 1},
            },
            "model",
            params=parameters,
        )
    assert type(net.width) is dict and type(net.width["a"]) is list
    assert net.act == {"x": 1} and net.depth == 2
    assert net.params is parameters and net.params[1] is parameters[1]


def test_keys_that_are_no_arguments_are_left_out() -> None:
    assert build({"_target_": "users_models.anything", "name": "n", "loss": "mse"}, "model", ("loss",)) == {"name": "n"}


def test_partial_gives_the_function() -> None:
    double = build({"_target_": "users_models.scaled", "by": 2, "_partial_": True}, "model.loss")
    assert double(21) == 42
    assert build({"_target_": "users_models.scaled", "_partial_": True}, "model.loss", by=3)(2) == 6


def test_the_users_own_failure_comes_through() -> None:
    for node in (
        {"_target_": "users_models.fails"},
        {"_target_": "users_models.anything", "x": {"_target_": "users_models.fails"}},
    ):
        with pytest.raises(RuntimeError, match=r"^my own bug"):
            build(node, "model")


@pytest.mark.parametrize(
    ("node", "told"),
    [
        pytest.param(
            {"_target_": "nowhere.Net"},
            Told("model._target_=nowhere.Net", "no module named nowhere"),
            id="no-module",
        ),
        pytest.param(
            {"_target_": "users_models.Nett"},
            Told("model._target_=users_models.Nett", "users_models.Net"),
            id="no-attribute",
        ),
        pytest.param(
            {"_target_": "users_broken.Net"},
            Told(
                "model._target_=users_broken.Net",
                "users_broken",
                "ModuleNotFoundError: No module named 'a_package_that_is_not_there'",
            ),
            id="missing-dependency",
        ),
        pytest.param(
            {"_target_": "users_raises.Net"},
            Told("model._target_=users_raises.Net", "users_raises", "OSError: no licence"),
            id="import-raises",
        ),
        pytest.param(
            {"_target_": "Net"},
            Told("model._target_=Net", "not an import path", allowed=("module.Name",)),
            id="no-dot",
        ),
        pytest.param(
            {"_target_": None},
            Told("model._target_=None", "not an import path", allowed=("module.Name",)),
            id="not-text",
        ),
        pytest.param(
            {"_target_": "users_models.constant"},
            Told("model._target_=users_models.constant", "int", "called"),
            id="not-callable",
        ),
        pytest.param(
            {"_target_": "users_models.Net", "widht": 3},
            Told("model.widht", "width", allowed="width, depth, act, params"),
            id="unknown-argument",
        ),
        pytest.param(
            {"_target_": "users_models.Net", "depth": 3},
            Told("model._target_=users_models.Net", "users_models.Net", "width", write="model.width=..."),
            id="missing-argument",
        ),
        pytest.param(
            {"_target_": "users_models.Net", "width": 1, "act": {"_target_": "users_models.Net", "dept": 1}},
            Told("model.act.dept", "depth", allowed="width, depth, act, params"),
            id="nested-unknown-argument",
        ),
        pytest.param(
            {"_target_": "users_models.Net", "width": [{"_target_": "users_models.Mlp"}]},
            Told("model.width.0._target_=users_models.Mlp", "users_models"),
            id="nested-in-list",
        ),
    ],
)
def test_what_cannot_be_built(node: dict, told: Told) -> None:
    with pytest.raises(ConfigError) as caught:
        build(node, "model")
    assert_only_told(caught.value, told)


def test_what_hydra_refuses() -> None:
    with pytest.raises(ConfigError) as caught:
        build({"_target_": "subprocess.run", "_args_": ["true"]}, "model")
    assert_only_told(caught.value, Told("model._target_=subprocess.run", "Hydra", "'subprocess.run'"))


def test_without_a_place_the_message_names_the_target() -> None:
    with pytest.raises(ConfigError) as caught:
        build({"_target_": "users_models.Net"})
    assert_only_told(caught.value, Told("_target_=users_models.Net", "users_models.Net", "width", write="width: ..."))
