# SPDX-License-Identifier: Apache-2.0
"""Finds one sample in a cache of any format and layout, and reads its entries alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron.training.distillation.errors import TeacherDataMissingError
from megatron.training.distillation.open_shard import MemberRows, OpenShard
from megatron.training.distillation.packed_rows import TeacherRows
from megatron.training.distillation.payload import LOGPROB_SENTINEL
from megatron.training.distillation.shard_meta import ShardMeta
from megatron.training.distillation.utils import row_runs
from tools.cache.cache_files import CacheFiles, ShardFile
from tools.cache.coverage import Span, merge

_LISTED_SPANS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRow:
    """A sample and where it was found.

    Attributes:
        sample: Its global number.
        file: The shard.
        member: The member of the shard, by name.
        row: The row of the member.
        meta: What the shard says of its dump.
        entries: ``(S, 1, K)`` values and ids, ``(S, 1)`` tails.
    """

    sample: int
    file: ShardFile
    member: str
    row: int
    meta: ShardMeta
    entries: TeacherRows


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenEntries:
    """The kept entries of one position, in nats.

    Attributes:
        position: Counts from the start of the sample; the entries tell of the token after it.
        ids: The kept ids, by falling log-probability.
        logprobs: Their log-probabilities, as stored.
        tail_logprob: Log of the mass outside of them, as stored; None where the cache has none.
    """

    position: int
    ids: list[int]
    logprobs: list[float]
    tail_logprob: float | None

    @property
    def probabilities(self) -> list[float]:
        """The probabilities of the kept ids."""
        return np.exp(np.array(self.logprobs, np.float64)).tolist()

    @property
    def kept_mass(self) -> float:
        """The sum of the probabilities."""
        return float(sum(self.probabilities))

    @property
    def tail_mass(self) -> float:
        """The mass outside of them: as stored, else what is left to 1."""
        if self.tail_logprob is not None:
            return float(np.exp(self.tail_logprob))
        return max(0.0, 1.0 - self.kept_mass)

    @property
    def entropy(self) -> float:
        """What the kept ids contribute to the entropy; what the tail would add is not known."""
        return -sum(
            p * logp for p, logp in zip(self.probabilities, self.logprobs, strict=True) if p > 0
        )


def find_sample(files: CacheFiles, sample: int) -> SampleRow:
    """Return one sample of a cache; where shards overlap, of the one that starts later.

    Opens a shard that covers the sample, and then the one of the DP rank that has it.

    Raises:
        TeacherDataMissingError: No shard has it; says which samples near it are there.
        CacheFormatError: The shard that has it is damaged.
        OSError: It cannot be read.
    """
    covering = sorted(
        (file for file in files.shards if file.name.start <= sample < file.name.end),
        key=lambda file: (-file.name.start, file.name.dp_rank),
    )
    if not covering:
        raise TeacherDataMissingError(
            f"No shard of {files.directory} covers sample {sample}. {_nearby(files.shards, sample)}"
        )
    with covering[0].open(whole=False) as shard:
        dp_rank = _place(shard, _member(shard, sample), sample)[0]
        if dp_rank == shard.name.dp_rank:
            return _read(covering[0], shard, sample)
    file = next((file for file in covering if file.name.dp_rank == dp_rank), None)
    if file is None:
        same_rank = [file for file in files.shards if file.name.dp_rank == dp_rank]
        raise TeacherDataMissingError(
            f"Sample {sample} is DP rank {dp_rank}'s, as {covering[0].path} deals them, and no "
            f"shard of this rank in {files.directory} covers it. {_nearby(same_rank, sample)}"
        )
    with file.open(whole=False) as shard:
        return _read(file, shard, sample)


def _member(shard: OpenShard, sample: int) -> MemberRows:
    member = shard.member_at(sample)
    if member is None:
        spans = merge((member.start, member.end) for member in shard.members)
        raise TeacherDataMissingError(
            f"{shard.path} has no member with sample {sample}: the dump passed over it. Its "
            f"members have {_near(spans, sample)}."
        )
    return member


def _place(shard: OpenShard, member: MemberRows, sample: int) -> tuple[int, int]:
    """Return the DP rank that has the sample, and the row of its member."""
    run = next(
        row_runs(member.start, sample, sample + 1, mbs_save=shard.mbs, dp_save=shard.dp_size)
    )
    return run.d_save, run.row_start


def _read(file: ShardFile, shard: OpenShard, sample: int) -> SampleRow:
    member = _member(shard, sample)
    dp_rank, row = _place(shard, member, sample)
    if dp_rank != shard.name.dp_rank:
        raise TeacherDataMissingError(
            f"{shard.path} deals sample {sample} to DP rank {dp_rank}, which other shards do not: "
            "they come from different dumps. Rename the shards of the older one to .stale."
        )
    if shard.decodes_rows:
        entries = shard.decode(member, [row]).unpack_all()
    else:
        entries = shard.decode(member).unpack([row])
    return SampleRow(
        sample=sample,
        file=file,
        member=member.entry.name,
        row=row,
        meta=shard.meta,
        entries=entries,
    )


def token_entries(found: SampleRow, position: int) -> TokenEntries:
    """Return the kept entries of one position of a sample."""
    values, ids = (part[position, 0] for part in (found.entries.values, found.entries.indices))
    kept = values != LOGPROB_SENTINEL
    tail = found.entries.tail_logprob
    return TokenEntries(
        position=position,
        ids=ids[kept].tolist(),
        logprobs=values[kept].to(torch.float64).tolist(),
        tail_logprob=None if tail is None else float(tail[position, 0]),
    )


def _nearby(shards: Sequence[ShardFile], sample: int) -> str:
    spans = merge((file.name.start, file.name.end) for file in shards)
    if not spans:
        return "It has none at all."
    return f"By their names, shards cover {_near(spans, sample)}."


def _near(spans: Sequence[Span], sample: int) -> str:
    """Return the spans that are nearest to a sample, in words."""

    def distance(span: Span) -> int:
        return max(span.start - sample, sample - span.end + 1)

    nearest = sorted(sorted(spans, key=distance)[:_LISTED_SPANS])
    more = f" (of {len(spans)} ranges, the nearest)" if len(spans) > len(nearest) else ""
    return "samples " + ", ".join(map(str, nearest)) + more
