# SPDX-License-Identifier: Apache-2.0
"""What ``benchmarks/bench_loader.py`` counts and divides by."""

import io
import json
import multiprocessing
import os
import tarfile
import time
from pathlib import Path

import pytest
import torch
import zstandard

from benchmarks import bench_loader
from benchmarks.loader_cases import Cache, Caches, Case, member_sizes
from benchmarks.loader_counts import Decompression, DeviceCopies, LoaderProcesses
from benchmarks.loader_table import Table
from benchmarks.rank_usage import TreeMemory, Usage, descendants
from benchmarks.worker_processes import alternate


def _shard(path: Path, sizes: list[int]) -> None:
    with tarfile.open(path, "w") as tar:
        for number, size in enumerate([10, *sizes]):
            info = tarfile.TarInfo(str(number))
            info.size = size
            tar.addfile(info, io.BytesIO(bytes(size)))


def test_members_are_those_with_rows_of_rank_0(tmp_path):
    """Two ranks of the teacher, four iterations of four samples; read by one to three ranks."""
    caches = Caches(tmp_path, 64, {"x": Cache(dp=2, gbs=4, iterations=4, per_shard=2)})
    folder = tmp_path / "ours" / "x"
    folder.mkdir(parents=True)
    for start, sizes in ((0, [1, 2]), (8, [4, 8])):
        _shard(folder / f"dp0__{start}-{start + 8}.tar", sizes)
        _shard(folder / f"dp1__{start}-{start + 8}.tar", [16 * size for size in sizes])

    def needed(**case: int) -> int:
        return caches.needed_bytes(Case(title="", cache="x", **case), "ours")

    assert needed(dp=2, gbs=4) == 1 + 2 + 4 + 8
    assert needed(dp=1, gbs=8) == 17 * 15
    # Samples 0, 3, 6 and 9; the last four make no iteration.
    assert needed(dp=3, gbs=6) == 1 + 16 + 2 + 16 * 4
    student = Case(title="", cache="x", dp=3, gbs=6)
    assert caches.needed_bytes(student, "ours", range(1, 2)) == 2 + 16 * 4
    # Each of the four members holds two samples, and there are two iterations.
    assert caches.stored_samples(student) == 4 * 2 / 2
    assert caches.stored_samples(Case(title="", cache="x", dp=2, gbs=2)) == 4 * 2 / 8


def test_shards_are_those_with_rows_of_one_iteration_of_rank_0(tmp_path):
    """Three ranks of the teacher, two of context, whose shards are one here."""
    caches = Caches(tmp_path, 64, {"x": Cache(dp=3, cp=2, gbs=6, iterations=2, per_shard=2)})
    folder = tmp_path / "installed" / "x"
    folder.mkdir(parents=True)
    sizes = {}
    for dp_rank in range(3):
        paths = [folder / f"cp{cp_rank}_dp{dp_rank}__1.tar" for cp_rank in range(2)]
        for path in paths:
            _shard(path, [20000 * dp_rank, 1])
        sizes[dp_rank] = sum(path.stat().st_size for path in paths)

    def needed(iteration: int, **case: int) -> list[int]:
        return caches.needed_shards(Case(title="", cache="x", **case), "installed", iteration)

    assert needed(0, dp=3, gbs=6) == [sizes[0]]
    assert sorted(needed(1, dp=2, gbs=6)) == sorted(sizes.values())
    # Samples 4 and 6 are those of ranks 1 and 0.
    assert sorted(needed(1, dp=2, gbs=4)) == sorted([sizes[0], sizes[1]])


def test_members_of_the_installed_package_count_for_all_context_ranks(tmp_path):
    for cp_rank, size in ((0, 3), (1, 5)):
        _shard(tmp_path / f"cp{cp_rank}_dp0__15.tar", [size, size])
        _shard(tmp_path / f"cp{cp_rank}_dp0__7.tar", [10 * size])
    assert member_sizes(tmp_path) == {0: [80, 8, 8]}


def _decompress(frame: bytes) -> None:
    zstandard.ZstdDecompressor().decompress(frame)
    with zstandard.ZstdDecompressor().stream_reader(frame) as stream:
        stream.read(100)
    zstandard.ZstdDecompressor().decompressobj().decompress(frame)


def test_decompression_is_counted_in_this_process_and_in_forked_ones(monkeypatch):
    monkeypatch.setattr(zstandard, "ZstdDecompressor", zstandard.ZstdDecompressor)
    counts = Decompression()
    frame = zstandard.ZstdCompressor().compress(bytes(1000))
    _decompress(frame)
    assert counts.take() == 2100
    process = multiprocessing.get_context("fork").Process(target=_decompress, args=(frame,))
    process.start()
    process.join()
    assert counts.take() == 2100
    assert counts.take() == 0


class _Reading:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self):
        for _ in range(3):
            self.path.read_bytes()
            yield 1


def _read_then_iterate(dataset, may_begin, items) -> None:
    dataset.path.read_bytes()
    may_begin.wait(30)
    items.value = sum(dataset)


