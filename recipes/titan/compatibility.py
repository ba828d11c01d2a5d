"""What torchtitan 0.2.2 needs to be told before it trains on "tpu": each shim, and when it goes.

torchtitan reads the type of its device while it is imported, so `prepare` comes before the first
``import torchtitan``. Each shim stands in only where what it makes up for is missing.

| shim | what it makes up for | goes with torchtitan |
| --- | --- | --- |
| `_WithoutTriton` | models.moe.kernels imports triton at its top | 0.3: no such module |
| `_fill_indices` | that module's kernel is one for CUDA | 0.3: no such kernel |
| `_peak_flops` | MFU takes a TPU for an A100 | 0.3: it knows TPUs |
| `first_local_device` | a process's device is numbered by LOCAL_RANK | 0.3: it looks |
| `_OnCpu`, `_CpuDevice` | torch.cpu is no device module | stays: for comparing with gloo |
| `_count_on_cpu` | torch.histc has no integers on the CPU; MoE counts tokens with it | the same |
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tpu_dist.recipes.errors import MissingDependencyError, RecipeError
from tpu_dist.topology.errors import TopologyError
from tpu_dist.topology.generations import find_generation

DEVICES = ("tpu", "cpu")

_SERIES = "0.2."
_KERNELS = "torchtitan.models.moe.kernels"
_UTILS = "torchtitan.tools.utils"


def prepare(device: str = "tpu") -> None:
    """Import torchtitan for a type of device; again for the same one, nothing happens.

    Args:
        device: ``tpu``, or ``cpu`` for the same run on CPU tensors with gloo.

    Raises:
        MissingDependencyError: torchtitan is not installed.
        RecipeError: it is of another series, or was imported for another device.
        ValueError: no such device.
    """
    if device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {device}")
    if "torchtitan" not in sys.modules:
        _require_series()
        with _loading_for(device):
            kernels: Any = importlib.import_module(_KERNELS)
            utils: Any = importlib.import_module(_UTILS)
        if device == "cpu":
            torch.histc = _count_on_cpu(torch.histc)
        kernels.fill_indices_wrapper = _fill_indices(kernels.fill_indices_wrapper)
        utils.get_peak_flops = _peak_flops(utils.get_peak_flops)
    found = importlib.import_module(_UTILS).device_type
    if found != device:
        raise RecipeError(
            f"device {device!r} was asked for, and this process has imported torchtitan for "
            f"{found!r}. Call prepare({device!r}) before anything imports torchtitan."
        )


@contextmanager
def first_local_device() -> Iterator[Callable[[], None]]:
    """Let LOCAL_RANK be 0 until what is yielded is called, or the block ends.

    torchtitan names its device ``tpu:LOCAL_RANK``; a process here has one, and it is ``tpu:0``.
    """
    local_rank = os.environ.get("LOCAL_RANK")

    def restore() -> None:
        if local_rank is not None:
            os.environ["LOCAL_RANK"] = local_rank

    if local_rank is not None:
        os.environ["LOCAL_RANK"] = "0"
    try:
        yield restore
    finally:
        restore()


def _require_series() -> None:
    try:
        version = metadata.version("torchtitan")
    except metadata.PackageNotFoundError:
        raise MissingDependencyError("torchtitan", "this recipe") from None
    if not version.startswith(_SERIES):
        raise RecipeError(
            f"torchtitan {version} is installed, and this recipe is for {_SERIES}x, the last "
            f'series for the torch that tpu-dist needs. Run `pip install "tpu-dist[recipes]"`.'
        )


class _Anything:
    """A value that can be called, and asked for any attribute: what a decorator sees of triton."""

    def __call__(self, *args: object, **kwargs: object) -> _Anything:
        return self

    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class _WithoutTriton(importlib.machinery.SourceFileLoader):
    """Runs the module with something called triton there, for so long only.

    Left there, torch would take triton for installed.
    """

    def exec_module(self, module: ModuleType) -> None:
        standing_in: dict[str, Any] = {"triton": _Anything(), "triton.language": _Anything()}
        sys.modules.update(standing_in)
        try:
            super().exec_module(module)
        finally:
            for name in standing_in:
                del sys.modules[name]


class _OnCpu(importlib.machinery.SourceFileLoader):
    """Has the module that the others take their device from say that it is the CPU.

    It asks torch, which knows an accelerator, and would else take CUDA for granted.
    """

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        vars(module).update(device_type="cpu", device_module=_CpuDevice())


class _Finder:
    """Finds modules of torchtitan's that must be loaded by one of the above."""

    def __init__(self, loaders: Mapping[str, type[importlib.machinery.SourceFileLoader]]) -> None:
        self._loaders = loaders

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._loaders:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = self._loaders[name](name, spec.origin)
        return spec


