# SPDX-License-Identifier: Apache-2.0
"""The quickstart as a user runs it, with few iterations: through, interrupted, and once more."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.offline_distillation import recipe as recipes
from megatron.training.distillation.utils import ShardName

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.functional, pytest.mark.timeout(900)]


def start(out: Path) -> subprocess.Popen[str]:
    """Start the smallest quickstart; its output is readable as text."""
    return subprocess.Popen(
        (
            *(sys.executable, "-m", "examples.offline_distillation.quickstart", "--smoke"),
            *("--out", str(out), "--processes", "2"),
        ),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Return once the condition holds; fail if the process ends before."""
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


def processes_naming(text: str) -> list[str]:
    """Command lines of live processes that contain a text."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if text in command:
            found.append(command)
    return found


def test_interrupted_in_the_dump_then_through_then_nothing_left_to_do(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(out)
    confirmed = out / recipes.DUMP / "checkpoints" / "latest_checkpointed_iteration.txt"
    wait_for(confirmed.exists, process)
    # Not SIGINT, which a test run in the background inherits as ignored.
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "Run the same command again" in output
    deadline = time.monotonic() + 30
    while processes_naming(str(out)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert processes_naming(str(out)) == []

    process = start(out)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert "[2/5] Teacher: pretrain for 6 iterations: done before" in output
    assert "after 4 steps" in output
    assert (out / "comparison.png").stat().st_size > 0
    results = json.loads((out / "results.json").read_text())
    assert list(results["curves"]["student_distilled"]) == ["2", "4"]

    # Every sample of the dump lies in exactly one live shard of each rank.
    recipe = recipes.SMOKE
    for rank in range(2):
        names = [ShardName.parse(f.name) for f in recipes.logits_folder(out).iterdir()]
        ranges = sorted((n.start, n.end) for n in names if n is not None and n.dp_rank == rank)
        assert ranges[0][0] == 0
        assert ranges[-1][1] == recipe.student_iters * recipe.batch
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))

    # What each student trained with and what it did not.
    plain, distilled = (
        (out / name / "log.txt").read_text() for name in (recipes.PLAIN, recipes.DISTILLED)
    )
    assert "logits distillation loss: " in distilled
    assert "logits distillation loss: " not in plain

    before = time.monotonic()
    process = start(out)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert output.count("done before") == 5
    assert time.monotonic() - before < 30


def test_a_failing_stage_says_why(tmp_path: Path) -> None:
    # A corpus that is marked as finished, but whose tokenizer is gone.
    out = tmp_path / "out"
    stage = recipes.build_stages(recipes.SMOKE, out, processes=2)[recipes.CORPUS]
    stage.folder.mkdir(parents=True)
    state = {"key": stage.key(), "state": "done", "seconds": 1.0}
    (stage.folder / "stage.json").write_text(json.dumps(state))
    process = start(out)
    output, _ = process.communicate()
    assert process.returncode == 1, output
    assert "error: Stage 'teacher' failed with exit status 1." in output
    assert str(out / recipes.TEACHER / "log.txt") in output
    assert "run the same command again" in output
