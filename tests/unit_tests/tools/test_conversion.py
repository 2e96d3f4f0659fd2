# SPDX-License-Identifier: Apache-2.0
"""A converted cache gives a student the same rows, and nothing is overwritten or lost."""

import itertools
import tarfile
from pathlib import Path

import pytest
import torch

from megatron.training.distillation import eight_bit
from megatron.training.distillation.packed_rows import TeacherRows
from megatron.training.distillation.payload_v3 import encode_framed_payload
from megatron.training.distillation.shard_reader import (
    IterationFailure,
    LoadLayout,
    TeacherRowReader,
)
from megatron.training.distillation.shard_writer import write_batched_tar
from megatron.training.distillation.utils import SaverSettings, ShardMeta
from tests.unit_tests.training.distillation.cache_files import (
    IDENTIFIERS,
    write_large_shard,
    write_shard,
)
from tools import logits_cache
from tools.cache.conversion import same_rows
from tools.cache.conversion_target import Target

SHARED = Path(__file__).parents[4] / "shared" / "reference_caches"


def convert(source: Path, target: Path, version: int, *flags: str) -> int:
    return logits_cache.main(
        ["convert", str(source), str(target), "--format", str(version), "--jobs", "1", *flags]
    )


def rows_of(cache: Path, *, gbs: int = 4, dp: int = 1) -> list[TeacherRows]:
    """Return what the DP ranks of a student read, iteration by iteration."""
    found: list[TeacherRows] = []
    for rank in range(dp):
        layout = LoadLayout(dp_rank=rank, dp_size=dp, mbs=1, gbs=gbs)
        reader = TeacherRowReader(str(cache), layout, expected_identifiers=None)
        for item in itertools.takewhile(
            lambda item: not isinstance(item, IterationFailure), reader.iterations(0)
        ):
            found += item.microbatches
    return found


def files(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(cache.iterdir())}


@pytest.fixture
def cache(tmp_path) -> Path:
    """Two shards of two DP ranks each, and one that is set aside."""
    source = tmp_path / "v2"
    for start in (0, 8):
        write_shard(source, start, start + 8, dp=2, mbs=2)
    (source / "dp0__0-4.tar.stale").write_bytes(b"old")
    return source


def test_there_and_back_is_the_same_bytes(cache, tmp_path, capsys):
    assert convert(cache, tmp_path / "v3", 3) == 0
    assert convert(tmp_path / "v3", tmp_path / "back", 2) == 0
    assert "4 of 4 shards" in capsys.readouterr().out
    old = files(cache)
    del old["dp0__0-4.tar.stale"]
    assert files(tmp_path / "back") == old
    assert files(tmp_path / "v3").keys() == old.keys()
    assert files(tmp_path / "v3") != old


@pytest.mark.parametrize(("gbs", "dp"), [(4, 2), (4, 1), (8, 4), (2, 2)])
def test_a_student_reads_the_same_rows(cache, tmp_path, gbs, dp):
    convert(cache, tmp_path / "v3", 3)
    old, new = (rows_of(each, gbs=gbs, dp=dp) for each in (cache, tmp_path / "v3"))
    assert len(old) == 16
    assert all(itertools.starmap(same_rows, zip(old, new, strict=True)))


def test_what_is_hard_to_compress_stays_as_it_is(tmp_path):
    path = write_large_shard(tmp_path, 0, 8, gbs=4)
    source = tmp_path / "v2"
    source.mkdir()
    path.rename(source / path.name)
    convert(source, tmp_path / "v3", 3)
    convert(tmp_path / "v3", tmp_path / "back", 2)
    assert files(tmp_path / "back") == files(source)


@pytest.mark.parametrize("name", ["v2_a", "v2_b", "v2_c"])
def test_caches_of_the_original_writer_keep_their_rows(tmp_path, name):
    source = SHARED / name
    if not source.is_dir():
        pytest.skip(f"no {source}")
    assert convert(source, tmp_path / "v3", 3) == 0
    assert convert(tmp_path / "v3", tmp_path / "back", 2) == 0
    for other in (tmp_path / "v3", tmp_path / "back"):
        old, new = rows_of(source), rows_of(other)
        assert old
        assert all(itertools.starmap(same_rows, zip(old, new, strict=True)))
    for path in source.glob("*.tar"):
        with tarfile.open(path) as one, tarfile.open(tmp_path / "back" / path.name) as two:
            assert one.getnames() == two.getnames()


