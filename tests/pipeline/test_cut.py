"""Any model can be cut: all stages in one process give the output and the gradients of the whole model."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autolaunch_strategies.config import ConfigError, PipelineParallel
from autolaunch_strategies.model.blocks import find_blocks
from autolaunch_strategies.pipeline.build import plan_cut
from autolaunch_strategies.pipeline.cut import whole_model
from autolaunch_strategies.pipeline.record import record
from autolaunch_strategies.pipeline.structure import BatchDims, Structure, samples_in
from autolaunch_strategies.tracing.inputs import Steps
from autolaunch_strategies.tracing.step import Step
from tests.pipeline.chain import Chain, flat, weighted_sum
from tests.support.messages import Told, assert_only_told, assert_told
from tests.support.tiers import in_turn, tiered

WIDTH, TOKENS = 8, 16


# --- models that know nothing of stages -----------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(self.fc1(x).tanh())


class Stack(nn.Module):
    """A model of `depth` blocks between an embedding and a head; subclasses call them in their own way."""

    kind: type[nn.Module] = Block

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(self.kind() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class MaskedBlock(Block):
    def forward(self, x: torch.Tensor, *, mask: torch.Tensor, shift: tuple[torch.Tensor, float]) -> Any:
        scores = (x @ x.mT).masked_fill(~mask, -1e9)
        return super().forward(scores.softmax(-1) @ x + shift[0] * shift[1]), None, {"scores": scores, "kind": "masked"}


class Masked(Stack):
    """Blocks that take keywords and return tuples, dicts and None; a mask and positions are made between them."""

    kind = MaskedBlock

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(32, WIDTH))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        x, scores = self.embed(ids), []
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        causal = causal if mask is None else causal & mask[:, None, :].bool()
        for number, layer in enumerate(self.layers):
            x, nothing, extra = layer(x, mask=causal, shift=(self.table[: ids.shape[1]], number / 4))
            assert nothing is None and extra["kind"] == "masked"
            scores.append(extra["scores"])
        return {"logits": self.head(self.norm(x)), "scores": (scores[0], scores[-1])}


class UNet(nn.Module):
    """Skips that cross every cut, and a block in the middle that has none."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Sequential(nn.Conv2d(3 if i == 0 else 4, 4, 3, padding=1)) for i in range(3))
        self.middle = Block()
        self.up = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 4, 3, padding=1)) for _ in range(3))
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        skips, x = [], images
        for down in self.down:
            x = F.gelu(down(x))
            skips.append(x)
        x = self.middle(x)
        for up in self.up:
            x = F.gelu(up(torch.cat([x, skips.pop()], 1)))
        return self.last(x)


class Repeating(Stack):
    """Every block is called twice, as the layers of a recurrent model are."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in (*self.layers, *self.layers):
            x = layer(x)
        return self.head(self.norm(x))


class InPlace(Stack):
    """Glue that changes what a block returned, and what it returned is needed later."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, kept = self.embed(ids), []
        for layer in self.layers:
            x = layer(x)
            kept.append(x)
            x += 0.5
            x[:, 0] *= 2
            x = F.relu(x, inplace=True)
        return self.head(self.norm(x + kept[0] + kept[1]))


class InPlaceBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x *= 0.5
        return super().forward(x)


class ChangesItsInput(Stack):
    """Blocks that write into what they are given."""

    kind = InPlaceBlock


class Patches(nn.Module):
    """Frames that use parameters directly: a class token, positions, a head whose weight is that of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Module()
        self.trunk.embed = nn.Embedding(TOKENS, WIDTH)
        self.trunk.positions = nn.Parameter(torch.randn(1, 32, WIDTH))
        self.first = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.trunk.embed(ids)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1)
        x = x + self.trunk.positions[:, : x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.linear(x * self.scale, self.trunk.embed.weight)


class TiedBlocks(Stack):
    """A head that shares the embedding's weight, and two blocks of which one has a matrix of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight
        self.layers[3].fc1.weight = self.layers[0].fc1.weight


class OutOfOrder(nn.Module):
    """What is defined first runs last."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.norm = nn.Linear(WIDTH, TOKENS), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleDict({name: Block() for name in ("d", "b", "c", "a")})
        self.embed = nn.Embedding(TOKENS, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for name in sorted(self.layers):
            x = self.layers[name](x)
        return self.head(self.norm(x))


class TorchEncoder(nn.Module):
    def __init__(self, nested: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, nn.LayerNorm(WIDTH), enable_nested_tensor=nested)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, ids: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(self.encoder(self.embed(ids), src_key_padding_mask=padding))


class TorchDecoder(nn.Module):
    """Its mask is compared with a causal one: there is something to see in values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 2, 12, 0.0, batch_first=True), 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=self.head.weight.dtype)
        x = self.embed(ids)
        return self.head(self.decoder(x, x, tgt_mask=mask))


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        def block(inputs: int, outputs: int) -> nn.Module:
            norm, act = nn.GroupNorm(1, outputs), nn.ReLU(inplace=True)
            return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), norm, act)

        parts = OrderedDict(first=block(3, 4), second=block(4, 4), third=block(4, 8), fourth=block(8, 8))
        ends = OrderedDict(pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), head=nn.Linear(8, 5))
        super().__init__(parts | ends)


