# SPDX-License-Identifier: Apache-2.0
"""Where one tensor parallel rank's columns lie in the vocabulary."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabShard:
    """The columns of one rank.

    Attributes:
        start: Id of the first column.
        width: Columns.
        real: Columns that do not merely pad; the others come last.
        vocab_size: Real ids over all ranks.
        tp_rank: This rank's place in the tensor parallel group.
        tp_size: Size of that group.
        tp_group: That group; None is torch's default group.
    """

    start: int
    width: int
    real: int
    vocab_size: int
    tp_rank: int
    tp_size: int
    tp_group: dist.ProcessGroup | None


def shard_of(
    logits: Tensor,
    vocab_size: int | None,
    tp_rank: int,
    tp_size: int,
    tp_group: dist.ProcessGroup | None,
    *,
    name: str,
) -> VocabShard:
    """Return the place of *logits*, ``(S, B, V / tp)``, that the caller calls *name*.

    Raises:
        ValueError: They are no float tensor of three dimensions, or a size or a rank does not fit.
    """
    if logits.dim() != 3 or not logits.is_floating_point():
        raise ValueError(
            f"{name} must be a float tensor (S, B, V/tp), got {logits.dtype} {tuple(logits.shape)}"
        )
    if not 0 <= tp_rank < tp_size:
        raise ValueError(f"tp_rank must be in [0, {tp_size}) for tp_size {tp_size}, got {tp_rank}")
    width = logits.shape[-1]
    if vocab_size is None:
        vocab_size = width * tp_size
    if not 0 < vocab_size <= width * tp_size:
        raise ValueError(
            f"vocab_size must be in [1, {width * tp_size}] for {tp_size} shards of {width} logits, "
            f"got {vocab_size}"
        )
    start = tp_rank * width
    return VocabShard(
        start=start,
        width=width,
        real=min(max(vocab_size - start, 0), width),
        vocab_size=vocab_size,
        tp_rank=tp_rank,
        tp_size=tp_size,
        tp_group=tp_group,
    )
