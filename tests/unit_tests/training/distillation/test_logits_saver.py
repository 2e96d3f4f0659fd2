# SPDX-License-Identifier: Apache-2.0
"""The teacher's hooks: what they record of which forward passes, and what they hand over."""

import errno
import json
import math
import os
import tarfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.training.distillation import logits_saver, parallel, save_format, write_watch
from megatron.training.distillation.errors import LogitsWriteError
from megatron.training.distillation.fingerprint import LabelFingerprinter
from megatron.training.distillation.logits_saver import LogitsSaverHooks, get_logits_saver
from megatron.training.distillation.utils import (
    CacheIdentityError,
    decode_teacher_rows,
    identity_hash,
)
from tests.unit_tests.distributed import recorded_collectives, run_ranks
from tests.unit_tests.training.distillation.cache_files import IDENTIFIERS, read_content
from tests.unit_tests.training.distillation.run_stubs import (
    SETTINGS,
    GivenLogitsModel,
    PlainPatch,
    StubRun,
    group_layout,
)

SEQ, PADDED, REAL = 4, 16, 13


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> StubRun:
    monkeypatch.setattr(logits_saver, "_active_saver", None)
    return StubRun().install(monkeypatch)


def random_logits(seed: int, batch: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(SEQ, batch, PADDED, generator=generator)).to(dtype)


def forward(model: torch.nn.Module, *microbatches: torch.Tensor) -> None:
    for logits in microbatches:
        model(logits, torch.zeros(logits.size(1), SEQ, dtype=torch.long))


def pending(saver: LogitsSaverHooks) -> dict[str, Any]:
    """Take the pending data and decode it: rows by member name."""
    _, _, members, _ = saver.take_pending_data()
    return {name: decode_teacher_rows(read_content(payload)) for name, payload in members}


def check_rows(rows: Any, logits: torch.Tensor, k: int) -> None:
    """Compare fp32 rows with a dense float64 softmax over the real vocabulary."""
    logprobs = torch.log_softmax(logits[..., :REAL].double(), -1)
    values, indices = logprobs.sort(descending=True)
    assert rows.values.shape == (SEQ, logits.size(1), k)
    torch.testing.assert_close(rows.values.double(), values[..., :k], rtol=0, atol=2e-6)
    assert torch.equal(rows.indices.long(), indices[..., :k])
    tail = values[..., k:].logsumexp(-1)
    torch.testing.assert_close(rows.tail_logprob.double(), tail, rtol=2e-6, atol=2e-6)


# ---- what is recorded -------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("mtp_num_layers", [0, 2])
def test_iterations_are_recorded_in_order(
    run: StubRun, tmp_path: Path, batch: int, mtp_num_layers: int
) -> None:
    run.settings = replace(
        SETTINGS,
        micro_batch_size=batch,
        global_batch_size=2 * batch,
        mtp_num_layers=mtp_num_layers,
    )
    saver = LogitsSaverHooks(str(tmp_path), 3, save_dtype="fp32")
    model = GivenLogitsModel(mtp_num_layers)
    saver.attach_hooks(model)
    microbatches = [random_logits(seed, batch) for seed in range(4)]
    originals = [logits.clone() for logits in microbatches]
    forward(model, *microbatches[:2])
    run.move_to(2 * batch)
    forward(model, *microbatches[2:])
    rows = pending(saver)
    assert list(rows) == [f"0-{2 * batch}.pt.zst", f"{2 * batch}-{4 * batch}.pt.zst"]
    first, second = rows.values()
    check_rows(first, torch.cat(originals[:2], 1), 3)
    check_rows(second, torch.cat(originals[2:], 1), 3)


def test_tool_without_a_sequence_length_records_the_same(run: StubRun, tmp_path: Path) -> None:
    recorded = []
    for name, seq_length in (("trainer", SEQ), ("tool", None)):
        run.settings = replace(SETTINGS, seq_length=seq_length)
        saver = LogitsSaverHooks(str(tmp_path / name), 3)
        model = GivenLogitsModel()
        saver.attach_hooks(model)
        forward(model, random_logits(1), random_logits(2))
        _, _, members, _ = saver.take_pending_data()
        recorded.append([read_content(content) for _, content in members])
    assert recorded[0] == recorded[1] != []


