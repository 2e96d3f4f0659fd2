# SPDX-License-Identifier: Apache-2.0
"""Format v3: the exact bytes of a header, and what is noticed of damage, where."""

import dataclasses
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import torch

from megatron.training.distillation.entropy_coder import ColumnDecoder, coder_header
from megatron.training.distillation.errors import CacheFormatError
from megatron.training.distillation.frame_layout import MAGIC, FrameHeader, entry_groups
from megatron.training.distillation.payload_v3 import decode_framed_rows, read_header
from tests.unit_tests.training.distillation.payload_v3_cases import check_rows, make_member

MEMBER = make_member(300, 2, 3, vocab_size=70000, is_masked=True)
DATA = MEMBER.encode(sort_ties=False)
HEADER = read_header(DATA)
HEADER_BYTES = int(HEADER.offsets()[0])


def header_of(**changes) -> FrameHeader:
    """Return a header in which each part is easy to see."""
    parts = {
        "positions": 3,
        "rows": 2,
        "k": 2,
        "id_bits": 18,
        "value_type": 1,
        "frame_positions": 2,
        "segment_frames": 4,
        "has_tail": True,
        "is_ragged": False,
        "fingerprints": np.array([[1], [-2]]),
        "coder": b"\x04\x01",
        "ranking": (b"T", b"PP"),
        "ranked_ids": 7,
        "tables": [[b"i", b"v0", b"", b"t"]],
        "frame_bytes": np.array([5, 6, 7, 8], np.uint32),
        "frame_checksums": np.array([0xA1, 0xB2, 0xC3, 0xD4], np.uint32),
    }
    return FrameHeader(**parts | changes)


def test_header_by_hand() -> None:
    content = (
        MAGIC
        + struct.pack("<6I", 40 + 6 * 4 + 2 + 3 + 4 + 4 * 8 + 2 * 8 + 4, 3, 2, 2, 4, 7)
        + struct.pack("<HBBBBH", 2, 18, 1, 0b011, 2, 0)
        + struct.pack("<6I", 1, 2, 1, 2, 0, 1)
        + (b"\x04\x01" + b"T" + b"PP" + b"i" + b"v0" + b"t")
        + struct.pack("<8I", 5, 0xA1, 6, 0xB2, 7, 0xC3, 8, 0xD4)
        + struct.pack("<2q", 1, -2)
    )
    content += struct.pack("<I", zlib.crc32(content + MAGIC))
    header = header_of()
    assert header.to_bytes() == content
    assert header.nbytes == len(content) == 125
    assert header.offsets().tolist() == [125, 130, 136, 143, 151]
    assert [header.frame_length(frame) for frame in range(4)] == [2, 1, 2, 1]
    read = FrameHeader.from_bytes(content)
    for field in dataclasses.fields(FrameHeader):
        found, expected = getattr(read, field.name), getattr(header, field.name)
        if isinstance(expected, np.ndarray):
            assert np.array_equal(found, expected)
        elif field.name == "tables":
            assert list(map(list, found)) == expected
        else:
            assert found == expected


@pytest.mark.parametrize(
    ("k", "groups"),
    [
        (1, [(0, 1)]),
        (2, [(0, 1), (1, 2)]),
        (5, [(0, 1), (1, 2), (2, 4), (4, 5)]),
        (8, [(0, 1), (1, 2), (2, 4), (4, 8)]),
    ],
)
def test_groups_of_entries(k: int, groups: list[tuple[int, int]]) -> None:
    assert entry_groups(k) == groups


def test_size_of_a_tiny_payload() -> None:
    """One token of one entry: what a column of one number costs is in its table, its page empty."""
    data = make_member(1, 1, 1, vocab_size=2, has_extras=False).encode()
    # A table with one interval is 27 bits, the number and 6 or 5 bits: 9 bytes of an id, 6 of fp16.
    # 40 fixed, lengths of 2 + 2 columns, the coder's 2 bytes, tables, an index entry, the checksum.
    assert len(data) == 40 + 4 * 4 + 2 + 9 + 6 + 8 + 4


