"""torchrun's options that tpu-launch has not, and why: refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Mapping

_OWN_START = "each worker is a program of its own, started anew; leave it out"

_REFUSED: Mapping[str, str] = {
    "--start-method": _OWN_START,
    "--event-log-handler": "torchelastic's events are not recorded; leave it out",
    "--logs-specs": "logs are written where --log-dir, --redirects and --tee say",
    "--duplicate-stdout-filters": "filter the files that --tee writes below --log-dir instead",
    "--duplicate-stderr-filters": "filter the files that --tee writes below --log-dir instead",
    "--numa-binding": "torch binds workers by their CUDA devices; leave it out",
    "--signals-to-handle": "SIGINT, SIGTERM, SIGHUP and SIGQUIT are forwarded; leave it out",
    "--virtual-local-rank": "it renumbers CUDA devices; leave it out",
}


def refusal(option: str) -> str | None:
    """Return why ``option`` of torchrun is not available, or None if it is not one of those."""
    return _REFUSED.get(option)
