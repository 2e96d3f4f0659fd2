# SPDX-License-Identifier: Apache-2.0
"""The passes over a student's logits: one that reads them, one that writes their gradient.

Rows are tokens, columns are the ids of this rank's vocabulary shard that do not merely pad. Each
pass works chunk by chunk in scratch memory that stays in cache, and makes nothing of the size of
the logits but the gradient.

On CUDA the passes are the Triton kernels of ``row_kernels``, on other devices and without Triton
those of torch alone, which the kernels are checked against.

Needs torch alone. What these passes are for is in ``sparse_kl``.
"""

import importlib.util
import os
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

# Scratch bytes per chunk, about what an L2 cache holds; one row is the least.
_CPU_CHUNK_BYTES = 1 << 19
_DEVICE_CHUNK_BYTES = 1 << 25

# While the log of a sum of exponentials is in this range, exp() needs no shift: nothing overflows,
# and what underflows is too small to count.
_UNSHIFTED = (-10.0, 60.0)

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_KERNEL_SWITCH = "LOGITS_KD_TRITON"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowReadings:
    """What reading the rows once tells.

    Attributes:
        reference: ``(T,)`` a number near the largest logit of the row.
        outside: ``(T,)`` the sum of ``exp(x - reference)`` over the columns that are no slot.
        picked: ``(T, K)`` the logits at the slots, and anything where a slot is no column.
    """

    reference: Tensor
    outside: Tensor
    picked: Tensor


def read_rows(x: Tensor, slots: Tensor, elsewhere: Tensor, dtype: torch.dtype) -> RowReadings:
    """Read the logits.

    Args:
        x: ``(T, real)``, any float dtype.
        slots: ``(T, K)`` int64 columns, distinct within a row; ``real`` is no column.
        elsewhere: ``(T, K)`` bool, where a slot is no column.
        dtype: that of the arithmetic and of the result; float64 for float64, else fp32.
    """
    kernels = kernels_for(x)
    if kernels is None or x.shape[1] == 0:
        return read_rows_torch(x, slots, elsewhere, dtype)
    reference, outside, picked = kernels.read_rows(x, slots)
    return RowReadings(reference=reference, outside=outside, picked=picked)


def read_rows_torch(x: Tensor, slots: Tensor, elsewhere: Tensor, dtype: torch.dtype) -> RowReadings:
    """:func:`read_rows` with torch alone, chunk by chunk."""
    picked = torch.zeros(slots.shape, dtype=dtype, device=x.device)
    outside = torch.zeros(x.shape[0], dtype=dtype, device=x.device)
    if x.shape[1] == 0:
        lowest = torch.full_like(outside, torch.finfo(dtype).min)
        return RowReadings(reference=lowest, outside=outside, picked=picked)
    if not may_look(x):
        reference = _row_max(x, dtype)
        _read_chunks(x, slots, reference, picked, outside)
        return RowReadings(reference=reference, outside=outside, picked=picked)

    # The maximum and its subtraction would cost two passes of six, and nearly all logits do
    # without them.  So try without, then redo the rows that need them.
    _read_chunks(x, slots, None, picked, outside)
    kept = picked.exp().masked_fill_(elsewhere, 0).sum(-1)
    reference = kept.add_(outside).log_().round_()
    outside *= (-reference).exp_()
    for rows in _shift_needed(reference).nonzero()[:, 0].split(8):
        block = x[rows]
        block_picked, block_outside = picked[rows], outside[rows]
        reference[rows] = top = _row_max(block, dtype)
        _read_chunks(block, slots[rows], top, block_picked, block_outside)
        outside[rows] = block_outside
    return RowReadings(reference=reference, outside=outside, picked=picked)


