"""Cases for the tests of MeshStrategy; with REFERENCE set they are plain Lightning, for the others to compare with."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, TensorDataset

from autolaunch_strategies import MeshStrategy
from autolaunch_strategies.config import ConfigError
from tests.lightning import any_signature
from tests.lightning.modules import AutoEncoder, Classifier, Critic, Forces, Gan, LanguageModel, LateLanguageModel
from tests.support.cases import OUT, RANK, WORLD, no_compiler, serve

Case = Callable[[], Any]
GROUPS: dict[str, dict[str, Case]] = {}


def case(*groups: str, name: str = "") -> Callable[[Case], Case]:
    """Put a function into groups; it runs on every rank and what it returns is written as JSON."""

    def add(function: Case) -> Case:
        for group in groups:
            GROUPS.setdefault(group, {})[name or function.__name__] = function
        return function

    return add


def samples(count: int = 48) -> TensorDataset:
    """Floats [count, 16] and labels [count]."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 16, generator=generator)
    return TensorDataset(x, torch.randint(0, 4, (count,), generator=generator))


def loader(global_batch: int = 8, **kwargs: Any) -> DataLoader:
    """The same samples in the same optimizer step on every number of ranks."""
    data = samples(**kwargs)
    sampler = DistributedSampler(data, WORLD, RANK, shuffle=False)
    return DataLoader(data, batch_size=global_batch // WORLD, sampler=sampler)


class Rows(pl.Callback):
    """Loss, gradient norm before clipping and learning rate of every optimizer step; hooks in order."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.rates: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if "loss" in (outputs or {}):
            counts = getattr(trainer.strategy, "batch_weight", 1.0)
            self.losses.append(float(trainer.strategy.reduce(outputs["loss"].detach() * counts)))

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        from autolaunch_strategies.data_parallel.gradients import gradient_norm

        self.norms.append(float(gradient_norm(module.parameters())))
        self.rates.append(optimizer.param_groups[0]["lr"])

    def table(self) -> dict[str, Any]:
        return {"losses": self.losses, "norms": self.norms, "rates": self.rates}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).float().clone()


def weights(module: nn.Module, buffers: bool = False) -> dict[str, list[float]]:
    """Whole parameters by name, as numbers."""
    state = module.state_dict()
    wanted = dict(module.named_parameters(remove_duplicate=False))
    return {name: whole(value).flatten().tolist() for name, value in state.items() if buffers or name in wanted}


def mesh_strategy(level: int | None = None, **kwargs: Any) -> Any:
    """MeshStrategy on this run's ranks; Lightning's own choice in the process that is compared with."""
    if os.environ.get("REFERENCE"):
        return "auto"
    dp = kwargs.pop("dp", {"sharding_level": 3 if level is None else level})
    return MeshStrategy(kwargs.pop("mesh", str(WORLD)), dp=dp, timeout=60, **kwargs)


def make_trainer(strategy: Any, *callbacks: pl.Callback, **kwargs: Any) -> pl.Trainer:
    options: dict[str, Any] = {
        "accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "use_distributed_sampler": False,
        "num_sanity_val_steps": 0, "log_every_n_steps": 1,
    }  # fmt: skip
    return pl.Trainer(strategy=strategy, callbacks=list(callbacks), **{**options, **kwargs})


def train(
    module: pl.LightningModule, strategy: Any, data: Any = None, val: Any = None, **kwargs: Any
) -> dict[str, Any]:
    """Fit and return the rows of every step, the metrics and the weights at the end."""
    rows = Rows()
    trainer = make_trainer(strategy, rows, **kwargs)
    trainer.fit(module, loader() if data is None else data, val)
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return {**rows.table(), "metrics": metrics, "weights": weights(module)}


# --- parity: the same on every mesh -----------------------------------------------------------------------------


def parity(
    name: str, make: Callable[[], pl.LightningModule], strategy: dict[str, Any] | None = None, **kwargs: Any
) -> None:
    """A case that must give the same numbers as one process; `data` and `val` are made when it runs."""

    def run() -> Any:
        pl.seed_everything(1, verbose=False)
        module = make()
        made = {key: value() if callable(value) else value for key, value in kwargs.items()}
        with inside():
            return train(module, mesh_strategy(**(strategy or {})), **made)

    inside = kwargs.pop("inside", contextlib.nullcontext)
    GROUPS.setdefault("parity", {})[name] = run


class OwnClipping(LanguageModel):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, **kwargs: Any) -> None:
        if self.global_step % 2:
            self.clip_gradients(optimizer, 0.01, "value")
        else:
            self.clip_gradients(optimizer, 0.3, "norm")


class ClipsInHook(AutoEncoder):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class SynchronisedClassifier(Classifier):
    """On one process its batch norm is as any other; torch's own exchange knows GPUs only."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model)


class Thaws(pl.callbacks.BaseFinetuning):
    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.encoder)

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.encoder, optimizer)


class FineTuned(AutoEncoder):
    """Its encoder is frozen in the first epoch."""

    def configure_callbacks(self) -> Any:
        return [Thaws()]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((item for item in self.parameters() if item.requires_grad), lr=0.05)


class WithAdafactor(LanguageModel):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor((item for item in self.parameters() if item.requires_grad), lr=1e-3)


