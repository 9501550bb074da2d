"""Random numbers by position: what an element draws is a function of where it stands in the run, on every mesh alike.

A generator draws one number after the other, so what an element gets depends on what its process has drawn before: on
other stages, other shares of the batch and other parts of tensors it is another number. Here the number of an element
is a hash of the seed of the run, the optimizer step, the module that draws and the number of its call, and the indices
of the element in the whole tensor, the batch of all ranks included. Nothing is kept, so that recomputation sees the
same numbers, and so does a run that resumes on another mesh.

The indices of all dims but the last are hashed, those of the last dim are, each by 64 bits; an element mixes the sum of
both. The first are few, so that an element costs what the mixing of 32 bits does: two multiplications and two shifts.
Sources: the finaliser of SplitMix64 (Steele, Lea and Flood 2014, with the constants of Stafford's variant 13), and the
finaliser `lowbias32` of Wellons' hash prospector, of which a comparison needs no last shift.
"""

from __future__ import annotations

import hashlib
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from autolaunch_strategies.config import ConfigError
from autolaunch_strategies.torch_private.attention import attention_dropping, attention_replaced
from autolaunch_strategies.torch_private.random_functions import ORIGINALS, in_place_of, is_in_backward, is_recording

Held = Mapping[int, tuple[torch.Tensor, int]]
"""Of which dims this rank holds a part: dim -> (indices of its entries in the whole, int64 [count]; size there)."""

HeldByShape = Callable[[Sequence[int]], Held]
"""`Held` of a tensor of this shape."""

_CHUNK = 1 << 15
"""Elements that are mixed at once on a CPU: they stay in its cache."""


