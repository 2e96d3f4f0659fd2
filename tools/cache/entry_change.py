# SPDX-License-Identifier: Apache-2.0
"""Keeps fewer entries of every token, or rounds them, as a teacher would have done. Pure."""

import dataclasses
import math
from dataclasses import dataclass

import torch

from megatron.training.distillation import eight_bit
from megatron.training.distillation.packed_rows import TeacherRows
from megatron.training.distillation.payload import INDEX_SENTINEL, LOGPROB_SENTINEL
from megatron.training.distillation.save_format import EIGHT_BIT
from megatron.training.distillation.teacher_topk import TeacherTopK, apply_top_p
from megatron.training.distillation.utils import SaverSettings

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryChange:
    """What becomes of the entries of a token.

    Attributes:
        k: The first of them are kept; None keeps all.
        nucleus: P and minimum K of the nucleus that is kept of these; None keeps all.
        dtype: Of the values; None leaves them as they are.
        eight_bit: Whether they become the values of the nearest 8-bit codes.
    """

    k: int | None
    nucleus: tuple[float, int] | None
    dtype: torch.dtype | None
    eight_bit: bool

    @classmethod
    def between(cls, source: SaverSettings, target: SaverSettings) -> "EntryChange":
        """Return what leads from entries of one kind to those of another."""
        nucleus = None
        if target.p is not None and (target.p, target.min_k) != (source.p, source.min_k):
            nucleus = target.p, target.min_k or 1
        is_new = target.save_dtype != source.save_dtype
        return cls(
            k=target.k if target.k != source.k else None,
            nucleus=nucleus,
            dtype=_DTYPES.get(target.save_dtype or "") if is_new else None,
            eight_bit=target.save_dtype == EIGHT_BIT,
        )

    @property
    def drops(self) -> bool:
        """Whether it may drop entries."""
        return self.k is not None or self.nucleus is not None

    def apply(self, rows: TeacherRows) -> TeacherRows:
        """Return *rows* with the entries that are kept.

        What is dropped goes to the tail, where there is one: a cache without tails is read as if
        all mass outside the entries were its tail, which stays true.
        """
        if self.drops:
            rows = self._kept(rows)
        values = rows.values
        if self.eight_bit:
            codes = eight_bit.from_codes(eight_bit.to_codes(values.half().numpy()))
            masked = values == LOGPROB_SENTINEL
            values = torch.from_numpy(codes).masked_fill(masked, LOGPROB_SENTINEL)
        elif self.dtype is not None:
            values = values.to(self.dtype)
        return rows if values is rows.values else dataclasses.replace(rows, values=values)

    def _kept(self, rows: TeacherRows) -> TeacherRows:
        k = rows.values.shape[-1] if self.k is None else self.k
        masked = rows.values == LOGPROB_SENTINEL
        values = rows.values.float().masked_fill_(masked, -math.inf)
        tail = rows.tail_logprob
        if tail is None:
            tail = torch.full(values.shape[:2], -math.inf)
        if k < values.shape[-1]:
            tail = torch.logaddexp(tail, values[..., k:].logsumexp(-1))
        # (S, n, K)
        topk = TeacherTopK(
            logprobs=values[..., :k], indices=rows.indices[..., :k], tail_logprob=tail
        )
        if self.nucleus is not None:
            topk, _ = apply_top_p(topk, *self.nucleus)
        return dataclasses.replace(
            rows,
            values=topk.logprobs.masked_fill(masked[..., :k], LOGPROB_SENTINEL).to(
                rows.values.dtype
            ),
            indices=topk.indices,
            tail_logprob=None if rows.tail_logprob is None else topk.tail_logprob,
        )


def unmasked(rows: TeacherRows) -> TeacherRows:
    """Return *rows* whose masked entries have the id -1, as a teacher gives them."""
    masked = rows.values == LOGPROB_SENTINEL
    return dataclasses.replace(rows, indices=rows.indices.masked_fill(masked, INDEX_SENTINEL))


def trimmed(rows: TeacherRows) -> TeacherRows:
    """Return *rows* with as many entries as the token has that keeps most, as a teacher does."""
    # Of falling entries, those that any token keeps come first.
    width = int((rows.values != LOGPROB_SENTINEL).any(dim=(0, 1)).sum())
    return dataclasses.replace(
        rows, values=rows.values[..., :width], indices=rows.indices[..., :width]
    )
