# SPDX-License-Identifier: Apache-2.0
"""A teacher that is faster than its store waits, says so, and writes the same cache."""

import re
from pathlib import Path

import pytest

from tests.functional_tests.caches import read_cache
from tests.functional_tests.cases import DUMP_GLOBAL_BATCH, DUMP_ITERATIONS, DUMPS, Workshop
from tests.functional_tests.checkpoints import latest_iteration
from tests.functional_tests.harness import SLOW_STORE_SCRIPT, WRITE_SECONDS_VARIABLE, curves

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]

WRITE_SECONDS = 2.0


def test_windows_that_wait_are_bounded(workshop: Workshop, tmp_path: Path) -> None:
    """A window per iteration on two ranks, of which one has a slow store."""
    case = DUMPS["dp2"].in_format(3)
    expected = read_cache(workshop.dump("dp2").cache, workshop.format_of(3))
    sizes = [len(payload) for payload in expected.values()]
    # Room for two windows of a rank; without a bound, most of its eight would wait at the end.
    bound = max(sizes) * 5 // 2
    assert bound < 3 * min(sizes)

    cache, save, tensorboard = (tmp_path / name for name in ("cache", "save", "tensorboard"))
    arguments = workshop.dump_arguments(case, cache, save, save_interval=1)
    arguments += ["--logits-save-max-waiting-bytes", str(bound)]
    job = workshop.jobs.run(
        "dump-to-a-slow-store",
        [*arguments, "--tensorboard-dir", str(tensorboard)],
        ranks=case.ranks,
        script=SLOW_STORE_SCRIPT,
        timeout=240.0,
        env={WRITE_SECONDS_VARIABLE: str(WRITE_SECONDS)},
    )
    assert latest_iteration(save) == DUMP_ITERATIONS
    assert read_cache(cache) == expected

    # What each rank has handed over, with what it hands over.
    found = curves(tensorboard)
    waiting = found["logits-waiting-bytes"]
    assert sorted(waiting) == list(range(1, DUMP_ITERATIONS + 1))
    assert max(waiting.values()) <= 2 * bound

    waits = re.findall(
        r"The teacher waits: ([\d.]+) MB.*?\((\d+)\)\. The window of samples (\d+) to .*?\((\S+)\)",
        job.of_rank(1),
    )
    ends = re.findall(r"goes on after it has waited ([\d.]+) s", job.of_rank(1))
    # The first two windows have room.
    assert 2 <= len(waits) == len(ends) <= DUMP_ITERATIONS - 2
    for megabytes, stated, start, shard in waits:
        assert bound - max(sizes) - 500 <= float(megabytes) * 1e6 <= bound + 500
        assert int(stated) == bound
        assert shard == f"{cache}/dp1__{start}-{int(start) + DUMP_GLOBAL_BATCH}.tar"

    # The longer wait of the two ranks.
    waited = found["logits-flush-wait"]
    assert (waited[1], waited[2]) == (0.0, 0.0)
    assert sum(seconds > 0 for seconds in waited.values()) >= len(waits)
    assert sum(waited.values()) >= sum(map(float, ends)) - 0.06 * len(ends)
    assert max(found["logits-flush-time"].values()) >= WRITE_SECONDS
