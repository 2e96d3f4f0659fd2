# SPDX-License-Identifier: Apache-2.0
"""The seal in a shard's metadata, and that no cut, renamed or mixed shard gets past it."""

import io
import json
import logging
import re
import tarfile
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.training.distillation.errors import (
    CacheFormatError,
    CacheIdentityError,
    MixedCacheError,
)
from megatron.training.distillation.manifest import ExpectedRun, RunManifest
from megatron.training.distillation.open_shard import OpenShard
from megatron.training.distillation.shard_company import ShardCompany
from megatron.training.distillation.shard_content import seal_meta, tar_size
from megatron.training.distillation.shard_meta import ShardMeta
from megatron.training.distillation.shard_reader import (
    IterationFailure,
    LoadLayout,
    TeacherRowReader,
)
from megatron.training.distillation.utils import ShardName, write_shard_tar
from tests.unit_tests.training.distillation.cache_files import IDENTIFIERS, SEQ, write_shard
from tests.unit_tests.training.distillation.cache_mutations import (
    read_members,
    without_index,
    write_members,
)

pytestmark = pytest.mark.usefixtures("cache_format")

MANIFEST = RunManifest(sequence_length=SEQ, teacher={"checkpoint": "a", "step": 1})
RUN = ExpectedRun(identifiers=IDENTIFIERS, manifest=MANIFEST, reports=True)


def open_shard(content: bytes, name: str) -> OpenShard:
    parsed = ShardName.parse(name)
    assert parsed is not None
    return OpenShard(f"/cache/{name}", parsed, io.BytesIO(content), RUN)


def read(root: Path, run: ExpectedRun = RUN, gbs: int = 4) -> list:
    layout = LoadLayout(dp_rank=0, dp_size=1, mbs=1, gbs=gbs)
    reader = TeacherRowReader(str(root), layout, expected_identifiers=run, decode_threads=1)
    return list(reader.iterations(0))


@pytest.fixture
def indexed(tmp_path) -> bytes:
    write_shard(tmp_path, 0, 8, manifest=MANIFEST)
    return (tmp_path / "dp0__0-8.tar").read_bytes()


@pytest.fixture(params=["with an index", "without one"])
def shard(indexed, request) -> bytes:
    return indexed if request.param == "with an index" else without_index(indexed)


# ---- the seal ------------------------------------------------------------------------------


def test_the_sealed_bytes_are_these():
    members = [("0-8.pt.zst", b"first"), ("8-16.pt.zst", b"second")]
    assert seal_meta(b'{"saver":{"k":8}}', "dp0__0-16.tar", members) == (
        b'{"saver":{"k":8},"content":{"name":"dp0__0-16.tar","bytes":10240,"members":2,'
        b'"crc32":[%d,%d],"meta_crc32":%d,"index":[[0,8,5],[8,16,6]],"index_crc32":%d}}'
        % (
            zlib.crc32(b"first"),
            zlib.crc32(b"second"),
            zlib.crc32(b'{"saver":{"k":8}}'),
            zlib.crc32(b"[[0,8,5],[8,16,6]]"),
        )
    )


def test_members_of_other_names_have_no_index():
    members = [("0-8.pt.zst", b"first"), ("more", b"second")]
    assert "index" not in json.loads(seal_meta(b"{}", "dp0__0-16.tar", members))["content"]


@pytest.mark.parametrize("count", [0, 1, 7, 300])
@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 10240, 99999])
def test_the_size_is_that_of_the_file(count, size):
    members = [(f"{a}-{a + 1}.pt.zst", bytes(size)) for a in range(count)]
    sealed = seal_meta(b"{}", "dp0__0-300.tar", members)
    stream = io.BytesIO()
    write_shard_tar(stream, sealed, members)
    assert json.loads(sealed)["content"]["bytes"] == len(stream.getvalue())
    assert tar_size([len(sealed), *[size] * count]) == len(stream.getvalue())


def test_an_older_seal_is_replaced():
    members = [("0-8.pt.zst", b"x")]
    sealed = seal_meta(b'{"a":1}', "dp0__0-8.tar", members)
    assert seal_meta(sealed, "dp0__0-8.tar", members) == sealed
    assert json.loads(seal_meta(sealed, "dp0__0-9.tar", []))["content"]["members"] == 0


@pytest.mark.parametrize("bad", [b"", b"[]", b"x", b"[" * 100000])
def test_only_a_json_object_can_be_sealed(bad):
    with pytest.raises(CacheFormatError, match="not"):
        seal_meta(bad, "dp0__0-8.tar", [])


# ---- what it finds -------------------------------------------------------------------------


def test_a_cut_at_any_byte_is_found(shard):
    assert open_shard(shard, "dp0__0-8.tar").member_at(7) is not None
    bytes_named = 0
    for length in range(len(shard)):
        with pytest.raises(CacheFormatError, match=r"damaged|truncated|not JSON") as caught:
            open_shard(shard[:length], "dp0__0-8.tar")
        bytes_named += f"has {length} bytes, and was written with {len(shard)} bytes and 2" in str(
            caught.value
        )
    # From where the metadata is whole, the error names what was expected.
    assert bytes_named > len(shard) - 2048


