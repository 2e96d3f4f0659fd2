# SPDX-License-Identifier: Apache-2.0
"""What the model states about the loader, against the loader itself."""

import itertools
import json
import tarfile

import pytest
import torch

from megatron.training.distillation import object_store, read_ahead, target_stream
from megatron.training.distillation.packed_rows import BlockLayout
from megatron.training.distillation.shard_reader import LoadLayout, TeacherRowReader
from megatron.training.distillation.targets import DEFAULT_MAX_AHEAD_BYTES
from tests.unit_tests.training.distillation.cache_files import write_shard
from tools.load_plan.setting import MIB, Loader
from tools.logits_load_plan import _parser, _setting

RUN = (
    "--world-size 8 --micro-batch-size 1 --global-batch-size 8 --seq-length 64 "
    "--train-samples 800 --save-interval 10 --step-time 1"
)
LAYOUT = LoadLayout(dp_rank=0, dp_size=1, mbs=1, gbs=1)


def loader(*flags: str) -> Loader:
    return _setting(_parser().parse_args([*RUN.split(), *flags])).loader


def test_the_lookahead_is_the_readers():
    sizes = [0, 1, 7, 100, 3 * MIB]
    bounds = [1, 6, 700, 799, 800, 10**9]
    for threads, held, bound in itertools.product([1, 2, 4], [0, 1, 5], bounds):
        reader = TeacherRowReader(
            "", LAYOUT, expected_identifiers=None, decode_threads=threads,
            max_ahead_bytes=bound, held_iterations=held,
        )  # fmt: skip
        model = Loader(decode_threads=threads, max_ahead_bytes=bound, held_iterations=held)
        for iteration, members in itertools.product(sizes, sizes):
            expected = reader.lookahead(iteration, members)
            assert model.lookahead(iteration, members) == expected, (model, iteration, members)


@pytest.mark.parametrize(("store", "process"), [("filesystem", 1), ("object", 0)])
def test_as_many_iterations_are_held_as_on_the_way_of_the_loader(store, process):
    found = loader("--store", store)
    assert found.held_iterations == target_stream._HELD_ITERATIONS
    # The thread's, and those that wait in front of it and behind it
    expected = 1 + target_stream._READY_ITERATIONS
    expected += process * target_stream.PREFETCHED_ITERATIONS
    assert found.queued_iterations == expected


def test_sizes_are_the_loaders():
    found = loader()
    assert found.max_ahead_bytes == DEFAULT_MAX_AHEAD_BYTES
    assert found.small_range_bytes == object_store.SMALL_RANGE_BYTES
    assert found.piece_bytes == read_ahead.PIECE_BYTES
    assert found.pieces_ahead == read_ahead.PIECES_AHEAD


def test_packed_bytes_are_those_of_a_block():
    block = BlockLayout(
        positions=8192,
        samples=1,
        k=128,
        high_planes=1,
        dtype=torch.float16,
        has_tail=True,
        chunks=8192 // 64,
    )
    assert block.nbytes == 8192 * 532.125
    stated = _setting(_parser().parse_args(RUN.split())).dump.packed_bytes_per_token
    assert stated == -(-block.nbytes // 8192)


def test_the_index_takes_as_much_as_is_stated(tmp_path):
    stated = _setting(_parser().parse_args(RUN.split())).dump.index_bytes_per_member
    sizes = []
    for count in (10, 60):
        # As many digits as in a dump of millions of samples
        start = 10_000_000
        write_shard(tmp_path, start, start + 4 * count)
        with tarfile.open(tmp_path / f"dp0__{start}-{start + 4 * count}.tar") as tar:
            content = json.loads(tar.extractfile("_meta.json").read())["content"]
            sizes.append(tar.getmember("_meta.json").size)
        assert len(content["index"]) == count
    assert 0.8 * stated < (sizes[1] - sizes[0]) / 50 < 1.1 * stated
