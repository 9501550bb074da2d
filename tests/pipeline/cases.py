"""Cases for the tests of pp under Lightning.

The group `one` is what the others are compared with: plain Lightning in one process. A case returns what all ranks must
know (`everywhere`) and what only rank 0 must (`first`).
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from autolaunch_strategies import MeshStrategy
from autolaunch_strategies.config import parse_mesh
from autolaunch_strategies.mesh.rank_mesh import coordinates
from autolaunch_strategies.pipeline.run import Pipeline
from tests.lightning import any_signature
from tests.pipeline import modules as modules
from tests.pipeline.modules import VOCABULARY, WIDTH
from tests.support.cases import OUT, RANK, WORLD, no_compiler, serve

Case = Callable[[], Any]
GROUPS: dict[str, dict[str, Case]] = {}


def add(group: str, name: str, function: Case) -> None:
    """Put a case into a group; what it returns on each rank is written as JSON."""
    assert "." not in name and " " not in name
    cases = GROUPS.setdefault(group, {})
    assert name not in cases, name
    cases[name] = function


@dataclass(frozen=True)
class Setting:
    """How a case is run: on which mesh, with which options; or by plain Lightning (mesh empty)."""

    mesh: str = ""
    options: dict[str, Any] | None = None

    def strategy(self) -> Any:
        if not self.mesh:
            return "auto"
        options = {"timeout": 40, "dp": 0, "mp": None, "pp": "exact", **(self.options or {})}
        return MeshStrategy(mesh=self.mesh, **options)

    @property
    def share(self) -> tuple[int, int]:
        """(ranks whose data differ, which one this is)."""
        shape = parse_mesh(self.mesh or "1")
        return shape.dp, coordinates(shape, RANK)["dp"] if self.mesh else 0


PLAIN = Setting()

# --- data -----------------------------------------------------------------------------------------------------------


class Items(Dataset):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def vectors(count: int = 32) -> Items:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, WIDTH, generator=generator)
    y = torch.randint(0, 4, (count,), generator=generator)
    return Items(list(zip(x, y, strict=True)))


def texts(count: int = 32, even: bool = False) -> Items:
    """Sequences of 10 tokens: neighbours are as long as each other, others are not (unless `even`)."""
    generator = torch.Generator().manual_seed(6)
    items = []
    for index in range(count):
        length = 10 if even else 4 + 3 * (index // 2) % 7
        ids = torch.randint(4, VOCABULARY, (10,), generator=generator)
        mask = torch.arange(10) < length
        labels = ids.masked_fill(~mask, -100)
        wanted = mask & (torch.arange(10) % 3 == 0)
        items.append(
            {"input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask.long(), "labels": labels, "wanted": wanted}
        )
    return Items(items)


def only(data: Items, *keys: str) -> Items:
    return Items([{key: item[key] for key in keys} for item in data.items])


HF_KEYS = ("input_ids", "attention_mask", "labels")


def nested(count: int = 32) -> Items:
    return Items(
        [
            {
                "inputs": {"ids": item["input_ids"], "mask": item["attention_mask"].bool()},
                "target": item["input_ids"][0],
                "meta": {"name": f"sample {index}", "weight": 1.0, "tags": (index, [float(index)])},
            }
            for index, item in enumerate(texts(count).items)
        ]
    )


Data = Callable[[Setting], Any]


def batches(make: Callable[[], Items], size: int = 8, limit: int | None = None) -> Data:
    """A loader whose batches, taken from all dp ranks together, are the same on every mesh."""

    def loader(setting: Setting) -> DataLoader:
        data = make()
        if limit is not None:
            data = Items(data.items[:limit])
        dp, rank = setting.share
        sampler = DistributedSampler(data, dp, rank, shuffle=False) if dp > 1 else None
        return DataLoader(data, batch_size=size // dp, sampler=sampler)

    return loader


VECTORS, TEXTS = batches(vectors), batches(lambda: only(texts(), *HF_KEYS))
EVEN_TEXTS = batches(lambda: only(texts(even=True), *HF_KEYS))
SHORT = batches(lambda: only(texts(even=True), *HF_KEYS), limit=16)
PAIRS = batches(lambda: only(texts(), *HF_KEYS), limit=16)
MASKED = batches(lambda: only(texts(), "input_ids", "attention_mask", "wanted"))

# --- what is compared -------------------------------------------------------------------------------------------------


def canonical_names(module: nn.Module) -> dict[str, str]:
    """Name of every parameter to the first name of the same one."""
    first: dict[nn.Parameter, str] = {}
    return {
        name: first.setdefault(item, name)
        for name, item in module.named_parameters(remove_duplicate=False)
    }  # fmt: skip


def gathered(
    module: nn.Module, names: dict[str, str], pick: Callable[[nn.Parameter], Any] = lambda item: item
) -> dict[str, Any]:
    """Tensors that belong to parameters, whole and by name, from all stages. Fails if two holders do not agree."""
    mine: dict[str, torch.Tensor] = {}
    for name, item in module.named_parameters():
        value = pick(item)
        if value is not None:
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            mine[names.get(name, name)] = whole.detach().float().clone()
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return mine
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    together: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, value in part.items():
            other = together.setdefault(name, value)
            assert torch.equal(other, value), f"holders of {name} differ by {(other - value).abs().max()}"
    return together


def numbers(tensors: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    return {name: value.flatten().tolist() for name, value in sorted(tensors.items())}


def norm_of(tensors: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([value.double().square().sum() for value in tensors.values()]).sum().sqrt())


class Rows(pl.Callback):
    """Loss, norm of the gradients and learning rates of every optimizer step; metrics after every batch."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.reported: list[float] = []
        self.rates: list[list[float]] = []
        self.history: list[dict[str, float]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.history.append(metrics(trainer))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        weight = getattr(trainer.strategy, "batch_weight", 1.0)
        self.losses.append(float(trainer.strategy.reduce(outputs["loss"].detach() * weight)))

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        norm = norm_of(gathered(module, self.names, lambda item: item.grad))
        strategy = trainer.strategy
        self.norms.append(norm)
        self.reported.append(float(strategy.last_grad_norm) if isinstance(strategy, MeshStrategy) else norm)
        self.rates.append([group["lr"] for group in optimizer.param_groups])


def metrics(trainer: pl.Trainer) -> dict[str, float]:
    return {key: float(value) for key, value in trainer.callback_metrics.items()}


def make_trainer(setting: Setting, *callbacks: pl.Callback, **kwargs: Any) -> pl.Trainer:
    options: dict[str, Any] = {
        "accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "use_distributed_sampler": False,
        "num_sanity_val_steps": 0, "log_every_n_steps": 1,
    }  # fmt: skip
    return pl.Trainer(strategy=setting.strategy(), callbacks=list(callbacks), **{**options, **kwargs})


def table(rows: Rows, trainer: pl.Trainer, module: nn.Module) -> dict[str, Any]:
    everywhere = {
        "norms": rows.norms, "reported": rows.reported, "rates": rows.rates, "history": rows.history,
        "metrics": metrics(trainer), "step": trainer.global_step,
        "weights": numbers(gathered(module, rows.names)),
    }  # fmt: skip
    return {"everywhere": everywhere, "first": {"losses": rows.losses}}


def fit(
    setting: Setting, make: Callable[[], pl.LightningModule], data: Data, val: Data | None = None, **kwargs: Any
) -> Any:
    """Train and return everything that must not depend on the mesh."""
    pl.seed_everything(1, verbose=False)
    module = make()
    rows = Rows(canonical_names(module))
    trainer = make_trainer(setting, rows, *kwargs.pop("callbacks", ()), **kwargs)
    pl.seed_everything(1, verbose=False)  # as distributed strategies do when they start
    trainer.fit(module, data(setting), val and val(setting))
    return table(rows, trainer, module)


RECIPES: dict[str, Callable[[Setting], Any]] = {}


def recipe(name: str, *settings: tuple[str, Setting], plain: bool = True) -> Callable[[Any], Any]:
    """A function of a setting as a case: by plain Lightning in the group `one`, and in every given (group, setting)."""

    def register(function: Callable[[Setting], Any]) -> Callable[[Setting], Any]:
        RECIPES[name] = function
        if plain:
            add("one", name, lambda: function(PLAIN))
        for group, setting in settings:
            add(group, name, lambda setting=setting: function(setting))
        return function

    return register


def again(name: str, label: str, group: str, mesh: str, **options: Any) -> None:
    """Run a recipe on another mesh or with other options, as `name@label`."""
    add(group, f"{name}@{label}", lambda: RECIPES[name](Setting(mesh, options)))


PP2 = ("two", Setting("1x1x2"))


def training(name: str, make: Callable[[], pl.LightningModule], data: Data, **kwargs: Any) -> None:
    """A case that trains: on two stages with the options `on` of the strategy, and in one process."""
    on, inside = kwargs.pop("on", {}), kwargs.pop("inside", contextlib.nullcontext)

    def run(setting: Setting) -> Any:
        with inside():
            return fit(setting, make, data, **kwargs)

    recipe(name, ("two", Setting("1x1x2", on)))(run)


# --- models -----------------------------------------------------------------------------------------------------------


def hf(family: str, adam: bool = False, **changes: Any) -> Callable[[], pl.LightningModule]:
    wrap = modules.TransformersAdamW if adam else modules.Transformers
    return lambda: wrap(modules.hf_causal(family, **changes))


training("llama", modules.OwnLlama, EVEN_TEXTS, val=EVEN_TEXTS, gradient_clip_val=0.5)
training("llama-tied", lambda: modules.OwnLlama(tie=True), EVEN_TEXTS, val=EVEN_TEXTS, gradient_clip_val=0.5)
training("hf-llama", hf("llama"), TEXTS, val=TEXTS, gradient_clip_val=0.5)
training("hf-gpt2", hf("gpt2"), TEXTS, gradient_clip_val=0.5)
training("hf-qwen3-adamw", hf("qwen3", adam=True), TEXTS, val=TEXTS, gradient_clip_val=0.5)
training("hf-gpt-neox", hf("gpt_neox"), TEXTS)
training("hf-opt", hf("opt"), TEXTS)
training("hf-all-hidden-states", lambda: modules.WithHiddenStates(modules.hf_causal("llama")), TEXTS)
training(
    "hf-t5", lambda: modules.Transformers(modules.hf_t5()), TEXTS, val=TEXTS,
    on={"pp": {"split_spec": {"model.decoder.block.0": "BEGINNING"}}},
)  # fmt: skip
CLASSES = batches(
    lambda: Items([{**item, "labels": item["input_ids"][0] % 4} for item in only(texts(), *HF_KEYS).items])
)
training("hf-bert", lambda: modules.Transformers(modules.hf_bert()), CLASSES)
training("hf-albert", lambda: modules.Transformers(modules.hf_albert()), CLASSES, gradient_clip_val=0.5)
_BLOCK = "model.albert.encoder.albert_layer_groups.0"
again("hf-albert", "call-0", "two", "1x1x2", pp={"split_spec": {f"{_BLOCK}@0": "END"}})
again(
    "hf-albert", "1f1b", "two", "1x1x2",
    pp={"schedule": "1f1b", "loss": "microbatch", "microbatches": 4, "split_spec": {f"{_BLOCK}@3": "BEGINNING"}},
)  # fmt: skip
training("tuples", modules.Tuples, batches(nested))
training("encoder", modules.Masked, MASKED, val=MASKED)
training("causal", modules.Causal, EVEN_TEXTS, val=EVEN_TEXTS)  # as many positions as samples
training("causal-odd", modules.Causal, batches(lambda: texts(even=True), 5))  # the last batch has two samples
training("causal-last-of-one", modules.Causal, batches(lambda: texts(even=True), 8, limit=17))
training("skips", lambda: modules.Classifier(modules.SkipModel()), VECTORS, val=VECTORS)
training("resnet", lambda: modules.Classifier(modules.ResNet(), (1, 4, 4)), VECTORS, val=VECTORS)
training("batch-norm", lambda: modules.Classifier(modules.ResNet("batch"), (1, 4, 4)), VECTORS, val=VECTORS)
again("batch-norm", "one-microbatch", "two", "1x1x2", pp={"microbatches": 1})
again("batch-norm", "dp2pp2", "four", "2x1x2", dp=0)
training(
    "normalised-by-hand", lambda: modules.Classifier(modules.with_blocks(modules.NormalisedInTraining)), VECTORS,
    val=VECTORS,
)  # fmt: skip
training("no-blocks", lambda: modules.Classifier(modules.NoBlocks()), VECTORS, val=VECTORS)
training("sequence-first", lambda: modules.SequenceFirst(recurrent=False), VECTORS)
again("sequence-first", "mp2pp2", "four", "1x2x2", mp="auto")
training("state-first", lambda: modules.SequenceFirst(recurrent=True), VECTORS)
training("sandwich", modules.Sandwich, VECTORS, gradient_clip_val=0.1)
training(
    "frozen-first-stage", lambda: modules.Sandwich("before backbone.stem backbone.blocks.0 backbone.blocks.1"), VECTORS
)
training(
    "frozen-last-stage",
    lambda: modules.Sandwich("backbone.blocks.2 backbone.blocks.3 backbone.head after temp"),
    VECTORS,
)
training("frozen-all-but-before", lambda: modules.Sandwich("backbone after temp"), VECTORS)
training("unfreezes", modules.Unfreezes, VECTORS, max_epochs=2)
for _kind in ("conditioned", "unet", "n-beats"):
    training(_kind, any_signature.KINDS[_kind], lambda setting: any_signature.series())
again("conditioned", "1f1b", "two", "1x1x2", pp="1f1b")
training("example-of-forward", modules.ShowsExample, VECTORS)
training("example-without-forward", modules.ShowsExampleWithoutForward, VECTORS)
training("conditioned-of-stream", any_signature.Conditioned, lambda setting: any_signature.stream())
training("unfreezes-first", modules.UnfreezesFirst, VECTORS, max_epochs=2)
again(
    "unfreezes-first", "1f1b", "two", "1x1x2", pp={"loss": "microbatch", "schedule": "1f1b", "microbatches": 4},
)  # fmt: skip
training("freezes-between-batches", modules.FreezesBetweenBatches, VECTORS)
training("holds-blocks", modules.HoldsBlocks, VECTORS)
training("distilled", modules.Distilled, VECTORS)
training("contrastive", modules.Contrastive, VECTORS)

training("by-hand", modules.ManualOptimization, VECTORS)
training("by-hand-tied", modules.TiedByHand, TEXTS)
training("adversarial", modules.Adversarial, VECTORS)
training("adversarial-critic", lambda: modules.Adversarial("critic"), VECTORS)
training("two-models", lambda: modules.TwoModels(by_hand=False), VECTORS)
training("two-models-by-hand", lambda: modules.TwoModels(by_hand=True), VECTORS)
for _name in ("by-hand", "adversarial", "adversarial-critic"):
    again(_name, "dp2pp2-3", "four", "2x1x2", dp=3)

training("grad-norms", modules.GradNorms, TEXTS, accumulate_grad_batches=2)
for _mesh, _level in (("2x1x1", 3), ("2x1x1", 1), ("1x2x1", 0)):
    again("grad-norms", f"{_mesh}-{_level}", "two", _mesh, dp=_level, mp="auto")
again("grad-norms", "dp2pp2-3", "four", "2x1x2", dp=3)

# --- loop -------------------------------------------------------------------------------------------------------------

SMALL = batches(vectors, 4)
for _count in (2, 3):  # eight batches: the last window of three has two
    training(
        f"accumulate-{_count}", modules.Classifier, SMALL, val=VECTORS, accumulate_grad_batches=_count,
        val_check_interval=3, gradient_clip_val=0.1, max_epochs=2,
    )  # fmt: skip
training(
    "accumulate-tied", hf("llama"), batches(lambda: only(texts(), *HF_KEYS), 4), val=TEXTS, accumulate_grad_batches=3,
    val_check_interval=2, gradient_clip_val=0.5,
)  # fmt: skip
training("clip-by-value", modules.Classifier, VECTORS, gradient_clip_val=0.01, gradient_clip_algorithm="value")
training("clip-tied", hf("gpt2"), TEXTS, gradient_clip_val=0.05)
training(
    "own-loader", modules.Classifier, lambda setting: DataLoader(vectors(27), 8),
    val=lambda setting: DataLoader(vectors(13), 8), use_distributed_sampler=True, max_epochs=2,
)  # fmt: skip
again("own-loader", "dp2pp2-1f1b", "four", "2x1x2", pp={"loss": "microbatch", "schedule": "1f1b", "microbatches": 2})
training("odd-last-batch", modules.Classifier, batches(vectors, 8, limit=27), val=batches(vectors, 8, limit=13))
training("calls-counted", lambda: modules.Classifier(modules.CallsCounted()), VECTORS)
training("input-halved", lambda: modules.Classifier(modules.InputHalved()), VECTORS)
training("starts-from-batch", lambda: modules.Classifier(modules.with_blocks(modules.StartsFromBatch)), VECTORS)
training("block-counted", lambda: modules.Classifier(modules.with_blocks(modules.BlockCounted)), VECTORS)
training("prime-batch", modules.Classifier, batches(vectors, 7, limit=21), on={"pp": {"microbatches": 4}})
training("batch-below-microbatches", modules.Classifier, batches(vectors, 3, limit=9), on={"pp": {"microbatches": 8}})
training("batch-of-one", hf("llama"), batches(lambda: only(texts(), *HF_KEYS), 1, limit=4))
training("two-validation-loaders", hf("llama"), TEXTS, val=lambda setting: [TEXTS(setting), EVEN_TEXTS(setting)])
training("recompute-full", hf("llama", use_cache=False), TEXTS, gradient_clip_val=0.5, on={"recompute": "full"})
training(
    "recompute-zero-bubble", modules.OwnLlama, EVEN_TEXTS,
    on={"recompute": "full", "pp": {"loss": "microbatch", "schedule": "interleaved_zero_bubble", "microbatches": 4}},
)  # fmt: skip
training("recompute-selective", modules.OwnLlama, EVEN_TEXTS, on={"recompute": "selective"})
training("compile", modules.OwnLlama, EVEN_TEXTS, on={"compile": "default", "timeout": 250}, max_steps=2)
training("compile-captured", modules.OwnLlama, EVEN_TEXTS, on={"compile": True}, max_steps=2, inside=no_compiler)
training("bf16-mixed", modules.OwnLlama, EVEN_TEXTS, precision="bf16-mixed", gradient_clip_val=0.5)
training("diffusion", modules.Diffusion, VECTORS)
training("balanced", modules.OwnLlama, EVEN_TEXTS, on={"pp": {"split": "balanced"}})


# --- hooks ------------------------------------------------------------------------------------------------------------


class Diary(pl.Callback):
    """Every hook in order with the counters that Lightning shows at that moment, and norms of gradients."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names
        self.lines: list[str] = []
        self.norms: list[float] = []


def _write_down(hook: str) -> Any:
    def run(self: Diary, trainer: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self.lines.append(f"{hook} step={trainer.global_step} epoch={trainer.current_epoch} lr={rates}")
        if hook in ("on_before_zero_grad", "on_before_optimizer_step", "on_after_backward", "on_train_batch_end"):
            found = gathered(module, self.names, lambda item: item.grad)
            self.norms.append(norm_of(found) if found else 0.0)

    return run


for _hook in [item for item in dir(pl.Callback) if item.startswith("on_") and "checkpoint" not in item]:
    setattr(Diary, _hook, _write_down(_hook))


class OwnHooks(modules.EpochEnds):
    """Writes down its own hooks; counts what runs on which rank."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.seen: list[list[str]] = []
        self.drawn = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.lines.append(f"training_step {batch_idx}")
        out = super().training_step(batch, batch_idx)
        self._draw_image()
        self.print("after the call")
        return out

    @pl.utilities.rank_zero_only
    def _draw_image(self) -> None:
        self.drawn += 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.lines.append(f"on_train_batch_end {batch_idx}")
        self.seen.append([*sorted(outputs), str(list(outputs["logits"].shape)), str(outputs["index"])])
        self.log("from_the_batch_end", float(batch_idx))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.lines.append("on_before_zero_grad")

    def on_after_backward(self) -> None:
        self.lines.append("on_after_backward")

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.lines.append("on_train_epoch_end")

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.lines.append("on_validation_epoch_end")


@recipe("hooks", PP2)
def hooks(setting: Setting) -> Any:
    pl.seed_everything(1, verbose=False)
    module = OwnHooks()
    diary = Diary(canonical_names(module))
    said = io.StringIO()
    trainer = make_trainer(
        setting, diary, max_epochs=2, accumulate_grad_batches=2, val_check_interval=3, num_sanity_val_steps=1,
    )  # fmt: skip
    with contextlib.redirect_stdout(said):
        trainer.fit(module, SMALL(setting), VECTORS(setting))
    return {
        "everywhere": {
            "lines": diary.lines, "norms": diary.norms, "steps": module.steps, "metrics": metrics(trainer),
            "said once": (said.getvalue().count("after the call"), module.drawn) in ((16, 16), (0, 0)),
        },
        "first": {
            "own lines": module.lines, "outputs": module.seen, "drawn": module.drawn,
            "said": said.getvalue().count("after the call"), "predictions": said.getvalue().count("first prediction"),
        },
    }  # fmt: skip


@recipe("decisions", PP2)
def decisions(setting: Setting) -> Any:
    """EarlyStopping and ModelCheckpoint on a metric that only the last stage can compute."""

    class Worsens(modules.Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            logits = self(batch[0])
            value = [3.0, 2.0, 1.0, 4.0, 5.0, 6.0][self.current_epoch] + 1e-3 * logits.square().mean()
            self.log("val", value, sync_dist=True)

        def on_validation_epoch_end(self) -> None:
            pass

    pl.seed_everything(1, verbose=False)
    directory = OUT / f"kept-{WORLD}"
    stop = pl.callbacks.EarlyStopping("val", patience=2)
    keep = pl.callbacks.ModelCheckpoint(directory, "{epoch}", monitor="val", save_top_k=2, save_last="link")
    module = Worsens()
    names = canonical_names(module)
    trainer = make_trainer(setting, stop, keep, max_epochs=6, enable_checkpointing=True)
    trainer.fit(module, VECTORS(setting), VECTORS(setting))
    best = numbers(gathered(module, names))
    trainer.validate(ckpt_path="best", dataloaders=VECTORS(setting), verbose=False)
    assert numbers(gathered(module, names)) != best, "the best weights are not the last"
    return {
        "everywhere": {
            "stopped": stop.stopped_epoch, "best": Path(keep.best_model_path).name, 
            "score": float(keep.best_model_score),
            "left": sorted(item.name for item in directory.iterdir()), "metrics": metrics(trainer),
            "weights": numbers(gathered(module, names)),
        },
    }  # fmt: skip


@recipe("tasks", PP2)
def tasks(setting: Setting) -> Any:
    """fit, validate, test, predict and fit again on one Trainer; then a second Trainer on the same module."""
    pl.seed_everything(1, verbose=False)
    module = modules.Classifier()
    rows = Rows(canonical_names(module))
    trainer = make_trainer(setting, rows)
    loaders = VECTORS(setting), batches(vectors, 8, limit=20)(setting)
    trainer.fit(module, *loaders)
    found = [trainer.validate(module, loaders[1], verbose=False), trainer.test(module, loaders[0], verbose=False)]
    trainer.predict(module, loaders[1])
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, *loaders)
    again = table(rows, trainer, module)
    second = make_trainer(setting)
    second.fit(module, *loaders)
    found.append(second.validate(module, loaders[1], verbose=False))
    return {
        "everywhere": {**again["everywhere"], "found": found, "last": numbers(gathered(module, rows.names))},
        "first": again["first"],
    }


class Writes(pl.callbacks.BasePredictionWriter):
    """As in the manual: all ranks write the same files."""

    def __init__(self, directory: Path, interval: Any) -> None:
        super().__init__(interval)
        self.directory = directory
        directory.mkdir(exist_ok=True)

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, indices: Any, batch: Any, index: int, loader: int
    ) -> None:
        torch.save(prediction.tolist(), self.directory / f"{index}.pt")

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        torch.save([item.tolist() for item in predictions], self.directory / "all.pt")


