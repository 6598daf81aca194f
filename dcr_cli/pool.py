"""Runs many small tasks in a few threads; the first thing that goes wrong in one stops all.

What the tasks do, and whom to tell how far they are, is the caller's business.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

Task = TypeVar("Task")
Work = Callable[[Task], None]

_TICK_SECONDS = 0.1


def run_all(
    tasks: Iterable[Task], make_worker: Callable[[], Work[Task]], jobs: int, tick: Callable[[], None] | None = None
) -> None:
    """Run every task in one of `jobs` threads; each thread works with a function of its own from `make_worker`.

    Tasks are taken from `tasks` as threads become free, by one thread at a time. What a task, or `tasks` itself, raises
    is raised here, when no task is running any more; tasks not begun are left. So is what a signal raises meanwhile.
    `tick` is called now and then in the caller's thread. With one job, that thread does the work.
    """
    tick = tick or _nothing
    if jobs == 1:
        work = make_worker()
        for task in tasks:
            work(task)
            tick()
        return
    run = _Run(iter(tasks), make_worker)
    threads = [threading.Thread(target=run.loop, name=f"dcr-{number}", daemon=True) for number in range(jobs)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(_TICK_SECONDS)
                tick()
    finally:
        run.is_stopped = True
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if run.error is not None:
        raise run.error


class _Run(Generic[Task]):
    def __init__(self, tasks: Iterator[Task], make_worker: Callable[[], Work[Task]]) -> None:
        self._tasks = tasks
        self._make_worker = make_worker
        self._lock = threading.Lock()
        self.is_stopped = False
        self.error: BaseException | None = None

    def loop(self) -> None:
        try:
            work = self._make_worker()
            while not self.is_stopped:
                with self._lock:
                    # Another thread may have stopped the run while this one waited for its turn.
                    if self.is_stopped:
                        return
                    task = next(self._tasks, self)
                if task is self:
                    return
                work(task)  # type: ignore[arg-type]
        except BaseException as error:
            with self._lock:
                if self.error is None:
                    self.error = error
                self.is_stopped = True


def _nothing() -> None:
    pass
