"""Gives torch's dispatcher the kernels of the device: when the first of them is called."""

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tpu_dist.runtime.operators.decompositions import decomposed
from tpu_dist.runtime.operators.fallback import fall_back
from tpu_dist.runtime.operators.functional_kernels import functional_kernel
from tpu_dist.runtime.operators.lowering import LOWERINGS, Lowering
from tpu_dist.runtime.operators.operator import Operator
from tpu_dist.runtime.operators.writing_kernels import writing_kernel

KEY = "PrivateUse1"

# What enters lowerings; a family a file.
_FAMILIES = (
    "activations",
    "attention",
    "convolution",
    "copies",
    "creation",
    "foreach",
    "fused_optimizers",
    "indexing",
    "linalg",
    "losses",
    "matmul",
    "normalisation",
    "pointwise",
    "pointwise_unary",
    "pooling",
    "random_numbers",
    "reductions",
    "shapes",
    "sorting",
    "sync_batch_norm",
    "views",
)

_aten = torch.ops.aten
_library: torch.library.Library | None = None  # torch drops kernels with the library's object
_taken: set[str] = set()
_lock = threading.Lock()


def load_operators() -> None:
    """Register all kernels; once a process."""
    global _library
    with _lock:
        if _library is not None:
            return
        library = torch.library.Library("aten", "IMPL")
        modules = [importlib.import_module(f"tpu_dist.runtime.operators.{f}") for f in _FAMILIES]
        for module in modules:
            for name, kernel in getattr(module, "KERNELS", {}).items():
                _register(library, name, kernel)
            for name, kernel in getattr(module, "AUTOGRAD_KERNELS", {}).items():
                library.impl(name, kernel, f"Autograd{KEY}")
        for lowering in LOWERINGS.values():
            for name, kernel in _kernels(lowering):
                _register(library, name, kernel)
        _library = library


# Operators that torch composes of others, where a kernel of ours loses nothing to autograd: their
# results have no gradient, or torch composes them itself where one is wanted.
_COMPOSED_TOO = frozenset(
    {"argsort", "argsort.stable", "isfinite", "mish_backward", "silu_backward",
     "scaled_dot_product_attention"}
)  # fmt: skip


def _is_composed(name: str) -> bool:
    """Whether torch composes it of operators that have kernels; ours would hide their gradients."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(f"aten::{name}", "CompositeImplicitAutograd") and name not in _COMPOSED_TOO


def _register(library: torch.library.Library, name: str, kernel: Callable[..., Any]) -> None:
    if name not in _taken and not _is_composed(name):
        _taken.add(name)
        with warnings.catch_warnings():  # kernels that torch has for every device: ours is better
            warnings.simplefilter("ignore")
            library.impl(name, kernel, KEY)


def overload_of(name: str) -> Any:
    """ATen's overload of a name such as ``add.Tensor`` or ``relu``."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(_aten, packet), overload or "default")


def _kernels(lowering: Lowering) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The kernels of an operator and of its variants."""
    natural = overload_of(lowering.name)
    if natural._schema.is_mutable:
        yield lowering.name, writing_kernel(Operator(natural, lowering))
        return
    yield lowering.name, functional_kernel(Operator(natural, lowering))
    for variant in _variants(natural):
        name = str(variant).removeprefix("aten.").removesuffix(".default")
        yield name, writing_kernel(Operator(variant, lowering, natural))


def _variants(natural: Any) -> Iterator[Any]:
    """The in-place and out= variants: those whose arguments are the same."""
    packet = natural.__name__.split(".")[0]
    schema = natural._schema
    wanted = [(a.name, str(a.type)) for a in schema.arguments]
    in_place = getattr(_aten, f"{packet}_", None)
    for name in in_place.overloads() if in_place is not None else ():
        found = getattr(in_place, name)
        arguments = found._schema.arguments
        written = [a for a in arguments if a.alias_info and a.alias_info.is_write]
        if len(written) == 1 and _is_same([(a.name, str(a.type)) for a in arguments], wanted):
            yield found
    base = getattr(_aten, packet)
    for name in base.overloads():
        found = getattr(base, name)
        outs = [a for a in found._schema.arguments if a.is_out]
        rest = [(a.name, str(a.type)) for a in found._schema.arguments if not a.is_out]
        if outs and _is_same(rest, wanted) and len(outs) == len(schema.returns):
            if all(str(a.type) == "Tensor" for a in outs):
                yield found


# What an in-place or out= variant takes from what it writes to.
_OF_OUTPUT = ("dtype", "layout", "device", "pin_memory")


def _is_same(rest: list[tuple[str, str]], wanted: list[tuple[str, str]]) -> bool:
    return rest in (wanted, [pair for pair in wanted if pair[0] not in _OF_OUTPUT])


_decomposed: dict[Any, Callable[..., Any] | None] = {}


def run_unregistered(op: Any, *args: Any, **kwargs: Any) -> Any:
    """What the dispatcher calls for an operator without a kernel: decompose it, or use the CPU."""
    if _library is None:
        load_operators()
        return op(*args, **kwargs)
    kernel = _decomposed.get(op, ...)
    if kernel is ...:
        kernel = _decomposed[op] = _decomposed_kernel(op) if op.namespace == "aten" else None
    if kernel is not None:
        return kernel(*args, **kwargs)
    return fall_back(op, *args, **kwargs)


def _decomposed_kernel(op: Any) -> Callable[..., Any] | None:
    """A kernel from torch's decomposition of `op`, or of the operator whose variant it is."""
    if not op._schema.is_mutable:
        lowering = decomposed(op)
        return None if lowering is None else functional_kernel(Operator(op, lowering))
    natural = _natural_of(op)
    if natural is None:
        return None
    lowering = LOWERINGS.get(str(natural).removeprefix("aten.").removesuffix(".default"))
    lowering = lowering or decomposed(natural)
    return None if lowering is None else writing_kernel(Operator(op, lowering, natural))


def _natural_of(op: Any) -> Any:
    """The functional operator of an in-place or out= variant; None if there is none."""
    packet, _, overload = op.__name__.partition(".")
    arguments = op._schema.arguments
    outs = [a for a in arguments if a.is_out]
    rest = [(a.name, str(a.type)) for a in arguments if not a.is_out]
    base = getattr(_aten, packet if outs else packet.removesuffix("_"), None)
    for name in base.overloads() if base is not None else ():
        found = getattr(base, name)
        wanted = [(a.name, str(a.type)) for a in found._schema.arguments]
        written = len(outs) or 1
        if (
            not found._schema.is_mutable
            and _is_same(rest, wanted)
            and len(found._schema.returns) == written
        ):
            return found
    return None
