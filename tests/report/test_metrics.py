"""metrics.csv and the values in it, through a real Trainer."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch.utils.data import DataLoader

from autolaunch.report import metrics
from autolaunch.report.metrics import StepMetrics, count_tokens, holds_tokens
from autolaunch.report.metrics_csv import COLUMNS, MetricsCsv
from tests.support.ranks import start, torchrun


class Regression(pl.LightningModule):
    """Records the loss of every microbatch, for the tests to compare with."""

    def __init__(self, log: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 1)
        self.log_values = log
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> dict[str, torch.Tensor]:
        loss = (self.linear(batch["x"]) - 1).pow(2).mean()
        self.losses.append(loss.item())
        if self.log_values:
            self.log("accuracy", 0.1 * batch_idx)
            self.log("loss", -1.0)  # not to be taken for the loss that is measured
        return {"loss": loss}

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", (self.linear(batch["x"]) - 1).pow(2).mean())

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader(samples: int = 40, batch_size: int = 2) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    data = [{"x": torch.randn(4, generator=generator), "input_ids": torch.arange(5)} for _ in range(samples)]
    return DataLoader(data, batch_size=batch_size)


def fit(output_dir: Path, module: pl.LightningModule, *callbacks: pl.Callback, **arguments: Any) -> StepMetrics:
    step_metrics = arguments.pop("steps", None) or StepMetrics()
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "max_steps": 6,
        "max_epochs": -1,
        "log_every_n_steps": 1,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
    }
    others = arguments.pop("loggers", [])
    ckpt_path, data = arguments.pop("ckpt_path", None), arguments.pop("data", None) or loader()
    trainer = pl.Trainer(
        logger=[MetricsCsv(output_dir), *others],
        callbacks=[step_metrics, *callbacks],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=output_dir,
        **(options | arguments),
    )
    trainer.fit(module, data, loader(6), ckpt_path=ckpt_path, weights_only=False if ckpt_path else None)
    return step_metrics


def rows(output_dir: Path) -> list[dict[str, str]]:
    with (output_dir / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_per_step_in_full_precision(tmp_path: Path) -> None:
    module = Regression()
    fit(tmp_path, module)
    found = rows(tmp_path)
    assert (tmp_path / "metrics.csv").read_text().splitlines()[0] == "step,loss,grad_norm,lr,tokens,step_time_s"
    assert [row["step"] for row in found] == ["1", "2", "3", "4", "5", "6"]
    assert [row["loss"] for row in found] == [repr(loss) for loss in module.losses]
    assert [row["lr"] for row in found] == [repr(0.1 * (1 / (step + 1))) for step in range(6)]
    assert [row["tokens"] for row in found] == ["10", "20", "30", "40", "50", "60"]
    assert {row["grad_norm"] for row in found} == {""}  # a plain strategy measures none


def test_no_optimizer_and_names_of_own_columns(tmp_path: Path) -> None:
    class Logging(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("lr", 5.0)
            return loss

        def configure_optimizers(self) -> Any:
            return None

    with pytest.warns(UserWarning, match="by these names: lr; what the module logs") as told:
        fit(tmp_path, Logging(), max_steps=-1, max_epochs=1)
    assert sum("by these names: lr;" in str(item.message) for item in told) == 1


def test_microbatches_are_averaged_and_only_every_nth_step_is_logged(tmp_path: Path) -> None:
    module = Regression()
    step_metrics = fit(tmp_path, module, accumulate_grad_batches=3, log_every_n_steps=2, max_steps=5)
    found = rows(tmp_path)
    means = [sum(module.losses[i : i + 3]) / 3 for i in range(0, 15, 3)]
    assert [row["step"] for row in found] == ["2", "4"]
    assert [float(row["loss"]) for row in found] == pytest.approx([means[1], means[3]], rel=1e-6)
    assert [row["tokens"] for row in found] == ["60", "120"]
    # The end of training is measured for the summary, though it has no row.
    assert step_metrics.latest is not None
    assert (step_metrics.latest.step, step_metrics.latest.tokens) == (5, 150)
    assert step_metrics.latest.loss == pytest.approx(means[4], rel=1e-6)


def _note_latest(steps: StepMetrics, shown: list[int], *_: Any) -> None:
    shown.append(steps.latest.step if steps.latest else 0)


def test_values_that_are_read_a_step_late_are_the_same(tmp_path: Path) -> None:
    validate = {"val_check_interval": 9, "check_val_every_n_epoch": None, "limit_val_batches": 1.0}
    found = {}
    for late in (False, True):
        module, directory = Regression(log=True), tmp_path / str(late)
        checkpoint = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=4, save_top_k=-1)
        steps, shown = StepMetrics(late), list[int]()
        seen = LambdaCallback(on_train_batch_end=partial(_note_latest, steps, shown))
        fit(directory, module, checkpoint, seen, steps=steps, accumulate_grad_batches=3, max_steps=7, **validate)
        saved = torch.load(directory / "step=4.ckpt", weights_only=False)["callbacks"]["StepMetrics"]
        untimed = [{name: value for name, value in row.items() if name != "step_time_s"} for row in rows(directory)]
        found[late] = untimed, list(steps.losses), list(steps.steps), saved, steps.latest and steps.latest.tokens
        assert shown[2::3] == [step - late for step in range(1, 7)]
    assert found[True] == found[False]


def test_the_last_step_of_an_epoch_may_have_fewer_microbatches(tmp_path: Path) -> None:
    module = Regression()
    fit(tmp_path, module, accumulate_grad_batches=3, max_epochs=1, max_steps=-1, data=loader(8))
    last = rows(tmp_path)[-1]
    assert len(module.losses) == 4
    assert (last["step"], float(last["loss"])) == ("2", pytest.approx(module.losses[3], rel=1e-6))


def test_logged_and_validation_values_join_the_row_of_their_step(tmp_path: Path) -> None:
    module = Regression(log=True)
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    validate = {"val_check_interval": 4, "check_val_every_n_epoch": None, "limit_val_batches": 1.0}
    fit(tmp_path, module, checkpoint, **validate)
    found = rows(tmp_path)
    assert list(found[0]) == [*COLUMNS, "accuracy", "val_loss"]
    assert [row["step"] for row in found] == ["1", "2", "3", "4", "5", "6"]
    assert [row["loss"] for row in found] == [repr(loss) for loss in module.losses]
    assert all(float(row["accuracy"]) == pytest.approx(0.1 * i) for i, row in enumerate(found))
    assert [bool(row["val_loss"]) for row in found] == [False, False, False, True, False, False]
    assert [path.name for path in tmp_path.glob("metrics*")] == ["metrics.csv"]


@pytest.mark.parametrize("same_directory", [pytest.param(True, id="same"), pytest.param(False, id="new")])
def test_resume(tmp_path: Path, same_directory: bool) -> None:
    # An epoch has four steps, because this loader cannot go on in the middle of one.
    whole, first = tmp_path / "whole", tmp_path / "first"
    fit(whole, Regression(), max_steps=8, data=loader(8))
    checkpoint = ModelCheckpoint(first, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    fit(first, Regression(), checkpoint, max_steps=6, data=loader(8))
    with (first / "metrics.csv").open("a") as file:
        file.write("7,0.")  # what a killed process leaves behind
    second = first if same_directory else tmp_path / "second"
    fit(second, Regression(), max_steps=8, data=loader(8), ckpt_path=first / "step=4.ckpt")

    def comparable(directory: Path) -> list[dict[str, str]]:
        return [row | {"step_time_s": ""} for row in rows(directory)]

    assert comparable(second) == comparable(whole)[0 if same_directory else 4 :]


def test_a_new_run_in_the_same_directory_starts_a_new_file(tmp_path: Path) -> None:
    fit(tmp_path, Regression(log=True))
    fit(tmp_path, Regression(), max_steps=2)
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2"]


def test_other_loggers_get_the_values_at_the_step_of_lightnings_own(tmp_path: Path) -> None:
    module = Regression(log=True)
    fit(tmp_path, module, loggers=[csv_logger := CSVLogger(tmp_path / "other", version="")], max_steps=3)
    with (Path(csv_logger.log_dir) / "metrics.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    ours, logged = found[0::2], found[1::2]  # this logger starts a row with every call
    assert [row["step"] for row in ours] == [row["step"] for row in logged] == ["0", "1", "2"]
    assert [float(row["lr"]) for row in ours] == [0.1, 0.05, pytest.approx(0.1 / 3)]
    assert [float(row["accuracy"]) for row in logged] == pytest.approx([0.0, 0.1, 0.2])


def test_the_gradient_norm_is_the_strategys(tmp_path: Path) -> None:
    class Normed(SingleDeviceStrategy):
        last_grad_norm = torch.tensor(0.125)

    fit(tmp_path, Regression(), strategy=Normed("cpu"), max_steps=2)
    assert [row["grad_norm"] for row in rows(tmp_path)] == ["0.125", "0.125"]


def test_step_time_leaves_validation_and_checkpoints_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    class Timed(Regression):
        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> dict[str, torch.Tensor]:
            pass_time(1.0 if batch_idx else 9.0)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
            pass_time(100.0)

    class SlowCheckpoint(ModelCheckpoint):
        def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
            pass_time(1000.0)
            super()._save_checkpoint(trainer, filepath)
            pass_time(1000.0)

    def pass_time(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now)
    checkpoint = SlowCheckpoint(tmp_path, every_n_train_steps=3)
    validate = {"val_check_interval": 2, "check_val_every_n_epoch": None, "limit_val_batches": 1.0}
    step_metrics = fit(tmp_path, Timed(), checkpoint, log_every_n_steps=2, max_steps=10, **validate)
    assert [row["step_time_s"] for row in rows(tmp_path)] == ["5.0", "1.0", "1.0", "1.0", "1.0"]
    assert step_metrics.median_step_time() == 1.0
    assert step_metrics.tokens_per_second() == 10.0


def test_a_run_that_fails_keeps_its_rows(tmp_path: Path) -> None:
    class Failing(Regression):
        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> dict[str, torch.Tensor]:
            if batch_idx == 3:
                raise RuntimeError("out of luck")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="out of luck"):
        fit(tmp_path, Failing())
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("batch", "count", "tokens"),
    [
        pytest.param({"input_ids": torch.zeros(2, 3), "labels": torch.zeros(9)}, 6, True, id="input_ids"),
        pytest.param({"images": torch.zeros(2, 3, 8), "labels": torch.zeros(2)}, 2, False, id="labels"),
        pytest.param((torch.zeros(4, 7), torch.zeros(4)), 4, False, id="tuple"),
        pytest.param({"meta": "text", "x": [torch.zeros(5, 2)]}, 5, False, id="nested"),
        pytest.param([{"text": {"labels": torch.zeros(2, 5)}}], 10, True, id="nested tokens"),
        pytest.param(torch.zeros(3, 2), 3, False, id="tensor"),
        pytest.param("text", 0, False, id="nothing"),
    ],
)
def test_count_tokens(batch: Any, count: int, tokens: bool) -> None:
    assert (count_tokens(batch), holds_tokens(batch)) == (count, tokens)


TWO_RANKS = """
import sys
import lightning.pytorch as pl, torch
from torch.utils.data import DataLoader
from autolaunch.report.metrics import StepMetrics
from autolaunch.report.metrics_csv import MetricsCsv
from autolaunch.report.summary import collect_summary

