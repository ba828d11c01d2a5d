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
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.models.moe.kernels import generate_permute_indices  # noqa: E402
from torchtitan.protocols.train_spec import get_train_spec  # noqa: E402
from torchtitan.tools import utils  # noqa: E402

from tpu_dist.recipes.titan import configs, specs  # noqa: E402
from tpu_dist.topology.system import System  # noqa: E402

specs.register_specs()
specs.register_specs()  # again: nothing happens

PODS = {
    "llama3_8b": ["v5e:16x16", "v6e:16x16*4", "v5p:8x8x8"],
    "llama3_70b": ["v6e:16x16", "v5p:8x8x16", "tpu7x:8x8x8*2"],
    "llama3_405b": ["v5p:8x16x16", "tpu7x:16x16x16"],
    "qwen3_32b": ["v6e:16x16", "v5p:8x8x8"],
    "qwen3_30b_a3b": ["v6e:16x16", "v5p:4x4x8"],
    "qwen3_235b_a22b": ["v5p:8x8x8", "tpu7x:4x8x8"],
    "deepseek_v3_671b": ["v5p:8x16x16", "tpu7x:8x8x16"],
}
GROUPS = [(1, 4, 8), (2, 4, 8), (3, 1, 8), (4, 2, 16), (1, 1, 8)]  # ranks, experts, alignment
COMMAND_LINES = [
    "",
    "--config lama",
    "--config llama3_debug --topology v99:2x2",
    "--config llama3_debug --training.stepz 3",
    "--config llama3_debug --job.config_file x.toml",
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


def large(name: str) -> dict[str, Any]:
    """Parameters, and biases of experts, of a model on no memory; whether its pods fit it."""
    config = getattr(configs, name)()
    spec = get_train_spec(config.model.name)
    args = spec.model_args[config.model.flavor]
    args.update_from_config(config)
    with torch.device("meta"):
        model = spec.model_cls(args)
    biases = (b for n, b in model.named_buffers() if n.endswith("expert_bias"))
    for topology in PODS[name]:
        system = System.parse(topology)
        degrees = getattr(configs, name)(system).parallelism
        ParallelDims(  # raises where they do not multiply to the number of ranks
            dp_replicate=degrees.data_parallel_replicate_degree,
            dp_shard=degrees.data_parallel_shard_degree,
            cp=1,
            tp=degrees.tensor_parallel_degree,
            pp=1,
            ep=degrees.expert_parallel_degree,
            etp=1,
            world_size=system.num_devices,
        )
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "biases": sum(b.numel() for b in biases),
        "attention": getattr(args, "attn_type", "sdpa"),
        "grouped": args.moe_args.use_grouped_mm if hasattr(args, "moe_inter_dim") else None,
    }


def teraflops(name: str) -> float | str:
    peak = utils.get_peak_flops(name)
    return peak / 1e12 if peak == peak else "nan"


names = [*sorted({*_NAMES.values()}), "NVIDIA H100", torch.tpu.get_device_name()]
print(
    json.dumps(
        {
            "torch sees triton": has_triton_package(),
            "finder left": any(type(finder) is compatibility._Finder for finder in sys.meta_path),
            "second device": second_device(),
            "routing": {device: routing(device) for device in ("tpu", "cpu")},
            "peak teraflops": {name: teraflops(name) for name in names},
            "large": {name: large(name) for name in PODS},
            "command line": {line: command_line(line) for line in COMMAND_LINES},
        }
    )
)