class RotaryBlock(Block):
    """As torchtune's attention: positions of all layers come from one module without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.positions: nn.Module = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.positions(x))


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(32, WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table[: x.shape[1]]


class SharedPositions(Stack):
    kind = RotaryBlock

    def __init__(self) -> None:
        super().__init__()
        positions = Positions()
        for layer in self.layers:
            layer.positions = positions


class ListsOfParts(Stack):
    """As x-transformers' layers: lists of [norm, what is called, nothing] that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.ModuleList([nn.LayerNorm(WIDTH)]), layer, nn.Identity()]) for layer in self.layers
        )

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.embed(ids)
        for (norm,), layer, nothing in self.layers:
            x = nothing(x + layer(norm(x)))
        return self.head(self.norm(x))


@dataclasses.dataclass
class Notes:
    """What a block tells beside its output; x-transformers' blocks do so."""

    scores: torch.Tensor
    kind: str = ""


class NotingBlock(Block):
    def forward(self, x: torch.Tensor, before: Any = None) -> Any:
        scores = self.fc1(x)
        if before is not None:
            x = x + before.scores.mean(-1, keepdim=True)
        return super().forward(x), Notes(scores)


class Noting(Stack):
    """Its layers return objects, into which glue writes; with `looks` later layers read what earlier ones noted."""

    kind = NotingBlock
    looks = False

    def forward(self, ids: torch.Tensor) -> Any:
        x, notes = self.embed(ids), None
        for number, layer in enumerate(self.layers):
            x, notes = layer(x, notes if self.looks else None)
            notes.kind = f"layer {number}"
        assert notes is not None and notes.kind == "layer 3"
        return self.head(self.norm(x))


class LooksAtNotes(Noting):
    looks = True


class KeptRow:
    def __init__(self, key: torch.Tensor) -> None:
        self.key = key


class Kept:
    """Something for every block, within objects within an object, as caches of keys hold it."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = [KeptRow(row) for row in rows.unbind(1)]

    def join(self, number: int, x: torch.Tensor) -> torch.Tensor:
        row = self.rows[number]
        row.key = torch.cat((row.key, x), 1)
        return row.key


class PrefixedBlock(Block):
    def forward(self, x: torch.Tensor, number: int, kept: Kept) -> torch.Tensor:
        keys = kept.join(number, x)
        return super().forward((x @ keys.mT).softmax(-1) @ keys)


class Prefixed(Stack):
    """A prefix for the keys of every block: one module makes them all."""

    kind = PrefixedBlock

    def __init__(self) -> None:
        super().__init__()
        self.prefix = nn.Embedding(2, len(self.layers) * WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.prefix(torch.arange(2).expand(len(ids), -1))
        kept = Kept(rows.view(len(ids), 2, -1, WIDTH).transpose(1, 2))
        x = self.embed(ids)
        for number, layer in enumerate(self.layers):
            x = layer(x, number, kept)
        return self.head(x)


class Hidden:
    """What nothing can look into."""

    def __init__(self, scores: torch.Tensor) -> None:
        self.scores = scores


class HidingBlock(NotingBlock):
    def forward(self, x: torch.Tensor, before: Any = None) -> Any:
        x, notes = super().forward(x, before)
        return x, Hidden(notes.scores)


class LooksAtHidden(LooksAtNotes):
    kind = HidingBlock


@dataclasses.dataclass(frozen=True)
class Tokens:
    """A batch, and what the model made of it."""

    ids: torch.Tensor
    keep: torch.Tensor
    states: tuple[Any, ...] = dataclasses.field(default=())
    nothing: None = dataclasses.field(default=None, init=False)


class PassesTokens(Block):
    def forward(self, x: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, Tokens]:
        x = super().forward(x) * tokens.keep[..., None]
        return x, dataclasses.replace(tokens, states=(*tokens.states, Notes(x.mean(-1))))


class InDataclasses(Stack):
    """A dataclass goes in, grows from block to block, and comes out."""

    kind = PassesTokens

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = (Tokens(ids(), ids() > 0),)

    def forward(self, tokens: Tokens) -> Any:
        x = self.embed(tokens.ids)
        for layer in self.layers:
            x, tokens = layer(x, tokens)
        scores = sum(notes.scores for notes in tokens.states)
        return {"logits": self.head(self.norm(x)), "scores": scores, "tokens": dataclasses.replace(tokens, states=())}


class Structured(Stack):
    """Blocks with outputs in a class of `transformers`."""

    class kind(Block):
        def forward(self, x: torch.Tensor) -> Any:
            from transformers.modeling_outputs import BaseModelOutput

            return BaseModelOutput(last_hidden_state=super().forward(x), hidden_states=(x, x.detach()))

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            output = layer(x)
            x = output.last_hidden_state + 0.1 * output["hidden_states"][0] + output[1][1]
        return self.head(self.norm(x))


class BatchSecond(Stack):
    """Sequences first inside of the model: what crosses the cuts has the batch as its second dim."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).transpose(0, 1).contiguous()
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Flattened(Stack):
    """What crosses the cuts has lost the batch: [batch * length, width]."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).flatten(0, 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).view(*ids.shape, -1)


class Frozen(Stack):
    """An embedding that is not trained: nothing flows back to it, and integers cross the cuts, too."""

    class kind(Block):
        def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> Any:
            return super().forward(pair[0]), pair[1] + 1

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        pair = self.embed(ids), ids
        for layer in self.layers:
            pair = layer(pair)
        return self.head(self.norm(pair[0])) * pair[1].unsqueeze(-1)


class Times(nn.Module):
    """Embeddings of a time, the second made from the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, time: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.first(time)
        return self.second(first.tanh()), first


