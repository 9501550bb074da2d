"""Cases for the tests of `parallelize` with an axis cp.

Every case trains the same thing on one process (this one, plain) and on the mesh, and compares.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from autolaunch_strategies import ContextParallel, PrepareContextParallel, ProcessMesh, clip_grad_norm_, parallelize
from tests.context.modules import GPT, LENGTH
from tests.loop.cases import PADDLE_SEQUENCE, RANK, START, TENSOR, assert_same_weights, full, llama
from tests.loop.cases import batches as batches_of
from tests.support.cases import serve

GROUPS: dict[str, dict[str, Callable[[], Any]]] = {}


def case(group: str, function: Callable[[], Any], name: str = "") -> None:
    GROUPS.setdefault(group, {})[name or function.__name__] = function


def cases(group: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        case(group, function)
        return function

    return add


def batches(count: int = 3) -> list[torch.Tensor]:
    return batches_of(count, size=4, length=LENGTH + 1)


def mesh_of(order: tuple[str, ...] = ("dp", "mp", "cp"), **sizes: int) -> ProcessMesh:
    """By default cp is the innermost axis."""
    shape = [sizes.get(axis, 1) for axis in order]
    return ProcessMesh(torch.arange(torch.tensor(shape).prod().item()).view(shape).tolist(), list(order))


# --- models: each is called with ids [b, s] and labels [b, s], which are shifted already, and returns the loss --------


class Seed(nn.Module):
    """The seed's model with positions and labels: what is marked is called with ids, and the rest sees all of it."""

    class SDPALayer(nn.Module):
        def __init__(self, causal: bool) -> None:
            super().__init__()
            self.causal = causal

        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)

    class AttentionLayer(nn.Module):
        def __init__(self, causal: bool) -> None:
            super().__init__()
            self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)
            self.sdpa = Seed.SDPALayer(causal)

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            q, k, v = (item(input).unflatten(-1, (-1, 8)).transpose(1, 2) for item in (self.q, self.k, self.v))
            return self.sdpa(q, k, v).transpose(1, 2).flatten(2)

    class LlamaLayer(nn.Module):
        def __init__(self, causal: bool) -> None:
            super().__init__()
            self.embedding, self.position_embedding = nn.Embedding(64, 32), nn.Embedding(LENGTH, 32)
            self.attention = Seed.AttentionLayer(causal)
            self.norm = nn.LayerNorm(32)

        def forward(self, input: torch.Tensor, position: torch.Tensor, label: torch.Tensor | None = None) -> Any:
            hidden = self.embedding(input) + self.position_embedding(position)
            return self.norm(hidden + self.attention(hidden))

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.llama = Seed.LlamaLayer(causal)
        self.weight = nn.Parameter(torch.randn(32, 64) * 0.2)
        self.loss_func = nn.CrossEntropyLoss()

    def forward(self, input: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        position = torch.arange(input.shape[1]).expand_as(input)
        logits = torch.matmul(self.llama(input, position, label), self.weight)
        assert logits.shape == (*input.shape, 64)
        return self.loss_func(logits.flatten(0, 1), label.flatten())


class TwoDims(Seed):
    """Positions [s] have no batch, and are given by keyword; a flag is no tensor."""

    class Inner(Seed.LlamaLayer):
        def forward(self, input: torch.Tensor, flag: bool, *, position: torch.Tensor) -> Any:
            assert flag
            return {"hidden": super().forward(input, position), "flag": flag}

    def __init__(self) -> None:
        super().__init__()
        self.llama = TwoDims.Inner(True)

    def forward(self, input: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        hidden = self.llama(input, True, position=torch.arange(input.shape[1]))["hidden"]
        return self.loss_func((hidden @ self.weight).flatten(0, 1), label.flatten())


class Scored(nn.Module):
    """A model that returns logits, under a mean."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(input).flatten(0, 1), label.flatten())


class NanoGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.gpt = GPT()

    def forward(self, input: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return self.gpt(input % 32, label % 32)[1]


def plan(backend: str, **more: Any) -> dict[str, Any]:
    """The seed's."""
    return {
        "parallelize_plan": {
            "llama": PrepareContextParallel(backend), "llama.attention.sdpa": ContextParallel(backend), **more
        }
    }  # fmt: skip


# --- parity -----------------------------------------------------------------------------------------------------------


def train(model: nn.Module, optimizer: Any, data: list[torch.Tensor], parts: int = 1) -> list[list[float]]:
    """[sum of losses, norm of all gradients, an evaluation] of every step, each of `parts` backward passes."""
    told = []
    for tokens in data:
        total = 0.0
        for part in tokens.chunk(parts):
            loss = model(part[:, :-1], part[:, 1:]) / parts
            loss.backward()
            total += loss.item()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            evaluated = model.eval()(tokens[:2, :-1], tokens[:2, 1:]).item()
        model.train()
        told.append([total, float(norm), evaluated])
    return told


def mean_over_ranks(table: list[list[float]], group_size: int) -> torch.Tensor:
    tensor = torch.tensor(table)
    dist.all_reduce(tensor)
    return tensor / group_size


def parity(
    build: Callable[[], nn.Module],
    cp_config: Any,
    order: tuple[str, ...] = ("dp", "mp", "cp"),
    level: int = 0,
    parts: int = 1,
    mp_config: Any = None,
    optimizer_first: bool = True,
    **sizes: int,
) -> None:
    """Train on one process and on the mesh: losses, norms and every weight must be equal, and equal on every rank."""
    torch.manual_seed(3)
    reference = build()
    START.clear()
    START.update({name: parameter.detach().clone() for name, parameter in reference.named_parameters()})
    model, mesh = copy.deepcopy(reference), mesh_of(order, **sizes)
    data = batches()
    dp, place = mesh.axis_size("dp"), mesh.coordinate(RANK).get("dp", 0)
    shares = [torch.cat([part.chunk(dp)[place] for part in tokens.chunk(parts)]) for tokens in data]
    expected = torch.tensor(train(reference, adamw(reference), data, parts))
    config: dict[str, Any] = {"dp_config": {"sharding_level": level}} if dp > 1 or level else {}
    if cp_config is not None:
        config["cp_config"] = cp_config
    if mp_config is not None:
        config["mp_config"] = mp_config
    before = {key: dict(value) for key, value in config.items()}
    plans = {key: list(value.get("parallelize_plan", {}).items()) for key, value in config.items()}
    optimizer = adamw(model)
    if optimizer_first:
        assert parallelize(model, optimizer, mesh, config) == (model, optimizer)
    else:
        parallelize(model, None, mesh, config)
        optimizer = adamw(model)
    assert config == before
    assert plans == {key: list(value.get("parallelize_plan", {}).items()) for key, value in config.items()}
    torch.manual_seed(RANK)
    found = train(model, optimizer, shares, parts)
    if dp == 1:
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, found)
        assert all(other == found for other in everywhere), everywhere
    # the evaluation is of the first two samples of this rank's share
    average = mean_over_ranks(found, mesh.size)
    columns = slice(0, 3 if dp == 1 else 2)
    torch.testing.assert_close(average[:, columns], expected[:, columns], rtol=1e-5, atol=1e-5)
    assert_same_weights(model, reference, 1e-5 if not sizes.get("mp") else 1e-4)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.01, eps=1e-4)


