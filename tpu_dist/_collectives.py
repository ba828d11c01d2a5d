"""The collective verbs, under the names by which torch 2.13 calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import ReduceOp

from tpu_dist._group_base import GroupBase
from tpu_dist._sparse import NUM_SPARSE_STEPS, sparse_sum
from tpu_dist._validation import (
    check_count,
    check_output,
    check_outputs,
    check_rank,
    check_same_kind,
    check_tensor,
    check_tensors,
    only,
    split_sizes,
)
from tpu_dist._work import Work
from tpu_dist.collectives.border import flat
from tpu_dist.collectives.dtypes import wire_type
from tpu_dist.collectives.envelope import Signature
from tpu_dist.collectives.operations import Barrier, Exchange, Operation, Whole
from tpu_dist.collectives.reducers import Reducer, reducer_for
from tpu_dist.errors import UnsupportedError

Tensor = torch.Tensor


class CollectiveVerbs(GroupBase):
    """Each verb checks what it can see, says what it is to an operation, and returns a Work."""

    # --- one tensor, in place

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Reduce over all ranks; every rank gets the result."""
        tensor = only("all_reduce", tensors, "tensors")
        if isinstance(tensor, Tensor) and tensor.layout is torch.sparse_coo:
            return self._sparse_allreduce(tensor, opts)
        return self._allreduce([tensor], opts, timeout)

    def allreduce_coalesced(
        self, tensors: Sequence[Any], opts: Any = None, timeout: Any = None
    ) -> Work:
        """all_reduce of several tensors."""
        return self._allreduce(tensors, opts, timeout)

    def _allreduce(self, tensors: Sequence[Any], opts: Any, timeout: Any) -> Work:
        verb = "all_reduce"
        self._refuse_if_ended(verb)
        checked = [check_output(verb, tensor) for tensor in tensors]
        operations = [self._whole(verb, t, *_reduction(opts, t), None) for t in checked]
        return self._submit(verb, operations, _with(opts, timeout), checked, checked)

    def _sparse_allreduce(self, tensor: Tensor, opts: Any) -> Work:
        verb = "all_reduce"
        self._refuse_if_ended(verb)
        if _reduction(opts, tensor)[0].name != "SUM":
            raise UnsupportedError(f"{verb} of sparse tensors: only ReduceOp.SUM is defined")
        sequences = [self._next_sequence() for _ in range(NUM_SPARSE_STEPS)]

        def gather(step: int, source: Tensor, targets: list[Tensor]) -> Operation:
            sources = [source] * self.size()
            return self._exchange("all_gather", sources, targets, sequence=sequences[step])

        steps = sparse_sum(tensor, self._ranks, gather)
        return self._submit(verb, steps, opts, [tensor], [tensor])

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> Work:
        """Reduce over all ranks; the root gets the result, other tensors are left alone."""
        verb = "reduce"
        self._refuse_if_ended(verb)
        tensor = check_output(verb, only(verb, tensors, "tensors"))  # the same on all ranks
        root = self._root(verb, opts)
        operation = self._whole(verb, tensor, *_reduction(op or opts, tensor), root)
        return self._submit(verb, [operation], _with(opts, timeout), [tensor], [tensor])

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Copy the root's tensor into everybody's."""
        verb = "broadcast"
        self._refuse_if_ended(verb)
        tensor = check_output(verb, only(verb, tensors, "tensors"))  # the same on all ranks
        root = self._root(verb, opts)
        operation = self._whole(verb, tensor, None, 1.0, root)
        return self._submit(verb, [operation], _with(opts, timeout), [tensor], [tensor])

    def _whole(
        self, verb: str, tensor: Tensor, reducer: Reducer | None, factor: float, root: int | None
    ) -> Operation:
        signature = Signature(
            group=self._name,
            uid=self._uid,
            sequence=self._next_sequence(),
            verb=verb,
            wire=wire_type(tensor.dtype),
            reducer=reducer,
            root=root,
            factor=factor,
            place=tensor.device.type,
            shape=tuple(tensor.shape),
        )
        is_root = root == self._index
        keeps = is_root if verb == "reduce" else not (verb == "broadcast" and is_root)
        return Whole(signature=signature, tensor=tensor, keeps=keeps)

    # --- from everybody to everybody

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Give every rank everybody's tensor, as a list; sizes may differ between ranks."""
        verb = "all_gather"
        source = only(verb, inputs, "inputs")
        if outputs and isinstance(outputs[0], Tensor):
            outputs = [outputs]
        return self._allgather([only(verb, outputs, "outputs")], [source], opts)

    def allgather_coalesced(
        self, output_lists: Sequence[Any], inputs: Sequence[Any], opts: Any = None
    ) -> Work:
        """all_gather of several tensors; output_lists[rank][k] is for tensor k of that rank."""
        if len(output_lists) != self.size() or any(len(o) != len(inputs) for o in output_lists):
            raise ValueError(
                f"all_gather: output_lists must hold, for each of the {self.size()} ranks, one "
                f"tensor for each of the {len(inputs)} inputs"
            )
        return self._allgather([list(o) for o in zip(*output_lists, strict=True)], inputs, opts)

    def _allgather(self, output_lists: Sequence[Any], inputs: Sequence[Any], opts: Any) -> Work:
        verb = "all_gather"
        self._refuse_if_ended(verb)
        operations, sources, flat_outputs = [], [], []
        for output_list, source in zip(output_lists, inputs, strict=True):
            source = check_tensor(verb, source, "input")
            outputs = check_outputs(verb, output_list, self.size())
            check_same_kind(verb, outputs[0], source)
            own = outputs[self._index]
            check_count(verb, own, "this rank's output", source.numel(), "as many as in its input")
            sizes = [output.numel() for output in outputs]
            operations.append(self._exchange(verb, [source] * self.size(), outputs, sizes))
            sources.append(source)
            flat_outputs += outputs
        return self._submit(verb, operations, opts, sources, flat_outputs)

    def all_gather_single(self, output: Any, source: Any, opts: Any = None) -> Work:
        """all_gather into one tensor, concatenated or stacked."""
        return self.all_gather_single_coalesced([output], [source], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None
    ) -> Work:
        """all_gather_single of several tensors."""
        verb = "all_gather"
        self._refuse_if_ended(verb)
        operations, closers = [], []
        for output, source in zip(outputs, inputs, strict=True):
            source = check_tensor(verb, source, "input")
            output = check_output(verb, output, "output")
            check_same_kind(verb, output, source)
            total = source.numel() * self.size()
            check_count(verb, output, "output", total, f"{self.size()} times the input's")
            pieces, close = _pieces(output, [source.numel()] * self.size())
            operations.append(self._exchange(verb, [source] * self.size(), pieces))
            closers.append(close)
        steps = _in_turn(operations, closers)
        return self._submit(verb, steps, opts, list(inputs), list(outputs))

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Send another tensor to each rank, and get one from each; sizes may differ."""
        verb = "all_to_all"
        self._refuse_if_ended(verb)
        sources = check_tensors(verb, inputs, "inputs", count=self.size())
        targets = check_outputs(verb, outputs, self.size())
        check_same_kind(verb, targets[0], sources[0])
        own = sources[self._index].numel()
        check_count(verb, targets[self._index], "this rank's output", own, "as its own input")
        operation = self._exchange(verb, sources, targets)
        return self._submit(verb, [operation], opts, sources, targets)

    def all_to_all_single(
        self,
        output: Any,
        source: Any,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Work:
        """Send rows of one tensor to each rank; without split sizes, as many to each."""
        verb = "all_to_all"
        self._refuse_if_ended(verb)
        source = check_tensor(verb, source, "input")
        output = check_output(verb, output, "output")
        check_same_kind(verb, output, source)
        sends = split_sizes(verb, source, input_splits, self.size(), "input")
        receives = split_sizes(verb, output, output_splits, self.size(), "output")
        flat_source = flat(source)
        targets, close = _pieces(output, receives)
        operation = self._exchange(verb, list(flat_source.split(sends)), targets)
        return self._submit(verb, _in_turn([operation], [close]), opts, [source], [output])

    # --- with a root

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Give the root everybody's tensor, as a list."""
        verb = "gather"
        self._refuse_if_ended(verb)
        source = check_tensor(verb, only(verb, inputs, "inputs"), "input")
        root = self._root(verb, opts)
        targets: list[Tensor | None] = [None] * self.size()
        if self._index == root:
            listed = check_outputs(
                verb, only(verb, outputs, "outputs") if outputs else [], self.size()
            )
            check_same_kind(verb, listed[0], source)
            own = listed[root]
            check_count(verb, own, "the root's own output", source.numel(), "as in its input")
            targets = list(listed)
        elif outputs and outputs[0]:
            raise ValueError(f"{verb}: only the root, group rank {root}, may pass outputs")
        sends = [source if rank == root else None for rank in range(self.size())]
        operation = self._exchange(verb, sends, targets, root=root)
        flat_outputs = [target for target in targets if target is not None]
        return self._submit(verb, [operation], opts, [source], flat_outputs)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Give each rank its tensor of the root's list."""
        verb = "scatter"
        self._refuse_if_ended(verb)
        output = check_output(verb, only(verb, outputs, "outputs"), "output")
        root = self._root(verb, opts)
        sends: list[Tensor | None] = [None] * self.size()
        if self._index == root:
            listed = check_tensors(
                verb, only(verb, inputs, "inputs") if inputs else [], "inputs", count=self.size()
            )
            check_same_kind(verb, output, listed[0])
            check_count(verb, output, "output", listed[root].numel(), "as in the root's own input")
            sends = list(listed)
        elif inputs and inputs[0]:
            raise ValueError(f"{verb}: only the root, group rank {root}, may pass inputs")
        receives = [output if rank == root else None for rank in range(self.size())]
        operation = self._exchange(verb, sends, receives, root=root)
        return self._submit(verb, [operation], opts, [t for t in sends if t is not None], [output])

    # --- reduce and scatter

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> Work:
        """Reduce the k-th tensors of all lists for rank k; sizes may differ between ranks."""
        verb = "reduce_scatter"
        self._refuse_if_ended(verb)
        output = check_output(verb, only(verb, outputs, "outputs"), "output")
        if inputs and not isinstance(inputs[0], Tensor):
            inputs = only(verb, inputs, "inputs")
        listed = check_tensors(verb, inputs, "inputs", count=self.size())
        operation = self._reduce_scatter(output, listed, opts)
        return self._submit(verb, [operation], _with(opts, timeout), listed, [output])

    def reduce_scatter_single(self, output: Any, source: Any, opts: Any = None) -> Work:
        """reduce_scatter of one tensor, concatenated or stacked."""
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None
    ) -> Work:
        """reduce_scatter_single of several tensors."""
        verb = "reduce_scatter"
        self._refuse_if_ended(verb)
        operations = []
        for output, source in zip(outputs, inputs, strict=True):
            source = check_tensor(verb, source, "input")
            output = check_output(verb, output, "output")
            total = output.numel() * self.size()
            check_count(verb, source, "input", total, f"{self.size()} times the output's")
            pieces = list(flat(source).split([output.numel()] * self.size()))
            operations.append(self._reduce_scatter(output, pieces, opts))
        return self._submit(verb, operations, opts, list(inputs), list(outputs))

    def _reduce_scatter(self, output: Tensor, pieces: list[Tensor], opts: Any) -> Operation:
        verb = "reduce_scatter"
        check_same_kind(verb, output, pieces[0])
        own = pieces[self._index]
        check_count(verb, output, "output", own.numel(), "as in this rank's own input")
        reducer, factor = _reduction(opts, output)
        receives: list[Tensor | None] = [output] * self.size()
        return self._exchange(verb, pieces, receives, reducer=reducer, factor=factor, result=output)

    # --- nothing but meeting

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:
        """Finished on no rank before all have called it."""
        self._refuse_if_ended("barrier")
        signature = Signature(
            group=self._name, uid=self._uid, sequence=self._next_sequence(), verb="barrier"
        )
        opts = _with(opts, timeout)
        return self._submit("barrier", [Barrier(signature=signature)], opts, [], [])

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier that blocks, and on failure names who did not come and leaves the group whole.

        Raises:
            CollectiveTimeoutError: names the first missing rank, or all of them.
        """
        self._refuse_if_ended("monitored_barrier")
        self._job.barriers.wait(
            f"{self._uid}#{self._next_sequence()}",
            self._ranks,
            self._job.rank,
            timeout if timeout else self._timeout,
            wait_all_ranks=wait_all_ranks,
        )

    # --- helpers

    def _exchange(
        self,
        verb: str,
        sends: Sequence[Tensor | None],
        receives: Sequence[Tensor | None],
        expected: Sequence[int] | None = None,
        *,
        root: int | None = None,
        reducer: Reducer | None = None,
        factor: float = 1.0,
        result: Tensor | None = None,
        sequence: int | None = None,
    ) -> Operation:
        some = next(t for t in (*sends, *receives, result) if t is not None)
        if expected is None:
            expected = [0 if tensor is None else tensor.numel() for tensor in receives]
        signature = Signature(
            group=self._name,
            uid=self._uid,
            sequence=self._next_sequence() if sequence is None else sequence,
            verb=verb,
            wire=wire_type(some.dtype),
            reducer=reducer,
            root=root,
            factor=factor,
            place=some.device.type,
            sends=tuple(0 if tensor is None else tensor.numel() for tensor in sends),
            receives=tuple(expected),
        )
        return Exchange(signature=signature, sends=sends, receives=receives, result=result)

    def _root(self, verb: str, opts: Any) -> int:
        root = opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)
        return check_rank(verb, root, self.size(), "the root")

    # --- the names of older torch

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


@dataclass(frozen=True, slots=True)
class _Timeout:
    """Options that say nothing but the timeout, for calls that pass it by itself."""

    timeout: timedelta


def _with(opts: Any, timeout: Any) -> Any:
    return _Timeout(timeout) if isinstance(timeout, timedelta) else opts


def _reduction(opts: Any, tensor: Tensor) -> tuple[Reducer, float]:
    """The operation, and the factor of a PREMUL_SUM; from opts, from an operation, or SUM."""
    operation: Any = getattr(opts, "reduceOp", opts)
    if not isinstance(operation, (ReduceOp, ReduceOp.RedOpType)):
        operation = ReduceOp.SUM
    name = getattr(operation, "op", operation).name
    factor = float(operation.factor) if name == "PREMUL_SUM" else 1.0
    return reducer_for(name, wire_type(tensor.dtype)), factor


def _pieces(output: Tensor, sizes: Sequence[int]) -> tuple[list[Tensor], Callable[[], None]]:
    """Views of the output's elements for each rank, and what brings them in if it is strided."""
    if output.is_contiguous() and not output.is_conj() and not output.is_neg():
        return list(output.data.reshape(-1).split(list(sizes))), _nothing
    buffer = torch.empty(output.numel(), dtype=output.dtype, device=output.device)

    def close() -> None:
        output.data.copy_(buffer.view(output.shape))

    return list(buffer.split(list(sizes))), close


def _nothing() -> None:
    """The pieces were the output's own memory."""


def _in_turn(
    operations: Sequence[Operation], closers: Sequence[Callable[[], None]]
) -> Iterator[Operation]:
    """Each operation, and when it is done, its closer."""
    for operation, close in zip(operations, closers, strict=True):
        yield operation
        close()
