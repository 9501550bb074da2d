"""Running a part of a model through the model's own forward.

Every stage runs the whole `forward` of the model on the original inputs. Units that belong to other stages return what
they returned there: the values that arrived from the stage before, or, where nothing needs them, placeholders of the
same shape. The first unit call behind the stage ends the forward. So masks, positions and rotary tables between units
are computed by the model's own code on every stage.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.pipeline.cut import Cutting
from autolaunch_strategies.pipeline.record import Leaf, Shown
from autolaunch_strategies.pipeline.structure import Structure
from autolaunch_strategies.pipeline.transfer import Axes, LeafMeta, Metas, closed
from autolaunch_strategies.torch_private.backward import version_of
from autolaunch_strategies.torch_private.calls import intercept_calls, intercepted, run_call, show_output
from autolaunch_strategies.torch_private.trees import flattened, unflattened


class _Leave(BaseException):
    """Ends the forward of a model behind the last unit call of a stage. No Exception: user code must not catch it."""


@dataclass
class Pass:
    """One run of the model's forward on behalf of some of its unit calls."""

    structure: Structure
    first: int
    last: int
    """The unit calls that run; those before them return what is known of them, those behind them end the forward."""
    carry: tuple[Leaf, ...]
    """What is wanted of it."""
    known: dict[Leaf, torch.Tensor]
    """Values of earlier leaves."""
    metas: list[tuple[LeafMeta, ...]]
    """Of the unit calls before `first`; grows by those that run."""
    stop_at_once: bool = False
    """End the forward right behind the last call, not at the next one."""
    position: int = 0
    inside: bool = False
    versions: dict[Leaf, int] = field(default_factory=dict)
    blanks: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict)