@contextmanager
def _loading_for(device: str) -> Iterator[None]:
    """Have torchtitan imported for `device`, and without triton where that is not installed."""
    loaders: dict[str, type[importlib.machinery.SourceFileLoader]] = {}
    if importlib.util.find_spec("triton") is None:
        loaders[_KERNELS] = _WithoutTriton
    if device == "cpu":
        loaders[_UTILS] = _OnCpu
    finder = _Finder(loaders)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def _fill_indices(triton_wrapper: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return torchtitan's fill_indices_wrapper, for tensors on any device."""

    def fill_indices(
        tokens_per_expert_group: torch.Tensor,
        start_index_values: torch.Tensor,
        write_offsets: torch.Tensor,
        experts_per_rank: int,
        num_ranks: int,
        max_len: int,
        **launch: Any,
    ) -> torch.Tensor:
        """Say which token goes to each place, in the order of experts; -1 where none does.

        Tokens come in groups, by rank and then by expert, and go by expert and then by rank.
        """
        if tokens_per_expert_group.device.type == "cuda":
            return triton_wrapper(
                tokens_per_expert_group,
                start_index_values,
                write_offsets,
                experts_per_rank,
                num_ranks,
                max_len,
                **launch,
            )
        sizes = tokens_per_expert_group.view(num_ranks, experts_per_rank).long()
        starts = start_index_values.view(num_ranks, experts_per_rank).long()
        ends = sizes.cumsum(0)  # of each rank's tokens, among its expert's
        place = torch.arange(max_len, device=sizes.device)
        expert = (place[:, None] >= write_offsets.long()).sum(1) - 1
        within = place - write_offsets.long()[expert]
        rank = (within >= ends[:, expert]).sum(0)
        there = rank < num_ranks
        rank = rank.clamp(max=num_ranks - 1)
        first = ends[rank, expert] - sizes[rank, expert]
        index = starts[rank, expert] + within - first
        return torch.where(there, index, -1).to(torch.int32)

    return fill_indices


def _peak_flops(known: Callable[[str], float]) -> Callable[[str], float]:
    """Return torchtitan's get_peak_flops, with TPUs."""

    def get_peak_flops(device_name: str) -> float:
        """Bfloat16 FLOP/s of one device; not a number of a CPU, so that no MFU is made up."""
        if device_name.startswith("CPU"):
            return float("nan")
        try:
            generation = find_generation(device_name)
        except TopologyError:
            return known(device_name)
        return generation.peak_bf16_flops / generation.devices_per_chip

    return get_peak_flops


def _count_on_cpu(histc: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return torch.histc that counts integers on the CPU, too, as it does on CUDA and here."""

    @functools.wraps(histc)
    def count(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if tensor.is_floating_point():
            return histc(tensor, *args, **kwargs)
        return histc(tensor.float(), *args, **kwargs).to(tensor.dtype)

    return count


class _CpuDevice:
    """torch.cpu, and what a trainer asks of a device module besides."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        """An index, where torch.cpu's is a name: it goes to barrier(device_ids=...)."""
        return 0

    def get_device_name(self, device: object = None) -> str:
        return "CPU"

    def get_device_properties(self, device: object = None) -> SimpleNamespace:
        pages = os.sysconf("SC_PHYS_PAGES")
        return SimpleNamespace(name="CPU", total_memory=pages * os.sysconf("SC_PAGE_SIZE"))

    def memory_stats(self, device: object = None) -> dict[str, int]:
        """The most that was resident of the process: torch counts no bytes of CPU tensors."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak}

    def reset_peak_memory_stats(self, device: object = None) -> None:
        """A process's peak cannot be reset."""

    def empty_cache(self) -> None:
        """There is none."""
