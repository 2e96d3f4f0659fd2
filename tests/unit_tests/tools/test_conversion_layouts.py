# SPDX-License-Identifier: Apache-2.0
"""Other shard boundaries and layouts: which shards there are, and what is wrong with which."""

import itertools
import json
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megatron.training.distillation.manifest import RunManifest
from megatron.training.distillation.open_shard import OpenShard
from megatron.training.distillation.shard_reader import (
    IterationFailure,
    LoadLayout,
    TeacherRowReader,
)
from tests.unit_tests.tools.conversion_cases import MASKED, Case, assert_same, read, recorded, write
from tests.unit_tests.training.distillation.cache_files import IDENTIFIERS
from tools import logits_cache

SHARED = Path(__file__).parents[4] / "shared" / "reference_caches"
CASE = Case(dp=2, mbs=2, gbs=8)


def convert(source: Path | str, target: Path | str, *flags: str) -> int:
    return logits_cache.main(["convert", str(source), str(target), "--jobs", "1", *flags])


def layout(dp: int, mbs: int, gbs: int) -> list[str]:
    sizes = {"data-parallel": dp, "micro-batch": mbs, "global-batch": gbs}
    return [part for name, size in sizes.items() for part in (f"--{name}-size", str(size))]


def files(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(cache.iterdir())}


def check(cache: Path, *spans: tuple[int, int], case: Case = CASE) -> None:
    """Compare all samples, which must be those of *spans*."""
    found = read(cache).samples
    assert found.keys() == set(itertools.chain(*(range(*span) for span in spans)))
    for number, sample in found.items():
        assert_same(sample, recorded(number, case))


def flip(path: Path, member: int) -> None:
    content = bytearray(path.read_bytes())
    with tarfile.open(path) as tar:
        content[tar.getmembers()[member].offset_data + 40] ^= 1
    path.write_bytes(content)


# ---- which shards there are ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "windows", "members"),
    [
        (layout(1, 4, 8), ["0-16", "16-40"], 5),
        (layout(1, 2, 12), ["0-24", "24-40"], 4),  # a boundary moves to the end of an iteration
        (layout(4, 1, 4), ["0-16", "16-40"], 10),
        (["--samples-per-shard", "8"], ["0-8", "8-16", "16-24", "24-32", "32-40"], 5),
        (["--samples-per-shard", "80"], ["0-40"], 5),
        ([*layout(2, 2, 4), "--samples-per-shard", "20"], ["0-20", "20-40"], 10),
        (layout(2, 2, 20), ["0-20", "20-40"], 2),
        (layout(1, 1, 100), ["0-40"], 1),
    ],
)
def test_boundaries(tmp_path, flags, windows, members):
    source = write(tmp_path / "source", CASE, (0, 16), (16, 40))
    assert convert(source, tmp_path / "cache", *flags) == 0
    found = read(tmp_path / "cache")
    ranks = found.savers[0]["dp_size_save"]
    names = [f"dp{rank}__{window}.tar" for rank, window in itertools.product(range(ranks), windows)]
    assert sorted(files(tmp_path / "cache")) == sorted(names)
    assert len(found.widths) == members * ranks
    check(tmp_path / "cache", (0, 40))


def test_there_and_back_is_the_same_bytes(tmp_path):
    source = write(tmp_path / "source", CASE, (0, 16), (16, 40), manifest=RunManifest(split="1"))
    assert convert(source, tmp_path / "other", *layout(3, 1, 12), "--samples-per-shard", "12") == 0
    back = ["--samples-per-shard", "8", *layout(2, 2, 8)]
    assert convert(tmp_path / "other", tmp_path / "back", *back) == 0
    write(
        tmp_path / "dumped",
        CASE,
        *((a, a + 8) for a in range(0, 40, 8)),
        manifest=RunManifest(split="1"),
    )
    # 36 samples fill rounds of 3, and 4 are left out.
    expected = files(tmp_path / "dumped")
    for rank in range(2):
        del expected[f"dp{rank}__32-40.tar"]
    found = files(tmp_path / "back")
    assert {name: found.pop(name) for name in expected} == expected
    assert sorted(found) == ["dp0__32-36.tar", "dp1__32-36.tar"]


