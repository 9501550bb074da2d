"""How the ranks of the cp axis share sequences and heads of a model: what must fit, and what is chosen. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from autolaunch.config.against_schema import Where
from autolaunch.models.facts import ModelFacts, model_facts
from autolaunch_strategies.config import ConfigError, ContextParallel, MeshShape, backends_that


def check_sequence_parts(
    config: Mapping[str, Any], mesh: MeshShape, facts: ModelFacts | None, where: Where
) -> Iterator[ConfigError]:
    """Lengths, heads and dropout that the backend of `cp` cannot shard or compute, as far as the config shows them.

    What is wrong in `cp` itself is left to `ParallelConfig.check`.
    """
    if mesh.cp == 1 or config["cp"] is None:
        return
    cp = ContextParallel(**config["cp"])
    yield from _length(config["data"], cp, mesh.cp, facts, where)
    if facts is None:
        return
    yield from _heads(config, cp, mesh, facts)
    if facts.attention_dropout is not None and config["task"] in ("fit", "lr_find", "compare"):
        yield from _dropout(config, cp, mesh, facts)


def with_sequence_parts(config: Mapping[str, Any], mesh: MeshShape) -> dict[str, Any]:
    """The config with `cp.ulysses` chosen by the heads of the model, where the backend leaves it open."""
    if mesh.cp == 1 or config["cp"] is None or config["module"] is not None:
        return dict(config)
    cp = ContextParallel(**config["cp"])
    if not cp.spec.is_mixed or cp.ulysses is not None:
        return dict(config)
    _, ulysses = cp.split(mesh.cp, heads_per_rank(config, mesh, model_facts(config["model"])))
    return {**config, "cp": {**config["cp"], "ulysses": ulysses}}


def heads_per_rank(config: Mapping[str, Any], mesh: MeshShape, facts: ModelFacts) -> int | None:
    """Attention heads that one rank of mp has (with a plan of one's own maybe all of them); None if not known."""
    if facts.num_heads is None or facts.num_heads % mesh.mp:
        return None
    return facts.num_heads // mesh.mp


def _length(
    data: Mapping[str, Any], cp: ContextParallel, ranks: int, facts: ModelFacts | None, where: Where
) -> Iterator[ConfigError]:
    length, parts = data.get("seq_len"), 2 * ranks
    if "_target_" in data or not isinstance(length, int) or length % parts == 0 or cp.pad:
        return
    longest = None if facts is None else facts.max_seq_len
    below, above = length // parts * parts, -(-length // parts) * parts
    fits_above = longest is None or above <= longest
    nearest = above if fits_above and (not below or above - length < length - below) else below
    yield ConfigError(
        where("data.seq_len", length),
        f"{ranks} ranks of cp cut a sequence into 2 x {ranks} parts of equal length",
        f"multiples of {parts}, or cp.pad=true",
        f"data.seq_len={nearest} or cp.pad=true" if nearest else "cp.pad=true",
    )


def _heads(config: Mapping[str, Any], cp: ContextParallel, mesh: MeshShape, facts: ModelFacts) -> Iterator[ConfigError]:
    heads = heads_per_rank(config, mesh, facts)
    try:
        _, ulysses = cp.split(mesh.cp, heads)
    except ConfigError:
        return
    own_plan = config["mp"] is None or config["mp"]["base"] == "none"  # may leave attention whole
    if heads is None or (heads * mesh.mp if own_plan else heads) % ulysses == 0:
        return
    whose = f"{heads} attention heads" + (f" per rank of mp ({facts.num_heads} over {mesh.mp})" if mesh.mp > 1 else "")
    fitting = ", ".join(str(part) for part in range(1, mesh.cp + 1) if mesh.cp % part == 0 and heads % part == 0)
    if not cp.spec.is_mixed:
        without_heads = backends_that(lambda spec: not spec.exchanges_heads)
        mixed = backends_that(lambda spec: spec.is_mixed)
        yield ConfigError(
            f"mesh={mesh.name} with model={facts.name} and cp={config['cp']['name']}",
            f"{whose} cannot be shared evenly by {ulysses} ranks of cp, as {cp.backend} does",
            f"cp={' or cp='.join(without_heads)} for any number of heads, or "
            f"cp={' or cp='.join(mixed)} with cp.ulysses of {fitting}",
            f"cp={mixed[0]}" if fitting != "1" else "cp=ring",
        )
        return
    yield ConfigError(
        f"cp.ulysses={ulysses} with model={facts.name}",
        f"{whose} cannot be shared evenly by {ulysses} ranks",
        f"cp.ulysses of {fitting}, or null",
        "cp.ulysses=null",
    )


def _dropout(
    config: Mapping[str, Any], cp: ContextParallel, mesh: MeshShape, facts: ModelFacts
) -> Iterator[ConfigError]:
    assert facts.attention_dropout is not None
    key, share = facts.attention_dropout
    try:
        ring, _ = cp.split(mesh.cp, heads_per_rank(config, mesh, facts))
    except ConfigError:
        return
    if not cp.spec.passes_keys or ring == 1:
        return
    yield ConfigError(
        f"model.config.{key}={share} with cp={config['cp']['name']}",
        "a ring computes attention piece by piece, without dropout of its weights",
        f"model.config.{key}=0.0, or cp=gather, which has it",
        f"++model.config.{key}=0.0",
    )
