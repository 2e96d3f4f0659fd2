# SPDX-License-Identifier: Apache-2.0
"""What the student gets back, against an oracle that deals samples with Megatron's own sampler."""

import dataclasses
import io
import itertools
import json
import os
import pickle
import re
import tarfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard

from megatron.training.datasets.data_samplers import MegatronPretrainingSampler
from megatron.training.distillation import open_shard, shard_directory, storage, utils
from megatron.training.distillation.errors import TeacherSequenceError
from megatron.training.distillation.open_shard import OpenShard
from megatron.training.distillation.shard_reader import (
    IterationFailure,
    IterationTargets,
    LoadLayout,
    ShardDirectory,
    TeacherDataError,
    TeacherDataExhaustedError,
    TeacherDataMissingError,
    TeacherRowReader,
)
from megatron.training.distillation.utils import CacheFormatError, CacheIdentityError, ShardName

pytestmark = pytest.mark.usefixtures("cache_format")

IDENTIFIERS = {"seed": 7, "train_samples": 96, "blend": {"kind": "mock", "mock": True}}
S, K = 8, 3


def truth(sample: int, seq: int = S, k: int = K) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values ``(S, K)``, ids ``(S, K)`` and tail ``(S,)`` that tell every sample apart."""
    position = torch.arange(seq).view(seq, 1)
    entry = torch.arange(k).view(1, k)
    values = -(entry + sample / 128 + position / 1024)
    indices = (sample * 509 + position * 31 + entry * 65537) % utils.MAX_VOCAB_SIZE
    return values, indices, -(sample + position[:, 0] / 16)


def write_cache(
    root: Path,
    *,
    mbs: int,
    dp: int,
    members: Iterable[tuple[int, int]],
    per_shard: int = 2,
    k: Iterable[int] = (K,),
    dtype: torch.dtype = torch.float32,
    tail: bool = True,
    seq: int = S,
    identifiers: dict | None = IDENTIFIERS,
    only_ranks: Iterable[int] | None = None,
) -> None:
    """Write a cache without our writer: members are iterations ``[start, end)`` of the teacher."""
    members = list(members)
    widths = dict(zip(members, itertools.cycle(k), strict=False))
    for rank in only_ranks or range(dp):
        for chunk in itertools.batched(members, per_shard):
            name = f"dp{rank}__{chunk[0][0]}-{chunk[-1][1]}.tar"
            gbs = chunk[0][1] - chunk[0][0]
            saver = {"format_version": 2, "mbs_save": mbs, "dp_size_save": dp, "gbs_save": gbs}
            meta = {"saver": saver}
            if identifiers is not None:
                meta |= {"hash": utils.identity_hash(identifiers), "identifiers": identifiers}
            files = {"_meta.json": json.dumps(meta).encode()}
            for start, end in chunk:
                sampler = MegatronPretrainingSampler(end, start, mbs, rank, dp)
                rows = [truth(g, seq, widths[start, end]) for g in itertools.chain(*sampler)]
                files[f"{start}-{end}.pt.zst"] = payload(rows, dtype, tail)
            write_tar(root / name, files)


def payload(rows: list[tuple[torch.Tensor, ...]], dtype: torch.dtype, tail: bool) -> bytes:
    values, indices, tails = (torch.stack(part, dim=1) for part in zip(*rows, strict=True))
    bits = np.packbits((indices.numpy() >> 16).astype(bool))
    content = {
        "values": values.to(dtype),
        "indices_low": torch.from_numpy((indices.numpy() & 0xFFFF).astype(np.uint16)),
        "bit_17": torch.from_numpy(bits),
        "format_version": 2,
    }
    if tail:
        content["tail_logprob"] = tails
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return zstandard.ZstdCompressor(level=1).compress(buffer.getvalue())


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def read_tar(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}


def even(samples: int, gbs: int, start: int = 0) -> list[tuple[int, int]]:
    return [(a, a + gbs) for a in range(start, start + samples, gbs)]


def layout(dp=1, mbs=1, gbs=4, rank=0, **other) -> LoadLayout:
    return LoadLayout(dp_rank=rank, dp_size=dp, mbs=mbs, gbs=gbs, **other)


def read(root, wanted: LoadLayout, start: int = 0, identity=None, **options) -> list:
    reader = TeacherRowReader(str(root), wanted, expected_identifiers=identity, **options)
    return list(reader.iterations(start))


def check(items: list, wanted: LoadLayout, start: int, end: int, *, dtype=torch.float32) -> None:
    """Compare *items* with what the sampler deals from *start* on, up to the cache's *end*."""
    *targets, last = items
    batches = (end - start) // wanted.gbs
    assert [item.start for item in targets] == [start + i * wanted.gbs for i in range(batches)]
    assert isinstance(last, IterationFailure)
    assert isinstance(last.error, TeacherDataExhaustedError)
    assert last.start == start + batches * wanted.gbs
    sampler = MegatronPretrainingSampler(
        max(end, start + 1), start, wanted.mbs, wanted.dp_rank, wanted.dp_size
    )
    dealt = list(sampler)
    found = [rows for item in targets for rows in item.microbatches]
    assert len(found) == batches * wanted.num_microbatches
    for rows, samples in zip(found, dealt, strict=False):
        check_rows(rows, samples, dtype)


def check_rows(rows, samples: list[int], dtype=torch.float32) -> None:
    expected = [torch.stack(part, 1) for part in zip(*map(truth, samples), strict=True)]
    assert rows.values.dtype == dtype
    assert torch.equal(rows.values, expected[0].to(dtype))
    assert rows.indices.dtype == torch.int32
    assert torch.equal(rows.indices, expected[1].int())
    assert torch.equal(rows.tail_logprob, expected[2])
    assert rows.values.is_contiguous()
    assert rows.indices.is_contiguous()


