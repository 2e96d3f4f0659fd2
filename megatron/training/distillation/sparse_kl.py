# SPDX-License-Identifier: Apache-2.0
"""The distillation loss on the teacher's support, forward and backward.

With ``p`` the teacher, ``q`` the student, ``K`` the entries the teacher kept and one bucket for
everything else (``p_t``, ``q_t``), the loss of a token is::

    KL = sum_k p_k (log p_k - log q_k) + p_t (log p_t - log q_t)

and its gradient on logit ``v``, with ``P = sum_k p_k + p_t``, is ``P q_v - p_v`` for ``v`` in ``K``
and ``q_v (P - p_t / q_t)`` elsewhere.  Each direction is a few elementwise passes over the logits
and a scatter, done chunk by chunk in scratch memory that stays in cache.  From forward to backward
live the logits, two numbers per token and two per entry.

Needs torch and an explicit process group, nothing of the trainer.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# A stored log-probability of exactly this value marks an entry that top-P dropped.
_MASKED = -1000.0

# Scratch bytes per chunk, about what an L2 cache holds; one row is the least.
_CPU_CHUNK_BYTES = 1 << 19
_DEVICE_CHUNK_BYTES = 1 << 25

# While the log of a sum of exponentials is in this range, exp() needs no shift: nothing overflows,
# and what underflows is below _TAIL_FLOOR.
_UNSHIFTED = (-10.0, 60.0)

# A student tail below this, relative to the largest probability, counts as this: loss and gradient
# stay finite where the tail underflows.
_TAIL_FLOOR = 1e-25


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shard:
    """The columns of the vocabulary on this rank; `real` of the `width` do not merely pad."""

    start: int
    width: int
    real: int
    vocab_size: int
    tp_rank: int
    tp_size: int
    tp_group: dist.ProcessGroup | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entries:
    """The teacher's kept entries of ``T`` tokens, as one rank sees them."""

    logprobs: Tensor  # (T, K), -inf where masked
    probs: Tensor  # (T, K), 0 where masked
    elsewhere: Tensor  # (T, K) bool: masked, or on another rank
    slots: Tensor  # (T, K) int64 column in the shard, `real` (one past the end) where elsewhere
    tail: Tensor | None  # (T,) probability outside the entries; None without a tail bucket


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
    shard = _shard(student_logits, vocab_size, tp_rank, tp_size, tp_group)
    _check_teacher(student_logits, teacher_logprobs, teacher_indices, tail_logprob)
    loss: Tensor = _SparseKL.apply(
        student_logits, teacher_logprobs, teacher_indices, tail_logprob, with_tail, shard, False
    )
    return loss


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
    shard = _shard(student_logits, vocab_size, tp_rank, tp_size, tp_group)
    _check_teacher(student_logits, teacher_logprobs, teacher_indices, tail_logprob)
    share: Tensor = _SparseKL.apply(
        student_logits, teacher_logprobs, teacher_indices, tail_logprob, with_tail, shard, True
    )
    return share


