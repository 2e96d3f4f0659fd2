# SPDX-License-Identifier: Apache-2.0
"""``verify`` finds every kind of damage, names each shard, and says what to dump again."""

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.training.distillation.packed_rows import PackedRows
from megatron.training.distillation.payload import decode_packed_rows, encode_logprobs_payload
from tests.file_faults import FileFaults, recorded_operations
from tests.unit_tests.tools.sane_caches import (
    GBS,
    VOCAB,
    K,
    contents,
    encode,
    flip,
    members_of,
    rows_of,
    unsealed,
    write,
    write_cache,
)
from tools import logits_cache
from tools.cache.value_checks import Promise, find_fault

ROOT = Path(__file__).parents[3]
KILLED_AT_40 = """
import os, signal, sys
from tools import logits_cache
from tools.cache.verification_state import VerificationState

parts = []
add = VerificationState.add


def add_or_be_killed(state, verified):
    add(state, verified)
    parts.append(verified)
    if len(parts) == 40:
        os.killpg(0, signal.SIGKILL)


VerificationState.add = add_or_be_killed
sys.exit(logits_cache.main(sys.argv[1:]))
"""
"""A program whose processes are all killed when 40 parts have been verified."""
SHARED = Path(__file__).parents[4] / "shared" / "reference_caches"


@pytest.fixture(autouse=True)
def state_home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture(params=(2, 3), ids=("v2", "v3"))
def version(request) -> int:
    return int(request.param)


@pytest.fixture
def cache(tmp_path, version) -> Path:
    return write_cache(tmp_path / "cache", version)


@pytest.fixture
def verify(capsys) -> Callable[..., Any]:
    """Run the verb in this process; return the status and what it prints as JSON."""

    def run(cache: Path | str, *flags: str) -> Any:
        status = logits_cache.main(["verify", str(cache), "--json", "--jobs", "1", *flags])
        out = capsys.readouterr().out
        return status, json.loads(out)

    return run


def kinds(found: dict[str, Any]) -> dict[str, str]:
    return {one["shard"]: one["kind"] for one in found["findings"]}


def ranges(found: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    return [(one["samples"], one["dp_ranks"]) for one in found["regenerate"]]


# ---- sound caches ------------------------------------------------------------------------------


def test_a_sound_cache(cache, verify, version):
    before = contents(cache)
    for flags, payloads in (((), 0), (("--full",), 12), (("--sample", "5"), 5)):
        status, found = verify(cache, *flags)
        assert (status, found["sound"], found["findings"]) == (0, True, [])
        assert found["samples"] == [[0, 24]]
        assert (found["payloads"], found["verified_payloads"]) == (12, payloads)
    assert contents(cache) == before


def test_what_is_no_data_is_told_and_harmless(cache, verify):
    for name in ("dp0__0-8.tar.stale", "dp0__0-8.tar.tmp", "README", "cp0_dp0__1.tar"):
        (cache / name).write_bytes(b"?")
    status, found = verify(cache, "--full")
    assert status == 0
    assert found["stale_files"] == ["dp0__0-8.tar.stale"]
    assert found["unfinished_files"] == ["dp0__0-8.tar.tmp"]
    assert found["other_files"] == ["README", "cp0_dp0__1.tar"]


@pytest.mark.parametrize("name", ["v1_a", "v1_b", "v2_a", "v2_b", "v2_c"])
def test_caches_of_the_original_writer_are_sound(tmp_path, verify, name):
    if not (SHARED / name).is_dir():
        pytest.skip(f"no {SHARED / name}")
    status, found = verify(SHARED / name, "--full")
    assert (status, found["findings"]) == (0, [])
    assert found["unsealed_shards"] == found["shards"]
    assert found["verified_payloads"] == found["payloads"] > 0
    # A cut is found without a seal too, as the archive's end is missing.
    shutil.copytree(SHARED / name, tmp_path / "copy")
    last = sorted((tmp_path / "copy").glob("*.tar"))[-1]
    info = members_of(last)[-1]
    last.write_bytes(last.read_bytes()[: info.offset])
    status, found = verify(tmp_path / "copy")
    assert (status, kinds(found)) == (1, {last.name: "damaged"})
    assert len(found["regenerate"]) == 1


# ---- damaged ones ------------------------------------------------------------------------------


def test_a_shard_cut_anywhere_is_damaged(cache, verify):
    path = cache / "dp1__8-16.tar"
    whole = path.read_bytes()
    between = [info.offset for info in members_of(path)]
    for size in [*between, 1, 700, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:size])
        status, found = verify(cache)
        assert (status, kinds(found)) == (1, {path.name: "damaged"}), size
        assert ranges(found) == [([8, 16], [1])]
        assert found["regenerate"][0]["iterations"] == [2, 4]
        assert found["regenerate"][0]["flags"][:4] == [
            *("--override-ckpt-iteration", "2", "--exit-interval", "4"),
        ]


