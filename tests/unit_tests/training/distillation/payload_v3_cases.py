# SPDX-License-Identifier: Apache-2.0
"""Members to encode in format v3, and what decoding them must give."""

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron.training.distillation.frame_layout import FrameHeader
from megatron.training.distillation.packed_rows import PackedRows
from megatron.training.distillation.payload_v3 import encode_framed_payload

SENTINEL = -1000.0


@dataclass(frozen=True, kw_only=True)
class Member:
    """What one member holds."""

    values: torch.Tensor
    indices: torch.Tensor
    tail: torch.Tensor | None
    proofs: torch.Tensor | None
    vocab_size: int

    def encode(self, **options) -> bytes:
        """Return the payload."""
        return encode_framed_payload(
            self.values,
            self.indices,
            self.tail,
            self.proofs,
            vocab_size=self.vocab_size,
            **options,
        )

    def select(self, rows: Sequence[int], positions: slice) -> "Member":
        """Return some rows and positions of it; fingerprints are those of whole rows."""
        rows = list(rows)
        return replace(
            self,
            values=self.values[positions][:, rows],
            indices=self.indices[positions][:, rows],
            tail=None if self.tail is None else self.tail[positions][:, rows],
            proofs=None if self.proofs is None else self.proofs[:, rows],
        )


def make_member(
    positions: int,
    rows: int,
    k: int,
    *,
    vocab_size: int = 1000,
    dtype: torch.dtype = torch.float16,
    is_masked: bool = False,
    has_extras: bool = True,
    seed: int = 0,
) -> Member:
    """Return a random member with many equal values, frequent ids, and the largest id."""
    generator = torch.Generator().manual_seed(seed)
    shape = (positions, rows, k)

    def below(end: int, *size: int) -> torch.Tensor:
        return torch.randint(0, end, size, generator=generator)

    # Multiples of 1/8 are equal often, and a thousandth of one less is equal in some dtypes.
    steps = below(6, *shape).div(8) + below(2, *shape) / 8192
    values = -steps.cumsum(-1).to(dtype)
    few = below(min(vocab_size, 20), *shape)
    indices = torch.where(below(2, *shape) == 0, few, below(vocab_size, *shape))
    indices[0, 0, 0] = vocab_size - 1
    if is_masked:
        masked = torch.arange(k) >= below(k + 1, positions, rows, 1)
        values[masked] = SENTINEL
        indices[masked] = -1
    tail = proofs = None
    if has_extras:
        tail = -torch.rand(positions, rows, generator=generator) * 9
        tail[0] = -torch.inf
        proofs = torch.randint(
            -(1 << 63), (1 << 63) - 1, (-(-positions // 64), rows), generator=generator
        )
    return Member(values=values, indices=indices, tail=tail, proofs=proofs, vocab_size=vocab_size)


def check_rows(found: PackedRows, expected: Member, *, is_sorted: bool = False) -> None:
    """Compare decoded rows with the truth, bit by bit.

    Entries of equal value may have changed places if *is_sorted*.
    """
    k = expected.values.shape[-1]
    assert found.values.dtype == expected.values.dtype
    assert torch.equal(bits_of(found.values), bits_of(expected.values))
    ids, planes = ids_of(found, k)
    assert planes == max(1, (expected.vocab_size - 1).bit_length() - 16)
    masked = expected.values == SENTINEL
    # A masked entry's id is -1 in as many bits as there are.
    truth = torch.where(masked, (1 << (16 + planes)) - 1, expected.indices.long())
    if is_sorted:
        ids, truth = (_sorted_pairs(bits_of(expected.values), of) for of in (ids, truth))
    assert torch.equal(ids, truth)
    for part, of in (
        (found.tail_logprob, expected.tail),
        (found.label_fingerprints, expected.proofs),
    ):
        assert (part is None) == (of is None)
        if part is not None:
            assert part.dtype == of.dtype
            assert torch.equal(part, of)


def frames_of(header: FrameHeader, data: bytes) -> list[bytes]:
    """Return the frames of a payload."""
    return [bytes(data[a:b]) for a, b in itertools.pairwise(header.offsets())]


def with_frames(header: FrameHeader, frames: Sequence[bytes]) -> tuple[FrameHeader, bytes]:
    """Return the header with the checksums of these frames, and the payload."""
    header = replace(
        header,
        frame_bytes=np.array([len(frame) for frame in frames], np.uint32),
        frame_checksums=np.array([zlib.crc32(frame) for frame in frames], np.uint32),
    )
    return header, b"".join([header.to_bytes(), *frames])


def ids_of(rows: PackedRows, k: int) -> tuple[torch.Tensor, int]:
    """Return int64 ids by plain arithmetic, and how many planes of bits above the low 16 there are.

    Plane ``p`` of a token holds bit ``16 + p`` of its K ids, the first in its highest bit.
    """
    planes = rows.high_bits.unflatten(-1, (-1, -(-k // 8)))  # (S, n, planes, ceil(K / 8))
    ids = rows.indices_low.long()
    bits = torch.from_numpy(np.unpackbits(planes.numpy(), axis=-1, count=k))
    for plane in range(planes.shape[2]):
        ids += bits[:, :, plane].long() << (16 + plane)
    return ids, planes.shape[2]


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of values, whose equality is not that of floating-point numbers."""
    return values.contiguous().view(torch.int16 if values.itemsize == 2 else torch.int32)


def _sorted_pairs(bits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return (value, id) of each token as sorted numbers of 63 bits."""
    return ((bits.long() << 32) + ids).sort(-1).values