class Rank(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
    def training_step(self, batch, batch_idx):
        return self.weight.sum() + self.global_rank + batch_idx
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

if __name__ == "__main__":
    step_metrics = StepMetrics()
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=4, logger=[MetricsCsv(sys.argv[1])],
        callbacks=[step_metrics], enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=2,
        enable_checkpointing=False, accumulate_grad_batches=2)
    trainer.fit(Rank(), DataLoader(torch.zeros(40, 3), batch_size=2))
    # Ranks have used different amounts of memory, and all report the largest.
    extra = torch.ones(trainer.global_rank * 20_000_000)
    summary = collect_summary(trainer, step_metrics, 0.0, task="fit")
    others = [None, None]
    torch.distributed.all_gather_object(others, summary)
    assert others[0] == others[1], others
    assert (summary["world_size"], summary["mesh"], summary["steps"], summary["parameters"]) == (2, "2", 4, 1)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
"""


@pytest.mark.timeout(120)
def test_two_ranks_are_averaged_and_write_one_file(tmp_path: Path) -> None:
    script = tmp_path / "two_ranks.py"
    script.write_text(TWO_RANKS)
    run = start(torchrun(2, str(script), str(tmp_path)), timeout=100)
    assert run.returncode == 0, run.stdout
    found = [(row["step"], float(row["loss"]), row["tokens"]) for row in rows(tmp_path)]
    # Per rank and microbatch the loss is rank + index of the microbatch; each step has two of them on two ranks.
    assert found == [("2", 3.0, "16"), ("4", 7.0, "32")]
