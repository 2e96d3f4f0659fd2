# SPDX-License-Identifier: Apache-2.0
"""What a student that begins in the middle of a shard fetches from a real S3 server."""

import itertools
import json
import logging
import re
import tarfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron.training.distillation import (
    object_store,
    read_ahead,
    storage,
    storage_retry,
)
from megatron.training.distillation.errors import TeacherDataError
from megatron.training.distillation.object_store import SMALL_RANGE_BYTES
from megatron.training.distillation.shard_reader import (
    IterationFailure,
    LoadLayout,
    TeacherRowReader,
)
from tests.unit_tests.training.distillation.cache_files import (
    IDENTIFIERS,
    large_rows,
    sample_of,
    write_large_shard,
    write_shard,
)
from tests.unit_tests.training.distillation.cache_mutations import without_index

multistorageclient = pytest.importorskip("multistorageclient")

MEMBERS, GBS = 128, 4
END = MEMBERS * GBS


class Transfer(NamedTuple):
    """Bytes ``[start, end)`` of an object; the whole of it where ``end`` is None."""

    key: str
    start: int
    end: int | None
    size: int


@pytest.fixture
def transfers(monkeypatch) -> list[Transfer]:
    """What the server sends of objects, in the order in which it is asked for."""
    from botocore.client import BaseClient

    seen: list[Transfer] = []
    original = BaseClient._make_api_call

    def call(self, operation, parameters):
        if operation != "GetObject":
            return original(self, operation, parameters)
        key = parameters["Key"].rpartition("/")[2]
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", parameters.get("Range", "bytes=0-"))
        start, last = span.groups()
        place = len(seen)
        seen.append(Transfer(key, int(start), int(last) + 1 if last else None, 0))
        answer = original(self, operation, parameters)
        seen[place] = seen[place]._replace(size=answer["ContentLength"])
        return answer

    monkeypatch.setattr(BaseClient, "_make_api_call", call)
    return seen


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> dict[bool, bytes]:
    """A shard of 128 members of tens of kilobytes, with and without an index."""
    content = write_large_shard(tmp_path_factory.mktemp("large"), 0, END, gbs=GBS).read_bytes()
    return {True: content, False: without_index(content)}


@pytest.fixture
def small_pieces(monkeypatch) -> int:
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", 64 * 1024)
    monkeypatch.setattr(read_ahead, "PIECES_AHEAD", 2)
    return 64 * 1024


def put(folder: Path, content: bytes) -> Path:
    folder.mkdir()
    path = folder / f"dp0__0-{END}.tar"
    path.write_bytes(content)
    return path


def upload(url: str, content: bytes) -> None:
    """Write an object through the client: this server keeps the checksum that it sends."""
    storage.publish(url, lambda stream: stream.write(content))


def members_of(path: Path) -> list[tuple[int, int]]:
    """Return first and last byte of each member with its header."""
    with tarfile.open(path) as tar:
        return [(entry.offset, entry.offset_data + entry.size) for entry in tar.getmembers()[1:]]


def iterations(url: str, start: int, *, run: dict[str, Any] | None = None, depth: int = 0):
    return TeacherRowReader(
        url,
        LoadLayout(dp_rank=0, dp_size=1, mbs=4, gbs=GBS),
        expected_identifiers=run,
        decode_threads=1,
        msc_prefetch_depth=depth,
        names=storage.list_names(url),
    ).iterations(start)


