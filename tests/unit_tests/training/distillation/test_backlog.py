# SPDX-License-Identifier: Apache-2.0
"""A window is handed over when those that are not yet written leave room for it, and not before."""

import logging
import multiprocessing
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.training.distillation import backlog
from megatron.training.distillation.backlog import has_room, wait_for_room
from megatron.training.distillation.write_watch import WriteReports, WriteWatch, write_and_report

SECONDS = 20.0


class Draining:
    """A backlog whose bytes are other ones at every look."""

    def __init__(self, *waiting: int) -> None:
        self.left = list(waiting)

    def waiting_bytes(self) -> int:
        return self.left.pop(0)

    def oldest(self) -> tuple[str, float] | None:
        return "The window of samples 4 to 7 (dp0__4-8.tar)", 12.34


@pytest.fixture
def watch() -> Iterator[WriteWatch]:
    watch = WriteWatch(lambda error: None, poll_seconds=0.01)
    yield watch
    watch.close()


@pytest.mark.parametrize(
    ("waiting", "size", "expected"),
    [
        (0, 1, True),
        (60, 40, True),
        (60, 41, False),
        (100, 1, False),
        # Nothing is handed over, whatever waits.
        (100, 0, True),
        (500, 0, True),
        # A window above the bound goes alone.
        (0, 101, True),
        (1, 101, False),
        # One that went alone still waits.
        (500, 1, False),
    ],
)
def test_room_within_a_bound_of_100(waiting: int, size: int, expected: bool) -> None:
    assert has_room(waiting, size, 100) is expected


@pytest.mark.parametrize(
    ("waiting", "size", "left"),
    [
        # Looks that are not needed any more are left over.
        ((90, 90, 61, 60, 0), 40, [0]),
        ((90, 30, 0), 40, [0]),
        # Above the bound: only once nothing waits.
        ((90, 50, 1, 0, 7), 101, [7]),
    ],
)
def test_waits_until_there_is_room_and_says_so(
    caplog: pytest.LogCaptureFixture, waiting: tuple[int, ...], size: int, left: list[int]
) -> None:
    draining = Draining(*(bytes_ * 10**6 for bytes_ in waiting))
    with caplog.at_level(logging.INFO):
        seconds = wait_for_room(draining, size * 10**6, 100 * 10**6, poll_seconds=0.01)
    assert draining.left == [bytes_ * 10**6 for bytes_ in left]
    looks = len(waiting) - len(left) - 2
    assert 0.01 * looks <= seconds < SECONDS
    begun, ended = caplog.records
    assert begun.levelno == logging.WARNING
    for part in (
        "The teacher waits: 90.000 MB",
        f"{size}.000 MB more",
        "--logits-save-max-waiting-bytes (100000000)",
        "The window of samples 4 to 7 (dp0__4-8.tar) is written next",
        "12.3 s ago",
        "--save-interval",
    ):
        assert part in begun.getMessage()
    assert f"goes on after it has waited {seconds:.1f} s" in ended.getMessage()


def test_room_is_not_waited_for(
    watch: WriteWatch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backlog.time, "sleep", lambda seconds: pytest.fail("it waits"))
    with caplog.at_level(logging.INFO):
        for size in (101, 0):
            assert wait_for_room(watch, size, 100) == 0.0
            watch.hand_over("samples 0 to 3", size)
        watch.reports.finish()
        for size in (60, 0, 40):
            assert wait_for_room(watch, size, 100) == 0.0
            watch.hand_over("samples 4 to 7", size)
    assert watch.waiting_bytes() == 100
    assert not caplog.records


def write_once_asked(reports: WriteReports, paths: list[Path], asked: Any) -> None:
    assert asked.wait(SECONDS)
    for path in paths:
        time.sleep(0.1)
        write_and_report(reports, str(path), b"{}", [("0-4.pt.zst", b"payload")])


def test_worker_makes_room_while_the_trainer_waits(
    watch: WriteWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / f"dp0__{start}-{start + 4}.tar" for start in (0, 4, 8)]
    for path in paths:
        watch.hand_over(path.name, 40)
    fork = multiprocessing.get_context("fork")
    asked = fork.Event()
    process = fork.Process(target=write_once_asked, args=(watch.reports, paths, asked), daemon=True)
    process.start()
    oldest = watch.oldest
    monkeypatch.setattr(watch, "oldest", lambda: asked.set() or oldest())
    # One has to be written for the first, two for the second.
    assert wait_for_room(watch, 20, 100, poll_seconds=0.01) > 0
    assert paths[0].exists()
    wait_for_room(watch, 60, 100, poll_seconds=0.01)
    assert paths[1].exists()
    assert watch.waiting_bytes() <= 40
    process.join(SECONDS)
    assert process.exitcode == 0


def test_oldest_window_is_known_with_its_age(watch: WriteWatch) -> None:
    assert watch.oldest() is None
    watch.hand_over("samples 0 to 3", 10)
    time.sleep(0.2)
    before = time.monotonic()
    watch.hand_over("samples 4 to 7", 20)
    oldest = watch.oldest()
    assert oldest is not None
    assert oldest[0] == "samples 0 to 3"
    assert 0.2 <= oldest[1] < SECONDS
    watch.reports.finish()
    after = watch.oldest()
    assert after is not None
    assert after[0] == "samples 4 to 7"
    assert after[1] <= time.monotonic() - before
    watch.reports.finish()
    assert watch.oldest() is None


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["fails", "is killed"])
def test_lost_window_ends_the_wait(loss: str) -> None:
    """The real end, in an interpreter of its own that would wait for ever."""
    program = """
        import multiprocessing, os, signal, sys, time
        from megatron.training.distillation.backlog import wait_for_room
        from megatron.training.distillation.write_watch import WriteWatch, write_and_report

        def lose(reports, asked):
            asked.wait()
            time.sleep(0.5)
            if sys.argv[1] == "is killed":
                reports.begin()
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGKILL)
            write_and_report(reports, "/proc/none/dp0__0-4.tar", b"", [("0-4.pt.zst", b"")])

        class Asked(WriteWatch):
            def oldest(self):
                asked.set()
                return super().oldest()

        context = multiprocessing.get_context("fork")
        asked = context.Event()
        watch = Asked(poll_seconds=0.01)
        watch.hand_over("The window of samples 0 to 3", 80)
        context.Process(target=lose, args=(watch.reports, asked), daemon=True).start()
        wait_for_room(watch, 40, 100)
        print("handed over")
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), loss],
        cwd=Path(__file__).resolve().parents[4],
        env={name: value for name, value in os.environ.items() if "TORCHELASTIC" not in name},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ended.returncode == 1
    assert "The teacher waits" in ended.stderr
    assert "LogitsWriteError: The window of samples 0 to 3" in ended.stderr
    assert "handed over" not in ended.stdout
