# SPDX-License-Identifier: Apache-2.0
"""Does the same to many things in processes side by side."""

import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

import torch

_WAITING_PER_PROCESS = 4


class ProcessEndedError(RuntimeError):
    """A process ended before its work was done."""


def in_processes[Item, Result](
    work: Callable[[Item], Result], items: Iterable[Item], *, jobs: int
) -> Iterator[Result]:
    """Yield ``work(item)`` for each of *items*, in the order in which they are finished.

    No more items are taken than the processes have to do next. What *work* raises ends it all.

    Args:
        work: Picklable, as is what it takes and returns; it runs with one thread of torch.
        items: What it is called with.
        jobs: Processes; 1 works in this one.

    Raises:
        ProcessEndedError: One of the processes was killed.
    """
    if jobs == 1:
        yield from map(work, items)
        return
    # A forked process would have locks of the threads of this one.
    context = multiprocessing.get_context("spawn")
    left = iter(items)
    with ProcessPoolExecutor(jobs, context, _begin_process) as pool:
        waiting: set[Future[Result]] = set()
        try:
            while True:
                for item in itertools.islice(left, jobs * _WAITING_PER_PROCESS - len(waiting)):
                    waiting.add(pool.submit(work, item))
                if not waiting:
                    return
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        except BrokenProcessPool as error:
            raise ProcessEndedError(
                f"One of {jobs} processes ended before its work was done: it was killed, perhaps "
                "because memory ran out. Start the command again with a smaller --jobs; what was "
                "finished is kept where the verb keeps it."
            ) from error
        finally:
            for future in waiting:
                future.cancel()


def _begin_process() -> None:
    torch.set_num_threads(1)
    # A terminal interrupts all processes; the first one tells the others to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()


def _end_with_parent() -> None:
    """End this process when its parent is gone; by itself it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
