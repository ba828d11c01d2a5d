"""Runs operators: looks the call's program up, makes it when there is none, and takes its results.

A kernel is what torch's dispatcher calls. All kernels are made here, from the table of lowerings.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tpu_dist.runtime.device import checks
from tpu_dist.runtime.device.box import Box, box_of
from tpu_dist.runtime.device.dtypes import TO_ARRAY, TO_TORCH, array_dtype
from tpu_dist.runtime.device.generator import next_key
from tpu_dist.runtime.device.geometry import bitcast, dense_order, in_storage_order, read, write
from tpu_dist.runtime.device.modes import is_blocking, precision_key
from tpu_dist.runtime.device.place import on_forget, place
from tpu_dist.runtime.device.tensors import create_empty, fill_storage, wrap
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
from tpu_dist.runtime.operators.fallback import fall_back
from tpu_dist.runtime.operators.lowering import Lowering
from tpu_dist.runtime.operators.programs import (
    TRACING,
    NotLowered,
    Output,
    Program,
    compile_program,
    is_tracing,
)
from tpu_dist.runtime.operators.templates import View, flatten, rebuild

Array = Any
Kernel = Callable[..., Any]

_logger = logging.getLogger(__name__)

_caches: list[dict[Any, Any]] = []


def program_cache() -> dict[Any, Any]:
    """A dictionary for what is of no use on another device; emptied when the device goes."""
    cache: dict[Any, Any] = {}
    _caches.append(cache)
    return cache


@on_forget
def _empty_caches() -> None:
    for cache in _caches:
        cache.clear()


class Operator:
    """An overload of ATen, and how it is run."""

    def __init__(self, overload: Any, natural: Any, lowering: Lowering) -> None:
        """Take the schema apart.

        Args:
            overload: what is called.
            natural: the functional operator whose results are wanted; the overload itself, unless
                that is an in-place or out= variant.
            lowering: of `natural`.
        """
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

    # --- the parts of a call

    def _collect(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        boxes: list[Box | None] | None = None,
    ) -> tuple[list[Any], list[Array]]:
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

    def _templates(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any], TemplateMaker]:
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

    def _key_operand(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Array:
        generator = kwargs.get("generator")
        if generator is None and self.generator is not None and len(args) > self.generator:
            generator = args[self.generator]
        return place().put(next_key(generator))

    def _evaluator(
        self, args: Sequence[Any], kwargs: dict[str, Any], out: torch.Tensor | None = None
    ) -> tuple[Callable[..., tuple[list[Array], Any]], Any, TemplateMaker]:
        """What computes the results from the operands' arrays, and meta tensors like them."""
        positional, keywords, maker = self._templates(args, kwargs)
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

    def _report(self, flag: Array, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        assert self.lowering.checks is not None
        checks.report(flag, functools.partial(self.lowering.checks, *args, **kwargs))

    def _wait(self, arrays: Sequence[Array], args: Sequence[Any]) -> None:
        """Debug mode: have an error be raised here, with the operator's name."""
        try:
            for array in arrays:
                array.block_until_ready()
        except RuntimeError as error:
            raise RuntimeError(f"{self.name}({_shapes(args)}) failed: {error}") from error

    # --- functional operators

    def functional(self) -> Kernel:
        """The kernel of an operator that makes its results."""
        programs = self.programs
        lowering = self.lowering
        multiplies = lowering.multiplies
        kinds = self.kinds
        special = lowering.random or lowering.checks is not None

        def kernel(*args: Any, **kwargs: Any) -> Any:
            if multiplies and args[0].is_complex():  # torch leaves conjugation to these
                args = tuple([_unconjugated(value) for value in args])
            if TRACING.depth:
                return self._trace_functional(args, kwargs)
            key: list[Any] = []
            operands: list[Array] = []
            if kwargs:
                key, operands = self._collect(args, kwargs)
            else:  # as _collect() does
                collect(args, kinds, key, operands, None)
                if multiplies:
                    key.append(precision_key())
            index = tuple(key)
            program = programs.get(index)
            if special:
                if lowering.random:
                    operands.append(self._key_operand(args, kwargs))
            if program is None:
                program = programs[index] = self._build_functional(args, kwargs, operands)
            if program.run is _refused:
                return fall_back(self.overload, *args, **kwargs)
            arrays = program.run(*operands)
            if is_blocking():
                self._wait(arrays, args)
            if program.has_flag:
                self._report(arrays[-1], args, kwargs)
            outputs = program.outputs
            if len(outputs) == 1 and program.shape is None:
                output = outputs[0]
                if output is not None and output.stride is None:
                    tensor = create_empty(output.size, output.dtype)
                    box = Box(arrays[0], output.dtype, output.nbytes)
                    tensor.untyped_storage()._tpu = box  # type: ignore[attr-defined]
                    return tensor
            return _take(arrays, outputs, program.shape)

        return kernel

    def _build_functional(
        self, args: Sequence[Any], kwargs: dict[str, Any], operands: list[Array]
    ) -> Program:
        try:
            results, natural, _ = self._evaluator(args, kwargs)
        except NotLowered:
            return _REFUSED
        outputs: list[Output | None] = []
        has_flag = False

        def run(*arrays: Array) -> tuple[Array, ...]:
            nonlocal has_flag
            values, flag = results(arrays)
            outputs[:] = _outputs(values, natural, self.name)
            laid = [_lay(v, o) for v, o in zip(values, outputs, strict=True) if o is not None]
            has_flag = flag is not None
            return (*laid, flag) if has_flag else tuple(laid)

        compiled = self._compile(run, operands)
        if compiled is _refused:
            return _REFUSED
        shape = natural if isinstance(natural, (list, tuple)) else None
        return Program(compiled, tuple(outputs), shape, has_flag=has_flag)

    def _trace_functional(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.lowering.random:
            raise NotLowered(f"{self.name} draws random numbers inside a decomposition")
        _, operands = self._collect(args, kwargs)
        results, natural, _ = self._evaluator(args, kwargs)
        values, _ = results(operands)
        outputs = _outputs(values, natural, self.name)
        laid = [_lay(v, o) for v, o in zip(values, outputs, strict=True) if o is not None]
        return _take(laid, outputs, natural if isinstance(natural, (list, tuple)) else None)

    def _compile(
        self,
        run: Callable[..., tuple[Array, ...]],
        operands: Sequence[Array],
        donated: Sequence[int] = (),
    ) -> Any:
        """The program, or _refused where it cannot be had: then the CPU runs the operator."""
        try:
            return compile_program(run, operands, donated)
        except NotLowered as reason:
            _logger.debug("%s is not lowered here: %s", self.name, reason)
        except Exception:  # the border to XLA: what it does not compile, the CPU does
            _logger.debug("%s could not be lowered", self.name, exc_info=True)
        return _refused

    # --- operators that write to their arguments

    def writing(self) -> Kernel:
        """The kernel of an in-place or out= operator, or one that updates several tensors."""
        programs = self.programs
        outs = self.outs
        random = self.lowering.random
        multiplies = self.lowering.multiplies

        def kernel(*args: Any, **kwargs: Any) -> Any:
            if multiplies and args[0].is_complex():
                args = tuple([_unconjugated(value) for value in args])
            out_tensors = [kwargs.pop(name) for name in outs] if outs else ()
            boxes: list[Box | None] = []
            key, operands = self._collect(args, kwargs, boxes)
            targets = out_tensors or flatten([args[place] for place in self.written])
            if self.outs:
                _add_bases(out_tensors, key, operands, boxes)
            target_boxes = [box_of(target) for target in targets]
            donated = _describe_targets(targets, target_boxes, key, operands, boxes)
            if is_tracing():
                return self._trace_writing(args, kwargs, targets, target_boxes, operands, boxes)
            index = tuple(key)
            program = programs.get(index)
            if random:
                operands.append(self._key_operand(args, kwargs))
            if program is None:
                try:
                    if outs and self._resize_outs(args, kwargs, out_tensors):
                        kwargs.update(zip(outs, out_tensors, strict=True))
                        return kernel(*args, **kwargs)
                    program = self._build_writing(
                        args, kwargs, targets, target_boxes, operands, boxes, donated
                    )
                except NotLowered:
                    program = _REFUSED
                programs[index] = program
            if program.run is _refused:
                kwargs.update(zip(outs, out_tensors, strict=True))
                return fall_back(self.overload, *args, **kwargs)
            arrays = program.run(*operands)
            if is_blocking():
                self._wait(arrays, args)
            if program.has_flag:
                self._report(arrays[-1], args, kwargs)
            if len(target_boxes) == 1:
                target_boxes[0].put(arrays[0], program.dtypes[0])
            else:
                for box, array, dtype in zip(
                    dict.fromkeys(target_boxes), arrays, program.dtypes, strict=False
                ):
                    box.put(array, dtype)
            return self._returned(args, out_tensors)

        return kernel

    def _returned(self, args: Sequence[Any], outs: Sequence[torch.Tensor]) -> Any:
        if self.returns_nothing:
            return None
        if outs:
            return outs[0] if len(outs) == 1 else tuple(outs)
        written = [args[place] for place in self.written]
        return written[0] if len(written) == 1 else tuple(written)

    def _resize_outs(
        self, args: Sequence[Any], kwargs: dict[str, Any], outs: Sequence[torch.Tensor]
    ) -> bool:
        """See that out= fits as torch would, which resizes it if need be; whether it did.

        Raises:
            RuntimeError: what torch raises for an out= of a dtype that will not do.
        """
        positional, keywords, maker = self._templates(args, kwargs)
        metas = [View.of(out, None).meta() for out in outs]
        ask(self.overload, positional, keywords | dict(zip(self.outs, metas, strict=True)))
        resized = False
        for out, meta in zip(outs, metas, strict=True):
            if out.shape != meta.shape:
                torch.ops.aten.resize_.default(out, meta.shape)
                resized = True
        return resized

    def _writer(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        targets: Sequence[torch.Tensor],
        target_boxes: Sequence[Box],
        boxes: Sequence[Box | None],
    ) -> tuple[Callable[..., tuple[list[Array], Any]], list[torch.dtype]]:
        """What computes the new arrays of the storages that are written to, and their dtypes."""
        if not self.outs and self.natural is not self.overload:
            positional, keywords, _ = self._templates(args, kwargs)
            ask(self.overload, positional, keywords)
        results, _, _ = self._evaluator(args, kwargs, targets[0] if self.outs else None)
        views = [View.of(target, None) for target in targets]
        bases = {box: boxes.index(box) for box in target_boxes if box in boxes}
        wholes = [_is_whole(t, b) for t, b in zip(targets, target_boxes, strict=True)]

        def new_arrays(arrays: Sequence[Array]) -> tuple[list[Array], Any]:
            values, flag = results(arrays)
            states = {box: arrays[bases[box]] for box in target_boxes if box in bases}
            for value, view, box, whole in zip(values, views, target_boxes, wholes, strict=True):
                value = _as_result(value, view.size, view.dtype)
                if whole:
                    value = in_storage_order(value, view.size, view.stride)
                    states[box] = (
                        bitcast(value.reshape(-1), array_dtype(box.dtype))
                        if (_keeps_dtype(box, view.dtype))
                        else value
                    )
                elif math.prod(view.size):
                    states[box] = write(
                        states[box],
                        value,
                        array_dtype(view.dtype),
                        view.size,
                        view.stride,
                        view.offset,
                    )
                else:
                    states.setdefault(box, value.reshape(-1))
            return [states[box] for box in dict.fromkeys(target_boxes)], flag

        found = [box.dtype for box in dict.fromkeys(target_boxes)]
        for view, box, whole in zip(views, target_boxes, wholes, strict=True):
            if whole and not _keeps_dtype(box, view.dtype):
                found[list(dict.fromkeys(target_boxes)).index(box)] = view.dtype
        return new_arrays, found

    def _build_writing(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        targets: Sequence[torch.Tensor],
        target_boxes: Sequence[Box],
        operands: list[Array],
        boxes: Sequence[Box | None],
        donated: Sequence[int],
    ) -> Program:
        new_arrays, dtypes = self._writer(args, kwargs, targets, target_boxes, boxes)
        has_flag = False

        def run(*arrays: Array) -> tuple[Array, ...]:
            nonlocal has_flag
            states, flag = new_arrays(arrays)
            has_flag = flag is not None
            return (*states, flag) if has_flag else tuple(states)

        compiled = self._compile(run, operands, donated)
        if compiled is _refused:
            return _REFUSED
        return Program(compiled, (), None, dtypes, has_flag)

    def _trace_writing(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        targets: Sequence[torch.Tensor],
        target_boxes: Sequence[Box],
        operands: Sequence[Array],
        boxes: Sequence[Box | None],
    ) -> Any:
        if self.lowering.random:
            raise NotLowered(f"{self.name} draws random numbers inside a decomposition")
        if self.outs and self._resize_outs(args, kwargs, targets):
            kwargs = dict(kwargs, **dict(zip(self.outs, targets, strict=True)))
            return self.overload(*args, **kwargs)
        new_arrays, dtypes = self._writer(args, kwargs, targets, target_boxes, boxes)
        states, _ = new_arrays(operands)
        for box, array, dtype in zip(dict.fromkeys(target_boxes), states, dtypes, strict=True):
            box.put(array, dtype)
        return self._returned(args, targets if self.outs else ())


def _unconjugated(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_conj():
        return torch.resolve_conj(value)
    return value


def _refused(*operands: Array) -> tuple[Array, ...]:
    raise AssertionError("stands for a program that could not be made")


_REFUSED = Program(_refused, (), None)


def _add_bases(
    outs: Sequence[torch.Tensor],
    key: list[Any],
    operands: list[Array],
    boxes: list[Box | None],
) -> None:
    """Make operands of the storages that out= tensors fill only in part."""
    for out in outs:
        try:
            box = box_of(out)
        except AttributeError:
            raise RuntimeError(
                f"Expected out tensor to have device tpu:0, but got {out.device} instead"
            ) from None
        if box not in boxes and not _is_whole(out, box):
            fill_storage(out, box)
            if box.array is not None:
                key += (box.array.shape, box.dtype)
                operands.append(box.array)
                boxes.append(box)


def _describe_targets(
    targets: Sequence[torch.Tensor],
    target_boxes: Sequence[Box],
    key: list[Any],
    operands: Sequence[Array],
    boxes: Sequence[Box | None],
) -> list[int]:
    """Add to `key` how targets lie in which storages; returns which operands may be donated."""
    donated = []
    if len(boxes) == 1:  # most: one tensor, written in place
        box = target_boxes[0]
        if boxes[0] is box:
            target = targets[0]
            key += (target.dtype, box.dtype, box.nbytes, box.shared)
            return [] if box.shared else [0]
    places: dict[Box | None, int] = {}
    doubled = set()
    for place_, box_ in enumerate(boxes):
        if box_ in places:
            doubled.add(box_)
        else:
            places[box_] = place_
    for target, box in zip(targets, target_boxes, strict=True):
        base = places.get(box, -1)
        key += (
            target.shape,
            target.stride(),
            target.storage_offset(),
            target.dtype,
            box.dtype,
            box.nbytes,
            base,
        )
        if base >= 0 and not box.shared and box not in doubled and base not in donated:
            donated.append(base)
    if len(target_boxes) > 1:
        order = {box: i for i, box in enumerate(dict.fromkeys(target_boxes))}
        key.append(tuple(order[box] for box in target_boxes))
    key.append(tuple(donated))
    return donated


def _keeps_dtype(box: Box, written: torch.dtype) -> bool:
    """Whether a storage that is filled with elements of `written` goes on as what it was.

    It does where it is seen as something narrower for a while, as bytes mostly: its tensors would
    be cast at every look.
    """
    wider = box.dtype.itemsize > written.itemsize
    return wider and box.nbytes % box.dtype.itemsize == 0


def _is_whole(target: torch.Tensor, box: Box) -> bool:
    """Whether the target is all of its storage, in whatever order."""
    if target.numel() * target.dtype.itemsize != box.nbytes:
        return False
    return target.is_contiguous() or dense_order(target.shape, target.stride()) is not None


def _as_result(value: Array, size: Sequence[int], dtype: torch.dtype) -> Array:
    from jax import numpy as jnp

    value = jnp.asarray(value)
    wanted = TO_ARRAY[dtype]
    if value.dtype != wanted:
        if value.dtype.kind == "c" and wanted.kind != "c":
            value = value.real
        value = value.astype(wanted)
    if value.shape != tuple(size):
        value = jnp.broadcast_to(value, tuple(size))
    return value


def _outputs(values: Sequence[Array], natural: Any, name: str) -> list[Output | None]:
    """What tensors the results become: as torch's meta kernel says, else as they are."""
    if natural is None:
        return [None if v is None else Output(v.shape, TO_TORCH[v.dtype], None) for v in values]
    metas = flatten(natural)
    if len(metas) != len(values):
        raise AssertionError(f"{name}: the lowering returns {len(values)}, torch {len(metas)}")
    return [
        None if meta is None or value is None else Output.like(meta)
        for meta, value in zip(metas, values, strict=True)
    ]


def _lay(value: Array, output: Output) -> Array:
    """A result in the order in which its tensor's storage has it."""
    value = _as_result(value, output.size, output.dtype)
    if output.stride is None:
        return value
    return in_storage_order(value, output.size, output.stride)


def _take(arrays: Sequence[Array], outputs: Sequence[Output | None], shape: Any) -> Any:
    """Tensors around a program's results."""
    iterator = iter(arrays)
    tensors = [
        None if output is None else wrap(next(iterator), output.dtype, output.size, output.stride)
        for output in outputs
    ]
    if shape is None:
        return tensors[0] if len(tensors) == 1 else tuple(tensors)
    return rebuild(shape, tensors)


def _shapes(values: Sequence[Any]) -> str:
    def one(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if isinstance(value, (list, tuple)):
            return f"[{_shapes(value)}]"
        return repr(value)

    return ", ".join(map(one, values))


# --- views, for those who need an array of the tensor's own shape

_readers = program_cache()
_zeros = program_cache()


def zeros(elements: int, dtype: np.dtype[Any]) -> Array:
    """A 1-d array of zeros, made on the device."""
    from jax import numpy as jnp

    key = (elements, dtype)
    program = _zeros.get(key)
    if program is None:
        program = _zeros[key] = compile_program(lambda: (jnp.zeros(elements, dtype),), [])
    return program()[0]


def read_view(tensor: torch.Tensor) -> Array:
    """The elements of a tensor on the device as an array of its shape; the storage's own, if so."""
    box = box_of(tensor)
    fill_storage(tensor, box)
    view = View.of(tensor, None if box.array is None else 0)
    array = box.array
    if array is None:
        return place().put(np.zeros(view.size, array_dtype(view.dtype)))
    dtype = array_dtype(view.dtype)
    if is_tracing():
        return read(array, dtype, view.size, view.stride, view.offset)
    if array.shape == view.size and box.dtype is view.dtype and not view.offset:
        if tensor.is_contiguous():
            return array
    key = (array.shape, array.dtype, view)
    reader = _readers.get(key)
    if reader is None:

        def run(operand: Array) -> tuple[Array, ...]:
            return (read(operand, dtype, view.size, view.stride, view.offset),)

        reader = _readers[key] = compile_program(run, [array])
    return reader(array)[0]
