import subprocess
import sys


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False
    )


# A thread in a C++ function that gives the interpreter up meanwhile, and comes back to it while the
# process ends: the store has a destructor on the stack.
STUCK = """
import sys, threading, time
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore
from tpu_dist.runtime.parked_threads import park

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
came_back = threading.Event()

def wait():
    try:
        store.wait(["nobody sets it"], timedelta(seconds=1))
    finally:
        came_back.set()

thread = threading.Thread(target=wait, daemon=True)
thread.start()
time.sleep(0.3)
park(thread)
assert not came_back.wait(2), "it came back"
sys.exit(7)
"""


def test_a_parked_thread_never_comes_back_and_the_process_keeps_its_exit_code() -> None:
    ended = run(STUCK)
    assert (ended.returncode, ended.stderr) == (7, "")


BUSY = """
import hashlib, threading, time
from tpu_dist.runtime.parked_threads import park

thread = threading.Thread(target=hashlib.pbkdf2_hmac, args=("sha256", b"", b"", 500_000))
park(thread)  # it has not begun
thread.start()
time.sleep(0.1)
park(thread)
thread.join(20)
assert not thread.is_alive()
park(thread)
"""


def test_a_thread_that_runs_or_has_ended_is_left_alone() -> None:
    ended = run(BUSY)
    assert (ended.returncode, ended.stderr) == (0, "")