@pytest.mark.parametrize("extra", [bytes(512), b"x", bytes(10240)])
def test_anything_appended_is_found(shard, extra):
    with pytest.raises(CacheFormatError, match=f"has {len(shard) + len(extra)} bytes"):
        open_shard(shard + extra, "dp0__0-8.tar")


def test_a_member_more_or_less_is_found_at_the_same_size(indexed):
    shard = without_index(indexed)
    members = read_members(shard)
    for changed in (members[:2], [*members, ("8-12.pt.zst", b"x")]):
        content = write_members(changed)
        assert len(content) == len(shard)
        expected = f"has {len(changed) - 1} members, and was written with 2"
        with pytest.raises(CacheFormatError, match=expected):
            open_shard(content, "dp0__0-8.tar")


def test_with_an_index_a_member_less_is_found_where_it_is_read(indexed):
    members = read_members(indexed)
    content = write_members(members[:2])
    assert len(content) == len(indexed)
    opened = open_shard(content, "dp0__0-8.tar")
    opened.decode(opened.member_at(3))
    with pytest.raises(CacheFormatError, match=r"member 4-8\.pt\.zst of .* no tar header at byte"):
        opened.decode(opened.member_at(4))
    # One that nobody knows of is not read.
    opened = open_shard(write_members([*members, ("8-12.pt.zst", b"x")]), "dp0__0-8.tar")
    assert opened.decode(opened.member_at(7)).values.shape[0] == SEQ
    assert opened.member_at(8) is None


def test_another_name_is_found(shard):
    for name in ("dp0__0-12.tar", "dp1__0-8.tar"):
        with pytest.raises(CacheFormatError, match=r"was written as dp0__0-8\.tar"):
            open_shard(shard, name)


def test_members_that_changed_places_are_found(tmp_path, shard):
    meta, (a, first), (b, second) = read_members(shard)
    (tmp_path / "dp0__0-8.tar").write_bytes(write_members([meta, (a, second), (b, first)]))
    first_item, second_item, _ = read(tmp_path)
    for item, name in ((first_item, a), (second_item, b)):
        assert isinstance(item.error, CacheFormatError)
        assert not item.fatal
        assert f"member {name} of teacher shard" in str(item.error)
        assert re.search(r"its checksum is|the index of the shard says", str(item.error))


@pytest.mark.parametrize("offset", [0, 9, 200])
def test_a_changed_member_of_the_same_size_is_found(tmp_path, shard, offset):
    (tmp_path / "dp0__0-8.tar").write_bytes(flipped(shard, member=2, offset=offset))
    first, second, _ = read(tmp_path)
    assert not isinstance(first, IterationFailure)
    assert isinstance(second.error, CacheFormatError)
    assert "member 4-8.pt.zst of teacher shard" in str(second.error)
    assert re.search("its checksum is|the checksum of its frame", str(second.error))


@pytest.mark.parametrize("cache_format", [3], indirect=True)
def test_the_index_tells_the_headers_of_members_apart(indexed):
    """A checksum that covers a header and the header's own checksum is the same for all."""
    index = json.loads(read_members(indexed)[0][1])["content"]["index"]
    assert len({header_crc32 for *_, header_crc32 in index}) == len(index) == 2


def flipped(shard: bytes, *, member: int, offset: int) -> bytes:
    """Return *shard* with one bit changed in the content of a member."""
    with tarfile.open(fileobj=io.BytesIO(shard)) as tar:
        place = tar.getmembers()[member].offset_data + offset
    return shard[:place] + bytes([shard[place] ^ 1]) + shard[place + 1 :]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"mbs_save":1', b'"mbs_save":2', "metadata in .* is damaged: its checksum is"),
        (b'"step":1', b'"step":2', "metadata in .* is damaged: its checksum is"),
        (b'"content":', b'"c0ntent":', "does not say what the shard holds"),
        (b'"members":2', b'"members":3', "has content .*, expected name, bytes, members"),
        (b'"meta_crc32":', b'"meta_crc31":', "has content .*, expected name, bytes, members"),
        (b'"name":"dp0', b'"name":"dp1', r"was written as dp1__0-8\.tar"),
    ],
)
def test_changed_metadata_is_found(shard, old, new, message):
    (name, meta), *members = read_members(shard)
    assert old in meta
    with pytest.raises(CacheFormatError, match=message):
        open_shard(write_members([(name, meta.replace(old, new)), *members]), "dp0__0-8.tar")


def test_what_a_shard_leaves_when_it_is_cut_in_two_is_sealed_anew(tmp_path):
    write_shard(tmp_path, 0, 12, manifest=MANIFEST)
    write_shard(tmp_path, 4, 8, manifest=MANIFEST)
    names = sorted(path.name for path in tmp_path.glob("*.tar"))
    assert names == ["dp0__0-4.tar", "dp0__4-8.tar", "dp0__8-12.tar"]
    for name in names:
        open_shard((tmp_path / name).read_bytes(), name)
    assert [isinstance(item, IterationFailure) for item in read(tmp_path)] == [0, 0, 0, 1]