def test_eight_bit_values_are_those_of_the_nearest_codes(tmp_path):
    source = tmp_path / "v2"
    source.mkdir()
    write_large_shard(source, 0, 8, gbs=4)
    assert convert(source, tmp_path / "v3", 3, "--8bit") == 0
    assert convert(tmp_path / "v3", tmp_path / "back", 2) == 0
    old, new, back = (rows_of(each) for each in (source, tmp_path / "v3", tmp_path / "back"))
    assert len(old) == len(new) == len(back) == 8
    for exact, coded, plain in zip(old, new, back, strict=True):
        distance = (exact.values[..., None] - torch.from_numpy(eight_bit.VALUES)).abs().float()
        nearest = distance.min(dim=-1).values
        assert torch.equal((exact.values - coded.values).abs().float(), nearest)
        assert torch.equal(coded.indices, exact.indices)
        assert same_rows(coded, plain)
    with pytest.raises(ValueError, match="8-bit values are of format 3"):
        Target(format_version=2, eight_bit=True)


def test_a_stopped_conversion_goes_on(cache, tmp_path, capsys):
    convert(cache, tmp_path / "v3", 3)
    whole = files(tmp_path / "v3")
    (tmp_path / "v3" / "dp1__8-16.tar").unlink()
    (tmp_path / "v3" / "dp1__8-16.tar.tmp").write_bytes(whole["dp1__8-16.tar"][:700])
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "v3").glob("*.tar")}
    capsys.readouterr()
    assert convert(cache, tmp_path / "v3", 3) == 0
    assert "4 of 4 shards" in (said := capsys.readouterr().out)
    assert "3 of them were there already" in said
    assert files(tmp_path / "v3") == whole
    assert times == {path: path.stat().st_mtime_ns for path in times}


def test_another_shard_in_the_target_is_left_alone(cache, tmp_path, capsys):
    write_shard(tmp_path / "v3", 0, 8, dp=2, mbs=2)
    before = files(tmp_path / "v3")
    assert convert(cache, tmp_path / "v3", 3) == 1
    assert "is there already, and is not" in (said := capsys.readouterr().err)
    assert "2 shards were not converted: dp0__0-8.tar, dp1__0-8.tar" in said
    assert files(tmp_path / "v3").items() >= before.items()
    assert len(files(tmp_path / "v3")) == 4


def test_a_damaged_shard_is_named_and_the_others_are_converted(cache, tmp_path, capsys):
    path = cache / "dp1__0-8.tar"
    content = bytearray(path.read_bytes())
    with tarfile.open(path) as tar:
        content[tar.getmembers()[1].offset_data + 40] ^= 1
    path.write_bytes(content)
    assert convert(cache, tmp_path / "v3", 3) == 1
    said = capsys.readouterr().err
    assert f"The member 0-4.pt.zst of teacher shard {path} is damaged" in said
    assert "1 shards were not converted: dp1__0-8.tar" in said
    assert set(files(tmp_path / "v3")) == {"dp0__0-8.tar", "dp0__8-16.tar", "dp1__8-16.tar"}


def test_ids_that_format_2_does_not_hold_are_an_error(tmp_path, capsys):
    values = -torch.arange(3).float().expand(4, 2, 3).contiguous()
    ids = torch.tensor([5, 1 << 17, 200_000]).expand(4, 2, 3)
    saver = SaverSettings(
        k=3, save_dtype="fp32", format_version=3, mbs_save=1, dp_size_save=1, gbs_save=2
    )
    meta = ShardMeta.for_run(IDENTIFIERS, saver).to_bytes()
    payload = encode_framed_payload(values, ids, vocab_size=1 << 18)
    (tmp_path / "v3").mkdir()
    write_batched_tar(str(tmp_path / "v3" / "dp0__0-2.tar"), meta, [("0-2.pt.zst", payload)])
    assert convert(tmp_path / "v3", tmp_path / "v2", 2) == 1
    assert "do not fit the 17 bits of format v2" in capsys.readouterr().err
    assert files(tmp_path / "v2") == {}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("v2", "cannot be converted into itself"),
        ("empty", "no shard in"),
        ("none", "No such file or directory"),
    ],
)
def test_what_cannot_be_converted_is_said(cache, tmp_path, capsys, source, message):
    (tmp_path / "empty").mkdir()
    assert convert(tmp_path / source, cache, 3) == 1
    assert message in capsys.readouterr().err


def test_processes_side_by_side_write_the_same(cache, tmp_path):
    assert convert(cache, tmp_path / "one", 3) == 0
    assert convert(cache, tmp_path / "two", 3, "--jobs", "2") == 0
    assert files(tmp_path / "one") == files(tmp_path / "two")
