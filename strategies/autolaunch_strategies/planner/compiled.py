"""What a compiled block keeps between its passes, and what its kernels move, from the operators that it runs.

torch's compiler sees both passes before either runs, so it keeps what is cheapest to keep, and computes the rest again
beside what the backward pass computes anyway: a cut through the graph of the forward pass. This is that cut, by the
rules of torch's own partitioner (`torch._functorch.partitioners.solve_min_cut`, version 2.13), on the operators of a
block that ran on shapes. Asking torch itself takes as long as all the rest of a profile, and needs a block that can be
captured; tests compare the two.
"""

from __future__ import annotations

import enum
from collections import ChainMap, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

_FUSED = {
    "_to_copy", "_softmax", "_log_softmax", "_unsafe_index", "amax", "amin", "any", "arange", "argmax", "cat", "clone",
    "empty", "empty_like", "full", "full_like", "gather", "gelu_backward", "index", "masked_fill", "mean",
    "native_dropout", "native_dropout_backward", "native_layer_norm", "native_layer_norm_backward", "new_empty",
    "new_full", "new_ones", "new_zeros", "ones", "ones_like", "rand_like", "rsub", "scalar_tensor", "silu_backward",
    "std", "sum", "tril", "triu", "type_as", "var", "var_mean", "where", "zeros", "zeros_like",
    "_softmax_backward_data", "_fused_rms_norm", "_fused_rms_norm_backward", "native_group_norm",
    "native_group_norm_backward", "copy_",
}  # fmt: skip
"""Operators that become part of a kernel with their neighbours, next to those that torch tags as pointwise."""
_ONCE = {"native_dropout", "rand_like", "randn_like", "bernoulli", "bernoulli_", "cat"}
"""Of these, the ones that are not run again: most would draw other numbers."""
_REDUCES = 4
"""A result so many times smaller than what it is computed from is kept."""
_ENDLESS = 1 << 62


