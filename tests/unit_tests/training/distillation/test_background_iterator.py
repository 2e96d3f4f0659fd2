# SPDX-License-Identifier: Apache-2.0
"""Items that a thread takes ahead of the one who asks."""

import gc
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from megatron.training.distillation.background_iterator import BackgroundIterator


class Source:
    """Numbers, with what was taken of them and where."""

    def __init__(self, count: int = 1_000_000, failure: BaseException | None = None) -> None:
        self.count = count
        self.failure = failure
        self.taken = 0
        self.closed = threading.Event()
        self.threads: set[str] = set()

    def items(self) -> Iterator[int]:
        try:
            for number in range(self.count):
                self.taken = number + 1
                self.threads.add(threading.current_thread().name)
                yield number
            if self.failure is not None:
                raise self.failure
        finally:
            self.closed.set()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_items_in_order_and_no_further_than_asked() -> None:
    source = Source()
    ahead = BackgroundIterator(source.items(), depth=2)
    # Two wait, and the thread holds one.
    wait_until(lambda: source.taken == 3)
    assert [next(ahead) for _ in range(5)] == [0, 1, 2, 3, 4]
    wait_until(lambda: source.taken == 8)
    time.sleep(0.02)
    assert source.taken == 8
    assert source.threads == {"teacher-read-ahead"}
    ahead.close()
    assert source.closed.wait(30)


def test_the_end_stays_the_end() -> None:
    ahead = BackgroundIterator(Source(3).items(), depth=1)
    assert list(ahead) == [0, 1, 2]
    assert next(ahead, None) is None
    assert next(ahead, None) is None


@pytest.mark.parametrize("error", [RuntimeError("the worker died"), SystemExit(3)])
def test_what_the_source_raises_is_raised_in_its_place(error: BaseException) -> None:
    ahead = BackgroundIterator(Source(2, error).items(), depth=1)
    assert [next(ahead), next(ahead)] == [0, 1]
    with pytest.raises(type(error)) as caught:
        next(ahead)
    assert caught.value is error
    assert next(ahead, None) is None


def test_closing_ends_the_thread_that_waits_for_room() -> None:
    source = Source()
    ahead = BackgroundIterator(source.items(), depth=1)
    wait_until(lambda: source.taken == 2)
    ahead.close()
    assert source.closed.wait(30)
    assert source.taken <= 3


def test_what_nobody_holds_any_more_ends() -> None:
    source = Source()
    ahead = BackgroundIterator(source.items(), depth=1)
    wait_until(lambda: source.taken == 2)
    del ahead
    gc.collect()
    assert source.closed.wait(30)


def test_items_are_prepared_in_the_thread() -> None:
    calls: list[str] = []

    def begin() -> None:
        calls.append(f"begin in {threading.current_thread().name}")

    def prepare(item: int) -> int:
        calls.append(f"{item} in {threading.current_thread().name}")
        return -item

    ahead = BackgroundIterator(Source(2).items(), depth=1, prepare=prepare, begin=begin)
    assert list(ahead) == [0, -1]
    name = "teacher-read-ahead"
    assert calls == [f"begin in {name}", f"0 in {name}", f"1 in {name}"]


def test_preparation_that_fails_is_told() -> None:
    def prepare(item: int) -> int:
        raise MemoryError("no pages to lock")

    ahead = BackgroundIterator(Source(2).items(), depth=1, prepare=prepare)
    with pytest.raises(MemoryError, match="no pages to lock"):
        next(ahead)
