"""Matrix products: narrow floats are summed in float32 and rounded once."""

from __future__ import annotations

from typing import Any

import torch
from jax import numpy as jnp

from tpu_dist.runtime.device.dtypes import array_dtype
from tpu_dist.runtime.operators.lowering import lower, lower_all

Array = Any
_NARROW = ("float16", "bfloat16")


def product(a: Array, b: Array) -> Array:
    """A @ b; float32 where they are narrower, for the kernel to round."""
    if a.dtype.name in _NARROW:
        return jnp.matmul(a, b, preferred_element_type=jnp.float32)
    return jnp.matmul(a, b)


def _product_plus(added: Array, a: Array, b: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    result = product(a, b)
    if result.dtype.kind in "iu":  # as torch, which casts them
        beta, alpha = int(beta), int(alpha)
    if alpha != 1:
        result = result * alpha
    if beta == 0:  # what is added may be NaN then
        return result
    added = added.astype(result.dtype)
    return result + (added if beta == 1 else added * beta)


lower_all(
    {
        "mm": product,
        "bmm": product,
        "mv": product,
        "dot": lambda a, b: product(a, b),
        "vdot": lambda a, b: product(jnp.conj(a), b),
    },
    multiplies=True,
)
lower_all(
    {"addmm": _product_plus, "baddbmm": _product_plus, "addmv": _product_plus},
    multiplies=True,
    static=("beta", "alpha"),
)


@lower("mm.dtype", "bmm.dtype", multiplies=True)
def _product_as(a: Array, b: Array, out_dtype: torch.dtype) -> Array:
    return jnp.matmul(a, b, preferred_element_type=array_dtype(out_dtype))


@lower("addbmm", multiplies=True, static=("beta", "alpha"))
def _addbmm(added: Array, a: Array, b: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    rows, columns = a.shape[1], b.shape[2]
    flat_a = a.transpose(1, 0, 2).reshape(rows, -1)
    flat_b = b.reshape(-1, columns)
    return _product_plus(added, flat_a, flat_b, beta=beta, alpha=alpha)


@lower("_grouped_mm", multiplies=True, has_meta=False)
def _grouped_mm(
    a: Array, b: Array, offs: Array = None, bias: Array | None = None,
    out_dtype: torch.dtype | None = None,
) -> Array:  # fmt: skip
    """Products of groups of rows with a matrix each; groups end where `offs` says."""
    from jax import lax

    wide = None if a.dtype.name not in _NARROW else jnp.float32
    if a.ndim == 2 and b.ndim == 3:
        starts = jnp.concatenate([jnp.zeros(1, offs.dtype), offs[:-1]])
        sizes = (offs - starts).astype(jnp.int32)
        result = lax.ragged_dot(a, b, sizes, preferred_element_type=wide)
    elif a.ndim == 2 and b.ndim == 2:
        group = jnp.searchsorted(offs, jnp.arange(a.shape[1]), side="right")
        member = group[None, :] == jnp.arange(offs.shape[0])[:, None]
        result = jnp.einsum("mk,gk,kn->gmn", a, member.astype(a.dtype), b,
                            preferred_element_type=wide)  # fmt: skip
    elif a.ndim == 3 and b.ndim == 2:
        group = jnp.searchsorted(offs, jnp.arange(b.shape[1]), side="right")
        member = group[None, :] == jnp.arange(offs.shape[0])[:, None]
        result = jnp.einsum("gmk,kn,gn->mn", a, b, member.astype(a.dtype),
                            preferred_element_type=wide)  # fmt: skip
    else:
        result = jnp.matmul(a, b, preferred_element_type=wide)
    if bias is not None:
        result = result + bias
    return result.astype(a.dtype if out_dtype is None else array_dtype(out_dtype))
