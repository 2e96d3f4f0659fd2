# SPDX-License-Identifier: Apache-2.0
"""``plan`` predicts what real encoders, shards and readers take."""

import functools
import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bench_format
from megatron.training.distillation.shard_writer import write_batched_tar
from megatron.training.distillation.utils import (
    LogprobsReshardPlan,
    SaverSettings,
    ShardMeta,
    member_name,
)
from tests.unit_tests.tools.settings import setting as read_setting
from tests.unit_tests.training.distillation.cache_files import (
    IDENTIFIERS,
    encode_payload,
    large_rows,
    write_large_shard,
    write_shard,
)
from tools import logits_cache, logits_load_plan
from tools.cache.dump_plan import DumpSetting, likely_students, plan_format, plan_student, raw_bytes
from tools.cache.payload_sizes import PayloadSize, Sizes, synthetic_sizes
from tools.cache.synthetic_rows import Recording, synthetic_rows
from tools.load_plan.prediction import predict
from tools.load_plan.setting import Batches

SHARED = Path(__file__).parents[4] / "shared" / "reference_caches"
RUN = (
    *("--world-size", "4", "--micro-batch-size", "1", "--global-batch-size", "8"),
    *("--seq-length", "64", "--vocab-size", "32000", "--save-interval", "10"),
    *("--train-samples", "800"),
)


