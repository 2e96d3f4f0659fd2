# SPDX-License-Identifier: Apache-2.0
"""The contract of the cache format: exact bytes, hostile input, and the resharding arithmetic."""

import dataclasses
import io
import itertools
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard

from megatron.training.datasets.data_samplers import MegatronPretrainingSampler
from megatron.training.distillation import payload as payload_module
from megatron.training.distillation import utils
from megatron.training.distillation.utils import (
    CacheFormatError,
    CacheIdentityError,
    LogprobsReshardPlan,
    ReshardSource,
    RowRun,
    SaverSettings,
    ShardMeta,
    ShardName,
    TarMember,
)

# One shard as NVIDIA's v2 writer left it: K = 8, fp16, micro batch 2, DP 2, global batch 8.
REFERENCE = (Path(__file__).parent / "data" / "v2_dp0__0-16.tar").read_bytes()
REFERENCE_META = (
    b'{"hash":"41a8bba50770f69f422d911f2cda14bc","identifiers":{"seed":1234,"train_samples":48,'
    b'"blend":{"kind":"mock","mock":true}},"saver":{"k":8,"p":null,"min_k":1,"save_dtype":"fp16",'
    b'"format_version":2,"mbs_save":2,"dp_size_save":2,"gbs_save":8}}'
)
IDENTIFIERS = {"seed": 1234, "train_samples": 48, "blend": {"kind": "mock", "mock": True}}
SAVER = SaverSettings(
    k=8, p=None, min_k=1, save_dtype="fp16", mbs_save=2, dp_size_save=2, gbs_save=8
)


def reference_members() -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(REFERENCE)) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}


def reference_payload() -> bytes:
    return reference_members()["0-8.pt.zst"]


def frame(payload: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(payload, buffer)
    return zstandard.ZstdCompressor().compress(buffer.getvalue())


def payload_dict(**changes: object) -> dict[str, object]:
    low, bit_17 = utils.v2_pack_indices(torch.arange(12).view(2, 2, 3))
    payload = {"values": torch.zeros(2, 2, 3), "indices_low": low, "bit_17": bit_17}
    payload |= {"format_version": 2}
    return payload | changes


# ---- names ---------------------------------------------------------------------------------


def test_names_are_those_of_the_format():
    assert str(ShardName(0, 0, 16)) == "dp0__0-16.tar"
    assert ShardName.parse("dp12__1048576-1048704.tar") == ShardName(12, 1048576, 1048704)
    assert utils.member_name(0, 8) == "0-8.pt.zst"
    assert utils.parse_member_name("16-24.pt.zst") == (16, 24)


@pytest.mark.parametrize(
    "name",
    [
        "dp0__0-16.tar.stale",
        "dp0__0-16.1.tar.stale",
        "dp0__0-16.tar.tmp",
        "cp0_dp0__1.tar",
        "dp0__16-16.tar",
        "dp0__16-0.tar",
        "dp00__0-16.tar",
        "dp0__0-016.tar",
        "dp-1__0-16.tar",
        "xdp0__0-16.tar",
        "dp0__0-16.tar\n",
        "dp\u0661__0-16.tar",
        "latest_checkpointed_iteration.txt",
    ],
)
def test_other_names_are_not_live_shards(name):
    assert ShardName.parse(name) is None


@pytest.mark.parametrize("name", ["_meta.json", "0.pt.zst", "8-8.pt.zst", "00-8.pt.zst", "0-8.pt"])
def test_other_names_are_not_payload_members(name):
    assert utils.parse_member_name(name) is None


# ---- metadata ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train_samples", "digest"),
    [
        (48, "41a8bba50770f69f422d911f2cda14bc"),
        (36, "419aec2513c2254a7eb9d4fcb605dd16"),
        (72, "9d627997e6d04d4c0f820fe8daab18a4"),
    ],
)
def test_identity_hash_is_that_of_the_reference_runs(train_samples, digest):
    identifiers = IDENTIFIERS | {"train_samples": train_samples}
    assert utils.identity_hash(identifiers) == digest
    # Neither the order of the keys nor further identifiers change it.
    shuffled = {"extra": 1} | {key: identifiers[key] for key in reversed(identifiers)}
    assert utils.identity_hash(shuffled) == digest


