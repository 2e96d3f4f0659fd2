# SPDX-License-Identifier: Apache-2.0
"""The ranks of a pipeline stage read one listing, and renew it together."""

import functools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.training.distillation import cached_kd_loss, storage, target_stream
from megatron.training.distillation.cached_kd_loss import CachedLogitsKDLoss
from megatron.training.distillation.errors import CacheFormatError, TeacherDataError
from tests.unit_tests.distributed import recorded_collectives, run_ranks
from tests.unit_tests.training.distillation.cache_files import SEQ, sample_of, write_shard
from tests.unit_tests.training.distillation.run_stubs import (
    SETTINGS,
    PlainPatch,
    StubRun,
    group_layout,
)

WORLD = 4
GBS = 4
AGREEMENT = ["all_reduce"]
"""The collectives of an iteration whose targets all ranks have, without those that carry rows."""
FAILURE = ["all_reduce", "all_gather_object"]
LISTING = ["broadcast_object_list"]


class Stage:
    """One rank of a stage of TP 2 x DP 2, with what it does on the way recorded."""

    def __init__(self, rank: int, cache: Path, **options: Any) -> None:
        self.rank = rank
        self.cache = cache
        self.listings = 0
        replicas = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        layout = group_layout(
            tp_rank=rank % 2,
            tp_size=2,
            dp_rank=rank // 2,
            dp_size=2,
            replica_group=replicas[rank // 2],
        )
        settings = replace(SETTINGS, global_batch_size=GBS, seq_length=SEQ, vocab_size=None)
        self.run = StubRun(layout=layout, settings=settings)
        self.run.install(PlainPatch)
        original = storage.list_names

        def counted(directory: str, prefix: str = "") -> list[str]:
            self.listings += 1
            return original(directory, prefix)

        storage.list_names = counted
        # The processes of this test are daemons, which may not start a loader process.
        loader = target_stream.DataLoader
        target_stream.DataLoader = lambda *a, **k: loader(  # type: ignore[assignment,misc]
            *a, **{**k, "num_workers": 0, "prefetch_factor": None}
        )
        # Which collectives the divergence itself needs is not the matter here.
        cached_kd_loss.sparse_kl = lambda logits, *a, **k: logits.sum(-1)
        self.loss = CachedLogitsKDLoss(str(cache), **options)

    def step(self, start: int) -> tuple[list[list[int]] | str | None, list[str]]:
        """Return the samples of an iteration or its error, and the collectives of agreeing."""
        self.run.move_to(start)
        problem = ""
        with recorded_collectives() as seen:
            try:
                loss = self.loss(torch.zeros(SEQ, 1, 16))
            except (TeacherDataError, CacheFormatError) as error:
                problem = f"{type(error).__name__}: {error}"
        seen = [name for name in seen if name != "broadcast"]
        if problem:
            return problem, seen
        if loss is None:
            return None, seen
        first = self.loss._targets
        assert first is not None
        rows = [first.first.unpack(), self.loss._feed.take(1).unpack()]
        return [sample_of(part.values) for part in rows], seen

    def write_alone(self, write: functools.partial[Any]) -> None:
        """Have rank 0 change the cache while the others wait."""
        dist.barrier()
        if self.rank == 0:
            listings = self.listings
            write()
            self.listings = listings  # the writer's own do not count
        dist.barrier()


def expected_samples(rank: int, start: int) -> list[list[int]]:
    return [[start + rank // 2], [start + 2 + rank // 2]]


# ---- a teacher that still writes ---------------------------------------------------------------


def _follow_a_teacher(rank: int, world_size: int, cache: Path) -> tuple[int, list[int]]:
    stage = Stage(rank, cache)
    counts = []
    # These shards have no fingerprints, which the ranks tell each other once.
    assert stage.step(0) == (expected_samples(rank, 0), LISTING + FAILURE)
    assert stage.step(4) == (expected_samples(rank, 4), AGREEMENT)
    counts.append(stage.listings)
    # What is there is not looked for again.
    stage.write_alone(functools.partial(write_shard, cache, 8, 16, gbs=GBS, dp=2))
    assert stage.step(8) == (expected_samples(rank, 8), FAILURE + LISTING + AGREEMENT)
    assert stage.step(12) == (expected_samples(rank, 12), AGREEMENT)
    counts.append(stage.listings)
    # The teacher is resumed and puts what it has under another name.
    stage.write_alone(functools.partial(_rename_and_extend, cache))
    assert stage.step(16) == (expected_samples(rank, 16), FAILURE + LISTING + AGREEMENT)
    counts.append(stage.listings)
    return rank, counts


def _rename_and_extend(cache: Path) -> None:
    for shard in cache.glob("*__8-16.tar"):
        shard.rename(f"{shard}.stale")
    write_shard(cache, 8, 24, gbs=GBS, dp=2)


def test_one_rank_lists_at_the_start_and_once_for_all_when_data_is_missing(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, 8, gbs=GBS, dp=2)
    results = run_ranks(WORLD, _follow_a_teacher, tmp_path)
    assert [counts for _, counts in results] == [[1, 2, 3], *[[0, 0, 0]] * 3]


def _run_out(rank: int, world_size: int, cache: Path, ignore_errors: bool) -> Any:
    stage = Stage(rank, cache, ignore_errors=ignore_errors)
    stage.step(4)
    return [stage.step(8), stage.step(12), stage.listings]


@pytest.mark.parametrize("ignore_errors", [False, True])
def test_all_ranks_agree_again_after_the_second_look(tmp_path: Path, ignore_errors: bool) -> None:
    write_shard(tmp_path, 0, 8, gbs=GBS, dp=2)
    results = run_ranks(WORLD, _run_out, tmp_path, ignore_errors)
    for rank, (first, second, listings) in enumerate(results):
        for outcome, collectives in (first, second):
            assert collectives == FAILURE + LISTING + FAILURE
            if ignore_errors:
                assert outcome is None
            else:
                assert outcome.startswith("TeacherDataExhaustedError")
        assert listings == (0 if rank else 3)


# ---- ranks that differ -------------------------------------------------------------------------


def _lose_a_shard(rank: int, world_size: int, cache: Path) -> Any:
    stage = Stage(rank, cache)
    stage.step(0)
    return stage.step(8)


def test_shard_that_only_some_ranks_miss_is_looked_for_by_all(tmp_path: Path) -> None:
    """A rank whose own rows are there takes part in everything the others do."""
    write_shard(tmp_path, 0, 8, gbs=GBS, dp=2)
    write_shard(tmp_path, 8, 16, gbs=GBS, dp=2)
    (tmp_path / "dp1__8-16.tar").unlink()
    results = run_ranks(WORLD, _lose_a_shard, tmp_path)
    for rank, (outcome, collectives) in enumerate(results):
        assert collectives == FAILURE + LISTING + FAILURE
        kind = "TeacherDataMissingError" if rank > 1 else "TeacherDataError: Another rank"
        assert outcome.startswith(kind)
        assert "dp1__8-16.tar" in outcome


def test_damaged_data_is_not_looked_for_again(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, 8, gbs=GBS, dp=2)
    write_shard(tmp_path, 8, 16, gbs=GBS, dp=2)
    os.truncate(tmp_path / "dp1__8-16.tar", 700)
    results = run_ranks(WORLD, _lose_a_shard, tmp_path)
    for rank, (outcome, collectives) in enumerate(results):
        assert collectives == FAILURE
        assert outcome.startswith("CacheFormatError" if rank > 1 else "TeacherDataError: Another")


# ---- a directory that cannot be listed ---------------------------------------------------------


def _no_directory(rank: int, world_size: int, cache: Path, ignore_errors: bool) -> Any:
    stage = Stage(rank, cache / "missing", ignore_errors=ignore_errors)
    return stage.step(0)


@pytest.mark.parametrize("ignore_errors", [False, True])
def test_error_of_the_listing_rank_reaches_all(tmp_path: Path, ignore_errors: bool) -> None:
    for outcome, collectives in run_ranks(WORLD, _no_directory, tmp_path, ignore_errors):
        assert collectives == LISTING
        assert outcome.startswith("TeacherDataError: Cannot list the teacher data")
        assert str(tmp_path / "missing") in outcome


def _listing_has_a_bug(rank: int, world_size: int, cache: Path) -> Any:
    stage = Stage(rank, cache, ignore_errors=True)

    def list_names(directory: str, prefix: str = "") -> list[str]:
        raise KeyError("Contents")  # no kind of error that storage promises

    storage.list_names = list_names
    return stage.step(0)


def test_whatever_the_listing_raises_reaches_all(tmp_path: Path) -> None:
    for outcome, collectives in run_ranks(WORLD, _listing_has_a_bug, tmp_path):
        assert collectives == LISTING
        assert outcome.startswith(f"TeacherDataError: Cannot list the teacher data in {tmp_path}")
        assert "KeyError: 'Contents'" in outcome


def _directory_goes_away(rank: int, world_size: int, cache: Path) -> Any:
    stage = Stage(rank, cache, ignore_errors=True)
    stage.step(0)
    stage.write_alone(functools.partial(cache.rename, cache.with_name("gone")))
    missed = stage.step(8)
    stage.write_alone(functools.partial(cache.with_name("gone").rename, cache))
    stage.write_alone(functools.partial(write_shard, cache, 12, 16, gbs=GBS, dp=2))
    return missed, stage.step(12)


def test_listing_that_fails_later_leaves_the_failure_and_is_tried_again(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    write_shard(cache, 0, 8, gbs=GBS, dp=2)
    for rank, (missed, found) in enumerate(run_ranks(WORLD, _directory_goes_away, cache)):
        assert missed == (None, FAILURE + LISTING)
        assert found == (expected_samples(rank, 12), FAILURE + LISTING + AGREEMENT)
