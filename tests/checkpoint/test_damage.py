"""Whatever happens to a file of a checkpoint: one message names it and the newest whole one, and `last` goes back."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from autolaunch.config.resume import damage_passed_over, resolve_ckpt_path
from autolaunch_strategies import ConfigError, MeshStrategy
from autolaunch_strategies.checkpoint.files import (
    MANIFEST,
    complete_checkpoints,
    damage_in,
    files_with_hashes,
    problem_with,
    read_manifest,
)
from autolaunch_strategies.checkpoint.whole import whole_checkpoint
from autolaunch_strategies.mesh.process_group import leave_process_group
from tests.lightning.modules import AutoEncoder

SHARD, META, METADATA = "__0_0.distcp", "meta.pt", ".metadata"


class Shelf:
    """Checkpoints of a run after 2 and 4 steps, and a strategy that loads them in this process.

    Attributes:
        run: the run's output directory, in which `checkpoints/` holds them.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        data = torch.utils.data.TensorDataset(torch.randn(16, 16), torch.zeros(16))
        for path, steps in ((self.earlier, 2), (self.newest, 4)):
            self.module, self.trainer = AutoEncoder(), pl.Trainer(
                strategy=MeshStrategy(mesh="1"), accelerator="cpu", max_steps=steps, logger=False,
                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
            self.trainer.fit(self.module, torch.utils.data.DataLoader(data, batch_size=4))
            self.trainer.save_checkpoint(path)

    @property
    def newest(self) -> Path:
        return self.run / "checkpoints" / "step_0000004.ckpt"

    @property
    def earlier(self) -> Path:
        return self.run / "checkpoints" / "step_0000002.ckpt"

    def copied(self, run: Path) -> Shelf:
        """The same files in another directory, to be damaged."""
        copy = object.__new__(Shelf)
        copy.__dict__.update(self.__dict__)
        copy.run = run
        shutil.copytree(self.run, run)
        return copy

    def resume(self, ckpt_path: str) -> int:
        """The step from which a run with `ckpt_path` goes on: what the command does before it starts, then a rank."""
        config = {"ckpt_path": ckpt_path, "name": "run", "task": "fit"}
        path = resolve_ckpt_path(config, self.run)
        assert path is not None
        strategy: Any = self.trainer.strategy
        strategy.checkpoints.earlier_if_damaged = ckpt_path == "last"
        return strategy.checkpoints.load(Path(path), self.module, strategy.optimizers, True)["global_step"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    yield Shelf(tmp_path_factory.mktemp("damage") / "run")
    leave_process_group()


@pytest.fixture
def shelf(whole: Shelf, tmp_path: Path) -> Shelf:
    return whole.copied(tmp_path / "run")


def _flip(file: Path, place: float = 0.5) -> None:
    content = bytearray(file.read_bytes())
    content[int(len(content) * place)] ^= 4
    file.write_bytes(content)


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size * 2 // 3)


def _empty(file: Path) -> None:
    os.truncate(file, 0)


def _randomise(file: Path) -> None:
    file.write_bytes(random.Random(0).randbytes(file.stat().st_size))


def _lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x")


def _make_a_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _make_a_loop(file: Path) -> None:
    """Something that can't be opened, also by root."""
    file.unlink()
    file.symlink_to(file)


def _swap(file: Path) -> None:
    """With the file of that name in the other checkpoint; both are damaged then, so the other keeps a copy."""
    other = file.parents[1] / "step_0000002.ckpt" / file.name
    file.write_bytes(other.read_bytes())


def _change_content(key: str, value: Any) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))

    return change