def test_metadata_bytes_are_those_of_the_reference_writer():
    assert reference_members()["_meta.json"] == REFERENCE_META
    assert ShardMeta.for_run(IDENTIFIERS, SAVER).to_bytes() == REFERENCE_META
    assert ShardMeta.from_bytes(REFERENCE_META).to_bytes() == REFERENCE_META


def test_metadata_keeps_floats_and_blends():
    saver = SaverSettings(
        k=12, p=0.9, min_k=2, save_dtype="bf16", mbs_save=1, dp_size_save=2, gbs_save=6
    )
    blend = {"kind": "blend", "blend": [[0.3, "wiki"], [0.7, "b\u00fccher"]]}
    data = ShardMeta.for_run(IDENTIFIERS | {"blend": blend}, saver).to_bytes()
    assert b'"blend":{"kind":"blend","blend":[[0.3,"wiki"],[0.7,"b\\u00fccher"]]}' in data
    assert b'"k":12,"p":0.9,"min_k":2,"save_dtype":"bf16"' in data


def test_metadata_of_version_3_differ_in_the_version_alone():
    saver = dataclasses.replace(SAVER, format_version=3, save_dtype="uint8")
    data = ShardMeta.for_run(IDENTIFIERS, saver).to_bytes()
    expected = REFERENCE_META.replace(b'"format_version":2', b'"format_version":3')
    assert data == expected.replace(b'"fp16"', b'"uint8"')
    assert ShardMeta.from_bytes(data).saver == saver


def test_metadata_may_carry_less_and_more():
    saver = {"format_version": 2, "mbs_save": 1, "dp_size_save": 2, "gbs_save": 4, "new": [1]}
    meta = ShardMeta.from_bytes(json.dumps({"saver": saver, "other": None}).encode())
    assert meta.hash is None
    assert meta.identifiers is None
    assert meta.saver == SaverSettings(mbs_save=1, dp_size_save=2, gbs_save=4)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100000, "not JSON"),
        (b"[]", "no 'saver' object"),
        (b'{"saver":3}', "no 'saver' object"),
        (b'{"saver":{"k":8}}', "format_version None, expected 2 or 3"),
        (b'{"saver":{"format_version":1}}', "format_version 1, expected 2 or 3"),
        (b'{"saver":{"format_version":4}}', "format_version 4, expected 2 or 3"),
        (b'{"saver":{"format_version":"3"}}', "format_version '3', expected 2 or 3"),
        (b'{"saver":{"format_version":[3]}}', "format_version .3., expected 2 or 3"),
        (REFERENCE_META.replace(b'"mbs_save":2', b'"mbs_save":0'), "mbs_save 0"),
        (REFERENCE_META.replace(b'"gbs_save":8', b'"gbs_save":true'), "gbs_save True"),
        (REFERENCE_META.replace(b'"gbs_save":8', b'"gbs_save":8.0'), "gbs_save 8.0"),
        (REFERENCE_META.replace(b'"gbs_save":8', b'"gbs_save":6'), "gbs_save 6, .* = 2 \\* 2"),
    ],
)
def test_bad_metadata_says_what_and_where(data, message):
    with pytest.raises(CacheFormatError, match=message) as caught:
        ShardMeta.from_bytes(data, "/cache/dp0__0-16.tar")
    assert "/cache/dp0__0-16.tar" in str(caught.value)


def test_same_identity_passes():
    meta = ShardMeta.from_bytes(REFERENCE_META)
    utils.check_identity(meta, IDENTIFIERS, "here")
    utils.check_identity(meta, IDENTIFIERS | {"unknown_to_the_shard": 1}, "here")


