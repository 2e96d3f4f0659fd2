# SPDX-License-Identifier: Apache-2.0
"""A cache on a real S3 server: what its reader fetches when, and what a killed writer leaves."""

import json
import multiprocessing
import os
import threading
from typing import Any

import pytest

from megatron.core.msc_utils import MultiStorageClientFeature
from megatron.training.distillation import shard_writer, storage, storage_retry
from megatron.training.distillation.errors import TeacherDataError, TeacherDataExhaustedError
from megatron.training.distillation.shard_reader import TeacherRowReader
from megatron.training.distillation.targets import IterationFailure, LoadLayout
from tests.unit_tests.training.distillation.cache_files import sample_of, write_shard

pytestmark = pytest.mark.usefixtures("cache_format")

multistorageclient = pytest.importorskip("multistorageclient")

CONTENT = os.urandom(50_000)


def put(url: str, content: bytes) -> None:
    storage.publish(url, lambda stream: stream.write(content))


def get(url: str) -> bytes:
    with storage.open_read(url) as stream:
        return stream.read()


# ---- prefetching -------------------------------------------------------------------------------


def fetched_whole(url: str, depth: int) -> tuple[Any, list[Any]]:
    """Begin a student's pass over a cache and wait until nothing more is being fetched."""
    reader = TeacherRowReader(
        url,
        LoadLayout(dp_rank=0, dp_size=1, mbs=1, gbs=4),
        expected_identifiers=None,
        decode_threads=1,
        msc_prefetch_depth=depth,
        names=storage.list_names(url),
    )
    items = reader.iterations(0)
    first = next(items)
    for thread in threading.enumerate():
        if thread.name == "object-store-open":
            thread.join(20)
    return items, [first]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_whole_shards_are_fetched_ahead_by_depth(server, monkeypatch, calls, depth):
    """With the store gone after the first step, just what was fetched ahead can be trained on."""
    name = f"prefetch-{depth}"
    folder = server.objects / name
    for start in range(0, 48, 8):
        write_shard(folder, start, start + 8)
    calls.clear()
    items, found = fetched_whole(server.url(name), depth)
    assert calls.count("GetObject") == 1 + depth
    server.stop()
    monkeypatch.setattr(storage_retry, "PATIENCE_SECONDS", 0.0)
    # Two iterations to a shard.
    for item in items:
        found.append(item)
        if isinstance(item, IterationFailure):
            break
    assert [item.start for item in found] == [4 * step for step in range(2 * (1 + depth) + 1)]
    for item in found[:-1]:
        assert [sample_of(rows.values) for rows in item.microbatches] == [
            [item.start + row] for row in range(4)
        ]
    failure = found[-1]
    assert isinstance(failure.error, TeacherDataError)
    assert f"dp0__{failure.start}-{failure.start + 8}.tar" in str(failure.error)
    items.close()


def test_each_shard_is_fetched_once_and_closed_after_use(server, calls):
    folder = server.objects / "prefetch-once"
    for start in range(0, 48, 8):
        write_shard(folder, start, start + 8)
    calls.clear()
    items, found = fetched_whole(server.url("prefetch-once"), 2)
    found += items
    assert len(found) == 13
    assert isinstance(found[-1].error, TeacherDataExhaustedError)
    assert calls.count("GetObject") == 6


def test_clients_cache_holds_whole_shards_on_disk(server, tmp_path, monkeypatch, calls):
    name = tmp_path.name.replace("_", "-")
    config = {
        "profiles": {name: {**server.profile(), "caching_enabled": True}},
        "cache": {"size": "1G", "location": str(tmp_path / "cache")},
    }
    (tmp_path / "msc.json").write_text(json.dumps(config))
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
    url = f"msc://{name}/{name}/x.tar"
    put(url, CONTENT)
    assert [get(url), get(url)] == [CONTENT, CONTENT]
    assert calls.count("GetObject") == 1
    held = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert len(CONTENT) in [path.stat().st_size for path in held]
    # Written again by a resumed teacher: the object decides, not what is held.
    put(url, CONTENT[::-1])
    assert get(url) == CONTENT[::-1]


# ---- the checkpoint worker ---------------------------------------------------------------------

META = b'{"saver":{}}'


def members(start: int, end: int) -> list[tuple[str, bytes]]:
    return [(f"{a}-{a + 4}.pt.zst", b"x" * 100) for a in range(start, end, 4)]


def _flush_in_a_process_of_its_own(
    url: str, members: list[tuple[str, bytes]], msc_enabled: bool
) -> tuple[bool, bool]:
    before = MultiStorageClientFeature.is_enabled()
    shard_writer.write_batched_tar(url, META, members, msc_enabled)
    return before, MultiStorageClientFeature.is_enabled()


@pytest.mark.slow
def test_worker_that_inherits_nothing_enables_the_client(server):
    """The worker starts as a new interpreter, which is told by the arguments it is given."""
    url = server.url("worker/dp0__0-8.tar")
    arguments = (url, members(0, 8), True)
    with multiprocessing.get_context("forkserver").Pool(1) as worker:
        found = worker.apply_async(_flush_in_a_process_of_its_own, arguments).get(110)
    assert found == (False, True)
    assert storage.list_names(server.url("worker")) == ["dp0__0-8.tar"]


class Killed(BaseException):
    """Ends a writer where it is."""


@pytest.mark.slow
def test_writer_killed_between_copy_and_delete_loses_nothing(server, calls, monkeypatch):
    url = server.url("killed")
    shard_writer.write_batched_tar(f"{url}/dp0__0-8.tar", META, members(0, 8))
    first = get(f"{url}/dp0__0-8.tar")

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(multistorageclient.StorageClient, "delete", killed)
        with pytest.raises(Killed):
            shard_writer.write_batched_tar(f"{url}/dp0__0-16.tar", META, members(0, 16))
    # The old shard can still be read, and is kept under its other name besides.
    assert storage.list_names(url) == ["dp0__0-8.tar", "dp0__0-8.tar.stale"]
    shard_writer.write_batched_tar(f"{url}/dp0__0-16.tar", META, members(0, 16))
    stale = ["dp0__0-8.1.tar.stale", "dp0__0-8.tar.stale"]
    assert storage.list_names(url) == ["dp0__0-16.tar", *stale]
    assert [get(f"{url}/{name}") for name in stale] == [first, first]
