# SPDX-License-Identifier: Apache-2.0
"""``report`` on caches of every writer, whole, damaged and on S3, and what it looks at of them."""

import collections
import dataclasses
import html.parser
import itertools
import json
import re
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.training.distillation.manifest import RunManifest
from megatron.training.distillation.payload import LOGPROB_SENTINEL
from tests.unit_tests.tools.report_caches import teacher_rows, write_teacher_shard
from tests.unit_tests.training.distillation.cache_files import IDENTIFIERS, write_shard
from tools import logits_cache
from tools.cache.cache_files import list_cache
from tools.cache.conversion import Encoding
from tools.cache.inventory import ShardSummary, take_inventory
from tools.cache.report import reencoding
from tools.cache.report import survey as survey_module
from tools.cache.report.coverage_picture import State, draw_coverage, map_coverage
from tools.cache.report.page import page as make_page
from tools.cache.report.reencoding import measure_sizes
from tools.cache.report.sampling import spread, spread_payloads, spread_rows
from tools.cache.report.sequences import load_tokenizer
from tools.cache.report.survey import survey

SHARED = Path(__file__).parents[4] / "shared" / "reference_caches"
TOP_P = ("v1_b", "v2_b")
"""Those that were recorded with top-P."""


def report(cache: Path | str, out: Path | str, *flags: str) -> int:
    return logits_cache.main(["report", str(cache), "--out", str(out), "--jobs", "1", *flags])


def numbers_of(page: Path) -> dict[str, Any]:
    """Return the JSON in a page."""
    match = re.search(r'<script type="application/json" id="numbers">(.*?)</script>',
                      page.read_text(), re.DOTALL)  # fmt: skip
    assert match is not None
    found: dict[str, Any] = json.loads(match[1])
    return found


@pytest.fixture
def cache(tmp_path) -> Path:
    """Three shards of two DP ranks each, in both formats."""
    for start, version in ((0, 3), (8, 3), (16, 2)):
        write_teacher_shard(tmp_path / "cache", start, start + 8, dp=2, version=version)
    return tmp_path / "cache"


# ---- what is looked at -------------------------------------------------------------------------


@pytest.mark.parametrize("total", [0, 1, 2, 3, 10, 97, 1024, 10_000])
def test_each_is_looked_at_once_and_the_first_are_spread(total):
    order = list(spread(total))
    assert sorted(order) == list(range(total))
    for count in (10, 100):
        if total > 4 * count:
            gaps = np.diff([0, *sorted(order[:count]), total])
            assert gaps.max() <= 3 * total / count


@pytest.mark.parametrize("ranks", [1, 2, 8, 48, 64])
def test_no_dp_rank_is_favoured(tmp_path, ranks):
    for rank in range(ranks):
        for start in range(0, 64 * 4 * ranks, 4 * ranks):
            (tmp_path / f"dp{rank}__{start}-{start + 4 * ranks}.tar").touch()
    inventory = take_inventory(list_cache(str(tmp_path)))
    shards = [shard_of_four(shard) for shard in inventory.shards]
    chosen = list(itertools.islice(spread_payloads(shards), 4 * ranks))
    counts = collections.Counter(payload.shard.name.dp_rank for payload in chosen)
    assert max(counts.values()) <= 8
    assert len(counts) >= ranks * 0.75
    members = collections.Counter(payload.member for payload in chosen)
    assert set(members) <= {0, 1, 2, 3}
    assert max(members.values()) <= 2.5 * ranks + 2


def shard_of_four(shard: ShardSummary) -> ShardSummary:
    return dataclasses.replace(shard, members=4, problem=None)


def test_rows_are_spread():
    assert spread_rows(3, 8) == [0, 1, 2]
    assert spread_rows(8, 8) == list(range(8))
    assert spread_rows(100, 4) == [12, 37, 62, 87]


