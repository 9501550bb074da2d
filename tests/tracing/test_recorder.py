"""What observers of a forward pass on shapes alone are shown, and what is left behind: nothing."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autolaunch_strategies.torch_private.calls import intercepted, run_call
from autolaunch_strategies.tracing.recorder import Observer, Operation, Recorder, Untraceable, parts_intercepted
from autolaunch_strategies.tracing.shapes import fake_inputs, fake_like, fake_state, on_shapes_alone


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return self.linear(x).mul_(scale)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, scale=scale)
        return torch.cat([x, x]).detach()


class Log(Observer):
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.operations: list[Operation] = []

    def module_begins(self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        self.lines.append(f"{name} begins {[tuple(arg.shape) for arg in args]} {sorted(kwargs)}")

    def module_ends(self, name: str, module: nn.Module, output: Any) -> None:
        self.lines.append(f"{name} ends {tuple(output.shape)}")

    def operator(self, operation: Operation) -> None:
        self.lines.append(f"{type(operation.module).__name__}: {operation.name}")
        self.operations.append(operation)


def run(model: nn.Module, *args: Any, observers: int = 1, fakes: Any = None) -> list[Log]:
    logs = [Log() for _ in range(observers)]
    recorder = Recorder(model, logs, fakes)
    with on_shapes_alone():
        state = fake_state(model)
        fake_args, _ = fake_inputs(args, {})
        with torch.no_grad(), recorder.watching():
            recorder.call(state, fake_args, {})
    return logs


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_modules_and_operators_are_shown_in_order(device: str) -> None:
    model = Model().to(device)
    first, second = run(model, torch.ones(3, 4), torch.ones(4), observers=2)
    block = [
        "blocks.0 begins [(3, 4)] ['scale']",
        "blocks.0.linear begins [(3, 4)] []",
        "Linear: t",
        "Linear: mm",
        "blocks.0.linear ends (3, 4)",
        "Block: mul_",
        "blocks.0 ends (3, 4)",
    ]
    lines = [*block, *(line.replace("blocks.0", "blocks.1") for line in block), "Model: cat", "Model: detach"]
    assert first.lines == second.lines == lines


def test_what_an_operator_reads_returns_and_writes() -> None:
    (log,) = run(Model(), torch.ones(3, 4), torch.ones(4))
    mm, in_place, cat = (next(item for item in log.operations if item.name == name) for name in ("mm", "mul_", "cat"))
    assert [tuple(tensor.shape) for tensor in mm.inputs] == [(3, 4), (4, 4)]
    assert mm.outputs == [mm.output] and mm.written == []
    assert in_place.inputs[0] is in_place.written[0] is in_place.args[0] is mm.output
    assert len(cat.inputs) == 2, "tensors in lists count"


def test_operators_outside_of_the_call_are_shown_too() -> None:
    log, model = Log(), nn.Linear(4, 4)
    recorder = Recorder(model, [log])
    with on_shapes_alone():
        state = fake_state(model)
        with recorder.watching():
            output = recorder.call(state, (fake_like(torch.ones(3, 4)),), {})
            forward = len(log.lines)
            output.sum().backward()
    assert "Linear: sum" in log.lines[forward:] and "Linear: mm" in log.lines[forward:]


def test_a_fake_takes_the_place_of_an_operator() -> None:
    mm = torch.ops.aten.mm
    (log,) = run(Model(), torch.ones(3, 4), torch.ones(4), fakes={mm: lambda left, right: left.new_empty(7, 4)})
    assert tuple(log.operations[-1].output.shape) == (14, 4)


def test_nothing_is_left_behind() -> None:
    class Drawing(Model):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            random.random(), np.random.rand()
            return super().forward(x + torch.rand(()), scale)

    def states() -> tuple[Any, ...]:
        return torch.random.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())

    model = Drawing()
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    before = states()
    run(model, torch.ones(3, 4), torch.ones(4))
    assert states() == before
    assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert type(torch.ones(1)) is torch.Tensor


def test_whether_random_numbers_of_others_were_drawn() -> None:
    for draw, expected in ((random.random, True), (np.random.rand, True), (lambda: torch.rand(1), False)):
        with on_shapes_alone() as drew:
            assert not drew()
            draw()
            assert drew() == expected


def test_a_failure_says_within_which_module() -> None:
    with pytest.raises(Untraceable) as raised:
        run(Model(), torch.ones(3, 5), torch.ones(4))
    assert raised.value.inside == "blocks.0.linear" and isinstance(raised.value.error, RuntimeError)
    with pytest.raises(Untraceable) as raised:
        run(Model(), torch.ones(3, 4))
    assert raised.value.inside == "" and isinstance(raised.value.error, TypeError)


def test_inputs_keep_their_layout_and_may_change_their_type() -> None:
    tensor = torch.ones(3, 4, requires_grad=True).t()
    with on_shapes_alone():
        (floats, ids, flag), kwargs = fake_inputs((tensor, torch.ones(2, dtype=torch.long), True), {}, torch.bfloat16)
    assert (floats.stride(), floats.dtype, floats.requires_grad) == (tensor.stride(), torch.bfloat16, True)
    assert (ids.dtype, flag, kwargs) == (torch.long, True, {})


def test_parts_are_intercepted_but_not_within_another() -> None:
    model = Model()
    parts = {"block": model.blocks[0], "linear": model.blocks[0].linear}
    calls = []

    def handler(name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        calls.append((name, len(args), sorted(kwargs)))
        return run_call(module, *args, **kwargs) + 1

    x, scale = torch.ones(3, 4), torch.ones(4)
    expected = model.blocks[0](x, scale=scale) + 1
    with parts_intercepted(parts, handler):
        assert torch.equal(model.blocks[0](x, scale=scale), expected)
        with pytest.raises(RuntimeError):
            model.blocks[0](torch.ones(3, 5), scale=scale)
        model.blocks[0].linear(x)
    assert calls == [("block", 1, ["scale"]), ("block", 1, ["scale"]), ("linear", 1, [])]
    assert intercepted(model.blocks[0]) is None and intercepted(model.blocks[0].linear) is None
