"""Checkpoints of MeshStrategy: written on one mesh, loaded on any other; damaged ones are recognised."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from autolaunch_strategies import ConfigError, MeshStrategy
from autolaunch_strategies.checkpoint.files import REPLACED, WRITING, complete_checkpoints, problem_with
from autolaunch_strategies.mesh.process_group import leave_process_group
from tests import ROOT
from tests.lightning.modules import AutoEncoder, LanguageModel
from tests.support.ranks import Group, GroupOf, differences, environment, start
from tests.support.tiers import tiered

CASES = ROOT / "tests" / "lightning" / "cases.py"


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    """Trainers of this file leave no process group to those of other files."""
    yield
    leave_process_group()


SAVED = (*(f"save-{level}" for level in range(4)), "save-mid", "save-ranked", "save-weights", "save-encoder")


class Shelf:
    """The runs of all meshes around one set of checkpoints."""

    def __init__(self, checkpoints: Path, group_of: GroupOf) -> None:
        self.checkpoints = checkpoints
        kept = {"CHECKPOINTS": str(checkpoints)}
        self.plain = group_of(CASES, "plain", 1, REFERENCE="1", **kept)
        self.saved = group_of(CASES, "save", 2, **kept)
        self._resumed = {
            ranks: group_of(CASES, "resume4" if ranks == 4 else "resume", ranks, **kept) for ranks in (1, 2, 4)
        }
        self.plain.read("plain-file")
        for case in SAVED:
            self.saved.read_all(case)

    def resumed(self, ranks: int) -> Group:
        return self._resumed[ranks]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory, group_of: GroupOf) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("checkpoints"), group_of)


@pytest.mark.parametrize(
    ("ranks", "case"),
    tiered(
        [
            *((ranks, f"resume-level-{level}") for ranks in (1, 2, 4) for level in range(4)),
            *((ranks, f"resume-from-level-{level}") for ranks in (1, 2) for level in range(4)),
            *((ranks, case) for ranks in (1, 2, 4) for case in ("resume-plain", "resume-mid")),
            (2, "resume-ranked"),
        ],
        {
            (4, "resume-level-1"),
            *((2, f"resume-from-level-{level}") for level in (0, 3)),
            (2, "resume-mid"),
        },
        # Levels of two ranks are among those that begin from another's, and of four the last is.
        [*((2, f"resume-level-{level}") for level in range(4)), *((4, f"resume-level-{level}") for level in (0, 2))],
    ),
)
def test_resumed_run_goes_on_as_if_nothing_had_been(shelf: Shelf, ranks: int, case: str) -> None:
    whole = shelf.plain.read("uninterrupted")
    for rank in range(ranks):
        rest = shelf.resumed(ranks).read(case, rank)
        steps = 4 if case in ("resume-mid", "resume-ranked") else 6
        for column in ("losses", "norms", "rates"):
            assert len(rest[column]) == steps
            assert differences(whole[column][-steps:], rest[column], 1e-5) == []
        assert (rest["step"], rest["epoch"]) == (12, 2)
        assert differences(whole["weights"], rest["weights"], 3e-4) == []


@pytest.mark.parametrize(
    ("ranks", "case", "message"),
    [
        pytest.param(
            4, "resume-ranked-elsewhere",
            "ranked.ckpt: its data loaders stand at different places on 2 dp ranks; that can't be divided among 4\n"
            "  allowed: a mesh with dp=2, or a loader whose state does not depend on the rank\n"
            "  write:   mesh=dp2",
            id="loader-state-of-other-ranks",
        ),
        pytest.param(
            2, "resume-weights",
            "weights.ckpt: holds weights only\n"
            "  allowed: a checkpoint with optimizer states to resume from; "
            "validate, test, predict and load_from_checkpoint need none",
            id="weights-only",
        ),
        pytest.param(
            2, "resume-wider",
            "epoch-3.ckpt: belongs to another model: positions is (8, 12) there, (8, 16) here; "
            "embedding.weight is (16, 12) there, (16, 16) here; "
            "encoder.layers.0.self_attn.in_proj_weight is (36, 12) there, (48, 16) here\n"
            "  allowed: the model that it was saved from",
            id="other-sizes",
        ),
        pytest.param(
            2, "resume-other-model",
            "epoch-3.ckpt: belongs to another model: "
            "8 parameters are missing (encoder.0.weight, encoder.0.bias, encoder.2.weight, ...); "
            "44 are unknown here (positions, embedding.weight, encoder.layers.0.self_attn.in_proj_weight, ...)\n"
            "  allowed: the model that it was saved from",
            id="other-model",
        ),
    ],
)  # fmt: skip
def test_every_rank_says_what_is_wrong(shelf: Shelf, ranks: int, case: str, message: str) -> None:
    for rank in range(ranks):
        found = shelf.resumed(ranks).message(case, rank)
        assert sorted(found) == sorted(f"ConfigError: ckpt_path={shelf.checkpoints}/{message}")
        if case != "resume-other-model":  # there the order of names is that of the files
            assert found == f"ConfigError: ckpt_path={shelf.checkpoints}/{message}"


@pytest.mark.full
def test_random_numbers_go_on_in_the_middle_of_an_epoch(shelf: Shelf) -> None:
    for rank in (0, 1):
        found = shelf.saved.read("dropout_goes_on", rank)
        assert len(found["resumed"]) == 4
        assert found["resumed"] == found["whole"]


def test_background_checkpoints_change_nothing_and_are_complete(shelf: Shelf) -> None:
    for rank in (0, 1):
        found = shelf.saved.read("in_the_background", rank)
        assert found["equal"]
        assert found["left"] == {"step=5.ckpt": None, "step=6.ckpt": None}
        assert found["stopped"][0] == "TrainingStopped"
        assert found["stopped"][1][-1] == "step=3.ckpt"
        assert found["last"] is None


def test_what_is_no_plain_data_is_loaded_if_one_trusts_it(shelf: Shelf) -> None:
    found = shelf.saved.read("metadata_of_any_type")
    refused = found.pop("object")
    assert found == dict.fromkeys(("config", "trusted object", "plain"), "loaded")
    assert "_Fancy, and loading that would run code" in refused
    assert "MeshStrategy(trust_checkpoints=True)" in refused


def test_strict_loading_is_the_modules_choice(shelf: Shelf) -> None:
    assert shelf.saved.read("parts_left_out", 1) == ["loaded", "loaded"]


def test_lightnings_own_tool_makes_one_file_of_it(shelf: Shelf, tmp_path: Path) -> None:
    tool = [sys.executable, "-m", "lightning.pytorch.utilities.consolidate_checkpoint"]
    file = tmp_path / "one.ckpt"
    done = start([*tool, str(shelf.checkpoints / "epoch-3.ckpt"), "--output_file", str(file)])
    assert done.returncode == 0, done.stdout
    model = LanguageModel.load_from_checkpoint(file, weights_only=False)
    loaded = {name: value.flatten().tolist() for name, value in model.state_dict().items()}
    assert loaded == shelf.saved.read("save-3")["weights"]


# --- damaged, half-written --------------------------------------------------------------------------------------------


def trainer(**kwargs: object) -> pl.Trainer:
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return pl.Trainer(**{"strategy": MeshStrategy(mesh="1"), **options, "enable_checkpointing": False, **kwargs})


def batches(count: int) -> torch.utils.data.DataLoader:
    data = torch.utils.data.TensorDataset(torch.randn(4 * count, 16), torch.zeros(4 * count))
    return torch.utils.data.DataLoader(data, batch_size=4)


@pytest.fixture
def two_checkpoints(tmp_path: Path) -> Path:
    """A directory with a.ckpt (2 steps) and b.ckpt (4 steps)."""
    for name, steps in (("a", 2), ("b", 4)):
        run = trainer(max_steps=steps)
        run.fit(AutoEncoder(), batches(steps))
        run.save_checkpoint(tmp_path / f"{name}.ckpt")
    return tmp_path


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def _flip(path: Path) -> None:
    """Change one bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def _edit_manifest(path: Path, **fields: object) -> None:
    file = path / "checkpoint.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        pytest.param(lambda path: (path / "checkpoint.json").unlink(),
                     "is not a complete checkpoint: it has no readable checkpoint.json", id="no-manifest"),
        pytest.param(lambda path: (path / "checkpoint.json").write_text("{"),
                     "is not a complete checkpoint: it has no readable checkpoint.json", id="torn-manifest"),
        pytest.param(lambda path: (path / "__0_0.distcp").unlink(),
                     "is damaged: __0_0.distcp is missing", id="missing-file"),
        pytest.param(lambda path: _truncate(path / "meta.pt"),
                     r"is damaged: meta.pt has \d+ bytes instead of \d+", id="short-file"),
        pytest.param(shutil.rmtree, "does not exist", id="absent"),
        *(
            pytest.param(lambda path, name=name: _flip(path / name),
                         f"is damaged: the content of {name} has changed since it was written", id=f"flipped-{name}")
            for name in ("__0_0.distcp", "meta.pt", ".metadata")
        ),
        pytest.param(lambda path: _edit_manifest(path, format=99),
                     "was written by a newer autolaunch: its format is 99, this one reads up to 3", id="format"),
        pytest.param(lambda path: _edit_manifest(path, step=None),
                     "is not a complete checkpoint: it has no readable checkpoint.json", id="no-step"),
    ],
)  # fmt: skip
def test_damaged_checkpoint_is_recognised_and_the_previous_one_offered(two_checkpoints: Path, damage, problem) -> None:
    path = two_checkpoints / "b.ckpt"
    damage(path)
    with pytest.raises(ConfigError) as caught:
        trainer(max_steps=6).fit(AutoEncoder(), batches(6), ckpt_path=str(path))
    expected = (
        re.escape(f"ckpt_path={path}: ") + problem + "\n" + re.escape("  allowed: a complete checkpoint\n")
        + re.escape(f"  write:   ckpt_path={two_checkpoints / 'a.ckpt'}")
    )  # fmt: skip
    assert re.fullmatch(expected, str(caught.value))


