# SPDX-License-Identifier: Apache-2.0
"""What the reader is asked for and what it answers, as plain values."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megatron.training.distillation.packed_rows import BlockLayout, TeacherRows

DEFAULT_MAX_AHEAD_BYTES = 2 << 30
"""Bytes of decoded rows that may be held ahead of training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadLayout:
    """The student's batches, and this rank's share of them."""

    dp_rank: int
    dp_size: int
    mbs: int
    gbs: int
    cp_rank: int | None = 0
    """None takes the slices of all context-parallel ranks, each for itself."""
    cp_size: int = 1
    seq_length: int | None = None
    """Positions of a whole sequence that the student needs; None takes what is stored."""

    def __post_init__(self) -> None:
        """Check the sizes; ValueError names the ones that do not fit."""
        if min(self.dp_size, self.mbs, self.gbs) < 1 or self.gbs % (self.mbs * self.dp_size):
            raise ValueError(
                f"The global batch size ({self.gbs}) must be a positive multiple of the micro "
                f"batch size times the data-parallel size ({self.mbs} * {self.dp_size})."
            )
        for name, rank, size in (
            ("data", self.dp_rank, self.dp_size),
            ("context", self.cp_rank, self.cp_size),
        ):
            if rank is not None and not 0 <= rank < size:
                raise ValueError(f"The {name}-parallel rank is {rank}, expected 0 to {size - 1}.")

    @property
    def num_microbatches(self) -> int:
        """Microbatches per iteration of this rank."""
        return self.gbs // (self.mbs * self.dp_size)

    @property
    def cp_ranks(self) -> Sequence[int]:
        """The context-parallel ranks whose slices are wanted."""
        return range(self.cp_size) if self.cp_rank is None else (self.cp_rank,)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class IterationTargets:
    """The rows of one load DP rank for the iteration that starts at global sample *start*."""

    start: int
    layout: BlockLayout
    """How each block holds its rows."""
    blocks: torch.Tensor
    """``(num_microbatches, context-parallel slices, bytes of a block)`` uint8."""

    @property
    def microbatches(self) -> tuple[TeacherRows, ...]:
        """Unpack the first slice: one ``(S / cp, mbs, K)`` per microbatch."""
        return self.layout.rows(self.blocks[:, 0]).unpack_all().split()

    def pin_memory(self) -> "IterationTargets":
        """Return the same targets in page-locked memory."""
        return replace(self, blocks=self.blocks.pin_memory())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class IterationFailure:
    """Why the iteration that starts at global sample *start* has no targets."""

    start: int
    error: Exception
    fatal: bool
    """The run itself is wrong (other data, unreadable format): no iteration can be trusted."""
