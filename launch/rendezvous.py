"""How the hosts of a run find each other: the one place where that is chosen.

Each way is an entry of ``_RENDEZVOUS``: a function that opens a torchelastic RendezvousHandler.
``choose_rendezvous`` decides by the settings, before torch is imported; ``open_rendezvous`` opens.
Today there is one: a single host, which has nobody to find.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tpu_dist.launch.settings import Setting

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler

STANDALONE = "standalone"

_TODAY = (
    "tpu-launch starts the workers of one host today, and joins no hosts yet. "
    "Leave the option out, or use --standalone, which is the default"
)

# What of torchrun's options says "this host alone, port chosen by the system", and so is welcome.
_SINGLE_HOST: Mapping[str, frozenset[str]] = {
    "nnodes": frozenset({"1", "1:1"}),
    "rdzv-backend": frozenset({STANDALONE, "c10d", "static"}),
    "rdzv-endpoint": frozenset({"localhost:0", "127.0.0.1:0"}),
}


def choose_rendezvous(settings: Mapping[str, Setting]) -> str:
    """Return the name of the rendezvous that the settings ask for.

    Raises:
        LaunchError: more than one host, or a rendezvous elsewhere.
    """
    for name, accepted in _SINGLE_HOST.items():
        setting = settings.get(name)
        if setting is not None and setting.text not in accepted:
            raise setting.error(_TODAY)
    return STANDALONE


def open_rendezvous(name: str, run_id: str) -> RendezvousHandler:
    """Open the rendezvous ``name``; the caller shuts it down.

    Args:
        name: what ``choose_rendezvous`` returned.
        run_id: the run's name, the same on all its hosts.
    """
    return _RENDEZVOUS[name](run_id)


def _open_standalone(run_id: str) -> RendezvousHandler:
    from tpu_dist.launch.standalone import StandaloneRendezvous

    return StandaloneRendezvous(run_id)


_RENDEZVOUS: Mapping[str, Callable[[str], RendezvousHandler]] = {STANDALONE: _open_standalone}
