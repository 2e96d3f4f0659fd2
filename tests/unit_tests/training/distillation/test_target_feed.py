# SPDX-License-Identifier: Apache-2.0
"""One rank of a replica reads; every rank of it gets its part, and the same errors."""

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.training.distillation import (
    cached_kd_loss,
    framed_member,
    open_shard,
    storage,
    target_stream,
)
from megatron.training.distillation.cached_kd_loss import CachedLogitsKDLoss
from megatron.training.distillation.errors import (
    CacheFormatError,
    CacheIdentityError,
    TeacherDataError,
    TeacherDataExhaustedError,
)
from megatron.training.distillation.packed_rows import PackedRows, TeacherRows
from megatron.training.distillation.parallel import ParallelLayout, sequence_positions
from megatron.training.distillation.target_feed import OpenIteration, TargetFeed
from megatron.training.distillation.targets import IterationFailure, IterationTargets
from tests.unit_tests.distributed import recorded_collectives, run_ranks
from tests.unit_tests.training.distillation.cache_files import SEQ, sample_of, write_shard
from tests.unit_tests.training.distillation.given_targets import GivenTargets, sliced_targets
from tests.unit_tests.training.distillation.run_stubs import (
    SETTINGS,
    SINGLE,
    PlainPatch,
    StubRun,
    group_layout,
)

LENGTH = 8
GBS = 4
GRIDS = [(2, 1), (1, 2), (2, 2)]
"""Tensor parallel times context parallel size."""


