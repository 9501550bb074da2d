"""Loading a checkpoint runs none of the code that its files name."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import AttributeDict
from omegaconf import OmegaConf
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from autolaunch_strategies import ConfigError, MeshStrategy
from autolaunch_strategies.checkpoint import sharded
from autolaunch_strategies.checkpoint.files import (
    MANIFEST,
    complete_checkpoints,
    problem_with,
    read_manifest,
    write_manifest,
)
from autolaunch_strategies.checkpoint.plain_data import NotPlainData, load_plain, unpickle
from autolaunch_strategies.checkpoint.storage import Writer
from autolaunch_strategies.checkpoint.whole import whole_checkpoint
from autolaunch_strategies.mesh.process_group import leave_process_group
from tests.lightning.modules import AutoEncoder
from tests.support.messages import Told, assert_told


class Touches:
    """Its pickle writes a file when it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.file,))


def _trainer(steps: int, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        strategy=MeshStrategy(mesh="1", **options), accelerator="cpu", max_steps=steps, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def _batches(count: int = 2) -> torch.utils.data.DataLoader[Any]:
    data = torch.utils.data.TensorDataset(torch.randn(4 * count, 16), torch.zeros(4 * count))
    return torch.utils.data.DataLoader(data, batch_size=4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("plain") / "good.ckpt"
    run = _trainer(1)
    run.fit(AutoEncoder(), _batches())
    run.save_checkpoint(path)
    yield path
    leave_process_group()


def _in_meta(path: Path, evil: Touches) -> None:
    content = load_plain(path / "meta.pt")
    torch.save({**content, "hyper_parameters": {"x": evil}}, path / "meta.pt")


def _in_metadata(path: Path, evil: Touches) -> None:
    with (path / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    metadata.planner_data = {"x": evil}
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def _instead_of_meta(path: Path, evil: Touches) -> None:
    (path / "meta.pt").write_bytes(pickle.dumps(evil))


def _instead_of_metadata(path: Path, evil: Touches) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(evil, protocol=0))


def _in_place_of(name: str, path: Path, evil: Touches) -> None:
    """In place of a tensor, as what `torch.save` makes of the evil."""
    with (path / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    index, place = next((index, place) for index, place in metadata.storage_data.items() if name in index.fqn)
    torch.save(evil, path / "__9_0.distcp")
    place.relative_path, place.offset, place.length = "__9_0.distcp", 0, (path / "__9_0.distcp").stat().st_size
    metadata.storage_data[index] = place
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def _in_a_weight(path: Path, evil: Touches) -> None:
    _in_place_of("model.encoder", path, evil)


def _in_the_optimizer(path: Path, evil: Touches) -> None:
    _in_place_of("exp_avg", path, evil)


def _in_a_value(path: Path, evil: Touches) -> None:
    """In place of the first value that is no tensor."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    with (path / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    values = [name for name, kind in metadata.state_dict_metadata.items() if isinstance(kind, BytesStorageMetadata)]
    index, place = next((index, place) for index, place in metadata.storage_data.items() if index.fqn in values)
    torch.save(evil, path / "__9_0.distcp")
    place.relative_path, place.offset, place.length = "__9_0.distcp", 0, (path / "__9_0.distcp").stat().st_size
    metadata.storage_data[index] = place
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


class _Seen(torch.nn.Linear):
    """Keeps something that is no tensor."""

    def get_extra_state(self) -> Any:
        return {"seen": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


class _WithState(AutoEncoder):
    def __init__(self) -> None:
        super().__init__()
        self.extra = _Seen(1, 1)


@pytest.mark.parametrize(
    "put",
    [
        _in_meta, _in_metadata, _in_a_value, _instead_of_meta, _instead_of_metadata, _in_a_weight, _in_the_optimizer,
    ],
)  # fmt: skip
def test_a_malicious_directory_is_refused(
    put: Callable[[Path, Touches], None], tmp_path: Path, checkpoint: Path
) -> None:
    path, touched = tmp_path / "bad.ckpt", tmp_path / "touched"
    make = AutoEncoder
    if put is _in_a_value:
        make = _WithState
        run = _trainer(1)
        run.fit(make(), _batches())
        run.save_checkpoint(path)
    else:
        shutil.copytree(checkpoint, path)
    put(path, Touches(touched))
    step = read_manifest(path)["step"]
    (path / MANIFEST).unlink()
    write_manifest(path, step, "1")
    with pytest.raises(ConfigError) as caught:
        _trainer(2).fit(make(), _batches(), ckpt_path=str(path))
    assert not touched.exists()
    if put not in (_in_a_weight, _in_the_optimizer):  # torch itself reads tensors, and nothing else
        line = "checkpoint.trust=true, in a script MeshStrategy(trust_checkpoints=True)"
        assert_told(caught.value, f"ckpt_path={path}", "would run code", write=line)
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize("put", [_in_meta, _in_metadata, _instead_of_meta, _instead_of_metadata, _in_a_weight])
def test_a_malicious_directory_is_refused_by_load_from_checkpoint(
    put: Callable[[Path, Touches], None], tmp_path: Path, checkpoint: Path
) -> None:
    path, touched = tmp_path / "bad.ckpt", tmp_path / "touched"
    shutil.copytree(checkpoint, path)
    put(path, Touches(touched))
    (path / MANIFEST).unlink()
    write_manifest(path, 1, "1")
    with pytest.raises(ConfigError):
        whole_checkpoint(path)
    assert not touched.exists()


@pytest.mark.parametrize("key", ["x", "state_dict", "optimizer_states", "hyper_parameters"])
@pytest.mark.parametrize("old", [False, True], ids=["archive", "old-format"])
def test_a_malicious_file_of_plain_lightning_is_refused(key: str, old: bool, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    content = {"state_dict": {}, key: {"x": Touches(touched)}}
    torch.save(content, tmp_path / "bad.ckpt", _use_new_zipfile_serialization=not old)
    with pytest.raises(ConfigError, match="would run code"):
        _trainer(2).fit(AutoEncoder(), _batches(), ckpt_path=str(tmp_path / "bad.ckpt"))
    assert not touched.exists()


EVIL_PLAN = """
# @package _global_
model: {{_target_: os.system, command: "touch {touched}"}}
data: {{_target_: pathlib.Path.touch, self: {touched}}}
trainer:
  callbacks:
    evil: {{_target_: os.system, command: "touch {touched}"}}
"""


@pytest.mark.parametrize(
    "words", [["--cfg", "job"], ["checkpoint", "verify"], ["--info", "all"], ["--help"]], ids=lambda words: words[-1]
)
def test_looking_at_a_plan_calls_nothing_that_it_names(
    words: list[str], tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autolaunch.cli import run

    touched = tmp_path / "touched"
    shutil.copytree(checkpoint, tmp_path / "run" / "checkpoints" / "good.ckpt")
    plan = tmp_path / "run" / "plan.yaml"
    plan.write_text(EVIL_PLAN.format(touched=touched))
    job = {"config": {"model": {"_target_": "os.system", "command": f"touch {touched}"}}}
    (tmp_path / "run" / ".hydra").mkdir()
    (tmp_path / "run" / ".hydra" / "job.json").write_text(json.dumps(job))
    monkeypatch.chdir(tmp_path)
    run([*words, str(tmp_path / "run") if "verify" in words else f"experiment={plan}"])
    assert not touched.exists()


def test_a_program_is_no_checkpoint(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(2)), tmp_path / "program.ckpt")
    with pytest.raises(ConfigError, match="TorchScript"):
        _trainer(2).fit(AutoEncoder(), _batches(), ckpt_path=str(tmp_path / "program.ckpt"))


def test_plain_data_of_many_kinds_come_back(tmp_path: Path) -> None:
    import argparse
    import datetime
    from collections import OrderedDict, defaultdict

    values = {
        "hyperparameters": AttributeDict(width=3),
        "config": OmegaConf.create({"a": [1, 2.5, {"b": "c"}], "none": None}),
        "numbers": [np.float64(3), np.arange(3), 1j, range(3), {1, 2}, frozenset([1]), b"x", torch.float32],
        "time": datetime.timedelta(minutes=3),
        "path": tmp_path,
        "counts": defaultdict(int, a=1),
        "ordered": OrderedDict(a=1),
        "arguments": argparse.Namespace(lr=0.1),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    torch.save(values, tmp_path / "x.pt")
    loaded = load_plain(tmp_path / "x.pt")
    assert str(loaded) == str(values)


@pytest.mark.parametrize("name", ["eval", "exec", "__import__", "setattr"])
def test_builtins_that_do_something_are_not_given(name: str) -> None:
    with pytest.raises(NotPlainData):
        unpickle(io.BytesIO(b"c__builtin__\n" + name.encode() + b"\n."))


def _attribute(of: str, name: str) -> io.BytesIO:
    """`getattr(of, name)`, as Python up to 3.11.3 pickles a member of an enumeration."""
    return io.BytesIO(
        f"c__builtin__\ngetattr\n(c{of}\nX".encode() + struct.pack("<I", len(name)) + name.encode() + b"tR."
    )


def test_members_of_enumerations_come_back_as_any_python_wrote_them() -> None:
    module = "torch.distributed.checkpoint.metadata"
    found = unpickle(_attribute(f"{module}\n_MEM_FORMAT_ENCODING", "TORCH_PRESERVE_FORMAT"))
    assert found is _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT
    assert unpickle(io.BytesIO(pickle.dumps(found))) is found


@pytest.mark.parametrize(
    ("of", "name"),
    [
        ("pathlib\nPath", "touch"),
        ("__builtin__\ndict", "__init__"),
        ("torch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING", "__class__"),
    ],
)
def test_other_attributes_are_not_given(of: str, name: str) -> None:
    with pytest.raises(NotPlainData, match="getattr"):
        unpickle(_attribute(of, name))


def test_what_the_user_declared_safe_is_given(tmp_path: Path) -> None:
    torch.save({"x": Told("a")}, tmp_path / "x.pt")
    with pytest.raises(NotPlainData):
        load_plain(tmp_path / "x.pt")
    with torch.serialization.safe_globals([Told]):
        assert load_plain(tmp_path / "x.pt") == {"x": Told("a")}


def test_a_checkpoint_in_the_background_is_in_place_once_it_is_written(tmp_path: Path) -> None:
    """Not only when the next one is saved: a killed run keeps it. What it replaces is removed then, not before."""
    run = _trainer(1, asynchronous_checkpoints=True)
    run.fit(AutoEncoder(), _batches())
    run.save_checkpoint(tmp_path / "a.ckpt")
    run.save_checkpoint(tmp_path / "b.ckpt")
    run.strategy.remove_checkpoint(tmp_path / "a.ckpt")
    patience = time.monotonic() + 60
    while {item.name for item in tmp_path.iterdir()} != {"b.ckpt"}:
        assert time.monotonic() < patience, sorted(tmp_path.iterdir())
        time.sleep(0.01)
    assert problem_with(tmp_path / "b.ckpt") is None
    run.strategy.checkpoints.finish()


def test_a_checkpoint_that_is_never_written_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    write = Writer.write_data

    def hang(self: Writer, *args: Any) -> Any:
        goes_on.wait(60)
        return write(self, *args)

    monkeypatch.setattr(Writer, "write_data", hang)
    run = _trainer(1, asynchronous_checkpoints=True, timeout=1.0, first_step_timeout=1.0)
    run.fit(AutoEncoder(), _batches())
    run.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(RuntimeError, match=f"rank 0 could not write {tmp_path}/a.ckpt: it is not done after 1 s"):
        run.strategy.checkpoints.finish()
    goes_on.set()
    patience = time.monotonic() + 60
    while not (tmp_path / "a.ckpt").exists():  # what is late still takes its place
        assert time.monotonic() < patience
        time.sleep(0.01)


def test_what_fails_in_the_background_takes_no_place_and_the_next_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training waits for that one, and fails if it can't be written either; older ones stay until one is whole."""

    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    run = _trainer(1, asynchronous_checkpoints=True)
    run.fit(AutoEncoder(), _batches())
    strategy: Any = run.strategy
    run.save_checkpoint(tmp_path / "a.ckpt")
    strategy.checkpoints.finish()
    with monkeypatch.context() as patch:
        patch.setattr(sharded, "write_manifest", fail)
        run.save_checkpoint(tmp_path / "b.ckpt")
        while not strategy.checkpoints._writer._running.done():
            time.sleep(0.01)
        strategy.remove_checkpoint(tmp_path / "a.ckpt")
        with (
            pytest.warns(UserWarning, match="could not write .*b.ckpt: OSError: .*training waits for the next"),
            pytest.raises(RuntimeError, match=r"could not write .*c.ckpt: OSError: .*No space left"),
        ):
            run.save_checkpoint(tmp_path / "c.ckpt")
    assert complete_checkpoints(tmp_path) == [tmp_path / "a.ckpt"]
    run.save_checkpoint(tmp_path / "c.ckpt")
    assert complete_checkpoints(tmp_path) == [tmp_path / "c.ckpt"]
    monkeypatch.setattr(sharded, "write_manifest", fail)
    run.save_checkpoint(tmp_path / "d.ckpt")
    with pytest.warns(UserWarning, match=r"could not write .*d.ckpt"):  # not hidden by what ends the training
        strategy.on_exception(RuntimeError())
        strategy.teardown()


def test_a_checkpoint_is_on_the_disk_before_another_one_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _trainer(1)
    run.fit(AutoEncoder(), _batches())
    run.save_checkpoint(tmp_path / "a.ckpt")
    done: list[Path] = []
    synced, removed = os.fsync, sharded._remove
    monkeypatch.setattr(os, "fsync", lambda it: (done.append(Path(f"/proc/self/fd/{it}").readlink()), synced(it)))
    monkeypatch.setattr(sharded, "_remove", lambda path: (done.append(path), removed(path)))
    run.save_checkpoint(tmp_path / "a.ckpt")
    beside = tmp_path / "a.ckpt.writing"
    content, names = [beside / "meta.pt", beside / "checkpoint.json.writing", beside], [tmp_path]
    replaced = tmp_path / "a.ckpt.replaced"  # one of a process that was killed, then that of this one
    expected = [*content, replaced, *names, replaced]
    assert [path for path in done if path in expected] == expected


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_can_not_be_written_is_named_with_the_rank(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Writer, *args: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Writer, "write_data", fail)
    run = _trainer(1, asynchronous_checkpoints=asynchronous)
    run.fit(AutoEncoder(), _batches())
    with pytest.raises(RuntimeError, match=rf"rank 0 could not write {tmp_path}/a.ckpt: OSError: .*No space left"):
        run.save_checkpoint(tmp_path / "a.ckpt")
        run.strategy.checkpoints.finish()
    assert problem_with(tmp_path / "a.ckpt") == "does not exist"
