# SPDX-License-Identifier: Apache-2.0
"""Format v1: NVIDIA's caches, its saver inside the wheel, changed DP sizes, and what is refused."""

import argparse
import functools
import io
import itertools
import json
import logging
import pickle
import shutil
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import zstandard

from megatron.training.datasets.data_samplers import MegatronPretrainingSampler
from megatron.training.distillation import (
    argument_checks,
    cached_logits_loss,
    errors,
    legacy,
    storage,
)
from megatron.training.distillation.shard_reader import TeacherRowReader
from megatron.training.distillation.target_stream import StreamOptions, TargetStream
from megatron.training.distillation.targets import IterationFailure, IterationTargets, LoadLayout
from tests.unit_tests.distributed import run_ranks
from tests.unit_tests.training.distillation.wheel_modules import wheel_module

IDENTIFIERS = {"seed": 7, "train_samples": 96, "blend": {"kind": "mock", "mock": True}}
V1_IDENTIFIERS = {
    "seed": 7,
    "sequence_length": 8,
    "train_samples": 96,
    "blend": {"kind": "mock", "mock": True},
}
S, K = 8, 3


def truth(sample: int, k: int = K) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and ids ``(S, k)`` that tell every sample, position and entry apart."""
    position, entry = torch.arange(S).view(S, 1), torch.arange(k).view(1, k)
    indices = (sample * 509 + position * 31 + entry * 65537) % (1 << 17)
    return -(entry + sample / 64 + position / 1024), indices


def write_cache(
    root: Path,
    *,
    mbs: int = 1,
    dp: int = 1,
    gbs: int = 4,
    iterations: range = range(4),
    per_shard: int = 2,
    widths: tuple[int, ...] = (K,),
    dtype: torch.dtype = torch.float32,
    meta: dict[str, Any] | None = None,
    only_ranks: tuple[int, ...] | None = None,
) -> None:
    """Write what a v1 teacher would; the width K goes round with the global microbatch."""
    if meta is None:
        meta = {"hash": "of v1", "identifiers": V1_IDENTIFIERS, "saver": {"k": K, "p": None}}
    for rank in range(dp) if only_ranks is None else only_ranks:
        for shard in itertools.batched(iterations, per_shard):
            files = {"_meta.json": json.dumps(meta).encode()}
            for iteration in shard:
                start = iteration * gbs
                dealt = list(MegatronPretrainingSampler(start + gbs, start, mbs, rank, dp))
                k = [widths[samples[0] // mbs % len(widths)] for samples in dealt]
                rows = [
                    [truth(sample, width) for sample in samples]
                    for samples, width in zip(dealt, k, strict=True)
                ]
                values = [torch.stack([v for v, _ in part], 1).to(dtype) for part in rows]
                indices = [torch.stack([i for _, i in part], 1) for part in rows]
                files[f"{iteration}.pt.zst"] = frame(payload(values, indices))
            write_tar(root / f"cp0_dp{rank}__{shard[-1]}.tar", files)


def payload(values: list[torch.Tensor], indices: list[torch.Tensor]) -> dict[str, Any]:
    return {
        "values": values,
        "indices_low": [(part & 0xFFFF).to(torch.uint16) for part in indices],
        "bit_17": [(part >> 16).bool() for part in indices],
    }


def frame(content: Any) -> bytes:
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


def layout(dp=1, mbs=1, gbs=4, rank=0, **other) -> LoadLayout:
    return LoadLayout(dp_rank=rank, dp_size=dp, mbs=mbs, gbs=gbs, **other)


def read(root, wanted: LoadLayout, start: int = 0, identity=None, **options) -> list:
    reader = TeacherRowReader(str(root), wanted, expected_identifiers=identity, **options)
    return list(reader.iterations(start))


def dealt_rows(items: list, wanted: LoadLayout, start: int, end: int):
    """Yield each microbatch with its samples; the items must be those of ``[start, end)``."""
    *targets, last = items
    assert isinstance(last.error, errors.TeacherDataExhaustedError), last
    assert "exhausted" in str(last.error)
    assert [item.start for item in targets] == list(range(start, end, wanted.gbs))
    sampler = MegatronPretrainingSampler(end, start, wanted.mbs, wanted.dp_rank, wanted.dp_size)
    yield from zip([m for item in targets for m in item.microbatches], sampler, strict=True)


def check(items: list, wanted: LoadLayout, start: int, end: int, dtype=torch.float32) -> None:
    for rows, samples in dealt_rows(items, wanted, start, end):
        values, indices = (torch.stack(part, 1) for part in zip(*map(truth, samples), strict=True))
        assert torch.equal(rows.values, values.to(dtype))
        assert torch.equal(rows.indices, indices.int())
        assert rows.tail_logprob is None


def fatal_error(root, wanted: LoadLayout, start: int = 0, identity=None) -> Exception:
    (failure,) = read(root, wanted, start, identity)
    assert isinstance(failure, IterationFailure)
    assert failure.fatal
    assert failure.start == start
    return failure.error


# ---- caches that NVIDIA's code wrote -------------------------------------------------------

REFERENCE = Path(__file__).parents[5] / "shared" / "reference_caches"
REFERENCE_RUNS = {"v1_a": (2, 8, 48), "v1_b": (1, 6, 36)}  # mbs, gbs, samples


def compare_with_dense(found: torch.Tensor, ids: torch.Tensor, values, indices) -> None:
    """Compare entries ``(S, mbs, k)`` with whole rows ``(S, mbs, K)``, k at most K."""
    width = found.shape[-1]
    assert torch.equal(found.float(), values[..., :width])
    assert (values[..., width:] == -1000.0).all()
    kept = found != -1000.0
    assert torch.equal(ids[kept], indices[..., :width][kept])


@pytest.mark.skipif(not REFERENCE.is_dir(), reason=f"the reference caches are not at {REFERENCE}")
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize(
    ("run", "dp"), [("v1_a", 1), ("v1_a", 2), ("v1_a", 4), *(("v1_b", dp) for dp in (1, 2, 3, 6))]
)
def test_reference_caches_at_every_legal_dp(run, dp, cp):
    mbs, gbs, total = REFERENCE_RUNS[run]
    identity = {"seed": 1234, "train_samples": total, "blend": {"kind": "mock", "mock": True}}
    with np.load(REFERENCE / run / "expected.npz") as expected:
        values, indices = (
            torch.from_numpy(expected[key]).transpose(0, 1) for key in ("values", "indices")
        )
    for rank, cp_rank, start in itertools.product(range(dp), range(cp), (0, 3 * gbs)):
        wanted = layout(dp, mbs, gbs, rank, cp_rank=cp_rank, cp_size=cp, seq_length=32)
        chunks = torch.arange(32).chunk(2 * cp)
        position = torch.cat([chunks[cp_rank], chunks[2 * cp - 1 - cp_rank]]) if cp > 1 else ...
        items = read(REFERENCE / run, wanted, start, identity, decode_threads=2)
        for rows, samples in dealt_rows(items, wanted, start, total):
            compare_with_dense(
                rows.values,
                rows.indices,
                values[:, samples][position],
                indices[:, samples][position],
            )


def test_reference_shard_of_this_tree(tmp_path):
    """The same without the reference caches: iterations 0 and 1 of v1_b, mbs 1, gbs 6, top-P."""
    shard = Path(__file__).parent / "data" / "v1_cp0_dp0__1.tar"
    shutil.copy(shard, tmp_path / "cp0_dp0__1.tar")
    stored = []
    for name, data in list(read_tar(shard).items())[1:]:
        content = torch.load(
            io.BytesIO(zstandard.ZstdDecompressor().decompress(data)), weights_only=True
        )
        assert name == f"{len(stored) // 6}.pt.zst"
        stored += zip(*content.values(), strict=True)
    identity = {"seed": 1234, "train_samples": 36, "blend": {"kind": "mock", "mock": True}}
    for dp in (1, 2, 3, 6):
        for rank in range(dp):
            wanted = layout(dp, 1, 6, rank, seq_length=32)
            items = read(tmp_path, wanted, 0, identity)
            for rows, (sample,) in dealt_rows(items, wanted, 0, 12):
                values, low, high = stored[sample]
                width = values.shape[-1]
                assert torch.equal(rows.values[..., :width], values)
                assert (rows.values[..., width:] == -1000.0).all()
                kept = rows.values != -1000.0
                ids = (high.long() << 16) | low.long()
                assert torch.equal(rows.indices[kept], ids[kept[..., :width]].int())
                if sample == 7:
                    assert rows.values.dtype == torch.bfloat16
                    assert rows.values[3, 0, :3].tolist() == [-0.000179290771484375, -8.75, -1000]
                    assert rows.indices[3, 0, :2].tolist() == [98745, 86880]


VOCAB, WHEEL_SEQ, WHEEL_K = 200, 8, 12


def _dump_with_the_wheel(rank, world_size, root, logits, mbs, dp, gbs, options) -> None:
    """Run the wheel's saver over logits ``(samples, S, V)``, one process playing all DP ranks."""
    from megatron.core import num_microbatches_calculator, parallel_state
    from megatron.training import arguments as megatron_arguments
    from megatron.training import global_vars

    parser = megatron_arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_args(["--mock-data", "--seed", "7", "--seq-length", str(WHEEL_SEQ)])
    args.train_samples = len(logits)
    global_vars.set_args(args)
    parallel_state.initialize_model_parallel()
    num_microbatches_calculator.init_num_microbatches_calculator(0, None, gbs, mbs, dp, False)
    wheel_module("megatron.training.distillation.utils_logits", "utils_logits")
    saver_module = wheel_module("wheel_logits_saver", "logits_saver")
    for dp_rank in range(dp):
        parallel_state.get_data_parallel_rank = lambda *_, dp_rank=dp_rank, **__: dp_rank
        saver = saver_module.LogitsSaverHooks(root, WHEEL_K, **options)
        model = torch.nn.Module()
        model.output_layer = torch.nn.Identity()
        model.compute_language_model_loss = lambda labels, logits: logits
        saver.attach_hooks(model.train())
        sampler = iter(MegatronPretrainingSampler(len(logits), 0, mbs, dp_rank, dp))
        for iteration in range(len(logits) // gbs):
            args.curr_iteration = iteration
            for _ in range(gbs // (mbs * dp)):
                model.output_layer(logits[next(sampler)].transpose(0, 1))
            if iteration % 2:
                saver._write_batched_tar(*saver.take_pending_data())


@pytest.mark.parametrize(
    ("mbs", "dp", "options"),
    [
        (2, 2, {"p": 0.9, "min_k": 2, "save_dtype": "fp32"}),
        (1, 3, {"save_dtype": "fp16"}),
        (3, 1, {"p": 0.5, "save_dtype": "bf16"}),
    ],
)
def test_what_the_wheels_saver_writes(tmp_path, mbs, dp, options):
    """Values and ids of every token against a dense log-softmax in float64."""
    gbs, total = 12, 48
    scale = torch.linspace(0.5, 4, total).view(-1, 1, 1)  # nuclei of very different sizes
    logits = torch.randn(total, WHEEL_SEQ, VOCAB, generator=torch.manual_seed(3)) * scale
    run_ranks(1, _dump_with_the_wheel, str(tmp_path), logits, mbs, dp, gbs, options)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"cp0_dp{rank}__{last}.tar" for rank in range(dp) for last in (1, 3)
    ]
    dense = torch.log_softmax(logits.double(), -1)
    top, ids = dense.topk(WHEEL_K, -1)
    p, min_k = options.get("p"), options.get("min_k", 1)
    kept = torch.ones_like(top, dtype=torch.bool)
    if p is not None:
        mass_before = top.exp().cumsum(-1) - top.exp()
        kept = (mass_before < p) | (torch.arange(WHEEL_K) < min_k)
    tolerance = {"fp32": 1e-5, "fp16": 1e-3, "bf16": 8e-3}[options["save_dtype"]]
    identity = {**IDENTIFIERS, "train_samples": total}
    for load_dp in (size for size in range(1, gbs + 1) if gbs % (size * mbs) == 0):
        for rank in range(load_dp):
            wanted = layout(load_dp, mbs, gbs, rank, seq_length=WHEEL_SEQ)
            items = read(tmp_path, wanted, 0, identity)
            for rows, samples in dealt_rows(items, wanted, 0, total):
                here = kept[samples].transpose(0, 1)
                width = rows.values.shape[-1]
                assert not here[..., width:].any()
                assert torch.equal(rows.values != -1000.0, here[..., :width])
                here = here[..., :width]
                expected = top[samples].transpose(0, 1)[..., :width]
                torch.testing.assert_close(
                    rows.values.double()[here], expected[here], rtol=tolerance, atol=tolerance
                )
                expected_ids = ids[samples].transpose(0, 1)[..., :width]
                assert torch.equal(rows.indices[here], expected_ids[here].int())


# ---- another DP size -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mbs", "dp_save", "dp_load", "gbs"),
    [
        *[(1, 4, 4, 24), (1, 4, 8, 24), (1, 8, 4, 24), (1, 4, 6, 24), (1, 6, 4, 24)],
        *[(1, 3, 5, 30), (1, 5, 3, 30)],
        *[(2, 4, 6, 48), (2, 6, 1, 24), (3, 1, 2, 12), (2, 12, 1, 24), (2, 1, 12, 24)],
    ],
)
def test_any_dp_reads_what_the_sampler_deals(tmp_path, mbs, dp_save, dp_load, gbs):
    write_cache(tmp_path, mbs=mbs, dp=dp_save, gbs=gbs, iterations=range(3))
    for rank in range(dp_load):
        wanted = layout(dp_load, mbs, gbs, rank)
        for iteration in (0, 1 + rank % 2):
            threads = 1 + 2 * (rank % 2)
            items = read(tmp_path, wanted, iteration * gbs, IDENTIFIERS, decode_threads=threads)
            check(items, wanted, iteration * gbs, 3 * gbs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_keep_their_dtype(tmp_path, dtype):
    write_cache(tmp_path, mbs=2, dp=2, gbs=8, dtype=dtype)
    wanted = layout(1, 2, 8)
    check(read(tmp_path, wanted), wanted, 0, 32, dtype=dtype)


@pytest.mark.parametrize("widths", [(8,), (3, 8, 1), (16, 8), (9, 5, 7, 2, 9)])
def test_microbatches_of_different_width_are_padded(tmp_path, widths):
    write_cache(tmp_path, mbs=2, dp=2, gbs=12, widths=widths)
    for dp, rank in ((3, 0), (3, 2), (1, 0)):
        wanted = layout(dp, 2, 12, rank)
        for rows, samples in dealt_rows(read(tmp_path, wanted), wanted, 0, 48):
            width = widths[samples[0] // 2 % len(widths)]
            expected = [truth(sample, width) for sample in samples]
            assert torch.equal(rows.values[..., :width], torch.stack([v for v, _ in expected], 1))
            ids = torch.stack([i for _, i in expected], 1).int()
            assert torch.equal(rows.indices[..., :width], ids)
            assert (rows.values[..., width:] == -1000.0).all()
            assert set(rows.indices[..., width:].flatten().tolist()) <= {-1, 131071}


def test_context_parallel_ranks_slice_the_trimmed_sequence(tmp_path, caplog):
    write_cache(tmp_path)
    whole = read(tmp_path, layout())[0].microbatches[1].values
    for cp_rank, positions in ((0, [0, 3]), (1, [1, 2])):
        wanted = layout(cp_rank=cp_rank, cp_size=2, seq_length=4)
        found = read(tmp_path, wanted)[0].microbatches[1].values
        assert torch.equal(found, whole[positions])
    assert "trimming" in caplog.text
    error = fatal_error(tmp_path, layout(seq_length=9))
    assert isinstance(error, errors.TeacherSequenceError)


# ---- metadata and identity -----------------------------------------------------------------


def test_sizes_in_the_metadata_are_accepted_and_not_needed(tmp_path):
    saver = {"format_version": 1, "mbs_save": 1, "dp_size_save": 2, "gbs_save": 4}
    write_cache(tmp_path, dp=2, meta={"saver": saver})
    check(read(tmp_path, layout()), layout(), 0, 16)
    error = fatal_error(tmp_path, layout(), identity=IDENTIFIERS)
    assert isinstance(error, errors.CacheIdentityError)


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[]", "no 'saver' object"),
        (b'{"saver":{"format_version":2}}', "format_version 2, expected None or 1"),
    ],
)
def test_other_metadata_is_refused(tmp_path, meta, message):
    write_cache(tmp_path, iterations=range(2))
    files = read_tar(tmp_path / "cp0_dp0__1.tar")
    write_tar(tmp_path / "cp0_dp0__1.tar", {**files, "_meta.json": meta})
    first, *_ = read(tmp_path, layout())
    assert isinstance(first.error, errors.CacheFormatError)
    assert message in str(first.error)
    assert "cp0_dp0__1.tar" in str(first.error)


