# SPDX-License-Identifier: Apache-2.0
"""The teacher's rows as tensors: ids packed as they are stored and travel, or as a loss takes them.

Pure: tensors and sizes, on any device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_ALIGNMENT = 16


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TeacherRows:
    """Decoded targets of *n* samples: K entries per token, sorted by falling log-probability."""

    values: torch.Tensor
    """``(S, n, K)`` log-probabilities, fp16, bf16 or fp32; -1000.0 marks a masked entry."""
    indices: torch.Tensor
    """``(S, n, K)`` int32 token ids."""
    tail_logprob: torch.Tensor | None = None
    """``(S, n)`` fp32 log of the mass outside the K entries; None where the cache has none."""
    label_fingerprints: torch.Tensor | None = None
    """``(C, n)`` int64 fingerprints of the labels the teacher saw, of the leading chunks that can
    be compared; of the whole sequence on every context-parallel rank. None where there are none."""

    def split(self) -> "tuple[TeacherRows, ...]":
        """Return the rows along one more dimension, which all tensors have in front."""
        parts = {name: getattr(self, name) for name in self.__slots__}

        def row(number: int) -> dict[str, Any]:
            return {name: part if part is None else part[number] for name, part in parts.items()}

        return tuple(TeacherRows(**row(number)) for number in range(self.values.shape[0]))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedRows:
    """Targets of *n* samples as stored: values and ids as they travel, ids still packed.

    All tensors may have the same leading dimensions before those named here.
    """

    values: torch.Tensor
    """``(S, n, K)`` fp16, bf16 or fp32."""
    indices_low: torch.Tensor
    """``(S, n, K)`` uint16."""
    high_bits: torch.Tensor
    """``(S, n, h * ceil(K / 8))`` uint8: the ids' bits above the low 16, 1 <= h <= 15 planes.

    Plane 0 holds bit 16 of the ids, each further one the next higher; a plane is ``numpy.packbits``
    of each token's K bits.
    """
    tail_logprob: torch.Tensor | None = None
    """``(S, n)`` fp32, or None."""
    label_fingerprints: torch.Tensor | None = None
    """``(ceil(S / 64), n)`` int64, or None."""

    @property
    def high_planes(self) -> int:
        """How many planes ``high_bits`` holds."""
        return self.high_bits.shape[-1] // plane_bytes(self.values.shape[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        parts = (
            self.values,
            self.indices_low,
            self.high_bits,
            self.tail_logprob,
            self.label_fingerprints,
        )
        return sum(part.nbytes for part in parts if part is not None)

    def unpack_all(self) -> TeacherRows:
        """Return all rows with their ids expanded, where they are: on a GPU without waiting.

        ``values`` is the tensor of these rows, and so are tails and fingerprints.
        """
        return TeacherRows(
            values=self.values,
            indices=_join_ids(self.indices_low, self.high_bits),
            tail_logprob=self.tail_logprob,
            label_fingerprints=self.label_fingerprints,
        )

    def unpack(
        self, rows: slice | Sequence[int] | None = None, positions: slice | None = None
    ) -> TeacherRows:
        """Return the selected *rows* (along n) and *positions* (along S), None meaning all.

        Only what is returned is expanded. Fingerprints are those of the whole sequence, whatever
        *positions* are selected. There are no dimensions before those of the class.
        """
        pick = (
            slice(None) if positions is None else positions,
            slice(None) if rows is None else rows,
        )
        tail, fingerprints = self.tail_logprob, self.label_fingerprints
        selected = PackedRows(
            values=self.values[pick],
            # torch selects rows of int16, but not of uint16.
            indices_low=self.indices_low.view(torch.int16)[pick].view(torch.uint16),
            high_bits=self.high_bits[pick],
            tail_logprob=None if tail is None else tail[pick],
            label_fingerprints=None if fingerprints is None else fingerprints[:, pick[1]],
        )
        return selected.unpack_all()


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockLayout:
    """How the rows of one microbatch lie in one block of bytes, which is stored and sent as one.

    The largest elements come first, so that each part is aligned to its own.

    Attributes:
        positions: ``S``, or ``S / cp`` of one context-parallel rank.
        samples: ``n``, the micro batch size.
        k: Entries per token.
        high_planes: Planes of the ids' bits above the low 16.
        dtype: Of the values.
        has_tail: Whether there are tail log-probabilities.
        chunks: Chunks with fingerprints; 0 if there are none.
    """

    positions: int
    samples: int
    k: int
    high_planes: int
    dtype: torch.dtype
    has_tail: bool
    chunks: int

    @property
    def nbytes(self) -> int:
        """Bytes of a block, a multiple of 16."""
        size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._parts().values())
        return -(-size // _ALIGNMENT) * _ALIGNMENT

    def rows(self, blocks: torch.Tensor) -> PackedRows:
        """Return views of *blocks*, uint8 ``(..., nbytes)``; leading dimensions stay in front."""
        views: dict[str, torch.Tensor] = {}
        begin = 0
        for name, (shape, dtype) in self._parts().items():
            end = begin + math.prod(shape) * dtype.itemsize
            views[name] = blocks[..., begin:end].view(dtype).unflatten(-1, shape)
            begin = end
        return PackedRows(**views)

    def _parts(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and type of the tensors of :class:`PackedRows` that there are, in order."""
        tokens = (self.positions, self.samples)
        parts: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if self.chunks:
            parts["label_fingerprints"] = (self.chunks, self.samples), torch.int64
        if self.has_tail:
            parts["tail_logprob"] = tokens, torch.float32
        parts["values"] = (*tokens, self.k), self.dtype
        parts["indices_low"] = (*tokens, self.k), torch.uint16
        parts["high_bits"] = (*tokens, self.high_planes * plane_bytes(self.k)), torch.uint8
        return parts