class StagedModel:
    """A model whose unit calls can be run stage by stage."""

    def __init__(
        self,
        model: nn.Module,
        cutting: Cutting,
        stages: tuple[int, ...],
        axes: Axes,
        device: torch.device,
    ) -> None:
        """Take over the calls of the units of `model`.

        Args:
            stages: those that this rank holds.
            axes: over which leaves may be sharded.
        """
        self.model, self.cutting, self.stages, self.axes, self.device = model, cutting, stages, axes, device
        self._pass: Pass | None = None
        homes = cutting.unit_stages()
        for unit in cutting.units:
            module = model.get_submodule(unit)
            held = any(stage in stages for stage in homes[unit])
            intercept_calls(module, self._unit(unit, module, held, intercepted(module)))

    @property
    def running(self) -> bool:
        """Whether a pass is on its way: calls of the model are then the model's own."""
        return self._pass is not None

    def run(self, todo: Pass, args: Any, kwargs: Mapping[str, Any], call: Callable[..., Any]) -> Any:
        """Run the forward for the unit calls of `todo`; its `known` and `metas` grow by what they return.

        Args:
            call: what a call of the model does.

        Returns:
            The model's output, or None if the forward ended behind the last unit call.
        """
        assert self._pass is None, "one pass at a time"
        self._pass = todo
        try:
            output = call(*args, **kwargs)
        except _Leave:
            output = None
        finally:
            self._pass = None
        if todo.position <= todo.last:
            expected = todo.structure.recording.calls[todo.position].unit
            raise RuntimeError(
                f"pp: the forward of the model ended without calling {expected}, as it did when recorded"
            )
        for leaf in todo.carry:
            version = version_of(todo.known[leaf])
            if version != todo.versions.get(leaf, version):
                unit = todo.structure.recording.calls[leaf.call].unit
                raise RuntimeError(f"pp: the output of {unit} was changed in place before it could be sent on")
        return output

    def _unit(
        self, name: str, module: nn.Module, held: bool, own_call: Callable[..., Any] | None
    ) -> Callable[..., Any]:
        run = partial(run_call, module) if own_call is None else own_call

        def call(*args: Any, **kwargs: Any) -> Any:
            todo = self._pass
            if todo is None or todo.inside:
                if not held:
                    homes = self.cutting.unit_stages()[name]
                    raise RuntimeError(
                        f"pp: {self.cutting.name}{name} is held by stage {homes[0]} and can't run here; "
                        "call the whole model"
                    )
                return run(*args, **kwargs)
            number = todo.position
            calls = todo.structure.recording.calls
            if number >= len(calls) or calls[number].unit != name:
                expected = calls[number].unit if number < len(calls) else "the end of the forward"
                raise RuntimeError(
                    f"pp: the model calls {name} where {expected} was recorded; its parts must run in one order"
                )
            if number > todo.last:
                raise _Leave
            todo.position += 1
            if number < todo.first:
                return self._returned_elsewhere(todo, number, args, kwargs)
            shown: dict[tuple[str, int], Any] = {}
            todo.inside = True
            try:
                if not calls[number].shown:
                    output = run(*args, **kwargs)
                else:
                    with self._watching(calls[number].shown, shown):
                        output = run(*args, **kwargs)
            finally:
                todo.inside = False
            output = self._keep(todo, number, output, shown)
            if number == todo.last and todo.stop_at_once:
                raise _Leave
            return output

        return call

    def _keep(self, todo: Pass, number: int, output: Any, shown: dict[tuple[str, int], Any]) -> Any:
        recorded = todo.structure.recording.calls[number]
        leaves, spec = flattened(output)
        stepped_over = todo.structure.recording.untraceable
        if stepped_over and spec != recorded.spec:
            part, reason = next(iter(stepped_over.items()))
            raise ConfigError(
                "pp",
                f"{recorded.unit} returns something else than was concluded from shapes, on which {part} can't run "
                f"({reason}), so other stages can't go on with it",
                "a model whose parts run on shapes alone, or a mesh with pp of size 1",
            )
        leaves = list(map(closed, leaves))
        handed_on = list(leaves)
        for item in recorded.shown:
            leaves += [None] * (item.first - len(leaves))
            leaves += [closed(leaf) for leaf in tree_flatten(shown[item.module, item.turn])[0]]
        todo.metas.append(tuple(map(LeafMeta.of, leaves)))
        copied = {place for place in recorded.changed if place < len(handed_on)} if recorded.changed else ()
        for place in copied:
            handed_on[place] = leaves[place].clone()
        for leaf in todo.carry:
            if leaf.call == number:
                todo.known[leaf] = value = leaves[leaf.place]
                if leaf.place not in copied:
                    todo.versions[leaf] = version_of(value)
        return unflattened(handed_on, spec)

    @contextmanager
    def _watching(self, wanted: list[Shown], noted: dict[tuple[str, int], Any]) -> Iterator[None]:
        """Within it outputs of modules are noted that hooks are shown, by (module, turn)."""
        turns: dict[str, int] = {}

        def hook_of(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                turns[name] = turns.get(name, -1) + 1
                noted[name, turns[name]] = output

            return hook

        names = {item.module for item in wanted}
        handles = [self.model.get_submodule(name).register_forward_hook(hook_of(name)) for name in names]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _returned_elsewhere(self, todo: Pass, number: int, args: Any, kwargs: Any) -> Any:
        recorded = todo.structure.recording.calls[number]
        leaves: list[Any] = []
        for place, meta in enumerate(todo.metas[number]):
            value: Any = meta.constant
            if place in recorded.objects:
                value = copy.copy(recorded.objects[place])
            elif meta.dtype is not None:
                value = todo.known.get(Leaf(number, place))
                if value is None:
                    value = self._blank(todo, meta)
                elif place in recorded.changed:
                    value = value.clone()
            leaves.append(value)
        for item in recorded.shown:
            of_unit = item.module == recorded.unit
            output = tree_unflatten([leaves[place] for place in item.places], item.spec)
            module = self.model.get_submodule(item.module)
            show_output(module, args if of_unit else (), kwargs if of_unit else {}, output)
        return unflattened(leaves[: recorded.spec.num_leaves], recorded.spec)

    def _blank(self, todo: Pass, meta: LeafMeta) -> torch.Tensor:
        """A tensor that nothing needs. If something did after all, its result would be NaN, not slightly wrong."""
        assert meta.dtype is not None
        key = (meta.shape, meta.dtype, meta.placements, meta.sequence)
        if key not in todo.blanks:
            fill = float("nan") if meta.dtype.is_floating_point else 0
            local = torch.full(meta.local_shape(self.axes), fill, dtype=meta.dtype, device=self.device)
            todo.blanks[key] = meta.wrapped(local, self.axes)
        return todo.blanks[key]


def pass_of(
    structure: Structure, stage: int, known: dict[Leaf, torch.Tensor], metas: Metas, stop_at_once: bool = False
) -> Pass:
    """The pass of one stage on what arrived from the one before (nothing for the first)."""
    first, last = structure.calls_of(stage)
    return Pass(structure, first, last, structure.carries[stage], known, list(metas), stop_at_once)


def tail_of(structure: Structure, known: dict[Leaf, torch.Tensor], metas: Metas) -> Pass:
    """The pass behind the last unit call, on what it needs."""
    calls = len(structure.recording.calls)
    return Pass(structure, calls, calls - 1, (), known, list(metas))