@pytest.mark.parametrize(
    ("key", "value", "seq_length", "message"),
    [
        ("seed", 8, 8, "its seed is 7, here it is 8"),
        ("train_samples", 97, None, "its train_samples is 96, here it is 97"),
        ("blend", {"kind": "blend", "blend": [[1.0, "x"]]}, 8, 'here it is {"kind":"blend",'),
        ("seed", 7, 4, "its sequence_length is 8, here it is 4"),
    ],
)
def test_identity_is_compared_field_by_field(tmp_path, key, value, seq_length, message):
    write_cache(tmp_path)
    wanted = layout(seq_length=seq_length)
    error = fatal_error(tmp_path, wanted, identity={**IDENTIFIERS, key: value})
    assert isinstance(error, errors.CacheIdentityError)
    assert message in str(error)
    assert "cp0_dp0__1.tar" in str(error)
    assert isinstance(read(tmp_path, wanted, identity=None)[0], IterationTargets)


@pytest.mark.parametrize("seq_length", [None, 8])
def test_same_identity_is_accepted(tmp_path, seq_length):
    write_cache(tmp_path)
    wanted = layout(seq_length=seq_length)
    check(read(tmp_path, wanted, identity=IDENTIFIERS), wanted, 0, 16)


def test_absent_identifiers_prove_nothing(tmp_path):
    partly = {key: V1_IDENTIFIERS[key] for key in ("seed", "sequence_length", "blend")}
    for identifiers in (None, partly):
        write_cache(tmp_path, meta={"hash": "x", "identifiers": identifiers, "saver": {}})
        error = fatal_error(tmp_path, layout(), identity=IDENTIFIERS)
        assert isinstance(error, errors.CacheIdentityError)