def plane_bytes(k: int) -> int:
    """Return the bytes that one plane of ``high_bits`` takes for a token of *k* entries."""
    return -(-k // 8)


def bits_by_token(bit_17: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return the bits of :func:`v2_pack_indices` with every token's in bytes of their own.

    Args:
        bit_17: ``(ceil(S * n * K / 8),)`` uint8, packed over all ids.
        shape: ``(S, n, K)``.

    Returns:
        ``(S, n, ceil(K / 8))`` uint8, a view where K is a multiple of 8.
    """
    *tokens, k = shape
    if k % 8 == 0:
        return bit_17.view(*tokens, k // 8)
    bits = np.unpackbits(bit_17.numpy(), count=math.prod(shape)).reshape(*shape)
    return torch.from_numpy(np.packbits(bits, axis=-1))


def _join_ids(low: torch.Tensor, high_bits: torch.Tensor) -> torch.Tensor:
    """Return int32 ids ``(..., K)`` from their low 16 bits and the planes of those above."""
    k = low.shape[-1]
    planes = high_bits.split(plane_bytes(k), dim=-1)
    if low.device.type == "cpu":  # numpy does this in a fraction of torch's time
        first, *others = (np.unpackbits(plane.numpy(), axis=-1, count=k) for plane in planes)
        high = first.astype(np.uint16) if others else first
        for shift, bits in enumerate(others, 1):
            high |= np.left_shift(bits, shift, dtype=np.uint16)
        return torch.from_numpy(join_halves(low.numpy(), high))
    shifts = torch.arange(7, -1, -1, device=low.device, dtype=torch.uint8)
    # Few operations know uint16 there.
    ids = low.view(torch.int16).int() & 0xFFFF
    for shift, plane in enumerate(planes, 16):
        # (..., K / 8, 8) -> (..., K)
        bit = ((plane.unsqueeze(-1) >> shifts) & 1).flatten(-2)[..., :k]
        ids |= bit.int() << shift
    return ids


def join_halves(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return int32 ids from uint16 low halves and what stands above them, below 2**15."""
    halves = np.empty((*low.shape, 2), "<u2")
    halves[..., 0] = low
    halves[..., 1] = high
    return halves.view("<i4")[..., 0]
