# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of label tokens: 64 bits per chunk of a sample, the same wherever it is computed.

The fingerprint of a chunk is ``sum(mix64(label) * (mix64(position) | 1)) mod 2**64`` over its
positions, counted from the start of the sample. It depends on every token and on its place; a
sample that lies in parts on several context-parallel ranks has the sum of their fingerprints; and
wrapping integer arithmetic gives the same bits on a CPU and on a GPU. It finds accidents, and does
not withstand anyone who wants two samples to look alike.

Pure: tensors and sizes, nothing of the trainer.
"""

import torch

CHUNK = 64
"""Positions per fingerprint; part of the format."""

# The finalizer of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators).
_INCREMENT = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)


def chunk_count(length: int) -> int:
    """Return how many chunks a sequence of *length* positions has; the last one may be short."""
    return -(-length // CHUNK)


def comparable_chunks(stored: int, length: int) -> int:
    """Return how many leading chunks two sequences of one sample have in common.

    All of them where the lengths are equal. Where the stored sequence is longer, the chunk with the
    last position of the shorter one does not count, even if it is whole: what a data set puts at
    the end of a sample that it cuts off (SFT: padding) is not what follows in a longer one.
    """
    return chunk_count(stored) if stored == length else (min(stored, length) - 1) // CHUNK


class LabelFingerprinter:
    """Computes the fingerprints of this rank's part of a microbatch.

    Args:
        positions: ``(S / cp,)`` the positions of a sample that this rank holds, in order.
        length: Positions of a whole sample, ``S``.
    """

    def __init__(self, positions: torch.Tensor, length: int) -> None:
        self._positions = positions
        self._weights = mix64(positions) | 1
        self._length = length

    def __call__(self, labels: torch.Tensor) -> torch.Tensor:
        """Return ``(C, B)`` int64 on the device of *labels*.

        Args:
            labels: ``(B, S / cp)`` int64, or ``(1, B * S)`` where the samples of the microbatch are
                packed into one sequence.

        Raises:
            ValueError: *labels* are not those of whole samples.
        """
        local = self._positions.numel()
        if labels.numel() == 0 or labels.numel() % local:
            raise ValueError(
                f"The labels of a microbatch have shape {tuple(labels.shape)}; expected {local} "
                "positions for each of its samples. Every batch must have samples of --seq-length "
                "tokens."
            )
        if self._weights.device != labels.device:
            self._weights = self._weights.to(labels.device)
            self._positions = self._positions.to(labels.device)
        # (B, S / cp)
        weighted = mix64(labels.reshape(-1, local)).mul_(self._weights)
        chunks = chunk_count(self._length)
        # Scattered to their places and then summed: no atomics, so no order to depend on. (B, C*64)
        whole = weighted.new_zeros(weighted.size(0), chunks * CHUNK)
        whole.index_copy_(1, self._positions, weighted)
        # (B, C * 64) -> (B, C) -> (C, B)
        return whole.unflatten(1, (chunks, CHUNK)).sum(-1).t().contiguous()


def mix64(values: torch.Tensor) -> torch.Tensor:
    """Return splitmix64's output for each of the integers *values*, as int64 of the same bits."""
    mixed = values.long() + _signed(_INCREMENT)
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, None), strict=True):
        # An int64 shifts its sign in; the mask takes it out again.
        mixed ^= (mixed >> shift) & ((1 << (64 - shift)) - 1)
        if multiplier is not None:
            mixed *= _signed(multiplier)
    return mixed


def differing_chunks(batch: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Return ``(C', B)`` bool: which of the teacher's chunks are not those of the batch.

    Args:
        batch: ``(C, B)`` fingerprints of the batch.
        teacher: ``(C', B)`` of the rows it is trained on, ``C' <= C``, on the same device.
    """
    assert teacher.dim() == batch.dim() == 2, (teacher.shape, batch.shape)
    assert teacher.size(0) <= batch.size(0), (teacher.shape, batch.shape)
    assert teacher.size(1) == batch.size(1), (teacher.shape, batch.shape)
    return batch[: teacher.size(0)] != teacher


def _signed(bits: int) -> int:
    """Return the int64 of these 64 bits."""
    return bits - (1 << 64) if bits >> 63 else bits