# ---- what v1 cannot do ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (layout(1, 1, 8), "--micro-batch-size 2 .* here it is 1"),
        (layout(1, 4, 8), "--micro-batch-size 2 .* here it is 4"),
        (layout(1, 2, 4), r"--global-batch-size 8 \(2 microbatches of 2 .* 2 DP.* here it is 4"),
        (layout(3, 2, 6), "--global-batch-size 8 .* here it is 6"),
        (layout(4, 2, 16, 3), "--global-batch-size 8 .* here it is 16"),
    ],
)
def test_changed_batch_sizes_are_refused_with_both_numbers(tmp_path, wanted, message):
    write_cache(tmp_path, mbs=2, dp=2, gbs=8, iterations=range(8))
    error = fatal_error(tmp_path, wanted)
    assert isinstance(error, errors.TeacherLayoutError)
    with pytest.raises(errors.TeacherLayoutError, match=message):
        raise error


def test_start_inside_an_iteration_is_refused(tmp_path):
    write_cache(tmp_path)
    error = fatal_error(tmp_path, layout(), start=6)
    assert isinstance(error, errors.TeacherLayoutError)
    assert "iterations of 4 samples" in str(error)
    assert "sample 6 is not the start of one" in str(error)


def test_context_parallel_shards_are_refused(tmp_path):
    write_cache(tmp_path)
    (tmp_path / "cp1_dp0__1.tar").touch()
    error = fatal_error(tmp_path, layout())
    assert isinstance(error, errors.TeacherLayoutError)
    assert "cp1_dp0__1.tar" in str(error)
    assert "context-parallel rank 1, expected rank 0 only" in str(error)


