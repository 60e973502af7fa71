"""A thread pool that does not keep the process alive, for calls that may hang.

The standard library's pool joins its threads at exit. Calls in this pool can be interrupted at any point. Each operation of the
object store is atomic. On this node, such a call only reads, or writes files that are not listed before they are complete.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class DaemonPool(Executor):
    """At most `threads` daemon threads, started on demand. `initializer` runs first in each of them."""

    def __init__(self, threads: int, name: str, initializer: Callable[[], None] = lambda: None) -> None:
        self._max = threads
        self._name = name
        self._initializer = initializer
        self._lock = threading.Lock()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._waiting: set[Future[Any]] = set()
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            self._waiting.discard(future)
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)  # raised to the caller that waits for the result

        with self._lock:
            if self._closed:
                raise RuntimeError(f"the pool {self._name!r} takes no work any more")
            self._waiting.add(future)
            self._work.put(run)
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._max:
                name = f"{self._name}_{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._serve, name=name, daemon=True))
                self._threads[-1].start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._lock:
            self._closed = True
            if cancel_futures:
                for future in list(self._waiting):
                    future.cancel()
            for _ in self._threads:
                self._work.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _serve(self) -> None:
        self._initializer()
        while (run := self._work.get()) is not None:
            run()
            self._idle.release()