class SeveralClosures(AutoEncoder):
    """Its optimizer runs the step several times on a batch."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Measured(Classifier):
    """Metrics and sums of training, and the statistics of the batch norm, beside what it has in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.hits = torchmetrics.classification.MulticlassAccuracy(4, average="micro")
        self.seen = torchmetrics.CatMetric()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        output = super().training_step(batch, batch_idx)
        self.hits.update(output["logits"], batch[1])
        self.seen.update(batch[1].float())
        self.log("hits", self.hits, on_step=False, on_epoch=True)
        self.log("mean", output["loss"], on_step=False, on_epoch=True, sync_dist=True)
        self.log("largest", output["logits"].max(), on_step=False, on_epoch=True, reduce_fx="max", sync_dist=True)
        self.log("count", float(len(batch[1])), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        return output

    def on_train_epoch_end(self) -> None:
        self.log("seen", self.seen.compute().sum())
        self.seen.reset()
        norm = self.model[1]
        self.log_dict({"running mean": norm.running_mean.sum(), "running variance": norm.running_var.sum()})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Spectral(AutoEncoder):
    """Has complex weights, and frozen ones of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(9, dtype=torch.complex64))
        signs = torch.randint(0, 2, (16,), dtype=torch.int8) * 2 - 1
        self.signs = nn.Parameter(signs, requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = torch.fft.irfft(torch.fft.rfft(batch[0] * self.signs) * self.filter)
        return super().training_step((x, None), batch_idx)


class Transposed(AutoEncoder):
    """Begins with a matrix that stands in memory column by column, as `qr` makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.linalg.qr(torch.randn(16, 16))[0])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step((batch[0] @ self.turn, None), batch_idx)


class TwoTypes(AutoEncoder):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(16, dtype=torch.float64))


class SparseLookup(AutoEncoder):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.ModuleDict({"embed": nn.Embedding(8, 16, sparse=True)})


LEVELS = (0, 1, 2, 3)
parity("transposed", Transposed, {"level": 3}, gradient_clip_val=0.5)
parity(
    "clips-in-hook-mp",
    ClipsInHook,
    {"mesh": f"mp{WORLD}", "level": 0},
    data=lambda: DataLoader(samples(), batch_size=8),
)
parity("spectral", Spectral, {"level": 0}, gradient_clip_val=0.5)
for level in LEVELS:
    parity(f"autoencoder-{level}", AutoEncoder, {"level": level}, val=loader)
    parity(f"classifier-{level}", Classifier, {"level": level}, val=loader, max_epochs=2)
    parity(f"synchronised-{level}", SynchronisedClassifier, {"level": level}, val=loader)
    parity(f"language-{level}", LanguageModel, {"level": level}, val=loader, gradient_clip_val=0.5)
    parity(
        f"accumulate-{level}", LanguageModel, {"level": level}, data=lambda: loader(4), val=loader,
        accumulate_grad_batches=5, val_check_interval=3, gradient_clip_val=0.5,
    )  # fmt: skip
    parity(f"thawed-{level}", FineTuned, {"level": level}, max_epochs=2)
    parity(f"gan-{level}", Gan, {"level": level})
    parity(f"critic-{level}", Critic, {"level": level})
    parity(
        f"forces-{level}", Forces, {"level": level}, val=loader, accumulate_grad_batches=2, inference_mode=False,
        val_check_interval=1,
    )  # fmt: skip
    parity(f"adafactor-{level}", WithAdafactor, {"level": level}, val=loader)
for level in (0, 3):
    parity(
        f"by-value-{level}", LanguageModel, {"level": level}, gradient_clip_val=0.02, gradient_clip_algorithm="value"
    )
    parity(f"own-clipping-{level}", OwnClipping, {"level": level})
    parity(f"double-{level}", LanguageModel, {"level": level}, precision="64-true", gradient_clip_val=0.5)
    parity(f"bf16-mixed-{level}", LanguageModel, {"level": level}, precision="bf16-mixed", gradient_clip_val=0.5)
for recompute in ("full", 2, "selective"):
    parity(f"recompute-{recompute}", LanguageModel, {"level": 3, "recompute": recompute})
parity("compile", LanguageModel, {"level": 3, "compile": "default"})
parity("compile-captured", LanguageModel, {"level": 3, "compile": True}, inside=no_compiler)
parity("offload-3", LanguageModel, {"dp": {"sharding_level": 3, "cpu_offload": True}}, gradient_clip_val=0.5)
for dtypes in ({"param_dtype": "bf16"}, {"param_dtype": "bf16", "reduce_dtype": "fp32"}):
    _name = "-".join(("types", *dtypes))

    @case("parity", name=_name)
    def in_types(dtypes: dict[str, Any] = dtypes) -> Any:
        """The first losses of a model that is computed with in bf16 on every mesh, also on that of one rank."""
        pl.seed_everything(1, verbose=False)
        strategy = MeshStrategy(mesh=str(WORLD), dp={"sharding_level": 2, **dtypes}, timeout=60)
        return {"losses": train(LanguageModel(), strategy, max_steps=2)["losses"]}