def test_an_earlier_one_takes_the_place_of_a_damaged_one_if_asked_for(two_checkpoints: Path) -> None:
    _flip(two_checkpoints / "b.ckpt" / "__0_0.distcp")
    run = trainer(max_steps=3)
    strategy = run.strategy
    assert isinstance(strategy, MeshStrategy)
    strategy.checkpoints.earlier_if_damaged = True
    with pytest.warns(UserWarning, match=r"b.ckpt is damaged: the content of .* going on from .*a.ckpt instead"):
        run.fit(AutoEncoder(), batches(6), ckpt_path=str(two_checkpoints / "b.ckpt"))
    assert run.global_step == 3


def test_sizes_alone_let_a_flipped_bit_through(two_checkpoints: Path) -> None:
    _flip(two_checkpoints / "b.ckpt" / "__0_0.distcp")
    run = trainer(max_steps=5, strategy=MeshStrategy(mesh="1", verify_checkpoints="size"))
    run.fit(AutoEncoder(), batches(6), ckpt_path=str(two_checkpoints / "b.ckpt"))
    assert run.global_step == 5


def test_a_flipped_bit_in_a_file_of_plain_lightning(tmp_path: Path) -> None:
    file = tmp_path / "x.ckpt"
    plain = pl.Trainer(max_steps=1, logger=False, enable_progress_bar=False, enable_checkpointing=False,
                       enable_model_summary=False, accelerator="cpu")  # fmt: skip
    module = AutoEncoder()
    plain.fit(module, batches(1))
    plain.save_checkpoint(file)
    content = bytearray(file.read_bytes())
    content[content.index(next(module.parameters()).detach().numpy().tobytes())] ^= 4
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="is damaged: "):
        trainer(max_steps=2).fit(AutoEncoder(), batches(2), ckpt_path=str(file))


