# SPDX-License-Identifier: Apache-2.0
"""Caches for the tests of the report, with distributions like a teacher's, and their truth."""

import math
from pathlib import Path

import torch

from megatron.training.distillation.manifest import RunManifest
from megatron.training.distillation.packed_rows import TeacherRows
from megatron.training.distillation.payload import INDEX_SENTINEL, LOGPROB_SENTINEL
from megatron.training.distillation.shard_writer import write_batched_tar
from megatron.training.distillation.utils import SaverSettings, ShardMeta, member_name
from tests.unit_tests.training.distillation.cache_files import IDENTIFIERS, encode_payload

VOCAB = 512
MANIFEST = RunManifest(
    sequence_length=16,
    vocab_size=VOCAB,
    padded_vocab_size=VOCAB,
    teacher={"checkpoint": "big", "step": 7},
)


def teacher_rows(
    seed: int, samples: int, *, k: int = 12, positions: int = 16, p: float | None = None
) -> TeacherRows:
    """Return fp16 entries of random distributions, some sure and some not."""
    generator = torch.Generator().manual_seed(seed)
    heat = torch.rand((positions, samples, 1), generator=generator) * 4
    logits = torch.randn((positions, samples, VOCAB), generator=generator) * heat
    falling, ids = logits.log_softmax(-1).sort(descending=True, dim=-1)
    values, ids, rest = falling[..., :k], ids[..., :k], falling[..., k:]
    tail = rest.logsumexp(-1)
    if p is not None:
        drop = values.exp().cumsum(-1) - values.exp() >= p
        tail = torch.logaddexp(tail, values.masked_fill(~drop, -math.inf).logsumexp(-1))
        values = values.masked_fill(drop, LOGPROB_SENTINEL)
        ids = ids.masked_fill(drop, INDEX_SENTINEL)
    return TeacherRows(values=values.half(), indices=ids.int(), tail_logprob=tail)


def write_teacher_shard(
    directory: Path,
    start: int,
    end: int,
    *,
    dp: int = 1,
    gbs: int = 4,
    version: int = 3,
    seed: int = 0,
    p: float | None = None,
    with_tails: bool = True,
) -> list[TeacherRows]:
    """Write a shard of each DP rank over samples ``[start, end)``; return the rows of all."""
    saver = SaverSettings(
        k=12, p=p, min_k=1, save_dtype="fp16", format_version=version,
        mbs_save=1, dp_size_save=dp, gbs_save=gbs,
    )  # fmt: skip
    meta = ShardMeta.for_run(IDENTIFIERS, saver, MANIFEST).to_bytes()
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for rank in range(dp):
        members = []
        for first in range(start, end, gbs):
            rows = teacher_rows(seed + first * dp + rank, gbs // dp, p=p)
            written.append(rows)
            parts = rows.values, rows.indices, rows.tail_logprob if with_tails else None
            members.append((member_name(first, first + gbs), encode_payload(parts, version)))
        write_batched_tar(str(directory / f"dp{rank}__{start}-{end}.tar"), meta, members)
    return written