def parity_case(group: str, name: str, build: Callable[[], nn.Module], cp_config: Any, **more: Any) -> None:
    case(group, lambda: parity(build, cp_config, **more), name)


def llama_scored() -> nn.Module:
    return Scored(llama())


parity_case("two", "N15_all2all", Seed, plan("all2all"), cp=2)
parity_case("two", "N16_ring", Seed, plan("p2p"), cp=2)
parity_case("two", "N16_ring_full", lambda: Seed(causal=False), plan("p2p"), cp=2)
parity_case("two", "N15_all2all_full", lambda: Seed(causal=False), plan("all2all"), cp=2)
parity_case("two", "gather", Seed, plan("gather"), cp=2)
parity_case("two", "default_backend", Seed, {"parallelize_plan": {"llama": PrepareContextParallel()}}, cp=2)
parity_case("two", "ring_by_name", Seed, plan("ring"), cp=2)
parity_case("two", "keyword_positions", TwoDims, plan("p2p"), cp=2)
parity_case("two", "in_mp_config", Seed, None, mp_config=plan("p2p"), cp=2)
parity_case("two", "only_prepared", Seed, {"parallelize_plan": {"llama": PrepareContextParallel("p2p")}}, cp=2)
parity_case("two", "unmatched_keys", Seed, plan("p2p", **{"sdpa": ContextParallel("p2p")}), cp=2)
parity_case("two", "accumulation", Seed, plan("p2p"), parts=2, cp=2)
parity_case("two", "optimizer_afterwards", Seed, plan("p2p"), optimizer_first=False, cp=2)
parity_case("two", "without_plan_llama", llama_scored, {}, cp=2)
parity_case("two", "without_plan_nanogpt", NanoGPT, {}, cp=2)
parity_case("two", "level3", Seed, plan("p2p"), level=3, cp=2)
for _level in (0, 1, 3):
    parity_case("four", f"dp2_cp2_level{_level}", Seed, plan("p2p"), level=_level, parts=1 + _level % 2, dp=2, cp=2)
