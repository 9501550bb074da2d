"""Cases for the tests of `to_distributed`.

Every case trains the same thing on one process (this one, plain) and through `to_distributed`, and compares losses and
every weight.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

from autolaunch.models.llama import Llama
from autolaunch.models.llama_config import llama_config
from autolaunch_strategies import ConfigError, InputSpec, ToDistributedConfig, clip_grad_norm_, to_distributed
from autolaunch_strategies.data_parallel.loader import DistributedLoader, Share
from tests import ROOT
from tests.support.cases import RANK, WORLD, serve

Case = Callable[[], Any]
GROUPS: dict[str, dict[str, Case]] = {}
VOCABULARY, LENGTH = 64, 12
EXAMPLE = ROOT / "examples" / "to_distributed.py"


def case(groups: str, name: str, function: Case) -> None:
    for group in groups.split():
        GROUPS.setdefault(group, {})[name] = function


def cases(groups: str) -> Callable[[Case], Case]:
    def add(function: Case) -> Case:
        case(groups, function.__name__, function)
        return function

    return add


# --- models -------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """GPT's kind: LayerNorm, biases, GELU, fused attention of the functional interface."""

    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.size = heads, key_heads, width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = nn.Linear(width, key_heads * self.size), nn.Linear(width, key_heads * self.size)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        y = self.norm1(x)
        q = self.q(y).view(batch, length, self.heads, self.size).transpose(1, 2)
        k, v = (layer(y).view(batch, length, self.key_heads, self.size).transpose(1, 2) for layer in (self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.key_heads < self.heads)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Variant(nn.Module):
    def __init__(self, heads: int = 4, key_heads: int = 2) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, 8 * heads), nn.Embedding(LENGTH, 8 * heads)
        self.blocks = nn.ModuleList([Block(8 * heads, heads, key_heads) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(8 * heads), nn.Linear(8 * heads, VOCABULARY)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        x = self.embed(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss, logits


class Convolutions(nn.Module):
    """No pairs of layers for a plan."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, padding=1), nn.ReLU()
        )
        self.head = nn.Linear(8, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(self.features(images).mean((2, 3)))
        return F.cross_entropy(logits, labels), logits


class Scale(nn.Module):
    """Nothing that a plan could shard."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = (images * self.scale).flatten(1)
        return F.cross_entropy(logits, labels), logits


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 4))

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.layers(features)
        return F.cross_entropy(logits, labels), logits


class LooksAtValues(nn.Module):
    """Can't be run on shapes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(10, 4)

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> Any:
        if features.abs().max().item() > 1e6:
            raise ValueError("too large")
        logits = self.inner(features)
        return F.cross_entropy(logits, labels), logits


class WithLoss(nn.Module):
    """(loss, logits) of a model that gives logits, or that has a loss of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.inner(tokens)
        return (None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())), logits


def gqa_llama() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2}
    return WithLoss(Llama(llama_config({"size": "debug", "num_layers": 2, **sizes})))


class OfTransformers(nn.Module):
    """As people wrap them, with what they return as it is."""

    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        self.model = GPT2LMHeadModel(
            GPT2Config(
                n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=32, attn_pdrop=0.0,
                resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=1, eos_token_id=2,
            )
        )  # fmt: skip

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        output = self.model(input_ids=tokens, labels=labels)
        return output.loss, output.logits


IN_FP64 = (Variant, Convolutions, Perceptron, LooksAtValues)


# --- data ---------------------------------------------------------------------------------------------------------


def tokens(count: int) -> Dataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator) for _ in range(2)))


def images(count: int) -> Dataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(count, 3, 8, 8, generator=generator).double(), torch.randint(0, 10, (count,), generator=generator)
    )


def features(count: int) -> Dataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(count, 10, generator=generator).double(), torch.randint(0, 4, (count,), generator=generator)
    )


# --- training -----------------------------------------------------------------------------------------------------


