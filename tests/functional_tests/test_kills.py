# SPDX-License-Identifier: Apache-2.0
"""A dump that is killed again and again loses nothing confirmed and ends as if it had not been.

Ranks are started without torchrun, so that a kill takes a whole rank, its checkpoint worker
included, and nothing else reacts to it first.
"""

import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from megatron.training.distillation.shard_reader import TeacherRowReader
from megatron.training.distillation.targets import IterationTargets, LoadLayout
from megatron.training.distillation.utils import ShardName
from tests.functional_tests.caches import formats_of, read_cache
from tests.functional_tests.cases import DUMP_GLOBAL_BATCH, DUMPS, Workshop
from tests.functional_tests.checkpoints import latest_iteration
from tests.functional_tests.harness import PRETRAIN_GPT
from tests.functional_tests.launcher import start_rank
from tests.ports import free_port

pytestmark = [pytest.mark.functional, pytest.mark.timeout(900)]

ITERATIONS = 90
RANKS = 2
CASE = DUMPS["dp2"]
SECONDS = 120


@dataclass(frozen=True, kw_only=True)
class Kill:
    """When one run of the dump is killed.

    Attributes:
        save_interval: Iterations per flush in this run.
        changes: Changes of the cache directory after which the kill comes.
        delay: Seconds between the last of them and the kill.
        apart: Seconds between the kills of the two ranks.
        first: Rank that is killed first.
        save_format: Format in which this run writes: that of the run before or the other.
    """

    save_interval: int
    changes: int
    delay: float
    apart: float
    first: int
    save_format: int


def schedule(seed: int, kills: int) -> list[Kill]:
    generator = random.Random(seed)
    return [
        Kill(
            save_interval=generator.randint(1, 3),
            changes=generator.randint(1, 9),
            delay=generator.choice([0.0, 0.0, generator.uniform(0.0, 0.05)]),
            apart=generator.choice([0.0, 0.0, generator.uniform(0.0, 0.3)]),
            first=generator.randrange(RANKS),
            save_format=(2, 2, 3, 3)[number % 4],
        )
        for number in range(kills)
    ]


