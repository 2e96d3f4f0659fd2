# SPDX-License-Identifier: Apache-2.0
"""Ends the job when a window of the dump cannot be written, instead of letting it wait for ever.

Shards are written by the persistent checkpoint worker. An exception in one of its requests, or a
kill, ends that process without a word to the trainer, which goes on training, never confirms
another checkpoint and waits for the worker at its next one, or at its end. So the worker reports
what becomes of every window, in a directory that both see, and a thread of the trainer looks at it
and at the worker.

Nothing here communicates between ranks: one process that ends makes the launcher end the job. The
worker looks at the trainer as well, and ends with it.
"""

import atexit
import contextlib
import multiprocessing
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
from megatron.training.distillation.errors import LogitsWriteError
from megatron.training.distillation.member_content import Content
from megatron.training.distillation.shard_writer import write_batched_tar

POLL_SECONDS = 0.5
_RECORD_BYTES = 16
_SECONDS_TO_FOLLOW = 10.0
_TRAINER_WATCH = "logits-trainer-watch"
_QUEUE_MODULE = "megatron.training.async_utils"


@dataclass(frozen=True, slots=True)
class WriteReports:
    """How the worker tells the trainer what becomes of its windows; picklable.

    Attributes:
        directory: A directory that only this trainer process and its worker use.
        trainer: Process id of the trainer.
    """

    directory: Path
    trainer: int

    @property
    def _worker(self) -> Path:
        return self.directory / "worker"

    @property
    def _finished(self) -> Path:
        return self.directory / "finished"

    @property
    def _failed(self) -> Path:
        return self.directory / "failed"

    def begin(self) -> None:
        """Say which process writes."""
        self._publish(self._worker, str(os.getpid()))

    def finish(self, seconds: float = 0.0) -> None:
        """Count one more window that needs no attention, and say how long it took."""
        # Records of one size: a file that grows shows by its size alone which are complete.
        record = f"{seconds:{_RECORD_BYTES - 1}.3f}\n".encode()
        with self._finished.open("ab") as stream:
            stream.write(record)

    def fail(self, reason: str) -> None:
        """Say why a window could not be written."""
        self._publish(self._failed, reason)

    def worker(self) -> int | None:
        """Return the process that writes, once it has begun a window."""
        text = _read(self._worker)
        return None if text is None else int(text)

    def finished(self) -> int:
        """Return how many windows need no more attention."""
        with contextlib.suppress(FileNotFoundError):
            return self._finished.stat().st_size // _RECORD_BYTES
        return 0

    def forget_worker(self) -> None:
        """Forget which process wrote; only while no window waits."""
        self._worker.unlink(missing_ok=True)

    def seconds(self, window: int) -> float:
        """Return how long a finished window took; the first that was handed over is 0."""
        with self._finished.open("rb") as stream:
            stream.seek(window * _RECORD_BYTES)
            return float(stream.read(_RECORD_BYTES))

    def failure(self) -> str | None:
        """Return why a window could not be written, if one could not."""
        return _read(self._failed)

    @staticmethod
    def _publish(path: Path, text: str) -> None:
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text)
        os.replace(temporary, path)


def write_and_report(
    reports: WriteReports,
    path: str,
    meta_bytes: bytes,
    members: list[tuple[str, Content]],
    msc_enabled: bool = False,
) -> None:
    """Write one shard as :func:`write_batched_tar` does, and report what becomes of it.

    In the trainer's own process nothing is reported: the caller gets the error. Another process
    ends with the trainer from its first window on.
    """
    began = time.monotonic()
    if os.getpid() == reports.trainer:
        try:
            write_batched_tar(path, meta_bytes, members, msc_enabled)
        finally:
            reports.finish(time.monotonic() - began)
        return
    _end_with(reports.trainer)
    reports.begin()
    try:
        write_batched_tar(path, meta_bytes, members, msc_enabled)
    except Exception as error:
        reports.fail(f"{type(error).__name__}: {error}")
        # The trainer ends of it, or is ended with the job before it has ended what it started.
        # Then that is left to the thread that waits for it.
        _wait_for_end(reports.trainer, _SECONDS_TO_FOLLOW)
        raise
    reports.finish(time.monotonic() - began)


