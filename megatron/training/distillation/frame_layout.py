# SPDX-License-Identifier: Apache-2.0
"""Where everything lies in a payload of format v3, and the checksums of its parts, pure.

A payload is a header and then frames, one for each sample and run of positions, sample by sample.
A frame is decoded with the header alone. All numbers are little-endian; the package's README has
the specification.
"""

import itertools
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron.training.distillation.errors import CacheFormatError
from megatron.training.distillation.fingerprint import chunk_count

FORMAT_VERSION_V3 = 3
MAGIC = b"\x89LOGKD3\n"
"""First bytes of a payload: no zstd frame and no zip archive begins like this."""
MAX_ID_BITS = 31
MAX_VOCAB_SIZE_V3 = 1 << MAX_ID_BITS
MAX_K = (1 << 16) - 1
MAX_RANKED_IDS = 1 << 22
"""Ids of a larger vocabulary are not ranked."""
MAX_FRAME_ENTRIES = 1 << 20
"""Entries of a frame: a page may be empty whatever it holds, so that its size bounds nothing."""

VALUE_TYPES: tuple[tuple[np.dtype, torch.dtype], ...] = (
    (np.dtype("<u2"), torch.float16),
    (np.dtype("<u2"), torch.bfloat16),
    (np.dtype("<u4"), torch.float32),
    (np.dtype("u1"), torch.float16),
)
"""By the number in a header: the integers that are stored, and the values they stand for."""
EIGHT_BIT = 3
"""The value type whose integers are codes, not the bits of a value."""

