"""Scaled dot product attention: one program forwards, one backwards.

The one backwards computes the weights again, instead of their being kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jax import numpy as jnp

from tpu_dist.runtime.device.place import place
from tpu_dist.runtime.operators.functional_kernels import functional_kernel
from tpu_dist.runtime.operators.lowering import Lowering
from tpu_dist.runtime.operators.operator import Operator

Array = Any
Tensor = torch.Tensor


def _rows(x: Array, kv_heads: int) -> Array:
    """Rows of queries, (B, H, L, E), by the key head that they share: (B, K, H / K * L, E).

    One axis of rows: XLA's CPU compiler takes twice as long over products that sum over two.
    """
    batch, _, _, width = x.shape
    return x.reshape(batch, kv_heads, -1, width)


def _product(terms: str, a: Array, b: Array, narrow: Any, wide: Any) -> Array:
    """An einsum of operands in `narrow`, summed in `wide`."""
    return jnp.einsum(terms, a.astype(narrow), b.astype(narrow), preferred_element_type=wide)


def _operand_dtype(dtype: Any) -> Any:
    """In which the operands of products are: theirs on a TPU, float32 at least on the stand-in.

    XLA's CPU compiler widens bfloat16 and float16 anyhow, and slower than when it is told.
    """
    return dtype if place().platform == "tpu" else jnp.promote_types(dtype, jnp.float32)


def _scores(
    rows: Array, k: Array, length: int, mask: Array | None, is_causal: bool, scale: float
) -> Array:
    """What softmax is taken of, (B, K, H / K * L, S), in float32 at least."""
    wide = jnp.promote_types(k.dtype, jnp.float32)
    scores = _product("bkre,bkse->bkrs", rows, k, _operand_dtype(k.dtype), wide) * scale
    by_query = scores.reshape(*scores.shape[:2], -1, length, k.shape[2])  # (B, K, H / K, L, S)
    if mask is not None:
        mask = jnp.broadcast_to(mask, (1,) * (4 - mask.ndim) + mask.shape)
        if mask.shape[1] == 1:
            mask = mask[:, :, None]
        else:
            mask = mask.reshape(mask.shape[0], *by_query.shape[1:3], *mask.shape[2:])
        if mask.dtype == jnp.bool_:
            by_query = jnp.where(mask, by_query, -jnp.inf)
        else:
            by_query = by_query + mask.astype(wide)
    if is_causal:
        allowed = jnp.tri(length, k.shape[2], dtype=bool)
        by_query = jnp.where(allowed, by_query, -jnp.inf)
    return by_query.reshape(scores.shape)


def _attend(
    q: Array, k: Array, v: Array, mask: Array | None, is_causal: bool, scale: float
) -> tuple[Array, Array]:
    """The result, (B, H, L, Ev), and the logarithm of the weights' sums, (B, H, L)."""
    scores = _scores(_rows(q, k.shape[1]), k, q.shape[2], mask, is_causal, scale)
    top = jnp.max(scores, -1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0)  # rows in which all is masked
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, -1, keepdims=True)
    shares = weights / jnp.where(total == 0, 1, total)
    out = _product("bkrs,bkse->bkre", shares, v, _operand_dtype(v.dtype), scores.dtype)
    sums = top + jnp.log(total)
    return out.reshape(*q.shape[:-1], v.shape[-1]).astype(q.dtype), sums.reshape(q.shape[:-1])


def _attend_backward(
    grad: Array,
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    out: Array,
    sums: Array,
    is_causal: bool,
    scale: float,
    needs_mask_grad: bool,
) -> tuple[Array, ...]:
    heads, wide, narrow = k.shape[1], sums.dtype, _operand_dtype(q.dtype)
    q_r, grad_r, out_r = _rows(q, heads), _rows(grad, heads), _rows(out, heads)
    scores = _scores(q_r, k, q.shape[2], mask, is_causal, scale)
    sums_r = sums.reshape(*scores.shape[:-1], 1)
    shares = jnp.where(jnp.isfinite(sums_r), jnp.exp(scores - sums_r), 0)

    grad_v = _product("bkrs,bkre->bkse", shares, grad_r, narrow, wide)
    grad_shares = _product("bkre,bkse->bkrs", grad_r, v, narrow, wide)
    along = jnp.sum(grad_r.astype(wide) * out_r.astype(wide), -1, keepdims=True)
    grad_scores = shares * (grad_shares - along)
    grad_q = _product("bkrs,bkse->bkre", grad_scores, k, narrow, wide) * scale
    grad_k = _product("bkrs,bkre->bkse", grad_scores, q_r, narrow, wide) * scale
    results = (
        grad_q.reshape(q.shape).astype(q.dtype),
        grad_k.astype(k.dtype),
        grad_v.astype(v.dtype),
    )
    if not needs_mask_grad:
        return results
    assert mask is not None
    full = grad_scores.reshape(*q.shape[:-1], k.shape[2])
    shape = (1,) * (4 - mask.ndim) + mask.shape
    summed = tuple(d for d in range(4) if shape[d] == 1 and full.shape[d] != 1)
    return *results, jnp.sum(full, summed, keepdims=True).reshape(mask.shape).astype(mask.dtype)


