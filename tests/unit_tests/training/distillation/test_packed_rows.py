# SPDX-License-Identifier: Apache-2.0
"""Rows in blocks of bytes, and their ids packed and unpacked, against numpy and plain loops."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron.training.distillation import packed_rows
from megatron.training.distillation.packed_rows import (
    BlockLayout,
    PackedRows,
    TeacherRows,
    bits_by_token,
)
from megatron.training.distillation.payload import v2_pack_indices

WIDTHS = [1, 7, 8, 9, 16, 100, 128]
PLANES = [1, 2, 8, 9, 15]


def ids_of(*shape: int, planes: int = 1) -> torch.Tensor:
    """Ids that take up to *planes* bits above 16."""
    end = 1 << 16 + planes
    ids = torch.randint(0, end, shape, generator=torch.Generator().manual_seed(0))
    ids.view(-1)[:1] = end - 1
    ids.view(-1)[-1:] = end // 2
    return ids.int()


def packed(ids: torch.Tensor, planes: int = 1) -> PackedRows:
    wide = ids.long().numpy()
    bits = [np.packbits((wide >> 16 + plane) & 1, axis=-1) for plane in range(planes)]
    return PackedRows(
        values=torch.zeros(ids.shape, dtype=torch.float16),
        indices_low=torch.from_numpy((wide & 0xFFFF).astype(np.uint16)),
        high_bits=torch.from_numpy(np.concatenate(bits, axis=-1)),
    )


def test_bits_of_a_token_by_hand() -> None:
    # Two tokens of three ids: 1 0 1 and 0 1 1, which v2 packs to one byte, 101011 and two zeros.
    bits = bits_by_token(torch.tensor([0b10101100], dtype=torch.uint8), (2, 1, 3))
    assert bits.tolist() == [[[0b10100000]], [[0b01100000]]]


@pytest.mark.parametrize("k", WIDTHS)
def test_bits_by_token_are_numpys(k: int) -> None:
    ids = ids_of(3, 2, k)
    _, bit_17 = v2_pack_indices(ids)
    bits = bits_by_token(bit_17, ids.shape)
    assert torch.equal(bits, torch.from_numpy(np.packbits(ids.numpy() >> 16, axis=-1)))
    assert (k % 8 == 0) == (bits.data_ptr() == bit_17.data_ptr())  # a view where it can be


def test_planes_by_hand() -> None:
    """A token of nine ids in two planes of two bytes: bit 16 of each, then bit 17."""
    ids = torch.tensor([[[0, 1 << 16, 2 << 16, 3 << 16, 5, 6, 7, 8, (3 << 16) + 9]]])
    high_bits = torch.tensor([[[0b01010000, 0b10000000, 0b00110000, 0b10000000]]])
    rows = PackedRows(
        values=torch.zeros(ids.shape),
        indices_low=(ids & 0xFFFF).to(torch.uint16),
        high_bits=high_bits.to(torch.uint8),
    )
    assert rows.high_planes == 2
    assert torch.equal(rows.unpack_all().indices, ids.int())


@pytest.mark.parametrize("planes", PLANES)
@pytest.mark.parametrize("k", WIDTHS)
def test_unpacking_undoes_packing(k: int, planes: int) -> None:
    ids = ids_of(5, 4, k, planes=planes)
    rows = packed(ids, planes)
    assert rows.high_planes == planes
    assert rows.unpack().indices.dtype == torch.int32
    assert torch.equal(rows.unpack().indices, ids)
    for pick, positions in itertools.product(
        (slice(1, 3), [3, 0], None), (slice(2, 5), slice(0, 1), None)
    ):
        expected = ids[positions or slice(None)][:, slice(None) if pick is None else pick]
        assert torch.equal(rows.unpack(pick, positions).indices, expected)


@pytest.mark.parametrize("planes", PLANES)
@pytest.mark.parametrize("k", WIDTHS)
def test_ids_are_the_same_on_another_device(
    k: int, planes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operations for a GPU, run here: they know no tensor as one of the CPU."""
    ids = ids_of(5, 4, k, planes=planes)
    rows = packed(ids, planes)

    class Elsewhere(torch.Tensor):
        """A tensor that does not say that it is in host memory."""

        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("meta")

    arange = torch.arange
    monkeypatch.setattr(
        packed_rows.torch, "arange", lambda *args, device, dtype: arange(*args, dtype=dtype)
    )
    low = rows.indices_low.as_subclass(Elsewhere)
    found = packed_rows._join_ids(low, rows.high_bits).as_subclass(torch.Tensor)
    assert found.dtype == torch.int32
    assert torch.equal(found, ids)


LAYOUTS = [
    BlockLayout(
        positions=s, samples=n, k=k, high_planes=h, dtype=dtype, has_tail=tail, chunks=chunks
    )
    for s, n, k, h in [(1, 1, 1, 1), (3, 2, 5, 15), (7, 3, 128, 2)]
    for dtype in (torch.float16, torch.bfloat16, torch.float32)
    for tail in (False, True)
    for chunks in (0, 3)
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_parts_of_a_block_fill_it_and_do_not_overlap(layout: BlockLayout) -> None:
    blocks = torch.zeros((2, 3, layout.nbytes), dtype=torch.uint8)
    rows = layout.rows(blocks)
    used = 0
    for number, name in enumerate(PackedRows.__slots__, 1):
        part = getattr(rows, name)
        if part is None:
            continue
        assert part.shape[:2] == (2, 3)
        part.view(torch.uint8).fill_(number)
        used += part[0, 0].nbytes
    assert used == layout.rows(blocks[0, 0]).nbytes
    assert 0 <= layout.nbytes - used < 16
    assert layout.nbytes % 16 == 0
    counts = torch.bincount(blocks[1, 2].int(), minlength=6).tolist()
    for number, name in enumerate(PackedRows.__slots__, 1):
        part = getattr(rows, name)
        assert counts[number] == (0 if part is None else part[1, 2].nbytes), name
    assert rows.values.dtype == layout.dtype
    assert rows.high_planes == layout.high_planes
    assert (rows.tail_logprob is None) == (not layout.has_tail)
    assert (rows.label_fingerprints is None) == (layout.chunks == 0)


def test_bytes_per_token_by_hand() -> None:
    """K = 128 in fp16 with tails: 256 + 256 + 16 + 4, and a fingerprint for 64 tokens."""
    layout = BlockLayout(
        positions=4096,
        samples=2,
        k=128,
        high_planes=1,
        dtype=torch.float16,
        has_tail=True,
        chunks=64,
    )
    assert layout.nbytes == 4096 * 2 * 532 + 64 * 2 * 8
    # Ids of 18 bits take 16 bytes more.
    assert replace(layout, high_planes=2).nbytes == layout.nbytes + 4096 * 2 * 16


def test_rows_of_a_block_are_views() -> None:
    layout = BlockLayout(
        positions=2,
        samples=1,
        k=3,
        high_planes=1,
        dtype=torch.float32,
        has_tail=False,
        chunks=0,
    )
    block = torch.zeros(layout.nbytes, dtype=torch.uint8)
    rows = layout.rows(block)
    rows.values.fill_(1.0)
    assert block.any()
    unpacked = rows.unpack()
    assert isinstance(unpacked, TeacherRows)
    assert unpacked.values.data_ptr() == rows.values.data_ptr()
