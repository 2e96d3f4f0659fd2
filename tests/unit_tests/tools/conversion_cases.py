# SPDX-License-Identifier: Apache-2.0
"""Caches of every format and layout, and what they must hold, sample by sample, in numpy.

Nothing here uses the package's arithmetic of rows and samples: rows are placed and found by the
formula of the format.
"""

import functools
import io
import itertools
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard

from megatron.training.distillation.manifest import RunManifest
from megatron.training.distillation.payload import decode_packed_rows, encode_logprobs_payload
from megatron.training.distillation.payload_v3 import decode_framed_payload, encode_framed_payload
from megatron.training.distillation.shard_writer import write_batched_tar
from megatron.training.distillation.utils import SaverSettings, ShardMeta
from tests.unit_tests.training.distillation.cache_files import IDENTIFIERS

SEQ, VOCAB = 5, 300
MASKED = -1000.0
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a cache was recorded with."""

    version: int = 2
    k: int = 12
    p: float | None = None
    min_k: int = 1
    dtype: str = "fp32"
    dp: int = 1
    mbs: int = 1
    gbs: int = 4
    proven: bool = True
    """Whether there are tails and fingerprints; never in format 1."""

    @property
    def saver(self) -> SaverSettings:
        return SaverSettings(
            k=self.k,
            p=self.p,
            min_k=self.min_k,
            save_dtype=self.dtype,
            format_version=self.version,
            mbs_save=self.mbs,
            dp_size_save=self.dp,
            gbs_save=self.gbs,
        )


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Entries of one sample: per position the kept log-probabilities and ids, and the tail."""

    values: list[np.ndarray]
    ids: list[np.ndarray]
    tail: np.ndarray | None
    fingerprint: int | None


@functools.cache
def recorded(sample: int, case: Case) -> Sample:
    """Return what a teacher records of a sample; the same logits whatever it is asked to keep."""
    random = np.random.default_rng(sample)
    logits = 2.5 * random.standard_normal((SEQ, VOCAB))
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    order = np.argsort(-logprobs, axis=-1, kind="stable")
    values, ids, tails = [], [], []
    for position in range(SEQ):
        falling = logprobs[position, order[position]]
        count = kept_count(falling, case.k, case.p, case.min_k)
        values.append(as_dtype(falling[:count], case.dtype))
        ids.append(order[position, :count])
        outside = np.exp(falling[count:]).sum()
        tails.append(np.log(outside) if count < VOCAB else -np.inf)
    proven = case.proven and case.version != 1
    return Sample(
        values=values,
        ids=ids,
        tail=np.array(tails, np.float32) if proven else None,
        fingerprint=sample * 7919 + (1 << 40) if proven else None,
    )


def kept_count(falling: np.ndarray, k: int | None, p: float | None, min_k: int) -> int:
    """Return how many of one token's entries stay: those before which less than P lies."""
    most = len(falling) if k is None else min(k, len(falling))
    if p is None:
        return most
    mass, count = 0.0, 0
    while count < most and (count < min_k or mass < p):
        mass += float(np.exp(falling[count]))
        count += 1
    return count


def as_dtype(values: np.ndarray, dtype: str) -> np.ndarray:
    """Round to a dtype, in float64."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(DTYPES[dtype]).double().numpy()


def cut(sample: Sample, *, k: int | None, p: float | None, min_k: int, dtype: str) -> Sample:
    """Return what is left of stored entries, in float64; what is dropped goes to the tail."""
    values, ids, tails = [], [], []
    for position, (falling, names) in enumerate(zip(sample.values, sample.ids, strict=True)):
        count = kept_count(falling, k, p, min_k)
        values.append(as_dtype(falling[:count], dtype))
        ids.append(names[:count])
        if sample.tail is not None:
            outside = np.exp(np.float64(sample.tail[position])) + np.exp(falling[count:]).sum()
            tails.append(np.log(outside))
    tail = None if sample.tail is None else np.array(tails)
    return replace(sample, values=values, ids=ids, tail=tail)


# ---- writing -------------------------------------------------------------------------------


def dense(samples: Sequence[Sample], dtype: str) -> tuple[Any, ...]:
    """Return the tensors of a member's samples, padded with masked entries."""
    width = max(len(values) for sample in samples for values in sample.values)
    values = torch.full((SEQ, len(samples), width), MASKED, dtype=torch.float64)
    ids = torch.full((SEQ, len(samples), width), -1)
    for row, position in itertools.product(range(len(samples)), range(SEQ)):
        kept = samples[row].values[position]
        values[position, row, : len(kept)] = torch.from_numpy(kept)
        ids[position, row, : len(kept)] = torch.from_numpy(samples[row].ids[position])
    tails = marks = None
    if samples[0].tail is not None:
        tails = torch.stack([torch.from_numpy(np.float32(s.tail)) for s in samples], dim=1)
        marks = torch.tensor([[sample.fingerprint for sample in samples]])
    return values.to(DTYPES[dtype]), ids, tails, marks


