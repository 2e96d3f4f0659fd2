# SPDX-License-Identifier: Apache-2.0
"""Between the rows of a member, position by position, and its frames, entry by entry. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron.training.distillation import eight_bit
from megatron.training.distillation.errors import CacheFormatError
from megatron.training.distillation.frame_codec import Frames
from megatron.training.distillation.frame_layout import (
    EIGHT_BIT,
    MAX_VOCAB_SIZE_V3,
    VALUE_TYPES,
    FrameHeader,
)
from megatron.training.distillation.id_ranks import IdRanks
from megatron.training.distillation.packed_rows import PackedRows
from megatron.training.distillation.payload import LOGPROB_SENTINEL


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredEntries:
    """What a member's frames are made of, position by position.

    Attributes:
        bits: ``(S, n, K)`` unsigned integers.
        ids: ``(S, n, K)`` integers.
        counts: ``(S, n)`` uint16 entries of each token; None where all have K.
        tails: ``(S, n)`` uint32 bits, or None.
        vocab_size: All ids are below it.
    """

    bits: np.ndarray
    ids: np.ndarray
    counts: np.ndarray | None
    tails: np.ndarray | None
    vocab_size: int

    @classmethod
    def of(
        cls,
        values: torch.Tensor,
        indices: torch.Tensor,
        tail_logprob: torch.Tensor | None,
        vocab_size: int,
        eight_bit_values: bool,
    ) -> "StoredEntries":
        """Return the entries of a member; see :func:`encode_framed_payload`."""
        counts = _counts(values)
        ids = indices.detach().cpu().numpy()
        kept = ids if counts is None else np.where(_prefix(counts, ids.shape[-1]), ids, 0)
        if vocab_size > MAX_VOCAB_SIZE_V3 or kept.min() < 0 or kept.max() >= vocab_size:
            raise ValueError(
                f"Token ids {kept.min()} to {kept.max()} do not fit a vocabulary of {vocab_size}; "
                f"format v3 takes up to {MAX_VOCAB_SIZE_V3}."
            )
        if eight_bit_values:
            bits = eight_bit.to_codes(values.detach().cpu().half().numpy())
        else:
            bits = _bits(values)
        tails = None if tail_logprob is None else _bits(tail_logprob.float())
        return cls(bits=bits, ids=kept, counts=counts, tails=tails, vocab_size=vocab_size)

    @property
    def kept(self) -> np.ndarray | None:
        """``(S, n, K)`` bool, or None for all."""
        return None if self.counts is None else _prefix(self.counts, self.ids.shape[-1])

    def frames(
        self,
        places: Sequence[tuple[int, int]],
        length: int,
        ranks: IdRanks,
        *,
        sort_ties: bool,
    ) -> Frames:
        """Return the frames that begin at *places* (row, position), entry by entry.

        With *sort_ties* entries of equal value are ordered by rank.
        """
        positions, _, k = self.ids.shape
        is_partial = self.counts is not None or positions % length > 0
        make = np.zeros if is_partial else np.empty
        tokens = (len(places), length)
        bits, ids = make((*tokens, k), self.bits.dtype), make((*tokens, k), self.ids.dtype)
        counts = np.zeros(tokens, np.uint16) if is_partial else None
        tails = None if self.tails is None else make(tokens, np.uint32)
        for number, (row, begin) in enumerate(places):
            at = slice(begin, begin + length)
            filled = slice(0, min(length, positions - begin))
            bits[number, filled] = self.bits[at, row]
            ids[number, filled] = self.ids[at, row]
            if counts is not None:
                counts[number, filled] = k if self.counts is None else self.counts[at, row]
            if tails is not None and self.tails is not None:
                tails[number, filled] = self.tails[at, row]
        ids = ranks.ranks(ids, self.vocab_size)
        if sort_ties:
            bits, ids = _with_sorted_ties(bits, ids, counts)
        by_entry = (np.ascontiguousarray(np.moveaxis(part, -1, 0)) for part in (bits, ids))
        return Frames(bits=next(by_entry), ids=next(by_entry), counts=counts, tails=tails)


class DecodedRows:
    """Collects decoded frames as packed rows.

    Args:
        header: The payload's.
        columns: Rows that are wanted.
        positions: Positions of them that are wanted.
        max_bytes: What they may take.

    Raises:
        CacheFormatError: They would take more.
    """

    def __init__(self, header: FrameHeader, columns: int, positions: range, max_bytes: int) -> None:
        self._header = header
        self._positions = positions
        self._planes = max(1, header.id_bits - 16)
        tokens = (len(positions), columns)
        integers, self._dtype = VALUE_TYPES[header.value_type]
        if header.value_type == EIGHT_BIT:
            integers = eight_bit.VALUES.view(np.uint16).dtype
        shapes = {
            "values": ((*tokens, header.k), integers),
            "indices_low": ((*tokens, header.k), np.dtype(np.uint16)),
            "high_bits": ((*tokens, self._planes, -(-header.k // 8)), np.dtype(np.uint8)),
        }
        if header.has_tail:
            shapes["tail_logprob"] = tokens, np.dtype(np.uint32)
        size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())
        if size > max_bytes:
            raise CacheFormatError(f"its rows take {size} bytes, expected at most {max_bytes}")
        self._room = {name: np.empty(*shape) for name, shape in shapes.items()}

    def put(self, frames: Frames, places: Sequence[tuple[int, int]]) -> None:
        """Put frames where they belong: *places* are the (column, first position) of each."""
        parts = self._by_token(frames)
        for number, (column, position) in enumerate(places):
            begin = max(position, self._positions.start)
            length = self._header.frame_positions
            end = min(position + length, self._positions.stop)
            into = slice(begin - self._positions.start, end - self._positions.start)
            of_frame = slice(begin - position, end - position)
            for name, part in parts.items():
                self._room[name][into, column] = part[number, of_frame]

    def packed(self, rows: Sequence[int]) -> PackedRows:
        """Return the rows; *rows* are their numbers in the payload."""
        room = {name: torch.from_numpy(part) for name, part in self._room.items()}
        tail, proofs = room.get("tail_logprob"), self._header.fingerprints
        return PackedRows(
            values=room["values"].view(self._dtype),
            indices_low=room["indices_low"],
            high_bits=room["high_bits"].flatten(2),
            tail_logprob=None if tail is None else tail.view(torch.float32),
            label_fingerprints=None
            if proofs is None
            else torch.from_numpy(np.ascontiguousarray(proofs[list(rows)].T, np.int64)),
        )

    def _by_token(self, frames: Frames) -> dict[str, np.ndarray]:
        """Return the parts of :class:`PackedRows` of *frames*, ``(F, P, ...)`` each."""
        values = np.moveaxis(frames.bits, 0, -1)
        if self._header.value_type == EIGHT_BIT:
            values = eight_bit.from_codes(values).view(np.uint16)
        # torch transposes this faster than numpy.
        ids = torch.from_numpy(frames.ids.view(np.int32)).permute(1, 2, 0).contiguous().numpy()
        low, high = ids.view(np.uint16)[..., ::2], ids.view(np.uint16)[..., 1::2]
        masked = None if frames.kept is None else ~np.moveaxis(frames.kept, 0, -1)
        if masked is not None:
            sentinel = torch.tensor([LOGPROB_SENTINEL], dtype=self._dtype)
            values = np.where(masked, sentinel.view(torch.uint8).numpy().view(values.dtype), values)
            low = np.where(masked, np.uint16(0xFFFF), low)
        planes = []
        for plane in range(self._planes):
            ones = ids > 0xFFFF if self._planes == 1 else (high & (1 << plane)) != 0
            planes.append(np.packbits(ones if masked is None else ones | masked, axis=-1))
        parts = {"values": values, "indices_low": low, "high_bits": np.stack(planes, axis=2)}
        return parts if frames.tails is None else parts | {"tail_logprob": frames.tails}


def _with_sorted_ties(
    bits: np.ndarray, ranks: np.ndarray, counts: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return ``(F, P, K)`` bits and ranks, with entries of equal bits ordered by rank."""
    keys = (bits.astype(np.uint64) << np.uint64(32)) | ranks
    if counts is not None:
        keys[~_prefix(counts, bits.shape[-1])] = np.iinfo(np.uint64).max
    keys.sort(axis=-1)
    return (keys >> np.uint64(32)).astype(bits.dtype), keys.astype(np.uint32)


def _counts(values: torch.Tensor) -> np.ndarray | None:
    """Return ``(S, n)`` uint16 how many entries of each token are not masked; None if all are."""
    masked = (values == LOGPROB_SENTINEL).cpu().numpy()
    if not masked.any():
        return None
    if (masked[..., :-1] & ~masked[..., 1:]).any():
        raise ValueError("An entry follows a masked one of its token, and would be lost.")
    return (~masked).sum(axis=-1).astype(np.uint16)


def _prefix(counts: np.ndarray, k: int) -> np.ndarray:
    return np.arange(k) < counts[..., None]


def _bits(values: torch.Tensor) -> np.ndarray:
    """Return the bits of floating-point *values* as unsigned integers."""
    integers = torch.int16 if values.itemsize == 2 else torch.int32
    bits = values.detach().cpu().contiguous().view(integers).numpy()
    return bits.view(np.dtype(f"u{bits.itemsize}"))
