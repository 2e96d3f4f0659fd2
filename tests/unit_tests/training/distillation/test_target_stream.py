# SPDX-License-Identifier: Apache-2.0
"""The stream of targets through its loader process: order, jumps, failures, recovery."""

import logging
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.training.distillation import target_stream
from megatron.training.distillation.packed_rows import TeacherRows
from megatron.training.distillation.shard_reader import (
    IterationFailure,
    IterationTargets,
    LoadLayout,
    TeacherDataExhaustedError,
    TeacherDataMissingError,
)
from megatron.training.distillation.target_stream import StreamOptions, TargetStream
from megatron.training.distillation.utils import CacheFormatError, CacheIdentityError
from tests.unit_tests.training.distillation.cache_files import (
    IDENTIFIERS,
    rows_of,
    sample_of,
    write_shard,
)
from tests.unit_tests.training.distillation.given_targets import targets


def open_stream(
    directory: Path,
    *,
    identifiers: dict[str, Any] | None = IDENTIFIERS,
    gbs: int = 4,
    mbs: int = 2,
    dp_rank: int = 0,
    dp_size: int = 1,
) -> TargetStream:
    options = StreamOptions(
        logprobs_dir=str(directory),
        expected_identifiers=identifiers,
        decode_threads=2,
        decode_lookahead=None,
        msc_prefetch_depth=2,
    )
    return TargetStream(options, LoadLayout(dp_rank=dp_rank, dp_size=dp_size, mbs=mbs, gbs=gbs))


def samples(item: IterationTargets | IterationFailure) -> list[list[int]]:
    """Return the samples of every microbatch."""
    assert isinstance(item, IterationTargets), item
    return [sample_of(rows.values) for rows in item.microbatches]


def failure(item: IterationTargets | IterationFailure) -> IterationFailure:
    assert isinstance(item, IterationFailure), item
    return item


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    write_shard(tmp_path, 0, 8)
    write_shard(tmp_path, 8, 16)
    return tmp_path