class ConditionedBlock(Block):
    """It adds tables to an embedding: of one sample the gradients of all of them are one tensor in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.other = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        both = (self.table[None] + time.reshape(len(x), 2, -1)) + self.other[None]
        shift, scale = both.tanh().chunk(2, dim=1)
        return super().forward(x * (1 + scale) + shift)


class Conditioned(Stack):
    """Every block and the output need the embeddings of a time."""

    kind = ConditionedBlock

    def __init__(self) -> None:
        super().__init__()
        self.times, self.table = Times(), nn.Parameter(torch.randn(WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        both, time = self.times(ids[:, :1].to(x.dtype) / TOKENS)
        for layer in self.layers:
            x = layer(x, both)
        return self.head(self.norm(x) + (self.table[None] + time)[:, None])


def ids(batch: int = 6, length: int = 5) -> torch.Tensor:
    return torch.randint(0, TOKENS, (batch, length), generator=torch.Generator().manual_seed(1))


def images(batch: int = 4) -> torch.Tensor:
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def built(model: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(2)
    made = model().double()
    if isinstance(made, UNet | Convolutions):
        made.img_size = 8
    return made


def hf(kind: str, **sizes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{kind}Config")(vocab_size=TOKENS, use_cache=False, **sizes)
        of_two = "ForConditionalGeneration" if kind in ("T5", "Bart") else "ForCausalLM"
        ending = "LMHeadModel" if kind == "GPT2" else of_two
        return getattr(transformers, f"{kind}{ending}")(config)

    return make


LLAMA: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 12, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 16, "pad_token_id": 0,
}  # fmt: skip
GPT2 = {
    "n_embd": WIDTH,
    "n_layer": 4,
    "n_head": 2,
    "n_positions": 16,
    "resid_pdrop": 0,
    "embd_pdrop": 0,
    "attn_pdrop": 0,
}
T5 = {
    "d_model": WIDTH, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}  # fmt: skip
BART = {
    "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 12, "decoder_ffn_dim": 12,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 16, "dropout": 0.0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip


def text(square: bool = False) -> dict[str, torch.Tensor]:
    """Inputs with padding, which an in-model loss leaves out: the mean over microbatches is not that of the batch."""
    tokens = ids(6, 6 if square else 5)
    mask = torch.ones_like(tokens)
    mask[1, 3:] = mask[4, 2:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def translation() -> dict[str, torch.Tensor]:
    return {"input_ids": ids(), "attention_mask": text()["attention_mask"], "labels": ids(6, 4)}


CASES = {
    "llama": (hf("Llama", **LLAMA, tie_word_embeddings=True), (), text()),
    "llama with batch == length": (hf("Llama", **LLAMA), (), text(square=True)),
    "gpt2": (hf("GPT2", **GPT2), (), text()),
    "t5": (hf("T5", **T5), (), translation()),
    # Labels that are square are no mask: without them as samples it runs, and its output is of two batches.
    "bart with batch == length": (hf("Bart", **BART), (), {**translation(), "labels": ids(6, 6)}),
    "stack": (Stack, (ids(),), {}),
    "keywords, tuples and masks": (Masked, (ids(),), {"mask": ids() % 5 > 0}),
    "objects beside outputs": (Noting, (ids(),), {}),
    "dataclasses": (LooksAtNotes, (ids(),), {}),
    "objects in dataclasses": (InDataclasses, (Tokens(ids(), ids() % 5 > 0),), {}),
    "a module that all layers share": (SharedPositions, (ids(),), {}),
    "lists of parts": (ListsOfParts, (ids(),), {}),
    "batch == length": (Masked, (ids(5, 5),), {"mask": ids(5, 5) % 4 > 0}),
    "skips": (UNet, (images(),), {}),
    "called twice": (Repeating, (ids(),), {}),
    "glue in place": (InPlace, (ids(),), {}),
    "input in place": (ChangesItsInput, (ids(),), {}),
    "parameters in frames": (Patches, (ids(),), {}),
    "tied": (TiedBlocks, (ids(),), {}),
    "out of order": (OutOfOrder, (ids(),), {}),
    "encoder of torch": (TorchEncoder, (ids(),), {}),
    "encoder of torch with padding": (TorchEncoder, (ids(), ids() % 5 == 4), {}),
    "decoder of torch with a mask": (TorchDecoder, (ids(),), {}),
    "convolutions": (Convolutions, (images(),), {}),
    "structured outputs": (Structured, (ids(),), {}),
    "batch second": (BatchSecond, (ids(),), {}),
    "flattened": (Flattened, (ids(),), {}),
    "objects within objects": (Prefixed, (ids(),), {}),
    "frozen and integers": (Frozen, (ids(),), {}),
}


WAYS = [(2, 1), (3, 4)]
"""(stages, microbatches): with one microbatch the whole batch passes."""


def compare(model: nn.Module, chain: Chain, args: Any, kwargs: Any) -> None:
    plain = copy.deepcopy(model)
    expected = plain(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    loss = (lambda output: output.loss) if "labels" in kwargs else weighted_sum
    loss(expected).backward()
    found = chain.step(args, kwargs, loss)
    assert type(found) is type(expected)
    torch.testing.assert_close(flat(found), flat(expected), rtol=1e-9, atol=1e-12)
    gradients = {name: item.grad for name, item in plain.named_parameters() if item.grad is not None}
    assert chain.gradients().keys() == gradients.keys()
    for name, gradient in gradients.items():
        # Some code of transformers computes in float32 whatever the model is in.
        torch.testing.assert_close(chain.gradients()[name], gradient, rtol=1e-6, atol=1e-8, msg=f"{name}: {{}}".format)


@pytest.mark.parametrize(
    ("case", "stages", "microbatches"),
    tiered(
        [(case, *way) for case in CASES for way in WAYS],
        {(case, *way) for case, way in in_turn(list(CASES), WAYS)},
    ),
)
def test_output_and_gradients_are_those_of_the_whole_model(case: str, stages: int, microbatches: int) -> None:
    make, args, kwargs = CASES[case]
    model = built(make)
    chain = Chain(model, stages, microbatches=microbatches, split_spec="layers" if case == "tied" else None)
    compare(model, chain, args, kwargs)


def test_gradients_that_share_memory() -> None:
    model = built(Conditioned)
    compare(model, Chain(model, 2, microbatches=4), (ids(4),), {})


@pytest.mark.parametrize(
    ("spec", "first"),
    [
        pytest.param("layers", ["embed", "layers.0", "layers.1"], id="prefix"),
        pytest.param({"layers.1.fc1": "END"}, ["embed", "layers.0", "layers.1.fc1"], id="within a block"),
        pytest.param({"layers.2.fc2": "BEGINNING"}, ["embed", "layers.0", "layers.1", "layers.2.fc1"], id="beginning"),
        pytest.param({"embed": "END"}, ["embed"], id="behind the embedding"),
        pytest.param({"norm": "END"}, ["embed", "layers.0", "layers.1", "layers.2", "layers.3", "norm"], id="norm"),
    ],
)
def test_cuts_anywhere(spec: Any, first: list[str]) -> None:
    model = built(Stack)
    chain = Chain(model, 2, microbatches=2, split_spec=spec)
    homes = chain.cutting.unit_stages()
    assert [unit for unit in chain.cutting.units if homes[unit] == [0]] == first
    compare(model, chain, (ids(),), {})


def test_every_stage_holds_what_it_runs() -> None:
    chain = Chain(built(Patches), 3)
    held = [{name for name in names if "layers" not in name} for names in chain.held()]
    assert held[0] == {"trunk.embed.weight", "trunk.positions", "first"}
    # The glue in front of the first block is done anew behind it: there its result is dead, its parameters are not.
    assert held[2] == {"trunk.embed.weight", "scale", "unused", "trunk.positions", "first"}
    assert [sorted({name.split(".")[1] for name in names if "layers" in name}) for names in chain.held()] == [
        ["0", "1"],
        ["2"],
        ["3"],
    ]


@pytest.mark.parametrize(
    ("make", "holders"),
    [
        pytest.param(hf("Llama", **LLAMA, tie_word_embeddings=True), {"model.embed_tokens.weight": (0, 2)}, id="llama"),
        pytest.param(hf("GPT2", **GPT2), {"transformer.wte.weight": (0, 2)}, id="gpt2"),
        pytest.param(TiedBlocks, {"embed.weight": (0, 2), "layers.0.fc1.weight": (0, 2)}, id="blocks"),
        pytest.param(Stack, {}, id="nothing"),
    ],
)
def test_what_stages_share(make: Callable[[], nn.Module], holders: dict[str, tuple[int, ...]]) -> None:
    cutting = Chain(built(make), 3, split_spec="layers" if make is TiedBlocks else None).cutting
    assert {name: stages for name, stages in cutting.holders.items() if len(stages) > 1} == holders


def test_an_embedding_is_held_by_the_first_stage_and_a_head_by_the_last() -> None:
    embedding, *between, last = Chain(built(hf("Llama", **LLAMA, tie_word_embeddings=False)), 4).held()
    names = [{name for name in held if ".layers." not in name} for held in (embedding, *between, last)]
    assert names == [{"model.embed_tokens.weight"}, set(), set(), {"model.norm.weight", "lm_head.weight"}]


@pytest.mark.parametrize("make", [Stack, Patches, TiedBlocks, Masked, hf("GPT2", **GPT2)])
def test_names_are_the_original_ones(make: Callable[[], nn.Module]) -> None:
    model = built(make)
    chain = Chain(model, 3, split_spec="transformer.h" if hasattr(model, "transformer") else "layers")
    keys: set[str] = set()
    for root in chain.roots:
        state = root.state_dict()
        keys |= set(state)
        for name, value in state.items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=0, atol=0)
    assert keys == set(model.state_dict())
    for pipeline in chain.pipelines:
        before = [name for name, _ in pipeline.root.named_parameters()]
        with whole_model(pipeline.held) as whole:
            shown = dict(whole.named_parameters())
            assert list(shown) == [name for name, _ in model.named_parameters()]
            assert {name for name, item in shown.items() if not item.is_meta} == set(before)
            assert [item.shape for item in shown.values()] == [item.shape for item in model.parameters()]
        assert [name for name, _ in pipeline.root.named_parameters()] == before


def test_a_part_of_another_stage_can_not_be_called() -> None:
    chain = Chain(built(Stack), 2)
    with pytest.raises(RuntimeError) as error:
        chain.roots[0].layers[3](torch.zeros(1, WIDTH))
    assert_told(error.value, "pp", "layers.3", "stage 1", "whole model")


def test_a_value_that_did_not_travel_is_not_a_number() -> None:
    """Were liveness wrong, the result would not be a little wrong."""
    chain = Chain(built(UNet), 2)
    for pipeline in chain.pipelines:
        honest = pipeline.structures.of

        def forgetful(*args: Any, honest: Any = honest, **kwargs: Any) -> tuple[Structure, Any]:
            structure, key = honest(*args, **kwargs)
            carry, *rest = structure.carries
            return dataclasses.replace(structure, carries=(carry[1:], *rest)), key

        pipeline.structures.of = forgetful
    assert chain.step((images(),)).isnan().any()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_the_encoder_of_torch_without_gradients(training: bool, nested: bool) -> None:
    """In evaluation it takes another way, on which the values of padding may be others."""
    model = built(partial(TorchEncoder, nested)).train(training)
    padding = ids() % 5 == 4
    padding[:, 0] = False
    with torch.no_grad():
        expected = model(ids(), padding)
    found = Chain(model, 3, microbatches=3).step((ids(), padding))
    kept = ~padding if nested else slice(None)
    torch.testing.assert_close(found[kept], expected[kept])


# --- what can't be cut, and is told so ------------------------------------------------------------------------------


class Keeping(Stack):
    """A block keeps a tensor that the head reads."""

    class kind(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept = self.fc1(x)
            return super().forward(x)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + self.layers[0].kept.mean(-1, keepdim=True)


class WritesIntoASkip(InPlace):
    """A block writes into what is needed behind another cut: what it wrote is nothing that it returns."""

    kind = InPlaceBlock

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = first = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x + first)


class Pair:
    def __init__(self, x: torch.Tensor, count: int) -> None:
        self.x, self.count = x, count


class InAClass(Stack):
    """Blocks that hand tensors on in a class that nothing is known of."""

    class kind(Block):
        def forward(self, x: torch.Tensor) -> Any:
            return Pair(super().forward(x), 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x).x
        return self.head(x)


class Balanced(Stack):
    """Blocks that also return one number of the whole batch."""

    class kind(Block):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), self.fc1(x).square().mean()

    def forward(self, ids: torch.Tensor) -> Any:
        x, total = self.embed(ids), torch.zeros((), dtype=torch.float64)
        for layer in self.layers:
            x, part = layer(x)
            total = total + part
        return self.head(x), total


class Positional(Stack):
    """A batch of one size only."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if len(ids) not in (2, 6):  # the example inputs are a batch of two
            raise ValueError("always six samples")
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("make", "needing"),
    [
        pytest.param(Keeping, "output of the model", id="a tensor that is kept"),
        pytest.param(WritesIntoASkip, "head", id="a tensor that is written into"),
        pytest.param(InAClass, "layers.1", id="an output of an unknown class"),
    ],
)
def test_what_does_not_travel_is_refused(make: Callable[[], nn.Module], needing: str) -> None:
    with pytest.raises(ConfigError) as error:
        Chain(built(make), 2)
    told = Told(
        "pp",
        f"{needing} needs a tensor",
        "layers.0",
        allowed=("layers.0 returns it", "pp.global_spec"),
        write="pp.global_spec=layers.0",
    )
    assert_only_told(error.value, told)


