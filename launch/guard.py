"""Ties a worker's life to its launcher's: when the launcher dies, also by SIGKILL, so does it.

The same file is both sides. Imported, it wraps a worker's command. Run as a script, it asks Linux
for SIGKILL at its parent's death (prctl PR_SET_PDEATHSIG, which lasts through an exec) and becomes
the worker's command: no process stays between, and the worker's pid, environment and streams are
untouched. It costs a worker about 20 ms.

It covers the worker itself. Children that a worker started see its death, not the launcher's.
"""

from __future__ import annotations

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def guarded(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return ``command`` so wrapped that it dies with this process; as it is where not Linux.

    The parent that counts is the thread that starts the worker: it has to live as long as the
    workers may. The launcher starts them from its main thread.
    """
    if sys.platform != "linux":
        return command
    # -I -S: neither the user's environment nor site-packages concern the few lines below.
    return (sys.executable, "-I", "-S", __file__, str(os.getpid()), *command)


def main() -> None:
    """Arm the signal and become the command: ``guard.py LAUNCHER_PID COMMAND...``."""
    import ctypes

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback from here
    launcher, command = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        reason = os.strerror(ctypes.get_errno())
        print(f"tpu-launch: this worker would outlive its launcher: {reason}", file=sys.stderr)
    if os.getppid() != launcher:  # it died before the signal was armed
        os._exit(1)
    # Python ignores these two, and an exec would hand that on to a command that is not Python.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"tpu-launch: cannot run {command[0]!r}: {error.strerror}", file=sys.stderr)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main()