def damage(cache: Path, shard: str, member: str) -> None:
    path = cache / shard
    with tarfile.open(path) as tar:
        entry = tar.getmember(member)
    content = bytearray(path.read_bytes())
    content[entry.offset_data + entry.size // 2] ^= 1
    path.write_bytes(content)


def test_iterations_in_order(cache: Path) -> None:
    stream = open_stream(cache)
    for start in range(0, 16, 4):
        item = stream.iteration(start)
        assert item.start == start
        assert samples(item) == [[start, start + 1], [start + 2, start + 3]]
        assert isinstance(item, IterationTargets)
        first = item.microbatches[0]
        _, indices, tail = rows_of([start, start + 1])
        assert first.indices.tolist() == indices.tolist()
        assert first.tail_logprob is not None
        assert first.tail_logprob.tolist() == tail.tolist()


def test_other_batches_than_the_teachers(cache: Path) -> None:
    stream = open_stream(cache, gbs=8, mbs=1, dp_rank=1, dp_size=2)
    assert samples(stream.iteration(0)) == [[1], [3], [5], [7]]
    assert samples(stream.iteration(8)) == [[9], [11], [13], [15]]


def test_start_anywhere(cache: Path) -> None:
    assert samples(open_stream(cache).iteration(12)) == [[12, 13], [14, 15]]
    # Also where no iteration of the teacher starts.
    assert samples(open_stream(cache).iteration(6)) == [[6, 7], [8, 9]]


def test_data_behind_training_is_skipped_with_a_warning(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream = open_stream(cache)
    stream.iteration(0)
    with caplog.at_level(logging.WARNING):
        assert samples(stream.iteration(12)) == [[12, 13], [14, 15]]
    assert "samples 4 to 11 is behind training, which is at sample 12" in caplog.text


def test_step_back_reads_again(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    stream = open_stream(cache)
    stream.iteration(0)
    stream.iteration(4)
    with caplog.at_level(logging.WARNING):
        assert samples(stream.iteration(0)) == [[0, 1], [2, 3]]
        assert samples(stream.iteration(4)) == [[4, 5], [6, 7]]
    assert caplog.text == ""


def test_step_between_iterations_reopens(cache: Path) -> None:
    stream = open_stream(cache)
    stream.iteration(0)
    assert samples(stream.iteration(6)) == [[6, 7], [8, 9]]
    assert samples(stream.iteration(10)) == [[10, 11], [12, 13]]


def test_damaged_iteration_fails_alone(cache: Path) -> None:
    damage(cache, "dp0__0-8.tar", "4-8.pt.zst")
    stream = open_stream(cache)
    assert samples(stream.iteration(0)) == [[0, 1], [2, 3]]
    failed = failure(stream.iteration(4))
    assert failed.start == 4
    assert not failed.fatal
    # The error crosses the process boundary whole.
    assert type(failed.error) is CacheFormatError
    assert str(cache / "dp0__0-8.tar") in str(failed.error)
    assert samples(stream.iteration(8)) == [[8, 9], [10, 11]]


def test_hole_is_told_apart_from_the_end(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, 4)
    write_shard(tmp_path, 8, 12)
    stream = open_stream(tmp_path)
    samples(stream.iteration(0))
    hole = failure(stream.iteration(4)).error
    assert type(hole) is TeacherDataMissingError
    assert "misaligned" in str(hole)
    assert "sample 4 " in str(hole)
    samples(stream.iteration(8))
    end = failure(stream.iteration(12)).error
    assert type(end) is TeacherDataExhaustedError
    assert "exhausted" in str(end)
    assert "last sample is 11" in str(end)
    assert "12" in str(end)


def test_more_data_is_found_after_the_end(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, 4)
    stream = open_stream(tmp_path)
    samples(stream.iteration(0))
    assert type(failure(stream.iteration(4)).error) is TeacherDataExhaustedError
    assert type(failure(stream.iteration(8)).error) is TeacherDataExhaustedError
    write_shard(tmp_path, 4, 20)
    assert samples(stream.iteration(12)) == [[12, 13], [14, 15]]


def test_given_listing_decides_what_there_is(cache: Path) -> None:
    stream = open_stream(cache)
    stream.use_listing(["dp0__0-8.tar"])
    samples(stream.iteration(4))
    assert type(failure(stream.iteration(8)).error) is TeacherDataExhaustedError
    assert type(failure(stream.iteration(8)).error) is TeacherDataExhaustedError
    stream.use_listing(["dp0__0-8.tar", "dp0__8-16.tar"])
    assert samples(stream.iteration(8)) == [[8, 9], [10, 11]]


def test_another_runs_data_is_fatal(cache: Path) -> None:
    others = {**IDENTIFIERS, "seed": 2}
    failed = failure(open_stream(cache, identifiers=others).iteration(0))
    assert failed.fatal
    assert type(failed.error) is CacheIdentityError
    for part in ("seed is 1", "here it is 2", "dp0__0-8.tar"):
        assert part in str(failed.error)
    assert samples(open_stream(cache, identifiers=None).iteration(0)) == [[0, 1], [2, 3]]


def test_missing_directory_is_fatal(tmp_path: Path) -> None:
    failed = failure(open_stream(tmp_path / "missing").iteration(0))
    assert failed.fatal
    assert str(tmp_path / "missing") in str(failed.error)


ROWS = TeacherRows(values=torch.zeros(1, 1, 1), indices=torch.zeros(1, 1, 1, dtype=torch.int32))


class _FailingReader:
    """A reader that raises what no reader should at sample 4."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def iterations(self, start_sample: int) -> Any:
        while True:
            if start_sample == 4:
                raise self.error
            yield targets(start_sample, ROWS)
            start_sample += 4


@pytest.mark.parametrize("error", [KeyError("gone"), OSError(5, "broken"), MemoryError("all")])
def test_error_that_no_reader_should_raise_is_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Raised, it would leave the other ranks waiting in their agreement."""
    monkeypatch.setattr(StreamOptions, "reader", lambda self, layout: _FailingReader(error))
    stream = open_stream(tmp_path)
    assert stream.iteration(0).start == 0
    failed = failure(stream.iteration(4))
    assert failed.start == 4
    assert failed.fatal
    assert type(error).__name__ in str(failed.error)
    assert "sample 4" in str(failed.error)
    assert type(failed.error.__cause__) is type(error)


def test_loader_that_cannot_be_started_is_a_failure(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot_fork(*args: Any, **options: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(target_stream, "DataLoader", cannot_fork)
    failed = failure(open_stream(cache).iteration(0))
    assert failed.fatal
    assert "Resource temporarily unavailable" in str(failed.error)


def test_wait_is_the_time_spent_in_iterations(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    times = iter([10.0, 10.5, 20.0, 21.0, 30.0, 34.0])
    stream = open_stream(cache)
    monkeypatch.setattr(target_stream.time, "perf_counter", lambda: next(times))
    monkeypatch.setattr(stream, "_find", lambda start: None)
    stream.iteration(0)
    assert stream.take_wait() == 0.5
    # Two looks for one iteration add up, until they are taken.
    stream.iteration(4)
    stream.iteration(4)
    assert stream.take_wait() == 5.0
    assert stream.take_wait() == 0.0


class _DyingReader:
    """A reader whose process ends without a word at sample 4, the first time."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def iterations(self, start_sample: int) -> Any:
        while True:
            if start_sample == 4 and not self.marker.exists():
                self.marker.touch()
                os._exit(9)
            yield targets(start_sample, ROWS)
            start_sample += 4


def test_dead_loader_process_is_a_failure_and_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = _DyingReader(tmp_path / "marker")
    monkeypatch.setattr(StreamOptions, "reader", lambda self, layout: reader)
    monkeypatch.setattr(target_stream, "PREFETCHED_ITERATIONS", 1)
    stream = open_stream(tmp_path)
    assert stream.iteration(0).start == 0
    failed = failure(stream.iteration(4))
    assert failed.start == 4
    assert not failed.fatal
    assert "loader process" in str(failed.error)
    assert "sample 4" in str(failed.error)
    assert isinstance(stream.iteration(8), IterationTargets)