def test_a_payload_may_not_decompress_to_more_than_its_shape(tmp_path):
    write_shard(tmp_path, 0, 4, manifest=replace(MANIFEST, sequence_length=1 << 20))
    shard = open_shard((tmp_path / "dp0__0-4.tar").read_bytes(), "dp0__0-4.tar")
    member = shard.member_at(0)
    assert shard._max_bytes(member) > 1 << 25
    write_shard(tmp_path, 0, 4, manifest=MANIFEST)
    shard = open_shard((tmp_path / "dp0__0-4.tar").read_bytes(), "dp0__0-4.tar")
    assert shard._max_bytes(member) < 1 << 17
    assert shard.decode(member).values.shape[0] == SEQ


# ---- shards of other dumps -----------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 4, 8])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": 4}, "its k is"),
        ({"save_dtype": "bf16"}, "its save_dtype is"),
        ({"mbs": 2}, "its mbs_save is"),
        ({"dp": 2}, "its dp_size_save is"),
        ({"gbs": 2}, "its gbs_save is"),
    ],
)
def test_a_shard_of_another_dump_is_an_error_and_no_target(tmp_path, place, changes, message):
    for start in (0, 4, 8):
        other = changes | {"teacher": 2000} if start == place else {}
        write_shard(tmp_path, start, start + 4, manifest=MANIFEST, **other)
    *before, last = read(tmp_path)
    assert len(before) * 4 <= place
    assert last.fatal
    assert isinstance(last.error, MixedCacheError)
    assert message in str(last.error)
    assert "belongs to another dump than" in str(last.error)
    assert str(tmp_path) in str(last.error)


def test_settings_are_compared_without_a_manifest_as_well(tmp_path):
    write_shard(tmp_path, 0, 4)
    write_shard(tmp_path, 4, 8, k=4)
    (failure,) = read(tmp_path)
    assert isinstance(failure.error, MixedCacheError)


def test_batch_sizes_may_change_along_a_cache_without_a_manifest(tmp_path):
    write_shard(tmp_path, 0, 4, mbs=2)
    write_shard(tmp_path, 4, 8, dp=2)
    assert [isinstance(item, IterationFailure) for item in read(tmp_path)] == [0, 0, 1]


def test_the_format_may_change_along_a_cache(tmp_path, caplog):
    company = ShardCompany(RUN)
    for start, version in ((0, 2), (4, 3), (8, 2)):
        write_shard(tmp_path, start, start + 4, manifest=MANIFEST, format_version=version)
        name = f"dp0__{start}-{start + 4}.tar"
        shard = open_shard((tmp_path / name).read_bytes(), name)
        assert shard.format_version == version
        company.admit(shard)
    assert caplog.messages == []


def test_a_damaged_neighbour_does_not_matter_before_its_turn(tmp_path):
    write_shard(tmp_path, 0, 4, manifest=MANIFEST)
    (tmp_path / "dp0__4-8.tar").write_bytes(b"damaged")
    assert [isinstance(item, IterationFailure) for item in read(tmp_path)] == [0, 1, 1]


def test_harmless_differences_are_told_once_and_by_one_rank(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    for start, step in ((0, 1), (4, 2), (8, 2)):
        manifest = replace(MANIFEST, teacher={"checkpoint": "a", "step": step}, package_version="0")
        write_shard(tmp_path, start, start + 4, manifest=manifest)
    run = replace(RUN, manifest=replace(MANIFEST, package_version="1", teacher=None))
    assert len(read(tmp_path, run)) == 4
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert 'its package_version is "0", here it is "1"' in texts[0]
    assert '"step":2}, there it is {"checkpoint":"a","step":1}' in texts[1]
    caplog.clear()
    read(tmp_path, replace(run, reports=False))
    assert caplog.records == []


def test_an_identity_that_is_not_enforced_is_told(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    write_shard(tmp_path, 0, 4, manifest=MANIFEST)
    write_shard(tmp_path, 4, 8, manifest=MANIFEST, k=4)
    run = ExpectedRun(
        identifiers=IDENTIFIERS | {"seed": 9},
        manifest=replace(MANIFEST, sequence_length=64),
        enforced=False,
        reports=True,
    )
    assert len(read(tmp_path, run)) == 3
    assert "its seed is 1, here it is 9" in caplog.text
    assert "its sequence_length is 4, here it is 64" in caplog.text
    assert "its k is 4, there it is 2" in caplog.text
    (failure,) = read(tmp_path, replace(run, enforced=True))
    assert isinstance(failure.error, CacheIdentityError)


def test_metadata_with_a_manifest_comes_back():
    saver = ShardMeta.from_bytes(
        b'{"saver":{"format_version":2,"mbs_save":1,"dp_size_save":1,"gbs_save":1}}'
    ).saver
    meta = ShardMeta.for_run(IDENTIFIERS, saver, MANIFEST)
    text = seal_meta(meta.to_bytes(), "dp0__0-1.tar", [])
    assert ShardMeta.from_bytes(text).manifest == MANIFEST