CHANGED, SIZE, MISSING, UNREADABLE = "the content of {} has changed", "{} has ", "{} is missing", "can't be read: {}"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "bit-flipped": (_flip, CHANGED),
    "first-bit-flipped": (lambda file: _flip(file, 0.0), CHANGED),
    "last-bit-flipped": (lambda file: _flip(file, 0.9999), CHANGED),
    "truncated": (_truncate, SIZE),
    "emptied": (_empty, "{} has 0 bytes"),
    "missing": (Path.unlink, MISSING),
    "random-bytes": (_randomise, CHANGED),
    "lengthened": (_lengthen, SIZE),
    "a-directory": (_make_a_directory, MISSING),
    "unreadable": (_make_a_loop, "{}"),
}
NO_MANIFEST = f"no readable {MANIFEST}"
OF_MANIFEST: dict[str, tuple[Callable[[Path], Any], str]] = {
    "bit-flipped": (_flip, NO_MANIFEST),
    "truncated": (_truncate, NO_MANIFEST),
    "emptied": (_empty, NO_MANIFEST),
    "missing": (Path.unlink, NO_MANIFEST),
    "random-bytes": (_randomise, NO_MANIFEST),
    "a-directory": (_make_a_directory, f"can't be read: {MANIFEST}"),
    "unreadable": (_make_a_loop, f"can't be read: {MANIFEST}"),
    "of-another-checkpoint": (_swap, CHANGED.format("")[:14]),
    "another-step": (_change_content("step", 40), NO_MANIFEST),
    "no-files": (_change_content("files", {}), NO_MANIFEST),
    "no-hash": (_change_content("xxh3", None), NO_MANIFEST),
    "newer": (_change_content("format", 99), "newer autolaunch"),
}
OF_DIRECTORY: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (shutil.rmtree, "does not exist"),
    "emptied": (lambda path: (shutil.rmtree(path), path.mkdir()), NO_MANIFEST),
    "a-file": (lambda path: (shutil.rmtree(path), path.write_bytes(b"")), "is an empty file"),
    "another-file": (lambda path: (shutil.rmtree(path), path.write_bytes(b"x" * 99)), "torch can't read it"),
    "unreadable": (lambda path: (shutil.rmtree(path), path.symlink_to(path)), "can't be read"),
}
CASES = [
    *(
        pytest.param(name, damage, said.format(name), id=f"{name}-{kind}")
        for name in (SHARD, META, METADATA)
        for kind, (damage, said) in DAMAGES.items()
    ),
    *(
        pytest.param(name, _swap, CHANGED.format(name) if name != METADATA else name, id=f"{name}-of-another")
        for name in (SHARD, META)
    ),
    *(pytest.param(MANIFEST, damage, said, id=f"manifest-{kind}") for kind, (damage, said) in OF_MANIFEST.items()),
    *(pytest.param("", damage, said, id=f"directory-{kind}") for kind, (damage, said) in OF_DIRECTORY.items()),
]


@pytest.mark.parametrize(("name", "damage", "said"), CASES)
def test_damage_is_named_with_the_newest_whole_one(
    name: str, damage: Callable[[Path], Any], said: str, shelf: Shelf
) -> None:
    damage(shelf.newest / name)
    with pytest.raises(ConfigError) as caught:
        shelf.resume(str(shelf.newest))
    message = str(caught.value)
    assert said in message
    assert message.startswith(f"ckpt_path={shelf.newest}: ")
    assert message.endswith(f"write:   ckpt_path={shelf.earlier}")
    assert len(message.splitlines()) == 3
    assert "weights_only" not in message


@pytest.mark.parametrize(("name", "damage", "said"), CASES)
def test_last_goes_back_to_the_newest_whole_one(
    name: str, damage: Callable[[Path], Any], said: str, shelf: Shelf, recwarn: pytest.WarningsRecorder
) -> None:
    damage(shelf.newest / name)
    assert shelf.resume("last") == 2
    told = [str(item.message) for item in recwarn if "instead" in str(item.message)]
    told += [text] if (text := damage_passed_over(shelf.earlier)) else []
    if shelf.newest.exists() and shelf.newest.is_dir():
        assert len(told) == 1
        assert said in told[0]
        assert str(shelf.newest) in told[0]


@pytest.mark.parametrize("kind", ["file", "directory", "temporary"])
def test_files_that_are_not_of_the_checkpoint_do_not_matter(kind: str, shelf: Shelf) -> None:
    if kind == "directory":
        (shelf.newest / "extra").mkdir()
    else:
        (shelf.newest / ("__7_0.distcp" if kind == "file" else ".nfs00012")).write_bytes(b"x")
    assert shelf.resume(str(shelf.newest)) == shelf.resume("last") == 4


def test_if_none_is_whole_the_newest_is_named(shelf: Shelf) -> None:
    for path in (shelf.newest, shelf.earlier):
        (path / META).unlink()
    with pytest.raises(ConfigError, match=r"\.ckpt is damaged: meta.pt is missing\n.*; there is none in"):
        shelf.resume("last")


