"""What test_recipes_titan.py looks at: torchtitan, imported for "tpu". Prints JSON."""

import contextlib
import io
import json
import random
import sys
from typing import Any

import torch

from tpu_dist.recipes.titan import compatibility
from tpu_dist.recipes.titan.__main__ import main
from tpu_dist.runtime.device.properties import _NAMES

compatibility.prepare("tpu")
compatibility.prepare("tpu")  # again: nothing happens

from torch.utils._triton import has_triton_package  # noqa: E402
from torchtitan.models.moe.kernels import generate_permute_indices  # noqa: E402
from torchtitan.tools import utils  # noqa: E402

GROUPS = [(1, 4, 8), (2, 4, 8), (3, 1, 8), (4, 2, 16), (1, 1, 8)]  # ranks, experts, alignment
COMMAND_LINES = [
    "",
    "--config lama",
    "--config llama3_debug --topology v99:2x2",
    "--config llama3_debug --training.stepz 3",
    "--device abacus",
    "--module no.such.module --config x",
]


def second_device() -> str:
    try:
        compatibility.prepare("cpu")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def routing(device: str) -> dict[str, Any]:
    random.seed(0)
    cases, different = 0, []
    for ranks, experts, align in GROUPS:
        for empty in (0.0, 0.3, 0.7, 1.0):
            sizes = [
                0 if random.random() < empty else random.randrange(30)
                for _ in range(ranks * experts)
            ]
            length = (sum(sizes) + experts * align + align - 1) // align * align
            given = torch.tensor(sizes)
            want = generate_permute_indices(given, experts, ranks, length, align, use_cpu=True)
            got = generate_permute_indices(given.to(device), experts, ranks, length, align)
            cases += 1
            for one, other in zip(want, got, strict=True):
                if one.dtype != other.dtype or not torch.equal(one, other.cpu()):
                    different.append([sizes, one.tolist(), other.tolist()])
    return {"cases": cases, "different": different}


def command_line(arguments: str) -> tuple[Any, str]:
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
        try:
            main(arguments.split())
        except SystemExit as end:
            return end.code, printed.getvalue()
    return None, printed.getvalue()


def teraflops(name: str) -> float | str:
    peak = utils.get_peak_flops(name)
    return peak / 1e12 if peak == peak else "nan"


names = [*sorted({*_NAMES.values()}), "NVIDIA H100", torch.tpu.get_device_name()]
print(
    json.dumps(
        {
            "torch sees triton": has_triton_package(),
            "finder left": compatibility._KernelsFinder in sys.meta_path,
            "second device": second_device(),
            "routing": {device: routing(device) for device in ("tpu", "cpu")},
            "peak teraflops": {name: teraflops(name) for name in names},
            "command line": {line: command_line(line) for line in COMMAND_LINES},
        }
    )
)
