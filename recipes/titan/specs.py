"""The models: torchtitan's own, with what differs here.

`compatibility.prepare` comes before this module is imported.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import JobConfig
from torchtitan.models import deepseek_v3, llama3, qwen3
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec, register_train_spec
from torchtitan.tools.utils import device_type

from tpu_dist.recipes.titan.king_james import build_tokenizer
from tpu_dist.recipes.titan.metrics import DeviceMetrics

_MODELS: Mapping[str, Callable[[], TrainSpec]] = {
    "llama3": llama3.get_train_spec,
    "qwen3": qwen3.get_train_spec,
    "deepseek_v3": deepseek_v3.get_train_spec,
}


def spec_name(model: str) -> str:
    """Return what model.name is for one of these models."""
    return f"tpu_{model}"


def register_specs() -> None:
    """Make the models known to torchtitan, as `tpu_llama3` and so on; again does nothing."""
    for model, get_spec in _MODELS.items():
        name = spec_name(model)
        if not _is_registered(name):
            register_train_spec(name, _adapted(get_spec()))


def _is_registered(name: str) -> bool:
    try:
        get_train_spec(name)
    except ValueError:
        return False
    return True


def _adapted(spec: TrainSpec) -> TrainSpec:
    parallelize = spec.parallelize_fn
    return dataclasses.replace(
        spec,
        model_args={flavor: _adapted_args(args) for flavor, args in spec.model_args.items()},
        build_tokenizer_fn=build_tokenizer,
        build_metrics_processor_fn=lambda job_config, dims, args: DeviceMetrics(job_config, dims),
        parallelize_fn=_summing(parallelize) if device_type == "cpu" else parallelize,
    )


def _adapted_args(args: Any) -> Any:
    if getattr(args, "attn_type", "sdpa") != "sdpa":  # those are compiled by inductor, for CUDA
        args = dataclasses.replace(args, attn_type="sdpa", attn_mask_type="causal")
    if getattr(args, "moe_args", None) and getattr(args, "moe_enabled", True):
        return _multiplying_groups(args)
    if getattr(args, "enable_weight_tying", False):
        # torch 2.13's FSDP2 takes tied weights in one group only; torchtitan 0.2.2 makes two.
        return dataclasses.replace(args, enable_weight_tying=False)
    return args


def _multiplying_groups(args: Any) -> Any:
    """Have experts multiply in one grouped product: torchtitan would loop where CUDA is not.

    The loop asks the host how many tokens each expert got, and has programs of as many shapes.
    """

    class GroupedArgs(type(args)):  # type: ignore[misc]  # torchtitan is untyped
        def update_from_config(self, job_config: JobConfig, **kwargs: Any) -> None:
            self.moe_args.use_grouped_mm = False  # else it is said to be given up
            super().update_from_config(job_config, **kwargs)
            self.moe_args.use_grouped_mm = True

    grouped = copy.deepcopy(args)
    grouped.__class__ = GroupedArgs
    return grouped


def _summing(parallelize: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Have FSDP2 reduce with SUM: gloo has no PREMUL_SUM, which torchtitan's factor takes."""

    @functools.wraps(parallelize)
    def parallelize_summing(*args: Any, **kwargs: Any) -> nn.Module:
        model = parallelize(*args, **kwargs)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    return parallelize_summing