parity_case("four", "cp4_ring", Seed, plan("p2p"), cp=4)
parity_case("four", "cp4_all2all", Seed, plan("all2all"), cp=4)  # two key/value heads
parity_case("four", "ranks_laid_out_otherwise", Seed, plan("p2p"), order=("cp", "dp"), level=1, dp=2, cp=2)
_TENSOR, _SEQUENCE = (
    {("model." + key if not key.startswith("*") else key): value for key, value in given.items()}
    for given in (TENSOR, PADDLE_SEQUENCE)
)
_LLAMA = {"parallelize_plan": {"model.model.layers.*.self_attn": ContextParallel("p2p")}}
parity_case("four", "mp2_cp2", llama_scored, {}, mp_config={"parallelize_plan": _TENSOR}, mp=2, cp=2)
parity_case("four", "mp2_cp2_plan", llama_scored, _LLAMA, mp_config={"parallelize_plan": _TENSOR}, mp=2, cp=2)
parity_case("four", "mp2_cp2_sequence", llama_scored, {}, mp_config={"parallelize_plan": _SEQUENCE}, mp=2, cp=2)


@cases("four")
def pp2_cp2() -> None:
    """The call for pipelines serves a mesh with cp, too; the batch is whole for every rank along cp."""
    torch.manual_seed(3)
    reference: Any = llama(num_layers=2)
    model: Any = copy.deepcopy(reference)
    mesh = mesh_of(("pp", "cp"), pp=2, cp=2)
    optimizers = [adamw(reference), adamw(model)]
    parallelize(model, optimizers[1], mesh, {"pp_config": {}, "cp_config": {}})
    for tokens in batches():

        def loss_of(given: Any, labels: torch.Tensor, called: Any) -> torch.Tensor:
            return F.cross_entropy(called(given).flatten(0, 1), labels.flatten())

        expected = loss_of(tokens[:, :-1], tokens[:, 1:], reference)
        expected.backward()
        found = model.forward_backward(lambda x, y: loss_of(x, y, model), tokens[:, :-1], tokens[:, 1:])
        torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-5)
        for item, optimizer in zip((reference, model), optimizers, strict=True):
            clip_grad_norm_(item.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    expected_weights = dict(reference.named_parameters())
    for name, item in model.named_parameters():
        torch.testing.assert_close(full(item.detach()), expected_weights[name].detach(), rtol=1e-5, atol=1e-5)


LOOKS: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda item: item[:, -1],
    lambda item: item[0, 3:7],
    lambda item: item[..., 5],
    lambda item: item[:, torch.tensor([7, 0, 12])],
    lambda item: item.argmax(-1),
    lambda item: item.max(1)[0],
    lambda item: item.sum(),
    lambda item: item.norm(),
    lambda item: item.std(1),
    lambda item: item.cumsum(1),
    lambda item: item.softmax(-1).mean(1),
    lambda item: item.view(-1, 64)[9],
    lambda item: item.transpose(1, 2) @ item,
    lambda item: torch.cat([item, item], 1)[:, ::3],
    lambda item: item.detach().numpy(),
    lambda item: item.tolist(),
)
"""What code behind a model does with logits [b, s, vocabulary]."""