def test_a_flipped_bit_is_found_wherever_it_is(cache, verify, version):
    path = cache / "dp0__8-16.tar"
    whole = path.read_bytes()
    meta, first, second = members_of(path)
    places = {
        meta.offset_data + whole[meta.offset_data :].index(b'"seed":') + 7: "damaged",
        meta.offset_data + whole[meta.offset_data :].index(b'"index":[[') + 10: "damaged",
        first.offset + 3: "damaged payloads",  # its header in the archive
        second.offset_data + 3: "damaged payloads",  # its own header
        second.offset_data + second.size // 2: "damaged payloads",
        second.offset_data + second.size - 1: "damaged payloads",
    }
    lost = {first.offset: [8, 12], second.offset: [12, 16]}
    for place, kind in places.items():
        path.write_bytes(whole)
        flip(path, place)
        status, found = verify(cache, "--full")
        assert (status, kinds(found)) == (1, {path.name: kind}), place
        expected = [8, 16] if kind == "damaged" else lost[max(o for o in lost if o <= place)]
        assert ranges(found) == [(expected, [0])]
        assert str(path) in found["findings"][0]["reason"]
        assert found["verified_payloads"] == (12 if kind != "damaged" else 10)


def test_exchanged_members_are_found(cache, verify, version):
    """Of two DP ranks, with headers as they were: each payload is sound by itself."""
    sizes = {len(encode(rows_of(seed), version)): rows_of(seed) for seed in range(20)}
    seed = next(s for s in range(20, 999) if len(encode(rows_of(s), version)) in sizes)
    size = len(encode(rows_of(seed), version))
    one = write(cache, version, 0, 0, 8, changed={0: rows_of(seed)})
    two = write(cache, version, 1, 0, 8, changed={0: sizes[size]})
    a, b = members_of(one)[1], members_of(two)[1]
    x, y = bytearray(one.read_bytes()), bytearray(two.read_bytes())
    (
        x[a.offset_data : a.offset_data + a.size],
        y[b.offset_data : b.offset_data + b.size],
    ) = (y[b.offset_data : b.offset_data + b.size], x[a.offset_data : a.offset_data + a.size])
    one.write_bytes(x)
    two.write_bytes(y)
    status, found = verify(cache, "--full")
    assert (status, set(kinds(found))) == (1, {one.name, two.name})
    assert ranges(found) == [([0, 4], [0, 1])]


def test_renamed_and_swapped_shards_are_found(cache, verify):
    one, two, other = (cache / f"dp{r}__0-8.tar" for r in (0, 1, 2))
    one.rename(other)
    two.rename(one)
    other.rename(two)
    (cache / "dp0__16-24.tar").rename(cache / "dp0__24-32.tar")
    status, found = verify(cache)
    assert status == 1
    assert kinds(found) == {
        "dp0__0-8.tar": "damaged",
        "dp1__0-8.tar": "damaged",
        "dp0__24-32.tar": "damaged",
    }
    # The dump has 24 samples.
    assert ranges(found) == [([0, 8], [0, 1]), ([16, 24], [0])]