def wait_for(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(20)


def check_large(item: Any, start: int) -> None:
    assert not isinstance(item, IterationFailure), item.error
    (rows,) = item.microbatches
    assert item.start == start
    assert rows.values.equal(large_rows(start, GBS)[0])


# ---- what is fetched -----------------------------------------------------------------------


def test_up_to_the_first_sample_a_small_part_is_fetched(
    server, transfers, large, small_pieces, record_property
):
    path = put(server.objects / "resumed", large[True])
    size = path.stat().st_size
    items = iterations(server.url("resumed", profile="-ranges"), END // 2)
    check_large(next(items), END // 2)
    begin, end = members_of(path)[MEMBERS // 2]
    head, member, *ahead = transfers
    assert (head.start, head.size) == (0, SMALL_RANGE_BYTES)
    assert (member.start, member.end, member.size) == (begin, end, end - begin)
    record_property("bytes", [head.size + member.size, size])
    assert head.size + member.size < 0.03 * size
    # What follows is fetched after it, in pieces that are not repeated, and only so far.
    for number in range(1, MEMBERS // 2):
        check_large(next(items), END // 2 + GBS * number)
    assert isinstance(next(items), IterationFailure)
    *_, last = ahead = transfers[2:]
    assert [piece.start for piece in ahead] == list(range(end, size, small_pieces))
    assert {piece.size for piece in ahead[:-1]} == {small_pieces}
    assert last.end == size
    assert sum(transfer.size for transfer in transfers) < 0.53 * size


def test_no_more_is_fetched_ahead_than_is_held(server, transfers, large, small_pieces):
    path = put(server.objects / "bounded", large[True])
    others = set(threading.enumerate())
    items = iterations(server.url("bounded", profile="-ranges"), END // 2)
    check_large(next(items), END // 2)
    end = members_of(path)[MEMBERS // 2][1]
    new = set(threading.enumerate()) - others
    threads = [thread for thread in new if thread.name == "object-store-ahead"]
    assert len(threads) == 1
    deadline = time.monotonic() + 20
    while transfers[-1].end != end + 2 * small_pieces and time.monotonic() < deadline:
        time.sleep(0.01)
    threads[0].join(0.5)
    assert transfers[-1].end == end + 2 * small_pieces
    items.close()
    threads[0].join(20)
    assert not threads[0].is_alive()
    assert transfers[-1].end == end + 2 * small_pieces


def test_from_the_start_on_the_shard_is_fetched_whole(server, transfers, large):
    path = put(server.objects / "begun", large[True])
    check_large(next(iterations(server.url("begun", profile="-ranges"), 0)), 0)
    assert [transfer.end for transfer in transfers] == [None]
    assert transfers[0].size == path.stat().st_size


def test_without_an_index_the_headers_are_fetched(server, transfers, large):
    path = put(server.objects / "walked", large[False])
    items = iterations(server.url("walked", profile="-ranges"), END // 2)
    check_large(next(items), END // 2)
    items.close()
    headers = list(itertools.takewhile(lambda t: t.size <= SMALL_RANGE_BYTES, transfers))
    assert len(headers) <= MEMBERS + 1
    assert sum(transfer.size for transfer in headers) < 0.4 * path.stat().st_size
    begin, end = members_of(path)[MEMBERS // 2]
    member = transfers[len(headers)]
    assert (member.start, member.end) == (begin + 512, end)


@pytest.mark.parametrize("cache_format", [3], indirect=True)
def test_of_format_3_rows_are_fetched(server, tmp_path, cache_format):
    content = write_large_shard(tmp_path, 0, END, gbs=GBS).read_bytes()
    put(server.objects / "rows", content)
    layout = LoadLayout(dp_rank=1, dp_size=4, mbs=1, gbs=GBS)
    url = server.url("rows", profile="-ranges")
    items = TeacherRowReader(url, layout, expected_identifiers=None, decode_threads=2)
    found = list(itertools.islice(items.iterations(END // 2), 4))
    for item in found:
        (rows,) = item.microbatches
        values, ids = large_rows(item.start, GBS)
        assert rows.values[:, 0].equal(values[:, 1])
        assert rows.indices[:, 0].long().equal(ids[:, 1])


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_shard_that_is_compared_costs_its_beginning(server, transfers, depth):
    folder = server.objects / f"compared-{depth}"
    for start in range(0, 60, 20):
        write_shard(folder, start, start + 20)
    size = (folder / "dp0__0-20.tar").stat().st_size
    items = iterations(server.url(folder.name, profile="-ranges"), 0, run=IDENTIFIERS, depth=depth)
    found = [next(items)]
    wait_for("object-store-open")
    # In whatever order their threads come to it.
    whole = sorted(transfer.key for transfer in transfers if transfer.end is None)
    assert whole == [f"dp0__{start}-{start + 20}.tar" for start in range(0, 20 * (1 + depth), 20)]
    parts = [transfer for transfer in transfers if transfer.end is not None]
    assert [(part.key, part.start) for part in parts] == [("dp0__20-40.tar", 0)]
    assert parts[0].size == min(SMALL_RANGE_BYTES, size)
    found += items
    assert [item.start for item in found] == list(range(0, 64, 4))
    for item in found[:-1]:
        assert sample_of(item.microbatches[0].values) == list(range(item.start, item.start + 4))
    assert sum(transfer.end is None for transfer in transfers) == 3
    assert len(transfers) == 4


@pytest.mark.parametrize("profile", ["-ranges", ""])
@pytest.mark.parametrize("index", [True, False])
def test_from_any_iteration_on_the_rows_are_those_of_a_whole_pass(
    server, tmp_path, monkeypatch, profile, index
):
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", 700)
    url = server.url(f"any{profile}-{index}", profile=profile)
    for start in (0, 20):
        write_shard(tmp_path, start, start + 20)
    for path in tmp_path.iterdir():
        content = path.read_bytes()
        upload(f"{url}/{path.name}", content if index else without_index(content))
    for start in range(0, 40, 3):
        *found, last = iterations(url, start, run=IDENTIFIERS)
        assert isinstance(last, IterationFailure)
        assert [item.start for item in found] == list(range(start, 37, 4))
        for item in found:
            samples = sample_of(item.microbatches[0].values)
            assert samples == list(range(item.start, item.start + 4))


def test_with_the_clients_cache_the_rows_are_right(server, tmp_path, monkeypatch, large):
    name = tmp_path.name.replace("_", "-")
    options = {"response_checksum_validation": "when_required"}
    config = {
        "profiles": {name: {**server.profile(**options), "caching_enabled": True}},
        "cache": {"size": "1G", "location": str(tmp_path / "cache")},
    }
    (tmp_path / "msc.json").write_text(json.dumps(config))
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
    put(server.objects / name, large[True])
    for _ in range(2):
        items = iterations(f"msc://{name}/{name}", END - 8)
        check_large(next(items), END - 8)
        check_large(next(items), END - 4)
        items.close()


# ---- a store that refuses, goes away, or has something else --------------------------------


def test_where_ranges_are_refused_the_shard_is_fetched_whole_once(server, transfers, large, caplog):
    url = server.url("refused-ranges")
    path = f"{url}/dp0__0-{END}.tar"
    upload(path, large[True])
    with caplog.at_level(logging.DEBUG, logger=object_store.__name__):
        items = iterations(url, END // 2)
        for start in range(END // 2, END, GBS):
            check_large(next(items), start)
        items.close()
    assert [transfer.end is None for transfer in transfers] == [False, True]
    told = [message for message in caplog.messages if "cannot be read by ranges" in message]
    assert len(told) == 1
    assert path in told[0]
    assert "Trying again" not in caplog.text


def test_reading_ahead_outlives_a_restart(server, large, small_pieces, pauses, caplog):
    put(server.objects / "restarted", large[True])
    items = iterations(server.url("restarted", profile="-ranges"), END // 2)
    check_large(next(items), END // 2)
    server.stop()
    pauses.append(server.start)
    for start in range(END // 2 + GBS, END, GBS):
        check_large(next(items), start)
    assert "Trying again" in caplog.text
    items.close()


def test_a_store_that_stays_away_is_an_error_and_may_come_back(
    server, large, small_pieces, monkeypatch
):
    monkeypatch.setattr(storage_retry, "PATIENCE_SECONDS", 0.0)
    put(server.objects / "away", large[True])
    items = iterations(server.url("away", profile="-ranges"), END // 2)
    check_large(next(items), END // 2)
    server.stop()
    failure = next(item for item in items if isinstance(item, IterationFailure))
    assert isinstance(failure.error, TeacherDataError)
    assert f"dp0__0-{END}.tar" in str(failure.error)
    server.start()
    check_large(next(items), failure.start + GBS)
    items.close()


def test_an_object_that_was_replaced_is_not_read_on(server, large, small_pieces, pauses):
    path = put(server.objects / "replaced-ahead", large[True])
    items = iterations(server.url("replaced-ahead", profile="-ranges"), END // 2)
    check_large(next(items), END // 2)
    server.stop()
    path.write_bytes(large[True] + b"more")
    pauses.append(server.start)
    failure = next(item for item in items if isinstance(item, IterationFailure))
    size = len(large[True])
    assert f"it has {size + 4} bytes now and had {size}" in str(failure.error)
    items.close()


def test_a_missing_object_is_named(server):
    url = server.url("nothing/x.tar", profile="-ranges")
    with storage.open_read(url, whole=False) as stream, pytest.raises(FileNotFoundError) as caught:
        stream.read(1)
    assert url in str(caught.value)


def test_closing_does_not_wait(server):
    server.stop()
    stream = storage.open_read(server.url("away/x.tar", profile="-ranges"), whole=False)
    stream.close()
    with pytest.raises(ValueError, match="after it was closed"):
        stream.read(1)
    wait_for("object-store-open")


def test_a_part_is_read_like_a_file(server):
    content = bytes(range(256)) * 300
    (server.objects / "part").mkdir()
    (server.objects / "part" / "x").write_bytes(content)
    with storage.open_read(server.url("part/x", profile="-ranges"), whole=False) as stream:
        for position, size in ((0, 512), (512, 100), (16000, 1000), (70000, -1), (5, 60000)):
            stream.seek(position)
            stop = len(content) if size < 0 else position + size
            assert stream.read(size) == content[position:stop]
            assert stream.tell() == stop
        stream.seek(-10, 2)
        assert stream.read(100) == content[-10:]
        assert stream.read(100) == b""
        storage.fetch_whole(stream)
        stream.seek(0)
        assert stream.read() == content
