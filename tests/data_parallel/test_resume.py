"""A resumed run sees exactly the batches that the run which saved would have seen, whatever its loaders are."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader

from autolaunch_strategies import ConfigError, MeshStrategy
from autolaunch_strategies.mesh.process_group import leave_process_group
from tests import ROOT
from tests.data_parallel import resume_cases as cases
from tests.data_parallel.resume_cases import (
    LOADERS,
    WITHOUT_STATE,
    EarlyLook,
    Numbered,
    SavesAt,
    StatefulLoader,
    fit,
)
from tests.support.messages import assert_told
from tests.support.ranks import Group, GroupOf
from tests.support.tiers import but_one_in, in_turn, spread, tiered

CASES = ROOT / "tests" / "data_parallel" / "resume_cases.py"


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    yield
    leave_process_group()


ONE_PROCESS = [name for name in LOADERS if name not in ("by-rank", "generator-even")]
EVERYDAY = ("augmented", "own-sampler", "stateful-stream")


@pytest.mark.parametrize("name", tiered(ONE_PROCESS, EVERYDAY, but_one_in(2, ONE_PROCESS, EVERYDAY)))
def test_goes_on_with_the_batches_of_the_run_that_saved(name: str, tmp_path: Path) -> None:
    points = (3, 5, 6, 8)
    whole = fit(LOADERS[name], *(SavesAt(point, tmp_path / str(point)) for point in points))
    for point in points:
        assert fit(LOADERS[name], path=tmp_path / str(point), seed=70 + point) == whole[point:]


def test_batches_that_were_trained_on_are_not_loaded_again(tmp_path: Path) -> None:
    data = Numbered()
    whole = fit(lambda: DataLoader(Numbered(), batch_size=4), SavesAt(4, tmp_path / "4"), max_epochs=1)
    assert fit(lambda: DataLoader(data, batch_size=4), path=tmp_path / "4", max_epochs=1) == whole[4:]
    assert set(data.loaded[-6:]) == set(range(16, 22))
    assert not {8, 9, 10, 11} & set(data.loaded)


class SavesWhen(pl.Callback):
    """Writes a checkpoint in a hook of the second epoch (of the first where that is its end)."""

    def __init__(self, hook: str, epoch: int, path: Path) -> None:
        self.epoch, self.path = epoch, path
        setattr(self, hook, self._save)

    def _save(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.current_epoch == self.epoch and not self.path.exists():
            trainer.save_checkpoint(self.path)


BETWEEN_EPOCHS = {
    "early look": {"module": EarlyLook},
    "epoch end": {"save": ("on_train_epoch_end", 0)},
    "epoch end with steps": {"save": ("on_train_epoch_end", 0), "max_steps": 15, "max_epochs": -1},
    "epoch start": {"save": ("on_train_epoch_start", 1)},
    "end of validation": {"save": ("on_validation_end", 0), "val": True},
    "before validation": {"val": True, "at": 6},
    "validation within": {"val": True, "at": 8, "val_check_interval": 2},
    "limited": {"limit_train_batches": 4, "at": 4},
    "limited, within": {"limit_train_batches": 4, "at": 7},
}


MOMENTS = [(when, loader) for when in BETWEEN_EPOCHS for loader in ("shuffled", "by-epoch", "stateful-stream")]


@pytest.mark.parametrize(("when", "loader"), tiered(MOMENTS, [], spread(MOMENTS, tuple)))
def test_wherever_lightning_saves(when: str, loader: str, tmp_path: Path) -> None:
    if (when, loader) == ("before validation", "stateful-stream"):
        pytest.skip("without a length lightning leaves out that validation, and what it would have drawn")
    options: dict[str, Any] = dict(BETWEEN_EPOCHS[when])
    path, save, at = tmp_path / "saved", options.pop("save", None), options.pop("at", 8)
    options["val"] = DataLoader(Numbered(), batch_size=8) if options.get("val") else None
    whole = fit(LOADERS[loader], SavesWhen(*save, path) if save else SavesAt(at, path), **options)
    rest = fit(LOADERS[loader], path=path, seed=77, **options)
    assert rest
    assert rest == whole[-len(rest) :]
    assert len(rest) == (len(whole) - 6 if save else len(whole) - at)


def test_a_run_that_max_steps_ended_goes_on_in_its_epoch(tmp_path: Path) -> None:
    whole = fit(LOADERS["by-epoch"], max_steps=15, max_epochs=-1)
    fit(LOADERS["by-epoch"], _AtEnd(tmp_path / "ended"), max_steps=8, max_epochs=-1)
    assert fit(LOADERS["by-epoch"], path=tmp_path / "ended", max_steps=15, max_epochs=-1) == whole[8:]


class _AtEnd(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("name", tiered(WITHOUT_STATE, ("stream",)))
def test_what_has_no_place_is_said_and_refused(name: str, tmp_path: Path) -> None:
    make = WITHOUT_STATE[name]
    with pytest.warns(UserWarning, match="can't say where in the data it was.*read_again or start_over") as warned:
        whole = fit(make, SavesAt(8, tmp_path / "8"), SavesAt(9, tmp_path / "9"), SavesAt(6, tmp_path / "6"))
    assert len([item for item in warned if "can't say where" in str(item.message)]) == 1
    with pytest.raises(
        ConfigError,
        match=r"(?s)after 2 batches of an epoch.*write: .*(state_dict|num_workers=0).*data_position='read_again'",
    ):
        fit(make, path=tmp_path / "8")
    assert fit(make, path=tmp_path / "8", position="read_again") == whole[8:]
    assert len(fit(make, path=tmp_path / "8", position="start_over")) == 12
    assert fit(make, path=tmp_path / "6") == whole[6:]


def test_an_order_that_is_another_is_refused(tmp_path: Path) -> None:
    fit(partial(DataLoader, Numbered(), batch_size=4), SavesAt(8, tmp_path / "8"))
    for other in (
        lambda: DataLoader(Numbered(), batch_size=4, sampler=range(len(Numbered()))[::-1]),
        lambda: DataLoader(Numbered(), batch_size=4, sampler=cases.Fickle()),
    ):
        with pytest.raises(ConfigError, match="draws other samples than before the checkpoint"):
            fit(other, path=tmp_path / "8")
        assert fit(other, path=tmp_path / "8", position="start_over")


@pytest.mark.parametrize("size", [2, 8])
def test_an_epoch_that_starts_over_in_batches_of_another_size(size: int, tmp_path: Path) -> None:
    fit(partial(DataLoader, Numbered(), batch_size=4), SavesAt(8, tmp_path / "8"))
    rest = fit(
        partial(DataLoader, Numbered(), batch_size=size, shuffle=True),
        path=tmp_path / "8",
        strategy=MeshStrategy("1", allow_on_resume=["batch_size"], data_position="start_over"),
    )
    for epoch in (1, 2):
        batches = [(number, rows) for at, number, [rows], _ in rest if at == epoch]
        assert [number for number, _ in batches] == list(range(-(-cases.SAMPLES // size)))
        assert sorted(int(row[0]) for _, rows in batches for row in rows) == list(range(cases.SAMPLES))


UNKNOWN_AT_ANOTHER_SIZE: dict[str, tuple[Any, str]] = {
    "a loader that counts batches": (partial(StatefulLoader, Numbered()), "required"),
    "a stream that is read again": (lambda batch_size: DataLoader(cases.Stream(), batch_size=batch_size), "read_again"),
}


@pytest.mark.parametrize("case", list(UNKNOWN_AT_ANOTHER_SIZE))
def test_another_batch_size_is_refused_where_the_place_is_not_known(case: str, tmp_path: Path) -> None:
    make, position = UNKNOWN_AT_ANOTHER_SIZE[case]
    fit(partial(make, batch_size=4), SavesAt(8, tmp_path / "8"), SavesAt(6, tmp_path / "6"), position=position)

    def resumed(at: int) -> list[Any]:
        strategy = MeshStrategy("1", allow_on_resume=["batch_size"], data_position=position)
        return fit(partial(make, batch_size=2), path=tmp_path / str(at), strategy=strategy)

    with pytest.raises(ConfigError) as caught:
        resumed(8)
    assert_told(
        caught.value,
        f"ckpt_path={tmp_path / '8'}",
        *("2 batches of 4", "batches of 2"),
        allowed=("the batch size of the run that saved", "a checkpoint from the end of an epoch"),
        write="batch_size=4",
    )
    assert {epoch for epoch, *_ in resumed(6)} == {1, 2}


def test_a_stream_that_counts_samples_goes_on_in_batches_of_another_size(tmp_path: Path) -> None:
    whole = fit(LOADERS["stateful-stream"], SavesAt(8, tmp_path / "8"), max_epochs=2)
    rest = fit(
        lambda: DataLoader(cases.StatefulStream(), batch_size=2),
        path=tmp_path / "8",
        strategy=MeshStrategy("1", allow_on_resume=["batch_size"]),
        max_epochs=2,
    )
    seen = [[row[0] for _, _, [rows], _ in batches for row in rows] for batches in (whole[8:], rest)]
    assert seen[0] == seen[1]


def test_another_choice_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean start_over"):
        MeshStrategy("1", data_position="start-over")


# --- on several ranks ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def groups(group_of: GroupOf, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Group]:
    kept = {"CHECKPOINTS": str(tmp_path_factory.mktemp("checkpoints"))}
    return {(group, ranks): group_of(CASES, group, ranks, **kept) for group in ("saves", "resumes") for ranks in (1, 2)}


def samples(ranks: list[Any]) -> list[Any]:
    """Of all ranks together, of each batch: (epoch, its number, its samples)."""
    return [
        (parts[0][0], parts[0][1], [row[0] for part in parts for row in part[2][0]])
        for parts in zip(*ranks, strict=True)
    ]


RANKS = ((2, 2), (1, 2), (2, 1))
WAYS = [(*ranks, name) for ranks in RANKS for name in cases.ON_RANKS]
CHOSEN = {(*ranks, name) for name, ranks in in_turn(list(cases.ON_RANKS), RANKS)} | {(2, 2, "by-rank")}


@pytest.mark.parametrize(("before", "now", "name"), tiered(WAYS, [], lambda way: way not in CHOSEN))
def test_goes_on_on_another_mesh(name: str, before: int, now: int, groups: dict[tuple[str, int], Group]) -> None:
    if name == "by-rank" and before != now:
        pytest.skip("shares out its data itself")
    ranks = groups["saves", before].read_all(name)
    rest = groups["resumes", now].read_all(f"{name}-from-{before}")
    for point in cases.POINTS:
        resumed = [rank[str(point)] for rank in rest]
        assert samples(resumed) == samples([rank[point:] for rank in ranks])
        if before == now:
            assert resumed == [rank[point:] for rank in ranks]
