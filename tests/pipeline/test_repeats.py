"""Of many units that are alike a few are run: the recording is the one in which all of them are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autolaunch.models.llama import Llama, LlamaConfig
from autolaunch_strategies.model.blocks import find_blocks
from autolaunch_strategies.pipeline import record as recording
from autolaunch_strategies.pipeline import repeats
from autolaunch_strategies.pipeline.record import Recording, record

BLOCKS = 8
DEBUG = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_layers": BLOCKS}
TOKENS = torch.zeros(2, 8, dtype=torch.long)


@pytest.fixture(autouse=True)
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The units that were run, in order."""
    units: list[str] = []
    run = recording._Liveness._run

    def noted(self: Any, call: Any, *args: Any) -> Any:
        units.append(call.unit)
        return run(self, call, *args)

    monkeypatch.setattr(recording._Liveness, "_run", noted)
    return units


def recorded(model: nn.Module, *args: Any, **kwargs: Any) -> Recording:
    blocks = [block.name for block in find_blocks(model)]
    around = [
        name
        for name, module in model.named_modules()
        if not [*module.children()] and not any(f"{name}.".startswith(f"{block}.") for block in blocks)
    ]
    return record(model, [*blocks, *around], args, kwargs)


def is_as_if_all_were_run(monkeypatch: pytest.MonkeyPatch, model: nn.Module, *args: Any, **kwargs: Any) -> Recording:
    few = recorded(model, *args, **kwargs)
    monkeypatch.setattr(repeats, "MANY", 1_000)
    assert few == recorded(model, *args, **kwargs)
    return few


def test_of_a_llama_two_blocks_are_run(monkeypatch: pytest.MonkeyPatch, ran: list[str]) -> None:
    model = Llama(LlamaConfig(**DEBUG, num_heads=2, num_kv_heads=2, head_dim=8, max_seq_len=8))
    is_as_if_all_were_run(monkeypatch, model, TOKENS)
    blocks = [name for name in ran[: -len(dict.fromkeys(ran))] if "layers" in name]
    assert blocks == ["model.layers.0", f"model.layers.{BLOCKS - 1}"]


@pytest.mark.parametrize("name", ["Qwen3", "Gemma2", "Mixtral", "GptOss", "Mamba"])
@pytest.mark.full
def test_models_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch, ran: list[str]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4}
    model_class = getattr(transformers, f"{name}ForCausalLM")
    config = model_class.config_class(**sizes, **({"state_size": 4} if name == "Mamba" else heads))
    is_as_if_all_were_run(monkeypatch, model_class(config), input_ids=TOKENS, use_cache=False)
    assert len(ran) < 1.8 * len(dict.fromkeys(ran))


class Plain(nn.Module):
    """A block."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.linear(hidden).relu()


class Counting(Plain):
    """One that keeps something of each call."""

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(hidden)


class Remembering(Plain):
    """One that reads what another has left where nobody is told of it."""

    kept: list[Tensor] = []

    def forward(self, hidden: Tensor) -> Tensor:
        out = super().forward(hidden)
        if len(Remembering.kept) == BLOCKS // 2:
            return out + Remembering.kept[0]
        Remembering.kept.append(out)
        return out


class Writing(Plain):
    """One that changes what it is given."""

    def forward(self, hidden: Tensor) -> Tensor:
        out = super().forward(hidden)
        return hidden.detach().add_(1) + out


class Numbered(Plain):
    """One that does as its number says."""

    number = -1

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden).sum(-1, keepdim=True).expand(-1, 4) if self.number == BLOCKS - 1 else hidden * 2


class EveryThird(Plain):
    """One that does as its number says, which neither the first nor the last one shows."""

    number = -1

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = super().forward(hidden)
        return self.linear(hidden) if [False, False, True][self.number % 3] else hidden


class Replacing(Plain):
    """One that puts something of each call in the place of the last one's."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: dict[str, Any] = {"balance": 0.0}

    def forward(self, hidden: Tensor) -> Tensor:
        out = super().forward(hidden)
        self.losses["balance"] = out.square().mean()
        return out


