# SPDX-License-Identifier: Apache-2.0
"""Encodes and decodes the frames of a payload of format v3, several at a time. Pure.

Everything lies entry by entry, ``(K, frames, positions)``: an entry is then computed from the one
before for many tokens at once. A value is stored as the difference of its bits to those of
the entry before; an id as its rank, less the rank before where the values are equal. Entries that
a token has not kept take no space.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron.training.distillation.entropy_coder import ColumnDecoder, encode_column
from megatron.training.distillation.errors import CacheFormatError
from megatron.training.distillation.frame_layout import VALUE_TYPES, FrameHeader, entry_groups
from megatron.training.distillation.id_ranks import IdLookup, IdRanks


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Frames:
    """The entries of ``F`` frames of up to ``P`` positions.

    Attributes:
        bits: ``(K, F, P)`` unsigned integers: values as bits or codes.
        ids: ``(K, F, P)`` uint32: ranks when they are encoded, ids when they have been decoded.
        counts: ``(F, P)`` uint16 entries of each token, 0 past the end of a short frame; None where
            all have K.
        tails: ``(F, P)`` uint32 bits of the tail log-probabilities, or None.
    """

    bits: np.ndarray
    ids: np.ndarray
    counts: np.ndarray | None
    tails: np.ndarray | None

    @property
    def kept(self) -> np.ndarray | None:
        """``(K, F, P)`` bool: the entries there are; None for all."""
        if self.counts is None:
            return None
        return np.arange(len(self.ids))[:, None, None] < self.counts


def encode_frames(
    frames: Frames, lengths: Sequence[int], *, is_ragged: bool
) -> tuple[list[bytes], list[bytes]]:
    """Encode the frames of one segment.

    Args:
        frames: They; what is not kept may be anything.
        lengths: Positions of each.
        is_ragged: Whether counts are stored.

    Returns:
        The coder table of each stream, and each frame.
    """
    bits, ranks, kept = frames.bits, frames.ids, frames.kept
    steps = bits.copy()
    steps[1:] -= bits[:-1]
    rises = ranks.copy()
    rises[1:] -= np.where(steps[1:] == 0, ranks[:-1], np.uint32(0))
    positions = bits.shape[2]
    is_whole = all(length == positions for length in lengths)
    inside = None if is_whole else np.arange(positions) < np.asarray(lengths)[:, None]
    columns = []
    if is_ragged:
        assert frames.counts is not None
        columns.append(_column(frames.counts, inside))
    columns.append(_column(rises.swapaxes(0, 1), None if kept is None else kept.swapaxes(0, 1)))
    for group in (slice(*group) for group in entry_groups(len(bits))):
        mask = None if kept is None else kept[group].swapaxes(0, 1)
        columns.append(_column(steps[group].swapaxes(0, 1), mask))
    if frames.tails is not None:
        columns.append(_column(frames.tails, inside))
    encoded = [encode_column(numbers, sizes) for numbers, sizes in columns]
    pages = zip(*(one.pages for one in encoded), strict=True)
    return [one.table for one in encoded], [b"".join(frame) for frame in pages]


def _column(numbers: np.ndarray, mask: np.ndarray | None) -> tuple[np.ndarray, list[int]]:
    """Return the numbers that *mask* selects, frame by frame, and how many each frame has."""
    if mask is None:
        return numbers.ravel(), [numbers[0].size] * len(numbers)
    return numbers[mask], mask.reshape(len(mask), -1).sum(axis=1).tolist()


def id_lookup(header: FrameHeader) -> IdLookup:
    """Return what turns the ranks in a payload into ids.

    Raises:
        CacheFormatError: The list of frequent ids is damaged.
    """
    ranks = IdRanks.decode(header.coder, *header.ranking, header.ranked_ids, header.id_bits)
    return ranks.lookup(header.id_bits)


class FrameDecoder:
    """Decodes frames of one payload. Not to be shared by threads.

    Args:
        header: Its header.
        lookup: Its :func:`id_lookup`, which threads may share.
    """

    def __init__(self, header: FrameHeader, lookup: IdLookup) -> None:
        self._header = header
        self._lookup = lookup
        self._bits = VALUE_TYPES[header.value_type][0]
        self._columns: dict[int, list[ColumnDecoder]] = {}

    def decode(self, numbers: Sequence[int], contents: Sequence[bytes]) -> Frames:
        """Decode the frames *numbers*, whose stored bytes are *contents*.

        Raises:
            CacheFormatError: One of them is damaged.
        """
        header = self._header
        positions = max(map(header.frame_length, numbers))
        shape = (header.k, len(numbers), positions)
        is_partial = header.is_ragged or any(header.frame_length(f) < positions for f in numbers)
        make = np.zeros if is_partial else np.empty
        frames = Frames(
            bits=make(shape, self._bits),
            ids=make(shape, np.uint32),
            counts=np.zeros(shape[1:], np.uint16) if is_partial else None,
            tails=make(shape[1:], np.uint32) if header.has_tail else None,
        )
        for place, (number, content) in enumerate(zip(numbers, contents, strict=True)):
            self._read(number, content, frames, place)
        return self._restored(frames)

    def _read(self, number: int, content: bytes, frames: Frames, place: int) -> None:
        """Decode the pages of a frame into the arrays of all."""
        header = self._header
        columns = iter(self._decoders(number // header.segment_frames))
        length = header.frame_length(number)
        end, kept = 0, None
        if frames.counts is not None:
            counts = frames.counts[place, :length]
            if header.is_ragged:
                end = next(columns).read(content, end, counts)
                if int(counts.max()) > header.k:
                    raise CacheFormatError(
                        f"a token has {counts.max()} entries, at most {header.k}"
                    )
            else:
                counts[:] = header.k
            kept = np.arange(header.k)[:, None] < frames.counts[place]
        end = _fill(next(columns), content, end, frames.ids[:, place], kept)
        for group in (slice(*group) for group in header.groups):
            mask = None if kept is None else kept[group]
            end = _fill(next(columns), content, end, frames.bits[group, place], mask)
        if frames.tails is not None:
            end = next(columns).read(content, end, frames.tails[place, :length])
        if end != len(content):
            raise CacheFormatError(f"a frame has {len(content)} bytes, and its pages end at {end}")

    def _decoders(self, segment: int) -> list[ColumnDecoder]:
        """Return the decoders of a segment's streams."""
        if segment not in self._columns:
            header = self._header
            counts = [2] * header.is_ragged
            values = [self._bits.itemsize] * len(header.groups)
            widths = [*counts, 4, *values, *[4] * header.has_tail]
            self._columns[segment] = [
                ColumnDecoder(header.coder, table, width)
                for table, width in zip(header.tables[segment], widths, strict=True)
            ]
        return self._columns[segment]

    def _restored(self, frames: Frames) -> Frames:
        """Undo the differences, in place, and return *frames* with ids instead of ranks."""
        bits, ids = frames.bits, frames.ids
        # All ones where the value is that of the entry before, so that its rank is added.
        same = np.negative((bits == 0).view(np.int8), dtype=np.int32).view(np.uint32)
        before = np.empty_like(ids[0])
        for k in range(1, len(ids)):
            np.bitwise_and(ids[k - 1], same[k], out=before)
            np.add(ids[k], before, out=ids[k])
            np.add(bits[k], bits[k - 1], out=bits[k])
        kept = frames.kept
        if kept is not None:
            ids[~kept] = 0
        return replace(frames, ids=self._lookup.ids(ids))


def _fill(
    column: ColumnDecoder, content: bytes, begin: int, into: np.ndarray, kept: np.ndarray | None
) -> int:
    """Decode a page into the *kept* places and return where it ends."""
    numbers = np.empty(into.size if kept is None else np.count_nonzero(kept), into.dtype)
    end = column.read(content, begin, numbers)
    if kept is None:
        into[...] = numbers.reshape(into.shape)
    else:
        into[kept] = numbers
    return end
