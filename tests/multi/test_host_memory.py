"""What collectives ask of the kernel's memory."""

import resource

import torch
import torch.distributed as dist
from ranks import gloo_cannot, run_ranks

pytestmark = gloo_cannot("it has no buffers of its own")

NUM_BYTES = 16 << 20
PAGES = NUM_BYTES // resource.getpagesize()


def faults_of_an_all_reduce(rank: int) -> float:
    tensor = torch.zeros(NUM_BYTES // 4)
    for _ in range(3):
        dist.all_reduce(tensor)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        dist.all_reduce(tensor)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 8


def test_a_programs_buffers_need_no_new_pages_in_each_call() -> None:
    assert max(run_ranks(faults_of_an_all_reduce, 4)) < PAGES / 4
