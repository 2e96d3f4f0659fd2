# SPDX-License-Identifier: Apache-2.0
"""Small caches whose every value tells the sample and the position it belongs to."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from megatron.training.distillation.frame_layout import FORMAT_VERSION_V3
from megatron.training.distillation.manifest import RunManifest
from megatron.training.distillation.member_content import Content, open_content
from megatron.training.distillation.payload_v3 import encode_framed_payload
from megatron.training.distillation.shard_writer import write_batched_tar
from megatron.training.distillation.utils import (
    SaverSettings,
    ShardMeta,
    encode_logprobs_payload,
    member_name,
)

IDENTIFIERS: dict[str, Any] = {
    "seed": 1,
    "train_samples": 100,
    "blend": {"kind": "mock", "mock": True},
}
SEQ, K = 4, 2


CACHE_FORMAT = ContextVar("CACHE_FORMAT", default=2)
"""The format of the caches that are written here."""


@contextmanager
def in_format(version: int) -> Iterator[None]:
    """Write caches in a format meanwhile."""
    token = CACHE_FORMAT.set(version)
    try:
        yield
    finally:
        CACHE_FORMAT.reset(token)


def encode_payload(rows: Sequence[torch.Tensor], version: int | None = None) -> bytes:
    """Encode values, ids and what else there is in a format; None for that of the test."""
    if (version or CACHE_FORMAT.get()) == FORMAT_VERSION_V3:
        return encode_framed_payload(*rows, vocab_size=1 << 17, sort_ties=False)
    return encode_logprobs_payload(*rows)


def read_content(content: Content) -> bytes:
    """Return the bytes of a member, wherever they lie."""
    with open_content(content) as stream:
        return stream.read(len(content))


def sample_of(values: torch.Tensor, positions: Sequence[int] = range(SEQ)) -> list[int]:
    """Return the samples that the rows of ``(S, n, K)`` values at these positions belong to."""
    assert values.size(0) == len(positions)
    samples = (-values[0, :, 0].float() - positions[0] / 8).round().int()
    for row, position in zip(values.float(), positions, strict=True):
        expected = -samples.float()[:, None] - position / 8 - torch.arange(K) / 16
        torch.testing.assert_close(row, expected)
    return samples.tolist()


def rows_of(samples: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values and indices ``(S, n, K)`` and the tail ``(S, n)`` of these samples."""
    sample = torch.tensor(samples, dtype=torch.float32)
    position = torch.arange(SEQ)[:, None]
    values = -(sample + position / 8)[..., None] - torch.arange(K) / 16
    indices = torch.arange(K).expand(SEQ, len(samples), K) + position[..., None]
    return values, indices, -(sample + position / 8) - 0.5


def write_shard(
    directory: Path,
    start: int,
    end: int,
    *,
    gbs: int = 4,
    mbs: int = 1,
    dp: int = 1,
    identifiers: Mapping[str, Any] = IDENTIFIERS,
    manifest: RunManifest | None = None,
    k: int = K,
    save_dtype: str = "fp32",
    format_version: int | None = None,
    teacher: int = 0,
) -> None:
    """Write every DP rank's shard of samples ``[start, end)``, one member per *gbs* samples.

    What the metadata says of K and dtype may be untrue. Each *teacher* has other values. The format
    is that of the ``cache_format`` fixture where it is not given.
    """
    version = format_version or CACHE_FORMAT.get()
    saver = SaverSettings(
        k=k,
        p=None,
        min_k=1,
        save_dtype=save_dtype,
        format_version=version,
        mbs_save=mbs,
        dp_size_save=dp,
        gbs_save=gbs,
    )
    meta = ShardMeta.for_run(identifiers, saver, manifest).to_bytes()
    directory.mkdir(parents=True, exist_ok=True)
    for rank in range(dp):
        members = []
        for first in range(start, end, gbs):
            blocks = range(first + rank * mbs, first + gbs, mbs * dp)
            samples = [block + offset for block in blocks for offset in range(mbs)]
            rows = rows_of([sample + teacher for sample in samples])
            members.append((member_name(first, first + gbs), encode_payload(rows, version)))
        write_batched_tar(str(directory / f"dp{rank}__{start}-{end}.tar"), meta, members)


def large_rows(start: int, gbs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and indices ``(64, gbs, 64)`` of the samples from *start*, hard to compress."""
    generator = torch.Generator().manual_seed(start)
    shape = (64, gbs, 64)
    values = -torch.rand(shape, generator=generator).sort(dim=-1).values
    return values.half(), torch.randint(0, 1 << 17, shape, generator=generator)


def write_large_shard(directory: Path, start: int, end: int, *, gbs: int) -> Path:
    """Write a shard whose members take tens of kilobytes each; return its path."""
    saver = SaverSettings(
        k=64,
        p=None,
        min_k=1,
        save_dtype="fp16",
        format_version=CACHE_FORMAT.get(),
        mbs_save=gbs,
        dp_size_save=1,
        gbs_save=gbs,
    )
    members = [
        (member_name(first, first + gbs), encode_payload(large_rows(first, gbs)))
        for first in range(start, end, gbs)
    ]
    path = directory / f"dp0__{start}-{end}.tar"
    write_batched_tar(str(path), ShardMeta.for_run(IDENTIFIERS, saver).to_bytes(), members)
    return path