def test_a_number_of_the_whole_batch_is_refused_unless_it_is_one_microbatch() -> None:
    model = built(Balanced)
    with pytest.raises(ConfigError) as error:
        Chain(model, 2, microbatches=2).step((ids(),))
    told = Told(
        "pp.microbatches",
        "layers.0",
        "shape ()",
        "a batch of 7",
        allowed=("one microbatch", "pp.loss=microbatch"),
        write="pp.microbatches=1",
    )
    assert_only_told(error.value, told)
    compare(model, Chain(model, 2, microbatches=1), (ids(),), {})


def test_a_batch_of_one_size_only_is_refused_unless_it_is_one_microbatch() -> None:
    model = built(Positional)
    with pytest.raises(ConfigError) as error:
        Chain(model, 2, microbatches=2).step((ids(),))
    told = Told(
        "pp.microbatches",
        "(6, 5)",
        "another number than 6",
        "(always six samples)",
        allowed=("one microbatch",),
        write="pp.microbatches=1",
    )
    assert_only_told(error.value, told)
    compare(model, Chain(model, 2, microbatches=1), (ids(),), {})


def test_a_model_that_runs_on_nothing_that_is_known_is_refused_with_what_was_tried() -> None:
    class Picky(Stack):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            raise ValueError("exactly 12 tokens, please" * (ids.shape[1] != 12))

    with pytest.raises(ConfigError) as error:
        Chain(built(Picky), 2)
    tried = [
        "token ids for embed: exactly 12 tokens, please",
        "features for layers.0.fc1: exactly 12 tokens, please",
    ]
    assert_only_told(error.value, Told("pp", "order", "Picky", *tried, allowed=("`example_input_array`", "Picky")))
    assert str(error.value).count("exactly 12 tokens, please") == 2  # features were tried in two shapes


