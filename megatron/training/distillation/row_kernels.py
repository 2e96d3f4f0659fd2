# SPDX-License-Identifier: Apache-2.0
"""The passes of ``row_passes`` as Triton kernels: each reads the logits once.

Reading leaves the slots out of a sum over the row.  Taking them away from the whole sum afterwards
would cancel, so every program marks the slots of its row in a bitmap and looks at it beside the
logits.  The bitmap of a program has one bit per column; all of them together are a few megabytes
that stay in the L2 cache, whatever the number of tokens.

Importing this needs Triton.  Arithmetic is fp32, so the logits are fp32, bf16 or fp16.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

# Every thread loads 16 bytes at once, so eight warps load a tile of 4 KiB: 2048 columns of 16 bits.
# Four such programs fit on a multiprocessor by their registers, 64 per thread. With the three loads
# per thread that the compiler keeps in flight they ask for 48 KiB at a time, and an H200 needs 25
# KiB for its bandwidth (4.8 TB/s over 132 multiprocessors at 700 ns). More warps per program would
# wait for each other at the end of a row, and fewer would leave more of them to run out at once.
_WARPS = 8
_TILE_BYTES = 32 * _WARPS * 16
_PROGRAMS_PER_MULTIPROCESSOR = 4
_SLOT_TILE = 256  # slots at once: one per thread, so that K is no reason to compile again

# Tiles between those of one store: four loads per thread before the first store.
_TILES_PER_STORE = 4

# How far the row's maximum may lie above the guess: exp(60) times any vocabulary is a finite fp32.
_GUESS_RANGE = tl.constexpr(60.0)
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
_LOG2_E = tl.constexpr(math.log2(math.e))


def read_rows(
    x: Tensor, slots: Tensor, *, tile: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference`, `outside` and `picked` of ``row_passes.RowReadings``, in fp32.

    Args:
        x: ``(T, real)`` with at least one column; columns are adjacent in memory.
        slots: ``(T, K)`` int64 columns, distinct within a row; ``real`` is no column.
        tile: columns per load, a power of two from 16 on; None is what suits the device.
    """
    tokens, real = x.shape
    tile = tile or _TILE_BYTES // x.element_size()
    reference = torch.empty(tokens, dtype=torch.float32, device=x.device)
    outside = torch.empty_like(reference)
    picked = torch.empty(slots.shape, dtype=torch.float32, device=x.device)
    programs = min(tokens, _resident_programs(x.device))
    if programs == 0:
        return reference, outside, picked
    words = triton.cdiv(real, 8 * tile) * tile // 4
    marks = torch.zeros(programs, words, dtype=torch.int32, device=x.device)
    with torch.cuda.device_of(x):
        _read_kernel[(programs,)](
            x,
            slots.contiguous(),
            marks,
            marks.view(torch.uint8),
            reference,
            outside,
            picked,
            tokens,
            real,
            x.stride(0),
            slots.shape[1],
            words,
            TILE=tile,
            SLOT_TILE=_SLOT_TILE,
            num_warps=_WARPS,
        )
    return reference, outside, picked


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
    tile: int | None = None,
) -> None:
    """``row_passes.write_gradient`` where columns are adjacent in memory; `tile` as above.

    The logits of a row whose `scale` is 0 are not read, except that of the label.
    """
    tokens, real = x.shape
    if tokens == 0 or real == 0:
        return
    tile = tile or _TILE_BYTES // x.element_size()
    has_label = label_slots is not None and at_label is not None
    with torch.cuda.device_of(x):
        _write_kernel[(tokens,)](
            x,
            out,
            reference.contiguous(),
            scale.contiguous(),
            slots.contiguous(),
            at_slots.contiguous(),
            label_slots.contiguous() if label_slots is not None and has_label else None,
            at_label.contiguous() if at_label is not None and has_label else None,
            real,
            x.stride(0),
            out.stride(0),
            slots.shape[1],
            BLOCK=_TILES_PER_STORE * tile,
            SLOT_TILE=_SLOT_TILE,
            num_warps=_WARPS,
        )


def _resident_programs(device: torch.device) -> int:
    """Programs that run at once, and so have a bitmap each."""
    if device.type != "cuda":
        return 3  # Triton's interpreter, which runs them one by one
    properties = torch.cuda.get_device_properties(device)
    return _PROGRAMS_PER_MULTIPROCESSOR * int(properties.multi_processor_count)


@triton.jit
def _exp(value):
    # tl.exp spends three more instructions of twelve per column on results below 1e-38.
    return tl.exp2(value * _LOG2_E)