def test_identity_mismatch_names_each_identifier_with_both_values():
    blend = {"kind": "blend", "blend": ((1.0, "wiki"),)}
    expected = {"seed": 1235, "train_samples": 48, "blend": blend}
    with pytest.raises(CacheIdentityError) as caught:
        utils.check_identity(ShardMeta.from_bytes(REFERENCE_META), expected, "/c/dp0__0-16.tar")
    message = str(caught.value)
    assert "/c/dp0__0-16.tar" in message
    assert "its seed is 1234, here it is 1235" in message
    assert 'its blend is {"kind":"mock","mock":true}, here it is {"kind":"blend"' in message
    assert "train_samples" not in message
    assert "--logits-load-ignore-hash" in message


def test_further_identifiers_are_compared_where_both_sides_have_them():
    meta = ShardMeta.for_run(IDENTIFIERS | {"tokenizer": "a"}, SAVER)
    with pytest.raises(CacheIdentityError, match='its tokenizer is "a", here it is "b"'):
        utils.check_identity(meta, IDENTIFIERS | {"tokenizer": "b"}, "here")


def test_identity_without_or_with_another_hash():
    bare = ShardMeta(hash=None, identifiers=None, saver=SAVER)
    with pytest.raises(CacheIdentityError, match="carries no identity hash"):
        utils.check_identity(bare, IDENTIFIERS, "here")
    forged = ShardMeta(hash="f00", identifiers=IDENTIFIERS, saver=SAVER)
    with pytest.raises(CacheIdentityError, match="hash is 'f00', expected 41a8bba50770f69f"):
        utils.check_identity(forged, IDENTIFIERS, "here")


# ---- archive -------------------------------------------------------------------------------


class CountingStream(io.BytesIO):
    """Counts the bytes handed out, and never hands out more than 700 at once."""

    count = 0

    def read(self, size=-1):
        data = super().read(min(size, 700) if size >= 0 else 700)
        self.count += len(data)
        return data


def test_archive_is_byte_identical_to_the_reference_writer():
    members = reference_members()
    meta = members.pop("_meta.json")
    stream = io.BytesIO()
    utils.write_shard_tar(stream, meta, members.items())
    assert stream.getvalue() == REFERENCE


def test_index_is_read_without_the_content():
    stream = CountingStream(REFERENCE)
    index = utils.read_tar_index(stream)
    assert stream.count == 4 * 512
    assert index == [
        TarMember("_meta.json", 512, 243),
        TarMember("0-8.pt.zst", 1536, 4621),
        TarMember("8-16.pt.zst", 7168, 4653),
    ]
    contents = {member.name: utils.read_member(stream, member) for member in index}
    assert contents == reference_members()
    assert utils.read_shard_meta(stream, index, "here").saver == SAVER


def test_truncation_at_any_place_is_found():
    end_of_content = 7168 + 10 * 512
    for length in [*range(0, end_of_content, 61), *range(0, end_of_content, 512), end_of_content]:
        with pytest.raises(CacheFormatError, match=r"truncated|no tar header"):
            utils.read_tar_index(io.BytesIO(REFERENCE[:length]))
    # One block of the end marker is enough to know that nothing is missing.
    assert len(utils.read_tar_index(io.BytesIO(REFERENCE[: end_of_content + 512]))) == 3


def test_foreign_archives_are_refused():
    with pytest.raises(CacheFormatError, match="no tar header at byte 0"):
        utils.read_tar_index(io.BytesIO(b"PK\x03\x04" + bytes(2000)))
    empty = io.BytesIO(bytes(10240))
    with pytest.raises(CacheFormatError, match="found an empty archive"):
        utils.read_shard_meta(empty, utils.read_tar_index(empty), "here")
    with pytest.raises(CacheFormatError, match=r"begin with _meta.json, found 0-8.pt.zst"):
        utils.read_shard_meta(empty, [TarMember("0-8.pt.zst", 512, 9)], "here")
    with pytest.raises(CacheFormatError, match="expected at most"):
        utils.read_shard_meta(empty, [TarMember("_meta.json", 512, 1 << 30)], "here")


def test_members_that_are_no_files_are_passed_over():
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        info = tarfile.TarInfo("file")
        info.size, info.mtime = 3, 0.5  # a fractional time goes to an extended header
        tar.addfile(info, io.BytesIO(b"abc"))
    index = utils.read_tar_index(buffer)
    assert [member.name for member in index] == ["file"]
    assert utils.read_member(buffer, index[0]) == b"abc"