# magic, header bytes, positions, rows, positions of a frame, frames of a segment, ranked ids, k,
# id bits, value type, flags, bytes of the coder's header, zero
_FIXED = struct.Struct("<8sIIIIIIHBBBBH")
_HAS_TAIL, _HAS_FINGERPRINTS, _IS_RAGGED = 1, 2, 4
_CHECKSUM = struct.Struct("<I")
_LENGTH = np.dtype("<u4")
_INDEX = np.dtype([("bytes", "<u4"), ("crc32", "<u4")])
_FINGERPRINT = np.dtype("<i8")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FrameHeader:
    """What the header of a payload says.

    Attributes:
        positions: ``S``, of a sample.
        rows: ``n``, samples of this DP rank.
        k: Entries per token, at most.
        id_bits: Bits of the largest id.
        value_type: Index into :data:`VALUE_TYPES`.
        frame_positions: Positions of a frame, up to 2^20 entries; the last of a sample may have
            fewer.
        segment_frames: Frames that share coder tables; the last may have fewer.
        has_tail: Whether each token has a tail log-probability.
        is_ragged: Whether tokens have a number of entries of their own.
        fingerprints: ``(n, ceil(S / 64))`` int64 fingerprints of the labels, or None.
        coder: The header of the entropy coder.
        ranking: Coder table and page of the ids that have ranks; empty without any.
        ranked_ids: How many those are.
        tables: Of each segment the coder table of each stream; empty where it has no number.
        frame_bytes: ``(frames,)`` size of each.
        frame_checksums: ``(frames,)`` CRC-32 of each.
    """

    positions: int
    rows: int
    k: int
    id_bits: int
    value_type: int
    frame_positions: int
    segment_frames: int
    has_tail: bool
    is_ragged: bool
    fingerprints: np.ndarray | None
    coder: bytes
    ranking: tuple[bytes, bytes]
    ranked_ids: int
    tables: Sequence[Sequence[bytes]]
    frame_bytes: np.ndarray
    frame_checksums: np.ndarray

    @property
    def frames_per_row(self) -> int:
        """Frames of a sample."""
        return -(-self.positions // self.frame_positions)

    @property
    def groups(self) -> list[tuple[int, int]]:
        """The ranges of entries whose values form a stream."""
        return entry_groups(self.k)

    @property
    def nbytes(self) -> int:
        """Bytes of the header, checksum included: the first frame begins behind them."""
        lengths = 2 + sum(len(tables) for tables in self.tables)
        blobs = [self.coder, *self.ranking, *(table for row in self.tables for table in row)]
        proofs = 0 if self.fingerprints is None else self.fingerprints.nbytes
        frames = self.rows * self.frames_per_row
        return (
            _FIXED.size
            + lengths * _LENGTH.itemsize
            + sum(map(len, blobs))
            + frames * _INDEX.itemsize
            + proofs
            + _CHECKSUM.size
        )

    def frame_length(self, frame: int) -> int:
        """Return the positions of a frame."""
        begin = frame % self.frames_per_row * self.frame_positions
        return min(self.frame_positions, self.positions - begin)

    def offsets(self) -> np.ndarray:
        """Return ``(frames + 1,)`` int64: where in the payload each frame begins, and its end."""
        ends = np.cumsum(self.frame_bytes, dtype=np.int64)
        return np.concatenate([[0], ends]) + self.nbytes

    def to_bytes(self) -> bytes:
        """Return the header as stored."""
        flags = (
            _HAS_TAIL * self.has_tail
            | _HAS_FINGERPRINTS * (self.fingerprints is not None)
            | _IS_RAGGED * self.is_ragged
        )
        fixed = _FIXED.pack(
            MAGIC,
            self.nbytes,
            self.positions,
            self.rows,
            self.frame_positions,
            self.segment_frames,
            self.ranked_ids,
            self.k,
            self.id_bits,
            self.value_type,
            flags,
            len(self.coder),
            0,
        )
        blobs = [*self.ranking, *(table for row in self.tables for table in row)]
        index = np.empty(len(self.frame_bytes), _INDEX)
        index["bytes"], index["crc32"] = self.frame_bytes, self.frame_checksums
        proofs = b"" if self.fingerprints is None else self.fingerprints.astype(_FINGERPRINT)
        lengths = np.array([len(blob) for blob in blobs], _LENGTH)
        parts = [fixed, lengths.tobytes(), self.coder, *blobs, index.tobytes(), bytes(proofs)]
        content = b"".join(parts)
        return content + _CHECKSUM.pack(header_checksum(content + bytes(_CHECKSUM.size)))

    @classmethod
    def from_bytes(cls, data: bytes) -> "FrameHeader":
        """Return what *data*, exactly a header, says.

        Raises:
            CacheFormatError: It is damaged, or not one.
        """
        size = header_size(data)
        if len(data) != size:
            raise CacheFormatError(f"its header has {len(data)} bytes, and says {size}")
        (recorded,) = _CHECKSUM.unpack(data[-_CHECKSUM.size :])
        if (found := header_checksum(data)) != recorded:
            raise CacheFormatError(
                f"the checksum of its header is {found}, it was written with {recorded}"
            )
        return _parse(data)


def header_size(data: bytes) -> int:
    """Return the bytes of the header that *data* begins with.

    Raises:
        CacheFormatError: It does not begin with one.
    """
    if len(data) < _FIXED.size or not data.startswith(MAGIC):
        raise CacheFormatError(
            f"it begins with {data[:8]!r}, expected {MAGIC!r}: it is no payload of format v3"
        )
    size = int(_FIXED.unpack_from(data)[1])
    if size < _FIXED.size + _CHECKSUM.size:
        raise CacheFormatError(f"its header says that it has {size} bytes, which is too few")
    return size


def header_checksum(header: bytes) -> int:
    """Return the checksum that belongs at the end of a header: of what comes before, and the magic.

    Behind its own CRC-32 anything has the same CRC-32, so that what a shard records of a header, or
    of a member, would not depend on the header. The magic once more undoes that.
    """
    return zlib.crc32(MAGIC, zlib.crc32(header[: -_CHECKSUM.size]))


HEADER_PREFIX_BYTES = _FIXED.size
"""What :func:`header_size` needs of a payload."""


def entry_groups(k: int) -> list[tuple[int, int]]:
    """Return the ranges of entries whose values form a stream: 1, 1, 2, 4, 8, ... entries."""
    edges = [0, *(1 << power for power in range((k - 1).bit_length())), k]
    return list(itertools.pairwise(edges))


def _parse(data: bytes) -> FrameHeader:
    """Return what a header says whose size and checksum are right."""
    (_, size, positions, rows, length, segment, ranked, k, id_bits, kind, flags, coder, zero) = (
        _FIXED.unpack_from(data)
    )
    known = _HAS_TAIL | _HAS_FINGERPRINTS | _IS_RAGGED
    if (
        min(positions, rows, k, length, segment, id_bits) < 1
        or length > positions
        or length * k > MAX_FRAME_ENTRIES
        or id_bits > MAX_ID_BITS
        or ranked > 1 << id_bits
        or (ranked and 1 << id_bits > MAX_RANKED_IDS)
        or kind >= len(VALUE_TYPES)
        or flags & ~known
        or zero
    ):
        raise CacheFormatError(
            "its header says the impossible: "
            f"positions {positions}, rows {rows}, positions of a frame {length}, frames of a "
            f"segment {segment}, k {k}, id bits {id_bits}, ranked ids {ranked}, value type {kind}, "
            f"flags {flags}"
        )
    frames = rows * -(-positions // length)
    chunks = rows * chunk_count(positions) if flags & _HAS_FINGERPRINTS else 0
    streams = len(entry_groups(k)) + 1 + bool(flags & _IS_RAGGED) + bool(flags & _HAS_TAIL)
    segments = -(-frames // segment)
    # What needs no reading first: a size that cannot be makes no room for anything.
    needed = frames * _INDEX.itemsize + chunks * _FINGERPRINT.itemsize
    needed += (2 + segments * streams) * _LENGTH.itemsize + coder + _FIXED.size + _CHECKSUM.size
    if needed > size:
        raise CacheFormatError(
            f"its header has {size} bytes, and needs {needed} for {frames} frames"
        )
    lengths = np.frombuffer(data, _LENGTH, 2 + segments * streams, _FIXED.size)
    if needed + int(lengths.sum(dtype=np.int64)) != size:
        raise CacheFormatError(f"its header has {size} bytes, and its parts do not make that")
    blobs = _slices(data, _FIXED.size + lengths.nbytes, [coder, *map(int, lengths)])
    coder_header, table, page = (next(blobs) for _ in range(3))
    tables = tuple(tuple(next(blobs) for _ in range(streams)) for _ in range(segments))
    end = size - _CHECKSUM.size - chunks * _FINGERPRINT.itemsize
    index = np.frombuffer(data, _INDEX, frames, end - frames * _INDEX.itemsize)
    proofs = None
    if chunks:
        proofs = np.frombuffer(data, _FINGERPRINT, chunks, end).reshape(rows, -1)
    return FrameHeader(
        positions=positions,
        rows=rows,
        k=k,
        id_bits=id_bits,
        value_type=kind,
        frame_positions=length,
        segment_frames=segment,
        has_tail=bool(flags & _HAS_TAIL),
        is_ragged=bool(flags & _IS_RAGGED),
        fingerprints=proofs,
        coder=coder_header,
        ranking=(table, page),
        ranked_ids=ranked,
        tables=tables,
        frame_bytes=index["bytes"],
        frame_checksums=index["crc32"],
    )


def _slices(data: bytes, begin: int, lengths: Sequence[int]) -> Iterator[bytes]:
    for length in lengths:
        yield data[begin : begin + length]
        begin += length