# ---- only what is asked for is read --------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "positions", "frames"),
    [
        ([0], slice(0, 150), [0]),
        ([1], slice(0, 300), [2, 3]),
        ([1], slice(160, 161), [3]),
        ([0, 1], slice(149, 150), [0, 2]),
        ([0, 1], None, [0, 1, 2, 3]),
    ],
)
def test_only_frames_that_are_asked_for_are_read(rows, positions, frames) -> None:
    offsets = HEADER.offsets()
    wanted = np.zeros(len(DATA), bool)
    for frame in frames:
        wanted[offsets[frame] : offsets[frame + 1]] = True
    content = np.frombuffer(DATA, np.uint8)
    others_damaged = np.where(wanted, content, ~content)
    found = decode_framed_rows(HEADER, others_damaged.tobytes(), rows, positions)
    expected = MEMBER.select(rows, positions or slice(None))
    check_rows(found, expected)
    begin, end = int(offsets[frames[0]]), int(offsets[frames[-1] + 1])
    parts = {int(offsets[f]): DATA[offsets[f] : offsets[f + 1]] for f in reversed(frames)}
    for content in ({begin: DATA[begin:end]}, parts):
        check_rows(decode_framed_rows(HEADER, content, rows, positions), expected)
    for place in np.flatnonzero(wanted):
        damaged = bytearray(DATA)
        damaged[place] ^= 1 << (place % 8)
        with pytest.raises(CacheFormatError, match="the checksum of its frame"):
            decode_framed_rows(HEADER, bytes(damaged), rows, positions)


def test_every_byte_of_a_header_is_checked() -> None:
    for place in range(HEADER_BYTES):
        damaged = bytearray(DATA)
        damaged[place] ^= 1 << (place % 8)
        with pytest.raises(CacheFormatError):
            read_header(bytes(damaged))


def test_truncated_anywhere() -> None:
    for size in range(len(DATA)):
        with pytest.raises(CacheFormatError):
            decode_framed_rows(read_header(DATA[:size]), DATA[:size], [0, 1])


def test_a_part_from_elsewhere() -> None:
    with pytest.raises(CacheFormatError, match="the checksum of its frame 0"):
        decode_framed_rows(HEADER, {1: DATA}, [0])
    with pytest.raises(CacheFormatError, match="the checksum of its frame 0"):
        decode_framed_rows(HEADER, {HEADER_BYTES + 7: DATA[HEADER_BYTES:]}, [0])


# ---- what a header may say -----------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"positions": 0},
        {"rows": 0},
        {"k": 0},
        {"id_bits": 0},
        {"id_bits": 32},
        {"value_type": 4},
        {"frame_positions": 0},
        {"frame_positions": 4},
        {"segment_frames": 0},
        {"ranked_ids": (1 << 18) + 1},
        {"id_bits": 23},
        {"positions": 1 << 20, "frame_positions": (1 << 19) + 1},
    ],
)
def test_the_impossible(changes: dict[str, int]) -> None:
    with pytest.raises(CacheFormatError, match="its header says the impossible"):
        FrameHeader.from_bytes(_resealed(header_of(), **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": 1 << 30}, "needs .* for 1073741824 frames"),
        ({"rows": (1 << 32) - 1}, "needs .* for 8589934590 frames"),
        ({"positions": 65}, "needs "),
        ({"segment_frames": 1}, "needs "),
        ({"k": 1}, "its parts do not make that"),
        ({"segment_frames": 3}, "needs "),
    ],
)
def test_sizes_that_the_header_has_no_room_for(changes: dict[str, int], message: str) -> None:
    with pytest.raises(CacheFormatError, match=message):
        FrameHeader.from_bytes(_resealed(header_of(), **changes))


@pytest.mark.parametrize(("flags", "zero"), [(8, 0), (128, 0), (3, 1)])
def test_what_is_reserved_is_refused(flags: int, zero: int) -> None:
    content = bytearray(header_of().to_bytes())
    content[36], content[38] = flags, zero
    with pytest.raises(CacheFormatError, match="its header says the impossible"):
        FrameHeader.from_bytes(_sealed(content))


def test_headers_of_one_size_have_checksums_of_their_own() -> None:
    """Also those that cover the header's own checksum, as that of a member in a shard does."""
    headers = [header_of(ranked_ids=number).to_bytes() for number in range(5, 9)]
    assert len(set(map(len, headers))) == 1
    assert len({header[-4:] for header in headers}) == 4
    assert len({zlib.crc32(header + b"frames") for header in headers}) == 4