def rows_of(start: int, end: int, rank: int, mbs: int, dp: int) -> list[int]:
    """Return the samples of a rank's rows in the member ``[start, end)``."""
    rows = range((end - start) // dp)
    return [start + ((row // mbs) * dp + rank) * mbs + row % mbs for row in rows]


def write(
    directory: Path,
    case: Case,
    *windows: tuple[int, int],
    manifest: RunManifest | None = None,
    identifiers: Mapping[str, Any] = IDENTIFIERS,
    teacher: int = 0,
) -> Path:
    """Write the shards of these windows of samples; return the directory.

    Each *teacher* records other entries.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for (start, end), rank in itertools.product(windows, range(case.dp)):
        members = []
        for first in range(start, end, case.gbs):
            last = min(first + case.gbs, end)
            numbers = rows_of(first, last, rank, case.mbs, case.dp)
            samples = [recorded(number + teacher, case) for number in numbers]
            members.append((first, last, samples))
        if case.version == 1:
            _write_v1(directory, case, rank, members)
            continue
        meta = ShardMeta.for_run(identifiers, case.saver, manifest).to_bytes()
        payloads = [
            (f"{first}-{last}.pt.zst", encode(samples, case)) for first, last, samples in members
        ]
        write_batched_tar(str(directory / f"dp{rank}__{start}-{end}.tar"), meta, payloads)
    return directory


def encode(samples: Sequence[Sample], case: Case) -> bytes:
    parts = dense(samples, case.dtype)
    if case.version == 2:
        return encode_logprobs_payload(*parts)
    return encode_framed_payload(*parts, vocab_size=VOCAB, sort_ties=False)


def _write_v1(directory: Path, case: Case, rank: int, members: Sequence[Any]) -> None:
    identifiers = {"seed": 1, "sequence_length": SEQ, **IDENTIFIERS}
    settings = {"k": case.k, "p": case.p, "min_k": case.min_k, "save_dtype": case.dtype}
    meta = {"hash": "of format 1", "identifiers": identifiers, "saver": settings}
    files = {"_meta.json": json.dumps(meta).encode()}
    for first, _, samples in members:
        batches = [samples[row : row + case.mbs] for row in range(0, len(samples), case.mbs)]
        payload: dict[str, list[torch.Tensor]] = {"values": [], "indices_low": [], "bit_17": []}
        for batch in batches:
            values, ids, _, _ = dense(batch, case.dtype)
            payload["values"].append(values)
            payload["indices_low"].append((ids & 0xFFFF).to(torch.int32).to(torch.uint16))
            payload["bit_17"].append((ids & 0x10000) != 0)
        buffer = io.BytesIO()
        torch.save(payload, buffer)
        compressed = zstandard.ZstdCompressor().compress(buffer.getvalue())
        files[f"{first // case.gbs}.pt.zst"] = compressed
    last = (members[-1][1] // case.gbs) - 1
    with tarfile.open(directory / f"cp0_dp{rank}__{last}.tar", "w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


# ---- reading -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a cache of format 2 or 3 holds."""

    samples: dict[int, Sample]
    dtypes: set[torch.dtype]
    widths: dict[tuple[str, str], int]
    """Of the payloads, by shard and member."""
    savers: list[dict[str, Any]]
    metas: list[dict[str, Any]]


def read(directory: Path) -> Found:
    """Read every payload of a cache; a sample that is there twice is an error."""
    found = Found(samples={}, dtypes=set(), widths={}, savers=[], metas=[])
    for path in sorted(directory.glob("dp*.tar")):
        with tarfile.open(path) as tar:
            meta, *members = [(entry.name, tar.extractfile(entry).read()) for entry in tar]
        content = json.loads(meta[1])
        content.pop("content")
        saver = content.pop("saver")
        found.savers.append(saver)
        found.metas.append(content)
        rank = int(path.name.partition("__")[0][2:])
        for name, payload in members:
            start, end = map(int, name.removesuffix(".pt.zst").split("-"))
            decode = decode_packed_rows if saver["format_version"] == 2 else decode_framed_payload
            rows = decode(payload).unpack_all()
            found.dtypes.add(rows.values.dtype)
            found.widths[path.name, name] = rows.values.shape[2]
            numbers = rows_of(start, end, rank, saver["mbs_save"], saver["dp_size_save"])
            assert len(numbers) == rows.values.shape[1]
            for row, number in enumerate(numbers):
                assert number not in found.samples
                found.samples[number] = _sample(rows, row)
    return found


def _sample(rows: Any, row: int) -> Sample:
    values = rows.values[:, row].double().numpy()
    kept = values != MASKED
    assert (np.diff(kept.astype(int), axis=-1) <= 0).all()
    marks = rows.label_fingerprints
    return Sample(
        values=[values[position, kept[position]] for position in range(SEQ)],
        ids=[rows.indices[position, row].numpy()[kept[position]] for position in range(SEQ)],
        tail=None if rows.tail_logprob is None else rows.tail_logprob[:, row].numpy(),
        fingerprint=None if marks is None else int(marks[0, row]),
    )


def assert_same(found: Sample, expected: Sample) -> None:
    """Entries are equal to the last bit, tails to the rounding of fp32."""
    assert found.fingerprint == expected.fingerprint
    for position in range(SEQ):
        np.testing.assert_array_equal(found.values[position], expected.values[position])
        np.testing.assert_array_equal(found.ids[position], expected.ids[position])
    assert (found.tail is None) == (expected.tail is None)
    if found.tail is not None and expected.tail is not None:
        np.testing.assert_allclose(found.tail, expected.tail, rtol=2e-6, atol=2e-6)


def settings(case: Case) -> dict[str, Any]:
    """Return the ``saver`` of a cache's metadata."""
    return asdict(case.saver)