def test_gaps_overlaps_holes_and_foreign_shards(cache, verify, version):
    (cache / "dp1__0-8.tar").unlink()
    write(cache, version, 1, 8, 16, left_out=[12])
    write(cache, version, 0, 16, 24, seed=2)
    # A writer would set the older ones aside.
    write(cache.parent / "other", version, 0, 4, 16).rename(cache / "dp0__4-16.tar")
    status, found = verify(cache)
    assert status == 1
    assert kinds(found) == {
        "dp0__4-16.tar": "overlapping",
        "dp0__8-16.tar": "overlapping",
        "dp0__16-24.tar": "of another dump",
    }
    assert ranges(found) == [([0, 8], [1]), ([12, 24], [0, 1])]
    assert any("its seed is 2" in one["reason"] for one in found["findings"])


def test_a_missing_rank_and_a_missing_end(cache, verify):
    for path in cache.glob("dp1__*"):
        path.unlink()
    status, found = verify(cache)
    assert (status, ranges(found)) == (1, [([0, 24], [1])])
    status, found = verify(cache, "--samples", "8-24")
    assert (status, ranges(found)) == (1, [([8, 24], [1])])


def test_a_cache_that_begins_late_is_sound_unless_more_is_asked_for(cache, verify):
    for path in cache.glob("*__0-8.tar"):
        path.unlink()
    assert verify(cache)[0] == 0
    status, found = verify(cache, "--samples", "0-24")
    assert (status, ranges(found)) == (1, [([0, 8], [0, 1])])


def test_one_damaged_shard_does_not_hide_the_others(cache, verify):
    (cache / "dp0__0-8.tar").write_bytes(b"")
    (cache / "dp0__8-16.tar").write_bytes(b"no archive" * 100)
    path = cache / "dp1__0-8.tar"
    flip(path, members_of(path)[1].offset_data + 40)
    status, found = verify(cache, "--full")
    assert (status, len(kinds(found))) == (1, 3)
    assert ranges(found) == [([0, 16], [0, 1])]


def test_what_the_storage_does_not_give_is_not_damage(cache, verify):
    path = cache / "dp0__0-8.tar"
    path.unlink()
    path.mkdir()  # cannot be read as a file, by anyone
    status, found = verify(cache, "--full")
    assert (status, kinds(found)) == (1, {path.name: "not reachable"})
    assert found["regenerate"] == []


def test_a_disk_that_fails_amid_a_payload_is_not_damage(cache, verify, tmp_path):
    """What was read before it, and every other shard, counts; a later run reads the rest."""
    path, state = cache / "dp0__8-16.tar", tmp_path / "state.jsonl"
    with FileFaults(str(path), tmp_path / "counted"):
        verify(cache)
    opened = len(recorded_operations(tmp_path / "counted"))
    flags = ("--full", "--state", str(state))
    with FileFaults(str(path), tmp_path / "record", first_failing=opened + 4, error="EIO"):
        status, found = verify(cache, *flags)
    assert (status, kinds(found)) == (1, {path.name: "not reachable"})
    assert (found["verified_payloads"], found["regenerate"]) == (10, [])
    status, found = verify(cache, *flags)
    assert (status, found["verified_payloads"], found["skipped_payloads"]) == (0, 2, 10)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("is not finite", lambda v, i, t: (v.index_fill(2, torch.tensor([3]), torch.nan), i, t)),
        ("do not fall", lambda v, i, t: (v.flip(2), i, t)),
        ("above 0", lambda v, i, t: (v + 9, i, t)),
        ("occurs twice", lambda v, i, t: (v, i.index_copy(2, torch.tensor([1]), i[..., 5:6]), t)),
        ("outside the vocabulary", lambda v, i, t: (v, i + VOCAB, t)),
        ("are not 1 together", lambda v, i, t: (v, i, t - 1)),
        ("more than 1 together", lambda v, i, t: (v * 0 - 0.5, i, None)),
        ("no log-probability", lambda v, i, t: (v, i, t * torch.nan)),
        ("positions is 5", lambda v, i, t: (v[:5], i[:5], t[:5])),
        ("dtype is torch.bfloat16", lambda v, i, t: (v.bfloat16(), i, t)),
        ("at most 8", lambda v, i, t: (v.repeat(1, 1, 2), i.repeat(1, 1, 2), t)),
    ],
)
def test_values_that_no_teacher_records(cache, verify, what, change):
    """The payload is whole and its checksum right."""
    rows = change(*rows_of(8))
    write(cache, 2, 0, 8, 16, changed={8: rows})
    status, found = verify(cache, "--full")
    assert status == 1
    assert what in found["findings"][0]["reason"]
    assert ranges(found) == [([8, 12], [0])]


