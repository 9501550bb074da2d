"""A call of the model on shapes alone: in the number formats of the run, as the device would run it, on a tape."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from autolaunch_strategies.experts.find import Mixture, countable_mixtures
from autolaunch_strategies.model.example_inputs import BATCH, POSITIONS, ExampleInputs
from autolaunch_strategies.planner.device_functions import functions_of
from autolaunch_strategies.planner.operators import Tape
from autolaunch_strategies.planner.subject import ParameterSharding, Subject
from autolaunch_strategies.torch_private.tracing import RESULTS_OF_FAKES
from autolaunch_strategies.tracing.recorder import Recorder, parts_intercepted
from autolaunch_strategies.tracing.shapes import fake_inputs, fake_like, on_shapes_alone
from autolaunch_strategies.tracing.tensors import tensors_in

Loss = Callable[[Any], torch.Tensor]

PRECISIONS: dict[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    "32-true": (None, None),
    "64-true": (torch.float64, None),
    "bf16-true": (torch.bfloat16, None),
    "16-true": (torch.float16, None),
    "bf16-mixed": (None, torch.bfloat16),
    "16-mixed": (None, torch.float16),
}
"""Lightning's names -> (type of parameters, None for their own; type of autocast)."""


@dataclass(frozen=True)
class ModelCall:
    """What is called, and how."""

    subject: Subject
    sharding: ParameterSharding
    precision: str
    param_dtype: torch.dtype | None
    """Of gathered parameters."""
    device_type: str
    loss: Loss | None
    is_step: bool = False
    """Whether what is called is a training step, which may ask for values."""

    @contextmanager
    def on(
        self,
        tape: Tape,
        args: Any,
        kwargs: Any,
        block: Callable[[str, nn.Module, Any, Mapping[str, Any]], Any],
        unused: Collection[str] = (),
    ) -> Iterator[Callable[[], Any]]:
        """Within it everything that runs is on `tape`; gives the call of the model.

        Args:
            args, kwargs: what the model is called with.
            block: what the call of a block returns, see `parts_intercepted`.
            unused: blocks that are not run: nothing stands for parameters that they alone have.
        """
        model = self.subject.model
        dtype, autocast = PRECISIONS[self.precision]
        recorder = Recorder(model, [tape], RESULTS_OF_FAKES, answers=self.is_step)
        with ExitStack() as stack:
            stack.enter_context(on_shapes_alone())
            state = self._state(tape, unused)
            fake_args, fake_kwargs = fake_inputs(args, kwargs, dtype)
            stack.enter_context(_experts_seen([item.module for item in self._mixtures], tape))
            stack.enter_context(parts_intercepted(self.subject.blocks, block))
            stack.enter_context(_default_dtype(dtype))
            stack.enter_context(functions_of(self.device_type, tape, autocast))
            stack.enter_context(recorder.watching())
            yield lambda: recorder.call(state, fake_args, fake_kwargs)

    # Found once for a model as it is: going through a large one takes milliseconds each time.

    @cached_property
    def _mixtures(self) -> list[Mixture]:
        return countable_mixtures(self.subject.model)

    @cached_property
    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter); of one that has several names each."""
        return list(self.subject.model.named_parameters(remove_duplicate=False))

    @cached_property
    def _buffers(self) -> list[tuple[str, torch.Tensor, bool]]:
        """(name, buffer, whether it is saved)."""
        model = self.subject.model
        unsaved = {
            id(buffer)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if name in module._non_persistent_buffers_set
        }
        return [(name, buffer, id(buffer) not in unsaved) for name, buffer in model.named_buffers()]

    def _state(self, tape: Tape, unused: Collection[str]) -> dict[str, torch.Tensor]:
        """Parameters and buffers of the model, in the types of the run."""
        run_dtype = PRECISIONS[self.precision][0]
        state: dict[str, torch.Tensor] = {}
        blocks = tuple(f"{name}." for name in unused)
        used = {id(item) for name, item in self._parameters if not (blocks and name.startswith(blocks))}
        first_names = {id(item): name for name, item in reversed(self._parameters)}
        for name, parameter in self._parameters:
            if id(parameter) not in used or first_names[id(parameter)] != name:
                continue
            dtype = self.param_dtype or run_dtype
            state[name] = fake_like(parameter, dtype if parameter.is_floating_point() else None)
        for name, buffer, is_saved in self._buffers:
            converted = run_dtype is not None and buffer.is_floating_point() and is_saved
            state[name] = fake_like(buffer, (self.param_dtype or run_dtype) if converted else None)
        for name, tensor in state.items():
            tape.add_state(name, tensor, self.sharding.dims.get(name))
        return state


@contextmanager
def _experts_seen(modules: Iterable[nn.Module], tape: Tape) -> Iterator[None]:
    """Within it the tape knows when one of `modules` runs."""

    def begin(*_: Any) -> None:
        tape.in_experts = True

    def end(*_: Any) -> None:
        tape.in_experts = False

    def ended(_: nn.Module, inputs: Any, output: Any) -> None:
        end()
        for tensors, passes in ((tensors_in(output), begin), (tensors_in(inputs), end)):  # of the backward pass
            for tensor in tensors:
                if tensor.requires_grad:
                    tensor.register_hook(passes)

    hooks = [
        hook
        for module in modules
        for hook in (module.register_forward_pre_hook(begin), module.register_forward_hook(ended, always_call=True))
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def sized_inputs(inputs: ExampleInputs, batch: int, positions: int | None) -> tuple[Any, Any, int]:
    """(args, kwargs, positions of a sequence) with another batch and length than the example's.

    Dims of the size of the example's batch come first; the second dim of tokens [b, s], and of features [b, s, h] that
    were made up, is the sequence.
    """
    sized = [leaf for leaf in tensors_in((inputs.args, dict(inputs.kwargs))) if leaf.dim() > 0]
    before = sized[0].shape[0] if sized else BATCH
    lengths = [
        leaf.shape[1]
        for leaf in sized
        if (leaf.dim() == 2 and not leaf.is_floating_point())
        or (leaf.dim() == 3 and inputs.is_guess and leaf.shape[1] == POSITIONS)
    ]
    length = lengths[0] if lengths else None

    def changed(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            return leaf
        shape = list(leaf.shape)
        if shape[0] == before:
            shape[0] = batch
        if positions and length and leaf.dim() > 1:
            shape[1:] = [positions if size == length and place < 3 else size for place, size in enumerate(shape[1:], 1)]
        return torch.empty(shape, dtype=leaf.dtype, device="meta")

    args, kwargs = tree_map(changed, (inputs.args, dict(inputs.kwargs)))
    return args, kwargs, (positions or length or 1) if length else 1