@dataclass
class Draws:
    """Where in the run numbers are drawn: a step, some samples of its batch, and how often each module has drawn."""

    seed: str
    names: weakref.WeakKeyDictionary[nn.Module, str]
    samples: int
    """In the batch that this process works on now."""
    first: int
    """The number of the first of them in the batch of all ranks, over one optimizer step."""
    calls: dict[str, int] = field(default_factory=dict)
    again: bool = False
    """Whether a forward pass is repeated from `calls` on."""
    held: dict[str, Held] = field(default_factory=dict)
    """By module what was held in its last call, for a checkpoint of the model's own: who says it stands around that."""
    only_single: bool = False
    """Whether single numbers alone are drawn here, all others from the generators of the ranks."""

    def call(self, shape: Sequence[int]) -> tuple[int, int, Held]:
        """For a call that is made now two numbers of 63 bits, other ones for every call, and what is held in it."""
        place = _innermost(self.names)
        assert place is not None, "asked for in `_draws_here`"
        number, held = self.calls.get(place, 0), _held(shape)
        if is_in_backward() and not self.again:
            held = self.held.get(place, held)
            if number > 1:
                instead = "recompute=full instead of the model's own gradient checkpointing"
                raise ConfigError(
                    f"random_numbers={'by_rank' if self.only_single else 'by_position'}",
                    f"{place or 'the module'} draws {number} times in a step, and is computed again by a "
                    "checkpoint of the model's own, of which it can't be known which of these it repeats",
                    instead if self.only_single else f"{instead}, or random_numbers=by_rank",
                    "recompute=full" if self.only_single else "random_numbers=by_rank",
                )
            number = 0
        else:
            self.calls[place], self.held[place] = number + 1, held
        digest = hashlib.blake2b(f"{self.seed}:{place}:{number}".encode(), digest_size=16).digest()
        return int.from_bytes(digest[:8], "little") >> 1, int.from_bytes(digest[8:], "little") >> 1, held

    def hashes(self, shape: Sequence[int], device: torch.device) -> Iterator[tuple[slice, torch.Tensor]]:
        """32 random bits for each element of a tensor, as (rows, int32 [rows, last dim]), a part at a time.

        The highest bits are the most random ones.
        """
        rows_key, columns_key, held = self.call(shape)
        *outer, _ = indices = self._indices(shape, held, device)
        row = torch.zeros((), dtype=torch.int64, device=device)
        for index, size in outer:
            row = (row.unsqueeze(-1) * size + index).flatten()
        row, column = row.reshape(-1) + rows_key, indices[-1][0] + columns_key
        rows, columns = _mixed_64(torch.cat([row, column])).split([len(row), len(column)])
        count = len(rows) if device.type != "cpu" else max(1, _CHUNK // max(len(columns), 1))
        for start in range(0, len(rows), max(count, 1)):
            part = slice(start, min(start + count, len(rows)))
            yield part, _mixed_32(rows[part, None] + columns)

    def _indices(self, shape: Sequence[int], held: Held, device: torch.device) -> list[tuple[torch.Tensor, int]]:
        """Of each dim the indices in the whole tensor of all ranks, and its size there (that of dim 0 is not used)."""
        if not shape:
            return [(torch.zeros(1, dtype=torch.int64, device=device), 1)]
        indices = []
        for dim, count in enumerate(shape):
            index, size = held.get(dim, (None, count))
            index = torch.arange(count, device=device) if index is None else index.to(device)
            if dim == 0 and self.samples and size % self.samples == 0:
                index = index + self.first * (size // self.samples)
            indices.append((index, size))
        return indices


_NOW: list[Draws | None] = [None]
_HELD: list[tuple[HeldByShape, ...]] = [()]


@contextmanager
def draws_uncounted() -> Iterator[None]:
    """Behind it modules draw as if they had drawn nothing within."""
    draws = _NOW[0]
    if draws is None:
        yield
        return
    calls, held = dict(draws.calls), dict(draws.held)
    try:
        yield
    finally:
        draws.calls.clear()
        draws.calls.update(calls)
        draws.held.clear()
        draws.held.update(held)


def _held(shape: Sequence[int]) -> Held:
    """What was said last about a dim counts, or is a part of the part that was said before."""
    together: dict[int, tuple[torch.Tensor, int]] = {}
    for of_shape in _HELD[0]:
        for dim, (index, size) in of_shape(shape).items():
            outer, whole = together.get(dim, (index, size))
            together[dim] = (outer[index], whole) if dim in together and len(outer) == size else (index, size)
    return together


def _signed(bits: int, width: int) -> int:
    return bits - (1 << width) if bits >> (width - 1) else bits


def _mixed_64(x: torch.Tensor) -> torch.Tensor:
    """Of int64 numbers 32 random bits each, as int32."""
    x = x * _signed(0x9E3779B97F4A7C15, 64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * _signed(factor, 64)
    return (x ^ (x >> 31 & (1 << 33) - 1)).to(torch.int32)


def _mixed_32(x: torch.Tensor) -> torch.Tensor:
    """Mixes int32 numbers in place; there is no shift of them without the sign, so its copies are masked away."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << 32 - shift) - 1)).mul_(_signed(factor, 32))
    return x


def _draws_here(single: bool = False) -> Draws | None:
    """Where numbers are drawn now; None outside of steps, and for what no module of the trained one has asked for.

    Args:
        single: a tensor without dims is drawn.
    """
    draws = _NOW[0]
    if draws is None or (draws.only_single and not single) or is_recording():
        return None
    place = _innermost(draws.names)
    is_of_step = draws.only_single and not place  # what the step itself draws is for the samples of its rank
    return None if place is None or is_of_step else draws


def _innermost(names: Mapping[nn.Module, str]) -> str | None:
    """The name of the module whose method has led here; found on the stack, so that calls of modules cost nothing."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and (name := names.get(owner)) is not None:
            return name
        frame = frame.f_back  # type: ignore[assignment]  # of the outermost it is None, which ends the loop
    return None


# --- what torch's functions give ------------------------------------------------------------------------------------


def _kept(draws: Draws, shape: Sequence[int], keep: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """1 with the probability `keep`, else 0."""
    limit = round(keep * 2**32) - 2**31
    return _drawn(draws, torch.empty(shape, dtype=dtype, device=device), lambda bits: bits < limit)


def _drawn(draws: Draws, out: torch.Tensor, of_bits: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`out`, contiguous, filled with what `of_bits` makes of 32 random bits for each element."""
    rows = out.view(-1, *out.shape[-1:] or (1,))
    with torch.no_grad():
        for part, bits in draws.hashes(out.shape, out.device):
            rows[part] = of_bits(bits).to(out.dtype)
    return out


def _uniform(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Multiples of 2 ** -24 in [0, 1); of fewer digits in types in which these would be rounded to 1."""
    digits = {torch.bfloat16: 8, torch.float16: 11}.get(dtype, 24)
    return ((bits >> 32 - digits) + 2 ** (digits - 1)) * 2.0**-digits


def _normal(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Of the normal distribution, by its inverse at 2 ** 24 places."""
    return torch.erfinv(((bits >> 8) + 0.5) * 2.0**-23) * math.sqrt(2)


def _normal_of(bits: torch.Tensor, dtype: torch.dtype, mean: float, std: float) -> torch.Tensor:
    return _normal(bits, dtype).mul_(std).add_(mean)


def _uniform_between(bits: torch.Tensor, dtype: torch.dtype, low: float, high: float) -> torch.Tensor:
    return low + _uniform(bits, dtype) * (high - low)


def _exponential(bits: torch.Tensor, dtype: torch.dtype, rate: float) -> torch.Tensor:
    """Of the exponential distribution, at 2 ** 23 places: never 0, of which Gumbel's noise takes the logarithm."""
    return torch.log(((bits >> 9) + (2**22 + 0.5)) * 2.0**-23) / -rate


def _addressed(tensor: Any) -> Draws | None:
    """`_draws_here` for a plain tensor; others are taken apart first, by those who know how."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta and tensor.numel() > 0
    return _draws_here() if plain else None


def _dropout_with(original: Callable[..., Any], shape_of: Callable[[torch.Tensor], Sequence[int]]) -> Callable:
    in_place = original.__name__.endswith("_")

    def dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        draws = _addressed(input) if train and 0 < p < 1 else None
        if draws is None:
            return original(input, p, train)
        with torch.no_grad():
            noise = _kept(draws, shape_of(input), 1 - p, input.dtype, input.device).div_(1 - p)
        return input.mul_(noise) if in_place else input * noise

    return dropout


def _by_channel(tensor: torch.Tensor) -> Sequence[int]:
    return (*tensor.shape[:2], *[1] * (tensor.dim() - 2))


def _bernoulli_(self: torch.Tensor, p: Any = 0.5, *, generator: Any = None) -> torch.Tensor:
    draws = _addressed(self) if isinstance(p, float) and generator is None else None
    if draws is None:
        return ORIGINALS["bernoulli_"](self, p, generator=generator)
    with torch.no_grad():
        kept = _kept(draws, self.shape, p, self.dtype, self.device)
    return self.copy_(kept)  # no gradient passes through, as through torch's own


def _filled(name: str, of_bits: Callable[..., torch.Tensor], **defaults: float) -> Callable[..., torch.Tensor]:
    """`Tensor.normal_` or one of its kind: `of_bits` of random bits and of its arguments, which are in this order."""
    original = ORIGINALS[name]

    def fill(self: torch.Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> torch.Tensor:
        # Weights that a forward makes are none of samples, and the same on all ranks.
        plain = self.is_floating_point() and generator is None and not isinstance(self, nn.Parameter)
        draws = _addressed(self) if plain else None
        if draws is None:
            return original(self, *args, generator=generator, **kwargs)
        values = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}.values()
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return self.copy_(_drawn(draws, out, lambda bits: of_bits(bits, self.dtype, *values)))

    return fill


def _made(name: str, of_bits: Callable[[torch.Tensor, torch.dtype], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.rand` or one of its kind: of a shape, or (`rand_like`) of the shape of a tensor."""
    original, empty = ORIGINALS[name], torch.empty_like if name.endswith("_like") else torch.empty

    def make(*size: Any, **options: Any) -> torch.Tensor:
        if torch.compiler.is_compiling():  # what is compiled can't ask where it is
            return original(*size, **options)
        single = len(size) == 1 and isinstance(size[0], Sequence) and not size[0]
        draws = _addressed(size[0]) if empty is torch.empty_like else _draws_here(single)
        if draws is None or options.keys() - {"dtype", "device", "requires_grad"}:
            return original(*size, **options)
        out = empty(*size, **options)
        if out.is_meta or not out.numel() or not out.is_floating_point() or not out.is_contiguous():
            return original(*size, **options)
        _drawn(draws, out.detach(), lambda bits: of_bits(bits, out.dtype))
        return out

    return make


def _randint(*bounds_and_size: Any, **options: Any) -> torch.Tensor:
    """`torch.randint(low, high, size)`, or without `low`."""
    *bounds, size = bounds_and_size
    low, high = (0, *bounds)[-2:] if 1 <= len(bounds) <= 2 else (0, 0)
    usual = isinstance(size, Sequence) and not options.keys() - {"device", "dtype"} and 0 < high - low < 2**31
    draws = _draws_here() if usual and 0 not in size else None
    if draws is None:
        return ORIGINALS["randint"](*bounds_and_size, **options)
    out = torch.empty(size, **{"dtype": torch.int64, **options})
    return _drawn(draws, out, lambda bits: ((bits.long() + 2**31) * (high - low) >> 32) + low)


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`scaled_dot_product_attention` where torch has no kernel with dropout that would be lost: on a CPU."""
    draws = _addressed(query) if dropout_p > 0 and query.device.type == "cpu" else None
    if draws is None:
        original = ORIGINALS["scaled_dot_product_attention"]
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return original(query, key, value, attn_mask, dropout_p, is_causal, **options)
    kept = _kept(draws, (*query.shape[:-1], key.shape[-2]), 1 - dropout_p, torch.bool, query.device)
    return attention_dropping(query, key, value, attn_mask, dropout_p, is_causal, kept, scale, enable_gqa)


def by_position(func: Callable[..., Any]) -> Callable[..., Any]:
    """What computes as a function of torch, and drops weights of attention by position on plain tensors.

    For code that is handed `func` because it is what answers attention, as with cp: there torch's own function is not
    replaced, or that code would not be asked anymore.
    """
    if _NOW[0] is None or _NOW[0].only_single:
        return func
    if func is ORIGINALS["scaled_dot_product_attention"]:
        return attention
    return _with_attention_by_position if func is F.multi_head_attention_forward else func


def _with_attention_by_position(*args: Any, **kwargs: Any) -> Any:
    with attention_replaced(attention):
        return F.multi_head_attention_forward(*args, **kwargs)


_REPLACED: dict[str, Callable[..., Any]] = {
    "dropout": _dropout_with(ORIGINALS["dropout"], lambda tensor: tensor.shape),
    "dropout_": _dropout_with(ORIGINALS["dropout_"], lambda tensor: tensor.shape),
    "feature_dropout": _dropout_with(ORIGINALS["feature_dropout"], _by_channel),
    "feature_dropout_": _dropout_with(ORIGINALS["feature_dropout_"], _by_channel),
    "bernoulli_": _bernoulli_,
    "exponential_": _filled("exponential_", _exponential, lambd=1),
    "normal_": _filled("normal_", _normal_of, mean=0, std=1),
    "uniform_": _filled("uniform_", _uniform_between, **{"from": 0, "to": 1}),
    "rand": _made("rand", _uniform),
    "rand_like": _made("rand_like", _uniform),
    "randn": _made("randn", _normal),
    "randn_like": _made("randn_like", _normal),
    "randint": _randint,
    "scaled_dot_product_attention": attention,
}

# --- where numbers are drawn ----------------------------------------------------------------------------------------


class PositionedNumbers:
    """Random numbers by position for the training steps of one module.

    Args:
        module: what is trained; names of modules are those in it.
        seed: of the run.
        attention: whether torch's attention is replaced by one that drops by position, too; else what answers calls
            of it has to see to that (see `by_position`).
        only_single: draw by position only what `torch.rand(())` gives in modules of `module`. A number by itself, for
            no element of any tensor, decides what is run: a layer is skipped or not, and ranks that gather it have to
            agree. What `module` draws itself, in its step, is for the samples of a rank.
    """

    def __init__(self, module: nn.Module, seed: int, attention: bool = True, only_single: bool = False) -> None:
        self.seed, self.only_single = seed, only_single
        self._names = weakref.WeakKeyDictionary({part: name for name, part in module.named_modules()})
        self._functions = {
            name: function
            for name, function in _REPLACED.items()
            if (name == "rand" if only_single else attention or name != "scaled_dot_product_attention")
        }
        self._draws: Draws | None = None

    @contextmanager
    def step(self, number: int, samples: int, first: int) -> Iterator[None]:
        """A training step, forward.

        Args:
            number: of the optimizer step.
            samples, first: see `Draws`.
        """
        self._draws = Draws(f"{self.seed}:{number}", self._names, samples, first, only_single=self.only_single)
        with self.backward():
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """The backward pass of the last step, in which parts of it may be computed again."""
        with in_place_of(self._functions), _drawing(self._draws):
            yield


@contextmanager
def _drawing(draws: Draws | None) -> Iterator[None]:
    before, _NOW[0] = _NOW[0], draws
    held, _HELD[0] = _HELD[0], ()
    try:
        yield
    finally:
        _NOW[0], _HELD[0] = before, held


def drawing_now() -> Draws | None:
    """What `drawing` takes to go on later as it is now."""
    return _NOW[0]


def drawing(draws: Draws | None) -> AbstractContextManager[Any]:
    """Within it numbers are drawn where they were when `drawing_now` gave `draws`."""
    return nullcontext() if draws is None else _drawing(draws)


def drawing_of_part(start: int, samples: int, whole: int) -> AbstractContextManager[Any]:
    """Within it what is computed is a part of the batch: `samples` from number `start` on, of `whole`."""
    draws = _NOW[0]
    if draws is None:
        return nullcontext()
    first = draws.first * whole // max(draws.samples, 1) + start  # a step may give the model its batch twice
    return _drawing(replace(draws, samples=samples, first=first, calls=dict(draws.calls), held={}))


def drawing_again() -> AbstractContextManager[Any]:
    """The context in which a forward pass that begins now draws the same numbers once more."""
    draws = _NOW[0]
    if draws is None:
        return nullcontext()
    return _again(replace(draws, calls=dict(draws.calls), again=True), _HELD[0])


@contextmanager
def _again(draws: Draws, held: tuple[HeldByShape, ...]) -> Iterator[None]:
    with _drawing(replace(draws, calls=dict(draws.calls))):
        _HELD[0] = held
        yield


@contextmanager
def holding(held: Held | HeldByShape) -> Iterator[None]:
    """Within it plain tensors are parts of larger ones."""
    before, _HELD[0] = _HELD[0], (*_HELD[0], held if callable(held) else lambda shape: held)
    try:
        yield
    finally:
        _HELD[0] = before


def holding_part_of(sharded: DTensor) -> AbstractContextManager[Any]:
    """`holding` what this rank has of a DTensor, sharded evenly or with the last parts smaller."""
    if _NOW[0] is None or _NOW[0].only_single:
        return nullcontext()
    held: dict[int, tuple[torch.Tensor, int]] = {}
    for axis, placement in enumerate(sharded.placements):
        if isinstance(placement, Shard):
            dim, size = placement.dim % sharded.dim(), sharded.shape[placement.dim]
            assert dim not in held, "a dim that is sharded over two axes of a mesh"
            each = -(-size // sharded.device_mesh.size(axis))
            index = torch.arange(size)[each * sharded.device_mesh.get_local_rank(axis) :][:each]
            held[dim] = index, size
    return holding(held)