@triton.jit
def _mark_byte(column, TILE: tl.constexpr):
    """The byte of a bitmap that has the column's bit.

    Columns ``8 TILE n + TILE b + i`` share byte ``TILE n + i``, as bit ``b``: what a thread loads
    of the bitmap at once then serves the next eight tiles of its own columns.
    """
    return column // (8 * TILE) * TILE + column % TILE


@triton.jit
def _mark_bit(column, TILE: tl.constexpr):
    return column % (8 * TILE) // TILE


@triton.jit
def _sum_unmarked(x_row, marks, real, shift, TILE: tl.constexpr):
    """The sum of ``exp(x - shift)`` over the columns that are not marked, and the row's maximum."""
    lanes = tl.arange(0, TILE)
    sums = tl.zeros((TILE,), tl.float32)
    tops = tl.full((TILE,), float("-inf"), tl.float32)
    whole = real // (8 * TILE) * (8 * TILE)
    for first in tl.range(0, whole, 8 * TILE):
        # Past L1, which the marks of the row before may still be in.
        bits = tl.load(marks + first // 8 + lanes, cache_modifier=".cg").to(tl.int32)
        for bit in tl.static_range(8):
            value = tl.load(x_row + first + bit * TILE + lanes).to(tl.float32)
            tops = tl.maximum(tops, value, propagate_nan=tl.PropagateNan.ALL)
            sums += tl.where((bits >> bit) & 1 == 0, _exp(value - shift), 0.0)

    # A limit that is a multiple of 16 keeps loads wide; the last columns are a load of their own.
    even = real // 16 * 16
    if whole < even:
        bits = tl.load(marks + whole // 8 + lanes, cache_modifier=".cg").to(tl.int32)
        for first in tl.range(whole, even, 4 * TILE):
            for tile in tl.static_range(4):
                columns = first + tile * TILE + lanes
                value = tl.load(x_row + columns, mask=columns < even, other=float("-inf"))
                value = value.to(tl.float32)
                tops = tl.maximum(tops, value, propagate_nan=tl.PropagateNan.ALL)
                counts = (columns < even) & ((bits >> tile) & 1 == 0)
                sums += tl.where(counts, _exp(value - shift), 0.0)
            bits >>= 4
    total, top = tl.sum(sums, 0), _max_or_nan(tops)
    if even < real:
        columns = even + tl.arange(0, 16)
        here = columns < real
        value = tl.load(x_row + columns, mask=here, other=float("-inf")).to(tl.float32)
        bits = tl.load(marks + _mark_byte(columns, TILE), mask=here, other=0, cache_modifier=".cg")
        counts = here & ((bits.to(tl.int32) >> _mark_bit(columns, TILE)) & 1 == 0)
        total += tl.sum(tl.where(counts, _exp(value - shift), 0.0), 0)
        top = tl.maximum(top, _max_or_nan(value), propagate_nan=tl.PropagateNan.ALL)
    return total, top


@triton.jit
def _max_or_nan(values):
    # tl.max leaves out what is not a number.
    not_a_number = tl.max((values != values).to(tl.int32), 0)
    return tl.where(not_a_number > 0, float("nan"), tl.max(values, 0))


@triton.jit(do_not_specialize=["tokens", "real", "slot_count", "words"])
def _read_kernel(
    x,
    slots,
    mark_words,
    mark_bytes,
    reference,
    outside,
    picked,
    tokens,
    real,
    x_stride,
    slot_count,
    words,
    TILE: tl.constexpr,
    SLOT_TILE: tl.constexpr,
):
    """Row after row, with a bitmap that is all 0 between them."""
    program = tl.program_id(0).to(tl.int64)
    own_words = mark_words + program * words
    own_bytes = mark_bytes + program * words * 4
    lanes = tl.arange(0, SLOT_TILE)
    row = program
    while row < tokens:
        x_row = x + row * x_stride
        # The maximum of the row is near that of the teacher's entries or of the first tile; with
        # it as the shift one pass does, and threads need not agree on a maximum in between.
        columns = tl.arange(0, TILE)
        guess = tl.max(
            tl.load(x_row + columns, mask=columns < real // 16 * 16, other=float("-inf")), 0
        ).to(tl.float32)
        for first in tl.range(0, slot_count, SLOT_TILE):
            given = first + lanes < slot_count
            slot = tl.load(slots + row * slot_count + first + lanes, mask=given, other=real)
            here = slot < real
            value = tl.load(x_row + slot, mask=here, other=0.0).to(tl.float32)
            tl.store(picked + row * slot_count + first + lanes, value, mask=given)
            guess = tl.maximum(guess, tl.max(tl.where(here, value, float("-inf")), 0))
            byte = _mark_byte(slot, TILE)
            mark = tl.full((SLOT_TILE,), 1, tl.int32) << (byte % 4 * 8 + _mark_bit(slot, TILE)).to(
                tl.int32
            )
            tl.atomic_or(own_words + byte // 4, mark, mask=here, sem="relaxed")
        guess = tl.where((guess > -_LARGEST) & (guess < _LARGEST), guess, 0.0)
        tl.debug_barrier()  # all is marked

        total, top = _sum_unmarked(x_row, own_bytes, real, guess, TILE)
        # Finite where all is -inf, because the difference of two infinities is not a number.
        top = tl.maximum(top, -_LARGEST, propagate_nan=tl.PropagateNan.ALL)
        if (top - guess >= 0) & (top - guess < _GUESS_RANGE):
            total *= _exp(guess - top)
        else:
            total, _ = _sum_unmarked(x_row, own_bytes, real, top, TILE)
        tl.store(reference + row, top)
        tl.store(outside + row, total)

        tl.debug_barrier()  # all is read
        for first in tl.range(0, slot_count, SLOT_TILE):
            given = first + lanes < slot_count
            slot = tl.load(slots + row * slot_count + first + lanes, mask=given, other=real)
            zero = tl.zeros((SLOT_TILE,), tl.int32)
            tl.store(own_words + _mark_byte(slot, TILE) // 4, zero, mask=slot < real)
        tl.debug_barrier()  # all is 0
        row += tl.num_programs(0)


@triton.jit
def _fill_zeros(out_row, real, BLOCK: tl.constexpr):
    zeros = tl.zeros((BLOCK,), out_row.dtype.element_ty)
    even = real // 16 * 16
    for first in tl.range(0, even, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        tl.store(out_row + columns, zeros, mask=columns < even)
    columns = even + tl.arange(0, 16)
    tl.store(out_row + columns, tl.zeros((16,), out_row.dtype.element_ty), mask=columns < real)


@triton.jit
def _write_columns(x_row, out_row, columns, limit, shift, factor):
    here = columns < limit
    value = tl.load(x_row + columns, mask=here, other=0.0).to(tl.float32)
    result = factor * _exp(value - shift)
    tl.store(out_row + columns, result.to(out_row.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["real", "slot_count"])
def _write_kernel(
    x,
    out,
    reference,
    scale,
    slots,
    at_slots,
    label_slots,
    at_label,
    real,
    x_stride,
    out_stride,
    slot_count,
    BLOCK: tl.constexpr,
    SLOT_TILE: tl.constexpr,
):
    """One row: first every column, then those of the slots, and that of the label by itself."""
    row = tl.program_id(0).to(tl.int64)
    x_row = x + row * x_stride
    out_row = out + row * out_stride
    shift = tl.load(reference + row)
    factor = tl.load(scale + row)
    if factor == 0:
        _fill_zeros(out_row, real, BLOCK)
    else:
        even = real // 16 * 16  # as in _sum_unmarked
        for first in tl.range(0, even, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            _write_columns(x_row, out_row, columns, even, shift, factor)
        _write_columns(x_row, out_row, even + tl.arange(0, 16), real, shift, factor)
    tl.debug_barrier()  # what follows overwrites

    lanes = tl.arange(0, SLOT_TILE)
    label = tl.full((), -1, tl.int64)
    if label_slots is not None:
        label = tl.load(label_slots + row)
    kept_label = 0
    at_kept_label = 0.0
    for first in tl.range(0, slot_count, SLOT_TILE):
        given = first + lanes < slot_count
        places = row * slot_count + first + lanes
        slot = tl.load(slots + places, mask=given, other=real)
        value = tl.load(at_slots + places, mask=given, other=0.0)
        result = value.to(out_row.dtype.element_ty)
        tl.store(out_row + slot, result, mask=(slot < real) & (slot != label))
        kept_label += tl.sum((slot == label).to(tl.int32), 0)
        at_kept_label += tl.sum(tl.where(slot == label, value, 0.0), 0)
    if label_slots is not None:
        # Added before it is rounded to the dtype of the gradient, so not to what was written.
        value = tl.load(x_row + label, mask=label < real, other=0.0).to(tl.float32)
        base = tl.where(factor == 0, 0.0, factor * _exp(value - shift))
        base = tl.where(kept_label > 0, at_kept_label, base) + tl.load(at_label + row)
        tl.store(out_row + label, base.to(out_row.dtype.element_ty), mask=label < real)
