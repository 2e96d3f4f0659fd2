# SPDX-License-Identifier: Apache-2.0
"""Codes of 8 bits: the nearest of every fp16 number, what they cost, and their payloads."""

import dataclasses

import numpy as np
import pytest
import torch

from megatron.training.distillation import eight_bit
from megatron.training.distillation.payload_v3 import decode_framed_rows, read_header
from tests.unit_tests.training.distillation.payload_v3_cases import (
    SENTINEL,
    check_rows,
    make_member,
)


def test_values_by_hand() -> None:
    assert eight_bit.VALUES.dtype == np.float16
    # -24 times the squares of 0, 1/5, 2/5 and 1.
    assert eight_bit.VALUES[[0, 51, 102, 255]].tolist() == [
        0.0,
        np.float16(-0.96),
        np.float16(-3.84),
        -24.0,
    ]
    assert float(eight_bit.VALUES[1]) == pytest.approx(-24 / 65025, rel=1e-3)
    assert (np.diff(eight_bit.VALUES.astype(np.float64)) < 0).all()


def test_the_nearest_code_of_every_fp16_number() -> None:
    numbers = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    numbers = numbers[~np.isnan(numbers)]
    codes = eight_bit.to_codes(numbers)
    assert codes.dtype == np.uint8
    finite = np.isfinite(numbers)
    exact, values = numbers[finite].astype(np.float64), eight_bit.VALUES.astype(np.float64)
    distance = np.abs(exact[:, None] - values)
    chosen = distance[np.arange(len(exact)), codes[finite]]
    assert (chosen == distance.min(axis=1)).all()
    assert codes[numbers == -np.inf].tolist() == [255]
    assert codes[numbers == np.inf].tolist() == [0]


@pytest.mark.parametrize("scale", [1.0, 3.0, 8.0])
def test_divergence_of_peaked_distributions(scale: float) -> None:
    """KL(fp16 || codes) of normalised distributions, whose tail is stored exactly."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(500, 4096, generator=generator, dtype=torch.float64) * scale
    top = torch.log_softmax(logits, -1).topk(128, -1).values.half().numpy()
    coded = eight_bit.from_codes(eight_bit.to_codes(top)).astype(np.float64)
    exact = top.astype(np.float64)
    tail = np.maximum(1 - np.exp(exact).sum(-1, keepdims=True), 1e-9)
    p, q = (np.concatenate([np.exp(of), tail], -1) for of in (exact, coded))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    divergence = (p * np.log(p / q)).sum(-1)
    assert divergence.mean() < 3e-4
    # An entry is off by half the distance of codes there, and by the rounding to fp16.
    error = np.abs(exact - coded)[exact > -24]
    assert (error <= 24 * np.sqrt(-exact[exact > -24] / 24) / 255 + 0.01).all()


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("positions", "k"), [(1, 1), (600, 5)])
def test_payloads(positions: int, k: int, dtype: torch.dtype, is_masked: bool) -> None:
    """Masked entries stay masked; all others are what is nearest in fp16."""
    member = make_member(positions, 2, k, dtype=dtype, is_masked=is_masked, vocab_size=1 << 18)
    values = member.values.half()
    distance = (values.double().unsqueeze(-1) - torch.from_numpy(eight_bit.VALUES).double()).abs()
    nearest = torch.from_numpy(eight_bit.VALUES)[distance.argmin(-1)]
    nearest[member.values == SENTINEL] = SENTINEL
    expected = dataclasses.replace(member, values=nearest)
    for sort_ties in (False, True):
        data = member.encode(eight_bit=True, sort_ties=sort_ties)
        found = decode_framed_rows(read_header(data), data, range(2))
        check_rows(found, expected, is_sorted=sort_ties)
