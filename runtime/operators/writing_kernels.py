"""Kernels of operators that write to their arguments: in place, to out=, or to several tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpu_dist.runtime.device.box import Box, box_of
from tpu_dist.runtime.device.dtypes import array_dtype
from tpu_dist.runtime.device.geometry import bitcast, dense_order, in_storage_order, write
from tpu_dist.runtime.device.modes import is_blocking
from tpu_dist.runtime.device.tensors import fill_storage
from tpu_dist.runtime.operators.answers import ask
from tpu_dist.runtime.operators.fallback import fall_back
from tpu_dist.runtime.operators.offsets import Offset, offset_of
from tpu_dist.runtime.operators.operator import (
    REFUSED,
    Kernel,
    Operator,
    refused,
    unconjugated,
)
from tpu_dist.runtime.operators.programs import NotLowered, Program, is_tracing
from tpu_dist.runtime.operators.results import as_result
from tpu_dist.runtime.operators.templates import View, flatten

Array = Any


def writing_kernel(operator: Operator) -> Kernel:
    """The kernel of an in-place or out= operator, or one that updates several tensors."""
    programs = operator.programs
    outs = operator.outs
    random = operator.lowering.random
    multiplies = operator.lowering.multiplies

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if multiplies and args[0].is_complex():
            args = tuple([unconjugated(value) for value in args])
        out_tensors = [kwargs.pop(name) for name in outs] if outs else ()
        boxes: list[Box | None] = []
        key, operands = operator.collect(args, kwargs, boxes)
        targets = out_tensors or flatten([args[place] for place in operator.written])
        ats = _add_outs(out_tensors, key, operands, boxes) if outs else []
        target_boxes = [box_of(target) for target in targets]
        donated = _describe_targets(targets, target_boxes, key, boxes)
        if is_tracing():
            return _trace(operator, args, kwargs, targets, ats, target_boxes, operands, boxes)
        index = tuple(key)
        program = programs.get(index)
        if random:
            operands.append(operator.key_operand(args, kwargs))
        if program is None:
            try:
                if outs and _resize_outs(operator, args, kwargs, out_tensors):
                    kwargs.update(zip(outs, out_tensors, strict=True))
                    return kernel(*args, **kwargs)
                program = _build(
                    operator, args, kwargs, targets, ats, target_boxes, operands, boxes, donated
                )
            except NotLowered:
                program = REFUSED
            programs[index] = program
        if program.run is refused:
            kwargs.update(zip(outs, out_tensors, strict=True))
            return fall_back(operator.overload, *args, **kwargs)
        arrays = program.run(*operands)
        if is_blocking():
            operator.wait(arrays, args)
        if program.has_flag:
            operator.report(arrays[-1], args, kwargs)
        if len(target_boxes) == 1:
            target_boxes[0].put(arrays[0], program.dtypes[0])
        else:
            for box, array, dtype in zip(
                dict.fromkeys(target_boxes), arrays, program.dtypes, strict=False
            ):
                box.put(array, dtype)
        return _returned(operator, args, out_tensors)

    return kernel


def _returned(operator: Operator, args: Sequence[Any], outs: Sequence[torch.Tensor]) -> Any:
    if operator.returns_nothing:
        return None
    if outs:
        return outs[0] if len(outs) == 1 else tuple(outs)
    written = [args[place] for place in operator.written]
    return written[0] if len(written) == 1 else tuple(written)


def _resize_outs(
    operator: Operator, args: Sequence[Any], kwargs: dict[str, Any], outs: Sequence[torch.Tensor]
) -> bool:
    """See that out= fits as torch would, which resizes it if need be; whether it did.

    Raises:
        RuntimeError: what torch raises for an out= of a dtype that will not do.
    """
    positional, keywords, maker = operator.templates(args, kwargs)
    metas = [View.of(out, None).meta() for out in outs]
    ask(operator.overload, positional, keywords | dict(zip(operator.outs, metas, strict=True)))
    resized = False
    for out, meta in zip(outs, metas, strict=True):
        if out.shape != meta.shape:
            torch.ops.aten.resize_.default(out, meta.shape)
            resized = True
    return resized


def _writer(
    operator: Operator,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    targets: Sequence[torch.Tensor],
    ats: Sequence[int | None],
    target_boxes: Sequence[Box],
    boxes: Sequence[Box | None],
) -> tuple[Callable[..., tuple[list[Array], Any]], list[torch.dtype]]:
    """What computes the new arrays of the storages that are written to, and their dtypes."""
    if operator.outs:
        views = [View.of(out, None, at) for out, at in zip(targets, ats, strict=True)]
    else:
        positional, keywords, _ = operator.templates(args, kwargs)
        views = flatten([positional[place] for place in operator.written])
        if operator.natural is not operator.overload:
            ask(operator.overload, positional, keywords)
    results, _, _ = operator.evaluator(args, kwargs, targets[0] if operator.outs else None)
    bases = {box: boxes.index(box) for box in target_boxes if box in boxes}
    wholes = [_is_whole(t, b) for t, b in zip(targets, target_boxes, strict=True)]

    def new_arrays(arrays: Sequence[Array]) -> tuple[list[Array], Any]:
        values, flag = results(arrays)
        states = {box: arrays[bases[box]] for box in target_boxes if box in bases}
        for value, view, box, whole in zip(values, views, target_boxes, wholes, strict=True):
            value = as_result(value, view.size, view.dtype)
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
                    None if view.at is None else arrays[view.at],
                )
            else:
                states.setdefault(box, value.reshape(-1))
        return [states[box] for box in dict.fromkeys(target_boxes)], flag

    found = [box.dtype for box in dict.fromkeys(target_boxes)]
    for view, box, whole in zip(views, target_boxes, wholes, strict=True):
        if whole and not _keeps_dtype(box, view.dtype):
            found[list(dict.fromkeys(target_boxes)).index(box)] = view.dtype
    return new_arrays, found


def _build(
    operator: Operator,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    targets: Sequence[torch.Tensor],
    ats: Sequence[int | None],
    target_boxes: Sequence[Box],
    operands: list[Array],
    boxes: Sequence[Box | None],
    donated: Sequence[int],
) -> Program:
    new_arrays, dtypes = _writer(operator, args, kwargs, targets, ats, target_boxes, boxes)
    has_flag = False

    def run(*arrays: Array) -> tuple[Array, ...]:
        nonlocal has_flag
        states, flag = new_arrays(arrays)
        has_flag = flag is not None
        return (*states, flag) if has_flag else tuple(states)

    compiled = operator.compile(run, operands, donated)
    if compiled is refused:
        return REFUSED
    return Program(compiled, (), None, dtypes, has_flag)


def _trace(
    operator: Operator,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    targets: Sequence[torch.Tensor],
    ats: Sequence[int | None],
    target_boxes: Sequence[Box],
    operands: Sequence[Array],
    boxes: Sequence[Box | None],
) -> Any:
    if operator.lowering.random:
        raise NotLowered(f"{operator.name} draws random numbers inside a decomposition")
    if operator.outs and _resize_outs(operator, args, kwargs, targets):
        kwargs = dict(kwargs, **dict(zip(operator.outs, targets, strict=True)))
        return operator.overload(*args, **kwargs)
    new_arrays, dtypes = _writer(operator, args, kwargs, targets, ats, target_boxes, boxes)
    states, _ = new_arrays(operands)
    for box, array, dtype in zip(dict.fromkeys(target_boxes), states, dtypes, strict=True):
        box.put(array, dtype)
    return _returned(operator, args, targets if operator.outs else ())


def _add_outs(
    outs: Sequence[torch.Tensor],
    key: list[Any],
    operands: list[Array],
    boxes: list[Box | None],
) -> list[int | None]:
    """Add to `key` how out= tensors lie, and make operands of the storages that they fill in part.

    Returns which operand is the offset of each, if one is.
    """
    ats: list[int | None] = []
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
        shape, stride, dtype = out.shape, out.stride(), out.dtype
        offset = Offset(int(out.storage_offset()), None)
        if offset.token and not is_tracing():
            offset = offset_of(shape, stride, offset.token, box.nbytes // dtype.itemsize)
        key += (shape, stride, offset.token, dtype)
        ats.append(None if offset.operand is None else len(operands))
        if offset.operand is not None:
            operands.append(offset.operand)
            boxes.append(None)
    return ats


def _describe_targets(
    targets: Sequence[torch.Tensor],
    target_boxes: Sequence[Box],
    key: list[Any],
    boxes: Sequence[Box | None],
) -> list[int]:
    """Add to `key` which storages targets are in; returns which operands may be donated."""
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
    for box in target_boxes:
        base = places.get(box, -1)
        key += (box.dtype, box.nbytes, base)
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
