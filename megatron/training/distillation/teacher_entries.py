# SPDX-License-Identifier: Apache-2.0
"""A teacher's kept entries, as the loss on one tensor parallel rank needs them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.training.distillation.vocab_shard import VocabShard

# A stored log-probability of exactly this value marks an entry that top-P dropped.
_MASKED = -1000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherEntries:
    """The teacher's kept entries of ``T`` tokens, as one rank sees them."""

    logprobs: Tensor  # (T, K), -inf where masked
    probs: Tensor  # (T, K), 0 where masked
    elsewhere: Tensor  # (T, K) bool: masked, or on another rank
    slots: Tensor  # (T, K) int64 column in the shard, `real` (one past the end) where elsewhere
    tail: Tensor | None  # (T,) probability outside the entries; None without a tail bucket


def check_entries(
    logits: Tensor, logprobs: Tensor, indices: Tensor, tail_logprob: Tensor | None
) -> None:
    """Raise ValueError, with what was found and expected, where shapes or dtypes do not fit."""
    tokens = tuple(logits.shape[:2])
    if logprobs.dim() != 3 or tuple(logprobs.shape[:2]) != tokens:
        raise ValueError(
            f"teacher_logprobs must be (S, B, K) with (S, B) = {tokens} like student_logits, "
            f"got {tuple(logprobs.shape)}"
        )
    if indices.shape != logprobs.shape or indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"teacher_indices must be int32 or int64 of shape {tuple(logprobs.shape)} like "
            f"teacher_logprobs, got {indices.dtype} {tuple(indices.shape)}"
        )
    if tail_logprob is not None and tuple(tail_logprob.shape) != tokens:
        raise ValueError(f"tail_logprob must be (S, B) = {tokens}, got {tuple(tail_logprob.shape)}")


def read_entries(
    logprobs: Tensor,
    indices: Tensor,
    tail_logprob: Tensor | None,
    with_tail: bool,
    shard: VocabShard,
    dtype: torch.dtype,
) -> TeacherEntries:
    """The teacher's ``(T, K)`` entries as probabilities in `dtype` and columns of this shard."""
    masked = (logprobs == _MASKED) | (indices < 0) | (indices >= shard.vocab_size)
    logp = logprobs.to(dtype).masked_fill(masked, -math.inf)
    probs = logp.exp()
    columns = indices.long() - shard.start
    elsewhere = masked | (columns < 0) | (columns >= shard.real)
    tail = None
    if with_tail:
        if tail_logprob is None:
            # float64: fp32 would round the sum of many entries by as much as a small tail is worth
            tail = (1 - probs.sum(-1, dtype=torch.float64)).clamp_(min=0).to(dtype)
        else:
            tail = tail_logprob.reshape(-1).to(dtype).exp()
        # Entries that cover the vocabulary leave no tail, whatever their rounding says.
        covered = masked.logical_not().sum(-1) == shard.vocab_size
        tail = tail.masked_fill(covered, 0)
    return TeacherEntries(
        logprobs=logp,
        probs=probs,
        elsewhere=elsewhere,
        slots=columns.masked_fill_(elsewhere, shard.real),
        tail=tail,
    )
