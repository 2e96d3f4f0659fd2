# SPDX-License-Identifier: Apache-2.0
"""A student that resumes in a shard reads its metadata and what it needs, and never a wrong row."""

import io
import itertools
import json
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.training.distillation import storage
from megatron.training.distillation.errors import CacheFormatError, TeacherDataMissingError
from megatron.training.distillation.open_shard import OpenShard
from megatron.training.distillation.payload_v3 import read_header
from megatron.training.distillation.shard_reader import (
    IterationFailure,
    LoadLayout,
    TeacherRowReader,
)
from megatron.training.distillation.utils import ShardName
from tests.unit_tests.training.distillation.cache_files import (
    IDENTIFIERS,
    in_format,
    large_rows,
    sample_of,
    write_large_shard,
    write_shard,
)
from tests.unit_tests.training.distillation.cache_mutations import (
    change_seal,
    checksum_of_index,
    read_members,
    without_index,
    write_members,
)

pytestmark = pytest.mark.usefixtures("cache_format")

MEMBERS, GBS = 128, 4
LAYOUT = LoadLayout(dp_rank=0, dp_size=1, mbs=4, gbs=GBS)
NAME = f"dp0__0-{MEMBERS * GBS}.tar"


def reader(root: Path, *, run: dict[str, Any] | None = None) -> TeacherRowReader:
    return TeacherRowReader(str(root), LAYOUT, expected_identifiers=run, decode_threads=1)


@pytest.fixture
def bytes_read(monkeypatch) -> dict[str, int]:
    """The bytes that were read of each file, by name."""
    counts: dict[str, int] = {}

    class CountingFile(io.FileIO):
        def read(self, size=-1):
            data = super().read(size)
            counts[Path(self.name).name] = counts.get(Path(self.name).name, 0) + len(data)
            return data

        def readinto(self, buffer):
            raise AssertionError("not counted")

        readall = readinto

    monkeypatch.setattr(storage, "open_read", lambda path, **_: CountingFile(path))
    return counts


@pytest.fixture(scope="module")
def large_caches(tmp_path_factory) -> dict[int, Path]:
    """See :func:`large`, by format."""
    roots = {}
    for version in (2, 3):
        roots[version] = root = tmp_path_factory.mktemp("large")
        with in_format(version):
            for start in (0, MEMBERS * GBS):
                write_large_shard(root, start, start + MEMBERS * GBS, gbs=GBS)
        path = root / f"dp0__{MEMBERS * GBS}-{2 * MEMBERS * GBS}.tar"
        path.write_bytes(without_index(path.read_bytes()))
    return roots


@pytest.fixture
def large(large_caches, cache_format) -> Path:
    """A cache of two shards; the first has an index, the second only before it was written."""
    return large_caches[cache_format]


def layout_of(path: Path) -> list[tarfile.TarInfo]:
    with tarfile.open(path) as tar:
        return tar.getmembers()


# ---- what is read --------------------------------------------------------------------------


@pytest.mark.parametrize("member", [0, 1, 64, 127])
@pytest.mark.parametrize("index", [True, False])
def test_up_to_the_first_sample_a_small_part_is_read(large, bytes_read, index, member):
    path = sorted(large.iterdir())[0 if index else 1]
    entries = layout_of(path)
    start = member * GBS + (0 if index else MEMBERS * GBS)
    items = reader(large).iterations(start)
    assert_large_rows(next(items), start)
    items.close()
    meta, content = entries[0].size, entries[1 + member].size
    # Metadata and member with their headers; without an index all headers and the end marker.
    headers = 2 if index else MEMBERS + 2
    assert bytes_read == {path.name: meta + content + 512 * headers}
    assert bytes_read[path.name] < 0.03 * path.stat().st_size


@pytest.mark.parametrize("cache_format", [3], indirect=True)
def test_of_a_member_in_format_3_only_the_rows_are_read(tmp_path, cache_format, bytes_read):
    path = write_large_shard(tmp_path, 0, 8, gbs=8)
    layout = LoadLayout(dp_rank=1, dp_size=4, mbs=1, gbs=8)
    read = TeacherRowReader(str(tmp_path), layout, expected_identifiers=None, decode_threads=1)
    microbatches = next(read.iterations(0)).microbatches
    values, ids = large_rows(0, 8)
    for row, found in zip((1, 5), microbatches, strict=True):
        assert torch.equal(found.values[:, 0], values[:, row])
        assert torch.equal(found.indices[:, 0].long(), ids[:, row])
    meta, member = layout_of(path)
    header = read_header(path.read_bytes()[member.offset_data :])
    frames = header.frame_bytes.reshape(8, -1)[[1, 5]].sum()
    assert bytes_read == {path.name: 2 * 512 + meta.size + header.nbytes + frames}
    assert frames < 0.3 * member.size


