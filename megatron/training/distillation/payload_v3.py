# SPDX-License-Identifier: Apache-2.0
"""The payload of a member of format v3: any vocabulary, and frames that are decoded alone. Pure.

The format is specified in the package's README.
"""

import bisect
import itertools
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from megatron.training.distillation.entropy_coder import coder_header
from megatron.training.distillation.errors import CacheFormatError
from megatron.training.distillation.fingerprint import chunk_count
from megatron.training.distillation.frame_codec import FrameDecoder, encode_frames, id_lookup
from megatron.training.distillation.frame_layout import (
    EIGHT_BIT,
    MAX_FRAME_ENTRIES,
    MAX_K,
    VALUE_TYPES,
    FrameHeader,
    header_size,
)
from megatron.training.distillation.framed_entries import DecodedRows, StoredEntries
from megatron.training.distillation.id_ranks import IdLookup, IdRanks
from megatron.training.distillation.packed_rows import PackedRows
from megatron.training.distillation.payload import MAX_PAYLOAD_BYTES

_FRAME_POSITIONS = 256
# What shares a coder table: pcodec takes 2^24 numbers, and temporary memory is bounded.
_SEGMENT_ENTRIES = 1 << 22
# What is decoded at once: enough for each operation to do, and little enough to stay in cache.
_DECODED_ENTRIES = 1 << 19
_VALUE_TYPE = {dtype: number for number, (_, dtype) in enumerate(VALUE_TYPES[:EIGHT_BIT])}


