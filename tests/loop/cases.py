"""Cases for the tests of `parallelize` and of the styles.

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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as torch_styles
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autolaunch.models.llama import Llama
from autolaunch.models.llama_config import llama_config
from autolaunch_strategies import (
    ColWiseParallel,
    ProcessMesh,
    RowWiseParallel,
    SequenceParallelBegin,
    SequenceParallelDisable,
    SequenceParallelEnd,
    clip_grad_norm_,
    parallelize,
    set_mesh,
)
from autolaunch_strategies.tensor.views import MixedTensors
from tests.support.cases import RANK, WORLD, serve

Case = Callable[[], Any]
GROUPS: dict[str, dict[str, Case]] = {}
VOCABULARY = 64


def case(group: str, function: Case, name: str = "") -> None:
    GROUPS.setdefault(group, {})[name or function.__name__] = function


def cases(group: str) -> Callable[[Case], Case]:
    def add(function: Case) -> Case:
        case(group, function)
        return function

    return add


# --- models -------------------------------------------------------------------------------------------------------


def llama(**changes: Any) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2}
    return Llama(llama_config({"size": "debug", "num_layers": 2, **sizes, **changes}))


class Fused(nn.Module):
    """Attention and MLP with fused projections that are split afterwards, a root parameter, a buffer, a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.start = nn.Parameter(torch.randn(16))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 16))
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.gate_up, self.down = nn.Linear(16, 64, bias=False), nn.Linear(32, 16)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        batch, length = tokens.shape
        x = (self.embed(tokens) + self.start) * self.scale
        x = x + torch.arange(length, dtype=x.dtype)[None, :, None] / length
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (item.view(batch, length, 4, 4).transpose(1, 2) for item in (q, k, v))
        mask = torch.ones(length, length).tril().log()[None, None]
        weights = (q @ k.transpose(-1, -2) / 2 + mask).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, 16))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.head(x + self.down(F.silu(gate) * up))


FUSED = {"qkv|gate_up|head": ColWiseParallel(), "out|down": RowWiseParallel(), "embed": RowWiseParallel()}

LAYERS = {
    "*.layers.*.self_attn.(q|k|v)_proj": ColWiseParallel(),
    "*.layers.*.self_attn.o_proj": RowWiseParallel(),
    "*.layers.*.mlp.(gate|up)_proj": "ColWiseParallel",
    "*.layers.*.mlp.down_proj": {"RowWiseParallel": {"is_input_parallel": True}},
}
TENSOR = {"model.embed_tokens": RowWiseParallel(), **LAYERS, "lm_head": ColWiseParallel()}
SEQUENCE = {
    "model.embed_tokens": [RowWiseParallel(), SequenceParallelBegin(False)],
    "*.layers.*.(self_attn|mlp)": SequenceParallelDisable(need_transpose=False),
    **LAYERS,
    "lm_head": [SequenceParallelEnd(need_transpose=False), ColWiseParallel()],
}
PADDLE_SEQUENCE = {
    "model.embed_tokens": [ColWiseParallel(), SequenceParallelBegin()],
    "*.layers.*.self_attn": SequenceParallelDisable(),
    "*.layers.*.mlp": SequenceParallelDisable(need_transpose=False),
    **LAYERS,
    "lm_head": SequenceParallelEnd(),
    "lm_head.weight": ColWiseParallel(),
}


