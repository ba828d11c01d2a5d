"""Work: the user's handle on a call that is under way."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tpu_dist.collectives.lane import current_lane
from tpu_dist.errors import CollectiveError, CollectiveTimeoutError
from tpu_dist.runtime.device import calls
from tpu_dist.runtime.device.box import Box, box_of
from tpu_dist.runtime.device.modes import is_blocking
from tpu_dist.runtime.device.tensors import byte_range, is_on_device

# For callbacks where no lane runs them: they may block, which the channel's and the watchdog's
# threads must not. And torch wants an asynchronous profiler event to end on another thread than it
# began on.
_callbacks = ThreadPoolExecutor(max_workers=64, thread_name_prefix="tpu_dist-callbacks")

_FOR_EVER = timedelta(days=365)
NO_TIMEOUT = timedelta(0)  # what c10d passes for "wait as long as the group's timeout lets you"


class _Future(torch.futures.Future[Any]):
    """A future that callbacks on a lane's thread may wait for."""

    def wait(self) -> Any:
        """The value; blocks until it is there."""
        lane = current_lane()
        if lane is not None:
            lane.help_until(self.done)
        return super().wait()


class Work(dist.Work):
    """One call. Finished by a lane or the channel; waited for by anybody, any number of times.

    wait() blocks the host until CPU tensors hold the result. Where all outputs are on the device it
    returns at once: who touches one of them next waits, until the group's timeout at most, and gets
    the error of a call that has failed. It blocks there too if it is given a timeout, if
    get_future() was called, in Debug mode, and with TPU_DIST_BLOCKING_WAIT=1.
    """

    # C++ may hold a Work whose Python half nobody holds (DDP's join does). Without that half,
    # wait() is c10d's own, which sleeps for ever: so keep the recent ones alive.
    _recent: collections.deque[Work] = collections.deque(maxlen=1024)

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        describe: Callable[[], str],
        event: Any = None,
        *,
        group: str = "",
        blocks: bool = True,
    ) -> None:
        """A call that has not been made yet.

        Args:
            outputs: what result() returns.
            describe: says who is missing, for the message of a wait that gives up.
            event: handle of the profiler event to end with it.
            group: uid of its group.
            blocks: whether wait() blocks, whatever the outputs.
        """
        super().__init__()
        self._outputs = list(outputs)
        self._released: list[weakref.ref[torch.Tensor]] = []
        self._describe = describe
        self._event = event
        self._began_on = threading.get_ident()
        # A bare lock, held until the call is done: an Event costs twice as much on every call.
        self._running = threading.Lock()
        self._running.acquire()
        self._is_done = False
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._source = -1
        self._then: list[Callable[[], None]] = []
        self.group = group
        self.was_waited_for = False
        self._boxes = self._begin_in_boxes()
        on_device = bool(outputs) and all(map(is_on_device, outputs))
        self._orders = on_device and not blocks and not is_blocking()
        if on_device:
            calls.begin(self)
        self._recent.append(self)

    def _begin_in_boxes(self) -> list[Box]:
        """Let the outputs' boxes know who writes to them, and where."""
        boxes: dict[Box, None] = {}
        for output in self._outputs:
            if is_on_device(output):
                box = box_of(output)
                box.begin(self, *byte_range(output))
                boxes[box] = None
        return list(boxes)

    @classmethod
    def forget_recent(cls) -> None:
        """Let go of the works of a job that has ended."""
        cls._recent.clear()

    # --- for those who run it

    def finish(self, error: BaseException | None = None) -> None:
        """End it; to be called once."""
        self._error = error
        if self._event is not None:
            self._end_event()
        with self._lock:
            self._is_done = True
            future = self._future
            boxes, self._boxes = self._boxes, []
            then, self._then = self._then, []
        for box in boxes:
            box.end(self, failed=error is not None)
        calls.end(self, error if boxes else None)
        self._running.release()
        for callback in then:
            callback()
        if future is not None:
            if (
                current_lane() is not None
            ):  # in order, so that what callbacks call is in order on all ranks
                self._fulfil(future)
            else:
                _callbacks.submit(self._fulfil, future)

    def set_source(self, group_rank: int) -> None:
        """Say whom a receive from any source has got its message from."""
        self._source = group_rank

    # --- what c10d and users call

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Block until the call is done, or have those block who touch its outputs; True.

        Args:
            timeout: block, and give up waiting after this long; the call itself goes on until its
                group's timeout. Zero: no other limit than the group's; see the class for what
                blocks then.

        Raises:
            CollectiveTimeoutError: `timeout` is over.
            CollectiveError: the call has failed.
        """
        self.was_waited_for = True
        if timeout > NO_TIMEOUT or not self._leave_in_order():
            self._block(timeout)
            self._let_go()
        return True

    def _leave_in_order(self) -> bool:
        """Have those wait who touch the outputs, if that will do; whether it does."""
        if not self._orders:
            return False
        with self._lock:
            if self._is_done or self._future is not None:
                return False
            for box in self._boxes:
                box.keep_back(self)
        self._let_go()
        return True

    def join(self) -> None:
        """Block until the call is done, well or not."""
        with contextlib.suppress(CollectiveError):
            self._block(NO_TIMEOUT, sees=False)

    def settle(self) -> None:
        """Block until the call is done, on whatever tensors.

        Raises:
            CollectiveError: it has failed.
        """
        self._block(NO_TIMEOUT)

    def _block(self, timeout: timedelta, *, sees: bool = True) -> None:
        # Without a limit of its own it still ends: the watchdog fails calls that are overdue.
        lane = None if self._is_done else current_lane()
        if lane is not None:
            deadline = time.monotonic() + (timeout or _FOR_EVER).total_seconds()
            lane.help_until(lambda: self._is_done or time.monotonic() > deadline)
        if not self._is_done:
            if self._running.acquire(
                timeout=timeout.total_seconds() if timeout > NO_TIMEOUT else -1
            ):
                self._running.release()
            elif not self._is_done:
                raise CollectiveTimeoutError(
                    f"wait({timeout.total_seconds():g} s) gave up: {self._describe()}"
                )
        future = self._future
        if future is not None:  # whoever has waited may look at it at once, as DDP's join does
            with contextlib.suppress(Exception):
                future.wait()
        if self._error is not None:
            if sees:
                calls.see(self)
            raise self._error

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` when it has ended, on the thread that ends it; at once if it has."""
        with self._lock:
            if not self._is_done:
                self._then.append(callback)
                return
        callback()

    def _let_go(self) -> None:
        """Leave the outputs on the device to those who use them: _recent would keep them alive."""
        if self._future is None and self._outputs and all(map(is_on_device, self._outputs)):
            self._released = [weakref.ref(output) for output in self._outputs]
            self._outputs = []

    def synchronize(self) -> None:
        """Same as wait()."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._is_done

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._is_done and self._error is None

    def exception(self) -> BaseException | None:
        """The error it ended with, if any."""
        calls.see(self)
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The output tensors; filled once it is completed.

        Of tensors on the device, those that somebody still holds, once it was waited for.
        """
        return self._outputs or [t for left in self._released if (t := left()) is not None]

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the list of output tensors."""
        with self._lock:
            if self._future is None:
                self._future = _Future()
                if self._is_done:
                    self._fulfil(self._future)
            return self._future

    def source_rank(self) -> int:
        """Group rank of the sender of a received message; blocks until it is known."""
        if self._source < 0 and self._orders:
            self.settle()
        return self._source

    _source_rank = source_rank

    def _fulfil(self, future: torch.futures.Future[Any]) -> None:
        if self._error is not None:
            calls.see(self)
            future.set_exception(self._error)
        else:
            future.set_result(self.result())

    def _end_event(self) -> None:
        event, self._event = self._event, None
        end = torch.autograd._record_function_with_args_exit  # type: ignore[attr-defined]
        if threading.get_ident() == self._began_on:
            _callbacks.submit(end, event).result()
        else:
            end(event)


class CoalescedWork(Work):
    """Several calls seen as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__([], lambda: "coalesced calls are under way")
        self._works = list(works)
        self._outputs = [output for work in works for output in work.result()]
        self._left = len(self._works)
        if not self._works:
            self.finish()
        for work in self._works:
            work.when_done(self._one_done)

    def _leave_in_order(self) -> bool:
        if self._future is not None or self._is_done:
            return False
        errors = []
        for work in self._works:
            try:
                work.wait()
            except CollectiveError as error:  # those that outlive it must be ordered all the same
                errors.append(error)
        if errors:
            raise errors[0]
        return True

    def exception(self) -> BaseException | None:
        """The first error of its calls, if any."""
        for work in self._works:
            work.exception()
        return super().exception()

    def _block(self, timeout: timedelta, *, sees: bool = True) -> None:
        try:
            super()._block(timeout, sees=sees)
        finally:
            if self._is_done:
                self.exception()

    def _one_done(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            errors = [work._error for work in self._works]
            self.finish(next((error for error in errors if error is not None), None))
