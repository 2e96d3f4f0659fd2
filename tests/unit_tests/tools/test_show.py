# SPDX-License-Identifier: Apache-2.0
"""``show`` finds a sample in any cache, and its numbers are those of its entries."""

import json
import math
import shlex
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.training.distillation.shard_writer import write_batched_tar
from tests.unit_tests.training.distillation.cache_files import (
    SEQ,
    K,
    encode_payload,
    in_format,
    rows_of,
    write_shard,
)
from tools import logits_cache

SHARED = Path(__file__).parents[4] / "shared" / "reference_caches"

pytestmark = pytest.mark.usefixtures("cache_format")


@pytest.fixture(params=(2, 3), ids=("v2", "v3"))
def cache_format(request):
    with in_format(request.param):
        yield request.param


@pytest.fixture
def cache(tmp_path) -> Path:
    """Samples 0 to 15 and 24 to 31, dealt to two ranks by two."""
    for start, end in ((0, 8), (8, 16), (24, 32)):
        write_shard(tmp_path / "cache", start, end, dp=2, mbs=2)
    return tmp_path / "cache"


def show(capsys: pytest.CaptureFixture[str], cache: Path | str, *flags: str) -> Any:
    assert logits_cache.main(["show", str(cache), *flags, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def failure(capsys: pytest.CaptureFixture[str], cache: Path | str, *flags: str) -> str:
    assert logits_cache.main(["show", str(cache), *flags]) == 1
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("sample", "shard", "member", "row"),
    [
        (0, "dp0__0-8.tar", "0-4.pt.zst", 0),
        (3, "dp1__0-8.tar", "0-4.pt.zst", 1),
        (13, "dp0__8-16.tar", "12-16.pt.zst", 1),
        (30, "dp1__24-32.tar", "28-32.pt.zst", 0),
    ],
)
def test_a_sample_is_found_where_it_was_dealt(cache, capsys, sample, shard, member, row):
    """Values of these caches tell the sample, see ``cache_files``."""
    found = show(capsys, cache, "--sample", str(sample), "--positions", ":")
    assert (Path(found["shard"]).name, found["member"], found["row"]) == (shard, member, row)
    assert [token["position"] for token in found["tokens"]] == list(range(SEQ))
    for token in found["tokens"]:
        position = token["position"]
        first, second = token["entries"]
        assert (first["id"], second["id"]) == (position, position + 1)
        assert first["logprob"] == -sample - position / 8
        assert second["logprob"] == first["logprob"] - 1 / 16
        tail = np.float32(first["logprob"] - 0.5)
        assert token["tail_mass"] == pytest.approx(math.exp(tail))


def test_masses_and_entropy_are_those_of_the_entries(cache, capsys):
    token = show(capsys, cache, "--sample", "1", "--positions", "2")["tokens"][0]
    # Sample 1, position 2: log-probabilities -1.25 and -1.3125.
    first, second = math.exp(-1.25), math.exp(-1.3125)
    assert [entry["probability"] for entry in token["entries"]] == pytest.approx([first, second])
    assert token["kept_mass"] == pytest.approx(0.5556511, abs=1e-6)
    assert token["entropy"] == pytest.approx(1.25 * first + 1.3125 * second)
    assert token["kept"] == K
    assert token["tail_is_stored"]


@pytest.mark.parametrize("name", ["v1_a", "v1_b", "v2_a", "v2_b", "v2_c"])
def test_caches_of_the_original_writer(capsys, name):
    source = SHARED / name
    if not source.is_dir():
        pytest.skip("the reference caches are not here")
    truth = np.load(source / "expected.npz")
    for sample in (0, 3, len(truth["values"]) - 1):
        found = show(capsys, source, "--sample", str(sample), "--positions", ":")
        for token in found["tokens"]:
            values = truth["values"][sample, token["position"]].astype(np.float64)
            kept = values > -1000
            logprobs = [entry["logprob"] for entry in token["entries"]]
            assert logprobs == values[kept].tolist()
            ids = truth["indices"][sample, token["position"]][kept].tolist()
            assert [entry["id"] for entry in token["entries"]] == ids
            rest = max(0.0, 1 - np.exp(values[kept]).sum())
            assert token["tail_mass"] == pytest.approx(rest, abs=1e-9)
            assert not token["tail_is_stored"]


def test_the_table_says_what_there_is(cache, capsys):
    flags = ["--sample", "3", "--positions", "1:3", "--top", "1"]
    assert logits_cache.main(["show", str(cache), *flags]) == 0
    out = capsys.readouterr().out
    assert f"row 1 of member 0-4.pt.zst of {cache}/dp1__0-8.tar" in out
    assert "position 1: 2 kept, mass 0.085212" in out
    assert out.count("1 more") == 2
    assert max(map(len, out.splitlines()[1:])) <= 100


def test_the_later_of_two_overlapping_shards_is_shown(cache, capsys):
    write_shard(cache, 4, 8, dp=2, mbs=2, teacher=1)
    found = show(capsys, cache, "--sample", "5", "--positions", "0")
    assert Path(found["shard"]).name == "dp0__4-8.tar"
    assert found["tokens"][0]["entries"][0]["logprob"] == -6.0


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (
            20,
            "No shard of {cache} covers sample 20. By their names, shards cover samples 0 to 15, ",
        ),
        (99, "covers sample 99. By their names, shards cover samples 0 to 15, 24 to 31."),
    ],
)
def test_a_missing_sample(cache, capsys, sample, message):
    assert message.format(cache=cache) in failure(capsys, cache, "--sample", str(sample))


