# SPDX-License-Identifier: Apache-2.0
"""What an inventory amounts to, as plain numbers and words: run, layout, samples, bytes."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.training.distillation import storage
from megatron.training.distillation.errors import CacheFormatError, TeacherDataError
from megatron.training.distillation.manifest import RunManifest
from megatron.training.distillation.shard_meta import ShardMeta
from tools.cache.coverage import Coverage, Span, count
from tools.cache.inventory import Inventory, ShardSummary

_READ_FOR_SHAPE = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class PayloadShape:
    """What only a payload tells."""

    sequence_length: int
    k: int
    dtype: str
    has_tails: bool
    has_fingerprints: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """What a cache is.

    Attributes:
        meta: What most of its shards say; None if none can be read.
        shape: What one of its payloads shows; None if none can be read.
        formats: Live shards by format version.
        coverage: What the sound shards cover.
        size: Bytes of all live shards.
        bytes_per_token: Bytes of the sound shards per token whose targets they hold; None where the
            sequence length is not known.
        stale: Files that were set aside.
        unfinished: Files that no writer has finished.
        foreign_files: Other files.
        damaged: Shards that cannot be read, by name, and why.
        foreign: Shards of another dump, by name, and what tells them apart.
        overlapping: Pairs of shards of one DP rank that hold the same samples.
    """

    directory: str
    meta: ShardMeta | None
    shape: PayloadShape | None
    formats: dict[int, int]
    coverage: Coverage
    size: int
    bytes_per_token: float | None
    stale: Sequence[str]
    unfinished: Sequence[str]
    foreign_files: Sequence[str]
    damaged: dict[str, str]
    foreign: dict[str, str]
    overlapping: Sequence[tuple[str, str]]

    @property
    def sequence_length(self) -> int | None:
        """Tokens per sample."""
        return None if self.shape is None else self.shape.sequence_length

    @property
    def tokens(self) -> int | None:
        """Tokens whose targets every DP rank's share is there of."""
        length = self.sequence_length
        return None if length is None else self.coverage.samples * length

    @property
    def train_samples(self) -> int | None:
        """Samples of the run that was recorded, ``--train-samples`` or what follows from it."""
        identifiers = self.meta and self.meta.identifiers
        found = (identifiers or {}).get("train_samples")
        return found if isinstance(found, int) else None

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON takes."""
        saver = None if self.meta is None else dataclasses.asdict(self.meta.saver)
        manifest = self.meta and self.meta.manifest
        return {
            "directory": self.directory,
            "hash": self.meta and self.meta.hash,
            "identifiers": self.meta and self.meta.identifiers,
            "saver": saver,
            "manifest": manifest and manifest.to_dict(),
            "payload": self.shape and dataclasses.asdict(self.shape),
            "formats": {str(version): number for version, number in self.formats.items()},
            "samples": self.coverage.samples,
            "tokens": self.tokens,
            "complete": self.coverage.complete,
            "gaps": self.coverage.gaps,
            "by_dp_rank": {str(rank): spans for rank, spans in self.coverage.by_rank.items()},
            "bytes": self.size,
            "bytes_per_token": self.bytes_per_token,
            "shards": sum(self.formats.values()) + len(self.damaged),
            "damaged": self.damaged,
            "foreign_shards": self.foreign,
            "overlapping": self.overlapping,
            "stale": self.stale,
            "unfinished": self.unfinished,
            "foreign_files": self.foreign_files,
        }


def describe(inventory: Inventory) -> Description:
    """Return what the cache is; one payload is read.

    Raises:
        OSError: The payload cannot be read.
    """
    sound = inventory.sound
    shape = _shape_of_a_payload(sound)
    files = inventory.files
    return Description(
        directory=files.directory,
        meta=inventory.meta,
        shape=shape,
        formats=dict(sorted(Counter(_format_of(s) for s in inventory.shards if s.meta).items())),
        coverage=inventory.coverage,
        size=sum(shard.size for shard in inventory.shards),
        bytes_per_token=_bytes_per_token(sound, shape),
        stale=files.stale,
        unfinished=files.unfinished,
        foreign_files=files.foreign,
        damaged={s.file.base_name: s.problem for s in inventory.damaged if s.problem},
        foreign={
            file.base_name: "; ".join(map(str, differences))
            for file, differences in inventory.foreign.items()
        },
        overlapping=[(a.base_name, b.base_name) for a, b in inventory.overlaps],
    )


def manifest_of(description: Description) -> RunManifest:
    """Return the manifest of the dump, or one that knows nothing."""
    meta = description.meta
    return meta.manifest if meta and meta.manifest else RunManifest()


def missing_ranges(coverage: Coverage) -> dict[Span, list[int]]:
    """Return the samples that some DP ranks have and others lack, and which lack them."""
    missing: dict[Span, list[int]] = {}
    for rank in coverage.by_rank:
        for span in coverage.gaps_of(rank):
            missing.setdefault(span, []).append(rank)
    return dict(sorted(missing.items()))


def _format_of(shard: ShardSummary) -> int:
    assert shard.meta is not None
    return shard.meta.saver.format_version


def _shape_of_a_payload(shards: Sequence[ShardSummary]) -> PayloadShape | None:
    """Return the shape of the first payload that can be decoded, of the first few shards."""
    with_payloads = [shard for shard in shards if shard.members]
    for shard in with_payloads[:_READ_FOR_SHAPE]:
        try:
            with shard.file.open(whole=False) as stream:
                rows = stream.decode(stream.members[0], [0] if stream.decodes_rows else None)
        except (CacheFormatError, TeacherDataError, *storage.ERRORS):
            continue
        return PayloadShape(
            sequence_length=rows.values.shape[0],
            k=rows.values.shape[-1],
            dtype=str(rows.values.dtype).removeprefix("torch."),
            has_tails=rows.tail_logprob is not None,
            has_fingerprints=rows.label_fingerprints is not None,
        )
    return None


def _bytes_per_token(shards: Sequence[ShardSummary], shape: PayloadShape | None) -> float | None:
    rows = sum(count(shard.spans) / shard.meta.saver.dp_size_save for shard in shards if shard.meta)
    if shape is None or not rows:
        return None
    return sum(shard.size for shard in shards) / (rows * shape.sequence_length)