@pytest.mark.parametrize("data", [b"", MAGIC, b"\x28\xb5\x2f\xfd" + bytes(60), b"PK" + bytes(60)])
def test_no_payload_of_this_format(data: bytes) -> None:
    with pytest.raises(CacheFormatError, match="it is no payload of format v3"):
        read_header(data)


def test_a_header_that_is_too_small_for_itself() -> None:
    content = bytearray(header_of().to_bytes())
    content[8:12] = (43).to_bytes(4, "little")
    with pytest.raises(CacheFormatError, match="43 bytes, which is too few"):
        read_header(bytes(content))


def _resealed(header: FrameHeader, **changes: int) -> bytes:
    """Return the header with other numbers in its fixed part, and the same size."""
    names = ["positions", "rows", "frame_positions", "segment_frames", "ranked_ids"]
    content = bytearray(header.to_bytes())
    for name, number in changes.items():
        if name in names:
            struct.pack_into("<I", content, 12 + 4 * names.index(name), number)
        else:
            place, kind = {"k": (32, "<H"), "id_bits": (34, "B"), "value_type": (35, "B")}[name]
            struct.pack_into(kind, content, place, number)
    return _sealed(content)


def _sealed(content: bytearray) -> bytes:
    return bytes(content[:-4]) + struct.pack("<I", zlib.crc32(content[:-4] + MAGIC))


# ---- memory --------------------------------------------------------------------------------


@pytest.mark.parametrize("has_extras", [False, True])
def test_rows_may_take_no_more_than_allowed(has_extras: bool) -> None:
    member = make_member(300, 2, 3, vocab_size=1 << 18, has_extras=has_extras)
    data = member.encode()
    header = read_header(data)
    found = decode_framed_rows(header, data, [1, 0, 1])
    proofs = 0 if found.label_fingerprints is None else found.label_fingerprints.nbytes
    # Values, low halves, a byte for each of 2 planes, tails.
    taken = 300 * 3 * (3 * 2 + 3 * 2 + 2 + 4 * has_extras)
    assert found.nbytes - proofs == taken
    decode_framed_rows(header, data, [1, 0, 1], max_bytes=taken)
    with pytest.raises(CacheFormatError, match=f"take {taken} bytes, expected at most {taken - 1}"):
        decode_framed_rows(header, data, [1, 0, 1], max_bytes=taken - 1)


def test_a_small_payload_of_endless_rows_takes_no_memory() -> None:
    """Where all numbers are equal pages are empty, and only limits bound what they stand for."""
    values = torch.full((256, 1, 4), -1.0).half()
    member = dataclasses.replace(
        make_member(256, 1, 4, has_extras=False), values=values, indices=values.long() + 3
    )
    data = member.encode()
    header = read_header(data)
    assert header.frame_bytes.tolist() == [0]
    largest = dataclasses.replace(header, positions=1 << 18, frame_positions=1 << 18)
    endless = dataclasses.replace(header, positions=1 << 28, frame_positions=1 << 28)
    tracemalloc.start()
    try:
        with pytest.raises(CacheFormatError, match="says the impossible"):
            FrameHeader.from_bytes(endless.to_bytes())
        with pytest.raises(CacheFormatError, match="its rows take"):
            decode_framed_rows(largest, b"", [0], max_bytes=1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        # One position of the largest frame that there may be.
        found = decode_framed_rows(largest, b"", [0], slice(7, 8), max_bytes=1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()
    assert found.values.tolist() == [[[-1.0] * 4]]


@pytest.mark.parametrize("first", [0x01, 0x10, 0x20, 0x80])
def test_tables_of_other_modes_are_refused(first: int) -> None:
    """Pcodec's windows of earlier numbers would take up to 128 MiB for each table."""
    table = bytes([first, *HEADER.tables[0][0][1:]])
    with pytest.raises(CacheFormatError, match="pcodec's classic mode without differences"):
        ColumnDecoder(coder_header(), table, 4)


@pytest.mark.parametrize("coder", [b"", b"\x04", b"\xff\xff"])
def test_a_coder_that_is_not_known(coder: bytes) -> None:
    with pytest.raises(CacheFormatError, match="its coder tables cannot be read"):
        decode_framed_rows(dataclasses.replace(HEADER, coder=coder), DATA, [0])
