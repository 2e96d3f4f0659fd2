# SPDX-License-Identifier: Apache-2.0
"""Work in processes side by side: every item once, errors at once, nothing left behind."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from tools.cache.processes import ProcessEndedError, in_processes


def square(number: int) -> int:
    return number * number


def process_and_threads(number: int) -> tuple[int, int]:
    time.sleep(0.05)
    return os.getpid(), torch.get_num_threads()


def fail_at_3(number: int) -> int:
    if number == 3:
        raise ValueError("three")
    return number


def be_killed_at_3(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def sleep(seconds: float) -> None:
    time.sleep(seconds)


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_item_is_worked_on_once(jobs):
    assert sorted(in_processes(square, range(30), jobs=jobs)) == [n * n for n in range(30)]


def test_no_items():
    assert list(in_processes(square, [], jobs=2)) == []


def test_other_processes_with_one_thread_each():
    found = set(in_processes(process_and_threads, range(8), jobs=2))
    assert len(found) == 2
    assert os.getpid() not in {pid for pid, _ in found}
    assert {threads for _, threads in found} == {1}


def test_items_are_taken_as_they_are_needed():
    taken = []

    def items() -> Iterator[int]:
        for number in itertools.count():
            taken.append(number)
            yield number

    results = in_processes(square, items(), jobs=2)
    for _ in range(3):
        next(results)
    assert len(taken) < 20
    results.close()


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_ends_it(jobs):
    with pytest.raises(ValueError, match="three"):
        list(in_processes(fail_at_3, range(100), jobs=jobs))


def test_a_killed_process_is_told_in_words():
    with pytest.raises(ProcessEndedError, match="perhaps because memory ran out"):
        list(in_processes(be_killed_at_3, range(100), jobs=2))


def test_no_process_outlives_one_that_is_killed():
    script = (
        "from tests.unit_tests.tools.test_processes import sleep\n"
        "from tools.cache.processes import in_processes\n"
        "if __name__ == '__main__':\n"
        "    for _ in in_processes(sleep, [0, 0, 600, 600], jobs=2):\n"
        "        print('at work', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "at work\n"
        process.kill()
        process.wait()
        # The pipe is open as long as any of them is alive.
        assert process.stdout.read() in ("", "at work\n")
    finally:
        process.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