def test_of_large_members_few_rows_are_read(tmp_path, monkeypatch):
    write_teacher_shard(tmp_path / "v3", 0, 40, gbs=40)
    files = list_cache(str(tmp_path / "v3"))
    found = survey(take_inventory(files), payloads=1, seconds=1, jobs=1)
    assert (found.rows, found.rows_seen) == (40, 8)
    assert found.statistics.tokens == 8 * 16
    # Not only fewer rows are counted: the others are not even read.
    path = Path(files.shards[0].path)
    content = bytearray(path.read_bytes())
    content[-len(content) // 2 - 500 : -len(content) // 2] = bytes(500)
    path.write_bytes(content)
    rows = [survey_module.spread_rows(40, wanted) for wanted in (8, 40)]
    with files.shards[0].open(whole=False) as shard:
        survey_module.read_rows(shard, shard.members[0], [rows[0][0], rows[0][-1]])
        with pytest.raises(survey_module.READ_ERRORS):
            survey_module.read_rows(shard, shard.members[0], rows[1])


def test_time_is_kept(cache, monkeypatch):
    inventory = take_inventory(list_cache(str(cache)))
    now = [1000.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(survey_module.time, "time", clock)
    found = survey(inventory, payloads=None, seconds=6, jobs=1)
    assert found.stopped
    assert 1 <= len(found.points) < 12
    now[0] = 1000.0
    assert len(survey(inventory, payloads=None, seconds=1e6, jobs=1).points) == 12
    # However little time there is, something is looked at.
    assert len(survey(inventory, payloads=None, seconds=0, jobs=1).points) == 1


def test_the_first_are_the_same_however_many(cache):
    inventory = take_inventory(list_cache(str(cache)))
    few, more = (
        {point.payload for point in survey(inventory, payloads=n, seconds=1, jobs=1).points}
        for n in (4, 9)
    )
    assert len(few) == 4
    assert few < more


@pytest.mark.slow
def test_processes_find_the_same(cache, monkeypatch):
    inventory = take_inventory(list_cache(str(cache)))
    alone = survey(inventory, payloads=12, seconds=1, jobs=1)
    monkeypatch.setattr(survey_module, "_SECONDS_ALONE", 0.0)
    together = survey(inventory, payloads=12, seconds=1, jobs=2)
    assert together.statistics.tokens == alone.statistics.tokens == 12 * 2 * 16
    assert together.statistics.kept == pytest.approx(alone.statistics.kept, rel=1e-12)
    assert [point.payload for point in together.points] == [p.payload for p in alone.points]


# ---- numbers -----------------------------------------------------------------------------------


def test_numbers_are_those_of_all_rows(tmp_path):
    written = [
        rows
        for start, version in ((0, 2), (8, 3))
        for rows in write_teacher_shard(
            tmp_path / "c", start, start + 8, dp=2, version=version, p=0.9
        )
    ]
    assert report(tmp_path / "c", tmp_path / "page.html") == 0
    numbers = numbers_of(tmp_path / "page.html")
    values = torch.cat([rows.values.double().flatten(0, 1) for rows in written])
    p = torch.where(values == LOGPROB_SENTINEL, 0.0, values.exp())
    tails = torch.cat([rows.tail_logprob.double().exp().flatten() for rows in written])
    assert numbers["tokens_seen"] == len(p) == 16 * 16
    assert numbers["samples"] == 16
    assert numbers["sequence_length"] == 16
    assert numbers["kept_mass"] == pytest.approx(p.sum(1).mean().item(), rel=1e-9)
    assert numbers["tail_mass"] == pytest.approx(tails.mean().item(), rel=1e-6)
    assert numbers["entries"] == pytest.approx((p > 0).sum(1).double().mean().item())
    size = sum(path.stat().st_size for path in (tmp_path / "c").iterdir())
    assert numbers["bytes"] == size
    assert numbers["bytes_per_token"] == pytest.approx(size / 256)
    for at in numbers["by_k"]:
        kept = p[:, : at["k"]].sum(1)
        assert at["kept_mass"] == pytest.approx(kept.mean().item(), rel=1e-9)
        exact = np.quantile(kept.numpy(), 0.5, method="inverted_cdf")
        assert at["kept_mass_p50"] == pytest.approx(exact, abs=4e-3)
    assert [at["k"] for at in numbers["by_k"]] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12]
    for at in numbers["by_p"]:
        kept = (p.cumsum(1) - p < at["p"]) & (p > 0)
        assert at["entries"] == pytest.approx(kept.sum(1).double().mean().item())
        assert at["kept_mass"] == pytest.approx((p * kept).sum(1).mean().item(), rel=1e-9)


@pytest.mark.parametrize("version", [2, 3])
def test_estimated_bytes_are_those_of_rows_encoded_again(version):
    """A size of fewer entries is what the codec makes of rows that have no more."""
    rows, fewer = teacher_rows(1, 8, k=32), teacher_rows(1, 8, k=8)
    target = Encoding(version)
    whole, small = (measure_sizes(each, target, 1 << 17) for each in (rows, fewer))
    assert whole.tokens == 8 * 16
    assert whole.by_k[8] == pytest.approx(small.whole, rel=0.02)  # tails differ
    sizes = [whole.by_k[k] for k in sorted(whole.by_k)]
    assert sizes == sorted(sizes)
    assert sizes[-1] < whole.whole
    assert sorted(whole.by_k) == [1, 2, 3, 4, 6, 8, 12, 16, 24]
    for p in (0.5, 0.9):
        nucleus = measure_sizes(teacher_rows(1, 8, k=32, p=p), target, 1 << 17)
        assert whole.by_p[p] == pytest.approx(nucleus.whole, rel=0.02)


@pytest.mark.parametrize(
    ("samples", "positions", "tokens"), [(8, 16, 128), (9, 16, 128), (8, 100, 100), (2, 200, 128)]
)
def test_of_many_entries_some_are_encoded_again(monkeypatch, samples, positions, tokens):
    """Whole rows if possible."""
    monkeypatch.setattr(reencoding, "_MOST_ENTRIES", 128 * 12)
    rows = teacher_rows(1, samples, positions=positions)
    assert measure_sizes(rows, Encoding(2), 1 << 17).tokens == tokens


@pytest.mark.parametrize("name", ["v1_a", "v1_b", "v2_a", "v2_b", "v2_c"])
def test_caches_of_the_original_writer(tmp_path, name, monkeypatch):
    if not (SHARED / name).is_dir():
        pytest.skip(f"no {SHARED / name}")
    monkeypatch.setattr(survey_module, "_ROWS", 1000)
    assert report(SHARED / name, tmp_path / "page.html") == 0
    page, numbers = (tmp_path / "page.html").read_text(), numbers_of(tmp_path / "page.html")
    truth = np.load(SHARED / name / "expected.npz")
    values = truth["values"].astype(np.float64)
    p = np.where(values == LOGPROB_SENTINEL, 0.0, np.exp(values)).reshape(-1, values.shape[-1])
    assert numbers["tokens_seen"] == len(p)
    assert numbers["kept_mass"] == pytest.approx(p.sum(1).mean(), rel=1e-6)
    assert numbers["tail_mass"] == pytest.approx(np.clip(1 - p.sum(1), 0, 1).mean(), abs=1e-6)
    assert numbers["entries"] == pytest.approx((p > 0).sum(1).mean())
    assert "This cache has no tails." in page
    assert max(at["p"] for at in numbers["by_p"]) == (0.9 if name in TOP_P else 0.999)
    assert ("recorded with P = 0.9: no larger P is shown" in page) == (name in TOP_P)


# ---- coverage ----------------------------------------------------------------------------------


def states_of(cache: Path) -> dict[int, str]:
    """Return the states of each strip along the samples, a letter for each run of cells."""
    found = map_coverage(take_inventory(list_cache(str(cache))))
    letters = dict(zip(State, "copmfd", strict=True))
    return {
        strip[0]: "".join(letters[State(s)] for s, _ in itertools.groupby(row.tolist()))
        for strip, row in zip(found.strips, found.states, strict=True)
    }


def damage(cache: Path) -> Path:
    """Make a cache of four DP ranks over 96 samples with all that can be wrong with its shards."""
    for start in range(0, 96, 8):
        write_shard(cache, start, start + 8, dp=4, format_version=3)
    (cache / "dp0__8-16.tar").unlink()
    cut = cache / "dp1__32-40.tar"
    cut.write_bytes(cut.read_bytes()[:1000])
    other = cache.with_name("other")
    write_shard(other, 60, 68, dp=4, format_version=3)
    shutil.copy(other / "dp2__60-68.tar", cache)
    write_shard(other, 88, 96, dp=4, format_version=3, identifiers={**IDENTIFIERS, "seed": 2})
    shutil.copy(other / "dp3__88-96.tar", cache)
    return cache


def test_what_is_wrong_is_seen_where_it_is(tmp_path):
    cache = damage(tmp_path / "cache")
    assert states_of(cache) == {0: "cmc", 1: "cdc", 2: "coc", 3: "cf"}
    inventory = take_inventory(list_cache(str(cache)))
    found = map_coverage(inventory)
    assert found.samples.tolist() == list(range(97))
    assert np.flatnonzero(found.states[0]).tolist() == list(range(8, 16))
    assert np.flatnonzero(found.states[1]).tolist() == list(range(32, 40))
    assert np.flatnonzero(found.states[2]).tolist() == list(range(60, 68))
    picture = draw_coverage(found)
    assert "DP rank 1, samples 32 to 39: damaged shard" in picture
    assert "DP rank 2, samples 60 to 67: in two shards of one rank" in picture


def test_one_missing_sample_among_many_is_seen(tmp_path):
    """Ranks share strips, and samples share cells: a hole in one of them shows."""
    cache = tmp_path / "cache"
    for start in range(0, 160, 80):
        write_shard(cache, start, start + 80, dp=80, gbs=80, format_version=3)
    (cache / "dp79__0-80.tar").unlink()
    found = map_coverage(take_inventory(list_cache(str(cache))))
    assert found.strips[-1] == (78, 80)
    assert len(found.strips) == 40
    assert (found.states[-1, :80] == State.MISSING).all()
    assert not found.states[:-1].any()
    write_shard(tmp_path / "long", 0, 4000, gbs=4, format_version=2)
    write_shard(tmp_path / "long", 4004, 8000, gbs=4, format_version=2)
    found = map_coverage(take_inventory(list_cache(str(tmp_path / "long"))))
    assert found.states.shape == (1, 400)
    assert np.flatnonzero(found.states).tolist() == [200]
    assert found.states[0, 200] == State.PARTLY_MISSING


def test_the_picture_stays_small(tmp_path):
    """Every other shard of every rank is missing: cells are merged, and still show it."""
    for start in (*range(0, 4 * 400, 8), 4 * 399):
        for rank in range(64):
            (tmp_path / f"dp{rank}__{start}-{start + 4}.tar").touch()
    found = map_coverage(take_inventory(list_cache(str(tmp_path))))
    assert found.states.shape == (64, 200)
    assert found.samples.tolist() == list(range(0, 1601, 8))
    assert (found.states == State.DAMAGED).all()
    assert len(draw_coverage(found)) < 1_000_000


def test_a_name_alone_makes_no_large_picture(tmp_path):
    (tmp_path / "dp99999999__0-99999999999.tar").touch()
    began = time.monotonic()
    found = map_coverage(take_inventory(list_cache(str(tmp_path))))
    assert time.monotonic() - began < 5
    assert len(found.strips) <= 64


# ---- the verb ----------------------------------------------------------------------------------


def test_damage_is_named_and_no_error(tmp_path, capsys):
    cache = damage(tmp_path / "cache")
    member = cache / "dp2__16-24.tar"
    content = bytearray(member.read_bytes())
    content[len(content) - 12_000] ^= 0xFF
    at = content.rfind(b".pt.zst")
    content[(at // 512) * 512 + 512 + 40] ^= 0xFF
    member.write_bytes(content)
    assert report(cache, tmp_path / "page.html") == 0
    said = capsys.readouterr()
    assert "1 shards cannot be read; the page names them" in said.err
    assert "of these payloads cannot be read; the page names them" in said.err
    page, numbers = (tmp_path / "page.html").read_text(), numbers_of(tmp_path / "page.html")
    assert numbers["damaged"] == ["dp1__32-40.tar"]
    assert numbers["foreign"] == ["dp3__88-96.tar"]
    assert ["dp2__16-24.tar", 1] in numbers["payloads_damaged"]
    assert numbers["gaps"] == [[8, 16], [32, 40], [88, 96]]
    for name in ("dp1__32-40.tar", "dp3__88-96.tar", "dp2__60-68.tar", "dp2__16-24.tar"):
        assert name in page
    assert "cannot be read; they are named below" in page


def test_a_cache_without_anything_sound_has_a_page(tmp_path, capsys):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "dp0__0-8.tar").write_bytes(b"no tar at all")
    assert report(tmp_path / "c", tmp_path / "page.html") == 0
    page = (tmp_path / "page.html").read_text()
    assert "No payload was looked at" in page
    assert 'class="cell damaged"' in page
    assert numbers_of(tmp_path / "page.html")["payloads"] == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "cannot list the directory"),
        (lambda path: path.mkdir(), "There is no shard in"),
    ],
    ids=["missing", "empty"],
)
def test_no_cache_is_an_error(tmp_path, capsys, make, message):
    make(tmp_path / "c")
    assert report(tmp_path / "c", tmp_path / "page.html") == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_only_pages_are_overwritten(cache, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert report(cache, out) == 0
    first = out.read_text()
    assert report(cache, out) == 0
    assert drop_times(out.read_text()) == drop_times(first)
    shard = cache / "dp0__0-8.tar"
    before = shard.read_bytes()
    assert report(cache, shard) == 1
    assert "is there already and is no HTML page" in capsys.readouterr().err
    assert shard.read_bytes() == before
    assert report(cache, tmp_path / "nowhere" / "page.html") == 1
    assert "cannot write the file" in capsys.readouterr().err


def drop_times(page: str) -> str:
    return re.sub(r"looked at in \d+ s", "", page)


def test_the_same_page_can_be_made_again(cache, tmp_path, capsys, monkeypatch):
    """By the command on it, though time decided how much was looked at."""
    out = tmp_path / "page.html"
    assert report(cache, out, "--payloads", "5") == 0
    assert "of 5 of 12 payloads and 6 shards" in capsys.readouterr().out
    page = out.read_text()
    assert "5 of 12 payloads, evenly spread" in page
    command = re.search(r"<code>python -m tools.logits_cache (.*?)</code>", page)
    assert command is not None
    assert logits_cache.main([*shlex.split(command[1]), "--jobs", "1"]) == 0
    assert drop_times(out.read_text()) == drop_times(page)


def test_help_example_works(cache, tmp_path, capsys, monkeypatch):
    with pytest.raises(SystemExit, match="0"):
        logits_cache.main(["report", "--help"])
    example = capsys.readouterr().out.rpartition("example:")[2].split()
    assert example[:4] == ["python", "-m", "tools.logits_cache", "report"]
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    Path("dump").mkdir()
    cache.rename("dump/logits")
    words = {f"w{number}": number for number in range(512)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain).save_pretrained("corpus/tokenizer")
    assert logits_cache.main(example[3:]) == 0
    page = Path("report.html").read_text()
    assert re.search(r"<span [^>]*>w\d+</span>", page)


# ---- tokens ------------------------------------------------------------------------------------


def test_sequences_show_the_first_entries(tmp_path):
    rows = write_teacher_shard(tmp_path / "c", 0, 4, dp=2)[0]
    report(tmp_path / "c", tmp_path / "page.html", "--payloads", "2")
    page = (tmp_path / "page.html").read_text()
    assert "<h3>Sample 0</h3>" in page
    assert "<h3>Sample 1</h3>" in page  # row 0 of DP rank 1
    chips = re.findall(r'<span style="--p:([\d.]+)" title="[^"]*">(\d+)</span>', page)
    expected = list(zip(rows.values[:, 0, 0].double().exp().tolist(),
                        rows.indices[:, 0, 0].tolist(), strict=True))  # fmt: skip
    assert [(f"{p:.3f}", str(token)) for p, token in expected] == chips[:16]


def test_missing_transformers_is_said(tmp_path, cache, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert report(cache, tmp_path / "page.html", "--tokenizer", str(tmp_path)) == 1
    assert "needs the package transformers, which is not installed" in capsys.readouterr().err


def test_no_tokenizer_there_is_said(tmp_path, cache, capsys):
    assert report(cache, tmp_path / "page.html", "--tokenizer", str(tmp_path / "none")) == 1
    assert "There is no directory" in capsys.readouterr().err
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="holds no tokenizer that transformers can load"):
        load_tokenizer(str(cache))


# ---- the page ----------------------------------------------------------------------------------


class Checker(html.parser.HTMLParser):
    """Collects what a page refers to and whether its tags are closed."""

    VOID = frozenset({"meta", "link"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.tables = self.named_tables = 0

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        self.references += [v for k, v in attrs if k in ("src", "href", "xlink:href")]
        self.tables += tag == "table"
        self.named_tables += tag == "caption" or ("class", "facts") in attrs

    def handle_startendtag(self, tag, attrs):
        self.references += [v for k, v in attrs if k in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_needs_nothing_else(cache, tmp_path):
    damage(tmp_path / "damaged")
    for source in (cache, tmp_path / "damaged"):
        report(source, tmp_path / "page.html")
        page = (tmp_path / "page.html").read_text()
        checker = Checker()
        checker.feed(page)
        assert not checker.open
        assert checker.references == ["data:,"]
        assert "url(" not in page
        assert "@import" not in page
        assert checker.tables == checker.named_tables > 5
        assert len(page) < 1_000_000


def test_numbers_cannot_end_their_script():
    made = make_page("a & b", "lead", [], json.dumps({"name": "</script><img>"}))
    assert made.count("</script>") == 1
    assert "<img>" not in made
    checker = Checker()
    checker.feed(made)
    assert not checker.open


def test_names_cannot_break_the_page(tmp_path):
    bad = "</script><script>alert(1)</script>&<b>"
    write_shard(
        tmp_path / "c",
        0,
        8,
        identifiers={
            "seed": 1,
            "train_samples": 8,
            "blend": {"kind": "blend", "blend": [[1, bad]]},
        },
        manifest=RunManifest(teacher={"checkpoint": bad}, sequence_length=4),
        format_version=3,
    )
    report(tmp_path / "c", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<script>alert" not in page
    assert "alert(1)" in page
    checker = Checker()
    checker.feed(page)
    assert not checker.open


# ---- object stores -----------------------------------------------------------------------------


def test_a_cache_on_s3(s3_server, cache, tmp_path, monkeypatch):
    pytest.importorskip("multistorageclient")
    monkeypatch.setenv("MSC_CONFIG", str(s3_server.config))
    shutil.copytree(cache, s3_server.objects / "report-cache")
    try:
        url = s3_server.url("report-cache")
        assert report(url, tmp_path / "s3.html") == 0
        assert report(cache, tmp_path / "local.html") == 0
        assert report(cache, f"{url}/page.html") == 0
        assert (s3_server.objects / "report-cache" / "page.html").is_file()
        remote, local = (numbers_of(tmp_path / f"{name}.html") for name in ("s3", "local"))
        assert remote == local
    finally:
        shutil.rmtree(s3_server.objects / "report-cache")


def test_a_converted_cache_has_the_same_numbers(tmp_path):
    write_teacher_shard(tmp_path / "v3", 0, 8, dp=2, version=3)
    command = ["convert", str(tmp_path / "v3"), str(tmp_path / "v2"), "--format", "2"]
    assert logits_cache.main([*command, "--jobs", "1"]) == 0
    pages = []
    for name in ("v3", "v2"):
        report(tmp_path / name, tmp_path / "page.html")
        pages.append(numbers_of(tmp_path / "page.html"))
    for key in ("kept_mass", "tail_mass", "entropy_with_tail", "top1", "tokens_seen", "gaps"):
        assert pages[0][key] == pages[1][key]