def test_a_model_of_one_part_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        Chain(nn.Bilinear(2, 2, 2), 2)
    assert_only_told(error.value, Told("pp", "Bilinear", "no parts", allowed=("pp of size 1",)))


class FixedLength(nn.Module):
    """Its blocks run on sequences of 12 only, which no guess has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.stack = nn.Embedding(TOKENS, WIDTH), FixedStack()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.stack(self.embed(ids))


class FixedStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(1, 12, WIDTH))
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.positions
        for layer in self.layers:
            x = layer(x)
        return x


def test_inputs_on_which_blocks_do_not_run_are_none() -> None:
    with pytest.raises(ConfigError) as error:
        Chain(built(FixedLength), 2)
    assert_told(error.value, "pp", "stack does not run", write=None)
    model = built(FixedLength)
    model.example_input_array = ids(6, 12)
    compare(model, Chain(model, 2, microbatches=2), (ids(6, 12),), {})


def test_a_call_in_another_order_is_refused() -> None:
    class Undecided(Stack):
        def forward(self, ids: torch.Tensor, backwards: bool = False) -> torch.Tensor:
            x = self.embed(ids)
            for layer in reversed(self.layers) if backwards else self.layers:
                x = layer(x)
            return self.head(x)

    chain = Chain(built(Undecided), 2)
    with pytest.raises(ConfigError) as error:
        chain.step((ids(),), {"backwards": True})
    assert_only_told(error.value, Told("pp", "layers.1", "another order", allowed=("one order",)))


def test_a_call_that_leaves_blocks_out_runs() -> None:
    class Early(Stack):
        def forward(self, ids: torch.Tensor, skip: int = -1) -> torch.Tensor:
            x = self.embed(ids)
            for number, layer in enumerate(self.layers):
                x = x if number == skip else layer(x)
            return self.head(x)

    model = built(Early)
    chain = Chain(model, 2, microbatches=2)
    compare(model, chain, (ids(),), {"skip": 1})
    compare(model, Chain(model, 2, microbatches=2), (ids(),), {})


# --- what hooks are shown -------------------------------------------------------------------------------------------


class Shows(Stack):
    """The output takes what hooks collected: of blocks, and of a layer inside of each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: list[torch.Tensor] = []
        for layer in self.layers:
            layer.fc1.register_forward_hook(self._collect)
            layer.register_forward_hook(self._collect_with_input, with_kwargs=True)

    def _collect(self, module: nn.Module, args: Any, output: Any) -> None:
        self.collected.append(output)

    def _collect_with_input(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.collected.append(args[0])

    def forward(self, ids: torch.Tensor) -> Any:
        self.collected.clear()
        logits = super().forward(ids)
        assert len(self.collected) == 8
        return logits, self.collected[0], self.collected[2].mean(-1), self.collected[5]


def test_what_hooks_collect_inside_of_blocks_travels() -> None:
    model = built(Shows)
    compare(model, Chain(model, 3, microbatches=3), (ids(),), {})


@pytest.mark.parametrize("microbatches", [1, 3])
def test_hidden_states_and_attention_weights_of_transformers(microbatches: int) -> None:
    model = built(hf("Llama", **LLAMA, attn_implementation="eager"))
    wanted = {"output_hidden_states": True, "output_attentions": True}
    compare(model, Chain(model, 3, microbatches=microbatches), (), {**text(), **wanted})


class Caching(Stack):
    """A mask that is made once and kept, as people do."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: torch.Tensor | None = None
        self.lengths: list[int] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.lengths.append(ids.shape[1])
        if self.mask is None or len(self.mask) < ids.shape[1]:
            self.mask = torch.linspace(0, 1, ids.shape[1], dtype=torch.float64)
        x = self.embed(ids) * self.mask[: ids.shape[1], None]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_a_recorded_model_is_left_as_it_was() -> None:
    model = built(Caching)
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    chain = Chain(model, 2, microbatches=2)
    assert model.mask is None and model.lengths == []
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before
    compare(model, chain, (ids(),), {})


class LooksAtValues(Stack):
    """Glue that asks for a value if it is given a mask, and a unit that does not see the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1, WIDTH)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        shift = self.table(torch.zeros(1, dtype=torch.long))
        x = self.embed(ids)
        if mask is not None and mask.sum() > 0:
            x = x * mask.unsqueeze(-1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x + shift)