SHAPES_ALONE = {"empty_like", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like"}
"""Operators that look at no value of what they are called with."""


class Kernel(enum.Enum):
    """What an operator becomes."""

    FUSED = enum.auto()
    """A part of a kernel, with its neighbours."""
    ALONE = enum.auto()
    """A kernel of its own that moves bytes."""
    PRODUCT = enum.auto()
    """One that multiplies: what it moves is not counted here."""


def kernel_of(name: str, pointwise: bool, is_product: bool) -> Kernel:
    """What an operator becomes, by its name without an overload."""
    if is_product:
        return Kernel.PRODUCT
    return Kernel.FUSED if pointwise or name in _FUSED else Kernel.ALONE


@dataclass
class _Value:
    """A piece of memory that the forward pass has written."""

    size: int
    sharded: bool
    routed: bool
    recomputable: bool = False
    sources: set[int] = field(default_factory=set)
    """What it was computed from; parameters are always there, and do not count."""
    forward: list[bool] = field(default_factory=list)
    """For each use, whether it is fused with what made it."""
    backward: list[bool] = field(default_factory=list)


@dataclass
class _Operator:
    """One operator of the forward pass."""

    kernel: Kernel
    level: int
    """How many operators that are not fused lie before it, one after the other: what is as far on may be one kernel."""
    inputs: set[int]
    outputs: set[int]
    others: int
    """Bytes that it reads of what is no value: parameters."""


@dataclass(frozen=True)
class Kernels:
    """What the operators of one pass come to."""

    count: int
    moved: tuple[int, int, int]
    """Bytes that all but products read and write: (all, of which sharded, of which of experts)."""


class JointPass:
    """The forward and the backward pass of one block, as a graph of values.

    A value is known by a number of its own; what it is a view of has the same.
    """

    def __init__(self) -> None:
        self.values: dict[int, _Value] = {}
        self._same: dict[int, int] = {}
        """Value -> an earlier one that was computed in the same way."""
        self._made: dict[Hashable, list[int]] = {}
        """How something was computed -> what came out of it."""
        self._operators: list[_Operator] = []
        self._backward_values: dict[int, _Value] = {}
        """Values that the backward pass has made."""
        self._backward_operators: list[_Operator] = []
        self._level: dict[int, int] = {}
        """Value -> the level of what reads it."""

    def begins_with(self, number: int, size: int, sharded: bool) -> None:
        """Note what the block is called with."""
        self.values[number] = _Value(size, sharded, False)

    def gathered(self, number: int) -> None:
        """From here on a value is whole."""
        if number in self.values:
            self.values[number].sharded = False

    def forward(
        self,
        name: str,
        kernel: Kernel,
        inputs: Iterable[int],
        outputs: Iterable[tuple[int, int, bool, bool]],
        read: int,
        call: Hashable,
    ) -> None:
        """Note an operator of the forward pass.

        Args:
            name: without its overload.
            kernel: what it becomes.
            inputs: the values that it reads.
            outputs: (value, bytes, whether mp shards it, whether the experts of a mixture made it).
            read: bytes of all tensors that it reads.
            call: the operator with all that it was called with.
        """
        outputs = list(outputs)
        sources, fused = self._known(inputs), kernel is Kernel.FUSED
        again = fused and name not in _ONCE
        if any(number in sources for number, *_ in outputs):  # written in place: what was read before is another value
            self._made.clear()
        elif again:
            made = [number for number, *_ in outputs]
            if (before := self._made.setdefault(call, made)) is not made:
                self._same.update(zip(made, before, strict=True))
                return
        for number in sources:
            self.values[number].forward.append(fused)
        for number, size, sharded, routed in outputs:
            if number not in sources:
                self.values[number] = _Value(size, sharded, routed, again and _REDUCES * size >= read, sources)
        self._operators.append(self._operator(kernel, sources, outputs, read, self.values))

    def backward(
        self, kernel: Kernel, inputs: Iterable[int], outputs: Iterable[tuple[int, int, bool, bool]], read: int
    ) -> None:
        """Note an operator of the backward pass; arguments as those of `forward`."""
        known, outputs = self._known(inputs), list(outputs)
        for number in known:
            self.values[number].backward.append(kernel is Kernel.FUSED)
        sources = known | set(inputs) & self._backward_values.keys()
        for number, size, sharded, routed in outputs:
            if number not in sources:
                self._backward_values[number] = _Value(size, sharded, routed)
        values = ChainMap(self._backward_values, self.values)
        self._backward_operators.append(self._operator(kernel, sources, outputs, read, values))

    def _operator(
        self,
        kernel: Kernel,
        sources: set[int],
        outputs: Iterable[tuple[int, int, bool, bool]],
        read: int,
        values: Mapping[int, _Value],
    ) -> _Operator:
        made = {number for number, *_ in outputs}
        level = max((self._level.get(number, 0) for number in sources), default=0)
        self._level.update(dict.fromkeys(made, level + (kernel is not Kernel.FUSED)))
        of_values = sum(min(values[number].size, read) for number in sources)
        return _Operator(kernel, level, sources, made, max(0, read - of_values))

    def _known(self, numbers: Iterable[int]) -> set[int]:
        return {self._same.get(number, number) for number in numbers} & self.values.keys()

    def kept(self) -> dict[int, tuple[int, bool, bool]]:
        """The values that are kept: number -> (bytes, whether mp shards it, whether experts made it)."""
        numbers = list(self.values)
        place = {number: 2 + 2 * index for index, number in enumerate(numbers)}
        network = _Network(2 + 2 * len(numbers))
        begin, end = 0, 1
        for number, value in self.values.items():
            inside, outside = place[number], place[number] + 1
            # What has to be written anyway costs its bytes; what would be written for this alone, twice as much.
            written = not value.recomputable or not all(value.forward) or not all(value.backward)
            network.add(inside, outside, value.size * (1 if written else 2))
            if not value.recomputable or not all(value.backward):  # a product of the backward pass reads it from memory
                network.add(begin, inside, _ENDLESS)
            for source in value.sources:
                network.add(place[source] + 1, inside, _ENDLESS)
            if value.backward:
                network.add(outside, end, _ENDLESS)
        reached = network.cut(begin, end)
        return {
            number: (value.size, value.sharded, value.routed)
            for number, value in self.values.items()
            if place[number] in reached and place[number] + 1 not in reached
        }

    def kernels(self, kept: Iterable[int], returned: Iterable[int]) -> Kernels:
        """What the forward pass comes to.

        Args:
            kept: values that stay for the backward pass.
            returned: values that the block returns.
        """
        return _kernels(self._operators, self.values, {*kept, *returned})

    def backward_kernels(self, kept: Iterable[int]) -> Kernels:
        """What the backward pass comes to, in which what is not kept is computed again by who reads it."""
        there = {*kept, *(number for number, value in self.values.items() if not value.sources)}
        operators = [
            replace(operator, inputs=self._read_again(operator.inputs, there)) for operator in self._backward_operators
        ]
        read = {number for operator in operators for number in operator.inputs}
        values = ChainMap(self._backward_values, self.values)
        return _kernels(operators, values, self._backward_values.keys() - read)

    def _read_again(self, numbers: set[int], there: set[int]) -> set[int]:
        """What is read where these values are wanted of which not all are there."""
        wanted, seen = list(numbers), set()
        while wanted:
            number = wanted.pop()
            if number not in seen:
                seen.add(number)
                if number in self.values and number not in there:
                    wanted.extend(self.values[number].sources)
        return {number for number in seen if number in there or number not in self.values}


def _kernels(operators: Sequence[_Operator], values: Mapping[int, _Value], written: Set[int]) -> Kernels:
    """Neighbours that are fused and equally far on are one kernel, which reads and writes what others see of it.

    Neighbours are those of which one reads what the other makes, and those that go over the same value.

    Args:
        written: values that are wanted behind these operators.
    """
    group = _Groups()
    maker = {number: operator for operator in operators for number in operator.outputs}
    for operator in operators:
        for number in operator.inputs & maker.keys():
            both = operator.kernel is Kernel.FUSED is maker[number].kernel
            if both and maker[number].level == operator.level:
                group.join(id(maker[number]), id(operator))
    beside: dict[tuple[int, int], _Operator] = {}
    for operator in operators:
        largest = max((values[number].size for number in operator.outputs), default=0)
        for number in operator.inputs if operator.kernel is Kernel.FUSED else ():
            if largest <= 2 * values[number].size <= 4 * largest:  # numbers of 2 bytes and of 4
                group.join(id(beside.setdefault((number, operator.level), operator)), id(operator))
    reads: dict[int, set[int]] = {}
    writes: dict[int, set[int]] = {}
    others: dict[int, int] = {}
    for operator in operators:
        own = group.of(id(operator))
        for number in operator.inputs:
            made_by = maker.get(number)
            if made_by is None or group.of(id(made_by)) != own:
                reads.setdefault(own, set()).add(number)
                if made_by is not None:
                    writes.setdefault(group.of(id(made_by)), set()).add(number)
        for number in operator.outputs & written:
            writes.setdefault(own, set()).add(number)
        others[own] = others.get(own, 0) + operator.others
    moving = {group.of(id(operator)) for operator in operators if operator.kernel is not Kernel.PRODUCT}
    moved = [
        values[number]
        for own in moving
        for numbers in (reads.get(own, set()), writes.get(own, set()))
        for number in numbers
    ]
    return Kernels(
        len({group.of(id(operator)) for operator in operators}),
        (
            sum(value.size for value in moved) + sum(others[own] for own in moving),
            sum(value.size for value in moved if value.sharded),
            sum(value.size for value in moved if value.routed),
        ),
    )


class _Groups:
    """Which things belong together."""

    def __init__(self) -> None:
        self._above: dict[int, int] = {}

    def of(self, item: int) -> int:
        """The one that stands for all of its group."""
        while (above := self._above.get(item, item)) != item:
            item = above
        return item

    def join(self, one: int, other: int) -> None:
        self._above[self.of(one)] = self.of(other)


class _Network:
    """A flow network with integer capacities."""

    def __init__(self, count: int) -> None:
        self._left: list[dict[int, int]] = [{} for _ in range(count)]
        """For each node, how much more can flow to each neighbour."""

    def add(self, start: int, stop: int, capacity: int) -> None:
        self._left[start][stop] = self._left[start].get(stop, 0) + capacity
        self._left[stop].setdefault(start, 0)

    def cut(self, begin: int, end: int) -> set[int]:
        """What can be reached from `begin` when no more can flow to `end` (Edmonds and Karp, 1972)."""
        while True:
            came_from = {begin: begin}
            waiting = deque([begin])
            while waiting and end not in came_from:
                node = waiting.popleft()
                for other, capacity in self._left[node].items():
                    if capacity > 0 and other not in came_from:
                        came_from[other] = node
                        waiting.append(other)
            if end not in came_from:
                return set(came_from)
            path, node = [], end
            while node != begin:
                path.append((came_from[node], node))
                node = came_from[node]
            amount = min(self._left[start][stop] for start, stop in path)
            for start, stop in path:
                self._left[start][stop] -= amount
                self._left[stop][start] += amount
