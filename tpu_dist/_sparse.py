"""all_reduce of sparse tensors: everybody's entries are gathered, and added up here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from tpu_dist.collectives.operations import Operation
from tpu_dist.errors import MismatchError

NUM_SPARSE_STEPS = 3

Gather = Callable[[int, torch.Tensor, list[torch.Tensor]], Operation]


def sparse_sum(tensor: torch.Tensor, ranks: Sequence[int], gather: Gather) -> Iterator[Operation]:
    """Sum a COO tensor over all ranks, in place.

    Args:
        tensor: sparse_coo, of the same shape on all ranks; entries may differ. Filled in place.
        ranks: global ranks of the group, in its order.
        gather: makes the all_gather of step 0, 1, ... from a source and one target a rank.

    Yields:
        The operations, each to be finished before the next is asked for.

    Raises:
        MismatchError: the shapes differ; on every rank.
    """
    own = tensor.detach().coalesce()
    indices, values = own.indices(), own.values()
    count = torch.tensor([own._nnz(), *own.shape])
    counts = [torch.zeros_like(count) for _ in ranks]
    yield gather(0, count, counts)
    shapes = [tuple(one[1:].tolist()) for one in counts]
    if len(set(shapes)) > 1:
        raise MismatchError(
            "all_reduce of sparse tensors of different shapes: "
            + "; ".join(f"rank {r} has {s}" for r, s in zip(ranks, shapes, strict=True))
            + ". Nothing was summed."
        )
    sizes = [int(one[0]) for one in counts]
    all_indices = [torch.empty((indices.shape[0], size), dtype=indices.dtype) for size in sizes]
    yield gather(1, indices, all_indices)
    all_values = [torch.empty((size, *values.shape[1:]), dtype=values.dtype) for size in sizes]
    yield gather(2, values, all_values)
    total = torch.sparse_coo_tensor(
        torch.cat(all_indices, dim=1), torch.cat(all_values), tensor.shape
    ).coalesce()
    with torch.no_grad():  # not .data: a sparse tensor's is another one
        tensor.copy_(total)
