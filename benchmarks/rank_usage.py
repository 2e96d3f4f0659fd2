# SPDX-License-Identifier: Apache-2.0
"""What a process and its descendants use: CPU time, bytes read, memory; read from ``/proc``."""

import os
import resource
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_SAMPLED_EVERY = 0.002
# The scheduler's clock of all threads of a process (linux/posix-timers.h, CPUCLOCK_SCHED).
_SCHEDULER_CLOCK = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What this process and its descendants have used so far.

    Attributes:
        own_cpu: CPU seconds of all threads of this process.
        child_cpu: CPU seconds of its descendants, ended ones that were waited for included.
        bytes_read: What all of them got from ``read`` calls: of files wherever they lie, the page
            cache included, and of pipes; not what they touched of mapped files.
    """

    own_cpu: float
    child_cpu: float
    bytes_read: int

    @classmethod
    def now(cls) -> "Usage":
        """Read the counters."""
        alive = descendants(os.getpid())
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return cls(
            own_cpu=time.process_time(),
            child_cpu=ended.ru_utime + ended.ru_stime + sum(map(_cpu_seconds, alive)),
            # A process that has been waited for counts in its parent.
            bytes_read=sum(map(bytes_read_by, [os.getpid(), *alive])),
        )

    def __sub__(self, before: "Usage") -> "Usage":
        """Return what was used since *before*."""
        return Usage(
            own_cpu=self.own_cpu - before.own_cpu,
            child_cpu=self.child_cpu - before.child_cpu,
            bytes_read=self.bytes_read - before.bytes_read,
        )


class TreeMemory:
    """Growth of proportional set sizes of processes, each with its descendants, while entered.

    Memory that several of them share counts once. It is sampled.

    Args:
        pids: The processes.
        interval: Seconds between samples.

    Attributes:
        together: The largest sample of all of them, in bytes.
        largest: The largest sample of one of them.
    """

    def __init__(self, pids: Sequence[int], interval: float = _SAMPLED_EVERY) -> None:
        self._pids = pids
        self._interval = interval
        self._base: list[int] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.together = self.largest = 0

    def __enter__(self) -> "TreeMemory":
        """Begin to sample."""
        self._base = self._now()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take the last sample."""
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(self._interval):
            grown = [now - base for now, base in zip(self._now(), self._base, strict=True)]
            self.together = max(self.together, sum(grown))
            self.largest = max(self.largest, *grown)

    def _now(self) -> list[int]:
        return [sum(map(_proportional_bytes, [pid, *descendants(pid)])) for pid in self._pids]


def descendants(pid: int) -> list[int]:
    """Return the process ids of all living descendants of *pid*."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, _text(task).split()):
            found += [child, *descendants(child)]
    return found


def _cpu_seconds(pid: int) -> float:
    try:
        return time.clock_gettime(~pid << 3 | _SCHEDULER_CLOCK)
    except OSError:  # it has just ended
        return 0.0


def bytes_read_by(pid: int) -> int:
    """Return what a process got from ``read`` calls; see :class:`Usage`."""
    return _field(_text(Path(f"/proc/{pid}/io")), "rchar:")


def peak_bytes_of(pid: int) -> int:
    """Return the largest resident set that a process has had since it was started."""
    return _field(_text(Path(f"/proc/{pid}/status")), "VmHWM:") * 1024


def _proportional_bytes(pid: int) -> int:
    return _field(_text(Path(f"/proc/{pid}/smaps_rollup")), "Pss:") * 1024


def _text(path: Path) -> str:
    """Return the content of a file in ``/proc``; nothing if its process has just ended."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _field(text: str, key: str) -> int:
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith(key)), 0)
