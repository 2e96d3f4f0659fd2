# SPDX-License-Identifier: Apache-2.0
"""``info`` tells what a cache is, whatever state it is in."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.training.distillation import object_store
from megatron.training.distillation.manifest import RunManifest
from tests.s3_server import S3Server
from tests.unit_tests.training.distillation.cache_files import (
    IDENTIFIERS,
    SEQ,
    K,
    write_shard,
)
from tools import logits_cache
from tools.units import bytes_text

SHARED = Path(__file__).parents[4] / "shared" / "reference_caches"
MANIFEST = RunManifest(
    sequence_length=SEQ,
    vocab_size=50,
    padded_vocab_size=64,
    tokenizer={"type": "NullTokenizer", "fingerprint": "abc"},
    teacher={"checkpoint": "big", "step": 7},
)


@pytest.fixture
def cache(tmp_path, cache_format) -> Path:
    """Four windows of eight samples, of two DP ranks."""
    source = tmp_path / "cache"
    for start in range(0, 32, 8):
        write_shard(source, start, start + 8, dp=2, mbs=2, manifest=MANIFEST)
    return source


def info(directory: Path | str, capsys, *flags: str) -> str:
    assert logits_cache.main(["info", str(directory), *flags]) == 0
    return capsys.readouterr().out


def facts(directory: Path | str, capsys) -> dict[str, Any]:
    return json.loads(info(directory, capsys, "--json"))


def test_whole_cache(cache, capsys, cache_format):
    found = facts(cache, capsys)
    size = sum(path.stat().st_size for path in cache.iterdir())
    expected = {
        "directory": str(cache),
        "identifiers": IDENTIFIERS,
        "formats": {str(cache_format): 8},
        "samples": 32,
        "tokens": 32 * SEQ,
        "complete": [[0, 32]],
        "gaps": [],
        "by_dp_rank": {"0": [[0, 32]], "1": [[0, 32]]},
        "bytes": size,
        "bytes_per_token": size / (32 * SEQ),
        "shards": 8,
        "damaged": {},
        "foreign_shards": {},
        "overlapping": [],
        "stale": [],
        "unfinished": [],
        "foreign_files": [],
    }
    assert {key: found[key] for key in expected} == expected
    assert found["payload"] == {
        "sequence_length": SEQ,
        "k": K,
        "dtype": "float32",
        "has_tails": True,
        "has_fingerprints": False,
    }
    assert (found["saver"]["dp_size_save"], found["saver"]["mbs_save"]) == (2, 2)
    assert found["manifest"]["teacher"] == {"checkpoint": "big", "step": 7}
    text = info(cache, capsys)
    for line in (
        f"  shards     8 of format {cache_format}; {bytes_text(size)}",
        '             blend {"kind": "mock", "mock": true}',
        "  teacher    checkpoint big, step 7",
        "  vocabulary 50 tokens, padded to 64",
        "  saved      K 2, no top-P, fp32, tail mass, no label fingerprints",
        "  layout     DP 2, micro batch 2, global batch 4",
        "  tokens     128 with targets, ",
        "32 samples are complete, 32.0% of train_samples",
        f"  dp0-1 |{'#' * 64}|",
    ):
        assert line in text


def test_every_trouble_is_named(cache, tmp_path, capsys):
    cut = cache / "dp0__8-16.tar"
    cut.write_bytes(cut.read_bytes()[:-1024])
    (cache / "dp1__16-24.tar").unlink()
    other = tmp_path / "other"
    identifiers = {**IDENTIFIERS, "seed": 2}
    write_shard(other, 24, 32, dp=2, mbs=2, manifest=MANIFEST, identifiers=identifiers)
    shutil.copy(other / "dp1__24-32.tar", cache)
    write_shard(tmp_path / "late", 20, 28, dp=2, mbs=2, manifest=MANIFEST)
    shutil.copy(tmp_path / "late" / "dp0__20-28.tar", cache)
    for name in ("dp0__0-4.tar.stale", "dp0__32-40.tar.tmp", "notes.txt"):
        (cache / name).touch()
    found = facts(cache, capsys)
    assert list(found["damaged"]) == ["dp0__8-16.tar"]
    assert "bytes" in found["damaged"]["dp0__8-16.tar"]
    assert found["foreign_shards"] == {"dp1__24-32.tar": "its seed is 2, here it is 1"}
    assert found["overlapping"] == [
        ["dp0__16-24.tar", "dp0__20-28.tar"],
        ["dp0__20-28.tar", "dp0__24-32.tar"],
    ]
    assert found["by_dp_rank"] == {"0": [[0, 8], [16, 32]], "1": [[0, 16]]}
    assert (found["complete"], found["samples"]) == ([[0, 8]], 8)
    assert found["stale"] == ["dp0__0-4.tar.stale"]
    assert found["unfinished"] == ["dp0__32-40.tar.tmp"]
    assert found["foreign_files"] == ["notes.txt"]
    text = info(cache, capsys)
    for part in (
        f"  dp0 |{'#' * 16}{'!' * 16}{'#' * 32}|",
        f"  dp1 |{'#' * 32}{'.' * 32}|",
        "  samples 8 to 15 of dp0\n  samples 16 to 31 of dp1",
        "1 damaged:\n  dp0__8-16.tar: ",
        "1 of another dump:\n  dp1__24-32.tar: its seed is 2, here it is 1",
        "  dp0__16-24.tar and dp0__20-28.tar",
        "1 set aside (.stale): dp0__0-4.tar.stale",
        "1 unfinished (.tmp): dp0__32-40.tar.tmp",
        "1 foreign: notes.txt",
    ):
        assert part in text


def test_many_troubles_are_counted(cache, capsys):
    for path in cache.iterdir():
        path.write_bytes(b"no tar")
    write_shard(cache, 32, 40, dp=2, mbs=2)
    write_shard(cache, 40, 48, dp=2, mbs=2)
    for path in cache.glob("dp?__4*.tar"):
        path.write_bytes(b"no tar")
    text = info(cache, capsys)
    assert "10 damaged:" in text
    assert "  and 2 more (--json has all)" in text
    assert len(facts(cache, capsys)["damaged"]) == 10


def test_cache_without_a_readable_shard(cache, capsys):
    for path in cache.iterdir():
        path.write_bytes(b"")
    found = facts(cache, capsys)
    assert (found["hash"], found["tokens"], found["bytes_per_token"]) == (None, None, None)
    assert len(found["damaged"]) == 8
    assert "none that can be read" in info(cache, capsys)


@pytest.mark.parametrize(("make", "reason"), [(True, "no shard in"), (False, "cannot list")])
def test_no_cache(tmp_path, capsys, make, reason):
    if make:
        (tmp_path / "empty").mkdir()
    assert logits_cache.main(["info", str(tmp_path / "empty")]) == 1
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("name", ["v1_a", "v1_b", "v2_a", "v2_b", "v2_c"])
def test_caches_of_the_original_writer(capsys, name):
    if not (SHARED / name).is_dir():
        pytest.skip(f"no {SHARED / name}")
    found = facts(SHARED / name, capsys)
    truth = np.load(SHARED / name / "expected.npz")
    samples, length, k = truth["values"].shape
    assert (found["samples"], found["payload"]["sequence_length"]) == (samples, length)
    assert found["complete"] == [[0, samples]]
    assert found["saver"]["k"] == k
    assert not found["payload"]["has_tails"]
    assert found["damaged"] == found["foreign_shards"] == {}
    assert found["foreign_files"] == ["expected.npz"]


def test_cache_in_an_object_store(cache, server: S3Server, capsys):
    for path in cache.iterdir():
        object_store.upload(server.url(f"info/{path.name}"), path.read_bytes())
    found = facts(server.url("info"), capsys)
    assert (found["samples"], found["shards"], found["damaged"]) == (32, 8, {})
    local = facts(cache, capsys)
    assert {**found, "directory": ""} == {**local, "directory": ""}


def test_example_of_the_help(cache, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        logits_cache.main(["info", "--help"])
    assert ended.value.code == 0
    example = capsys.readouterr().out.rstrip().splitlines()[-1]
    words = shlex.split(example)
    assert words[:3] == ["python", "-m", "tools.logits_cache"]
    shutil.copytree(cache, tmp_path / "dump" / "logits")
    monkeypatch.chdir(tmp_path)
    assert logits_cache.main(words[3:]) == 0
    assert "32 samples are complete" in capsys.readouterr().out