def gathered_bytes(dp: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    """A run in bf16-mixed, and the bytes of gradients and parameters that this rank sends of each type."""
    sent: dict[str, int] = {}

    class Counts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.__name__.partition(".")[0]
            if name in ("_allgather_base_", "_reduce_scatter_base_"):
                key = f"{name} {args[1].dtype}"
                sent[key] = sent.get(key, 0) + args[1].nbytes
            return func(*args, **(kwargs or {}))

    pl.seed_everything(1, verbose=False)
    with Counts():
        module, strategy = LanguageModel(), mesh_strategy(dp=dp, **kwargs)
        result = train(module, strategy, loader(4), precision="bf16-mixed", accumulate_grad_batches=2, max_steps=4)
    return {**result, "sent": sent}


for _name, _level, _options in (
    ("2", 2, {}), ("3", 3, {}), ("3-recomputed", 3, {"recompute": "full"}), ("1-offload", 1, {"cpu_offload": True}),
):  # fmt: skip

    @case("parity", name=f"gathered-{_name}")
    def in_bf16_and_fp32(level: int = _level, options: dict[str, Any] = _options) -> Any:
        dp = {"sharding_level": level, **{k: v for k, v in options.items() if k == "cpu_offload"}}
        others = {k: v for k, v in options.items() if k not in dp}
        return [gathered_bytes({**dp, **types}, **others) for types in ({}, {"param_dtype": "fp32"})]


parity("offload-1", LanguageModel, {"dp": {"sharding_level": 1, "cpu_offload": True}}, gradient_clip_val=0.5)


class Diary(pl.Callback):
    """Every hook in order, with the counters that Lightning shows at that moment."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.grads: list[float] = []


def _write_down(hook: str) -> Any:
    def run(self: Diary, trainer: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        self.lines.append(f"{hook} step={trainer.global_step} epoch={trainer.current_epoch}")
        if hook in ("on_before_zero_grad", "on_before_optimizer_step"):
            from autolaunch_strategies.data_parallel.gradients import gradient_norm

            self.grads.append(float(gradient_norm(module.parameters())))

    return run


for _hook in [item for item in dir(pl.Callback) if item.startswith("on_") and "checkpoint" not in item]:
    setattr(Diary, _hook, _write_down(_hook))


class CountingModel(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        return {"loss": super().training_step(batch, batch_idx), "extra": batch_idx}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(sorted(outputs))


def hooks(level: int) -> Any:
    pl.seed_everything(1, verbose=False)
    module, diary = CountingModel(), Diary()
    trainer = make_trainer(
        mesh_strategy(level),
        diary,
        max_epochs=2,
        accumulate_grad_batches=2,
        val_check_interval=4,
        num_sanity_val_steps=1,
    )
    trainer.fit(module, loader(), loader(count=16))
    return {"lines": diary.lines, "grads": diary.grads, "calls": module.calls, "outputs": module.seen}


case("parity", name="hooks-0")(lambda: hooks(0))
case("parity", name="hooks-3")(lambda: hooks(3))


@case("parity")
def tasks_after_each_other() -> Any:
    """fit, validate, test, predict and fit again on one Trainer; then a second Trainer on the same module."""
    pl.seed_everything(1, verbose=False)
    module = LanguageModel()
    trainer = make_trainer(mesh_strategy(3))
    trainer.fit(module, loader(), loader(count=16))
    results = [trainer.validate(module, loader(count=16), verbose=False), trainer.test(module, loader(), verbose=False)]
    predicted = trainer.predict(module, loader())
    results.append(int(trainer.strategy.reduce(torch.cat(predicted).sum(), reduce_op="sum")))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(), loader(count=16))
    results.append({key: float(value) for key, value in trainer.callback_metrics.items()})
    second = make_trainer(mesh_strategy(3))
    second.fit(module, loader(), loader(count=16))
    results.append(second.validate(module, loader(count=16), verbose=False))
    return {"results": results, "weights": weights(module)}


class PartsElsewhere(pl.Callback):
    """Calls parts of the model outside of steps, also between the backward pass and the optimizer step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def _call(self, trainer: Any, module: Any) -> None:
        tokens = torch.arange(8).view(1, 8)
        with torch.no_grad():
            self.values += [float(module(tokens).sum()), float(module.embedding(tokens).sum())]
            self.values.append(float(module.encoder(torch.ones(1, 8, 12)).abs().sum()))

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self._call(trainer, module)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self._call(trainer, module)

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self._call(trainer, module)


def parts_elsewhere(level: int) -> Any:
    pl.seed_everything(1, verbose=False)
    module, parts = LanguageModel(), PartsElsewhere()
    make_trainer(mesh_strategy(level), parts).fit(module, loader())
    return {"values": parts.values, "weights": weights(module)}


for _level in LEVELS:
    case("parity", name=f"parts-elsewhere-{_level}")(lambda level=_level: parts_elsewhere(level))


def own_loader(batch_size: int | None = 8, count: int = 51, **options: Any) -> DataLoader:
    """As people write it for one process; the last batch has three samples, which two ranks can't share evenly."""
    return DataLoader(samples(count), batch_size=batch_size, **options)


for level in LEVELS:
    for order, options in (("in-order", {}), ("shuffled", {"shuffle": True})):
        parity(
            f"{order}-{level}", LanguageModel, {"level": level}, data=partial(own_loader, **options), val=own_loader,
            max_epochs=2, use_distributed_sampler=True,
        )  # fmt: skip
parity(
    "per-rank", LanguageModel, {"batch_size": "per_rank"}, data=lambda: own_loader(8 // WORLD, shuffle=True),
    max_epochs=2, use_distributed_sampler=True,
)  # fmt: skip
parity(
    "whole-along-mp", Classifier, {"mesh": f"mp{WORLD}"}, data=own_loader, val=own_loader, use_distributed_sampler=True
)
parity(
    "own-batches", LanguageModel, data=lambda: own_loader(None, sampler=BatchSampler(range(51), 8, False)),
    use_distributed_sampler=True,
)  # fmt: skip
parity(
    "closures", SeveralClosures, {"level": 0}, data=partial(own_loader, count=11), val=own_loader, max_epochs=2,
    use_distributed_sampler=True,
)  # fmt: skip
for _level in (0, 3):  # the last batch has one sample: some ranks only keep step
    parity(
        f"left-over-{_level}", Measured, {"level": _level}, data=partial(own_loader, count=9),
        val=partial(own_loader, count=9), max_epochs=2, use_distributed_sampler=True,
    )  # fmt: skip
for _index, (_kind, _make) in enumerate(any_signature.KINDS.items()):
    for level in (_index % 4, (_index + 2) % 4):
        parity(f"{_kind}-{level}", _make, {"level": level}, data=any_signature.series, use_distributed_sampler=True)
    parity(f"{_kind}-mp", _make, {"mesh": f"mp{WORLD}"}, data=partial(any_signature.series, shuffle=True))
parity("conditioned-of-stream-mp", any_signature.Conditioned, {"mesh": f"mp{WORLD}"}, data=any_signature.stream)


@case("parity")
def evaluated_with_any_signature() -> Any:
    """Without a training before it: the batch is one of the loaders that are evaluated."""

    class Evaluated(any_signature.Conditioned):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self.training_step(batch, batch_idx))

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
            return self.model(batch["past"], added={"static": batch["static"]})

    results: list[Any] = []
    for task in ("validate", "predict"):
        pl.seed_everything(1, verbose=False)
        module, trainer = Evaluated(), make_trainer(mesh_strategy(mesh=f"mp{WORLD}"))
        loaders = [any_signature.series(), any_signature.series()]
        if task == "validate":
            results.append(trainer.validate(module, loaders[0], verbose=False))
        else:
            results.append([batch.tolist() for part in trainer.predict(module, loaders) for batch in part])
    return {"results": results}


@case("ranks")
def shares_of_kinds() -> Any:
    """Of the parameters of each module, the share that one rank along mp holds, and what is said of it."""
    shares = {}
    for kind, make in any_signature.KINDS.items():
        module = make()
        trainer = make_trainer(mesh_strategy(mesh=f"mp{WORLD}"), max_steps=1)
        trainer.fit(module, any_signature.series())
        wholes = sum(item.numel() for item in module.parameters())
        local = sum((item.to_local() if isinstance(item, DTensor) else item).numel() for item in module.parameters())
        warned = trainer.strategy.describe().get("mp", {}).get("warnings", [])
        shares[kind] = {"share": local / wholes, "warnings": warned}
    return shares


@case("parity")
def logged_once() -> Any:
    import contextlib
    import io

    from lightning.pytorch.utilities import rank_zero_only

    class Talks(AutoEncoder):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[Any] = []
            self.images = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.losses.append(loss.detach())
            return loss

        @rank_zero_only
        def _image(self) -> None:
            self.images += 1

        def on_train_epoch_end(self) -> None:
            self.print("epoch ends")
            self._image()
            gathered = self.all_gather(torch.stack(self.losses)).float()
            self.log("epoch_loss", gathered.mean())
            self.losses.clear()

    pl.seed_everything(1, verbose=False)
    module, said = Talks(), io.StringIO()
    trainer = make_trainer(mesh_strategy(2), max_epochs=2)
    with contextlib.redirect_stdout(said):
        trainer.fit(module, loader())
    assert module.images == said.getvalue().count("epoch ends") == (2 if RANK == 0 else 0)
    return float(trainer.callback_metrics["epoch_loss"])


class Plateau(AutoEncoder):
    """Its learning rates follow a metric that is logged without `sync_dist`."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("monitored", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "monitored", "interval": "step"},
        }


parity("plateau", Plateau, {"level": 0})


@case("parity")
def early_stopping() -> Any:
    class Oscillates(AutoEncoder):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            # each rank by itself would stop at another epoch
            value = [3.0, 2.0, 1.0, 4.0, 4.0, 4.0][self.current_epoch] + (RANK if self.current_epoch == 2 else 0)
            self.log("val", torch.tensor(value))

    pl.seed_everything(1, verbose=False)
    stop = pl.callbacks.EarlyStopping("val", patience=2)
    keep = pl.callbacks.ModelCheckpoint(
        OUT / f"early-{WORLD}", filename="{epoch}-{val:.2f}", monitor="val", save_top_k=2, save_last="link"
    )
    trainer = make_trainer(mesh_strategy(3), stop, keep, max_epochs=6, enable_checkpointing=True)
    trainer.fit(Oscillates(), loader(), loader(count=16))
    left = sorted(item.name for item in (OUT / f"early-{WORLD}").iterdir())
    best = Path(keep.best_model_path).name
    trainer.validate(ckpt_path="best", dataloaders=loader(count=16), verbose=False)
    assert (OUT / f"early-{WORLD}" / "last.ckpt").is_symlink()
    return {"epoch": trainer.current_epoch, "left": len(left), "best": best.split("-")[0]}


@case("parity")
def summary_of_example_input() -> Any:
    class WithExample(AutoEncoder):
        def __init__(self) -> None:
            super().__init__()
            self.example_input_array = torch.zeros(2, 16)

    import contextlib
    import io

    pl.seed_everything(1, verbose=False)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        module = WithExample()
        make_trainer(mesh_strategy(3), enable_model_summary=True, max_steps=1).fit(module, loader())
    from lightning.pytorch.utilities.model_summary import ModelSummary

    return ModelSummary(module).total_parameters


class AddsNoise(torch.optim.SGD):
    """Langevin dynamics."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for item in (item for group in self.param_groups for item in group["params"]):
            item.add_(torch.randn_like(item), alpha=1e-2)
        return loss


def noise(automatic: bool) -> Any:
    """The weights after each step of a model that draws for its samples, too, and what this rank would draw next."""
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # from now on torch runs hooks for the step of the base class, too

    class Noisy(AutoEncoder):
        automatic_optimization = automatic

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step((batch[0] + torch.randn_like(batch[0]), None), batch_idx)
            if not automatic:
                self.manual_backward(loss)
                self.optimizers(use_pl_optimizer=False).step()
            return loss

        def configure_optimizers(self) -> Any:
            return AddsNoise(self.parameters(), lr=0.0)

    class After(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            seen.append(whole(pl_module.encoder[0].weight).flatten().tolist())

    seen: list[list[float]] = []
    pl.seed_everything(1, verbose=False)
    make_trainer(mesh_strategy(0), After(), limit_train_batches=3).fit(Noisy(), loader())
    return {"weights": seen, "next": torch.rand(()).item()}


case("ranks", name="noise_of_an_optimizer")(lambda: noise(automatic=True))
case("ranks", name="noise_of_a_bare_optimizer")(lambda: noise(automatic=False))


@case("ranks")
def refusals() -> Any:
    messages = []
    for callback, options in (
        (pl.callbacks.StochasticWeightAveraging(1e-2), {"level": 0}),
        (pl.callbacks.WeightAveraging(), {"level": 1}),
        (pl.callbacks.WeightAveraging(), {"level": 0, "mesh": "mp2"}),
    ):
        try:
            make_trainer(mesh_strategy(**options), callback).fit(AutoEncoder(), loader())
        except ValueError as error:
            messages.append(str(error))
    for make in (Spectral, TwoTypes, SparseLookup):
        try:
            make_trainer(mesh_strategy(3)).fit(make(), loader())
        except ValueError as error:
            messages.append(str(error))
    module = AutoEncoder()
    make_trainer(mesh_strategy(1), max_steps=1).fit(module, loader())
    try:
        make_trainer(mesh_strategy(3), max_steps=1).fit(module, loader())
    except ValueError as error:
        messages.append(str(error))
    return messages


class AssignsGradients(AutoEncoder):
    """Gives parameters gradients by hand, or, to compare with, by a backward pass."""

    def __init__(self, backward: bool) -> None:
        super().__init__()
        self.automatic_optimization, self._backward = False, backward

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        if self._backward:
            self.manual_backward(loss)
        else:
            trained = list(self.parameters())
            for parameter, gradient in zip(trained, torch.autograd.grad(loss, trained), strict=True):
                parameter.grad = gradient
        optimizer.step()


@case("ranks")
def assigned_gradients() -> Any:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]  # of this one alone
    logging.getLogger("autolaunch_strategies").addHandler(handler)
    heard = []
    for backward in (True, False):
        make_trainer(mesh_strategy(0), max_steps=3).fit(AssignsGradients(backward), loader())
        heard.append([text for text in said if "assigned" in text])
    return heard


@case("ranks")
def averaged_weights_at_level_0() -> Any:
    make_trainer(mesh_strategy(0), pl.callbacks.WeightAveraging()).fit(AutoEncoder(), loader())
    return "trained"


def local_bytes(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


@case("ranks")
def bytes_per_rank() -> Any:
    """What each level holds between steps, and between the backward passes of one step."""
    found = {}
    for level in LEVELS:

        class Weighs(pl.Callback):
            def __init__(self) -> None:
                self.gradients: list[int] = []

            def on_after_backward(self, trainer: Any, module: Any) -> None:
                # Parameters of the module are whole while a step accumulates; those of the optimizer never are.
                parameters = [item for group in trainer.optimizers[0].param_groups for item in group["params"]]
                grads = [item.grad for item in parameters if item.grad is not None]
                # level 1 keeps whole gradients aside while a step accumulates
                aside = sum(local_bytes(item) for item in accumulated(module))
                self.gradients.append(aside + sum(local_bytes(item) for item in grads))

        pl.seed_everything(1, verbose=False)
        module, weighs = LanguageModel(width=64), Weighs()
        trainer = make_trainer(mesh_strategy(level), weighs, accumulate_grad_batches=2)
        trainer.fit(module, loader())
        states = [item for state in trainer.optimizers[0].state.values() for item in state.values()]
        unused = set(module.unused.parameters())
        trained = [item for item in module.parameters() if item.requires_grad and item not in unused]
        found[level] = {
            "whole": sum(item.numel() * 4 for item in module.parameters()),
            "whole_trained": sum(item.numel() * 4 for item in trained),
            "whole_state": 2 * sum(item.numel() * 4 for item in trained),
            "parameters": sum(local_bytes(item) for item in module.parameters()),
            "state": sum(local_bytes(item) for item in states if item.dim()),
            "accumulating": weighs.gradients[0],
            "complete": weighs.gradients[1],
        }
    return found


def accumulated(module: nn.Module) -> list[torch.Tensor]:
    from torch.distributed.fsdp import FSDPModule

    found = []
    for part in module.modules():
        if isinstance(part, FSDPModule):
            group = part._get_fsdp_state()._fsdp_param_group
            for item in group.fsdp_params if group is not None else ():
                whole = getattr(item, "_unsharded_param", None)
                aside = (getattr(item, "unsharded_accumulated_grad", None), whole.grad if whole is not None else None)
                found += {id(gradient): gradient for gradient in aside if gradient is not None}.values()
    return found


@case("ranks")
def freed_between_uses() -> Any:
    """Bytes of whole parameters of all blocks while the last block runs, at levels 2 and 3."""
    from torch.distributed.fsdp import FSDPModule

    found = {}
    for level in (2, 3):

        class Looks(LanguageModel):
            def on_fit_start(self) -> None:
                blocks, self.seen = list(self.encoder.layers), []

                def look(part: nn.Module, args: Any) -> None:
                    self.seen.append(sum(held(block) for block in blocks))

                blocks[-1].linear2.register_forward_pre_hook(look)

        def held(block: nn.Module) -> int:
            assert isinstance(block, FSDPModule)
            items = block._get_fsdp_state()._fsdp_param_group.fsdp_params
            tensors = [item._unsharded_param for item in items if hasattr(item, "_unsharded_param")]
            return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

        module = Looks()
        make_trainer(mesh_strategy(level), max_steps=2).fit(module, loader())
        found[level] = [max(module.seen), sum(item.numel() * 4 for item in module.encoder.layers[0].parameters())]
    return found


@case("ranks")
def gathers_of_a_step() -> Any:
    """How often a step of three backward passes gathers parameters at levels 1 to 3, beside a step of one pass."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp

    gather, found = fsdp.foreach_all_gather, {}
    for level in (1, 2, 3):
        counts = []
        for passes in (1, 3):
            calls: list[int] = []

            def counted(*args: Any, calls: list[int] = calls, **kwargs: Any) -> Any:
                calls.append(1)
                return gather(*args, **kwargs)

            fsdp.foreach_all_gather = counted
            pl.seed_everything(1, verbose=False)
            module = LanguageModel()
            try:
                trainer = make_trainer(mesh_strategy(level), max_steps=2, max_epochs=9, accumulate_grad_batches=passes)
                trainer.fit(module, loader())
            finally:
                fsdp.foreach_all_gather = gather
            counts.append(len(calls) / 2)
        found[level] = counts
    return found


@case("ranks")
def step_without_a_last_backward() -> Any:
    """Weights by level, with a loop of its own that steps after backward passes all of which only accumulate."""

    class ByHand(LanguageModel):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            with self.trainer.strategy.block_backward_sync():
                self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()
            optimizer.zero_grad()

    found = {}
    for level in (2, 3):
        pl.seed_everything(1, verbose=False)
        module = ByHand()
        make_trainer(mesh_strategy(level), max_steps=3).fit(module, loader())
        whole = [item.full_tensor() if isinstance(item, DTensor) else item for item in module.parameters()]
        found[level] = [item.detach().double().norm().item() for item in whole]
    return found


@case("ranks")
def unused_on_one_rank() -> Any:
    """By level: weights with a parameter that only rank 1 uses, and which gradients no rank has."""

    class Branches(AutoEncoder):
        def __init__(self) -> None:
            super().__init__()
            self.sometimes, self.never = nn.Linear(16, 16), nn.Linear(16, 16)
            self.without: set[str] = set()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, _ = batch
            out = self.decoder(self.encoder(x))
            return nn.functional.mse_loss(self.sometimes(out) if RANK == 1 and batch_idx != 2 else out, x)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            without = [name for name, item in self.named_parameters() if item.grad is None]
            self.without |= {f"{name} {self.global_step}" for name in without}

    found = {}
    for level in range(4):
        for every in (1, 2):
            pl.seed_everything(1, verbose=False)
            module = Branches()
            make_trainer(mesh_strategy(level), max_steps=3, accumulate_grad_batches=every).fit(module, loader())
            whole = [item.full_tensor() if isinstance(item, DTensor) else item for item in module.parameters()]
            found[f"{level} {every}"] = [item.detach().flatten().tolist() for item in whole], sorted(module.without)
    return found


@case("ranks")
def reductions() -> Any:
    """What the collectives of a strategy mean: over ranks whose data differ."""
    trainer = make_trainer(mesh_strategy(0), max_steps=1)
    trainer.fit(AutoEncoder(), loader())
    strategy, mine = trainer.strategy, torch.tensor(float(RANK + 1))
    leaf = torch.tensor([float(RANK + 1)], requires_grad=True)
    (strategy.all_gather(leaf, sync_grads=True).sum() * (RANK + 1)).backward()
    return {
        "mean": float(strategy.reduce(mine)),
        "sum": float(strategy.reduce(mine, reduce_op="sum")),
        "integers": float(strategy.reduce(torch.tensor(RANK))),
        "max": float(strategy.reduce(mine, reduce_op=torch.distributed.ReduceOp.MAX)),
        "all": strategy.reduce_boolean_decision(RANK == 0),
        "any": strategy.reduce_boolean_decision(RANK == 0, all=False),
        "gathered": strategy.all_gather(mine).tolist(),
        "gradient": leaf.grad.tolist() if leaf.grad is not None else None,
        "broadcast": strategy.broadcast({"rank": RANK}),
        "dp": [strategy.dp_rank == RANK, strategy.dp_size],
    }


class Noisy(torch.utils.data.Dataset):
    """Samples with random augmentation in loader workers."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return torch.rand(16), 0


@case("ranks")
def augmentation_differs() -> Any:
    """Random numbers in loader workers and in the model differ between dp ranks, in a second run, too."""
    drawn: list[float] = []

    class Draws(AutoEncoder):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            drawn.extend([float(batch[0][0, 0]), float(torch.rand(()))])
            return super().training_step(batch, batch_idx)

    pl.seed_everything(1, workers=True, verbose=False)
    trainer = make_trainer(mesh_strategy(3), use_distributed_sampler=True)
    module = Draws()
    trainer.fit(module, DataLoader(Noisy(), batch_size=4, num_workers=1))
    os.environ.pop("PL_SEED_WORKERS", None)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, DataLoader(Noisy(), batch_size=4))
    return drawn


@case("ranks")
def statistics_agree() -> Any:
    """What a module collects itself is each rank's own in training, the first rank's in validation and checkpoints."""
    seen: list[float] = []

    class Collects(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("lately", torch.zeros(()))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.lately.lerp_(batch[0].mean(), 0.1)
            return super().training_step(batch, batch_idx)

        def on_train_end(self) -> None:
            seen.append(float(self.lately))

        def on_validation_epoch_end(self) -> None:
            super().on_validation_epoch_end()
            seen.append(float(self.lately))

    pl.seed_everything(1, verbose=False)
    module = Collects()
    trainer = make_trainer(mesh_strategy(3))
    trainer.fit(module, loader())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            trainer.validate(module, loader(), verbose=False)
    return seen[:2], [str(item.message) for item in warned if "other ranks" in str(item.message)]


class Numbers(IterableDataset):
    """0 to 9 in the first feature; `step` and `start` as of a dataset that shares them out itself."""

    def __init__(self, start: int = 0, step: int = 1) -> None:
        self.numbers = range(start, 10, step)

    def __iter__(self) -> Iterator[Any]:
        for number in self.numbers:
            yield torch.full((16,), float(number)), torch.tensor(0)


@case("ranks")
def nothing_to_shard() -> str:
    try:
        strategy = MeshStrategy(f"mp{WORLD}", mp="tensor_parallel", timeout=60)
        model = Classifier()
        model.model = nn.Sequential(nn.Flatten(), nn.LayerNorm(64))
        model.example_input_array = torch.zeros(2, 1, 8, 8)
        make_trainer(strategy).fit(model, own_loader())
    except ConfigError as error:
        return str(error)
    return ""


@case("ranks")
def streams() -> Any:
    def firsts(data: IterableDataset, batch_size: int, **options: Any) -> list[float]:
        seen: list[float] = []

        class Looks(AutoEncoder):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                seen.extend(batch[0][:, 0].tolist())
                return super().training_step(batch, batch_idx)

        trainer = make_trainer(mesh_strategy(3), **options)
        trainer.fit(Looks(), DataLoader(data, batch_size=batch_size))
        return seen

    shared = firsts(Numbers(), 4, use_distributed_sampler=True)
    left_alone = firsts(Numbers(RANK, WORLD), 2, use_distributed_sampler=False)
    try:
        firsts(Numbers(RANK, WORLD), 2, use_distributed_sampler=True)
    except ConfigError as error:
        return {"shared": shared, "left alone": left_alone, "refused": str(error)}


@case("ranks")
def predicted() -> Any:
    class Predicts(AutoEncoder):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            numbers = batch[0][:, 0]
            return {"numbers": numbers, "texts": [f"it is {number:g}" for number in numbers], "pair": [numbers]}

    class Looks(pl.callbacks.BasePredictionWriter):
        def __init__(self) -> None:
            super().__init__("batch_and_epoch")
            self.written: list[Any] = []

        def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *_: Any) -> None:
            (same,) = prediction["pair"]
            assert same.tolist() == prediction["numbers"].tolist()
            self.written.append([same.tolist(), prediction["texts"], indices])

        def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
            self.indices = batch_indices

    looks = Looks()
    data = [(torch.full((16,), float(number)), 0) for number in range(9)]
    trainer = make_trainer(mesh_strategy(3), looks, use_distributed_sampler=True)
    found = trainer.predict(Predicts(), [DataLoader(data, 4), DataLoader(Numbers(start=5), 4)])
    values = [[part["numbers"].tolist() for part in parts] for parts in found]
    return {"values": values, "indices": looks.indices[0], "written": looks.written[:3]}


# --- checkpoints: saved on two ranks, resumed on any mesh --------------------------------------------------------


class Stateful:
    """A loader that continues where it stood. Its state may depend on the rank."""

    def __init__(self, by_rank: bool = False) -> None:
        self.batches = list(loader())
        self.start, self.position, self.by_rank = 0, 0, by_rank

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        start, self.start = self.start, 0
        for index in range(start, len(self.batches)):
            self.position = index + 1
            yield self.batches[index]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "rank": RANK if self.by_rank else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rank"] in (None, RANK), state
        self.start = self.position = state["position"] % len(self.batches)


def shelf() -> Path:
    """Where the runs on different meshes exchange checkpoints."""
    return Path(os.environ["CHECKPOINTS"])


def save_at(
    name: str,
    make: Callable[[], pl.LightningModule],
    data: Any,
    weights_only: bool = False,
    step: int | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Train one epoch and save a checkpoint at its end, or in its middle after `step` steps and go on."""

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == step:
                trainer.save_checkpoint(shelf() / name)

    pl.seed_everything(1, verbose=False)
    rows = Rows()
    trainer = make_trainer(mesh_strategy(kwargs.pop("level", 3), **kwargs.pop("strategy", {})), rows, Saves(), **kwargs)
    module = make()
    trainer.fit(module, data)
    if step is None:
        trainer.save_checkpoint(shelf() / name, weights_only)
    return {**rows.table(), "weights": weights(module)}


def resume_from(name: str, level: int = 3, data: Any = None, max_epochs: int = 2, make: Any = LanguageModel) -> Any:
    pl.seed_everything(7, verbose=False)
    module, rows = make(), Rows()
    trainer = make_trainer(mesh_strategy(level), rows, max_epochs=max_epochs)
    trainer.fit(module, loader() if data is None else data, ckpt_path=str(shelf() / name))
    return {**rows.table(), "step": trainer.global_step, "epoch": trainer.current_epoch, "weights": weights(module)}


case("plain", name="uninterrupted")(lambda: train_whole(Stateful()))
case("plain", name="plain-file")(lambda: save_at("plain.ckpt", LanguageModel, loader()))


def train_whole(data: Any, **kwargs: Any) -> dict[str, Any]:
    pl.seed_everything(1, verbose=False)
    module = LanguageModel(**kwargs)
    return train(module, mesh_strategy(3), data, max_epochs=2)


for _level in LEVELS:
    case("save", name=f"save-{_level}")(
        lambda level=_level: save_at(f"epoch-{level}.ckpt", LanguageModel, loader(), level=level)
    )
    case("resume", "resume4", name=f"resume-level-{_level}")(lambda level=_level: resume_from("epoch-3.ckpt", level))
    case("resume", name=f"resume-from-level-{_level}")(
        lambda level=_level: resume_from(f"epoch-{level}.ckpt", 3 - level)
    )
case("save", name="save-mid")(lambda: save_at("mid.ckpt", LanguageModel, Stateful(), step=8, max_epochs=2))
case("save", name="save-ranked")(
    lambda: save_at("ranked.ckpt", LanguageModel, Stateful(by_rank=True), step=8, max_epochs=2)
)
case("save", name="save-weights")(lambda: save_at("weights.ckpt", LanguageModel, loader(), weights_only=True))
case("save", name="save-encoder")(lambda: save_at("encoder.ckpt", AutoEncoder, loader()))
case("resume", "resume4", name="resume-mid")(lambda: resume_from("mid.ckpt", data=Stateful()))
case("resume", "resume4", name="resume-plain")(lambda: resume_from("plain.ckpt"))
case("resume", name="resume-ranked")(lambda: resume_from("ranked.ckpt", data=Stateful(by_rank=True)))
case("resume4", name="resume-ranked-elsewhere")(lambda: resume_from("ranked.ckpt", data=Stateful(by_rank=True)))
case("resume", name="resume-weights")(lambda: resume_from("weights.ckpt"))
case("resume", name="resume-wider")(lambda: resume_from("epoch-3.ckpt", make=lambda: LanguageModel(width=16)))
case("resume", name="resume-other-model")(lambda: resume_from("epoch-3.ckpt", make=AutoEncoder))


@case("save")
def dropout_goes_on() -> Any:
    """Resumed in the middle of an epoch on the same mesh, dropout draws what it would have drawn."""
    whole_run = train_whole(Stateful(), dropout=0.3)
    save_at("dropout.ckpt", lambda: LanguageModel(dropout=0.3), Stateful(), step=8, max_epochs=2)
    rest = resume_from("dropout.ckpt", data=Stateful(), make=lambda: LanguageModel(dropout=0.3))
    return {"whole": whole_run["losses"][8:], "resumed": rest["losses"]}


@case("save")
def in_the_background() -> Any:
    """Asynchronous checkpoints change nothing; the last one is whole once fit is over, and after SIGTERM."""
    import signal

    from autolaunch_strategies.checkpoint.files import problem_with

    def run(directory: str, stop: bool = False, **strategy: Any) -> Any:
        class Terminates(pl.Callback):
            def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
                if stop and RANK == 0 and trainer.global_step == 3:
                    os.kill(os.getpid(), signal.SIGTERM)

        keep = pl.callbacks.ModelCheckpoint(
            shelf() / directory, filename="{step}", every_n_train_steps=1, save_top_k=2, monitor="step", mode="max"
        )
        pl.seed_everything(1, verbose=False)
        module = LanguageModel()
        trainer = make_trainer(mesh_strategy(3, **strategy), keep, Terminates(), enable_checkpointing=True)
        try:
            trainer.fit(module, loader())
        except SystemExit as stopped:
            return type(stopped).__name__, sorted(item.name for item in (shelf() / directory).iterdir())
        torch.distributed.barrier()
        left = {item.name: problem_with(item) for item in sorted((shelf() / directory).iterdir())}
        return weights(module), left

    background, left = run("background", asynchronous_checkpoints=True)
    foreground, _ = run("foreground")
    torch.distributed.barrier()
    stopped = run("stopped", stop=True, asynchronous_checkpoints=True)
    torch.distributed.barrier()
    last = problem_with(shelf() / "stopped" / stopped[1][-1])
    return {"equal": background == foreground, "left": left, "stopped": stopped, "last": last}


class WithConfig(AutoEncoder):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.save_hyperparameters({"config": config})


@case("save")
def metadata_of_any_type() -> Any:
    from omegaconf import OmegaConf

    def load(name: str, make: Any, **strategy: Any) -> str:
        try:
            make_trainer(mesh_strategy(3, **strategy)).validate(
                make(), loader(), ckpt_path=str(shelf() / name), verbose=False
            )
        except Exception as error:
            return str(error)
        return "loaded"

    config = OmegaConf.create({"width": 3})
    save_at("config.ckpt", lambda: WithConfig(config), loader())
    save_at("object.ckpt", lambda: WithConfig(_Fancy()), loader())
    return {
        "config": load("config.ckpt", lambda: WithConfig(config)),
        "object": load("object.ckpt", lambda: WithConfig(_Fancy())),
        "trusted object": load("object.ckpt", lambda: WithConfig(_Fancy()), trust_checkpoints=True),
        "plain": load("encoder.ckpt", AutoEncoder),
    }


class _Fancy:
    """No plain data."""


@case("save")
def parts_left_out() -> Any:
    """`strict_loading = False` lets a module keep frozen parts out of its checkpoints."""

    class LeavesOut(AutoEncoder):
        def __init__(self) -> None:
            super().__init__()
            self.strict_loading = False

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            state = super().state_dict(*args, **kwargs)
            return {name: value for name, value in state.items() if not name.startswith("decoder")}

    class Newer(AutoEncoder):
        def __init__(self) -> None:
            super().__init__()
            self.strict_loading = False
            self.added = nn.Linear(2, 2)

    save_at("part.ckpt", LeavesOut, loader())
    found = []
    for make in (LeavesOut, Newer):
        resume_from("part.ckpt", make=make) if make is LeavesOut else None
        make_trainer(mesh_strategy(3)).validate(make(), loader(), ckpt_path=str(shelf() / "part.ckpt"), verbose=False)
        found.append("loaded")
    return found


# --- four ranks ----------------------------------------------------------------------------------------------------

HYBRID: dict[str, Any] = {"sharding_level": 3, "replicate": 2, "shard": 2}


def four(name: str, make: Callable[[], pl.LightningModule], strategy: dict[str, Any], **kwargs: Any) -> None:
    parity(name, make, strategy, **kwargs)
    GROUPS.setdefault("four", {})[name] = GROUPS["parity"][name]


four("hybrid-3", LanguageModel, {"dp": HYBRID}, val=loader, gradient_clip_val=0.5)
four(
    "hybrid-accumulate-1", LanguageModel, {"dp": {**HYBRID, "sharding_level": 1}}, data=lambda: loader(4),
    accumulate_grad_batches=5, gradient_clip_val=0.5,
)  # fmt: skip
four(
    "hybrid-accumulate-2", LanguageModel, {"dp": {**HYBRID, "sharding_level": 2}}, data=lambda: loader(4),
    accumulate_grad_batches=5, gradient_clip_val=0.5,
)  # fmt: skip
four("four-3", Gan, {"level": 3})
four(
    "three-left-over", Measured, {"level": 2}, data=partial(own_loader, count=11), val=partial(own_loader, count=11),
    max_epochs=2, use_distributed_sampler=True,
)  # fmt: skip


def initial(make: Callable[[], pl.LightningModule], level: int, seed: int = 3) -> dict[str, list[float]]:
    class Looks(pl.Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            self.weights = weights(module, buffers=True)

    pl.seed_everything(seed, verbose=False)
    looks = Looks()
    make_trainer(MeshStrategy(mesh=str(WORLD), dp=level, timeout=60), looks, max_steps=1).fit(make(), loader())
    return looks.weights


@case("parity", "four", "alone")
def initial_weights() -> Any:
    """A model built in configure_model starts with the same weights on every mesh and at every level."""
    found = [initial(LateLanguageModel, level) for level in (0, 3)]
    assert found[0] == found[1]
    assert found[0] != initial(LateLanguageModel, 3, seed=4)
    return found[0]


if __name__ == "__main__":
    serve(GROUPS)