# ---- index packing and the codec -----------------------------------------------------------


def test_packing_by_hand():
    indices = torch.tensor([[[0, 65535, 65536], [131071, -1, 1]]])
    low, bit_17 = utils.v2_pack_indices(indices)
    assert low.dtype == torch.uint16
    assert low.tolist() == [[[0, 65535, 0], [65535, 65535, 1]]]
    assert bit_17.dtype == torch.uint8
    assert bit_17.tolist() == [0b00111000]
    unpacked = utils.v2_unpack_indices(low, bit_17)
    assert unpacked.dtype == torch.int64
    assert unpacked.tolist() == [[[0, 65535, 65536], [131071, 131071, 1]]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 8), (5, 3, 7), (4, 1, 16)])
def test_packing_round_trip(shape, dtype):
    indices = torch.randint(0, utils.MAX_VOCAB_SIZE, shape, dtype=dtype)
    assert torch.equal(utils.v2_unpack_indices(*utils.v2_pack_indices(indices)), indices.long())


@pytest.mark.parametrize("bad", [-2, 131072])
def test_ids_beyond_17_bits_are_refused(bad):
    with pytest.raises(ValueError, match=f"{bad}.* 17 bits"):
        utils.v2_pack_indices(torch.tensor([[[5, bad]]]))


