# SPDX-License-Identifier: Apache-2.0
"""The buffer that compresses iterations in the background and spools them by window."""

import os
import re
import threading
from pathlib import Path

import pytest
import torch

from megatron.training.distillation.errors import LogitsWriteError
from megatron.training.distillation.iteration_buffer import IterationBuffer
from megatron.training.distillation.utils import decode_teacher_rows, encode_logprobs_payload
from tests.unit_tests.training.distillation.cache_files import read_content


@pytest.fixture
def buffer():
    buffer = IterationBuffer()
    yield buffer
    buffer.close()


def entries(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(4, 2, 3, generator=generator).half(),
        torch.randint(0, 131072, (4, 2, 3), generator=generator),
        torch.randn(4, 2, generator=generator),
    )


def test_take_returns_all_iterations_in_order_and_empties(buffer):
    for start in (16, 0, 8):
        buffer.add(start, start + 8, *entries(start))
    assert len(buffer) == 3
    taken, close = buffer.take()
    assert [item[:2] for item in taken] == [(0, 8), (8, 16), (16, 24)]
    assert [item.member_name for item in taken] == ["0-8.pt.zst", "8-16.pt.zst", "16-24.pt.zst"]
    for item in taken:
        values, indices, tail = entries(item.start)
        rows = decode_teacher_rows(read_content(item.payload))
        assert torch.equal(rows.values, values)
        assert torch.equal(rows.indices, indices.int())
        assert torch.equal(rows.tail_logprob, tail)
    close()
    assert buffer.take().iterations == []


def test_entries_that_no_token_keeps_are_left_out(buffer):
    values, indices, tail = entries(0)
    values[..., 2], indices[..., 2] = -1000.0, -1
    values[1:, :, 1], indices[1:, :, 1] = -1000.0, -1
    buffer.add(0, 8, values, indices, tail)
    window = buffer.take()
    assert read_content(window.iterations[0].payload) == encode_logprobs_payload(
        values[..., :2], indices[..., :2], tail
    )


def test_a_given_encoder_makes_the_members():
    given = []

    def encode(*tensors: torch.Tensor | None) -> bytes:
        given.append(tensors)
        return b"member %d" % len(given)

    buffer = IterationBuffer(encode=encode)
    values, indices, tail = entries(0)
    values[..., 2] = -1000.0
    marks = torch.arange(2).view(1, 2)
    buffer.add(0, 8, values, indices, tail, marks)
    buffer.add(8, 16, values, indices)
    iterations, _ = buffer.take()
    assert [read_content(item.payload) for item in iterations] == [b"member 1", b"member 2"]
    kept = values[..., :2], indices[..., :2], tail, marks
    for found, expected in zip(given[0], kept, strict=True):
        assert torch.equal(found, expected)
    assert given[1][2:] == (None, None)
    buffer.close()


def test_tail_may_be_absent(buffer):
    values, indices, _ = entries(0)
    buffer.add(0, 8, values, indices)
    window = buffer.take()
    ((start, end, payload),) = window.iterations
    assert (start, end) == (0, 8)
    assert read_content(payload) == encode_logprobs_payload(values, indices)


def test_a_replay_replaces_the_iteration(buffer):
    for seed in (1, 2, 3):
        buffer.add(0, 8, *entries(seed))
    window = buffer.take()
    (item,) = window.iterations
    assert torch.equal(decode_teacher_rows(read_content(item.payload)).values, entries(3)[0])


def test_windows_have_spools_of_their_own(buffer):
    windows = []
    for start in (0, 8):
        buffer.add(start, start + 8, *entries(start))
        windows.append(buffer.take())
    (first,), (second,) = (window.iterations for window in windows)
    windows[0].close()
    with pytest.raises(OSError):
        first.payload.open()
    assert torch.equal(decode_teacher_rows(read_content(second.payload)).values, entries(8)[0])


class Told:
    """Hears of failures, from another thread."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self._heard = threading.Event()

    def __call__(self, error: LogitsWriteError) -> None:
        self.messages.append(str(error))
        self._heard.set()

    def only(self) -> str:
        assert self._heard.wait(20)
        (message,) = self.messages
        return message


def test_an_encoding_error_is_told_at_once_and_surfaces_every_time():
    told = Told()
    buffer = IterationBuffer(on_failure=told)
    values, indices, tail = entries(0)
    buffer.add(0, 8, values, indices, tail)
    buffer.add(8, 16, values, indices + 131072, tail)
    assert "Samples 8 to 15 of the logits dump" in told.only()
    for _ in range(2):
        with pytest.raises(LogitsWriteError, match="17 bits") as caught:
            buffer.take()
        assert told.only() == str(caught.value)
    buffer.add(8, 16, values, indices, tail)  # the replay repairs it
    assert len(buffer.take().iterations) == 2
    buffer.close()
    assert len(told.messages) == 1


def test_a_spool_that_fails_is_told_with_its_place(tmp_path: Path):
    told = Told()
    place = tmp_path / "spool"
    buffer = IterationBuffer(str(place), told)
    buffer.add(0, 8, *entries(0))
    with pytest.raises(LogitsWriteError):
        buffer.take()
    message = told.only()
    assert re.search(
        f"Samples 0 to 7 .*FileNotFoundError: .*spool in {place}: No such file", message
    )
    assert "start the job again" in message
    # Where it can be cured, nothing is lost.
    place.mkdir()
    buffer.add(0, 8, *entries(0))
    assert len(buffer.take().iterations) == 1
    buffer.close()


def test_held_memory_is_what_is_not_yet_on_a_disk(tmp_path: Path):
    tensors = entries(0)
    raw = sum(tensor.nbytes for tensor in tensors)
    for directory in (None, str(tmp_path)):
        buffer = IterationBuffer(directory)
        for start in (0, 8):
            buffer.add(start, start + 8, *tensors)
            iterations, close = buffer.take()
            size = len(iterations[0].payload)
            spooled = size if directory is None else 0
            # The tensors go when the spool has the bytes, so for a moment both are there.
            assert buffer.take_held_peak() == raw + spooled
            assert buffer.take_held_peak() == spooled
            close()
        buffer.take_held_peak()
        assert buffer.take_held_peak() == 0
        # A replay replaces what may wait, be under way, or be done.
        for _ in range(3):
            buffer.add(0, 8, *tensors)
        _, close = buffer.take()
        close()
        assert raw <= buffer.take_held_peak() <= 3 * (raw + size)
        assert buffer.take_held_peak() == 0
        buffer.close()
    assert os.listdir(tmp_path) == []


def test_iterations_may_come_from_several_threads(buffer):
    def work(worker: int) -> None:
        for iteration in range(5):
            start = (iteration * 4 + worker) * 8
            buffer.add(start, start + 8, *entries(start))

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    iterations, _ = buffer.take()
    assert [item.start for item in iterations] == list(range(0, 160, 8))


def test_encoding_uses_one_thread_that_close_ends():
    before = threading.active_count()
    buffer = IterationBuffer()
    assert threading.active_count() == before
    for start in range(0, 64, 8):
        buffer.add(start, start + 8, *entries(start))
        assert threading.active_count() <= before + 1
    buffer.close()
    assert threading.active_count() == before
    assert len(buffer.take().iterations) == 8