def test_a_length_of_its_own_is_found_where_no_metadata_promise_one(tmp_path, verify):
    cache = write_cache(tmp_path / "cache", 2)
    write(cache, 2, 1, 0, 8, changed={4: rows_of(3, positions=5)})
    for path in cache.iterdir():
        unsealed(path)
    status, found = verify(cache, "--full")
    assert (status, kinds(found)) == (1, {"dp1__0-8.tar": "damaged payloads"})
    assert ranges(found) == [([4, 8], [1])]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rounding_is_no_fault(dtype):
    """Flat and peaked distributions over a large vocabulary, against sums in float64."""
    generator = torch.Generator().manual_seed(0)
    for scale in (0.0, 0.1, 1.0, 10.0):
        logits = scale * torch.randn((32, 2, 20_000), generator=generator, dtype=torch.float64)
        values, ids = torch.log_softmax(logits, -1).sort(-1, descending=True)
        tail = values[..., 128:].logsumexp(-1).float()
        payload = encode_logprobs_payload(values[..., :128].to(dtype), ids[..., :128], tail)
        promise = Promise(
            positions=32, k=128, min_k=1, dtype=dtype, eight_bit=False, vocab_size=20_000
        )
        assert find_fault(decode_packed_rows(payload), promise) is None
        wrong = encode_logprobs_payload(values[..., :128].to(dtype), ids[..., :128], tail + 0.2)
        fault = find_fault(decode_packed_rows(wrong), promise)
        assert (fault is None) == bool((tail.exp() * 0.22 < 2e-3).all())


def test_masked_entries_may_have_any_id():
    values, ids, tail = rows_of(0)
    values[..., 3:] = -1000.0
    tail = torch.log1p(-values[..., :3].double().exp().sum(-1)).float()
    ids[..., 3:] = -1
    promise = Promise(positions=6, k=K, min_k=3, dtype=None, eight_bit=False, vocab_size=VOCAB)
    rows: PackedRows = decode_packed_rows(encode_logprobs_payload(values, ids, tail))
    assert find_fault(rows, promise) is None
    promise = Promise(positions=6, k=K, min_k=4, dtype=None, eight_bit=False, vocab_size=VOCAB)
    assert find_fault(rows, promise) == "at row 0, position 0, too few entries are kept"


# ---- command line ------------------------------------------------------------------------------


