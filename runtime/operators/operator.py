"""An operator: an overload of ATen with its lowering, and what all kernels of it have in common.

A kernel is what torch's dispatcher calls. It looks the call's program up, has it made where there
is none, and takes its results: functional_kernels.py and writing_kernels.py.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jax.errors import JaxRuntimeError

from tpu_dist.runtime.device import checks
from tpu_dist.runtime.device.box import Box
from tpu_dist.runtime.device.generator import next_key
from tpu_dist.runtime.device.modes import precision_key
from tpu_dist.runtime.device.place import place
from tpu_dist.runtime.operators.answers import ask
from tpu_dist.runtime.operators.arguments import (
    GENERATOR,
    TENSOR,
    TENSORS,
    TemplateMaker,
    collect,
    kind_of,
)
from tpu_dist.runtime.operators.evaluate import evaluate
from tpu_dist.runtime.operators.lowering import Lowering
from tpu_dist.runtime.operators.programs import (
    NotLowered,
    Program,
    compile_program,
    program_cache,
)
from tpu_dist.runtime.operators.templates import flatten

Array = Any
Kernel = Callable[..., Any]

# What JAX raises for a dtype, or a use, that an operation of its own does not take. All else is a
# fault of ours.
CANNOT_LOWER = (NotImplementedError, TypeError)

_logger = logging.getLogger(__name__)


class Operator:
    """An overload of ATen, and how it is run."""

    def __init__(self, overload: Any, lowering: Lowering, natural: Any = None) -> None:
        """Take the schema apart.

        Args:
            overload: what is called.
            lowering: of `natural`.
            natural: the functional operator whose results are wanted, where the overload is an
                in-place or out= variant of it; None: the overload itself.
        """
        natural = natural or overload
        self.overload = overload
        self.natural = natural
        self.lowering = lowering
        self.name = str(overload)
        arguments = overload._schema.arguments
        self.outs = [a.name for a in arguments if a.is_out]
        self.positional = [a for a in arguments if not a.kwarg_only]
        self.kinds = [kind_of(a, lowering) for a in self.positional]
        self.keyword_kinds = {
            a.name: kind_of(a, lowering) for a in arguments if a.kwarg_only and not a.is_out
        }
        self.generator = next((i for i, kind in enumerate(self.kinds) if kind == GENERATOR), None)
        written = [a for a in self.positional if a.alias_info and a.alias_info.is_write]
        self.written = [self.positional.index(a) for a in written]
        packet = overload._schema.name.split("::")[1]
        self.numbers_as_tensors = not torch._C._should_allow_numbers_as_tensors(packet)
        self.makes_from_nothing = not {TENSOR, TENSORS} & set(self.kinds) and any(
            a.name == "dtype" for a in natural._schema.arguments
        )
        self.returns_nothing = not overload._schema.returns
        self.programs = program_cache()
        self._has_said_why = False

    # --- the parts of a call

    def collect(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        boxes: list[Box | None] | None = None,
    ) -> tuple[list[Any], list[Array]]:
        """What tells the call from others, and its program's operands."""
        key: list[Any] = []
        operands: list[Array] = []
        collect(args, self.kinds, key, operands, boxes)
        if kwargs:
            for name, value in kwargs.items():
                key.append(name)
                collect((value,), (self.keyword_kinds[name],), key, operands, boxes)
        if self.lowering.multiplies:
            key.append(precision_key())
        return key, operands

    def templates(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any], TemplateMaker]:
        """The arguments with leaves for the operands, and who has numbered these."""
        maker = TemplateMaker(self.numbers_as_tensors)
        positional = maker.make(args, self.kinds)
        positional += [a.default_value for a in self.positional[len(args) :]]
        keywords = {
            name: maker.make((value,), (self.keyword_kinds[name],))[0]
            for name, value in kwargs.items()
        }
        return positional, keywords, maker

    def _natural_result(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Meta tensors like the results; raises what torch raises for arguments that do not fit."""
        if not self.lowering.has_meta:
            return None
        asked = self.natural
        if self.lowering.meta_of is not None:
            asked = getattr(torch.ops.aten, self.lowering.meta_of).default
        return ask(asked, args, kwargs)

    def key_operand(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Array:
        """A fresh key for random numbers."""
        generator = kwargs.get("generator")
        if generator is None and self.generator is not None and len(args) > self.generator:
            generator = args[self.generator]
        return place().put(next_key(generator))

    def evaluator(
        self, args: Sequence[Any], kwargs: dict[str, Any], out: torch.Tensor | None = None
    ) -> tuple[Callable[..., tuple[list[Array], Any]], Any, TemplateMaker]:
        """What computes the results from the operands' arrays, and meta tensors like them."""
        positional, keywords, maker = self.templates(args, kwargs)
        asked = keywords
        if out is not None and self.makes_from_nothing:  # its dtype is the output's
            asked = keywords | {"dtype": out.dtype}
        natural = self._natural_result(positional, asked)

        def results(arrays: Sequence[Array]) -> tuple[list[Array], Any]:
            key = arrays[maker.count] if self.lowering.random else None
            result = evaluate(self.lowering, positional, keywords, natural, arrays, key)
            flag = None
            if self.lowering.checks is not None:
                result, flag = result
            return flatten(result), flag

        return results, natural, maker

    def report(self, flag: Array, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Have the error raised that a program's flag stands for, if it is set."""
        assert self.lowering.checks is not None
        checks.report(flag, functools.partial(self.lowering.checks, *args, **kwargs))

    def wait(self, arrays: Sequence[Array], args: Sequence[Any]) -> None:
        """Debug mode: have an error be raised here, with the operator's name."""
        try:
            for array in arrays:
                array.block_until_ready()
        except RuntimeError as error:
            raise RuntimeError(f"{self.name}({_shapes(args)}) failed: {error}") from error

    def compile(
        self,
        run: Callable[..., tuple[Array, ...]],
        operands: Sequence[Array],
        donated: Sequence[int] = (),
    ) -> Any:
        """The program, or refused where it cannot be had: then the CPU runs the operator."""
        try:
            return compile_program(run, operands, donated)
        except NotLowered as reason:
            _logger.debug("%s is not lowered here: %s", self.name, reason)
        except CANNOT_LOWER as reason:
            self._say_why(reason)
        except JaxRuntimeError as error:
            if not str(error).startswith("UNIMPLEMENTED"):
                raise
            self._say_why(error)
        return refused

    def _say_why(self, reason: Exception) -> None:
        if not self._has_said_why:
            self._has_said_why = True
            _logger.warning(
                "%s runs on the CPU for some arguments, since JAX does not lower it for these: "
                "%s: %s", self.name, type(reason).__name__, reason,
            )  # fmt: skip


def unconjugated(value: Any) -> Any:
    """A tensor with its conjugation done; anything else as it is."""
    if isinstance(value, torch.Tensor) and value.is_conj():
        return torch.resolve_conj(value)
    return value


def refused(*operands: Array) -> tuple[Array, ...]:
    """What a program runs that could not be made: the operator runs on the CPU instead."""
    raise AssertionError("stands for a program that could not be made")


REFUSED = Program(refused, (), None)


def _shapes(values: Sequence[Any]) -> str:
    def one(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if isinstance(value, (list, tuple)):
            return f"[{_shapes(value)}]"
        return repr(value)

    return ", ".join(map(one, values))