_library = torch.library.Library("tpu_dist", "DEF")
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool is_causal, float scale) "
    "-> (Tensor, Tensor)"
)
_library.define(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out, "
    "Tensor sums, bool is_causal, float scale, bool needs_mask_grad) -> Tensor[]"
)
_forward = torch.ops.tpu_dist.attention.default
_backward = torch.ops.tpu_dist.attention_backward.default


def _enter(overload: Any, function: Callable[..., Any]) -> None:
    name = overload._schema.name.split("::")[1]
    lowering = Lowering(name=name, function=function, multiplies=True, has_meta=False)
    _library.impl(name, functional_kernel(Operator(overload, lowering)), "PrivateUse1")


_enter(_forward, _attend)
_enter(_backward, _attend_backward)


class _Attention(torch.autograd.Function):
    """What autograd sees."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float) -> Any:
        out, sums = _forward(q, k, v, mask, causal, scale)
        ctx.save_for_backward(q, k, v, mask, out, sums)
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        q, k, v, mask, out, sums = ctx.saved_tensors
        needs_mask_grad = bool(ctx.needs_input_grad[3])
        grads = _backward(grad, q, k, v, mask, out, sums, ctx.causal, ctx.scale, needs_mask_grad)
        return *grads[:3], (grads[3] if needs_mask_grad else None), None, None


def _is_ours(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float) -> bool:
    """Whether the programs above do it: (B, H, L, E), plain tensors, no dropout."""
    tensors = [t for t in (q, k, v, mask) if t is not None]
    return (
        dropout_p == 0
        and all(type(t) in (Tensor, torch.nn.Parameter) for t in tensors)
        and all(t.dim() == 4 for t in (q, k, v))
        and q.dtype == k.dtype == v.dtype
        and q.is_floating_point()
        and q.shape[0] == k.shape[0] == v.shape[0]
        and k.shape[1] == v.shape[1]
        and k.shape[2] == v.shape[2]
        and q.shape[3] == k.shape[3]
        and k.shape[1] > 0
        and q.shape[1] % k.shape[1] == 0
        and min(q.shape[2], k.shape[2], q.shape[3], v.shape[3]) > 0
        and (mask is None or (0 < mask.dim() <= 4))
    )


def _factor(query: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _is_sharded(*tensors: Tensor) -> bool:
    """Whether they are DTensors, which know how to shard flash attention, and do so in a ring."""
    return all(hasattr(tensor, "placements") and tensor.dim() == 4 for tensor in tensors)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention, of what a DTensor has on this rank."""
    if dropout_p:
        raise NotImplementedError(
            f"attention of sharded tensors has no dropout on 'tpu', and {dropout_p} was asked for"
        )
    out, sums = _forward(query, key, value, None, is_causal, _factor(query, scale))
    nothing = query.new_empty(())  # no dimension: DTensor takes it for what is not sharded
    sizes = query.shape[2], key.shape[2]
    return out, sums, nothing, nothing, *sizes, nothing, nothing, nothing


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Its backward."""
    grads = _backward(
        grad_out, query, key, value, None, out, logsumexp, is_causal, _factor(query, scale), False
    )
    return tuple(grads)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention."""
    if attn_mask is None and _is_sharded(query, key, value) and query.shape[1] == key.shape[1]:
        return torch.ops.aten._scaled_dot_product_flash_attention.default(  # type: ignore[no-any-return]
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
    grouped = query.dim() == 4 and key.dim() == 4 and query.shape[1] != key.shape[1]
    both = attn_mask is not None and is_causal
    if (
        both
        or (grouped and not enable_gqa)
        or not _is_ours(query, key, value, attn_mask, dropout_p)
    ):
        return torch.ops.aten._scaled_dot_product_attention_math.default(  # type: ignore[no-any-return]
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale,
            enable_gqa=enable_gqa,
        )[0]  # fmt: skip
    factor = _factor(query, scale)
    if torch.is_grad_enabled():
        return _Attention.apply(query, key, value, attn_mask, is_causal, factor)  # type: ignore[no-any-return,no-untyped-call]
    return _forward(query, key, value, attn_mask, is_causal, factor)[0]  # type: ignore[no-any-return]


# torch's own operator is one of autograd's: what it decomposes to depends on this device's name.
AUTOGRAD_KERNELS: Mapping[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": scaled_dot_product_attention
}
KERNELS = {
    **AUTOGRAD_KERNELS,
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
}