def test_status_of_what_is_no_cache(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert logits_cache.main(["verify", str(tmp_path / "empty")]) == 1
    assert "There is no shard" in capsys.readouterr().err
    assert logits_cache.main(["verify", str(tmp_path / "none")]) == 1
    assert "none" in capsys.readouterr().err
    for wrong in (["--sample", "0"], ["--full", "--sample", "3"], ["--samples", "8"]):
        with pytest.raises(SystemExit) as caught:
            logits_cache.main(["verify", str(tmp_path), *wrong])
        assert caught.value.code == 2


@pytest.mark.parametrize("verb", ["verify", "repair"])
def test_example_of_the_help_works(cache, monkeypatch, capsys, verb):
    with pytest.raises(SystemExit):
        logits_cache.main([verb, "--help"])
    example = re.search(r"example:\n  python -m tools.logits_cache (.*)", capsys.readouterr().out)
    assert example is not None
    monkeypatch.chdir(cache.parent)
    (cache.parent / "dump").mkdir()
    cache.rename("dump/logits")
    assert logits_cache.main([*example[1].split(), "--jobs", "1"]) == 0


def test_text_for_people(cache, capsys):
    path = cache / "dp0__8-16.tar"
    flip(path, members_of(path)[1].offset_data + 40)
    assert logits_cache.main(["verify", str(cache), "--full", "--jobs", "1"]) == 1
    out = capsys.readouterr().out
    assert "samples 8 to 11, iteration 3: lost of DP rank 0" in out
    assert "  --override-ckpt-iteration 2 --exit-interval 3 --save regenerate-2-3" in out
    assert out.endswith("NOT sound: 1 shard with damaged payloads, samples missing\n")


# ---- resuming ----------------------------------------------------------------------------------


def test_a_state_is_gone_on_with_and_changes_are_seen(cache, verify, tmp_path, version):
    state = tmp_path / "state.jsonl"
    path = cache / "dp1__0-8.tar"
    sound = path.read_bytes()
    flip(path, members_of(path)[2].offset_data + 40)
    flags = ("--full", "--state", str(state))
    status, first = verify(cache, *flags)
    assert (status, first["verified_payloads"], first["skipped_payloads"]) == (1, 12, 0)
    status, second = verify(cache, *flags)
    assert (status, second["verified_payloads"], second["skipped_payloads"]) == (1, 0, 12)
    assert second["findings"] == first["findings"]
    path.write_bytes(sound)
    status, third = verify(cache, *flags)
    assert (status, third["verified_payloads"], third["skipped_payloads"]) == (0, 2, 10)
    # A line that a kill has cut is passed over, and what comes after it is not.
    lines = state.read_text().splitlines()
    state.write_text("\n".join(lines[:-3]) + "\n" + lines[-1][:50])
    status, fourth = verify(cache, *flags)
    assert status == 0
    assert fourth["verified_payloads"] > 0
    assert verify(cache, *flags)[1]["skipped_payloads"] == 12


def test_a_state_of_another_cache_is_refused(cache, tmp_path, capsys):
    state = tmp_path / "state.jsonl"
    shutil.copytree(cache, tmp_path / "other")
    flags = ["--sample", "1", "--jobs", "1", "--state", str(state)]
    assert logits_cache.main(["verify", str(cache), *flags]) == 0
    assert logits_cache.main(["verify", str(tmp_path / "other"), *flags]) == 1
    assert f"is of {cache}" in capsys.readouterr().err
    state.write_text("notes of mine")
    assert logits_cache.main(["verify", str(cache), *flags]) == 1
    assert state.read_text() == "notes of mine"


def test_without_a_place_for_a_state_all_is_verified(cache, verify, state_home, capsys):
    state_home.write_bytes(b"no directory")
    status, found = verify(cache, "--full")
    assert (status, found["verified_payloads"]) == (0, 12)
    assert logits_cache.main(["verify", str(cache), "--full", "--jobs", "1"]) == 0
    assert "cannot be gone on with" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_verification_goes_on(tmp_path, state_home, verify):
    cache = tmp_path / "cache"
    for start in range(0, 2400, 2 * GBS):
        write(cache, 2, 0, start, start + 2 * GBS)
    command = [sys.executable, "-c", KILLED_AT_40, "verify", str(cache), "--full", "--jobs", "2"]
    process = subprocess.run(
        command, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL, timeout=100
    )
    assert process.returncode == -signal.SIGKILL
    assert list(state_home.rglob("*.jsonl"))
    status, result = verify(cache, "--full")
    assert status == 1  # there is one DP rank of two
    assert result["skipped_payloads"] == 40 * 2
    assert result["skipped_payloads"] + result["verified_payloads"] == 600
    # It came to its end, so that the next one begins anew.
    assert not list(state_home.rglob("*.jsonl"))
    assert verify(cache, "--full")[1]["skipped_payloads"] == 0


# ---- object stores -----------------------------------------------------------------------------


def test_a_cache_on_s3(server, verify, version, tmp_path):
    cache = write_cache(server.objects / "verified", version)
    url, state = server.url("verified"), ("--state", str(tmp_path / "s3.jsonl"))
    status, found = verify(url, "--full", *state)
    assert (status, found["verified_payloads"]) == (0, 12)
    path = cache / "dp0__8-16.tar"
    flip(path, members_of(path)[1].offset_data + 40)
    status, found = verify(url, "--full", *state)
    assert (status, found["verified_payloads"], found["skipped_payloads"]) == (1, 2, 10)
    assert kinds(found) == {path.name: "damaged payloads"}
    assert verify(url, "--sample", "3")[1]["verified_payloads"] == 3