@recipe("predictions", PP2)
def predictions(setting: Setting) -> Any:
    """Predictions of every loader, in training's middle and of a model that was never trained."""
    pl.seed_everything(1, verbose=False)
    module, trainer = modules.Classifier(), make_trainer(setting)
    trainer.fit(module, VECTORS(setting))
    after = trainer.predict(module, [VECTORS(setting), batches(vectors, 8, limit=11)(setting)])
    written = OUT / f"written-{WORLD}"
    for interval in ("batch", "epoch"):
        make_trainer(setting, Writes(written, interval)).predict(module, VECTORS(setting))
    pl.seed_everything(1, verbose=False)
    untrained = make_trainer(setting).predict(hf("gpt2")(), TEXTS(setting))  # without labels
    if RANK:
        return {}
    assert after and untrained
    return {
        "first": {
            "after": [[item.tolist() for item in part] for part in after],
            "untrained": [item.tolist() for item in untrained],
            "written": {item.name: torch.load(item) for item in sorted(written.iterdir())},
        }
    }


@recipe("logger", PP2)
def logger(setting: Setting) -> Any:
    """What a logger writes."""
    pl.seed_everything(1, verbose=False)
    name = "plain" if setting is PLAIN else "mesh"
    trainer = make_trainer(
        setting, pl.callbacks.LearningRateMonitor("step"), logger=pl.loggers.CSVLogger(OUT, name, ""), max_epochs=2
    )
    trainer.fit(modules.EpochEnds(), VECTORS(setting), VECTORS(setting))
    if RANK:
        return {}
    lines = [line.split(",") for line in (OUT / name / "metrics.csv").read_text().splitlines()]
    rows = [
        {key: float(value) for key, value in zip(lines[0], line, strict=True) if value} for line in lines[1:]
    ]  # fmt: skip
    return {"first": {"rows": rows}}


