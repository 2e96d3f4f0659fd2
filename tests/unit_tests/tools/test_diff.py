# SPDX-License-Identifier: Apache-2.0
"""``diff`` tells what two caches do not share, and its exit status whether they contradict."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.training.distillation.manifest import RunManifest
from megatron.training.distillation.shard_writer import write_batched_tar
from megatron.training.distillation.utils import SaverSettings, ShardMeta
from tests.unit_tests.training.distillation.cache_files import (
    IDENTIFIERS,
    encode_payload,
    rows_of,
    write_large_shard,
    write_shard,
)
from tools import logits_cache
from tools.cache import cache_comparison
from tools.cache.cache_comparison import spread
from tools.cache.coverage import Span
from tools.cache.verbs import diff as diff_verb

SHARED = Path(__file__).parents[4] / "shared" / "reference_caches"


def diff(capsys, a, b, *flags: str) -> tuple[int, str]:
    status = logits_cache.main(["diff", str(a), str(b), "--jobs", "1", *flags])
    return status, capsys.readouterr().out


def diff_json(capsys, a, b, *flags: str) -> dict[str, Any]:
    status, text = diff(capsys, a, b, "--json", *flags)
    found = json.loads(text)
    assert found["status"] == status
    return found


# ---- layouts and formats -------------------------------------------------------------------------


@pytest.mark.usefixtures("cache_format")
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(("dp", "mbs", "gbs"), [(1, 1, 4), (2, 2, 4), (3, 2, 12), (1, 24, 24)])
@pytest.mark.parametrize("window", [1, 4 * 2 * 64 * 2 * 5, 1 << 28])
def test_the_same_rows_in_any_layout_are_the_same(
    tmp_path, capsys, monkeypatch, version, dp, mbs, gbs, window
):
    """Windows of one rank's share, of some samples, and of as many as a task has."""
    monkeypatch.setattr(cache_comparison, "_WINDOW_BYTES", window)
    for start in (0, 24):
        write_shard(tmp_path / "a", start, start + 24, dp=2, mbs=1, gbs=4)
    write_shard(tmp_path / "b", 0, 48, dp=dp, mbs=mbs, gbs=gbs, format_version=version)
    found = diff_json(capsys, tmp_path / "a", tmp_path / "b", "--exact")
    assert found["status"] == 0
    assert found["samples"]["both"] == [[0, 48]]
    assert found["rows"]["samples"] == found["rows"]["same"] == 48
    assert found["rows"]["tokens"] == 4 * 48
    assert found["rows"]["kl"]["max"]["value"] == 0


def test_one_other_sample_is_found(tmp_path, capsys):
    write_shard(tmp_path / "a", 0, 48, dp=2)
    write_shard(tmp_path / "b", 0, 16, dp=1)
    write_shard(tmp_path / "b", 16, 20, teacher=1)
    write_shard(tmp_path / "b", 20, 48, dp=1)
    found = diff_json(capsys, tmp_path / "a", tmp_path / "b")
    assert found["status"] == 0
    assert found["rows"]["different"] == {"count": 4, "first": [16, 17, 18, 19]}
    assert found["rows"]["logprob_difference"]["max"]["value"] == 1.0
    assert found["rows"]["logprob_difference"]["max"]["sample"] == 16
    assert found["rows"]["equal_logprobs"] == pytest.approx(44 / 48)
    status, text = diff(capsys, tmp_path / "a", tmp_path / "b", "--exact")
    assert status == 1
    assert "44 of 48 samples" in text
    assert re.search(r"different +16, 17, 18, 19\n", text)


def test_parts_and_samples_of_a_cache(tmp_path, capsys):
    write_shard(tmp_path / "a", 0, 48, dp=2)
    write_shard(tmp_path / "b", 16, 64)
    found = diff_json(capsys, tmp_path / "a", tmp_path / "b")
    assert found["samples"] | {"no_row_in_a": 0, "no_row_in_b": 0} == {
        "both": [[16, 48]],
        "only_a": [[0, 16]],
        "only_b": [[48, 64]],
        "no_row_in_a": 0,
        "no_row_in_b": 0,
    }
    assert found["status"] == 0
    assert diff(capsys, tmp_path / "a", tmp_path / "b", "--exact")[0] == 1
    assert diff(capsys, tmp_path / "a", tmp_path / "b", "--exact", "--range", "17:31")[0] == 0
    found = diff_json(capsys, tmp_path / "a", tmp_path / "b", "--range", "17:31")
    assert found["rows"]["samples"] == 14
    found = diff_json(capsys, tmp_path / "a", tmp_path / "b", "--samples", "5")
    assert found["rows"]["samples"] == found["rows"]["same"] == 5


