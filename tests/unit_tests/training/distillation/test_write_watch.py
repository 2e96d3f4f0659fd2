# SPDX-License-Identifier: Apache-2.0
"""A window that is lost ends the trainer's process; nothing else does. With real processes."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
from megatron.training import async_utils
from megatron.training.distillation import write_watch
from megatron.training.distillation.errors import LogitsWriteError
from megatron.training.distillation.write_watch import (
    WriteReports,
    WriteWatch,
    WrittenWindow,
    write_and_report,
)
from tests.file_faults import FileFaults, recorded_operations

SECONDS = 20.0
MEMBERS = [("0-4.pt.zst", b"payload")]
META = b"{}"

fork = multiprocessing.get_context("fork")


class Ending:
    """Stands in for the end of the process."""

    def __init__(self) -> None:
        self.errors: list[LogitsWriteError] = []
        self._called = threading.Event()

    def __call__(self, error: LogitsWriteError) -> None:
        self.errors.append(error)
        self._called.set()

    def wait(self) -> str:
        assert self._called.wait(SECONDS), "the watch has noticed nothing"
        (error,) = self.errors
        return str(error)


@pytest.fixture(autouse=True)
def no_lingering(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer of these workers is the test process, which does not end with a window."""
    monkeypatch.setattr(write_watch, "_SECONDS_TO_FOLLOW", 0.0)


@pytest.fixture
def ending() -> Ending:
    return Ending()


@pytest.fixture
def watch(ending: Ending) -> Iterator[WriteWatch]:
    watch = WriteWatch(ending, poll_seconds=0.01)
    yield watch
    watch.close()


def worker(target: Callable[..., None], *args: Any) -> Any:
    process = fork.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def write_all(reports: WriteReports, paths: list[Path]) -> None:
    for path in paths:
        write_and_report(reports, str(path), META, MEMBERS)


def write_later(reports: WriteReports, path: Path) -> None:
    time.sleep(0.1)
    write_all(reports, [path])


def begin_and_sleep(reports: WriteReports) -> None:
    reports.begin()
    time.sleep(SECONDS)


def test_written_windows_end_nothing(watch: WriteWatch, ending: Ending, tmp_path: Path) -> None:
    paths = [tmp_path / f"dp0__{start}-{start + 4}.tar" for start in (0, 4, 8)]
    for path in paths:
        watch.hand_over(path.name)
    process = worker(write_all, watch.reports, paths)
    process.join(SECONDS)
    assert process.exitcode == 0
    # The thread looks on while a window waits, and ends with the last of them.
    until(lambda: watch._thread is None)
    assert ending.errors == []
    assert all(path.exists() for path in paths)
    # A later window is watched again.
    watch.hand_over("the next")
    process = worker(write_all, watch.reports, [Path("/proc/none/dp0__12-16.tar")])
    assert "the next" in ending.wait()


def test_failed_write_ends_the_process_and_names_the_window(
    watch: WriteWatch, ending: Ending, tmp_path: Path
) -> None:
    written = tmp_path / "dp0__0-4.tar"
    blocked = tmp_path / "file"
    blocked.touch()
    watch.hand_over("samples 0 to 3")
    watch.hand_over("samples 4 to 7")
    worker(write_all, watch.reports, [written, blocked / "dp0__4-8.tar"])
    message = ending.wait()
    for part in ("samples 4 to 7", str(blocked), "Error", "not confirmed", "start the job again"):
        assert part in message
    assert "samples 0 to 3" not in message
    assert written.exists()


def test_killed_worker_ends_the_process(watch: WriteWatch, ending: Ending) -> None:
    process = worker(begin_and_sleep, watch.reports)
    watch.hand_over("samples 0 to 3")
    until(lambda: watch.reports.worker() == process.pid)
    time.sleep(0.1)
    assert ending.errors == []
    os.kill(process.pid, signal.SIGKILL)
    message = ending.wait()
    assert "samples 0 to 3" in message
    assert "has ended" in message