def test_the_shard_that_is_compared_costs_its_metadata(large, bytes_read):
    first, second = sorted(large.iterdir())
    start = (MEMBERS - 2) * GBS
    items = reader(large, run=IDENTIFIERS).iterations(start)
    assert_large_rows(next(items), start)
    assert bytes_read[second.name] == 512 + layout_of(second)[0].size
    assert bytes_read[first.name] < 0.03 * first.stat().st_size
    for _ in range(2):
        assert_large_rows(next(items), start := start + GBS)
    items.close()


def assert_large_rows(item: Any, start: int) -> None:
    assert not isinstance(item, IterationFailure), item.error
    assert item.start == start
    (rows,) = item.microbatches
    assert rows.values.equal(large_rows(start, GBS)[0])


@pytest.mark.parametrize("index", [True, False])
def test_from_any_sample_on_the_rows_are_those_of_a_whole_pass(tmp_path, index):
    for start in (0, 20, 40):
        write_shard(tmp_path, start, start + 20, dp=2, mbs=2)
    if not index:
        for path in tmp_path.iterdir():
            path.write_bytes(without_index(path.read_bytes()))
    for start in range(60):
        rank = start // 2 % 2
        wanted = LoadLayout(dp_rank=rank, dp_size=2, mbs=1, gbs=2)
        loader = TeacherRowReader(str(tmp_path), wanted, expected_identifiers=IDENTIFIERS)
        *found, last = loader.iterations(start)
        assert isinstance(last, IterationFailure)
        expected = list(range(start + rank, 60 - (60 - start) % 2, 2))
        assert [sample_of(item.microbatches[0].values)[0] for item in found] == expected


# ---- an index that is not that of the file -------------------------------------------------


def rotated(index: list) -> list:
    """Return the sizes one entry further on."""
    sizes = [size for _, _, size, *_ in index]
    return [
        [start, end, size, *header]
        for (start, end, _, *header), size in zip(index, sizes[-1:] + sizes[:-1], strict=True)
    ]


CHANGES: dict[str, Callable[[list], object]] = {
    "size of one": lambda index: [[*index[0][:2], index[0][2] + 1], *index[1:]],
    "size of two": lambda index: [
        [*index[0][:2], index[0][2] - 512],
        [*index[1][:2], index[1][2] + 512],
        *index[2:],
    ],
    "sizes shifted": rotated,
    "samples shifted": lambda index: [[start + 4, end + 4, *rest] for start, end, *rest in index],
    "samples of another": lambda index: [index[1], index[0], *index[2:]],
    "too few": lambda index: index[:-1],
    "too many": lambda index: [*index, [16, 20, 100]],
    "none": lambda index: [],
    "overlapping": lambda index: [[0, 8, index[0][2]], *index[1:]],
    "empty range": lambda index: [[0, 0, index[0][2]], *index[1:]],
    "beyond the shard": lambda index: [*index[:-1], [12, 20, index[-1][2]]],
    "huge size": lambda index: [[0, 4, 1 << 80], *index[1:]],
    "huge samples": lambda index: [*index[:-1], [1 << 80, (1 << 80) + 4, index[-1][2]]],
    "negative": lambda index: [[-4, 4, index[0][2]], *index[1:]],
    "negative size": lambda index: [[0, 4, -1], *index[1:]],
    "float": lambda index: [[0, 4, float(index[0][2])], *index[1:]],
    "text": lambda index: [["0", 4, index[0][2]], *index[1:]],
    "bool": lambda index: [[False, 4, index[0][2]], *index[1:]],
    "null": lambda index: [[0, 4, None], *index[1:]],
    "entry too short": lambda index: [[0, 4], *index[1:]],
    "entry no list": lambda index: [{"start": 0}, *index[1:]],
    "no list": lambda index: {"0": index},
    "null index": lambda index: None,
}


@pytest.fixture
def small(tmp_path) -> Path:
    """A shard of four members whose content is of different sizes."""
    write_shard(tmp_path, 0, 16)
    path = tmp_path / "dp0__0-16.tar"
    assert len({entry.size for entry in layout_of(path)}) > 2
    return path