def test_samples_are_spread_evenly():
    spans = [Span(10, 20), Span(100, 130)]
    assert spread(spans, 4) == [15, 105, 115, 125]
    assert spread(spans, 1000) == [*range(10, 20), *range(100, 130)]


def test_processes_find_what_one_does(tmp_path, capsys, monkeypatch):
    for start in range(0, 96, 24):
        write_shard(tmp_path / "a", start, start + 24, dp=2)
        write_shard(tmp_path / "b", start, start + 24, gbs=6, dp=3, teacher=start // 40)
    one = diff_json(capsys, tmp_path / "a", tmp_path / "b")
    monkeypatch.setattr(diff_verb, "_SMALL_BYTES", 0)
    status = logits_cache.main(
        ["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--jobs", "2", "--json"]
    )
    two = json.loads(capsys.readouterr().out)
    assert status == 0
    for found in (one, two):  # sums in another order
        found["rows"]["tail_mass_difference"]["mean"] = None
        for name in ("mass_of_a_not_in_b", "kl"):
            found["rows"][name]["mean"] = None
    assert one == two


# ---- contradictions ------------------------------------------------------------------------------


def with_labels(directory: Path, changed: int | None = None, positions: int = 4) -> None:
    """Write samples 0 to 7 with fingerprints; those of sample *changed* are of other labels."""
    saver = SaverSettings(k=2, save_dtype="fp32", mbs_save=1, dp_size_save=1, gbs_save=4)
    members = []
    for first in (0, 4):
        values, ids, _ = rows_of(list(range(first, first + 4)))
        repeat = positions // len(values)
        fingerprints = torch.arange(first, first + 4).repeat(-(-positions // 64), 1)
        if changed is not None and first <= changed < first + 4:
            fingerprints[-1, changed - first] += 100
        parts = values.repeat(repeat, 1, 1), ids.repeat(repeat, 1, 1), None, fingerprints
        members.append((f"{first}-{first + 4}.pt.zst", encode_payload(parts)))
    directory.mkdir()
    meta = ShardMeta.for_run(IDENTIFIERS, saver).to_bytes()
    write_batched_tar(str(directory / "dp0__0-8.tar"), meta, members)


def test_other_tokens_are_the_loudest_finding(tmp_path, capsys):
    with_labels(tmp_path / "a", positions=128)
    with_labels(tmp_path / "b", positions=128)
    with_labels(tmp_path / "c", changed=5, positions=128)
    status, text = diff(capsys, tmp_path / "a", tmp_path / "b")
    assert status == 0
    assert re.search(r"labels +the same tokens in 8 samples\n", text)
    status, text = diff(capsys, tmp_path / "a", tmp_path / "c")
    assert status == 1
    assert text.startswith("OTHER TOKENS: the labels of 1 of 8 samples are not the same")
    assert "The first is sample 5, in its 64 positions from 64 on" in text
    labels = diff_json(capsys, tmp_path / "a", tmp_path / "c")["labels"]
    assert labels == {
        "same": 7,
        "other": {"count": 1, "first": [5]},
        "first_positions": {"5": 64},
    }


MANIFEST = RunManifest(
    sequence_length=4,
    vocab_size=100,
    padded_vocab_size=128,
    split="99,1,0",
    package_version="1",
)


@pytest.mark.parametrize(
    ("run", "kind", "name", "text"),
    [
        ({"identifiers": {**IDENTIFIERS, "seed": 2}}, "fatal", "seed", "seed: A 1, B 2"),
        ({"manifest": {"vocab_size": 90}}, "fatal", "vocab_size", "vocab_size: A 100, B 90"),
        ({"manifest": {"sequence_length": 8}}, "fatal", "sequence_length", "A 4, B 8"),
        ({"manifest": {"padded_vocab_size": 256}}, "harmless", "padded_vocab_size", "A 128, B 256"),
        ({"manifest": {"split": "99,0,1"}}, "harmless", "split", "the training share is the same"),
        ({"k": 3}, "settings", "k", "k: A 2, B 3"),
        ({"dp": 2}, "settings", "dp_size_save", "dp_size_save: A 1, B 2"),
    ],
)
def test_every_difference_of_identity_is_named(tmp_path, capsys, run, kind, name, text):
    given = {**MANIFEST.to_dict(), **run.pop("manifest", {})}
    write_shard(tmp_path / "a", 0, 8, manifest=MANIFEST)
    write_shard(tmp_path / "b", 0, 8, manifest=RunManifest.from_dict(given), **run)
    found = diff_json(capsys, tmp_path / "a", tmp_path / "b")
    assert [each["name"] for each in found["identity"][kind]] == [name]
    assert found["status"] == (kind == "fatal")
    status, said = diff(capsys, tmp_path / "a", tmp_path / "b")
    assert text in said
    assert ("NOT THE SAME DATA" in said) == (kind == "fatal")
    assert status == found["status"]


def test_what_one_side_does_not_say_is_told(tmp_path, capsys):
    write_shard(tmp_path / "a", 0, 8, manifest=MANIFEST)
    write_shard(tmp_path / "b", 0, 8)
    found = diff_json(capsys, tmp_path / "a", tmp_path / "b")
    assert found["status"] == 0
    assert found["identity"]["not_compared"] == [
        "B does not have a manifest: sequence length, vocabulary, tokenizer, split, sampler"
    ]


# ---- what is damaged -----------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path) -> tuple[Path, Path]:
    """Two caches of two shards for each of two DP ranks."""
    for start in (0, 8):
        write_shard(tmp_path / "a", start, start + 8, dp=2, manifest=MANIFEST)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    return tmp_path / "a", tmp_path / "b"


def cut(cache: Path) -> None:
    path = cache / "dp1__0-8.tar"
    path.write_bytes(path.read_bytes()[:-700])


def flip(cache: Path) -> None:
    path = cache / "dp1__0-8.tar"
    content = bytearray(path.read_bytes())
    content[content.rindex(b"4-8.pt.zst") + 512 + 40] ^= 1
    path.write_bytes(content)


def rename(cache: Path) -> None:
    (cache / "dp1__0-8.tar").rename(cache / "dp1__16-24.tar")


def foreign(cache: Path) -> None:
    write_shard(cache, 0, 8, dp=2, manifest=MANIFEST, identifiers={**IDENTIFIERS, "seed": 9})
    shutil.copy(cache.parent / "a" / "dp0__0-8.tar", cache / "dp0__0-8.tar")


@pytest.mark.usefixtures("cache_format")
@pytest.mark.parametrize(
    ("damage", "said", "same"),
    [
        (cut, "dp1__0-8.tar", 12),
        (flip, "member 4-8.pt.zst of teacher shard", 14),
        (rename, "was written as dp1__0-8.tar", 12),
        (foreign, "dp1__0-8.tar is of another dump than most of the cache: its seed is 9", 12),
    ],
)
def test_what_is_damaged_is_named_and_the_rest_is_compared(two, capsys, damage, said, same):
    a, b = two
    damage(b)
    found = diff_json(capsys, a, b)
    (problem,) = found["problems"]
    assert said in problem
    assert str(b) in problem
    assert found["status"] == 1
    assert found["rows"]["same"] == found["rows"]["samples"] == same
    assert found["samples"]["no_row_in_b"]["count"] == 16 - same
    assert found["samples"]["no_row_in_a"]["count"] == 0
    assert "1 problems" in diff(capsys, a, b)[1]
    assert diff_json(capsys, b, a)["rows"]["same"] == same


def test_a_missing_rank_is_told_by_its_samples(two, capsys):
    a, b = two
    (b / "dp1__8-16.tar").unlink()
    found = diff_json(capsys, a, b)
    assert found["status"] == 0
    assert found["samples"]["no_row_in_b"] == {"count": 4, "first": [9, 11, 13, 15]}
    assert diff_json(capsys, a, b, "--exact")["status"] == 1


def test_overlapping_shards_are_read_as_a_student_does(two, capsys):
    a, b = two
    write_shard(b, 4, 8, dp=2, manifest=MANIFEST, teacher=3)
    found = diff_json(capsys, a, b)
    assert found["rows"]["different"] == {"count": 4, "first": [4, 5, 6, 7]}
    assert (found["status"], found["problems"]) == (0, [])


def test_what_cannot_be_compared_is_said(two, tmp_path, capsys):
    a, b = two
    (tmp_path / "empty").mkdir()
    write_shard(tmp_path / "later", 100, 108)
    write_shard(tmp_path / "broken", 0, 8)
    (tmp_path / "broken" / "dp0__0-8.tar").write_bytes(b"")
    for other, message in (
        ("empty", "There is no shard in"),
        ("none", "No such file or directory"),
        ("later", "no sample in common: .* samples 0 to 15, .* holds samples 100 to 107"),
        ("broken", "No shard of .*broken can be read; dp0__0-8.tar: .*truncated"),
    ):
        assert logits_cache.main(["diff", str(a), str(tmp_path / other)]) == 1
        assert re.search(message, capsys.readouterr().err), other
    assert logits_cache.main(["diff", str(a), str(b), "--range", "16:20"]) == 1
    assert "no sample of samples 16 to 19 in common" in capsys.readouterr().err
    for text in ("5", "5:5", "a:b", "-1:4"):
        with pytest.raises(SystemExit, match="2"):
            logits_cache.main(["diff", str(a), str(b), f"--range={text}"])
        assert "is not a range of samples, such as 0:1024" in capsys.readouterr().err


# ---- other writers, converted copies, stores -----------------------------------------------------


@pytest.mark.parametrize(("one", "other"), [("v1_a", "v2_a"), ("v1_b", "v2_b")])
def test_formats_1_and_2_of_the_original_writer_are_the_same(capsys, one, other):
    if not SHARED.is_dir():
        pytest.skip(f"no {SHARED}")
    found = diff_json(capsys, SHARED / one, SHARED / other, "--exact")
    assert found["status"] == 0
    assert found["rows"]["same"] == found["rows"]["samples"] > 0
    assert not found["rows"]["tails_are_stored"]


def test_other_runs_of_the_original_writer_contradict(capsys):
    if not SHARED.is_dir():
        pytest.skip(f"no {SHARED}")
    found = diff_json(capsys, SHARED / "v2_a", SHARED / "v2_c")
    assert [each["name"] for each in found["identity"]["fatal"]] == ["train_samples"]
    assert found["status"] == 1


def test_a_copy_of_8_bit_values_diverges_by_what_they_cost(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    write_large_shard(tmp_path / "a", 0, 8, gbs=4)
    arguments = ["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--format", "3", "--8bit"]
    assert logits_cache.main([*arguments, "--jobs", "1"]) == 0
    capsys.readouterr()
    found = diff_json(capsys, tmp_path / "a", tmp_path / "b")
    assert found["status"] == 0
    rows = found["rows"]
    assert rows["same_ids"] == rows["jaccard"] == 1.0
    assert 0 < rows["kl"]["p50"] <= rows["kl"]["p99"] <= rows["kl"]["max"]["value"] * 1.01 < 1e-3
    # Codes are at most 24 * 2 / 255 apart times the root of the value's share.
    assert 0 < rows["logprob_difference"]["max"]["value"] < 24 / 255
    assert [each["name"] for each in found["identity"]["settings"]] == [
        "save_dtype",
        "format_version",
    ]


@pytest.mark.parametrize("flags", [(), ("--samples", "3")])
def test_caches_in_a_store_are_compared(server, tmp_path, capsys, flags):
    name = tmp_path.name
    for start in (0, 16):
        write_shard(server.objects / name, start, start + 16, dp=2)
        write_shard(tmp_path / "b", start, start + 16, format_version=3)
    found = diff_json(capsys, server.url(name), tmp_path / "b", *flags)
    assert found["status"] == 0
    assert found["rows"]["same"] == found["rows"]["samples"] == (3 if flags else 32)


def test_the_example_of_the_help_works(two, capsys, monkeypatch):
    with pytest.raises(SystemExit, match="0"):
        logits_cache.main(["diff", "--help"])
    example = capsys.readouterr().out.partition("example:\n")[2].strip()
    a, b = two
    (a.parent / "dump").mkdir()
    a.rename(a.parent / "dump" / "logits")
    b.rename(a.parent / "dump" / "logits3")
    monkeypatch.chdir(a.parent)
    words = shlex.split(example)
    assert words[:3] == ["python", "-m", "tools.logits_cache"]
    assert logits_cache.main(words[3:]) == 0
    assert all(len(line) <= 100 for line in capsys.readouterr().out.splitlines())
