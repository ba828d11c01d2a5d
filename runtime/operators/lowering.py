"""The table of lowerings: for an ATen operator, the JAX function that it is.

A lowering is pure and traced: tensors arrive as arrays of their own shape, numbers of ATen's type
Scalar as 0-d arrays, all else as it is. (numpy's `kind` of bfloat16 is "V": ask for "iub", not
"f".) One function serves the functional operator, its in-place
and out= variants, foreach's lists, and whole traced graphs: what differs between those, kernels
do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

Array = Any
Function = Callable[..., Any]


class Cast(Enum):
    """In which dtype a lowering gets its operands; narrow floats are widened to float32."""

    RESULT = "result"
    """Of the result, as torch promotes; arithmetic."""
    COMMON = "common"
    """What torch promotes the operands to, where the result is of another; comparisons."""
    NONE = "none"
    """Each of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowering:
    """How one operator is lowered.

    Attributes:
        name: ATen's, with its overload: ``add.Tensor``.
        function: see above; it may have a parameter `meta`, which gets the result's meta tensors.
        cast: of tensors and numbers.
        keep: positions of arguments that are not cast.
        multiplies: whether the precision of matrix products matters to it.
        random: whether it gets a parameter `key`, a fresh one for each call.
        checks: the error that stands for the flag which the function returns beside its result.
        traced: names of arguments of type float that are traced, as they change from call to call.
        static: names of arguments of type Scalar that are not.
        has_meta: whether torch can tell the result's shape without running the operator.
        meta_of: the operator that torch is asked instead for the result's shape.
        on_leaves: whether the function is called with the operands' arrays, the result's meta
            tensors, and arguments with leaves in them (templates.py): it evaluates other lowerings.
    """

    name: str
    function: Function
    cast: Cast = Cast.NONE
    keep: tuple[int, ...] = ()
    multiplies: bool = False
    random: bool = False
    checks: Callable[..., Exception] | None = None
    traced: frozenset[str] = frozenset()
    static: frozenset[str] = frozenset()
    has_meta: bool = True
    on_leaves: bool = False
    meta_of: str | None = None
    parameters: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        names = inspect.signature(self.function).parameters
        object.__setattr__(self, "parameters", MappingProxyType(dict(names)))


_lowerings: dict[str, Lowering] = {}
LOWERINGS: Mapping[str, Lowering] = MappingProxyType(_lowerings)


def lower(*names: str, **options: Any) -> Callable[[Function], Function]:
    """Enter the decorated function as the lowering of `names`; options are Lowering's."""
    for option in ("traced", "static"):
        if option in options:
            options[option] = frozenset(options[option])

    def enter(function: Function) -> Function:
        for name in names:
            if name in _lowerings:
                raise ValueError(f"{name} has two lowerings")
            _lowerings[name] = Lowering(name=name, function=function, **options)
        return function

    return enter


def lower_all(table: Mapping[str, Function], **options: Any) -> None:
    """Enter a table of lowerings that share their options."""
    for name, function in table.items():
        lower(name, **options)(function)
