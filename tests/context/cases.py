"""Cases for the tests of cp under Lightning.

The group `one` is what the others are compared with: plain Lightning in one process. A case returns what all ranks must
know (`everywhere`) and what only rank 0 must (`first`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from autolaunch_strategies import MeshStrategy
from autolaunch_strategies.config import parse_mesh
from autolaunch_strategies.context import sharded_modules
from autolaunch_strategies.training import traced_block
from tests.context import modules as modules
from tests.context.modules import LENGTH, Encoder, MultiHead, SequenceFirst, Tokens, Transformers, ViT, hf
from tests.context.runs import how_modules_run
from tests.pipeline.cases import PLAIN, Items, Rows, Setting, batches, canonical_names, fit, make_trainer, shelf, table
from tests.pipeline.modules import VOCABULARY
from tests.support.cases import no_compiler, serve

Case = Callable[[], Any]
GROUPS: dict[str, dict[str, Case]] = {"one": {}, "two": {}, "four": {}, "eight": {}, "refused": {}, "back": {}}
THREE = ("gather", "ring", "ulysses")
RANKS = {"one": 1, "two": 2, "four": 4, "eight": 8, "refused": 2, "back": 1}
"""Processes per group."""


def add(group: str, name: str, function: Case) -> None:
    """Put a case into a group; what it returns on each rank is written as JSON."""
    assert "." not in name and " " not in name
    assert name not in GROUPS[group], name
    GROUPS[group][name] = function


class On(Setting):
    """A mesh with an axis cp, level 0 along dp unless the options say otherwise."""

    def strategy(self) -> Any:
        options = {"timeout": 40, "dp": 0, "mp": None, "pp": None, **(self.options or {})}
        return MeshStrategy(mesh=self.mesh, **options)


@dataclass(frozen=True)
class Run:
    """On which mesh a recipe is run, and how its name says so."""

    mesh: str
    label: str
    setting: On

    @property
    def group(self) -> str:
        return {2: "two", 4: "four", 8: "eight"}[parse_mesh(self.mesh).size]


def on(mesh: str, cp: Any = "gather", label: str = "", **options: Any) -> Run:
    """The mesh, the backend (or the fields of ContextParallel), and other options of the strategy."""
    backend = cp["backend"] if isinstance(cp, dict) else cp
    return Run(mesh, "-".join(filter(None, (mesh, backend, label))), On(mesh, {**options, "cp": cp}))


def everywhere(mesh: str = "cp2", **options: Any) -> list[Run]:
    """The same mesh with each of the three backends."""
    return [on(mesh, backend, **options) for backend in THREE]


RECIPES: dict[str, Callable[[Setting], Any]] = {}


def recipe(name: str, *runs: Run) -> Callable[[Any], Any]:
    """A function of a setting as a case: by plain Lightning in the group `one`, and in every given run."""

    def register(function: Callable[[Setting], Any]) -> Callable[[Setting], Any]:
        assert name not in RECIPES
        RECIPES[name] = function
        add("one", name, lambda: function(PLAIN))
        for run in runs:
            add(run.group, f"{name}@{run.label}", lambda run=run: function(run.setting))
        return function

    return register


def training(name: str, make: Callable[[], pl.LightningModule], data: Any, *runs: Run, **kwargs: Any) -> None:
    """A case that trains for four steps."""
    inside = kwargs.pop("inside", contextlib.nullcontext)

    def run(setting: Setting) -> Any:
        with inside():
            return fit(setting, make, data, **kwargs)

    recipe(name, *runs)(run)


@contextlib.contextmanager
def captured() -> Iterator[None]:
    """Graphs of blocks run as they are, and no block runs without one."""
    before = len(traced_block._REASONS)
    with no_compiler():
        yield
    assert len(traced_block._REASONS) == before, traced_block._REASONS


# --- data -----------------------------------------------------------------------------------------------------------


def ids(length: int = LENGTH, count: int = 16) -> Items:
    """Token ids only."""
    generator = torch.Generator().manual_seed(7)
    return Items([{"input_ids": torch.randint(3, VOCABULARY, (length,), generator=generator)} for _ in range(count)])


def shifted(length: int = LENGTH) -> Items:
    """Inputs and labels that are shifted already, as the data of this project; some labels are ignored.

    Neighbours ignore as many as each other, so that the mean over ranks along dp is the mean over all.
    """
    items = []
    for index, item in enumerate(ids(length + 1).items):
        labels = item["input_ids"][1:].clone()
        labels[: index // 2 % 3] = -100
        items.append({"input_ids": item["input_ids"][:-1], "labels": labels})
    return Items(items)


def texts(padding: str = "", length: int = LENGTH) -> Items:
    """Ids and labels, of which pairs of samples ignore another number; with a mask of padding `left` or `right`."""
    items = []
    for index, item in enumerate(ids(length).items):
        there = torch.arange(length) < 6 + 5 * (index // 2) % (length - 5)
        if padding == "left":
            there = there.flip(0)
        chosen = there & (torch.arange(length) % 4 != index // 2 % 4)
        found = {"input_ids": item["input_ids"], "labels": item["input_ids"].masked_fill(~chosen, -100)}
        if padding:
            found = {**found, "input_ids": found["input_ids"].masked_fill(~there, 0), "attention_mask": there.long()}
        items.append(found)
    return Items(items)


def pairs() -> Items:
    """For encoder-decoders: the inputs are padded and longer than the labels."""
    return Items([{**item, "labels": item["input_ids"][:8].clone()} for item in texts("right").items])


def images() -> Items:
    generator = torch.Generator().manual_seed(8)
    made = torch.randn(16, 3, 8, 8, generator=generator)
    target = torch.randint(0, 4, (16,), generator=generator)
    return Items([{"images": image, "target": item} for image, item in zip(made, target, strict=True)])


IDS, LABELLED, UNPADDED = batches(ids, 4), batches(shifted, 4), batches(texts, 4)
PADDED, PADDED_LEFT = batches(lambda: texts("right"), 4), batches(lambda: texts("left"), 4)


def LENGTHS(setting: Setting) -> Any:
    """Batches of other lengths than those before, and of other sizes."""
    assert setting.share == (1, 0)
    return DataLoader(
        [
            torch.utils.data.default_collate(shifted(length).items[:size])
            for length, size in ((16, 4), (8, 3), (24, 4), (16, 2), (12, 4), (32, 1))
        ],
        batch_size=None,
    )  # fmt: skip


PAIRS, IMAGES = batches(pairs, 4), batches(images, 4)

# --- this project's Llama -------------------------------------------------------------------------------------------

CLIP = {"gradient_clip_val": 0.5}
TRAINED = {**CLIP, "val": LABELLED}
training(
    "llama", modules.built_in, LABELLED, *everywhere("cp2"),
    *(on("dp2xcp2", "ring", label=f"level{level}", dp=level) for level in (0, 3)),
    on("dp2xcp2", "ring", label="hybrid", dp={"sharding_level": 3, "replicate": 2}),
    *(on("mp2xcp2", backend, label="sp", mp="seq_parallel") for backend in ("gather", "ring", "ulysses")),
    on("pp2xcp2", "ring", label="exact", pp="exact"),
    on("pp2xcp2", "ulysses", label="exact", pp="exact"),
    on("1x2x2x2", "ring", label="exact", mp="seq_parallel", pp="exact"),
    **TRAINED,
)  # fmt: skip
training("llama-tied", lambda: modules.built_in(tie_embeddings=True), LABELLED, *everywhere(), **TRAINED)
# Each sample has as many labels as any other: the mean over microbatches is the mean over the batch.
_MICRO = {"loss": "microbatch", "schedule": "1f1b", "microbatches": 2}
EVEN = batches(
    lambda: Items(
        [{"input_ids": item["input_ids"][:-1], "labels": item["input_ids"][1:]} for item in ids(LENGTH + 1).items]
    ),
    4,
)
training(
    "llama-even", modules.built_in, EVEN,
    on("pp2xcp2", "ring", label="1f1b", pp=_MICRO),
    on("pp2xcp2", "gather", label="1f1b", pp=_MICRO),
    **CLIP,
)  # fmt: skip

# --- transformers ---------------------------------------------------------------------------------------------------


def wrapped(family: str, attention: str = "sdpa", **changes: Any) -> Callable[[], pl.LightningModule]:
    return lambda: Transformers(hf(family, attention, **changes))


def _recomputing(model: Any, **options: Any) -> nn.Module:
    model.gradient_checkpointing_enable(options or None)
    return model


for _attention in ("sdpa", "eager"):
    training(f"hf-llama-{_attention}", wrapped("llama", _attention), UNPADDED, *everywhere(), val=UNPADDED, **CLIP)
    training(f"hf-gpt2-{_attention}", wrapped("gpt2", _attention), UNPADDED, *everywhere(), val=UNPADDED, **CLIP)
    training(f"hf-llama-padded-{_attention}", wrapped("llama", _attention), PADDED, *everywhere(), val=PADDED, **CLIP)
    training(f"hf-mistral-{_attention}", wrapped("mistral", _attention), PADDED, *everywhere(), **CLIP)
    training(f"hf-bert-{_attention}", wrapped("bert", _attention), PADDED, *everywhere(), val=PADDED, **CLIP)
# Rows of padding see nothing, and the token behind them is predicted from such a row: sdpa says 0, eager the mean.
training("hf-llama-left", wrapped("llama"), PADDED_LEFT, *everywhere(), **CLIP)
training("hf-gpt2-padded", wrapped("gpt2"), PADDED, on("cp2"), on("dp2xcp2", label="level3", dp=3), **CLIP)
training("hf-gemma3", wrapped("gemma3"), PADDED, on("cp2"), on("cp4"), **CLIP)
training("hf-bert-whole", wrapped("bert"), UNPADDED, *everywhere(), on("cp4", "usp"), **CLIP)
training(
    "hf-qwen3", wrapped("qwen3"), UNPADDED, on("dp2xcp2", "ring", label="level3", dp=3),
    on("mp2xcp2", "ulysses", label="mp", mp="tensor_parallel"), on("pp2xcp2", "gather", label="pp", pp="exact"),
    val=UNPADDED, **CLIP,
)  # fmt: skip
training(
    "hf-gpt2", wrapped("gpt2"), UNPADDED, on("dp2xcp2", "ulysses", label="level1", dp=1),
    on("mp2xcp2", "ring", label="mp", mp="tensor_parallel"), on("pp2xcp2", "ring", label="pp", pp="exact"),
    on("2x2x1x2", "gather", label="level3", dp=3, mp="tensor_parallel"),
    # Behind the embeddings a module without parameters begins the region, between modules that run on parts.
    on("mp2xcp2", "gather", label="sp", mp="seq_parallel"), **CLIP,
)  # fmt: skip
training("hf-llama-recomputes", lambda: Transformers(_recomputing(hf("llama"))), UNPADDED, *everywhere(), **CLIP)
training(
    "hf-no-cache", wrapped("llama", use_cache=False), UNPADDED, on("cp2", "ring"), **CLIP,
)  # fmt: skip
training("hf-packed", lambda: modules.GivesPositions(hf("llama")), IDS, *everywhere(), on("cp4"), **CLIP)
training("hf-generates", lambda: modules.Generates(hf("llama")), UNPADDED, *everywhere(), val=UNPADDED, **CLIP)
training(
    "hf-llama-reenters",
    lambda: Transformers(_recomputing(hf("llama"), use_reentrant=True)),
    UNPADDED,
    on("cp2"),
    **CLIP,
)
training("hf-bart", wrapped("bart"), PAIRS, *everywhere(), val=PAIRS, **CLIP)
training(
    "hf-accumulate", wrapped("llama"), UNPADDED, on("cp2", "ring"), accumulate_grad_batches=2, max_epochs=2, **CLIP
)

# --- models and steps of one's own ----------------------------------------------------------------------------------

training("nanogpt", modules.NanoGPT, IDS, *everywhere(), on("cp4", "usp"), val=IDS, **CLIP)
training(
    "own-step", modules.OwnStep, PADDED, *everywhere(), on("mp2xcp2", "gather", label="sp", mp="seq_parallel"),
    val=PADDED, **CLIP,
)  # fmt: skip
training(
    "own-step-linear", lambda: modules.OwnStep(linear=True), PADDED, on("dp2xcp2", "ring", label="level3", dp=3),
    val=PADDED, **CLIP,
)  # fmt: skip
training("encoder", lambda: Tokens(Encoder()), PADDED, *everywhere(), val=PADDED, **CLIP)
training("encoder-padded", lambda: Tokens(Encoder(), padded=True), PADDED, *everywhere(), val=PADDED, **CLIP)
training("multi-head", lambda: Tokens(MultiHead()), PADDED, *everywhere(), val=PADDED, **CLIP)
training("holds-blocks", modules.HoldsBlocks, IDS, on("cp2"), on("cp2", "ring"), **CLIP)
training("bent", lambda: Tokens(modules.Bent()), PADDED, on("cp2"), on("cp2", "ulysses"), val=PADDED, **CLIP)
training("bent-fixed", lambda: Tokens(modules.Bent(learned=False)), PADDED, on("cp2", "ring"), val=PADDED, **CLIP)
training("viewed", lambda: Tokens(modules.Plainly(modules.Viewed)), PADDED, on("cp2"), **CLIP)
training("fails-on-one-rank", lambda: Tokens(modules.Plainly(modules.FailsOnOneRank)), PADDED, on("cp2"), **CLIP)
training("chosen", modules.Chosen, PADDED, *everywhere(), **CLIP)
training("by-hand", modules.ByHand, IDS, on("cp2", "ring"), on("dp2xcp2", "ring", label="level2", dp=2))
training("calls-in-hooks", modules.CallsInHooks, IDS, on("cp2"), on("cp2", "ring"), **CLIP)
training("frozen", modules.Frozen, IDS, on("cp2", "ring"), on("dp2xcp2", label="level3", dp=3), **CLIP)
training("batch-of-one", modules.built_in, batches(shifted, 1, limit=4), *everywhere(), **CLIP)
training("as-many-samples-as-positions", modules.built_in, batches(shifted, 16), *everywhere(), max_epochs=3, **CLIP)
training("lengths", modules.built_in, LENGTHS, *everywhere(), val=LENGTHS, **CLIP)
training("diffusion", modules.Diffusion, IMAGES, *everywhere(), **CLIP)
training("vit", lambda: modules.Images(ViT()), IMAGES, *everywhere(), val=IMAGES, **CLIP)


@recipe(
    "own-lengths",
    *(on("dp2xcp2", "gather", label=f"level{level}", dp=level) for level in (0, 3)),
    on("dp2xcp2", "ring", label="level3", dp=3),
)
def own_lengths(setting: Setting) -> Any:
    """Replicas whose batches have other lengths at the same time: each meets new ones when the other does not."""
    ranks, index = setting.share
    lengths = (24, 24, 16, 24, 24, 32, 32, 8)
    batches = [torch.utils.data.default_collate(shifted(length).items[:4]) for length in lengths]
    trained = fit(
        setting,
        modules.TellsLengths,
        lambda _: DataLoader(batches[index::ranks], batch_size=None),
        accumulate_grad_batches=2 // ranks,
    )
    return {"everywhere": {"weights": trained["everywhere"]["weights"]}, "first": {}}


@recipe("predictions", *everywhere())
def predictions(setting: Setting) -> Any:
    """What predict returns is whole, of every kind of module, trained or not."""
    found: dict[str, Any] = {}
    for name, make, data in (
        ("own-step", modules.OwnStep, PADDED), ("nanogpt", modules.NanoGPT, IDS), ("hf", wrapped("gpt2"), UNPADDED),
        ("diffusion", modules.Diffusion, IMAGES), ("built-in", modules.built_in, LABELLED),
    ):  # fmt: skip
        pl.seed_everything(1, verbose=False)
        module, trainer = make(), make_trainer(setting, max_steps=1)
        pl.seed_everything(1, verbose=False)  # as distributed strategies do when they start
        if name != "hf":
            trainer.fit(module, data(setting))
        outputs = trainer.predict(module, data(setting))
        assert outputs is not None
        found[name] = torch.utils._pytree.tree_map(lambda item: item.tolist(), outputs)
    return {"everywhere": found}


@recipe("tasks", on("cp2", "ring"), on("dp2xcp2", "gather", label="level3", dp=3))
def tasks(setting: Setting) -> Any:
    """fit, validate and fit again on one Trainer."""
    pl.seed_everything(1, verbose=False)
    module = modules.OwnStep(linear=True)
    rows = Rows(canonical_names(module))
    trainer = make_trainer(setting, rows, **CLIP)
    trainer.fit(module, PADDED(setting), PADDED(setting))
    found = trainer.validate(module, PADDED(setting), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, PADDED(setting), PADDED(setting))
    again = table(rows, trainer, module)
    return {"everywhere": {**again["everywhere"], "found": found}, "first": again["first"]}


# --- with everything else -------------------------------------------------------------------------------------------

training("recompute-full", wrapped("llama", use_cache=False), UNPADDED, *everywhere(recompute="full"), **CLIP)
training(
    "recompute-2", wrapped("llama", use_cache=False), UNPADDED,
    on("dp2xcp2", "ring", label="level3", recompute=2, dp=3), **CLIP,
)  # fmt: skip
training("recompute-selective", modules.built_in, LABELLED, *everywhere(recompute="selective"), **CLIP)
training("compiled", modules.built_in, LABELLED, on("cp2", "gather", compile=True, timeout=250), max_steps=2, **CLIP)
training(
    "captured", modules.built_in, LABELLED, on("cp2", "gather", compile=True),
    on("mp2xcp2", "ring", label="sp", mp="seq_parallel", compile=True, timeout=250),
    on("mp2xcp2", "ulysses", label="selective", mp="tensor_parallel", compile=True, recompute="selective"),
    max_steps=2, inside=captured, **CLIP,
)  # fmt: skip
training(
    "bf16-mixed", modules.built_in, LABELLED, *everywhere(), on("dp2xcp2", "ring", label="level3", dp=3),
    precision="bf16-mixed", **CLIP,
)  # fmt: skip
# Plain Lightning takes the mean over accumulated batches, and not over all of their labels.
training("accumulate", modules.built_in, EVEN, on("cp2", "ring"),
         on("dp2xcp2", "gather", label="level2", dp=2), accumulate_grad_batches=2, max_epochs=2, **CLIP)  # fmt: skip

# Of 9 positions one of four ranks, each with a part in one piece, holds padding only.
for _length, _cp4 in ((13, ("gather", "ring")), (9, ("ulysses", "usp"))):
    _data = batches(lambda length=_length: shifted(length), 4)
    training(
        f"llama-length-{_length}", modules.built_in, _data, *(on("cp2", name) for name in THREE),
        *(on("cp4", name) for name in _cp4), val=_data, **CLIP,
    )  # fmt: skip
_TEXTS_13 = batches(lambda: texts("right", 13), 4)
training("hf-bert-length-13", wrapped("bert"), _TEXTS_13, on("cp2", "gather"), **CLIP)
training("hf-gpt2-length-13", wrapped("gpt2"), batches(lambda: texts(length=13), 4),
         *(on("cp2", name) for name in THREE), **CLIP)  # fmt: skip
training("encoder-length-13", lambda: Tokens(Encoder()), batches(lambda: texts("right", 13), 4),
         *(on("cp2", name) for name in THREE), **CLIP)  # fmt: skip
training("vit-token", lambda: modules.Images(ViT("token")), IMAGES, on("cp2", "ring"), **CLIP)

# --- blocks in which positions meet outside of attention ------------------------------------------------------------

for _kind in ("convolution", "cumsum", "own-attention", "positions", "last", "batch-norm", "far", "own-mask", "loop"):
    training(f"mixes-{_kind}", lambda kind=_kind: Tokens(modules.Mixing(kind)), PADDED, on("cp2"), val=PADDED, **CLIP)
training(
    "mixes-closed", lambda: Tokens(modules.Mixing("closed")), PADDED, on("cp2"), on("dp2xcp2", label="level3", dp=3),
    on("mp2xcp2", label="sp", mp="seq_parallel"), **CLIP,
)  # fmt: skip
training(
    "mixes-compiled", lambda: Tokens(modules.Mixing("closed")), PADDED, on("cp2", compile=True), inside=no_compiler,
    **CLIP,
)  # fmt: skip
for _kind in ("faint", "gated"):
    training(f"mixes-{_kind}", lambda kind=_kind: Tokens(modules.Mixing(kind)), PADDED, on("cp2"), **CLIP)
training(
    "written-out", lambda: Tokens(modules.WrittenOut()), _TEXTS_13,
    on("cp2", "ring"), on("cp2", "ulysses"), on("cp4", "gather"),
    on("cp2", "gather", label="full", recompute="full"), on("cp2", "gather", label="selective", recompute="selective"),
    on("cp2", "gather", label="compiled", compile=True), on("dp2xcp2", "gather", label="level3", dp=3),
    on("mp2xcp2", "gather", label="sp", mp="seq_parallel"), on("pp2xcp2", "gather", label="exact", pp="exact"),
    val=_TEXTS_13, inside=no_compiler, **CLIP,
)  # fmt: skip


@contextlib.contextmanager
def tried_on_one_window() -> Iterator[None]:
    """Trials are as short as one window of `_WINDOW` positions."""
    before, sharded_modules._TRIAL_LENGTH = sharded_modules._TRIAL_LENGTH, _WINDOW
    yield
    sharded_modules._TRIAL_LENGTH = before


_WINDOW = 8
training("shares-keys", lambda: Tokens(modules.SharesKeys()), _TEXTS_13, on("cp2", "gather"), **CLIP)
# Where positions meet shows in no difference between the short, rounded results of a trial.
training(
    "meets-beside-large", lambda: Tokens(modules.WrittenOut(largest=2000.0)), _TEXTS_13, on("cp2", "gather"), **CLIP
)
training(
    "meets-in-windows", lambda: Tokens(modules.InWindows(_WINDOW)), batches(lambda: texts("right", 4 * _WINDOW), 4),
    on("cp2", "gather"), inside=tried_on_one_window, **CLIP,
)  # fmt: skip
training(
    "meets-in-training",
    lambda: Tokens(modules.NormalisedByHand()),
    _TEXTS_13,
    on("cp2", "gather"),
    val=_TEXTS_13,
    **CLIP,
)
CALLS = {
    "own": lambda: Tokens(modules.CallsAttention(), padded=True),
    "multi": lambda: Tokens(modules.CallsAttention(multi_head=True), padded=True),
}
for _heads, _make in CALLS.items():
    training(
        f"calls-attention-{_heads}", _make, PADDED, on("cp2", "gather"), on("cp2", "ulysses"),
        on("mp2xcp2", "gather", mp="auto"), on("mp2xcp2", "gather", label="sp", mp="seq_parallel"), **CLIP,
    )  # fmt: skip


def how_blocks_run(mesh: str, heads: str) -> Any:
    """What is gathered and repeated in blocks that call attention by themselves, by name of the block."""
    setting = On(mesh, {"cp": "gather", "mp": "auto" if "mp" in mesh else None})
    trainer = make_trainer(setting, max_steps=1)
    trainer.fit(CALLS[heads](), PADDED(setting))
    runs = how_modules_run(trainer.strategy._applied)
    return {name: how for name, how in runs.items() if ".blocks." in name}


for _heads in CALLS:
    add("two", f"how-{_heads}", lambda heads=_heads: how_blocks_run("cp2", heads))
    add("four", f"how-{_heads}", lambda heads=_heads: how_blocks_run("mp2xcp2", heads))
training("hf-t5", wrapped("t5"), PAIRS, on("cp2"), on("dp2xcp2", label="level3", dp=3), val=PAIRS, **CLIP)
training(
    "hf-gptj",
    wrapped("gptj", "eager"),
    PADDED,
    on("cp2"),
    on("cp2", recompute="full", label="full"),
    val=PADDED,
    **CLIP,
)
training("hf-vit", lambda: modules.Images(modules.ClassifiesImages(hf("vit"))), IMAGES, on("cp2"), val=IMAGES, **CLIP)
training("multi-head-weights", lambda: Tokens(MultiHead(need_weights=True)), PADDED, on("cp2"), val=PADDED, **CLIP)
training("sequence-first", lambda: Tokens(SequenceFirst()), PADDED, on("cp2"), val=PADDED, **CLIP)
training("no-attention", lambda: Tokens(modules.NoAttention()), PADDED, on("cp2"), val=PADDED, **CLIP)

# --- dropout --------------------------------------------------------------------------------------------------------


class WatchesMasks(pl.Callback):
    """Where the dropouts of a model dropped, in order."""

    def __init__(self) -> None:
        self.dropped: dict[str, list[Any]] = {}

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        for name, part in module.named_modules():
            if isinstance(part, nn.Dropout):
                part.register_forward_hook(self._write_down(name))

    def _write_down(self, name: str) -> Any:
        def look(part: nn.Module, args: Any, output: torch.Tensor) -> None:
            if part.training:
                self.dropped.setdefault(name, []).append((output == 0).flatten().int().tolist())

        return look


def dropout(cp: Any, p: float = 0.5, attention: float = 0.0) -> Case:
    """Losses, and what the dropouts of this rank dropped: twice with one seed, once with another, and recomputed."""

    def run() -> Any:
        found = {}
        for name, seed, recompute in (
            ("first", 1, "none"), ("again", 1, "none"), ("other", 2, "none"), ("recomputed", 1, "full"),
            ("selected", 1, "selective"),
        ):  # fmt: skip
            setting = On("cp2", {"cp": cp, "recompute": recompute})
            pl.seed_everything(1, verbose=False)
            module, watch = modules.NanoGPT(dropout=p, attention_dropout=attention), WatchesMasks()
            rows = Rows(canonical_names(module))
            trainer = make_trainer(setting, rows, watch)
            pl.seed_everything(seed, verbose=False)
            trainer.fit(module, IDS(setting), IDS(setting))
            found[name] = {"losses": rows.losses, "norms": rows.norms, "dropped": watch.dropped}
        return found

    return run


for _backend in THREE:
    add("two", f"dropout-{_backend}", dropout(_backend))
add("two", "dropout-of-attention-gather", dropout("gather", 0.0, 0.5))
add("two", "dropout-of-attention-ulysses", dropout("ulysses", 0.0, 0.5))

# --- what is refused ------------------------------------------------------------------------------------------------


def failing(make: Callable[[], pl.LightningModule], data: Any = IDS, cp: Any = "gather", mesh: str = "cp2") -> Case:
    """(message of the error, optimizer steps before it)."""

    def run() -> Any:
        pl.seed_everything(1, verbose=False)
        setting = On(mesh, {"cp": cp})
        trainer = make_trainer(setting)
        try:
            trainer.fit(make(), data(setting))
        except Exception as error:
            return {"type": type(error).__name__, "message": str(error), "steps": trainer.global_step}
        return {"type": "", "message": "", "steps": trainer.global_step}

    return run


class ThreeHeads(nn.Module):
    """GPT's blocks with a number of heads that two ranks can't share evenly."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.qkv, self.out = nn.LayerNorm(12), nn.Linear(12, 36), nn.Linear(12, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, n, width = x.shape
            q, k, v = self.qkv(self.norm(x)).view(b, n, 3, 3, 4).permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return x + self.out(y.transpose(1, 2).reshape(b, n, width))

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 12), nn.Linear(12, VOCABULARY)
        self.blocks = nn.ModuleList(ThreeHeads.Block() for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


training("three-heads", lambda: Tokens(ThreeHeads()), PADDED, on("cp2", "gather"), on("cp2", "ring"), **CLIP)
_AS_IT_IS = {backend: {"backend": backend, "pad": False} for backend in THREE}
_TEXTS_14 = batches(lambda: texts("right", 14), 4)
for _backend in THREE:
    add("refused", f"odd-length-{_backend}", failing(modules.OwnStep, _TEXTS_13, _AS_IT_IS[_backend]))
add("refused", "half-length", failing(lambda: Tokens(Encoder()), _TEXTS_14, _AS_IT_IS["gather"]))
add("refused", "ring-dropout", failing(lambda: modules.NanoGPT(attention_dropout=0.5), IDS, "ring"))
add("refused", "ring-hf-dropout", failing(wrapped("gpt2", attn_pdrop=0.5), UNPADDED, "ring"))
add("refused", "ulysses-heads", failing(lambda: Tokens(ThreeHeads()), PADDED, "ulysses"))
add("refused", "class-token", failing(lambda: modules.Images(modules.ViT("token")), IMAGES, _AS_IT_IS["gather"]))
add("refused", "ring-learned-bias", failing(lambda: Tokens(modules.Bent()), PADDED, "ring"))

# --- checkpoints ----------------------------------------------------------------------------------------------------


def one_more_epoch(name: str, setting: Setting, resume: bool) -> Any:
    """Train the first epoch and save; or go on from what was saved with the second."""
    pl.seed_everything(2 if resume else 1, verbose=False)
    module = modules.built_in(tie_embeddings=True)
    rows = Rows(canonical_names(module))
    trainer = make_trainer(setting, rows, max_epochs=2 if resume else 1, **CLIP)
    if resume:
        trainer.fit(module, LABELLED(setting), ckpt_path=str(shelf(name)))
    else:
        trainer.fit(module, LABELLED(setting))
        trainer.save_checkpoint(shelf(name))
    return table(rows, trainer, module)


ALONE = On("1", {})
MESHES = {
    "cp2": On("cp2", {"cp": "ring"}), "dp2": On("dp2", {"dp": 3}), "dp2xcp2": On("dp2xcp2", {"cp": "gather", "dp": 3})
}  # fmt: skip
add(
    "one",
    "uninterrupted",
    lambda: fit(PLAIN, lambda: modules.built_in(tie_embeddings=True), LABELLED, max_epochs=2, **CLIP),
)
add("one", "save-1", lambda: one_more_epoch("1.ckpt", ALONE, False))
for _name, _setting in MESHES.items():
    add(
        "four" if _name == "dp2xcp2" else "two", f"save-{_name}",
        lambda name=_name, setting=_setting: one_more_epoch(f"{name}.ckpt", setting, False),
    )  # fmt: skip
    add("back", f"resume-1-from-{_name}", lambda name=_name: one_more_epoch(f"{name}.ckpt", ALONE, True))
for _name, _sources in {"cp2": ("1", "cp2", "dp2"), "dp2": ("cp2",), "dp2xcp2": ("1", "cp2", "dp2xcp2")}.items():
    for _source in _sources:
        add(
            "four" if _name == "dp2xcp2" else "two", f"resume-{_name}-from-{_source}",
            lambda source=_source, setting=MESHES[_name]: one_more_epoch(f"{source}.ckpt", setting, True),
        )  # fmt: skip


if __name__ == "__main__":
    serve(GROUPS)
