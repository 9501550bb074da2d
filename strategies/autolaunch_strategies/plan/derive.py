"""Derive a plan for a model that comes with none, from the dataflow of one recorded forward pass.

Between a column-wise and a row-wise layer activations keep their global shapes (see `views`), so a plan can be slow but
not wrong; what is decided here is which pairs of layers save the most.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.model.blocks import Block, find_blocks
from autolaunch_strategies.plan.decisions import COLUMN, ROW, Decisions
from autolaunch_strategies.plan.layers import features, is_layer, is_linear
from autolaunch_strategies.plan.rest import divide_the_rest
from autolaunch_strategies.plan.rules import Rule
from autolaunch_strategies.plan.sequence import sequence_styles
from autolaunch_strategies.plan.trace import Trace, trace
from autolaunch_strategies.tracing.inputs import Steps

SOURCE = "derived"


class NothingToShard(ConfigError):
    """No plan can be derived, whatever the model is called with; whole on every rank it runs."""


def derive_plan(
    model: nn.Module, sequence_parallel: bool, ranks: int, example: Any = None, steps: Steps | None = None
) -> list[Rule]:
    """The rules for `model` (on meta or real; it is not touched), each with its reason. No styles: it stays whole.

    Args:
        sequence_parallel: shard activations between blocks along the sequence, too, where the structure allows it.
        ranks: along the mp axis.
        example: inputs for one call of the model, if those that are found by themselves do not serve.
        steps: what a module around the model does with it: where nothing else serves, that is followed.

    Raises:
        ConfigError: its forward can't be run on shapes alone, and there is no training step that calls it.
        NothingToShard: nothing in it can be sharded, or the training step can't be followed to any part of it.
    """
    try:
        flow = trace(model, example, steps)
    except ConfigError as error:
        if steps is None or steps.training is None:
            raise
        raise NothingToShard(error.where, error.problem, error.allowed, error.write) from error
    blocks = plan_blocks(model)
    decisions = Decisions()
    for block in blocks:
        _decide_block(flow, block, ranks, decisions)
    decide_vocabulary(model, flow, ranks, decisions)
    divide_the_rest(model, flow, ranks, decisions)
    if not decisions.planned():
        reasons = "".join(f"\n    {name}: {reason}" for name, reason in _one_of_each(decisions.reasons).items())
        raise NothingToShard(
            "mp",
            f"nothing in {type(model).__name__} can be sharded among {ranks} ranks"
            + (reasons or ": no repeated blocks with pairs of linear layers were found"),
            "a plan of your own in mp.plan, with mp.base=none, or a mesh whose mp is 1",
        )
    if sequence_parallel:
        sequence_styles(model, flow, blocks, decisions)
    return as_rules(model, blocks, decisions, SOURCE)


def plan_blocks(model: nn.Module) -> list[Block]:
    """The repeated blocks; of a model with one block only, the parts of its lists of modules."""
    blocks = list(find_blocks(model))
    if blocks:
        return blocks
    return [
        Block(f"{name}.{key}" if name else key, child)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.ModuleDict)
        for key, child in module.named_children()
        if next(child.children(), None) is not None
    ]


# --- pairs of column-wise and row-wise layers within a block ------------------------------------------------------


def _decide_block(flow: Trace, block: Block, ranks: int, decisions: Decisions) -> None:
    within = {f"{block.name}.{name}": module for name, module in block.module.named_modules() if name}
    linears = {name: module for name, module in within.items() if name in flow.sources}
    joining = flow.reaching.get(block.name, frozenset()) & linears.keys()
    groups = _groups(flow, linears, joining)
    for columns, rows in groups:
        _decide_group(flow, block, linears, columns, rows, ranks, decisions)
    for name in linears:
        if name in decisions.reasons:
            continue
        if name in joining:
            decisions.decide(name, (), "whole: it joins the residual stream, but no linear layer of the block feeds it")
        else:
            decisions.decide(name, (), "whole: it feeds something other than the layers that join the residual stream")
    for name, module in within.items():
        if flow.cut_short and is_linear(module) and name not in flow.calls:
            decisions.decide(name, (), f"whole: {flow.example.origin} could be followed only until: {flow.cut_short}")
        elif name in flow.untraceable:
            decisions.decide(name, (), f"whole: it can't run on shapes alone ({flow.untraceable[name]})")
        elif name not in flow.calls and not is_linear(module) and _holds_matrices(module):
            decisions.decide(name, (), "whole: it is not called as a module")
        elif _holds_matrices(module) and not is_layer(module):
            decisions.decide(name, (), f"whole: no rule is known for the parameters of {type(module).__name__}")


def _holds_matrices(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))


def _groups(flow: Trace, linears: Mapping[str, nn.Module], joining: Iterable[str]) -> list[tuple[set[str], set[str]]]:
    """(column-wise, row-wise) candidates: layers that join the residual stream, with the layers that feed only those.

    Rows that share a column are one group.
    """
    joining = set(joining)
    groups: list[tuple[set[str], set[str]]] = []
    for row in joining:
        columns = {
            name
            for name in flow.sources[row]
            if name in linears and name not in joining and flow.consumers(name) <= joining
        }
        if not columns:
            continue
        rows = {row}
        for other in [group for group in groups if group[0] & columns]:
            groups.remove(other)
            columns |= other[0]
            rows |= other[1]
        groups.append((columns, rows))
    return groups


def _decide_group(
    flow: Trace,
    block: Block,
    linears: Mapping[str, nn.Module],
    columns: set[str],
    rows: set[str],
    ranks: int,
    decisions: Decisions,
) -> None:
    def short(names: Iterable[str]) -> str:
        return ", ".join(name.removeprefix(f"{block.name}.") for name in sorted(names))

    heads = {name: count for name in columns if (count := _heads(flow, name)) > 0}
    most = max(heads.values(), default=0)
    few = {name for name, count in heads.items() if count % ranks and count < most}
    problem = ""
    if most % ranks:
        problem = f"{most} heads do not divide among {ranks} ranks"
    for name in sorted(rows | columns - few):
        size = features(linears[name])[0 if name in rows else 1]
        if size % ranks and not problem:
            kind = "inputs" if name in rows else "outputs"
            problem = f"the {size} {kind} of {short([name])} do not divide among {ranks} ranks"
    if unsure := sorted(set().union(*(flow.operators.get(name, ()) for name in columns))):
        problem = problem or f"{', '.join(unsure)} between them may not work on sharded tensors"
    calls_of_block = flow.calls[block.name].times if block.name in flow.calls else 1
    if any(flow.calls[name].times > calls_of_block for name in rows | columns):
        problem = problem or "it is called more than once in a forward pass"
    if problem:
        for name in rows | columns:
            decisions.decide(name, (), f"whole: {problem}")
        return
    for name in columns - few:
        decisions.decide(name, [COLUMN], f"column-wise: it feeds {short(rows)}")
    for name in few:
        decisions.decide(name, (), f"whole: its heads ({heads[name]}) do not divide among {ranks} ranks")
    for name in rows:
        fed = short(columns & flow.sources[name])
        decisions.decide(name, [ROW], f"row-wise: it joins the residual stream; fed by {fed}")


def _heads(flow: Trace, name: str) -> int:
    """Into how many heads the output of a layer is viewed; 0 if it is not. Of (3, heads, size) the heads count."""
    counts = [parts[1] if len(parts) > 2 and parts[0] in (2, 3) else parts[0] for parts in flow.splits.get(name, ())]
    return max(counts, default=0)


# --- embedding and head -------------------------------------------------------------------------------------------


def vocabulary(model: nn.Module, flow: Trace | None) -> tuple[str | None, str | None]:
    """(the embedding of tokens, the linear layer that gives their logits), each None if there is none."""
    names = {id(module): name for name, module in model.named_modules() if name}
    embedding, head = None, None
    if hasattr(model, "get_input_embeddings") and hasattr(model, "get_output_embeddings"):
        with contextlib.suppress(NotImplementedError, AttributeError):
            transformer: Any = model
            embedding, head = transformer.get_input_embeddings(), transformer.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) and flow is not None:
        embeddings = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
        called = [module for name, module in embeddings if name in flow.calls]
        embedding = max(called, key=lambda module: module.num_embeddings, default=None)
    if not isinstance(embedding, nn.Embedding):
        return None, None
    if not (head is not None and is_linear(head)) and flow is not None:
        fitting = [
            module
            for name, module in model.named_modules()
            if is_linear(module) and name in flow.calls and features(module)[1] == embedding.num_embeddings
        ]
        head = fitting[-1] if fitting else None
    if head is not None and not (is_linear(head) and features(head)[1] == embedding.num_embeddings):
        head = None
    return names.get(id(embedding)), None if head is None else names.get(id(head))


def decide_vocabulary(model: nn.Module, flow: Trace | None, ranks: int, decisions: Decisions) -> None:
    """Shard the embedding of tokens and the layer of their logits by the vocabulary."""
    embedding_name, head_name = vocabulary(model, flow)
    if embedding_name is None:
        return
    embedding = model.get_submodule(embedding_name)
    assert isinstance(embedding, nn.Embedding)
    head = None if head_name is None else model.get_submodule(head_name)
    tied = head is not None and head.weight is embedding.weight
    problem = ""
    if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
        problem = "whole: max_norm, scale_grad_by_freq and sparse need the whole table"
    elif embedding.num_embeddings < ranks:
        problem = f"whole: {embedding.num_embeddings} tokens for {ranks} ranks"
    if problem:
        decisions.decide(embedding_name, (), problem)
    else:
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding) and module.weight is embedding.weight:
                decisions.decide(name, [ROW], "row-wise: each rank holds some of the vocabulary")
    if head_name is None:
        return
    if problem and tied:
        decisions.decide(head_name, (), f"whole: it shares its weight with {embedding_name}")
    elif embedding.num_embeddings >= ranks:
        shared = f"; its weight is that of {embedding_name}" if tied else ""
        decisions.decide(head_name, [COLUMN], f"column-wise: logits and loss stay sharded by the vocabulary{shared}")


# --- rules --------------------------------------------------------------------------------------------------------


def as_rules(model: nn.Module, blocks: Iterable[Block], decisions: Decisions, source: str) -> list[Rule]:
    """One rule per kind of module: the number of a block becomes `*` where all blocks agree, else they are listed."""
    containers: dict[str, list[str]] = {}
    for block in blocks:
        container, _, key = block.name.rpartition(".")
        containers.setdefault(container, []).append(key)
    groups: dict[tuple[str, str, bool], dict[str, list[str]]] = {}
    """(container, name in the block, whether it is in a block) -> decision -> keys of blocks."""
    for name in (name for name, _ in model.named_modules() if name in decisions.styles):
        container, key, rest = _place(name, containers)
        said = repr((decisions.styles[name], decisions.reasons[name]))
        groups.setdefault((container, rest, bool(key)), {}).setdefault(said, []).append(key)
    rules = []
    names = {_joined(name, key) for name, module in model.named_modules() for key in ("", *module._parameters)}
    for (container, rest, in_block), variants in groups.items():
        decided = {key for keys in variants.values() for key in keys}
        holder = model.get_submodule(container)
        alike = [key for key in (*holder._modules, *holder._parameters) if _joined(container, key, rest) in names]
        for keys in variants.values():
            if not in_block:
                full = pattern = container
            else:
                one = keys[0] if len(keys) == 1 else f"({'|'.join(re.escape(key) for key in keys)})"
                part = "*" if len(variants) == 1 and decided.issuperset(alike) else one
                pattern, full = _joined(container, part, rest), _joined(container, keys[0], rest)
            rules.append(Rule(pattern, decisions.styles[full], decisions.reasons[full], source))
    return rules


def _joined(*pieces: str) -> str:
    return ".".join(piece for piece in pieces if piece)


def _place(name: str, containers: Mapping[str, list[str]]) -> tuple[str, str, str]:
    """(container, key of the block, name within the block), or (name, "", "") outside of all blocks."""
    for container, keys in containers.items():
        rest = name.removeprefix(f"{container}.") if container else name
        key, _, inner = rest.partition(".")
        if (not container or rest != name) and key in keys:
            return container, key, inner
    return name, "", ""


def _one_of_each(reasons: Mapping[str, str]) -> dict[str, str]:
    """The first of the names that differ by numbers only."""
    first: dict[str, str] = {}
    for name in reasons:
        first.setdefault(re.sub(r"\d+", "*", name), name)
    return {name: reasons[name] for name in first.values()}
