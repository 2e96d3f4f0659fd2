# SPDX-License-Identifier: Apache-2.0
"""Format v3: what is refused although all checksums are right, each with its reason."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from megatron.training.distillation.errors import CacheFormatError
from megatron.training.distillation.frame_codec import Frames, encode_frames
from megatron.training.distillation.frame_layout import FrameHeader
from megatron.training.distillation.id_ranks import IdLookup, IdRanks
from megatron.training.distillation.packed_rows import PackedRows
from megatron.training.distillation.payload_v3 import decode_framed_rows, read_header
from tests.unit_tests.training.distillation.payload_v3_cases import (
    frames_of,
    make_member,
    with_frames,
)

DATA = make_member(300, 2, 5, vocab_size=70000, is_masked=True).encode()
HEADER = read_header(DATA)
FRAMES = frames_of(HEADER, DATA)
TOO_LARGE = np.arange(HEADER.ranked_ids, dtype=np.uint32) + (1 << 17)


def read(header: FrameHeader, frames: Sequence[bytes] = FRAMES) -> PackedRows:
    """Write and read a payload with right checksums."""
    _, data = with_frames(header, frames)
    return decode_framed_rows(read_header(data), data, [0, 1])


def test_the_undamaged_payload() -> None:
    assert with_frames(HEADER, FRAMES)[1] == DATA
    assert read(HEADER).values.shape == (300, 2, 5)


def test_bytes_behind_the_pages_of_a_frame() -> None:
    size = len(FRAMES[1])
    with pytest.raises(
        CacheFormatError, match=f"a frame has {size + 1} bytes, and its pages end at {size}"
    ):
        read(HEADER, [FRAMES[0], FRAMES[1] + b"\0", *FRAMES[2:]])


def test_frames_that_are_cut_short() -> None:
    for size in range(len(FRAMES[1])):
        with pytest.raises(CacheFormatError):
            read(HEADER, [FRAMES[0], FRAMES[1][:size], *FRAMES[2:]])


def test_more_entries_than_there_may_be() -> None:
    shape = (5, 4, 150)
    frames = Frames(
        bits=np.ones(shape, np.uint16),
        ids=np.ones(shape, np.uint32),
        counts=np.full(shape[1:], 6, np.uint16),
        tails=np.zeros(shape[1:], np.uint32),
    )
    tables, contents = encode_frames(frames, [150] * 4, is_ragged=True)
    with pytest.raises(CacheFormatError, match="a token has 6 entries, at most 5"):
        read(replace(HEADER, tables=[tables]), contents)


def test_ids_of_more_bits_than_there_are() -> None:
    limit = HEADER.ranked_ids + (1 << 16)
    with pytest.raises(CacheFormatError, match=f"an id of rank .*, expected less than {limit}"):
        read(replace(HEADER, id_bits=16))


@pytest.mark.parametrize(
    ("frequent", "id_bits", "ranks", "ids"),
    [
        ([2, 0, 3], 2, [0, 1, 2, 3, 6], [2, 0, 3, 0, 3]),
        ([], 31, [0, (1 << 31) - 1], [0, (1 << 31) - 1]),
    ],
)
def test_the_last_rank_there_is(
    frequent: list[int], id_bits: int, ranks: list[int], ids: list[int]
) -> None:
    lookup = IdLookup(np.array(frequent, np.uint32), id_bits)
    numbers = np.array(ranks, np.uint32)
    assert lookup.ids(numbers).tolist() == ids
    with pytest.raises(CacheFormatError, match=f"rank {ranks[-1] + 1}, expected less than"):
        lookup.ids(numbers + np.uint32(1))


@pytest.mark.parametrize(
    "header",
    [
        replace(HEADER, ranking=IdRanks(frequent=TOO_LARGE).encode()),
        replace(HEADER, ranking=(HEADER.ranking[0], HEADER.ranking[1] + b"\0")),
    ],
)
def test_a_list_of_frequent_ids_that_cannot_be(header: FrameHeader) -> None:
    with pytest.raises(CacheFormatError, match="its list of frequent ids is damaged"):
        read(header)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (b"", "it has numbers of a column without a table"),
        (b"\0", "its coder tables cannot be read"),
        (b"\0" + b"\xff" * 40, "its coder tables cannot be read"),
    ],
)
@pytest.mark.parametrize("stream", range(7))
def test_tables_that_cannot_be(stream: int, table: bytes, message: str) -> None:
    (tables,) = HEADER.tables
    assert len(tables) == 7  # counts, ids, 4 groups of values, tails
    changed = [*tables[:stream], table, *tables[stream + 1 :]]
    with pytest.raises(CacheFormatError, match=message):
        read(replace(HEADER, tables=[changed]))


def test_a_page_that_is_none() -> None:
    with pytest.raises(CacheFormatError, match="one of its pages cannot be decoded"):
        read(HEADER, [b"", *FRAMES[1:]])
