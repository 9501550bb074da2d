"""Cases for the tests of `parallelize` with a pipeline.

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

from autolaunch_strategies import ProcessMesh, SplitPoint, clip_grad_norm_, items_per_rank, parallelize
from tests.loop.cases import PADDLE_SEQUENCE, RANK, START, TENSOR, assert_same_weights, batches, full, llama
from tests.support.cases import serve

GROUPS: dict[str, dict[str, Callable[[], Any]]] = {}


def case(group: str, function: Callable[[], Any], name: str = "") -> None:
    GROUPS.setdefault(group, {})[name or function.__name__] = function


def cases(group: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        case(group, function)
        return function

    return add


def mesh_of(dp: int = 1, mp: int = 1, pp: int = 1, order: tuple[str, ...] = ("dp", "mp", "pp")) -> ProcessMesh:
    """By default pp is the innermost axis, as in Paddle's examples."""
    sizes = {"dp": dp, "mp": mp, "pp": pp}
    return ProcessMesh(torch.arange(dp * mp * pp).view([sizes[axis] for axis in order]).tolist(), list(order))


def token_loss(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tokens: F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())


@torch.no_grad()
def evaluated(model: nn.Module, tokens: torch.Tensor) -> float:
    loss = token_loss(model.eval())(tokens[:3]).item()
    model.train()
    return loss


def train_alone(model: nn.Module, optimizer: Any, data: list[torch.Tensor], parts: int) -> list[list[float]]:
    """[sum of losses, norm of all gradients, an evaluation] of every step, each of `parts` backward passes."""
    told, step = [], token_loss(model)
    for tokens in data:
        total = 0.0
        for part in tokens.chunk(parts):
            loss = step(part)
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        told.append([total, norm.item(), evaluated(model, tokens)])
    return told


def train_in_stages(
    model: Any, optimizer: Any, data: list[torch.Tensor], parts: int, mesh: ProcessMesh
) -> list[list[float]]:
    told, step = [], token_loss(model)
    dp, place = mesh.axis_size("dp"), mesh.coordinate(RANK)["dp"]
    parameters = {id(item) for item in model.parameters()}
    for tokens in data:
        total = torch.zeros(())
        for part in tokens.chunk(parts):
            loss = model.forward_backward(step, part.chunk(dp)[place])
            assert loss.shape == () and loss.dtype == torch.float32 and not loss.requires_grad
            total += loss
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        told.append([total.item() / mesh.size, norm.item(), evaluated(model, tokens)])
        assert {id(item) for item in model.parameters()} == parameters, "something gathered was not freed"
    return told