def write_gradient(
    x: Tensor,
    out: Tensor,
    *,
    reference: Tensor,
    scale: Tensor,
    slots: Tensor,
    at_slots: Tensor,
    label_slots: Tensor | None,
    at_label: Tensor | None,
) -> None:
    """Write ``scale * exp(x - reference)`` where no slot is, and what is given where one is.

    A `scale` of exactly 0 writes exactly 0, whatever the logits are.

    Args:
        x: ``(T, real)`` the logits.
        out: ``(T, real)``, of the dtype of `x`; gets the gradient.
        reference: ``(T,)`` as in :class:`RowReadings`; its dtype is that of the arithmetic.
        scale: ``(T,)``.
        slots: ``(T, K)`` int64 as in :func:`read_rows`.
        at_slots: ``(T, K)`` the gradient at the slots.
        label_slots: ``(T,)`` int64 column of the label, ``real`` where it is no column; or None.
        at_label: ``(T,)`` what is added there, whether or not a slot is there; or None.
    """
    kernels = kernels_for(x)
    write = write_gradient_torch if kernels is None else kernels.write_gradient
    write(
        x,
        out,
        reference=reference,
        scale=scale,
        slots=slots,
        at_slots=at_slots,
        label_slots=label_slots,
        at_label=at_label,
    )


def write_gradient_torch(
    x: Tensor,
    out: Tensor,
    *,
    reference: Tensor,
    scale: Tensor,
    slots: Tensor,
    at_slots: Tensor,
    label_slots: Tensor | None,
    at_label: Tensor | None,
) -> None:
    """:func:`write_gradient` with torch alone, chunk by chunk."""
    unused = scale == 0
    some_unused = not may_look(x) or bool(unused.any())
    shifted = not may_look(x) or bool(_shift_needed(reference).any())
    if not shifted:
        scale = scale * (-reference).exp()
    scratch = _scratch(x, reference.dtype)
    for first in range(0, x.shape[0], scratch.shape[0]):
        rows = slice(first, first + scratch.shape[0])
        target = out[rows]
        chunk = scratch[: target.shape[0]]
        work = chunk[:, :-1].copy_(x[rows])
        if shifted:
            work.sub_(reference[rows, None])
        work.exp_().mul_(scale[rows, None])
        if some_unused:
            work.masked_fill_(unused[rows, None], 0)  # 0 * inf is not a number
        chunk.scatter_(1, slots[rows], at_slots[rows])
        if label_slots is not None and at_label is not None:
            chunk.scatter_add_(1, label_slots[rows, None], at_label[rows, None])
        target.copy_(work)


def kernels_for(x: Tensor) -> ModuleType | None:
    """``row_kernels`` where it can run on `x`; None means that torch does the passes."""
    fits = x.device.type == "cuda" and x.dtype in _KERNEL_DTYPES and x.stride(-1) == 1
    if not fits or not _HAS_TRITON or os.environ.get(_KERNEL_SWITCH) == "0":
        return None
    from megatron.training.distillation import row_kernels  # needs Triton, which is optional

    return row_kernels


def may_look(x: Tensor) -> bool:
    """Whether reading a value back is free; on an accelerator it would stall the queue."""
    return x.device.type == "cpu"


def _scratch(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``(n, real + 1)`` for ``n`` rows of `x` at a time; the spare column takes stray scatters."""
    budget = _CPU_CHUNK_BYTES if x.device.type == "cpu" else _DEVICE_CHUNK_BYTES
    tokens, real = x.shape
    stride = -(-(real + 1) // 16) * 16
    rows = max(1, min(tokens, budget // (stride * dtype.itemsize)))
    return torch.zeros(rows, stride, dtype=dtype, device=x.device)[:, : real + 1]


def _read_chunks(
    x: Tensor, slots: Tensor, shift: Tensor | None, picked: Tensor, outside: Tensor
) -> None:
    """Fill `picked` and `outside` as in :class:`RowReadings`; a `shift` of None is 0."""
    scratch = _scratch(x, outside.dtype)
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
        torch.sum(work, -1, out=outside[rows])


def _row_max(x: Tensor, dtype: torch.dtype) -> Tensor:
    # Finite where all is -inf, because the difference of two infinities is not a number.
    return x.amax(-1).to(dtype).clamp_(min=torch.finfo(dtype).min)


def _shift_needed(reference: Tensor) -> Tensor:
    low, high = _UNSHIFTED
    return ~((reference > low) & (reference < high))  # also where it is not a number
