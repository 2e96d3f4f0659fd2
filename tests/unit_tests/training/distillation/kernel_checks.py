# SPDX-License-Identifier: Apache-2.0
"""Checks of the Triton kernels; each raises AssertionError if it fails.

For a process whose Triton interprets, or for a GPU (``benchmarks/gpu_check.py``).  Triton decides
when it is imported, for the whole process, whether it compiles or interprets.
"""

import functools
import math
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron.training.distillation import row_kernels, row_passes
from tests.unit_tests.training.distillation.loss_cases import EPS

# The least: rows of the tests then have whole groups of eight tiles, single tiles and single
# columns.
TILE = 16
FP32 = torch.float32


def slots_of(tokens: int, real: int, k: int) -> Tensor:
    """Distinct columns per row; about a third of the slots is no column."""
    slots = torch.full((tokens, k), real)
    for row in slots:
        own = torch.randperm(real)[:k]
        row[: len(own)] = own
    return slots.masked_fill(torch.rand(tokens, k) < 0.3, real)


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm().clamp(min=1e-300)).item()


def gradient_inputs(tokens: int, real: int, slots: Tensor, with_label: bool) -> dict[str, Any]:
    """The first row's label is a slot where it has one, the last one's is no column."""
    label_slots = torch.randint(real, (tokens,))
    if slots.shape[1]:
        label_slots[0] = slots[0, 0]
    label_slots[-1] = real
    return {
        "scale": torch.randn(tokens),
        "slots": slots,
        "at_slots": torch.randn(slots.shape),
        "label_slots": label_slots if with_label else None,
        "at_label": torch.randn(tokens) if with_label else None,
    }


def dense_gradient(x: Tensor, reference: Tensor, given: dict[str, Any]) -> Tensor:
    """The definition, in float64."""
    wide = torch.nn.functional.pad(x.double(), (0, 1))
    grad = given["scale"].double()[:, None] * (wide - reference.double()[:, None]).exp()
    grad.scatter_(1, given["slots"], given["at_slots"].double())
    if given["label_slots"] is not None:
        grad.scatter_add_(1, given["label_slots"][:, None], given["at_label"].double()[:, None])
    return grad[:, :-1]


def on(device: str, given: dict[str, Any]) -> dict[str, Any]:
    return {name: None if value is None else value.to(device) for name, value in given.items()}


def check_passes(
    dtype: torch.dtype,
    k: int,
    real: int,
    width: int,
    offset: float,
    *,
    tokens: int = 5,
    tile: int | None = TILE,
    device: str = "cpu",
) -> None:
    """Both passes against dense float64 and against torch, on more rows than programs."""
    torch.manual_seed(real + k)
    logits = (3 * torch.randn(tokens, width) + offset).to(device, dtype)
    before = logits.clone()
    x, slots = logits[:, :real], slots_of(tokens, real, k).to(device)
    elsewhere = slots == real
    reference, outside, picked = row_kernels.read_rows(x, slots, tile=tile)
    assert torch.equal(reference, x.amax(-1).float())
    marked = torch.zeros(tokens, real + 1, dtype=torch.bool, device=device)
    marked = marked.scatter_(1, slots, True)[:, :-1]
    terms = (x.double() - reference.double()[:, None]).exp().masked_fill(marked, 0)
    torch.testing.assert_close(outside.double(), terms.sum(-1), rtol=1e-6, atol=0)
    assert torch.equal(
        picked[~elsewhere], x.gather(1, slots.clamp(max=real - 1))[~elsewhere].float()
    )
    torch_readings = row_passes.read_rows_torch(x, slots, elsewhere, FP32)
    torch.testing.assert_close(
        outside.log() + reference,
        torch_readings.outside.log() + torch_readings.reference,
        rtol=3e-7,
        atol=2e-6,
    )

    for with_label in (True, False):
        given = on(device, gradient_inputs(tokens, real, slots.cpu(), with_label))
        grad = torch.full((tokens, width), 7.0, dtype=dtype, device=device)
        row_kernels.write_gradient(x, grad[:, :real], reference=reference, **given, tile=tile)
        assert bool((grad[:, real:] == 7).all()), "a column that pads was written"
        wanted = dense_gradient(x, reference, given)
        smallest = torch.finfo(dtype).smallest_normal if dtype == torch.float16 else 0
        torch.testing.assert_close(
            grad[:, :real].double(), wanted, rtol=EPS[dtype], atol=1e-7 + smallest
        )
        assert dtype != FP32 or relative(grad[:, :real], wanted) < 1e-6
        by_torch = torch.empty_like(grad)
        row_passes.write_gradient_torch(x, by_torch[:, :real], reference=reference, **given)
        torch.testing.assert_close(
            grad[:, :real], by_torch[:, :real], rtol=2 * EPS[dtype], atol=1e-7 + smallest
        )
    assert torch.equal(logits, before)


