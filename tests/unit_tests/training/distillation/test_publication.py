# SPDX-License-Identifier: Apache-2.0
"""Dumps that are killed and resumed in any order leave disjoint shards and lose no sample.

The dump here is real down to the files; only the model is missing: an iteration's payload is a
function of its samples, as a frozen teacher's is, and of the format, which may change from one life
to the next.
"""

import builtins
import functools
import itertools
import json
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.training.distillation.publication import (
    Extract,
    Publish,
    SetAside,
    plan_disjoint,
    plan_publication,
)
from megatron.training.distillation.shard_writer import write_batched_tar
from megatron.training.distillation.utils import ShardName
from tests.unit_tests.training.distillation.cache_files import encode_payload, rows_of

GBS = 4
ITERATIONS = 12


def shard(start: int, end: int, dp_rank: int = 0) -> ShardName:
    return ShardName(dp_rank, start, end)


@pytest.mark.parametrize(
    ("new", "live", "steps"),
    [
        (shard(8, 16), [], [Publish(shard(8, 16))]),
        (shard(8, 16), [shard(0, 8), shard(16, 24)], [Publish(shard(8, 16))]),
        (shard(8, 16), [shard(8, 16)], [Publish(shard(8, 16))]),
        (shard(8, 16), [shard(8, 16, 1), shard(0, 99, 2)], [Publish(shard(8, 16))]),
        (
            shard(0, 16),
            [shard(0, 8), shard(8, 16)],
            [SetAside(shard(0, 8)), SetAside(shard(8, 16)), Publish(shard(0, 16))],
        ),
        (
            shard(8, 16),
            [shard(0, 12)],
            [Extract(shard(0, 12), shard(0, 8)), SetAside(shard(0, 12)), Publish(shard(8, 16))],
        ),
        (
            shard(8, 16),
            [shard(12, 20)],
            [Extract(shard(12, 20), shard(16, 20)), SetAside(shard(12, 20)), Publish(shard(8, 16))],
        ),
        (
            shard(8, 16),
            [shard(0, 24)],
            [
                Extract(shard(0, 24), shard(0, 8)),
                Extract(shard(0, 24), shard(16, 24)),
                SetAside(shard(0, 24)),
                Publish(shard(8, 16)),
            ],
        ),
        # What a killed writer left: an extract beside its source, away from the new shard.
        (
            shard(40, 48),
            [shard(0, 24), shard(0, 8)],
            [SetAside(shard(0, 8)), Publish(shard(40, 48))],
        ),
        # What another writer left: the later start wins.
        (
            shard(40, 48),
            [shard(0, 12), shard(8, 16)],
            [Extract(shard(0, 12), shard(0, 8)), SetAside(shard(0, 12)), Publish(shard(40, 48))],
        ),
    ],
)
def test_plans(new, live, steps):
    assert plan_publication(new, live) == steps
    assert plan_publication(new, reversed(live)) == steps


# ---- killed at every file operation ----------------------------------------------------------


def test_shards_are_made_disjoint_rank_by_rank():
    live = [
        shard(4, 12),
        shard(0, 8),
        shard(0, 8, 1),
        shard(8, 12, 1),
        shard(20, 24),
        shard(20, 22),
    ]
    steps = [
        Extract(shard(0, 8), shard(0, 4)),
        SetAside(shard(0, 8)),
        SetAside(shard(20, 22)),
    ]
    assert plan_disjoint(live) == steps
    assert plan_disjoint([shard(0, 4), shard(4, 12), shard(20, 24)]) == []


class Killed(BaseException):
    """Stands in for SIGKILL: no handler of the writer may see it."""


