# SPDX-License-Identifier: Apache-2.0
"""The collectives of the package, on gloo groups of real processes."""

from dataclasses import replace

import torch
import torch.distributed as dist

from megatron.training.distillation.parallel import (
    ParallelLayout,
    from_speaker,
    gather_sequence,
    max_over_stage,
    sequence_positions,
    sum_over_context,
    sum_over_stage,
    worst_over_stage,
)
from tests.unit_tests.distributed import run_ranks


def layout(
    rank: int,
    stage: list[int],
    *,
    cp_ranks: list[int] | None = None,
) -> ParallelLayout:
    """A layout whose stage group is *stage* and whose CP group is *cp_ranks*. Collective."""
    size = dist.get_world_size()
    own = [dist.new_group([number]) for number in range(size)][rank]
    context = own if cp_ranks is None else dist.new_group(cp_ranks)
    return ParallelLayout(
        tp_rank=0,
        tp_size=1,
        tp_group=own,
        tp_source=rank,
        cp_rank=0 if cp_ranks is None else cp_ranks.index(rank),
        cp_size=1 if cp_ranks is None else len(cp_ranks),
        cp_group=context,
        replica_group=context,
        dp_rank=0,
        dp_size=1,
        stage_group=dist.new_group(stage),
    )


def zigzag(whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """What CP rank *rank* holds, by Megatron's rule: chunks r and 2cp-1-r of 2cp."""
    length = whole.size(0) // (2 * size)
    first = range(rank * length, (rank + 1) * length)
    last = range((2 * size - 1 - rank) * length, (2 * size - rank) * length)
    return whole[[*first, *last]]


def _gather(rank: int, world_size: int, shape: list[int], dtype: torch.dtype) -> object:
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    place = layout(rank, list(range(world_size)), cp_ranks=list(range(world_size)))
    return gather_sequence(zigzag(whole, rank, world_size), place)


def test_gather_sequence_puts_the_zigzag_in_order() -> None:
    for cp_size in (2, 3):
        for shape, dtype in (
            ([2 * cp_size, 1, 1], torch.int32),
            ([4 * cp_size, 2, 3], torch.float16),
            ([4 * cp_size, 3], torch.float32),
        ):
            whole = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
            gathered, *others = run_ranks(cp_size, _gather, shape, dtype)
            assert gathered.dtype == dtype
            assert torch.equal(gathered, whole)
            assert others == [None] * (cp_size - 1)


def _sum_over_context(rank: int, world_size: int) -> object:
    place = layout(rank, list(range(world_size)), cp_ranks=list(range(world_size)))
    part = torch.tensor([[1 << 62, rank], [-1, 5]])
    positions = sequence_positions(4 * world_size, place)
    return sum_over_context(part, place), part, positions


def test_sum_over_context_wraps_and_positions_are_those_of_the_zigzag() -> None:
    for rank, (total, part, positions) in enumerate(run_ranks(2, _sum_over_context)):
        assert total.tolist() == [[-(1 << 63), 1], [-2, 10]]
        assert part.tolist() == [[1 << 62, rank], [-1, 5]]
        assert torch.equal(positions, zigzag(torch.arange(8), rank, 2))


def _gather_off_rank_0(rank: int, world_size: int) -> object:
    # The CP group of ranks 1 and 2: its rank 0 is not global rank 0.
    place = layout(rank, [0, 1, 2], cp_ranks=[1, 2]) if rank else None
    if place is None:
        for number in range(world_size):
            dist.new_group([number])
        dist.new_group([1, 2])
        dist.new_group([0, 1, 2])
        return "not asked"
    whole = torch.arange(8)
    return gather_sequence(zigzag(whole, rank - 1, 2), place)


def test_gather_sequence_in_a_group_that_starts_elsewhere() -> None:
    idle, destination, sender = run_ranks(3, _gather_off_rank_0)
    assert idle == "not asked"
    assert destination.tolist() == list(range(8))
    assert sender is None


def test_gather_sequence_without_context_parallelism_is_the_identity() -> None:
    chunk = torch.ones(3)
    place = ParallelLayout(
        tp_rank=0,
        tp_size=1,
        tp_group=None,
        tp_source=0,
        cp_rank=0,
        cp_size=1,
        cp_group=None,
        replica_group=None,
        dp_rank=0,
        dp_size=1,
        stage_group=None,
    )
    assert gather_sequence(chunk, place) is chunk


def _sum(rank: int, world_size: int) -> list[float]:
    return sum_over_stage([float(rank), 2.0**40 + rank], layout(rank, [0, 1, 2]))


def _largest(rank: int, world_size: int) -> list[float]:
    return max_over_stage([[0.5, -1.0, 2.0**40 + 0.25][rank], -rank], layout(rank, [0, 1, 2]))


def test_max_over_stage() -> None:
    assert run_ranks(3, _largest) == [[2.0**40 + 0.25, 0.0]] * 3


def test_sum_over_stage() -> None:
    expected = [3.0, 3 * 2.0**40 + 3]
    assert run_ranks(3, _sum) == [expected] * 3


def _from_speaker(rank: int, world_size: int) -> object:
    # The stage of ranks 1 to 3, whose speaker is not global rank 0.
    stages = [dist.new_group([0]), dist.new_group([1, 2, 3])]
    place = replace(layout(rank, [0, 1, 2, 3]), stage_group=stages[rank > 0])
    return from_speaker((rank, ["dp0__0-8.tar"], "" if rank else "error"), place)


def test_all_ranks_get_what_the_speaker_of_their_stage_has() -> None:
    own, *others = run_ranks(4, _from_speaker)
    assert own == (0, ["dp0__0-8.tar"], "error")
    assert others == [(1, ["dp0__0-8.tar"], "")] * 3


def _worst(rank: int, world_size: int, codes: list[int], details: list[str]) -> tuple[int, str]:
    return worst_over_stage(codes[rank], details[rank], layout(rank, list(range(world_size))))


def test_ranks_agree_when_all_is_well() -> None:
    assert run_ranks(3, _worst, [0, 0, 0], ["unused"] * 3) == [(0, "")] * 3


def test_one_ranks_failure_is_every_ranks() -> None:
    assert run_ranks(3, _worst, [0, 1, 0], ["", "disk gone", ""]) == [(1, "rank 1: disk gone")] * 3


def test_equal_failures_are_told_once_and_lesser_ones_not() -> None:
    results = run_ranks(4, _worst, [2, 1, 2, 2], ["same", "lesser", "same", "other"])
    assert results == [(2, "rank 0, 2: same\nrank 3: other")] * 4
