"""Attention where each rank of the cp axis holds a part of the sequence: what calls of attention are turned into."""

from __future__ import annotations

import torch

from autolaunch_strategies.config import CP_BACKEND_SPECS, ConfigError, ContextBackend, backends_that, to_write
from autolaunch_strategies.context.attention.exchange import GatherInOrder
from autolaunch_strategies.context.attention.gather import gathered_attention
from autolaunch_strategies.context.attention.kernels import attend_whole
from autolaunch_strategies.context.attention.operator import attention_over_places
from autolaunch_strategies.context.attention.ring import PassedKeys
from autolaunch_strategies.context.attention.tiles import padded
from autolaunch_strategies.context.attention.ulysses import attention_by_heads
from autolaunch_strategies.mesh.layout import Layout, Peers
from autolaunch_strategies.torch_private.modes import without_autocast


@torch.compiler.disable
def context_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    backend: str,
    peers: Peers,
    layout: Layout,
    mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """This rank's rows of attention over the whole sequence; every rank of `peers` has to call it alike.

    Args:
        q: [b, h, layout.local, d], or [b, layout.local, d]: queries at `layout.padded_positions(peers.rank)`.
        k: [b, h_kv, layout.local, d], where h_kv divides h. `v`: [b, h_kv, layout.local, d_v].
        backend: gather (keys and values from all ranks), ring (passed round), ulysses (heads for sequence) or usp
            (ulysses within rings). `layout` and `peers` have to be made for it.
        mask: bool (True: seen) or float (added), broadcastable to [b, h, queries, keys] of the whole sequence. One of
            the last two dims may also be this rank's part alone (layout.local). Both count with `is_causal`.

    Returns:
        [b, h, layout.local, d_v], 0 where a query sees no key and in rows of padding. Differentiable in q, k and v,
        and in a float mask with gather and ulysses.

    Raises:
        ConfigError: queries and keys differ in length; the mask fits in no way; heads cannot be shared evenly by the
            ranks; dropout, or a mask with a gradient, in a ring.
    """
    if q.dim() == 3:
        whole = context_attention(
            q[:, None], k[:, None], v[:, None], backend=backend, peers=peers, layout=layout,
            mask=mask[:, None] if mask is not None and mask.dim() == 3 else mask,
            dropout_p=dropout_p, is_causal=is_causal, scale=scale,
        )  # fmt: skip
        return whole[:, 0]
    _check_shapes(q, k, v, backend, peers, layout)
    if scale is None:
        scale = q.shape[3] ** -0.5
    device = q.device.type
    if torch.is_autocast_enabled(device):  # as for torch's own attention; kernels below know nothing of it
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    with without_autocast(device):
        if mask is not None:
            mask = _global_mask(mask, q.shape[1], backend, peers, layout)
        ring, ulysses, spec = peers.ring, peers.ulysses, CP_BACKEND_SPECS[backend]
        if ring is not None and spec.passes_keys:
            _check_ring(backend, mask, dropout_p)

        def attention(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
        ) -> torch.Tensor:  # fmt: skip
            if ring is None:
                return _at_one_place(q, k, v, layout, mask, dropout_p, is_causal, scale)
            if spec.passes_keys:
                return attention_over_places(
                    q, k, v, exchange=PassedKeys, group=ring, layout=layout, mask=mask, causal=is_causal, scale=scale
                )
            return gathered_attention(
                q, k, v, group=ring, layout=layout, mask=mask, dropout_p=dropout_p, causal=is_causal, scale=scale
            )

        if ulysses is None:
            return attention(q, k, v, mask)
        _check_heads(spec, q.shape[1], ulysses.size())
        return attention_by_heads(q, k, v, group=ulysses, mask=mask, attention=attention)


