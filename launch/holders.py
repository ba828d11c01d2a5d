"""Who holds a chip, or listens on a port: from /proc, as far as this user may look."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NODE = re.compile(r"/dev/(?:accel|vfio/)\d+")  # as tpu-info finds them
_LISTENING = "0A"  # of /proc/net/tcp: TCP_LISTEN
_MAX_COMMAND = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process, its command, and which of the files in question it has open."""

    pid: int
    command: str
    files: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.command[:_MAX_COMMAND]})"


def holders_of_chips(root: Path = Path("/")) -> Iterator[Holder]:
    """Yield the processes that have a chip's file open."""
    for process, links in _open_files(root):
        files = sorted({link for link in links if _NODE.fullmatch(link)})
        if files:
            yield Holder(pid=int(process.name), command=_command(process), files=tuple(files))


def listener_on(port: int, root: Path = Path("/")) -> Holder | None:
    """Return the process that listens on a TCP port; None if that cannot be seen."""
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port, root)}
    for process, links in _open_files(root) if sockets else ():
        if sockets & set(links):
            return Holder(pid=int(process.name), command=_command(process))
    return None


def _listening_inodes(port: int, root: Path) -> Iterator[str]:
    for name in ("tcp", "tcp6"):
        try:
            lines = (root / "proc/net" / name).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


def _open_files(root: Path) -> Iterator[tuple[Path, list[str]]]:
    for process in (root / "proc").glob("[0-9]*"):
        try:
            links = list((process / "fd").iterdir())
        except OSError:  # it has ended, or is another user's
            continue
        yield process, list(_targets(links))


def _targets(links: list[Path]) -> Iterator[str]:
    for link in links:
        try:
            yield str(link.readlink())
        except OSError:
            continue


def _command(process: Path) -> str:
    try:
        text = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "it has ended"
    return text.strip()
