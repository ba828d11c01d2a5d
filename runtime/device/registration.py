"""Makes "tpu" a device of torch's: its name, its module, and the kernel that loads all others.

Runs at the end of `import torch`, so it is cheap and imports no JAX. The first operator on a tensor
of the device loads the operators, and with them JAX.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

DEVICE = "tpu"

# torch forgets kernels when the object goes that registered them.
_libraries: list[torch.library.Library] = []


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    """What torch's C++ asks of a backend."""

    def is_available(self) -> bool:
        return True

    def has_primary_context(self, device_index: int) -> bool:
        from tpu_dist.runtime.device.place import is_started

        return is_started()

    def is_built(self) -> bool:
        return True


class _Guard(torch._C._acc.DeviceGuard):
    """Which device the thread is at: there is one."""

    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


def register_device() -> None:
    """Register the device with torch; once a process.

    Raises:
        RuntimeError: another backend has taken torch's place for one.
    """
    if _libraries:
        return
    from tpu_dist.runtime.device import accelerator, autocast, module, storage
    from tpu_dist.runtime.device.generator import Generator

    rename_privateuse1_backend(DEVICE)
    generate_methods_for_privateuse1_backend()
    torch._register_device_module(DEVICE, module.device_module())
    torch._C._acc.register_python_privateuseone_hook(_Hooks())
    torch._C._acc.register_python_privateuseone_device_guard(_Guard())
    storage.patch_storage()
    accelerator.patch_accelerator()
    _print_from_host()
    torch.Generator = Generator  # type: ignore[misc]
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(_run_unregistered, "PrivateUse1")
    _libraries.append(fallback)
    _libraries.append(_pinning())
    _libraries.extend(autocast.register())


def _run_unregistered(op: Any, *args: Any, **kwargs: Any) -> Any:
    from tpu_dist.runtime.operators.load import run_unregistered

    return run_unregistered(op, *args, **kwargs)


def _print_from_host() -> None:
    """Have tensors be copied before they are printed: torch would run 25 operators to do it."""
    import functools

    from torch import _tensor_str

    theirs = _tensor_str._tensor_str

    @functools.wraps(theirs)
    def tensor_str(self: torch.Tensor, indent: int) -> str:
        if self.device.type == DEVICE and type(self) in (torch.Tensor, torch.nn.Parameter):
            self = self.detach().cpu()
        return str(theirs(self, indent))  # type: ignore[no-untyped-call]

    _tensor_str._tensor_str = tensor_str


def _pinning() -> torch.library.Library:
    """Host memory needs no pinning for PJRT: pin_memory() gives a plain copy, which says it is."""
    library = torch.library.Library("aten", "IMPL")

    def pin(self: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        copy = self.clone()
        copy.untyped_storage()._pinned_for_tpu = True  # type: ignore[attr-defined]
        return copy

    def is_pinned(self: torch.Tensor, device: torch.device | None = None) -> bool:
        return "_pinned_for_tpu" in self.untyped_storage().__dict__

    library.impl("_pin_memory", pin, "CPU", allow_override=True)
    library.impl("is_pinned", is_pinned, "CPU", allow_override=True)
    return library