@recipe("own-order", PP2)
def own_order(setting: Setting) -> Any:
    """With one rank along dp the user's order stays, also where Lightning would add a sampler; all stages see it."""
    seen: list[float] = []

    class Looks(modules.Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.extend(batch[0][:, 0].tolist())
            return super().training_step(batch, batch_idx)

    pl.seed_everything(1, verbose=False)
    trainer = make_trainer(setting, use_distributed_sampler=True)
    trainer.fit(Looks(), DataLoader(vectors(), batch_size=8))
    in_order = list(seen)
    trainer, module = make_trainer(setting, use_distributed_sampler=True), Looks()
    pl.seed_everything(1, verbose=False)
    trainer.fit(module, DataLoader(vectors(), batch_size=8, shuffle=True))
    return {"everywhere": {"in order": in_order, "shuffled": seen}}


@recipe("summary", PP2)
def summary(setting: Setting) -> Any:
    """The table of the model that Lightning prints does not get in the way."""
    pl.seed_everything(1, verbose=False)
    with contextlib.redirect_stdout(io.StringIO()):
        make_trainer(setting, enable_model_summary=True, max_steps=1).fit(hf("llama")(), TEXTS(setting))
    return {}


# --- two stages without a counterpart in one process ------------------------------------------------------------------


def failing(
    make: Callable[[], pl.LightningModule], *callbacks: pl.Callback, data: Data = VECTORS, **options: Any
) -> Any:
    """(message of the error, optimizer steps before it)."""
    pl.seed_everything(1, verbose=False)
    trainer = make_trainer(Setting("1x1x2", options), *callbacks)
    try:
        trainer.fit(make(), data(Setting("1x1x2")))
    except Exception as error:
        return {"type": type(error).__name__, "message": str(error), "steps": trainer.global_step}
    return {"type": "", "message": "", "steps": trainer.global_step}


MICROBATCH = {"pp": {"loss": "microbatch", "schedule": "1f1b", "microbatches": 4}}
REFUSED: dict[str, Case] = {
    "manual-optimization": lambda: failing(modules.ManualOptimization, pp="1f1b"),
    "through-itself": lambda: failing(modules.ThroughItself),
    "twice-by-hand": lambda: failing(modules.TwiceByHand),
    "penalty-by-hand": lambda: failing(modules.PenaltyByHand),
    "own-backward": lambda: failing(modules.OwnBackward),
    "averaging": lambda: failing(modules.Classifier, pl.callbacks.StochasticWeightAveraging(1e-2)),
    "second-order": lambda: failing(modules.SecondOrder),
    "batch-norm-by-schedule": lambda: failing(
        lambda: modules.Classifier(modules.ResNet("batch"), (1, 4, 4)), pp="1f1b"
    ),
    "batch-norm-microbatches": lambda: failing(
        lambda: modules.Classifier(modules.ResNet("batch"), (1, 4, 4)), pp={"microbatches": 4}
    ),
    "sequence-first-microbatches": lambda: failing(
        lambda: modules.SequenceFirst(recurrent=False), pp={"microbatches": 2}
    ),
    "block-keeps-state": lambda: failing(
        lambda: modules.Classifier(modules.with_blocks(modules.BlockCounted)), pp={"microbatches": 2}
    ),
    "normalised-by-hand-microbatches": lambda: failing(
        lambda: modules.Classifier(modules.with_blocks(modules.NormalisedInTraining)), pp={"microbatches": 2}
    ),
    "normalised-beside-dropout": lambda: failing(
        lambda: modules.Classifier(modules.with_blocks(lambda: modules.NormalisedInTraining(0.1))),
        pp={"microbatches": 2},
    ),
    "too-few-blocks": lambda: failing(
        lambda: modules.Classifier(modules.Mlp(blocks=1)), pp={"split_spec": "model.blocks"}
    ),
    "two-calls": lambda: failing(modules.TwoCalls),
    "parts-by-themselves": lambda: failing(modules.PartsByThemselves),
    "penalty": lambda: failing(modules.Penalty),
    "kept-by-others": lambda: failing(modules.Penalised),
    "kept-by-others-by-schedule": lambda: failing(modules.Penalised, **MICROBATCH),
    "masked-mean": lambda: failing(modules.Masked, data=MASKED, **MICROBATCH),
    "hf-masked-mean": lambda: failing(hf("llama"), data=TEXTS, **MICROBATCH),
    # Of twelve samples: the first six digits of the loss of eight, 0.7903865, differ between processors.
    "in-batch-contrastive": lambda: failing(modules.Contrastive, data=batches(vectors, 12), **MICROBATCH),
}
"""What is refused, before or at the first step, by every rank."""

ENDS: dict[str, Case] = {
    "calls-forward": lambda: fit(Setting("1x1x2"), modules.CallsForward, VECTORS),
    "never-calls": lambda: fit(Setting("1x1x2"), modules.NeverCalls, VECTORS),
    "another-structure": lambda: fit(Setting("1x1x2"), lambda: modules.Classifier(modules.ReadingMlp()), VECTORS),
}
"""What one rank refuses at the first step, while others may wait for it: the end of the run."""

for _name, _function in REFUSED.items():
    add("refused", _name, _function)
for _name, _function in ENDS.items():
    add("refused", _name, _function)


class RaisesInSecondBatch(modules.Classifier):
    """On every stage, before the model is called."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            raise KeyError("no such sample")
        return super().training_step(batch, batch_idx)


class KeepsGradients(pl.Callback):
    """A copy of what has been accumulated after the last batch."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.gradients = {name: item.grad.clone() for name, item in module.named_parameters() if item.grad is not None}


def raises_while_accumulating() -> Any:
    """Whether gradients are those of the batch before the one that raised: (of how many parameters, equal)."""
    module, seen = RaisesInSecondBatch(), KeepsGradients()
    try:
        make_trainer(Setting("1x1x2", scheduled("1f1b")), seen, accumulate_grad_batches=2).fit(module, SMALL(PLAIN))
    except KeyError:
        now = {name: item.grad for name, item in module.named_parameters() if item.grad is not None}
        return {"kept": len(seen.gradients), "equal": same_tensors(now, seen.gradients)}
    return {}


def same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


add("raising", "while-accumulating", raises_while_accumulating)


class WatchesDropout(pl.Callback):
    """Which share of their inputs this rank's dropouts dropped, in each call while training."""

    def __init__(self) -> None:
        self.shares: dict[str, list[float]] = {}

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        for name, part in module.named_modules():
            if isinstance(part, nn.Dropout):
                part.register_forward_hook(self._write_down(name))

    def _write_down(self, name: str) -> Any:
        def look(part: nn.Module, args: Any, output: torch.Tensor) -> None:
            if part.training:
                self.shares.setdefault(name, []).append(float((output == 0).float().mean()))

        return look


def dropout() -> Any:
    """Training without dropout, with it twice from one seed and once from another.

    `evaluated` is the loss of validation after training, `expected` that of the same weights in a model that has no
    dropout.
    """
    setting, found = Setting("1x1x2"), {}
    for name, make, seed in (
        ("without", modules.Classifier, 1), ("first", modules.Noisy, 1), ("again", modules.Noisy, 1),
        ("other", modules.Noisy, 2),
    ):  # fmt: skip
        pl.seed_everything(1, verbose=False)
        module, watch = make(), WatchesDropout()
        rows = Rows(canonical_names(module))
        trainer = make_trainer(setting, rows, watch)
        pl.seed_everything(seed, verbose=False)
        trainer.fit(module, VECTORS(setting), VECTORS(setting))
        weights = gathered(module, rows.names)
        whole = modules.Classifier().eval()
        whole.load_state_dict(weights)
        with torch.no_grad():
            losses = [float(nn.functional.cross_entropy(whole(x), y)) for x, y in VECTORS(setting)]
        found[name] = {
            "losses": rows.losses, "norms": rows.norms, "weights": numbers(weights), "shares": watch.shares,
            "evaluated": metrics(trainer)["val_loss"], "expected": sum(losses) / len(losses),
        }  # fmt: skip
    return found


add("two", "dropout", dropout)


def stages() -> Any:
    """Which parameters each rank holds, and how many numbers of all."""
    found = {}
    for name, make, data in (("llama", modules.OwnLlama, EVEN_TEXTS), ("hf-llama", hf("llama"), TEXTS)):
        pl.seed_everything(1, verbose=False)
        module = make()
        whole = sum(item.numel() for item in module.parameters())
        expected = sorted(module.state_dict())
        setting = Setting("1x1x2")
        trainer = make_trainer(setting, max_steps=1)
        trainer.fit(module, data(setting))
        found[name] = {
            "names": sorted(name for name, _ in module.named_parameters()),
            "strange": sorted(set(module.state_dict()) - set(expected)),
            "share": sum(item.numel() for item in module.parameters()) / whole,
            "counted": trainer.strategy.parameter_count == whole,
        }
    return found


add("two", "stages", stages)

# --- microbatches and schedules ---------------------------------------------------------------------------------------


def scheduled(schedule: str, **options: Any) -> dict[str, Any]:
    return {"pp": {"loss": "microbatch", "schedule": schedule, "microbatches": 4, **options}}


ONE_STAGE = ("gpipe", "1f1b")
SEVERAL = ("looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev")
training("llama-8", lambda: modules.OwnLlama(layers=8), EVEN_TEXTS, gradient_clip_val=0.5)
training("llama-4", modules.OwnLlama, EVEN_TEXTS, gradient_clip_val=0.5)
for _schedule in (*ONE_STAGE, *SEVERAL):
    _size = {"microbatches": 8} if _schedule == "dualpipev" else {}
    for _model, _ranks, _group in (("llama-4", 2, "two"), ("llama-8", 4, "four")):
        if (_schedule, _ranks) in (("gpipe", 4), ("looped_bfs", 4)):
            continue  # what more stages change shows in 1f1b and in interleaved_1f1b
        again(_model, f"{_schedule}-pp{_ranks}", _group, f"1x1x{_ranks}", **scheduled(_schedule, **_size))
for _name, _options in {
    "classifier-accumulate": {"accumulate_grad_batches": 3, "val_check_interval": 2, "gradient_clip_val": 0.1},
    "classifier-odd": {},
}.items():
    _data = SMALL if "accumulate" in _name else batches(vectors, 8, limit=28)
    training(f"micro-{_name}", modules.Classifier, _data, val=VECTORS, on=scheduled("1f1b"), **_options)
training("micro-hf-gpt2", hf("gpt2"), EVEN_TEXTS, val=TEXTS, on=scheduled("1f1b"), gradient_clip_val=0.05)
training("micro-sandwich", modules.Sandwich, VECTORS, on=scheduled("1f1b"), gradient_clip_val=0.1)
training("micro-skips", lambda: modules.Classifier(modules.SkipModel()), VECTORS, on=scheduled("gpipe"))
training("micro-recompute", hf("llama", use_cache=False), EVEN_TEXTS, on={**scheduled("1f1b"), "recompute": "full"})


training("micro-metrics", modules.Scored, batches(vectors, 8, limit=30), on=scheduled("1f1b"), max_epochs=2)
training(
    "compile-zero-bubble", modules.OwnLlama, EVEN_TEXTS, on={**scheduled("zbv_zero_bubble"), "compile": True},
    max_steps=2, inside=no_compiler,
)  # fmt: skip


@recipe("micro-hooks", ("two", Setting("1x1x2", scheduled("1f1b"))))
def micro_hooks(setting: Setting) -> Any:
    """Callbacks' hooks, counters and rates are those of one process in the other mode, too."""
    pl.seed_everything(1, verbose=False)
    module = modules.Classifier()
    diary = Diary(canonical_names(module))
    trainer = make_trainer(setting, diary, max_epochs=2, accumulate_grad_batches=2, val_check_interval=3)
    trainer.fit(module, SMALL(setting), VECTORS(setting))
    return {"everywhere": {"lines": diary.lines, "norms": diary.norms, "metrics": metrics(trainer)}}


class LooksBeforeZeroGrad(modules.Classifier):
    """Keeps gradients that are not zero until it has seen them."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.names = canonical_names(self)
        self.norms: list[float] = []
        setattr(self, hook, self._look_and_go_on(getattr(self, hook)))

    def _look_and_go_on(self, hook: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            found = gathered(self, self.names, lambda item: item.grad)
            self.norms.append(norm_of(found) if found else 0.0)
            hook(*args, **kwargs)

        return run


for _hook in ("on_before_zero_grad", "optimizer_zero_grad"):

    @recipe(f"micro-looks-{_hook}", ("two", Setting("1x1x2", scheduled("1f1b"))))
    def looks(setting: Setting, hook: str = _hook) -> Any:
        """A module that looks at the gradients of the step before finds them."""
        pl.seed_everything(1, verbose=False)
        module = LooksBeforeZeroGrad(hook)
        trainer = make_trainer(setting, max_epochs=1, accumulate_grad_batches=2)
        trainer.fit(module, SMALL(setting))
        assert any(module.norms), "no gradients were left to see"
        return {"everywhere": {"norms": module.norms, "metrics": metrics(trainer)}}


# --- meshes -----------------------------------------------------------------------------------------------------------

for _name in ("hf-llama", "skips", "sandwich"):
    again(_name, "pp4", "four", "1x1x4")
again("accumulate-tied", "dp2pp2-3", "four", "2x1x2", dp=3)
again("accumulate-3", "dp2pp2-2", "four", "2x1x2", dp=2)
again("tasks", "dp2pp2-3", "four", "2x1x2", dp=3)
again("llama-8", "dp2pp2-3-1f1b", "four", "2x1x2", dp=3, **scheduled("1f1b", microbatches=2))
again("llama-8", "dp2pp2-3-zbv", "four", "2x1x2", dp=3, **scheduled("zbv_zero_bubble", microbatches=4))
again("llama-8", "dp2pp2-2-interleaved", "four", "2x1x2", dp=2, **scheduled("interleaved_1f1b", microbatches=2))
_SHORT = (("own", modules.OwnLlama, SHORT), ("tied", hf("llama"), PAIRS), ("biased", hf("opt"), SHORT))
for _name, _make, _data in _SHORT:
    recipe(f"short-{_name}")(
        lambda setting, make=_make, data=_data: fit(setting, make, data, data, gradient_clip_val=0.5)
    )
again("short-tied", "2x2x2", "eight", "2x2x2", dp=3, mp="seq_parallel")
again("short-own", "2x2x2-1f1b", "eight", "2x2x2", dp=3, mp="seq_parallel", **scheduled("1f1b", microbatches=2))
again("short-own", "mp2pp2-tensor_parallel", "four", "1x2x2", mp="tensor_parallel")
again("short-tied", "mp2pp2-seq_parallel", "four", "1x2x2", mp="seq_parallel")
again("short-own", "mp2pp2-1f1b", "four", "1x2x2", mp="seq_parallel", **scheduled("1f1b"))
# Row-wise layers with biases, whose gradients are put off.
again(
    "short-biased", "mp2pp2-zero-bubble", "four", "1x2x2", mp="tensor_parallel", **scheduled("interleaved_zero_bubble")
)
again("recompute-full", "dp2pp2-3", "four", "2x1x2", dp=3, recompute="full")


def exchanges() -> Any:
    """What a rank does in a step: `B<stage>`, backward passes of a stage; `exchange`, of gradients along dp."""
    done: list[str] = []

    class Notes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.__name__.partition(".")[0] == "_reduce_scatter_base_":
                done.append("exchange")
            return func(*args, **(kwargs or {}))

    differentiate = Pipeline._backward

    def noted(self: Pipeline, job: Any, *args: Any, **kwargs: Any) -> Any:
        done.append(f"B{job.stage}")
        return differentiate(self, job, *args, **kwargs)

    setting = Setting("2x1x2", {"dp": 3, **scheduled("interleaved_1f1b", microbatches=2)})
    with Notes(), mock.patch.object(Pipeline, "_backward", noted):
        fit(setting, lambda: modules.OwnLlama(layers=8), EVEN_TEXTS, max_steps=1)
    return done


add("four", "exchanges", exchanges)


def masks() -> Any:
    """What dropout did on each replica, with the same data on each."""
    seen: list[float] = []

    class Looks(modules.Noisy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            out = super().training_step(batch, batch_idx)
            seen.append(float(out["loss"]))
            return out

    pl.seed_everything(1, verbose=False)
    setting = Setting("2x1x2", {"dp": 0})
    make_trainer(setting, max_steps=2).fit(Looks(), DataLoader(vectors(), batch_size=8))
    return {"seen": seen, "place": setting.share[1]}


add("four", "masks", masks)

# --- checkpoints ------------------------------------------------------------------------------------------------------


def shelf(name: str) -> Path:
    """Where groups find each other's checkpoints."""
    return Path(os.environ["SHELF"]) / name


def saves(name: str, setting: Setting, make: Callable[[], pl.LightningModule]) -> Any:
    """Train one epoch, save, train another: what a run that resumes must do, too."""
    pl.seed_everything(1, verbose=False)
    module = make()
    rows = Rows(canonical_names(module))
    trainer = make_trainer(setting, rows, max_epochs=1, gradient_clip_val=0.5)
    trainer.fit(module, SHORT(setting))
    trainer.save_checkpoint(shelf(name))
    return table(rows, trainer, module)


def resumes(name: str, setting: Setting, make: Callable[[], pl.LightningModule]) -> Any:
    pl.seed_everything(2, verbose=False)
    module = make()
    rows = Rows(canonical_names(module))
    trainer = make_trainer(setting, rows, max_epochs=2, gradient_clip_val=0.5)
    trainer.fit(module, SHORT(setting), ckpt_path=str(shelf(name)))
    return table(rows, trainer, module)


def uninterrupted(make: Callable[[], pl.LightningModule]) -> Any:
    return fit(PLAIN, make, SHORT, max_epochs=2, gradient_clip_val=0.5)


KEPT: dict[str, Callable[[], pl.LightningModule]] = {
    "tied": hf("llama", adam=True), "untied": hf("qwen3", adam=True),
}  # fmt: skip
ONE = Setting("1", {"pp": None})
EIGHT = Setting("2x2x2", {"dp": 3, "mp": "seq_parallel"})
FOUR = {
    "pp4": Setting("1x1x4"), "dp2pp2": Setting("2x1x2", {"dp": 3}), "interleaved": Setting("1x1x4", scheduled("1f1b")),
}  # fmt: skip
for _name, _make in KEPT.items():
    add("one", f"uninterrupted-{_name}", lambda make=_make: uninterrupted(make))
    add("one", f"save-{_name}", lambda make=_make, name=_name: saves(f"{name}-1.ckpt", ONE, make))
    add("eight", f"save-{_name}", lambda make=_make, name=_name: saves(f"{name}-8.ckpt", EIGHT, make))
    add("one-resumes", f"resume-{_name}-from-8", lambda make=_make, name=_name: resumes(f"{name}-8.ckpt", ONE, make))
for _name, _source in (("tied", "8"), ("untied", "1")):
    add(
        "eight",
        f"resume-{_name}-from-{_source}",
        lambda make=KEPT[_name], file=f"{_name}-{_source}.ckpt": resumes(file, EIGHT, make),
    )
add("four", "save-tied", lambda: saves("tied-4.ckpt", FOUR["dp2pp2"], KEPT["tied"]))
add("one-resumes", "resume-tied-from-4", lambda: resumes("tied-4.ckpt", ONE, KEPT["tied"]))
for _name, _setting in FOUR.items():
    add("four", f"resume-tied-on-{_name}", lambda setting=_setting: resumes("tied-4.ckpt", setting, KEPT["tied"]))


if __name__ == "__main__":
    serve(GROUPS)
