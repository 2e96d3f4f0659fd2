# SPDX-License-Identifier: Apache-2.0
"""Tells on stderr how far a verb has come: on a terminal in one line, else now and then."""

import sys
import time
from types import TracebackType

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_STATES = 0.1


class Progress:
    """A count of *unit*, of bytes where they are told, and of the time that is left.

    Args:
        unit: What is counted, in the plural.
        total: How many there will be.
    """

    def __init__(self, unit: str, total: int) -> None:
        self._unit = unit
        self._total = total
        self._done = self._bytes = 0
        self._began = self._told = time.monotonic()
        self._is_terminal = sys.stderr.isatty()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the terminal's line empty."""
        self._write("")

    @property
    def seconds(self) -> float:
        """Time since the beginning."""
        return time.monotonic() - self._began

    def advance(self, size: int = 0, count: int = 1) -> None:
        """Count one more, or *count*, of *size* bytes."""
        self._done += count
        self._bytes += size
        now = time.monotonic()
        wait = _SECONDS_BETWEEN_STATES if self._is_terminal else _SECONDS_BETWEEN_LINES
        if now - self._told > wait:
            self._told = now
            self._write(self._state() + ("" if self._is_terminal else "\n"))

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._write(f"{text}\n")

    def _state(self) -> str:
        seconds = max(self.seconds, 1e-9)
        parts = [f"{self._done}/{self._total} {self._unit}"]
        if self._bytes:
            parts.append(f"{self._bytes / 1e6 / seconds:.0f} MB/s")
        parts.append(f"{seconds / self._done * (self._total - self._done):.0f} s left")
        return ", ".join(parts)

    def _write(self, text: str) -> None:
        clear = "\r\x1b[K" if self._is_terminal else ""
        sys.stderr.write(clear + text)
        sys.stderr.flush()
