"""The worker side of ``--run-path``: runs a script by path, and records what it raises.

A file to be run, not imported: ``python script_runner.py SCRIPT ARGS``. The script runs in this
interpreter under ``record``, so that an exception reaches the launcher's report without the script
asking for it.
"""

from __future__ import annotations

import os
import runpy
import sys


def main() -> None:
    """Run the script that the command line names."""
    del sys.argv[0]
    script = sys.argv[0]
    # Python put this file's folder first; the script expects its own, as if run directly.
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    from torch.distributed.elastic.multiprocessing.errors import record

    record(runpy.run_path)(script, run_name="__main__")


if __name__ == "__main__":
    main()
