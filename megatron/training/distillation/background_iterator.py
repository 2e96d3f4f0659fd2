# SPDX-License-Identifier: Apache-2.0
"""Takes the items of an iterator in a thread, so that whoever asks for one finds it ready."""

import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, eq=False)
class _Error:
    """What the iterator raised."""

    error: BaseException


class _End:
    """The iterator has no more items."""


@dataclass(frozen=True, slots=True, eq=False)
class _Line[T]:
    """Items between the thread that takes them and the one that asks."""

    ready: queue.Queue[T | _Error | _End]
    closing: threading.Event = field(default_factory=threading.Event)

    def close(self) -> None:
        """Have the thread end after the item that it is at."""
        self.closing.set()
        while not self.ready.empty():  # it may wait for room
            self.ready.get_nowait()


class BackgroundIterator[T]:
    """An iterator over *items* that are taken ahead.

    Args:
        items: Used by the thread alone; closed by it where it can be closed.
        depth: Items that wait here; the thread holds one more.
        prepare: Called in the thread for each item; its answer is handed out.
        begin: Called in the thread before the first item.
    """

    def __init__(
        self,
        items: Iterator[T],
        *,
        depth: int,
        prepare: Callable[[T], T] = lambda item: item,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self._line: _Line[T] = _Line(queue.Queue(depth))
        self._has_ended = False
        # The thread does not know this object, so that it ends with it.
        self._finalizer = weakref.finalize(self, self._line.close)
        threading.Thread(
            target=_take_all,
            args=(items, self._line, prepare, begin),
            name="teacher-read-ahead",
            daemon=True,
        ).start()

    def __iter__(self) -> "BackgroundIterator[T]":
        return self

    def __next__(self) -> T:
        """Return the next item, or raise what the iterator raised."""
        if self._has_ended:
            raise StopIteration
        item = self._line.ready.get()
        if isinstance(item, _Error):
            self._has_ended = True
            raise item.error
        if isinstance(item, _End):
            self._has_ended = True
            raise StopIteration
        return item

    def close(self) -> None:
        """Take no more items."""
        self._finalizer()


def _take_all[T](
    items: Iterator[T],
    line: _Line[T],
    prepare: Callable[[T], T],
    begin: Callable[[], None],
) -> None:
    try:
        begin()
        for item in items:
            if line.closing.is_set():
                break
            line.ready.put(prepare(item))
            del item  # the next one may take long, and this one is large
            if line.closing.is_set():
                break
        else:
            line.ready.put(_End())
    except BaseException as error:  # it is raised again where the item was asked for
        line.ready.put(_Error(error))
    finally:
        close = getattr(items, "close", None)
        if close is not None:
            close()