def test_gaps_stay_gaps(tmp_path, capsys):
    source = write(tmp_path / "source", CASE, (0, 8), (24, 40))
    assert convert(source, tmp_path / "cache", *layout(1, 2, 16)) == 0
    said = capsys.readouterr().out
    assert "16 samples are not in the cache, so no shard will have them: 8 to 23" in said
    assert sorted(files(tmp_path / "cache")) == ["dp0__0-8.tar", "dp0__24-40.tar"]
    with tarfile.open(tmp_path / "cache" / "dp0__24-40.tar") as tar:
        assert tar.getnames()[1:] == ["24-32.pt.zst", "32-40.pt.zst"]
    check(tmp_path / "cache", (0, 8), (24, 40))


def test_what_fills_no_round_is_left_out_and_said(tmp_path, capsys):
    source = write(tmp_path / "source", CASE, (8, 24))
    assert convert(source, tmp_path / "cache", *layout(3, 2, 12)) == 0
    said = capsys.readouterr().out
    assert "4 samples are left out, as they do not fill a round of micro batches: 8 to 11" in said
    check(tmp_path / "cache", (12, 24))


def test_of_overlapping_shards_the_later_start_wins(tmp_path):
    source = write(tmp_path / "source", CASE, (0, 24))
    write(source, CASE, (16, 32), teacher=1000)
    assert convert(source, tmp_path / "cache", *layout(1, 4, 8)) == 0
    found = read(tmp_path / "cache").samples
    assert found.keys() == set(range(32))
    for number, sample in found.items():
        assert_same(sample, recorded(number + 1000 * (number >= 16), CASE))


def test_a_dry_run_writes_nothing(tmp_path, capsys):
    source = write(tmp_path / "source", CASE, (0, 16))
    assert convert(source, tmp_path / "cache", "--dry-run", "--top-k", "3", *layout(4, 2, 8)) == 0
    assert not (tmp_path / "cache").exists()
    said = capsys.readouterr().out
    assert "format 2, K 12, fp32, DP 2 MBS 2 GBS 8: 2 shards" in said
    assert "become format 2, K 3, fp32, DP 4 MBS 2 GBS 8: 4 shards" in said


def test_the_example_of_the_help_works(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "dump" / "logits", Case(k=20), (0, 8))
    with pytest.raises(SystemExit) as stopped:
        logits_cache.main(["convert", "--help"])
    assert stopped.value.code == 0
    example = capsys.readouterr().out.partition("example:")[2].split()
    assert example[:4] == ["python", "-m", "tools.logits_cache", "convert"]
    assert logits_cache.main([*example[3:], "--jobs", "1"]) == 0
    assert read(tmp_path / "small" / "logits").savers[0]["k"] == 16


# ---- what is wrong -------------------------------------------------------------------------


def test_a_missing_rank_costs_the_shards_that_need_it(tmp_path, capsys):
    source = write(tmp_path / "source", CASE, (0, 16), (16, 32))
    (source / "dp1__0-16.tar").unlink()
    assert convert(source, tmp_path / "wide", *layout(4, 2, 8)) == 1
    said = capsys.readouterr().err
    assert "Samples 0 to 15 were recorded by DP rank 1, of which there is no shard" in said
    assert "2 shards were not converted: dp1__0-16.tar, dp3__0-16.tar" in said
    assert len(files(tmp_path / "wide")) == 6
    assert convert(source, tmp_path / "one", *layout(1, 2, 8)) == 1
    said = capsys.readouterr().err
    assert "Sample 2 was recorded by DP rank 1, of which there is no shard: there is" in said
    assert "1 shards were not converted: dp0__0-16.tar" in said
    check(tmp_path / "one", (16, 32))
    # When it is back, the conversion goes on.
    write(source, CASE, (0, 16))
    assert convert(source, tmp_path / "wide", *layout(4, 2, 8)) == 0
    check(tmp_path / "wide", (0, 32))


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-512])


def rename(path: Path) -> None:
    path.rename(path.with_name("dp1__0-16.tar"))


def exchange(path: Path) -> None:
    write(path.parent / "other", CASE, (0, 16), identifiers={**IDENTIFIERS, "seed": 2})
    (path.parent / "other" / path.name).rename(path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: flip(path, 2), "The member 8-16.pt.zst of teacher shard"),
        (lambda path: flip(path, 0), "dp0__0-16.tar is damaged"),
        (cut_off, "is damaged: it has"),
        (rename, "of DP rank 0"),
        (exchange, "is of another dump than most of the cache: its seed is 2"),
    ],
    ids=("payload", "metadata", "cut", "renamed", "foreign"),
)
def test_what_is_damaged_is_named(tmp_path, capsys, damage, words):
    source = write(tmp_path / "source", CASE, (0, 16), (16, 32))
    damage(source / "dp0__0-16.tar")
    assert convert(source, tmp_path / "cache", *layout(1, 4, 8)) == 1
    said = capsys.readouterr().err
    if words != "of DP rank 0":
        assert words in said
    assert "1 shards were not converted: dp0__0-16.tar" in said
    check(tmp_path / "cache", (16, 32))