def plan(capsys, *flags: str) -> dict[str, Any]:
    assert logits_cache.main(["plan", *RUN, *flags, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# ---- bytes per token -----------------------------------------------------------------------------


@functools.cache
def model_sizes(
    k: int, vocab: int, *, bf16: bool = True, p: float | None = None, kept: float | None = None
) -> Sizes:
    recording = Recording(k=k, vocab_size=vocab, p=p, mean_kept=kept)
    return synthetic_sizes(recording, 1024, 8, bf16_logits=bf16)


@pytest.mark.parametrize(
    ("case", "measured"),
    [
        ({"k": 128, "vocab": 128256}, (326.65, 254.38, 242.08)),
        ({"k": 128, "vocab": 128256, "bf16": False}, (401.96, 303.59, 242.22)),
        ({"k": 32, "vocab": 128256}, (95.07, 72.27, None)),
        ({"k": 128, "vocab": 262144}, (None, 264.12, 252.59)),
        ({"k": 128, "vocab": 262144, "bf16": False}, (None, 313.41, 252.75)),
    ],
    ids=lambda part: "-".join(map(str, part.values())) if isinstance(part, dict) else "",
)
def test_entries_take_what_was_measured(case, measured):
    """The figures of benchmarks/RESULTS.md, whose logits are made in another way."""
    found = model_sizes(**case).formats
    assert list(found) == ["2", "3", "3, 8-bit"][case["vocab"] > 1 << 17 :]
    for name, size in zip(("2", "3", "3, 8-bit"), measured, strict=True):
        if size is not None:
            assert found[name].bytes_per_token == pytest.approx(size, rel=0.05)


@pytest.mark.parametrize(("k", "p"), [(16, None), (64, None), (64, 0.9)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_entries_of_other_logits_take_what_is_predicted(monkeypatch, k, p, dtype):
    """Top K of logits ``(T, V)``, encoded here; with P the mean of its entries is known."""
    monkeypatch.setattr(bench_format, "ROWS", 2)
    case = bench_format.synthetic(16384, k, dtype, 256, p)
    kept = None if p is None else float((case.values != -1000.0).sum(-1).double().mean())
    recording = Recording(k=k, vocab_size=16384, p=p, mean_kept=kept)
    found = synthetic_sizes(recording, 256, 2, bf16_logits=dtype is torch.bfloat16)
    assert found.mean_kept == pytest.approx(k if kept is None else kept, rel=0.02)
    for codec in bench_format.codecs(case):
        size = len(codec.encode()) / case.tokens
        assert found.formats[codec.name].bytes_per_token == pytest.approx(size, rel=0.12)


@pytest.mark.parametrize(("dtype", "size"), [("fp16", 2), ("fp32", 4)])
@pytest.mark.parametrize("k", [8, 100])
def test_what_does_not_compress_bounds_format_2(dtype, size, k):
    recording = Recording(
        k=k, vocab_size=1 << 17, dtype={"fp16": torch.float16, "fp32": torch.float32}[dtype]
    )
    found = synthetic_sizes(recording, 512, 4, bf16_logits=False).formats["2"].bytes_per_token
    raw = k * (size + 2 + 1 / 8) + 4 + 1 / 8
    assert 0.7 * raw < found < raw


def test_the_rows_are_those_of_a_teacher():
    recording = Recording(k=40, vocab_size=5000, p=0.8, min_k=3)
    rows = synthetic_rows(recording, 128, 4, bf16_logits=True)
    kept = rows.values != -1000.0
    counts = kept.sum(-1)
    assert rows.values.shape == (128, 4, int(counts.max()))
    assert 3 <= counts.min() < counts.max() <= 40
    assert (rows.values.diff(dim=-1)[kept[..., 1:]] <= 0).all()
    assert ((rows.indices >= 0) == kept).all()
    assert int(rows.indices.max()) < 5000
    mass = (rows.values.float().exp() * kept).sum(-1) + rows.tail_logprob.exp()
    assert torch.allclose(mass, torch.ones(()), atol=2e-3)


# ---- like another cache --------------------------------------------------------------------------


@pytest.fixture
def large(tmp_path) -> Path:
    """Rows ``(64, 8, 64)`` without tails, which hardly compress."""
    (tmp_path / "large").mkdir()
    write_large_shard(tmp_path / "large", 0, 32, gbs=8)
    return tmp_path / "large"


def test_entries_like_a_cache_take_what_they_do_there(large, capsys):
    found = plan(capsys, "--world-size", "1", "--like", str(large), "--vocab-size", "131072",
                 "--logits-save-top-k", "64")  # fmt: skip
    stored = len(encode_payload(large_rows(0, 8), 2)) / (64 * 8)
    assert found["formats"]["2"]["bytes_per_token"] == pytest.approx(stored, rel=0.01)
    stored = len(encode_payload(large_rows(0, 8), 3)) / (64 * 8)
    # Equal values are sorted, and tails are added.
    assert found["formats"]["3"]["bytes_per_token"] == pytest.approx(stored, rel=0.03)
    assert found["mean_kept"] == 64
    assert str(large) in found["source"]
    half = plan(capsys, "--world-size", "1", "--like", str(large), "--vocab-size", "131072",
                "--logits-save-top-k", "32")  # fmt: skip
    ratio = half["formats"]["2"]["bytes_per_token"] / found["formats"]["2"]["bytes_per_token"]
    assert 0.45 < ratio < 0.55


@pytest.mark.parametrize("name", ["v1_a", "v2_a", "v2_c"])
def test_caches_of_the_original_writer_can_be_looked_at(capsys, name):
    if not SHARED.is_dir():
        pytest.skip(f"no {SHARED}")
    dtype = ("--logits-save-dtype", "fp32") if name == "v2_c" else ()
    found = plan(capsys, "--like", str(SHARED / name), "--logits-save-top-k", "5",
                 "--vocab-size", "131072", *dtype)  # fmt: skip
    assert found["mean_kept"] == 5
    assert 5 * 3 < found["formats"]["2"]["bytes_per_token"] < 5 * 8 + 40


def test_a_nucleus_is_taken_as_it_is(capsys):
    """K 12, P 0.9, whose writer keeps 4.04 entries per token in bf16."""
    if not SHARED.is_dir():
        pytest.skip(f"no {SHARED}")
    flags = ["--like", str(SHARED / "v2_b"), "--vocab-size", "131072"]
    flags += ["--logits-save-dtype", "bf16", "--logits-save-top-k"]
    own = plan(capsys, *flags, "12")
    assert own["mean_kept"] == pytest.approx(4.04, rel=0.05)
    assert plan(capsys, *flags, "12", "--logits-save-top-p", "0.9")["mean_kept"] == own["mean_kept"]
    for other in (["8"], ["12", "--logits-save-top-p", "0.5"]):
        assert logits_cache.main(["plan", *RUN, *flags, *other]) == 1
        assert "has a nucleus of each token (K 12, P 0.9)" in capsys.readouterr().err


def test_a_cache_in_a_store_can_be_looked_at(server, large, capsys):
    large.rename(server.objects / "like")
    found = plan(capsys, "--like", server.url("like"), "--logits-save-top-k", "16",
                 "--vocab-size", "131072")  # fmt: skip
    assert found["mean_kept"] == 16


# ---- files, memory, bandwidth --------------------------------------------------------------------


def dump_setting(**changes: Any) -> DumpSetting:
    given = {
        "world_size": 8, "tp": 2, "mbs": 1, "gbs": 8, "seq_length": 64, "train_samples": 8 * 25,
        "save_interval": 10, "step_time": 2.0, "max_waiting_bytes": 1 << 40,
    }  # fmt: skip
    return DumpSetting(**given | changes)


SIZE = PayloadSize(bytes_per_token=100.0, encode_seconds_per_token=1e-3)


def test_sums_by_hand():
    found = plan_format(dump_setting(), "2", SIZE, raw_iteration=5)
    # DP 4, 2 samples and so 12800 bytes in each of 10 members; the last shard has 5.
    assert (found.flush, found.flush_all) == (128_000, 512_000)
    assert found.bandwidth == 512_000 / 20
    assert found.bandwidth_per_writer == 128_000 / 20
    assert found.encode_share == pytest.approx(128 * 1e-3 / 2)
    # Header and blocks of 512 bytes: 13312 a member, 2560 for metadata, rounded to 10240.
    assert found.shard == 143_360
    assert found.disk == 4 * (2 * 143_360 + 71_680)
    assert found.memory == 5 + 2 * 128_000
    assert found.memory_behind == 5 + 3 * 128_000
    assert found.spool == 0


@pytest.mark.parametrize(
    ("bound", "waiting"), [(1, 128_000), (200_000, 200_000), (1 << 40, 256_000)]
)
def test_what_waits_is_within_the_bound(bound, waiting):
    found = plan_format(dump_setting(max_waiting_bytes=bound), "3", SIZE, raw_iteration=5)
    assert found.memory_behind == 5 + 128_000 + waiting
    spooled = dump_setting(max_waiting_bytes=bound, spooled=True)
    found = plan_format(spooled, "3", SIZE, raw_iteration=5)
    assert (found.memory, found.memory_behind, found.spool) == (5, 5, 128_000 + waiting)


def test_a_raw_iteration_is_that_of_the_buffer():
    shape = (64, 2, 7)
    parts = [
        torch.empty(shape, dtype=torch.float16),
        torch.empty(shape, dtype=torch.int32),
        torch.empty(shape[:2]),
        torch.empty((1, 2), dtype=torch.int64),
    ]
    assert raw_bytes(dump_setting(), 7, 2) == sum(part.nbytes for part in parts)


@pytest.mark.parametrize("version", [2, 3])
def test_a_shard_has_the_predicted_bytes(tmp_path, version):
    saver = SaverSettings(
        k=64, p=None, min_k=1, save_dtype="fp16", format_version=version, mbs_save=1,
        dp_size_save=4, gbs_save=8,
    )  # fmt: skip
    payload = encode_payload(large_rows(0, 2), version)
    members = [(member_name(8 * i, 8 * i + 8), payload) for i in range(10)]
    path = tmp_path / "dp0__0-80.tar"
    write_batched_tar(str(path), ShardMeta.for_run(IDENTIFIERS, saver).to_bytes(), members)
    size = PayloadSize(bytes_per_token=len(payload) / 128, encode_seconds_per_token=0.0)
    found = plan_format(dump_setting(), str(version), size, raw_iteration=0)
    assert abs(found.shard - path.stat().st_size) <= 10240


# ---- students ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dp", "mbs", "gbs"), [(1, 1, 8), (4, 1, 8), (8, 1, 8), (2, 4, 24), (3, 2, 6)]
)
def test_amplification_is_that_of_the_reshard_plan(dp, mbs, gbs):
    found = plan_student(dump_setting(), Batches(dp=dp, mbs=mbs, gbs=gbs))
    reshard = LogprobsReshardPlan(
        mbs_save=1, dp_save=4, gbs_save=8, mbs_load=mbs, dp_load=dp, gbs_load=gbs
    )
    iterations = math.lcm(8, gbs) // gbs
    decoded = {
        (rank, source.iter_save, source.d_save)
        for rank in range(dp)
        for iteration in range(iterations)
        for microbatch in range(reshard.num_mb_load)
        for source in reshard.sources_for_microbatch(iteration, microbatch, rank)
    }
    assert found.amplification_v2 == pytest.approx(len(decoded) * 2 / (iterations * gbs))
    assert found.amplification_v3 == 1.0
    assert found.saved_ranks == max(len(reshard.needed_d_saves(rank)) for rank in range(dp))
    assert found.reads_v1 == ((mbs, gbs) == (1, 8))


def test_amplification_is_that_of_the_load_plan():
    save = Batches(dp=4, mbs=1, gbs=8)
    played = predict(read_setting(dp=8, gbs=16, save=save), iterations=20)
    found = plan_student(dump_setting(), Batches(dp=8, mbs=1, gbs=16))
    assert found.amplification_v2 == played.reads.amplification
    assert found.saved_ranks == played.reads.saved_ranks_per_reader


def test_likely_students_can_all_read():
    for gbs in (8, 12, 200):
        students = likely_students(dump_setting(), gbs)
        assert students
        assert all(s.gbs == gbs and gbs % (s.mbs * s.dp) == 0 for s in students)
    with pytest.raises(ValueError, match="is 201, expected 1 to the 200 samples"):
        likely_students(dump_setting(), 201)


# ---- the verb ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--micro-batch-size 3", r"batch size \(8\) must be .* \(3 \* 4\). Change one"),
        ("--tensor-model-parallel-size 3", r"The world size \(4\) must be a multiple .* = 3\)"),
        ("--context-parallel-size 4 --seq-length 60", "must be a multiple of twice the context"),
        ("--train-samples 801", "not whole iterations of 8 .* use 800 or 808"),
        ("--logits-save-top-k 40000", "--logits-save-top-k is 40000, expected at most 32000"),
        ("--logits-save-top-p 1.5", "--logits-save-top-p is 1.5, expected at most 1"),
        ("--logits-save-top-p-min-k 200", "min-k is 200, expected at most .* 128"),
        ("--kept-entries 4", "give --logits-save-top-p as well"),
        ("--logits-save-top-p 0.9 --kept-entries 400", "--kept-entries is 400, expected .* 1 to"),
        ("--vocab-size 2147483649", "no format stores ids from 2147483648 on"),
        ("--student-global-batch-size 900", "is 900, expected 1 to the 800 samples"),
        ("--like DIR", "keeps 2 entries per token, fewer than --logits-save-top-k 128"),
        ("--like DIR/none", "No such file or directory"),
        ("--like DIR/empty", "There is no shard in"),
        ("--like DIR --logits-save-top-k 2 --vocab-size 3", "has id 4, and --vocab-size is 3"),
        ("--like DIR/cut", "No sample of .* can be read"),
        (
            "--like DIR/fp16 --logits-save-top-k 64 --vocab-size 131072 --logits-save-dtype fp32",
            "has fp16 values",
        ),
    ],
)
def test_what_cannot_be_is_said(tmp_path, capsys, large, flags, message):
    write_shard(tmp_path, 0, 8)
    (tmp_path / "empty").mkdir()
    large.rename(tmp_path / "fp16")
    write_shard(tmp_path / "cut", 0, 8)
    (tmp_path / "cut" / "dp0__0-8.tar").write_bytes(b"0" * 600)
    words = flags.replace("DIR", str(tmp_path)).split()
    assert logits_cache.main(["plan", *RUN, *words]) == 1
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("length", "samples"),
    [("--train-samples 80", 80), ("--train-iters 10", 80), ("--tokens 5000", 80)],
)
def test_a_length_is_told_in_three_ways(capsys, length, samples):
    run = RUN[: RUN.index("--train-samples")]
    assert logits_cache.main(["plan", *run, *length.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["samples"], found["tokens"], found["iterations"]) == (samples, samples * 64, 10)
    assert (found["writing_ranks"], found["shards"], found["shards_per_rank"]) == (4, 4, 1)


def test_flags_decide_what_is_shown(capsys):
    assert logits_cache.main(["plan", *RUN]) == 0
    text = capsys.readouterr().out
    assert "store must take" not in text
    flags = "--step-time 2 --store-gb-s 0.001 --logits-save-spool-dir /x --vocab-size 262144"
    assert logits_cache.main(["plan", *RUN, *flags.split()]) == 0
    text = capsys.readouterr().out
    assert "Format 2 stores ids below 131072 only." in text
    for title in ("store must take, one rank", "on the spool's disk", "a flush takes"):
        assert title in text
    assert set(plan(capsys, "--logits-save-dtype", "bf16")["formats"]) == {"2", "3"}
    wide = plan(capsys, "--logits-save-top-p", "0.9", "--kept-entries", "20")
    assert wide["mean_kept"] == pytest.approx(20, rel=0.05)
    means = [plan(capsys, "--logits-save-top-p", p)["mean_kept"] for p in ("0.5", "0.9")]
    assert 1 < means[0] < means[1] < 128


def test_examples_of_help_and_of_what_is_printed_work(capsys):
    with pytest.raises(SystemExit, match="0"):
        logits_cache.main(["plan", "--help"])
    example = capsys.readouterr().out.partition("example:\n")[2]
    words = shlex.split(example.replace("\\\n", ""))
    assert words[:3] == ["python", "-m", "tools.logits_cache"]
    assert logits_cache.main(words[3:]) == 0
    text = capsys.readouterr().out
    assert all(len(line) <= 100 for line in text.splitlines())
    command = text.partition("a student like the teacher):\n")[2]
    words = shlex.split(command.replace("\\\n", ""))
    assert words[:3] == ["python", "-m", "tools.logits_load_plan"]
    assert logits_load_plan.main([*words[3:], "--iterations", "4"]) == 0
    assert "rows decoded / needed" in capsys.readouterr().out
