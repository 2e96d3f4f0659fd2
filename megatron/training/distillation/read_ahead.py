# SPDX-License-Identifier: Apache-2.0
"""Fetches the rest of something large piece by piece, in the background and only so far ahead.

Nothing here knows a store: what fetches a range is decided by the caller.
"""

import errno
import threading
from collections import deque
from collections.abc import Callable

PIECE_BYTES = 8 * 2**20
"""What is fetched at once, after a first piece whose size is asked for."""
PIECES_AHEAD = 4
"""Pieces that are fetched beyond the end of what was read last."""


class ReadAhead:
    """Holds the bytes ``[start, end)`` of an object around the place where they are read.

    What lies up to a piece behind the last read is held too, as threads that take their turns may
    read two neighbours in the other order.

    Args:
        fetch: Returns the bytes from a position on, as many as a number says; runs in a thread.
        start: Where reading begins.
        first: Bytes of the first piece, so that the first read waits for nothing else.
        end: Bytes of the object.
    """

    def __init__(
        self, fetch: Callable[[int, int], bytes], start: int, first: int, end: int
    ) -> None:
        self._fetch = fetch
        self._first = first
        self._end = end
        self._pieces: deque[tuple[int, bytes]] = deque()
        self._held_from = self._fetched_to = start
        self._wanted_to = min(start + first, end)
        self._read_from = start
        self._error: OSError | None = None
        self._is_over = False
        self._is_closed = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="object-store-ahead", daemon=True).start()

    def read(self, position: int, size: int) -> bytes | None:
        """Return *size* bytes, or what the object has; None if *position* is not held any more.

        Raises:
            OSError: They could not be fetched; nothing more is.
        """
        stop = min(position + size, self._end)
        with self._changed:
            if position < self._held_from:
                return None
            ahead = min(stop + PIECES_AHEAD * PIECE_BYTES, self._end)
            self._wanted_to = max(self._wanted_to, ahead)
            self._read_from = position
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._fetched_to >= stop or self._is_over)
            if self._fetched_to < stop:
                raise self._error or OSError(errno.EBADF, "it is no longer fetched")
            data = b"".join(
                piece[max(0, position - offset) : stop - offset]
                for offset, piece in self._pieces
                if offset < stop and position < offset + len(piece)
            )
            self._drop_before(position - PIECE_BYTES)
        return data

    def close(self) -> None:
        """Fetch nothing more and drop what is held, without waiting for what is on its way."""
        with self._changed:
            self._is_closed = self._is_over = True
            self._pieces.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        size = self._first
        try:
            while self._await_demand():
                size = min(size, self._end - self._fetched_to)
                data = self._fetch(self._fetched_to, size)
                if not data:
                    raise OSError(errno.EIO, f"it ends at byte {self._fetched_to}")
                self._keep(data)
                size = PIECE_BYTES
        except OSError as error:
            self._error = error
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _await_demand(self) -> bool:
        """Wait until more is wanted; return False when nothing more can be.

        What is far before the place that is read now is not fetched any more.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or self._fetched_to < self._wanted_to or self._at_end()
            )
            if self._read_from > self._fetched_to + PIECE_BYTES:
                self._pieces.clear()
                self._held_from = self._fetched_to = self._read_from
            return not (self._is_closed or self._at_end())

    def _at_end(self) -> bool:
        return self._fetched_to >= self._end

    def _keep(self, data: bytes) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._pieces.append((self._fetched_to, data))
            self._fetched_to += len(data)
            self._changed.notify_all()

    def _drop_before(self, position: int) -> None:
        while self._pieces:
            offset, piece = self._pieces[0]
            if offset + len(piece) > position:
                return
            self._pieces.popleft()
            self._held_from = offset + len(piece)