def test_payload_is_that_of_the_reference_writer():
    raw = zstandard.ZstdDecompressor().decompress(reference_payload())
    theirs = torch.load(io.BytesIO(raw), weights_only=True)
    rows = utils.decode_teacher_rows(reference_payload())
    assert rows.tail_logprob is None
    ours_raw = zstandard.ZstdDecompressor().decompress(
        utils.encode_logprobs_payload(rows.values, rows.indices)
    )
    ours = torch.load(io.BytesIO(ours_raw), weights_only=True)
    assert list(ours) == list(theirs) == ["values", "indices_low", "bit_17", "format_version"]
    assert ours["format_version"] == theirs["format_version"] == 2
    for key in ("values", "indices_low", "bit_17"):
        assert ours[key].dtype == theirs[key].dtype
        assert ours[key].shape == theirs[key].shape
        assert torch.equal(ours[key].view(torch.uint8), theirs[key].view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("with_tail", [False, True])
@pytest.mark.parametrize("k", [1, 5, 8, 24])
def test_payload_round_trip_and_selection(dtype, with_tail, k):
    values = torch.randn(6, 4, k).to(dtype)
    indices = torch.randint(0, utils.MAX_VOCAB_SIZE, (6, 4, k))
    tail = torch.randn(6, 4) if with_tail else None
    data = utils.encode_logprobs_payload(values, indices, tail)
    packed = utils.decode_packed_rows(data)
    selections = [None, slice(1, 3), [3, 0], [2]]
    for rows, positions in itertools.product(selections, [None, slice(0, 4), slice(3, 6)]):
        pick = (positions or slice(None), slice(None) if rows is None else rows)
        found = packed.unpack(rows, positions)
        assert found.values.dtype == dtype
        assert torch.equal(found.values, values[pick])
        assert found.indices.dtype == torch.int32
        assert torch.equal(found.indices, indices[pick].int())
        assert (found.tail_logprob is None) == (tail is None)
        if tail is not None:
            assert torch.equal(found.tail_logprob, tail[pick])
    old_values, old_indices = utils.decode_logprobs_payload(data)
    assert torch.equal(old_values, values)
    assert torch.equal(old_indices, indices)
    assert torch.equal(utils.decode_teacher_rows(data, [3, 0]).values, values[:, [3, 0]])


def test_payload_of_a_view_holds_only_the_view():
    values = torch.randn(64, 64, 64)
    indices = torch.randint(0, 9, (64, 64, 64))
    small = utils.encode_logprobs_payload(values[:2, :1, :4], indices[:2, :1, :4])
    assert len(small) < 2000


@pytest.mark.parametrize("length", [1, 64, 65])
def test_fingerprints_come_back_with_their_rows(length):
    values, indices = torch.randn(length, 3, 2), torch.zeros(length, 3, 2, dtype=torch.int32)
    fingerprints = torch.tensor([[-(1 << 63), 5, (1 << 63) - 1], [7, -8, 9]])[: -(-length // 64)]
    data = utils.encode_logprobs_payload(values, indices, label_fingerprints=fingerprints)
    assert torch.equal(utils.decode_packed_rows(data).label_fingerprints, fingerprints)
    for rows in (None, slice(1, 3), [2, 0]):
        found = utils.decode_teacher_rows(data, rows).label_fingerprints
        assert torch.equal(found, fingerprints if rows is None else fingerprints[:, rows])
    part = utils.decode_packed_rows(data).unpack(slice(1, 2), slice(0, 1))
    assert torch.equal(part.label_fingerprints, fingerprints[:, 1:2])
    # Other programs take what they know and leave the rest.
    assert torch.equal(utils.decode_logprobs_payload(data)[0], values)
    content = torch.load(io.BytesIO(zstandard.decompress(data)), weights_only=True)
    assert list(content)[-2:] == ["label_fingerprints", "fingerprint_chunk"]
    assert content["fingerprint_chunk"] == 64


def test_payload_without_fingerprints_has_no_trace_of_them():
    data = utils.encode_logprobs_payload(torch.randn(2, 2, 3), torch.zeros(2, 2, 3).int())
    assert utils.decode_packed_rows(data).label_fingerprints is None
    content = torch.load(io.BytesIO(zstandard.decompress(data)), weights_only=True)
    assert not any("fingerprint" in key for key in content)


def test_masked_entries_survive_by_value():
    values = torch.tensor([[[-0.5, utils.LOGPROB_SENTINEL]]], dtype=torch.float16)
    data = utils.encode_logprobs_payload(values, torch.tensor([[[7, utils.INDEX_SENTINEL]]]))
    rows = utils.decode_teacher_rows(data)
    assert rows.values.tolist() == [[[-0.5, -1000.0]]]
    assert rows.indices.tolist() == [[[7, 131071]]]


# ---- hostile payloads ----------------------------------------------------------------------


class Dangerous:
    def __reduce__(self):
        return os.mkdir, (str(Path.cwd() / "executed"),)


def test_nothing_in_a_payload_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CacheFormatError, match=r"torch.load refuses"):
        utils.decode_packed_rows(frame(payload_dict(values=Dangerous())))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ([1, 2], "format_version None, expected 2"),
        ({"values": torch.zeros(1, 1, 1)}, "format_version None, expected 2"),
        (payload_dict(format_version=1), "format_version 1, expected 2"),
        (payload_dict(values=[torch.zeros(2, 2, 3)]), "'values' is a list, expected a tensor"),
        (payload_dict(values=torch.zeros(2, 6)), r"'values' .* shape \(2, 6\), expected shape \(S"),
        (payload_dict(values=torch.zeros(2, 2, 3).double()), "'values' is torch.float64"),
        (payload_dict(values=torch.zeros(2, 0, 3)), "'values' .* is empty"),
        (payload_dict(values=torch.zeros(2, 2, 1).expand(2, 2, 3)), "'values' .* contiguous"),
        (payload_dict(values=torch.zeros(2, 2, 4)), r"'indices_low' .* expected shape \(2, 2, 4\)"),
        (payload_dict(indices_low=torch.zeros(2, 2, 3)), "'indices_low' is torch.float32"),
        (payload_dict(bit_17=torch.zeros(2, 2, 3, dtype=torch.bool)), "'bit_17' is torch.bool"),
        (payload_dict(bit_17=torch.zeros(3, dtype=torch.uint8)), r"'bit_17' .* shape \(2,\)"),
        (payload_dict(bit_17=None), "'bit_17' is a NoneType"),
        (payload_dict(tail_logprob=torch.zeros(2, 3)), r"'tail_logprob' .* shape \(2, 2\)"),
        (payload_dict(tail_logprob=torch.zeros(2, 2).half()), "'tail_logprob' is torch.float16"),
        *(
            (
                payload_dict(label_fingerprints=torch.zeros(1, 2).long(), fingerprint_chunk=chunk),
                f"'fingerprint_chunk' is {chunk}, expected 64",
            )
            for chunk in (None, 32, 64.5)
        ),
        *(
            (payload_dict(label_fingerprints=found, fingerprint_chunk=64), message)
            for found, message in (
                (torch.zeros(2, 2).long(), r"'label_fingerprints' .* expected shape \(1, 2\)"),
                (torch.zeros(1, 2), "'label_fingerprints' is torch.float32"),
                ([1, 2], "'label_fingerprints' is a list"),
                (torch.zeros(1, 1).long().expand(1, 2), "'label_fingerprints' .* contiguous"),
            )
        ),
        (payload_dict(values=torch.zeros(2, 2, 3).to_sparse()), "'values' .* contiguous"),
        (payload_dict(values=torch.zeros(2, 2, 3, device="meta")), "'values' .* contiguous"),
    ],
)
def test_payloads_of_another_shape_are_refused(payload, message):
    with pytest.raises(CacheFormatError, match=message):
        utils.decode_packed_rows(frame(payload))