def test_missing_dp_ranks_are_named(tmp_path):
    write_cache(tmp_path, dp=4, only_ranks=(0, 3))
    error = fatal_error(tmp_path, layout())
    assert isinstance(error, errors.TeacherLayoutError)
    assert "recorded with 4 DP ranks, but no shard of DP rank 1, 2" in str(error)
    assert "cp0_dp1__1.tar" in str(error)


def test_missing_highest_rank_shows_in_the_batch_size(tmp_path):
    write_cache(tmp_path, dp=4, only_ranks=(0, 1, 2))
    error = fatal_error(tmp_path, layout())
    assert "--global-batch-size 3 " in str(error)
    assert "here it is 4" in str(error)


# ---- holes, ends, damage -------------------------------------------------------------------


def test_hole_is_misaligned_and_passed_over(tmp_path):
    write_cache(tmp_path, dp=2, iterations=range(6))
    for rank in range(2):
        (tmp_path / f"cp0_dp{rank}__3.tar").unlink()
    items = read(tmp_path, layout(), 4)
    assert [isinstance(item, IterationTargets) for item in items] == [1, 0, 0, 1, 1, 0]
    for item, sample in zip(items[1:3], (8, 12), strict=True):
        assert isinstance(item.error, errors.TeacherDataMissingError)
        assert not item.fatal
        assert f"misaligned with training: sample {sample} is needed" in str(item.error)
        assert "cp0_dp0__5.tar has no member for it" in str(item.error)
        assert "shards of format v1 up to sample 23" in str(item.error)
    assert "exhausted: its last sample is 23" in str(items[-1].error)


