# SPDX-License-Identifier: Apache-2.0
"""``plan``: what a dump will take, before it is started, and which students can read it."""

import argparse
import json
import math

import torch

from megatron.training.distillation.backlog import DEFAULT_MAX_WAITING_BYTES
from megatron.training.distillation.frame_layout import MAX_K, MAX_VOCAB_SIZE_V3
from tools.cache.command_line import Verbs, add_verb, positive
from tools.cache.dump_plan import (
    DumpSetting,
    decoded_bytes_per_token,
    likely_students,
    plan_format,
    plan_students,
    raw_bytes,
)
from tools.cache.payload_sizes import sizes_like, synthetic_sizes
from tools.cache.plan_report import DumpPlan, as_json, report
from tools.cache.synthetic_rows import Recording

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def add_parser(verbs: Verbs) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "plan",
        summary="predict what a dump will take, before it is started",
        description="Predict bytes on disk, files, host memory, flushes and bandwidth of a dump in "
        "each format, and which\nstudents can read it at what cost. Flags have Megatron's names. "
        "Entries are those of a model of some\nassumptions (see tools/README.md), or with --like "
        "those of a real cache.",
        example="python -m tools.logits_cache plan --world-size 512 --tensor-model-parallel-size 8 "
        "\\\n      --pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 1024 "
        "\\\n      --seq-length 8192 --tokens 100e9 --vocab-size 128256 --save-interval 100 "
        "--step-time 8",
    )
    _add_run(parser.add_argument_group("teacher's run"))
    _add_recording(parser.add_argument_group("what is recorded"))
    other = parser.add_argument_group("students and output")
    other.add_argument(
        "--student-global-batch-size",
        type=positive,
        metavar="GBS",
        help="of the students whose layouts are listed (default: the teacher's)",
    )
    other.add_argument(
        "--store-gb-s", type=_amount, help="GB/s that the store takes: how long a flush lasts"
    )
    other.add_argument("--json", action="store_true", help="print JSON, in bytes and seconds")
    parser.set_defaults(run=_run)


def _add_run(run: "argparse._ArgumentGroup") -> None:
    run.add_argument("--world-size", type=positive, required=True, help="ranks")
    for name in ("tensor-model", "pipeline-model", "context"):
        run.add_argument(f"--{name}-parallel-size", type=positive, default=1, help="Megatron's")
    for name in ("micro-batch-size", "global-batch-size", "seq-length", "save-interval"):
        run.add_argument(f"--{name}", type=positive, required=True, help="Megatron's")
    length = run.add_mutually_exclusive_group(required=True)
    length.add_argument("--train-samples", type=positive, help="Megatron's")
    length.add_argument("--train-iters", type=positive, help="Megatron's")
    length.add_argument(
        "--tokens", type=_amount, help="tokens, such as 100e9; up to a whole iteration"
    )
    run.add_argument("--step-time", type=_amount, help="seconds per iteration of the teacher")


def _add_recording(recording: "argparse._ArgumentGroup") -> None:
    recording.add_argument(
        "--vocab-size", type=positive, required=True, help="of the output layer, padded"
    )
    recording.add_argument("--logits-save-top-k", type=positive, default=128, help="default 128")
    recording.add_argument("--logits-save-top-p", type=_amount, help="default: none")
    recording.add_argument("--logits-save-top-p-min-k", type=positive, default=1, help="default 1")
    recording.add_argument(
        "--kept-entries",
        type=_amount,
        metavar="MEAN",
        help="entries per token under top-P, where that is known; else they follow from P and the "
        "model's assumptions, or from --like",
    )
    recording.add_argument(
        "--logits-save-dtype", choices=tuple(_DTYPES), default="fp16", help="default fp16"
    )
    recording.add_argument(
        "--logits-dtype",
        choices=("bf16", "fp32"),
        default="bf16",
        help="of the teacher's output layer; coarser logits take less (default bf16)",
    )
    recording.add_argument(
        "--like", metavar="DIR", help="take the entries of this cache, of a similar teacher"
    )
    recording.add_argument(
        "--logits-save-max-waiting-bytes",
        type=positive,
        default=DEFAULT_MAX_WAITING_BYTES,
        help=f"default {DEFAULT_MAX_WAITING_BYTES}",
    )
    recording.add_argument(
        "--logits-save-spool-dir", help="compressed logits wait on a disk of the node"
    )


