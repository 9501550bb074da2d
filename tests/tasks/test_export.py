"""What `export` refuses, and what it leaves behind: one whole model, or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from autolaunch.config.command_line import parse
from autolaunch.config.compose import compose, resolved
from autolaunch.config.recorded import recorded_model
from autolaunch.models import build_module
from autolaunch.tasks.export import export_checkpoint
from autolaunch_strategies.checkpoint.files import write_manifest
from autolaunch_strategies.checkpoint.record import plain_record
from autolaunch_strategies.config import ConfigError
from tests.support.messages import assert_told

TINY = (
    "model.size=debug",
    "model.hidden_size=8",
    "model.intermediate_size=8",
    "model.num_heads=2",
    "model.vocab_size=9",
)


def config_of(layers: int, *typed: str) -> dict[str, Any]:
    return resolved(compose(parse([*TINY, "model.num_kv_heads=2", f"model.num_layers={layers}", *typed])).config)


def saved(directory: Path, config: dict[str, Any], *, recorded: bool = False) -> Path:
    """A checkpoint of this model."""
    directory.mkdir()
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"model": build_module(config).state_dict()}, checkpoint_id=directory, no_dist=True)
    run = {"model": plain_record(recorded_model(config))} if recorded else {}
    write_manifest(directory, 1, "1", run=run)
    return directory


def refused(source: Path, target: Path, config: dict[str, Any], *facts: str, **told: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        export_checkpoint(source, target, config)
    assert_told(caught.value, told.get("key", f"ckpt_path={source}"), *facts)
    assert [path for path in target.parent.iterdir() if path not in (source, target)] == []


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    """By what it says of its run, and by its weights where it says nothing."""
    two, target = config_of(2), tmp_path / "out" / "model"
    target.parent.mkdir()
    known, unknown = saved(tmp_path / "known", two, recorded=True), saved(tmp_path / "unknown", two)
    refused(known, target, config_of(1), "num_layers 2 there, 1 here")
    refused(unknown, target, config_of(1), "does not have", "model.layers.1.self_attn.q_proj.weight", "and 6 more")
    refused(unknown, target, config_of(3), "the checkpoint not", "model.layers.2.self_attn.q_proj.weight")
    refused(unknown, target, config_of(2, "model.vocab_size=10"), "another shape", "model.embed_tokens.weight")
    assert export_checkpoint(known, target, two)["parameters"] == sum(
        tensor.numel() for tensor in load_file(target / "model.safetensors").values()
    )


def test_of_two_exports_to_a_directory_one_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, and the other one is told; what it had written is gone."""
    config, target = config_of(1), tmp_path / "out" / "model"
    target.parent.mkdir()
    source = saved(tmp_path / "saved", config)
    reached: list[Path] = []

    def write_tokenizer(directory: Path, *_: object) -> None:
        reached.append(directory)
        if len(reached) == 1:
            export_checkpoint(source, target, config)

    monkeypatch.setattr("autolaunch.tasks.export.write_tokenizer", write_tokenizer)
    refused(source, target, config, "exists already", key=f"export_path={target}")
    assert len(set(reached)) == 2
    assert target.stat().st_mode == target.parent.stat().st_mode  # of no private directory
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors"]
    expected = build_module(config).state_dict()
    weights = load_file(target / "model.safetensors")
    assert {name: tensor.shape for name, tensor in weights.items()} == {
        name.removeprefix("model."): tensor.shape for name, tensor in expected.items()
    }


def test_an_export_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = saved(tmp_path / "saved", config_of(1)), tmp_path / "out" / "model"

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("autolaunch.tasks.export.write_tokenizer", no_space)
    with pytest.raises(OSError, match="No space left"):
        export_checkpoint(source, target, config_of(1))
    assert list(target.parent.iterdir()) == []
    (tmp_path / "file").touch()
    below = tmp_path / "file" / "model"
    with pytest.raises(ConfigError) as caught:
        export_checkpoint(source, below, config_of(1))
    assert_told(caught.value, f"export_path={below}", "cannot be created")