def test_another_conversion_in_the_target_is_refused(tmp_path, capsys):
    source = write(tmp_path / "source", CASE, (0, 16))
    assert convert(source, tmp_path / "cache", "--top-k", "3", *layout(1, 2, 8)) == 0
    before = files(tmp_path / "cache")
    for flags, words in (
        (["--top-k", "3", *layout(1, 2, 8), "--samples-per-shard", "8"], "not of this conversion"),
        (["--top-k", "4", *layout(1, 2, 8)], "k is 3 there, 4 here"),
        (["--top-k", "3", "--top-p", "0.5", *layout(1, 2, 8)], "p is None there, 0.5 here"),
        (["--top-k", "3", "--dtype", "fp16", *layout(1, 2, 8)], "save_dtype is 'fp32' there"),
        (["--top-k", "3", "--format", "3", *layout(1, 2, 8)], "format_version is 2 there, 3 here"),
        (["--top-k", "3", *layout(1, 4, 8)], "mbs_save is 2 there, 4 here"),
        (["--top-k", "3", *layout(1, 2, 4)], "gbs_save is 8 there, 4 here"),
    ):
        assert convert(source, tmp_path / "cache", *flags) == 1
        assert words in capsys.readouterr().err
        assert files(tmp_path / "cache") == before
    assert convert(source, tmp_path / "cache", "--top-k", "3", *layout(1, 2, 8)) == 0
    assert "1 of 1 shards in" in (said := capsys.readouterr().out)
    assert "1 of them were there already" in said


NUCLEUS = Case(p=0.8, min_k=2)


@pytest.mark.parametrize(
    ("case", "flags", "words"),
    [
        (CASE, "--top-k 13", "--top-k is 13, and the cache holds at most 12 entries per token"),
        (CASE, "--top-p 1.5", "--top-p is 1.5: give a probability mass in (0, 1]"),
        (CASE, "--top-p-min-k 2", "there is no P: give --top-p too"),
        (CASE, "--top-k 3 --top-p 0.5 --top-p-min-k 4", "At least 4 entries of each token stay"),
        (CASE, "--format 2 --8bit", "8-bit values are of format 3"),
        (CASE, "--8bit", "give --format 3 too"),
        (CASE, "--8bit --format 3 --dtype bf16", "codes that are read as fp16, not bf16"),
        (CASE, "--data-parallel-size 3", "A global batch of 8 samples cannot be dealt to 3"),
        (CASE, "--samples-per-shard 12", "give a multiple of the global batch size (8)"),
        (NUCLEUS, "--top-p 0.9", "--top-p is 0.9, and the cache was recorded with 0.8"),
        (NUCLEUS, "--top-p-min-k 3", "recorded with P 0.8 and at least 2 entries"),
        (NUCLEUS, "--top-k 1", "At least 2 entries of each token stay, but at most 1"),
    ],
)
def test_what_the_source_does_not_hold_is_refused_before_any_work(
    tmp_path, capsys, case, flags, words
):
    source = write(tmp_path / "source", case, (0, 8))
    assert convert(source, tmp_path / "cache", *flags.split()) == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_a_vocabulary_beyond_17_bits_is_refused_for_format_2(tmp_path, capsys):
    manifest = RunManifest(vocab_size=140_000)
    source = write(tmp_path / "source", Case(version=3), (0, 8), manifest=manifest)
    assert convert(source, tmp_path / "cache", "--format", "2") == 1
    assert "The vocabulary has 140000 entries" in capsys.readouterr().err


# ---- how often things are decoded ----------------------------------------------------------


@pytest.fixture
def decoded(monkeypatch) -> Counter[tuple[str, str]]:
    """How often each member is decoded, by shard and name."""
    counts: Counter[tuple[str, str]] = Counter()
    original = OpenShard.decode

    def decode(self, member, rows=None):
        counts[Path(self.path).name, member.entry.name] += 1
        return original(self, member, rows)

    monkeypatch.setattr(OpenShard, "decode", decode)
    return counts