@dataclass(frozen=True, slots=True)
class WrittenWindow:
    """A window that the worker has written.

    Attributes:
        size: Its bytes.
        seconds: How long the worker took, with what it tried again.
    """

    size: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Window:
    """A window that the worker has or will get.

    Attributes:
        description: What it is, in words.
        size: Its bytes.
        release: Gives up what the worker reads it from.
        handed_over: When that was.
    """

    description: str
    size: int
    release: Callable[[], None] | None = None
    handed_over: float = field(default_factory=time.monotonic)


class WriteWatch:
    """Knows which windows the checkpoint worker has, and ends this process if one is lost.

    Args:
        end: Called with what happened, from the watching thread; does not return in a job.
        poll_seconds: Time between two looks.
    """

    def __init__(
        self,
        end: Callable[[LogitsWriteError], None] | None = None,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        directory = Path(tempfile.mkdtemp(prefix="logits-writes-"))
        self.reports = WriteReports(directory, os.getpid())
        self._end = end_process if end is None else end
        self._poll_seconds = poll_seconds
        self._handed_over = 0
        self._windows: deque[_Window] = deque()
        self._written: list[WrittenWindow] = []
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._worker_pid: int | None = None
        self._worker_fd: int | None = None
        self._lock = threading.Lock()
        atexit.register(self._close_at_exit)

    def hand_over(
        self, window: str, size: int = 0, release: Callable[[], None] | None = None
    ) -> None:
        """Expect a report about one more window.

        Args:
            window: What it is, in words.
            size: Its bytes.
            release: Called once the window has been written: gives up what the worker reads it
                from.
        """
        with self._lock:
            if self._oldest_waiting() is None:
                # The trainer may have ended the worker before, to start another for this window.
                self._forget_worker()
            self._handed_over += 1
            self._windows.append(_Window(window, size, release))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="logits-write-watch", daemon=True
                )
                self._thread.start()

    def waiting_bytes(self) -> int:
        """Return the bytes of the windows that have been handed over and are not yet written."""
        with self._lock:
            self._oldest_waiting()
            return sum(window.size for window in self._windows)

    def oldest(self) -> tuple[str, float] | None:
        """Return the window that is written next, in words, and the seconds since its hand-over.

        None if nothing waits.
        """
        with self._lock:
            window = self._oldest_waiting()
        if window is None:
            return None
        return window.description, time.monotonic() - window.handed_over

    def take_written(self) -> list[WrittenWindow]:
        """Return the windows that have been written since the last call, in order."""
        with self._lock:
            self._oldest_waiting()
            written, self._written = self._written, []
            return written

    def end_job(self, error: LogitsWriteError) -> None:
        """End this process, because a window that has not been handed over is lost."""
        self._end(error)

    def _close_at_exit(self) -> None:
        """Stop watching, unless a window waits.

        A trainer that is asked to end leaves its loop and then waits for its worker, which may have
        died of the window.
        """
        with self._lock:
            waits = self._oldest_waiting() is not None
        if not waits:
            self.close()

    def close(self) -> None:
        """Stop watching, and forget the windows that wait."""
        self._stopped.set()
        thread = self._thread
        if thread is not None:
            thread.join()
        with self._lock:
            # Not released: a worker that is still at one may finish it.
            self._windows.clear()
        self._close_descriptor()
        shutil.rmtree(self.reports.directory, ignore_errors=True)

    def _run(self) -> None:
        """Look until no window waits any more, or one is lost."""
        while not self._stopped.wait(self._poll_seconds):
            try:
                with self._lock:
                    # Looked at first: a worker that has ended can have reported until then.
                    gone = self._worker_is_gone()
                    window = self._oldest_waiting()
                    if window is None:
                        self._thread = None
                        return
                error = self._loss(window.description, gone)
            except OSError as problem:
                # If this thread ended, a lost window would have the trainer wait for ever.
                error = LogitsWriteError(
                    "What becomes of the windows of the logits dump can no longer be told, for the "
                    f"checkpoint worker's reports cannot be read: {problem}. Start the job again "
                    "when the cause is gone: it goes on from the last confirmed checkpoint."
                )
            if error is not None:
                self._end(error)
                return

    def _loss(self, window: str, gone: bool) -> LogitsWriteError | None:
        """Return why *window*, the oldest that waits, will never be written; None if it may be."""
        reason = self.reports.failure()
        if reason is None and not gone:
            return None
        if reason is None:
            reason = (
                "the checkpoint worker process has ended before that. Its own output says why, or "
                "it was killed, for example for want of memory"
            )
        return LogitsWriteError(
            f"{window} of the logits dump could not be written: {reason}. The checkpoint of this "
            "window is not confirmed: start the job again when the cause is gone, and it dumps the "
            "window again."
        )

    def _oldest_waiting(self) -> _Window | None:
        waiting = self._handed_over - self.reports.finished()
        while len(self._windows) > max(waiting, 0):
            number = self._handed_over - len(self._windows)
            window = self._windows.popleft()
            self._written.append(WrittenWindow(window.size, self.reports.seconds(number)))
            if window.release is not None:
                window.release()
        return self._windows[0] if self._windows else None

    def _worker_is_gone(self) -> bool:
        """Return whether the worker that has the waiting windows was there and has ended.

        The trainer knows its worker from the start; without that, one is known once it has begun a
        window.
        """
        process = _worker_of_trainer()
        pid = self.reports.worker() if process is None else process.pid
        if pid is None:
            return False
        if pid != self._worker_pid:
            self._close_descriptor()
            self._worker_pid = pid
            with contextlib.suppress(ProcessLookupError):
                self._worker_fd = os.pidfd_open(pid)
        if self._worker_fd is None:
            return True
        # A process descriptor becomes readable when the process ends.
        ended = select.poll()
        ended.register(self._worker_fd, select.POLLIN)
        return bool(ended.poll(0))

    def _forget_worker(self) -> None:
        self.reports.forget_worker()
        self._close_descriptor()
        self._worker_pid = None

    def _close_descriptor(self) -> None:
        if self._worker_fd is not None:
            os.close(self._worker_fd)
            self._worker_fd = None


