# SPDX-License-Identifier: Apache-2.0
"""The teacher's top-K log-probabilities from vocabulary-parallel logits, and their nucleus.

The top-k is exact and in two stages: the columns are dealt into blocks, and the ``k`` blocks with
the largest maxima contain a top-k, because each of those maxima beats every column of a block that
was left out.  The log-sum-exp of a row never sees a difference: the mass outside the kept entries
is summed by itself.  Logits are read in chunks whose fp32 copy stays in cache.

Needs torch and an explicit process group, nothing of the trainer.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.training.distillation.vocab_shard import shard_of

# What the cache stores for an entry that top-P dropped.
_MASKED_LOGPROB = -1000.0
_MASKED_INDEX = -1

# Scratch bytes per chunk, about what an L2 cache holds; one row is the least.
_CPU_CHUNK_BYTES = 1 << 19
_DEVICE_CHUNK_BYTES = 1 << 25


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherTopK:
    """The kept entries of every token and the mass that is not among them, in nats."""

    logprobs: Tensor
    """``(S, B, K)`` fp32, falling; -1000.0 where masked."""

    indices: Tensor
    """``(S, B, K)`` int64 vocabulary ids; -1 where masked."""

    tail_logprob: Tensor
    """``(S, B)`` fp32, log of the mass outside the entries; -inf where there is none."""


def teacher_topk(
    logits: Tensor,
    k: int,
    *,
    vocab_size: int | None = None,
    tp_rank: int = 0,
    tp_size: int = 1,
    tp_group: dist.ProcessGroup | None = None,
    tp_dst_rank: int = 0,
) -> TeacherTopK | None:
    """The ``k`` largest log-probabilities of every token, on TP rank 0; None on the others.

    Collective over TP when ``tp_size > 1``: every rank must call.  One gather to TP rank 0, of
    ``2 min(k, V / tp) + 1`` fp32 words per token.  The logits are not written to.

    Args:
        logits: ``(S, B, V / tp)``, any float dtype.  Rank ``r`` holds the columns of ids
            ``[r * V / tp, (r + 1) * V / tp)``.
        k: entries per token, at least 1.  More than there are ids means all of them.
        vocab_size: number of real ids.  Columns from there on only pad: they are never selected
            and carry no mass.  None means that no column pads.
        tp_rank: this rank's place in the tensor-parallel group.
        tp_size: size of that group.
        tp_group: that group; None is torch's default group.
        tp_dst_rank: global rank of TP rank 0.

    Raises:
        ValueError: a shape, a dtype or a rank does not fit; says what was found and expected.
    """
    shard = shard_of(logits, vocab_size, tp_rank, tp_size, tp_group, name="logits")
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    tokens = logits.shape[:2]
    k = min(k, shard.vocab_size)
    with torch.no_grad():
        x = logits.reshape(-1, shard.width)[:, : shard.real]
        values, indices, tail = _local_topk(x, shard.start, min(k, shard.width))
        if tp_size > 1:
            gathered = _gather_candidates(
                values, indices, tail, tp_rank, tp_size, tp_group, tp_dst_rank
            )
            if gathered is None:
                return None
            values, indices, tail = _merge(*gathered, k)
        values -= values[:, :1].clone()  # as the tail is: rounding must not grow with an offset
        log_sum = values.exp().sum(-1).add_(tail.exp()).log_()
        # A shard's filler wins only over a logit of -inf.
        logprobs = (values - log_sum[:, None]).masked_fill_(indices < 0, _MASKED_LOGPROB)
        return TeacherTopK(
            logprobs=logprobs.view(*tokens, k),
            indices=indices.view(*tokens, k),
            tail_logprob=(tail - log_sum).view(tokens),
        )


def apply_top_p(topk: TeacherTopK, p: float, min_k: int) -> tuple[TeacherTopK, Tensor]:
    """Keep each token's nucleus: the entries before which less than `p` of the mass lies.

    At least `min_k` entries stay.  Entries that a token does not keep are masked and their mass
    goes to the tail; K stays, so nothing waits for the device.

    Args:
        topk: entries with falling log-probabilities.
        p: in (0, 1].
        min_k: at least 1.

    Returns:
        The nucleus, and the number of entries kept per token, ``(S, B)`` int64.

    Raises:
        ValueError: `p` or `min_k` is out of range.
    """
    if not 0 < p <= 1:
        raise ValueError(f"p must be in (0, 1], got {p}")
    if min_k < 1:
        raise ValueError(f"min_k must be at least 1, got {min_k}")
    probs = topk.logprobs.exp()
    keep = probs.cumsum(-1) - probs < p
    keep[..., :min_k] = True
    kept = keep.sum(-1)
    dropped = topk.logprobs.masked_fill(keep, -math.inf).logsumexp(-1)
    drop = ~keep
    nucleus = TeacherTopK(
        logprobs=topk.logprobs.masked_fill(drop, _MASKED_LOGPROB),
        indices=topk.indices.masked_fill(drop, _MASKED_INDEX),
        tail_logprob=torch.logaddexp(topk.tail_logprob, dropped),
    )
    return nucleus, kept


def _local_topk(x: Tensor, start: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's largest logits ``(T, k)``, their ids, and the tail ``(T,)``.

    The tail is the log-sum-exp of the other columns, less the largest logit.

    Where `x` has fewer than `k` columns the values end in -inf and the ids in -1.
    """
    tokens, real = x.shape
    values = torch.full((tokens, k), -math.inf, dtype=torch.float32, device=x.device)
    indices = torch.full((tokens, k), _MASKED_INDEX, dtype=torch.int64, device=x.device)
    tail = torch.full((tokens,), -math.inf, dtype=torch.float32, device=x.device)
    k = min(k, real)
    if k == 0:
        return values, indices, tail
    budget = _CPU_CHUNK_BYTES if x.device.type == "cpu" else _DEVICE_CHUNK_BYTES
    scratch = torch.empty(
        max(1, min(tokens, budget // (4 * real))), real, dtype=torch.float32, device=x.device
    )
    # Small operations run on several chunks at once.
    step = 8 * scratch.shape[0]
    for first in range(0, tokens, step):
        rows = slice(first, first + step)
        values[rows, :k], columns, tail[rows] = _group_topk(x[rows], k, scratch)
        torch.add(columns, start, out=indices[rows, :k])
    return values, indices, tail


def _group_topk(x: Tensor, k: int, scratch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The `k` largest of each row, their columns, and the tail as in `_local_topk`."""
    tokens, width = x.shape
    block = _block_size(width, k)
    blocks = width // block
    dealt = scratch[:, : block * blocks].view(-1, block, blocks)
    maxima = torch.empty(tokens, blocks, dtype=torch.float32, device=x.device)
    top = torch.empty(tokens, 1, dtype=torch.float32, device=x.device)
    sums = torch.empty_like(maxima)
    lowest = torch.finfo(torch.float32).min  # -inf would make the difference not a number
    for first in range(0, tokens, scratch.shape[0]):
        rows = slice(first, min(first + scratch.shape[0], tokens))
        part = slice(0, rows.stop - first)
        scratch[part].copy_(x[rows])
        work, shift, block_max = dealt[part], top[rows], maxima[rows]
        torch.amax(work, 1, out=block_max)
        torch.amax(block_max, 1, True, out=shift).clamp_(min=lowest)
        torch.sum(work.sub_(shift[:, None]).exp_(), 1, out=sums[rows])

    chosen = _wide_topk(maxima, k)
    columns = _columns_of(chosen, block, blocks, width)
    candidates = x.gather(1, columns).float()
    values, places = candidates.topk(k, -1)
    # Outside are the blocks that were not chosen and the candidates that were not found.
    best = values[:, :1].clamp(min=lowest)
    outside = sums.scatter_(1, chosen, 0).sum(-1, True).mul_((top - best).exp_())
    outside += candidates.sub_(best).exp_().scatter_(1, places, 0).sum(-1, True)
    return values, columns.gather(1, places), outside.log_()[:, 0]


def _wide_topk(x: Tensor, k: int) -> Tensor:
    """The columns of the `k` largest of each row, in any order, by way of blocks if that pays."""
    block = _block_size(x.shape[1], k)
    if block == 1:
        return x.topk(k, -1, sorted=False).indices
    blocks = x.shape[1] // block
    maxima = x[:, : block * blocks].view(-1, block, blocks).amax(1)
    columns = _columns_of(_wide_topk(maxima, k), block, blocks, x.shape[1])
    return columns.gather(1, x.gather(1, columns).topk(k, -1, sorted=False).indices)


def _block_size(width: int, k: int) -> int:
    """Columns per block, such that there are clearly more blocks than get chosen."""
    return next((block for block in (16, 4) if width // block >= 3 * k), 1)


def _columns_of(chosen: Tensor, block: int, blocks: int, width: int) -> Tensor:
    """The columns of the chosen blocks ``(n, k)``, then those that are in no block."""
    # Column = place in block * blocks + block: maxima then run over rows of contiguous memory.
    places = torch.arange(0, block * blocks, blocks, device=chosen.device)
    rest = torch.arange(block * blocks, width, device=chosen.device)
    inside = (chosen[:, :, None] + places).flatten(1)
    return torch.cat([inside, rest.expand(chosen.shape[0], -1)], 1)


def _gather_candidates(
    values: Tensor,
    indices: Tensor,
    tail: Tensor,
    tp_rank: int,
    tp_size: int,
    tp_group: dist.ProcessGroup | None,
    tp_dst_rank: int,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """What every rank found, ``(tp, T, k)`` twice and ``(tp, T)``, on TP rank 0.

    Collective over TP: every rank must call.
    """
    # (T, k), (T, k), (T, 1) -> (T, 2k + 1); ids travel as the bits of an int32
    packed = torch.cat([values, indices.int().view(torch.float32), tail[:, None]], 1)
    gathered = packed.new_empty(tp_size, *packed.shape) if tp_rank == 0 else None
    parts = None if gathered is None else list(gathered.unbind())
    dist.gather(packed, parts, dst=tp_dst_rank, group=tp_group)
    if gathered is None:
        return None
    k = values.shape[1]
    ids = gathered[..., k:-1].contiguous().view(torch.int32).long()
    return gathered[..., :k], ids, gathered[..., -1]


def _merge(values: Tensor, indices: Tensor, tails: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `k` largest logits of all ranks, their ids, and the tail as in `_local_topk`."""
    tops = values[..., 0]
    top = tops.amax(0)
    # (tp, T, k) -> (T, tp * k)
    values, indices = (part.transpose(0, 1).flatten(1) for part in (values, indices))
    best, places = values.topk(k, -1)
    others = (values - top[:, None]).scatter_(1, places, -math.inf)
    tail = torch.cat([others, (tails + (tops - top)).T], 1).logsumexp(-1)
    return best, indices.gather(1, places), tail