@pytest.mark.parametrize("version", [1, 2, 3])
def test_each_member_of_the_source_is_decoded_once(tmp_path, decoded, version):
    case = Case(version=version, dp=2, mbs=2, gbs=8, p=0.9)
    source = write(tmp_path / "source", case, (0, 24), (24, 48))
    for number, flags in enumerate((layout(4, 1, 8), layout(1, 2, 4), layout(3, 2, 24))):
        decoded.clear()
        assert convert(source, tmp_path / str(number), *flags) == 0
        assert len(decoded) == 12
        assert set(decoded.values()) == {1}


@pytest.mark.parametrize("version", [2, 3])
def test_a_student_decodes_its_own_rows_only(tmp_path, decoded, version):
    """Two ranks would each decode all members of another layout; now each has its own."""
    source = write(tmp_path / "source", Case(dp=1, mbs=4, gbs=16, version=version), (0, 32))
    assert convert(source, tmp_path / "cache", *layout(2, 2, 8)) == 0
    expected = {f"dp{rank}__0-32.tar" for rank in range(2)}
    for cache, ways in ((source, None), (tmp_path / "cache", expected)):
        decoded.clear()
        rows = 0
        for rank in range(2):
            student = LoadLayout(dp_rank=rank, dp_size=2, mbs=2, gbs=8)
            reader = TeacherRowReader(str(cache), student, expected_identifiers=None)
            for item in itertools.takewhile(
                lambda item: not isinstance(item, IterationFailure), reader.iterations(0)
            ):
                rows += sum(batch.values.shape[1] for batch in item.microbatches)
        assert rows == 32
        if ways is None:
            assert sum(decoded.values()) > len(decoded)
        else:
            assert {name for name, _ in decoded} == ways
            assert len(decoded) == 2 * 4
            assert set(decoded.values()) == {1}


# ---- caches that NVIDIA's code wrote -------------------------------------------------------

RUNS = {"v1_a": (2, 8), "v1_b": (1, 6), "v2_a": (2, 8), "v2_b": (1, 6), "v2_c": (3, 12)}


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("name", RUNS)
def test_reference_caches(tmp_path, name, version):
    source = SHARED / name
    if not source.is_dir():
        pytest.skip(f"no {source}")
    mbs, gbs = RUNS[name]
    with np.load(source / "expected.npz") as truth:
        values, ids = truth["values"], truth["indices"]
    flags = ["--format", str(version)]
    assert convert(source, tmp_path / "same", *flags) == 0
    assert convert(source, tmp_path / "other", *flags, *layout(2, 1, 4), "--top-k", "4") == 0
    for cache, k in ((tmp_path / "same", values.shape[2]), (tmp_path / "other", 4)):
        found = read(cache)
        assert found.samples.keys() == set(range(len(values)))
        for number, sample in found.samples.items():
            assert sample.tail is sample.fingerprint is None
            for position, kept in enumerate(sample.values):
                expected = values[number, position, :k]
                count = int((expected != MASKED).sum())
                np.testing.assert_array_equal(kept, expected[:count])
                np.testing.assert_array_equal(sample.ids[position], ids[number, position, :count])
    saver = read(tmp_path / "same").savers[0]
    assert (saver["mbs_save"], saver["gbs_save"], saver["format_version"]) == (mbs, gbs, version)


@pytest.mark.parametrize(("old", "new"), [("v1_a", "v2_a"), ("v1_b", "v2_b")])
def test_format_1_becomes_what_format_2_says_of_the_same_run(tmp_path, old, new):
    if not SHARED.is_dir():
        pytest.skip(f"no {SHARED}")
    flags = layout(2, RUNS[new][0], RUNS[new][1])
    assert convert(SHARED / old, tmp_path / "cache", *flags) == 0
    with tarfile.open(SHARED / new / sorted(files(tmp_path / "cache"))[0]) as tar:
        stream = tar.extractfile("_meta.json")
        assert stream is not None
        expected = json.load(stream)
    found = read(tmp_path / "cache")
    assert all(saver == expected["saver"] for saver in found.savers)
    assert all(meta["hash"] == expected["hash"] for meta in found.metas)
    assert all(
        meta["identifiers"].items() >= expected["identifiers"].items() for meta in found.metas
    )
    assert sorted(files(tmp_path / "cache")) == sorted(
        path.name for path in (SHARED / new).glob("*.tar")
    )