class Experts(nn.Module):
    """As in `transformers`: parameters of all experts in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 16) / 4), nn.Parameter(torch.randn(4, 16, 8) / 4)

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        mixed = torch.zeros_like(hidden)
        for number in range(self.num_experts):
            rows, places = torch.where(index == number)
            made = torch.tanh(hidden[rows] @ self.up[number].T) @ self.down[number].T
            mixed = mixed.index_add(0, rows, made * weights[rows, places, None])
        return mixed


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.router, self.experts = nn.Linear(16, 4), Experts()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens).flatten(0, 1)
        weights, index = self.router(x).softmax(dim=-1).topk(2)
        return self.head(x + self.experts(x, index, weights)).view(*tokens.shape, -1)


# --- training -----------------------------------------------------------------------------------------------------


def full(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def mesh_of(dp: int, mp: int, transposed: bool = False) -> ProcessMesh:
    ranks = torch.arange(dp * mp)
    if transposed:
        return ProcessMesh(ranks.view(mp, dp).T.tolist(), ["dp", "mp"])
    return ProcessMesh(ranks.view(dp, mp).tolist(), ["dp", "mp"])


def batches(count: int, size: int = 8, length: int = 12) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (size, length), generator=generator) for _ in range(count)]


def train(
    model: nn.Module, optimizer: Any, data: list[torch.Tensor], parts: int = 1, clip: float = 0.5, scheduler: Any = None
) -> list[float]:
    """A plain training loop: `parts` backward passes per step, clipping, an evaluation before each step."""
    losses = []
    for tokens in data:
        total = 0.0
        for part in tokens.chunk(parts):
            loss = F.cross_entropy(model(part).flatten(0, 1), part.roll(-1, 1).flatten()) / parts
            loss.backward()
            total += loss.item()
        if clip:
            clip_grad_norm_(model.parameters(), clip)
        with torch.no_grad():
            model(tokens[:1])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def share(data: list[torch.Tensor], mesh: ProcessMesh, parts: int = 1) -> list[torch.Tensor]:
    """What this rank trains on: its share of each of the parts of every batch."""
    dp, place = mesh.axis_size("dp"), mesh.coordinate(RANK)["dp"]
    return [torch.cat([part.chunk(dp)[place] for part in tokens.chunk(parts)]) for tokens in data]


def mean_over_ranks(values: list[float]) -> list[float]:
    tensor = torch.tensor(values)
    dist.all_reduce(tensor)
    return (tensor / WORLD).tolist()


def assert_same_weights(model: nn.Module, reference: nn.Module, tolerance: float = 1e-4) -> None:
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            full(parameter.detach()),
            expected[name].detach(),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )
        assert not parameter.requires_grad or not torch.equal(expected[name], START[name]), f"{name} was not trained"


START: dict[str, torch.Tensor] = {}


def parity(
    build: Callable[[], nn.Module],
    plan: dict[str, Any],
    dp: int,
    mp: int,
    level: int = 0,
    parts: int = 1,
    transposed: bool = False,
    steps: int = 3,
    length: int = 12,
    make: Callable[..., Any] = torch.optim.AdamW,
    ep: int = 1,
) -> dict[str, Any]:
    """Train on one process and on the mesh: losses and every weight must be equal."""
    torch.manual_seed(3)
    reference = build()
    START.clear()
    START.update({name: parameter.detach().clone() for name, parameter in reference.named_parameters()})
    model = copy.deepcopy(reference)
    data = batches(steps, length=length)
    expected = train(reference, make(reference.parameters(), lr=1e-2), data, parts)
    mesh = mesh_of(dp, mp, transposed)
    optimizer = make(model.parameters(), lr=1e-2)
    config: dict[str, Any] = {"dp_config": {"sharding_level": level}}
    if ep > 1:
        config["ep"] = ep
    if mp > 1:
        config["mp_config"] = {"parallelize_plan": plan}
    before = copy.copy(config)
    given, given_optimizer = parallelize(model, optimizer, mesh, config)
    assert given is model and given_optimizer is optimizer and config == before
    torch.manual_seed(RANK)
    losses = mean_over_ranks(train(model, optimizer, share(data, mesh, parts), parts))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    assert_same_weights(model, reference)
    return {"losses": losses}


def parity_case(
    group: str, name: str, build: Callable[[], nn.Module], plan: Any, dp: int, mp: int, **more: Any
) -> None:
    case(group, lambda: parity(build, plan, dp, mp, **more), name)


def tied() -> nn.Module:
    return llama(tie_embeddings=True)


parity_case("two", "N1_dp2", llama, {}, 2, 1)
parity_case("two", "N2_mp2", llama, TENSOR, 1, 2)
parity_case("two", "N5_mp2_sequence", llama, SEQUENCE, 1, 2)
parity_case("two", "N5_mp2_sequence_transposed", llama, PADDLE_SEQUENCE, 1, 2)
parity_case("two", "N5_mp2_sequence_odd_length", llama, SEQUENCE, 1, 2, length=11)
for level in (1, 2, 3):
    parity_case("two", f"N7_dp2_level{level}", llama, {}, 2, 1, level=level)
for level in (0, 1):
    parity_case("two", f"N11_tied_dp2_level{level}", tied, {}, 2, 1, level=level)
    parity_case("two", f"N18_accumulation_dp2_level{level}", llama, {}, 2, 1, level=level, parts=2)
parity_case("two", "N13_tied_mp2", tied, TENSOR, 1, 2)
parity_case(
    "two", "N13_tied_mp2_only_embedding_planned", tied, {**LAYERS, "model.embed_tokens": ColWiseParallel()}, 1, 2
)
parity_case("two", "N14_fused_mp2", Fused, FUSED, 1, 2, make=torch.optim.SGD)
parity_case("two", "N18_accumulation_mp2", llama, TENSOR, 1, 2, parts=2)
for level in (1, 2):
    parity_case("four", f"N3_N8_dp2_mp2_level{level}", llama, TENSOR, 2, 2, level=level, parts=1 + level % 2)
for level in (0, 3):
    parity_case("four", f"N6_dp2_mp2_sequence_level{level}", llama, SEQUENCE, 2, 2, level=level)
parity_case("four", "N13_tied_dp2_mp2_level3", tied, TENSOR, 2, 2, level=3)
parity_case("four", "N14_fused_dp2_mp2_level2", Fused, FUSED, 2, 2, level=2, make=torch.optim.SGD)
parity_case("four", "ranks_laid_out_otherwise", llama, TENSOR, 2, 2, transposed=True)
MIXTURE = {"embed": RowWiseParallel(), "head": ColWiseParallel()}
parity_case("two", "experts_dp2_ep2_level3", Mixture, {}, 2, 1, level=3, ep=2, parts=2)
parity_case("two", "experts_mp2_ep2", Mixture, MIXTURE, 1, 2, ep=2)
parity_case("four", "experts_dp2_mp2_ep2_level0", Mixture, MIXTURE, 2, 2, ep=2)
parity_case("four", "experts_dp2_mp2_ep4_level2", Mixture, MIXTURE, 2, 2, level=2, ep=4)
parity_case("eight", "N4_dp4_mp2_sequence_level3", llama, SEQUENCE, 4, 2, level=3)
parity_case("eight", "N2_dp2_mp4", lambda: llama(num_kv_heads=4), TENSOR, 2, 4, level=1)


# --- bytes (P4) ---------------------------------------------------------------------------------------------------


@cases("four")
def P4_bytes_of_each_level() -> dict[str, Any]:
    """Numbers of local elements of (parameters, gradients, state) of one planned and one unplanned parameter."""
    found = {}
    for level in (0, 1, 2, 3):
        torch.manual_seed(0)
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        config = {"dp_config": {"sharding_level": level}, "mp_config": {"parallelize_plan": TENSOR}}
        parallelize(model, optimizer, mesh_of(2, 2), config)
        loss = F.cross_entropy(model(batches(1)[0][:2]).flatten(0, 1), batches(1)[0][:2].flatten())
        loss.backward()
        parameters = dict(model.named_parameters())
        gradients = {name: local(parameter.grad) for name, parameter in parameters.items()}
        optimizer.step()
        for name in ("model.layers.0.mlp.up_proj.weight", "model.norm.weight"):
            state = optimizer.state[parameters[name]]["exp_avg"]
            found[f"{level} {name}"] = [local(parameters[name]), gradients[name], local(state), state.numel()]
    return found


def local(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel()


# --- optimizers ---------------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.gain = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(1))
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.gain * self.down(F.gelu(self.up(self.norm(x))))


SMALL = {"up": ColWiseParallel(), "down": RowWiseParallel()}


def small_steps(model: nn.Module, optimizer: Any, data: torch.Tensor) -> None:
    for x in data:
        optimizer.zero_grad()
        nn.MSELoss()(model(x), torch.zeros_like(x)).backward()
        optimizer.step()


OPTIMIZERS: dict[str, Callable[[list[Any]], Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1),
    "AdamW_foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "AdamW_fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "Adamax": lambda p: torch.optim.Adamax(p, 1e-2),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 1.0),
    "NAdam": lambda p: torch.optim.NAdam(p, 1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, 1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, 1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, 1e-2),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
    "Muon": lambda p: torch.optim.Muon([item for item in p if item.dim() == 2], 1e-2),
}


def optimizer_parity(name: str, level: int) -> None:
    """Two steps on one process, `parallelize` takes over with the state that there is, two more steps; then a
    round trip of the state through `state_dict`, and one more step."""
    torch.manual_seed(0)
    reference = Small()
    data = torch.randn(5, 4, 8)
    make = OPTIMIZERS[name]
    expected = make(list(reference.parameters()))
    small_steps(reference, expected, data[:2])
    model, mesh = copy.deepcopy(reference), mesh_of(2, 2)
    optimizer = make(list(model.parameters()))
    optimizer.load_state_dict(copy.deepcopy(expected.state_dict()))
    config = {"dp_config": {"sharding_level": level}, "mp_config": {"parallelize_plan": SMALL}}
    parallelize(model, optimizer, mesh, config)
    place = mesh.coordinate(RANK)["dp"]
    mine = data[:, 2 * place : 2 * place + 2]
    small_steps(reference, expected, data[2:4])
    small_steps(model, optimizer, mine[2:4])
    state = optimizer.state_dict()
    optimizer.state.clear()
    optimizer.load_state_dict(state)
    small_steps(reference, expected, data[4:])
    small_steps(model, optimizer, mine[4:])
    for (key, parameter), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            full(parameter.detach()), other.detach(), rtol=1e-4, atol=1e-5, msg=lambda m, n=key: f"{n}: {m}"
        )


for optimizer_name in OPTIMIZERS:
    if optimizer_name != "Muon" or hasattr(torch.optim, "Muon"):
        for level in (0, 3):
            case(
                "optimizers",
                lambda n=optimizer_name, at=level: optimizer_parity(n, at),
                f"{optimizer_name}_level{level}",
            )


@cases("optimizers")
def groups_frozen_parameters_and_scheduler() -> None:
    for level in (0, 1, 3):
        torch.manual_seed(0)
        reference = Small()
        reference.down.weight.requires_grad_(False)
        model, mesh = copy.deepcopy(reference), mesh_of(2, 2)
        optimizers = []
        for item in (reference, model):
            groups = [
                {"params": [item.up.weight, item.down.weight], "lr": 1e-2, "weight_decay": 0.3, "name": "matrices"},
                {"params": [item.up.bias, item.scale], "lr": 3e-3, "betas": (0.8, 0.9)},
            ]
            optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
            optimizers.append((optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)))
        config = {"dp_config": {"sharding_level": level}, "mp_config": {"parallelize_plan": SMALL}}
        parallelize(model, optimizers[1][0], mesh, config)
        groups = optimizers[1][0].param_groups
        assert [len(group["params"]) for group in groups] == [2, 2]
        assert groups[0]["params"][0] is model.up.weight and groups[0]["params"][1] is model.down.weight
        assert groups[1]["params"][1] is model.scale
        assert groups[0]["name"] == "matrices" and groups[1]["betas"] == (0.8, 0.9)
        assert not model.down.weight.requires_grad and model.up.weight.requires_grad
        data, place = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(2)), mesh.coordinate(RANK)["dp"]
        for (optimizer, scheduler), item, rows in zip(
            optimizers, (reference, model), (data, data[:, 2 * place : 2 * place + 2]), strict=True
        ):
            for x in rows:
                small_steps(item, optimizer, x[None])
                scheduler.step()
        assert [group["lr"] for group in groups] == [1e-2 / 8, 3e-3 / 8]
        for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full(parameter.detach()), other.detach(), rtol=1e-4, atol=1e-5)


@cases("optimizers")
def made_afterwards() -> None:
    for level in (0, 2):
        torch.manual_seed(0)
        reference = Small()
        model, mesh = copy.deepcopy(reference), mesh_of(2, 2)
        config = {"dp_config": {"sharding_level": level}, "mp_config": {"parallelize_plan": SMALL}}
        assert parallelize(model, None, mesh, config) == (model, None)
        data, place = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(2)), mesh.coordinate(RANK)["dp"]
        small_steps(reference, torch.optim.Adafactor(reference.parameters(), 1e-2), data)
        small_steps(model, torch.optim.Adafactor(model.parameters(), 1e-2), data[:, 2 * place : 2 * place + 2])
        for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full(parameter.detach()), other.detach(), rtol=1e-4, atol=1e-5)


# --- refusals -----------------------------------------------------------------------------------------------------


def message(*args: Any, **kwargs: Any) -> str:
    try:
        parallelize(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return ""


@cases("two")
def refusals() -> dict[str, str]:
    mesh = mesh_of(1, 2)
    config = {"mp_config": {"parallelize_plan": SMALL}}
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    parallelize(model, optimizer, mesh, config)
    other = Small()
    stranger = torch.optim.SGD([*other.parameters(), nn.Parameter(torch.ones(3))], 1e-2)
    with torch.device("meta"):
        on_meta = Small()
    return {
        "model twice": message(model, None, mesh, config),
        "optimizer twice": message(Small(), optimizer, mesh, config),
        "stranger": message(other, stranger, mesh, config),
        "lbfgs": message(other, torch.optim.LBFGS(other.parameters()), mesh, config),
        "meta": message(on_meta, None, mesh, config),
        "world size": message(Small(), None, ProcessMesh([0], ["dp"]), {"dp_config": {"sharding_level": 1}}),
        "three dims": message(nn.Sequential(nn.Conv1d(2, 2, 1)), None, mesh, plan_of({"0": RowWiseParallel()})),
        "torch style": message(
            nn.Sequential(nn.LayerNorm(2)), None, mesh, plan_of({"0": torch_styles.ColwiseParallel()})
        ),
    }


def plan_of(plan: dict[str, Any]) -> dict[str, Any]:
    return {"mp_config": {"parallelize_plan": plan}}


@cases("two")
def values_and_random_state_are_shared() -> None:
    torch.manual_seed(RANK)
    model = Small()
    parallelize(model, None, mesh_of(1, 2), plan_of(SMALL))
    for tensor in (model.scale.detach(), torch.rand(3)):
        gathered = [torch.empty_like(tensor) for _ in range(WORLD)]
        dist.all_gather(gathered, tensor)
        assert torch.equal(gathered[0], gathered[1])


@cases("two")
def trained_only_later() -> None:
    """What was frozen at first is averaged once it is trained, be it alone."""
    for level in (0, 3):
        torch.manual_seed(0)
        reference = Small()
        reference.up.requires_grad_(False)
        model = copy.deepcopy(reference)
        parallelize(model, None, mesh_of(2, 1), {"dp_config": {"sharding_level": level}})
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2))
        for item, rows in ((reference, x), (model, x[2 * RANK : 2 * RANK + 2])):
            for name, parameter in item.named_parameters():
                parameter.requires_grad_(name.startswith("up."))
            item(rows).square().mean().backward()
        for name, parameter in model.named_parameters():
            expected = reference.get_parameter(name).grad
            assert (parameter.grad is None) == (expected is None), (level, name)
            if expected is not None:
                torch.testing.assert_close(full(parameter.grad), expected)


@cases("four")
def a_mesh_like_one_whose_groups_have_ended() -> None:
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Small()
        mesh = mesh_of(2, 2)
        parallelize(model, None, mesh, {"mp_config": {"parallelize_plan": SMALL}})
        loss = nn.MSELoss()(model(torch.ones(4, 8)), torch.zeros(4, 8))
        loss.backward()
        losses.append(loss.item())
        groups = set(model.up.weight.device_mesh.get_all_groups()) - {dist.group.WORLD}
        assert groups
        dist.barrier()
        for group in groups:
            dist.destroy_process_group(group)
    assert losses[0] == losses[1]


@cases("two")
def torch_mesh_is_taken() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    set_mesh(init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")))
    model = Small()
    parallelize(model, config=plan_of(SMALL))
    assert model.up.weight.placements == (Shard(0),)


# --- random numbers -----------------------------------------------------------------------------------------------


class Dropouts(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.recompute = nn.Linear(8, 64), nn.Linear(64, 8), recompute
        self.inner, self.outer = nn.Dropout(0.25), nn.Dropout(0.25)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(self.up(x))
        self.seen = hidden
        heads = hidden.view(x.shape[0], -1, 4, 16).transpose(1, 2)
        heads = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2)
        return self.outer(self.down(heads.transpose(1, 2).reshape(hidden.shape)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)


def dropout_run(recompute: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    model = Dropouts(recompute)
    parallelize(model, None, mesh_of(1, 2), plan_of(SMALL))
    torch.manual_seed(5)
    x = torch.randn(8, 32, 8)
    out = model(x)
    dropped = model.seen.to_local() == 0
    out.pow(2).mean().backward()
    return {
        "mask": dropped,
        "out": out.detach(),
        **{n: p.grad.to_local() for n, p in model.named_parameters() if isinstance(p.grad, DTensor)},
    }


def gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(WORLD)]
    dist.all_gather(parts, tensor.contiguous())
    return parts


@cases("two")
def dropout() -> dict[str, float]:
    first, again, recomputed = dropout_run(False), dropout_run(False), dropout_run(True)
    for key, value in first.items():
        assert torch.equal(value, again[key]), f"{key} differs in a second run"
        torch.testing.assert_close(value, recomputed[key], msg=lambda m, k=key: f"recomputed {k}: {m}")
    mine, other = (part.bool() for part in gathered(first["mask"].byte()))
    whole = gathered(first["out"])
    return {
        "share dropped here": mine.float().mean().item(),
        "share dropped there": other.float().mean().item(),
        "share dropped on both": (mine & other).float().mean().item(),
        "outputs differ by": (whole[0] - whole[1]).abs().max().item(),
        "share of outputs dropped": (whole[0] == 0).float().mean().item(),
    }


@cases("two")
def random_functions() -> dict[str, Any]:
    """Whether ranks draw different numbers for their parts, function by function, and stay in step afterwards."""
    parallelize(model := Small(), None, mesh_of(1, 2), plan_of(SMALL))
    mesh = model.up.weight.device_mesh
    found: dict[str, Any] = {}
    for name, draw in {
        "dropout": lambda x: F.dropout(x, 0.5),
        "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
        "bernoulli": lambda x: torch.bernoulli(x * 0.5),
        "rand_like": torch.rand_like,
        "normal_": lambda x: torch.empty_like(x).normal_(),
        "rrelu": lambda x: F.rrelu(-x, training=True),
        "eval": lambda x: F.dropout(x, 0.5, training=False),
    }.items():
        for placement in (Shard(1), Replicate()):
            x = DTensor.from_local(torch.ones(16, 16), mesh, [placement], run_check=False)
            parts = gathered(draw(x).to_local())
            found[f"{name} {'sharded' if placement.is_shard() else 'whole'}"] = not torch.equal(parts[0], parts[1])
    uneven = F.dropout(DTensor.from_local(torch.ones(2, 3 - RANK), mesh, [Shard(1)], shape=(2, 5), stride=(5, 1)), 0.5)
    found["uneven"] = [list(uneven.shape), uneven.to_local().shape[1]]
    steps = gathered(torch.rand(4))
    found["in step"] = torch.equal(steps[0], steps[1])
    x = DTensor.from_local(torch.ones(2, 4, 6), mesh, [Shard(2)], run_check=False)
    channels = F.dropout1d(x, 0.5).full_tensor()
    found["dropout1d drops whole channels"] = bool(((channels == 0).all(2) | (channels != 0).all(2)).all())
    whole = torch.zeros(4, 4).normal_(generator=torch.Generator().manual_seed(7))
    drawn = DTensor.from_local(torch.zeros(4, 2), mesh, [Shard(1)], run_check=False)
    drawn.normal_(generator=torch.Generator().manual_seed(7))
    found["own generator as on one process"] = torch.equal(drawn.full_tensor(), whole)
    return found


# --- errors -------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        with torch._C.DisableTorchFunction():  # code that no function mode sees, such as a kernel of its own
            hidden = hidden + torch.zeros(16)
        return self.down(hidden)


@cases("two")
def operations_that_sharded_tensors_do_not_survive() -> None:
    """Values and gradients are those of the whole tensor, also where its parts are of unequal size."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("mp",))
    operations: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "flatten": lambda x: x.flatten(1),
        "view": lambda x: x.contiguous().view(3, -1),
        "group_norm": lambda x: F.group_norm(x.transpose(1, 2), 2),
    }
    for name, operation in operations.items():
        for length in (9, 8, 1):
            whole = torch.randn(3, length, 4, generator=torch.Generator().manual_seed(3)).requires_grad_()
            factors = torch.randn(operation(whole).shape, generator=torch.Generator().manual_seed(4))
            (operation(whole) * factors).sum().backward()
            sharded = distribute_tensor(whole.detach(), mesh, [Shard(1)]).requires_grad_()
            with MixedTensors(mesh):
                (operation(sharded) * factors).sum().backward()
            assert torch.allclose(full(sharded.grad), whole.grad, atol=1e-6), (name, length)


