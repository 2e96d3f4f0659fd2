# SPDX-License-Identifier: Apache-2.0
"""``repair`` sets aside what is broken, loses nothing that could be loaded, and can be killed."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.training.distillation.shard_reader import TeacherRowReader
from megatron.training.distillation.targets import IterationTargets, LoadLayout
from tests.file_faults import FileFaults, recorded_operations
from tests.unit_tests.tools.sane_caches import (
    GBS,
    contents,
    flip,
    members_of,
    unsealed,
    write,
    write_cache,
)
from tools import logits_cache

SHARED = Path(__file__).parents[4] / "shared" / "reference_caches"


@pytest.fixture(params=(2, 3), ids=("v2", "v3"))
def version(request) -> int:
    return int(request.param)


@pytest.fixture
def cache(tmp_path, version) -> Path:
    return write_cache(tmp_path / "cache", version)


def repair(cache: Path | str, *flags: str) -> int:
    return logits_cache.main(["repair", str(cache), "--jobs", "1", *flags])


@pytest.fixture
def missing(capsys) -> Callable[..., Any]:
    """Return what ``verify`` says is missing, and the kinds of what is wrong."""

    def run(cache: Path | str, *flags: str) -> Any:
        capsys.readouterr()
        logits_cache.main(["verify", str(cache), "--json", "--jobs", "1", *flags])
        found = json.loads(capsys.readouterr().out)
        return [one["samples"] for one in found["regenerate"]], found["findings"]

    return run


def loaded(cache: Path | str) -> dict[int, bytes]:
    """Return what a student reads of every iteration that can be read."""
    layout = LoadLayout(dp_rank=0, dp_size=1, mbs=GBS, gbs=GBS)
    found = {}
    for start in range(0, 24, GBS):
        reader = TeacherRowReader(str(cache), layout, expected_identifiers=None)
        item = next(reader.iterations(start))
        if isinstance(item, IterationTargets):
            (rows,) = item.microbatches
            parts = [rows.values.float(), rows.indices.float()]
            found[start] = torch.cat(parts, dim=-1).numpy().tobytes()
    return found


def damage(cache: Path, version: int) -> None:
    """Leave a payload, a whole shard, an overlap, a foreign shard and a .tmp behind."""
    path = cache / "dp0__0-8.tar"
    flip(path, members_of(path)[2].offset_data + 40)
    (cache / "dp1__16-24.tar").write_bytes((cache / "dp1__16-24.tar").read_bytes()[:3000])
    write(cache, version, 0, 16, 24, seed=2)
    write(cache.parent / "other", version, 1, 4, 16).rename(cache / "dp1__4-16.tar")
    (cache / "dp1__16-24.tar.tmp").write_bytes(b"begun")


AFTER = {
    "dp0__0-4.tar",
    "dp0__0-8.tar.stale",
    "dp0__16-24.tar.stale",
    "dp0__8-16.tar",
    "dp1__0-4.tar",
    "dp1__0-8.tar.stale",
    "dp1__16-24.tar.stale",
    "dp1__16-24.tar.tmp.stale",
    "dp1__4-16.tar",
    "dp1__8-16.tar.stale",
}


def test_a_sound_cache_stays_as_it_is(cache):
    before = contents(cache)
    assert repair(cache, "--apply", "--full") == 0
    assert contents(cache) == before


def test_each_move_is_told_and_made_once(cache, version, capsys, missing):
    damage(cache, version)
    before, readable = contents(cache), loaded(cache)
    assert repair(cache, "--full", "--no-writer") == 1
    told = " ".join(capsys.readouterr().out.split())
    assert contents(cache) == before
    for name in AFTER:
        if name.endswith(".stale"):
            assert f"{name.removesuffix('.stale')} -> .stale: " in told
    assert "what it alone holds and is sound stays as dp0__0-4.tar" in told

    assert repair(cache, "--full", "--no-writer", "--apply") == 1  # samples are left
    after = contents(cache)
    assert set(after) == AFTER
    assert all(after[name] == before[name.removesuffix(".stale")] for name in AFTER & set(before))
    assert set(before.values()) <= set(after.values())
    assert loaded(cache) == readable
    ranges, findings = missing(cache, "--full")
    assert (ranges, findings) == ([[4, 8], [16, 24]], [])

    assert repair(cache, "--full", "--no-writer", "--apply") == 1
    assert contents(cache) == after
    for rank in range(2):
        write(cache, version, rank, 4, 8)
        write(cache, version, rank, 16, 24)
    assert repair(cache, "--apply") == 0
    assert missing(cache, "--full") == ([], [])
    assert len(loaded(cache)) == 6


def test_damage_known_from_a_verification_is_looked_at_again(cache, tmp_path, capsys):
    damaged, healed = cache / "dp0__0-8.tar", cache / "dp1__0-8.tar"
    sound = healed.read_bytes()
    for path in (damaged, healed):
        flip(path, members_of(path)[1].offset_data + 40)
    state = tmp_path / "state.jsonl"
    verify = ["verify", str(cache), "--full", "--jobs", "1"]
    assert logits_cache.main([*verify, "--state", str(state)]) == 1
    capsys.readouterr()
    assert logits_cache.main([*verify, "--json", "--state", str(state)]) == 1
    printed = tmp_path / "printed.json"
    printed.write_text(capsys.readouterr().out)
    healed.write_bytes(sound)
    for known in (state, printed):
        assert repair(cache, "--from", str(known)) == 1
        out = capsys.readouterr().out
        assert "dp0__0-8.tar -> .stale" in out
        assert "dp1__0-8.tar -> .stale" not in out
    assert repair(cache, "--from", str(cache / "dp1__8-16.tar")) == 1
    assert "is neither a state of verify" in capsys.readouterr().err


@pytest.mark.parametrize(("version", "only"), [(2, False), (3, True)])
def test_an_interruption_loses_nothing(tmp_path, version, only):
    """Every file operation fails, alone or with all that follow; then it is run again."""
    original = write_cache(tmp_path / "original", version)
    damage(original, version)
    readable = loaded(original)
    assert 0 < len(readable) < 6

    def attempt(number: int | None) -> list[str]:
        cache = tmp_path / f"cache-{number}"
        shutil.copytree(original, cache)
        record = tmp_path / f"record-{number}"
        with FileFaults(str(cache), record, first_failing=number, only=only):
            assert repair(cache, "--full", "--no-writer", "--apply") == 1
        held = set(contents(cache).values())
        assert set(contents(original).values()) <= held, number
        assert loaded(cache).items() >= readable.items(), number
        assert repair(cache, "--full", "--no-writer", "--apply") == 1
        live = {path.name for path in cache.glob("*.tar")}
        assert live == {name for name in AFTER if name.endswith(".tar")}, number
        assert loaded(cache) == readable
        shutil.rmtree(cache)
        return recorded_operations(record)

    operations = attempt(None)
    changes = [
        number
        for number, what in enumerate(operations)
        if what.split()[0] in ("rename", "replace", "fsync", "write", "unlink")
        or what.endswith(".tmp")
    ]
    assert sum(operations[number].startswith("rename") for number in changes) == 6
    for number in changes:
        attempt(number)


def test_copies_that_are_damaged_in_different_places_complete_each_other(cache, missing, version):
    """Of two overlapping shards each has what the other has lost."""
    write(cache.parent / "other", version, 0, 0, 16).rename(cache / "dp0__0-16.tar")
    for name, member in (("dp0__0-16.tar", 1), ("dp0__0-16.tar", 4), ("dp0__0-8.tar", 2)):
        flip(cache / name, members_of(cache / name)[member].offset_data + 40)
    assert repair(cache, "--full", "--apply") == 0
    assert missing(cache, "--full") == ([], [])
    assert len(loaded(cache)) == 6


def test_a_piece_never_takes_the_place_of_another_shard(cache, missing, version):
    """One damaged shard has the name of what is left of another one."""
    write(cache.parent / "other", version, 0, 0, 12).rename(cache / "dp0__0-12.tar")
    for name, member in (("dp0__0-12.tar", 3), ("dp0__0-8.tar", 2)):
        flip(cache / name, members_of(cache / name)[member].offset_data + 40)
    before = contents(cache)
    for _ in range(2):
        repair(cache, "--full", "--apply")
        assert set(before.values()) <= set(contents(cache).values())
    assert missing(cache, "--full") == ([], [])


def test_a_hole_is_not_preferred_to_what_fills_it(cache, missing, version):
    other = cache.parent / "other"
    write(other, version, 1, 0, 16, left_out=[8]).rename(cache / "dp1__0-16.tar")
    assert repair(cache, "--apply") == 0
    assert missing(cache, "--full") == ([], [])
    assert {path.name for path in cache.glob("dp1*.tar")} == {
        "dp1__0-8.tar",
        "dp1__8-16.tar",
        "dp1__16-24.tar",
    }


def test_shards_without_a_seal_are_repaired_too(tmp_path, missing):
    cache = write_cache(tmp_path / "cache", 2)
    for path in cache.iterdir():
        unsealed(path)
    path = cache / "dp0__8-16.tar"
    path.write_bytes(path.read_bytes()[: members_of(path)[2].offset])
    assert repair(cache, "--apply", "--full") == 1
    assert missing(cache, "--full") == ([[8, 16]], [])
    assert len(loaded(cache)) == 4


@pytest.mark.parametrize(
    ("name", "shard", "lost"),
    [("v2_a", "dp1__16-32.tar", [16, 32]), ("v2_c", "dp0__48-72.tar", [48, 72])],
)
def test_a_cache_of_the_original_writer(tmp_path, missing, name, shard, lost):
    if not (SHARED / name).is_dir():
        pytest.skip(f"no {SHARED / name}")
    cache = tmp_path / "cache"
    shutil.copytree(SHARED / name, cache)
    before = contents(cache)
    damaged = before[shard][:1000]
    (cache / shard).write_bytes(damaged)
    assert repair(cache, "--apply") == 1
    after = contents(cache)
    assert after.pop(f"{shard}.stale") == damaged
    assert after == {key: content for key, content in before.items() if key != shard}
    assert missing(cache, "--full") == ([lost], [])
    assert repair(cache, "--apply") == 1
    assert contents(cache).keys() == {*after, f"{shard}.stale"}


def test_shards_of_format_v1_stay(tmp_path, capsys):
    if not (SHARED / "v1_a").is_dir():
        pytest.skip(f"no {SHARED / 'v1_a'}")
    cache = tmp_path / "cache"
    shutil.copytree(SHARED / "v1_a", cache)
    path = cache / "cp0_dp1__3.tar"
    path.write_bytes(path.read_bytes()[:2000])
    before = contents(cache)
    assert repair(cache, "--apply") == 1
    assert "dump the teacher again into a new directory" in capsys.readouterr().out
    assert contents(cache) == before


def test_a_dump_that_is_writing_is_left_alone(cache, capsys):
    (cache / "dp0__0-8.tar").write_bytes(b"")
    unfinished = cache / "dp0__24-32.tar.tmp"
    unfinished.write_bytes(b"")
    before = contents(cache)
    assert repair(cache, "--apply") == 1
    assert "a dump or a conversion is writing" in capsys.readouterr().err.replace("\n", " ")
    assert contents(cache) == before
    for path in cache.iterdir():
        os.utime(path, (0, 0))
    assert repair(cache, "--apply") == 1
    assert capsys.readouterr().err == ""
    assert not unfinished.exists()


def test_renamed_and_swapped_shards_get_their_names_back(cache, missing):
    whole, before = loaded(cache), contents(cache)
    other = cache / "other"
    (cache / "dp0__0-8.tar").rename(other)
    (cache / "dp1__0-8.tar").rename(cache / "dp0__0-8.tar")
    other.rename(cache / "dp1__0-8.tar")
    (cache / "dp0__16-24.tar").rename(cache / "dp0__24-32.tar")
    # Of this one there is a live copy under its own name.
    shutil.copy(cache / "dp1__8-16.tar", cache / "dp1__32-40.tar")
    # With a damaged payload besides.
    path = cache / "dp1__16-24.tar"
    flip(path, members_of(path)[1].offset_data + 40)
    found = contents(cache)
    assert repair(cache) == 1
    assert contents(cache) == found
    assert repair(cache, "--full", "--apply") == 1
    assert missing(cache, "--full") == ([[16, 20]], [])
    (cache / "dp1__20-24.tar").unlink()
    path.with_suffix(".tar.stale").unlink()
    path.write_bytes(before[path.name])
    assert repair(cache, "--apply") == 0
    after = contents(cache)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {
        *("dp0__0-8.tar.stale", "dp1__0-8.tar.stale", "dp0__24-32.tar.stale"),
        "dp1__32-40.tar.stale",
    }
    assert loaded(cache) == whole
    assert missing(cache, "--full") == ([], [])
    # A cut shard of another name is no copy of anything.
    path = (cache / "dp0__16-24.tar").rename(cache / "dp0__8-24.tar")
    path.write_bytes(path.read_bytes()[:-600])
    assert repair(cache, "--apply") == 1
    assert not (cache / "dp0__16-24.tar").exists()


def test_a_shard_that_was_healed_meanwhile_stays(cache, monkeypatch, capsys):
    path = cache / "dp0__0-8.tar"
    sound = path.read_bytes()
    path.write_bytes(b"")
    from tools.cache.verbs import repair as verb

    original = verb.plan_repair

    def heal(*arguments: Any) -> Any:
        path.write_bytes(sound)
        return original(*arguments)

    monkeypatch.setattr(verb, "plan_repair", heal)
    repair(cache, "--apply")
    assert "dp0__0-8.tar stays: it is sound by now" in capsys.readouterr().out
    assert path.read_bytes() == sound


def test_a_cache_on_s3(server, version, missing):
    cache = write_cache(server.objects / "repaired", version)
    damage(cache, version)
    url = server.url("repaired")
    assert repair(url, "--full", "--no-writer", "--apply") == 1
    assert set(contents(cache)) == AFTER
    assert missing(url, "--full") == ([[4, 8], [16, 24]], [])
    assert repair(url, "--full", "--no-writer", "--apply") == 1
    assert set(contents(cache)) == AFTER