@cases("two")
def outputs_are_whole() -> None:
    """What the model returns has the shape and the values of the whole, whatever is asked of it."""
    torch.manual_seed(3)
    reference = llama()
    model = copy.deepcopy(reference)
    parallelize(model, None, mesh_of(cp=2), {"cp_config": {}})
    tokens = batches(1)[0][:, :-1]
    for mode in (torch.inference_mode, torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            expected, found = reference(tokens), model(tokens)
            assert found.shape == expected.shape and found.dtype == expected.dtype and len(found) == len(expected)
            for look in LOOKS:
                one, other = (as_tensor(look(item)).detach() for item in (expected, found))
                assert one.shape == other.shape
                torch.testing.assert_close(whole(other), one, rtol=1e-5, atol=1e-5)


def as_tensor(seen: Any) -> torch.Tensor:
    return seen if isinstance(seen, torch.Tensor) else torch.as_tensor(seen)


def whole(tensor: Any) -> torch.Tensor:
    return tensor.whole() if hasattr(tensor, "whole") else tensor


@cases("two")
def gradients_of_inputs() -> None:
    """Inputs that have gradients of their own, as soft prompts have."""
    torch.manual_seed(3)
    reference = nn.Sequential(*(GPT.Block(0.0, 0.0) for _ in range(2)))
    model = copy.deepcopy(reference)
    parallelize(model, None, mesh_of(cp=2), {"cp_config": {}})
    found = []
    for item in (reference, model):
        x = torch.randn(2, LENGTH, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        item(x * 1).square().mean().backward()
        found.append(x.grad)
    mine = found[1].clone()
    dist.all_reduce(mine)
    torch.testing.assert_close(mine / dist.get_world_size(), found[0], rtol=1e-4, atol=1e-6)


@cases("two")
def inference_mode() -> None:
    """What is cut in it has no version, and is not what training gets afterwards."""
    torch.manual_seed(3)
    reference = nn.Sequential(*(GPT.Block(0.0, 0.0) for _ in range(2)))
    model = copy.deepcopy(reference)
    parallelize(model, None, mesh_of(cp=2), {"cp_config": {}})
    x = torch.randn(2, LENGTH, 16)
    for _ in range(2):
        with torch.inference_mode():
            for given in (x, x * 2):
                torch.testing.assert_close(whole(model(given)), reference(given), rtol=1e-5, atol=1e-5)
        model(x).square().mean().backward()


def message(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@cases("two")
def refusals() -> dict[str, str]:
    tokens = batches(1)[0]

    def run(model: nn.Module, config: Any, ids: torch.Tensor = tokens, **sizes: int) -> str:
        def call() -> None:
            parallelize(model, None, mesh_of(**(sizes or {"cp": 2})), config)
            model(ids[:, :-1], ids[:, 1:])

        return message(call)

    two_ways = plan("p2p", **{"llama.attention.sdpa": ContextParallel("all2all")})
    return {
        "length": run(Seed(), {"cp_config": {**plan("p2p"), "pad": False}}, tokens[:, :14]),
        "two backends": run(Seed(), {"cp_config": two_ways}),
        "a parameter": run(Seed(), {"cp_config": {"parallelize_plan": {"llama.norm.weight": ContextParallel()}}}),
    }


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    serve(GROUPS)
