# SPDX-License-Identifier: Apache-2.0
"""Samples side by side and one after the other: there, back again, and what is neither."""

import itertools

import pytest
import torch

from megatron.training.distillation.packed_layout import is_packed, pack_samples, unpack_samples

VOCAB = 5


def sample_major(positions: int, samples: int, *rest: int) -> torch.Tensor:
    """``(S, B, ...)`` in which each place holds ``1000 * sample + position``."""
    columns = [
        torch.tensor([1000 * sample + position for position in range(positions)])
        for sample in range(samples)
    ]
    return (
        torch.stack(columns, 1)
        .reshape(positions, samples, *[1] * len(rest))
        .expand(positions, samples, *rest)
    )


@pytest.mark.parametrize("rest", [(), (3,)], ids=["tail", "entries"])
@pytest.mark.parametrize("samples", [1, 2, 4])
@pytest.mark.parametrize("positions", [1, 2, 3, 8])
def test_samples_are_joined_in_order_and_told_apart_again(
    positions: int, samples: int, rest: tuple[int, ...]
) -> None:
    rows = sample_major(positions, samples, *rest)
    joined = pack_samples(rows)
    assert joined.shape == (samples * positions, 1, *rest)
    expected = [1000 * s + p for s, p in itertools.product(range(samples), range(positions))]
    assert joined.reshape(samples * positions, -1)[:, 0].tolist() == expected
    assert torch.equal(unpack_samples(joined, samples), rows)


def test_joined_losses_lie_like_the_loss_mask_that_the_trainer_joins() -> None:
    mask = torch.arange(8.0).reshape(2, 4)  # (B, S)
    assert torch.equal(pack_samples(mask.T).T, mask.reshape(1, -1))


@pytest.mark.parametrize("samples", [1, 2, 4])
@pytest.mark.parametrize("positions", [1, 3, 8])
def test_layout_is_told_by_the_shape(positions: int, samples: int) -> None:
    side_by_side = torch.empty(positions, samples, VOCAB)
    joined = torch.empty(positions * samples, 1, VOCAB)
    assert not is_packed(side_by_side, positions=positions, micro_batch_size=samples)
    packed = is_packed(joined, positions=positions, micro_batch_size=samples)
    assert packed == (samples > 1)


@pytest.mark.parametrize(
    "found", [(8, 1), (4, 1), (16, 2), (8, 4), (1, 16), (2, 8), (15, 1), (32, 1)]
)
def test_shape_of_neither_layout_is_refused(found: tuple[int, int]) -> None:
    with pytest.raises(ValueError) as caught:
        is_packed(torch.empty(*found, VOCAB), positions=8, micro_batch_size=2)
    message = str(caught.value)
    for part in (str(found), "(8, 2)", "(16, 1)", "--micro-batch-size", "--seq-length"):
        assert part in message


def test_joined_samples_cannot_be_sliced_over_context_parallel_ranks() -> None:
    joined = torch.empty(8, 1, VOCAB)
    with pytest.raises(ValueError, match=r"\(8, 1\).* 2 samples .* 2 context-parallel .* Use"):
        is_packed(joined, positions=4, micro_batch_size=2, cp_size=2)
    # One sample is sliced the same way whatever the layout is called.
    assert not is_packed(joined, positions=8, micro_batch_size=1, cp_size=2)
    assert not is_packed(torch.empty(4, 2, VOCAB), positions=4, micro_batch_size=2, cp_size=2)