@cases("two")
def mixed_error_names_module_and_rule() -> str:
    model = nn.ModuleDict({"block": Odd()})
    model.forward = lambda x: model["block"](x)
    parallelize(model, None, mesh_of(1, 2), plan_of({"block.up": ColWiseParallel(), "block.down": RowWiseParallel()}))
    try:
        model(torch.ones(4, 8))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# --- torch's own styles -------------------------------------------------------------------------------------------


class TitanAttention(nn.Module):
    """Written for local tensors, as torchtitan's: head counts are found by view(-1)."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (layer(x).view(batch, length, -1, 4).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        out = F.scaled_dot_product_attention(q * rotation, k * rotation, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


class TitanBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.attention_norm = TitanAttention(), nn.RMSNorm(16)
        self.ffn_norm, self.feed_forward = nn.RMSNorm(16), nn.ModuleDict()
        self.feed_forward = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.ffn_norm(x))


class Titan(nn.Module):
    def __init__(self, tie: bool = False) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleDict({str(index): TitanBlock() for index in range(2)})
        self.norm, self.output = nn.RMSNorm(16), nn.Linear(16, VOCABULARY, bias=False)
        if tie:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rotation = torch.linspace(0.5, 1, tokens.shape[1])[:, None]
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, rotation)
        return self.output(self.norm(x))


def titan_plan(loss_parallel: bool) -> dict[str, Any]:
    column, row = torch_styles.ColwiseParallel, torch_styles.RowwiseParallel
    return {
        "tok_embeddings": row(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm|layers.*.(attention|ffn)_norm": torch_styles.SequenceParallel(),
        "layers.*.attention": torch_styles.PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        ),
        "layers.*.attention.w(q|k|v)": column(),
        "layers.*.attention.wo": row(output_layouts=Shard(1)),
        "layers.*.feed_forward": torch_styles.PrepareModuleInputOutput(
            input_layouts=(Shard(1),),
            desired_input_layouts=(Replicate(),),
            output_layouts=(Shard(1),),
            desired_output_layouts=(Shard(1),),
        ),
        "layers.*.feed_forward.0": column(),
        "layers.*.feed_forward.2": row(output_layouts=Shard(1), use_local_output=False),
        "output": column(
            input_layouts=Shard(1),
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        ),
    }


MIXED_STYLES = {
    "tok_embeddings": RowWiseParallel(),
    "layers.*.attention.w(q|k|v)": torch_styles.ColwiseParallel(use_local_output=False),
    "layers.*.attention.wo": RowWiseParallel(),
    "layers.*.feed_forward.0": {
        "_target_": "torch.distributed.tensor.parallel.ColwiseParallel",
        "output_layouts": {"_target_": "torch.distributed.tensor.Shard", "dim": -1},
    },
    "layers.*.feed_forward.2": torch_styles.RowwiseParallel(),
    "output": ColWiseParallel(),
}
parity_case("titan", "titan_mp2", Titan, titan_plan(False), 1, 2)
parity_case("titan", "titan_loss_parallel", Titan, titan_plan(True), 1, 2)
parity_case("titan", "titan_tied", lambda: Titan(True), titan_plan(True), 1, 2)
parity_case("titan", "titan_mixed_with_ours", Titan, MIXED_STYLES, 1, 2)
parity_case("titan4", "titan_dp2_mp2_level3", Titan, titan_plan(True), 2, 2, level=3)
parity_case("titan4", "titan_dp2_mp2_level0", Titan, titan_plan(False), 2, 2)
GROUPS["two"].update(GROUPS.pop("titan"))
GROUPS["four"].update(GROUPS.pop("titan4"))


@cases("two")
def same_as_torch_parallelize_module() -> None:
    """The titan plan through torch's own function, by hand, and through ours: equal after a step."""
    torch.manual_seed(3)
    by_hand = Titan()
    model = copy.deepcopy(by_hand)
    parallelize(model, None, mesh_of(1, 2), plan_of(titan_plan(False)))
    mesh = model.output.weight.device_mesh
    plan = titan_plan(False)
    wide = {key.replace("w(q|k|v)", f"w{name}"): value for key, value in plan.items() for name in "qkv"}
    wide.update({key: wide.pop("norm|layers.*.(attention|ffn)_norm") for key in ("norm",)})
    wide["layers.*.attention_norm"] = wide["layers.*.ffn_norm"] = wide["norm"]
    torch_styles.parallelize_module(by_hand, mesh, wide)
    tokens = batches(1)[0]
    for item in (by_hand, model):
        F.cross_entropy(item(tokens).flatten(0, 1), tokens.flatten()).backward()
    for (name, mine), theirs in zip(model.named_parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(full(mine.grad), full(theirs.grad), msg=lambda m, n=name: f"{n}: {m}")


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    if WORLD > 1:
        dist.init_process_group("gloo")
    serve(GROUPS)