class Descending(Plain):
    """One that differentiates in its forward."""

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden if hidden.requires_grad else hidden.clone().requires_grad_()
        energy = self.linear(hidden).square().sum()
        return hidden - torch.autograd.grad(energy, hidden, create_graph=True)[0]


class Scaling(Plain):
    """One without any operation that counts."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.linear.bias


class Stack(nn.Module):
    """Blocks one behind the other."""

    def __init__(self, block: Callable[[], Plain]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))
        for number, item in enumerate(self.blocks):
            item.number = number
        self.head = nn.Linear(4, 2)

    def forward(self, hidden: Tensor) -> Tensor:
        Remembering.kept = []
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


DOING_MORE = [Counting, Remembering, Writing, Numbered, EveryThird, Replacing]


@pytest.mark.parametrize("block", [Plain, *DOING_MORE])
def test_blocks_that_do_more_are_run(block: type[Plain], monkeypatch: pytest.MonkeyPatch, ran: list[str]) -> None:
    few = recorded(Stack(block), torch.zeros(3, 4))
    if block is Plain:  # the input of the first one needs no gradient
        assert ran == ["blocks.0", "blocks.1", f"blocks.{BLOCKS - 1}", "head"]
    else:
        assert len(ran) >= len(few.calls)
    monkeypatch.setattr(repeats, "MANY", 1_000)
    assert few == recorded(Stack(block), torch.zeros(3, 4))


def test_a_weight_of_another_block_is_said_to_be_used_by_both(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack(Plain)
    model.blocks[5].linear.weight = model.blocks[2].linear.weight
    seen = is_as_if_all_were_run(monkeypatch, model, torch.zeros(3, 4))
    assert seen.uses["blocks.2.linear.weight"] == {2, 5}


def test_a_block_whose_output_is_collected_is_run(monkeypatch: pytest.MonkeyPatch, ran: list[str]) -> None:
    model = Stack(Plain)
    kept: list[Tensor] = []
    model.blocks[4].linear.register_forward_hook(lambda module, args, output: kept.append(output))
    is_as_if_all_were_run(monkeypatch, model, torch.zeros(3, 4))
    assert "blocks.4" in ran[:4]


@pytest.mark.parametrize("block", [Descending, Scaling])
def test_the_recording_is_the_same(block: type[Plain], monkeypatch: pytest.MonkeyPatch, ran: list[str]) -> None:
    seen = is_as_if_all_were_run(monkeypatch, Stack(block), torch.zeros(3, 4))
    assert not seen.untraceable and len(ran) < 2 * len(seen.calls)


class Deep(Plain):
    """One that counts in what it is given."""

    def forward(self, hidden: Tensor, state: dict[str, int] | None = None) -> Tensor:
        assert state is not None
        state["depth"] += 1
        hidden = super().forward(hidden)
        return self.linear(hidden) if state["depth"] == BLOCKS // 2 else hidden


class Counted(Stack):
    """Blocks that are given where they stand."""

    def forward(self, hidden: Tensor) -> Tensor:
        state = {"depth": 0}
        for block in self.blocks:
            hidden = block(hidden, state)
        return self.head(hidden)


class Switched(Stack):
    """A block does something else for the time of a call."""

    def forward(self, hidden: Tensor) -> Tensor:
        linear = self.blocks[4].linear
        linear.forward = lambda hidden: hidden
        try:
            return super().forward(hidden)
        finally:
            del linear.forward


class Collecting(Stack):
    """What a block shows is collected for the time of a call."""

    def forward(self, hidden: Tensor) -> Tensor:
        kept: list[Tensor] = []
        handle = self.blocks[4].linear.register_forward_hook(lambda module, args, output: kept.append(output))
        try:
            return super().forward(hidden).sum() + sum(item.sum() for item in kept)
        finally:
            handle.remove()


@pytest.mark.parametrize(("stack", "block"), [(Counted, Deep), (Switched, Plain), (Collecting, Plain)])
def test_what_the_model_does_to_its_blocks(
    stack: type[Stack], block: type[Plain], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_as_if_all_were_run(monkeypatch, stack(block), torch.zeros(3, 4))
