# SPDX-License-Identifier: Apache-2.0
"""Rows of given samples are found in any format and layout, and each member is decoded once."""

import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.training.distillation.open_shard import OpenShard
from megatron.training.distillation.packed_rows import TeacherRows
from tests.unit_tests.training.distillation.cache_files import rows_of, write_shard
from tools.cache.cache_files import list_cache
from tools.cache.sample_rows import LiveParts, RowReader

SHARED = Path(__file__).parents[4] / "shared" / "reference_caches"


def read(cache, samples) -> tuple[dict[int, TeacherRows], list[str]]:
    with RowReader(LiveParts.of(list_cache(str(cache)).shards)) as reader:
        found = reader.read(samples)
    return found.rows, found.problems


def assert_rows_of(rows: dict[int, TeacherRows], samples, teacher: int = 0) -> None:
    assert sorted(rows) == sorted(samples)
    for sample, found in rows.items():
        values, ids, _ = rows_of([sample + teacher])
        assert torch.equal(found.values, values[:, 0])
        assert torch.equal(found.indices, ids[:, 0].int())


@pytest.mark.usefixtures("cache_format")
@pytest.mark.parametrize(
    ("dp", "mbs", "gbs"), [(1, 1, 4), (2, 1, 4), (2, 2, 4), (4, 2, 8), (1, 4, 4)]
)
def test_every_set_of_samples_is_found(tmp_path, dp, mbs, gbs):
    for start in (0, 16):
        write_shard(tmp_path, start, start + 16, dp=dp, mbs=mbs, gbs=gbs)
    generator = random.Random(dp * 100 + mbs)
    for size in (1, 5, 32):
        samples = sorted(generator.sample(range(32), size))
        rows, problems = read(tmp_path, samples)
        assert_rows_of(rows, samples)
        assert not problems


@pytest.mark.usefixtures("cache_format")
def test_a_cache_whose_layout_changes_is_read_through(tmp_path):
    write_shard(tmp_path, 0, 12, dp=2, mbs=1, gbs=4)
    write_shard(tmp_path, 12, 24, dp=3, mbs=2, gbs=6)
    rows, problems = read(tmp_path, range(6, 20))
    assert_rows_of(rows, range(6, 20))
    assert not problems


def test_the_shard_that_starts_later_is_read(tmp_path):
    write_shard(tmp_path, 0, 16)
    write_shard(tmp_path, 8, 12, teacher=100)
    rows, problems = read(tmp_path, range(16))
    assert_rows_of({s: rows[s] for s in range(8, 12)}, range(8, 12), teacher=100)
    others = [*range(8), *range(12, 16)]
    assert_rows_of({s: rows[s] for s in others}, others)
    assert not problems


def test_shards_that_deal_in_other_ways_are_told(tmp_path):
    write_shard(tmp_path, 0, 16, dp=2)
    (tmp_path / "dp0__0-16.tar").unlink()
    write_shard(tmp_path, 4, 8, dp=1, teacher=100)
    rows, problems = read(tmp_path, range(16))
    assert_rows_of({s: rows[s] for s in range(4, 8)}, range(4, 8), teacher=100)
    assert {*range(1, 16, 2)} < set(rows)
    (problem,) = problems
    assert "both hold sample 5" in problem
    assert "dp0__4-8.tar" in problem
    assert "dp1__0-16.tar" in problem


@pytest.mark.usefixtures("cache_format")
def test_a_member_is_decoded_once_per_read(tmp_path, monkeypatch, cache_format):
    write_shard(tmp_path, 0, 16, dp=2, mbs=2)
    decoded = []
    decode = OpenShard.decode

    def counting(shard, member, rows=None):
        decoded.append((shard.name.dp_rank, member.start, rows))
        return decode(shard, member, rows)

    monkeypatch.setattr(OpenShard, "decode", counting)
    read(tmp_path, [1, 4, 5, 6])
    if cache_format == 2:
        assert decoded == [(0, 0, None), (0, 4, None), (1, 4, None)]
    else:
        assert decoded == [(0, 0, [1]), (0, 4, [0, 1]), (1, 4, [0])]


def test_what_is_not_there_is_left_out(tmp_path):
    write_shard(tmp_path, 4, 8)
    rows, problems = read(tmp_path, range(12))
    assert_rows_of(rows, range(4, 8))
    assert not problems
    assert read(tmp_path, []) == ({}, [])


@pytest.mark.usefixtures("cache_format")
def test_damage_is_told_and_the_rest_is_read(tmp_path):
    for start in (0, 8):
        write_shard(tmp_path, start, start + 8)
    cut = tmp_path / "dp0__8-16.tar"
    cut.write_bytes(cut.read_bytes()[:-100])
    flipped = tmp_path / "dp0__0-8.tar"
    content = bytearray(flipped.read_bytes())
    at = content.rindex(b"4-8.pt.zst") + 512 + 40
    content[at] ^= 1
    flipped.write_bytes(content)
    with RowReader(LiveParts.of(list_cache(str(tmp_path)).shards)) as reader:
        first, second = reader.read(range(10)), reader.read(range(8, 16))
    assert_rows_of(first.rows, range(4))
    member, shard = first.problems
    assert f"member 4-8.pt.zst of teacher shard {flipped} is damaged" in member
    assert str(cut) in shard
    assert (second.rows, second.problems) == ({}, [])  # said once


def test_only_what_a_window_needs_is_sent_to_a_process(tmp_path):
    for start in range(0, 64, 8):
        write_shard(tmp_path, start, start + 8, dp=2)
    parts = LiveParts.of(list_cache(str(tmp_path)).shards).within(10, 17)
    found = [[part.file.base_name for part in rank] for rank in parts.by_rank]
    assert found == [[f"dp{rank}__{a}-{a + 8}.tar" for a in (8, 16)] for rank in (0, 1)]
    assert parts.of_rank(1).by_rank == parts.by_rank[1:]
    assert parts.within(16, 24).within(8, 16).by_rank == ()
    assert pickle.loads(pickle.dumps(parts)) == parts


@pytest.mark.parametrize("name", ["v1_a", "v1_b", "v2_a", "v2_b", "v2_c"])
def test_caches_of_the_original_writer_have_the_expected_rows(name):
    if not (SHARED / name).is_dir():
        pytest.skip(f"no {SHARED / name}")
    expected = np.load(SHARED / name / "expected.npz")
    values, ids = expected["values"], expected["indices"]
    rows, problems = read(SHARED / name, range(len(values)))
    assert not problems
    assert sorted(rows) == list(range(len(values)))
    for sample, found in rows.items():
        assert found.tail_logprob is None
        k = found.values.shape[-1]
        masked = found.values == -1000.0
        assert np.array_equal(found.values.float().numpy(), values[sample][:, :k])
        kept = ~masked.numpy()
        assert np.array_equal(found.indices.numpy()[kept], ids[sample][:, :k][kept])
        assert (found.indices[masked] == -1).all()


def test_a_cache_in_a_store_is_read(server, tmp_path):
    name = tmp_path.name
    write_shard(server.objects / name, 0, 16, dp=2)
    rows, problems = read(server.url(name), range(3, 11))
    assert_rows_of(rows, range(3, 11))
    assert not problems