def _worker_of_trainer() -> BaseProcess | None:
    """Return the persistent checkpoint worker of this process; None if it has none now.

    megatron-core keeps it with a class, nvidia-resiliency-ext with the queue that the trainer has.
    """
    process: BaseProcess | None = PersistentAsyncCaller._persistent_process
    if process is None:
        # Where there is a queue the trainer has been imported; a worker has no need of it.
        queue = getattr(sys.modules.get(_QUEUE_MODULE), "_async_calls_queue", None)
        process = getattr(getattr(queue, "persistent_caller", None), "process", None)
    return process


def end_process(error: LogitsWriteError) -> None:
    """End this process and those it has started, with status 1 at once, having said why.

    The main thread may be waiting for the worker where no exception reaches it. The launcher is
    told the reason as if it had been raised there.
    """
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    get_error_handler().record_exception(error)
    # Nobody else ends them after this: the checkpoint worker, its queue's manager, data loaders.
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    os._exit(1)


def _end_with(trainer: int) -> None:
    """End this process when *trainer* ends, however that does; to be called any number of times.

    A rank that is killed cannot end what it has started. Its worker would wait for another request
    for ever, or write on into a directory in which the job may run again by then.
    """
    if any(thread.name == _TRAINER_WATCH for thread in threading.enumerate()):
        return
    threading.Thread(
        target=_wait_and_end, args=(trainer,), name=_TRAINER_WATCH, daemon=True
    ).start()


def _wait_for_end(process: int, seconds: float | None = None) -> None:
    """Return when *process* has ended, or after *seconds*."""
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        descriptor = os.pidfd_open(process)
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        ended.poll(None if seconds is None else 1000 * seconds)
        os.close(descriptor)


def _wait_and_end(trainer: int) -> None:
    _wait_for_end(trainer)
    print(
        f"The trainer process {trainer} has ended, so its checkpoint worker ends.",
        file=sys.stderr,
        flush=True,
    )
    if os.getpgid(0) == trainer:
        # The launcher gave the rank a process group, in which its queue's manager is left as well.
        os.killpg(trainer, signal.SIGKILL)
    os._exit(1)


def _read(path: Path) -> str | None:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text()
    return None