def test_decompression_is_bounded_by_what_the_frame_can_hold():
    honest = zstandard.ZstdCompressor().compress(bytes(1 << 22))
    field = honest.index((1 << 22).to_bytes(4, "little"))

    def declaring(size: int) -> bytes:
        return honest[:field] + size.to_bytes(4, "little") + honest[field + 4 :]

    for size, message in (
        (1 << 22, "not an archive"),
        (1 << 31, "impossible 2147483648"),
        (1 << 20, "not one zstd frame"),
    ):
        with pytest.raises(CacheFormatError, match=message):
            utils.decode_packed_rows(declaring(size))


def test_frames_must_be_whole_alone_and_sized():
    data = frame(payload_dict())
    for bad in (b"", data[:3], data[:-1], data + b"x", data + data, b"garbage" * 9):
        with pytest.raises(CacheFormatError, match="not one zstd frame"):
            utils.decode_packed_rows(bad)
    compressor = zstandard.ZstdCompressor(write_content_size=False)
    with pytest.raises(CacheFormatError, match="does not declare its content size"):
        utils.decode_packed_rows(compressor.compress(b"x"))


def test_decompression_is_bounded_by_what_the_caller_expects():
    data = frame(payload_dict())
    size = zstandard.frame_content_size(data)
    assert utils.decode_packed_rows(data, max_bytes=size).values.shape == (2, 2, 3)
    with pytest.raises(CacheFormatError, match=f"declares {size} bytes, expected at most 99"):
        utils.decode_packed_rows(data, max_bytes=99)


def test_the_checksum_of_a_frame_is_verified_where_there_is_one():
    content = bytes(range(256)) * 8
    values = torch.zeros(2, 2, 3)
    ours = utils.encode_logprobs_payload(values, torch.arange(12).view(2, 2, 3))
    assert zstandard.get_frame_parameters(ours).has_checksum
    for has_checksum in (True, False):
        compressor = zstandard.ZstdCompressor(write_checksum=has_checksum)
        stored = compressor.compress(content)
        assert payload_module._decompress(stored, 1 << 20) == content
        assert zstandard.get_frame_parameters(stored).has_checksum == has_checksum
    damaged = ours[:-1] + bytes([ours[-1] ^ 1])  # in the checksum itself
    with pytest.raises(CacheFormatError, match="not one zstd frame"):
        utils.decode_packed_rows(damaged)
    assert utils.decode_packed_rows(frame(payload_dict())).values.shape == (2, 2, 3)
    assert not zstandard.get_frame_parameters(frame(payload_dict())).has_checksum


def test_a_flipped_bit_never_gives_other_rows():
    values, indices = torch.randn(3, 2, 5).half(), torch.randint(0, 131072, (3, 2, 5))
    data = utils.encode_logprobs_payload(values, indices)
    refused = 0
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        try:
            rows = utils.decode_teacher_rows(bytes(flipped))
        except CacheFormatError:
            refused += 1
        else:
            assert torch.equal(rows.values, values)
            assert torch.equal(rows.indices, indices.int())
    assert refused > 0.99 * len(data)


