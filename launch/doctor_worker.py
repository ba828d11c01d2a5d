"""What ``tpu-launch doctor`` runs on every device: all_reduce for two seconds. A file to be run."""

from __future__ import annotations

import time

SECONDS = 2.0
ELEMENTS = 1 << 18  # of float32: 1 MiB


def main() -> None:
    """Join, reduce for two seconds, check each result, and print what was done."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("tpu_dist")
    world = dist.get_world_size()
    expected = float(sum(range(1, world + 1)))
    count = 0
    go_on = torch.ones(1)
    deadline = time.monotonic() + SECONDS
    while go_on.item() > 0:
        value = torch.full((ELEMENTS,), dist.get_rank() + 1.0)
        dist.all_reduce(value)
        if not bool((value == expected).all()):
            raise RuntimeError(f"all_reduce of {world} ranks gave {value[0]}, not {expected}")
        count += 1
        # All must agree on the last one.
        go_on = torch.tensor([float(time.monotonic() < deadline)])
        dist.all_reduce(go_on, op=dist.ReduceOp.MIN)
    if dist.get_rank() == 0:
        print(f"all_reduce: {count} of 1 MiB by {world} ranks in {SECONDS:g} s, all right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