def test_no_other_checkpoint_to_offer(tmp_path: Path) -> None:
    (tmp_path / f"x.ckpt{WRITING}").mkdir()
    with pytest.raises(ConfigError) as caught:
        trainer(max_steps=1).fit(AutoEncoder(), batches(1), ckpt_path=str(tmp_path / f"x.ckpt{WRITING}"))
    assert str(caught.value) == (
        f"ckpt_path={tmp_path}/x.ckpt{WRITING}: was never finished: it was still being written\n"
        f"  allowed: a complete checkpoint; there is no other one in {tmp_path}"
    )


def test_damaged_single_file(tmp_path: Path) -> None:
    (tmp_path / "x.ckpt").write_bytes(b"PK\x03\x04 no archive")
    with pytest.raises(ConfigError) as caught:
        trainer(max_steps=1).fit(AutoEncoder(), batches(1), ckpt_path=str(tmp_path / "x.ckpt"))
    assert str(caught.value).startswith(f"ckpt_path={tmp_path}/x.ckpt: is damaged: its end is missing")


def test_leftovers_of_a_crash_are_no_hindrance(two_checkpoints: Path) -> None:
    path = two_checkpoints / "b.ckpt"
    shutil.copytree(path, path.with_name(path.name + REPLACED))
    shutil.copytree(path, path.with_name(path.name + WRITING))
    run = trainer(max_steps=1)
    run.fit(AutoEncoder(), batches(1))
    run.save_checkpoint(path)
    (two_checkpoints / "link.ckpt").symlink_to("nowhere")
    run.save_checkpoint(two_checkpoints / "link.ckpt")
    assert sorted(item.name for item in two_checkpoints.iterdir()) == ["a.ckpt", "b.ckpt", "link.ckpt"]
    assert len(complete_checkpoints(two_checkpoints)) == 3