def full(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(
    model: nn.Module, optimizer: Any, loader: Any, told: Callable[[Any], Any] = lambda loss: loss,
    epochs: int = 1, clip: float = 0.0, scheduler: Any = None, staged: bool = False,
) -> list[float]:  # fmt: skip
    """The user's loop."""
    losses = []
    for _ in range(epochs):
        for inputs, labels in loader:
            if staged:
                loss = model.forward_backward(lambda x, y: model(x, labels=y)[0], inputs, labels)
                losses.append(told(loss).item())
            else:
                loss, _ = model(inputs, labels=labels)
                losses.append(told(loss).item())
                loss.backward()
            if clip:
                clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
    return losses


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def compare(
    model: nn.Module, reference: nn.Module, start: dict[str, torch.Tensor], pp: int = 1, tolerance: float = 1e-6
) -> None:
    """Every weight is what one process gets, and every trainable one was trained."""
    expected = dict(reference.named_parameters())
    held = dict(model.named_parameters())
    assert pp > 1 or held.keys() == expected.keys()
    for name, parameter in held.items():
        torch.testing.assert_close(
            full(parameter.detach()),
            expected[name].detach(),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )
        moved = not torch.equal(full(parameter.detach()), start[name])
        assert moved == expected[name].requires_grad, f"{name} was {'' if moved else 'not '}trained"


def parity(
    build: Callable[[], nn.Module],
    make_loader: Callable[[], DataLoader],
    config: ToDistributedConfig | None = None,
    make: Callable[[nn.Module], Any] | None = None,
    node_num: int | None = 1,
    tolerance: float = 1e-6,
    **training: Any,
) -> dict[str, Any]:
    """Train on one process and through `to_distributed`: losses and every weight must be equal."""
    torch.manual_seed(3)
    reference = build().double()  # in fp32 Adam makes steps of what is 0 but for rounding (biases of keys)
    make = make or (adamw if build in IN_FP64 else sgd)  # some compute a part in fp32 whatever they have
    start = {name: parameter.detach().clone() for name, parameter in reference.named_parameters()}
    model = copy.deepcopy(reference)
    torch.manual_seed(7)
    alone = {key: value for key, value in training.items() if key != "staged"}
    expected = train(reference, make(reference), make_loader(), **alone)
    optimizer, loader = make(model), make_loader()
    torch.manual_seed(7)
    given = to_distributed(model, optimizer, loader, WORLD // (node_num or 1), node_num, config)
    assert given[0] is model and given[1] is optimizer and isinstance(given[2], DistributedLoader)
    losses = train(*given, given[2].global_mean, **training)
    torch.testing.assert_close(losses, expected, rtol=tolerance, atol=0)
    settings = given[2].plan.settings
    compare(model, reference, start, settings.mesh.pp, tolerance)
    return {
        "mesh": settings.mesh.name,
        "level": settings.dp.sharding_level,
        "steps": len(losses),
        "told": str(given[2].plan),
        "sequence": bool(settings.mp and settings.mp.sequence_parallel),
    }


def parity_case(groups: str, name: str, *args: Any, **options: Any) -> None:
    case(groups, name, lambda: parity(*args, **options))


def loader_of(data: Callable[[int], Dataset], count: int, size: int, **options: Any) -> Callable[[], DataLoader]:
    return lambda: DataLoader(data(count), batch_size=size, **options)


# --- the seed's example -------------------------------------------------------------------------------------------


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cases("one two four eight")
def example() -> dict[str, Any]:
    """The file as it is: losses equal to one process, every weight trained as on one process."""
    module = load_example()
    with contextlib.redirect_stdout(io.StringIO()) as written:
        losses, model, loader = module.main(["--small"])
    reference, optimizer, plain = module.parts()
    start = {name: parameter.detach().clone() for name, parameter in reference.named_parameters()}
    expected = module.train(reference, optimizer, plain)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    compare(model, reference, start, tolerance=1e-6)
    return {"losses": losses, "printed": written.getvalue(), "mesh": loader.plan.mesh.name}


def example_with(mesh: str, *options: str) -> dict[str, Any]:
    module = load_example()
    with contextlib.redirect_stdout(io.StringIO()):
        losses, model, loader = module.main(["--small", "--mesh", mesh, *options])
    reference, optimizer, plain = module.parts()
    start = {name: parameter.detach().clone() for name, parameter in reference.named_parameters()}
    torch.testing.assert_close(losses, module.train(reference, optimizer, plain), rtol=1e-5, atol=0)
    compare(model, reference, start, tolerance=1e-6)
    assert loader.plan.mesh.name == mesh
    return {"sequence": bool(loader.plan.settings.mp and loader.plan.settings.mp.sequence_parallel)}


case("two", "example_1x2", lambda: example_with("1x2"))
case("two", "example_1x2_without_sequences", lambda: example_with("1x2", "--no-sequence-parallel"))
case("four", "example_2x2", lambda: example_with("2x2"))
case("four", "example_1x4", lambda: example_with("1x4"))
case("four", "example_two_nodes", lambda: example_with("2x2", "--nodes", "2"))
case("eight", "example_4x2", lambda: example_with("4x2"))
case("eight", "example_1x8", lambda: example_with("1x8"))


# --- what the planner chooses, and what people ask for ------------------------------------------------------------

EVEN = loader_of(tokens, 24, 12)
parity_case("one two three four six", "gqa_llama", gqa_llama, EVEN)
parity_case("one two three four", "layer_norm_bias_gelu_sdpa", Variant, EVEN)
parity_case("one two three", "convolutions", Convolutions, loader_of(images, 24, 12))
parity_case("two three", "perceptron", Perceptron, loader_of(features, 24, 12))
parity_case("one two", "gpt2_of_transformers", OfTransformers, EVEN)
parity_case("one two", "looks_at_values", LooksAtValues, loader_of(features, 24, 12))
parity_case("three", "batch_of_4_heads_of_6", lambda: Variant(6, 6), loader_of(tokens, 8, 4), make=adamw)
parity_case("six", "batch_of_2", lambda: Variant(6, 3), loader_of(tokens, 4, 2), make=adamw)
parity_case("two", "shuffled_twice", gqa_llama, loader_of(tokens, 12, 4, shuffle=True), epochs=2)
parity_case("four", "two_nodes", gqa_llama, EVEN, node_num=2)
parity_case("two", "node_num_none", Perceptron, loader_of(features, 24, 12), node_num=None)


def asked(**options: Any) -> ToDistributedConfig:
    return ToDistributedConfig(**options)


for mesh in ("2", "1x2"):
    for level in (0, 3):
        config = asked(mesh=mesh, dp=level)
        parity_case("two", f"variant_{mesh}_level{level}", Variant, EVEN, config, clip=0.5)
    parity_case("two", f"gpt2_of_transformers_{mesh}", OfTransformers, EVEN, asked(mesh=mesh))
    parity_case("two", f"gqa_llama_{mesh}_recomputed", gqa_llama, EVEN, asked(mesh=mesh, recompute="full"))
for level in range(4):
    parity_case("four", f"sequences_2x2_level{level}", gqa_llama, EVEN,
                asked(mesh="2x2", dp=level, sequence_parallel=True), clip=0.5)  # fmt: skip
parity_case("four", "hybrid", gqa_llama, EVEN, asked(mesh="4", dp={"sharding_level": 3, "replicate": 2}))
parity_case("four", "staged", Variant, EVEN, asked(mesh="dp2xpp2", axes=("dp", "pp")), staged=True)
parity_case("four", "divided_sequences", gqa_llama, EVEN, asked(mesh="dp2xcp2", cp="ring"))
parity_case("two", "staged_on_one_stage", Variant, EVEN, asked(mesh="2", axes=("dp", "pp")), staged=True)
parity_case(
    "two", "spec_as_in_paddle", Variant, EVEN, asked(input_spec=[InputSpec([12, LENGTH], "float32", "seq", True)])
)
parity_case("two", "spec_of_inputs", Variant, EVEN, asked(input_spec=[InputSpec([None, LENGTH], "int64", "tokens")]))


# --- the last batch -----------------------------------------------------------------------------------------------

for count in (14, 13):  # tails of 6 and 5 on 2 ranks, of 5 and 4 on 3; below, of 1: ranks that get nothing
    for level in (0, 3):
        parity_case("two three", f"tail_of_{count - 8}_level{level}", Variant,
                    loader_of(tokens, count, 8 if WORLD != 3 else 9), asked(mesh=str(WORLD), dp=level))  # fmt: skip
parity_case("two three", "tail_below_ranks", gqa_llama, loader_of(tokens, 11 + WORLD, 12), asked(mesh=str(WORLD)))
parity_case("four", "tail_of_1_2x2", Variant, loader_of(tokens, 9, 8), asked(mesh="2x2", dp=2))
parity_case("two", "tail_of_transformers", OfTransformers, loader_of(tokens, 5, 4), asked(mesh="2"))


# --- optimizers ---------------------------------------------------------------------------------------------------


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    """Groups with options of their own; the embedding of places frozen, the head's bias left out of them."""
    model.places.weight.requires_grad_(False)
    model.head.bias.requires_grad_(False)
    named = dict(model.named_parameters())
    bare = [parameter for name, parameter in named.items() if parameter.dim() == 1 and name != "head.bias"]
    rest = [parameter for parameter in named.values() if parameter.dim() > 1]
    return torch.optim.AdamW(
        [{"params": rest, "weight_decay": 0.2}, {"params": bare, "lr": 3e-3, "weight_decay": 0.0}], lr=1e-2
    )


@cases("two four")
def groups_frozen_parameters_and_scheduler() -> None:
    """A scheduler that was made before goes on; groups, options and membership are what they were."""
    torch.manual_seed(3)
    reference = Variant().double()
    start = {name: parameter.detach().clone() for name, parameter in reference.named_parameters()}
    model = copy.deepcopy(reference)

    def parts(model: nn.Module) -> tuple[Any, Any, Any]:
        optimizer = grouped(model)
        return optimizer, DataLoader(tokens(32), 8), torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    optimizer, loader, scheduler = parts(reference)
    expected = train(reference, optimizer, loader, scheduler=scheduler, clip=0.3)
    optimizer, loader, scheduler = parts(model)
    before = [(len(group["params"]), group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    options = asked(mesh="2" if WORLD == 2 else "2x2", dp=1)
    model, optimizer, loader = to_distributed(model, optimizer, loader, WORLD, config=options)
    assert before == [(len(group["params"]), group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    losses = train(model, optimizer, loader, loader.global_mean, scheduler=scheduler, clip=0.3)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    assert not model.places.weight.requires_grad and optimizer.param_groups[0]["lr"] == 1e-2 * 0.5**4
    compare(model, reference, start)


parity_case("two", "sgd_momentum", gqa_llama, EVEN, asked(mesh="1x2"), sgd)
parity_case("two", "adafactor", gqa_llama, EVEN, asked(mesh="2", dp=3),
            lambda model: torch.optim.Adafactor(model.parameters(), 1e-2))  # fmt: skip


# --- loaders ------------------------------------------------------------------------------------------------------


class Numbers(Dataset):
    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Any:
        return {"number": torch.tensor(index), "pair": (torch.full((2,), index), f"text {index}"), "plain": index}


class Stream(IterableDataset):
    """Draws numbers while it is read, from all three generators."""

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        for index in range(11 if worker is None else 6 + worker.id):
            drawn = [torch.rand(()).item(), random.random(), np.random.rand()]
            yield {"number": torch.tensor(index), "drawn": torch.tensor(drawn)}


class Sizes(Sampler[list[int]]):
    """Batches of several sizes, in an order that is drawn batch by batch."""

    def __iter__(self) -> Iterator[list[int]]:
        for size in (4, 7, 1, 2):
            yield [random.randrange(22) for _ in range(size)]

    def __len__(self) -> int:
        return 4


class Own(DataLoader):
    """A loader with a way of its own."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield {**batch, "more": torch.rand(len(batch["number"]))}


class WithGenerator(Sampler[int]):
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __len__(self) -> int:
        return 22

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(22, generator=self.generator).tolist()


def texts(samples: list[Any]) -> list[str]:
    return [f"{sample['number'].item()}" for sample in samples]


LOADERS: dict[str, Callable[[], DataLoader]] = {
    "in_order": lambda: DataLoader(Numbers(), 6),
    "drop_last": lambda: DataLoader(Numbers(), 6, drop_last=True),
    "shuffled": lambda: DataLoader(Numbers(), 6, shuffle=True),
    "shuffled_with_generator": lambda: DataLoader(
        Numbers(), 6, shuffle=True, generator=torch.Generator().manual_seed(RANK)
    ),
    "sampler": lambda: DataLoader(Numbers(), 6, sampler=WithGenerator()),
    "batch_sampler": lambda: DataLoader(Numbers(), batch_sampler=BatchSampler(WithGenerator(), 4, False)),
    "batches_of_several_sizes": lambda: DataLoader(Numbers(), batch_sampler=Sizes()),
    "collated": lambda: DataLoader(Numbers(), 6, shuffle=True, collate_fn=texts),
    "workers": lambda: DataLoader(Numbers(), 6, shuffle=True, num_workers=2),
    "persistent_workers": lambda: DataLoader(Numbers(), 6, shuffle=True, num_workers=1, persistent_workers=True),
    "stream": lambda: DataLoader(Stream(), 4),
    "stream_drop_last": lambda: DataLoader(Stream(), 4, drop_last=True),
    "stream_with_workers": lambda: DataLoader(Stream(), 4, num_workers=2),
    "stream_of_batches": lambda: DataLoader(
        [{"x": torch.arange(n), "n": list(range(n)), "t": n} for n in (4, 5)], batch_size=None
    ),
    "own_way": lambda: Own(Numbers(), 6, shuffle=True),
}


def listed(batch: Any) -> list[Any]:
    """A batch as one plain list of its samples."""
    if isinstance(batch, list):
        return batch
    columns = []
    for value in batch.values():
        if isinstance(value, torch.Tensor):
            columns.append(value.tolist())
        elif isinstance(value, list | tuple) and value and isinstance(value[0], torch.Tensor):
            columns.append([list(pair) for pair in zip(value[0].tolist(), value[1], strict=True)])
        elif isinstance(value, list):
            columns.append(value)
    return [list(row) for row in zip(*columns, strict=True)]


@cases("two three")
def loaders() -> None:
    """Parts of all ranks, one after the other, are the batches of one process; two passes; all kinds of loaders."""
    for name, make in LOADERS.items():
        if name == "shuffled_with_generator":  # the first rank's counts: it is the one of one process
            alone = DataLoader(Numbers(), 6, shuffle=True, generator=torch.Generator().manual_seed(0))
        else:
            alone = make()
        for same_seed in (True, False):
            if not same_seed and name != "shuffled":
                continue
            seed_all(11)
            expected = [[listed(batch) for batch in alone] for _ in range(2)]
            seed_all(11 if same_seed or RANK == 0 else 100 + RANK)
            plain = make()
            loader = DistributedLoader(plain, Share(RANK, WORLD), WORLD)
            if name not in ("stream", "stream_drop_last", "stream_with_workers"):
                assert len(loader) == len(plain)
            assert loader.dataset is plain.dataset and loader.batch_size == plain.batch_size
            found = []
            for number in range(2):
                given = []
                for batch in loader() if number else loader:
                    given.append((listed(batch), loader.weight))
                found.append(given)
                assert loader.weight == 1
            gathered: list[Any] = [None] * WORLD
            dist.all_gather_object(gathered, found)
            for number in range(2):
                joined = [
                    [row for rows, weight in parts if weight for row in rows]
                    for parts in zip(*(ranks[number] for ranks in gathered), strict=True)
                ]
                assert joined == expected[number], (name, number, joined, expected[number])
                for parts in zip(*(ranks[number] for ranks in gathered), strict=True):
                    assert abs(sum(weight for _, weight in parts) - WORLD) < 1e-9
                    assert all(rows for rows, _ in parts), name
            if same_seed and name.startswith(("shuffled", "in_order")):
                assert torch.rand(1).item() == after(alone, name), name


def after(alone: DataLoader, name: str) -> float:
    """What torch's generator gives after two passes on one process."""
    seed_all(11)
    for _ in range(2):
        for _ in alone:
            pass
    return torch.rand(1).item()


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@cases("four")
def ranks_of_one_replica_get_the_same() -> None:
    model = gqa_llama()
    seed_all(RANK)
    config = asked(mesh="2x2")
    model, _, loader = to_distributed(
        model, adamw(model), DataLoader(tokens(16), 8, shuffle=True), WORLD, config=config
    )
    for inputs, labels in loader:
        gathered: list[Any] = [None] * WORLD
        dist.all_gather_object(gathered, (inputs.tolist(), labels.tolist()))
        assert gathered[0] == gathered[1] and gathered[2] == gathered[3] and gathered[0] != gathered[2]
        assert len(inputs) == 4


# --- refusals -----------------------------------------------------------------------------------------------------


def refused(**changes: Any) -> str:
    model = changes.pop("model", None) or Variant(4, 4)
    given: dict[str, Any] = {
        "model": model, "optimizer": changes.pop("optimizer", None) or adamw(model),
        "dataloader": DataLoader(tokens(8), 4), "device_num": WORLD, **changes,
    }  # fmt: skip
    try:
        to_distributed(**given)
    except ConfigError as error:
        return str(error)
    raise AssertionError("it was not refused")


@cases("two")
def refusals() -> dict[str, str]:
    from torch.utils.data import DistributedSampler

    sampler = DistributedSampler(tokens(8), num_replicas=2, rank=RANK)
    done = Variant()
    to_distributed(done, adamw(done), DataLoader(tokens(8), 4), WORLD)
    return {
        "twice": refused(model=done),
        "world": refused(device_num=4),
        "world of nodes": refused(device_num=4, node_num=2),
        "device_num": refused(device_num=0),
        "node_num": refused(node_num="2"),
        "model": refused(model=lambda x: x, optimizer=adamw(Variant())),
        "optimizer": refused(optimizer="adam"),
        "dataloader": refused(dataloader=[1, 2]),
        "sampler": refused(dataloader=DataLoader(tokens(8), 4, sampler=sampler)),
        "config": refused(config={"sequence_paralel": True}),
        "input_spec": refused(config=asked(input_spec=[[4, 12]])),
        "sequence_parallel": refused(config=asked(sequence_parallel="yes")),
        "axes": refused(config=asked(axes=("dp", "ep"))),
        "mesh": refused(config=asked(mesh="2x2")),
        "batch": refused(config=asked(mesh="2"), dataloader=DataLoader(tokens(9), 3)),
        "no mesh of this model": refused(
            model=Convolutions().double(), dataloader=DataLoader(images(9), 3), config=asked(axes=("dp", "mp"))
        ),
        "divided": refused(
            model=Scale().double(),
            dataloader=DataLoader(images(8), 4),
            config=asked(mesh="1x2", mp="tensor_parallel"),
        ),
        "spec": refused(config=asked(input_spec=[InputSpec([4, 12], "int65", "tokens")])),
    }


@cases("three")
def no_way_is_left() -> dict[str, str]:
    """3 devices, batches of 4, 4 heads: nothing fits, and nothing is shrunk."""
    of_images = DataLoader(images(8), 4)
    return {
        "three": refused(model=Variant(4, 4)),
        "convolutions": refused(model=Convolutions().double(), dataloader=of_images),
    }


@cases("four")
def staged_tail_is_refused() -> str:
    model = Variant()
    config = asked(mesh="dp2xpp2", axes=("dp", "pp"))
    model, optimizer, loader = to_distributed(model, adamw(model), DataLoader(tokens(5), 4), WORLD, config=config)
    try:
        train(model, optimizer, loader, staged=True)
    except ConfigError as error:
        return str(error)
    raise AssertionError("it was not refused")


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    serve(GROUPS)
