"""torch.autocast("tpu"): which operators run in the narrow dtype, which in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

SUPPORTED = (torch.bfloat16, torch.float16)

# As torch.autocast("cuda") has them.
_NARROW = (
    "addbmm",
    "addmm",
    "addmv",
    "addr",
    "baddbmm",
    "bmm",
    "chain_matmul",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_tbc",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "convolution",
    "einsum",
    "linalg_multi_dot",
    "linalg_vecdot",
    "linear",
    "matmul",
    "mm",
    "mv",
    "prelu",
    "scaled_dot_product_attention",
)
_WIDE = (
    "acos",
    "asin",
    "binary_cross_entropy_with_logits",
    "cdist",
    "cosh",
    "cosine_embedding_loss",
    "cosine_similarity",
    "cross_entropy_loss",
    "cumprod",
    "cumsum",
    "dist",
    "erfinv",
    "exp",
    "expm1",
    "gelu",
    "group_norm",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "layer_norm",
    "log",
    "log10",
    "log1p",
    "log2",
    "log_softmax.int",
    "logsumexp",
    "margin_ranking_loss",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "nll_loss",
    "nll_loss2d",
    "norm.Scalar",
    "nuclear_norm",
    "pdist",
    "poisson_nll_loss",
    "pow.Scalar",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "prod",
    "reciprocal",
    "renorm",
    "rms_norm",
    "rsqrt",
    "sinh",
    "smooth_l1_loss",
    "soft_margin_loss",
    "softmax.int",
    "softplus",
    "sum",
    "sum.dim_IntList",
    "tan",
    "triplet_margin_loss",
)
_WIDEST = ("addcdiv", "addcmul", "atan2", "bilinear", "cat", "cross", "dot", "grid_sampler",
           "index_put", "scatter_add", "stack", "tensordot", "vdot")  # fmt: skip

_KEY = "AutocastPrivateUse1"


def register() -> list[torch.library.Library]:
    """Register the kernels; all other operators pass autocast by."""
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, _KEY)
    library = torch.library.Library("aten", "IMPL")
    for names, choose in ((_NARROW, _narrow), (_WIDE, _wide), (_WIDEST, _widest)):
        for name in names:
            library.impl(name, _kernel(name, choose), _KEY)
    return [others, library]


def _kernel(name: str, choose: Callable[[list[torch.Tensor]], torch.dtype]) -> Any:
    packet, _, overload = name.partition(".")
    below = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        tensors: list[torch.Tensor] = []
        _visit([*args, *kwargs.values()], tensors)
        dtype = choose(tensors)
        with torch._C._ExcludeDispatchKeyGuard(below):
            cast = [_cast(value, dtype) for value in args]
            return op(*cast, **{key: _cast(value, dtype) for key, value in kwargs.items()})

    return kernel


def _narrow(tensors: list[torch.Tensor]) -> torch.dtype:
    return torch.get_autocast_dtype("tpu")


def _wide(tensors: list[torch.Tensor]) -> torch.dtype:
    return torch.float32


def _widest(tensors: list[torch.Tensor]) -> torch.dtype:
    narrow = {tensor.dtype for tensor in tensors}
    return narrow.pop() if len(narrow) == 1 else torch.float32


def _visit(values: Any, tensors: list[torch.Tensor]) -> None:
    for value in values:
        if _is_castable(value):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            _visit(value, tensors)


def _is_castable(value: Any) -> bool:
    """Whether autocast touches it: floats on the device, but for float64."""
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
        and value.device.type == "tpu"
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if _is_castable(value):
        return value if value.dtype is dtype else value.to(dtype)
    if isinstance(value, (list, tuple)):
        return [_cast(item, dtype) for item in value]
    return value
