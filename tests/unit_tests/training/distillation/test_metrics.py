# SPDX-License-Identifier: Apache-2.0
"""What is measured of targets and dumps, against sums over plain Python numbers."""

import math
import random

import pytest
import torch

from megatron.training.distillation.metrics import TargetMasses, TargetMeans, WindowMasses

S, B, K = 5, 3, 4


def test_means_of_known_targets() -> None:
    values = torch.tensor([[[0.5, 0.25], [0.75, 0.0]], [[0.125, 0.0], [0.0, 0.0]]]).log()
    values[values == -math.inf] = -1000.0
    tail = torch.tensor([[0.25, 0.25], [0.5, 0.5]]).log()
    masses = TargetMasses()
    masses.add(values, tail)
    assert masses.means() == TargetMeans(
        mass_kept=pytest.approx((0.75 + 0.75 + 0.125 + 0) / 4),
        tail_mass=pytest.approx(1.5 / 4),
        with_targets=0.75,
    )
    # Without a stored tail it is what the entries leave.
    masses = TargetMasses()
    masses.add(values, None)
    means = masses.means()
    assert means is not None
    assert means.tail_mass == pytest.approx((0.25 + 0.25 + 0.875 + 1) / 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("with_tail", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_means_over_unmasked_tokens(dtype: torch.dtype, with_tail: bool, packed: bool) -> None:
    draw = random.Random(f"{dtype} {with_tail}")
    masses = TargetMasses()
    kept_sum = tail_sum = entries = tokens = 0.0
    for _ in range(3):
        values = torch.tensor(
            [[[draw.uniform(-6, -2) for _ in range(K)] for _ in range(B)] for _ in range(S)]
        ).to(dtype)
        mask = torch.tensor([[float(draw.random() < 0.6) for _ in range(S)] for _ in range(B)])
        tail = torch.tensor([[draw.uniform(-3, 0) for _ in range(B)] for _ in range(S)])
        for s in range(S):
            for b in range(B):
                if draw.random() < 0.3:
                    values[s, b, draw.randrange(K) :] = -1000.0
                if mask[b, s] == 0:
                    # Nothing of a masked token counts, whatever it holds.
                    values[s, b, 0] = tail[s, b] = math.nan
                    continue
                kept = [math.exp(v) for v in values[s, b].tolist() if v != -1000.0]
                kept_sum += sum(kept)
                tail_sum += math.exp(float(tail[s, b])) if with_tail else max(1 - sum(kept), 0)
                entries += bool(kept)
                tokens += 1
        flat_mask = mask
        if packed:
            # (S, B) one sample after the other in one sequence (B * S, 1)
            values = values.transpose(0, 1).reshape(B * S, 1, K)
            tail = tail.transpose(0, 1).reshape(B * S, 1)
            flat_mask = mask.reshape(1, B * S)
        masses.add(values, tail if with_tail else None, flat_mask.reshape(-1))
    means = masses.means()
    assert means is not None
    assert means.mass_kept == pytest.approx(kept_sum / tokens, rel=1e-6)
    assert means.tail_mass == pytest.approx(tail_sum / tokens, rel=1e-6)
    assert means.with_targets == entries / tokens


def test_no_token_has_no_mean() -> None:
    masses = TargetMasses()
    assert masses.means() is None
    masses.add(torch.zeros(S, B, K), None, torch.zeros(B * S))
    assert masses.means() is None


def test_window_sums_iterations_and_replays_replace() -> None:
    masses = WindowMasses()
    tails = torch.tensor([[0.5], [0.25], [0.0]]).log()
    masses.add(0, [tails, tails])
    masses.add(2, [torch.tensor([[1.0], [0.9], [0.8]]).log()])
    masses.add(0, [tails[:2], tails])
    kept, tokens = masses.take()
    assert kept == pytest.approx((0.5 + 0.75) + (0.5 + 0.75 + 1.0) + (0.0 + 0.1 + 0.2))
    assert tokens == 8
    assert masses.take() == (0.0, 0)