@contextlib.contextmanager
def running_ranks(arguments: list[str], log: Path) -> Iterator[list[BaseProcess]]:
    """Start the ranks of a job, each leading a process group of its own; kill what is left."""
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
    }
    ranks = [
        start_rank(
            [str(PRETRAIN_GPT), *arguments],
            environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            log_of(log, rank),
        )
        for rank in range(RANKS)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            kill(rank)


def log_of(log: Path, rank: int) -> Path:
    return log.with_suffix(f".{rank}.log")


def tails(log: Path) -> str:
    """Return the ends of what the ranks of a job have printed."""
    logs = [log_of(log, rank) for rank in range(RANKS)]
    return "".join(f"{one}:\n{one.read_text(errors='replace')[-3000:]}\n" for one in logs)


def kill(rank: BaseProcess) -> None:
    """Kill a rank and everything it has started."""
    assert rank.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(rank.pid, signal.SIGKILL)
    rank.join()


def wait_for(condition: Callable[[], bool], log: Path, what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {SECONDS} s for {what}; {tails(log)}")
        time.sleep(0.0005)


def run_until_killed(arguments: list[str], cache: Path, log: Path, plan: Kill) -> None:
    seen = set(os.listdir(cache)) if cache.exists() else set()
    changes = 0

    def changed_enough() -> bool:
        nonlocal seen, changes
        now = set(os.listdir(cache)) if cache.exists() else set()
        if now != seen:
            changes += 1
            seen = now
        ended = [rank for rank, process in enumerate(ranks) if not process.is_alive()]
        assert not ended, f"ranks {ended} ended by themselves: {tails(log)}"
        return changes >= plan.changes

    with running_ranks(arguments, log) as ranks:
        wait_for(changed_enough, log, f"{plan.changes} changes of {cache}")
        time.sleep(plan.delay)
        kill(ranks[plan.first])
        time.sleep(plan.apart)


def run_to_the_end(arguments: list[str], log: Path) -> None:
    with running_ranks(arguments, log) as ranks:
        wait_for(lambda: not any(rank.is_alive() for rank in ranks), log, "the dump to end")
        assert [rank.exitcode for rank in ranks] == [0, 0], tails(log)


def overlapping(cache: Path) -> list[tuple[ShardName, ShardName]]:
    """Return the pairs of live shards of one DP rank that share samples."""
    shards = sorted(filter(None, map(ShardName.parse, os.listdir(cache))))
    return [
        (first, second)
        for first, second in itertools.combinations(shards, 2)
        if first.dp_rank == second.dp_rank and first.start < second.end and second.start < first.end
    ]


def targets(cache: Path) -> dict[int, torch.Tensor]:
    """Return, by first sample, what a student reads of every iteration that can be read.

    Entries of equal value come in the order of their ids, whatever the order in their shard.
    """
    layout = LoadLayout(
        dp_rank=0, dp_size=1, mbs=DUMP_GLOBAL_BATCH, gbs=DUMP_GLOBAL_BATCH, cp_rank=0, cp_size=1
    )
    found = {}
    for item in TeacherRowReader(str(cache), layout, expected_identifiers=None).iterations(0):
        if isinstance(item, IterationTargets):
            (rows,) = item.microbatches
            assert rows.tail_logprob is not None
            by_id = rows.indices.argsort(dim=-1)
            order = by_id.gather(
                -1, rows.values.gather(-1, by_id).argsort(dim=-1, descending=True, stable=True)
            )
            entries = [part.gather(-1, order).float() for part in (rows.values, rows.indices)]
            whole = [*entries, rows.tail_logprob[..., None]]
            found[item.start] = torch.cat(whole, dim=-1)
    return found


def test_dump_survives_ten_kills(workshop: Workshop, tmp_path: Path) -> None:
    whole, cache, save = tmp_path / "whole", tmp_path / "cache", tmp_path / "save"
    arguments = workshop.dump_arguments(
        CASE, whole, tmp_path / "whole-save", iterations=ITERATIONS, save_interval=30
    )
    run_to_the_end(arguments, tmp_path / "whole.log")
    expected = targets(whole)
    assert sorted(expected) == list(range(0, ITERATIONS * DUMP_GLOBAL_BATCH, DUMP_GLOBAL_BATCH))

    def arguments_at(interval: int, save_format: int) -> list[str]:
        case = CASE.in_format(save_format)
        return workshop.dump_arguments(
            case, cache, save, iterations=ITERATIONS, save_interval=interval
        )

    plans = schedule(seed=3, kills=10)
    # Two changes at least, a .tmp that comes and goes, are a flush of one rank.
    assert sum((plan.changes // 2 + 1) * plan.save_interval for plan in plans) < ITERATIONS
    confirmed = [0]
    for number, plan in enumerate(plans):
        run_until_killed(
            arguments_at(plan.save_interval, plan.save_format),
            cache,
            tmp_path / f"killed-{number}.log",
            plan,
        )
        tracker = save / "latest_checkpointed_iteration.txt"
        confirmed.append(latest_iteration(save) if tracker.exists() else 0)
        # Only a shard that was being cut in two may be there twice, and then both say the same.
        assert len(overlapping(cache)) <= RANKS, (number, plan)
        readable = targets(cache)
        for start, rows in readable.items():
            torch.testing.assert_close(rows, expected[start], rtol=0, atol=0)
        missing = set(expected) - set(readable)
        assert min(missing) >= confirmed[-1] * DUMP_GLOBAL_BATCH, (number, plan)
    assert confirmed == sorted(confirmed)
    assert 0 < confirmed[-1] < ITERATIONS

    run_to_the_end(arguments_at(4, 3), tmp_path / "last.log")
    assert overlapping(cache) == []
    last = workshop.format_of(3)
    assert read_cache(cache, last) == read_cache(whole, last)
    assert set(formats_of(cache).values()) == {workshop.format_of(2), last}
    final = targets(cache)
    assert sorted(final) == sorted(expected)
    for start, rows in final.items():
        torch.testing.assert_close(rows, expected[start], rtol=0, atol=0)
