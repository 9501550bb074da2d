"""Where attention is called: the calls of models that know nothing of sharded sequences are answered here."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from autolaunch_strategies.config import ConfigError, to_write
from autolaunch_strategies.context.attention.backends import context_attention
from autolaunch_strategies.mesh.layout import Layout, Peers
from autolaunch_strategies.model.random_positions import attention as attention_by_torch
from autolaunch_strategies.model.random_positions import by_position, holding
from autolaunch_strategies.sharded_sequence.collectives import TRAFFIC
from autolaunch_strategies.sharded_sequence.parts import whole
from autolaunch_strategies.sharded_sequence.shard import Positions, SequenceShard, cut, repeated_to
from autolaunch_strategies.torch_private.attention import ATTENTION_ARGUMENTS, HEADS, attention_replaced
from autolaunch_strategies.torch_private.backward import is_differentiating, run_backward
from autolaunch_strategies.torch_private.modes import is_active


@dataclass(frozen=True)
class Within:
    """What runs now: a module on this rank's part of a sequence."""

    module: str
    layout: Layout
    backend: str


class AttentionCalls(TorchFunctionMode):
    """While it is active, attention within a sharded module sees the keys and values of every rank.

    It has to be entered before `MixedTensors`, which comes first then and hands on the heads of this rank alone.
    """

    def __init__(self, peers: Peers, backend: str) -> None:
        super().__init__()
        self.peers, self.backend = peers, backend
        self.within: Within | None = None
        self.seen = 0
        """How many calls have been answered."""
        self._ran: dict[int, set[Within]] = {}
        self._chosen: str | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Forward and backward passes run within it."""
        if is_active(self):
            yield
            return
        with self:
            yield

    def sharding(self, module: str, layout: Layout, backend: str) -> AbstractContextManager[None]:
        """Within it tensors are this rank's part of a sequence."""
        within = Within(module, layout, backend)
        if torch.is_grad_enabled():
            self._ran.setdefault(layout.local, set()).add(replace(within, module=""))
        return self._set(within)

    @contextmanager
    def using(self, backend: str) -> Iterator[None]:
        """Within it attention is computed by another backend than the usual one."""
        before, self._chosen = self._chosen, backend
        try:
            yield
        finally:
            self._chosen = before

    def now(self) -> tuple[Layout, str] | None:
        """What a call of attention would be answered by; None: by torch."""
        return None if self.within is None else (self.within.layout, self._chosen or self.within.backend)

    def whole(self) -> AbstractContextManager[None]:
        """Within it tensors are whole."""
        return self._set(None)

    @contextmanager
    def _set(self, within: Within | None) -> Iterator[None]:
        before, self.within = self.within, within
        try:
            yield
        finally:
            self.within = before

    def repeating(self) -> Repeating:
        """The context in which what runs now can be run again, in a backward pass."""
        return Repeating(self, self.within)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.backward:
            with self:  # not within it while a function of its own runs; what is computed again must be
                return run_backward(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            return self._answer(func, types, args, kwargs or {})
        if func is F.multi_head_attention_forward:
            return self._multi_head_attention(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _answer(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        arguments = dict(zip(ATTENTION_ARGUMENTS, args, strict=False)) | kwargs
        if self.within is None and SequenceShard in types:
            return self._attention_outside(func, arguments)
        within = self._now(arguments["query"].shape[-2])
        return by_position(func)(*args, **kwargs) if within is None else self._attention(within, arguments)

    def _now(self, length: int) -> Within | None:
        """The sharded module that calls attention now with `length` queries; None outside of all of them.

        In a backward pass it is a module that is computed again, in a model that checkpoints its blocks itself.

        Raises:
            ConfigError: in a backward pass, if sequences of several lengths were padded to this one.
        """
        if self.within is not None or not is_differentiating():
            return self.within
        ran = self._ran.get(length, set())
        if len(ran) > 1:
            raise ConfigError(
                f"cp={self.peers.size} with activation checkpointing within the model",
                "sequences of several lengths are padded to the same one, and what is computed again has only that",
                "recompute=full, which knows what it computes again, or lengths that divide",
                to_write("recompute", "full"),
            )
        return next(iter(ran), None)

    def _attention_outside(self, func: Any, arguments: dict[str, Any]) -> Any:
        """Attention that no sharded module calls, on sequences that come out of some."""
        dim = arguments["query"].dim() - 2
        positions = _positions_of_heads(arguments, dim)
        if positions is None:
            return func(**arguments)
        parts = _parts_of_heads(arguments, dim)
        mask = arguments.get("attn_mask")
        if isinstance(mask, SequenceShard):
            parts["attn_mask"] = _mask_of_attention(mask, positions)
        return self._shard(self._attention(self._outside(positions), arguments | parts), dim, positions)

    def _outside(self, positions: Positions) -> Within:
        return Within("the model", positions.layout, self.backend)

    def _shard(self, padded: torch.Tensor, dim: int, positions: Positions) -> SequenceShard:
        local = padded.narrow(dim, 0, positions.layout.valid(self.peers.rank))
        return SequenceShard.of(local, dim, positions, self.peers.group)

    @torch.compiler.disable
    def _attention(self, within: Within, arguments: dict[str, Any]) -> Any:
        """As `F.scaled_dot_product_attention` of whole sequences, on q, k, v [b, h, local, d]: this rank's rows."""
        arguments, layout = dict(arguments), within.layout
        q, k, v = (arguments.pop(name) for name in HEADS)
        mask, is_causal = arguments.pop("attn_mask", None), arguments.pop("is_causal", False)
        if q.dim() < 3 or q.shape[-2] != layout.local:  # along something else than the sequence
            return attention_by_torch(q, k, v, attn_mask=mask, is_causal=is_causal, **arguments)
        if k.shape[-2] != layout.local:
            return self._on_whole_keys(within, q, k, v, mask, is_causal, arguments)
        self.seen += 1
        arguments.pop("enable_gqa", None)
        leading = q.shape[:-3]
        if q.dim() != 4:
            q, k, v = (_four_dims(item) for item in (q, k, v))
            mask = mask if mask is None or mask.dim() <= 4 else mask.flatten(0, mask.dim() - 4)
            if mask is not None and mask.dim() == 3:
                mask = mask.unsqueeze(0)
        with self.whole():  # what it draws is told by its backend, of which only that knows the shape
            out = context_attention(
                q,
                k,
                v,
                backend=self._chosen or within.backend,
                peers=self.peers,
                layout=layout,
                mask=mask,
                is_causal=is_causal,
                dropout_p=arguments.get("dropout_p", 0.0),
                scale=arguments.get("scale"),
            )
        return out if len(leading) == 1 else out.reshape(*leading, *out.shape[1:])

    def _on_whole_keys(
        self,
        within: Within,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Any,
        is_causal: bool,
        arguments: Any,
    ) -> torch.Tensor:
        """Attention of this rank's queries to keys that every rank has whole (those of another sequence)."""
        if is_causal:
            raise ConfigError(
                f"cp with {within.module}",
                f"causal attention of a sharded sequence of {within.layout.size} positions to {k.shape[-2]} keys that "
                "are not sharded",
                "causal attention of a sequence to itself, without a cache of keys",
            )
        if mask is not None and mask.dim() > 1 and mask.shape[-2] == within.layout.size:
            mask = mask.index_select(-2, within.layout.repeated_positions(self.peers.rank, mask.device))
        own_rows = {q.dim() - 2: (within.layout.padded_positions(self.peers.rank), within.layout.size)}
        with self.whole(), holding(own_rows):
            return attention_by_torch(q, k, v, attn_mask=mask, **arguments)

    def _multi_head_attention(self, func: Any, args: Any, kwargs: Any) -> Any:
        """As `F.multi_head_attention_forward`: attention within it is answered here, too.

        A whole mask [s, s] or [b·h, s, s] does not fit into its checks of shapes, so it goes around them.
        """
        arguments = dict(zip(_MULTI_HEAD_ARGUMENTS, args, strict=False)) | kwargs
        if self.within is None and isinstance(arguments["query"], SequenceShard):
            return self._multi_head_attention_outside(func, arguments)
        within = self._now(arguments["query"].shape[0])
        if within is None or arguments["query"].shape[0] != within.layout.local:
            return by_position(func)(**arguments)
        if arguments.get("need_weights", True):
            raise ConfigError(
                f"cp={self.peers.size} with {within.module or 'the model'}",
                "nn.MultiheadAttention is asked for its weights, as it is unless told otherwise; then it does not call "
                "scaled_dot_product_attention",
                "need_weights=False",
                "self.attention(x, x, x, need_weights=False)",
            )
        mask, local = arguments.get("attn_mask"), within.layout.local
        around: Any = None
        if mask is not None and mask.shape[-1] != local:
            if arguments.get("is_causal") and arguments.get("key_padding_mask") is None:
                around = "causal"
            else:
                around = mask
                if mask.dtype == torch.bool:
                    around = torch.zeros_like(mask, dtype=arguments["query"].dtype).masked_fill_(mask, float("-inf"))
                if mask.dim() == 3:
                    around = around.unflatten(0, (-1, arguments["num_heads"]))
            arguments |= {"attn_mask": None, "is_causal": False}

        def attention(
            q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False
        ) -> Any:
            if isinstance(around, torch.Tensor):
                attn_mask = around if attn_mask is None else around + self._of_all_keys(attn_mask, within.layout)
            causal = is_causal or around == "causal"
            rest = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": causal}
            return self._attention(within, {"query": q, "key": k, "value": v, **rest})

        with attention_replaced(attention):
            return func(**arguments)

    def _multi_head_attention_outside(self, func: Any, arguments: dict[str, Any]) -> Any:
        """As `_attention_outside`, of [s, b, e]."""
        positions = _positions_of_heads(arguments, 0)
        if positions is None or arguments.get("need_weights", True):
            return func(**arguments)
        mask, ignored = arguments.get("attn_mask"), arguments.get("key_padding_mask")
        if isinstance(mask, SequenceShard):
            arguments["attn_mask"] = mask.whole()
        if ignored is not None:
            dim = ignored.dim() - 1
            if not isinstance(ignored, SequenceShard) or (ignored.sequence_dim, ignored.positions) != (dim, positions):
                part = cut(whole(ignored), dim, positions, self.peers.group)
            else:
                part = ignored.local
            arguments["key_padding_mask"] = repeated_to(part, dim, positions.layout.local)
        with self._set(self._outside(positions)):
            out, _ = self._multi_head_attention(func, (), arguments | _parts_of_heads(arguments, 0))
        return self._shard(out, 0, positions), None

    def _of_all_keys(self, mask: torch.Tensor, layout: Layout) -> torch.Tensor:
        """A mask [..., local] of this rank's keys as one of the keys of all ranks, [..., size]."""
        own = mask.narrow(-1, 0, layout.valid(self.peers.rank))
        positions = Positions.of_layout(layout)
        return _mask_of_attention(SequenceShard.of(own, own.dim() - 1, positions, self.peers.group), positions)


_MULTI_HEAD_ARGUMENTS = tuple(inspect.signature(F.multi_head_attention_forward).parameters)


def _mask_of_attention(mask: SequenceShard, positions: Positions) -> torch.Tensor:
    """A mask of all keys: its rows are those of this rank's queries, padded, or all."""
    if (mask.sequence_dim, mask.positions) == (mask.dim() - 2, positions):
        return repeated_to(mask.local, mask.dim() - 2, positions.layout.local)
    before = TRAFFIC.copy()
    whole_mask = mask.whole()
    TRAFFIC.restore(before)  # a part of attention, as the keys are
    return whole_mask


def _positions_of_heads(arguments: dict[str, Any], dim: int) -> Positions | None:
    """The positions that queries, keys and values have along `dim`; None if not all are sharded and by the same."""
    heads = [arguments[name] for name in HEADS]
    if not all(isinstance(item, SequenceShard) and item.sequence_dim == dim for item in heads):
        return None
    positions: Positions = heads[0].positions
    alike = all(item.positions == positions for item in heads)
    return positions if alike and _is_all(positions) else None


def _parts_of_heads(arguments: dict[str, Any], dim: int) -> dict[str, Any]:
    """What this rank holds of queries, keys and values, padded."""
    return {name: repeated_to(arguments[name].local, dim, arguments[name].positions.layout.local) for name in HEADS}


def _is_all(positions: Positions) -> bool:
    """Whether `positions` are all positions of a sequence."""
    return positions == Positions.of_layout(positions.layout)


def _four_dims(tensor: torch.Tensor) -> torch.Tensor:
    """[..., h, s, d] as [b, h, s, d]."""
    return tensor.unsqueeze(0) if tensor.dim() == 3 else tensor.flatten(0, tensor.dim() - 4)


class Repeating:
    """A context that can be entered any number of times: what ran when it was made runs again."""

    def __init__(self, calls: AttentionCalls, within: Within | None) -> None:
        self.calls, self.within = calls, within
        self._stack: list[ExitStack] = []

    def __enter__(self) -> None:
        stack = ExitStack()
        stack.enter_context(self.calls.running())
        stack.enter_context(self.calls._set(self.within))
        self._stack.append(stack)

    def __exit__(self, *error: Any) -> None:
        self._stack.pop().__exit__(*error)
