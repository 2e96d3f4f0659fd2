# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of labels, against Python's own integers."""

import pytest
import torch

from megatron.training.distillation.fingerprint import (
    CHUNK,
    LabelFingerprinter,
    chunk_count,
    comparable_chunks,
    differing_chunks,
    mix64,
)
from megatron.training.distillation.parallel import sequence_positions
from tests.unit_tests.training.distillation.run_stubs import placed

MASK = (1 << 64) - 1


def splitmix64(value: int) -> int:
    """Splitmix64's output for the state *value*, in unsigned arithmetic of unlimited width."""
    mixed = (value + 0x9E3779B97F4A7C15) & MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
    return mixed ^ (mixed >> 31)


def expected_fingerprints(samples: list[list[int]]) -> list[list[int]]:
    """``(C, B)`` as Python integers in the range of int64."""
    table = []
    for first in range(0, len(samples[0]), CHUNK):
        row = []
        for labels in samples:
            total = sum(
                splitmix64(label & MASK) * (splitmix64(position) | 1)
                for position, label in enumerate(labels)
                if first <= position < first + CHUNK
            )
            row.append((total & MASK) - ((total & MASK) >> 63 << 64))
        table.append(row)
    return table


def random_labels(samples: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 131072, (samples, length), generator=generator)


def whole(labels: torch.Tensor) -> torch.Tensor:
    length = labels.size(1)
    return LabelFingerprinter(torch.arange(length), length)(labels)


def test_mixing_is_splitmix64() -> None:
    """The first outputs of splitmix64 from seed 0, as its authors publish them."""
    increment = 0x9E3779B97F4A7C15
    states = [0, increment - (1 << 64), 2 * increment % (1 << 64)]
    found = [value & MASK for value in mix64(torch.tensor(states)).tolist()]
    assert found == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 200])
@pytest.mark.parametrize("samples", [1, 3])
def test_fingerprints_are_sums_modulo_2_to_the_64(length: int, samples: int) -> None:
    labels = random_labels(samples, length)
    labels[0, -1] = -100  # a masked label of SFT
    labels[-1, 0] = 0
    found = whole(labels)
    assert found.shape == (chunk_count(length), samples)
    assert found.dtype == torch.int64
    assert found.tolist() == expected_fingerprints(labels.tolist())


@pytest.mark.parametrize("length", [8, 64, 72, 320])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_parts_of_context_parallel_ranks_add_up(length: int, cp_size: int) -> None:
    labels = random_labels(2, length)
    total = torch.zeros(chunk_count(length), 2, dtype=torch.int64)
    seen = []
    for rank in range(cp_size):
        positions = sequence_positions(length, placed(cp_rank=rank, cp_size=cp_size))
        assert positions.numel() == length // cp_size
        seen += positions.tolist()
        total += LabelFingerprinter(positions, length)(labels[:, positions])
    assert sorted(seen) == list(range(length))
    assert torch.equal(total, whole(labels))


def test_packed_labels_have_the_same_fingerprints() -> None:
    labels = random_labels(3, 100)
    joined = labels.reshape(1, -1)
    assert torch.equal(LabelFingerprinter(torch.arange(100), 100)(joined), whole(labels))


def test_labels_of_other_samples_are_refused() -> None:
    fingerprint = LabelFingerprinter(torch.arange(8), 8)
    for shape in ((2, 7), (1, 9), (0, 8)):
        with pytest.raises(ValueError, match=r"have shape \(\d, \d\); expected 8 positions"):
            fingerprint(torch.zeros(shape, dtype=torch.long))


def test_any_change_is_seen_where_it_is() -> None:
    length = 5 * CHUNK
    labels = random_labels(1, length)
    reference = whole(labels)

    def changed(other: torch.Tensor) -> list[int]:
        return differing_chunks(whole(other), reference).nonzero()[:, 0].tolist()

    assert changed(labels.clone()) == []
    for position in range(0, length, 7):
        other = labels.clone()
        other[0, position] ^= 1
        assert changed(other) == [position // CHUNK]
    for left, right in ((0, 1), (70, 100), (10, 300)):
        other = labels.clone()
        other[0, [left, right]] = labels[0, [right, left]]
        assert changed(other) == sorted({left // CHUNK, right // CHUNK})
    assert changed(labels.roll(1, dims=1)) == [0, 1, 2, 3, 4]
    assert changed(random_labels(1, length, seed=1)) == [0, 1, 2, 3, 4]


def test_same_tokens_in_another_chunk_look_different() -> None:
    """A position counts from the start of the sample, not of the chunk."""
    chunk = random_labels(1, CHUNK)
    first, second = whole(torch.cat([chunk, chunk], dim=1))[:, 0].tolist()
    assert first != second


@pytest.mark.parametrize(
    ("stored", "length", "chunks"),
    [
        *((16, 16, 1), (64, 64, 1), (65, 65, 2), (200, 200, 4)),
        # The last position of a trimmed sequence is never compared.
        *((200, 64, 0), (200, 65, 1), (200, 128, 1), (200, 129, 2), (65, 64, 0), (20, 10, 0)),
    ],
)
def test_comparable_chunks(stored: int, length: int, chunks: int) -> None:
    assert comparable_chunks(stored, length) == chunks
    labels = random_labels(2, stored)
    short = labels[:, :length].clone()
    if stored > length:
        short[:, -1] = 0
    assert not differing_chunks(whole(short), whole(labels)[:chunks]).any()


def test_only_whole_samples_are_compared() -> None:
    with pytest.raises(AssertionError):
        differing_chunks(torch.zeros(2, 1), torch.zeros(2, 3))