def read_all(path: Path) -> list[CacheFormatError]:
    """Read a shard from each of its iterations on; what is no error has the right rows."""
    errors = []
    for start in range(0, 16, 4):
        for item in itertools.islice(reader(path.parent).iterations(start), 4 - start // 4):
            if isinstance(item, IterationFailure):
                assert isinstance(item.error, CacheFormatError), repr(item.error)
                assert str(path) in str(item.error)
                errors.append(item.error)
            else:
                samples = sample_of(item.microbatches[0].values)
                assert samples == list(range(item.start, item.start + 4))
    return errors


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("checksum", ["renewed", "old"])
def test_a_damaged_index_is_an_error_and_no_row(small, change, checksum):
    def damage(content: dict[str, Any]) -> None:
        content["index"] = CHANGES[change](content["index"])
        if checksum == "renewed":
            content["index_crc32"] = checksum_of_index(content["index"])

    size = small.stat().st_size
    small.write_bytes(change_seal(small.read_bytes(), damage))
    assert small.stat().st_size == size
    errors = read_all(small)
    # From each of the four starts on, at least what the damage touches is an error.
    assert len(errors) >= (1 if checksum == "renewed" else 10)


def test_samples_that_a_sound_index_does_not_have_are_missing(small):
    def leave_out(content: dict[str, Any]) -> None:
        content["index"][-1][1] = 15
        content["index_crc32"] = checksum_of_index(content["index"])

    small.write_bytes(change_seal(small.read_bytes(), leave_out))
    item = next(reader(small.parent).iterations(12))
    assert isinstance(item.error, TeacherDataMissingError)
    assert str(small) in str(item.error)


@pytest.mark.parametrize("key", ["index", "index_crc32"])
def test_half_an_index_is_an_error(small, key):
    small.write_bytes(change_seal(small.read_bytes(), lambda content: content.pop(key)))
    assert len(read_all(small)) == 10


def test_a_shard_without_an_index_is_read_by_its_headers(small):
    small.write_bytes(without_index(small.read_bytes()))
    assert read_all(small) == []


# ---- a tar that another tool has written again ---------------------------------------------


def rewritten(shard: bytes, **options: Any) -> bytes:
    """Return an archive of the same members as a tool with other habits writes it."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", **options) as tar:
        for name, content in read_members(shard):
            info = tarfile.TarInfo(name)
            info.size, info.mtime, info.uname, info.mode = len(content), 1.5, "someone", 0o600
            tar.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def test_other_values_in_the_same_headers_are_read(small):
    content = rewritten(small.read_bytes(), format=tarfile.GNU_FORMAT)
    assert content != small.read_bytes()
    small.write_bytes(content)
    assert read_all(small) == []


def test_extended_headers_are_an_error(small):
    small.write_bytes(rewritten(small.read_bytes(), format=tarfile.PAX_FORMAT))
    errors = read_all(small)
    assert len(errors) == 10
    assert "and was written with" in str(errors[0])


def test_a_header_more_is_an_error_at_the_same_size(tmp_path):
    """It moves all members, and the padding at the end takes it up."""
    write_shard(tmp_path, 0, 12)
    path = tmp_path / "dp0__0-12.tar"
    shard = path.read_bytes()
    meta, *members = read_members(shard)
    path.write_bytes(write_members([meta, ("x", b""), *members]))
    assert path.stat().st_size == len(shard)
    for start, expected in ((0, "is of x with 0 bytes"), (4, "no tar header"), (8, "no tar")):
        item = next(reader(tmp_path).iterations(start))
        assert isinstance(item.error, CacheFormatError)
        assert expected in str(item.error)
        assert str(path) in str(item.error)


def test_members_in_another_order_are_an_error(small):
    meta, *members = read_members(small.read_bytes())
    small.write_bytes(write_members([meta, *reversed(members)]))
    assert len(read_all(small)) == 10


def test_a_member_of_another_name_is_an_error_where_it_is_read(small):
    meta, first, (_, second), *rest = read_members(small.read_bytes())
    content = write_members([meta, first, ("4-6.pt.zst", second), *rest])
    small.write_bytes(content)
    (error, _) = read_all(small)
    assert "is of 4-6.pt.zst with" in str(error)
    assert "the index of the shard says 4-8.pt.zst with" in str(error)


@pytest.mark.parametrize("index", [True, False])
def test_a_changed_byte_anywhere_gives_the_rows_or_an_error(small, index):
    shard = small.read_bytes() if index else without_index(small.read_bytes())
    name = ShardName.parse(small.name)
    outcomes = Counter()
    for place in range(0, len(shard), 41):
        changed = shard[:place] + bytes([shard[place] ^ 0x55]) + shard[place + 1 :]
        for start in range(0, 16, 4):
            try:
                opened = OpenShard(str(small), name, io.BytesIO(changed), None)
                member = opened.member_at(start)
                assert sample_of(opened.decode(member).values) == list(range(start, start + 4))
            except CacheFormatError:
                outcomes["error"] += 1
            else:
                outcomes["rows"] += 1
    assert min(outcomes.values()) > 0.1 * outcomes.total()


def test_the_index_of_a_dump_tells_what_lies_where(large):
    path = large / NAME
    meta, *members = layout_of(path)
    with tarfile.open(path) as tar:
        content = json.loads(tar.extractfile(meta).read())["content"]
    assert [f"{start}-{end}.pt.zst" for start, end, *_ in content["index"]] == [
        member.name for member in members
    ]
    assert [size for _, _, size, *_ in content["index"]] == [member.size for member in members]
