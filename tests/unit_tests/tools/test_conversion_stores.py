# SPDX-License-Identifier: Apache-2.0
"""Conversions from and to an object store, and one that is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit_tests.tools.conversion_cases import Case, write
from tests.unit_tests.training.distillation.cache_files import write_large_shard
from tools import logits_cache

CASE = Case(dp=2, mbs=2, gbs=8)
FLAGS = ["--top-k", "5", "--data-parallel-size", "1", "--global-batch-size", "16", "--format", "3"]
ROOT = Path(__file__).parents[3]


def files(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(cache.glob("*.tar"))}


def test_object_stores_get_the_same_bytes(s3_server, monkeypatch, tmp_path):
    pytest.importorskip("multistorageclient")
    monkeypatch.setenv("MSC_CONFIG", str(s3_server.config))
    server, stored = s3_server, s3_server.objects / "conversion"
    source = write(tmp_path / "source", CASE, (0, 16), (16, 32))
    write(stored / "source", CASE, (0, 16), (16, 32))
    ways = {
        str(tmp_path / "local"): (str(source), tmp_path / "local"),
        server.url("conversion/from-local"): (str(source), stored / "from-local"),
        server.url("conversion/from-store"): (
            server.url("conversion/source"),
            stored / "from-store",
        ),
    }
    found = []
    for target, (origin, place) in ways.items():
        for _ in range(2):  # the second time all of it is there
            assert logits_cache.main(["convert", origin, target, "--jobs", "1", *FLAGS]) == 0
        found.append(files(place))
    assert sorted(found[0]) == ["dp0__0-16.tar", "dp0__16-32.tar"]
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_a_killed_conversion_goes_on_to_the_same_bytes(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for start in range(0, 64 * 24, 64):
        write_large_shard(source, start, start + 64, gbs=4)
    flags = ["--format", "3", "--data-parallel-size", "2", "--micro-batch-size", "2", "--jobs", "2"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert logits_cache.main(["convert", str(source), str(whole), *flags[:-1], "1"]) == 0
    command = [sys.executable, "-m", "tools.logits_cache", "convert", str(source), str(killed)]
    process = subprocess.Popen([*command, *flags], cwd=ROOT, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while not killed.is_dir() or len(files(killed)) < 8:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    there = {path: path.stat().st_mtime_ns for path in killed.glob("*.tar")}
    assert 8 <= len(there) < 48
    assert logits_cache.main(["convert", str(source), str(killed), *flags[:-1], "1"]) == 0
    assert files(killed) == files(whole)
    assert there == {path: path.stat().st_mtime_ns for path in there}