def test_load_from_checkpoint_names_it_too(shelf: Shelf) -> None:
    _flip(shelf.newest / SHARD)
    with pytest.raises(ConfigError, match=f"{SHARD} has changed since it was written\n.*\n.*{shelf.earlier}$"):
        whole_checkpoint(shelf.newest)


def test_every_bit_of_a_manifest_counts(shelf: Shelf) -> None:
    """Or changes nothing that it says."""
    file = shelf.newest / MANIFEST
    content, manifest = file.read_bytes(), read_manifest(shelf.newest)
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        file.write_bytes(flipped)
        assert problem_with(shelf.newest) is not None or read_manifest(shelf.newest) == manifest, f"byte {place}"


@pytest.mark.parametrize("name", [SHARD, META, METADATA])
def test_any_flipped_bit_is_seen(name: str, shelf: Shelf) -> None:
    file, numbers = shelf.newest / name, random.Random(0)
    content = file.read_bytes()
    for _ in range(100):
        flipped = bytearray(content)
        flipped[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)
        file.write_bytes(flipped)
        assert damage_in(shelf.newest, files_with_hashes(shelf.newest)) is not None


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="has no users")
def test_a_checkpoint_without_rights_is_named(whole: Shelf, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole.run, run)
    newest, earlier = (run / "checkpoints" / path.name for path in (whole.newest, whole.earlier))
    user, parents = os.geteuid(), [item for item in tmp_path.parents if item.stat().st_uid == os.geteuid()]
    modes = {item: item.stat().st_mode for item in (*parents, tmp_path)}
    try:
        if user == 0:  # whom no rights keep out
            for item in modes:
                item.chmod(0o755)
            os.seteuid(65534)
        else:
            newest.chmod(0)
        if user == 0:
            os.seteuid(0)
            newest.chmod(0)
            os.seteuid(65534)
        assert complete_checkpoints(run / "checkpoints") == [earlier]
        problem = problem_with(newest)
        assert problem is not None
        assert problem.startswith("can't be read: ")
        found = resolve_ckpt_path({"ckpt_path": "last", "name": "run", "task": "fit"}, run)
        assert found == str(earlier)
    finally:
        if user == 0:
            os.seteuid(0)
        newest.chmod(0o755)
        for item, mode in modes.items():
            item.chmod(mode)


# --- files of plain Lightning -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("plain") / "x.ckpt"
    trainer = pl.Trainer(max_steps=1, logger=False, enable_progress_bar=False, enable_checkpointing=False,
                         enable_model_summary=False, accelerator="cpu")  # fmt: skip
    data = torch.utils.data.TensorDataset(torch.randn(4, 16), torch.zeros(4))
    trainer.fit(AutoEncoder(), torch.utils.data.DataLoader(data, batch_size=4))
    trainer.save_checkpoint(file)
    return file


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(_truncate, "is damaged: ", id="truncated"),
        pytest.param(_empty, "is an empty file", id="emptied"),
        pytest.param(Path.unlink, "does not exist", id="missing"),
        pytest.param(_randomise, "is damaged: ", id="random-bytes"),
        pytest.param(_make_a_directory, NO_MANIFEST, id="a-directory"),
        pytest.param(_make_a_loop, "can't be read", id="unreadable"),
    ],
)
def test_damage_to_a_plain_file_is_named(
    damage: Callable[[Path], Any], said: str, plain_file: Path, whole: Shelf, tmp_path: Path
) -> None:
    file = tmp_path / "x.ckpt"
    shutil.copy(plain_file, file)
    damage(file)
    with pytest.raises(ConfigError) as caught:
        whole.resume(str(file))
    assert said in str(caught.value)
    assert str(file) in str(caught.value)
    assert "weights_only" not in str(caught.value)


def test_a_flipped_bit_of_a_plain_file_is_named_or_changes_nothing(
    plain_file: Path, whole: Shelf, tmp_path: Path
) -> None:
    file, numbers = tmp_path / "x.ckpt", random.Random(1)
    content = plain_file.read_bytes()
    whole.resume(str(plain_file))
    expected = {name: value.clone() for name, value in whole.module.state_dict().items()}
    refused = 0
    for _ in range(80):
        flipped = bytearray(content)
        flipped[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)
        file.write_bytes(flipped)
        try:
            whole.resume(str(file))
        except ConfigError:
            refused += 1
        else:
            assert all(torch.equal(value, expected[name]) for name, value in whole.module.state_dict().items())
    assert refused > 20