def test_data_ahead_is_misaligned(tmp_path):
    write_cache(tmp_path, iterations=range(4, 12))
    items = read(tmp_path, layout())
    assert [type(item.error) for item in items[:4]] == 4 * [errors.TeacherDataMissingError]
    check(items[4:], layout(), 16, 48)


def test_rank_that_lags_behind_is_missing(tmp_path):
    write_cache(tmp_path, dp=2)
    (tmp_path / "cp0_dp1__3.tar").unlink()
    first, second, third, *_ = read(tmp_path, layout())
    assert isinstance(first, IterationTargets)
    assert isinstance(second, IterationTargets)
    assert isinstance(third.error, errors.TeacherDataMissingError)
    assert "there is no cp0_dp1__3.tar beside cp0_dp0__3.tar" in str(third.error)


def damaged(change) -> bytes:
    values, indices = truth(0)
    content = payload(2 * [values[:, None]], 2 * [indices[:, None]])
    change(content)
    return frame(content)


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (b"not zstd", "not one zstd frame"),
        (frame([1]), "are not lists with one tensor per microbatch"),
        (frame({"values": torch.zeros(1, 1, 1), "format_version": 2}), "are not lists"),
        (damaged(lambda c: c.pop("bit_17")), "are not lists"),
        (damaged(lambda c: c["values"].pop()), "are not lists"),
        (damaged(lambda c: [part.clear() for part in c.values()]), "are not lists"),
        (damaged(lambda c: c["values"].__setitem__(0, 3)), "'values' is a int, expected a tensor"),
        (
            damaged(lambda c: c.update(values=[v.double() for v in c["values"]])),
            "'values' is torch.float64",
        ),
        (
            damaged(lambda c: c.update(bit_17=[b.to(torch.uint8) for b in c["bit_17"]])),
            "'bit_17' is torch.uint8",
        ),
        (
            damaged(lambda c: c.update(indices_low=[i[:4] for i in c["indices_low"]])),
            "'indices_low' is torch.uint16 of shape (4, 1, 3)",
        ),
        (
            damaged(lambda c: c["values"].__setitem__(1, c["values"][1].half())),
            "its microbatches differ in (S, mbs) or dtype",
        ),
        (
            damaged(lambda c: c.update({k: [t[:, :, :1].expand(-1, -1, 3) for t in c[k]]
                                        for k in c})),
            "not a contiguous tensor",
        ),
    ],
)  # fmt: skip
def test_damaged_members_fail_their_own_iteration(tmp_path, member, message):
    write_cache(tmp_path, gbs=2, iterations=range(2))
    path = tmp_path / "cp0_dp0__1.tar"
    write_tar(path, {**read_tar(path), "0.pt.zst": member})
    first, second, _ = read(tmp_path, layout(gbs=2))
    assert isinstance(first.error, errors.CacheFormatError)
    assert not first.fatal
    assert f"member 0.pt.zst of teacher shard {path} is damaged: " in str(first.error)
    assert message in str(first.error)
    assert isinstance(second, IterationTargets)


