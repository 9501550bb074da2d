"""Cases for the tests of StageRelay, on 2 or 4 ranks, and on one process with which they are compared.

A stand-in strategy plays two stages: both ranks of a pair have the whole model, but the one that isn't the last stage
leaves the step where it calls the model.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torchmetrics
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassPrecision, MulticlassRecall

from autolaunch_strategies.lightning.relay import StageRelay
from tests.support.cases import OUT, RANK, WORLD, serve

STAGES = 2 if WORLD > 1 else 1
SHARES = WORLD // STAGES
Case = Callable[[], Any]
GROUPS: dict[str, list[Case]] = {}


def case(*groups: str) -> Callable[[Case], Case]:
    def add(function: Case) -> Case:
        for group in groups:
            GROUPS.setdefault(group, []).append(function)
        return function

    return add


class LeftStep(BaseException):
    """What a stage that isn't the last one leaves the step by."""


@functools.cache
def groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The stages of this rank's share of the data, and the shares of its stage."""
    pairs = [dist.new_group(list(range(share, WORLD, SHARES))) for share in range(SHARES)]
    shares = [dist.new_group(list(range(stage * SHARES, (stage + 1) * SHARES))) for stage in range(STAGES)]
    return pairs[RANK % SHARES], shares[RANK // SHARES]


class TwoStages(ParallelStrategy):
    """Stage s and share d of the data on rank s * SHARES + d; stage 0 plays the last one."""

    is_distributed = SHARES > 1
    in_step = False

    def __init__(self, microbatches: int = 1) -> None:
        super().__init__(cluster_environment=TorchElasticEnvironment())
        self.microbatches = microbatches
        self.pair, self.data = groups()
        self.relay: StageRelay | None = None

    global_rank = property(lambda self: RANK)
    world_size = property(lambda self: WORLD)
    root_device = property(lambda self: torch.device("cpu"))
    distributed_sampler_kwargs = property(lambda self: {"num_replicas": SHARES, "rank": RANK % SHARES})

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        assert isinstance(self.lightning_module, pl.LightningModule)
        self.last = RANK < SHARES
        if self.relay is None:
            data = self.data if SHARES > 1 else None
            self.relay = StageRelay(self.lightning_module, self.pair, self.last, data, self.root_device)
        self.relay.install()
        self.gate = self.lightning_module.model.register_forward_pre_hook(leave_step)

    def teardown(self) -> None:
        assert self.relay is not None
        self.relay.remove()
        self.gate.remove()
        super().teardown()

    def _run(self, name: str, batch: Any, *args: Any) -> Any:
        step, outputs = getattr(self.lightning_module, name), None
        parts = [[item.chunk(self.microbatches) for item in batch]] if self.microbatches > 1 else []
        TwoStages.in_step = True
        with self.relay.recording():
            try:
                with contextlib.suppress(LeftStep):
                    if not parts:
                        outputs = step(batch, *args)
                for microbatch in zip(*parts[0], strict=True) if parts else ():
                    self.relay.microbatch(len(microbatch[0]))
                    with contextlib.suppress(LeftStep):
                        result = step(microbatch, *args)
                        weighted = result["loss"] * (len(microbatch[0]) / len(batch[0]))
                        outputs = {"loss": weighted + (outputs["loss"] if outputs else 0), "logits": result["logits"]}
            except Exception as error:
                self.relay.fail(error, name)
                raise
            finally:
                TwoStages.in_step = False
        loss = {"loss": outputs["loss"]} if isinstance(outputs, dict) else {}
        shared = self.relay.share(loss)
        if self.last:
            return outputs
        return {"loss": shared["loss"].requires_grad_()} if "loss" in shared else None

    def training_step(self, *args: Any) -> Any:
        return self._run("training_step", *args)

    def on_validation_epoch_start(self) -> None:
        self.tracker.increment()

    def on_test_epoch_start(self) -> None:
        self.tracker.increment()

    def validation_step(self, *args: Any) -> Any:
        return self._run("validation_step", *args)

    def test_step(self, *args: Any) -> Any:
        return self._run("test_step", *args)

    def predict_step(self, *args: Any) -> Any:
        return self._run("predict_step", *args)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().backward(*args, **kwargs)
        for parameter in self.lightning_module.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if self.last:
                dist.all_reduce(parameter.grad, group=self.data)
                parameter.grad /= SHARES
            dist.broadcast(parameter.grad, group=self.pair, group_src=0)
        return loss

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        name = str(reduce_op)
        total = tensor.detach().clone()
        total = total.float() if name == "mean" and not total.is_floating_point() else total
        operator = getattr(dist.ReduceOp, {"mean": "SUM"}.get(name, name.upper()))
        dist.all_reduce(total, operator, group=self.data)
        return total / SHARES if name == "mean" else total

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        gathered = [torch.empty_like(tensor) for _ in range(SHARES)]
        dist.all_gather(gathered, tensor.contiguous(), group=self.data)
        return torch.stack(gathered)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def barrier(self, name: str | None = None) -> None:
        dist.barrier()

    def model_to_device(self) -> None:
        pass

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = torch.tensor(int(decision))
        dist.all_reduce(votes)
        return bool(votes == WORLD) if all else bool(votes > 0)


def leave_step(*_: Any) -> None:
    """Where the model is called; a function of this module, so that copies and pickles can have it."""
    if TwoStages.in_step and RANK >= SHARES:
        raise LeftStep


class Logger(pl.LightningModule):
    """Logs in every way that lightning's documentation shows, before and after the call of its model."""

    def __init__(self, batch_values: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
        self.batch_values = batch_values
        self.train_accuracy = MulticlassAccuracy(4, average="macro")
        self.auroc = MulticlassAUROC(4)
        self.mean = torchmetrics.MeanMetric()
        self.total = torchmetrics.SumMetric()
        self.only_computed = MulticlassRecall(4)
        self.collection = torchmetrics.MetricCollection([MulticlassPrecision(4), MulticlassRecall(4)], prefix="val_")
        self.extremes = torchmetrics.MinMaxMetric(MulticlassAccuracy(4))
        self.ratio = torchmetrics.SumMetric() / torchmetrics.MeanMetric()
        self.by_class = torchmetrics.ClasswiseWrapper(MulticlassAccuracy(4, average=None))
        self.tracker = torchmetrics.MetricTracker(MulticlassAccuracy(4))
        self.outs: list[torch.Tensor] = []
        self.train_outs: list[torch.Tensor] = []
        self.seen: dict[str, Any] = {}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2)

    def _loss(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.model(batch[0])
        return nn.functional.cross_entropy(logits, batch[1]), logits

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        self.log("before", float(batch_idx), sync_dist=True)
        loss, logits = self._loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log("positional", loss * 2, True, sync_dist=True)
        self.log("largest", logits.max(), reduce_fx="max", on_step=True, on_epoch=True, sync_dist=True)
        self.log("smallest", logits.min(), reduce_fx=torch.min, on_step=False, on_epoch=True, sync_dist=True)
        self.log("sum", logits.sum().double(), reduce_fx="sum", on_step=False, on_epoch=True, sync_dist=True)
        self.log_dict({"one": loss + 1, "three": 3}, on_step=False, on_epoch=True, sync_dist=True)
        counted = batch[1] > 0  # another number in every batch
        losses = nn.functional.cross_entropy(logits, batch[1], reduction="none")
        size = int(counted.sum())
        self.log("masked", losses[counted].mean(), on_step=False, on_epoch=True, batch_size=size, sync_dist=True)
        weights = 0.1 + 0.3 * batch[1]
        total: Any = float(weights.sum())  # no whole number
        mean = (losses * weights).sum() / total
        self.log("weighted", mean, on_step=False, on_epoch=True, batch_size=total, sync_dist=True)
        if batch_idx % 2:
            self.log("odd", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.train_accuracy(logits, batch[1])
        self.log("accuracy", self.train_accuracy, on_step=self.batch_values, on_epoch=True)
        return {"loss": loss, "logits": logits.detach()}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("rows", float(len(batch[0])), sync_dist=True, reduce_fx="sum")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("gradient", self.model[0].weight.grad.norm())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.train_outs.append(outputs["logits"])
        self.log("logits", outputs["logits"].mean(), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.log("epoch_logits", torch.cat(self.train_outs).mean(), sync_dist=True)
        self.train_outs.clear()

    def _evaluate(self, batch: Any) -> dict[str, torch.Tensor]:
        loss, logits = self._loss(batch)
        self.log("val_loss", loss, sync_dist=True, prog_bar=True)
        self.auroc.update(logits, batch[1])
        self.log("val_auroc", self.auroc)
        self.collection.update(logits, batch[1])
        self.log_dict(self.collection, on_epoch=True)
        self.mean.update(loss, weight=len(logits))
        self.log("val_mean", self.mean, prog_bar=True)
        self.only_computed.update(logits, batch[1])
        self.total.update(len(logits))
        self.ratio.update(logits.detach().square())
        for metric in (self.extremes, self.by_class, self.tracker):
            metric.update(logits, batch[1])
        self.outs.append(logits)
        return {"loss": loss, "logits": logits}

    def _finish(self) -> None:
        recall, total = self.only_computed.compute(), self.total.compute()
        self.seen["recall"], self.seen["total"] = float(recall), float(total)
        self.log("own_recall", recall)
        self.log("own_total", total)
        self.log_dict({f"extremes_{name}": value for name, value in self.extremes.compute().items()})
        self.log_dict({**self.by_class.compute(), "ratio": self.ratio.compute(), "tracked": self.tracker.compute()})
        self.log("best", float(self.tracker.best_metric()))
        for metric in (self.only_computed, self.total, self.by_class, self.ratio):
            metric.reset()
        logits = self.all_gather(torch.cat(self.outs)).reshape(-1, 4)
        self.outs.clear()
        self.log("val_spread", logits.std())

    def on_validation_epoch_start(self) -> None:
        self.tracker.increment()

    def on_test_epoch_start(self) -> None:
        self.tracker.increment()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, torch.Tensor]:
        return self._evaluate(batch)

    def on_validation_epoch_end(self) -> None:
        self._finish()

    def test_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        return self._evaluate(batch)

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("test_logits", outputs["logits"].mean(), sync_dist=True)

    def on_test_epoch_end(self) -> None:
        self._finish()

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        output = self.model(batch[0])
        self.outs.append(output)
        return output

    def on_predict_epoch_end(self) -> None:
        self.seen["predicted"] = float(torch.cat(self.outs).sum())
        self.outs.clear()


class Rows(pl.Callback):
    """Everything that lightning shows to callbacks, loggers and progress bars, as it goes."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def _note(self, trainer: pl.Trainer, moment: str) -> None:
        shown = (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)
        self.rows.append([moment, *({name: float(value) for name, value in sorted(item.items())} for item in shown)])

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._note(trainer, "batch")

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self._note(trainer, "epoch")

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        self._note(trainer, "validation")

    def on_test_end(self, trainer: Any, *_: Any) -> None:
        self._note(trainer, "test")


class EarlyOnRankZero(pl.Callback):
    """Reads epoch values as a progress bar does: on one rank, before the others."""

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        if RANK == 0:
            dict(trainer.progress_bar_metrics)


def loader(seed: int = 5, count: int = 44) -> DataLoader:
    """The same samples in every step for every number of shares; the last batch is smaller."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, generator=generator)
    data = TensorDataset(x, (x[:, :4] + torch.randn(count, 4, generator=generator)).argmax(1))
    sampler = DistributedSampler(data, SHARES, RANK % SHARES, shuffle=False)
    return DataLoader(data, batch_size=8 // SHARES, sampler=sampler)


def trainer_for(microbatches: int = 1, **kwargs: Any) -> pl.Trainer:
    options = {
        "accelerator": "cpu",
        "devices": SHARES * STAGES,
        "max_epochs": 3,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 1,
        "inference_mode": False,  # metrics made in validation are updated in training
    }
    if STAGES > 1:
        options["strategy"] = TwoStages(microbatches)
    return pl.Trainer(**options | kwargs)


def results(module: Any, trainer: pl.Trainer, rows: Rows) -> dict[str, Any]:
    weights = [float(parameter.double().square().sum()) for parameter in module.parameters()]
    return {"rows": rows.rows, "weights": weights, "epochs": trainer.current_epoch, "seen": module.seen}


@case("one", "two", "four")
def fit() -> dict[str, Any]:
    module, rows = Logger(batch_values=False), Rows()
    trainer = trainer_for(callbacks=[rows, EarlyOnRankZero()], val_check_interval=2)
    trainer.fit(module, loader(), [loader(6, 24), loader(7, 24)])
    return results(module, trainer, rows)


@case("one", "two")
def batch_values() -> dict[str, Any]:
    module, rows = Logger(), Rows()
    trainer = trainer_for(callbacks=[rows], accumulate_grad_batches=2)
    trainer.fit(module, loader(), loader(6))
    return results(module, trainer, rows)


@case("one", "two")
def microbatches() -> dict[str, Any]:
    module, rows = Logger(batch_values=False), Rows()
    trainer = trainer_for(2, callbacks=[rows])
    trainer.fit(module, loader(), loader(6))
    # What a hook reads from the outputs is made by the stand-in, not by the relay.
    for row in rows.rows:
        for shown in row[1:]:
            for name in ("logits", "epoch_logits"):
                shown.pop(name, None)
    return results(module, trainer, rows)


@case("one", "two", "four")
def monitors() -> dict[str, Any]:
    module, rows = Logger(batch_values=False), Rows()
    stopping = EarlyStopping("val_auroc", mode="min", patience=1)
    best = ModelCheckpoint(OUT / "monitors", "{epoch}", monitor="own_recall", mode="max", save_weights_only=True)
    trainer = trainer_for(callbacks=[rows, stopping, best], enable_checkpointing=True, max_epochs=6)
    trainer.fit(module, loader(), loader(6))
    best_path = Path(best.best_model_path).name
    return results(module, trainer, rows) | {"stopped": stopping.stopped_epoch, "best": best_path}


@case("one", "two", "four")
def all_loops() -> dict[str, Any]:
    module, rows = Logger(batch_values=False), Rows()
    trainer = trainer_for(callbacks=[rows], max_epochs=1)
    trainer.fit(module, loader(), loader(6))
    returned = [trainer.validate(module, loader(8), verbose=False), trainer.test(module, loader(9), verbose=False)]
    predicted = trainer.predict(module, loader(8))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(), loader(6))
    in_hook = module.seen.pop("predicted", None)
    if RANK < SHARES:
        assert abs(in_hook - float(torch.cat(predicted).sum())) < 1e-5
    else:
        assert predicted == [None] * 6
    return results(module, trainer, rows) | {"returned": [list(map(dict, item)) for item in returned]}


class Failing(Logger):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def _fail(self, where: str) -> None:
        if self.where == where:
            raise ValueError(f"no luck in {where}")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        self._fail("training_step")
        if self.where == "log":
            self.log("many", torch.tensor([1.0, 2.0]))
        return result

    def on_train_epoch_end(self) -> None:
        self._fail("on_train_epoch_end")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if RANK == 1:
            self._fail("on_before_zero_grad")


def _failure(where: str) -> list[str]:
    try:
        trainer_for().fit(Failing(where), loader())
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


@case("two")
def warned() -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("autolaunch_strategies.lightning.relay")
    logger.addHandler(handler)
    trainer_for(max_epochs=2).fit(Logger(), loader())
    logger.removeHandler(handler)
    return messages


@case("two")
def failures() -> dict[str, list[str]]:
    return {where: _failure(where) for where in ("training_step", "log", "on_train_epoch_end", "on_before_zero_grad")}


class Skipping(Logger):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 and RANK == 0 else None


@case("one", "two")
def skipped_epoch() -> dict[str, Any]:
    module, rows = Skipping(), Rows()
    trainer = trainer_for(callbacks=[rows], max_epochs=2)
    trainer.fit(module, loader())
    return results(module, trainer, rows)


class Copying(Logger):
    """Takes copies of itself in the middle of a fit."""

    def on_train_epoch_start(self) -> None:
        trainer, self._trainer = self._trainer, None  # a trainer isn't copied, on one device either
        copied, pickled = copy.deepcopy(self), pickle.loads(pickle.dumps(self))
        self._trainer = trainer
        for module in (copied, pickled):
            module.log = lambda *_, **__: None
            module.all_gather = lambda tensor: tensor
            module.on_validation_epoch_start()
            for index in range(2):
                module.validation_step((torch.ones(4, 16) * (index + 1), torch.arange(4)), index)
            module.on_validation_epoch_end()
        self.seen["copies"] = [copied.seen["total"], pickled.seen["total"]]
        self.seen["overridden"] = [is_overridden(name, self) for name in ("on_train_epoch_end", "on_train_start")]
        self.seen["own hooks"] = [
            type(module.on_validation_epoch_end.__self__) is Copying
            and module.on_validation_epoch_end.__self__ is module
            for module in (copied, pickled)
        ]
        self.seen["keys"] = sorted(copied.state_dict()) == sorted(self.state_dict())


@case("two")
def copies() -> dict[str, Any]:
    module = Copying()
    before = set(vars(module))
    trainer_for(max_epochs=1).fit(module, loader())
    added = {name for name in set(vars(module)) - before if name.startswith("on_") or name == "log"}
    after = copy.deepcopy(module)
    after.total.update(3)
    return {"seen": module.seen, "added": sorted(added), "after": float(after.total.compute())}


class ShardedValue(Logger):
    """Logs a value that is the sum of what the ranks of a stage have."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        total = result["logits"].sum()
        if SHARES > 1:
            mesh = DeviceMesh.from_group(groups()[1], "cpu")
            total = DTensor.from_local(total, mesh, [Partial()])
        self.log("total", total)
        return result


@case("one", "four")
def sharded_value() -> dict[str, Any]:
    module, rows = ShardedValue(batch_values=False), Rows()
    trainer = trainer_for(callbacks=[rows], max_epochs=1)
    trainer.fit(module, loader())
    return results(module, trainer, rows)


if __name__ == "__main__":
    if WORLD > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    serve({group: {function.__name__: function for function in functions} for group, functions in GROUPS.items()})
