"""Random numbers: a seed and an offset that every draw moves on, as torch.cuda's generators have.

A draw's key is made of both inside its program, so numbers depend on the state alone.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

Key = np.ndarray[Any, Any]

_DEFAULT_SEED = 67280421310721  # torch's, for its own default generators
_MASK = (1 << 64) - 1
_STATE_BYTES = 16


class DefaultGenerator:
    """The generator that is used where none is passed; its state is 16 bytes: seed, offset.

    Thread-safe.
    """

    device = torch.device("cpu")  # replaced when the device's name is known

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seed = _DEFAULT_SEED
        self._offset = 0

    def manual_seed(self, seed: int) -> DefaultGenerator:
        """Start the sequence of `seed`."""
        with self._lock:
            self._seed, self._offset = int(seed) & _MASK, 0
        return self

    def seed(self) -> int:
        """Start a sequence that nobody knows; returns its seed."""
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        self.manual_seed(seed)
        return seed

    def initial_seed(self) -> int:
        """The seed of the sequence."""
        return self._seed

    def get_state(self) -> torch.Tensor:
        """Seed and offset, as a CPU tensor of 16 bytes."""
        with self._lock:
            words = np.array([self._seed, self._offset], np.uint64)
        return torch.from_numpy(words.view(np.uint8).copy())

    def set_state(self, state: torch.Tensor) -> DefaultGenerator:
        """Go on from what get_state() returned.

        Raises:
            ValueError: it is no such state.
        """
        if state.numel() != _STATE_BYTES or state.dtype != torch.uint8:
            raise ValueError(
                f"the state of a 'tpu' generator is {_STATE_BYTES} bytes (seed and offset), got "
                f"{state.numel()} elements of {state.dtype}"
            )
        words = state.cpu().contiguous().numpy().view(np.uint64)
        with self._lock:
            self._seed, self._offset = int(words[0]), int(words[1])
        return self

    def next_key(self) -> Key:
        """The key of the next draw: four words."""
        with self._lock:
            words = np.array([self._seed, self._offset], np.uint64)
            self._offset = (self._offset + 4) & _MASK  # in fours, as DTensor's tracker counts
        return words.view(np.uint32)


DEFAULT_GENERATOR = DefaultGenerator()


class DeviceGenerator(torch._C.Generator):
    """torch.Generator(device="tpu"): keys are drawn from a generator on the host.

    torch lets only C++ make generators of other devices. Draws of the host's generator are the
    same everywhere, so results depend on the seed alone.
    """

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where tensors that it fills are."""
        return torch.device("tpu", 0)


class _GeneratorType(type(torch._C.Generator)):  # type: ignore[misc]
    """Makes `isinstance(g, torch.Generator)` true of every generator, C++'s own too."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch._C.Generator)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, torch._C.Generator)

    def __call__(cls, device: Any = "cpu") -> Any:
        if torch.device(device).type == "tpu":
            return DeviceGenerator()
        return torch._C.Generator(device)


class Generator(torch._C.Generator, metaclass=_GeneratorType):
    """torch.Generator, which makes generators for "tpu" too."""


def next_key(generator: Any) -> Key:
    """The key of a draw from `generator`, or from the default one."""
    if generator is None:
        return DEFAULT_GENERATOR.next_key()
    word = torch.empty((), dtype=torch.int64).random_(generator=generator)
    return np.array([int(word) & _MASK, 0], np.uint64).view(np.uint32)
