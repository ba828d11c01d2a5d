"""Starts the service as a process of its own."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from dataclasses import asdict
from typing import IO

from tpu_dist.launch.errors import LaunchError
from tpu_dist.launch.service.__main__ import Orders
from tpu_dist.launch.service.server import PortTakenError

_START_SECONDS = 30.0


def start_service(
    orders: Orders, *, log: IO[bytes] | int | None = None
) -> tuple[subprocess.Popen[bytes], dict[str, int]]:
    """Start the service; it is not ours to end, but for `for_ever`: it ends after its last host.

    In a session of its own, as Ctrl-C at a terminal is for the launcher, which then says goodbye.

    Args:
        orders: what to serve.
        log: where its log goes; None is this process's stderr.

    Returns:
        The process, and its ports by name: ``port``, ``metrics_port``.

    Raises:
        PortTakenError: the port is taken.
        LaunchError: it did not start; says why.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "tpu_dist.launch.service"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(asdict(orders)).encode())
    process.stdin.close()
    ready, _, _ = select.select([process.stdout], [], [], _START_SECONDS)
    line = process.stdout.readline() if ready else b""
    process.stdout.close()
    try:
        answer: dict[str, int | str] = json.loads(line)
    except ValueError:
        process.kill()
        process.wait()
        raise LaunchError(
            f"the rendezvous service did not start within {_START_SECONDS:g} s (status "
            f"{process.returncode}); what it printed is above"
        ) from None
    if "error" in answer:
        process.wait()
        kind = PortTakenError if answer.get("taken") else LaunchError
        raise kind(str(answer["error"]))
    return process, {name: int(value) for name, value in answer.items()}


def resident_megabytes(pid: int) -> float:
    """Return the most memory that a process has had (VmHWM), in MB of 10^6 bytes; Linux."""
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        kilobytes = next(line.split()[1] for line in status if line.startswith("VmHWM"))
    return int(kilobytes) * 1024 / 1e6


def raise_open_files() -> int:
    """Raise the limit of open files to what the system lets, and return it."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else sys.maxsize