def _amount(text: str) -> float:
    number = float(text)
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"{text} is not more than 0")
    return number


def _run(options: argparse.Namespace) -> int:
    setting, recording = _setting(options), _recording(options)
    students = likely_students(setting, options.student_global_batch_size)
    if options.like is None:
        bf16 = options.logits_dtype == "bf16"
        rows = setting.batches.rows
        sizes = synthetic_sizes(recording, setting.seq_length, rows, bf16_logits=bf16)
    else:
        sizes = sizes_like(options.like, recording, setting.batches.rows)
    value_bytes = recording.dtype.itemsize
    raw = raw_bytes(setting, recording.k, value_bytes)
    plan = DumpPlan(
        setting=setting,
        sizes=sizes,
        formats={
            name: plan_format(setting, name, size, raw_iteration=raw)
            for name, size in sizes.formats.items()
        },
        students=plan_students(setting, students),
        raw_iteration=raw,
        decoded_bytes_per_token=decoded_bytes_per_token(
            recording.k, value_bytes, recording.vocab_size
        ),
        store_bandwidth=None if options.store_gb_s is None else options.store_gb_s * 1e9,
    )
    print(json.dumps(as_json(plan), indent=2) if options.json else "\n".join(report(plan)))
    return 0


def _setting(options: argparse.Namespace) -> DumpSetting:
    gbs = options.global_batch_size
    if options.train_samples is not None:
        samples = options.train_samples
    elif options.train_iters is not None:
        samples = options.train_iters * gbs
    else:
        samples = math.ceil(options.tokens / (options.seq_length * gbs)) * gbs
    return DumpSetting(
        world_size=options.world_size,
        tp=options.tensor_model_parallel_size,
        pp=options.pipeline_model_parallel_size,
        cp=options.context_parallel_size,
        mbs=options.micro_batch_size,
        gbs=gbs,
        seq_length=options.seq_length,
        train_samples=samples,
        save_interval=options.save_interval,
        step_time=options.step_time,
        max_waiting_bytes=options.logits_save_max_waiting_bytes,
        spooled=options.logits_save_spool_dir is not None,
    )


def _recording(options: argparse.Namespace) -> Recording:
    k, p, kept = options.logits_save_top_k, options.logits_save_top_p, options.kept_entries
    if options.vocab_size > MAX_VOCAB_SIZE_V3:
        raise ValueError(
            f"--vocab-size is {options.vocab_size}; no format stores ids from {MAX_VOCAB_SIZE_V3} "
            "on."
        )
    if k > min(MAX_K, options.vocab_size):
        raise ValueError(
            f"--logits-save-top-k is {k}, expected at most {min(MAX_K, options.vocab_size)}: "
            "--vocab-size, or what a format stores."
        )
    if p is not None and p > 1:
        raise ValueError(f"--logits-save-top-p is {p}, expected at most 1.")
    if options.logits_save_top_p_min_k > k:
        raise ValueError(
            f"--logits-save-top-p-min-k is {options.logits_save_top_p_min_k}, expected at most "
            f"--logits-save-top-k {k}."
        )
    if kept is not None and p is None:
        raise ValueError("--kept-entries is of a nucleus: give --logits-save-top-p as well.")
    if kept is not None and not options.logits_save_top_p_min_k <= kept <= k:
        raise ValueError(
            f"--kept-entries is {kept:g}, expected --logits-save-top-p-min-k "
            f"{options.logits_save_top_p_min_k} to --logits-save-top-k {k}."
        )
    return Recording(
        k=k,
        p=p,
        min_k=options.logits_save_top_p_min_k,
        mean_kept=kept,
        dtype=_DTYPES[options.logits_save_dtype],
        vocab_size=options.vocab_size,
    )