def label_means(dp: int, pp: int, level: int, parts: int, **pp_config: Any) -> None:
    """The mean over all labels of a step, of which a whole accumulated batch, and one rank in another, has none."""
    torch.manual_seed(3)
    reference, mesh = llama(), mesh_of(dp, 1, pp)
    START.clear()
    START.update({name: parameter.detach().clone() for name, parameter in reference.named_parameters()})
    model, data = copy.deepcopy(reference), []
    for tokens in batches(3):
        labels = tokens.roll(-1, 1)
        labels[: len(labels) // 4 * 3] = -100
        for row, length in enumerate(range(0, 12, 3)):
            labels[row - 4, :length] = -100
        data.append((tokens, labels))
    data.append((data[0][0], torch.full_like(data[0][0], -100)))

    def train(model: Any, optimizer: Any, backward: Callable[..., torch.Tensor], clip: Any, dp: int, place: int) -> Any:
        told = []
        for tokens, labels in data:
            ours = [
                (x.chunk(dp)[place], y.chunk(dp)[place])
                for x, y in zip(tokens.chunk(parts), labels.chunk(parts), strict=True)
            ]
            items = items_per_rank(model, sum((y != -100).sum() for _, y in ours))
            total = torch.zeros(())
            for x, y in ours:
                total += backward(model, items, x, y)
            told.append([total.item(), clip(model.parameters(), 0.5).item()])
            optimizer.step()
            optimizer.zero_grad()
        return told

    def alone(model: Any, items: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / items
        loss.backward()
        return loss.detach()

    def staged(model: Any, items: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def step(part: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(part).flatten(0, 1), labels.flatten(), reduction="sum") / items
            return loss * len(x) / len(part)  # a schedule takes the mean over samples

        return model.forward_backward(step, x, y)

    expected = train(
        reference, torch.optim.SGD(reference.parameters(), 0.5, 0.5), alone, nn.utils.clip_grad_norm_, 1, 0
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.5, 0.5)
    config: dict[str, Any] = {"dp_config": {"sharding_level": level}}
    parallelize(model, optimizer, mesh, config | ({"pp_config": pp_config} if pp > 1 else {}))
    backward = staged if pp > 1 else alone
    told = torch.tensor(train(model, optimizer, backward, clip_grad_norm_, dp, mesh.coordinate(RANK)["dp"]))
    dist.all_reduce(told)
    torch.testing.assert_close((told / mesh.size).tolist(), expected, rtol=1e-5, atol=1e-5)
    assert_same_weights(model, reference, 1e-5)


def label_means_everywhere() -> None:
    label_means(4, 1, 0, 1)
    label_means(4, 1, 3, 2)
    label_means(2, 2, 2, 2)
    label_means(2, 2, 3, 2, loss="microbatch", schedule="1f1b", microbatches=2)


case("four", label_means_everywhere)


def parity(
    build: Callable[[], nn.Module],
    dp: int = 1,
    mp: int = 1,
    pp: int = 2,
    level: int = 0,
    plan: Any = None,
    order: tuple[str, ...] = ("dp", "mp", "pp"),
    parts: int = 1,
    tolerance: float = 1e-4,
    optimizer_first: bool = True,
    **pp_config: Any,
) -> None:
    torch.manual_seed(3)
    reference = build()
    START.clear()
    START.update({name: parameter.detach().clone() for name, parameter in reference.named_parameters()})
    model, data, mesh = copy.deepcopy(reference), batches(3), mesh_of(dp, mp, pp, order)
    expected = train_alone(reference, torch.optim.AdamW(reference.parameters(), 1e-2), data, parts)
    config: dict[str, Any] = {"dp_config": {"sharding_level": level}}
    if pp_config:
        config["pp_config"] = pp_config
    if plan:
        config["mp_config"] = {"parallelize_plan": plan}
    if optimizer_first:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        assert parallelize(model, optimizer, mesh, config) == (model, optimizer)
    else:
        parallelize(model, None, mesh, config)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    found = train_in_stages(model, optimizer, data, parts, mesh)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    assert_same_weights(model, reference, tolerance)
    everywhere: list[Any] = [None] * dist.get_world_size()
    mine = [name for name, _ in model.named_parameters()]
    dist.all_gather_object(everywhere, mine)
    assert {name for names in everywhere for name in names} == set(dict(reference.named_parameters()))
    assert all(len(names) < len(list(reference.parameters())) for names in everywhere)
    assert set(model.state_dict()) == set(mine) | ({"lm_head.weight"} & set(model.state_dict()))


def parity_case(group: str, name: str, build: Callable[[], nn.Module] = llama, **more: Any) -> None:
    case(group, lambda: parity(build, **more), name)


def layers(count: int, **more: Any) -> Callable[[], nn.Module]:
    return lambda: llama(num_layers=count, **more)


parity_case("two", "N9_pp2_3_layers", layers(3))
parity_case("two", "N9_pp2_4_layers", layers(4), optimizer_first=False)
parity_case("two", "N12_tied", layers(3, tie_embeddings=True), microbatches=2)
parity_case("two", "accumulation_tied", layers(3, tie_embeddings=True), parts=2)
parity_case("two", "1f1b", layers(4), loss="microbatch", schedule="1f1b", microbatches=4)
parity_case(
    "two", "1f1b_accumulation_tied", layers(4, tie_embeddings=True), loss="microbatch", schedule="1f1b", parts=2
)
parity_case("two", "zbv", layers(4), loss="microbatch", schedule="zbv_zero_bubble")
parity_case("two", "split_spec_prefix", layers(3), split_spec="model.layers")
parity_case("two", "split_spec_list", layers(4), split_spec=["model.layers.0", "model.layers.2"])
parity_case("two", "split_spec_points", layers(4), split_spec={"model.layers.1": SplitPoint.BEGINNING})
for level in (0, 3):
    tied = layers(3, tie_embeddings=level == 3)
    parity_case("four", f"dp2_pp2_level{level}", tied, dp=2, level=level, parts=2)
for level in (1, 2):
    by_schedule = {"loss": "microbatch", "schedule": "1f1b"}
    parity_case("four", f"dp2_pp2_level{level}_1f1b", layers(2), dp=2, level=level, parts=level, **by_schedule)
parity_case("four", "mp2_pp2", layers(2), mp=2, plan=TENSOR)
parity_case("four", "mp2_pp2_1f1b", layers(3), mp=2, plan=TENSOR, loss="microbatch", schedule="1f1b")
parity_case("four", "mp2_pp2_tied", layers(3, tie_embeddings=True), mp=2, plan=TENSOR, parts=2)
parity_case("four", "ranks_laid_out_otherwise", layers(2), dp=2, order=("pp", "dp"), level=1)
sequence = {"plan": PADDLE_SEQUENCE, "split_spec": "model.layers"}
parity_case("eight", "N10_dp2_mp2_pp2_level3", layers(4), dp=2, mp=2, level=3, **sequence)


# --- small models: what goes through the call ----------------------------------------------------------------------


class Chain(nn.Module):
    """Blocks that take a table of positions by keyword; returns what `answer` says."""

    def __init__(self, answer: str = "tensor", blocks: int = 4) -> None:
        super().__init__()
        self.answer = answer
        self.embed, self.positions = nn.Embedding(16, 8), nn.Embedding(32, 8)
        self.blocks = nn.ModuleList(ChainBlock() for _ in range(blocks))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        x, positions = self.embed(tokens), self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, positions=positions, mask=mask)
        output = self.head(x)
        if self.answer == "tuple":
            return output, x, None
        return {"logits": output, "last": x, "length": tokens.shape[1]} if self.answer == "dict" else output


class ChainBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(8, 8), nn.Dropout(0.0)

    def forward(self, x: torch.Tensor, *, positions: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        x = x + self.drop(torch.tanh(self.layer(x + positions)))
        return x if mask is None else x * mask[..., None]


def tokens_of(count: int = 8, length: int = 6) -> torch.Tensor:
    return torch.randint(0, 16, (count, length), generator=torch.Generator().manual_seed(1))


def built(build: Callable[[], nn.Module] = Chain, **pp_config: Any) -> tuple[nn.Module, Any]:
    """The same model twice: plain, and in two stages."""
    torch.manual_seed(0)
    reference = build()
    return reference, in_stages(copy.deepcopy(reference), **pp_config)


def in_stages(model: nn.Module, **pp_config: Any) -> Any:
    return parallelize(model, None, mesh_of(pp=2), {"pp_config": pp_config})[0]


def assert_same_gradients(model: nn.Module, reference: nn.Module) -> None:
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        one, other = parameter.grad, expected[name].grad
        assert (one is None) == (other is None), name
        if one is not None:
            torch.testing.assert_close(full(one), other, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def masked_mean(model: Any) -> Callable[..., torch.Tensor]:
    def step(tokens: torch.Tensor, *, mask: torch.Tensor, weight: float) -> torch.Tensor:
        losses = F.cross_entropy(model(tokens, mask=mask).transpose(1, 2), tokens, reduction="none")
        return weight * (losses * mask).sum() / mask.sum()

    return step


def contrastive(model: Any) -> Callable[..., torch.Tensor]:
    def step(tokens: torch.Tensor) -> torch.Tensor:
        vectors = F.normalize(model(tokens).mean(1), dim=-1)
        return F.cross_entropy(vectors @ vectors.T / 0.1, torch.arange(len(tokens)))

    return step


@cases("two")
def any_loss_is_exact() -> None:
    tokens = tokens_of()
    mask = (torch.arange(6) < torch.tensor([6, 1, 2, 6, 3, 1, 5, 4])[:, None]).float()
    for make, kwargs in ((masked_mean, {"mask": mask, "weight": 0.5}), (contrastive, {})):
        reference, model = built()
        expected = make(reference)(tokens, **kwargs)
        expected.backward()
        loss = model.forward_backward(make(model), tokens, **kwargs)
        torch.testing.assert_close(loss, expected.detach())
        assert_same_gradients(model, reference)


@cases("two")
def microbatches_of_one_sample_beside_a_table() -> None:
    """Batches that don't divide, with class weights: one sample is one, and as many samples as classes are samples."""
    rows = torch.linspace(0.5, 1.5, 16)
    reference, model = built(loss="microbatch", schedule="1f1b", microbatches=4)

    def weighted(of: nn.Module) -> Callable[..., torch.Tensor]:
        return lambda x, w: (F.cross_entropy(of(x).transpose(1, 2), x, reduction="none") * w[x]).mean()

    for count in (8, 7, 1, 16):
        tokens = tokens_of(count)
        expected = weighted(reference)(tokens, rows)
        expected.backward()
        loss = model.forward_backward(weighted(model), tokens, rows)
        torch.testing.assert_close(loss, expected.detach())
        assert_same_gradients(model, reference)


@cases("two")
def freezing_while_it_trains() -> None:
    """Parts of the first stage, and all of it, from one batch to the next, where everything was trained at first."""
    tokens = tokens_of()
    for pp_config in ({}, {"loss": "microbatch", "schedule": "1f1b", "microbatches": 4}):
        reference, model = built(**pp_config)
        for frozen in ((), ("embed", "blocks.0"), ("embed", "positions", "blocks.0", "blocks.1"), ("blocks.3",), ()):
            for each in (reference, model):
                each.zero_grad()
                for name, parameter in each.named_parameters():
                    parameter.requires_grad_(not name.startswith(frozen))
            F.cross_entropy(reference(tokens).flatten(0, 1), tokens.flatten()).backward()
            model.forward_backward(lambda x, m=model: F.cross_entropy(m(x).flatten(0, 1), x.flatten()), tokens)
            assert_same_gradients(model, reference)


@cases("two")
def inference_mode() -> None:
    tokens = tokens_of()
    reference, model = built()
    for _ in range(2):
        expected = reference(tokens)
        F.cross_entropy(expected.flatten(0, 1), tokens.flatten()).backward()
        model.forward_backward(lambda x: F.cross_entropy(model(x).flatten(0, 1), x.flatten()), tokens)
        for given in (tokens, tokens_of()):
            with torch.inference_mode():
                torch.testing.assert_close(model(given), expected.detach())
    assert_same_gradients(model, reference)


@cases("two")
def global_spec() -> None:
    """Modules that run on every stage: their parameters are held, and trained alike, by both."""
    tokens = tokens_of()
    for pp_config in ({"global_spec": "positions"}, {"global_spec": ["positions"], "split_spec": "blocks"}):
        reference, model = built(**pp_config)
        for _ in range(2):
            F.cross_entropy(reference(tokens).flatten(0, 1), tokens.flatten()).backward()
            model.forward_backward(lambda x, m=model: F.cross_entropy(m(x).flatten(0, 1), x.flatten()), tokens)
        assert "positions.weight" in dict(model.named_parameters())
        assert_same_gradients(model, reference)


@cases("two")
def forward_alone() -> dict[str, str]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens, told = tokens_of(), {}
    for answer in ("tensor", "tuple", "dict", "ModelOutput"):
        reference, model = built(
            lambda kind=answer: (
                LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes)) if kind == "ModelOutput" else Chain(kind)
            )
        )
        for gradients in (True, False):
            with torch.set_grad_enabled(gradients):
                for training in (True, False):
                    expected, output = reference.train(training)(tokens), model.train(training)(tokens)
                    assert type(output) is type(expected)
                    torch.testing.assert_close(logits_of(output).detach(), logits_of(expected).detach())
                    assert logits_of(output).requires_grad == gradients
        assert answer != "tuple" or output[2] is None
        assert answer != "dict" or output["length"] == 6
        model.eval()
        try:
            F.cross_entropy(logits_of(model(tokens)).flatten(0, 1), tokens.flatten()).backward()
        except RuntimeError as error:
            told[answer] = str(error)
    return told


def logits_of(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0] if isinstance(output, tuple) else output["logits"]


@cases("two")
def random_numbers_stay_in_step() -> None:
    model: Any = Chain()
    for block in model.blocks:
        block.drop.p = 0.5
    torch.manual_seed(RANK)
    in_stages(model)
    assert_same_everywhere(torch.rand(3))
    tokens = tokens_of()
    losses = [
        model.forward_backward(lambda x: model(x).pow(2).mean() + 0 * torch.rand(()), tokens).item() for _ in range(3)
    ]
    assert len(set(losses)) == 3, "dropout draws the same numbers in every step"
    assert_same_everywhere(torch.rand(3))


def assert_same_everywhere(tensor: torch.Tensor) -> None:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    assert all(torch.equal(part, tensor) for part in parts)


@cases("two")
def another_model_in_the_step() -> str:
    """A teacher that is cut, too, runs forward in front of the student's call, and not behind it."""
    tokens = tokens_of()
    teacher, cut_teacher = built(lambda: Chain("dict"))
    reference, model = built()

    def step(student: Any, other: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def distance(x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                target = other(x)["last"].mean(-1, keepdim=True)
            return (student(x) - target).square().mean()

        return distance

    step(reference, teacher)(tokens).backward()
    model.forward_backward(step(model, cut_teacher), tokens)
    assert_same_gradients(model, reference)
    return message(lambda: model.forward_backward(lambda x: (model(x) - cut_teacher(x)["logits"]).sum(), tokens))


@cases("two")
def autocast() -> None:
    tokens = tokens_of()
    for pp_config in ({}, {"loss": "microbatch", "schedule": "1f1b"}):
        reference, model = built(**pp_config)
        with torch.autocast("cpu", torch.bfloat16):
            expected = F.cross_entropy(reference(tokens).flatten(0, 1), tokens.flatten())
            loss = model.forward_backward(lambda x, m=model: F.cross_entropy(m(x).flatten(0, 1), x.flatten()), tokens)
        expected.backward()
        assert logits_of(model(tokens)).dtype == torch.float32
        torch.testing.assert_close(loss, expected.detach(), rtol=2e-2, atol=2e-2)
        gradients = dict(reference.named_parameters())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                parameter.grad, gradients[name].grad, rtol=5e-2, atol=5e-3, msg=lambda m, n=name: f"{n}: {m}"
            )


# --- optimizers ----------------------------------------------------------------------------------------------------


def by_group(model: Any) -> list[dict[str, Any]]:
    norms = [item for name, item in model.named_parameters() if "norm" in name]
    others = [item for name, item in model.named_parameters() if "norm" not in name and "lm_head" not in name]
    return [
        {"params": others, "weight_decay": 0.3, "name": "decayed"},
        {"params": norms, "lr": 3e-3},
        {"params": [model.lm_head.weight], "lr": 1e-3, "betas": (0.8, 0.9)},
    ]


@cases("two")
def optimizer_keeps_groups_state_and_scheduler() -> None:
    torch.manual_seed(3)
    reference = llama(num_layers=3)
    reference.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    data = batches(4)
    model: Any = copy.deepcopy(reference)
    optimizers, schedulers = [], []
    for item in (reference, model):
        optimizer = torch.optim.AdamW(by_group(item), lr=1e-2)
        optimizers.append(optimizer)
        schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        train_alone(item, optimizer, data[:1], 1)
    parallelize(model, optimizers[1], mesh_of(pp=2), {"pp_config": {}})
    groups, mine = optimizers[1].param_groups, dict(model.named_parameters())
    assert groups[0]["name"] == "decayed" and groups[0]["weight_decay"] == 0.3 and groups[2]["betas"] == (0.8, 0.9)
    assert [item for group in groups for item in group["params"]] and len(optimizers[1].state) == len(mine) - (
        "model.layers.0.mlp.up_proj.weight" in mine
    )
    assert {id(item) for group in groups for item in group["params"]} == {id(item) for item in mine.values()}
    assert len(groups[2]["params"]) == ("lm_head.weight" in mine), "a group without parameters stays where it is"
    for tokens in data[1:]:
        train_alone(reference, optimizers[0], [tokens], 1)
        train_in_stages(model, optimizers[1], [tokens], 1, mesh_of(pp=2))
        for scheduler in schedulers:
            scheduler.step()
        state = optimizers[1].state_dict()
        optimizers[1].state.clear()
        optimizers[1].load_state_dict(state)
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    assert rates[0] == rates[1] == [1e-2 / 8, 3e-3 / 8, 1e-3 / 8]
    expected = dict(reference.named_parameters())
    for name, parameter in mine.items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
        assert parameter.requires_grad == expected[name].requires_grad


@cases("two")
def clipping_together_with_a_module_outside() -> None:
    """One norm over all stages and what only the last one, where the loss is, has gradients of."""
    tokens = tokens_of()
    reference, model = built()
    heads = [nn.Linear(16, 3), nn.Linear(16, 3)]
    heads[1].load_state_dict(heads[0].state_dict())
    F.cross_entropy(heads[0](reference(tokens)).mean(1), tokens[:, 0] % 3).backward()
    model.forward_backward(lambda x: F.cross_entropy(heads[1](model(x)).mean(1), x[:, 0] % 3), tokens)
    for kind in (2.0, float("inf")):
        expected = nn.utils.clip_grad_norm_([*reference.parameters(), *heads[0].parameters()], 0.1, kind)
        norm = clip_grad_norm_([*model.parameters(), *heads[1].parameters()], 0.1, kind)
        torch.testing.assert_close(norm, expected)
        assert_same_gradients(model, reference)
    # Only one stage holds anything of this; the other takes part without a parameter.
    expected = nn.utils.clip_grad_norm_(reference.blocks[0].parameters(), 1.0)
    torch.testing.assert_close(clip_grad_norm_(model.blocks[0].parameters(), 1.0), expected)


@cases("two")
def one_loop_for_a_mesh_without_stages() -> None:
    """With an axis pp of one rank the call is there, too."""
    for level in (0, 1):
        torch.manual_seed(3)
        reference = llama()
        model, data, mesh = copy.deepcopy(reference), batches(2), mesh_of(dp=2)
        expected = train_alone(reference, torch.optim.AdamW(reference.parameters(), 1e-2), data, 2)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        parallelize(
            model, optimizer, mesh, {"dp_config": {"sharding_level": level}, "pp_config": {"schedule": "gpipe"}}
        )
        found = train_in_stages(model, optimizer, data, 2, mesh)
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-5)


# --- what can't work ------------------------------------------------------------------------------------------------


def message(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@cases("two")
def refusals() -> dict[str, str]:
    """Whatever was refused, the next batch is trained on as if nothing had been."""
    tokens = tokens_of()
    reference, model = built()
    microbatched = built(loss="microbatch", schedule="1f1b")[1]

    def train(step: Any, *batch: Any) -> Callable[[], Any]:
        return lambda: model.forward_backward(step, *batch)

    def without_gradients() -> None:
        with torch.no_grad():
            model.forward_backward(lambda x: model(x).sum(), tokens)

    told = {
        "no call": message(train(lambda x: x.float().sum(), tokens)),
        "inner call": message(train(lambda x: model.forward(x).sum(), tokens)),
        "two calls": message(train(lambda x: model(x).sum() + model(x).sum(), tokens)),
        "no loss": message(train(lambda x: model(x), tokens)),
        "a number": message(train(lambda x: model(x).sum().item(), tokens)),
        "no graph": message(train(lambda x: model(x).detach().sum(), tokens)),
        "error behind the call": message(train(lambda x: model(x).sum() / len(["a"][1]), tokens)),
        "penalty": message(train(lambda x: model(x).sum() + sum(p.sum() for p in model.parameters()), tokens)),
        "no_grad": message(without_gradients),
        "no batch": message(lambda: microbatched.forward_backward(lambda: microbatched(tokens).sum())),
        # A loss of 0.2547117, whose first six digits are those on any processor.
        "another objective": message(lambda: microbatched.forward_backward(contrastive(microbatched), tokens[:, :3])),
        "part": message(lambda: model.blocks[3 * RANK](torch.ones(1, 6, 8), positions=torch.ones(6, 8), mask=None)),
        "own name": message(lambda: in_stages(WithOwnName())),
        "too few": message(lambda: in_stages(Chain(blocks=1), split_spec="blocks")),
        "no match": message(lambda: in_stages(Chain(), split_spec="layers")),
        "no global": message(lambda: in_stages(Chain(), global_spec="position")),
    }
    for item in (reference, model):
        item.zero_grad()
    F.cross_entropy(reference(tokens).flatten(0, 1), tokens.flatten()).backward()
    model.forward_backward(lambda x: F.cross_entropy(model(x).flatten(0, 1), x.flatten()), tokens)
    assert_same_gradients(model, reference)
    return told


@cases("two")
def refusals_by_schedule() -> dict[str, str]:
    """The same of single microbatches: every stage is told, and the next batch is trained on."""
    tokens, told = tokens_of(), {}
    for schedule in ("1f1b", "zbv_zero_bubble"):
        reference, model = built(loss="microbatch", schedule=schedule, microbatches=4)
        third = [0]

        def fails_late(x: Any, model: Any = model, third: list[int] = third) -> Any:
            logits = model(x)
            third[0] += 1
            return logits.sum() * (1 / (3 - third[0]))

        for name, step in {
            "no loss": lambda x, model=model: model(x),
            "two calls": lambda x, model=model: model(x).sum() + model(x).sum(),
            "no graph": lambda x, model=model: model(x).detach().sum(),
            "error behind the call": fails_late,
        }.items():
            told[f"{name} {schedule}"] = message(lambda step=step, model=model: model.forward_backward(step, tokens))
        for parameter in model.parameters():
            assert parameter.grad is None
        F.cross_entropy(reference(tokens).flatten(0, 1), tokens.flatten()).backward()
        model.forward_backward(lambda x, model=model: F.cross_entropy(model(x).flatten(0, 1), x.flatten()), tokens)
        assert_same_gradients(model, reference)
    return told


@cases("two")
def refused_batch_leaves_earlier_gradients() -> None:
    """A loss that is refused behind its backward passes has added nothing to the gradients of earlier batches."""
    _, model = built(loss="microbatch", schedule="1f1b", microbatches=4)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert "pp.loss=microbatch" in message(lambda: model.forward_backward(contrastive(model), tokens_of()))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, torch.ones_like(parameter)), name


class WithOwnName(Chain):
    def forward_backward(self) -> None:
        """In the way."""


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    serve(GROUPS)