SAVES = """
import os, sys
import lightning.pytorch as pl, torch
from tests.lightning.modules import AutoEncoder
from autolaunch_strategies import MeshStrategy
for _ in range(int(sys.argv[2])):  # one import of torch serves many processes that are killed
    child = os.fork()
    if child == 0:
        data = torch.utils.data.TensorDataset(torch.randn(4, 16), torch.zeros(4))
        trainer = pl.Trainer(strategy=MeshStrategy(mesh="1"), accelerator="cpu", max_steps=1, logger=False,
                             enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        trainer.fit(AutoEncoder(), torch.utils.data.DataLoader(data, batch_size=4))
        print("saving", os.getpid(), flush=True)
        for number in range(100000):
            trainer.save_checkpoint(f"{sys.argv[1]}/{'same' if number % 2 else number}.ckpt")
    os.waitpid(child, 0)
"""


@pytest.mark.parametrize("rounds", [3, pytest.param(12, marks=pytest.mark.every)])
def test_killed_while_saving_leaves_nothing_half_under_its_name(tmp_path: Path, rounds: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SAVES), str(tmp_path), str(rounds)],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        for number in range(rounds):
            line = ""
            while not line.startswith("saving"):
                line = process.stdout.readline()
                assert line, "the process that saves has ended"
            time.sleep(0.02 + 0.013 * number)  # another place in the loop each time
            while number == rounds - 1 and not complete_checkpoints(tmp_path):
                time.sleep(0.01)  # nothing was there to lose yet
            os.kill(int(line.split()[1]), signal.SIGKILL)
            while Path(f"/proc/{line.split()[1]}").exists():
                time.sleep(0.005)
            visible = [item for item in tmp_path.iterdir() if not item.name.endswith((WRITING, REPLACED))]
            assert {item.name: problem_with(item) for item in visible} == {item.name: None for item in visible}
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
    assert complete_checkpoints(tmp_path)
