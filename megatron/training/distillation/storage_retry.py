# SPDX-License-Identifier: Apache-2.0
"""Tries an operation again while an object store or a file system is away for a moment.

Nothing here knows a store: what may be tried again is decided by the caller.
"""

import logging
import random
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 240.0
"""How long after its first failure an operation is tried again.

Long enough for a server to be restarted or a rate limit to pass; short enough that the other ranks,
which may wait in a collective meanwhile, do not reach the ten minutes after which it gives up.
"""
FIRST_DELAY_SECONDS = 1.0
LONGEST_DELAY_SECONDS = 30.0


def retry[T](
    action: Callable[[], T],
    *,
    what: str,
    errors: tuple[type[Exception], ...],
    is_transient: Callable[[Exception], bool],
    describe: Callable[[Exception], str] = str,
    pause: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """Return what *action* returns, trying it again with growing delays while it may still succeed.

    Args:
        action: The operation; every attempt is a whole one.
        what: The operation and its path in words, for the log.
        errors: What the operation raises; anything else ends it at once.
        is_transient: Whether trying again can help.
        describe: The reason as the log gives it.
        pause: Waits for a number of seconds; may raise to give up.
        clock: Seconds since some moment.

    Raises:
        Exception: The last error, when trying again cannot help or patience has run out.
    """
    deadline: float | None = None
    delay = FIRST_DELAY_SECONDS
    while True:
        try:
            return action()
        except errors as error:
            if not is_transient(error):
                raise
            now = clock()
            if deadline is None:
                deadline = now + PATIENCE_SECONDS
            left = deadline - now
            if left <= 0:
                raise
            # Writers fail together when a store goes away and must not come back together.
            wait = min(delay * random.uniform(0.5, 1.0), left)
            logger.warning(
                "Cannot %s: %s. Trying again in %.1f s, for another %.0f s.",
                what,
                describe(error),
                wait,
                left,
            )
        pause(wait)
        delay = min(2 * delay, LONGEST_DELAY_SECONDS)