@pytest.mark.parametrize("begins", ["in time", "too late"])
def test_what_a_loader_process_read_to_start_is_known(tmp_path, monkeypatch, begins):
    monkeypatch.setattr(_Reading, "__iter__", _Reading.__iter__)  # to be put back
    processes = LoaderProcesses(_Reading)
    processes.limit = 2
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    assert sum(_Reading(path)) == 3  # in this process there is no limit
    context = multiprocessing.get_context("fork")
    may_begin, items = context.Event(), context.Value("q")
    process = context.Process(target=_read_then_iterate, args=(_Reading(path), may_begin, items))
    process.start()
    if begins == "too late":
        processes.take_read_at_start()
    may_begin.set()
    process.join(30)
    assert items.value == 2
    read = processes.take_read_at_start()
    assert (1 << 20 <= read < 2 << 20) if begins == "in time" else read == 0


def test_only_tensors_for_a_device_count_as_copies():
    tensor = torch.zeros(10)
    with DeviceCopies() as copies:
        tensor.to(torch.float64)
        tensor.to(torch.device("cpu"), non_blocking=True)
        tensor.half().to("cpu")
    assert copies.bytes == 40 + 20


def _use(path: str, ready: "multiprocessing.synchronize.Event") -> None:
    Path(path).read_bytes()
    while time.process_time() < 0.3:
        pass
    ready.set()
    time.sleep(60)


@pytest.mark.parametrize("ended", [False, True])
def test_descendants_count_while_they_live_and_afterwards(tmp_path, ended):
    path = tmp_path / "file"
    path.write_bytes(bytes(3 << 20))
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    before = Usage.now()
    process = context.Process(target=_use, args=(str(path), ready))
    process.start()
    try:
        assert process.pid in descendants(os.getpid())
        assert ready.wait(30)
    finally:
        if ended:
            process.kill()
            process.join()
    try:
        used = Usage.now() - before
    finally:
        process.kill()
        process.join()
    assert 0.29 <= used.child_cpu < 3
    assert 3 << 20 <= used.bytes_read < 4 << 20


def test_memory_of_several_processes_is_added_up_and_the_largest_is_known():
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    processes = [context.Process(target=_hold, args=(size, barrier)) for size in (100, 200)]
    for process in processes:
        process.start()
    try:
        with TreeMemory([process.pid for process in processes]) as memory:
            barrier.wait(30)
            barrier.wait(30)
            time.sleep(0.2)
    finally:
        for process in processes:
            process.kill()
            process.join()
    # What forked processes share with the others comes and goes while they run.
    assert 270e6 <= memory.together < 340e6
    assert 180e6 <= memory.largest < 230e6


def _hold(megabytes: int, barrier: "multiprocessing.synchronize.Barrier") -> None:
    barrier.wait(30)
    held = bytearray(b"x") * (megabytes * 10**6)
    barrier.wait(30)
    time.sleep(60)
    del held


class _Answers:
    """A worker that gives these answers."""

    def __init__(self, *answers: dict[str, object]) -> None:
        self.answers = list(answers)

    def ask(self, request: list[object]) -> dict[str, object]:
        return self.answers.pop(0)


def test_who_refuses_is_not_asked_again():
    workers = {"ours": _Answers({"x": 1}, {"x": 2}), "installed": _Answers({"error": "no"})}
    found = alternate(workers, {name: ["measure"] for name in workers}, 2)
    assert found == {"x": {"ours": [1, 2]}, "error": {"installed": ["no"]}}
    table = Table(["installed", "ours"])
    table.refuse("row", found["error"])
    assert table.has_refused("row", "installed")
    assert not table.has_refused("other row", "installed")
    with pytest.raises(RuntimeError, match="row: no"):
        table.refuse("row", {"ours": ["no"]})


SMALL = ("--seq-length", "64", "--vocab-size", "8192", "--top-k", "16", "--iterations", "4")
CASES = ("DP 2 -> 8", "GBS / 4")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_layout_has_every_number(tmp_path, capsys):
    """In small, of one rank; the installed package refuses the second layout."""
    file = tmp_path / "results.json"
    options = ["--runs", "1", "--slack", "1", "--json", str(file), "--case", *CASES]
    bench_loader.main([*SMALL, *options])
    results = json.loads(file.read_text())
    rows, refusals = results["results"], results["refusals"]
    printed = capsys.readouterr().out
    ways = ("dataset", "loss")
    assert rows.keys() == {"floor", *(f"{case}, {way}" for case in CASES for way in ways)}
    assert refusals.keys() == {f"{CASES[1]}, {way}" for way in ways}
    for row, metrics in rows.items():
        for metric, found in metrics.items():
            assert f"\n{row:24}{metric:27}" in printed
            refused = row in refusals or metric == "waited, ms/iteration"
            assert found.keys() == ({"ours"} if refused else {"ours", "installed"})
    for case in CASES:
        metrics = rows[f"{case}, loss"]
        assert {name.partition(",")[0] for name in metrics} >= {"peak memory", "stall", "waited"}
        assert metrics["peak memory, MB/rank"]["ours"][0] > 0
        assert metrics["first sample, ms"]["ours"][0] > 0
        assert 0 < metrics["bytes to it / its shard"]["ours"][0] < 0.2
    both = rows[f"{CASES[0]}, loss"]
    decoded, to_first = both["decoded / needed"], both["bytes to it / its shard"]
    assert decoded["ours"] == pytest.approx([4], rel=0.05)
    assert decoded["installed"] == pytest.approx([4], rel=0.05)
    # The installed package reads up to the middle.
    assert to_first["installed"][0] > 0.5
