"""Models built without memory get the values that their constructors would have given them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autolaunch_strategies.model.construction import Construction
from autolaunch_strategies.model.materialise import materialise


class Everything(nn.Module):
    """What constructors do: copies, initialisers, constants, values read back, ties, in-place edits."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.embedding = nn.Embedding(40, 32, padding_idx=0)
        self.scaled = nn.Parameter(torch.randn(30, 40) * 0.02)
        self.scalar = nn.Parameter(torch.tensor(2.5))
        self.orthogonal = nn.Linear(32, 32)
        nn.init.orthogonal_(self.orthogonal.weight)
        self.truncated = nn.Linear(32, 32)
        nn.init.trunc_normal_(self.truncated.weight, std=0.02)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]
        self.places = torch.linspace(0, 1, 3).tolist()
        self.numbers = torch.arange(4).numpy()
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)).bool())
        self.register_buffer("constant", torch.tensor([1.0, 2.0]) * torch.arange(2))
        self.convolution = nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 16, 3))
        self.head = nn.Linear(32, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(4)
        self.decay = nn.Parameter(torch.log(torch.arange(1, 5).float().repeat(3, 1)))
        with torch.no_grad():
            self.orthogonal.bias[2:4] = 7
        self.recurrent = nn.LSTM(16, 16)


def transformers_model(family: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
        config = transformers.AutoConfig.for_model(family, **sizes)
        return transformers.AutoModelForCausalLM.from_config(config)

    return make


def built(make: Callable[[], nn.Module], seed: int = 0) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    construction = Construction(seed)
    with construction.recording():
        module = make()
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return module, {name: construction.tensor(item) if construction.knows(item) else item for name, item in tensors}


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(Everything, id="everything"),
        *(pytest.param(transformers_model(f), id=f) for f in ("llama", "gpt2")),
    ],
)
def test_same_constants_and_same_distributions(make: Callable[[], nn.Module]) -> None:
    _, recorded = built(make)
    torch.manual_seed(0)
    eager = make()
    expected = dict([*eager.named_parameters(), *eager.named_buffers()])
    assert recorded.keys() == expected.keys()
    for name, want in expected.items():
        found, want = recorded[name].detach(), want.detach()
        assert (found.shape, found.stride(), found.dtype) == (want.shape, want.stride(), want.dtype), name
        found, want = found.float(), want.float()
        if want.numel() == 0 or (want == want.flatten()[0]).all():
            assert torch.equal(found, want), name
        elif want.numel() >= 500:
            assert abs(found.std() - want.std()) < 0.15 * want.std(), name
            assert abs(found.mean() - want.mean()) < 0.2 * want.std(), name


def test_details_of_construction() -> None:
    module, values = built(Everything)
    eager = Everything()
    assert (module.rates, module.places, module.numbers.tolist()) == (eager.rates, eager.places, [0, 1, 2, 3])
    for name in ("scalar", "decay", "mask", "constant"):
        assert torch.equal(values[name], getattr(eager, name)), name
    assert values["embedding.weight"][0].abs().sum() == 0, "the padding row stays zero"
    assert values["orthogonal.bias"][2:4].tolist() == [7, 7] and 7 not in values["orthogonal.bias"][:2]
    weight = values["orthogonal.weight"]
    assert torch.allclose(weight @ weight.T, torch.eye(32), atol=1e-5)
    assert torch.equal(values["encoder.layers.0.linear1.weight"], values["encoder.layers.2.linear1.weight"])
    assert module.head.weight is module.embedding.weight
    norm = values["convolution.parametrizations.weight.original1"].flatten(1).norm(dim=1)
    assert torch.allclose(norm, values["convolution.parametrizations.weight.original0"].flatten())


@pytest.mark.parametrize("number", [torch.int64, torch.float32])
def test_what_can_not_be_drawn_is_refused_in_the_constructor(number: torch.dtype) -> None:
    """Where the line that does it is known, and not as values are made."""
    with Construction(0).recording(), pytest.raises(RuntimeError):
        torch.empty(3, dtype=number).normal_(std=1.0 if number is torch.int64 else -1.0)