def _at_one_place(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    mask: torch.Tensor | None,
    dropout_p: float,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """Attention where no other place holds keys; padding is at the end."""
    length = q.shape[2]
    q, k, v = (x[:, :, : layout.size] for x in (q, k, v))
    return padded(attend_whole(q, k, v, causal=causal, mask=mask, dropout_p=dropout_p, scale=scale), length)


def _check_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: str, peers: Peers, layout: Layout
) -> None:
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ConfigError(
            f"cp={backend}",
            f"a call of attention has queries of shape {list(q.shape)}",
            "[batch, heads, sequence, width] or [batch, sequence, width]",
            to_write("mesh", f"dp{peers.size}"),
        )
    if not q.shape[2] == k.shape[2] == v.shape[2] == layout.local:
        raise ConfigError(
            f"cp={backend}",
            f"a call of attention has {q.shape[2]} queries and {k.shape[2]} keys per rank, of {layout.local} positions",
            "self-attention over the sequence that is sharded: as many queries as keys, no cache of earlier keys",
            to_write("mesh", f"dp{peers.size}"),
        )
    if q.shape[1] % k.shape[1] or k.shape[1] != v.shape[1]:
        raise ConfigError(
            f"cp={backend}",
            f"a call of attention has {q.shape[1]} heads of queries, {k.shape[1]} of keys and {v.shape[1]} of values",
            "as many heads of keys as of values, in a number that divides that of queries",
            to_write("mesh", f"dp{peers.size}"),
        )


def _check_heads(spec: ContextBackend, heads: int, ranks: int) -> None:
    if heads % ranks == 0:
        return
    without_heads = backends_that(lambda other: not other.exchanges_heads)
    instead = next(name for name in without_heads if CP_BACKEND_SPECS[name].passes_keys == spec.passes_keys)
    raise ConfigError(
        f"cp={spec.name}",
        f"{heads} heads of attention cannot be shared evenly by {ranks} ranks",
        f"as many ranks per group as divide {heads}; {' and '.join(without_heads)} need no heads",
        to_write("cp", instead),
    )


def _check_ring(backend: str, mask: torch.Tensor | None, dropout_p: float) -> None:
    names = backends_that(lambda spec: not spec.passes_keys)
    others = [f"cp={name}" for name in names]
    if dropout_p > 0.0:
        raise ConfigError(
            f"cp={backend}",
            f"attention drops out {dropout_p:g} of its weights, which a ring cannot",
            f"{', '.join(others)}, or a model whose attention dropout is 0 (attention_dropout, attn_pdrop)",
            to_write("cp", names[0]),
        )
    if mask is not None and mask.requires_grad:
        raise ConfigError(
            f"cp={backend}",
            "a mask of attention needs a gradient (a learned bias), which a ring cannot give",
            " or ".join(others),
            to_write("cp", names[0]),
        )


def _global_mask(mask: torch.Tensor, heads: int, backend: str, peers: Peers, layout: Layout) -> torch.Tensor:
    """The mask as [b or 1, h or 1, size or 1, size or 1]; dims of which this rank holds a part are gathered."""
    shape = list(mask.shape)
    mask = mask[(None,) * (4 - mask.dim())] if mask.dim() < 4 else mask
    fits = mask.dim() == 4 and all(length in (1, layout.size, layout.local) for length in mask.shape[2:])
    if not fits or mask.shape[1] not in (1, heads) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise ConfigError(
            f"cp={backend}",
            f"a mask of attention ({str(mask.dtype).removeprefix('torch.')}) has the shape {shape}",
            f"bool or float, [batch, heads, queries, keys], where heads is 1 or {heads}, and queries and keys are each "
            f"1, {layout.size} (the whole sequence) or {layout.local} (one rank's part)",
            to_write("mesh", f"dp{peers.size}"),
        )
    held = [dim for dim in (2, 3) if mask.shape[dim] not in (1, layout.size)]
    if len(held) == 2:
        raise ConfigError(
            f"cp={backend}",
            f"a mask of attention has the shape {shape}: this rank's queries with its own keys, so none for other keys",
            f"[batch, heads, queries, keys], where one of queries and keys is {layout.size}, the whole sequence",
            to_write("mesh", f"dp{peers.size}"),
        )
    for dim in held:
        (mask,) = GatherInOrder.apply(peers.group, layout, dim, mask)
    return mask