def encode_framed_payload(
    values: torch.Tensor,
    indices: torch.Tensor,
    tail_logprob: torch.Tensor | None = None,
    label_fingerprints: torch.Tensor | None = None,
    *,
    vocab_size: int,
    sort_ties: bool = True,
    eight_bit: bool = False,
) -> bytes:
    """Return the content of one member.

    Args:
        values: ``(S, n, K)`` log-probabilities, fp16, bf16 or fp32, falling along K; -1000.0 marks
            masked entries, which follow all others of their token.
        indices: ``(S, n, K)`` token ids, any integer dtype; -1 where *values* is -1000.0.
        tail_logprob: ``(S, n)`` log of the mass outside the K entries, stored as fp32, or None.
        label_fingerprints: ``(ceil(S / 64), n)`` int64 fingerprints of the labels, or None.
        vocab_size: All ids are below it.
        sort_ties: Whether entries of equal value may change places, which takes a few per cent
            less. The order depends on nothing but the arguments.
        eight_bit: Store the codes of :mod:`eight_bit`, which are read as fp16.

    Raises:
        ValueError: An id or a size is out of the format's range, or an entry follows a masked one.
    """
    assert values.dim() == 3, values.shape
    assert indices.shape == values.shape, (indices.shape, values.shape)
    positions, rows, k = values.shape
    if not values.numel():
        raise ValueError(f"Entries of shape {tuple(values.shape)} make no payload.")
    if k > MAX_K:
        raise ValueError(f"{k} entries per token do not fit format v3, at most {MAX_K}.")
    entries = StoredEntries.of(values, indices, tail_logprob, vocab_size, eight_bit)
    ranks = IdRanks.of(entries.ids, entries.kept, vocab_size)
    most = min(_FRAME_POSITIONS, MAX_FRAME_ENTRIES // k)
    length = -(-positions // -(-positions // most))
    places = [(row, begin) for row in range(rows) for begin in range(0, positions, length)]
    segment = max(1, _SEGMENT_ENTRIES // (length * k))
    tables, contents = [], []
    for first in range(0, len(places), segment):
        part = places[first : first + segment]
        frames = entries.frames(part, length, ranks, sort_ties=sort_ties)
        lengths = [min(length, positions - begin) for _, begin in part]
        found = encode_frames(frames, lengths, is_ragged=entries.counts is not None)
        tables.append(found[0])
        contents += found[1]
    header = FrameHeader(
        positions=positions,
        rows=rows,
        k=k,
        id_bits=max(1, (vocab_size - 1).bit_length()),
        value_type=EIGHT_BIT if eight_bit else _VALUE_TYPE[values.dtype],
        frame_positions=length,
        segment_frames=segment,
        has_tail=tail_logprob is not None,
        is_ragged=entries.counts is not None,
        fingerprints=_by_row(label_fingerprints, positions, rows),
        coder=coder_header(),
        ranking=ranks.encode(),
        ranked_ids=len(ranks.frequent),
        tables=tables,
        frame_bytes=np.array([len(content) for content in contents], np.uint32),
        frame_checksums=np.array([zlib.crc32(content) for content in contents], np.uint32),
    )
    return b"".join([header.to_bytes(), *contents])


def _by_row(fingerprints: torch.Tensor | None, positions: int, rows: int) -> np.ndarray | None:
    """Return ``(n, chunks)`` fingerprints from ``(chunks, n)``."""
    if fingerprints is None:
        return None
    expected = (chunk_count(positions), rows)
    assert fingerprints.shape == expected, (fingerprints.shape, expected)
    assert fingerprints.dtype == torch.int64, fingerprints.dtype
    return np.ascontiguousarray(fingerprints.cpu().numpy().T)


def read_header(data: bytes) -> FrameHeader:
    """Return the header at the beginning of a payload.

    Raises:
        CacheFormatError: It is damaged, or not one.
    """
    return FrameHeader.from_bytes(data[: header_size(data)])


def decode_framed_payload(data: bytes, max_bytes: int = MAX_PAYLOAD_BYTES) -> PackedRows:
    """Return all rows of a payload; see :func:`decode_framed_rows`.

    Raises:
        CacheFormatError: It is damaged.
    """
    header = read_header(data)
    if int(header.offsets()[-1]) != len(data):
        raise CacheFormatError(f"its frames end at byte {header.offsets()[-1]} of {len(data)}")
    return decode_framed_rows(header, data, range(header.rows), max_bytes=max_bytes)


def decode_framed_rows(
    header: FrameHeader,
    content: bytes | Mapping[int, bytes],
    rows: Sequence[int],
    positions: slice | None = None,
    *,
    max_bytes: int = MAX_PAYLOAD_BYTES,
    lookup: IdLookup | None = None,
) -> PackedRows:
    """Verify and decode some rows of a payload, and nothing else of it.

    Args:
        header: The payload's.
        content: The payload, or parts of it by the bytes at which they begin: each frame of these
            rows and positions lies in one of them.
        rows: The rows, in the order in which they are returned; any number of times.
        positions: Which positions of them, with a step of 1; None for all.
        max_bytes: What the rows may take. Decoding needs room besides for a few frames, whose
            entries the format limits.
        lookup: The payload's :func:`id_lookup`, where it is at hand.

    Returns:
        ``(len(positions), len(rows), K)`` entries. Fingerprints are of all positions.

    Raises:
        CacheFormatError: A frame is damaged, or the rows take more than *max_bytes*.
        ValueError: The payload has no such rows or positions.
    """
    first, stop, _ = (positions or slice(None)).indices(header.positions)
    if not 0 <= first < stop:
        raise ValueError(f"positions {positions} select none of {header.positions}.")
    if not all(0 <= row < header.rows for row in rows):
        raise ValueError(f"rows {list(rows)} are not all of {header.rows}.")
    length = header.frame_positions
    chunks = range(first // length, -(-stop // length))
    out = DecodedRows(header, len(rows), range(first, stop), max_bytes)
    wanted = [
        (row * header.frames_per_row + chunk, column, chunk * length)
        for column, row in enumerate(rows)
        for chunk in chunks
    ]
    parts = {0: content} if isinstance(content, bytes) else content
    starts, offsets = sorted(parts), header.offsets().tolist()

    def stored(number: int) -> bytes:
        start = starts[bisect.bisect_right(starts, offsets[number]) - 1]
        return parts[start][offsets[number] - start : offsets[number + 1] - start]

    decoder = FrameDecoder(header, lookup or id_lookup(header))
    at_once = max(1, _DECODED_ENTRIES // (length * header.k))
    for part in itertools.batched(wanted, at_once):
        numbers = [number for number, _, _ in part]
        frames = list(map(stored, numbers))
        for number, data in zip(numbers, frames, strict=True):
            if (found := zlib.crc32(data)) != header.frame_checksums[number]:
                raise CacheFormatError(
                    f"the checksum of its frame {number} is {found}, it was written with "
                    f"{header.frame_checksums[number]}"
                )
        out.put(decoder.decode(numbers, frames), [(column, place) for _, column, place in part])
    return out.packed(rows)
