# SPDX-License-Identifier: Apache-2.0
"""Each file operation of a window's publication and of a student's reads fails, one by one."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.training.distillation import target_stream
from megatron.training.distillation.errors import TeacherDataError
from megatron.training.distillation.shard_reader import TeacherRowReader
from megatron.training.distillation.target_stream import StreamOptions, TargetStream
from megatron.training.distillation.targets import IterationFailure, IterationTargets, LoadLayout
from tests.file_faults import FileFaults, recorded_operations
from tests.unit_tests.training.distillation.cache_files import IDENTIFIERS, sample_of, write_shard

GBS = 4
LAYOUT = LoadLayout(dp_rank=0, dp_size=1, mbs=GBS, gbs=GBS)
DENIED = "Permission denied"


# ---- a window ----------------------------------------------------------------------------------


def begin(directory: Path) -> None:
    """Make a directory in which the window 8 to 23 finds a shard and its namesake in its way."""
    directory.mkdir()
    write_shard(directory, 0, 16)
    (directory / "dp0__0-16.tar.stale").write_bytes(b"kept")


def live(directory: Path) -> list[str]:
    """Return what is there and not set aside; nothing unfinished may stay."""
    return sorted(path.name for path in directory.iterdir() if path.suffix != ".stale")


def readable(directory: Path) -> list[int]:
    """Return the first samples of the iterations that a student can read, all of them right."""
    found = []
    for item in TeacherRowReader(str(directory), LAYOUT, expected_identifiers=None).iterations(0):
        if isinstance(item, IterationTargets):
            (rows,) = item.microbatches
            assert sample_of(rows.values) == list(range(item.start, item.start + GBS))
            found.append(item.start)
    return found


@pytest.mark.parametrize(
    ("cache_format", "only"),
    [(2, True), (3, False)],
    indirect=["cache_format"],
    ids=["v2 once", "v3 for good"],
)
def test_publication(tmp_path: Path, cache_format: int, only: bool) -> None:
    """Whatever fails is told, loses nothing that was there and stands in nobody's way later."""
    begin(tmp_path / "whole")
    with FileFaults("whole", tmp_path / "operations"):
        write_shard(tmp_path / "whole", 8, 24)
    operations = recorded_operations(tmp_path / "operations")
    assert operations.pop(0) == "mkdir whole"  # of the helper that writes the shard
    assert {operation.partition(" ")[0] for operation in operations} == {
        *("listdir", "stat", "open", "seek", "read", "write"),
        *("fsync", "close", "replace", "rename"),
    }
    for number, operation in enumerate(operations, start=1):
        cache = tmp_path / f"cache-{number}"
        begin(cache)
        faults = FileFaults(
            cache.name, tmp_path / f"record-{number}", first_failing=number, only=only
        )
        with faults, pytest.raises(OSError, match=DENIED) as raised:
            write_shard(cache, 8, 24)
        assert cache.name in str(raised.value), operation
        assert {0, 4} <= set(readable(cache)) <= set(range(0, 24, GBS)), operation
        assert (cache / "dp0__0-16.tar.stale").read_bytes() == b"kept"

        write_shard(cache, 8, 24)
        assert live(cache) == ["dp0__0-8.tar", "dp0__8-24.tar"], operation
        assert readable(cache) == list(range(0, 24, GBS))


# ---- reads -------------------------------------------------------------------------------------


@pytest.fixture
def stream_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], TargetStream]:
    """Open the stream of a cache, without a loader process."""
    loader = target_stream.DataLoader
    monkeypatch.setattr(
        target_stream,
        "DataLoader",
        lambda *args, **options: loader(
            *args, **{**options, "num_workers": 0, "prefetch_factor": None}
        ),
    )

    def make(cache: Path) -> TargetStream:
        options = StreamOptions(
            logprobs_dir=str(cache),
            expected_identifiers=IDENTIFIERS,
            decode_threads=1,
            decode_lookahead=None,
            msc_prefetch_depth=0,
        )
        return TargetStream(options, LAYOUT)

    return make


@pytest.mark.usefixtures("cache_format")
@pytest.mark.parametrize("only", [True, False], ids=["once", "for good"])
def test_reads(tmp_path: Path, only: bool, stream_of: Callable[[Path], TargetStream]) -> None:
    """Whatever fails is an answer that says what and where; nothing is read wrong."""
    cache = tmp_path / "cache"
    cache.mkdir()
    write_shard(cache, 0, 8)
    write_shard(cache, 8, 16)
    with FileFaults(str(cache), tmp_path / "operations"):
        stream = stream_of(cache)
        for start in range(0, 16, GBS):
            assert isinstance(stream.iteration(start), IterationTargets)
        stream.close()
    operations = recorded_operations(tmp_path / "operations")
    # What comes after the last rows is a look for more of them.
    while operations[-1].startswith("listdir"):
        operations.pop()
    assert {operation.partition(" ")[0] for operation in operations} == {
        *("listdir", "open", "seek", "read", "close")
    }
    for number, operation in enumerate(operations):
        failures = []
        with FileFaults(str(cache), tmp_path / f"record-{number}", first_failing=number, only=only):
            stream = stream_of(cache)
            for start in range(0, 16, GBS):
                item = stream.iteration(start)
                if isinstance(item, IterationFailure):
                    failures.append(item.error)
                else:
                    (rows,) = item.microbatches
                    assert sample_of(rows.values) == list(range(start, start + GBS))
            stream.close()
        # A directory is looked at again; what cannot be closed is told with the next iteration.
        assert failures or only or operation.startswith("close"), operation
        for error in failures:
            assert isinstance(error, TeacherDataError), operation
            assert DENIED in str(error)
            assert str(cache) in str(error)
