"""Which stage of a pipeline runs and holds what: from a recorded forward pass and the places where to cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autolaunch_strategies.config import ConfigError, PipelineParallel, nearest
from autolaunch_strategies.model.blocks import Blocks
from autolaunch_strategies.model.example_inputs import ExampleInputs
from autolaunch_strategies.model.lightning_module import has_no_forward
from autolaunch_strategies.pipeline.absent import Absent
from autolaunch_strategies.pipeline.record import Recording, record
from autolaunch_strategies.pipeline.split import candidate_names, choose_cuts, split_call
from autolaunch_strategies.tracing.inputs import Steps, no_steps, with_inputs_that_run
from autolaunch_strategies.tracing.step import NotCalled, Step, arguments_in


@dataclass(frozen=True)
class StageCalls:
    """The unit calls `first` to `last` (both included) of a recorded forward pass."""

    first: int
    last: int


@dataclass
class Cutting:
    """How a model is cut: the same on every rank."""

    name: str
    """Of the pipelined model in the module that is trained, with a dot at its end; empty if it is that module."""
    units: list[str]
    """In the order of their first call; names in the pipelined model."""
    recording: Recording
    stages: list[StageCalls]
    holders: dict[str, tuple[int, ...]]
    """Parameter of the module that is trained -> the stages that hold it."""
    cuts: list[str]
    blocks: list[str]
    """Where it may be cut, in order of execution."""
    sizes: dict[str, int]
    """Parameter of the module that is trained -> its number of elements."""

    def unit_stages(self) -> dict[str, list[int]]:
        """Unit -> the stages that call it."""
        callers: dict[str, list[int]] = {}
        for number, stage in enumerate(self.stages):
            for call in self.recording.calls[stage.first : stage.last + 1]:
                if number not in callers.setdefault(call.unit, []):
                    callers[call.unit].append(number)
        return callers

    def account(self) -> list[dict[str, Any]]:
        """What each stage calls, holds and costs, as plain data for plan.yaml."""
        calls, costs = self.recording.calls, [_cost_of_calls(self.recording, stage) for stage in self.stages]
        total = sum(costs) or 1.0
        return [
            {
                "units": _ranges([call.unit for call in calls[stage.first : stage.last + 1]]),
                "share_of_work": round(cost / total, 4),
                "parameters": sum(size for name, size in self.sizes.items() if number in self.holders[name]),
            }
            for number, (stage, cost) in enumerate(zip(self.stages, costs, strict=True))
        ]


def pipelined_part(root: nn.Module, blocks: Blocks, pp: PipelineParallel) -> str:
    """The name in a LightningModule of what is cut: its child that holds the blocks, or "" for the module itself.

    Without blocks it is the one child that has parameters; of several models in a module that is none itself, the
    largest.
    """
    spec = pp.split_spec
    if spec is not None:
        named = [split_call(str(name))[0] for name in ([spec] if isinstance(spec, str) else spec)]
        children = {name.partition(".")[0] for name in named}
        known = {name for name, _ in root.named_children()}
        if len(children & known) == 1 and children <= known and not _is_list(getattr(root, next(iter(children)))):
            return next(iter(children))
        if not children & known:  # names inside of the one child that has parameters
            return _only_child(root)
        return ""
    parents = list(dict.fromkeys(block.name.rpartition(".")[0] for block in blocks))
    if not parents:
        return _only_child(root)
    holding = list(dict.fromkeys(name.partition(".")[0] for name in parents))
    if len(holding) > 1:  # a frozen teacher beside the model, say, is none of it
        holding = [child for child in holding if any(p.requires_grad for p in root.get_submodule(child).parameters())]
    if len(holding) > 1 and has_no_forward(root):
        # It is no model itself: its largest one is cut, and the others are whole on every stage.
        models = [child for child in holding if not _is_list(root.get_submodule(child))]
        return max(models, key=lambda child: _size(root.get_submodule(child)), default="")
    if len(holding) != 1:
        return ""
    child = holding[0]
    return "" if not child or (child in parents and _is_list(root.get_submodule(child))) else child


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def _only_child(root: nn.Module) -> str:
    children = [name for name, child in root.named_children() if next(child.parameters(), None) is not None]
    return children[0] if len(children) == 1 else ""


def find_units(model: nn.Module, candidates: Sequence[str], everywhere: Sequence[str]) -> list[str]:
    """The modules that stages hold as a whole: with parameters, outside of `everywhere`, as large as cuts allow.

    Args:
        candidates: modules that may be cut at; what contains one of them is no unit.
        everywhere: modules that run on every stage.
    """
    frames = {""} | {
        ".".join(parts[:depth])
        for parts in (name.split(".") for name in (*candidates, *everywhere))
        for depth in range(1, len(parts))
    }
    units: list[str] = []

    def visit(module: nn.Module, name: str) -> None:
        for key, child in module.named_children():
            child_name = f"{name}.{key}" if name else key
            if child_name in everywhere or next(child.parameters(), None) is None:
                continue
            if child_name in frames or _is_list(child):
                visit(child, child_name)
            else:
                units.append(child_name)

    visit(model, "")
    return units


def cut(
    root: nn.Module,
    blocks: Blocks,
    pp: PipelineParallel,
    stages: int,
    wrapped: bool = True,
    steps: Callable[[nn.Module], Steps] = no_steps,
) -> Cutting:
    """Decide how `root` (may be on meta) is cut into so many stages. Nothing is changed.

    Args:
        wrapped: whether `root` is a module around the model (a LightningModule), and not the model itself.
        steps: what `root` does with a part of it.

    Raises:
        ConfigError: the model can't be cut so, or its forward does not run on any inputs that are known.
    """
    part = pipelined_part(root, blocks, pp) if wrapped else ""
    model = root.get_submodule(part)
    prefix = f"{part}." if part else ""
    modules = [name for name, _ in model.named_modules() if name]
    block_names = [block.name.removeprefix(prefix) for block in blocks if block.name.startswith(prefix)]
    everywhere = _global_modules(pp.global_spec, modules, prefix)
    if not find_units(model, [], everywhere):
        outside = " outside of pp.global_spec" if everywhere else ""
        raise ConfigError(
            "pp",
            f"{type(model).__name__} has no parts with parameters{outside}, so there is nothing to share out",
            "a model of several modules, or a mesh with pp of size 1",
        )
    known, split = steps(model), pp.split
    if pp.split_spec is None and not block_names:
        block_names = _repeated(model, part, everywhere, known)
        if not block_names:
            block_names, split = _parts(model, everywhere, stages), "balanced"  # they are not alike
    candidates = candidate_names(pp.split_spec, modules, block_names, prefix=prefix)
    units = find_units(model, candidates, everywhere)
    recording = _recorded(model, part, units, known)
    _refuse_hidden_reads(recording)
    cuts = choose_cuts(
        pp.split_spec, recording.executed, modules, block_names, stages, split, _costs(recording), prefix=prefix
    )
    behind = _last_calls(recording, [(item.module, item.after) for item in cuts])
    ends = [*behind, len(recording.calls) - 1]
    starts = [0, *(end + 1 for end in behind)]
    ranges = [StageCalls(first, last) for first, last in zip(starts, ends, strict=True)]
    for number, stage in enumerate(ranges):
        if stage.last < stage.first:
            raise ConfigError(
                "pp.split_spec",
                f"stage {number} would be empty",
                "cuts with at least one module with parameters between them",
            )
    order = [call.unit for call in recording.calls]
    return Cutting(
        prefix,
        list(dict.fromkeys(order)),
        recording,
        ranges,
        _holders(root, prefix, model, units, recording, ranges),
        [f"{'behind' if item.after else 'before'} {item.module}" for item in cuts],
        [name for name in dict.fromkeys(order) if name in set(candidates)],
        {name: parameter.numel() for name, parameter in root.named_parameters()},
    )


def _repeated(model: nn.Module, part: str, everywhere: Sequence[str], steps: Steps) -> list[str]:
    """The outermost modules with parameters that are called several times: blocks that share their weights."""
    times = _recorded(model, part, find_units(model, [], everywhere), steps).times
    repeated: list[str] = []
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{other}.") for other in (*repeated, *everywhere))
        if times.get(name, 0) > 1 and not is_inside and next(module.parameters(), None) is not None:
            repeated.append(name)
    return repeated


def _parts(model: nn.Module, everywhere: Sequence[str], stages: int) -> list[str]:
    """The outermost parts of a model without repeated blocks; of large ones their parts, until there are enough."""
    parts = find_units(model, [], everywhere)
    while len(parts) < stages:
        sizes = {name: _size(model.get_submodule(name)) for name in parts}
        compound = [name for name in parts if _children_with_parameters(model.get_submodule(name))]
        if not compound:
            break
        largest = max(compound, key=sizes.__getitem__)
        inner = [f"{largest}.{child}" for child in _children_with_parameters(model.get_submodule(largest))]
        parts = find_units(model, [*(name for name in parts if name != largest), *inner], everywhere)
    return parts


def _children_with_parameters(module: nn.Module) -> list[str]:
    return [name for name, child in module.named_children() if next(child.parameters(), None) is not None]


def _global_modules(spec: Any, modules: Sequence[str], prefix: str) -> list[str]:
    named = [] if spec is None else [spec] if isinstance(spec, str) else list(spec)
    global_names = []
    for name in named:
        inner = str(name) if name in modules else str(name).removeprefix(prefix)
        if inner not in modules:
            close = nearest(inner, modules)
            raise ConfigError(
                f"pp.global_spec={name}",
                "no module of the model is called so" + (f"; did you mean {close}?" if close else ""),
                "names of modules, as a string or a list",
            )
        global_names.append(inner)
    return global_names


def _recorded(model: nn.Module, part: str, units: Sequence[str], steps: Steps) -> Recording:
    """The recorded forward pass of `model` on the first inputs on which it runs.

    Guessed ones that leave out some of its parameters (a text without its image) are second to the first batch.
    """
    partial: list[Recording] = []

    def attempt(inputs: ExampleInputs) -> Recording:
        recording = record(model, units, inputs.args, inputs.kwargs, inputs.origin)
        if not recording.calls:
            raise LookupError("calls none of its parts")
        for name, reason in recording.untraceable.items():
            if any(unit.startswith(f"{name}.") for unit in units):
                raise LookupError(f"{name} does not run on them: {reason}")
        used = recording.uses.keys() | recording.glue_uses.keys()
        unused = [name for name, _ in model.named_parameters() if name not in used]
        if inputs.is_guess and unused and steps.training is not None:
            partial.append(recording)
            raise LookupError(f"{unused[0]} is not used")
        return recording

    def attempt_step(step: Step) -> Recording:
        try:
            args, kwargs = arguments_in(step, model)
        except NotCalled as error:
            if step is steps.training and error.parts:
                raise _parts_by_themselves(model, part, step.origin, error.parts) from None
            raise
        return attempt(ExampleInputs(step.origin, args, kwargs, False))

    try:
        return with_inputs_that_run(
            model,
            steps.example,
            attempt,
            lambda problem: ConfigError(
                "pp",
                f"the order in which the parts of {type(model).__name__} run is not known: {problem}",
                f"`example_input_array` as an attribute of {type(model).__name__}: inputs with which its forward runs",
            ),
            steps,
            attempt_step,
        )
    except ConfigError:
        if not partial:
            raise
        return partial[0]


def _parts_by_themselves(model: nn.Module, part: str, origin: str, called: Sequence[str]) -> ConfigError:
    inside = [f"self.{part}.{name}" if part else f"self.{name}" for name in called]
    return ConfigError(
        f"pp with {type(model).__name__}",
        f"{origin} calls {', '.join(inside)} by themselves, and stages can run the one call of one module only",
        "a module whose forward calls all of them, as one attribute of the LightningModule that is called "
        "once in a step; or a mesh with pp of size 1",
        "" if part else "self.model = Model(); loss = f(self.model(x))",
    )


def _refuse_hidden_reads(recording: Recording) -> None:
    for unit, reader in recording.hidden_reads().items():
        raise ConfigError(
            "pp",
            f"{reader or 'the output of the model'} needs a tensor that {unit} keeps and does not return, so it can't "
            "be sent to another stage",
            f"a model in which {unit} returns it, or {unit} in pp.global_spec",
            f"pp.global_spec={unit}",
        )


def _costs(recording: Recording) -> Mapping[str, float]:
    """Work of every unit; where nothing multiplies matrices, each call counts as one."""
    if recording.costs:
        return recording.costs
    counted: dict[str, float] = {}
    for call in recording.calls:
        counted[call.unit] = counted.get(call.unit, 0.0) + 1.0
    return counted


def _cost_of_calls(recording: Recording, stage: StageCalls) -> float:
    costs = _costs(recording)
    times: dict[str, int] = {}
    for call in recording.calls:
        times[call.unit] = times.get(call.unit, 0) + 1
    calls = recording.calls[stage.first : stage.last + 1]
    return sum(costs.get(call.unit, 0.0) / times[call.unit] for call in calls)


def _last_calls(recording: Recording, cuts: Sequence[tuple[str, bool]]) -> list[int]:
    """The number of the last unit call in front of each cut."""
    ends = []
    for name, after in cuts:
        module, time = split_call(name)
        numbers = [
            number
            for number, call in enumerate(recording.calls)
            if call.unit == module or call.unit.startswith(f"{module}.")
        ]
        if time is not None:
            numbers = numbers[time : time + 1]
        if not numbers:
            raise ConfigError(f"pp.split_spec={module}", "it has no parameters, so it is no part of a stage")
        ends.append(numbers[-1] if after else numbers[0] - 1)
    return ends


def _holders(
    root: nn.Module,
    prefix: str,
    model: nn.Module,
    units: Sequence[str],
    recording: Recording,
    stages: Sequence[StageCalls],
) -> dict[str, tuple[int, ...]]:
    """Which stages hold each parameter: those that call a unit with it, and those whose glue uses it.

    A parameter that nothing uses is held by the last stage; one outside of the pipelined model by all of them.
    """
    held: dict[nn.Parameter, set[int]] = {parameter: set() for parameter in root.parameters()}
    by_name = dict(model.named_parameters())
    everywhere = set(range(len(stages)))
    for number, stage in enumerate(stages):
        called = {call.unit for call in recording.calls[stage.first : stage.last + 1]}
        for unit in called:
            for parameter in model.get_submodule(unit).parameters():
                held[parameter].add(number)
        for name, uses in recording.uses.items():
            if any(stage.first <= call <= stage.last for call in uses):
                held[by_name[name]].add(number)
        for name, time in recording.glue_uses.items():
            # The glue up to the next stage's first call runs on this stage, too.
            if time <= stage.last + 1:
                held[by_name[name]].add(number)
    inside = set(by_name.values())
    for parameter, numbers in held.items():
        if not numbers:
            numbers |= {len(stages) - 1} if parameter in inside else everywhere
    return {name: tuple(sorted(held[parameter])) for name, parameter in root.named_parameters()}


def _ranges(names: Sequence[str]) -> list[str]:
    """Names with runs of numbered ones written as `layers.0-3`, and calls of one module as `layer (3 calls)`."""
    written: list[str] = []
    run: list[str] = []

    def close() -> None:
        if run:
            parent = run[0].rpartition(".")[0]
            first, last = (name.rpartition(".")[2] for name in (run[0], run[-1]))
            written.append(f"{parent}.{first}-{last}" if len(run) > 1 else run[0])
            run.clear()

    for name, same in itertools.groupby(names):
        times = len(list(same))
        parent, _, number = name.rpartition(".")
        if not (times == 1 and run and number.isdigit() and run[-1] == f"{parent}.{int(number) - 1}"):
            close()
        if times == 1:
            run.append(name)
        else:
            written.append(f"{name} ({times} calls)")
    close()
    return written


@dataclass
class Held:
    """What a rank holds of a module that was cut: everything else stands beside it as a tensor without memory."""

    root: nn.Module
    stages: tuple[int, ...]
    layout: list[tuple[nn.Module, list[str], dict[str, nn.Parameter]]] = field(default_factory=list)
    """Module, names of its parameters in order, and placeholders for those that are not held."""
    shown: dict[nn.Parameter, Absent] = field(default_factory=dict)
    """Placeholder -> what code sees in its place."""

    def lacks(self, module: nn.Module) -> bool:
        """Whether some parameter of `module` is held by other stages only."""
        owners = {owner for owner, _, _ in self.layout}
        return any(part in owners for part in module.modules())

    @property
    def placeholders(self) -> set[nn.Parameter]:
        """Parameters on meta that take the place of what other stages hold."""
        return {placeholder for _, _, absent in self.layout for placeholder in absent.values()}


def hold(root: nn.Module, cutting: Cutting, stages: Sequence[int]) -> Held:
    """Take every parameter and buffer out of `root` that none of `stages` holds. Names of the rest do not change.

    Code that asks an absent parameter for its type or its shape gets the answer from a tensor on meta.
    """
    mine = set(stages)
    names = {parameter: name for name, parameter in root.named_parameters()}
    absent = {p for p, name in names.items() if not mine & set(cutting.holders[name])}
    held = Held(root, tuple(stages))
    placeholders = {
        parameter: nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        for parameter in absent
    }
    held.shown = {
        placeholder: Absent(placeholder, names[parameter], cutting.holders[names[parameter]])
        for parameter, placeholder in placeholders.items()
    }
    for module in root.modules():
        own = {name: parameter for name, parameter in module._parameters.items() if parameter in absent}
        if own:
            replaced = {name: placeholders[parameter] for name, parameter in own.items() if parameter is not None}
            held.layout.append((module, list(module._parameters), replaced))
            for name, placeholder in replaced.items():
                del module._parameters[name]
                module.__dict__[name] = held.shown[placeholder]
    elsewhere = {cutting.name + unit for unit, called_by in cutting.unit_stages().items() if not mine & set(called_by)}
    for module in _modules_within_alone(root, elsewhere):
        for name in list(module._buffers):
            buffer = module._buffers.pop(name)
            module._non_persistent_buffers_set.discard(name)
            module.__dict__[name] = None if buffer is None else torch.empty_like(buffer, device="meta")
    return held


def _modules_within_alone(root: nn.Module, names: Collection[str]) -> Iterator[nn.Module]:
    """The modules that are parts of these, and of nothing else: one that all layers share (rotary positions) is not."""

    def parts(module: nn.Module, name: str) -> Iterator[nn.Module]:
        if name in names:
            return
        yield module
        for key, child in module._modules.items():
            if child is not None:
                yield from parts(child, f"{name}.{key}" if name else key)

    others = set(parts(root, ""))
    seen = {module for name in names for module in root.get_submodule(name).modules()}
    yield from seen - others


@contextmanager
def whole_model(held: Held) -> Iterator[nn.Module]:
    """Within it placeholders stand where parameters are absent: code that looks for some sees those of all stages."""
    for module, order, absent in held.layout:
        present = dict(module._parameters)
        module._parameters.clear()
        for name in order:
            module.__dict__.pop(name, None)
            module._parameters[name] = absent[name] if name in absent else present.pop(name)
        module._parameters.update(present)
    try:
        yield held.root
    finally:
        for module, _, absent in held.layout:
            for name, placeholder in absent.items():
                module._parameters.pop(name, None)
                module.__dict__[name] = held.shown[placeholder]


def drop_placeholders(optimizer: torch.optim.Optimizer, held: Held) -> None:
    """Take the parameters of other stages out of an optimizer; its groups stay, even if nothing is left in them."""
    absent = held.placeholders
    for group in optimizer.param_groups:
        kept = [place for place, parameter in enumerate(group["params"]) if parameter not in absent]
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [group[key][place] for place in kept]
    for parameter in absent:
        optimizer.state.pop(parameter, None)