@pytest.mark.parametrize("order", [(1, 0), (0, 0), (0, 2)])
def test_members_must_ascend_up_to_the_name(tmp_path, order):
    write_cache(tmp_path, iterations=range(3), per_shard=3)
    files = read_tar(tmp_path / "cp0_dp0__2.tar")
    (tmp_path / "cp0_dp0__2.tar").unlink()
    with tarfile.open(tmp_path / "cp0_dp0__1.tar", "w") as tar:
        for name in ("_meta.json", *(f"{iteration}.pt.zst" for iteration in order)):
            info = tarfile.TarInfo(name)
            info.size = len(files[name])
            tar.addfile(info, io.BytesIO(files[name]))
    first, *_ = read(tmp_path, layout())
    assert f"member {order[1]}.pt.zst does not fit, expected ascending iterations up to 1" in str(
        first.error
    )


# ---- directories ---------------------------------------------------------------------------


def test_other_files_are_ignored(tmp_path):
    write_cache(tmp_path)
    for name in (
        *("cp0_dp1__3.tar.stale", "cp0_dp1__3.tar.tmp", "cp0_dp01__3.tar", "cp1_dp0__x.tar"),
        *("expected.npz", "xcp1_dp0__1.tar", "cp1_dp0__1.tar2"),
    ):
        (tmp_path / name).touch()
    check(read(tmp_path, layout()), layout(), 0, 16)