# ---- resharding ----------------------------------------------------------------------------

SAVED = [(1, 1, 4), (2, 2, 8), (1, 6, 24), (3, 4, 24), (3, 1, 12), (1, 3, 6)]
LOADED = [(1, 1, 1), (2, 1, 6), (2, 4, 16), (1, 4, 8), (2, 3, 24), (4, 3, 48), (1, 5, 15)]


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """One cache of 48 samples per (mbs, dp, gbs) of a teacher."""
    roots = {}
    for mbs, dp, gbs in SAVED:
        roots[mbs, dp, gbs] = tmp_path_factory.mktemp("cache")
        write_cache(roots[mbs, dp, gbs], mbs=mbs, dp=dp, members=even(48, gbs))
    return roots


@pytest.mark.parametrize("load", LOADED)
@pytest.mark.parametrize("save", SAVED)
def test_any_layout_reads_what_the_sampler_deals(grid, save, load):
    mbs, dp, gbs = load
    for start in (0, 5, 24):
        for rank in range(dp):
            wanted = layout(dp, mbs, gbs, rank)
            items = read(grid[save], wanted, start, IDENTIFIERS, decode_threads=1)
            check(items, wanted, start, 48)


def test_every_start_sample(grid):
    wanted = layout(2, 1, 4, rank=1)
    for start in range(48):
        check(read(grid[3, 4, 24], wanted, start, decode_threads=1), wanted, start, 48)


def test_lookahead_within_a_bound_by_hand():
    """One iteration of 100 bytes from members of 300: the next one, and 400 bytes each further."""
    reader = TeacherRowReader(
        "unused",
        layout(),
        expected_identifiers=None,
        decode_threads=8,
        max_ahead_bytes=2499,
        held_iterations=5,
    )
    assert reader.lookahead(0, 0) == 0  # nothing is known yet
    assert reader.lookahead(100, 300) == 3  # 1999 left: four, the next one among them
    assert reader.lookahead(1, 3) == 8  # as many as there are threads
    assert reader.lookahead(499, 1) == 0
    assert reader.lookahead(10_000, 0) == 0


@pytest.mark.parametrize(("bound", "ahead"), [(1, 0), (7, 1), (10, 2), (1 << 30, 4)])
def test_decoded_rows_stay_within_the_bound(tmp_path, monkeypatch, bound, ahead):
    """Bounds in iterations; each counts twice, as one member and as the rows made of it."""
    write_cache(tmp_path, mbs=1, dp=1, members=even(48, 4))
    (first, *_) = read(tmp_path, layout())
    nbytes = first.blocks.nbytes
    decoded = []
    decode = OpenShard.decode
    monkeypatch.setattr(
        OpenShard, "decode", lambda shard, member: decoded.append(member) or decode(shard, member)
    )
    reader = TeacherRowReader(
        str(tmp_path),
        layout(),
        expected_identifiers=None,
        decode_threads=4,
        max_ahead_bytes=bound * nbytes,
        held_iterations=3,
    )
    stream = reader.iterations(0)
    for number in range(1, 6):
        next(stream)
        deadline = time.monotonic() + 10
        expected = 1 if number == 1 else number + ahead
        while len(decoded) < expected and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.01)
        assert len(decoded) == expected
    stream.close()


@pytest.mark.parametrize("rank", range(4))
def test_shards_without_rows_of_this_rank_are_not_opened(tmp_path, monkeypatch, rank):
    """But for the first: how samples are dealt stands in a shard."""
    write_cache(tmp_path, mbs=1, dp=4, members=even(48, 8), per_shard=2)
    opened = []
    open_read = storage.open_read
    monkeypatch.setattr(
        storage,
        "open_read",
        lambda path, **how: opened.append(Path(path).name) or open_read(path, **how),
    )
    wanted = layout(4, 2, 8, rank)  # pairs of samples, of saved ranks 0 and 1, or 2 and 3
    check(read(tmp_path, wanted), wanted, 0, 48)
    own = [
        f"dp{2 * (rank % 2) + n}__{start}-{start + 16}.tar" for start in (0, 16, 32) for n in (0, 1)
    ]
    assert set(opened) - {f"dp{rank}__0-16.tar"} == set(own) - {f"dp{rank}__0-16.tar"}
    assert len(opened) == len(set(opened))


def test_iteration_sizes_may_change_along_the_cache(tmp_path):
    write_cache(tmp_path, mbs=1, dp=2, members=[(0, 4), (4, 12), (12, 14)], per_shard=3)
    write_cache(tmp_path, mbs=4, dp=1, members=[(14, 18), (18, 30)], per_shard=1)
    write_cache(tmp_path, mbs=2, dp=3, members=even(18, 6, start=30))
    for rank in range(3):
        wanted = layout(3, 1, 9, rank)
        check(read(tmp_path, wanted, 2), wanted, 2, 48)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_keep_their_dtype(tmp_path, dtype):
    write_cache(tmp_path, mbs=2, dp=2, members=even(16, 8), dtype=dtype)
    wanted = layout(1, 2, 4)
    check(read(tmp_path, wanted), wanted, 0, 16, dtype=dtype)


def test_decode_threads_and_lookahead_change_nothing(grid):
    wanted = layout(2, 2, 8, rank=1)
    for threads, lookahead in itertools.product((1, 4), (None, 0, 1, 20)):
        items = read(grid[1, 6, 24], wanted, 3, decode_threads=threads, decode_lookahead=lookahead)
        check(items, wanted, 3, 48)