def test_a_call_that_looks_at_values_runs_as_the_recorded_one(caplog: pytest.LogCaptureFixture) -> None:
    model = built(LooksAtValues)
    compare(model, Chain(model, 2, microbatches=3), (ids(), ids() % 5 > 0), {})
    assert {record.getMessage() for record in caplog.records} == {
        "pp: this call can't be recorded (aten._local_scalar_dense.default); it is taken to run as the first one"
    }


class EveryWhere(Stack):
    """A module with parameters that runs between the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = self.between(layer(x))
        return self.head(x)


@pytest.mark.parametrize("spec", [None, "between", ["between", "norm"]])
def test_a_module_that_runs_on_every_stage(spec: Any) -> None:
    model = built(EveryWhere)
    chain = Chain(model, 3, microbatches=2, global_spec=spec)
    assert chain.cutting.holders["between.weight"] == (0, 1, 2)
    assert ("between" in chain.cutting.units) == (spec is None)
    compare(model, chain, (ids(),), {})


def test_a_module_for_every_stage_that_is_not_there() -> None:
    with pytest.raises(ConfigError) as error:
        Chain(built(EveryWhere), 2, global_spec="betwen")
    assert_only_told(error.value, Told("pp.global_spec=betwen", "no module", "between"))


class Masking(Stack):
    """Random numbers for the input of the first block; `later` are needed again behind the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.later = False
        self.dropout = nn.Dropout(0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        kept = torch.rand(ids.shape) < 0.5
        first = self.dropout(x * kept.unsqueeze(-1))
        x = first
        for layer in self.layers:
            x = layer(x)
        return self.head(x + first) * kept.unsqueeze(-1) if self.later else self.head(x)


class Pictured(Stack):
    """May be given a picture, which a parameter of the model's own changes."""

    def __init__(self) -> None:
        super().__init__()
        self.frame = nn.Parameter(torch.ones(WIDTH))

    def forward(self, ids: torch.Tensor, picture: torch.Tensor | None = None) -> Any:
        x = self.embed(ids)
        if picture is not None:
            x = x + picture[:, None] * self.frame
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def test_a_call_with_parameters_that_its_stage_lacks_is_refused() -> None:
    chain = Chain(built(Pictured), 2)
    with pytest.raises(ConfigError) as error:
        chain.step((ids(), torch.ones(len(ids()), WIDTH)))
    told = Told("pp", "frame", "stage 0", "token ids for embed", allowed=("`example_input_array`", "as in training"))
    assert_only_told(error.value, told)


def test_the_first_batch_counts_more_than_inputs_that_leave_parameters_out() -> None:
    model = built(Pictured)
    batch = ids(), torch.ones(len(ids()), WIDTH)
    step = Step("the first batch", model, lambda *args: model(*args), lambda: (batch, {}))
    cutting = plan_cut(model, find_blocks(model), PipelineParallel(), 2, False, steps=lambda _: Steps(training=step))
    assert cutting.recording.origin == "the first batch"
    assert cutting.holders["frame"] == (0, 1)  # glue before the first part runs on both stages


@pytest.mark.parametrize("learns", [True, False])
def test_losses_of_routers_are_refused_where_each_microbatch_would_have_its_own(learns: bool) -> None:
    sizes = LLAMA | {"num_local_experts": 2, "num_experts_per_tok": 1, "output_router_logits": learns}
    model = built(hf("Mixtral", **sizes))

    def planned(pp: PipelineParallel) -> str:
        return plan_cut(model, find_blocks(model), pp, 2, False).name

    one_f_one_b = PipelineParallel("1f1b", "microbatch", "1f1b")
    assert planned(PipelineParallel()) == planned(dataclasses.replace(one_f_one_b, microbatches=1))
    if not learns:
        assert planned(one_f_one_b) == ""
        return
    with pytest.raises(ConfigError) as caught:
        planned(one_f_one_b)
    where = "pp.loss=microbatch with the model (output_router_logits)"
    assert_only_told(caught.value, Told(where, "routers", "one device", allowed=("pp=exact",), write="pp=exact"))


def test_random_numbers_that_several_stages_need_are_refused() -> None:
    model = built(Masking)
    assert not Chain(model, 2, microbatches=2).step((ids(),)).isnan().any()
    model.later = True
    with pytest.raises(ConfigError) as error:
        Chain(model, 2, microbatches=2).step((ids(),))
    assert_only_told(error.value, Told("pp", "random numbers", "layers.0", "head", allowed=("one part",)))


def test_what_an_object_holds_cannot_be_sent() -> None:
    with pytest.raises(ConfigError) as caught:
        Chain(built(LooksAtHidden), 2).step((ids(),))
    assert_told(caught.value, "pp", "layers.1", "does not return", write=None)


@pytest.mark.parametrize("dropped", [0.0, 0.5])
def test_attention_draws_where_it_drops_out_alone(dropped: float) -> None:
    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x, x, x, dropout_p=dropped, is_causal=True)

    model = nn.Sequential(Attention(), Attention())
    recording = record(model, ["0", "1"], (torch.zeros(1, 2, 4, 8),), {})
    assert recording.may_draw is (dropped > 0)  # a pipeline seeds the microbatches of what may draw, one by one