@pytest.mark.parametrize("strategy", ["mcore", "nvrx"])
def test_worker_that_died_before_its_first_window_is_known(
    watch: WriteWatch, ending: Ending, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """It may die in a checkpoint's own request; the trainer knows its process."""
    process = worker(time.sleep, SECONDS)
    if strategy == "mcore":
        monkeypatch.setattr(PersistentAsyncCaller, "_persistent_process", process)
    else:
        queue = SimpleNamespace(persistent_caller=SimpleNamespace(process=process))
        monkeypatch.setattr(async_utils, "_async_calls_queue", queue)
    watch.hand_over("samples 0 to 3")
    time.sleep(0.1)
    assert ending.errors == []
    process.kill()
    assert "has ended" in ending.wait()


def test_worker_may_end_once_nothing_waits(watch: WriteWatch, ending: Ending) -> None:
    process = worker(begin_and_sleep, watch.reports)
    watch.hand_over("samples 0 to 3")
    until(lambda: watch.reports.worker() == process.pid)
    watch.reports.finish()
    process.kill()
    process.join()
    time.sleep(0.1)
    assert ending.errors == []


@pytest.mark.parametrize("poll_seconds", [0.01, 0.3])
@pytest.mark.parametrize("known", [False, True])
def test_next_window_may_have_another_worker(
    ending: Ending,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    known: bool,
    poll_seconds: float,
) -> None:
    """The trainer ends its worker after the training loop, and starts one for the last save."""
    watch = WriteWatch(ending, poll_seconds)
    for start in (0, 4):
        watch.hand_over(f"samples from {start}")
        # The new worker is not there at once, and is busy with the checkpoint first.
        time.sleep(0.4)
        process = worker(write_later, watch.reports, tmp_path / f"dp0__{start}-{start + 4}.tar")
        if known:
            monkeypatch.setattr(PersistentAsyncCaller, "_persistent_process", process)
        process.join(SECONDS)
        assert process.exitcode == 0
        monkeypatch.setattr(PersistentAsyncCaller, "_persistent_process", None)
    until(lambda: watch._thread is None)
    watch.close()
    assert ending.errors == []
    assert len(list(tmp_path.iterdir())) == 2


def test_own_process_raises_and_is_not_ended(
    watch: WriteWatch, ending: Ending, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    watch.hand_over("samples 0 to 3")
    with pytest.raises(OSError):
        write_and_report(watch.reports, str(blocked / "dp0__0-4.tar"), META, MEMBERS)
    time.sleep(0.1)
    assert ending.errors == []


def test_what_the_worker_calls_can_be_sent_to_it(watch: WriteWatch, tmp_path: Path) -> None:
    call = pickle.loads(pickle.dumps(partial(write_and_report, watch.reports)))
    path = tmp_path / "dp0__0-4.tar"
    watch.hand_over(path.name)
    call(str(path), META, MEMBERS, False)
    assert path.exists()
    assert watch.reports.finished() == 1


def test_waiting_and_written_windows_are_known(watch: WriteWatch) -> None:
    for number, size in enumerate((100, 20, 3)):
        watch.hand_over(f"window {number}", size)
    assert watch.waiting_bytes() == 123
    assert watch.take_written() == []
    watch.reports.finish(1.5)
    assert watch.waiting_bytes() == 23
    watch.reports.finish(0.25)
    # Reports come in the order of the windows, each is told once.
    assert watch.take_written() == [WrittenWindow(100, 1.5), WrittenWindow(20, 0.25)]
    assert watch.take_written() == []
    watch.reports.finish(86400.125)
    assert watch.waiting_bytes() == 0
    assert watch.take_written() == [WrittenWindow(3, 86400.125)]


def test_written_windows_are_released_in_order(watch: WriteWatch) -> None:
    released: list[int] = []
    for number in range(3):
        watch.hand_over(f"window {number}", 1, partial(released.append, number))
    watch.hand_over("a window that reads from nothing")
    watch.reports.finish()
    # Noticed without anyone asking.
    until(lambda: released == [0])
    watch.reports.finish()
    watch.reports.finish()
    assert watch.waiting_bytes() == 0
    assert released == [0, 1, 2]
    watch.hand_over("window 3", 1, partial(released.append, 3))
    watch.close()
    # A worker may still read it.
    assert released == [0, 1, 2]


def test_report_cut_short_is_no_report(watch: WriteWatch) -> None:
    """A worker that is killed while it reports leaves part of a record."""
    watch.hand_over("window 0", 100)
    watch.hand_over("window 1", 20)
    watch.reports.finish(2.0)
    with (watch.reports.directory / "finished").open("ab") as stream:
        stream.write(b"      ")
    assert watch.reports.finished() == 1
    assert watch.waiting_bytes() == 20
    assert watch.take_written() == [WrittenWindow(100, 2.0)]


def test_worker_reports_the_time_it_took(
    watch: WriteWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_watch, "write_batched_tar", lambda *args: time.sleep(0.2))
    watch.hand_over("window 0", 7)
    process = worker(write_all, watch.reports, [tmp_path / "dp0__0-4.tar"])
    process.join(SECONDS)
    (written,) = watch.take_written()
    assert written.size == 7
    assert 0.2 <= written.seconds < 10


def test_closing_removes_the_reports(ending: Ending) -> None:
    watch = WriteWatch(ending)
    assert watch.reports.directory.is_dir()
    watch.close()
    assert not watch.reports.directory.exists()


def _write_and_wait(reports: WriteReports, path: Path) -> None:
    write_and_report(reports, str(path), META, MEMBERS)
    write_and_report(reports, str(path), META, MEMBERS)
    threading.Event().wait()


@pytest.mark.parametrize("earlier", [False, True])
def test_worker_ends_with_its_trainer(tmp_path: Path, earlier: bool) -> None:
    """A rank that is killed cannot end its worker, which may wait or still write."""
    trainer = worker(threading.Event().wait)
    reports = WriteReports(tmp_path, trainer.pid)
    if earlier:
        trainer.kill()
        trainer.join()
    process = worker(_write_and_wait, reports, tmp_path / "dp0__0-4.tar")
    if not earlier:
        until(lambda: reports.finished() == 2)
        assert process.is_alive()
        trainer.kill()
        trainer.join()
    process.join(SECONDS)
    assert process.exitcode == 1


def _write_with_faults(faults: FileFaults, reports: WriteReports, path: Path) -> None:
    faults.install()
    write_and_report(reports, str(path), META, MEMBERS)


REPORT = [
    *("open worker.tmp", "write worker.tmp", "close worker.tmp", "replace worker.tmp"),
    *("open finished", "write finished"),
]


@pytest.mark.parametrize("number", range(len(REPORT)))
def test_report_that_cannot_be_written_is_a_lost_window(
    watch: WriteWatch, ending: Ending, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As in a full directory for temporary files: the worker dies of it."""
    record = tmp_path / "record"
    faults = FileFaults(str(watch.reports.directory), record, first_failing=number)
    watch.hand_over("The window of samples 0 to 3")
    process = worker(_write_with_faults, faults, watch.reports, tmp_path / "dp0__0-4.tar")
    monkeypatch.setattr(PersistentAsyncCaller, "_persistent_process", process)
    assert "worker process has ended" in ending.wait()
    assert recorded_operations(record)[: number + 1] == REPORT[: number + 1]


@pytest.mark.parametrize("report", ["worker", "finished", "failed"])
def test_report_that_cannot_be_read_ends_the_process(
    watch: WriteWatch, ending: Ending, tmp_path: Path, report: str
) -> None:
    watch.hand_over("The window of samples 0 to 3")
    path = str(watch.reports.directory / report)
    with FileFaults(path, tmp_path / "record", first_failing=0):
        message = ending.wait()
    assert "reports cannot be read: [Errno 13] Permission denied" in message
    assert path in message


def _join_group(group: int, then: Callable[..., object], *args: Any) -> None:
    os.setpgid(0, group)
    then(*args)


def test_worker_ends_the_process_group_of_its_trainer(tmp_path: Path) -> None:
    """A killed rank leaves more than its worker, such as the manager of its queues."""
    trainer = worker(_join_group, 0, threading.Event().wait)
    until(lambda: os.getpgid(trainer.pid) == trainer.pid)
    reports = WriteReports(tmp_path, trainer.pid)
    manager = worker(_join_group, trainer.pid, threading.Event().wait)
    process = worker(_join_group, trainer.pid, _write_and_wait, reports, tmp_path / "dp0__0-4.tar")
    until(lambda: reports.finished() == 2 and os.getpgid(manager.pid) == trainer.pid)
    trainer.kill()
    trainer.join()
    process.join(SECONDS)
    manager.join(SECONDS)
    assert process.exitcode == manager.exitcode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("end", ["threading.Event().wait()", "sys.exit(0)"])
def test_blocked_main_thread_does_not_keep_the_process(tmp_path: Path, end: str) -> None:
    """The real end, in an interpreter of its own whose main thread waits for ever.

    One that exits waits for the processes it has started.
    """
    program = """
        import multiprocessing, sys, threading
        from megatron.training.distillation.write_watch import WriteWatch, write_and_report

        other = multiprocessing.Process(target=threading.Event().wait)
        other.start()
        print(other.pid, flush=True)
        watch = WriteWatch(poll_seconds=0.01)
        watch.hand_over("The window of samples 0 to 3")
        arguments = (watch.reports, "/proc/none/dp0__0-4.tar", b"", [("0-4.pt.zst", b"")])
        process = multiprocessing.get_context("fork").Process(
            target=write_and_report, args=arguments
        )
        process.start()
    """
    report = tmp_path / "error.json"
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program) + end],
        cwd=Path(__file__).resolve().parents[4],
        env=os.environ | {"TORCHELASTIC_ERROR_FILE": str(report)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ended.returncode == 1
    assert "LogitsWriteError: The window of samples 0 to 3" in ended.stderr
    assert "The window of samples 0 to 3" in report.read_text()
    # What it has started does not stay behind; what waits to be reaped has no command line.
    command = Path(f"/proc/{int(ended.stdout)}/cmdline")
    until(lambda: not command.exists() or not command.read_bytes())
