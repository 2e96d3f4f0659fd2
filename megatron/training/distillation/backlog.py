# SPDX-License-Identifier: Apache-2.0
"""Bounds what a dump holds in memory while the checkpoint worker is behind.

The worker writes one window after another; those behind it wait in memory. So a rank hands over a
window only when it and those that are not yet written fit into a bound, and waits until then.

A rank waits on its own, without a collective; the others meet it at their next one. The worker is
another process with its own queue, fed by a thread: it needs nothing of the thread that waits. If
it loses a window, the write watch ends the process.
"""

import logging
import time
from typing import Protocol

logger = logging.getLogger(__name__)

DEFAULT_MAX_WAITING_BYTES = 8 * 1024**3
POLL_SECONDS = 0.1


class Backlog(Protocol):
    """The windows that are handed over and not yet written."""

    def waiting_bytes(self) -> int:
        """Return their bytes."""

    def oldest(self) -> tuple[str, float] | None:
        """Return the first of them in words, and the seconds since it was handed over."""


def has_room(waiting: int, size: int, bound: int) -> bool:
    """Return whether *size* bytes may be handed over while *waiting* bytes are not yet written.

    What is larger than the bound may go alone: no wait would make it smaller.
    """
    return size == 0 or waiting == 0 or waiting + size <= bound


def wait_for_room(
    backlog: Backlog, size: int, bound: int, *, poll_seconds: float = POLL_SECONDS
) -> float:
    """Wait until a window of *size* bytes may be handed over; return the seconds it took.

    Says when it begins to wait and when it has ended. Returns 0 at once where there is room.

    Args:
        backlog: What this rank has handed over; windows leave it as they are written.
        size: Bytes of the window; 0 never waits.
        bound: Bytes that may wait on this rank, with the window.
        poll_seconds: Time between two looks.
    """
    waiting = backlog.waiting_bytes()
    if has_room(waiting, size, bound):
        return 0.0
    oldest = backlog.oldest()
    if oldest is None:
        return 0.0
    window, age = oldest
    logger.warning(
        "The teacher waits: %.3f MB of its logits are not yet written, and %.3f MB more would "
        "exceed --logits-save-max-waiting-bytes (%d). %s is written next; it was handed over "
        "%.1f s ago, behind its checkpoint. If this comes again and again, the storage of logits "
        "and checkpoints is slower than the teacher: use a faster one, or save less often "
        "(--save-interval). A higher bound helps over bursts.",
        waiting / 1e6,
        size / 1e6,
        bound,
        window,
        age,
    )
    began = time.monotonic()
    while not has_room(backlog.waiting_bytes(), size, bound):
        time.sleep(poll_seconds)
    seconds = time.monotonic() - began
    logger.info(" the teacher goes on after it has waited %.1f s for its writes", seconds)
    return seconds