# ---- reshard plan --------------------------------------------------------------------------

SIZES = [(1, 1, 4), (2, 2, 8), (1, 3, 6), (1, 6, 24), (3, 4, 24), (2, 3, 30), (1, 5, 30)]


def sampled(dp_rank: int, *, mbs: int, dp: int, start: int, samples: int) -> list[list[int]]:
    """Return the microbatches that Megatron's own sampler gives to one DP rank."""
    sampler = MegatronPretrainingSampler(start + samples, start, mbs, dp_rank, dp)
    return list(sampler)


@pytest.mark.parametrize("save", SIZES)
@pytest.mark.parametrize("load", [*SIZES, (4, 1, 16), (2, 4, 16), (1, 1, 1)])
def test_plan_agrees_with_megatrons_sampler(save, load):
    (mbs_save, dp_save, gbs_save), (mbs_load, dp_load, gbs_load) = save, load
    plan = LogprobsReshardPlan(mbs_save, dp_save, gbs_save, mbs_load, dp_load, gbs_load)
    total = int(np.lcm(gbs_save, gbs_load))
    rows = {
        (start // gbs_save, d): list(
            itertools.chain(*sampled(d, mbs=mbs_save, dp=dp_save, start=start, samples=gbs_save))
        )
        for start in range(0, total, gbs_save)
        for d in range(dp_save)
    }
    assert plan.samples_per_save_shard == len(rows[0, 0])
    assert plan.num_mb_save * mbs_save == len(rows[0, 0])
    for d_load in range(dp_load):
        used = set()
        for i_load in range(total // gbs_load):
            start = i_load * gbs_load
            batches = sampled(d_load, mbs=mbs_load, dp=dp_load, start=start, samples=gbs_load)
            assert len(batches) == plan.num_mb_load
            for m_load, expected in enumerate(batches):
                sources = list(plan.sources_for_microbatch(i_load, m_load, d_load))
                used.update(source.d_save for source in sources)
                found = [
                    rows[source.iter_save, source.d_save][row]
                    for source in sources
                    for row in range(source.row_start, source.row_end)
                ]
                assert found == expected
        assert plan.needed_d_saves(d_load) == sorted(used)


def test_plan_by_hand():
    plan = LogprobsReshardPlan(
        mbs_save=1, dp_save=6, gbs_save=24, mbs_load=1, dp_load=4, gbs_load=8
    )
    assert plan.needed_d_saves(0) == [0, 2, 4]
    source = next(plan.sources_for_microbatch(1, 0, 3))
    assert isinstance(source, ReshardSource)
    assert source == (0, 5, 1, 2)  # sample 11 is the second row of DP rank 5


def test_row_runs_by_hand():
    # mbs 2, DP 2: samples 8 9 | 10 11 | 12 13 | 14 15 are rows 0-1 of 0, of 1, rows 2-3 of 0, of 1.
    runs = list(utils.row_runs(8, 9, 14, mbs_save=2, dp_save=2))
    assert runs == [RowRun(0, 1, 2), RowRun(1, 0, 2), RowRun(0, 2, 4)]
    assert list(utils.row_runs(8, 9, 14, mbs_save=2, dp_save=1)) == [RowRun(0, 1, 6)]
    assert list(utils.row_runs(8, 9, 9, mbs_save=2, dp_save=2)) == []


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((1, 4, 24, 1, 5, 24), r"gbs_load \(24\) .*\(1 \* 5 = 5\)"),
        ((3, 4, 20, 1, 1, 1), r"gbs_save \(20\) .*\(3 \* 4 = 12\)"),
        ((0, 1, 1, 1, 1, 1), "mbs_save"),
    ],
)
def test_plan_refuses_sizes_that_megatron_refuses(sizes, message):
    with pytest.raises(ValueError, match=message):
        LogprobsReshardPlan(*sizes)
