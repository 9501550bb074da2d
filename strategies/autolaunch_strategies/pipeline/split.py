"""Where a model is cut into stages: from what people write (`pp.split_spec`) to cuts between modules.

Names only, no torch: which modules there are and in which order they run is told by the caller.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from math import lcm
from typing import Any

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.plan.patterns import compile_pattern, matching, nearest_names


class SplitPoint(Enum):
    """What may be said of a module in a mapping: cut before it, or behind it."""

    BEGINNING = "BEGINNING"
    END = "END"


_ALLOWED = "a prefix of numbered blocks, a list of names and prefixes, {name or pattern: BEGINNING | END}, or null"
_CALL = re.compile(r"@(\d+)$")


def call_name(module: str, number: int) -> str:
    """The name of one of several calls of a module, counted from 0."""
    return f"{module}@{number}"


def split_call(name: str) -> tuple[str, int | None]:
    """(module, number of its call) of a name as `call_name` gives it; None if it is that of a module."""
    at = _CALL.search(name)
    return (name[: at.start()], int(at[1])) if at else (name, None)


@dataclass(frozen=True)
class Cut:
    """A cut next to one module, by its dotted name, or next to one of its calls (`call_name`)."""

    module: str
    after: bool
    """Whether the cut is behind the call of the module; otherwise it is before it."""

    def __str__(self) -> str:
        return f"{'behind' if self.after else 'before'} {self.module}"


def parse_spec(spec: Any) -> list[str] | dict[str, str] | None:
    """Bring `pp.split_spec` into one form: a list of names and prefixes, `{pattern: BEGINNING | END}`, or None.

    Raises:
        ConfigError: another type, an unknown split point, or a key that is not a pattern.
    """
    where = _where(spec)
    if spec is None:
        return None
    if isinstance(spec, str):
        spec = [spec]
    if isinstance(spec, Mapping):
        points = {}
        for name, value in spec.items():
            if isinstance(value, Mapping) and value:
                raise _dots(name, value)
            # torch has a SplitPoint of its own, whose members have the same names.
            point = str(getattr(value, "name", value)).upper()
            if point not in SplitPoint.__members__:
                raise ConfigError(where, f"{value!s} is no split point", "BEGINNING (before it), END (behind it)")
            try:
                compile_pattern(split_call(str(name))[0])
            except ConfigError as error:
                raise ConfigError(where, f"{name} is {error.problem}", error.allowed) from None
            points[str(name)] = point
        if not points:
            raise ConfigError(where, "names no module", _ALLOWED, "pp.split_spec=null")
        return points
    if not isinstance(spec, Sequence) or not all(isinstance(name, str) and name for name in spec):
        raise ConfigError(where, "does not say where to cut", _ALLOWED)
    if not spec:
        raise ConfigError(where, "names no module", _ALLOWED, "pp.split_spec=null")
    return list(spec)


def candidate_names(spec: Any, modules: Collection[str], blocks: Sequence[str], *, prefix: str = "") -> list[str]:
    """Every module next to which this spec may cut, before the order of execution is known.

    Args:
        spec: `pp.split_spec`.
        modules: the dotted names of all modules.
        blocks: the names of the repeated blocks; the candidates where `spec` is None.
        prefix: the name of the model these names are relative to; names in `spec` may begin with it, too.

    Raises:
        ConfigError: the spec is wrong, or a name in it matches nothing.
    """
    parsed = parse_spec(spec)
    if parsed is None:
        if not blocks:
            raise ConfigError(_where(spec), "the model shows no repeated blocks to cut between", _ALLOWED)
        return list(blocks)
    find = _modules_of_pattern if isinstance(parsed, dict) else _modules_of_name
    candidates: dict[str, None] = {}
    for name in parsed:
        of_name = find(split_call(name)[0], modules, prefix)
        if not of_name:
            raise _no_match(spec, name, modules, blocks)
        candidates.update(dict.fromkeys(of_name))
    return list(candidates)


def choose_cuts(
    spec: Any,
    executed: Sequence[str],
    modules: Collection[str],
    blocks: Sequence[str],
    stages: int,
    split: str,
    costs: Mapping[str, float],
    *,
    prefix: str = "",
) -> list[Cut]:
    """The `stages - 1` cuts of a model, in order of execution.

    A mapping says them itself. Otherwise the candidates are shared out, in order of execution, and each cut is behind
    the last candidate of a stage: as many for each (`even`: the first ``n % stages`` stages have one more), or so that
    the costliest stage costs as little as possible (`balanced`; among such splits, the most even one).

    Args:
        spec: `pp.split_spec`.
        executed: the modules in the order of their first call; what is never called is absent. Further calls of a
            candidate are in it by their `call_name`, from the second one on; each call is a candidate then.
        modules: the dotted names of all modules.
        blocks: the names of the repeated blocks; the candidates where `spec` is None.
        stages: the number of stages, over all ranks.
        split: `even` or `balanced`.
        costs: `balanced` only: the cost of modules, none of which lies inside another one that has a cost. What runs
            before the first candidate belongs to the first stage, what runs after the last to the last, what runs
            between two candidates to the later one. A module without an entry costs nothing.
        prefix: the name of the model these names are relative to; names in `spec` may begin with it, too.

    Raises:
        ConfigError: the spec is wrong, matches nothing or a module that is never called, or does not fit `stages`.
    """
    candidates = candidate_names(spec, modules, blocks, prefix=prefix)
    order = _Order(executed)
    if spec is None:
        candidates = [name for name in candidates if name in order]
    elif never := [name for name in candidates if name not in order]:
        raise ConfigError(
            _where(spec),
            f"{never[0]} is never called in the forward pass, so there is no place next to it",
            _allowed_names(never[0], executed, [name for name in blocks if name in order]),
        )
    if isinstance(spec, Mapping):
        return _written_cuts(spec, order, modules, stages, prefix)
    candidates = [call for name in candidates for call in order.calls(name)]
    costs = {call: cost / len(order.calls(name)) for name, cost in costs.items() for call in order.calls(name)}
    ends = {order.end(name): name for name in sorted(candidates, key=lambda name: -name.count("."))}
    names = [ends[end] for end in sorted(ends)]
    if len(names) < stages:
        if not names:
            raise ConfigError(
                _where(spec),
                f"the forward pass calls none of the blocks {_among(list(blocks))}, so a stage can't end behind one",
                "names of modules that it calls",
            )
        raise ConfigError(
            _where(spec),
            f"{_count(len(names), 'place')} to end a stage, {_among(names)}, but {_count(stages, 'stage')}",
            f"at most {_count(len(names), 'stage')} (pp x virtual stages), or more names in pp.split_spec",
        )
    if split == "balanced":
        sizes = balanced_sizes(_weights(names, order, costs), stages)
    else:
        sizes = even_sizes(len(names), stages)
    last = -1
    cuts = []
    for size in sizes[:-1]:
        last += size
        cuts.append(Cut(names[last], after=True))
    return cuts


def even_sizes(count: int, stages: int) -> list[int]:
    """How many of `count` candidates each stage has: the first ``count % stages`` stages have one more."""
    return [count // stages + (stage < count % stages) for stage in range(stages)]


def balanced_sizes(weights: Sequence[float], stages: int) -> list[int]:
    """How many of the weights, in their order, each stage has (at least one) so that the largest sum is smallest.

    Among such splits it is one whose costs, and then whose numbers of candidates, are the most even (the smallest sum
    of squares); among those, the one whose first stages have the most.
    """
    assert 1 <= stages <= len(weights)
    # Sums of floats depend on their order; as integers over one denominator, equal splits compare as equal.
    exact = [Fraction(weight) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    sums = [0]
    for weight in exact:
        sums.append(sums[-1] + int(weight * scale))
    count = len(weights)

    def solve(largest: int | None) -> tuple[tuple[int, int], list[int]]:
        """(value, sizes): without a bound, of the smallest largest sum; with one, of the most even split under it."""
        # best[begin]: the same, the sizes as a linked list, of what begins there over as many stages as rounds so far.
        best: list[tuple[tuple[int, int], Any] | None] = [None] * count + [((0, 0), None)]
        for stage in range(stages):
            following: list[tuple[tuple[int, int], Any] | None] = [None] * (count + 1)
            for begin in range(count) if stage < stages - 1 else (0,):
                for end in range(count, begin, -1):
                    rest = best[end]
                    cost, size = sums[end] - sums[begin], end - begin
                    if rest is None or (largest is not None and cost > largest):
                        continue
                    costs, sizes = rest[0]
                    value = (max(cost, costs), 0) if largest is None else (cost**2 + costs, size**2 + sizes)
                    held = following[begin]
                    if held is None or value < held[0]:
                        following[begin] = (value, (size, rest[1]))
            best = following
        assert best[0] is not None
        value, linked = best[0]
        chosen = []
        while linked is not None:
            size, linked = linked
            chosen.append(size)
        return value, chosen

    (largest, _), _ = solve(None)
    return solve(largest)[1]


# --- places in the order of execution ------------------------------------------------------------------------------


class _Order:
    """Places between the calls of the innermost modules that run: 0 is before the first."""

    def __init__(self, executed: Sequence[str]) -> None:
        inner = {parent for name in executed for parent in _parents(name)}
        self._begin: dict[str, int] = {}
        self._end: dict[str, int] = {}
        self.count = 0
        for name in executed:
            self._begin[name] = self.count
            if name not in inner:
                self.count += 1
        for name in executed:
            for known in (name, *_parents(name)):
                if known in self._begin:
                    end = self._begin[name] + (name not in inner)
                    self._end[known] = max(self._end.get(known, 0), end)
        self._calls: dict[str, list[str]] = {}
        for name in executed:
            module, number = split_call(name)
            if number is None:
                continue
            if module not in self._calls:
                first = call_name(module, 0)
                self._begin[first], self._end[first] = self._begin[module], self._end[module]
                self._calls[module] = [first]
            self._calls[module].append(name)
            self._end[module] = self._end[name]

    def __contains__(self, name: str) -> bool:
        return name in self._begin

    def calls(self, name: str) -> list[str]:
        """The names of the calls of a module, in order: its own if it is called once."""
        return self._calls.get(name, [name])

    def begin(self, name: str) -> int:
        return self._begin[name]

    def end(self, name: str) -> int:
        return self._end[name]


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))] + ([""] if name else [])


def _weights(names: Sequence[str], order: _Order, costs: Mapping[str, float]) -> list[float]:
    """The cost of each candidate with what runs between it and the one before; the rest counts for the last."""
    ends = [order.end(name) for name in names]
    weights: list[float] = [0] * len(names)
    for name, cost in costs.items():
        if name in order:
            later = next((index for index, end in enumerate(ends) if order.begin(name) < end), len(names) - 1)
            weights[later] += cost
    return weights


def _written_cuts(
    spec: Mapping[Any, Any], order: _Order, modules: Collection[str], stages: int, prefix: str
) -> list[Cut]:
    points = parse_spec(spec)
    assert isinstance(points, dict)
    cuts: dict[Cut, None] = {}
    for written, point in points.items():
        pattern, number = split_call(written)
        for name in _modules_of_pattern(pattern, modules, prefix):
            if number is not None:
                calls = order.calls(name)
                if number >= len(calls):
                    allowed = f"{name}@0 to {calls[-1]}" if len(calls) > 1 else name
                    raise ConfigError(_where(spec), f"{name} is called {_times(len(calls))}", allowed)
                name = calls[number]
            cuts[Cut(name, point == "END")] = None
    places: dict[int, Cut] = {}
    for cut in cuts:
        place = order.end(cut.module) if cut.after else order.begin(cut.module)
        if place in (0, order.count):
            raise ConfigError(
                _where(spec),
                f"nothing runs {'after' if place else 'before'} {cut.module}, so a stage would be empty",
                f"a name of a module that does not run {'last' if place else 'first'}",
            )
        if place in places:
            raise ConfigError(
                _where(spec), f"{places[place]} and {cut} are the same place", "each place once; END is behind"
            )
        places[place] = cut
    if len(places) != stages - 1:
        raise ConfigError(
            _where(spec),
            f"{_count(len(places), 'cut')}, {_among([str(places[place]) for place in sorted(places)])}, "
            f"but {_count(stages, 'stage')}",
            f"{_count(stages - 1, 'cut')}: one less than pp x virtual stages",
        )
    return [places[place] for place in sorted(places)]


# --- names ---------------------------------------------------------------------------------------------------------


def _modules_of_name(name: str, modules: Collection[str], prefix: str) -> list[str]:
    """The numbered blocks below `name`, or the module of this name."""
    for wanted in _without_prefix(name, prefix):
        numbered = [other for other in modules if re.fullmatch(rf"{re.escape(wanted)}\.\d+", other)]
        if numbered:
            return sorted(numbered, key=lambda other: int(other.rsplit(".", 1)[-1]))
        if wanted in modules:
            return [wanted]
    return []


def _modules_of_pattern(pattern: str, modules: Collection[str], prefix: str) -> list[str]:
    matches = matching(pattern, modules)
    if not matches and prefix:
        full = {f"{prefix.rstrip('.')}.{name}": name for name in modules if name}
        matches = [full[name] for name in matching(pattern, full)]
    return matches


def _without_prefix(name: str, prefix: str) -> Iterable[str]:
    yield name
    if prefix and name.startswith(f"{prefix.rstrip('.')}."):
        yield name[len(prefix.rstrip(".")) + 1 :]


# --- messages ------------------------------------------------------------------------------------------------------


def _where(spec: Any) -> str:
    if spec is None:
        return "pp.split_spec=null"
    if isinstance(spec, Mapping):
        text = ", ".join(f"{name}: {getattr(point, 'name', point)}" for name, point in spec.items())
        return f"pp.split_spec={{{text}}}"
    if isinstance(spec, Sequence) and not isinstance(spec, str):
        return f"pp.split_spec=[{','.join(map(str, spec))}]"
    return f"pp.split_spec={spec}"


def _dots(name: Any, value: Any) -> ConfigError:
    """`pp.split_spec.model.layers.1=END` was meant to be a name, and became groups in groups."""
    dotted = str(name)
    while isinstance(value, Mapping) and value:
        name, value = next(iter(value.items()))
        dotted += f".{name}"
    return ConfigError(
        f"pp.split_spec.{dotted}",
        "dots in a key of the command line make groups of keys, not a name of a module",
        "names in braces",
        f"'pp.split_spec={{{dotted}: {value}}}'",
    )


def _no_match(spec: Any, name: str, modules: Collection[str], blocks: Sequence[str]) -> ConfigError:
    parents = list(dict.fromkeys(block.rpartition(".")[0] for block in blocks))
    write = f"pp.split_spec={parents[0]}" if len(parents) == 1 and parents[0] and not isinstance(spec, Mapping) else ""
    return ConfigError(
        _where(spec), f"no module is called {name}", _allowed_names(name, modules, blocks) or _ALLOWED, write
    )


def _allowed_names(name: str, names: Iterable[str], blocks: Sequence[str]) -> str:
    texts = [f"the repeated blocks {_among(blocks)}"] if blocks else []
    close = [other for other in nearest_names(name, names) if other]
    if close:
        texts.append(f"names like {', '.join(close)}")
    return "; ".join(texts)


def _among(names: Sequence[str]) -> str:
    """A few names whole, many by the first and the last."""
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} to {names[-1]}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _count(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