class Indexed(nn.Module):
    """Tensors that are indexed with what torch makes tensors of itself."""

    def __init__(self) -> None:
        super().__init__()
        numbers = torch.arange(12.0).view(3, 4)
        numbers[[0, 1], [1, 0]] = torch.tensor([90.0, 80.0])
        numbers[2, [0, 3]] = -1.0
        self.picked = nn.Buffer(numbers[[2, 0, 1]])
        self.columns = nn.Buffer(numbers[:, [3, 1]])
        self.by_array = nn.Buffer(numbers[np.array([[1, 0], [0, 2]]), None])
        self.none = nn.Buffer(numbers[[]])


def test_lists_that_index_are_numbers_and_not_memory() -> None:
    _, values = built(Indexed)
    expected = Indexed().state_dict()
    assert values.keys() == expected.keys()
    assert all(torch.equal(values[name], expected[name]) for name in expected)


def test_values_are_a_function_of_the_seed_alone() -> None:
    _, first = built(Everything)
    torch.manual_seed(123)
    _, second = built(Everything)
    _, other = built(Everything, seed=1)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["scaled"], other["scaled"])
    state = torch.get_rng_state()
    built(Everything)
    assert torch.equal(state, torch.get_rng_state()), "making tensors draws nothing from the process's generator"


def test_two_layers_of_one_kind_differ_and_copies_agree() -> None:
    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.c = copy.deepcopy(self.a)
            self.b2 = nn.Linear(8, 8)
            self.b2.load_state_dict(self.b.state_dict())

    _, values = built(Copies)
    assert not torch.equal(values["a.weight"], values["b.weight"])
    assert torch.equal(values["a.weight"], values["c.weight"])
    assert torch.equal(values["b.weight"], values["b2.weight"])


def test_making_one_tensor_holds_no_other() -> None:
    """The largest memory that exists while a tensor is made is that tensor, whatever else the model holds."""

    class Sizes(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.largest, self.made = 0, 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            output = func(*args, **(kwargs or {}))
            if isinstance(output, torch.Tensor) and not output.is_meta and "empty" in str(func):
                self.largest = max(self.largest, output.numel())
                self.made += output.numel()
            return output

    construction = Construction(0)
    with construction.recording():
        model = nn.Sequential(*(nn.Linear(100, 100) for _ in range(20)))
    with Sizes() as sizes:
        construction.tensor(model[19].weight)
    assert (sizes.largest, sizes.made) == (10_000, 10_000)


def test_what_is_converted_afterwards_has_the_values_of_its_constructor() -> None:
    class Typed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((3,), 0.3, dtype=torch.float32))
            self.register_buffer("shift", torch.arange(3.0))

    construction = Construction(1)
    with construction.recording():
        module = Typed()
    construction.remember(module)
    module.to(torch.bfloat16)
    construction.remember(module)
    materialise(module, torch.device("cpu"), construction)
    assert torch.equal(module.scale, torch.full((3,), 0.3).bfloat16())
    assert torch.equal(module.shift, torch.arange(3.0).bfloat16())


def test_tensors_that_are_neither_parameters_nor_buffers_are_made_for_real() -> None:
    class Schedule:
        def __init__(self) -> None:
            self.betas, self.kept = torch.linspace(0, 1, 5), {"steps": [torch.arange(3), "linear"]}

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.schedule = nn.Linear(2, 2), Schedule()
            self.register_buffer("mask", torch.ones(2))
            self.pair = (torch.ones(2), 3)
            self.again = self.pair[0]
            self.prior = torch.distributions.Normal(torch.zeros(2), torch.ones(2))
            self.named = [self.layer.weight, self.mask]
            self.me = self
            self.owner: list[Any] = []

    construction, owner = Construction(0), [torch.empty(0)]
    with construction.recording():
        module = Plain()
        owner[:] = [torch.ones(2)]
    module.owner = owner
    construction.settle(module, leave=[owner])
    assert module.schedule.betas.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert module.schedule.kept["steps"][0].tolist() == [0, 1, 2] and module.schedule.kept["steps"][1] == "linear"
    assert module.pair[0].tolist() == [1, 1] and module.again is module.pair[0] and module.pair[1] == 3
    assert module.prior.log_prob(torch.zeros(2)).device.type == "cpu"
    assert module.named[0] is module.layer.weight and module.layer.weight.is_meta and module.mask.is_meta
    assert owner[0].is_meta, "what is left out stays as it is"