# --- which tensors of a batch are cut -------------------------------------------------------------------------------

SAMPLES, TABLE, ONE = True, False, False


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        pytest.param([(8, 8, 5), (1, 1, 5), (5, 5, 5)], (SAMPLES, SAMPLES, TABLE), id="table behind"),
        pytest.param([(1, 1, 1), (8, 8, 5)], (SAMPLES, SAMPLES, TABLE), id="one sample first"),
        pytest.param([(1, 1, 5), (8, 8, 5), (1, 1, 5)], (SAMPLES, SAMPLES, TABLE), id="learnt later"),
        pytest.param([(1, 8, 8), (1, 1, 1), (1, 3, 3)], (ONE, SAMPLES, SAMPLES), id="one for all samples in front"),
        pytest.param([(8, 8, 8), (8, 8, 1), (8, 8, 8)], (SAMPLES, SAMPLES, SAMPLES), id="at times one for all"),
    ],
)
def test_which_tensors_hold_samples_is_told_by_all_batches(
    batches: list[tuple[int, ...]], expected: tuple[bool, ...]
) -> None:
    dims = BatchDims()
    for sizes in batches:
        leaves = [*(torch.empty(size, 2) for size in sizes), "a word", torch.tensor(1.0)]
        found = dims.of(leaves, "form")
    assert found == (*expected, False, False)
    assert samples_in(leaves, found) == batches[-1][expected.index(True)]