@pytest.mark.parametrize(
    ("save_dtype", "expected"),
    [("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32)],
)
@pytest.mark.parametrize("logits_dtype", [torch.float32, torch.bfloat16])
def test_values_are_rounded_to_the_save_dtype(
    run: StubRun,
    tmp_path: Path,
    save_dtype: str,
    expected: torch.dtype,
    logits_dtype: torch.dtype,
) -> None:
    saver = LogitsSaverHooks(str(tmp_path), 13, save_dtype=save_dtype)
    model = GivenLogitsModel()
    saver.attach_hooks(model)
    microbatches = [random_logits(seed, dtype=logits_dtype) for seed in range(2)]
    whole = torch.cat(microbatches, 1).double()
    forward(model, *microbatches)
    (rows,) = pending(saver).values()
    assert rows.values.dtype == expected
    exact = torch.log_softmax(whole[..., :REAL], -1).gather(-1, rows.indices.long())
    rounding = torch.finfo(expected).eps / 2
    torch.testing.assert_close(rows.values.double(), exact, rtol=rounding, atol=2e-6)
    assert rows.tail_logprob.dtype == torch.float32
    assert (rows.tail_logprob == -math.inf).all()


@pytest.mark.parametrize(
    ("settings", "save_dtype", "options", "dtype"),
    [
        (
            {"save_format": "3", "padded_vocab_size": PADDED},
            "fp32",
            {"vocab_size": PADDED, "eight_bit": False},
            torch.float32,
        ),
        (
            {"padded_vocab_size": PADDED, "save_8bit": True},
            "fp16",
            {"vocab_size": PADDED, "eight_bit": True},
            torch.float16,
        ),
        ({"save_format": "3"}, "bf16", {"vocab_size": REAL, "eight_bit": False}, torch.bfloat16),
        (
            {"padded_vocab_size": 131073},
            "fp16",
            {"vocab_size": 131073, "eight_bit": False},
            torch.float16,
        ),
    ],
)
def test_format_3_is_encoded_with_the_vocabulary(
    run: StubRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    save_dtype: str,
    options: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    """What its encoder is given, and what the metadata say; format 2 is given the same tensors."""
    given = []

    def encode(*tensors: torch.Tensor, **options: Any) -> bytes:
        given.append((tensors, options))
        return b"encoded"

    def dump(**changes: Any) -> tuple[dict[str, Any], bytes]:
        run.settings = replace(SETTINGS, **changes)
        saver = LogitsSaverHooks(str(tmp_path / str(changes)), 3, save_dtype=save_dtype)
        saver.attach_hooks(model)
        forward(model, random_logits(0), random_logits(1))
        _, meta, members, _ = saver.take_pending_data()
        saver.remove_hooks()
        return json.loads(meta)["saver"], read_content(members[0][1])

    monkeypatch.setattr(save_format, "encode_framed_payload", encode)
    model = GivenLogitsModel()
    meta, content = dump(**settings)
    assert content == b"encoded"
    recorded = "uint8" if options["eight_bit"] else save_dtype
    assert (meta["format_version"], meta["save_dtype"]) == (3, recorded)
    ((values, indices, tail, marks), found_options) = given.pop()
    assert found_options == options
    assert values.dtype == dtype
    meta, content = dump(save_format="2")
    assert meta["format_version"] == 2
    rows = decode_teacher_rows(content)
    assert torch.equal(rows.values, values)
    assert torch.equal(rows.indices, indices.int())
    assert torch.equal(rows.tail_logprob, tail)
    assert torch.equal(rows.label_fingerprints, marks)
    assert given == []


@pytest.mark.parametrize(
    ("settings", "save_dtype", "message"),
    [
        ({"save_format": "2"}, "uint8", "which --logits-save-format 2 does not have"),
        ({"save_format": "2", "save_8bit": True}, "fp16", "--logits-save-format 2 does not have"),
        ({"save_8bit": True}, "fp32", "fp16, not fp32"),
        ({"save_format": "3", "vocab_size": None}, "fp16", "its size is not known"),
        ({"save_format": "2", "vocab_size": 131073}, "fp16", "131073 entries"),
    ],
)
def test_what_the_format_cannot_store_is_refused(
    run: StubRun, tmp_path: Path, settings: dict[str, Any], save_dtype: str, message: str
) -> None:
    run.settings = replace(SETTINGS, **settings)
    with pytest.raises(ValueError, match=message):
        LogitsSaverHooks(str(tmp_path / "cache"), 3, save_dtype=save_dtype)
    assert not (tmp_path / "cache").exists()


def test_evaluation_is_not_recorded(run: StubRun, tmp_path: Path) -> None:
    saver = LogitsSaverHooks(str(tmp_path), 3, save_dtype="fp32")
    model = GivenLogitsModel()
    saver.attach_hooks(model)
    logits = [random_logits(seed) for seed in range(2)]
    copies = [part.clone() for part in logits]
    forward(model, logits[0])
    model.eval()
    forward(model, random_logits(9))
    model.train()
    forward(model, logits[1])
    (rows,) = pending(saver).values()
    check_rows(rows, torch.cat(copies, 1), 3)


def test_replayed_step_replaces_the_iteration(run: StubRun, tmp_path: Path) -> None:
    """The rerun state machine runs a step again; here with other logits, to tell them apart."""
    saver = LogitsSaverHooks(str(tmp_path), 3, save_dtype="fp32")
    model = GivenLogitsModel()
    saver.attach_hooks(model)
    forward(model, random_logits(0), random_logits(1))
    forward(model, random_logits(2), random_logits(3))
    (rows,) = pending(saver).values()
    check_rows(rows, torch.cat([random_logits(2), random_logits(3)], 1), 3)


def test_unfinished_iteration_is_never_handed_over(
    run: StubRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver = LogitsSaverHooks(str(tmp_path), 3, save_dtype="fp32")
    model = GivenLogitsModel()
    saver.attach_hooks(model)
    forward(model, random_logits(0))
    assert pending(saver) == {}
    # Training went on elsewhere, as after loading a checkpoint in place.
    run.move_to(2)
    forward(model, random_logits(1), random_logits(2))
    rows = pending(saver)
    assert list(rows) == ["2-4.pt.zst"]
    check_rows(rows["2-4.pt.zst"], torch.cat([random_logits(1), random_logits(2)], 1), 3)
    (warning,) = caplog.messages
    assert "starts at sample 0 is not recorded: 1 of its 2 microbatches" in warning
    assert "sample 2" in warning


def test_iterations_that_are_passed_over_are_told(
    run: StubRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver = LogitsSaverHooks(str(tmp_path), 3)
    model = GivenLogitsModel()
    saver.attach_hooks(model)
    for start in (0, 2, 8):
        run.move_to(start)
        forward(model, random_logits(0), random_logits(1))
    assert list(pending(saver)) == ["0-2.pt.zst", "2-4.pt.zst", "8-10.pt.zst"]
    (warning,) = caplog.messages
    assert "Samples 4 to 7 are not recorded" in warning


class _ScaledModel(GivenLogitsModel):
    """Scales its logits after the output layer, as muP does."""

    def _scale_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return 0.25 * logits


def test_scaled_logits_are_recorded(run: StubRun, tmp_path: Path) -> None:
    saver = LogitsSaverHooks(str(tmp_path), 3, save_dtype="fp32")
    model = _ScaledModel()
    saver.attach_hooks(model)
    forward(model, random_logits(0), random_logits(1))
    (rows,) = pending(saver).values()
    check_rows(rows, 0.25 * torch.cat([random_logits(0), random_logits(1)], 1), 3)


# ---- packed sequences -------------------------------------------------------------------------


def joined(logits: torch.Tensor) -> torch.Tensor:
    """Lay the samples of ``(S, B, V)`` one after the other, as the trainer does under --sft."""
    return torch.cat(list(logits.unbind(1)))[:, None]


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("p", [None, 0.8])
def test_packed_samples_are_recorded_as_rows(
    run: StubRun, tmp_path: Path, batch: int, p: float | None
) -> None:
    """The payload is that of the same samples side by side, to the last byte."""
    run.settings = replace(SETTINGS, micro_batch_size=batch, global_batch_size=2 * batch)
    payloads = []
    for lay in (torch.clone, joined):
        saver = LogitsSaverHooks(str(tmp_path), 5, p=p, save_dtype="fp32")
        model = GivenLogitsModel(frozen=True)
        saver.attach_hooks(model)
        for seed in range(2):
            logits = lay(random_logits(seed, batch))
            losses = model(logits, torch.zeros(logits.shape[1::-1], dtype=torch.long))
            assert losses.shape == logits.shape[1::-1]
        members = saver.take_pending_data()[2]
        payloads.append([(name, read_content(payload)) for name, payload in members])
    assert payloads[0] == payloads[1]
    assert len(run.curve("avg-logprobs-kept")) == (0 if p is None else 2)
    # Both layouts measure the same.
    half = len(run.scalars) // 2
    assert run.scalars[:half] == run.scalars[half:]


@pytest.mark.parametrize("shape", [(4, 2), (3, 1), (8, 1)])
def test_logits_of_another_microbatch_are_refused(
    run: StubRun, tmp_path: Path, shape: tuple[int, int]
) -> None:
    saver = LogitsSaverHooks(str(tmp_path), 3)
    model = GivenLogitsModel(frozen=True)
    saver.attach_hooks(model)
    with pytest.raises(ValueError, match=r"\(positions, samples\) = .*expected \(4, 1\)"):
        model(torch.zeros(*shape, PADDED), torch.zeros(shape[::-1], dtype=torch.long))


# ---- top-P ------------------------------------------------------------------------------------


def peaked(masses: list[list[float]]) -> torch.Tensor:
    """Logits ``(S, 1, V)`` whose tokens have these leading probabilities, the rest spread."""
    logits = torch.full((len(masses), 1, PADDED), -math.inf)
    for token, leading in enumerate(masses):
        rest = (1 - sum(leading)) / (REAL - len(leading))
        logits[token, 0, :REAL] = torch.tensor(leading + [rest] * (REAL - len(leading))).log()
    return logits


def test_top_p_keeps_the_nucleus_and_moves_the_rest_to_the_tail(
    run: StubRun, tmp_path: Path
) -> None:
    saver = LogitsSaverHooks(str(tmp_path), 5, p=0.7, min_k=1, save_dtype="fp32")
    model = GivenLogitsModel()
    saver.attach_hooks(model)
    one = peaked([[0.9], [0.5, 0.3], [0.4, 0.2, 0.15], [0.75]])
    other = peaked([[0.8], [0.71], [0.72], [0.6, 0.2]])
    forward(model, one, other)
    (rows,) = pending(saver).values()
    # The first microbatch keeps up to 3 entries, the second up to 2.
    kept = (rows.values != -1000.0).sum(-1)
    assert kept.tolist() == [[1, 1], [2, 1], [3, 1], [1, 2]]
    assert rows.values.shape == (SEQ, 2, 3)
    expected_tail = torch.tensor([[0.1, 0.2], [0.2, 0.29], [0.25, 0.28], [0.25, 0.2]])
    torch.testing.assert_close(rows.tail_logprob.exp(), expected_tail, rtol=1e-5, atol=1e-6)
    assert rows.values[2, 0].exp().tolist() == pytest.approx([0.4, 0.2, 0.15], rel=1e-5)
    assert run.curve("avg-logprobs-kept") == [(1, 12 / 8)]
    assert run.curve("logits-kept-mass") == [(1, pytest.approx(1 - float(expected_tail.mean())))]


def test_kept_entries_are_counted_where_curves_are_written_only(
    run: StubRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summed: list[list[float]] = []
    monkeypatch.setattr(
        parallel, "sum_over_stage", lambda values, layout: summed.append(values) or values
    )
    run.writes = False
    saver = LogitsSaverHooks(str(tmp_path), 5, p=0.7)
    model = GivenLogitsModel()
    saver.attach_hooks(model)
    forward(model, random_logits(0), random_logits(1))
    assert (summed, run.scalars) == ([], [])
    run.writes = True
    run.move_to(2)
    forward(model, random_logits(2), random_logits(3))
    assert len(summed) == 1
    assert len(run.curve("avg-logprobs-kept")) == 1


def test_nothing_is_logged_without_top_p(run: StubRun, tmp_path: Path) -> None:
    saver = LogitsSaverHooks(str(tmp_path), 5)
    model = GivenLogitsModel()
    saver.attach_hooks(model)
    forward(model, random_logits(0), random_logits(1))
    assert run.scalars == []


# ---- handing over -----------------------------------------------------------------------------


def test_data_is_handed_over_once_and_written(run: StubRun, tmp_path: Path) -> None:
    run.layout = replace(run.layout, dp_rank=1, dp_size=2)
    run.settings = replace(SETTINGS, global_batch_size=4)
    cache = tmp_path / "new" / "cache"
    saver = LogitsSaverHooks(str(cache), 3, p=0.5, min_k=2, save_dtype="bf16")
    model = GivenLogitsModel()
    saver.attach_hooks(model)
    for start in (8, 12):
        run.move_to(start)
        forward(model, random_logits(start), random_logits(start + 1))
    saver._write_batched_tar(*saver.take_pending_data())
    with tarfile.open(cache / "dp1__8-16.tar") as tar:
        assert tar.getnames() == ["_meta.json", "8-12.pt.zst", "12-16.pt.zst"]
        stream = tar.extractfile("_meta.json")
        assert stream is not None
        meta = json.load(stream)
    assert meta.pop("content")["name"] == "dp1__8-16.tar"
    assert meta == {
        "hash": identity_hash(IDENTIFIERS),
        "identifiers": IDENTIFIERS,
        "saver": {
            "k": 3,
            "p": 0.5,
            "min_k": 2,
            "save_dtype": "bf16",
            "format_version": 2,
            "mbs_save": 1,
            "dp_size_save": 2,
            "gbs_save": 4,
        },
    }
    # Nothing is left, and nothing is written for nothing.
    assert saver.take_pending_data()[2] == []
    saver._write_batched_tar(*saver.take_pending_data())
    assert [path.name for path in cache.iterdir()] == ["dp1__8-16.tar"]


def test_the_trainers_way_to_the_saver(run: StubRun, tmp_path: Path) -> None:
    assert get_logits_saver() is None
    saver = LogitsSaverHooks(str(tmp_path), 3)
    assert get_logits_saver() is saver


def test_stage_without_output_layer_stays_idle(run: StubRun, tmp_path: Path) -> None:
    saver = LogitsSaverHooks(str(tmp_path), 3)
    stage = torch.nn.Linear(2, 2)
    saver.attach_hooks(stage)
    stage(torch.zeros(1, 2))
    _, _, members, _ = saver.take_pending_data()
    assert members == []
    saver._write_batched_tar(*saver.take_pending_data())
    saver.remove_hooks()
    assert list(tmp_path.iterdir()) == []


def test_removed_hooks_record_nothing(run: StubRun, tmp_path: Path) -> None:
    saver = LogitsSaverHooks(str(tmp_path), 3)
    model = GivenLogitsModel(frozen=True)
    saver.attach_hooks(model)
    saver.remove_hooks()
    forward(model, random_logits(0), random_logits(1))
    assert pending(saver) == {}
    labels = torch.zeros(1, SEQ, dtype=torch.long)
    assert (model(random_logits(0), labels) > 0).all()


def test_pending_data_crosses_to_the_checkpoint_worker(run: StubRun, tmp_path: Path) -> None:
    import pickle

    saver = LogitsSaverHooks(str(tmp_path), 3)
    model = GivenLogitsModel()
    saver.attach_hooks(model)
    forward(model, random_logits(0), random_logits(1))
    write, arguments = pickle.loads(
        pickle.dumps((saver._write_batched_tar, saver.take_pending_data()))
    )
    write(*arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["dp0__0-2.tar"]


# ---- the model's loss -------------------------------------------------------------------------


def test_frozen_model_computes_no_loss_but_stays_connected(run: StubRun, tmp_path: Path) -> None:
    saver = LogitsSaverHooks(str(tmp_path), 3)
    model = GivenLogitsModel(frozen=True)
    saver.attach_hooks(model)
    # An earlier pipeline stage waits for the gradient of what it sent.
    received = random_logits(0).requires_grad_()
    with torch.no_grad():
        received[0, 0, 0] = math.inf
    loss = model(received, torch.zeros(1, SEQ, dtype=torch.long))
    assert loss.shape == (1, SEQ)
    assert loss.dtype == torch.float32
    assert (loss == 0).all()
    loss.sum().backward()
    assert received.grad is not None
    assert (received.grad == 0).all()


def test_frozen_model_is_evaluated_with_its_own_loss(run: StubRun, tmp_path: Path) -> None:
    labels = torch.zeros(1, SEQ, dtype=torch.long)
    model = GivenLogitsModel(frozen=True)
    expected = model(random_logits(0), labels)
    saver = LogitsSaverHooks(str(tmp_path), 3)
    saver.attach_hooks(model)
    model.eval()
    assert torch.equal(model(random_logits(0), labels), expected)
    assert pending(saver) == {}


def test_training_model_keeps_its_loss(run: StubRun, tmp_path: Path) -> None:
    logits, labels = random_logits(0), torch.ones(1, SEQ, dtype=torch.long)
    expected = GivenLogitsModel()(logits.clone(), labels)
    saver = LogitsSaverHooks(str(tmp_path), 3)
    model = GivenLogitsModel()
    saver.attach_hooks(model)
    assert torch.equal(model(logits, labels), expected)


# ---- arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k is 0: expected at least 1"),
        ({"k": 3, "p": 0.0}, r"p is 0.0: expected a probability mass in \(0, 1\]"),
        ({"k": 3, "p": 1.5}, r"p is 1.5"),
        ({"k": 3, "min_k": 0}, "min_k is 0"),
        ({"k": 3, "save_dtype": "fp8"}, "save_dtype is 'fp8'.*fp16.*bf16.*fp32.*uint8"),
    ],
)
def test_arguments_out_of_range_are_refused(
    run: StubRun, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LogitsSaverHooks(str(tmp_path), **options)


# ---- several ranks ----------------------------------------------------------------------------


def _dump_on_rank(
    rank: int, world_size: int, directory: str, axis: str, p: float | None
) -> tuple[list[tuple[str, bytes]], list[Any]]:
    sizes = {f"{axis}_rank": rank, f"{axis}_size": world_size}
    run = StubRun(layout=group_layout(**sizes)).install(PlainPatch)
    saver = LogitsSaverHooks(directory, 5, p=p, save_dtype="fp32")
    model = GivenLogitsModel()
    saver.attach_hooks(model)
    for seed in range(2):
        logits = random_logits(seed)
        if axis == "tp":
            width = PADDED // world_size
            model_part = logits[..., rank * width : (rank + 1) * width]
        else:
            chunks = logits.chunk(2 * world_size)
            model_part = torch.cat([chunks[rank], chunks[2 * world_size - 1 - rank]])
        model_part = model_part.contiguous()
        model(model_part, torch.zeros(1, model_part.size(0), dtype=torch.long))
    members = saver.take_pending_data()[2]
    return [(name, read_content(payload)) for name, payload in members], run.scalars


@pytest.mark.parametrize("p", [None, 0.6])
@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_ranks_of_a_replica_record_one_copy(tmp_path: Path, axis: str, p: float | None) -> None:
    results = run_ranks(2, _dump_on_rank, str(tmp_path), axis, p)
    ((_, payload),), scalars = results[0]
    nothing, other_scalars = results[1]
    assert nothing == []
    assert scalars == other_scalars
    run = StubRun(scalars=scalars)
    assert run.curve("logits-flush-bytes") == [(1, len(payload))]
    assert run.curve("logits-waiting-bytes") == [(1, len(payload))]
    rows = decode_teacher_rows(payload)
    whole = torch.cat([random_logits(0), random_logits(1)], 1)
    if p is None:
        check_rows(rows, whole, 5)
        assert run.curve("avg-logprobs-kept") == []
        return
    falling, order = torch.log_softmax(whole[..., :REAL].double(), -1).sort(descending=True)
    keep = falling.exp().cumsum(-1) - falling.exp() < p
    keep[..., 5:] = False
    width = rows.values.size(-1)
    assert width == int(keep.sum(-1).max())
    assert torch.equal(rows.values != -1000.0, keep[..., :width])
    kept = keep[..., :width]
    torch.testing.assert_close(rows.values.double()[kept], falling[..., :width][kept])
    assert torch.equal(rows.indices.long()[kept], order[..., :width][kept])
    average = float(keep.sum() / keep[..., 0].numel())
    assert run.curve("avg-logprobs-kept") == [(1, pytest.approx(average))]
    (kept_mass,) = run.curve("logits-kept-mass")
    assert kept_mass == (1, pytest.approx(float(falling.exp()[keep].sum() / keep[..., 0].numel())))


# ---- the directory of another dump ------------------------------------------------------------


def start_dump(directory: Path, k: int = 3, **options: Any) -> LogitsSaverHooks:
    """Start a dump and have it write its first shard."""
    saver = LogitsSaverHooks(str(directory), k, **options)
    model = GivenLogitsModel()
    saver.attach_hooks(model)
    forward(model, random_logits(0), random_logits(1))
    saver._write_batched_tar(*saver.take_pending_data())
    return saver


def test_dump_goes_on_in_its_own_directory(run: StubRun, tmp_path: Path) -> None:
    start_dump(tmp_path, p=0.5)
    run.move_to(2)
    start_dump(tmp_path, p=0.5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dp0__0-2.tar", "dp0__2-4.tar"]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"k": 4}, ["3", "4"]),
        ({"p": 0.5}, ["None", "0.5"]),
        ({"save_dtype": "fp32"}, ["fp16", "fp32"]),
        ({"seed": 2}, ["seed", "1", "2"]),
    ],
)
def test_directory_of_another_dump_is_refused(
    run: StubRun, tmp_path: Path, options: dict[str, Any], parts: list[str]
) -> None:
    start_dump(tmp_path)
    if "seed" in options:
        identifiers = {**IDENTIFIERS, "seed": options.pop("seed")}
        run.settings = replace(SETTINGS, identifiers=identifiers)
    with pytest.raises(CacheIdentityError) as caught:
        start_dump(tmp_path, **options)
    message = str(caught.value)
    for part in (str(tmp_path / "dp0__0-2.tar"), "another dump", *parts):
        assert part in message
    assert [path.name for path in tmp_path.iterdir()] == ["dp0__0-2.tar"]


def _start_on_rank(rank: int, world_size: int, directory: str) -> str:
    layout = group_layout(dp_rank=rank, dp_size=world_size)
    StubRun(layout=layout).install(PlainPatch)
    try:
        LogitsSaverHooks(directory, 4)
    except CacheIdentityError as error:
        return str(error)
    return "accepted"


def test_all_ranks_refuse_the_directory_of_another_dump(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        StubRun().install(patch)
        start_dump(tmp_path)
    results = run_ranks(2, _start_on_rank, str(tmp_path))
    assert all("dp0__0-2.tar" in result for result in results)


# ---- spools -----------------------------------------------------------------------------------


def test_spool_directory_holds_what_waits_and_is_empty_to_see(run: StubRun, tmp_path: Path) -> None:
    spools, cache = tmp_path / "spools", tmp_path / "cache"
    spools.mkdir()
    run.settings = replace(SETTINGS, spool_dir=str(spools))
    saver = start_dump(cache)
    for start in (2, 4):
        run.move_to(start)
        saver._on_logits(random_logits(start))
        saver._on_logits(random_logits(start + 1))
    path, _, members, _ = arguments = saver.take_pending_data()
    assert [decode_teacher_rows(read_content(piece)).values.shape for _, piece in members] == [
        (SEQ, 2, 3)
    ] * 2
    for _, piece in members:
        assert f"{spools}/" in os.readlink(piece.path)
    assert list(spools.iterdir()) == []
    saver._write_batched_tar(*arguments)
    assert Path(path).exists()
    # It is given up once it is known to be written.
    assert saver._watch.waiting_bytes() == 0
    assert not os.path.lexists(members[0][1].path) or str(spools) not in os.readlink(
        members[0][1].path
    )


@pytest.mark.parametrize("spool_dir", ["missing", "dp0__0-2.tar"])
def test_unusable_spool_directory_is_refused(run: StubRun, tmp_path: Path, spool_dir: str) -> None:
    start_dump(tmp_path)
    run.settings = replace(SETTINGS, spool_dir=str(tmp_path / spool_dir))
    with pytest.raises(CacheIdentityError) as caught:
        start_dump(tmp_path)
    message = str(caught.value)
    for part in ("--logits-save-spool-dir cannot be used", f"{tmp_path / spool_dir}", "every node"):
        assert part in message


def _start_with_spools_on_rank(rank: int, world_size: int, directory: str) -> str:
    layout = group_layout(dp_rank=rank, dp_size=world_size)
    settings = replace(SETTINGS, spool_dir=f"{directory}/spool-{rank}")
    StubRun(layout=layout, settings=settings).install(PlainPatch)
    try:
        LogitsSaverHooks(f"{directory}/cache", 3)
    except CacheIdentityError as error:
        return str(error)
    return "accepted"


def test_all_ranks_refuse_a_spool_directory_that_one_lacks(tmp_path: Path) -> None:
    (tmp_path / "spool-0").mkdir()
    for message in run_ranks(2, _start_with_spools_on_rank, str(tmp_path)):
        assert "rank 1: [Errno 2] --logits-save-spool-dir cannot be used: " in message
        assert "rank 0" not in message


def test_iteration_that_cannot_be_kept_ends_the_job(
    run: StubRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as it is compressed, not at the checkpoint."""
    ended: list[str] = []
    heard = threading.Event()

    def end(error: LogitsWriteError) -> None:
        ended.append(str(error))
        heard.set()

    monkeypatch.setattr(write_watch, "end_process", end)
    monkeypatch.setattr(os, "pwrite", _full_disk)
    saver = LogitsSaverHooks(str(tmp_path), 3)
    model = GivenLogitsModel()
    saver.attach_hooks(model)
    run.move_to(6)
    forward(model, random_logits(0), random_logits(1))
    assert heard.wait(20)
    (message,) = ended
    for part in ("Samples 6 to 7", "No space left on device", "spool in memory", "again"):
        assert part in message
    with pytest.raises(LogitsWriteError):
        saver.take_pending_data()


def _full_disk(*_: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# ---- fingerprints of the labels ---------------------------------------------------------------


def random_labels(seed: int, batch: int = 1, length: int = SEQ) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, REAL, (batch, length), generator=generator)


def fingerprints(*labels: torch.Tensor) -> torch.Tensor:
    """The ``(C, n)`` fingerprints of whole samples, microbatch by microbatch."""
    length = labels[0].size(1)
    fingerprint = LabelFingerprinter(torch.arange(length), length)
    return torch.cat([fingerprint(part) for part in labels], dim=1)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mtp_num_layers", [0, 2])
def test_labels_of_the_main_head_are_recorded(
    run: StubRun, tmp_path: Path, frozen: bool, packed: bool, mtp_num_layers: int
) -> None:
    run.settings = replace(
        SETTINGS, micro_batch_size=2, global_batch_size=4, mtp_num_layers=mtp_num_layers
    )
    saver = LogitsSaverHooks(str(tmp_path), 3)
    model = _RollingModel(mtp_num_layers, frozen)
    saver.attach_hooks(model)
    labels = [random_labels(seed, 2) for seed in range(2)]
    for seed, part in enumerate(labels):
        logits = random_logits(seed, 2)
        if packed:
            model(joined(logits), part.reshape(1, -1))
        else:
            model(logits, part)
        model.eval()
        model(random_logits(9, 2), random_labels(9, 2))
        model.train()
    (rows,) = pending(saver).values()
    assert torch.equal(rows.label_fingerprints, fingerprints(*labels))


class _RollingModel(GivenLogitsModel):
    """Gives its other heads other labels, as Megatron does: those of the tokens after the next."""

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for head in range(self.mtp_num_layers):
            logits, _ = self.output_layer(hidden.detach() * -2 + 1)
            self.compute_language_model_loss(labels.roll(head + 1, dims=1), logits)
        logits, _ = self.output_layer(hidden * self.weight)
        return self.compute_language_model_loss(labels, logits)


def test_replay_replaces_the_fingerprints(run: StubRun, tmp_path: Path) -> None:
    saver = LogitsSaverHooks(str(tmp_path), 3)
    model = GivenLogitsModel()
    saver.attach_hooks(model)
    for seed in (0, 1, 2, 3):
        model(random_logits(seed), random_labels(seed))
    (rows,) = pending(saver).values()
    assert torch.equal(rows.label_fingerprints, fingerprints(random_labels(2), random_labels(3)))


class _Headless(torch.nn.Module):
    """A model that computes its loss elsewhere, or (*hooked*) has a loss that it does not call."""

    def __init__(self, hooked: bool) -> None:
        super().__init__()
        self.output_layer = torch.nn.Identity()
        if hooked:
            self.compute_language_model_loss = lambda labels, logits: logits

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.output_layer(hidden)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("p", [None, 0.5])
def test_model_without_a_loss_is_recorded_without_fingerprints(
    run: StubRun, tmp_path: Path, hooked: bool, p: float | None
) -> None:
    saver = LogitsSaverHooks(str(tmp_path), 3, p=p, save_dtype="fp32")
    model = _Headless(hooked)
    saver.attach_hooks(model)
    for start in (0, 2):
        run.move_to(start)
        model(random_logits(start))
        model(random_logits(start + 1))
    rows = pending(saver)
    assert list(rows) == ["0-2.pt.zst", "2-4.pt.zst"]
    assert all(part.label_fingerprints is None for part in rows.values())
    if p is None:
        check_rows(rows["2-4.pt.zst"], torch.cat([random_logits(2), random_logits(3)], 1), 3)
    assert [step for step, _ in run.curve("avg-logprobs-kept")] == ([] if p is None else [1, 2])


LONG = 8 * 20
"""Two and a half chunks, in pieces that do not end with them."""


def _fingerprints_on_rank(
    rank: int, world_size: int, directory: str, axis: str
) -> tuple[torch.Tensor | None, list[str]]:
    sizes = {f"{axis}_rank": rank, f"{axis}_size": world_size}
    settings = replace(SETTINGS, seq_length=LONG)
    StubRun(settings=settings, layout=group_layout(**sizes)).install(PlainPatch)
    saver = LogitsSaverHooks(directory, 3)
    model = GivenLogitsModel(frozen=True)
    saver.attach_hooks(model)
    with recorded_collectives() as calls:
        for seed in range(2):
            labels = random_labels(seed, length=LONG)
            if axis == "cp":
                pieces = labels.chunk(2 * world_size, dim=1)
                labels = torch.cat([pieces[rank], pieces[2 * world_size - 1 - rank]], dim=1)
            width = PADDED // (world_size if axis == "tp" else 1)
            model(torch.randn(labels.size(1), 1, width), labels)
    members = saver.take_pending_data()[2]
    if not members:
        return None, calls
    return decode_teacher_rows(read_content(members[0][1])).label_fingerprints, calls


@pytest.mark.parametrize(("axis", "ranks"), [("tp", 2), ("cp", 2), ("cp", 4)])
def test_fingerprints_are_those_of_whole_samples(tmp_path: Path, axis: str, ranks: int) -> None:
    results = run_ranks(ranks, _fingerprints_on_rank, str(tmp_path), axis)
    expected = fingerprints(*(random_labels(seed, length=LONG) for seed in range(2)))
    assert torch.equal(results[0][0], expected)
    assert all(result is None for result, _ in results[1:])
    if axis == "cp":
        assert all(calls == results[0][1] for _, calls in results)