def _shard(
    logits: Tensor,
    vocab_size: int | None,
    tp_rank: int,
    tp_size: int,
    tp_group: dist.ProcessGroup | None,
) -> _Shard:
    """Where this rank's columns lie in the vocabulary."""
    if logits.dim() != 3 or not logits.is_floating_point():
        raise ValueError(
            "student_logits must be a float tensor (S, B, V/tp), "
            f"got {logits.dtype} {tuple(logits.shape)}"
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
    return _Shard(
        start=start,
        width=width,
        real=min(max(vocab_size - start, 0), width),
        vocab_size=vocab_size,
        tp_rank=tp_rank,
        tp_size=tp_size,
        tp_group=tp_group,
    )


def _check_teacher(
    logits: Tensor, logprobs: Tensor, indices: Tensor, tail_logprob: Tensor | None
) -> None:
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


def _read_entries(
    logprobs: Tensor,
    indices: Tensor,
    tail_logprob: Tensor | None,
    with_tail: bool,
    shard: _Shard,
    dtype: torch.dtype,
) -> _Entries:
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
    return _Entries(
        logprobs=logp,
        probs=probs,
        elsewhere=elsewhere,
        slots=columns.masked_fill_(elsewhere, shard.real),
        tail=tail,
    )


def _scratch(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``(n, real + 1)`` for ``n`` rows of `x` at a time; the spare column takes stray scatters."""
    budget = _CPU_CHUNK_BYTES if x.device.type == "cpu" else _DEVICE_CHUNK_BYTES
    tokens, real = x.shape
    stride = -(-(real + 1) // 16) * 16
    rows = max(1, min(tokens, budget // (stride * dtype.itemsize)))
    return torch.empty(rows, stride, dtype=dtype, device=x.device)[:, : real + 1]


def _read_chunks(
    x: Tensor, slots: Tensor, shift: Tensor | None, picked: Tensor, tail: Tensor
) -> None:
    """Read the logits `x` once, filling `picked` and `tail`.

    Args:
        x: ``(T, real)``.
        slots: ``(T, K)`` columns; ``real`` is none.
        shift: ``(T,)``; None is 0.
        picked: ``(T, K)``, gets `x` at `slots`, and anything where that is no column.
        tail: ``(T,)``, gets the sum of ``exp(x - shift)`` over the columns that are not in `slots`.
    """
    scratch = _scratch(x, tail.dtype)
    for first in range(0, x.shape[0], scratch.shape[0]):
        rows = slice(first, first + scratch.shape[0])
        logits, columns = x[rows], slots[rows]
        chunk = scratch[: logits.shape[0]]
        work = chunk[:, :-1].copy_(logits)
        torch.gather(chunk, 1, columns, out=picked[rows])
        if shift is not None:
            work.sub_(shift[rows, None])
        work.exp_()
        chunk.scatter_(1, columns, 0)
        torch.sum(work, -1, out=tail[rows])


def _row_max(x: Tensor, dtype: torch.dtype) -> Tensor:
    # Finite where all is -inf, because the difference of two infinities is not a number.
    return x.amax(-1).to(dtype).clamp_(min=torch.finfo(dtype).min)


def _local_sums(x: Tensor, entries: _Entries, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A reference ``(T,)`` near the row's maximum; what `_read_chunks` finds with it as shift."""
    slots = entries.slots
    picked = torch.zeros(slots.shape, dtype=dtype, device=x.device)
    tail = torch.zeros(x.shape[0], dtype=dtype, device=x.device)
    if x.shape[1] == 0:
        return torch.full_like(tail, torch.finfo(dtype).min), tail, picked
    if not _may_look(x):
        reference = _row_max(x, dtype)
        _read_chunks(x, slots, reference, picked, tail)
        return reference, tail, picked

    # The maximum and its subtraction would cost two passes of six, and nearly all logits do
    # without them.  So try without, then redo the rows that need them.
    _read_chunks(x, slots, None, picked, tail)
    kept = picked.exp().masked_fill_(entries.elsewhere, 0).sum(-1)
    reference = kept.add_(tail).log_().round_()
    tail *= (-reference).exp_()
    for rows in _shift_needed(reference).nonzero()[:, 0].split(8):
        block = x[rows]
        block_picked, block_tail = picked[rows], tail[rows]
        reference[rows] = top = _row_max(block, dtype)
        _read_chunks(block, slots[rows], top, block_picked, block_tail)
        tail[rows] = block_tail
    return reference, tail, picked


def _may_look(x: Tensor) -> bool:
    """Whether reading a value back is free; on an accelerator it would stall the queue."""
    return x.device.type == "cpu"


def _shift_needed(reference: Tensor) -> Tensor:
    low, high = _UNSHIFTED
    return ~((reference > low) & (reference < high))  # also where it is not a number


def _all_gather(packed: Tensor, shard: _Shard) -> Tensor:
    """``(tp, *packed.shape)``.  Collective over TP when ``tp_size > 1``: every rank must call."""
    if shard.tp_size == 1:
        return packed[None]
    out = packed.new_empty(shard.tp_size * packed.numel())
    dist.all_gather_into_tensor(out, packed.flatten(), group=shard.tp_group)
    return out.view(shard.tp_size, *packed.shape)


class _SparseKL(torch.autograd.Function):
    """Per-token tensors in here are (T,) with T = S * B; `x` holds this rank's real columns."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        logprobs: Tensor,
        indices: Tensor,
        tail_logprob: Tensor | None,
        with_tail: bool,
        shard: _Shard,
        share: bool,
    ) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        x = logits.reshape(-1, shard.width)[:, : shard.real]
        flat = (x.shape[0], logprobs.shape[-1])
        entries = _read_entries(
            logprobs.reshape(flat), indices.reshape(flat), tail_logprob, with_tail, shard, dtype
        )
        own_ref, own_tail, picked = _local_sums(x, entries, dtype)
        above = picked.sub(own_ref[:, None])
        own_kept = above.exp().masked_fill_(entries.elsewhere, 0).sum(-1)
        own_probs = entries.probs.masked_fill(entries.elsewhere, 0)
        # Masked because 0 * inf is not a number.
        own_dot = above.masked_fill_(own_probs == 0, 0).mul_(own_probs).sum(-1)
        own = torch.stack([own_ref, own_tail, own_kept, own_dot, own_probs.sum(-1)])

        # (tp, 5, T) -> five times (tp, T)
        refs, tails, kepts, dots, masses = _all_gather(own, shard).unbind(1)
        ref = refs.amax(0)
        weights = (refs - ref).exp_()
        tail = (weights * tails).sum(0)
        total = (weights * kepts).sum(0).add_(tail)
        tail.clamp_(min=_TAIL_FLOOR)
        log_total = total.log()

        # sum p_k log q_k of each rank's entries: log q_k = x_k - ref - log_total
        cross = dots + masses * (refs - ref - log_total)
        probs = own_probs if share else entries.probs
        loss = (probs * entries.logprobs.masked_fill(probs == 0, 0)).sum(-1)
        loss -= cross[shard.tp_rank] if share else cross.sum(0)
        mass = entries.probs.sum(-1)
        outside = mass  # becomes P - p_t / q_t
        if entries.tail is not None:
            mass = mass + entries.tail
            outside = mass - entries.tail / tail * total
            if not share or shard.tp_rank == 0:
                log_q_tail = tail.log() - log_total
                loss += torch.xlogy(entries.tail, entries.tail) - entries.tail * log_q_tail

        # P q_k - p_k
        inside = picked.sub_(ref[:, None]).exp_().mul_((mass / total)[:, None]).sub_(entries.probs)
        ctx.save_for_backward(logits, ref, outside / total, inside, entries.slots.int())
        ctx.shard = shard
        return loss.view(logits.shape[:2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        logits, ref, outside, inside, slots = ctx.saved_tensors
        dtype, real = ref.dtype, ctx.shard.real
        x = logits.reshape(-1, ctx.shard.width)
        upstream = upstream.reshape(-1).to(dtype)
        inside = inside * upstream[:, None]
        outside = outside * upstream
        slots = slots.long()
        shifted = not _may_look(x) or bool(_shift_needed(ref).any())
        if not shifted:
            outside *= (-ref).exp_()

        grad = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        grad[:, real:] = 0
        scratch = _scratch(x[:, :real], dtype)
        for first in range(0, x.shape[0], scratch.shape[0]):
            rows = slice(first, first + scratch.shape[0])
            target = grad[rows, :real]
            chunk = scratch[: target.shape[0]]
            work = chunk[:, :-1].copy_(x[rows, :real])
            if shifted:
                work.sub_(ref[rows, None])
            work.exp_().mul_(outside[rows, None])
            chunk.scatter_(1, slots[rows], inside[rows])
            target.copy_(work)
        unused = upstream == 0
        if not _may_look(x) or bool(unused.any()):
            grad.masked_fill_(unused[:, None], 0)  # 0 * inf is not a number
        return grad.view(logits.shape), None, None, None, None, None, None