def test_members_of_different_width_are_padded(tmp_path):
    write_cache(tmp_path, mbs=1, dp=1, members=even(16, 4), k=(2, 5, 8, 1))
    items = read(tmp_path, layout(1, 1, 8))
    for item, widths in zip(items, [(2, 5), (8, 1)], strict=False):
        for m, rows in enumerate(item.microbatches):
            width = widths[m // 4]
            values, indices, tail = truth(item.start + m, k=width)
            assert rows.values.shape == (S, 1, max(widths))
            assert torch.equal(rows.values[:, 0, :width], values)
            assert torch.equal(rows.indices[:, 0, :width], indices.int())
            assert (rows.values[..., width:] == -1000.0).all()
            assert (rows.indices[..., width:] == 131071).all()
            assert torch.equal(rows.tail_logprob[:, 0], tail)


def test_tail_is_absent_where_the_cache_has_none(tmp_path):
    write_cache(tmp_path, mbs=1, dp=1, members=[(0, 4)], tail=False)
    write_cache(tmp_path, mbs=1, dp=1, members=[(4, 8)])
    alone, with_tail, _ = read(tmp_path, layout(1, 1, 4))
    mixed, _ = read(tmp_path, layout(1, 1, 8))
    assert alone.microbatches[0].tail_logprob is None
    assert with_tail.microbatches[0].tail_logprob is not None
    assert {rows.tail_logprob for rows in mixed.microbatches} == {None}


def test_metadata_with_nothing_but_sizes(tmp_path):
    write_cache(tmp_path, mbs=1, dp=2, members=even(8, 4), identifiers=None)
    wanted = layout(2, 1, 4)
    check(read(tmp_path, wanted), wanted, 0, 8)
    (failure,) = read(tmp_path, wanted, identity=IDENTIFIERS)
    assert failure.fatal
    assert "carries no identity hash" in str(failure.error)


# ---- the reference caches ------------------------------------------------------------------

REFERENCE = Path(__file__).parents[5] / "shared" / "reference_caches"
NEEDS_REFERENCE = pytest.mark.skipif(
    not REFERENCE.is_dir(), reason=f"the reference caches are not at {REFERENCE}"
)
REFERENCE_RUNS = {"v2_a": (2, 2, 8, 48), "v2_b": (1, 2, 6, 36), "v2_c": (3, 1, 12, 72)}


@NEEDS_REFERENCE
@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("scale", ["half", "same", "double", "odd"])
@pytest.mark.parametrize("run", REFERENCE_RUNS)
def test_reference_caches_decode_to_the_truth(run, scale, dp):
    mbs_save, _, gbs_save, total = REFERENCE_RUNS[run]
    mbs = {"half": max(1, mbs_save // 2), "same": mbs_save, "double": 2 * mbs_save, "odd": 5}[scale]
    gbs = {"half": gbs_save // 2, "same": gbs_save, "double": 2 * gbs_save, "odd": 1}[scale]
    gbs = -(-gbs // (mbs * dp)) * mbs * dp
    identity = {"seed": 1234, "train_samples": total, "blend": {"kind": "mock", "mock": True}}
    with np.load(REFERENCE / run / "expected.npz") as expected:
        values = torch.from_numpy(expected["values"]).transpose(0, 1)
        indices = torch.from_numpy(expected["indices"]).transpose(0, 1)
    for rank, start in itertools.product(range(dp), (0, 1, gbs_save)):
        wanted = layout(dp, mbs, gbs, rank)
        *items, last = read(REFERENCE / run, wanted, start, identity, decode_threads=2)
        assert isinstance(last.error, TeacherDataExhaustedError)
        assert len(items) == (total - start) // gbs
        for item, m in itertools.product(items, range(wanted.num_microbatches)):
            rows = item.microbatches[m]
            first = item.start + (m * dp + rank) * mbs
            width = rows.values.shape[-1]
            expected_values = values[:, first : first + mbs]
            assert torch.equal(rows.values.float(), expected_values[..., :width])
            assert (expected_values[..., width:] == -1000.0).all()
            kept = rows.values != -1000.0
            expected_indices = indices[:, first : first + mbs, :width]
            assert torch.equal(rows.indices[kept], expected_indices[kept])


# ---- sequence: context parallelism, trimming -----------------------------------------------


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("length", [None, 8])
@pytest.mark.parametrize("k", [3, 8])
def test_context_parallel_ranks_get_two_chunks_each(tmp_path, caplog, cp, length, k):
    stored = 16
    write_cache(tmp_path, mbs=2, dp=1, members=[(0, 4)], seq=stored, k=(k,))
    parts = []
    for cp_rank in range(cp):
        wanted = layout(1, 2, 4, cp_rank=cp_rank, cp_size=cp, seq_length=length)
        parts.append(read(tmp_path, wanted)[0].microbatches)
    kept = length or stored
    chunk = kept // (2 * cp)
    for m in range(2):
        expected = [
            torch.stack(part, 1)[:kept]
            for part in zip(*(truth(g, stored, k) for g in (2 * m, 2 * m + 1)), strict=True)
        ]
        for cp_rank, microbatches in enumerate(parts):
            pieces = (cp_rank, 2 * cp - 1 - cp_rank)
            at = torch.cat([torch.arange(p * chunk, (p + 1) * chunk) for p in pieces])
            rows = microbatches[m]
            assert torch.equal(rows.values, expected[0][at])
            assert torch.equal(rows.indices, expected[1][at].int())
            assert torch.equal(rows.tail_logprob, expected[2][at])
    assert any("trimming" in message for message in caplog.messages) == (length is not None)


def fingerprints_of(sample: int, chunks: int) -> torch.Tensor:
    """Stand-ins for fingerprints ``(C,)`` that tell sample and chunk."""
    return torch.arange(chunks) + 100 * sample - (1 << 62)


def write_fingerprinted(root: Path, seq: int, without: int | None = None) -> None:
    """Write a cache of 8 samples, 4 per member; member *without* has no fingerprints."""
    meta = {"saver": {"format_version": 2, "mbs_save": 1, "dp_size_save": 1, "gbs_save": 4}}
    files = {"_meta.json": json.dumps(meta).encode()}
    for start in (0, 4):
        rows = [truth(sample, seq) for sample in range(start, start + 4)]
        values, indices, tail = (torch.stack(part, dim=1) for part in zip(*rows, strict=True))
        marks = [fingerprints_of(sample, -(-seq // 64)) for sample in range(start, start + 4)]
        files[f"{start}-{start + 4}.pt.zst"] = utils.encode_logprobs_payload(
            values, indices, tail, None if start == without else torch.stack(marks, dim=1)
        )
    write_tar(root / "dp0__0-8.tar", files)


@pytest.mark.parametrize(
    ("seq", "length", "chunks"),
    [(16, None, 1), (16, 16, 1), (160, 160, 3), (160, 128, 1), (192, 160, 2)],
)
@pytest.mark.parametrize("wanted", [layout(), layout(2, 2, 8, rank=1), layout(1, 2, 8)])
@pytest.mark.parametrize("cp_rank", [None, 0, 1])
def test_fingerprints_come_whole_with_their_rows(tmp_path, seq, length, chunks, wanted, cp_rank):
    """On every context-parallel rank those of the whole sequence, as far as it can be compared."""
    write_fingerprinted(tmp_path, seq)
    cp = {} if cp_rank is None else {"cp_rank": cp_rank, "cp_size": 2}
    wanted = dataclasses.replace(wanted, seq_length=length, **cp)
    items = read(tmp_path, wanted)[:-1]
    assert len(items) == 8 // wanted.gbs
    for item in items:
        for m, rows in enumerate(item.microbatches):
            first = item.start + (m * wanted.dp_size + wanted.dp_rank) * wanted.mbs
            expected = [fingerprints_of(first + i, chunks) for i in range(wanted.mbs)]
            assert torch.equal(rows.label_fingerprints, torch.stack(expected, dim=1))


@pytest.mark.parametrize(("seq", "length"), [(16, 8), (65, 64), (160, 64)])
def test_sequences_too_short_to_prove_are_refused(tmp_path, seq, length):
    write_fingerprinted(tmp_path, seq)
    (failure,) = read(tmp_path, layout(seq_length=length))
    assert failure.fatal
    assert isinstance(failure.error, TeacherSequenceError)
    assert f"{seq} tokens, the student's {length}" in str(failure.error)
    assert "nothing would prove" in str(failure.error)
    (item, *_) = read(tmp_path, layout(seq_length=seq))
    assert item.microbatches[0].label_fingerprints is not None


def test_batch_with_a_member_without_fingerprints_has_none(tmp_path):
    write_fingerprinted(tmp_path, 16, without=4)
    items = read(tmp_path, layout())[:-1]
    assert [item.microbatches[0].label_fingerprints is None for item in items] == [False, True]
    (item,) = read(tmp_path, layout(gbs=8))[:-1]
    assert all(rows.label_fingerprints is None for rows in item.microbatches)


def test_trimming_warns_once(tmp_path, caplog):
    write_cache(tmp_path, mbs=1, dp=1, members=even(16, 4))
    items = read(tmp_path, layout(seq_length=5))
    assert items[0].microbatches[0].values.shape == (5, 1, K)
    (warning,) = caplog.messages
    assert "8 tokens, the student's 5: trimming" in warning


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_length": 9}, "have 8 tokens, the student's 9"),
        ({"cp_size": 3}, "8 tokens cannot be cut into 6 equal chunks"),
        ({"cp_size": 2, "seq_length": 6}, "6 tokens cannot be cut into 4 equal chunks"),
    ],
)
def test_sequences_that_do_not_fit_end_the_stream(tmp_path, changes, message):
    write_cache(tmp_path, mbs=1, dp=1, members=even(16, 4))
    (failure,) = read(tmp_path, layout(**changes))
    assert failure.fatal
    assert isinstance(failure.error, CacheFormatError)
    assert message in str(failure.error)


# ---- missing data --------------------------------------------------------------------------


def outcomes(items: list) -> list[tuple[int, str]]:
    names = [
        "ok" if isinstance(item, IterationTargets) else type(item.error).__name__ for item in items
    ]
    return [(item.start, name) for item, name in zip(items, names, strict=True)]


def test_exhausted_is_its_own_error_and_the_last_item(tmp_path):
    write_cache(tmp_path, mbs=1, dp=2, members=even(12, 4))
    *_, last = read(tmp_path, layout(2, 1, 8))
    assert not last.fatal
    message = str(last.error)
    assert "exhausted" in message
    assert "its last sample is 11" in message
    assert "from sample 8 on ends with sample 15" in message
    assert outcomes(read(tmp_path, layout(), 400)) == [(400, "TeacherDataExhaustedError")]


def test_every_rank_finds_the_same_end(tmp_path):
    write_cache(tmp_path, mbs=1, dp=1, members=even(10, 2))
    for rank in range(4):  # the last batch would have rows for ranks 0 and 1
        items = read(tmp_path, layout(4, 1, 4, rank))
        assert outcomes(items)[-1] == (8, "TeacherDataExhaustedError")


def test_a_hole_fails_its_iterations_only(tmp_path):
    write_cache(tmp_path, mbs=1, dp=1, members=[(0, 4), (4, 8)], per_shard=1)
    write_cache(tmp_path, mbs=1, dp=1, members=[(16, 20), (20, 24)], per_shard=1)
    items = read(tmp_path, layout())
    assert [name for _, name in outcomes(items)] == [
        *["ok"] * 2,
        *["TeacherDataMissingError"] * 2,
        *["ok"] * 2,
        "TeacherDataExhaustedError",
    ]
    check_rows(items[4].microbatches[1], [17])
    message = str(items[2].error)
    assert "misaligned" in message
    assert "sample 8 is needed" in message
    assert "Found samples 0 to 7, 16 to 23" in message
    assert str(tmp_path) in message
    assert not items[2].fatal


def test_data_ahead_of_the_student(tmp_path):
    write_cache(tmp_path, mbs=1, dp=1, members=even(8, 4, start=40))
    items = read(tmp_path, layout(), 36)
    assert [name for _, name in outcomes(items)][:2] == ["TeacherDataMissingError", "ok"]
    assert "sample 36 is needed" in str(items[0].error)
    assert "Found samples 40 to 47" in str(items[0].error)


def test_a_missing_dp_rank_is_named(tmp_path):
    write_cache(tmp_path, mbs=1, dp=2, members=even(8, 4))
    (tmp_path / "dp1__0-8.tar").unlink()
    items = read(tmp_path, layout())
    assert [name for _, name in outcomes(items)][:2] == ["TeacherDataMissingError"] * 2
    assert "there is no dp1__0-8.tar beside dp0__0-8.tar" in str(items[0].error)


def test_a_member_missing_inside_a_shard(tmp_path):
    write_cache(tmp_path, mbs=1, dp=2, members=even(12, 4), per_shard=3)
    for rank in range(2):
        path = tmp_path / f"dp{rank}__0-12.tar"
        files = read_tar(path)
        del files["4-8.pt.zst"]
        write_tar(path, files)
        items = read(tmp_path, layout())
        failed = [name for _, name in outcomes(items)]
        assert failed == ["ok", "TeacherDataMissingError", "ok", "TeacherDataExhaustedError"]
        assert "has no member for it" in str(items[1].error)


def test_an_empty_directory(tmp_path):
    for name in ("notes.txt", "dp0__0-8.tar.tmp", "dp0__0-8.tar.stale"):
        (tmp_path / name).touch()
    (failure,) = read(tmp_path, layout())
    assert isinstance(failure.error, TeacherDataMissingError)
    assert not failure.fatal
    assert "no shard named like dp0__0-1024.tar" in str(failure.error)


def test_a_directory_that_cannot_be_listed_is_fatal(tmp_path):
    (failure,) = read(tmp_path / "missing", layout())
    assert failure.fatal
    assert isinstance(failure.error, TeacherDataError)
    assert str(tmp_path / "missing") in str(failure.error)


# ---- a teacher that still writes -----------------------------------------------------------


def test_a_shard_that_appears_later_is_found(tmp_path):
    write_cache(tmp_path, mbs=1, dp=1, members=even(8, 4))
    for lookahead in (0, 3):
        reader = TeacherRowReader(
            str(tmp_path), layout(), expected_identifiers=None, decode_lookahead=lookahead
        )
        stream = reader.iterations(0)
        assert [next(stream).start, next(stream).start] == [0, 4]
        write_cache(tmp_path, mbs=1, dp=1, members=even(8, 4, start=8))
        items = list(stream)
        assert outcomes(items) == [(8, "ok"), (12, "ok"), (16, "TeacherDataExhaustedError")]
        (tmp_path / "dp0__8-16.tar").unlink()


def test_the_directory_is_listed_once_more_before_a_failure(tmp_path, monkeypatch):
    write_cache(tmp_path, mbs=1, dp=1, members=even(8, 4))
    listings = []
    list_names = storage.list_names
    monkeypatch.setattr(storage, "list_names", lambda d: listings.append(d) or list_names(d))
    read(tmp_path, layout())
    assert len(listings) == 2


def test_a_given_listing_is_not_renewed(tmp_path, monkeypatch):
    write_cache(tmp_path, mbs=1, dp=1, members=even(16, 4))
    monkeypatch.setattr(storage, "list_names", None)
    items = read(tmp_path, layout(), names=["dp0__0-8.tar", "dp0__8-16.tar.stale", "notes"])
    assert outcomes(items) == [(0, "ok"), (4, "ok"), (8, "TeacherDataExhaustedError")]
    items = read(tmp_path, layout(), names=["dp0__0-8.tar", "dp0__8-16.tar", "dp0__16-24.tar"])
    missing = (16, "TeacherDataMissingError"), (20, "TeacherDataMissingError")
    assert outcomes(items)[4:] == [*missing, (24, "TeacherDataExhaustedError")]
    assert "dp0__16-24.tar is no longer there" in str(items[5].error)


def test_a_shard_replaced_by_a_longer_one_is_found(tmp_path):
    write_cache(tmp_path, mbs=1, dp=1, members=even(8, 4))
    reader = TeacherRowReader(str(tmp_path), layout(), expected_identifiers=None, decode_threads=1)
    stream = reader.iterations(0)
    next(stream)
    (tmp_path / "dp0__0-8.tar").rename(tmp_path / "dp0__0-8.tar.stale")
    write_cache(tmp_path, mbs=1, dp=1, members=even(16, 4), per_shard=4)
    assert outcomes(list(stream))[:3] == [(4, "ok"), (8, "ok"), (12, "ok")]


# ---- overlapping shards --------------------------------------------------------------------


def test_samples_in_two_shards_come_from_the_one_that_starts_later(tmp_path, caplog):
    write_cache(tmp_path, mbs=1, dp=2, members=even(16, 4), per_shard=4, tail=False)
    write_cache(tmp_path, mbs=1, dp=2, members=even(16, 4, start=8), per_shard=4)
    for rank in range(2):
        wanted = layout(2, 1, 4, rank)
        caplog.clear()
        items = read(tmp_path, wanted)
        tails = [item.microbatches[0].tail_logprob is not None for item in items[:-1]]
        assert tails == [False] * 2 + [True] * 4
        (warning,) = caplog.messages
        assert "overlap, such as dp0__0-16.tar and dp0__8-24.tar" in warning


def test_a_shard_inside_a_longer_one_is_read_where_it_is(tmp_path):
    write_cache(tmp_path, mbs=1, dp=1, members=even(24, 4), per_shard=6, tail=False)
    write_cache(tmp_path, mbs=1, dp=1, members=even(8, 4, start=8))
    items = read(tmp_path, layout())
    tails = [item.microbatches[0].tail_logprob is not None for item in items[:-1]]
    assert tails == [False, False, True, True, False, False]


def test_a_resumed_dump_with_another_layout_needs_no_old_rank(tmp_path):
    write_cache(tmp_path, mbs=1, dp=3, members=even(24, 6), per_shard=4)
    write_cache(tmp_path, mbs=2, dp=2, members=even(24, 8, start=12), per_shard=3)
    for rank in range(2):
        wanted = layout(2, 1, 6, rank)
        check(read(tmp_path, wanted), wanted, 0, 36)


def test_shards_that_disagree_are_refused(tmp_path):
    write_cache(tmp_path, mbs=1, dp=2, members=even(8, 8), only_ranks=[0])
    write_cache(tmp_path, mbs=2, dp=2, members=even(8, 8), only_ranks=[1])
    items = read(tmp_path, layout(1, 1, 8))
    assert isinstance(items[0].error, CacheFormatError)
    for part in ("dp0__0-8.tar", "dp1__0-8.tar", "disagree about sample 1"):
        assert part in str(items[0].error)


def owner_by_hand(shards: list[ShardName], sample: int) -> ShardName | None:
    covering = [shard for shard in shards if shard.start <= sample < shard.end]
    return max(covering, key=lambda shard: (shard.start, shard.end), default=None)


def test_overlap_rule_against_brute_force(tmp_path):
    generator = np.random.default_rng(0)
    for case in range(60):
        root = tmp_path / str(case)
        root.mkdir()
        shards = set()
        for _ in range(generator.integers(1, 9)):
            start, length, rank = generator.integers((0, 1, 0), (20, 15, 2))
            shards.add(ShardName(int(rank), int(start), int(start + length)))
        for shard in shards:
            (root / str(shard)).touch()
        directory = ShardDirectory(str(root))
        assert directory.end == max(shard.end for shard in shards)
        for sample in range(40):
            for rank in range(3):
                own = [shard for shard in shards if shard.dp_rank == rank]
                assert directory.shard_of(rank, sample) == owner_by_hand(own, sample)
            expected = owner_by_hand(list(shards), sample)
            for preferred in range(3):
                found = directory.locate(sample, preferred)
                assert (found is None) == (expected is None)
                if found is not None:
                    assert found.shard in shards
                    assert (found.shard.start, found.shard.end) == (expected.start, expected.end)
                    assert found.start <= sample < found.end


def test_stale_unfinished_and_foreign_files_are_ignored(tmp_path):
    write_cache(tmp_path, mbs=1, dp=1, members=even(8, 4))
    for name in ("dp0__4-12.tar.stale", "dp0__8-16.tar.tmp", "dp7__0-8.tar.1", "README", "dp9.tar"):
        (tmp_path / name).write_bytes(b"not a tar")
    wanted = layout()
    check(read(tmp_path, wanted), wanted, 0, 8)


def test_next_shards_of_the_same_rank(tmp_path):
    for name in ("dp0__0-8.tar", "dp0__8-16.tar", "dp0__24-32.tar", "dp1__8-16.tar"):
        (tmp_path / name).touch()
    directory = ShardDirectory(str(tmp_path))
    following = directory.following(ShardName(0, 0, 8), 2)
    assert following == [ShardName(0, 8, 16), ShardName(0, 24, 32)]
    assert directory.following(ShardName(0, 24, 32), 2) == []
    assert directory.following(ShardName(0, 0, 8), 0) == []


# ---- identity ------------------------------------------------------------------------------


def test_identity_mismatch_is_fatal_and_named(tmp_path):
    write_cache(tmp_path, mbs=1, dp=1, members=even(8, 4))
    (failure,) = read(tmp_path, layout(), identity=IDENTIFIERS | {"seed": 8})
    assert failure.fatal
    assert isinstance(failure.error, CacheIdentityError)
    assert "its seed is 7, here it is 8" in str(failure.error)
    assert str(tmp_path / "dp0__0-8.tar") in str(failure.error)


def test_every_shard_is_checked(tmp_path):
    write_cache(tmp_path, mbs=1, dp=2, members=even(8, 4))
    other = IDENTIFIERS | {"train_samples": 12}
    write_cache(tmp_path, mbs=1, dp=2, members=even(8, 4, start=8), identifiers=other)
    items = read(tmp_path, layout(), identity=IDENTIFIERS)
    assert outcomes(items) == [(0, "ok"), (4, "ok"), (8, "CacheIdentityError")]
    assert "train_samples is 12, here it is 96" in str(items[-1].error)
    # Nobody asked: the hash is not looked at.
    assert len(read(tmp_path, layout())) == 5


# ---- damage --------------------------------------------------------------------------------


def rewrite(path: Path, **members: bytes | None) -> None:
    """Replace members of a shard by content, or drop them (None)."""
    files = read_tar(path)
    for key, content in members.items():
        name = {"meta": "_meta.json", "first": "0-4.pt.zst", "second": "4-8.pt.zst"}[key]
        if content is None:
            del files[name]
        else:
            files[name] = content
    write_tar(path, files)


ROWS = [truth(g) for g in range(4)]
GOOD = payload(ROWS, torch.float32, tail=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no zstd", "not one zstd frame"),
        (GOOD[: len(GOOD) // 2], "not one zstd frame"),
        (b"", "not one zstd frame"),
        (zstandard.ZstdCompressor().compress(b"x" * 99), "not an archive of torch.save"),
        (payload(ROWS[:3], torch.float32, tail=True), "has 3 rows, expected 4"),
        (payload(ROWS, torch.float64, tail=True), "'values' is torch.float64"),
    ],
)
def test_a_damaged_member_fails_its_iteration_only(tmp_path, content, message):
    write_cache(tmp_path, mbs=1, dp=1, members=even(16, 4), per_shard=4)
    path = tmp_path / "dp0__0-16.tar"
    rewrite(path, second=content)
    for threads in (1, 4):
        items = read(tmp_path, layout(), decode_threads=threads)
        failed = [name for _, name in outcomes(items)]
        assert failed == ["ok", "CacheFormatError", "ok", "ok", "TeacherDataExhaustedError"]
        text = str(items[1].error)
        assert message in text
        assert "4-8.pt.zst" in text
        assert str(path) in text
        assert "dump these samples again" in text
        assert not items[1].fatal


@pytest.mark.parametrize("change", ["dtype", "sequence"])
def test_rows_of_one_batch_must_have_one_shape(tmp_path, change):
    options = {"dtype": torch.float16} if change == "dtype" else {"seq": 4}
    write_cache(tmp_path, mbs=1, dp=1, members=[(0, 4)])
    write_cache(tmp_path, mbs=1, dp=1, members=[(4, 8)], **options)
    items = read(tmp_path, layout(1, 1, 8))
    assert outcomes(items)[0] == (0, "CacheFormatError")
    assert "differ in" in str(items[0].error)
    assert len(read(tmp_path, layout(1, 1, 4))) == 3


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:2000]), "truncated"),
        (lambda path: path.write_bytes(b""), "truncated"),
        (lambda path: path.write_bytes(b"PK" * 999), "no tar header"),
        (lambda path: rewrite(path, meta=None), "must begin with _meta.json, found 0-4.pt.zst"),
        (lambda path: rewrite(path, meta=b"{}"), "no 'saver' object"),
        (lambda path: rewrite(path, meta=b'{"saver":{"k":8}}'), "format_version None"),
        (lambda path: path.rename(path.with_name("dp5__0-8.tar")), "DP rank 5, but .* dp_size"),
        (lambda path: path.rename(path.with_name("dp0__0-7.tar")), "4-8.pt.zst does not fit"),
        (lambda path: path.rename(path.with_name("dp0__1-8.tar")), "0-4.pt.zst does not fit"),
        (lambda path: (path.unlink(), path.mkdir()), "Cannot read teacher shard"),
    ],
)
def test_a_damaged_shard_fails_its_samples_only(tmp_path, damage, message):
    write_cache(tmp_path, mbs=1, dp=1, members=even(16, 4))
    damage(tmp_path / "dp0__0-8.tar")
    items = read(tmp_path, layout())
    assert [item.start for item in items] == [0, 4, 8, 12, 16]
    assert [isinstance(item, IterationTargets) for item in items[2:]] == [True, True, False]
    errors = [item.error for item in items[:2]]
    assert all(not item.fatal for item in items[:2])
    # Where the name promises less than the shard holds, the rest of the batch is just missing.
    located = [error for error in errors if not isinstance(error, TeacherDataMissingError)]
    assert located
    for error in located:
        assert str(tmp_path / "dp") in str(error)
        assert re.search(message, str(error))


def test_members_out_of_order_or_torn_are_refused(tmp_path):
    write_cache(tmp_path, mbs=1, dp=2, members=even(8, 4))
    path = tmp_path / "dp0__0-8.tar"
    files = read_tar(path)
    orders = [
        ["_meta.json", "4-8.pt.zst", "0-4.pt.zst"],
        ["_meta.json", "0-4.pt.zst", "0-4.pt.zst"],
        ["_meta.json", "0-3.pt.zst"],
    ]
    for order in orders:
        path.unlink()
        with tarfile.open(path, "w") as tar:
            for name in order:
                content = files.get(name, b"x")
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        items = read(tmp_path, layout(2, 1, 4))
        assert isinstance(items[0].error, CacheFormatError)
        assert f"{order[-1]} does not fit" in str(items[0].error)


def test_a_read_error_is_reported_with_its_place(tmp_path, monkeypatch):
    write_cache(tmp_path, mbs=1, dp=1, members=even(8, 4))

    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(open_shard, "read_member", broken)
    items = read(tmp_path, layout())
    assert type(items[0].error) is TeacherDataError
    assert "member 0-4.pt.zst of teacher shard" in str(items[0].error)
    assert "Input/output error" in str(items[0].error)


# ---- economy -------------------------------------------------------------------------------


def test_only_what_is_needed_is_read_and_decoded_once(tmp_path, monkeypatch):
    write_cache(tmp_path, mbs=1, dp=2, members=even(96, 24), per_shard=2)
    decoded = []
    opened = []
    decode = shard_directory.OpenShard.decode
    open_read = storage.open_read

    def watch_decode(shard, member):
        decoded.append((shard.name.dp_rank, member.start))
        return decode(shard, member)

    monkeypatch.setattr(shard_directory.OpenShard, "decode", watch_decode)
    monkeypatch.setattr(storage, "open_read", lambda p, **k: opened.append(p) or open_read(p, **k))
    # A quarter of the teacher's batch size: four iterations share a member.
    read(tmp_path, layout(2, 1, 6, rank=1), start=24, decode_threads=4)
    assert sorted(decoded) == [(1, 24), (1, 48), (1, 72)]
    assert [os.path.basename(path) for path in opened] == ["dp1__0-48.tar", "dp1__48-96.tar"]


def test_ranks_start_from_different_shards(grid, monkeypatch):
    opened = []
    open_read = storage.open_read
    monkeypatch.setattr(storage, "open_read", lambda p, **k: opened.append(p) or open_read(p, **k))
    for rank in range(6):
        read(grid[1, 6, 24], layout(6, 1, 24, rank))
    assert len(opened) == 6


def test_nothing_stays_open(tmp_path):
    write_cache(tmp_path, mbs=1, dp=2, members=even(32, 4), per_shard=1)
    reader = TeacherRowReader(str(tmp_path), layout(), expected_identifiers=None)
    descriptors, threads = os.listdir("/proc/self/fd"), threading.active_count()
    stream = reader.iterations(0)
    assert os.listdir("/proc/self/fd") == descriptors
    next(stream)
    next(stream)  # works ahead once it knows how much an iteration takes
    assert len(os.listdir("/proc/self/fd")) > len(descriptors)
    stream.close()
    assert os.listdir("/proc/self/fd") == descriptors
    assert threading.active_count() == threads
    stream = reader.iterations(0)
    most = max(len(os.listdir("/proc/self/fd")) for _ in stream)
    assert most <= len(descriptors) + 2 * (4 + 1)  # two shards per iteration in flight
    assert os.listdir("/proc/self/fd") == descriptors
    assert threading.active_count() == threads


def test_what_crosses_a_loader_process_is_picklable(tmp_path):
    write_cache(tmp_path, mbs=1, dp=1, members=even(8, 4))
    reader = TeacherRowReader(str(tmp_path), layout(), expected_identifiers=IDENTIFIERS)
    items = list(pickle.loads(pickle.dumps(reader)).iterations(0))
    targets, _, failure = pickle.loads(pickle.dumps(items))
    check_rows(targets.microbatches[2], [2])
    assert isinstance(failure.error, TeacherDataExhaustedError)
    assert str(failure.error) == str(items[2].error)
    for kind in (TeacherDataMissingError, CacheFormatError, CacheIdentityError):
        assert str(pickle.loads(pickle.dumps(kind("text")))) == "text"


# ---- layout, object storage ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gbs": 6, "mbs": 4}, r"global batch size \(6\) .*\(4 \* 1\)"),
        ({"gbs": 0}, "positive multiple"),
        ({"rank": 1}, "data-parallel rank is 1, expected 0 to 0"),
        ({"cp_rank": 2, "cp_size": 2}, "context-parallel rank is 2, expected 0 to 1"),
    ],
)
def test_layouts_that_megatron_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        layout(**changes)