def test_shards_of_v2_hide_those_of_v1(tmp_path, caplog):
    write_cache(tmp_path, mbs=1, gbs=2)
    (tmp_path / "cp1_dp0__7.tar").touch()
    v2 = Path(__file__).parent / "data" / "v2_dp0__0-16.tar"
    shutil.copy(v2, tmp_path / "dp0__0-16.tar")
    items = read(tmp_path, layout(2, 2, 8, 0))  # the teacher's rank 0 of 2
    assert [len(item.microbatches) for item in items[:-1]] == [2, 2]
    assert items[0].microbatches[0].values.shape == (32, 2, 8)
    assert not caplog.records


def test_one_deprecation_warning(tmp_path, caplog):
    write_cache(tmp_path, dp=2, iterations=range(8))
    with caplog.at_level(logging.WARNING):
        read(tmp_path, layout())
    (record,) = caplog.records
    assert "format v1, which is deprecated" in record.getMessage()
    assert str(tmp_path) in record.getMessage()


def test_directory_is_listed_once_to_start(tmp_path, monkeypatch):
    write_cache(tmp_path)
    listed = []
    list_names = storage.list_names
    monkeypatch.setattr(storage, "list_names", lambda path: listed.append(path) or list_names(path))
    stream = TeacherRowReader(str(tmp_path), layout(), expected_identifiers=None).iterations(0)
    next(stream)
    assert listed == [str(tmp_path)]
    stream.close()


def test_teacher_that_is_still_writing(tmp_path):
    write_cache(tmp_path, iterations=range(2))
    stream = TeacherRowReader(
        str(tmp_path), layout(), expected_identifiers=None, decode_threads=2
    ).iterations(0)
    assert isinstance(next(stream), IterationTargets)
    write_cache(tmp_path, iterations=range(2, 4))
    rest = list(stream)
    check(rest, layout(), 4, 16)


def test_shards_that_reach_back_behind_an_earlier_one(tmp_path):
    """A dump resumed at iteration 4 with another interval: the shard up to 7 holds 4 and 5 too."""
    write_cache(tmp_path, dp=2, iterations=range(6))
    write_cache(tmp_path, dp=2, iterations=range(4, 8), per_shard=4)
    for start in (0, 16, 20, 24):
        check(read(tmp_path, layout(), start), layout(), start, 32)


