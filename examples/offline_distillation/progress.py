# SPDX-License-Identifier: Apache-2.0
"""Show how far a running stage is, from the lines of its log."""

import shutil
import sys
import time

from examples.offline_distillation.megatron_log import Iteration, parse_line

_TERMINAL_SECONDS = 0.2
_PLAIN_SECONDS = 10.0


def format_seconds(seconds: float) -> str:
    """Return for example ``3:07``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


class Progress:
    """The live line: rewritten in place on a terminal, elsewhere a new line now and then."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._started = time.monotonic()
        self._shown_at = self._started
        self._first: tuple[int, float] | None = None
        self._last: tuple[Iteration, float] | None = None

    def line(self, line: str) -> None:
        """Take in a log line, and show it if it is one of progress."""
        record = parse_line(line)
        if isinstance(record, Iteration):
            self._last = (record, time.monotonic())
            self._first = self._first or (record.number, time.monotonic())
        self.tick()

    def tick(self) -> None:
        """Show the present state, if it is time to."""
        now = time.monotonic()
        if now - self._shown_at < (_TERMINAL_SECONDS if self._terminal else _PLAIN_SECONDS):
            return
        self._shown_at = now
        text = f"      {self._describe(now)}"
        if self._terminal:
            columns = shutil.get_terminal_size().columns
            print(f"\r{text[: columns - 1]:<{columns - 1}}", end="", flush=True)
        else:
            print(text, flush=True)

    def close(self) -> None:
        """Clear the live line."""
        if self._terminal:
            print(f"\r{'':<{shutil.get_terminal_size().columns - 1}}\r", end="", flush=True)

    def _describe(self, now: float) -> str:
        elapsed = format_seconds(now - self._started)
        if self._last is None or self._first is None:
            return f"running, {elapsed}"
        record, last_at = self._last
        # A frozen teacher computes no loss and reports 0.
        losses = [f"  {name} {loss:.3f}" for name, loss in record.losses.items() if loss]
        first, first_at = self._first
        left = ""
        if record.number == record.total:
            left = ", finishing"
        elif record.number > first:
            # From the wall clock, so that evaluations and checkpoints count.
            per_iteration = (last_at - first_at) / (record.number - first)
            left = f", {format_seconds(per_iteration * (record.total - record.number))} left"
        # The losses last: a narrow terminal cuts them off and not the time.
        return f"iteration {record.number}/{record.total}  {elapsed}{left}{''.join(losses)}"