def test_a_missing_rank(cache, capsys):
    (cache / "dp1__0-8.tar").unlink()
    message = failure(capsys, cache, "--sample", "2")
    assert "Sample 2 is DP rank 1's" in message
    assert "shards cover samples 8 to 15, 24 to 31." in message
    assert show(capsys, cache, "--sample", "4", "--positions", "0")["sample"] == 4


def test_a_member_that_was_passed_over(tmp_path, capsys):
    write_shard(tmp_path, 0, 4)
    with tarfile.open(tmp_path / "dp0__0-4.tar") as tar:
        meta = tar.extractfile("_meta.json").read()
    members = [
        (f"{first}-{first + 4}.pt.zst", encode_payload(rows_of(list(range(first, first + 4)))))
        for first in (0, 8)
    ]
    write_batched_tar(str(tmp_path / "dp0__0-12.tar"), meta, members)
    message = failure(capsys, tmp_path, "--sample", "5")
    assert "has no member with sample 5: the dump passed over it." in message
    assert "Its members have samples 0 to 3, 8 to 11." in message


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-600]), "is damaged: it has"),
        (lambda path: path.write_bytes(b""), "is truncated at byte 0"),
        (lambda path: path.rename(path.with_name("dp0__0-4.tar")), "was written as dp0__0-8.tar"),
        (lambda path: _flip(path), "is damaged"),
    ],
    ids=["cut", "empty", "renamed", "flipped"],
)
def test_a_damaged_shard(cache, capsys, damage, message):
    damage(cache / "dp0__0-8.tar")
    assert message in failure(capsys, cache, "--sample", "0")


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    place = content.index(b"0-4.pt.zst") + 512 + 40
    content[place] ^= 1
    path.write_bytes(bytes(content))


def test_directories_without_a_shard(tmp_path, capsys):
    assert "There is no shard in" in failure(capsys, tmp_path, "--sample", "0")
    assert "cannot list the directory" in failure(capsys, tmp_path / "no", "--sample", "0")


def test_positions_that_there_are_not(cache, capsys):
    message = failure(capsys, cache, "--sample", "0", "--positions", "9:12")
    assert "has positions 0 to 3" in message


def test_texts_of_a_tokenizer(cache, tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = {f"word{number}": number for number in range(8)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="word0"))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=model)
    fast.save_pretrained(tmp_path / "tokenizer")
    flags = ["--sample", "0", "--positions", "3", "--tokenizer", str(tmp_path / "tokenizer")]
    entries = show(capsys, cache, *flags)["tokens"][0]["entries"]
    assert [entry["text"] for entry in entries] == ["word3", "word4"]
    message = failure(capsys, cache, *flags[:-1], str(tmp_path / "none"))
    assert "--tokenizer" in message
    assert "cannot be loaded" in message


def test_a_tokenizer_without_its_package(cache, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    message = failure(capsys, cache, "--sample", "0", "--tokenizer", "x")
    assert "pip install transformers" in message


def test_a_cache_on_s3(s3_server, cache, capsys, monkeypatch):
    pytest.importorskip("multistorageclient")
    monkeypatch.setenv("MSC_CONFIG", str(s3_server.config))
    folder = f"show-{cache.parent.name}"
    shutil.copytree(cache, s3_server.objects / folder)
    found = show(capsys, s3_server.url(folder), "--sample", "13", "--positions", "0")
    assert found["shard"].endswith("/dp0__8-16.tar")
    assert found["tokens"][0]["entries"][0]["logprob"] == -13.0


def test_the_example_works(cache, capsys, monkeypatch):
    with pytest.raises(SystemExit):
        logits_cache.main(["show", "--help"])
    example = shlex.split(capsys.readouterr().out.rpartition("example:\n")[2])
    assert example[:4] == ["python", "-m", "tools.logits_cache", "show"]
    (cache.parent / "dump").mkdir()
    write_shard(cache.parent / "dump" / "logits", 0, 32)
    monkeypatch.chdir(cache.parent)
    assert logits_cache.main(example[3:]) == 0
    assert "sample 16" in capsys.readouterr().out