def test_object_storage_with_prefetch(tmp_path, monkeypatch):
    write_cache(tmp_path, dp=2, iterations=range(8))
    opened = []
    local_open = functools.partial(open, mode="rb")
    names = sorted(path.name for path in tmp_path.iterdir())
    monkeypatch.setattr(storage, "is_remote", lambda path: True)
    monkeypatch.setattr(storage, "join", lambda directory, name: str(Path(directory) / name))
    monkeypatch.setattr(storage, "list_names", lambda path: names)
    monkeypatch.setattr(
        storage, "open_read", lambda path, **_: opened.append(Path(path).name) or local_open(path)
    )
    wanted = layout(2, rank=1)
    check(read(tmp_path, wanted, decode_threads=1, msc_prefetch_depth=2), wanted, 0, 32)
    assert opened == [f"cp0_dp1__{last}.tar" for last in (1, 3, 5, 7)]


# ---- the way to the student ----------------------------------------------------------------


def test_stream_through_a_loader_process(tmp_path):
    write_cache(tmp_path, mbs=2, dp=2, gbs=8)
    options = StreamOptions(
        logprobs_dir=str(tmp_path),
        expected_identifiers=IDENTIFIERS,
        decode_threads=2,
        decode_lookahead=None,
        msc_prefetch_depth=2,
    )
    wanted = layout(4, 2, 8, rank=3, seq_length=S)
    assert isinstance(pickle.loads(pickle.dumps(options.reader(wanted))), TeacherRowReader)
    stream = TargetStream(options, wanted)
    items = [stream.iteration(start) for start in range(0, 40, 8)]
    check(items, wanted, 0, 32)
    for wrong in (layout(4, 1, 8), layout(1, 2, 16)):
        item = TargetStream(options, wrong).iteration(0)
        assert item.fatal
        assert isinstance(item.error, errors.TeacherLayoutError)


def test_teacher_tar_dataset_reads_v1(tmp_path, monkeypatch):
    write_cache(tmp_path, mbs=2, dp=2, gbs=12)
    namespace = SimpleNamespace(micro_batch_size=2, global_batch_size=12)
    monkeypatch.setattr(cached_logits_loss, "get_args", lambda: namespace)
    dataset = cached_logits_loss.make_teacher_tar_dataset(
        str(tmp_path), 0, 1, 2, 3, start_iteration=1, ignore_hash=True
    )
    found = list(dataset)
    assert [iteration for iteration, _, _ in found] == [1, 2, 3]
    for iteration, values, indices in found:
        for m in range(2):
            first = iteration * 12 + (m * 3 + 2) * 2
            expected = [torch.stack(t, 1) for t in zip(truth(first), truth(first + 1), strict=True)]
            assert torch.equal(values[m], expected[0])
            assert torch.equal(indices[m], expected[1].int())


def test_load_directory_of_v1_passes_the_flag_check(tmp_path):
    args = argparse.Namespace(
        logits_load_dir=str(tmp_path),
        logits_save_dir=None,
        logits_load_kd_loss_alpha=1.0,
        logits_load_decode_threads=1,
        logits_load_msc_prefetch_depth=0,
        logits_load_max_ahead_bytes=1,
        logits_load_ignore_errors=False,
        logits_load_max_skipped_share=0.05,
    )
    assert len(argument_checks._load_problems(args)) == 1
    (tmp_path / "cp0_dp0__1.tar").touch()
    assert argument_checks._load_problems(args) == []


def test_shard_names():
    assert legacy.is_shard_name("cp0_dp0__0.tar")
    assert legacy.is_shard_name("cp1_dp12__345.tar")
    for name in ("dp0__0-16.tar", "cp0_dp0__01.tar", "cp0_dp0__1.tar.stale", "cp0_dp0__1-2.tar"):
        assert not legacy.is_shard_name(name)


def test_layout_errors_survive_pickling():
    error = pickle.loads(pickle.dumps(errors.TeacherLayoutError("why")))
    assert isinstance(error, errors.CacheFormatError)
    assert str(error) == "why"
