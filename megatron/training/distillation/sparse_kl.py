# SPDX-License-Identifier: Apache-2.0
"""The distillation loss on the teacher's support, alone or with the LM loss; forward and backward.

With ``p`` the teacher, ``q`` the student, ``K`` the entries the teacher kept and one bucket for
everything else (``p_t``, ``q_t``), the loss of a token is::

    KL = sum_k p_k (log p_k - log q_k) + p_t (log p_t - log q_t)

and its gradient on logit ``v``, with ``P = sum_k p_k + p_t``, is ``P q_v - p_v`` for ``v`` in ``K``
and ``q_v (P - p_t / q_t)`` elsewhere.  The LM loss is the trainer's: the cross entropy of the label
over all columns, those that only pad included.  Both losses together read the logits once and write
one gradient (``row_passes``).  From forward to backward live the logits, a few numbers per token
and three per entry.

Needs torch and an explicit process group, nothing of the trainer.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.training.distillation.row_passes import read_rows, write_gradient
from megatron.training.distillation.teacher_entries import (
    TeacherEntries,
    check_entries,
    read_entries,
)
from megatron.training.distillation.vocab_shard import VocabShard, shard_of

# A student tail below this, relative to the largest probability, counts as this: loss and gradient
# stay finite where the tail underflows.
_TAIL_FLOOR = 1e-25


@dataclass(frozen=True, kw_only=True, slots=True)
class _Options:
    """What to compute: `share` leaves this rank's share of the divergence instead of the whole."""

    shard: VocabShard
    with_tail: bool
    share: bool


