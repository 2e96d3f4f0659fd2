# SPDX-License-Identifier: Apache-2.0
"""Format v3: what is encoded is decoded, whatever is asked for and in whatever order."""

import itertools

import pytest
import torch

from megatron.training.distillation import payload_v3
from megatron.training.distillation.frame_layout import (
    MAX_FRAME_ENTRIES,
    MAX_K,
    MAX_VOCAB_SIZE_V3,
)
from megatron.training.distillation.payload_v3 import (
    decode_framed_rows,
    encode_framed_payload,
    read_header,
)
from tests.unit_tests.training.distillation.payload_v3_cases import check_rows, make_member

FLAGS = (False, True)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("vocab_size", [40, 65536, 65537, 262144, 1 << 31])
@pytest.mark.parametrize("k", [1, 5, 32])
@pytest.mark.parametrize(("positions", "rows"), [(1, 3), (64, 1), (257, 2), (600, 2)])
def test_round_trip(positions: int, rows: int, k: int, vocab_size: int) -> None:
    for dtype, is_masked, sort_ties in itertools.product(DTYPES, FLAGS, FLAGS):
        member = make_member(
            positions,
            rows,
            k,
            vocab_size=vocab_size,
            dtype=dtype,
            is_masked=is_masked,
            has_extras=sort_ties != is_masked,
        )
        data = member.encode(sort_ties=sort_ties)
        header = read_header(data)
        assert int(header.offsets()[-1]) == len(data)
        check_rows(decode_framed_rows(header, data, range(rows)), member, is_sorted=sort_ties)
    # The last of these in another order and in part.
    order, part = [rows - 1, 0, rows - 1], slice(positions // 3, positions // 3 + 1)
    check_rows(
        decode_framed_rows(header, data, order, part), member.select(order, part), is_sorted=True
    )


@pytest.mark.parametrize("is_masked", FLAGS)
@pytest.mark.parametrize("positions", [8, 512, 600, 1001])
def test_any_rows_and_positions_any_number_of_times(positions: int, is_masked: bool) -> None:
    member = make_member(positions, 3, 4, vocab_size=1 << 18, is_masked=is_masked)
    data = member.encode(sort_ties=False)
    header = read_header(data)
    part = positions // 8
    slices = [
        *(slice(rank * part, (rank + 1) * part) for rank in (0, 3, 7)),  # zigzag parts of CP 4
        *(slice(1, positions), slice(positions - 1, positions), slice(None), slice(-5, None)),
        *(slice(positions // 2 - 1, positions // 2 + 2), slice(0, 1 << 40)),
    ]
    for rows, selected in itertools.product(([0, 1, 2], [2, 0], [1], [1, 1, 0, 1]), slices):
        found = decode_framed_rows(header, data, rows, selected)
        check_rows(found, member.select(rows, selected))


@pytest.mark.parametrize("entries", [1, 1000, 3000])
def test_several_segments(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has coder tables of its own, of other numbers."""
    monkeypatch.setattr(payload_v3, "_SEGMENT_ENTRIES", entries)
    monkeypatch.setattr(payload_v3, "_DECODED_ENTRIES", 1500)  # across segments
    member = make_member(600, 4, 3, is_masked=True)
    member.values[:, :2] *= 2
    member.values[member.indices == -1] = -1000.0
    data = member.encode()
    header = read_header(data)
    frames = 4 * 3
    assert len(header.tables) == -(-frames // max(1, entries // (200 * 3)))
    for rows in ([0, 1, 2, 3], [3, 1], [2]):
        check_rows(
            decode_framed_rows(header, data, rows), member.select(rows, slice(None)), is_sorted=True
        )


@pytest.mark.parametrize("positions", [1, 257])
def test_tokens_without_entries(positions: int) -> None:
    member = make_member(positions, 2, 4, is_masked=True)
    member.values[:, 0], member.indices[:, 0] = -1000.0, -1
    for sort_ties in FLAGS:
        data = member.encode(sort_ties=sort_ties)
        found = decode_framed_rows(read_header(data), data, [0, 1])
        check_rows(found, member, is_sorted=sort_ties)
    member.values[...], member.indices[...] = -1000.0, -1
    data = member.encode()
    check_rows(decode_framed_rows(read_header(data), data, [0, 1]), member)


def test_every_bit_pattern_of_a_value_survives() -> None:
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    values = values[values != -1000.0].reshape(-1, 5, 3)
    ids = torch.arange(values.numel()).reshape(values.shape)
    data = encode_framed_payload(values, ids, vocab_size=1 << 17, sort_ties=False)
    found = decode_framed_rows(read_header(data), data, range(5))
    assert torch.equal(found.values.view(torch.int16), values.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint16, torch.uint8])
def test_ids_of_any_integer_dtype(dtype: torch.dtype) -> None:
    member = make_member(70, 2, 3, vocab_size=200)
    data = encode_framed_payload(member.values, member.indices.to(dtype), vocab_size=200)
    assert data == encode_framed_payload(member.values, member.indices, vocab_size=200)


def test_layout_in_memory_does_not_matter() -> None:
    member = make_member(70, 3, 5, is_masked=True)
    strided = [
        tensor.transpose(0, 1).contiguous().transpose(0, 1)
        for tensor in (member.values, member.indices, member.tail, member.proofs)
    ]
    assert encode_framed_payload(*strided, vocab_size=1000) == member.encode()


def test_equal_values_are_sorted_whatever_their_order() -> None:
    values = torch.tensor([-0.5, -1, -1, -1, -2]).half().expand(1, 1, 5)
    payloads = {
        encode_framed_payload(values, torch.tensor([[[7, *order, 1]]]), vocab_size=10)
        for order in itertools.permutations((3, 9, 4))
    }
    assert len(payloads) == 1
    (data,) = payloads
    ids = decode_framed_rows(read_header(data), data, [0]).indices_low
    assert ids.view(torch.int16).tolist() == [[[7, 3, 4, 9, 1]]]


def test_the_largest_k_and_id() -> None:
    """Frames are shorter then: a frame has at most 2^20 entries."""
    values = -torch.arange(MAX_K, dtype=torch.float32).expand(40, 1, MAX_K)
    values = torch.where(values == -1000.0, -999.5, values)
    ids = (MAX_VOCAB_SIZE_V3 - 1 - torch.arange(MAX_K)).expand(40, 1, MAX_K)
    data = encode_framed_payload(values, ids, vocab_size=MAX_VOCAB_SIZE_V3, sort_ties=False)
    header = read_header(data)
    assert header.frame_positions == 14  # 3 frames of at most 16
    assert header.frame_positions * MAX_K <= MAX_FRAME_ENTRIES
    found = decode_framed_rows(header, data, [0], slice(27, 29))
    assert torch.equal(found.values, values[27:29])
    low = found.indices_low.numpy().astype("int64")
    assert (low == ids[27:29].numpy() % (1 << 16)).all()
    # All ids of 15 planes have their bits 16 to 30 set, but for the last byte's unused bit.
    planes = found.high_bits.view(2, 1, 15, -1)
    assert (planes[..., :-1] == 255).all()
    assert (planes[..., -1] == 254).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.indices[0, 0].fill_(1000), "do not fit a vocabulary of 1000"),
        (lambda m: m.indices[0, 0].fill_(-1), "Token ids -1 to"),
        (lambda m: m.values[3, 1, :2].fill_(-1000.0), "An entry follows a masked one"),
    ],
)
def test_what_cannot_be_encoded(change, message: str) -> None:
    member = make_member(5, 2, 4)
    change(member)
    with pytest.raises(ValueError, match=message):
        member.encode()


@pytest.mark.parametrize(
    ("shape", "vocab_size", "message"),
    [
        ((1, 1, MAX_K + 1), 10, "65536 entries per token do not fit format v3, at most 65535"),
        ((1, 1, 1), MAX_VOCAB_SIZE_V3 + 1, "format v3 takes up to 2147483648"),
        ((0, 1, 1), 10, "make no payload"),
        ((1, 0, 1), 10, "make no payload"),
        ((1, 1, 0), 10, "make no payload"),
    ],
)
def test_sizes_that_cannot_be_encoded(shape, vocab_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_framed_payload(
            -torch.ones(shape), torch.zeros(shape, dtype=torch.int), vocab_size=vocab_size
        )


@pytest.mark.parametrize("positions", [slice(3, 3), slice(600, 700), slice(4, 2)])
def test_no_positions(positions: slice) -> None:
    data = make_member(600, 2, 2).encode()
    with pytest.raises(ValueError, match="select none of 600"):
        decode_framed_rows(read_header(data), data, [0], positions)


@pytest.mark.parametrize("rows", [[2], [0, -1]])
def test_rows_that_there_are_not(rows: list[int]) -> None:
    data = make_member(600, 2, 2).encode()
    with pytest.raises(ValueError, match="are not all of 2"):
        decode_framed_rows(read_header(data), data, rows)