def layout_of(rank: int, tp: int, cp: int) -> ParallelLayout:
    """The place of a rank of one replica, which is the whole world."""
    return group_layout(tp_rank=rank % tp, tp_size=tp, cp_rank=rank // tp, cp_size=cp)


def whole_rows(start: int, microbatch: int, *, k: int = 3, **parts: Any) -> TeacherRows:
    """The rows of whole sequences: every number tells where it belongs."""
    generator = torch.Generator().manual_seed(1000 * start + microbatch)
    shape = (LENGTH, 2, k)
    dtype = parts.get("dtype", torch.float16)
    return TeacherRows(
        values=-torch.rand(shape, generator=generator).to(dtype),
        indices=torch.randint(0, 131072, shape, generator=generator).int(),
        tail_logprob=-torch.rand(shape[:2], generator=generator) if parts.get("tail") else None,
        label_fingerprints=(
            torch.randint(-(2**62), 2**62, (3, 2), generator=generator)
            if parts.get("fingerprints")
            else None
        ),
    )


def slice_of(rows: TeacherRows, layout: ParallelLayout) -> TeacherRows:
    """What a context-parallel rank holds of *rows*."""
    positions = sequence_positions(LENGTH, layout)
    tail = rows.tail_logprob
    return TeacherRows(
        values=rows.values[positions],
        indices=rows.indices[positions],
        tail_logprob=None if tail is None else tail[positions],
        label_fingerprints=rows.label_fingerprints,
    )


def iteration(start: int, cp: int, microbatches: int = 2, **parts: Any) -> IterationTargets:
    """What the rank that reads has of an iteration."""
    places = [replace(SINGLE, cp_rank=rank, cp_size=cp) for rank in range(cp)]
    rows = [whole_rows(start, number, **parts) for number in range(microbatches)]
    return sliced_targets(start, *([slice_of(row, place) for place in places] for row in rows))


class NotAsked(GivenTargets):
    """The stream of a rank that does not read."""

    def iteration(self, start_sample: int) -> Any:
        raise AssertionError("this rank does not read")


def feed_of(
    layout: ParallelLayout,
    make: Callable[[int], IterationTargets | IterationFailure],
    device: str = "cpu",
) -> TargetFeed:
    """A feed whose reading rank reads what *make* returns."""

    class Made(GivenTargets):
        def iteration(self, start_sample: int) -> IterationTargets | IterationFailure:
            self.asked.append(start_sample)
            return make(start_sample)

    stream = Made() if layout.reads_for_replica else NotAsked()
    place = torch.device(device)
    return TargetFeed(stream, layout, gbs=GBS, device=place)  # type: ignore[arg-type]


def check(rows: PackedRows, whole: TeacherRows, layout: ParallelLayout) -> None:
    found, expected = rows.unpack(), slice_of(whole, layout)
    for name in TeacherRows.__slots__:
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (theirs is None), name
        assert ours is None or torch.equal(ours, theirs), name


# ---- rows -------------------------------------------------------------------------------------


PARTS = [
    {"k": 8},
    {"k": 3, "tail": True},
    {"k": 100, "dtype": torch.bfloat16, "fingerprints": True},
    {"k": 16, "dtype": torch.float32, "tail": True, "fingerprints": True},
]


def _every_part(rank: int, world_size: int, tp: int, cp: int) -> None:
    layout = layout_of(rank, tp, cp)
    for parts in PARTS:
        for microbatches in (1, 2, 3):
            make = functools.partial(iteration, cp=cp, microbatches=microbatches, **parts)
            feed = feed_of(layout, make)
            for start in (0, GBS, 2 * GBS):
                opened = feed.open(start)
                assert isinstance(opened, OpenIteration)
                assert (opened.start, opened.microbatches) == (start, microbatches)
                check(opened.first, whole_rows(start, 0, **parts), layout)
                for number in range(microbatches):
                    check(feed.take(number), whole_rows(start, number, **parts), layout)


@pytest.mark.parametrize(("tp", "cp"), GRIDS)
def test_every_rank_gets_its_part(tp: int, cp: int) -> None:
    run_ranks(tp * cp, _every_part, tp, cp)


def test_replica_of_one_rank_takes_what_it_reads() -> None:
    feed = feed_of(SINGLE, functools.partial(iteration, cp=1, tail=True))
    with recorded_collectives() as seen:
        for start in (0, GBS):
            assert isinstance(feed.open(start), OpenIteration)
            for number in (0, 1, 0, 1):
                check(feed.take(number), whole_rows(start, number, tail=True), SINGLE)
    assert seen == []
    assert feed.stream.asked == [0, GBS]  # type: ignore[attr-defined]
    assert feed.wait == 0.25


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_rows_travel_to_a_gpu_and_nothing_synchronises() -> None:
    parts = {"k": 100, "tail": True, "fingerprints": True}
    given = {start: iteration(start, 1, 3, **parts).pin_memory() for start in range(0, 40, GBS)}
    feed = feed_of(SINGLE, given.__getitem__, "cuda")
    work = torch.randn(2048, 2048, device="cuda")
    taken: list[tuple[int, int, TeacherRows]] = []
    for start in range(0, 36, GBS):
        torch.cuda.set_sync_debug_mode("error")
        try:
            opened = feed.open(start)
            assert isinstance(opened, OpenIteration)
            for number in (0, 1, 2, 1):
                taken.append((start, number, feed.take(number).unpack()))
                work = work @ work  # the next rows arrive meanwhile
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for start, number, rows in taken:
        expected = whole_rows(start, number, **parts)
        assert rows.values.is_cuda
        for name in TeacherRows.__slots__:
            assert torch.equal(getattr(rows, name).cpu(), getattr(expected, name)), name


def _any_order(rank: int, world_size: int, tp: int, cp: int, seed: int) -> None:
    """Replays, jumps and microbatches out of order, the same on all ranks."""
    layout = layout_of(rank, tp, cp)
    feed = feed_of(layout, functools.partial(iteration, cp=cp, microbatches=3, tail=True))
    chance = random.Random(seed)
    start = 0
    for _ in range(12):
        start = chance.choice([start, start + GBS, start + GBS, start + 3 * GBS, 0])
        first = chance.choice([0, 0, 1, 2])
        opened = feed.open(start, first)
        assert isinstance(opened, OpenIteration)
        check(opened.first, whole_rows(start, first, tail=True), layout)
        order = [first, *range(first + 1, 3)]
        if chance.random() < 0.5:
            order += chance.choices(range(3), k=chance.randrange(5))
        for number in order:
            check(feed.take(number), whole_rows(start, number, tail=True), layout)


@pytest.mark.parametrize(("tp", "cp"), GRIDS)
@pytest.mark.parametrize("seed", range(3))
def test_microbatches_in_any_order(tp: int, cp: int, seed: int) -> None:
    run_ranks(tp * cp, _any_order, tp, cp, seed)


# ---- collectives ------------------------------------------------------------------------------


def _collectives(rank: int, world_size: int, tp: int, cp: int) -> list[list[str]]:
    layout = layout_of(rank, tp, cp)
    feed = feed_of(layout, functools.partial(iteration, cp=cp, microbatches=3))
    steps = []
    for start in (0, GBS, 2 * GBS):
        with recorded_collectives() as seen:
            feed.open(start)
            for number in range(3):
                feed.take(number)
        steps.append(seen)
    with recorded_collectives() as seen:  # the step is run again, which was not foreseen
        for number in range(3):
            feed.take(number)
    return [*steps, seen]


@pytest.mark.parametrize(("tp", "cp"), GRIDS)
def test_one_collective_per_microbatch(tp: int, cp: int) -> None:
    name = "broadcast" if cp == 1 else "scatter"
    for rank, steps in enumerate(run_ranks(tp * cp, _collectives, tp, cp)):
        counts = [len(seen) for seen in steps]
        # The first step opens, learns how large a microbatch is, and sends the next step's ahead.
        assert counts == [3 + 2, 3, 3, 3], rank
        assert {used for seen in steps for used in seen} == {name}


def _growth(rank: int, world_size: int) -> list[int]:
    """K rises, falls and rises again, as rows with top-P do."""
    layout = layout_of(rank, 2, 1)
    widths = {0: 3, GBS: 40, 2 * GBS: 2, 3 * GBS: 41, 4 * GBS: 41}
    feed = feed_of(layout, lambda start: iteration(start, 1, k=widths.get(start, 1)))
    counts = []
    for start, k in widths.items():
        with recorded_collectives() as seen:
            opened = feed.open(start)
            assert isinstance(opened, OpenIteration)
            assert opened.blocks.k == k
            for number in range(2):
                check(feed.take(number), whole_rows(start, number, k=k), layout)
        counts.append(len(seen))
    return counts


def test_more_room_is_agreed_on_when_it_is_needed() -> None:
    assert run_ranks(2, _growth) == [[4, 3, 2, 3, 2]] * 2


# ---- failures ---------------------------------------------------------------------------------


ERRORS = [
    (TeacherDataError("Cannot read it: näher, 日本"), False),
    (TeacherDataExhaustedError("the end"), False),
    (CacheFormatError("x" * 20_000), False),
    (CacheIdentityError("another seed"), True),
]


def _failures(rank: int, world_size: int, tp: int, cp: int) -> list[tuple[str, str, bool]]:
    layout = layout_of(rank, tp, cp)

    def make(start: int) -> IterationTargets | IterationFailure:
        number = start // GBS
        if number % 2 == 1 and number // 2 < len(ERRORS):
            error, fatal = ERRORS[number // 2]
            return IterationFailure(start=start, error=error, fatal=fatal)
        return iteration(start, cp)

    feed = feed_of(layout, make)
    told = []
    for number in range(2 * len(ERRORS)):
        opened = feed.open(number * GBS)
        if isinstance(opened, IterationFailure):
            assert opened.start == number * GBS
            told.append((type(opened.error).__name__, str(opened.error), opened.fatal))
            continue
        for microbatch in range(2):
            check(feed.take(microbatch), whole_rows(number * GBS, microbatch), layout)
    return told


@pytest.mark.parametrize(("tp", "cp"), GRIDS)
def test_failures_reach_all_ranks(tp: int, cp: int) -> None:
    expected = [(type(error).__name__, str(error), fatal) for error, fatal in ERRORS]
    assert run_ranks(tp * cp, _failures, tp, cp) == [expected] * (tp * cp)


def _second_look(rank: int, world_size: int) -> list[str]:
    """What is asked for again after a failure is read again."""
    layout = layout_of(rank, 1, 2)
    answers = iter([True, False, False, True])

    def make(start: int) -> IterationTargets | IterationFailure:
        if next(answers):
            return iteration(start, 2, microbatches=1)
        error = TeacherDataExhaustedError("not yet")
        return IterationFailure(start=start, error=error, fatal=False)

    feed = feed_of(layout, make)
    kinds = [type(feed.open(0)).__name__]
    feed.take(0)
    kinds += [type(feed.open(GBS)).__name__ for _ in range(3)]
    return kinds


def test_failure_read_ahead_is_not_the_last_word() -> None:
    expected = ["OpenIteration", "IterationFailure", "IterationFailure", "OpenIteration"]
    assert run_ranks(2, _second_look) == [expected] * 2


# ---- from files to the loss -------------------------------------------------------------------


class Reads:
    """How often this rank opened shards and decoded members, and the bytes it read."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.decoded = self.bytes = 0
        original_open = storage.open_read

        def opened(path: str, *args: Any, **options: Any) -> Any:
            self.opened.append(Path(path).name)
            return original_open(path, *args, **options)

        storage.open_read = opened  # type: ignore[assignment]
        open_shard.decode_packed_rows = self._counting(open_shard.decode_packed_rows, 0)
        framed_member.decode_framed_rows = self._counting(framed_member.decode_framed_rows, 1)

    def _counting(self, decode: Callable[..., PackedRows], place: int) -> Callable[..., PackedRows]:
        """Count the calls of *decode* and the bytes of its argument at *place*."""

        def counting(*args: Any, **options: Any) -> PackedRows:
            self.decoded += 1
            self.bytes += len(args[place])
            return decode(*args, **options)

        return counting


def _read_files(
    rank: int, world_size: int, tp: int, cache: Path
) -> tuple[list[Any], tuple[list[str], int, int]]:
    """Train on two iterations of a cache; each loss tells the samples it was given."""
    reads = Reads()
    # The processes of this test are daemons, which may not start a loader process.
    loader = target_stream.DataLoader
    target_stream.DataLoader = lambda *a, **k: loader(  # type: ignore[assignment,misc]
        *a, **{**k, "num_workers": 0, "prefetch_factor": None}
    )
    cached_kd_loss.sparse_kl = lambda logits, *a, **k: logits.sum(-1)
    cp = world_size // tp
    run = StubRun(
        layout=layout_of(rank, tp, cp),
        settings=replace(SETTINGS, global_batch_size=GBS, seq_length=SEQ, vocab_size=None),
    )
    run.install(PlainPatch)
    kd_loss = CachedLogitsKDLoss(str(cache))
    positions = sequence_positions(SEQ, run.layout).tolist()
    told: list[Any] = []
    for start in (0, GBS, 2 * GBS):
        run.move_to(start)
        try:
            for _ in range(GBS):
                kd_loss(torch.zeros(SEQ // cp, 1, 16))
                assert kd_loss._targets is not None
            told.append([sample_of(kd_loss._feed.take(m).values, positions) for m in range(GBS)])
        except (TeacherDataError, CacheFormatError) as error:
            told.append((type(error).__name__, str(error)))
    kd_loss._feed.stream.close()
    return told, (reads.opened, reads.decoded, reads.bytes)


@pytest.mark.usefixtures("cache_format")
@pytest.mark.parametrize(("tp", "cp"), GRIDS)
def test_bytes_are_read_and_decoded_once_per_replica(tmp_path: Path, tp: int, cp: int) -> None:
    write_shard(tmp_path, 0, 8, gbs=GBS)
    (alone,) = run_ranks(1, _read_files, 1, tmp_path)
    results = run_ranks(tp * cp, _read_files, tp, tmp_path)
    assert [told for told, _ in results] == [results[0][0]] * (tp * cp)
    told, (opened, decoded, nbytes) = results[0]
    assert told[:2] == [[[0], [1], [2], [3]], [[4], [5], [6], [7]]]
    assert told[2][0] == "TeacherDataExhaustedError"
    assert told == alone[0]
    assert (opened, decoded) == (["dp0__0-8.tar"], 2)
    assert (opened, decoded, nbytes) == alone[1]
    assert [counts for _, counts in results[1:]] == [([], 0, 0)] * (tp * cp - 1)


@pytest.mark.usefixtures("cache_format")
@pytest.mark.parametrize(("tp", "cp"), GRIDS)
def test_damage_that_the_reading_rank_finds_stops_all(tmp_path: Path, tp: int, cp: int) -> None:
    write_shard(tmp_path, 0, 8, gbs=GBS)
    write_shard(tmp_path, 8, 12, gbs=GBS)
    path = tmp_path / "dp0__0-8.tar"
    content = path.read_bytes()
    place = content.index(b"4-8.pt.zst") + 600
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    for told, _ in run_ranks(tp * cp, _read_files, tp, tmp_path):
        assert told[0] == [[0], [1], [2], [3]]
        assert told[1][0] == "CacheFormatError"
        assert "member 4-8.pt.zst" in told[1][1]
        assert told[2] == [[8], [9], [10], [11]]


def _reader_dies(rank: int, world_size: int) -> tuple[str, str]:
    layout = layout_of(rank, 2, 1)
    feed = feed_of(layout, functools.partial(iteration, cp=1))
    stream = target_stream.TargetStream(None, None)  # type: ignore[arg-type]

    def break_down(start: int) -> Any:
        raise KeyError("a bug")

    stream._find = break_down  # type: ignore[method-assign]
    stream._options = type("Options", (), {"logprobs_dir": "the-cache"})()
    if layout.reads_for_replica:
        feed.stream = stream
    opened = feed.open(0)
    assert isinstance(opened, IterationFailure)
    assert opened.fatal
    dist.barrier()
    return type(opened.error).__name__, str(opened.error)


def test_whatever_breaks_on_the_reading_rank_is_told() -> None:
    for name, text in run_ranks(2, _reader_dies):
        assert name == "TeacherDataError"
        assert "KeyError: 'a bug'" in text
        assert "the-cache" in text