def wild_rows(real: int) -> Tensor:
    x = torch.randn(13, real)
    x[1, 3] = math.nan  # no slot
    x[2, 0] = math.nan  # a slot
    x[3, -1] = math.nan  # in what is left of the row after whole tiles
    x[4, 5] = math.inf
    x[5, 0] = math.inf
    x[6] = -math.inf
    x[7, : real // 2] = -math.inf
    x[8, :-2] = -math.inf
    x[9, : real // 2] = -200.0  # the guess is far off
    x[10] = torch.finfo(FP32).max
    x[11] = -1000.0
    x[11, 3] = -900.0
    return x


def check_wild_rows(real: int, *, tile: int | None = TILE, device: str = "cpu") -> None:
    """Rows that are not finite, or far from the first guess, as torch alone treats them."""
    torch.manual_seed(3)
    x = wild_rows(real).to(device)
    slots = torch.tensor([0, 2, real], device=device).expand(len(x), 3).contiguous()
    reference, outside, picked = row_kernels.read_rows(x, slots, tile=tile)
    with mock.patch.object(row_passes, "may_look", return_value=False):  # as on an accelerator
        wanted = row_passes.read_rows_torch(x, slots, slots == real, FP32)
    close = functools.partial(torch.testing.assert_close, rtol=2e-6, atol=1e-30, equal_nan=True)
    close(reference, wanted.reference)
    close(outside, wanted.outside)
    assert torch.isnan(outside[1:5]).tolist() == [True] * 4
    close(picked[:, :2], wanted.picked[:, :2])
    given = on(device, gradient_inputs(len(x), real, slots.cpu(), with_label=True))
    given["scale"][1::3] = 0
    grad, by_torch = torch.empty_like(x), torch.empty_like(x)
    row_kernels.write_gradient(x, grad, reference=reference, **given, tile=tile)
    row_passes.write_gradient_torch(x, by_torch, reference=reference, **given)
    close(grad, by_torch, atol=1e-7)
    assert not grad[1::3].isnan().any()


def check_empty_shapes() -> None:
    """No token, and no column."""
    readings = row_kernels.read_rows(torch.empty(0, 40), torch.empty(0, 3, dtype=torch.int64))
    assert [tuple(part.shape) for part in readings] == [(0,), (0,), (0, 3)]
    for tokens, real in ((0, 40), (2, 0)):
        x = torch.empty(tokens, real)
        row_kernels.write_gradient(
            x,
            x.clone(),
            reference=torch.zeros(tokens),
            scale=torch.ones(tokens),
            slots=torch.full((tokens, 3), real),
            at_slots=torch.ones(tokens, 3),
            label_slots=torch.full((tokens,), real),
            at_label=torch.ones(tokens),
        )


def check_tail_that_cancels() -> None:
    """The entries hold all but 1e-9 of the mass, which a difference of sums would lose."""
    torch.manual_seed(4)
    x = torch.randn(2, 300)
    x[:, 10:14] += 25
    slots = torch.arange(10, 14).expand(2, 4)
    reference, outside, _ = row_kernels.read_rows(x, slots, tile=TILE)
    rest = (x.double() - reference.double()[:, None]).exp()
    rest[:, 10:14] = 0
    torch.testing.assert_close(outside.double(), rest.sum(-1), rtol=1e-6, atol=0)


def check_offsets_beyond_32_bits(folder: str) -> None:
    """The third row begins 2^31 elements after the first, in sparse files."""
    torch.manual_seed(5)
    real, stride = 40, 2**30
    x, grad = (
        torch.from_file(
            f"{folder}/{name}", shared=True, size=2 * stride + real, dtype=torch.float16
        ).as_strided((3, real), (stride, 1))
        for name in ("logits", "gradient")
    )
    x.copy_(torch.randn(3, real))
    slots = slots_of(3, real, 4)
    readings = row_kernels.read_rows(x, slots, tile=TILE)
    for found, wanted in zip(
        readings, row_kernels.read_rows(x.clone(), slots, tile=TILE), strict=True
    ):
        assert torch.equal(found, wanted)
    given = gradient_inputs(3, real, slots, with_label=True)
    row_kernels.write_gradient(x, grad, reference=readings[0], **given, tile=TILE)
    wanted = dense_gradient(x, readings[0], given)
    torch.testing.assert_close(grad.double(), wanted, rtol=EPS[grad.dtype], atol=1e-4)