def sparse_kl(
    student_logits: Tensor,
    teacher_logprobs: Tensor,
    teacher_indices: Tensor,
    *,
    tail_logprob: Tensor | None = None,
    with_tail: bool = True,
    vocab_size: int | None = None,
    tp_rank: int = 0,
    tp_size: int = 1,
    tp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Per-token KL divergence from teacher to student; every TP rank gets the whole of it.

    Collective over TP when ``tp_size > 1``: every rank must call.  Forward runs one all-gather of
    five numbers per token, backward runs none.

    Given the same upstream gradient on every rank, each rank gets the exact gradient of its own
    columns.  A token whose upstream gradient is exactly 0 gets a gradient of exactly 0, even where
    its logits or its loss are not finite.  The logits are never written to.

    Args:
        student_logits: ``(S, B, V / tp)``, any float dtype.  Rank ``r`` holds the columns of ids
            ``[r * V / tp, (r + 1) * V / tp)``.  Arithmetic is fp32, or float64 for float64 logits.
        teacher_logprobs: ``(S, B, K)`` float, in nats.  An entry of exactly -1000.0 is masked,
            whatever its id.
        teacher_indices: ``(S, B, K)`` int32 or int64 vocabulary ids, distinct within a token.  An
            entry whose id is outside ``[0, vocab_size)`` counts as masked.
        tail_logprob: ``(S, B)`` log of the teacher's mass outside the entries.  None takes the
            complement of their mass, but not less than 0.
        with_tail: False leaves the tail bucket out and ignores `tail_logprob`.
        vocab_size: number of real ids.  Columns from there on only pad: they are outside the
            distribution and get a gradient of exactly 0.  None means that no column pads.
        tp_rank: this rank's place in the tensor-parallel group.
        tp_size: size of that group.
        tp_group: that group; None is torch's default group.

    Returns:
        ``(S, B)`` fp32 (float64 for float64 logits), in nats.

    Raises:
        ValueError: a shape, a dtype or a rank does not fit; says what was found and expected.
    """
    shard = shard_of(student_logits, vocab_size, tp_rank, tp_size, tp_group, name="student_logits")
    check_entries(student_logits, teacher_logprobs, teacher_indices, tail_logprob)
    loss: Tensor
    loss, _ = _Losses.apply(
        student_logits,
        teacher_logprobs,
        teacher_indices,
        tail_logprob,
        None,
        _Options(shard=shard, with_tail=with_tail, share=False),
    )
    return loss


def sparse_kl_and_cross_entropy(
    student_logits: Tensor,
    teacher_logprobs: Tensor,
    teacher_indices: Tensor,
    labels: Tensor,
    *,
    tail_logprob: Tensor | None = None,
    vocab_size: int | None = None,
    tp_rank: int = 0,
    tp_size: int = 1,
    tp_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`sparse_kl` and the LM loss of the same logits, in one pass forward and one backward.

    Collective over TP as :func:`sparse_kl`, with seven numbers per token.  A loss whose upstream
    gradient is None costs nothing in backward.  A token whose upstream gradients are both exactly 0
    gets a gradient of exactly 0.

    Args:
        student_logits: as for :func:`sparse_kl`.
        teacher_logprobs: as for :func:`sparse_kl`.
        teacher_indices: as for :func:`sparse_kl`.
        labels: ``(S, B)`` int64 vocabulary ids, the same on all TP ranks.  One that is outside the
            padded vocabulary counts as a label of probability 0 in the gradient, as it does in
            ``vocab_parallel_cross_entropy``; its LM loss means nothing.
        tail_logprob: as for :func:`sparse_kl`.
        vocab_size: as for :func:`sparse_kl`.  In the LM loss padding columns have their share of
            the probability, as they have in the trainer's.
        tp_rank: as for :func:`sparse_kl`.
        tp_size: as for :func:`sparse_kl`.
        tp_group: as for :func:`sparse_kl`.

    Returns:
        Divergence and cross entropy, both as :func:`sparse_kl` returns them.

    Raises:
        ValueError: a shape, a dtype or a rank does not fit; says what was found and expected.
    """
    shard = shard_of(student_logits, vocab_size, tp_rank, tp_size, tp_group, name="student_logits")
    check_entries(student_logits, teacher_logprobs, teacher_indices, tail_logprob)
    if labels.shape != student_logits.shape[:2] or labels.dtype != torch.int64:
        raise ValueError(
            f"labels must be int64 of shape (S, B) = {tuple(student_logits.shape[:2])}, "
            f"got {labels.dtype} {tuple(labels.shape)}"
        )
    kl, cross_entropy = _Losses.apply(
        student_logits,
        teacher_logprobs,
        teacher_indices,
        tail_logprob,
        labels,
        _Options(shard=shard, with_tail=True, share=False),
    )
    return kl, cross_entropy


def sparse_kl_share(
    student_logits: Tensor,
    teacher_logprobs: Tensor,
    teacher_indices: Tensor,
    *,
    tail_logprob: Tensor | None = None,
    with_tail: bool = True,
    vocab_size: int | None = None,
    tp_rank: int = 0,
    tp_size: int = 1,
    tp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """This rank's share of :func:`sparse_kl`: the shares of all TP ranks sum to it.

    A share holds the entries whose ids lie on this rank; the tail counts on TP rank 0.  The
    gradient is that of the sum of all shares, given the same upstream gradient on every rank, so
    callers add the shares up outside autograd.  Arguments, result, errors and the one collective
    over TP (every rank must call) are those of :func:`sparse_kl`.
    """
    shard = shard_of(student_logits, vocab_size, tp_rank, tp_size, tp_group, name="student_logits")
    check_entries(student_logits, teacher_logprobs, teacher_indices, tail_logprob)
    share: Tensor
    share, _ = _Losses.apply(
        student_logits,
        teacher_logprobs,
        teacher_indices,
        tail_logprob,
        None,
        _Options(shard=shard, with_tail=with_tail, share=True),
    )
    return share


def _all_gather(packed: Tensor, shard: VocabShard) -> Tensor:
    """``(tp, *packed.shape)``.  Collective over TP when ``tp_size > 1``: every rank must call."""
    if shard.tp_size == 1:
        return packed[None]
    out = packed.new_empty(shard.tp_size * packed.numel())
    dist.all_gather_into_tensor(out, packed.flatten(), group=shard.tp_group)
    return out.view(shard.tp_size, *packed.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Student:
    """The student's distribution over all ranks, relative to a reference per token.

    With ``e_v = exp(x_v - ref)``: `total` sums it over the real ids, `tail` over those that are no
    entry.
    """

    ref: Tensor  # (T,)
    total: Tensor  # (T,)
    tail: Tensor  # (T,)
    kept: Tensor  # (T, K) e of the entries on this rank, 0 elsewhere
    cross: Tensor  # (tp, T) sum of p_k log q_k over each rank's entries
    log_all: Tensor | None  # (T,) log of the sum of e over all columns, those that pad included
    label: Tensor | None  # (T,) x of the label - ref


def _gather_student(
    x: Tensor,
    entries: TeacherEntries,
    own_probs: Tensor,
    labels: Tensor | None,
    shard: VocabShard,
    dtype: torch.dtype,
) -> _Student:
    """Collective over TP when ``tp_size > 1``: every rank must call."""
    read = read_rows(x[:, : shard.real], entries.slots, entries.elsewhere, dtype)
    above = read.picked.sub_(read.reference[:, None])
    kept = above.exp().masked_fill_(entries.elsewhere, 0)
    # Masked because 0 * inf is not a number.
    own_dot = above.masked_fill_(own_probs == 0, 0).mul_(own_probs).sum(-1)
    own = [read.reference, read.outside, kept.sum(-1), own_dot, own_probs.sum(-1)]
    if labels is not None:
        own += _read_labels(x, labels, read.reference, shard)

    # (tp, 5 or 7, T) -> so many times (tp, T)
    refs, tails, kepts, dots, masses, *rest = _all_gather(torch.stack(own), shard).unbind(1)
    ref = refs.amax(0)
    weights = (refs - ref).exp_()
    tail = (weights * tails).sum(0)
    total = (weights * kepts).sum(0).add_(tail)
    log_total = total.log()
    log_all = label = None
    if labels is not None:
        pads, label_sums = rest
        log_all = torch.logaddexp(log_total, pads.logsumexp(0) - ref)
        owner = labels.div(shard.width, rounding_mode="floor")
        owned = (owner >= 0) & (owner < shard.tp_size)
        owner = owner.clamp(0, shard.tp_size - 1)[None]
        label = (label_sums + (refs - ref)).gather(0, owner)[0].masked_fill_(~owned, 0)
    return _Student(
        ref=ref,
        total=total,
        tail=tail.clamp_(min=_TAIL_FLOOR),
        kept=kept.mul_((read.reference - ref).exp_()[:, None]),
        # log q_k = x_k - ref - log_total
        cross=dots + masses * (refs - ref - log_total),
        log_all=log_all,
        label=label,
    )


def _read_labels(x: Tensor, labels: Tensor, reference: Tensor, shard: VocabShard) -> list[Tensor]:
    """``(T,)`` log-sum-exp of the columns that pad, and the label's logit less the reference."""
    pads = x[:, shard.real :].to(reference.dtype).logsumexp(-1)
    columns = labels - shard.start
    here = (columns >= 0) & (columns < shard.width)
    picked = x.gather(1, columns.masked_fill(~here, 0)[:, None])[:, 0].to(reference.dtype)
    return [pads, (picked - reference).masked_fill_(~here, 0)]


class _Losses(torch.autograd.Function):
    """Per-token tensors in here are (T,) with T = S * B; `x` holds this rank's columns."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        logprobs: Tensor,
        indices: Tensor,
        tail_logprob: Tensor | None,
        labels: Tensor | None,
        options: _Options,
    ) -> tuple[Tensor, Tensor | None]:
        shard, share = options.shard, options.share
        dtype = torch.promote_types(logits.dtype, torch.float32)
        x = logits.reshape(-1, shard.width)
        flat = (x.shape[0], logprobs.shape[-1])
        entries = read_entries(
            logprobs.reshape(flat),
            indices.reshape(flat),
            tail_logprob,
            options.with_tail,
            shard,
            dtype,
        )
        own_probs = entries.probs.masked_fill(entries.elsewhere, 0)
        labels = None if labels is None else labels.reshape(-1)
        student = _gather_student(x, entries, own_probs, labels, shard, dtype)

        log_total = student.total.log()
        probs = own_probs if share else entries.probs
        loss = (probs * entries.logprobs.masked_fill(probs == 0, 0)).sum(-1)
        loss -= student.cross[shard.tp_rank] if share else student.cross.sum(0)
        mass = entries.probs.sum(-1)
        outside = mass  # becomes P - p_t / q_t
        if entries.tail is not None:
            mass = mass + entries.tail
            outside = mass - entries.tail / student.tail * student.total
            if not share or shard.tp_rank == 0:
                log_q_tail = student.tail.log() - log_total
                loss += torch.xlogy(entries.tail, entries.tail) - entries.tail * log_q_tail

        lm_loss = None
        if student.log_all is not None and student.label is not None:
            lm_loss = (student.log_all - student.label).view(logits.shape[:2])
        ctx.set_materialize_grads(False)
        ctx.shard = shard
        ctx.save_for_backward(
            logits,
            student.ref,
            outside / student.total,
            mass / student.total,
            student.kept,
            own_probs,
            entries.slots.int(),
            student.log_all,
            labels,
        )
        return loss.view(logits.shape[:2]), lm_loss

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, kl_upstream: Tensor | None, lm_upstream: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        logits, ref, outside, inside, kept, probs, slots, log_all, labels = ctx.saved_tensors
        shard = ctx.shard
        x = logits.reshape(-1, shard.width)
        grad = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        scale, at_slots = torch.zeros_like(ref), torch.zeros_like(kept)
        unused = torch.ones_like(ref, dtype=torch.bool)
        if kl_upstream is not None:
            kl_upstream = kl_upstream.reshape(-1).to(ref.dtype)
            # P q_k - p_k; masked because 0 * inf is not a number
            unused &= kl_upstream == 0
            at_slots = (kept * inside[:, None] - probs) * kl_upstream[:, None]
            at_slots.masked_fill_(unused[:, None], 0)
            scale = (outside * kl_upstream).masked_fill_(unused, 0)
        label_slots = at_label = None
        padding = grad[:, shard.real :]
        if lm_upstream is None:
            padding.zero_()
        else:
            lm_upstream = lm_upstream.reshape(-1).to(ref.dtype)
            unused &= lm_upstream == 0
            lm_scale = (-log_all).exp_().mul_(lm_upstream)
            scale = (scale + lm_scale).masked_fill_(unused, 0)
            at_slots.add_(kept * lm_scale[:, None]).masked_fill_(unused[:, None], 0)
            columns = labels - shard.start
            label_slots = columns.masked_fill((columns < 0) | (columns >= shard.real), shard.real)
            at_label = -lm_upstream
            _write_padding_gradient(
                x[:, shard.real :], padding, ref + log_all, columns - shard.real, lm_upstream
            )
            padding.masked_fill_(unused[:, None], 0)
        write_gradient(
            x[:, : shard.real],
            grad[:, : shard.real],
            reference=ref,
            scale=scale,
            slots=slots.long(),
            at_slots=at_slots,
            label_slots=label_slots,
            at_label=at_label,
        )
        return grad.view(logits.shape), None, None, None, None, None


def _write_padding_gradient(
    x: Tensor, out: Tensor, log_all: Tensor, columns: Tensor, upstream: Tensor
) -> None:
    """Write the LM loss's gradient on the columns that pad, ``(T, n)``; few there are.

    A label is no padding, but the loss counts it where it is one.
    """
    places = torch.arange(x.shape[1], device=x.device)
    probs = (x.to(log_all.dtype) - log_all[:, None]).exp_()
    probs.sub_((places == columns[:, None]).to(probs.dtype)).mul_(upstream[:, None])
    out.copy_(probs)