def test_negative_start(tmp_path):
    with pytest.raises(ValueError, match="start_sample is -1"):
        read(tmp_path, layout(), -1)


def test_object_storage_with_prefetch(tmp_path, monkeypatch):
    pytest.importorskip("multistorageclient")
    (tmp_path / "cache").mkdir()
    write_cache(tmp_path / "cache", mbs=1, dp=2, members=even(32, 4), per_shard=1)
    provider = {"type": "file", "options": {"base_path": str(tmp_path)}}
    config = {"profiles": {"test-shard-reader": {"storage_provider": provider}}}
    (tmp_path / "msc.json").write_text(json.dumps(config))
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
    root = "msc://test-shard-reader/cache"
    opened = []
    open_read = storage.open_read
    monkeypatch.setattr(storage, "open_read", lambda p, **k: opened.append(p) or open_read(p, **k))
    wanted = layout(2, 1, 4, rank=1)
    descriptors = None
    for depth in (0, 3):
        opened.clear()
        stream = TeacherRowReader(
            root,
            wanted,
            expected_identifiers=IDENTIFIERS,
            decode_threads=1,
            msc_prefetch_depth=depth,
        ).iterations(0)
        items = [next(stream)]
        # The first shard is compared with the next one, which is one of those ahead of it.
        assert len(opened) == 1 + max(1, depth)
        items += stream
        check(items, wanted, 0, 32)
        assert opened == [f"{root}/dp1__{a}-{a + 4}.tar" for a in range(0, 32, 4)]
        now = len(os.listdir("/proc/self/fd"))
        descriptors = descriptors or now
        assert now == descriptors
    (failure,) = read("msc://test-shard-reader/missing", layout())
    assert "cannot list the directory" in str(failure.error)
