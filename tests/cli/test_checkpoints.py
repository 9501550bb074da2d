"""`autolaunch checkpoint verify`, and the export of a checkpoint that somebody else made."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autolaunch.cli import run
from autolaunch.config.trained import trained_config
from autolaunch.tasks.trusted import check_targets
from autolaunch_strategies.checkpoint.files import MANIFEST, WRITING, write_manifest
from autolaunch_strategies.config import ConfigError
from tests.support.messages import assert_told


def _checkpoint(directory: Path, step: int) -> Path:
    path = directory / f"step_{step:07d}.ckpt"
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"x" * 5000)
    (path / ".metadata").write_bytes(b"m" * 20)
    (path / "meta.pt").write_bytes(b"y" * 10)
    write_manifest(path, step, "2x1x2")
    return path


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """The output directory of a run with two checkpoints and one that was never finished."""
    directory = tmp_path / "run"
    for step in (10, 20):
        _checkpoint(directory / "checkpoints", step)
    (directory / "checkpoints" / f"step_0000030.ckpt{WRITING}").mkdir()
    return directory


def _verify(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = run(["checkpoint", "verify", str(path)])
    shown = capsys.readouterr()
    return code, " ".join(shown.out.split()), shown.err


@pytest.mark.parametrize("what", [".", "checkpoints", "checkpoints/step_0000020.ckpt"])
def test_whole_checkpoints(what: str, outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, _ = _verify(outputs / what, capsys)
    assert code == 0
    assert "step_0000020.ckpt 20 2x1x2 4.9 KiB whole" in shown
    assert ("step_0000010.ckpt 10" in shown) == (not what.endswith("ckpt"))


def test_checkpoints_of_several_runs(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _checkpoint(outputs.parent / "later" / "checkpoints", 7)
    code, shown, _ = _verify(outputs.parent, capsys)
    assert code == 0
    assert "later/checkpoints/step_0000007.ckpt 7" in shown
    assert f"{outputs.name}/checkpoints/step_0000020.ckpt 20" in shown


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "meta.pt"])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_flip, "the content of {} has changed"),
        (lambda file: file.unlink(), "{} is missing"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "{} has"),
        (lambda file: file.write_bytes(file.read_bytes() + b"x"), "{} has"),
        (lambda file: file.write_bytes(b""), "{} has 0 bytes"),
        (lambda file: (file.unlink(), file.mkdir()), "{} is missing"),
        (lambda file: file.write_bytes(bytes(file.stat().st_size)), "the content of {} has changed"),
        (lambda file: file.write_bytes(b"1" + file.read_bytes()[1:]), "the content of {} has changed"),
    ],
    ids=["flipped", "missing", "short", "long", "empty", "directory", "zeros", "byte"],
)
def test_damage_is_named(
    damage: Callable[[Path], Any], said: str, name: str, outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = outputs / "checkpoints" / "step_0000020.ckpt" / name
    damage(file)
    code, shown, _ = _verify(outputs, capsys)
    assert code == 1
    assert "step_0000010.ckpt 10 2x1x2 4.9 KiB whole" in shown
    assert said.format(name) in shown


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", f"no readable {MANIFEST}"),
        ("[]", f"no readable {MANIFEST}"),
        ('{"format": 2, "step": "x", "files": {}}', f"no readable {MANIFEST}"),
        ('{"format": 2, "files": {}}', f"no readable {MANIFEST}"),
        ('{"format": 2, "step": 3, "files": {"a": {}}}', f"no readable {MANIFEST}"),
        ('{"format": 99, "step": 3, "files": {}}', "newer autolaunch"),
    ],
)
def test_a_damaged_manifest_is_named(text: str, said: str, outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (outputs / "checkpoints" / "step_0000020.ckpt" / MANIFEST).write_text(text)
    code, shown, _ = _verify(outputs, capsys)
    assert code == 1
    assert said in shown


def test_a_manifest_without_hashes_is_said_to_be_one(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = outputs / "checkpoints" / "step_0000020.ckpt" / MANIFEST
    content = json.loads(manifest.read_text())
    sizes = {name: entry["size"] for name, entry in content["files"].items()}
    del content["xxh3"]
    manifest.write_text(json.dumps({**content, "format": 1, "files": sizes}))
    code, shown, _ = _verify(outputs, capsys)
    assert code == 0
    assert "whole by its size: it has no hashes" in shown


@pytest.mark.parametrize("words", [[], ["verify"], ["check", "x"], ["verify", "a", "b"]])
def test_other_words_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoint", *words]) == 2
    line = "autolaunch checkpoint verify outputs/run/<date>_<time>"
    assert_told(capsys.readouterr().err, " ".join(["autolaunch checkpoint", *words]), "one path", write=line)


def test_a_word_that_is_misspelt(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoint", "verfy", "X"]) == 2
    told = capsys.readouterr().err
    assert_told(told, "autolaunch checkpoint verfy X", "did you mean verify", write="autolaunch checkpoint verify X")


def test_single_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, zipped in (("new.ckpt", True), ("old.ckpt", False)):
        torch.save({"a": torch.ones(2)}, tmp_path / name, _use_new_zipfile_serialization=zipped)
        code, shown, _ = _verify(tmp_path / name, capsys)
        assert code == 0 and "whole by its size" in shown
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "cut.ckpt").write_bytes((tmp_path / "new.ckpt").read_bytes()[:-40])
    with zipfile.ZipFile(tmp_path / "any.zip", "w") as archive:
        archive.writestr("a.txt", "a")
    for name, problem in (("rows.jsonl", "no checkpoint"), ("any.zip", "no checkpoint"), ("cut.ckpt", "is damaged")):
        code, shown, _ = _verify(tmp_path / name, capsys)
        assert code == 1 and problem in shown


def test_nothing_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = _verify(tmp_path / "nothing", capsys)
    assert code == 2
    assert "no such file" in error
    assert _verify(tmp_path, capsys)[0] == 2


@pytest.mark.parametrize(
    "config",
    [
        {"model": {"_target_": "os.system", "command": "true"}},
        {"model": {"_target_": "torch.nn.Sequential", "x": {"_target_": "subprocess.Popen"}}},
        {"module": {"_target_": "builtins.eval"}, "model": {}},
    ],
)
def test_export_calls_nothing_but_models_of_a_config_beside_a_checkpoint(config: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="code of its choice"):
        check_targets(tmp_path, config)


def test_export_takes_models_of_a_config_beside_a_checkpoint(tmp_path: Path) -> None:
    check_targets(tmp_path, {"model": {"_target_": "torch.nn.Linear"}, "module": None})


def test_data_of_a_job_beside_a_checkpoint_are_built_by_what_was_typed_or_by_data_modules(tmp_path: Path) -> None:
    config = {"data": {"_target_": "os.listdir"}}
    with pytest.raises(ConfigError, match="code of its choice"):
        check_targets(tmp_path, config, ["data"])
    check_targets(tmp_path, config, ["data"], ["data._target_"])
    check_targets(tmp_path, {"data": {"_target_": "lightning.pytorch.LightningDataModule"}}, ["data"])


@pytest.mark.parametrize("text", ["", "{", "[]", '{"config": {}}', "\x00\x01", '{"config": 3}'])
def test_export_names_a_damaged_job_beside_a_checkpoint(text: str, outputs: Path) -> None:
    job = outputs / ".hydra" / "job.json"
    job.parent.mkdir()
    job.write_text(text)
    with pytest.raises(ConfigError, match=f"the job of its run, {job}, can't be read"):
        trained_config(outputs / "checkpoints" / "step_0000020.ckpt")