class KillSwitch:
    """Raises before the n-th operation that changes a file or directory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: int | None = None
        for name in ("replace", "rename", "fsync", "unlink"):
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))
        opened = builtins.open

        def counted_open(path, mode="r", *args, **kwargs):
            if mode == "wb":
                self.tick()
            return opened(path, mode, *args, **kwargs)

        monkeypatch.setattr(builtins, "open", counted_open)

    def tick(self) -> None:
        if self.left is not None:
            if self.left == 0:
                raise Killed
            self.left -= 1

    def _counted(self, function):
        def call(*args, **kwargs):
            self.tick()
            return function(*args, **kwargs)

        return call


@functools.cache
def payload(start: int, save_format: int) -> bytes:
    return encode_payload(rows_of(list(range(start, start + GBS))), save_format)


def dump(root: Path, begin: int, end: int, interval: int, save_format: int) -> int:
    """Dump iterations ``[begin, end)`` as the trainer does; return the last confirmed one."""
    flushed = begin
    meta = json.dumps({"saver": {"format_version": save_format}}).encode()
    for iteration in range(begin + 1, end + 1):
        if iteration % interval == 0 or iteration == end:
            window = range(flushed, iteration)
            members = [
                (f"{i * GBS}-{(i + 1) * GBS}.pt.zst", payload(i * GBS, save_format)) for i in window
            ]
            name = ShardName(0, flushed * GBS, iteration * GBS)
            write_batched_tar(str(root / str(name)), meta, members)
            flushed = iteration
    return flushed


def live(root: Path) -> list[ShardName]:
    return sorted(name for name in map(ShardName.parse, os.listdir(root)) if name is not None)


def readable(root: Path) -> set[int]:
    """Return the start of every sample range; each payload is in the format of its shard."""
    found = set()
    for name in live(root):
        with tarfile.open(root / str(name)) as tar:
            meta, *members = tar.getmembers()
            save_format = json.load(tar.extractfile(meta))["saver"]["format_version"]
            for member in members:
                start = int(member.name.split("-")[0])
                assert name.start <= start < name.end
                assert tar.extractfile(member).read() == payload(start, save_format)
                found.add(start)
    return found


def assert_disjoint(root: Path) -> None:
    shards = live(root)
    for first, second in itertools.pairwise(shards):
        assert first.end <= second.start, shards


def assert_complete(root: Path) -> None:
    assert_disjoint(root)
    assert readable(root) == {i * GBS for i in range(ITERATIONS)}
    assert sum(name.end - name.start for name in live(root)) == ITERATIONS * GBS


@pytest.fixture
def kill_switch(monkeypatch):
    return KillSwitch(monkeypatch)


def test_killed_before_every_operation_of_a_publication_that_cuts_on_both_sides(
    tmp_path, kill_switch
):
    """Every prefix of the longest plan there is: two extracts, a set-aside, a publication."""
    operations = 0
    while True:
        root = tmp_path / str(operations)
        root.mkdir()
        dump(root, 0, ITERATIONS, ITERATIONS, 2)
        confirmed_before = readable(root)
        kill_switch.left = operations
        try:
            dump(root, 4, 8, 4, 3)
        except Killed:
            kill_switch.left = None
            lost = confirmed_before - readable(root)
            # Only what the killed write was about to record again, from the checkpoint it had.
            assert lost <= {i * GBS for i in range(4, 8)}
            dump(root, 4, ITERATIONS, 5, 3)
            assert_complete(root)
            operations += 1
            continue
        kill_switch.left = None
        break
    # Three publications (open, fsync, replace, fsync of the directory) and one rename.
    assert operations == 3 * 4 + 1
    assert_complete(root)


FORMATS = st.sampled_from((2, 3))
LIFE = st.tuples(
    st.integers(1, 7),  # the save interval of this life
    st.integers(0, 60),  # file operations until it is killed
    st.integers(0, 3),  # confirmed checkpoints the next life goes back by
    FORMATS,
)


@pytest.mark.slow
@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    lives=st.lists(LIFE, min_size=1, max_size=6),
    last_interval=st.integers(1, 7),
    last_format=FORMATS,
)
def test_any_schedule_of_kills_resumes_intervals_and_formats(
    tmp_path_factory, kill_switch, lives, last_interval, last_format
):
    root = tmp_path_factory.mktemp("cache")
    confirmed = [0]
    for interval, operations, back, save_format in lives:
        begin = confirmed[max(0, len(confirmed) - 1 - back)]
        confirmed = [iteration for iteration in confirmed if iteration <= begin]
        kill_switch.left = operations
        try:
            first = begin - begin % interval + interval
            for end in [*range(first, ITERATIONS, interval), ITERATIONS]:
                if end > begin:
                    confirmed.append(dump(root, confirmed[-1], end, ITERATIONS, save_format))
        except Killed:
            pass
        kill_switch.left = None
        # What is confirmed at or before the checkpoint that is resumed from stays readable.
        if root.exists():
            assert readable(root) >= {i * GBS for i in range(confirmed[-1])}
    dump(root, confirmed[-1], ITERATIONS, last_interval, last_format)
    assert_complete(root)
