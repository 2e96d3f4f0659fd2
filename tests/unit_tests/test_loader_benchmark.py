# SPDX-License-Identifier: Apache-2.0
"""What ``benchmarks/bench_loader.py`` counts and divides by."""

import io
import multiprocessing
import os
import tarfile
import time
from pathlib import Path

import pytest
import torch
import zstandard

from benchmarks.loader_cases import Cache, Caches, Case, member_sizes
from benchmarks.loader_counts import Decompression, DeviceCopies
from benchmarks.rank_usage import Usage, descendants


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
